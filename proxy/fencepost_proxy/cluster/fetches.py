"""Records of a partition: Fetch v9–13 without a fetch session, sent to the leader. Needs READ on the topic.

By topic id if the broker supports it (v13). The request carries the known leader epoch. Retried as in `log_ends`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fencepost_proxy.cluster.broker import BrokerConnection, Call, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.log_ends import EARLIEST, LATEST, list_offset_call, read_list_offset
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.responses import Retry, check, only
from fencepost_proxy.errors import Error
from fencepost_proxy.types import NO_TOPIC_ID, LeaderEpoch, Monotonic, Offset, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.schema import Message

_BATCH_PREFIX_BYTES: Final = 12  # base offset and length, before what the length counts
_FROM_A_CONSUMER: Final = -1  # replica id
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1
_NO_SESSION_EPOCH: Final = -1


@dataclass(frozen=True, slots=True)
class Found:
    """The complete batch whose offset range contains the requested offset."""

    batch: bytes


@dataclass(frozen=True, slots=True)
class NotYet:
    """The offset is at or above the high watermark.

    An unreplicated batch may still be there: compare with `log_end`.
    """

    high_watermark: Offset


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The offset is below the log start: retention or DeleteRecords removed the records."""

    log_start_offset: Offset


@dataclass(frozen=True, slots=True)
class CompactedAway:
    """Compaction removed the records at this offset; the next batch begins at `next_base_offset`."""

    next_base_offset: Offset


BatchRead = Found | NotYet | OutOfRange | CompactedAway


@dataclass(frozen=True, slots=True)
class Fetched:
    """`aborted` – (producer id, first offset) of the aborted transactions among the records."""

    records: bytes
    aborted: tuple[tuple[int, int], ...]
    last_stable_offset: Offset
    out_of_range: bool = False


@dataclass(frozen=True, slots=True)
class Fetches:
    """Reads of a partition, without waiting for new records."""

    kafka: KafkaClient

    async def read_batch(
        self, tp: TopicPartition, offset: Offset, *, bytes_max: int = 1_048_576, timeout_seconds: float | None = None
    ) -> BatchRead:
        """Fetches the batch that contains `offset`, without waiting, read uncommitted, by topic id if the broker
        supports it (v13). A batch larger than `bytes_max` is still returned in full.

        Control batches (transaction markers) are returned like any other.
        """

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> BatchRead:
            partition = await self._fetch_now(connection, leader, tp, offset, bytes_max=bytes_max, deadline=deadline)
            if partition.error_code == Error.OFFSET_OUT_OF_RANGE:
                start = list_offset_call(connection, tp, leader.leader_epoch, EARLIEST)
                latest = list_offset_call(connection, tp, leader.leader_epoch, LATEST)
                low, high = map(read_list_offset, await connection.pipeline([start, latest], deadline=deadline))
                if offset < low:
                    return OutOfRange(low)
                if offset >= high:
                    return NotYet(high)
                raise Retry(f"offset {offset} is out of range, yet within {low} to {high}")
            check(partition.error_code, "Fetch")
            if not partition.records:
                if offset >= partition.high_watermark:
                    return NotYet(Offset(partition.high_watermark))
                raise Retry(f"nothing at offset {offset} below the high watermark {partition.high_watermark}")
            return _batch_containing(offset, partition.records)

        return await self.kafka.query_leader(tp, query, timeout_seconds)

    async def fetch(
        self, tp: TopicPartition, offset: Offset, *, bytes_max: int, committed: bool, timeout_seconds: float
    ) -> Fetched:
        """Records from `offset` on, without waiting. Unless read `committed`, `aborted` is meaningless."""

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> Fetched:
            partition = await self._fetch_now(
                connection, leader, tp, offset, bytes_max=bytes_max, deadline=deadline, committed=committed
            )
            if partition.error_code != Error.OFFSET_OUT_OF_RANGE:
                check(partition.error_code, "Fetch")
            return Fetched(
                bytes(partition.records or b""),
                tuple((each.producer_id, each.first_offset) for each in partition.aborted_transactions or ()),
                Offset(partition.last_stable_offset),
                out_of_range=partition.error_code == Error.OFFSET_OUT_OF_RANGE,
            )

        return await self.kafka.query_leader(tp, query, timeout_seconds)

    async def _fetch_now(
        self,
        connection: BrokerConnection,
        leader: Leader,
        tp: TopicPartition,
        offset: Offset,
        *,
        bytes_max: int,
        deadline: Monotonic,
        committed: bool = False,
    ) -> Message:
        """Fetches without waiting for new records. Returns the response's partition."""
        info = self.kafka.topic(tp.topic)
        call = fetch_call(
            connection,
            tp,
            info.topic_id if info is not None else None,
            offset,
            leader_epoch=leader.leader_epoch,
            bytes_max=bytes_max,
            wait_max_ms=0,
            bytes_min=0,
            committed=committed,
        )
        return fetched_partition(await connection.request(*call, deadline=deadline))


def fetch_call(
    connection: BrokerConnection,
    tp: TopicPartition,
    topic_id: UUID | None,
    offset: Offset,
    *,
    leader_epoch: LeaderEpoch,
    bytes_max: int,
    wait_max_ms: int,
    bytes_min: int,
    committed: bool = False,
) -> Call:
    """Fetch of one partition without a fetch session; v13 (topic id) if supported."""
    by_id = topic_id or NO_TOPIC_ID
    partition = Message(
        partition=tp.partition,
        current_leader_epoch=leader_epoch,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=bytes_max,
    )
    message = Message(
        replica_id=_FROM_A_CONSUMER,
        max_wait_ms=wait_max_ms,
        min_bytes=bytes_min,
        max_bytes=bytes_max,
        isolation_level=_READ_COMMITTED if committed else _READ_UNCOMMITTED,
        session_id=0,
        session_epoch=_NO_SESSION_EPOCH,
        topics=[Message(topic=tp.topic, topic_id=by_id, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
    )
    return connection.call(apis.FETCH, message, at_least=9, at_most=13 if by_id != NO_TOPIC_ID else 12)


def fetched_partition(answer: Message) -> Message:
    """The only partition of a Fetch response. The caller checks its error code."""
    check(answer.error_code, "Fetch")
    return only(only(answer.responses, "Fetch").partitions, "Fetch")


def _batch_containing(offset: Offset, records: bytes) -> Found | CompactedAway:
    try:
        header = parse_batch_header(memoryview(records))
    except MalformedBatch as e:
        raise UpstreamUnavailable(f"the log contains a batch that this proxy cannot read: {e}") from e
    if header.base_offset > offset:
        return CompactedAway(Offset(header.base_offset))
    size = _BATCH_PREFIX_BYTES + header.batch_length
    if header.base_offset + header.last_offset_delta < offset or size > len(records):
        raise Retry(f"Fetch of offset {offset} answered offset {header.base_offset}, or only a part of it")
    return Found(records[:size])
