"""Measures the event loop's delay, and names the code that it runs meanwhile.

All connections share one thread: while one callback runs, no other client is served. A timer of the loop is due every
`REFRESH_SECONDS`. `LATE_SECONDS` later a thread checks whether it ran; if not, it records the frame of the loop's
thread.

Four checks per second wake an idle process eight times a second and cost 0.08 % of a core (twenty checks: 0.3 %). They
always detect a callback of 0.3 s, and shorter ones by chance.

Other causes of a delay are a busy machine and another thread that holds the interpreter lock. `cpu_seconds` far below
`late_seconds` in the log line means that the loop's thread did not run.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import fencepost_proxy
from fencepost_proxy import logs

_log = logs.get("observability.watchdog")
_limited_log = logs.RateLimitedLog(_log)

REFRESH_SECONDS = 0.25
LATE_SECONDS = 0.05
#: Delay after which the thread logs, because the loop may never continue.
STUCK_SECONDS = 2.0
_PACKAGES = Path(fencepost_proxy.__file__).parents[1]
_POLICIES = "fencepost_policies"
#: Frames outside of this file belong to no callback.
_LOOP_RUNS_IN = asyncio.runners.__file__


class Watchdog:
    """Watches the event loop that calls `start`. `observe`: called in that loop with each delay in seconds."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._due = 0.0
        self._cpu_seconds = 0.0
        self._sample: tuple[float, str] | None = None  # due time of the late check, and the frame
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._set_timer(time.monotonic())
        self._thread = threading.Thread(target=self._watch, args=[threading.get_ident()], name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    # ---- in the loop

    def _set_timer(self, now: float) -> None:
        self._cpu_seconds = time.thread_time()
        self._due = now + REFRESH_SECONDS
        self._timer = asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._on_time)

    def _on_time(self) -> None:
        now = time.monotonic()
        late, sample = now - self._due, self._sample
        self._observe(max(0.0, late))
        if late > LATE_SECONDS:
            frame = sample[1] if sample is not None and sample[0] == self._due else "unknown"
            _limited_log.warning(
                frame,
                "the event loop was late: other connections waited",
                late_seconds=round(late, 3),
                cpu_seconds=round(time.thread_time() - self._cpu_seconds, 3),
                frame=frame,
            )
        self._set_timer(now)

    # ---- in the thread

    def _watch(self, loop_thread: int) -> None:
        while not self._stopped.wait(max(0.0, self._due + LATE_SECONDS - time.monotonic())):
            due = self._due
            if time.monotonic() < due + LATE_SECONDS:
                continue
            self._sample = due, frame_of(loop_thread)
            stuck_at = due + STUCK_SECONDS
            while self._due == due and not self._stopped.wait(LATE_SECONDS):
                if time.monotonic() >= stuck_at:
                    stuck_at = float("inf")
                    _log.warning(
                        "the event loop is blocked: all connections wait",
                        late_seconds=round(time.monotonic() - due, 3),
                        frame=frame_of(loop_thread),
                    )


def frame_of(thread: int) -> str:
    """A thread's innermost frame in this product, otherwise its innermost frame; "no callback" for a waiting loop."""
    frame: FrameType | None = sys._current_frames().get(thread)
    innermost = None
    while frame is not None and frame.f_code.co_filename != _LOOP_RUNS_IN:
        innermost = innermost or frame
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGES) or _POLICIES in path.parts:
            return _shown(frame)
        frame = frame.f_back
    return "no callback" if innermost is None else _shown(innermost)


def _shown(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    short = path.relative_to(_PACKAGES) if path.is_relative_to(_PACKAGES) else Path(*path.parts[-2:])
    return f"{short}:{frame.f_lineno} {frame.f_code.co_qualname}"
