"""How long a log writer tries; and operations that are decided anew until nobody else was first."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fencepost.errors import OffsetMismatch, TransactionAborted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempt_seconds` bounds one send or one read, `total_seconds` an append with all its retries and looks at the
    log, or the wait for a cluster that cannot be reached. Between tries the pause doubles from `pause_seconds` to
    `pause_seconds_max`.
    """

    attempt_seconds: float = 15.0
    total_seconds: float = 120.0
    pause_seconds: float = 0.05
    pause_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.attempt_seconds <= self.total_seconds:
            raise ValueError(
                f"attempt_seconds={self.attempt_seconds} must be above 0 and at most total_seconds={self.total_seconds}"
            )

    def pause(self, tries: int) -> float:
        """Seconds to wait after the `tries`-th try, counted from 1."""
        return min(self.pause_seconds_max, self.pause_seconds * 2.0 ** min(tries - 1, 32))

    def jittered(self, tries: int) -> float:
        """Seconds to wait after the `tries`-th try, drawn anew each time: two that met will not meet again so."""
        return random.uniform(0, self.pause(tries))


#: After these, nothing was appended, and reading shows what has changed.
AGAIN = (OffsetMismatch, TransactionAborted)


def retrying(attempt: Callable[[], T], policy: RetryPolicy = RetryPolicy()) -> T:
    """Calls `attempt` until it neither raises OffsetMismatch nor TransactionAborted (a TransactionConflict is one).

    `attempt` must read, decide and append, all three: an append that is only sent again, at another offset, has not
    been decided on what is there now. Pauses in between are random, up to `policy.pause`. After `policy.total_seconds`
    the last refusal is raised. An OutcomeUnknown is not retried: `attempt` may have succeeded.
    """
    deadline, tries = time.monotonic() + policy.total_seconds, 0
    while True:
        try:
            return attempt()
        except AGAIN:
            tries += 1
            pause = policy.jittered(tries)
            if time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)


async def retrying_async(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy = RetryPolicy(),
) -> T:
    """As `retrying`, for coroutine functions."""
    deadline, tries = time.monotonic() + policy.total_seconds, 0
    while True:
        try:
            return await attempt()
        except AGAIN:
            tries += 1
            pause = policy.jittered(tries)
            if time.monotonic() + pause >= deadline:
                raise
        await asyncio.sleep(pause)
