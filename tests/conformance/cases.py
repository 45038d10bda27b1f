"""What gates rely on, told as stories of one partition. Each is run against real Kafka and against the model of it.

`KAFKA`, the argument of every case, is a `driver.Kafka`. Error codes, offsets and what is remembered are asserted
exactly: where the two differ, the simulation's word is worth nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance.driver import DEFAULTS, Answer, Kafka, ProducerState, Settings, Stored, Topic
from tests.support import raw

CORRUPT, UNKNOWN_TOPIC_ID, NOT_LEADER, TIMED_OUT, TOO_LARGE = 2, 100, 6, 7, 10
NOT_ENOUGH_REPLICAS, DENIED, INVALID_TIMESTAMP = 19, 29, 32
OUT_OF_ORDER, WRONG_EPOCH, INVALID_TXN_STATE, INVALID_RECORD, PRODUCER_FENCED = 45, 47, 48, 87, 90
#: The producer id of the stamps, which no coordinator has given out.
SHARED = 7_000_001
OTHER = 7_000_002
_GZIP = Settings(gzip=True)
LAST_SEQUENCE = (1 << 31) - 1
DAY_MS = 86_400_000


@dataclass(frozen=True)
class Case:
    report: Callable[[Kafka], None]
    fact: str
    brokers: int
    expires: bool

    @property
    def name(self) -> str:
        return self.report.__name__


CASES: list[Case] = []


def case(
    fact: str, *, brokers: int = 1, expires: bool = False
) -> Callable[[Callable[[Kafka], None]], Callable[[Kafka], None]]:
    """`fact`: what gates rely on. `brokers`: how many replicas the topic has. `expires`: needs brokers that look for
    expired producers soon."""

    def register(report: Callable[[Kafka], None]) -> Callable[[Kafka], None]:
        CASES.append(Case(report, fact, brokers, expires))
        return report

    return register


def fenced(
    kafka: Kafka,
    sequence: int,
    *values: bytes,
    epoch: int = 0,
    producer_id: int = SHARED,
    timestamp_ms: int | None = None,
    transactional: bool = False,
    base_offset: int = 0,
    attributes: int = 0,
) -> bytes:
    at = kafka.now_ms() if timestamp_ms is None else timestamp_ms
    records = [raw.Record(value, timestamp_ms=at) for value in values or (b"%d" % sequence,)]
    producer = raw.Producer(producer_id, epoch, sequence)
    return raw.batch(
        *records, producer=producer, transactional=transactional, base_offset=base_offset, attributes=attributes
    )


def plain(kafka: Kafka, *values: bytes) -> bytes:
    return raw.batch(*(raw.Record(value, timestamp_ms=kafka.now_ms()) for value in values))


def appended(base_offset: int, log_start_offset: int = 0) -> Answer:
    """Fresh, on a CreateTime topic."""
    return Answer(0, base_offset, -1, log_start_offset)


def duplicate(base_offset: int, first: bytes, log_start_offset: int = 0) -> Answer:
    """Told apart by the time, which is that of the batch that is there."""
    return Answer(0, base_offset, timestamp_of(first), log_start_offset)


def refused(error_code: int, log_start_offset: int = -1) -> Answer:
    return Answer(error_code, -1, -1, log_start_offset)


def timestamp_of(batch: bytes) -> int:
    """The newest of its records."""
    return int(struct.unpack_from(">q", batch, 35)[0])


def next_sequence(topic: Topic, node: int | None = None) -> tuple[int, int] | None:
    """(epoch, last sequence) of the stamps."""
    known = topic.producers(node).get(SHARED)
    return None if known is None else (known.epoch, known.last_sequence)


def values(topic: Topic) -> list[bytes | None]:
    return [value for batch in topic.read() for value in batch.values]


# --- duplicates -------------------------------------------------------------------------------------------------------


@case("A producer's last five batches are recognized; older ones get 45")
def the_last_five_batches_are_known_again(kafka: Kafka) -> None:
    """Each with its own offset and time; the one before them is a gap, not a duplicate."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(6)]
    for base in range(1, 6):
        assert topic.append(batches[base]) == duplicate(base, batches[base])
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    assert topic.end() == 6


@case("A sequence gap is refused with 45")
def a_gap_is_refused_and_changes_nothing(kafka: Kafka) -> None:
    topic = kafka.create()
    first = fenced(kafka, 0, b"a", b"b")
    assert topic.append(first) == appended(0)
    before = topic.producers()
    assert topic.append(fenced(kafka, 3)) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 1)) == refused(OUT_OF_ORDER, 0)
    assert topic.producers() == before == {SHARED: ProducerState(0, 1, timestamp_of(first), -1)}
    assert topic.append(fenced(kafka, 2)) == appended(2)


@case("An unknown producer may start at any sequence")
def a_producer_that_is_not_known_begins_anywhere(kafka: Kafka) -> None:
    """The leniency that the whole stamp stands on."""
    topic = kafka.create()
    assert topic.producers() == {}
    assert topic.append(plain(kafka, b"other")) == appended(0)
    assert topic.append(fenced(kafka, 41)) == appended(1)
    assert next_sequence(topic) == (0, 41)
    assert topic.append(fenced(kafka, 43)) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 42)) == appended(2)


