"""Members of consumer groups, of every client, with one interface: assignment, records, commits.

Each runs in a separate thread or process, and commits only on request.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import confluent_kafka
from aiokafka import AIOKafkaConsumer
from kafka import KafkaConsumer
from kafka.errors import KafkaConnectionError

from fencepost_dev.tools import compile_java, java_command
from tests.kit.closing import Closing
from tests.kit.waiting import until
from tests.support.rejoining import keep_on_joining

WAIT_SECONDS = 90.0
_SOURCE = Path(__file__).parent.parent / "java" / "GroupMember.java"
_ASSIGNORS = "org.apache.kafka.clients.consumer."


class Read(NamedTuple):
    partition: int
    offset: int
    key: str
    value: str


class Commits(Protocol):
    def __call__(self) -> None: ...


class Member(Closing):
    """Close it, or use it in `with`. `read` has every record in the order received."""

    def __init__(self) -> None:
        self.read: list[Read] = []
        self.assigned: set[int] = set()
        self.errors: list[str] = []
        self.commits = 0
        self._commit_requested = threading.Event()
        self._end = threading.Event()

    def commit(self) -> None:
        """Commit the records read so far, and wait for that."""
        before = self.commits
        self._commit_requested.set()
        until(lambda: self.commits > before or not self.live, f"{self} did not commit: {self.errors}")

    @property
    def live(self) -> bool:
        return not self._end.is_set()

    def read_of(self, partition: int) -> list[Read]:
        return [each for each in self.read if each.partition == partition]


class _Threaded(Member):
    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._checked, daemon=True)
        self._thread.start()

    def _checked(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.errors.append(repr(error))
        finally:
            self._end.set()

    def _run(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._end.set()
        self._thread.join(WAIT_SECONDS)


class ConfluentMember(_Threaded):
    def __init__(self, bootstrap: str, topic: str, group: str, reset: str, **configs: Any) -> None:
        classic = {} if configs.get("group.protocol") == "consumer" else {"heartbeat.interval.ms": 300}
        self._configs = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "client.id": f"librdkafka-{group}",
            "auto.offset.reset": reset,
            "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 500,
            **classic,
            **configs,
        }
        self._topic = topic
        super().__init__()

    def _run(self) -> None:
        consumer = confluent_kafka.Consumer(self._configs)
        incremental = self._configs.get("group.protocol") == "consumer" or (
            "cooperative-sticky" in str(self._configs.get("partition.assignment.strategy"))
        )

        def assigned(_: object, partitions: list[Any]) -> None:
            numbers = {each.partition for each in partitions}
            self.assigned = self.assigned | numbers if incremental else numbers

        def revoked(_: object, partitions: list[Any]) -> None:
            self.assigned = self.assigned - {each.partition for each in partitions}

        consumer.subscribe([self._topic], on_assign=assigned, on_revoke=revoked, on_lost=revoked)
        while not self._end.is_set():
            message = consumer.poll(0.05)
            if message is not None and message.error():
                self.errors.append(str(message.error()))
            elif message is not None:
                key, value = message.key() or b"", message.value() or b""
                self.read.append(Read(message.partition(), message.offset(), key.decode(), value.decode()))
            if self._commit_requested.is_set():
                self._commit_requested.clear()
                try:
                    consumer.commit(asynchronous=False)
                    self.commits += 1
                except confluent_kafka.KafkaException as error:
                    self.errors.append(str(error))
                    if error.args[0].code() == confluent_kafka.KafkaError._NO_OFFSET:
                        self.commits += 1
                    else:
                        self._commit_requested.set()
        consumer.close()


class KafkaPythonMember(_Threaded):
    def __init__(self, bootstrap: str, topic: str, group: str, reset: str) -> None:
        self._arguments = (bootstrap, topic, group, reset)
        super().__init__()

    def _run(self) -> None:
        bootstrap, topic, group, reset = self._arguments
        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            client_id=f"kafka-python-{group}",
            auto_offset_reset=reset,
            enable_auto_commit=False,
            heartbeat_interval_ms=300,
            metadata_max_age_ms=500,
        )
        try:
            while not self._end.is_set():
                try:
                    polled = consumer.poll(50)
                except KafkaConnectionError as error:
                    # kafka-python raises this while a port is closed; users poll again.
                    self.errors.append(repr(error))
                    continue
                for records in polled.values():
                    self.read += [
                        Read(each.partition, each.offset, (each.key or b"").decode(), (each.value or b"").decode())
                        for each in records
                    ]
                keep_on_joining(consumer)
                self.assigned = {each.partition for each in consumer.assignment()}
                if self._commit_requested.is_set():
                    self._commit_requested.clear()
                    try:
                        consumer.commit()
                        self.commits += 1
                    except Exception as error:
                        self.errors.append(repr(error))
                        self._commit_requested.set()
        finally:
            consumer.close(autocommit=False)


class AiokafkaMember(_Threaded):
    def __init__(self, bootstrap: str, topic: str, group: str, reset: str) -> None:
        self._arguments = (bootstrap, topic, group, reset)
        super().__init__()

    def _run(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        bootstrap, topic, group, reset = self._arguments
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            client_id=f"aiokafka-{group}",
            auto_offset_reset=reset,
            enable_auto_commit=False,
            heartbeat_interval_ms=300,
            metadata_max_age_ms=500,
        )
        await consumer.start()
        while not self._end.is_set():
            for records in (await consumer.getmany(timeout_ms=50)).values():
                self.read += [
                    Read(each.partition, each.offset, (each.key or b"").decode(), (each.value or b"").decode())
                    for each in records
                ]
            self.assigned = {each.partition for each in consumer.assignment()}
            if self._commit_requested.is_set():
                self._commit_requested.clear()
                try:
                    await consumer.commit()
                    self.commits += 1
                except Exception as error:
                    self.errors.append(repr(error))
                    self._commit_requested.set()
        await consumer.stop()


class JavaMember(Member):
    def __init__(self, bootstrap: str, topic: str, group: str, reset: str, **configs: str) -> None:
        super().__init__()
        classic = {} if configs.get("group.protocol") == "consumer" else {"heartbeat.interval.ms": "300"}
        properties = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "client.id": f"java-{group}",
            "auto.offset.reset": reset,
            "enable.auto.commit": "false",
            "metadata.max.age.ms": "500",
            **classic,
            **configs,
        }
        arguments = [topic, *(f"{name}={value}" for name, value in properties.items())]
        command = java_command("GroupMember", arguments, classes=compile_java([_SOURCE]))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._readers = [
            threading.Thread(target=self._follow, daemon=True),
            threading.Thread(target=self._complaints, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                kind, _, rest = line.rstrip("\n").partition(" ")
                if kind == "record":
                    _, partition, offset, key, value = rest.split(" ")
                    self.read.append(Read(int(partition), int(offset), key, value))
                elif kind == "assigned":
                    self.assigned |= _numbers(rest)
                elif kind in ("revoked", "lost"):
                    self.assigned -= _numbers(rest)
                elif kind == "committed":
                    self.commits += 1
                elif kind == "error":
                    self.errors.append(rest)
                    if self.live and self._commit_requested.is_set():
                        self._write("commit")
        self._end.set()

    def _complaints(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.errors.append(line.rstrip())

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def commit(self) -> None:
        before = self.commits
        self._commit_requested.set()
        self._write("commit")
        until(lambda: self.commits > before or not self.live, f"{self} did not commit: {self.errors}")
        self._commit_requested.clear()

    def crash(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(WAIT_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(WAIT_SECONDS)


def _numbers(names: str) -> set[int]:
    return {int(name.rpartition("-")[2]) for name in names.split(",") if name}


Start = Callable[[str, str, str, str], Member]


def _confluent(**configs: Any) -> Start:
    return lambda bootstrap, topic, group, reset: ConfluentMember(bootstrap, topic, group, reset, **configs)


def _java(**configs: str) -> Start:
    return lambda bootstrap, topic, group, reset: JavaMember(bootstrap, topic, group, reset, **configs)


#: Every client and protocol: bootstrap, topic, group, auto.offset.reset → member.
MEMBERS: dict[str, Start] = {
    "java-eager": _java(**{"partition.assignment.strategy": f"{_ASSIGNORS}RangeAssignor"}),
    "java-cooperative": _java(**{"partition.assignment.strategy": f"{_ASSIGNORS}CooperativeStickyAssignor"}),
    "java-consumer-protocol": _java(**{"group.protocol": "consumer"}),
    "librdkafka-eager": _confluent(**{"partition.assignment.strategy": "range"}),
    "librdkafka-cooperative": _confluent(**{"partition.assignment.strategy": "cooperative-sticky"}),
    "librdkafka-consumer-protocol": _confluent(**{"group.protocol": "consumer"}),
    "kafka-python": KafkaPythonMember,
    "aiokafka": AiokafkaMember,
}
