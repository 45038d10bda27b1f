"""Cases of appends to one partition with one replica."""

from __future__ import annotations

import struct

from fencepost_proxy.preflight.conformance.batches import sign
from fencepost_proxy.preflight.conformance.case import (
    ALLOWED_FOR,
    CORRUPT,
    DENIED,
    INVALID_RECORD,
    INVALID_TIMESTAMP,
    LAST_SEQUENCE,
    OUT_OF_ORDER,
    TOO_LARGE,
    WRONG_EPOCH,
    Control,
    appended,
    case,
    duplicate,
    fenced,
    holds,
    next_sequence,
    refused,
    same,
    timestamp_of,
    unconditional,
    values,
)
from fencepost_proxy.preflight.conformance.driver import DEFAULTS, Kafka, ProducerState, Settings, Topic

_GZIP = Settings(gzip=True)
_INSTANCE_ID = 0x5A00

# --- duplicates -------------------------------------------------------------------------------------------------------


@case("A producer's last five batches are recognized; older ones get 45")
def last_five_batches_are_recognized(kafka: Kafka) -> None:
    """Each response has its own offset and timestamp. The sixth-last batch is a gap, not a duplicate."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    same([topic.append(each) for each in batches], [appended(base) for base in range(6)])
    for base in range(1, 6):
        same(topic.append(batches[base]), duplicate(base, batches[base]))
    same(topic.append(batches[0]), refused(OUT_OF_ORDER, 0))
    same(topic.end(), 6)


@case("A sequence gap is refused with 45")
def sequence_gap_is_refused(kafka: Kafka) -> None:
    topic = kafka.create()
    first = fenced(kafka, 0, b"a", b"b")
    same(topic.append(first), appended(0))
    before = topic.producers()
    same(topic.append(fenced(kafka, 3)), refused(OUT_OF_ORDER, 0))
    same(topic.append(fenced(kafka, 1)), refused(OUT_OF_ORDER, 0))
    same(topic.producers(), {kafka.shared_id: ProducerState(0, 1, timestamp_of(first), -1)})
    same(before, {kafka.shared_id: ProducerState(0, 1, timestamp_of(first), -1)})
    same(topic.append(fenced(kafka, 2)), appended(2))


@case("An unknown producer may start at any sequence")
def unknown_producer_starts_at_any_sequence(kafka: Kafka) -> None:
    """Fences depend on this leniency."""
    topic = kafka.create()
    same(topic.producers(), {})
    same(topic.append(unconditional(kafka, b"other")), appended(0))
    same(topic.append(fenced(kafka, 41)), appended(1))
    same(next_sequence(kafka, topic), (0, 41))
    same(topic.append(fenced(kafka, 43)), refused(OUT_OF_ORDER, 0))
    same(topic.append(fenced(kafka, 42)), appended(2))


@case("With equal sequences, a race's loser gets success; only `log_append_time` differs")
def equal_sequences_are_duplicates_despite_other_records(kafka: Kafka) -> None:
    """The loser gets 0 at its own expected offset. Only the timestamp shows that the batch is another writer's."""
    topic = kafka.create()
    ours = fenced(kafka, 0, b"ours", b"ours")
    theirs = fenced(kafka, 0, b"theirs", b"theirs too", timestamp_ms=timestamp_of(ours) + 1000)
    same(topic.append(ours), appended(0))
    same(topic.append(theirs), duplicate(0, ours))
    same(values(topic), [b"ours", b"ours"])


@case("A duplicate has the same first and last sequence")
def other_record_count_is_no_duplicate(kafka: Kafka) -> None:
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0, b"a", b"b")), appended(0))
    same(topic.append(fenced(kafka, 0, b"a")), refused(OUT_OF_ORDER, 0))
    same(topic.append(fenced(kafka, 0, b"a", b"b", b"c")), refused(OUT_OF_ORDER, 0))
    same(topic.end(), 2)


@case("Other producers' batches do not hide a duplicate")
def duplicate_is_found_after_other_producers(kafka: Kafka) -> None:
    """The response has the batch's offset, not the log end."""
    topic = kafka.create()
    first = fenced(kafka, 0)
    same(topic.append(first), appended(0))
    same(topic.append(unconditional(kafka, b"x", b"y")), appended(1))
    same(topic.append(fenced(kafka, 9, producer_id=kafka.other_id)), appended(3))
    same(topic.append(first), duplicate(0, first))
    same(topic.append(fenced(kafka, 1)), appended(4))


@case("An unfenced append moves the next sequence to a later offset", ALLOWED_FOR)
def cached_sequence_offset_accepts_a_wrong_offset(kafka: Kafka) -> None:
    """This needs no race: an unfenced append moves the log end, and the next sequence still fits."""
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0)), appended(0))
    same(topic.append(unconditional(kafka, b"unfenced")), appended(1))
    same(topic.append(fenced(kafka, 1)), appended(2), "expected at 1")


