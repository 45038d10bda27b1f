"""Appends of our own: Produce v3–13, to the leader, on a separate connection. Needs WRITE on the topic.

Sent at most once: the caller resolves failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from fencepost_proxy.cluster.broker import UpstreamUnavailable, deadline_in, remaining
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.pool import Purpose
from fencepost_proxy.cluster.responses import RETRIABLE, only
from fencepost_proxy.types import NO_TOPIC_ID, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class Appends:
    """Appends of single batches."""

    kafka: KafkaClient

    async def produce(
        self,
        tp: TopicPartition,
        batch: bytes,
        *,
        timeout_ms: int,
        acks: int = -1,
        topic_id: UUID | None = None,
    ) -> PartitionResult:
        """Appends one batch, sent at most once. Any error code is in the result, including 3, 6 and 100.

        Uses the given or the cached topic id if the broker supports it (v13), so that the batch cannot be appended to
        a topic created again under the same name (error 100). `acks` is -1 or 1.

        Raises UpstreamUnavailable if nothing was sent, and OutcomeUnknown if no response came within a second after
        `timeout_ms`: then only the log shows the outcome.
        """
        if acks not in (-1, 1):
            raise ValueError("acks must be -1 or 1: acks=0 has no response")
        # The broker answers 7 after timeout_ms; one second is for the network.
        deadline = deadline_in(timeout_ms / 1000 + 1.0)
        leader = self.kafka.leader(tp)
        if leader is None:
            await self.kafka.refresh_metadata([tp.topic], timeout_seconds=remaining(deadline))
            leader = self.kafka.leader(tp)
        if leader is None:
            raise UpstreamUnavailable(f"{tp}: has no leader now")
        connection = await self.kafka.connected(leader.node_id, Purpose.APPENDS, deadline)
        info = self.kafka.topic(tp.topic)
        by_id = topic_id or (info.topic_id if info is not None else NO_TOPIC_ID)
        partition = Message(index=tp.partition, records=batch)
        topic = Message(name=tp.topic, topic_id=by_id, partition_data=[partition])
        message = Message(transactional_id=None, acks=acks, timeout_ms=timeout_ms, topic_data=[topic])
        answer = await connection.query(
            apis.PRODUCE, message, at_least=3, at_most=13 if by_id != NO_TOPIC_ID else 12, deadline=deadline
        )
        result = only(only(answer.responses, "Produce").partition_responses, "Produce")
        if result.error_code in RETRIABLE:
            # For the next append; this one does not wait for it.
            self.kafka.run(self.kafka.metadata.refresh_quietly([tp.topic]), "metadata")
        return PartitionResult(
            tp.partition,
            result.error_code,
            result.base_offset,
            result.log_append_time_ms,
            result.log_start_offset,
            error_message=result.error_message,
        )
