"""Kafka behavior that partition sequencers rely on, one case each. A case runs on real Kafka and on the model broker.

Cases assert error codes, offsets and producer states exactly: the simulation is worth nothing where the two differ.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance.driver import DEFAULTS, Answer, Kafka, ProducerState, Settings, Topic
from tests.support import raw

CORRUPT, UNKNOWN_TOPIC_ID, NOT_LEADER, TIMED_OUT, TOO_LARGE = 2, 100, 6, 7, 10
NOT_ENOUGH_REPLICAS, DENIED, INVALID_TIMESTAMP = 19, 29, 32
OUT_OF_ORDER, WRONG_EPOCH, INVALID_TXN_STATE, INVALID_RECORD, PRODUCER_FENCED = 45, 47, 48, 87, 90
#: The shared producer id of fences. No coordinator has assigned it.
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
    """`fact`: the behavior. `brokers`: replicas of the topic. `expires`: needs brokers that expire producers often."""

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


def unconditional(kafka: Kafka, *values: bytes) -> bytes:
    return raw.batch(*(raw.Record(value, timestamp_ms=kafka.now_ms()) for value in values))


def appended(base_offset: int, log_start_offset: int = 0) -> Answer:
    """A new append, with CreateTime."""
    return Answer(0, base_offset, -1, log_start_offset)


def duplicate(base_offset: int, first: bytes, log_start_offset: int = 0) -> Answer:
    """Distinguished by the timestamp, which is that of the existing batch."""
    return Answer(0, base_offset, timestamp_of(first), log_start_offset)


def refused(error_code: int, log_start_offset: int = -1) -> Answer:
    return Answer(error_code, -1, -1, log_start_offset)


def timestamp_of(batch: bytes) -> int:
    """The newest timestamp of its records."""
    return int(struct.unpack_from(">q", batch, 35)[0])


def next_sequence(topic: Topic, node: int | None = None) -> tuple[int, int] | None:
    """(epoch, last sequence) of the fences."""
    known = topic.producers(node).get(SHARED)
    return None if known is None else (known.epoch, known.last_sequence)


def values(topic: Topic) -> list[bytes | None]:
    return [value for batch in topic.read() for value in batch.values]


# --- duplicates -------------------------------------------------------------------------------------------------------


@case("A producer's last five batches are recognized; older ones get 45")
def last_five_batches_are_recognized(kafka: Kafka) -> None:
    """Each response has its own offset and timestamp. The sixth-last batch is a gap, not a duplicate."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(6)]
    for base in range(1, 6):
        assert topic.append(batches[base]) == duplicate(base, batches[base])
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    assert topic.end() == 6


@case("A sequence gap is refused with 45")
def sequence_gap_is_refused(kafka: Kafka) -> None:
    topic = kafka.create()
    first = fenced(kafka, 0, b"a", b"b")
    assert topic.append(first) == appended(0)
    before = topic.producers()
    assert topic.append(fenced(kafka, 3)) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 1)) == refused(OUT_OF_ORDER, 0)
    assert topic.producers() == before == {SHARED: ProducerState(0, 1, timestamp_of(first), -1)}
    assert topic.append(fenced(kafka, 2)) == appended(2)


@case("An unknown producer may start at any sequence")
def unknown_producer_starts_at_any_sequence(kafka: Kafka) -> None:
    """Fences depend on this leniency."""
    topic = kafka.create()
    assert topic.producers() == {}
    assert topic.append(unconditional(kafka, b"other")) == appended(0)
    assert topic.append(fenced(kafka, 41)) == appended(1)
    assert next_sequence(topic) == (0, 41)
    assert topic.append(fenced(kafka, 43)) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 42)) == appended(2)


@case("With equal sequences, a race's loser gets success; only `log_append_time` differs")
def equal_sequences_are_duplicates_despite_other_records(kafka: Kafka) -> None:
    """The loser gets 0 at its own expected offset. Only the timestamp shows that the batch is another writer's."""
    topic = kafka.create()
    ours = fenced(kafka, 0, b"ours", b"ours")
    theirs = fenced(kafka, 0, b"theirs", b"theirs too", timestamp_ms=timestamp_of(ours) + 1000)
    assert topic.append(ours) == appended(0)
    assert topic.append(theirs) == duplicate(0, ours)
    assert values(topic) == [b"ours", b"ours"]