@case("With equal sequences, a race's loser gets success; only `log_append_time` differs")
def equal_sequences_are_a_duplicate_whatever_they_hold(kafka: Kafka) -> None:
    """The loser of a race is told 0, at its own expected offset. Only the time betrays that it is another's batch."""
    topic = kafka.create()
    ours = fenced(kafka, 0, b"ours", b"ours")
    theirs = fenced(kafka, 0, b"theirs", b"theirs too", timestamp_ms=timestamp_of(ours) + 1000)
    assert topic.append(ours) == appended(0)
    assert topic.append(theirs) == duplicate(0, ours)
    assert values(topic) == [b"ours", b"ours"]


@case("A duplicate has the same first and last sequence")
def another_count_of_records_is_no_duplicate(kafka: Kafka) -> None:
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0, b"a", b"b")) == appended(0)
    assert topic.append(fenced(kafka, 0, b"a")) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 0, b"a", b"b", b"c")) == refused(OUT_OF_ORDER, 0)
    assert topic.end() == 2


@case("Other producers' batches do not hide a duplicate")
def a_duplicate_is_found_behind_other_writers(kafka: Kafka) -> None:
    """The answer is where it lies, not where the log ends."""
    topic = kafka.create()
    first = fenced(kafka, 0)
    assert topic.append(first) == appended(0)
    assert topic.append(plain(kafka, b"x", b"y")) == appended(1)
    assert topic.append(fenced(kafka, 9, producer_id=OTHER)) == appended(3)
    assert topic.append(first) == duplicate(0, first)
    assert topic.append(fenced(kafka, 1)) == appended(4)


@case("An unfenced append shifts the next sequence's offset")
def a_cached_shift_accepts_at_the_wrong_place(kafka: Kafka) -> None:
    """No race is needed: whoever goes around the stamp moves the log end, and the next sequence still fits."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    assert topic.append(plain(kafka, b"around")) == appended(1)
    assert topic.append(fenced(kafka, 1)) == appended(2), "expected at 1"


@case("Appends with different sequence offsets both succeed")
def two_that_believe_in_different_shifts_both_win(kafka: Kafka) -> None:
    """Both expect 2, cold. Hence one owner of a shift, or none; or its own epoch for each."""
    topic = kafka.create()
    assert topic.append(plain(kafka, b"a", b"b")) == appended(0)
    assert topic.append(fenced(kafka, 2, b"by one who believes in a shift of 0")) == appended(2)
    assert topic.append(fenced(kafka, 3, b"by one who believes in a shift of -1")) == appended(3), "expected at 2"


@case("Log end and sequence, read separately, may not match")
def the_end_and_then_the_sequence_make_no_shift(kafka: Kafka) -> None:
    """Between the two reads somebody else appends. Read the other way round, what moved would be in the end."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    end = topic.end()
    assert topic.append(fenced(kafka, 0, producer_id=OTHER)) == appended(1)
    known = next_sequence(topic)
    assert known == (0, 0)
    sequence_offset = end - (known[1] + 1)
    assert sequence_offset == 0, "in truth it is 1"
    assert topic.append(fenced(kafka, end - sequence_offset)) == appended(2), "expected at 1"


@case("With LogAppendTime, a duplicate looks like a new append")
def log_append_time_hides_duplicates(kafka: Kafka) -> None:
    """A duplicate's answer is a fresh one's, byte for byte."""
    topic = kafka.create(Settings(log_append_time=True))
    first = fenced(kafka, 0)
    fresh = topic.append(first)
    assert fresh[:2] == (0, 0)
    assert fresh.log_append_time_ms > 0
    assert topic.append(first) == fresh
    assert topic.append(fenced(kafka, 0, b"theirs")) == fresh
    assert topic.producers()[SHARED].last_timestamp_ms == fresh.log_append_time_ms


