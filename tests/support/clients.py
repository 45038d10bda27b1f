"""One interface to the three client libraries, so that one test can run with each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Protocol, TypeVar

from kafka import KafkaAdminClient
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewTopic

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost import LogRecord, Record, RetryPolicy
from tests.kit import producers
from tests.kit.reading import read
from tests.kit.waiting import until
from tests.support.raw import Log as RawLog

T = TypeVar("T")
WAIT_SECONDS = 90.0


def create_topic(bootstrap: str, topic: str, check: str | None = None, *, partitions: int = 1, **configs: str) -> str:
    """`check`: value of fencepost.check.expected.offsets (through a proxy)."""
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=configs)])
        # The broker that returns the topic's configs learns of it shortly after the controller.
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        until(lambda: admin.describe_configs([resource], config_filter="all")["topic"][topic], f"{topic} to appear")
    if check is not None:
        set_check(bootstrap, topic, check)
    return topic


def set_check(bootstrap: str, topic: str, check: str) -> None:
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        change = {"fencepost.check.expected.offsets": (AlterConfigOp.SET, check)}
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])


def read_all(bootstrap: str, topic: str, partition: int = 0) -> list[tuple[int, bytes]]:
    """(offset, value) of every record, as a consumer gets them."""
    found = read(bootstrap, (topic, partition), isolation="read_uncommitted")
    return [(message.offset(), message.value()) for message in found]


def log_end(bootstrap: str, topic: str) -> int:
    return RawLog(bootstrap).end(topic)


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


class Producer:
    """A `ConditionalProducer`. `send` submits a record without waiting; `resolve` waits for all."""

    def __init__(self, library: str, bootstrap: str, *, idempotence: Any = None, **configs: Any) -> None:
        chosen = {} if idempotence is None else {"idempotence": idempotence}
        more = {"options": chosen} if library == "confluent-kafka" else chosen
        kind = {"kind": producers.OURS[library], "seconds": WAIT_SECONDS, **more}
        self._producer = producers.start(library, None, bootstrap, **kind, **configs)
        self._waiting: list[tuple[Outcome, Future[producers.Placed]]] = []

    def send(self, topic: str, value: bytes, *, expected_offset: int | None = None, **more: Any) -> Outcome:
        said = {name: each.decode() if isinstance(each, bytes) else each for name, each in more.items()}
        said = {"partition": None, **said, "expected": expected_offset}
        outcome = Outcome()
        self._waiting.append((outcome, self._producer.send(topic, value.decode(), **said)))
        return outcome

    def resolve(self) -> None:
        for outcome, future in self._waiting:
            found = producers.outcome(future, WAIT_SECONDS)
            if isinstance(found, Exception):
                outcome.error = found
            else:
                outcome.offset = found
        self._waiting.clear()

    def close(self) -> None:
        self.resolve()
        self._producer.close()


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


def log_writer(library: str, topic: str, bootstrap: str, retry: RetryPolicy | None = None) -> Log:
    """A `LogWriter` of partition 0 with the common interface."""
    retry = retry or RetryPolicy()
    if library == "kafka-python":
        return fencepost.kafka_python.LogWriter(topic, 0, bootstrap_servers=bootstrap, retry=retry)
    if library == "aiokafka":
        return AiokafkaLog(topic, bootstrap, retry)
    return fencepost.confluent.LogWriter(topic, 0, {"bootstrap.servers": bootstrap}, retry=retry)
