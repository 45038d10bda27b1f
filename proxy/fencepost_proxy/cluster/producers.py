"""Producers of a partition: DescribeProducers v0 between two OffsetForLeaderEpoch requests. Needs READ on the topic.

DescribeProducers has no fence: a follower responds too, with what it has replicated so far. So it is sent between two
OffsetForLeaderEpoch requests on one connection, which the broker handles in order and only the leader of that epoch
answers. Retried as in `log_ends`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fencepost_proxy.cluster.broker import BrokerConnection, Call, UpstreamUnavailable, remaining
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.confirmed_leader import ConfirmedLeader
from fencepost_proxy.cluster.log_ends import (
    EARLIEST,
    LogEnd,
    list_offsets_call,
    log_end_call,
    log_end_in,
    offset_in,
)
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.responses import Retry, check
from fencepost_proxy.errors import Error
from fencepost_proxy.types import Monotonic, Offset, ProducerEpoch, ProducerId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

#: Partitions that are read together. More would make a response, and the time between the two log ends, long.
TOGETHER_MAX: Final = 16


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


@dataclass(slots=True, eq=False)
class _Together:
    """Partitions of one leader that are read together, and the results."""

    deadline: Monotonic
    leaders: dict[TopicPartition, Leader] = field(default_factory=dict)
    results: dict[TopicPartition, asyncio.Future[PartitionReading]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Producers:
    """What partition leaders know of producers.

    Reads of one leader that begin in one iteration of the event loop are sent together: a request for several
    partitions needs one for each when its connection is new.
    """

    kafka: KafkaClient
    _starting: dict[BrokerConnection, _Together] = field(default_factory=dict, init=False)
    _leaders: ConfirmedLeader = field(init=False)

    def __post_init__(self) -> None:
        self._leaders = ConfirmedLeader(self.kafka)

    async def read_partition(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> PartitionReading:
        """Log end, producers and log start, in one read."""

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> PartitionReading:
            return await self._read_from(connection, tp, leader, deadline)

        return await self.kafka.query_leader(tp, query, timeout_seconds)

    async def _read_from(
        self, connection: BrokerConnection, tp: TopicPartition, leader: Leader, deadline: Monotonic
    ) -> PartitionReading:
        together = self._starting.get(connection)
        joins = together is not None and together.deadline <= deadline and tp not in together.leaders
        if together is None or not joins:
            self._starting[connection] = together = _Together(deadline)
        together.leaders[tp] = leader
        result: asyncio.Future[PartitionReading] = asyncio.get_running_loop().create_future()
        together.results[tp] = result
        if len(together.leaders) == TOGETHER_MAX:
            del self._starting[connection]
        if not joins:
            await self._read(connection, together)
        return await result

    async def _read(self, connection: BrokerConnection, together: _Together) -> None:
        """In the task of the first of them. The others try again if that ends."""
        failure: BaseException = UpstreamUnavailable(f"{connection.address}: a read for several partitions was ended")
        try:
            await asyncio.sleep(0)
            if self._starting.get(connection) is together:
                del self._starting[connection]
            requested_at = Monotonic(time.monotonic())
            leaders = together.leaders
            log_ends = log_end_call(connection, leaders)
            calls = [
                log_ends,
                describe_producers_call(connection, leaders),
                log_ends,
                list_offsets_call(connection, {tp: each.leader_epoch for tp, each in leaders.items()}, EARLIEST),
            ]
            answers = await connection.pipeline(calls, deadline=together.deadline)
            before, producers, after, starts = map(_by_partition, answers)
            for tp, leader in leaders.items():
                result = together.results[tp]
                if result.done():
                    continue
                try:
                    log_end = log_end_in(after[tp], leader)
                    found = _producers_in(producers[tp])
                    consistent = log_end_in(before[tp], leader) == log_end
                    result.set_result(PartitionReading(log_end, offset_in(starts[tp]), found, consistent, requested_at))
                except KeyError:
                    result.set_exception(UpstreamUnavailable(f"{connection.address} did not answer for {tp}"))
                except (Retry, UpstreamUnavailable) as error:
                    result.set_exception(error)
        except UpstreamUnavailable as error:
            failure = error
        finally:
            if self._starting.get(connection) is together:
                del self._starting[connection]
            for result in together.results.values():
                if not result.done():
                    result.set_exception(failure)
                    result.exception()  # its reader may have ended

    async def open_transactions(
        self, tp: TopicPartition, *, timeout_seconds: float | None = None
    ) -> Mapping[ProducerId, ProducerState]:
        """The producers with a transaction open on the partition. See `read_partition`."""
        return (await self.read_partition(tp, timeout_seconds=timeout_seconds)).open_transactions

    async def producer_at(
        self,
        producer_id: ProducerId,
        partitions: Iterable[TopicPartition],
        *,
        in_sync: Callable[[str], Awaitable[int]],
        timeout_seconds: float | None = None,
    ) -> Mapping[TopicPartition, ProducerState | None]:
        """Confirmed partition leaders' state of one producer, None if they have none.

        A partition whose leader does not respond in time is missing; a deleted one has None. `in_sync`:
        min.insync.replicas of a topic.
        """
        deadline = self.kafka.deadline(timeout_seconds)
        found: dict[TopicPartition, ProducerState | None] = {}

        async def read(tp: TopicPartition) -> None:
            try:
                needed = await in_sync(tp.topic)

                async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> PartitionReading:
                    reading = self._read_from(connection, tp, leader, deadline)
                    return await self._leaders.confirmed(reading, tp, leader, in_sync=needed, deadline=deadline)

                reading = await self.kafka.query_leader(tp, query, remaining(deadline))
                found[tp] = reading.producers.get(producer_id)
            except UpstreamUnavailable as error:
                if error.error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
                    found[tp] = None  # deleted

        await asyncio.gather(*map(read, partitions))
        return found


def _by_partition(answer: Message) -> Mapping[TopicPartition, Message]:
    """Of OffsetForLeaderEpoch, DescribeProducers and ListOffsets, which name these fields differently."""
    found = {}
    for topic in answer.topics:
        name = topic.topic if hasattr(topic, "topic") else topic.name
        for each in topic.partitions:
            index = each.partition if hasattr(each, "partition") else each.partition_index
            found[TopicPartition(name, index)] = each
    return found


def describe_producers_call(connection: BrokerConnection, partitions: Iterable[TopicPartition]) -> Call:
    topics: dict[str, list[int]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(tp.partition)
    message = Message(topics=[Message(name=topic, partition_indexes=each) for topic, each in topics.items()])
    return connection.call(apis.DESCRIBE_PRODUCERS, message, at_most=0)


def _producers_in(partition: Message) -> Mapping[ProducerId, ProducerState]:
    check(partition.error_code, "DescribeProducers", partition.error_message)
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
