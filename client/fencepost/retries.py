"""Time limits of log writers, and retry loops for read-decide-append operations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fencepost._steps import CannotRead, Pause, Steps, now, run, run_async
from fencepost.errors import FencepostError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time limits in seconds.

    `attempt_seconds` limits one send or one read. `total_seconds` limits an append with its retries and log reads, or
    the wait for an unreachable cluster. The pause between attempts doubles from `pause_seconds` to `pause_seconds_max`.
    Raises ValueError unless 0 < `attempt_seconds` <= `total_seconds`.
    """

    attempt_seconds: float = 15.0
    total_seconds: float = 120.0
    pause_seconds: float = 0.05
    pause_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.attempt_seconds <= self.total_seconds:
            raise ValueError(
                f"attempt_seconds={self.attempt_seconds} must be > 0 and <= total_seconds={self.total_seconds}"
            )

    def pause(self, tries: int) -> float:
        """Seconds to wait after attempt number `tries`, counted from 1."""
        return min(self.pause_seconds_max, self.pause_seconds * 2.0 ** min(tries - 1, 32))

    def jittered(self, tries: int) -> float:
        """Random seconds up to `pause(tries)`, so that two conflicting writers do not retry at the same time."""
        return random.uniform(0, self.pause(tries))


def patiently(act: Callable[[], Steps[T]], policy: RetryPolicy, temporary: type[Exception] = CannotRead) -> Steps[T]:
    """Repeat `act` after CannotRead and `temporary` for `total_seconds`; then raise the client library's error."""
    deadline = now() + policy.total_seconds
    for tries in itertools.count(1):
        try:
            return (yield from act())
        except (CannotRead, temporary) as error:
            if now() >= deadline:
                raise (error.__cause__ or error if isinstance(error, CannotRead) else error) from None
        yield Pause(policy.pause(tries))
    raise AssertionError("unreachable")


def retrying(attempt: Callable[[], T], policy: RetryPolicy = RetryPolicy()) -> T:
    """Call `attempt` until it raises no `retriable` error (OffsetMismatchError, TransactionAbortedError).

    `attempt` must read, decide and append. Sending the same append at another offset would skip the decision. Pauses
    are random, up to `policy.pause`. After `policy.total_seconds` the last error is raised. OutcomeUnknownError is not
    retried, because `attempt` may have succeeded.
    """
    result: T = run(_attempts(attempt, policy))
    return result


async def retrying_async(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy = RetryPolicy(),
) -> T:
    """`retrying` for coroutine functions."""
    result: T = await run_async(_attempts(attempt, policy))
    return result


def _attempts(attempt: Callable[[], Any], policy: RetryPolicy) -> Steps[Any]:
    deadline, tries = now() + policy.total_seconds, 0
    while True:
        try:
            return (yield attempt())
        except FencepostError as error:
            if not error.retriable:
                raise
            tries += 1
            pause = policy.jittered(tries)
            if now() + pause >= deadline:
                raise
        yield Pause(pause)
