"""A member of a consumer group, as a process: `python -m tests.support.group_member LIBRARY TOPIC COMMIT SETTINGS`.

Kafka's Java consumer has `tests/java/GroupMember.java` with the same lines. COMMIT: how often it commits, in seconds;
then also when partitions are revoked, and at its end. 0: on request only. On standard output, with the system's
monotonic clock:

    S NANOS PARTITION OFFSET KEY VALUE    a record was handled
    A NANOS P,P,…                         partitions were assigned: all that it has now
    R NANOS P,P,…                         partitions were revoked: all that it has now
    C                                     a commit succeeded
    E TEXT                                an error

On standard input: "pace SECONDS BELOW" is how long it takes for a record of a partition below BELOW; "commit". It
leaves the group when standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

POLL_SECONDS = 0.1
POLL_RECORDS = 10


class Member:
    """What the loops of all libraries share: commands, reports, and when a commit is due."""

    def __init__(self, commit_seconds: float) -> None:
        self.ended = False
        #: Whether it commits without a request.
        self.commits = commit_seconds > 0
        self._every, self._last, self._dirty, self._requested = commit_seconds, time.monotonic(), False, False
        self._seconds, self._below = 0.0, 0
        threading.Thread(target=self._read, daemon=True).start()

    def pause(self, partition: int) -> float:
        return self._seconds if partition < self._below else 0.0

    def handled(self, partition: int, offset: int, key: bytes | None, value: bytes | None) -> None:
        _say(f"S {time.monotonic_ns()} {partition} {offset} {(key or b'').decode()} {(value or b'').decode()}")
        self._dirty = True

    def has(self, partitions: Iterable[int], event: str = "A") -> None:
        _say(f"{event} {time.monotonic_ns()} {','.join(map(str, sorted(partitions)))}")

    @property
    def commit_is_due(self) -> bool:
        if self.commits and self._dirty and time.monotonic() - self._last >= self._every:
            self._last, self._dirty = time.monotonic(), False
            return True
        return self._requested

    def committed(self, error: Exception | None = None) -> None:
        """A requested commit is repeated after an error."""
        if error is not None:
            self.failed("commit", error)
            return
        self._requested = False
        _say("C")

    def failed(self, what: str, error: object) -> None:
        _say(f"E {what}: {error!r}".replace("\n", " "))

    def _read(self) -> None:
        for line in sys.stdin:
            match line.split():
                case ["pace", seconds, below]:
                    self._seconds, self._below = float(seconds), int(below)
                case ["commit"]:
                    self._requested = True
        self.ended = True


def _say(text: str) -> None:
    # One write, so that a kill leaves no partial line.
    os.write(1, f"{text}\n".encode())


def kafka_python(topic: str, member: Member, settings: dict[str, Any]) -> None:
    import kafka  # noqa: PLC0415 - a member has one library

    from tests.support.rejoining import keep_on_joining  # noqa: PLC0415

    if settings.pop("assignor", None) == "cooperative":
        from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor  # noqa: PLC0415

        settings["partition_assignment_strategy"] = [CooperativeStickyAssignor]
    consumer = kafka.KafkaConsumer(**settings, max_poll_records=POLL_RECORDS)

    def commit() -> None:
        try:
            consumer.commit()
        except kafka.errors.KafkaError as error:
            member.committed(error)
        else:
            member.committed()

    class Listener(kafka.ConsumerRebalanceListener):  # type: ignore[misc]
        def on_partitions_revoked(self, revoked: Any) -> None:
            if revoked and member.commits:
                # commit() would wait for the thread that calls this.
                consumer.commit_async()
            member.has((tp.partition for tp in consumer.assignment() - set(revoked)), "R")

        def on_partitions_assigned(self, added: Any) -> None:
            member.has(tp.partition for tp in consumer.assignment())

    consumer.subscribe([topic], listener=Listener())
    while not member.ended:
        try:
            polled = consumer.poll(int(POLL_SECONDS * 1000))
        except kafka.errors.KafkaError as error:  # also raised for temporary failures, such as a refused connection
            member.failed("poll", error)
            time.sleep(POLL_SECONDS)
            continue
        for records in polled.values():
            for record in records:
                time.sleep(member.pause(record.partition))
                member.handled(record.partition, record.offset, record.key, record.value)
        keep_on_joining(consumer)
        if member.commit_is_due:
            commit()
    if member.commits:
        commit()
    consumer.close(autocommit=False)


def confluent(topic: str, member: Member, settings: dict[str, Any]) -> None:
    import confluent_kafka  # noqa: PLC0415

    consumer = confluent_kafka.Consumer(settings)
    # Commits only handled records, whatever the library's position is: a missing record is then a fault of the broker
    # or proxy.
    done: dict[int, int] = {}

    def commit() -> None:
        offsets = [confluent_kafka.TopicPartition(topic, partition, offset) for partition, offset in done.items()]
        try:
            if offsets:
                consumer.commit(offsets=offsets, asynchronous=False)
        except confluent_kafka.KafkaException as error:
            member.committed(error)
        else:
            member.committed()

    holds: set[int] = set()

    def added(_: object, partitions: Any) -> None:
        holds.update(tp.partition for tp in partitions)
        member.has(holds)

    def taken(_: object, partitions: Any) -> None:
        for tp in partitions:
            holds.discard(tp.partition)
            done.pop(tp.partition, None)
        member.has(holds, "R")

    def revoked(_: object, partitions: Any) -> None:
        if member.commits:
            commit()
        taken(_, partitions)

    consumer.subscribe([topic], on_assign=added, on_revoke=revoked, on_lost=taken)
    while not member.ended:
        message = consumer.poll(POLL_SECONDS)
        if message is not None:
            if message.error() is not None:
                member.failed("poll", message.error())
                continue
            partition, offset = message.partition(), message.offset()
            time.sleep(member.pause(partition))
            member.handled(partition, offset, message.key(), message.value())
            done[partition] = offset + 1
        if member.commit_is_due:
            commit()
    if member.commits:
        commit()
    consumer.close()


def aiokafka(topic: str, member: Member, settings: dict[str, Any]) -> None:
    import aiokafka  # noqa: PLC0415
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor  # noqa: PLC0415
    from aiokafka.errors import KafkaError  # noqa: PLC0415

    async def run() -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            **settings, max_poll_records=POLL_RECORDS, partition_assignment_strategy=[RangePartitionAssignor]
        )

        # Rebalances of aiokafka happen between two records, not only during the next call. Records that getmany()
        # returned before a rebalance and that are not handled yet must neither be committed nor handled later.
        done: dict[Any, int] = {}
        rebalances = 0

        async def commit() -> None:
            try:
                if done:
                    await consumer.commit(dict(done))
            except KafkaError as error:
                member.committed(error)
            else:
                member.committed()

        class Listener(aiokafka.ConsumerRebalanceListener):  # type: ignore[misc]
            async def on_partitions_revoked(self, revoked: Any) -> None:
                nonlocal rebalances
                rebalances += 1
                if member.commits:
                    await commit()
                done.clear()
                member.has((), "R")

            async def on_partitions_assigned(self, added: Any) -> None:
                member.has(tp.partition for tp in consumer.assignment())

        consumer.subscribe([topic], listener=Listener())
        await consumer.start()
        while not member.ended:
            try:
                batches = await consumer.getmany(timeout_ms=int(POLL_SECONDS * 1000), max_records=POLL_RECORDS)
            except KafkaError as error:
                member.failed("poll", error)
                await asyncio.sleep(POLL_SECONDS)
                continue
            before = rebalances
            for tp, records in batches.items():
                for record in records:
                    await asyncio.sleep(member.pause(record.partition))
                    if rebalances != before:
                        break
                    member.handled(record.partition, record.offset, record.key, record.value)
                    done[tp] = record.offset + 1
            if member.commit_is_due:
                await commit()
        if member.commits:
            await commit()
        await consumer.stop()

    asyncio.run(run())


LIBRARIES: dict[str, Callable[[str, Member, dict[str, Any]], None]] = {
    "kafka-python": kafka_python,
    "aiokafka": aiokafka,
    "librdkafka": confluent,
}


def main() -> None:
    library, topic, commit_seconds, settings = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        LIBRARIES[library](topic, Member(float(commit_seconds)), json.loads(settings))
    os._exit(0)


if __name__ == "__main__":
    main()
