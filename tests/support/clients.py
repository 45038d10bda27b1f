"""One interface to the three client libraries, so that one test can run with each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import confluent_kafka
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewTopic

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost import LogRecord, Record, RetryPolicy

T = TypeVar("T")
WAIT_SECONDS = 90.0


def create_topic(bootstrap: str, topic: str, check: str | None = None, *, partitions: int = 1, **configs: str) -> str:
    """`check`: value of fencepost.check.expected.offsets (through a proxy)."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=configs)])
        # The broker that returns the topic's configs learns of it shortly after the controller.
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        give_up = time.monotonic() + WAIT_SECONDS
        while not admin.describe_configs([resource], config_filter="all")["topic"][topic]:
            assert time.monotonic() < give_up, f"{topic} did not appear"
            time.sleep(0.05)
    finally:
        admin.close()
    if check is not None:
        set_check(bootstrap, topic, check)
    return topic


def set_check(bootstrap: str, topic: str, check: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        change = {"fencepost.check.expected.offsets": (AlterConfigOp.SET, check)}
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
    finally:
        admin.close()


def read_all(bootstrap: str, topic: str, partition: int = 0) -> list[tuple[int, bytes]]:
    """(offset, value) of every record, as a consumer gets them."""
    tp = TopicPartition(topic, partition)
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False)
    try:
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        end = consumer.end_offsets([tp])[tp]
        found: list[tuple[int, bytes]] = []
        while consumer.position(tp) < end:
            found += [(r.offset, r.value) for r in consumer.poll(500).get(tp, [])]
        return found
    finally:
        consumer.close()


def log_end(bootstrap: str, topic: str, partition: int = 0) -> int:
    tp = TopicPartition(topic, partition)
    consumer = KafkaConsumer(bootstrap_servers=bootstrap)
    try:
        return int(consumer.end_offsets([tp])[tp])
    finally:
        consumer.close()


class Outcome:
    """The result of one send: `offset` or `error`. `Producer.resolve` sets it."""

    def __init__(self) -> None:
        self.offset: int | None = None
        self.error: Exception | None = None

    def get(self) -> int:
        if self.error is not None:
            raise self.error
        assert self.offset is not None, "not resolved"
        return self.offset


class Producer(Protocol):
    """`send` submits a record without waiting; `resolve` waits for all."""

    def send(self, topic: str, value: bytes, **options: Any) -> Outcome: ...

    def resolve(self) -> None: ...

    def close(self) -> None: ...


class KafkaPythonProducer:
    def __init__(self, bootstrap: str, **configs: Any) -> None:
        self.producer = fencepost.kafka_python.ConditionalProducer(bootstrap_servers=bootstrap, **configs)
        self._waiting: list[tuple[Outcome, Any]] = []

    def send(self, topic: str, value: bytes, **options: Any) -> Outcome:
        outcome = Outcome()
        self._waiting.append((outcome, self.producer.send(topic, value, **options)))
        return outcome

    def resolve(self) -> None:
        for outcome, future in self._waiting:
            try:
                outcome.offset = future.get(WAIT_SECONDS).offset
            except Exception as error:
                outcome.error = error
        self._waiting.clear()

    def close(self) -> None:
        self.producer.close(WAIT_SECONDS)


class ConfluentProducer:
    def __init__(self, bootstrap: str, *, idempotence: Any = None, **configs: Any) -> None:
        named = {name.replace("_", "."): value for name, value in configs.items()}
        self.producer = fencepost.confluent.ConditionalProducer(
            {"bootstrap.servers": bootstrap, **named}, idempotence=idempotence
        )

    def send(self, topic: str, value: bytes, **options: Any) -> Outcome:
        outcome = Outcome()

        def delivered(err: Any, msg: confluent_kafka.Message) -> None:
            if err is None:
                outcome.offset = msg.offset()
            else:
                outcome.error = err if isinstance(err, Exception) else confluent_kafka.KafkaException(err)

        if "timestamp_ms" in options:
            options["timestamp"] = options.pop("timestamp_ms")
        self.producer.produce(topic, value, on_delivery=delivered, **options)
        return outcome

    def resolve(self) -> None:
        assert self.producer.flush(WAIT_SECONDS) == 0

    def close(self) -> None:
        self.resolve()
        self.producer.close()


