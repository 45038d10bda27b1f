"""The state topic's settings: creates the topic if needed, and checks its configs and replicas.

Needs DESCRIBE, DESCRIBE_CONFIGS and CREATE on the topic. `open` is not retried here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import Configs, TopicFacts
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.metadata import TopicInfo
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.errors import Error, StateError
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.closed import CLOSED
from fencepost_proxy.types import TopicPartition

_log = logs.get("cluster.state_topic_settings")
_limited_log = logs.RateLimitedLog(_log)

#: `uncompressed`: records cannot decompress to more than was read.
#: `segment.ms`, `min.cleanable.dirty.ratio`: heartbeats are frequent, and a start reads what compaction left.
TOPIC_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "compression.type": "uncompressed",
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
}
_REPLICAS_MAX: Final = 3
_IN_SYNC_REPLICAS_MAX: Final = 2


def created_with(brokers: int) -> tuple[int, Mapping[str, str]]:
    """Replication factor and configs of a new state topic."""
    replicas = min(_REPLICAS_MAX, brokers)
    return replicas, {**TOPIC_CONFIGS, "min.insync.replicas": str(min(_IN_SYNC_REPLICAS_MAX, replicas))}


def _wrong_cleanup_policy(topic: str, facts: TopicFacts) -> str | None:
    if facts.assumed or facts.cleanup_policy == {"compact"}:
        return None
    return (
        f"{topic} has cleanup.policy={','.join(sorted(facts.cleanup_policy))}: Kafka would delete "
        "records that must be kept. Set it to compact before records are lost"
    )


class StateTopicSettings:
    """`in_sync` – replicas that acknowledge an append."""

    def __init__(self, kafka: KafkaClient, name: str) -> None:
        self._kafka = kafka
        self._topics = Topics(kafka)
        self._configs = Configs(kafka)
        self._log_ends = LogEnds(kafka)
        self._tp = TopicPartition(name, 0)
        self.in_sync = 1
        self._created = False  # by this process: it exists even if brokers do not report it yet

    async def open(self) -> UUID:
        """Finds or creates the topic; returns its id.

        Raises `UpstreamUnavailable`, and `StateError` if the topic is unusable.
        """
        name = self._tp.topic
        await self._kafka.refresh_metadata([name])
        info = self._kafka.topic(name)
        if info is None:
            if not self._kafka.brokers:  # the controller considers all dead, for example after a pause
                raise UpstreamUnavailable("cannot create the state topic: Kafka reports no brokers")
            replicas, configs = created_with(len(self._kafka.brokers))
            created = await self._create(replicas, configs)
            if created:
                _log.warning(
                    "state topic created: only checks in the configuration file are in force. If this cluster had a "
                    "state topic before, switch on its checks again",
                    topic=name,
                    replicas=replicas,
                    min_insync_replicas=int(configs["min.insync.replicas"]),
                )
                self._created = True
            # `log_start` retries until there is a leader, and refreshes metadata.
            try:
                await self._log_ends.log_start(self._tp)
            except UpstreamUnavailable as e:
                if self._created and e.error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
                    # A broker that is busy with thousands of new partitions needs up to a minute.
                    raise UpstreamUnavailable(f"{name}: created, but not known to all brokers yet") from e
                raise
            info = self._kafka.topic(name)
        if info is None:
            raise UpstreamUnavailable(f"{name}: not known to all brokers yet")
        await self._check(info)
        return info.topic_id

    async def _create(self, replicas: int, configs: Mapping[str, str]) -> bool:
        name = self._tp.topic
        try:
            return await self._topics.create(name, partitions=1, replication_factor=replicas, configs=configs)
        except UpstreamUnavailable as e:
            if CLOSED in str(e):
                raise StateError(str(e), hint=hints.PROXY) from e
            raise

    async def _check(self, info: TopicInfo) -> None:
        if info.partition_count != 1:
            raise StateError(
                f"{info.name} has {info.partition_count} partitions: it cannot be this proxy's state topic, which has "
                "one. Delete the topic if nothing else uses it",
                hint=hints.NOT_OURS,
            )
        facts = await self._configs.topic_facts(info.name)
        if wrong := _wrong_cleanup_policy(info.name, facts):
            raise StateError(wrong, hint=hints.CLEANUP_POLICY)
        self.in_sync = facts.in_sync
        if info.replication_factor > 1 and self.in_sync == 1:
            _log.warning(
                "state topic has min.insync.replicas=1: a deposed leader that is cut off from the other brokers cannot "
                "be detected (set it to 2, then restart every proxy)",
                topic=info.name,
                replicas=info.replication_factor,
            )
        if info.replication_factor < min(_REPLICAS_MAX, len(self._kafka.brokers)):
            _log.warning(
                "state topic has too few replicas: if they are lost, so are the virtual configs and the producer id",
                topic=info.name,
                replicas=info.replication_factor,
                brokers=len(self._kafka.brokers),
            )

    async def read_again(self) -> None:
        """Read the topic's configs again. Raises `UpstreamUnavailable`.

        A raised min.insync.replicas takes effect after a restart: fewer replicas may have the earlier records.
        """
        facts = await self._configs.topic_facts(self._tp.topic)
        if facts.assumed:
            return
        if wrong := _wrong_cleanup_policy(self._tp.topic, facts):
            _limited_log.error("cleanup.policy", "cleanup.policy of the state topic was changed", reason=wrong)
        if facts.min_insync_replicas < self.in_sync:
            _limited_log.warning(
                "min.insync.replicas",
                "min.insync.replicas of the state topic was lowered",
                topic=self._tp.topic,
                was=self.in_sync,
                min_insync_replicas=facts.min_insync_replicas,
            )
            # With 1 nothing would be confirmed; two replicas confirm more than none.
            self.in_sync = max(facts.min_insync_replicas, min(self.in_sync, _IN_SYNC_REPLICAS_MAX))
