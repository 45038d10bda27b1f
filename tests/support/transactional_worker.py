"""A process with transactional clients that runs commands: `python -m tests.support.transactional_worker CLIENT
BOOTSTRAP`, CLIENT one of `kafka-python`, `aiokafka`, `confluent-kafka`. Java has `tests/java/TransactionalWorker.java`.

As a process it can be killed with an open transaction. Each line of standard input is a command. The response is one
line, "ok …" or "error CLASS message":

    init NAME TRANSACTIONAL_ID TIMEOUT_MS        create producer NAME, and call initTransactions; "-": no transactions
    begin|commit|abort|close NAME
    send NAME TOPIC PARTITION VALUE EXPECTED     EXPECTED: an offset, or "-". Returns the offset, once acknowledged
    offsets NAME GROUP TOPIC PARTITION OFFSET    sendOffsetsToTransaction
    read TOPIC PARTITION LEVEL STOP IDLE_MS      values from the beginning, to STOP, or until the idle time has passed
    transform NAME GROUP INPUT OUTPUT PARTITION  endless consume-transform-produce: a line "ok OFFSET" per transaction
    forward NAME GROUP INPUT OUTPUT PARTITION    the same without transactions: it commits offsets after the sends

Endless commands report the beginning of each step on standard error: "at STEP".
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
import time
from typing import Any, Protocol

import aiokafka
import confluent_kafka
import kafka
from aiokafka.structs import TopicPartition as AioTopicPartition
from kafka import KafkaConsumer, TopicPartition
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata

from tests.kit import producers

_PATIENCE_SECONDS = 60.0
#: librdkafka may wait this long for a lost connection.
_OFFSETS_SECONDS = 20.0
_BATCH_MAX = 20
#: Instead of a transactional id.
PLAIN = "-"
_POLL_SECONDS = 0.2


class Instance(producers.Producer, Protocol):
    """A transactional producer."""

    def offsets(self, group: str, topic: str, partition: int, offset: int) -> None: ...


class Reader(Protocol):
    """Reads one partition."""

    def poll(self) -> list[tuple[int, bytes]]: ...
    def commit(self, offset: int) -> None: ...
    def close(self) -> None: ...


# --- kafka-python -----------------------------------------------------------------------------------------------------


class KafkaPython(producers.KafkaPython):
    def offsets(self, group: str, topic: str, partition: int, offset: int) -> None:
        requested = {TopicPartition(topic, partition): OffsetAndMetadata(offset, "", -1)}
        self._producer.send_offsets_to_transaction(requested, ConsumerGroupMetadata(group))


class KafkaPythonReader:
    def __init__(self, bootstrap: str, topic: str, partition: int, level: str, group: str | None) -> None:
        self._consumer = KafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            isolation_level=f"read_{level}",
            auto_offset_reset="earliest",
        )
        self._partition = TopicPartition(topic, partition)
        self._consumer.assign([self._partition])

    def poll(self) -> list[tuple[int, bytes]]:
        found = self._consumer.poll(timeout_ms=int(_POLL_SECONDS * 1000), max_records=_BATCH_MAX)
        return [(each.offset, each.value) for records in found.values() for each in records]

    def commit(self, offset: int) -> None:
        self._consumer.commit({self._partition: OffsetAndMetadata(offset, "", -1)})

    def close(self) -> None:
        self._consumer.close()


# --- aiokafka ---------------------------------------------------------------------------------------------------------

_runner = asyncio.Runner()


def _run(coroutine: Any) -> Any:
    return _runner.run(asyncio.wait_for(coroutine, _PATIENCE_SECONDS))


class Aiokafka(producers.Aiokafka):
    def offsets(self, group: str, topic: str, partition: int, offset: int) -> None:
        self._run(self._producer.send_offsets_to_transaction({AioTopicPartition(topic, partition): offset}, group))


class AiokafkaReader:
    def __init__(self, bootstrap: str, topic: str, partition: int, level: str, group: str | None) -> None:
        async def start() -> aiokafka.AIOKafkaConsumer:
            consumer = aiokafka.AIOKafkaConsumer(
                bootstrap_servers=bootstrap,
                group_id=group,
                enable_auto_commit=False,
                isolation_level=f"read_{level}",
                auto_offset_reset="earliest",
            )
            await consumer.start()
            consumer.assign([self._partition])
            return consumer

        self._partition = AioTopicPartition(topic, partition)
        self._consumer = _run(start())

    def poll(self) -> list[tuple[int, bytes]]:
        found = _run(self._consumer.getmany(timeout_ms=int(_POLL_SECONDS * 1000), max_records=_BATCH_MAX))
        return [(each.offset, each.value) for records in found.values() for each in records]

    def commit(self, offset: int) -> None:
        _run(self._consumer.commit({self._partition: offset}))

    def close(self) -> None:
        _run(self._consumer.stop())


# --- confluent-kafka --------------------------------------------------------------------------------------------------


class Confluent(producers.Confluent):
    def offsets(self, group: str, topic: str, partition: int, offset: int) -> None:
        # librdkafka creates group metadata only from a consumer.
        consumer = confluent_kafka.Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": group, "log_level": 0})
        try:
            requested = [confluent_kafka.TopicPartition(topic, partition, offset)]
            self._producer.send_offsets_to_transaction(requested, consumer.consumer_group_metadata(), _OFFSETS_SECONDS)
        finally:
            consumer.close()


class ConfluentReader:
    def __init__(self, bootstrap: str, topic: str, partition: int, level: str, group: str | None) -> None:
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group or "nobody",
                "enable.auto.commit": False,
                "isolation.level": f"read_{level}",
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        start = confluent_kafka.OFFSET_STORED if group else confluent_kafka.OFFSET_BEGINNING
        self._partition = topic, partition
        self._consumer.assign([confluent_kafka.TopicPartition(topic, partition, start)])

    def poll(self) -> list[tuple[int, bytes]]:
        found = []
        for message in self._consumer.consume(_BATCH_MAX, _POLL_SECONDS):
            error = message.error()
            if error is None:
                found.append((message.offset(), message.value()))
            elif not error.retriable():
                print(f"note {error}", file=sys.stderr, flush=True)
        return found

    def commit(self, offset: int) -> None:
        requested = [confluent_kafka.TopicPartition(*self._partition, offset)]
        self._consumer.commit(offsets=requested, asynchronous=False)

    def close(self) -> None:
        self._consumer.close()


# --- commands ---------------------------------------------------------------------------------------------------------

PRODUCERS: dict[str, Any] = {"kafka-python": KafkaPython, "aiokafka": Aiokafka, "confluent-kafka": Confluent}
READERS: dict[str, Any] = {
    "kafka-python": KafkaPythonReader,
    "aiokafka": AiokafkaReader,
    "confluent-kafka": ConfluentReader,
}


def _read(reader: Reader, stop: bytes, idle_seconds: float) -> list[str]:
    """`idle_seconds` count from the first record on."""
    values: list[bytes] = []
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while stop not in values and time.monotonic() < deadline:
        found = [value for _, value in reader.poll()]
        values += found
        if found and idle_seconds:
            deadline = time.monotonic() + idle_seconds
    return [value.decode() for value in values]


class Worker:
    def __init__(self, client: str, bootstrap: str) -> None:
        self.client, self.bootstrap = client, bootstrap
        self.instances: dict[str, Instance] = {}

    def do(self, command: str, arguments: list[str]) -> str:
        match command, arguments:
            case "init", [name, transactional_id, timeout_ms]:
                self.instances[name] = self.start(transactional_id, int(timeout_ms))
            case (("begin" | "commit" | "abort" | "close"), [name]):
                getattr(self.instances[name], command)()
            case "send", [name, topic, partition, value, expected]:
                stated = None if expected == "-" else int(expected)
                sent = self.instances[name].send(topic, value, partition=int(partition), expected=stated)
                return str(sent.result(_PATIENCE_SECONDS).offset)
            case "offsets", [name, group, topic, partition, offset]:
                self.instances[name].offsets(group, topic, int(partition), int(offset))
            case "read", [topic, partition, level, stop, idle_ms]:
                reader = READERS[self.client](self.bootstrap, topic, int(partition), level, None)
                values = _read(reader, stop.encode(), int(idle_ms) / 1000)
                reader.close()
                return " ".join(values)
            case "transform", [name, group, source, target, partition]:
                self.transform(self.instances[name], group, source, target, int(partition))
            case "forward", [name, group, source, target, partition]:
                self.forward(self.instances[name], group, source, target, int(partition))
            case _:
                raise ValueError(f"{command} {arguments}")
        return ""

    def start(self, transactional_id: str, timeout_ms: int) -> Instance:
        settings: dict[str, Any] = {} if self.client == "kafka-python" else {"enable_idempotence": True}
        if transactional_id != PLAIN:
            settings |= {"transactional_id": transactional_id, "transaction_timeout_ms": timeout_ms}
        instance: Instance = PRODUCERS[self.client](self.bootstrap, seconds=_PATIENCE_SECONDS, **settings)
        return instance

    def transform(self, instance: Instance, group: str, source: str, target: str, partition: int) -> None:
        """Starts at the group's committed offset: `init` has ended the previous instance's open transaction."""
        reader: Reader = READERS[self.client](self.bootstrap, source, partition, "committed", group)
        while True:
            found = _awaited(reader)
            instance.begin()
            _at("send")
            for _, value in found:
                instance.send(target, value.decode(), partition=partition).result(_PATIENCE_SECONDS)
            _at("offsets")
            instance.offsets(group, source, partition, found[-1][0] + 1)
            _at("commit")
            instance.commit()
            print(f"ok {found[-1][0] + 1}", flush=True)

    def forward(self, instance: Instance, group: str, source: str, target: str, partition: int) -> None:
        reader: Reader = READERS[self.client](self.bootstrap, source, partition, "committed", group)
        while True:
            found = _awaited(reader)
            _at("send")
            for _, value in found:
                instance.send(target, value.decode(), partition=partition).result(_PATIENCE_SECONDS)
            _at("commit")
            reader.commit(found[-1][0] + 1)
            print(f"ok {found[-1][0] + 1}", flush=True)


def _awaited(reader: Reader) -> list[tuple[int, bytes]]:
    _at("poll")
    while not (found := reader.poll()):
        pass
    return found


def _at(step: str) -> None:
    print(f"at {step} {time.time():.3f}", file=sys.stderr, flush=True)


def main(client: str, bootstrap: str) -> None:
    faulthandler.register(signal.SIGUSR1)  # shows where it hangs
    worker = Worker(client, bootstrap)
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            print(f"ok {worker.do(command, arguments)}".rstrip(), flush=True)
        except (kafka.errors.KafkaError, aiokafka.errors.KafkaError, confluent_kafka.KafkaException) as error:
            name = type(error).__name__
            if isinstance(error, confluent_kafka.KafkaException):
                name = error.args[0].name()
            print(f"error {name} {error}".replace("\n", " "), flush=True)
        except Exception as error:
            print(f"error {type(error).__name__} {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
