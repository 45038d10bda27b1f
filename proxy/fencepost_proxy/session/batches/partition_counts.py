"""A Produce request to topics with partition-count checks (KIP-253): parse, enter the append barriers, leave them.

`CountCheckedProduce` accompanies the request's `ProduceExchange` (`produce_exchange.py`). The barriers come before the
sequencers:

1. Once every barrier it needs is open, all its counts are checked at one moment, and it enters.
2. From then on, no expansion of these topics completes before it has left.
3. It leaves when Kafka has answered everything sent, the sequencers' resends included. If something sent will never be
   answered, it leaves in doubt.

Until `deadline` it may wait for a closed barrier; or, if a count differs from the known one, for metadata newer than
the request. After that the client gets a retriable error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Final

from fencepost_policies.append import (
    INVALID_PARTITIONS,
    INVALID_RECORD,
    Append,
    Check,
    Refusal,
    header_unreadable,
)
from fencepost_policies.partition_count import PartitionFacts, check_count
from fencepost_policies.values import value
from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.sequencer.events import INDEPENDENT
from fencepost_proxy.session.batches.reading import Readings, checked_append
from fencepost_proxy.session.frames.services import Expansions
from fencepost_proxy.topics.virtual_configs import UNCHECKED, TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.primitives import MALFORMED, join_tags, split_tags
from fencepost_proxy.wire.produce import PartitionData, ProduceRequest, TopicData

#: A tagged field of a topic in a Produce request, v9 and later: the partition count known to the producer, int32.
#: KIP-253 makes it a regular field; codecs relay this one, because Kafka has not assigned its number.
PARTITION_COUNT_TAG: Final = 253
_INT32 = Struct(">i")


@value
class Waits:
    """Try again when a barrier opens, metadata arrives, or at the next tick. `query` – topics to refresh."""

    query: tuple[str, ...]


@value
class Admitted:
    """It has entered. `refused` – the partitions not appended. `guesses` – topics refused because of the count last
    reported to their client."""

    refused: dict[TopicPartition, Refusal]
    guesses: tuple[str, ...]

    @property
    def stale(self) -> bool:
        """Whether the client should refresh its metadata: 37 alone makes no client do so."""
        return any(refusal.error_code == INVALID_PARTITIONS for refusal in self.refused.values())


@dataclass(slots=True, eq=False)
class _Topic:
    """One topic of the request with partition-count checks. `declared` – the tagged field, or why it is unreadable.

    `read` – each batch, or why it is refused for any count; None before it is needed. `validated` – the result for a
    count and a policy: kept, because validation takes time and the request may have to wait afterwards.
    """

    data: TopicData
    declared: int | str | None
    read: list[Append | Refusal] | None = None
    validated: tuple[tuple[int | None, TopicPolicy], list[Refusal | None]] | None = None


@dataclass(slots=True, eq=False)
class CountCheckedProduce:
    """See the module. Times are monotonic seconds. `unanswered` – how many of its requests are upstream. `in_doubt` –
    an outcome was reported as unknown, so the append may be resent or appended at any time."""

    connection: int
    client_id: str | None
    arrived_at: float
    deadline: float
    topics: tuple[_Topic, ...]
    unanswered: int = 0
    in_doubt: bool = False
    readings: Readings | None = None
    _entered: list[AppendBarrier] = field(default_factory=list)

    # ---- enter

    def enter_barriers(self, services: Expansions, now: float) -> Waits | Admitted:
        """Has no effect if it returns `Waits`."""
        late = now >= self.deadline
        if self.readings is None:
            self.readings = Readings(services.header_names, services.decompressed_bytes_max)
        closed = [topic for topic in self.topics if not self._is_admitted(services, topic)]
        if closed and not late:
            return Waits(())
        query = []
        refused: dict[TopicPartition, Refusal] = {}
        guesses = []
        for topic in self.topics:
            name = topic.data.name
            if topic in closed:
                message = f"TRY_AGAIN topic={name} is being expanded: appends wait until the expansion has ended"
                _refuse_all(refused, topic, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "barrier_closed", message))
                continue
            decisions = self._decisions(services, topic, now)
            if decisions is None and services.count_confirmed_since(name, self.arrived_at):
                message = f"UNKNOWN_TOPIC topic={name}: metadata does not show it to the proxy"
                _refuse_all(refused, topic, Refusal(Error.UNKNOWN_TOPIC_OR_PARTITION, "unknown_topic", message))
                continue
            if decisions is None or (
                any(decision is not None and decision.error_code == INVALID_PARTITIONS for decision in decisions)
                and not services.count_confirmed_since(name, self.arrived_at)
            ):
                query.append(name)
                message = f"TRY_AGAIN topic={name}: its partition count could not be read in time"
                _refuse_all(refused, topic, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "count_unknown", message))
                continue
            for data, decision in zip(topic.data.partitions, decisions, strict=True):
                if decision is not None:
                    refused[TopicPartition(name, data.partition)] = decision
                    if decision.error_code == INVALID_PARTITIONS and not self._states(topic):
                        guesses.append(name)
        if query and not late:
            return Waits(tuple(query))
        for topic in self.topics:
            if any(TopicPartition(topic.data.name, data.partition) not in refused for data in topic.data.partitions):
                barrier = services.barrier(topic.data.name)
                entered = barrier.enter(self, now, _transactional_producers(topic.data) if barrier.closed else ())
                assert entered, "the barrier closed meanwhile"
                self._entered.append(barrier)
        return Admitted(refused, tuple(dict.fromkeys(guesses)))

    @staticmethod
    def _is_admitted(services: Expansions, topic: _Topic) -> bool:
        barrier = services.barrier(topic.data.name)
        return barrier.admits() or barrier.admits(_transactional_producers(topic.data))

    @staticmethod
    def _states(topic: _Topic) -> bool:
        """Whether the refusal of its batches is due to a count in the request."""
        return topic.declared is not None or any(
            isinstance(each, Append) and each.partition_count is not None for each in topic.read or ()
        )

    def _decisions(self, services: Expansions, topic: _Topic, now: float) -> list[Refusal | None] | None:
        """None: a count is needed and unknown."""
        name = topic.data.name
        policy = services.policy(name) or UNCHECKED
        if policy.count_check is Check.OFF:
            return [None] * len(topic.data.partitions)
        if topic.read is None:
            topic.read = [self._read(services, topic, data) for data in topic.data.partitions]
        count, opened_with = services.partition_count(name, now), services.barrier(name).count
        if opened_with is not None:
            count = max(count or 0, opened_with)
        if topic.validated is None or topic.validated[0] != (count, policy):
            decisions = self._validate(services, topic, policy, count, now)
            if decisions is None:
                return None
            topic.validated = (count, policy), decisions
        return topic.validated[1]

    def _validate(
        self, services: Expansions, topic: _Topic, policy: TopicPolicy, count: int | None, now: float
    ) -> list[Refusal | None] | None:
        assert topic.read is not None
        name = topic.data.name
        declared = None if isinstance(topic.declared, str) else topic.declared  # if unreadable, all are refused already
        decisions: list[Refusal | None] = []
        served = (
            services.served_count(self.connection, self.client_id, name, now) if policy.partitioner is None else None
        )
        in_grace_period = count is not None and policy.partitioner is not None and services.in_grace_period(name, now)
        for data, append in zip(topic.data.partitions, topic.read, strict=True):
            if isinstance(append, Refusal):
                decisions.append(append)
                continue
            stated = append.partition_count is not None or declared is not None
            if count is None:
                if stated or served is not None or policy.count_check is Check.REQUIRED:
                    return None
                decisions.append(None)
                continue
            if in_grace_period and not stated and policy.count_check is Check.ON:
                assert self.readings is not None
                assert data.records is not None
                decisions.append(self.readings.placed(append, data.records, policy, count))
                continue
            facts = PartitionFacts(count, declared, policy.partitioner, None, served)
            decisions.append(check_count(append, policy.count_check, facts))
        return decisions

    def _read(self, services: Expansions, topic: _Topic, data: PartitionData) -> Append | Refusal:
        name = topic.data.name
        if isinstance(topic.declared, str):
            return _unreadable(name, data, "PARTITION_COUNT_UNREADABLE", topic.declared)
        policy = services.policy(name) or UNCHECKED
        where = TopicPartition(name, data.partition)
        assert self.readings is not None
        append = checked_append(where, self.readings.of(where, data.records, policy), services.shared_producer_ids)
        if isinstance(append, Refusal):
            return append
        if not policy.is_checked and append.unreadable is not None and append.unreadable.header == "baseOffset":
            return append  # Kafka decides
        return header_unreadable(append) or append

    # ---- leave

    def was_sent(self) -> None:
        """A part of it goes upstream."""
        self.unanswered += 1

    def was_answered(self) -> None:
        self.unanswered -= 1

    def leave(self, now: float) -> None:
        """Its outcome is known, or never will be. May be called repeatedly."""
        in_doubt = self.in_doubt or self.unanswered > 0
        while self._entered:
            self._entered.pop().leave(self, now, in_doubt=in_doubt)

    @property
    def entered(self) -> bool:
        return bool(self._entered)


def count_checked_produce(
    request: ProduceRequest,
    policy: Callable[[str], TopicPolicy | None],
    connection: int,
    now: float,
    deadline: float,
    *,
    readings: Readings | None = None,
) -> tuple[ProduceRequest, CountCheckedProduce | None]:
    """The request to send upstream, and its topics with partition-count checks.

    Raises ClientProtocolError if it names one of their partitions twice.
    """
    policies = [policy(topic.name) for topic in request.topics]
    if not any(map(_is_count_checked, policies)):
        return request, None
    stripped = []
    count_checked = []
    observed: set[str] = set()
    for topic, its_policy in zip(request.topics, policies, strict=True):
        if not _is_count_checked(its_policy):
            stripped.append(topic)
            continue
        partitions = [data.partition for data in topic.partitions]
        if topic.name in observed or len(set(partitions)) < len(partitions):
            raise ClientProtocolError(f"a Produce request names topic {topic.name}, or a partition of it, twice")
        observed.add(topic.name)
        declared, tags = _declared(topic.tags)
        without = replace(topic, tags=tags) if tags != topic.tags else topic
        stripped.append(without)
        count_checked.append(_Topic(without, declared))
    checked = CountCheckedProduce(connection, request.client_id, now, deadline, tuple(count_checked), readings=readings)
    return replace(request, topics=tuple(stripped)), checked


def _is_count_checked(policy: TopicPolicy | None) -> bool:
    return policy is not None and policy.checks_count


def _declared(tags: bytes) -> tuple[int | str | None, bytes]:
    """The count in the tagged field, or why it is unreadable; and the other tagged fields."""
    if not tags:
        return None, tags
    fields = split_tags(tags)
    stated = [contents for field_tag, contents in fields if field_tag == PARTITION_COUNT_TAG]
    if not stated:
        return None, tags
    others = join_tags([(field_tag, contents) for field_tag, contents in fields if field_tag != PARTITION_COUNT_TAG])
    if len(stated) > 1:
        return f"tagged field {PARTITION_COUNT_TAG} occurs {len(stated)} times", others
    if len(stated[0]) != _INT32.size:
        return f"tagged field {PARTITION_COUNT_TAG} has {len(stated[0])} bytes; it is an int32", others
    (count,) = _INT32.unpack(stated[0])
    if count < 1:
        return f"{count} is not a number of partitions", others
    return count, others


def _transactional_producers(topic: TopicData) -> frozenset[tuple[int, int]]:
    """Ids and epochs of the producers of its batches, if all of them are transactional; else empty."""
    producers = set()
    for data in topic.partitions:
        try:
            header = parse_batch_header(data.records or memoryview(b""))
        except (MalformedBatch, *MALFORMED):
            return frozenset()
        if not header.is_transactional:
            return frozenset()
        producers.add((header.producer_id, header.producer_epoch))
    return frozenset(producers)


def pipeline_of(data: PartitionData) -> int:
    """As `PendingAppend.pipeline`, for a batch whose records are not read. INDEPENDENT if it has no producer id."""
    try:
        producer_id = parse_batch_header(data.records or memoryview(b"")).producer_id
    except MalformedBatch:
        producer_id = -1
    return producer_id if producer_id >= 0 else INDEPENDENT


def _refuse_all(refused: dict[TopicPartition, Refusal], topic: _Topic, refusal: Refusal) -> None:
    for data in topic.data.partitions:
        refused[TopicPartition(topic.data.name, data.partition)] = refusal


def _unreadable(topic: str, data: PartitionData, word: str, reason: str) -> Refusal:
    message = f"{word} topic={topic} partition={data.partition}: {reason}"
    return Refusal(INVALID_RECORD, word.lower(), message)