@case("A duplicate has the same first and last sequence")
def other_record_count_is_no_duplicate(kafka: Kafka) -> None:
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0, b"a", b"b")) == appended(0)
    assert topic.append(fenced(kafka, 0, b"a")) == refused(OUT_OF_ORDER, 0)
    assert topic.append(fenced(kafka, 0, b"a", b"b", b"c")) == refused(OUT_OF_ORDER, 0)
    assert topic.end() == 2


@case("Other producers' batches do not hide a duplicate")
def duplicate_is_found_after_other_producers(kafka: Kafka) -> None:
    """The response has the batch's offset, not the log end."""
    topic = kafka.create()
    first = fenced(kafka, 0)
    assert topic.append(first) == appended(0)
    assert topic.append(unconditional(kafka, b"x", b"y")) == appended(1)
    assert topic.append(fenced(kafka, 9, producer_id=OTHER)) == appended(3)
    assert topic.append(first) == duplicate(0, first)
    assert topic.append(fenced(kafka, 1)) == appended(4)


@case("An unfenced append moves the next sequence to a later offset")
def cached_sequence_offset_accepts_a_wrong_offset(kafka: Kafka) -> None:
    """This needs no race: an unfenced append moves the log end, and the next sequence still fits."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    assert topic.append(unconditional(kafka, b"unfenced")) == appended(1)
    assert topic.append(fenced(kafka, 1)) == appended(2), "expected at 1"


@case("Appends with different sequence offsets both succeed")
def different_sequence_offsets_both_succeed(kafka: Kafka) -> None:
    """Both expect 2, with unconfirmed fences. So all processes must use one sequence offset, or different epochs."""
    topic = kafka.create()
    assert topic.append(unconditional(kafka, b"a", b"b")) == appended(0)
    assert topic.append(fenced(kafka, 2, b"sequence offset 0")) == appended(2)
    assert topic.append(fenced(kafka, 3, b"sequence offset -1")) == appended(3), "expected at 2"


@case("Log end and sequence, read separately, may not match")
def separate_reads_give_a_wrong_sequence_offset(kafka: Kafka) -> None:
    """Another producer appends between the two reads. In the other order, the log end would include that append."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    end = topic.end()
    assert topic.append(fenced(kafka, 0, producer_id=OTHER)) == appended(1)
    known = next_sequence(topic)
    assert known == (0, 0)
    sequence_offset = end - (known[1] + 1)
    assert sequence_offset == 0, "the true one is 1"
    assert topic.append(fenced(kafka, end - sequence_offset)) == appended(2), "expected at 1"


@case("With LogAppendTime, a duplicate looks like a new append")
def log_append_time_hides_duplicates(kafka: Kafka) -> None:
    """A duplicate's response equals that of a new append, byte for byte."""
    topic = kafka.create(Settings(log_append_time=True))
    first = fenced(kafka, 0)
    fresh = topic.append(first)
    assert fresh[:2] == (0, 0)
    assert fresh.log_append_time_ms > 0
    assert topic.append(first) == fresh
    assert topic.append(fenced(kafka, 0, b"theirs")) == fresh
    assert topic.producers()[SHARED].last_timestamp_ms == fresh.log_append_time_ms


