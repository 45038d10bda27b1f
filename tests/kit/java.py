"""Kafka's Java producers in one JVM, controlled by lines of text (`tests/java/ScriptedProducer.java`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path

from fencepost_dev.process import supervised
from fencepost_dev.tools import compile_java, java_command
from tests.kit.closing import Closing
from tests.support.kafka import kafka_version

_SOURCE = Path(__file__).parents[1] / "java" / "ScriptedProducer.java"
_END_SECONDS = 10.0


class JavaError(Exception):
    """`kind` is the exception's simple class name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind} {message}")
        self.kind = kind
        self.message = message


class JavaProducers(Closing):
    """Start it in a thread that lives as long. Thread-safe."""

    def __init__(self, log: Path = Path(os.devnull)) -> None:
        classes = compile_java([_SOURCE], version=kafka_version())
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                supervised(java_command("ScriptedProducer", [], classes=classes, version=kafka_version())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[list[int]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECONDS)

    def query(self, verb: str, name: str, *words: str) -> Future[list[int]]:
        """The future has the response's numbers (of a send: offset and partition), or raises JavaError."""
        number = str(next(self._numbers))
        stdin = self._process.stdin
        assert stdin is not None
        future: Future[list[int]] = Future()
        with self._lock:
            self._waiting[number] = future
            stdin.write("\t".join((number, verb, name, *words)) + "\n")
            stdin.flush()
        return future

    @staticmethod
    def words(**settings: object) -> list[str]:
        return [
            f"{key.replace('_', '.')}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in settings.items()
        ]

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                number, what, *rest = line.rstrip("\n").split("\t", 3)
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None or future.done():
                    continue
                if what == "ok":
                    future.set_result([int(word) for each in rest for word in each.split("\t")])
                else:
                    future.set_exception(JavaError(rest[0], rest[1] if len(rest) > 1 else ""))
        with self._lock:
            left, self._waiting = self._waiting, {}
        for future in left.values():
            if not future.done():
                future.set_exception(JavaError("Ended", "the JVM has ended"))