@case("Appends with different sequence offsets both succeed", ALLOWED_FOR)
def different_sequence_offsets_both_succeed(kafka: Kafka) -> None:
    """Both expect 2, with unconfirmed fences. So all processes must use one sequence offset, or different epochs."""
    topic = kafka.create()
    same(topic.append(unconditional(kafka, b"a", b"b")), appended(0))
    same(topic.append(fenced(kafka, 2, b"sequence offset 0")), appended(2))
    same(topic.append(fenced(kafka, 3, b"sequence offset -1")), appended(3), "expected at 2")


@case("Log end and sequence, read separately, may not match", ALLOWED_FOR)
def separate_reads_give_a_wrong_sequence_offset(kafka: Kafka) -> None:
    """Another producer appends between the two reads. In the other order, the log end would include that append."""
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0)), appended(0))
    end = topic.end()
    same(topic.append(fenced(kafka, 0, producer_id=kafka.other_id)), appended(1))
    known = next_sequence(kafka, topic)
    same(known, (0, 0))
    assert known is not None
    sequence_offset = end - (known[1] + 1)
    same(sequence_offset, 0, "the true one is 1")
    same(topic.append(fenced(kafka, end - sequence_offset)), appended(2), "expected at 1")


@case("With LogAppendTime, a duplicate looks like a new append", ALLOWED_FOR)
def log_append_time_hides_duplicates(kafka: Kafka) -> None:
    """A duplicate's response equals that of a new append, byte for byte."""
    topic = kafka.create(Settings(log_append_time=True))
    first = fenced(kafka, 0)
    fresh = topic.append(first)
    same(fresh[:2], (0, 0))
    holds(fresh.log_append_time_ms > 0, "the answer has an append time")
    same(topic.append(first), fresh)
    same(topic.append(fenced(kafka, 0, b"theirs")), fresh)
    same(topic.producers()[kafka.shared_id].last_timestamp_ms, fresh.log_append_time_ms)


@case("So does one with timestamp −1", ALLOWED_FOR)
def missing_timestamp_hides_duplicates(kafka: Kafka) -> None:
    """A duplicate's response has the batch's timestamp: -1, as for a new append."""
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0, b"ours", timestamp_ms=-1)), appended(0))
    same(topic.append(fenced(kafka, 0, b"theirs", timestamp_ms=-1)), appended(0))
    same(topic.append(fenced(kafka, 0, b"theirs")), appended(0))
    same(values(topic), [b"ours"])


@case("Sequence 0 follows 2³¹−1, within a batch too")
def sequences_wrap(kafka: Kafka) -> None:
    topic = kafka.create()
    wrapping = fenced(kafka, LAST_SEQUENCE, b"last", b"first")
    same(topic.append(fenced(kafka, LAST_SEQUENCE - 1)), appended(0))
    same(topic.append(wrapping), appended(1))
    same(next_sequence(kafka, topic), (0, 0))
    same(topic.append(wrapping), duplicate(1, wrapping))
    same(topic.append(fenced(kafka, 1)), appended(3))
    exactly = kafka.create()
    same(exactly.append(fenced(kafka, LAST_SEQUENCE)), appended(0))
    same(next_sequence(kafka, exactly), (0, LAST_SEQUENCE))
    same(exactly.append(fenced(kafka, 1)), refused(OUT_OF_ORDER, 0))
    same(exactly.append(fenced(kafka, 0)), appended(1))


@case("Unassigned attribute bits survive")
def unassigned_attributes_survive(kafka: Kafka) -> None:
    """Fences keep the instance id in these bits."""
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0, b"a", attributes=_INSTANCE_ID)), appended(0))
    same([batch.attributes for batch in topic.read()], [_INSTANCE_ID])


@case("They do not if the broker rewrites the batch", ALLOWED_FOR)
def rewritten_batches_lose_unassigned_attributes(kafka: Kafka) -> None:
    """It rewrites for LogAppendTime, for another compression, and to correct a timestamp."""
    as_sent, timed, repacked = (kafka.create(each) for each in (DEFAULTS, Settings(log_append_time=True), _GZIP))
    for topic in (timed, repacked):
        same(topic.append(fenced(kafka, 0, b"a", attributes=_INSTANCE_ID)).error_code, 0)
    lying = bytearray(fenced(kafka, 0, b"a", attributes=_INSTANCE_ID))
    struct.pack_into(">q", lying, 35, kafka.now_ms() + 5000)
    sign(lying)
    same(as_sent.append(bytes(lying)), appended(0))
    same([batch.attributes for batch in as_sent.read()], [0])
    same([batch.attributes for batch in timed.read()], [0x08])
    same([batch.attributes for batch in repacked.read()], [0x01])
    same(values(repacked), [b"a"])


