"""A member of a consumer group, as a process: `python -m tests.order_proof.python_member LIBRARY TOPIC COMMIT K=V …`.

It has the interface of `tests/java/OrderMember.java`. It prints "S nanos partition offset key counter" after each
handled record, and "A nanos p,p,…" after each assignment. It accepts "pace SECONDS BELOW" on standard input, and leaves
the group when standard input ends.
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


class Orders:
    """Commands from standard input."""

    def __init__(self) -> None:
        self.ended = False
        self._seconds, self._below = 0.0, 0
        threading.Thread(target=self._read, daemon=True).start()

    def pause(self, partition: int) -> float:
        return self._seconds if partition < self._below else 0.0

    def _read(self) -> None:
        for line in sys.stdin:
            _, seconds, below = line.split()
            self._seconds, self._below = float(seconds), int(below)
        self.ended = True


class Commits:
    """Determines when a commit is due."""

    def __init__(self, every_seconds: float) -> None:
        self._every, self._last = every_seconds, time.monotonic()
        self.dirty = False

    def due(self) -> bool:
        if not self.dirty or time.monotonic() - self._last < self._every:
            return False
        self._last, self.dirty = time.monotonic(), False
        return True


def say(text: str) -> None:
    # One write, so that a kill leaves no partial line.
    os.write(1, f"{text}\n".encode())


def handled(partition: int, offset: int, key: bytes, value: bytes) -> None:
    say(f"S {time.monotonic_ns()} {partition} {offset} {key.decode()} {value.decode()}")


def assigned(partitions: Iterable[int]) -> None:
    say(f"A {time.monotonic_ns()} {','.join(map(str, sorted(partitions)))}")


def kafka_python(topic: str, orders: Orders, commits: Commits, settings: dict[str, Any]) -> None:
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
            print(f"commit: {error!r}", file=sys.stderr)

    class Listener(kafka.ConsumerRebalanceListener):  # type: ignore[misc]
        def on_partitions_revoked(self, revoked: Any) -> None:
            if revoked:
                # commit() would wait for the thread that calls this.
                consumer.commit_async()

        def on_partitions_assigned(self, added: Any) -> None:
            assigned(tp.partition for tp in consumer.assignment())

    consumer.subscribe([topic], listener=Listener())
    while not orders.ended:
        try:
            polled = consumer.poll(int(POLL_SECONDS * 1000))
        except kafka.errors.KafkaError as error:  # also raised for temporary failures, such as a refused connection
            print(f"poll: {error!r}", file=sys.stderr)
            time.sleep(POLL_SECONDS)
            continue
        for records in polled.values():
            for record in records:
                time.sleep(orders.pause(record.partition))
                handled(record.partition, record.offset, record.key, record.value)
                commits.dirty = True
        keep_on_joining(consumer)
        if commits.due():
            commit()
    commit()
    consumer.close()


def confluent(topic: str, orders: Orders, commits: Commits, settings: dict[str, Any]) -> None:
    import confluent_kafka  # noqa: PLC0415

    consumer = confluent_kafka.Consumer(settings)
    # Commits only handled records, whatever the library's position is: a missing record is then a fault of the broker
    # or proxy.
    done: dict[int, int] = {}

    def commit() -> None:
        offsets = [confluent_kafka.TopicPartition(topic, partition, offset) for partition, offset in done.items()]
        if not offsets:
            return
        try:
            consumer.commit(offsets=offsets, asynchronous=False)
        except confluent_kafka.KafkaException as error:
            print(f"commit: {error!r}", file=sys.stderr)

    holds: set[int] = set()

    def added(_: object, partitions: Any) -> None:
        holds.update(tp.partition for tp in partitions)
        assigned(holds)

    def taken(_: object, partitions: Any) -> None:
        for tp in partitions:
            holds.discard(tp.partition)
            done.pop(tp.partition, None)

    def revoked(_: object, partitions: Any) -> None:
        commit()
        taken(_, partitions)

    consumer.subscribe([topic], on_assign=added, on_revoke=revoked, on_lost=taken)
    while not orders.ended:
        message = consumer.poll(POLL_SECONDS)
        if message is not None:
            if message.error() is not None:
                print(f"poll: {message.error()}", file=sys.stderr)
                continue
            partition, offset, key = message.partition(), message.offset(), message.key()
            time.sleep(orders.pause(partition))
            handled(partition, offset, key, message.value())
            done[partition] = offset + 1
            commits.dirty = True
        if commits.due():
            commit()
    commit()
    consumer.close()


def aiokafka(topic: str, orders: Orders, commits: Commits, settings: dict[str, Any]) -> None:
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
            if not done:
                return
            try:
                await consumer.commit(dict(done))
            except KafkaError as error:
                print(f"commit: {error!r}", file=sys.stderr)

        class Listener(aiokafka.ConsumerRebalanceListener):  # type: ignore[misc]
            async def on_partitions_revoked(self, revoked: Any) -> None:
                nonlocal rebalances
                rebalances += 1
                await commit()
                done.clear()

            async def on_partitions_assigned(self, added: Any) -> None:
                assigned(tp.partition for tp in consumer.assignment())

        consumer.subscribe([topic], listener=Listener())
        await consumer.start()
        while not orders.ended:
            try:
                batches = await consumer.getmany(timeout_ms=int(POLL_SECONDS * 1000), max_records=POLL_RECORDS)
            except KafkaError as error:
                print(f"poll: {error!r}", file=sys.stderr)
                await asyncio.sleep(POLL_SECONDS)
                continue
            before = rebalances
            for tp, records in batches.items():
                for record in records:
                    await asyncio.sleep(orders.pause(record.partition))
                    if rebalances != before:
                        break
                    handled(record.partition, record.offset, record.key, record.value)
                    done[tp] = record.offset + 1
                    commits.dirty = True
            if commits.due():
                await commit()
        await commit()
        await consumer.stop()

    asyncio.run(run())


LIBRARIES: dict[str, Callable[[str, Orders, Commits, dict[str, Any]], None]] = {
    "kafka-python": kafka_python,
    "aiokafka": aiokafka,
    "librdkafka": confluent,
}


def main() -> None:
    library, topic, commit_seconds, settings = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        LIBRARIES[library](topic, Orders(), Commits(float(commit_seconds)), json.loads(settings))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
