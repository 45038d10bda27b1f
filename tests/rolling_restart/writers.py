"""Producers of the four clients that continue after every error, and the outcome of each send.

Unconditional producers have the client's usual configuration, with acks=all and idempotence, and ten records in flight.
Conditional ones state an expected offset for every append. They use the client library's `LogWriter`, or Kafka's Java
producer with the headers of the contract.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiokafka
import confluent_kafka
from kafka import KafkaProducer

from fencepost import Record
from tests.kit.java import JavaProducers
from tests.support.clients import log_writer

CLIENTS = ("java", "kafka-python", "aiokafka", "confluent-kafka")
#: Longer than the delivery timeout of any client.
_REPORTED_SECONDS = 180.0
_AT_ONCE = 10
_PAUSE_SECONDS = 0.05


@dataclass
class Ledger:
    """`reported` – value → offset, of sends that the client reported as appended. `failed` – value → error."""

    reported: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    longest_pause_seconds: float = 0.0


class Sending(Protocol):
    """Send all values and wait for all: for each, the offset or the error that a user gets."""

    def send(self, values: Sequence[str]) -> list[int | Exception]: ...
    def close(self) -> None: ...


class Writer:
    """Runs from its construction until `finish`. `name` is the prefix of its values, which are numbered."""

    def __init__(self, name: str, topic: str, start: Callable[[], Sending], at_once: int) -> None:
        self.name = name
        self.topic = topic
        self.ledger = Ledger()
        self._start = start
        self._at_once = at_once
        self._end = threading.Event()
        self.crashed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def appended(self) -> int:
        self.raise_crash()
        return len(self.ledger.reported)

    def raise_crash(self) -> None:
        if self.crashed is not None:
            raise AssertionError(f"writer {self.name} has ended") from self.crashed

    def finish(self) -> None:
        self._end.set()
        self._thread.join(2 * _REPORTED_SECONDS)
        assert not self._thread.is_alive(), f"writer {self.name} does not end"

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.crashed = error
            raise

    def _work(self) -> None:
        sending = self._start()
        number, ledger = 0, self.ledger
        while not self._end.is_set():
            values = [f"{self.name}/{number + each}" for each in range(self._at_once)]
            number += self._at_once
            began = time.monotonic()
            for value, reported in zip(values, sending.send(values), strict=True):
                if isinstance(reported, int):
                    ledger.reported[value] = reported
                else:
                    ledger.failed[value] = f"{type(reported).__name__} {reported}"
            ledger.longest_pause_seconds = max(ledger.longest_pause_seconds, time.monotonic() - began)
            self._end.wait(_PAUSE_SECONDS)
        sending.close()


class KafkaPython:
    def __init__(self, bootstrap: str, topic: str, **more: Any) -> None:
        self._topic = topic
        self._producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, **more)

    def send(self, values: Sequence[str]) -> list[int | Exception]:
        futures = [self._producer.send(self._topic, each.encode()) for each in values]
        reported: list[int | Exception] = []
        for future in futures:
            try:
                reported.append(int(future.get(_REPORTED_SECONDS).offset))
            except Exception as error:
                reported.append(error)
        return reported

    def close(self) -> None:
        self._producer.close(_REPORTED_SECONDS)


class Aiokafka:
    def __init__(self, bootstrap: str, topic: str, **more: Any) -> None:
        self._topic = topic
        self._runner = asyncio.Runner()

        async def start() -> aiokafka.AIOKafkaProducer:
            settings = {"bootstrap_servers": bootstrap, "acks": "all", "enable_idempotence": True, **more}
            producer = aiokafka.AIOKafkaProducer(**settings)
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            return producer

        try:
            self._producer = self._runner.run(start())
        except BaseException:
            self._runner.close()
            raise

    def send(self, values: Sequence[str]) -> list[int | Exception]:
        async def all_of_them() -> list[Any]:
            futures = [await self._producer.send(self._topic, each.encode()) for each in values]
            return await asyncio.gather(*futures, return_exceptions=True)

        return [each if isinstance(each, Exception) else int(each.offset) for each in self._runner.run(all_of_them())]

    def close(self) -> None:
        self._runner.run(self._producer.stop())
        self._runner.close()


class Confluent:
    def __init__(self, bootstrap: str, topic: str, **more: Any) -> None:
        self._topic = topic
        settings = {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True}
        self._producer = confluent_kafka.Producer(settings | {key.replace("_", "."): more[key] for key in more})

    def send(self, values: Sequence[str]) -> list[int | Exception]:
        reported: dict[str, int | Exception] = {}

        def delivered(error: Any, message: confluent_kafka.Message) -> None:
            value = (message.value() or b"").decode()
            reported[value] = int(message.offset() or 0) if error is None else confluent_kafka.KafkaException(error)

        for each in values:
            self._producer.produce(self._topic, each.encode(), on_delivery=delivered)
        self._producer.flush(_REPORTED_SECONDS)
        return [reported.get(each, TimeoutError("no outcome")) for each in values]

    def close(self) -> None:
        self._producer.flush(_REPORTED_SECONDS)


class Java:
    """One producer in the shared JVM. `expects` – whether it states the expected offset of each append."""

    def __init__(
        self, java: JavaProducers, name: str, bootstrap: str, topic: str, *, expects: bool = False, **more: Any
    ) -> None:
        self._java = java
        self._name = name
        self._topic = topic
        self._expects = expects
        self._next = 0
        settings = {"bootstrap_servers": bootstrap, "acks": "all", "enable_idempotence": "true", **more}
        java.open(name, **settings).result(_REPORTED_SECONDS)

    def send(self, values: Sequence[str]) -> list[int | Exception]:
        if self._expects:
            return [self._append(each) for each in values]
        futures = [self._java.send(self._name, self._topic, each) for each in values]
        reported: list[int | Exception] = []
        for future in futures:
            try:
                reported.append(future.result(_REPORTED_SECONDS) or 0)
            except Exception as error:
                reported.append(error)
        return reported

    def _append(self, value: str) -> int | Exception:
        try:
            offset = self._java.send(self._name, self._topic, value, self._next, value).result(_REPORTED_SECONDS)
        except Exception as error:
            return error
        assert offset is not None
        self._next = offset + 1
        return offset

    def close(self) -> None:
        self._java.query("close", self._name).result(_REPORTED_SECONDS)


class _LogWriter:
    """One record per append."""

    def __init__(self, client: str, bootstrap: str, topic: str) -> None:
        self._log = log_writer(client, topic, bootstrap)
        self._log.read_to_end(lambda record: None)

    def send(self, values: Sequence[str]) -> list[int | Exception]:
        reported: list[int | Exception] = []
        for each in values:
            try:
                reported.append(self._log.append([Record(each.encode())]))
            except Exception as error:
                reported.append(error)
        return reported

    def close(self) -> None:
        self._log.close()


def plain(client: str, bootstrap: str, topic: str, java: JavaProducers) -> Writer:
    """Without expected offsets; batches of several records."""
    name = f"{client}-plain"
    starts: dict[str, Callable[[], Sending]] = {
        "java": lambda: Java(java, name, bootstrap, topic, expects=False),
        "kafka-python": lambda: KafkaPython(bootstrap, topic),
        "aiokafka": lambda: Aiokafka(bootstrap, topic),
        "confluent-kafka": lambda: Confluent(bootstrap, topic),
    }
    return Writer(name, topic, starts[client], _AT_ONCE)


def conditional(client: str, bootstrap: str, topic: str, java: JavaProducers) -> Writer:
    """Each append states its expected offset. The only writer of its topic."""
    name = f"{client}-conditional"
    if client == "java":
        return Writer(name, topic, lambda: Java(java, name, bootstrap, topic, expects=True), 1)
    return Writer(name, topic, lambda: _LogWriter(client, bootstrap, topic), 1)


def finish(writers: Sequence[Writer]) -> None:
    """Finish all writers, also if one of them hangs."""
    with ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.finish)
