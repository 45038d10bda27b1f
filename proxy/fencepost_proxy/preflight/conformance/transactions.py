"""Cases of transactions, v1 and v2."""

from __future__ import annotations

from fencepost_proxy.preflight.conformance.batches import Logged
from fencepost_proxy.preflight.conformance.case import (
    ALLOWED_FOR,
    CLAIMS,
    INVALID_TXN_STATE,
    MARKERS,
    OUT_OF_ORDER,
    PRODUCER_FENCED,
    TRANSACTIONS,
    WRONG_EPOCH,
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
)
from fencepost_proxy.preflight.conformance.driver import Kafka, ProducerState, Topic, Transaction


def _control(batches: list[Logged]) -> list[tuple[int, int, int]]:
    return [(b.base_offset, b.producer_id, b.producer_epoch) for b in batches if b.is_control]


def _sent_by(kafka: Kafka, producer: Transaction, sequence: int) -> bytes:
    return fenced(kafka, sequence, producer_id=producer.producer_id, epoch=producer.epoch, transactional=True)


def _marker_v1(kafka: Kafka, *, commit: bool) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    first = _sent_by(kafka, producer, 0)
    same(producer.append(topic, first), appended(0))
    known = topic.producers()[producer.producer_id]
    same(known, ProducerState(producer.epoch, 0, timestamp_of(first), 0), "open since offset 0")
    same(topic.append(unconditional(kafka, b"during it")), appended(1))
    producer.end(commit=commit)
    kafka.until(lambda: topic.end() == 3, "the marker, after EndTxn was answered")
    kafka.until(lambda: topic.high_watermark() == 3, "the marker to be committed")
    same(_control(topic.read()), [(2, producer.producer_id, producer.epoch)])
    known = topic.producers()[producer.producer_id]
    same((known.epoch, known.last_sequence, known.transaction_start), (producer.epoch, 0, -1))
    same(
        producer.append(topic, first), refused(INVALID_TXN_STATE), "the transaction check precedes the duplicate check"
    )
    same(topic.append(unconditional(kafka, b"after it")), appended(3))


@case("A commit marker takes an offset, after EndTxn is answered", MARKERS)
def commit_marker_takes_an_offset(kafka: Kafka) -> None:
    _marker_v1(kafka, commit=True)


@case("An abort marker too", MARKERS)
def abort_marker_takes_an_offset(kafka: Kafka) -> None:
    _marker_v1(kafka, commit=False)


@case("In transactions v1, a partition without records gets its marker", ALLOWED_FOR)
def added_partition_without_records_gets_a_marker(kafka: Kafka) -> None:
    """The log end moves, although this producer appended nothing."""
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0)), appended(0))
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    same((topic.end(), set(topic.producers())), (1, {kafka.shared_id}))
    producer.end(commit=False)
    kafka.until(lambda: topic.end() == 2, "the marker")
    same(next_sequence(kafka, topic), (0, 0), "the fence sequence is unchanged")
    same(topic.append(fenced(kafka, 1)), appended(2), "expected at 1")
    known = topic.producers()[producer.producer_id]
    same((known.epoch, known.last_sequence, known.transaction_start), (producer.epoch, -1, -1))
    kafka.until(lambda: topic.high_watermark() == 3, "all to be committed")
    same(_control(topic.read()), [(1, producer.producer_id, producer.epoch)])


@case("A coordinator lists a partition until its marker is written", MARKERS)
def coordinator_lists_partition_until_its_marker(kafka: Kafka) -> None:
    """So a log end read after the partition is no longer listed includes the marker."""
    written, stranded = kafka.create(), kafka.create()
    producer = kafka.transactional(v2=False)
    for number in range(3):
        for topic in (written, stranded):
            holds(not producer.is_on(topic), "not listed before it is added")
            producer.add(topic)
            holds(producer.is_on(topic), "listed once it is added")
        same(producer.append(written, _sent_by(kafka, producer, number)), appended(2 * number))
        producer.end(commit=bool(number % 2))
        for topic, end in ((written, 2 * number + 2), (stranded, number + 1)):

            def is_over(topic: Topic = topic) -> bool:
                return not producer.is_on(topic)

            kafka.until(is_over, "it to be unlisted")
            same(topic.end(), end)