@case("So does one with timestamp −1")
def missing_timestamp_hides_duplicates(kafka: Kafka) -> None:
    """A duplicate's response has the batch's timestamp: -1, as for a new append."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0, b"ours", timestamp_ms=-1)) == appended(0)
    assert topic.append(fenced(kafka, 0, b"theirs", timestamp_ms=-1)) == appended(0)
    assert topic.append(fenced(kafka, 0, b"theirs")) == appended(0)
    assert values(topic) == [b"ours"]


@case("Sequence 0 follows 2³¹−1, within a batch too")
def sequences_wrap(kafka: Kafka) -> None:
    topic = kafka.create()
    wrapping = fenced(kafka, LAST_SEQUENCE, b"last", b"first")
    assert topic.append(fenced(kafka, LAST_SEQUENCE - 1)) == appended(0)
    assert topic.append(wrapping) == appended(1)
    assert next_sequence(topic) == (0, 0)
    assert topic.append(wrapping) == duplicate(1, wrapping)
    assert topic.append(fenced(kafka, 1)) == appended(3)
    exactly = kafka.create()
    assert exactly.append(fenced(kafka, LAST_SEQUENCE)) == appended(0)
    assert next_sequence(exactly) == (0, LAST_SEQUENCE)
    assert exactly.append(fenced(kafka, 1)) == refused(OUT_OF_ORDER, 0)
    assert exactly.append(fenced(kafka, 0)) == appended(1)


@case("Unassigned attribute bits survive, unless the broker rewrites the batch")
def unassigned_attributes_survive_unless_rewritten(kafka: Kafka) -> None:
    """Fences keep the instance id in these bits. It is lost if the broker rewrites the batch."""
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
def new_epoch_starts_at_zero_and_fences_the_old(kafka: Kafka) -> None:
    topic = kafka.create()
    old = fenced(kafka, 5)
    assert topic.append(old) == appended(0)
    assert topic.append(fenced(kafka, 6, epoch=1)) == refused(OUT_OF_ORDER, 0)
    assert next_sequence(topic) == (0, 5)
    new = fenced(kafka, 0, epoch=1)
    assert topic.append(new) == appended(1)
    assert topic.append(old) == refused(WRONG_EPOCH, 0), "it is in the log, and was a duplicate before"
    assert topic.append(fenced(kafka, 6)) == refused(WRONG_EPOCH, 0)
    assert topic.append(new) == duplicate(1, new)
    assert topic.append(fenced(kafka, 0, epoch=9)) == appended(2), "epochs may be skipped"
    assert next_sequence(topic) == (9, 0)


@case("An unknown producer may start with any epoch")
def unknown_producer_starts_with_any_epoch(kafka: Kafka) -> None:
    topic = kafka.create()
    assert topic.append(fenced(kafka, 17, epoch=4)) == appended(0)
    assert topic.append(fenced(kafka, 18, epoch=3)) == refused(WRONG_EPOCH, 0)
    assert next_sequence(topic) == (4, 17)


# --- checks before the duplicate check --------------------------------------------------------------------------------


def _limited(kafka: Kafka) -> Topic:
    return kafka.create(Settings(max_message_bytes=500, timestamp_after_max_ms=60_000))


@case("Errors 2, 10, 32, 87 leave the sequence unchanged")
def refused_batch_does_not_change_the_sequence(kafka: Kafka) -> None:
    """With a confirmed fence, pipelined successors meet a gap, as intended."""
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
def unconfirmed_successor_replaces_a_refused_batch(kafka: Kafka) -> None:
    """So with an unconfirmed fence only one append is in flight."""
    topic = _limited(kafka)
    assert topic.append(unconditional(kafka, b"there")) == appended(0)
    wire = topic.connect()
    wire.send(fenced(kafka, 1, b"x" * 500))
    wire.send(fenced(kafka, 2, b"second"))
    assert wire.receive() == refused(TOO_LARGE)
    assert wire.receive() == appended(1), "expected at 2"
    wire.close()
    assert values(topic) == [b"there", b"second"]


@case("Errors 2, 10, 29, 32, 87 precede the duplicate check")
def errors_precede_the_duplicate_check(kafka: Kafka) -> None:
    """Such an error for a resend does not show whether the first attempt was appended."""
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
    kafka.until(lambda: topic.append(there) == refused(DENIED), "the WRITE right to be revoked")
    assert topic.end() == 1


@case("Base offset, size and checksum are checked in this order")
def validation_order_is_fixed(kafka: Kafka) -> None:
    topic = _limited(kafka)
    all_wrong = bytearray(fenced(kafka, 0, b"x" * 500, base_offset=7))
    all_wrong[-1] ^= 1
    assert topic.append(bytes(all_wrong)) == refused(INVALID_RECORD, 0)
    too_large_and_corrupt = bytearray(fenced(kafka, 0, b"x" * 500))
    too_large_and_corrupt[-1] ^= 1
    assert topic.append(bytes(too_large_and_corrupt)) == refused(TOO_LARGE)
    assert topic.producers() == {}


@case("DescribeProducers needs READ; Produce needs WRITE alone")
def describe_producers_needs_read(kafka: Kafka) -> None:
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    topic.deny("READ")

    def denied() -> bool:
        try:
            topic.producers()
        except PermissionError:
            return True
        return False

    kafka.until(denied, "the READ right to be revoked")
    assert topic.append(fenced(kafka, 1)) == appended(1), "WRITE is enough to append"


# --- expiry of producers ----------------------------------------------------------------------------------------------


@case("After a restart only a producer's last batch is recognized")
def restart_keeps_only_the_last_batch(kafka: Kafka) -> None:
    """A resend of an earlier batch gets 45, although it is in the log."""
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
def kill_keeps_only_the_last_batch(kafka: Kafka) -> None:
    """Recovery rebuilds producer states from the log, stores them and starts with them."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(3)]
    kafka.crash()
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[1]) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[2]) == duplicate(2, batches[2])
    assert topic.append(fenced(kafka, 3)) == appended(3)


