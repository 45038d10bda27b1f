"""Runs the drivers, which are shared by the blocking client libraries and aiokafka.

A driver is a generator. It yields what its adapter's calls return, and gets back the results: a blocking library has
returned the result already, and a coroutine of aiokafka is awaited first. The error of a call is raised at its `yield`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from fencepost.errors import ConcurrentUseError

T = TypeVar("T")

Steps = Generator[Any, Any, T]


class CannotRead(Exception):
    """A temporary failure. `__cause__`: the client library's error."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Uninterrupted:
    """Steps that end even if the caller is cancelled."""

    steps: Steps[Any]


def now() -> float:
    """Monotonic seconds."""
    return time.monotonic()


def run(steps: Steps[T]) -> T:
    """Run a driver over a blocking client library."""
    resume: Callable[[], Any] = partial(next, steps)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            if isinstance(step, Pause):
                time.sleep(step.seconds)
            resume = partial(steps.send, run(step.steps) if isinstance(step, Uninterrupted) else step)
        except BaseException as error:
            resume = partial(steps.throw, error)


async def run_async(steps: Steps[T]) -> T:
    """Run a driver over aiokafka."""
    resume: Callable[[], Any] = partial(next, steps)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            if isinstance(step, Pause):
                step = asyncio.sleep(step.seconds)
            elif isinstance(step, Uninterrupted):
                step = asyncio.shield(run_async(step.steps))
            resume = partial(steps.send, await step if inspect.isawaitable(step) else step)
        except BaseException as error:
            resume = partial(steps.throw, error)


def once(call: Callable[..., Any], *args: Any) -> Steps[Any]:
    """One call of an adapter."""
    return (yield call(*args))


class Use:
    """Refuses a second use of an object while one is in progress, by any task or thread.

    Two interleaved reads or appends would leave the application with a state that differs from the log.
    """

    def __init__(self, what: str, instead: str) -> None:
        self._refused = what, instead
        self._count = 0
        self._lock = threading.RLock()  # the end of a loop may be a finalizer, which interrupts its own thread

    def begin(self) -> None:
        """Raises ConcurrentUseError."""
        with self._lock:
            if self._count:
                raise ConcurrentUseError(*self._refused)
            self._count = 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1

    def alone(self, steps: Steps[T]) -> Steps[T]:
        """`steps`, as one use."""
        self.begin()
        try:
            return (yield from steps)
        finally:
            self.end()

    def prolonged(self, steps: Steps[T]) -> Steps[T]:
        """`steps`, as a part of the use in progress, which ends after them."""
        with self._lock:
            self._count += 1
        return self._prolonged(steps)

    def _prolonged(self, steps: Steps[T]) -> Steps[T]:
        try:
            return (yield from steps)
        finally:
            self.end()


class Closing:
    """A context manager that closes its object."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