@case("So does one with timestamp −1")
def without_a_timestamp_a_duplicate_looks_fresh(kafka: Kafka) -> None:
    """Timestamp -1: the time in a duplicate's answer is that of the batch, and so is there none."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0, b"ours", timestamp_ms=-1)) == appended(0)
    assert topic.append(fenced(kafka, 0, b"theirs", timestamp_ms=-1)) == appended(0)
    assert topic.append(fenced(kafka, 0, b"theirs")) == appended(0)
    assert values(topic) == [b"ours"]


@case("Sequence 0 follows 2³¹−1, within a batch too")
def sequences_wrap(kafka: Kafka) -> None:
    """Behind 2^31 - 1 comes 0, within a batch and between batches."""
    topic = kafka.create()
    services = fenced(kafka, LAST_SEQUENCE, b"last", b"first")
    assert topic.append(fenced(kafka, LAST_SEQUENCE - 1)) == appended(0)
    assert topic.append(services) == appended(1)
    assert next_sequence(topic) == (0, 0)
    assert topic.append(services) == duplicate(1, services)
    assert topic.append(fenced(kafka, 1)) == appended(3)
    exactly = kafka.create()
    assert exactly.append(fenced(kafka, LAST_SEQUENCE)) == appended(0)
    assert next_sequence(exactly) == (0, LAST_SEQUENCE)
    assert exactly.append(fenced(kafka, 1)) == refused(OUT_OF_ORDER, 0)
    assert exactly.append(fenced(kafka, 0)) == appended(1)


@case("Unassigned attribute bits survive, unless the broker rewrites the batch")
def attributes_without_a_meaning_are_kept_where_the_batch_is(kafka: Kafka) -> None:
    """A tag that says whose stamp it is survives in them; where the broker writes the batch anew, it is gone."""
    instance_id = 0x5A00
    as_sent, timed, repacked = (kafka.create(each) for each in (DEFAULTS, Settings(log_append_time=True), _GZIP))
    for topic in (as_sent, timed, repacked):
        assert topic.append(fenced(kafka, 0, b"a", attributes=instance_id)).error_code == 0
    lying = bytearray(fenced(kafka, 1, b"a", attributes=instance_id))
    struct.pack_into(">q", lying, 35, kafka.now_ms() + 5000)
    raw.sign(lying)
    assert as_sent.append(bytes(lying)) == appended(1)
    assert [batch.attributes for batch in as_sent.read()] == [instance_id, 0]
    assert [batch.attributes for batch in timed.read()] == [0x08]
    assert [batch.attributes for batch in repacked.read()] == [0x01]
    assert values(repacked) == [b"a"]


# --- epochs -----------------------------------------------------------------------------------------------------------


@case("A new epoch starts at 0 and fences the old (47)")
def a_new_epoch_begins_at_zero_and_fences_the_old(kafka: Kafka) -> None:
    topic = kafka.create()
    old = fenced(kafka, 5)
    assert topic.append(old) == appended(0)
    assert topic.append(fenced(kafka, 6, epoch=1)) == refused(OUT_OF_ORDER, 0)
    assert next_sequence(topic) == (0, 5)
    new = fenced(kafka, 0, epoch=1)
    assert topic.append(new) == appended(1)
    assert topic.append(old) == refused(WRONG_EPOCH, 0), "what is there, and was a duplicate before"
    assert topic.append(fenced(kafka, 6)) == refused(WRONG_EPOCH, 0)
    assert topic.append(new) == duplicate(1, new)
    assert topic.append(fenced(kafka, 0, epoch=9)) == appended(2), "epochs may be left out"
    assert next_sequence(topic) == (9, 0)


@case("An unknown producer may start with any epoch")
def a_producer_that_is_not_known_begins_with_any_epoch_and_sequence(kafka: Kafka) -> None:
    topic = kafka.create()
    assert topic.append(fenced(kafka, 17, epoch=4)) == appended(0)
    assert topic.append(fenced(kafka, 18, epoch=3)) == refused(WRONG_EPOCH, 0)
    assert next_sequence(topic) == (4, 17)


# --- what is checked before duplicates are looked for -----------------------------------------------------------------


def _limited(kafka: Kafka) -> Topic:
    return kafka.create(Settings(max_message_bytes=500, timestamp_after_max_ms=60_000))


@case("Errors 2, 10, 32, 87 leave the sequence unchanged")
def a_refused_batch_leaves_the_sequence_alone(kafka: Kafka) -> None:
    """Warm: what was chained behind it meets a gap, as wanted."""
    topic = _limited(kafka)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    before = topic.producers()
    corrupt = bytearray(fenced(kafka, 1))
    corrupt[-1] ^= 1
    assert topic.append(bytes(corrupt)) == refused(CORRUPT)
    assert topic.append(fenced(kafka, 1, b"x" * 500)) == refused(TOO_LARGE)
    assert topic.append(fenced(kafka, 1, timestamp_ms=kafka.now_ms() + 600_000)) == refused(INVALID_TIMESTAMP, 0)
    assert topic.append(fenced(kafka, 1, base_offset=1)) == refused(INVALID_RECORD, 0)
    assert topic.producers() == before
    assert topic.append(fenced(kafka, 2)) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 1)) == appended(1)


@case("While unconfirmed, a pipelined append may replace a refused one")
def behind_a_refused_first_batch_the_second_lands_in_its_place(kafka: Kafka) -> None:
    """Cold: hence one at a time."""
    topic = _limited(kafka)
    assert topic.append(plain(kafka, b"there")) == appended(0)
    wire = topic.connect()
    wire.send(fenced(kafka, 1, b"x" * 500))
    wire.send(fenced(kafka, 2, b"second"))
    assert wire.receive() == refused(TOO_LARGE)
    assert wire.receive() == appended(1), "expected at 2"
    wire.close()
    assert values(topic) == [b"there", b"second"]


@case("Errors 2, 10, 29, 32, 87 precede the duplicate check")
def errors_come_before_duplicates(kafka: Kafka) -> None:
    """45, 10, 32, 2, 29 and the like to a resend say nothing about whether the first try is there."""
    topic = _limited(kafka)
    there = fenced(kafka, 0, b"a")
    assert topic.append(there) == appended(0)
    again = fenced(kafka, 0, b"a", timestamp_ms=kafka.now_ms() + 600_000)
    assert topic.append(again) == refused(INVALID_TIMESTAMP, 0)
    assert topic.append(fenced(kafka, 0, b"x" * 500)) == refused(TOO_LARGE)
    corrupt = bytearray(there)
    corrupt[-1] ^= 1
    assert topic.append(bytes(corrupt)) == refused(CORRUPT)
    assert topic.append(fenced(kafka, 0, b"a", base_offset=7)) == refused(INVALID_RECORD, 0)
    assert topic.append(there) == duplicate(0, there)
    topic.deny("WRITE")
    kafka.until(lambda: topic.append(there) == refused(DENIED), "the right to write to be gone")
    assert topic.end() == 1


@case("Base offset, size and checksum are checked in this order")
def of_several_errors_the_first_is_told(kafka: Kafka) -> None:
    """Base offset, size, checksum."""
    topic = _limited(kafka)
    all_wrong = bytearray(fenced(kafka, 0, b"x" * 500, base_offset=7))
    all_wrong[-1] ^= 1
    assert topic.append(bytes(all_wrong)) == refused(INVALID_RECORD, 0)
    too_large_and_corrupt = bytearray(fenced(kafka, 0, b"x" * 500))
    too_large_and_corrupt[-1] ^= 1
    assert topic.append(bytes(too_large_and_corrupt)) == refused(TOO_LARGE)
    assert topic.producers() == {}


@case("DescribeProducers needs READ; Produce needs WRITE alone")
def who_may_not_read_cannot_describe_producers(kafka: Kafka) -> None:
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    topic.deny("READ")

    def denied() -> bool:
        try:
            topic.producers()
        except PermissionError:
            return True
        return False

    kafka.until(denied, "the right to read to be gone")
    assert topic.append(fenced(kafka, 1)) == appended(1), "WRITE is enough to append"


# --- what is forgotten ------------------------------------------------------------------------------------------------


@case("After a restart only a producer's last batch is recognized")
def after_a_restart_only_the_last_batch_is_remembered(kafka: Kafka) -> None:
    """45 on a resend of what is there; six batches later nothing is known of it."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(6)]
    kafka.restart()
    for each in batches[:5]:
        assert topic.append(each) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[5]) == duplicate(5, batches[5])
    assert topic.append(fenced(kafka, 6)) == appended(6)
    assert len(values(topic)) == 7


