"""What a run makes of a proxy's log."""

from __future__ import annotations

from tests.soak.run import crashes

LOG = """\
2026-01-01T00:00:00.000Z INFO net.app serving bootstrap=127.0.0.1:19092 brokers=3
2026-01-01T00:00:01.000Z ERROR net.app read t-0 crashed
    Traceback (most recent call last):
      File "app.py", line 1, in read
        go()
        ^^^^
    RuntimeError: the handler is closed
2026-01-01T00:00:02.000Z ERROR net.app read t-1 crashed
    Traceback (most recent call last):
      File "app.py", line 1, in read
    RuntimeError: the handler is closed
2026-01-01T00:00:03.000Z WARNING net.broker broker cannot be reached
"""


def test_a_crash_in_the_log_is_told_once_and_counted() -> None:
    assert list(crashes("a", LOG)) == ["proxy a crashed 2 times with RuntimeError: the handler is closed; see its log"]
    assert list(crashes("a", LOG.splitlines()[0])) == []
