"""Cases of a partition with two replicas."""

from __future__ import annotations

from fencepost_proxy.preflight.conformance.case import (
    ALLOWED_FOR,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    OUT_OF_ORDER,
    TIMED_OUT,
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
from fencepost_proxy.preflight.conformance.driver import Answer, Kafka, Settings, Topic


def _follower_replica(topic: Topic) -> int:
    leader = topic.leader()
    return next(node for node in topic.replicas() if node != leader)


def _two(kafka: Kafka, min_isr: int = 1) -> Topic:
    return kafka.create(Settings(replicas=2, min_isr=min_isr))


@case("OffsetForLeaderEpoch returns the log end, ListOffsets the high watermark", brokers=2, control=Control.STOPS)
def log_end_exceeds_the_high_watermark(kafka: Kafka) -> None:
    """Fetch also ends at the high watermark."""
    topic = _two(kafka)
    same((topic.end(), topic.high_watermark()), (0, 0))
    same(topic.append(fenced(kafka, 0)), appended(0))
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    for sequence in (1, 2):
        same(topic.append(fenced(kafka, sequence), acks=1), appended(sequence))
    same((topic.end(), topic.high_watermark()), (3, 1))
    same(values(topic), [b"0"])
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.high_watermark() == 3, "the follower replica to catch up")
    same(len(values(topic)), 3)


@case("With too few in-sync replicas: 19 before the append, 7 after", brokers=2, control=Control.STOPS)
def too_few_in_sync_replicas(kafka: Kafka) -> None:
    """19 precedes the duplicate check. 7 has the offset of the appended batch."""
    topic = _two(kafka, min_isr=2)
    first, waits = fenced(kafka, 0), fenced(kafka, 1)
    same(topic.append(first), appended(0))
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    same(topic.append(waits, timeout_ms=300), Answer(TIMED_OUT, 1, -1, 0))
    same((topic.end(), topic.high_watermark()), (2, 1))
    kafka.until(
        lambda: topic.append(waits, timeout_ms=100) == refused(NOT_ENOUGH_REPLICAS, 0),
        "the follower replica to leave the in-sync replicas",
    )
    same(topic.append(fenced(kafka, 2)), refused(NOT_ENOUGH_REPLICAS, 0))
    same(topic.append(fenced(kafka, 2), acks=1), appended(2), "acks=1 ignores the other replicas")
    same((topic.end(), topic.high_watermark(), next_sequence(kafka, topic)), (3, 1, (0, 2)))
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.in_sync() == 2 and topic.high_watermark() == 3, "the follower replica to catch up")
    same(topic.append(waits), duplicate(1, waits))


@case("A duplicate is answered once it is committed", brokers=2, control=Control.STOPS)
def duplicate_waits_for_replicas(kafka: Kafka) -> None:
    topic = _two(kafka, min_isr=2)
    same(topic.append(fenced(kafka, 0)), appended(0))
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    waits = fenced(kafka, 1)
    same(topic.append(waits, timeout_ms=200), Answer(TIMED_OUT, 1, -1, 0))
    same(topic.append(waits, timeout_ms=200), Answer(TIMED_OUT, 1, timestamp_of(waits), 0))
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.high_watermark() == 2, "the follower replica to catch up")
    same(topic.append(waits), duplicate(1, waits))


@case("A connection's later appends wait for an earlier one's replicas", ALLOWED_FOR, brokers=2, control=Control.STOPS)
def later_appends_wait_for_earlier_replication(kafka: Kafka) -> None:
    """Later requests of the connection are not appended yet. Other connections are served."""
    topic = _two(kafka, min_isr=2)
    same(topic.append(fenced(kafka, 0)), appended(0))
    wire = topic.connect()
    follower_replica = _follower_replica(topic)
    kafka.pause(follower_replica)
    wire.send(fenced(kafka, 1), timeout_ms=4000)
    wire.send(fenced(kafka, 2), acks=1)
    kafka.until(lambda: topic.end() == 2, "the first to be appended")
    same(topic.append(unconditional(kafka, b"other"), acks=1), appended(2))
    same(topic.end(), 3)
    same(wire.receive(), Answer(TIMED_OUT, 1, -1, 0))
    same(wire.receive(), appended(3))
    wire.close()
    kafka.resume(follower_replica)
    kafka.until(lambda: topic.in_sync() == 2, "the follower replica to be back")