@case("Acknowledged records are read back as they were sent, with their headers")
def acknowledged_records_are_read_back(kafka: Kafka) -> None:
    """The resolver of unknown outcomes and the Spark sink compare them. Headers have write ids and commit tags."""
    topic = kafka.create()
    sent = fenced(kafka, 0, b"a", b"", b"b" * 300, headers=[(b"fencepost-write-id", b"\x00\xff"), (b"", b"")])
    same(topic.append(sent), appended(0))
    (found,) = topic.read()
    same(
        (found.base_offset, found.producer_id, found.producer_epoch, found.payload), (0, kafka.shared_id, 0, sent[61:])
    )
    same(topic.high_watermark(), 3)


# --- epochs -----------------------------------------------------------------------------------------------------------


@case("A new epoch starts at 0 and fences the old (47)")
def new_epoch_starts_at_zero_and_fences_the_old(kafka: Kafka) -> None:
    topic = kafka.create()
    old = fenced(kafka, 5)
    same(topic.append(old), appended(0))
    same(topic.append(fenced(kafka, 6, epoch=1)), refused(OUT_OF_ORDER, 0))
    same(next_sequence(kafka, topic), (0, 5))
    new = fenced(kafka, 0, epoch=1)
    same(topic.append(new), appended(1))
    same(topic.append(old), refused(WRONG_EPOCH, 0), "it is in the log, and was a duplicate before")
    same(topic.append(fenced(kafka, 6)), refused(WRONG_EPOCH, 0))
    same(topic.append(new), duplicate(1, new))
    same(topic.append(fenced(kafka, 0, epoch=9)), appended(2), "epochs may be skipped")
    same(next_sequence(kafka, topic), (9, 0))


@case("An unknown producer may start with any epoch")
def unknown_producer_starts_with_any_epoch(kafka: Kafka) -> None:
    topic = kafka.create()
    same(topic.append(fenced(kafka, 17, epoch=4)), appended(0))
    same(topic.append(fenced(kafka, 18, epoch=3)), refused(WRONG_EPOCH, 0))
    same(next_sequence(kafka, topic), (4, 17))


# --- checks before the duplicate check --------------------------------------------------------------------------------


def _limited(kafka: Kafka) -> Topic:
    return kafka.create(Settings(max_message_bytes=500, timestamp_after_max_ms=60_000))


@case("Errors 2, 10, 32, 87 leave the sequence unchanged")
def refused_batch_does_not_change_the_sequence(kafka: Kafka) -> None:
    """With a confirmed fence, pipelined successors meet a gap, as intended."""
    topic = _limited(kafka)
    same(topic.append(fenced(kafka, 0)), appended(0))
    before = topic.producers()
    corrupt = bytearray(fenced(kafka, 1))
    corrupt[-1] ^= 1
    same(topic.append(bytes(corrupt)), refused(CORRUPT))
    same(topic.append(fenced(kafka, 1, b"x" * 500)), refused(TOO_LARGE))
    same(topic.append(fenced(kafka, 1, timestamp_ms=kafka.now_ms() + 600_000)), refused(INVALID_TIMESTAMP, 0))
    same(topic.append(fenced(kafka, 1, base_offset=1)), refused(INVALID_RECORD, 0))
    same(topic.producers(), before)
    same(topic.append(fenced(kafka, 2)), refused(OUT_OF_ORDER, 0))
    same(topic.append(fenced(kafka, 1)), appended(1))


@case("While unconfirmed, a pipelined append may replace a refused one", ALLOWED_FOR)
def unconfirmed_successor_replaces_a_refused_batch(kafka: Kafka) -> None:
    """So with an unconfirmed fence only one append is in flight."""
    topic = _limited(kafka)
    same(topic.append(unconditional(kafka, b"there")), appended(0))
    wire = topic.connect()
    wire.send(fenced(kafka, 1, b"x" * 500))
    wire.send(fenced(kafka, 2, b"second"))
    same(wire.receive(), refused(TOO_LARGE))
    same(wire.receive(), appended(1), "expected at 2")
    wire.close()
    same(values(topic), [b"there", b"second"])


