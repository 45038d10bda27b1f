"""Topics: CreateTopics v2–7 and CreatePartitions v0–3, to any broker.

CreateTopics is retried, CreatePartitions is sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fencepost_proxy.cluster.broker import BrokerConnection, UpstreamUnavailable, remaining
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.responses import RETRIABLE, check, only
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.types import Monotonic, NodeId
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class Topics:
    """Creates topics and partitions."""

    kafka: KafkaClient

    async def create(
        self,
        name: str,
        *,
        partitions: int,
        replication_factor: int,
        configs: Mapping[str, str],
        timeout_seconds: float | None = None,
    ) -> bool:
        """CreateTopics. False if the topic existed, whatever its configs.

        Retried after a lost response, so False may also mean that an earlier try created it. Brokers learn of the
        topic one by one: call `refresh_metadata` until it shows.
        """

        async def query(connection: BrokerConnection, deadline: Monotonic) -> bool:
            requested = Message(
                name=name,
                num_partitions=partitions,
                replication_factor=replication_factor,
                assignments=[],
                configs=[Message(name=key, value=value) for key, value in configs.items()],
            )
            message = Message(topics=[requested], timeout_ms=int(remaining(deadline) * 1000), validate_only=False)
            answer = await connection.query(apis.CREATE_TOPICS, message, at_least=2, at_most=7, deadline=deadline)
            topic = only(answer.topics, "CreateTopics")
            if topic.error_code == Error.TOPIC_ALREADY_EXISTS:
                return False
            check(topic.error_code, "CreateTopics", topic.error_message)
            return True

        return await self.kafka.query_any(query, timeout_seconds)

    async def create_partitions(
        self,
        topic: str,
        count: int,
        assignments: Sequence[Sequence[NodeId]] | None,
        *,
        validate_only: bool,
        timeout_seconds: float | None = None,
    ) -> tuple[int, str | None]:
        """CreatePartitions up to `count` in total. Sent once; returns Kafka's error code and message.

        Needs ALTER on the topic. Raises UpstreamUnavailable if nothing was sent or the outcome is unknown (also as
        OutcomeUnknown).
        """
        deadline = self.kafka.deadline(timeout_seconds)
        connection = await self.kafka.pool.to_any()[0].connected(deadline)
        broker_assignments = None if assignments is None else [Message(broker_ids=list(each)) for each in assignments]
        message = Message(
            topics=[Message(name=topic, count=count, assignments=broker_assignments)],
            timeout_ms=int(remaining(deadline) * 1000),
            validate_only=validate_only,
        )
        answer = await connection.query(apis.CREATE_PARTITIONS, message, at_most=3, deadline=deadline)
        result = only(answer.results, "CreatePartitions")
        if result.error_code in RETRIABLE and result.error_code != Error.UNKNOWN_TOPIC_OR_PARTITION:
            text = result.error_message or "no text"
            raise UpstreamUnavailable(f"CreatePartitions returned {error_name(result.error_code)} ({text})")
        return result.error_code, result.error_message
