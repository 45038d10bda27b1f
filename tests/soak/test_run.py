"""Stack traces in a proxy's log, and the end of a run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.kit.history import History
from tests.soak import run
from tests.soak.run import append_at_last, crashes
from tests.support.raw import Answer

LOG = """\
2026-01-01T00:00:00.000Z INFO server serving bootstrap=127.0.0.1:19092 brokers=3
2026-01-01T00:00:01.000Z ERROR server read t-0 crashed
    Traceback (most recent call last):
      File "app.py", line 1, in read
        go()
        ^^^^
    RuntimeError: the handler is closed
2026-01-01T00:00:02.000Z ERROR server read t-1 crashed
    Traceback (most recent call last):
      File "app.py", line 1, in read
    RuntimeError: the handler is closed
2026-01-01T00:00:03.000Z WARNING cluster.broker broker unreachable
"""


def test_repeated_crash_in_log_is_reported_once() -> None:
    assert list(crashes("a", LOG)) == ["proxy a crashed 2 times with RuntimeError: the handler is closed; see its log"]
    assert list(crashes("a", LOG.splitlines()[0])) == []


class Busy:
    """A partition with other appends between each read of its end and the append there, until `over`."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def append(self, topic: str, _: bytes) -> Answer:
        if self._over.is_set():
            return Answer(0, self._end, -1, 0, None, ())
        reported = f"OFFSET_MISMATCH topic={topic} partition=0 expected={self._end} actual={self._end + 1}"
        self._end += 1
        return Answer(44, self._end, -1, 0, reported, ())


def test_probe_losing_every_race_stops_the_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    busy = Busy(over)
    monkeypatch.setattr(run, "connect_to_leader", lambda *_: busy)
    monkeypatch.setattr(run, "_HEARTBEAT_SECONDS", 30.0)
    monkeypatch.setattr(run, "_RACE_SECONDS", 0.2)
    stage: Any = SimpleNamespace(bootstrap=lambda _: "127.0.0.1:9092")
    assert append_at_last(stage, History(), "checked-mixed", "a", over)
    assert over.is_set()