@case("A restart forgets producers with old record timestamps")
def restart_forgets_producers_with_old_records(kafka: Kafka) -> None:
    """The newest record timestamp counts, not the append time: a confirmed fence can expire."""
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
def broker_computes_the_newest_timestamp(kafka: Kafka) -> None:
    topic = kafka.create()
    old = kafka.now_ms() - 2 * DAY_MS
    lying = bytearray(fenced(kafka, 0, timestamp_ms=old))
    struct.pack_into(">q", lying, 35, kafka.now_ms())
    raw.sign(lying)
    assert topic.append(bytes(lying)) == appended(0)
    assert topic.producers() == {SHARED: ProducerState(0, 0, old, -1)}


@case("Producers also expire without a restart", expires=True)
def producers_expire_without_a_restart(kafka: Kafka) -> None:
    """By default, brokers expire producers every ten minutes."""
    topic = kafka.create()
    old = fenced(kafka, 0, b"old", timestamp_ms=kafka.now_ms() - 2 * DAY_MS)
    young = fenced(kafka, 5, b"young", producer_id=OTHER, timestamp_ms=kafka.now_ms() - DAY_MS // 2)
    assert topic.append(young) == appended(0)
    assert topic.append(old) == appended(1)
    kafka.expire_producers()
    kafka.until(lambda: SHARED not in topic.producers(), "the old producer to expire")
    assert topic.append(old) == appended(2), "twice"
    assert topic.append(young) == duplicate(0, young)


@case("If all records are deleted, a restart forgets the producer")
def producer_of_deleted_records_is_known_until_restart(kafka: Kafka) -> None:
    """The records of a duplicate may be unreadable. After a restart it is appended again."""
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
def producer_is_known_while_other_records_remain(kafka: Kafka) -> None:
    """A shutdown stores all producers. A start ignores them only if no record is left."""
    topic = kafka.create()
    ours = fenced(kafka, 0)
    assert topic.append(ours) == appended(0)
    assert topic.append(unconditional(kafka, b"remains")) == appended(1)
    topic.delete_records(1)
    kafka.restart()
    assert next_sequence(topic) == (0, 0)
    assert topic.append(ours) == duplicate(0, ours, 1)


@case("After a kill, deleted records may be back")
def kill_may_restore_deleted_records(kafka: Kafka) -> None:
    """The log start is stored once a minute. The producer is known again, too."""
    topic = kafka.create()
    ours = fenced(kafka, 0)
    assert topic.append(ours) == appended(0)
    assert topic.append(unconditional(kafka, b"remains")) == appended(1)
    topic.delete_records(1)
    kafka.crash()
    start = topic.start()
    assert start in (0, 1)
    assert topic.append(ours) == duplicate(0, ours, start)


@case("A recreated topic refuses stale batches only by id (100)")
def recreated_topic_has_another_id_and_no_producers(kafka: Kafka) -> None:
    """By name, a stale batch is appended to the new topic at 0. By id, it is refused."""
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
def request_is_appended_after_its_connection_closed(kafka: Kafka) -> None:
    """So no read is a barrier: the log end moves after the client has disconnected."""
    topic = kafka.create()
    (node,) = topic.replicas()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    wire = topic.connect()
    wire.send(unconditional(kafka, b"connected"))
    assert wire.receive() == appended(1)
    kafka.pause(node)
    wire.send(fenced(kafka, 1, b"late"))
    wire.close()
    kafka.resume(node)
    kafka.until(lambda: topic.end() == 3, "the queued append")
    assert next_sequence(topic) == (0, 1)
    assert topic.append(fenced(kafka, 1, b"another's")).base_offset == 2, "a duplicate of the late one"
    assert [b.values for b in topic.read()][-1] == (b"late",)


@case("Of a late request and its competitor, one is a duplicate")
def sequence_decides_between_late_request_and_competitor(kafka: Kafka) -> None:
    """Two appends expect the same offset, and one is queued on a closed connection. In either order, one wins."""
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


def _control(batches: list[raw.Logged]) -> list[tuple[int, int, int]]:
    return [(b.base_offset, b.producer_id, b.producer_epoch) for b in batches if b.is_control]


def _marker_v1(kafka: Kafka, *, commit: bool) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    first = fenced(kafka, 0, producer_id=producer.producer_id, epoch=producer.epoch, transactional=True)
    assert producer.append(topic, first) == appended(0)
    known = topic.producers()[producer.producer_id]
    assert known == ProducerState(producer.epoch, 0, timestamp_of(first), 0), "open since offset 0"
    assert topic.append(unconditional(kafka, b"during it")) == appended(1)
    producer.end(commit=commit)
    kafka.until(lambda: topic.end() == 3, "the marker, after EndTxn was answered")
    kafka.until(lambda: topic.high_watermark() == 3, "the marker to be committed")
    assert _control(topic.read()) == [(2, producer.producer_id, producer.epoch)]
    known = topic.producers()[producer.producer_id]
    assert (known.epoch, known.last_sequence, known.transaction_start) == (producer.epoch, 0, -1)
    assert producer.append(topic, first) == refused(INVALID_TXN_STATE), (
        "the transaction check precedes the duplicate check"
    )
    assert topic.append(unconditional(kafka, b"after it")) == appended(3)


@case("A commit marker takes an offset, after EndTxn is answered")
def commit_marker_takes_an_offset(kafka: Kafka) -> None:
    _marker_v1(kafka, commit=True)


@case("An abort marker too")
def abort_marker_takes_an_offset(kafka: Kafka) -> None:
    _marker_v1(kafka, commit=False)


@case("In transactions v1, a partition without records gets its marker")
def added_partition_without_records_gets_a_marker(kafka: Kafka) -> None:
    """The log end moves, although this producer appended nothing."""
    topic = kafka.create()
    assert topic.append(fenced(kafka, 0)) == appended(0)
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    assert (topic.end(), set(topic.producers())) == (1, {SHARED})
    producer.end(commit=False)
    kafka.until(lambda: topic.end() == 2, "the marker")
    assert next_sequence(topic) == (0, 0), "the fence sequence is unchanged"
    assert topic.append(fenced(kafka, 1)) == appended(2), "expected at 1"
    known = topic.producers()[producer.producer_id]
    assert (known.epoch, known.last_sequence, known.transaction_start) == (producer.epoch, -1, -1)
    kafka.until(lambda: topic.high_watermark() == 3, "all to be committed")
    assert _control(topic.read()) == [(1, producer.producer_id, producer.epoch)]


@case("A coordinator lists a partition until its marker is written")
def coordinator_lists_partition_until_its_marker(kafka: Kafka) -> None:
    """So a log end read after the partition is no longer listed includes the marker."""
    written, stranded = kafka.create(), kafka.create()
    producer = kafka.transactional(v2=False)
    for number in range(3):
        for topic in (written, stranded):
            assert not producer.is_on(topic)
            producer.add(topic)
            assert producer.is_on(topic)
        sender = {"producer_id": producer.producer_id, "epoch": producer.epoch}
        assert producer.append(written, fenced(kafka, number, transactional=True, **sender)) == appended(2 * number)
        producer.end(commit=bool(number % 2))
        for topic, end in ((written, 2 * number + 2), (stranded, number + 1)):

            def is_over(topic: Topic = topic) -> bool:
                return not producer.is_on(topic)

            kafka.until(is_over, "it to be unlisted")
            assert topic.end() == end


@case("A producer known only by a marker starts at 0")
def producer_known_by_marker_starts_at_zero(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    producer.end(commit=True)
    kafka.until(lambda: topic.end() == 1, "the marker")
    producer.add(topic)
    sender = {"producer_id": producer.producer_id, "epoch": producer.epoch}
    assert producer.append(topic, fenced(kafka, 4, transactional=True, **sender)) == refused(OUT_OF_ORDER, 0)
    assert producer.append(topic, fenced(kafka, 0, transactional=True, **sender)) == appended(1)


@case("A transactional batch for a partition not added gets 48")
def transactional_batch_needs_its_partition_added(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    sender = {"producer_id": producer.producer_id, "epoch": producer.epoch}
    assert producer.append(topic, fenced(kafka, 0, transactional=True, **sender)) == refused(INVALID_TXN_STATE)
    assert (topic.end(), topic.producers()) == (0, {})


@case("In v2, unknown producers start at 0; ends bump the epoch")
def transactions_v2_start_at_zero_and_bump_epochs(kafka: Kafka) -> None:
    """The marker has the next epoch, and unknown producers must start at 0."""
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
def transaction_states(kafka: Kafka) -> None:
    for v2 in (False, True):
        topic = kafka.create()
        producer = kafka.transactional(v2=v2)
        assert producer.state() == "Empty"
        for commit, end in ((True, 2), (False, 4)):
            producer.add(topic)
            sender = {"producer_id": producer.producer_id, "epoch": producer.epoch}
            sequence = 0 if v2 or commit else 1
            assert producer.append(topic, fenced(kafka, sequence, transactional=True, **sender)) == appended(end - 2)
            assert producer.state() == "Ongoing"
            producer.end(commit=commit)
            after = "CompleteCommit" if commit else "CompleteAbort"
            assert producer.state() in (after.replace("Complete", "Prepare"), after)
            kafka.until(lambda producer=producer, after=after: producer.state() == after, after)
            assert topic.end() == end


@case("A repeated EndTxn succeeds; a contrary one gets 48, another epoch 90")
def repeated_end_txn(kafka: Kafka) -> None:
    """So a commit whose response was lost can be repeated (transactions v1)."""
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    for commit in (True, False):
        assert producer.say_end(producer.epoch, commit=commit) == INVALID_TXN_STATE, "nothing was begun"
    for number, commit in enumerate((True, False)):
        producer.add(topic)
        assert producer.say_end(producer.epoch + 1, commit=commit) == PRODUCER_FENCED
        for _ in range(2):
            assert producer.say_end(producer.epoch, commit=commit) == 0
        assert producer.say_end(producer.epoch, commit=not commit) == INVALID_TXN_STATE
        assert topic.end() == number + 1


@case("In v2, EndTxn repeats with the epoch that it ended")
def repeated_end_txn_v2(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=True)
    assert producer.say_end(producer.epoch, commit=True) == INVALID_TXN_STATE, "nothing was begun"
    for end in (2, 4):
        sender = {"producer_id": producer.producer_id, "epoch": producer.epoch}
        assert producer.append(topic, fenced(kafka, 0, transactional=True, **sender)) == appended(end - 2)
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


def _follower_replica(topic: Topic) -> int:
    leader = topic.leader()
    return next(node for node in topic.replicas() if node != leader)


def _two(kafka: Kafka, min_isr: int = 1) -> Topic:
    return kafka.create(Settings(replicas=2, min_isr=min_isr))


@case("OffsetForLeaderEpoch returns the log end, ListOffsets the high watermark", brokers=2)
def log_end_exceeds_the_high_watermark(kafka: Kafka) -> None:
    """Fetch also ends at the high watermark."""
    topic = _two(kafka)
    assert (topic.end(), topic.high_watermark()) == (0, 0)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    for sequence in (1, 2):
        assert topic.append(fenced(kafka, sequence), acks=1) == appended(sequence)
    assert (topic.end(), topic.high_watermark()) == (3, 1)
    assert values(topic) == [b"0"]
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.high_watermark() == 3, "the follower replica to catch up")
    assert len(values(topic)) == 3


@case("With too few in-sync replicas: 19 before the append, 7 after", brokers=2)
def too_few_in_sync_replicas(kafka: Kafka) -> None:
    """19 precedes the duplicate check. 7 has the offset of the appended batch."""
    topic = _two(kafka, min_isr=2)
    first, waits = fenced(kafka, 0), fenced(kafka, 1)
    assert topic.append(first) == appended(0)
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    assert topic.append(waits, timeout_ms=300) == Answer(TIMED_OUT, 1, -1, 0)
    assert (topic.end(), topic.high_watermark()) == (2, 1)
    kafka.until(
        lambda: topic.append(waits, timeout_ms=100) == refused(NOT_ENOUGH_REPLICAS, 0),
        "the follower replica to leave the in-sync replicas",
    )
    assert topic.append(fenced(kafka, 2)) == refused(NOT_ENOUGH_REPLICAS, 0)
    assert topic.append(fenced(kafka, 2), acks=1) == appended(2), "acks=1 ignores the other replicas"
    assert (topic.end(), topic.high_watermark(), next_sequence(topic)) == (3, 1, (0, 2))
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.in_sync() == 2 and topic.high_watermark() == 3, "the follower replica to catch up")
    assert topic.append(waits) == duplicate(1, waits)


@case("A duplicate is answered once it is committed", brokers=2)
def duplicate_waits_for_replicas(kafka: Kafka) -> None:
    topic = _two(kafka, min_isr=2)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    waits = fenced(kafka, 1)
    assert topic.append(waits, timeout_ms=200) == Answer(TIMED_OUT, 1, -1, 0)
    assert topic.append(waits, timeout_ms=200) == Answer(TIMED_OUT, 1, timestamp_of(waits), 0)
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.high_watermark() == 2, "the follower replica to catch up")
    assert topic.append(waits) == duplicate(1, waits)


