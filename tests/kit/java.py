"""Kafka's Java producers in one JVM, controlled by lines of text (`tests/java/ScriptedProducer.java`)."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future
from pathlib import Path

from fencepost_dev.tools import compile_java, java_command
from tests.kit.lines import LineProcess
from tests.support.kafka import kafka_version

_SOURCE = Path(__file__).parents[1] / "java" / "ScriptedProducer.java"


class JavaError(Exception):
    """`kind` is the exception's simple class name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind} {message}")
        self.kind = kind
        self.message = message


class JavaProducers(LineProcess):
    """Thread-safe."""

    def __init__(self, log: Path = Path(os.devnull)) -> None:
        classes = compile_java([_SOURCE], version=kafka_version())
        command = java_command("ScriptedProducer", [], classes=classes, version=kafka_version())
        self._numbers = itertools.count(1)
        self._waiting: dict[str, Future[list[int]]] = {}
        super().__init__(command, self._answered, log=log)

    def query(self, verb: str, name: str, *words: str) -> Future[list[int]]:
        """The future has the response's numbers (of a send: offset and partition), or raises JavaError."""
        number = str(next(self._numbers))
        future = self._waiting[number] = Future()
        self.send("\t".join((number, verb, name, *words)))
        return future

    @staticmethod
    def words(**settings: object) -> list[str]:
        return [
            f"{key.replace('_', '.')}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in settings.items()
        ]

    def _answered(self, line: str | None) -> None:
        if line is None:
            while self._waiting:
                _, future = self._waiting.popitem()
                if not future.done():
                    future.set_exception(JavaError("Ended", "the JVM has ended"))
            return
        number, what, *rest = line.split("\t", 3)
        future = self._waiting.pop(number, None)
        if future is None or future.done():  # Java may report a failed send twice: it calls back, and raises
            return
        if what == "ok":
            future.set_result([int(word) for each in rest for word in each.split("\t")])
        else:
            future.set_exception(JavaError(rest[0], rest[1] if len(rest) > 1 else ""))