@case("The same after a kill")
def after_a_kill_only_the_last_batch_is_remembered(kafka: Kafka) -> None:
    """Recovery reads the log, writes down what it learned of each producer, and begins with that."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(3)]
    kafka.crash()
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[1]) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[2]) == duplicate(2, batches[2])
    assert topic.append(fenced(kafka, 3)) == appended(3)


@case("A restart forgets producers with old record timestamps")
def old_records_are_forgotten_at_a_restart_and_appended_twice(kafka: Kafka) -> None:
    """Not when they were written counts, but what their newest timestamp says: a warm partition grows cold."""
    topic, fresh = kafka.create(), kafka.create()
    old = fenced(kafka, 0, b"old", timestamp_ms=kafka.now_ms() - 2 * DAY_MS)
    young = fenced(kafka, 0, b"young", timestamp_ms=kafka.now_ms() - DAY_MS // 2)
    assert topic.append(old) == appended(0)
    assert topic.append(old) == duplicate(0, old)
    assert fresh.append(young) == appended(0)
    kafka.restart()
    assert topic.producers() == {}
    assert topic.append(old) == appended(1), "twice"
    assert values(topic) == [b"old", b"old"]
    assert fresh.append(young) == duplicate(0, young)


@case("The broker computes the newest timestamp from the records")
def a_lying_header_does_not_keep_old_records_known(kafka: Kafka) -> None:
    """The broker computes the newest timestamp from the records."""
    topic = kafka.create()
    old = kafka.now_ms() - 2 * DAY_MS
    lying = bytearray(fenced(kafka, 0, timestamp_ms=old))
    struct.pack_into(">q", lying, 35, kafka.now_ms())
    raw.sign(lying)
    assert topic.append(bytes(lying)) == appended(0)
    assert topic.producers() == {SHARED: ProducerState(0, 0, old, -1)}


@case("Producers also expire without a restart", expires=True)
def old_records_are_forgotten_without_a_restart_too(kafka: Kafka) -> None:
    """When brokers look for what has expired; by default every ten minutes."""
    topic = kafka.create()
    old = fenced(kafka, 0, b"old", timestamp_ms=kafka.now_ms() - 2 * DAY_MS)
    young = fenced(kafka, 5, b"young", producer_id=OTHER, timestamp_ms=kafka.now_ms() - DAY_MS // 2)
    assert topic.append(young) == appended(0)
    assert topic.append(old) == appended(1)
    kafka.expire_producers()
    kafka.until(lambda: SHARED not in topic.producers(), "the old one to be forgotten")
    assert topic.append(old) == appended(2), "twice"
    assert topic.append(young) == duplicate(0, young)


@case("If all records are deleted, a restart forgets the producer")
def deleted_records_are_remembered_until_a_restart(kafka: Kafka) -> None:
    """A duplicate may be told whose records can no longer be read. After the restart it is appended again."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(3)]
    topic.delete_records(3)
    assert (topic.start(), topic.end(), topic.read()) == (3, 3, [])
    assert topic.append(batches[1]) == duplicate(1, batches[1], 3)
    assert topic.append(fenced(kafka, 9)) == refused(OUT_OF_ORDER, 3)
    assert next_sequence(topic) == (0, 2)
    kafka.restart()
    assert (topic.start(), topic.end(), topic.producers()) == (3, 3, {})
    assert topic.append(batches[2]) == appended(3, 3), "twice"


