"""For tests of the client library's writers: the reader of a log in memory, which fails at times, and their clock."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Protocol

import pytest

from fencepost import LogRecord
from fencepost import _steps as module


class Readable(Protocol):
    """`committed` – the record at an offset or its value and write id, None where no committed record is."""

    rng: Random

    def something_happens(self) -> None: ...
    def stable(self, partition: int) -> int: ...
    def committed(self, partition: int, offset: int) -> tuple[bytes, bytes] | LogRecord | None: ...


class FakeConsumer:
    """`problem` – the probability of an error."""

    error = timeout_error = ConnectionError

    def __init__(self, log: Readable, problem: float) -> None:
        self.log, self.problem = log, problem
        self.partition = self.position = 0

    def start(self) -> None: ...

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        self.log.something_happens()
        if self.log.rng.random() < self.problem:
            raise ConnectionError("no broker")
        return 0, self.log.stable(partition)

    def exists(self, topic: str, partition: int) -> bool:
        return True

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self.partition, self.position = partition, offset

    def poll(self) -> tuple[list[LogRecord], int]:
        if self.log.rng.random() < self.problem / 10:
            raise ConnectionError("no broker")
        at, self.position = self.position, self.position + 1
        found = self.log.committed(self.partition, at)
        if isinstance(found, tuple):
            found = LogRecord(at, 0, None, found[0], (("fencepost-write-id", found[1]),))
        return [] if found is None else [found], self.position

    def pause(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time passes by sleeping only."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds: float) -> None:
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(module, "time", fake)
    return now