@case("A connection's later appends wait for an earlier one's replicas", brokers=2)
def later_appends_wait_for_earlier_replication(kafka: Kafka) -> None:
    """Later requests of the connection are not appended yet. Other connections are served."""
    topic = _two(kafka, min_isr=2)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    wire = topic.connect()
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    wire.send(fenced(kafka, 1), timeout_ms=4000)
    wire.send(fenced(kafka, 2), acks=1)
    kafka.until(lambda: topic.end() == 2, "the first to be appended")
    assert topic.append(unconditional(kafka, b"other"), acks=1) == appended(2)
    assert topic.end() == 3
    assert wire.receive() == Answer(TIMED_OUT, 1, -1, 0)
    assert wire.receive() == appended(3)
    wire.close()
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.in_sync() == 2, "the follower replica to be back")


@case("A new leader recognizes five batches; the old one answers 6", brokers=2)
def new_leader_recognizes_five_batches(kafka: Kafka) -> None:
    """A broker queried with another leader epoch does not report its log end."""
    topic = _two(kafka)
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(6)]
    a, b = topic.leader(), _follower_replica(topic)
    epoch = topic.leader_epoch()
    assert (topic.end_as_of(a, epoch), topic.end_as_of(b, epoch)) == (6, None)
    assert topic.end_as_of(a, epoch + 1) is None
    kafka.until(lambda: topic.producers(b) == topic.producers(a), "the follower replica to know the producer")
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
def truncation_removes_log_and_sequence_together(kafka: Kafka) -> None:
    """Batches that only the dead leader had are lost, and their sequences too, even after it returns."""
    topic = _two(kafka)
    assert topic.append(fenced(kafka, 0)) == appended(0)
    a, b = topic.leader(), _follower_replica(topic)
    kafka.pause(b)
    # A pending fetch of the follower could still return the first of these.
    kafka.let_fetches_end()
    assert topic.append(fenced(kafka, 0, producer_id=OTHER), acks=1) == appended(1)
    lost = fenced(kafka, 1, b"lost")
    assert topic.append(lost, acks=1) == appended(2)
    assert topic.append(fenced(kafka, 2, b"lost too"), acks=1) == appended(3)
    assert next_sequence(topic) == (0, 2)
    kafka.kill(a)
    kafka.resume(b)
    kafka.until(lambda: topic.leader() == b, "the other to lead")
    kafka.until(lambda: topic.end_as_of(b, topic.leader_epoch()) is not None, "the new leader to serve")
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
    assert topic.append(lost) == duplicate(end, other), "a resend finds another batch at that offset"
    assert b"lost" not in values(topic)


@case("Replicas differ: a resend may be 45 or a duplicate", brokers=2)
def replicas_remember_different_batches(kafka: Kafka) -> None:
    """A resend is a duplicate on one replica and a gap on the restarted one: 45 does not prove its absence."""
    topic = _two(kafka)
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    assert [topic.append(each) for each in batches] == [appended(base) for base in range(3)]
    a, b = topic.leader(), _follower_replica(topic)
    kafka.kill(b)
    kafka.start_again(b)
    kafka.until(lambda: topic.in_sync() == 2, "the follower replica to be back")
    assert topic.producers(b) == topic.producers(a)
    topic.move_leader(b)
    assert topic.append(batches[0]) == refused(OUT_OF_ORDER, 0)
    assert topic.append(batches[2]) == duplicate(2, batches[2])
    topic.move_leader(a)
    assert topic.append(batches[0]) == duplicate(0, batches[0])
