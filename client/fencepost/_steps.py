"""Runs the drivers, which are shared by the blocking client libraries and aiokafka.

A driver is a generator. It yields what its adapter's calls return, and gets back the results: a blocking library has
returned the result already, and a coroutine of aiokafka is awaited first. The error of a call is raised at its `yield`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

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