@case("If other records remain, it does not")
def a_producer_whose_records_are_deleted_is_known_as_long_as_others_remain(kafka: Kafka) -> None:
    """What a shutdown writes down is of all producers; it is not used only where nothing of the log is left."""
    topic = kafka.create()
    ours = fenced(kafka, 0)
    assert topic.append(ours) == appended(0)
    assert topic.append(plain(kafka, b"remains")) == appended(1)
    topic.delete_records(1)
    kafka.restart()
    assert next_sequence(topic) == (0, 0)
    assert topic.append(ours) == duplicate(0, ours, 1)


@case("After a kill, deleted records may be back")
def after_a_kill_deleted_records_may_be_back(kafka: Kafka) -> None:
    """Where the log starts is written down once a minute. And who wrote them is known again."""
    topic = kafka.create()
    ours = fenced(kafka, 0)
    assert topic.append(ours) == appended(0)
    assert topic.append(plain(kafka, b"remains")) == appended(1)
    topic.delete_records(1)
    kafka.crash()
    start = topic.start()
    assert start in (0, 1)
    assert topic.append(ours) == duplicate(0, ours, start)


@case("A recreated topic refuses stale batches only by id (100)")
def a_recreated_topic_knows_nobody_and_has_another_id(kafka: Kafka) -> None:
    """By name a stale batch lands at 0 of the new one; by id it is refused."""
    topic = kafka.create()
    old = topic.topic_id
    assert topic.append_by_id(fenced(kafka, 0), old) == appended(0)
    assert topic.append(fenced(kafka, 1)) == appended(1)
    topic.recreate()
    assert topic.topic_id != old
    assert topic.append_by_id(fenced(kafka, 2), old) == refused(UNKNOWN_TOPIC_ID)
    assert (topic.end(), topic.producers()) == (0, {})
    assert topic.append(fenced(kafka, 2, b"stale")) == appended(0), "expected at 2"
    assert topic.append_by_id(fenced(kafka, 3), topic.topic_id) == appended(1)


# --- connections ------------------------------------------------------------------------------------------------------


@case("A request may be appended after its connection closed")
def a_request_outlives_its_connection(kafka: Kafka) -> None:
    """No read is a barrier: the log end was read after the client was gone, and moves all the same."""
    topic = kafka.create()
    (node,) = topic.replicas()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    wire = topic.connect()
    wire.send(plain(kafka, b"to be sure that it is connected"))
    assert wire.receive() == appended(1)
    kafka.pause(node)
    wire.send(fenced(kafka, 1, b"late"))
    wire.close()
    kafka.resume(node)
    kafka.until(lambda: topic.end() == 3, "what was queued to be appended")
    assert next_sequence(topic) == (0, 1)
    assert topic.append(fenced(kafka, 1, b"another's")).base_offset == 2, "a duplicate of the late one"
    assert [b.values for b in topic.read()][-1] == (b"late",)


@case("Of a late request and its competitor, one is a duplicate")
def only_the_sequence_decides_between_a_late_request_and_another(kafka: Kafka) -> None:
    """Two that expect the same offset, one of them queued behind a dead connection: one wins, whatever the order."""
    topic = kafka.create()
    (node,) = topic.replicas()
    late = topic.connect()
    late.send(fenced(kafka, 0, timestamp_ms=kafka.now_ms() - 5))
    assert late.receive() == appended(0)
    other = topic.connect()
    kafka.pause(node)
    late.send(fenced(kafka, 1, b"late", timestamp_ms=kafka.now_ms() - 5))
    late.close()
    other.send(fenced(kafka, 1, b"other"))
    kafka.resume(node)
    answer = other.receive()
    kafka.until(lambda: topic.end() == 2, "one of them")
    won = answer.log_append_time_ms == -1
    assert (answer.error_code, answer.base_offset) == (0, 1)
    assert values(topic) == [b"0", b"other" if won else b"late"]


@case("A connection's requests are handled in order")
def requests_of_one_connection_are_handled_in_order(kafka: Kafka) -> None:
    topic = kafka.create()
    wire = topic.connect()
    for sequence in (3, 4, 6, 5):
        wire.send(fenced(kafka, sequence))
    answers = [wire.receive() for _ in range(4)]
    assert answers == [appended(0), appended(1), refused(OUT_OF_ORDER, 0), appended(2)]
    wire.close()


# --- transactions -----------------------------------------------------------------------------------------------------


def _control(batches: list[Stored]) -> list[tuple[int, int, int]]:
    return [(b.base_offset, b.producer_id, b.producer_epoch) for b in batches if b.is_control]


def _marker_v1(kafka: Kafka, *, commit: bool) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    first = fenced(kafka, 0, producer_id=producer.producer_id, epoch=producer.epoch, transactional=True)
    assert producer.append(topic, first) == appended(0)
    known = topic.producers()[producer.producer_id]
    assert known == ProducerState(producer.epoch, 0, timestamp_of(first), 0), "open since offset 0"
    assert topic.append(plain(kafka, b"beside it")) == appended(1)
    producer.end(commit=commit)
    kafka.until(lambda: topic.end() == 3, "the marker, after EndTxn was answered")
    kafka.until(lambda: topic.high_watermark() == 3, "the marker to be committed")
    assert _control(topic.read()) == [(2, producer.producer_id, producer.epoch)]
    known = topic.producers()[producer.producer_id]
    assert (known.epoch, known.last_sequence, known.transaction_start) == (producer.epoch, 0, -1)
    assert producer.append(topic, first) == refused(INVALID_TXN_STATE), "its end comes before its duplicates"
    assert topic.append(plain(kafka, b"behind it")) == appended(3)