class AiokafkaProducer:
    """aiokafka in a separate event loop, which runs only during a call."""

    def __init__(self, bootstrap: str, **configs: Any) -> None:
        self._runner = asyncio.Runner()
        self._waiting: list[tuple[Outcome, asyncio.Future[Any]]] = []

        async def start() -> fencepost.aiokafka.ConditionalProducer:
            producer = fencepost.aiokafka.ConditionalProducer(bootstrap_servers=bootstrap, **configs)
            await producer.start()
            return producer

        self.producer = self._runner.run(start())

    def send(self, topic: str, value: bytes, **options: Any) -> Outcome:
        outcome = Outcome()
        self._waiting.append((outcome, self._runner.run(self.producer.send(topic, value, **options))))
        return outcome

    def resolve(self) -> None:
        async def resolve() -> None:
            for outcome, future in self._waiting:
                try:
                    outcome.offset = (await asyncio.wait_for(future, WAIT_SECONDS)).offset
                except Exception as error:
                    outcome.error = error

        self._runner.run(resolve())
        self._waiting.clear()

    def close(self) -> None:
        self._runner.run(self.producer.stop())
        self._runner.close()


class Log(Protocol):
    @property
    def next_offset(self) -> int | None: ...

    def __iter__(self) -> Iterator[LogRecord]: ...

    def read_to_end(self, apply: Callable[[LogRecord], None]) -> int: ...

    def append(self, records: Sequence[Record]) -> int: ...

    def close(self) -> None: ...


class AiokafkaLog:
    def __init__(self, topic: str, bootstrap: str, retry: RetryPolicy) -> None:
        self._runner = asyncio.Runner()

        async def start() -> fencepost.aiokafka.LogWriter:
            log = fencepost.aiokafka.LogWriter(topic, 0, bootstrap_servers=bootstrap, retry=retry)
            await log.start()
            return log

        self._log = self._runner.run(start())

    @property
    def next_offset(self) -> int | None:
        return self._log.next_offset

    def __iter__(self) -> Iterator[LogRecord]:
        records = aiter(self._log)

        async def following() -> LogRecord | None:
            return await anext(records, None)

        while (record := self._run(following())) is not None:
            yield record

    def read_to_end(self, apply: Callable[[LogRecord], None]) -> int:
        return self._run(self._log.read_to_end(apply))

    def append(self, records: Sequence[Record]) -> int:
        return self._run(self._log.append(records))

    def close(self) -> None:
        self._run(self._log.stop())
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


LIBRARIES = ("kafka-python", "aiokafka", "confluent-kafka")


def producer(library: str, bootstrap: str, **configs: Any) -> Producer:
    """A `ConditionalProducer` with the common interface."""
    kinds: dict[str, Callable[..., Producer]] = {
        "kafka-python": KafkaPythonProducer,
        "aiokafka": AiokafkaProducer,
        "confluent-kafka": ConfluentProducer,
    }
    return kinds[library](bootstrap, **configs)


def log_writer(library: str, topic: str, bootstrap: str, retry: RetryPolicy | None = None) -> Log:
    """A `LogWriter` of partition 0 with the common interface."""
    retry = retry or RetryPolicy()
    if library == "kafka-python":
        return fencepost.kafka_python.LogWriter(topic, 0, bootstrap_servers=bootstrap, retry=retry)
    if library == "aiokafka":
        return AiokafkaLog(topic, bootstrap, retry)
    return fencepost.confluent.LogWriter(topic, 0, {"bootstrap.servers": bootstrap}, retry=retry)
