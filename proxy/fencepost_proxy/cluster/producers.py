"""Producers of a partition: DescribeProducers v0 between two OffsetForLeaderEpoch requests. Needs READ on the topic.

DescribeProducers has no fence: a follower responds too, with what it has replicated so far. So it is sent between two
OffsetForLeaderEpoch requests on one connection, which the broker handles in order and only the leader of that epoch
answers. Retried as in `log_ends`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fencepost_proxy.cluster.broker import BrokerConnection, Call, UpstreamUnavailable, remaining
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.log_ends import (
    EARLIEST,
    LogEnd,
    list_offset_call,
    log_end_call,
    read_list_offset,
    read_log_end,
)
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.pool import Purpose
from fencepost_proxy.cluster.responses import check, only
from fencepost_proxy.errors import Error
from fencepost_proxy.types import Monotonic, NodeId, Offset, ProducerEpoch, ProducerId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a partition's leader remembers of one producer.

    `last_sequence` is -1 before its first sequence of this epoch. `last_timestamp_ms`: the highest record timestamp
    of its last batch, by which Kafka expires it. `current_txn_start_offset`: None without an open transaction here.
    """

    producer_id: ProducerId
    epoch: ProducerEpoch
    last_sequence: int
    last_timestamp_ms: int
    current_txn_start_offset: Offset | None


@dataclass(frozen=True, slots=True)
class PartitionReading:
    """A snapshot of the end of a partition, read from the leader of `log_end.leader_epoch`.

    `consistent` – the log end was the same before and after the producers were read, so they belong together.
    `requested_at` – when the read began: it includes everything acknowledged before.
    """

    log_end: LogEnd
    log_start_offset: Offset
    producers: Mapping[ProducerId, ProducerState]
    consistent: bool
    requested_at: Monotonic

    @property
    def open_transactions(self) -> Mapping[ProducerId, ProducerState]:
        return {key: each for key, each in self.producers.items() if each.current_txn_start_offset is not None}


@dataclass(frozen=True, slots=True)
class Producers:
    """What partition leaders know of producers."""

    kafka: KafkaClient

    async def read_partition(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> PartitionReading:
        """Log end, producers and log start, in one read."""

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> PartitionReading:
            requested_at = Monotonic(time.monotonic())
            fence = log_end_call(connection, {tp: leader})
            calls = [
                fence,
                describe_producers_call(connection, [tp]),
                fence,
                list_offset_call(connection, tp, leader.leader_epoch, EARLIEST),
            ]
            before, producers, after, start = await connection.pipeline(calls, deadline=deadline)
            log_end = read_log_end(after, leader)
            consistent = read_log_end(before, leader) == log_end
            return PartitionReading(
                log_end, read_list_offset(start), _read_producers(producers), consistent, requested_at
            )

        return await self.kafka.query_leader(tp, query, timeout_seconds)

    async def open_transactions(
        self, tp: TopicPartition, *, timeout_seconds: float | None = None
    ) -> Mapping[ProducerId, ProducerState]:
        """The producers with a transaction open on the partition. See `read_partition`."""
        return (await self.read_partition(tp, timeout_seconds=timeout_seconds)).open_transactions

    async def producer_at(
        self, producer_id: ProducerId, partitions: Iterable[TopicPartition], *, timeout_seconds: float | None = None
    ) -> Mapping[TopicPartition, ProducerState | None]:
        """The partition leaders' state of one producer, None if they have none; see `read_partition`.

        One read per broker. A partition whose leader does not respond in time is missing; a deleted one has None.
        """
        deadline = self.kafka.deadline(timeout_seconds)
        by_leader: dict[NodeId, list[TopicPartition]] = {}
        rest = []
        for tp in partitions:
            leader = self.kafka.leader(tp)
            if leader is None:
                rest.append(tp)
            else:
                by_leader.setdefault(leader.node_id, []).append(tp)
        found: dict[TopicPartition, ProducerState | None] = {}

        async def at_leader(node_id: NodeId, queried: list[TopicPartition]) -> None:
            try:
                connection = await self.kafka.connected(node_id, Purpose.QUERIES, deadline)
                leaders = {tp: leader for tp in queried if (leader := self.kafka.leader(tp)) is not None}
                fence = log_end_call(connection, leaders)
                calls = [fence, describe_producers_call(connection, queried), fence]
                before, producers, after = await connection.pipeline(calls, deadline=deadline)
                led = _led(before, leaders) & _led(after, leaders)
                found.update((tp, state) for tp, state in _state_of(producers, producer_id).items() if tp in led)
            except UpstreamUnavailable:
                pass
            rest.extend(tp for tp in queried if tp not in found)

        async def alone(tp: TopicPartition) -> None:
            try:
                reading = await self.read_partition(tp, timeout_seconds=remaining(deadline))
                found[tp] = reading.producers.get(producer_id)
            except UpstreamUnavailable as error:
                if error.error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
                    found[tp] = None  # deleted

        await asyncio.gather(*(at_leader(node_id, queried) for node_id, queried in by_leader.items()))
        await asyncio.gather(*map(alone, rest))
        return found


def describe_producers_call(connection: BrokerConnection, partitions: Iterable[TopicPartition]) -> Call:
    topics: dict[str, list[int]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(tp.partition)
    message = Message(topics=[Message(name=topic, partition_indexes=each) for topic, each in topics.items()])
    return connection.call(apis.DESCRIBE_PRODUCERS, message, at_most=0)


def _led(answer: Message, leaders: Mapping[TopicPartition, Leader]) -> set[TopicPartition]:
    """The partitions whose leader of that epoch responded."""
    found = set()
    for topic in answer.topics:
        for each in topic.partitions:
            tp = TopicPartition(topic.topic, each.partition)
            leader = leaders.get(tp)
            if leader is not None and not each.error_code and each.leader_epoch == leader.leader_epoch:
                found.add(tp)
    return found


def _state_of(answer: Message, producer_id: ProducerId) -> Mapping[TopicPartition, ProducerState | None]:
    return {
        TopicPartition(topic.name, each.partition_index): _producers_of(each).get(producer_id)
        for topic in answer.topics
        for each in topic.partitions
        if not each.error_code
    }


def _read_producers(answer: Message) -> Mapping[ProducerId, ProducerState]:
    partition = only(only(answer.topics, "DescribeProducers").partitions, "DescribeProducers")
    check(partition.error_code, "DescribeProducers", partition.error_message)
    return _producers_of(partition)


def _producers_of(partition: Message) -> Mapping[ProducerId, ProducerState]:
    return {
        ProducerId(each.producer_id): ProducerState(
            ProducerId(each.producer_id),
            ProducerEpoch(each.producer_epoch),
            each.last_sequence,
            each.last_timestamp,
            Offset(each.current_txn_start_offset) if each.current_txn_start_offset >= 0 else None,
        )
        for each in partition.active_producers
    }
