"""A correct writer alongside a hostile client (`hostile.py`), and its rate.

The rates at Kafka and through the proxy are measured alternately, in short windows, and the best window of each counts.
A busy machine slows some windows. A blocked partition is slow in all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import raw

#: Pause of the writer between a response and its next append. It keeps the writer's CPU time from limiting its rate.
THINKS_SECONDS = 0.02
WINDOW_SECONDS = 1.5
ROUNDS_MIN, ROUNDS_MAX = 2, 10
#: The test measures until the ratio reaches `ENOUGH`, and requires `LEAST` on a busy machine. A blocked partition keeps
#: less than a tenth.
ENOUGH, LEAST = 0.5, 0.3
_OK, _NOT_LEADER, _TIMED_OUT = 0, 6, 7


@contextlib.contextmanager
def hostile(address: str, topic: str, way: str, *status: str) -> Iterator[subprocess.Popen[str]]:
    """Start a hostile client, wait until it is ready, and pause it."""
    command = [sys.executable, "-m", "tests.support.hostile", address, topic, way, *status]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "ready\n", process.communicate()[1][-3000:]
            os.kill(process.pid, signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def rate(address: str, topic: str, beside: subprocess.Popen[str], enter: raw.Enter = raw.as_it_is) -> float:
    """The writer's appends per second in one window."""
    os.kill(beside.pid, signal.SIGCONT)
    try:
        appended, end = 0, time.monotonic() + WINDOW_SECONDS
        records = raw.batch(b"good")
        while time.monotonic() < end:
            # A lost connection, or one silent for a whole window, counts as no append.
            with contextlib.suppress(OSError, raw.Closed), _connected(address, enter) as connection:
                while time.monotonic() < end:
                    error = connection.append(topic, records).error_code
                    assert error in (_OK, _NOT_LEADER, _TIMED_OUT)
                    appended += error == _OK and time.monotonic() < end
                    time.sleep(THINKS_SECONDS)
        return appended / WINDOW_SECONDS
    finally:
        os.kill(beside.pid, signal.SIGSTOP)


def _connected(address: str, enter: raw.Enter) -> raw.Connection:
    return raw.Connection(address, timeout_seconds=2.0, enter=enter)


def kept_rate(topics: Mapping[str, str], way: str, *status: str, enter: raw.Enter = raw.as_it_is) -> float:
    """Part of its rate at Kafka that the writer has through the proxy. `topics`: by their addresses. Prints the rates.

    `status`: the proxy's status address.
    """
    kafka, proxy = topics
    best = dict.fromkeys(topics, 0.0)
    with contextlib.ExitStack() as stack:
        beside = {
            address: stack.enter_context(hostile(address, topic, way, *(status if address == proxy else ())))
            for address, topic in topics.items()
        }
        for number in range(ROUNDS_MAX):
            for address, topic in topics.items():
                best[address] = max(best[address], rate(address, topic, beside[address], enter))
            kept = best[proxy] / max(best[kafka], 1.0)
            if number + 1 >= ROUNDS_MIN and kept >= ENOUGH:  # otherwise the machine may have been busy
                break
    print(f"\n| {way} | {best[kafka]:.1f} | {best[proxy]:.1f} | {kept:.0%} |")
    return kept
