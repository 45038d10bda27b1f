"""Writers with producers of the four clients, which continue after every error.

Unconditional producers have the client's usual configuration, with acks=all and idempotence, and ten records in flight.
Conditional ones state an expected offset for every append. They use the client library's `LogWriter`, or Kafka's Java
producer with the headers of the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fencepost import Record
from tests.kit import producers
from tests.kit.history import OK, UNKNOWN, History, Manner, Operation, Reported
from tests.kit.java import JavaProducers
from tests.kit.threads import Worker
from tests.support.clients import log_writer

PARTITIONS = 3
#: Longer than the delivery timeout of any client.
_REPORTED_SECONDS = 180.0
_AT_ONCE = 10
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Shared:
    """What all writers of a run use. `kafka` – Kafka's own bootstrap address."""

    kafka: str
    bootstrap: str
    history: History
    java: JavaProducers


class Writer(Worker):
    """Runs from its construction until `finish`. Its name is the prefix of its values, which are numbered."""

    manner = Manner(resends=True, idempotent=True)

    def __init__(self, name: str, topic: str, shared: Shared) -> None:
        super().__init__(name)
        self.topic = topic
        self.appended = 0
        self._shared = shared
        self.start()

    def progress(self) -> int:
        """Records that were reported as appended."""
        self.raise_error()
        return self.appended

    def finish(self) -> None:
        self.stop()
        self.join(2 * _REPORTED_SECONDS)

    def _call(self, value: str, expected: int | None = None, **more: Any) -> Operation:
        return self._shared.history.call(self.name, self.topic, [value], expected=expected, manner=self.manner, **more)

    def _reported(self, operation: Operation, outcome: int | Exception | None) -> None:
        if isinstance(outcome, Exception):
            failed = Reported(UNKNOWN, code=type(outcome).__name__, detail=f"{outcome}"[:200])
            self._shared.history.reported(operation, failed)
        else:
            self._shared.history.reported(operation, Reported(OK, offset=outcome))
            self.appended += 1


class Plain(Writer):
    """Without expected offsets."""

    def __init__(self, client: str, topic: str, shared: Shared) -> None:
        self._client = client
        super().__init__(f"{client}-plain", topic, shared)

    def work(self) -> None:
        java, settings = self._shared.java, {"acks": "all", "enable_idempotence": True}
        producer = producers.start(self._client, java, self._shared.bootstrap, seconds=_REPORTED_SECONDS, **settings)
        number = 0
        while not self.over.is_set():
            pipeline_key, sent = f"{self.name}/{number}", []
            for _ in range(_AT_ONCE):
                value, partition = f"{self.name}/{number}", number % PARTITIONS
                operation = self._call(value, partition=partition, pipeline_key=pipeline_key)
                sent.append((operation, producer.send(self.topic, value, partition=partition)))
                number += 1
            for operation, future in sent:
                self._reported(operation, producers.outcome(future, _REPORTED_SECONDS))
            self.over.wait(_PAUSE_SECONDS)
        producer.close()


class Conditional(Writer):
    """One record per append. The only writer of its topic."""

    manner = Manner(named=True, resends=True)

    def __init__(self, client: str, topic: str, shared: Shared) -> None:
        self._client = client
        super().__init__(f"{client}-conditional", topic, shared)

    def work(self) -> None:
        bootstrap = self._shared.bootstrap
        if self._client == "java":
            producer = producers.Java(self._shared.java, bootstrap, acks="all", seconds=_REPORTED_SECONDS)

            def append(value: str, end: int) -> int:
                sent = producer.send(self.topic, value, expected=end, write_id=value)
                return sent.result(_REPORTED_SECONDS).offset

            self._append_all(append)
            producer.close()
            return
        log = log_writer(self._client, self.topic, bootstrap)
        log.read_to_end(lambda record: None)
        self._append_all(lambda value, _: log.append([Record(value.encode())]))
        log.close()

    def _append_all(self, append: Callable[[str, int], int]) -> None:
        number = end = 0
        while not self.over.is_set():
            value = f"{self.name}/{number}"
            operation = self._call(value, end)
            try:
                offset = append(value, end)
            except Exception as error:
                self._reported(operation, error)
            else:
                self._reported(operation, offset)
                end = offset + 1
            number += 1
            self.over.wait(_PAUSE_SECONDS)


def finish(writers: Sequence[Writer]) -> None:
    """Finish all writers, also if one of them hangs."""
    with ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.finish)
