"""The watchdog over a real event loop: how late it was, and which code it ran meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from fencepost_proxy import logs
from fencepost_proxy.observability import watchdog as product
from fencepost_proxy.observability.watchdog import LATE_SECONDS, Watchdog, frame_of
from tests.kit.waiting import until_async

_LONGEST_SECONDS = 20.0


def _spin_until(done: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + _LONGEST_SECONDS
    while not done():
        assert time.monotonic() < give_up_at


def _in_the_product(clock: Callable[[], float]) -> None:
    logs.RateLimitedLog(logs.get("test"), clock=clock).info("x", "x")


def _fields(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [each.__dict__["fencepost_fields"] for each in caplog.records if each.getMessage().startswith(event)]


@pytest.fixture(autouse=True)
def _no_line_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_limited_log", logs.RateLimitedLog(logs.get("observability.watchdog")))


async def test_long_callback_is_measured_and_its_frame_named(caplog: pytest.LogCaptureFixture) -> None:
    late: list[float] = []

    def clock() -> float:
        """Called by a method of the product, in the event loop."""
        _spin_until(lambda: watchdog._sample is not None)
        return 0.0

    watchdog = Watchdog(late.append)
    with caplog.at_level(logging.WARNING, "fencepost"):
        watchdog.start()
        asyncio.get_running_loop().call_soon(_in_the_product, clock)
        await until_async(lambda: any(each > LATE_SECONDS for each in late), "a late report")
        watchdog.stop()

    first = _fields(caplog, "the event loop was late")[0]
    assert str(first["frame"]).startswith("fencepost_proxy/logs.py:")
    assert str(first["frame"]).endswith(" RateLimitedLog._limited")
    assert first["late_seconds"] == round(next(each for each in late if each > LATE_SECONDS), 3)
    assert 0 < float(str(first["cpu_seconds"])) <= float(str(first["late_seconds"])) + product.REFRESH_SECONDS + 0.1


async def test_blocked_event_loop_is_logged_while_blocked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "STUCK_SECONDS", 0.1)

    def stands() -> float:
        _spin_until(lambda: bool(_fields(caplog, "the event loop is blocked")))
        return 0.0

    watchdog = Watchdog(lambda late: None)
    with caplog.at_level(logging.WARNING, "fencepost"):
        watchdog.start()
        asyncio.get_running_loop().call_soon(_in_the_product, stands)
        await until_async(lambda: bool(_fields(caplog, "the event loop was late")), "the log line")
        watchdog.stop()

    standing = _fields(caplog, "the event loop is blocked")[0]
    assert str(standing["frame"]).endswith(" RateLimitedLog._limited")


async def test_punctual_event_loop_is_measured_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    late: list[float] = []
    watchdog = Watchdog(late.append)
    with caplog.at_level(logging.WARNING, "fencepost"):
        watchdog.start()
        await until_async(lambda: len(late) >= 2, "two reports")
        watchdog.stop()

    # A busy machine may be late; what is logged is what was measured.
    assert bool(_fields(caplog, "the event loop was late")) is any(each > LATE_SECONDS for each in late)


def test_waiting_loop_runs_no_callback() -> None:
    async def wait() -> None:
        ends = asyncio.Event()
        loops.append((asyncio.get_running_loop(), ends, threading.get_ident()))
        await ends.wait()

    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = []
    thread = threading.Thread(target=lambda: asyncio.Runner(loop_factory=_uvloop).run(wait()))
    thread.start()
    try:
        _spin_until(lambda: bool(loops))
        _spin_until(lambda: frame_of(loops[0][2]) == "no callback")
    finally:
        loop, ends, _ = loops[0]
        loop.call_soon_threadsafe(ends.set)
        thread.join()


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]


async def test_stopped_watchdog_leaves_no_thread_and_no_timer() -> None:
    late: list[float] = []
    watchdog = Watchdog(late.append)
    watchdog.start()
    await until_async(lambda: bool(late), "a report")
    assert "watchdog" in {each.name for each in threading.enumerate()}
    watchdog.stop()
    assert watchdog._timer is not None
    assert watchdog._timer.cancelled()
    assert "watchdog" not in {each.name for each in threading.enumerate()}


def test_watchdog_that_never_started_can_be_stopped() -> None:
    Watchdog(lambda late: None).stop()