@case("A new leader recognizes five batches; the old one answers 6", brokers=2)
def new_leader_recognizes_five_batches(kafka: Kafka) -> None:
    """A broker queried with another leader epoch does not report its log end."""
    topic = _two(kafka)
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    same([topic.append(each) for each in batches], [appended(base) for base in range(6)])
    a, b = topic.leader(), _follower_replica(topic)
    epoch = topic.leader_epoch()
    same((topic.end_as_of(a, epoch), topic.end_as_of(b, epoch)), (6, None))
    holds(topic.end_as_of(a, epoch + 1) is None, "a later epoch is refused")
    kafka.until(lambda: topic.producers(b) == topic.producers(a), "the follower replica to know the producer")
    topic.move_leader(b)
    new_epoch = topic.leader_epoch()
    holds(new_epoch > epoch, "the epoch is higher")
    holds(topic.end_as_of(a, epoch) is None, "the old leader refuses the old epoch")
    holds(topic.end_as_of(b, epoch) is None, "the new leader refuses the old epoch")
    same(topic.end_as_of(b, new_epoch), 6)
    same(topic.append(fenced(kafka, 6), node=a), refused(NOT_LEADER))
    same(topic.append(batches[0]), refused(OUT_OF_ORDER, 0))
    for base in range(1, 6):
        same(topic.append(batches[base]), duplicate(base, batches[base]))
    same(topic.append(fenced(kafka, 6)), appended(6))
    topic.move_leader(a)
    same(topic.append(fenced(kafka, 6, b"another's")).base_offset, 6)
    same(topic.append(fenced(kafka, 7)), appended(7))


@case("Truncation takes back log and sequence together", brokers=2, control=Control.STOPS)
def truncation_removes_log_and_sequence_together(kafka: Kafka) -> None:
    """Batches that only the dead leader had are lost, and their sequences too, even after it returns."""
    topic = _two(kafka)
    same(topic.append(fenced(kafka, 0)), appended(0))
    a, b = topic.leader(), _follower_replica(topic)
    kafka.pause(b)
    # A pending fetch of the follower could still return the first of these.
    kafka.let_fetches_end()
    same(topic.append(fenced(kafka, 0, producer_id=kafka.other_id), acks=1), appended(1))
    lost = fenced(kafka, 1, b"lost")
    same(topic.append(lost, acks=1), appended(2))
    same(topic.append(fenced(kafka, 2, b"lost too"), acks=1), appended(3))
    same(next_sequence(kafka, topic), (0, 2))
    kafka.kill(a)
    kafka.resume(b)
    kafka.until(lambda: topic.leader() == b, "the other to lead")
    kafka.until(lambda: topic.end_as_of(b, topic.leader_epoch()) is not None, "the new leader to serve")
    end = topic.end()
    holds(end in (1, 2), "the log ends at 1 or 2")
    same(next_sequence(kafka, topic), (0, 0))
    same(topic.append(fenced(kafka, 2, b"lost too")), refused(OUT_OF_ORDER, 0))
    other = fenced(kafka, 1, b"another's")
    same(topic.append(other), appended(end))
    kafka.start_again(a)
    kafka.until(lambda: topic.in_sync() == 2, "the old leader to be back")
    same(next_sequence(kafka, topic, a), (0, 1))
    same(next_sequence(kafka, topic, b), (0, 1))
    topic.move_leader(a)
    same(topic.end(), end + 1)
    same(topic.append(lost), duplicate(end, other), "a resend finds another batch at that offset")
    holds(b"lost" not in values(topic), "what was lost does not return")


@case("Replicas differ: a resend may be 45 or a duplicate", ALLOWED_FOR, brokers=2, control=Control.STOPS)
def replicas_remember_different_batches(kafka: Kafka) -> None:
    """A resend is a duplicate on one replica and a gap on the restarted one: 45 does not prove its absence."""
    topic = _two(kafka)
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    same([topic.append(each) for each in batches], [appended(base) for base in range(3)])
    a, b = topic.leader(), _follower_replica(topic)
    kafka.kill(b)
    kafka.start_again(b)
    kafka.until(lambda: topic.in_sync() == 2, "the follower replica to be back")
    same(topic.producers(b), topic.producers(a))
    topic.move_leader(b)
    same(topic.append(batches[0]), refused(OUT_OF_ORDER, 0))
    same(topic.append(batches[2]), duplicate(2, batches[2]))
    topic.move_leader(a)
    same(topic.append(batches[0]), duplicate(0, batches[0]))
