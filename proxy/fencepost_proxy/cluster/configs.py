"""Configs of topics and brokers: DescribeConfigs v1–4. Needs DESCRIBE_CONFIGS on topics and the cluster.

Topics' configs come from any broker, with retries. A broker's come from that broker, sent once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import BrokerConnection, UpstreamUnavailable, remaining
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.pool import Purpose
from fencepost_proxy.cluster.responses import check, only
from fencepost_proxy.errors import Error
from fencepost_proxy.types import Monotonic, NodeId
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_log = logs.get("cluster.configs")
_limited_log = logs.RateLimitedLog(_log)

_TOPIC_RESOURCE: Final = 2
_BROKER_RESOURCE: Final = 4
TOPICS_DESCRIBED_AT_ONCE: Final = 200
_TOPIC_CONFIGS: Final = (
    "message.timestamp.type",
    "max.message.bytes",
    "min.insync.replicas",
    "unclean.leader.election.enable",
    "cleanup.policy",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
)
_BROKER_CONFIGS: Final = ("producer.id.expiration.ms",)


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic's effective Kafka configs. `assumed`: not permitted to read them, these are Kafka's defaults."""

    assumed: bool = True
    log_append_time: bool = False
    max_message_bytes: int = 1_048_588
    min_insync_replicas: int = 1
    unclean_leader_election: bool = False
    cleanup_policy: frozenset[str] = frozenset({"delete"})
    timestamp_before_max_ms: int = 9_223_372_036_854_775_807
    timestamp_after_max_ms: int = 3_600_000

    @property
    def in_sync(self) -> int:
        """min.insync.replicas, for the confirmation of a leader: 2 if it may not be read."""
        return 2 if self.assumed else self.min_insync_replicas


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Settings of the brokers. If they differ: the shortest expiration.

    `complete` – every broker responded.
    """

    producer_id_expiration_ms: int = 86_400_000
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Configs:
    """Effective configs."""

    kafka: KafkaClient

    async def topic_facts(self, topic: str, *, timeout_seconds: float | None = None) -> TopicFacts:
        """DescribeConfigs of a topic. If that is not permitted: Kafka's defaults, and a warning."""

        async def query(connection: BrokerConnection, deadline: Monotonic) -> Mapping[str, str]:
            return await _describe_one(connection, _TOPIC_RESOURCE, topic, _TOPIC_CONFIGS, deadline)

        return _topic_facts(await _allowed(self.kafka.query_any(query, timeout_seconds), f"topic {topic}"))

    async def facts_of_topics(
        self, topics: Sequence[str], *, timeout_seconds: float | None = None
    ) -> Mapping[str, TopicFacts]:
        """The same for many topics, in few requests. Omits topics that do not exist.

        Raises UpstreamUnavailable.
        """
        deadline = self.kafka.deadline(timeout_seconds)
        facts: dict[str, TopicFacts] = {}
        for start in range(0, len(topics), TOPICS_DESCRIBED_AT_ONCE):
            queried = topics[start : start + TOPICS_DESCRIBED_AT_ONCE]

            async def query(
                connection: BrokerConnection, deadline: Monotonic, queried: Sequence[str] = queried
            ) -> Mapping[str, TopicFacts]:
                return await described_topics(connection, queried, deadline)

            facts.update(await self.kafka.query_any(query, remaining(deadline)))
        return facts

    async def broker_facts(self, *, timeout_seconds: float | None = None) -> BrokerFacts:
        """DescribeConfigs sent to each broker. If that is not permitted: Kafka's defaults, and a warning.

        Omits brokers that do not respond in time. Raises UpstreamUnavailable if none does.
        """
        deadline = self.kafka.deadline(timeout_seconds)

        async def query(node_id: NodeId) -> Mapping[str, str]:
            connection = await self.kafka.connected(node_id, Purpose.QUERIES, deadline)
            return await _describe_one(connection, _BROKER_RESOURCE, str(node_id), _BROKER_CONFIGS, deadline)

        answers = await asyncio.gather(
            *(_allowed(query(node_id), f"broker {node_id}") for node_id in self.kafka.brokers), return_exceptions=True
        )
        found: list[Mapping[str, str]] = []
        failure: UpstreamUnavailable | None = None
        for answer in answers:
            if isinstance(answer, UpstreamUnavailable):
                failure = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        if not found:
            raise failure or UpstreamUnavailable("no broker is known")
        default = BrokerFacts()
        return BrokerFacts(
            min(int(each.get("producer.id.expiration.ms", default.producer_id_expiration_ms)) for each in found),
            complete=failure is None,
        )


async def _allowed(query_message: Awaitable[Mapping[str, str]], what: str) -> Mapping[str, str]:
    try:
        return await query_message
    except UpstreamUnavailable as e:
        if e.error_code not in (Error.TOPIC_AUTHORIZATION_FAILED, Error.CLUSTER_AUTHORIZATION_FAILED):
            raise
        _limited_log.warning(("configs", what), "may not read configs, Kafka's defaults are assumed", of=what, reason=e)
        return {}


def _topic_facts(configs: Mapping[str, str]) -> TopicFacts:
    """Empty `configs`: not permitted to read them."""
    default = TopicFacts()
    return TopicFacts(
        assumed=not configs,
        log_append_time=configs.get("message.timestamp.type") == "LogAppendTime",
        max_message_bytes=int(configs.get("max.message.bytes", default.max_message_bytes)),
        min_insync_replicas=int(configs.get("min.insync.replicas", default.min_insync_replicas)),
        unclean_leader_election=configs.get("unclean.leader.election.enable") == "true",
        cleanup_policy=frozenset(configs["cleanup.policy"].replace(" ", "").split(","))
        if "cleanup.policy" in configs
        else default.cleanup_policy,
        timestamp_before_max_ms=int(configs.get("message.timestamp.before.max.ms", default.timestamp_before_max_ms)),
        timestamp_after_max_ms=int(configs.get("message.timestamp.after.max.ms", default.timestamp_after_max_ms)),
    )


async def described_topics(
    connection: BrokerConnection, topics: Sequence[str], deadline: Monotonic
) -> Mapping[str, TopicFacts]:
    """Configs of the topics that exist, in one request. Raises UpstreamUnavailable."""
    facts = {}
    for result in await _describe(connection, _TOPIC_RESOURCE, topics, _TOPIC_CONFIGS, deadline):
        if result.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            facts[result.resource_name] = TopicFacts()
        elif not result.error_code:
            facts[result.resource_name] = _topic_facts(_values(result))
    return facts


async def _describe_one(
    connection: BrokerConnection, resource_type: int, name: str, keys: Sequence[str], deadline: Monotonic
) -> Mapping[str, str]:
    result = only(await _describe(connection, resource_type, [name], keys, deadline), "DescribeConfigs")
    check(result.error_code, "DescribeConfigs", result.error_message)
    return _values(result)


async def _describe(
    connection: BrokerConnection, resource_type: int, names: Sequence[str], keys: Sequence[str], deadline: Monotonic
) -> Sequence[Message]:
    resources = [
        Message(resource_type=resource_type, resource_name=name, configuration_keys=list(keys)) for name in names
    ]
    message = Message(resources=resources)
    answer = await connection.query(apis.DESCRIBE_CONFIGS, message, at_least=1, at_most=4, deadline=deadline)
    results: Sequence[Message] = answer.results
    return results


def _values(result: Message) -> Mapping[str, str]:
    return {each.name: each.value for each in result.configs if each.value is not None}