@case("Errors 2, 10, 32, 87 precede the duplicate check", ALLOWED_FOR)
def errors_precede_the_duplicate_check(kafka: Kafka) -> None:
    """Such an error for a resend does not show whether the first attempt was appended."""
    topic = _limited(kafka)
    there = fenced(kafka, 0, b"a")
    same(topic.append(there), appended(0))
    again = fenced(kafka, 0, b"a", timestamp_ms=kafka.now_ms() + 600_000)
    same(topic.append(again), refused(INVALID_TIMESTAMP, 0))
    same(topic.append(fenced(kafka, 0, b"x" * 500)), refused(TOO_LARGE))
    corrupt = bytearray(there)
    corrupt[-1] ^= 1
    same(topic.append(bytes(corrupt)), refused(CORRUPT))
    same(topic.append(fenced(kafka, 0, b"a", base_offset=7)), refused(INVALID_RECORD, 0))
    same(topic.append(there), duplicate(0, there))
    same(topic.end(), 1)


@case("So does 29", ALLOWED_FOR, control=Control.ACLS)
def write_right_precedes_the_duplicate_check(kafka: Kafka) -> None:
    topic = kafka.create()
    there = fenced(kafka, 0, b"a")
    same(topic.append(there), appended(0))
    topic.deny("WRITE")
    kafka.until(lambda: topic.append(there) == refused(DENIED), "the WRITE right to be revoked")
    same(topic.end(), 1)


@case("Base offset, size and checksum are checked in this order", ALLOWED_FOR)
def validation_order_is_fixed(kafka: Kafka) -> None:
    topic = _limited(kafka)
    all_wrong = bytearray(fenced(kafka, 0, b"x" * 500, base_offset=7))
    all_wrong[-1] ^= 1
    same(topic.append(bytes(all_wrong)), refused(INVALID_RECORD, 0))
    too_large_and_corrupt = bytearray(fenced(kafka, 0, b"x" * 500))
    too_large_and_corrupt[-1] ^= 1
    same(topic.append(bytes(too_large_and_corrupt)), refused(TOO_LARGE))
    same(topic.producers(), {})


@case("DescribeProducers needs READ; Produce needs WRITE alone", ALLOWED_FOR, control=Control.ACLS)
def describe_producers_needs_read(kafka: Kafka) -> None:
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0)), appended(0))
    topic.deny("READ")

    def denied() -> bool:
        try:
            topic.producers()
        except PermissionError:
            return True
        return False

    kafka.until(denied, "the READ right to be revoked")
    same(topic.append(fenced(kafka, 1)), appended(1), "WRITE is enough to append")


# --- connections ------------------------------------------------------------------------------------------------------


@case("A request may be appended after its connection closed", ALLOWED_FOR, control=Control.STOPS)
def request_is_appended_after_its_connection_closed(kafka: Kafka) -> None:
    """So no read is a barrier: the log end moves after the client has disconnected."""
    topic = kafka.create()
    (node,) = topic.replicas()
    same(topic.append(fenced(kafka, 0)), appended(0))
    wire = topic.connect()
    wire.send(unconditional(kafka, b"connected"))
    same(wire.receive(), appended(1))
    kafka.pause(node)
    wire.send(fenced(kafka, 1, b"late"))
    wire.close()
    kafka.resume(node)
    kafka.until(lambda: topic.end() == 3, "the queued append")
    same(next_sequence(kafka, topic), (0, 1))
    same(topic.append(fenced(kafka, 1, b"another's")).base_offset, 2, "a duplicate of the late one")
    same([b.values for b in topic.read()][-1], (b"late",))


@case("Of a late request and its competitor, one is a duplicate", control=Control.STOPS)
def sequence_decides_between_late_request_and_competitor(kafka: Kafka) -> None:
    """Two appends expect the same offset, and one is queued on a closed connection. In either order, one wins."""
    topic = kafka.create()
    (node,) = topic.replicas()
    late = topic.connect()
    late.send(fenced(kafka, 0, timestamp_ms=kafka.now_ms() - 5))
    same(late.receive(), appended(0))
    other = topic.connect()
    kafka.pause(node)
    late.send(fenced(kafka, 1, b"late", timestamp_ms=kafka.now_ms() - 5))
    late.close()
    other.send(fenced(kafka, 1, b"other"))
    kafka.resume(node)
    answer = other.receive()
    kafka.until(lambda: topic.end() == 2, "one of them")
    won = answer.log_append_time_ms == -1
    same((answer.error_code, answer.base_offset), (0, 1))
    same(values(topic), [b"0", b"other" if won else b"late"])


@case("A connection's requests are handled in order")
def requests_of_one_connection_are_handled_in_order(kafka: Kafka) -> None:
    topic = kafka.create()
    wire = topic.connect()
    for sequence in (3, 4, 6, 5):
        wire.send(fenced(kafka, sequence))
    answers = [wire.receive() for _ in range(4)]
    same(answers, [appended(0), appended(1), refused(OUT_OF_ORDER, 0), appended(2)])
    wire.close()
