"""Cases of producers that brokers forget, and of topics that are deleted."""

from __future__ import annotations

import struct

from fencepost_proxy.preflight.conformance.batches import sign
from fencepost_proxy.preflight.conformance.case import (
    ALLOWED_FOR,
    DAY_MS,
    OUT_OF_ORDER,
    UNKNOWN_TOPIC_ID,
    Control,
    appended,
    case,
    duplicate,
    fenced,
    holds,
    next_sequence,
    refused,
    same,
    unconditional,
    values,
)
from fencepost_proxy.preflight.conformance.driver import Kafka, ProducerState


@case("After a restart only a producer's last batch is recognized", ALLOWED_FOR, control=Control.STOPS)
def restart_keeps_only_the_last_batch(kafka: Kafka) -> None:
    """A resend of an earlier batch gets 45, although it is in the log."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(6)]
    same([topic.append(each) for each in batches], [appended(base) for base in range(6)])
    kafka.restart()
    for each in batches[:5]:
        same(topic.append(each), refused(OUT_OF_ORDER, 0))
    same(topic.append(batches[5]), duplicate(5, batches[5]))
    same(topic.append(fenced(kafka, 6)), appended(6))
    same(len(values(topic)), 7)


@case("The same after a kill", ALLOWED_FOR, control=Control.STOPS)
def kill_keeps_only_the_last_batch(kafka: Kafka) -> None:
    """Recovery rebuilds producer states from the log, stores them and starts with them."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    same([topic.append(each) for each in batches], [appended(base) for base in range(3)])
    kafka.crash()
    same(topic.append(batches[0]), refused(OUT_OF_ORDER, 0))
    same(topic.append(batches[1]), refused(OUT_OF_ORDER, 0))
    same(topic.append(batches[2]), duplicate(2, batches[2]))
    same(topic.append(fenced(kafka, 3)), appended(3))


@case("A restart forgets producers with old record timestamps", ALLOWED_FOR, control=Control.STOPS)
def restart_forgets_producers_with_old_records(kafka: Kafka) -> None:
    """The newest record timestamp counts, not the append time: a confirmed fence can expire."""
    topic, fresh = kafka.create(), kafka.create()
    old = fenced(kafka, 0, b"old", timestamp_ms=kafka.now_ms() - 2 * DAY_MS)
    young = fenced(kafka, 0, b"young", timestamp_ms=kafka.now_ms() - DAY_MS // 2)
    same(topic.append(old), appended(0))
    same(topic.append(old), duplicate(0, old))
    same(fresh.append(young), appended(0))
    kafka.restart()
    same(topic.producers(), {})
    same(topic.append(old), appended(1), "twice")
    same(values(topic), [b"old", b"old"])
    same(fresh.append(young), duplicate(0, young))


@case("The broker computes the newest timestamp from the records")
def broker_computes_the_newest_timestamp(kafka: Kafka) -> None:
    topic = kafka.create()
    old = kafka.now_ms() - 2 * DAY_MS
    lying = bytearray(fenced(kafka, 0, timestamp_ms=old))
    struct.pack_into(">q", lying, 35, kafka.now_ms())
    sign(lying)
    same(topic.append(bytes(lying)), appended(0))
    same(topic.producers(), {kafka.shared_id: ProducerState(0, 0, old, -1)})


@case("Producers also expire without a restart", ALLOWED_FOR, control=Control.EXPIRY)
def producers_expire_without_a_restart(kafka: Kafka) -> None:
    """By default, brokers expire producers every ten minutes."""
    topic = kafka.create()
    old = fenced(kafka, 0, b"old", timestamp_ms=kafka.now_ms() - 2 * DAY_MS)
    young = fenced(kafka, 5, b"young", producer_id=kafka.other_id, timestamp_ms=kafka.now_ms() - DAY_MS // 2)
    same(topic.append(young), appended(0))
    same(topic.append(old), appended(1))
    kafka.expire_producers()
    kafka.until(lambda: kafka.shared_id not in topic.producers(), "the old producer to expire")
    same(topic.append(old), appended(2), "twice")
    same(topic.append(young), duplicate(0, young))


@case("If all records are deleted, a restart forgets the producer", control=Control.STOPS)
def producer_of_deleted_records_is_known_until_restart(kafka: Kafka) -> None:
    """The records of a duplicate may be unreadable. After a restart it is appended again."""
    topic = kafka.create()
    batches = [fenced(kafka, sequence) for sequence in range(3)]
    same([topic.append(each) for each in batches], [appended(base) for base in range(3)])
    topic.delete_records(3)
    same((topic.start(), topic.end(), topic.read()), (3, 3, []))
    same(topic.append(batches[1]), duplicate(1, batches[1], 3))
    same(topic.append(fenced(kafka, 9)), refused(OUT_OF_ORDER, 3))
    same(next_sequence(kafka, topic), (0, 2))
    kafka.restart()
    same((topic.start(), topic.end(), topic.producers()), (3, 3, {}))
    same(topic.append(batches[2]), appended(3, 3), "twice")


@case("If other records remain, it does not", control=Control.STOPS)
def producer_is_known_while_other_records_remain(kafka: Kafka) -> None:
    """A shutdown stores all producers. A start ignores them only if no record is left."""
    topic = kafka.create()
    ours = fenced(kafka, 0)
    same(topic.append(ours), appended(0))
    same(topic.append(unconditional(kafka, b"remains")), appended(1))
    topic.delete_records(1)
    kafka.restart()
    same(next_sequence(kafka, topic), (0, 0))
    same(topic.append(ours), duplicate(0, ours, 1))


@case("After a kill, deleted records may be back", ALLOWED_FOR, control=Control.STOPS)
def kill_may_restore_deleted_records(kafka: Kafka) -> None:
    """The log start is stored once a minute. The producer is known again, too."""
    topic = kafka.create()
    ours = fenced(kafka, 0)
    same(topic.append(ours), appended(0))
    same(topic.append(unconditional(kafka, b"remains")), appended(1))
    topic.delete_records(1)
    kafka.crash()
    start = topic.start()
    holds(start in (0, 1), "the log starts at 0 or 1")
    same(topic.append(ours), duplicate(0, ours, start))


@case("A recreated topic refuses stale batches only by id (100)", optional=True)
def recreated_topic_has_another_id_and_no_producers(kafka: Kafka) -> None:
    """By name, a stale batch is appended to the new topic at 0. By id, it is refused."""
    topic = kafka.create()
    old = topic.topic_id
    same(topic.append_by_id(fenced(kafka, 0), old), appended(0))
    same(topic.append(fenced(kafka, 1)), appended(1))
    topic.recreate()
    holds(topic.topic_id != old, "it has another id")
    same(topic.append_by_id(fenced(kafka, 2), old), refused(UNKNOWN_TOPIC_ID))
    same((topic.end(), topic.producers()), (0, {}))
    same(topic.append(fenced(kafka, 2, b"stale")), appended(0), "expected at 2")
    same(topic.append_by_id(fenced(kafka, 3), topic.topic_id), appended(1))
