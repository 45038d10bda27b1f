"""A Produce request at the doors of counted topics (KIP-253): what it says, whether it may go in, when it is out again.

`CountedTurn` stands beside the request's `Turn` (`turn.py`). It goes in before the gates: once every door it needs is
open, its counts are looked at, all at one moment, and it enters. From then on no expansion ends before it has left. It
leaves when Kafka has answered for all that was sent, the gates' resends included; one that was sent and will never be
answered leaves in doubt.

What may keep it waiting, within `deadline`: a closed door; or a count that does not agree with what is known, until
metadata was asked whether that is still true. After that it is told to try again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Final, Protocol

from fencepost_policies.append import INVALID_PARTITIONS, INVALID_RECORD, Append, Check, Refusal, header_unreadable
from fencepost_policies.partition_count import CountFacts, check_partition_count
from fencepost_policies.values import value
from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.partitions.events import INDEPENDENT
from fencepost_proxy.session.reading import Readings
from fencepost_proxy.session.turn import Bid, make_ticket
from fencepost_proxy.topics.door import Door
from fencepost_proxy.topics.virtual_configs import UNGUARDED, TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames, MalformedBatch, parse_batch_header
from fencepost_proxy.wire.primitives import MALFORMED, join_tags, split_tags
from fencepost_proxy.wire.produce import PartitionData, ProduceRequest, TopicData

#: Of a topic in a Produce request, v9 and later: the number of its partitions as its producer knows it, int32. KIP-253
#: has it as a field of its own; a tag that Kafka has not assigned passes through codecs that do not know it.
PARTITION_COUNT_TAG: Final = 253
_INT32 = Struct(">i")


class Surroundings(Protocol):
    """What a counted turn asks of the process. Answers hold at the moment of asking."""

    header_names: HeaderNames
    decompressed_bytes_max: int

    @property
    def shared_producer_ids(self) -> frozenset[int]: ...

    def policy(self, topic: str) -> TopicPolicy | None: ...

    def door(self, topic: str) -> Door:
        """Of a counted topic."""

    def partition_count(self, topic: str, now: float) -> int | None:
        """Of a counted topic, None while it is not known."""

    def count_confirmed_since(self, topic: str, at: float) -> bool:
        """Whether metadata was asked at that time or later, and answered."""

    def settles(self, topic: str, now: float) -> bool:
        """Whether it has grown a short while ago."""

    def served_count(self, connection: int, client_id: str | None, topic: str, now: float) -> int | None:
        """What this client was told last, None where that is not known."""


@value
class Waits:
    """Come back when a door opens, metadata has answered, or at the next tick. `ask` – topics to ask metadata for."""

    ask: tuple[str, ...]


@value
class Admitted:
    """It has entered. `refused` – the partitions that go no further. `guesses` – topics refused by what their client
    was told last."""

    refused: dict[TopicPartition, Refusal]
    guesses: tuple[str, ...]

    @property
    def stale(self) -> bool:
        """Whether the client should ask for metadata: 37 alone makes none do so."""
        return any(refusal.error_code == INVALID_PARTITIONS for refusal in self.refused.values())


@dataclass(slots=True, eq=False)
class _Topic:
    """One counted topic of the request. `declared` – by the tagged field, or why that cannot be read.

    `read` – what each batch says, or why it is refused whatever the count is; None until somebody wants to know.
    `judged` – for which count and policy, and what came of it: it may have to wait with that, and judging takes time.
    """

    data: TopicData
    declared: int | str | None
    read: list[Append | Refusal] | None = None
    judged: tuple[tuple[int | None, TopicPolicy], list[Refusal | None]] | None = None


@dataclass(slots=True, eq=False)
class CountedTurn:
    """See the module. Times are monotonic seconds. `unanswered` – how much of it is upstream; `in_doubt` – somebody
    was told that its outcome is not known, so it may be sent again from here, or be appended any time."""

    connection: int
    client_id: str | None
    arrived_at: float
    deadline: float
    topics: tuple[_Topic, ...]
    unanswered: int = 0
    in_doubt: bool = False
    readings: Readings | None = None
    _inside: list[Door] = field(default_factory=list)

    # ---- in

    def go_in(self, around: Surroundings, now: float) -> Waits | Admitted:
        """Nothing has happened where it waits."""
        late = now >= self.deadline
        if self.readings is None:
            self.readings = Readings(around.header_names, around.decompressed_bytes_max)
        closed = [topic for topic in self.topics if not self._is_admitted(around, topic)]
        if closed and not late:
            return Waits(())
        ask = []
        refused: dict[TopicPartition, Refusal] = {}
        guesses = []
        for topic in self.topics:
            name = topic.data.name
            if topic in closed:
                message = f"TRY_AGAIN topic={name} is growing: appends wait until its expansion has ended"
                _refuse_all(refused, topic, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "door_closed", message))
                continue
            verdicts = self._verdicts(around, topic, now)
            if verdicts is None and around.count_confirmed_since(name, self.arrived_at):
                message = f"UNKNOWN_TOPIC topic={name}: metadata does not show it to the proxy"
                _refuse_all(refused, topic, Refusal(Error.UNKNOWN_TOPIC_OR_PARTITION, "unknown_topic", message))
                continue
            if verdicts is None or (
                any(verdict is not None and verdict.error_code == INVALID_PARTITIONS for verdict in verdicts)
                and not around.count_confirmed_since(name, self.arrived_at)
            ):
                ask.append(name)
                message = f"TRY_AGAIN topic={name}: how many partitions it has could not be looked up in time"
                _refuse_all(refused, topic, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "count_unknown", message))
                continue
            for data, verdict in zip(topic.data.partitions, verdicts, strict=True):
                if verdict is not None:
                    refused[TopicPartition(name, data.partition)] = verdict
                    if verdict.error_code == INVALID_PARTITIONS and not self._says(topic):
                        guesses.append(name)
        if ask and not late:
            return Waits(tuple(ask))
        for topic in self.topics:
            if any(TopicPartition(topic.data.name, data.partition) not in refused for data in topic.data.partitions):
                door = around.door(topic.data.name)
                entered = door.enter(self, now, _transactional_producers(topic.data) if door.closed else ())
                assert entered, "it was open a moment ago"
                self._inside.append(door)
        return Admitted(refused, tuple(dict.fromkeys(guesses)))

    @staticmethod
    def _is_admitted(around: Surroundings, topic: _Topic) -> bool:
        door = around.door(topic.data.name)
        return door.admits() or door.admits(_transactional_producers(topic.data))

    @staticmethod
    def _says(topic: _Topic) -> bool:
        """Whether the refusal of its batches came from what they say."""
        return topic.declared is not None or any(
            isinstance(each, Append) and each.partition_count is not None for each in topic.read or ()
        )

    def _verdicts(self, around: Surroundings, topic: _Topic, now: float) -> list[Refusal | None] | None:
        """None: that takes a count, and none is known."""
        name = topic.data.name
        policy = around.policy(name) or UNGUARDED
        if policy.count_check is Check.OFF:
            return [None] * len(topic.data.partitions)
        if topic.read is None:
            topic.read = [self._read(around, topic, data, now) for data in topic.data.partitions]
        count, opened_with = around.partition_count(name, now), around.door(name).count
        if opened_with is not None:
            count = max(count or 0, opened_with)
        if topic.judged is None or topic.judged[0] != (count, policy):
            verdicts = self._judge(around, topic, policy, count, now)
            if verdicts is None:
                return None
            topic.judged = (count, policy), verdicts
        return topic.judged[1]

    def _judge(
        self, around: Surroundings, topic: _Topic, policy: TopicPolicy, count: int | None, now: float
    ) -> list[Refusal | None] | None:
        assert topic.read is not None
        name = topic.data.name
        declared = None if isinstance(topic.declared, str) else topic.declared  # else all are refused already
        verdicts: list[Refusal | None] = []
        served = around.served_count(self.connection, self.client_id, name, now) if policy.partitioner is None else None
        settles = count is not None and policy.partitioner is not None and around.settles(name, now)
        for data, append in zip(topic.data.partitions, topic.read, strict=True):
            if isinstance(append, Refusal):
                verdicts.append(append)
                continue
            said = append.partition_count is not None or declared is not None
            if count is None:
                if said or served is not None or policy.count_check is Check.REQUIRED:
                    return None
                verdicts.append(None)
                continue
            if settles and not said and policy.count_check is Check.ON:
                assert self.readings is not None
                assert data.records is not None
                verdicts.append(self.readings.placed(append, data.records, policy, count))
                continue
            facts = CountFacts(policy.count_check, count, policy.partitioner, None, served)
            verdicts.append(check_partition_count(append, declared, facts))
        return verdicts

    def _read(self, around: Surroundings, topic: _Topic, data: PartitionData, now: float) -> Append | Refusal:
        name = topic.data.name
        if isinstance(topic.declared, str):
            return _unreadable(name, data, "PARTITION_COUNT_UNREADABLE", topic.declared)
        policy = around.policy(name) or UNGUARDED
        bid = Bid(
            self.connection,
            UNGUARDED,
            around.header_names,
            around.decompressed_bytes_max,
            around.shared_producer_ids,
            now,
            self.deadline,
        )
        where = TopicPartition(name, data.partition)
        assert self.readings is not None
        ticket = make_ticket(bid, where, data, self.readings.of(where, data.records, policy))
        if isinstance(ticket, Refusal):
            return ticket
        append = ticket.append
        if not policy.guarded and append.unreadable is not None and append.unreadable.header == "baseOffset":
            return append  # Kafka says what it thinks of it
        return header_unreadable(append) or append

    # ---- out

    def was_sent(self) -> None:
        """A part of it goes upstream."""
        self.unanswered += 1

    def was_answered(self) -> None:
        self.unanswered -= 1

    def leave(self, now: float) -> None:
        """Its outcome is known, or never will be. May be called again."""
        in_doubt = self.in_doubt or self.unanswered > 0
        while self._inside:
            self._inside.pop().leave(self, now, in_doubt=in_doubt)

    @property
    def inside(self) -> bool:
        return bool(self._inside)


def counted_turn(
    request: ProduceRequest,
    policy: Callable[[str], TopicPolicy | None],
    connection: int,
    now: float,
    deadline: float,
    *,
    readings: Readings | None = None,
) -> tuple[ProduceRequest, CountedTurn | None]:
    """The request as it is to go upstream, and what of it concerns counted topics.

    Raises ClientProtocolError where it names one of their partitions twice.
    """
    if not any(_is_counted(policy(topic.name)) for topic in request.topics):
        return request, None
    stripped = []
    counted = []
    seen: set[str] = set()
    for topic in request.topics:
        if not _is_counted(policy(topic.name)):
            stripped.append(topic)
            continue
        partitions = [data.partition for data in topic.partitions]
        if topic.name in seen or len(set(partitions)) < len(partitions):
            raise ClientProtocolError(f"a Produce request names topic {topic.name}, or a partition of it, twice")
        seen.add(topic.name)
        declared, tags = _declared(topic.tags)
        without = replace(topic, tags=tags) if tags != topic.tags else topic
        stripped.append(without)
        counted.append(_Topic(without, declared))
    turn = CountedTurn(connection, request.client_id, now, deadline, tuple(counted), readings=readings)
    return replace(request, topics=tuple(stripped)), turn


def _is_counted(policy: TopicPolicy | None) -> bool:
    return policy is not None and policy.counted


def _declared(tags: bytes) -> tuple[int | str | None, bytes]:
    """What the tagged field says, or why it cannot be read; and the tagged fields without it."""
    if not tags:
        return None, tags
    fields = split_tags(tags)
    said = [contents for tag, contents in fields if tag == PARTITION_COUNT_TAG]
    if not said:
        return None, tags
    others = join_tags([(tag, contents) for tag, contents in fields if tag != PARTITION_COUNT_TAG])
    if len(said) > 1:
        return f"tagged field {PARTITION_COUNT_TAG} occurs {len(said)} times", others
    if len(said[0]) != _INT32.size:
        return f"tagged field {PARTITION_COUNT_TAG} has {len(said[0])} bytes; it is an int32", others
    (count,) = _INT32.unpack(said[0])
    if count < 1:
        return f"{count} is not a number of partitions", others
    return count, others


def _transactional_producers(topic: TopicData) -> frozenset[tuple[int, int]]:
    """Ids and epochs of the producers of its batches, if all of them are transactional; else nobody's."""
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
    """As `Ticket.pipeline`, of a batch whose records were not read. INDEPENDENT where it names no producer."""
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


def partition_counts(topics: Iterable[object]) -> Iterator[tuple[str, int]]:
    """Of a Metadata response's topics: name and number of partitions of those that have both."""
    for topic in topics:
        name, error_code = getattr(topic, "name", None), getattr(topic, "error_code", 0)
        if name is not None and not error_code:
            yield name, len(getattr(topic, "partitions", ()))