@case("A commit marker takes an offset, after EndTxn is answered")
def a_commit_marker_takes_an_offset(kafka: Kafka) -> None:
    _marker_v1(kafka, commit=True)


@case("An abort marker too")
def an_abort_marker_takes_an_offset(kafka: Kafka) -> None:
    _marker_v1(kafka, commit=False)


@case("In transactions v1, a partition without records gets its marker")
def a_partition_that_was_added_and_never_written_gets_its_marker(kafka: Kafka) -> None:
    """Transactions v1: nobody has seen a batch of that producer, and still the log end moves."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    assert (topic.end(), set(topic.producers())) == (1, {SHARED})
    producer.end(commit=False)
    kafka.until(lambda: topic.end() == 2, "the marker")
    assert next_sequence(topic) == (0, 0), "the stamps know nothing of it"
    assert topic.append(fenced(kafka, 1)) == appended(2), "expected at 1"
    known = topic.producers()[producer.producer_id]
    assert (known.epoch, known.last_sequence, known.transaction_start) == (producer.epoch, -1, -1)
    kafka.until(lambda: topic.high_watermark() == 3, "all to be committed")
    assert _control(topic.read()) == [(1, producer.producer_id, producer.epoch)]


@case("A coordinator lists a partition until its marker is written")
def a_coordinator_knows_until_the_marker_is_there(kafka: Kafka) -> None:
    """So whoever is told that it is not named, and reads the log end after that, has the marker before it."""
    written, stranded = kafka.create(), kafka.create()
    producer = kafka.transactional(v2=False)
    for exchange in range(3):
        for topic in (written, stranded):
            assert not producer.is_on(topic)
            producer.add(topic)
            assert producer.is_on(topic)
        who = {"producer_id": producer.producer_id, "epoch": producer.epoch}
        assert producer.append(written, fenced(kafka, exchange, transactional=True, **who)) == appended(2 * exchange)
        producer.end(commit=bool(exchange % 2))
        for topic, end in ((written, 2 * exchange + 2), (stranded, exchange + 1)):

            def is_over(topic: Topic = topic) -> bool:
                return not producer.is_on(topic)

            kafka.until(is_over, "it to be named no more")
            assert topic.end() == end


@case("A producer known only by a marker starts at 0")
def who_is_known_by_a_marker_alone_begins_at_zero(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    producer.end(commit=True)
    kafka.until(lambda: topic.end() == 1, "the marker")
    producer.add(topic)
    who = {"producer_id": producer.producer_id, "epoch": producer.epoch}
    assert producer.append(topic, fenced(kafka, 4, transactional=True, **who)) == refused(OUT_OF_ORDER, 0)
    assert producer.append(topic, fenced(kafka, 0, transactional=True, **who)) == appended(1)


@case("A transactional batch for a partition not added gets 48")
def a_transactional_batch_without_its_partition_is_refused(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    who = {"producer_id": producer.producer_id, "epoch": producer.epoch}
    assert producer.append(topic, fenced(kafka, 0, transactional=True, **who)) == refused(INVALID_TXN_STATE)
    assert (topic.end(), topic.producers()) == (0, {})


@case("In v2, unknown producers start at 0; ends bump the epoch")
def transactions_v2_begin_at_zero_and_bump_the_epoch_with_each_end(kafka: Kafka) -> None:
    """The marker has the next epoch already, and the leniency towards unknown producers is gone."""
    topic = kafka.create()
    producer = kafka.transactional(v2=True)
    epoch, producer_id = producer.epoch, producer.producer_id

    def next_batch(sequence: int) -> bytes:
        return fenced(kafka, sequence, producer_id=producer_id, epoch=producer.epoch, transactional=True)

    assert producer.append(topic, next_batch(3)) == refused(OUT_OF_ORDER, 0)
    first = next_batch(0)
    assert producer.append(topic, first) == appended(0)
    assert producer.append(topic, first) == duplicate(0, first)
    assert topic.producers()[producer_id].transaction_start == 0
    producer.end(commit=True)
    kafka.until(lambda: topic.end() == 2, "the marker")
    assert producer.epoch == epoch + 1
    known = topic.producers()[producer_id]
    assert (known.epoch, known.last_sequence, known.transaction_start) == (epoch + 1, -1, -1)
    assert producer.append(topic, next_batch(0)) == appended(2)
    producer.end(commit=False)
    kafka.until(lambda: topic.end() == 4 == topic.high_watermark(), "the second marker")
    assert _control(topic.read()) == [(1, producer_id, epoch + 1), (3, producer_id, epoch + 2)]


@case("A transaction is Empty, Ongoing, then Complete after its markers")
def a_transactions_states(kafka: Kafka) -> None:
    for v2 in (False, True):
        topic = kafka.create()
        producer = kafka.transactional(v2=v2)
        assert producer.state() == "Empty"
        for commit, end in ((True, 2), (False, 4)):
            producer.add(topic)
            who = {"producer_id": producer.producer_id, "epoch": producer.epoch}
            sequence = 0 if v2 or commit else 1
            assert producer.append(topic, fenced(kafka, sequence, transactional=True, **who)) == appended(end - 2)
            assert producer.state() == "Ongoing"
            producer.end(commit=commit)
            after = "CompleteCommit" if commit else "CompleteAbort"
            assert producer.state() in (after.replace("Complete", "Prepare"), after)
            kafka.until(lambda producer=producer, after=after: producer.state() == after, after)
            assert topic.end() == end


@case("A repeated EndTxn succeeds; a contrary one gets 48, another epoch 90")
def an_end_that_is_said_again(kafka: Kafka) -> None:
    """Transactions v1: so a commit whose answer was lost may be asked for again."""
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    for commit in (True, False):
        assert producer.say_end(producer.epoch, commit=commit) == INVALID_TXN_STATE, "nothing was begun"
    for exchange, commit in enumerate((True, False)):
        producer.add(topic)
        assert producer.say_end(producer.epoch + 1, commit=commit) == PRODUCER_FENCED
        for _ in range(2):
            assert producer.say_end(producer.epoch, commit=commit) == 0
        assert producer.say_end(producer.epoch, commit=not commit) == INVALID_TXN_STATE
        assert topic.end() == exchange + 1


@case("In v2, EndTxn repeats with the epoch that it ended")
def an_end_that_is_said_again_v2(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=True)
    assert producer.say_end(producer.epoch, commit=True) == INVALID_TXN_STATE, "nothing was begun"
    for end in (2, 4):
        who = {"producer_id": producer.producer_id, "epoch": producer.epoch}
        assert producer.append(topic, fenced(kafka, 0, transactional=True, **who)) == appended(end - 2)
        ended = producer.epoch
        producer.end(commit=True)
        assert producer.say_end(ended, commit=True) == 0
        assert producer.say_end(ended, commit=False) == INVALID_TXN_STATE
        assert producer.say_end(producer.epoch, commit=True) == INVALID_TXN_STATE, "nothing was begun"
        assert producer.say_end(ended - 1, commit=True) == PRODUCER_FENCED
        assert producer.say_end(producer.epoch + 1, commit=True) == PRODUCER_FENCED
        assert topic.end() == end
    before = producer.epoch
    producer.end(commit=False)
    assert producer.epoch == before + 1


# --- offsets on more than one broker ----------------------------------------------------------------------------------


def _follower(topic: Topic) -> int:
    leader = topic.leader()
    return next(node for node in topic.replicas() if node != leader)


def _two(kafka: Kafka, min_isr: int = 1) -> Topic:
    return kafka.create(Settings(replicas=2, min_isr=min_isr))


@case("OffsetForLeaderEpoch returns the log end, ListOffsets the high watermark", brokers=2)
def the_log_end_runs_ahead_of_the_high_watermark(kafka: Kafka) -> None:
    """OffsetForLeaderEpoch tells the end; ListOffsets tells what is committed, and Fetch gives no more than that."""
    topic = _two(kafka)
    assert (topic.end(), topic.high_watermark()) == (0, 0)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    duplicate_waiter = _follower(topic)
    kafka.pause(duplicate_waiter)
    for sequence in (1, 2):
        assert topic.append(fenced(kafka, sequence), acks=1) == appended(sequence)
    assert (topic.end(), topic.high_watermark()) == (3, 1)
    assert values(topic) == [b"0"]
    kafka.resume(duplicate_waiter)
    kafka.until(lambda: topic.high_watermark() == 3, "the follower to catch up")
    assert len(values(topic)) == 3


@case("With too few in-sync replicas: 19 before the append, 7 after", brokers=2)
def too_few_in_sync_replicas(kafka: Kafka) -> None:
    """19 before the append, and before duplicates; 7 after the append, with the offset where it lies."""
    topic = _two(kafka, min_isr=2)
    first, waits = fenced(kafka, 0), fenced(kafka, 1)
    assert topic.append(first) == appended(0)
    duplicate_waiter = _follower(topic)
    kafka.pause(duplicate_waiter)
    assert topic.append(waits, timeout_ms=300) == Answer(TIMED_OUT, 1, -1, 0)
    assert (topic.end(), topic.high_watermark()) == (2, 1)
    kafka.until(
        lambda: topic.append(waits, timeout_ms=100) == refused(NOT_ENOUGH_REPLICAS, 0), "the follower to be missed"
    )
    assert topic.append(fenced(kafka, 2)) == refused(NOT_ENOUGH_REPLICAS, 0)
    assert topic.append(fenced(kafka, 2), acks=1) == appended(2), "acks=1 asks nobody"
    assert (topic.end(), topic.high_watermark(), next_sequence(topic)) == (3, 1, (0, 2))
    kafka.resume(duplicate_waiter)
    kafka.until(lambda: topic.in_sync() == 2 and topic.high_watermark() == 3, "the follower to catch up")
    assert topic.append(waits) == duplicate(1, waits)


@case("A duplicate is answered once it is committed", brokers=2)
def a_resend_waits_for_its_replicas_as_the_first_did(kafka: Kafka) -> None:
    """A duplicate is no success before it is committed."""
    topic = _two(kafka, min_isr=2)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    duplicate_waiter = _follower(topic)
    kafka.pause(duplicate_waiter)
    waits = fenced(kafka, 1)
    assert topic.append(waits, timeout_ms=200) == Answer(TIMED_OUT, 1, -1, 0)
    assert topic.append(waits, timeout_ms=200) == Answer(TIMED_OUT, 1, timestamp_of(waits), 0)
    kafka.resume(duplicate_waiter)
    kafka.until(lambda: topic.high_watermark() == 2, "the follower to catch up")
    assert topic.append(waits) == duplicate(1, waits)


@case("A connection's later appends wait for an earlier one's replicas", brokers=2)
def a_connection_is_silent_while_an_append_waits_for_replicas(kafka: Kafka) -> None:
    """One request at a time: what came behind it is not even appended. Other connections go on."""
    topic = _two(kafka, min_isr=2)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    wire = topic.connect()
    duplicate_waiter = _follower(topic)
    kafka.pause(duplicate_waiter)
    wire.send(fenced(kafka, 1), timeout_ms=4000)
    wire.send(fenced(kafka, 2), acks=1)
    kafka.until(lambda: topic.end() == 2, "the first to be appended")
    assert topic.append(plain(kafka, b"other"), acks=1) == appended(2)
    assert topic.end() == 3
    assert wire.receive() == Answer(TIMED_OUT, 1, -1, 0)
    assert wire.receive() == appended(3)
    wire.close()
    kafka.resume(duplicate_waiter)
    kafka.until(lambda: topic.in_sync() == 2, "the follower to be back")


@case("A new leader recognizes five batches; the old one answers 6", brokers=2)
def a_new_leader_knows_the_last_five_and_the_old_one_takes_nothing(kafka: Kafka) -> None:
    """A to B to A. Who is asked in the name of another epoch, older or newer, does not tell its log end."""
    topic = _two(kafka)
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(6)]
    a, b = topic.leader(), _follower(topic)
    epoch = topic.leader_epoch()
    assert (topic.end_as_of(a, epoch), topic.end_as_of(b, epoch)) == (6, None)
    assert topic.end_as_of(a, epoch + 1) is None
    kafka.until(lambda: topic.producers(b) == topic.producers(a), "the follower to know it too")
    topic.move_leader(b)
    new_epoch = topic.leader_epoch()
    assert new_epoch > epoch
    assert topic.end_as_of(a, epoch) is None
    assert topic.end_as_of(b, epoch) is None
    assert topic.end_as_of(b, new_epoch) == 6
    assert topic.append(fenced(kafka, 6), node=a) == refused(NOT_LEADER)
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    for base in range(1, 6):
        assert topic.append(batches[base]) == duplicate(base, batches[base])
    assert topic.append(fenced(kafka, 6)) == appended(6)
    topic.move_leader(a)
    assert topic.append(fenced(kafka, 6, b"another's")).base_offset == 6
    assert topic.append(fenced(kafka, 7)) == appended(7)


@case("Truncation takes back log and sequence together", brokers=2)
def truncation_takes_log_and_sequence_back_together(kafka: Kafka) -> None:
    """The tail that only the dead leader had is gone, and so is the memory of it, there too once it is back."""
    topic = _two(kafka)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    a, b = topic.leader(), _follower(topic)
    kafka.pause(b)
    # A fetch of the follower's was waiting: the first of these may be on its way to it.
    kafka.let_fetches_end()
    assert topic.append(fenced(kafka, 0, producer_id=OTHER), acks=1) == appended(1)
    lost = fenced(kafka, 1, b"lost")
    assert topic.append(lost, acks=1) == appended(2)
    assert topic.append(fenced(kafka, 2, b"lost too"), acks=1) == appended(3)
    assert next_sequence(topic) == (0, 2)
    kafka.kill(a)
    kafka.resume(b)
    kafka.until(lambda: topic.leader() == b, "the other to lead")
    kafka.until(lambda: topic.end_as_of(b, topic.leader_epoch()) is not None, "it to know")
    end = topic.end()
    assert end in (1, 2)
    assert next_sequence(topic) == (0, 0)
    assert topic.append(fenced(kafka, 2, b"lost too")) == refused(OUT_OF_ORDER, 0)
    other = fenced(kafka, 1, b"another's")
    assert topic.append(other) == appended(end)
    kafka.start_again(a)
    kafka.until(lambda: topic.in_sync() == 2, "the old leader to be back")
    assert next_sequence(topic, a) == next_sequence(topic, b) == (0, 1)
    topic.move_leader(a)
    assert topic.end() == end + 1
    assert topic.append(lost) == duplicate(end, other), "it was sent again, and another's lies in its place"
    assert b"lost" not in values(topic)


@case("Replicas differ: a resend may be 45 or a duplicate", brokers=2)
def each_replica_has_its_own_memory(kafka: Kafka) -> None:
    """The same resend is a duplicate to one and a gap to the other, which was restarted: 45 does not mean that it is
    not there, and what a leader knew its successor need not know."""
    topic = _two(kafka)
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(3)]
    a, b = topic.leader(), _follower(topic)
    kafka.kill(b)
    kafka.start_again(b)
    kafka.until(lambda: topic.in_sync() == 2, "the follower to be back")
    assert topic.producers(b) == topic.producers(a)
    topic.move_leader(b)
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[2]) == duplicate(2, batches[2])
    topic.move_leader(a)
    assert topic.append(batches[0]) == duplicate(0, batches[0])
