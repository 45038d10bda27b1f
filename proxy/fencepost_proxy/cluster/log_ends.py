"""Where partitions begin and end: OffsetForLeaderEpoch v2–4, ListOffsets v5–7, sent to the leader.

Both carry the known leader epoch as fence. Retried on errors 3, 6, 74, 75 and the like. Each raises
`UpstreamUnavailable`: see `client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fencepost_proxy.cluster.broker import BrokerConnection, Call
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.responses import Retry, check, only
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, Monotonic, NodeId, Offset, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

EARLIEST: Final = -2
LATEST: Final = -1
_FROM_A_CONSUMER: Final = -1  # replica id
_READ_UNCOMMITTED: Final = 0
_LIST_OFFSETS: Final = 2


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log end of a partition, as reported by the leader of that epoch."""

    leader_epoch: LeaderEpoch
    offset: LogEndOffset
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """Log end and high watermark of a partition from one read, by the leader of one epoch."""

    log_end: LogEnd
    high_watermark: Offset


@dataclass(frozen=True, slots=True)
class LogEnds:
    """Offsets of a partition, from its leader."""

    kafka: KafkaClient

    async def log_end(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> LogEnd:
        """OffsetForLeaderEpoch of the current epoch, with that epoch as fence: the log end offset, not the high
        watermark.

        Retried on errors 3, 6, 74, 75 and the like, on a response for another epoch (its offset is the start of the
        next epoch, not the log end), and on an undefined one (-1).
        """

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> LogEnd:
            call = log_end_call(connection, {tp: leader})
            return read_log_end(await connection.request(*call, deadline=deadline), leader)

        return await self.kafka.query_leader(tp, query, timeout_seconds)

    async def log_start(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> Offset:
        """ListOffsets of -2, with the leader epoch as fence."""
        return await self._list_offset(tp, EARLIEST, timeout_seconds)

    async def high_watermark(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> Offset:
        """ListOffsets of -1 as a consumer, read uncommitted, with the leader epoch as fence."""
        return await self._list_offset(tp, LATEST, timeout_seconds)

    async def partition_end(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> PartitionEnd:
        """Log end, then high watermark, under one leader epoch. If the latter is not below the former, everything up to
        that log end is replicated."""

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> PartitionEnd:
            calls = [
                log_end_call(connection, {tp: leader}),
                list_offset_call(connection, tp, leader.leader_epoch, LATEST),
            ]
            log_end, latest = await connection.pipeline(calls, deadline=deadline)
            return PartitionEnd(read_log_end(log_end, leader), read_list_offset(latest))

        return await self.kafka.query_leader(tp, query, timeout_seconds)

    async def _list_offset(self, tp: TopicPartition, timestamp: int, timeout_seconds: float | None) -> Offset:
        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> Offset:
            call = list_offset_call(connection, tp, leader.leader_epoch, timestamp)
            return read_list_offset(await connection.request(*call, deadline=deadline))

        return await self.kafka.query_leader(tp, query, timeout_seconds)


def log_end_call(connection: BrokerConnection, leaders: Mapping[TopicPartition, Leader]) -> Call:
    topics: dict[str, list[Message]] = {}
    for tp, leader in leaders.items():
        epoch = leader.leader_epoch
        topics.setdefault(tp.topic, []).append(
            Message(partition=tp.partition, current_leader_epoch=epoch, leader_epoch=epoch)
        )
    message = Message(topics=[Message(topic=topic, partitions=each) for topic, each in topics.items()])
    return connection.call(apis.OFFSET_FOR_LEADER_EPOCH, message, at_least=2, at_most=4)


def read_log_end(answer: Message, leader: Leader) -> LogEnd:
    return log_end_in(only(only(answer.topics, "OffsetForLeaderEpoch").partitions, "OffsetForLeaderEpoch"), leader)


def log_end_in(partition: Message, leader: Leader) -> LogEnd:
    """Of one partition of the response. Raises as `read_log_end` does."""
    check(partition.error_code, "OffsetForLeaderEpoch")
    if partition.leader_epoch != leader.leader_epoch or partition.end_offset < 0:
        # Undefined (-1, -1): the epoch has no entry in the leader's log yet.
        raise Retry(f"end of leader epoch {leader.leader_epoch} unknown, got epoch {partition.leader_epoch}")
    return LogEnd(leader.leader_epoch, LogEndOffset(partition.end_offset), leader.node_id)


def list_offset_call(
    connection: BrokerConnection, tp: TopicPartition, leader_epoch: LeaderEpoch, timestamp: int
) -> Call:
    return list_offsets_call(connection, {tp: leader_epoch}, timestamp)


def list_offsets_call(
    connection: BrokerConnection, leader_epochs: Mapping[TopicPartition, LeaderEpoch], timestamp: int
) -> Call:
    topics: dict[str, list[Message]] = {}
    for tp, epoch in leader_epochs.items():
        topics.setdefault(tp.topic, []).append(
            Message(partition_index=tp.partition, current_leader_epoch=epoch, timestamp=timestamp)
        )
    queried = [Message(name=topic, partitions=each) for topic, each in topics.items()]
    message = Message(replica_id=_FROM_A_CONSUMER, isolation_level=_READ_UNCOMMITTED, topics=queried)
    return connection.call(_LIST_OFFSETS, message, at_least=5, at_most=7)


def read_list_offset(answer: Message) -> Offset:
    return offset_in(only(only(answer.topics, "ListOffsets").partitions, "ListOffsets"))


def offset_in(partition: Message) -> Offset:
    """Of one partition of the response. Raises as `read_list_offset` does."""
    check(partition.error_code, "ListOffsets")
    if partition.offset < 0:
        raise Retry("ListOffsets answered no offset")
    return Offset(partition.offset)