@case("A producer known only by a marker starts at 0", ALLOWED_FOR)
def producer_known_by_marker_starts_at_zero(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    producer.add(topic)
    producer.end(commit=True)
    kafka.until(lambda: topic.end() == 1, "the marker")
    producer.add(topic)
    same(producer.append(topic, _sent_by(kafka, producer, 4)), refused(OUT_OF_ORDER, 0))
    same(producer.append(topic, _sent_by(kafka, producer, 0)), appended(1))


@case("A marker without a transaction begins an epoch, at one offset: lower ones get 47, it starts at 0", CLAIMS)
def marker_claims_an_epoch(kafka: Kafka) -> None:
    topic = kafka.create()
    same(topic.append(fenced(kafka, 0)), appended(0))
    late, successor = fenced(kafka, 1), fenced(kafka, 2)
    same(topic.write_marker(kafka.shared_id, 3), 0)
    same(_control(topic.read()), [(1, kafka.shared_id, 3)])
    same(next_sequence(kafka, topic), (3, -1))
    same([topic.append(each) for each in (late, successor)], [refused(WRONG_EPOCH, 0)] * 2)
    same(topic.append(fenced(kafka, 1, epoch=3)), refused(OUT_OF_ORDER, 0), "the first append is compared")
    same(topic.append(fenced(kafka, 0, epoch=3)), appended(2))
    same(topic.write_marker(kafka.shared_id, 2), WRONG_EPOCH)
    same(topic.end(), 3)


@case("A second marker of an epoch may take an offset, and changes no sequence", ALLOWED_FOR)
def second_marker_of_an_epoch_changes_no_sequence(kafka: Kafka) -> None:
    """In transactions v2 it is refused, or taken for a repeated one (KAFKA-19999)."""
    topic = kafka.create()
    same(topic.write_marker(kafka.shared_id, 3), 0)
    same(topic.append(fenced(kafka, 0, epoch=3)), appended(1))
    topic.write_marker(kafka.shared_id, 3)
    end = topic.end()
    same(end in (2, 3), True)
    same(topic.append(fenced(kafka, 0, epoch=3)).base_offset, 1, "still a duplicate")
    same(topic.append(fenced(kafka, 2, epoch=3)), refused(OUT_OF_ORDER, 0))
    same(topic.append(fenced(kafka, 1, epoch=3)), appended(end))


@case("A transactional batch for a partition not added gets 48", TRANSACTIONS)
def transactional_batch_needs_its_partition_added(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    same(producer.append(topic, _sent_by(kafka, producer, 0)), refused(INVALID_TXN_STATE))
    same((topic.end(), topic.producers()), (0, {}))


@case("In v2, unknown producers start at 0", ALLOWED_FOR, optional=True)
def transactions_v2_start_at_zero(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=True)
    same(producer.append(topic, _sent_by(kafka, producer, 3)), refused(OUT_OF_ORDER, 0))
    same(producer.append(topic, _sent_by(kafka, producer, 0)), appended(0))


@case("In v2, ends bump the epoch", TRANSACTIONS, optional=True)
def transactions_v2_bump_epochs(kafka: Kafka) -> None:
    """The marker has the next epoch."""
    topic = kafka.create()
    producer = kafka.transactional(v2=True)
    epoch, producer_id = producer.epoch, producer.producer_id
    first = _sent_by(kafka, producer, 0)
    same(producer.append(topic, first), appended(0))
    same(producer.append(topic, first), duplicate(0, first))
    same(topic.producers()[producer_id].transaction_start, 0)
    producer.end(commit=True)
    kafka.until(lambda: topic.end() == 2, "the marker")
    same(producer.epoch, epoch + 1)
    known = topic.producers()[producer_id]
    same((known.epoch, known.last_sequence, known.transaction_start), (epoch + 1, -1, -1))
    same(producer.append(topic, _sent_by(kafka, producer, 0)), appended(2))
    producer.end(commit=False)
    kafka.until(lambda: topic.end() == 4 == topic.high_watermark(), "the second marker")
    same(_control(topic.read()), [(1, producer_id, epoch + 1), (3, producer_id, epoch + 2)])


def _states(kafka: Kafka, *, v2: bool) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=v2)
    same(producer.state(), "Empty")
    for commit, end in ((True, 2), (False, 4)):
        producer.add(topic)
        sequence = 0 if v2 or commit else 1
        same(producer.append(topic, _sent_by(kafka, producer, sequence)), appended(end - 2))
        same(producer.state(), "Ongoing")
        producer.end(commit=commit)
        after = "CompleteCommit" if commit else "CompleteAbort"
        holds(producer.state() in (after.replace("Complete", "Prepare"), after), f"{after}, or before it Prepare")
        kafka.until(lambda after=after: producer.state() == after, after)  # type: ignore[misc]
        same(topic.end(), end)


@case("A transaction is Empty, Ongoing, then Complete after its markers", TRANSACTIONS)
def transaction_states(kafka: Kafka) -> None:
    _states(kafka, v2=False)


@case("In v2 too", TRANSACTIONS, optional=True)
def transaction_states_v2(kafka: Kafka) -> None:
    _states(kafka, v2=True)


@case("A repeated EndTxn succeeds; a contrary one gets 48, another epoch 90", TRANSACTIONS)
def repeated_end_txn(kafka: Kafka) -> None:
    """So a commit whose response was lost can be repeated (transactions v1)."""
    topic = kafka.create()
    producer = kafka.transactional(v2=False)
    for commit in (True, False):
        same(producer.say_end(producer.epoch, commit=commit), INVALID_TXN_STATE, "nothing was begun")
    for number, commit in enumerate((True, False)):
        producer.add(topic)
        same(producer.say_end(producer.epoch + 1, commit=commit), PRODUCER_FENCED)
        for _ in range(2):
            same(producer.say_end(producer.epoch, commit=commit), 0)
        same(producer.say_end(producer.epoch, commit=not commit), INVALID_TXN_STATE)
        same(topic.end(), number + 1)


@case("In v2, EndTxn repeats with the epoch that it ended", TRANSACTIONS, optional=True)
def repeated_end_txn_v2(kafka: Kafka) -> None:
    topic = kafka.create()
    producer = kafka.transactional(v2=True)
    same(producer.say_end(producer.epoch, commit=True), INVALID_TXN_STATE, "nothing was begun")
    for end in (2, 4):
        same(producer.append(topic, _sent_by(kafka, producer, 0)), appended(end - 2))
        ended = producer.epoch
        producer.end(commit=True)
        same(producer.say_end(ended, commit=True), 0)
        same(producer.say_end(ended, commit=False), INVALID_TXN_STATE)
        same(producer.say_end(producer.epoch, commit=True), INVALID_TXN_STATE, "nothing was begun")
        same(producer.say_end(ended - 1, commit=True), PRODUCER_FENCED)
        same(producer.say_end(producer.epoch + 1, commit=True), PRODUCER_FENCED)
        same(topic.end(), end)
    before = producer.epoch
    producer.end(commit=False)
    same(producer.epoch, before + 1)
