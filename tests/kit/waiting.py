"""Wait until a condition is true. An unreachable peer counts as a condition that is not true yet."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fencepost_proxy.cluster.broker import UpstreamUnavailable

_NOT_YET = (OSError, UpstreamUnavailable)


class NeverHappened(AssertionError):
    """An event that a test waits for did not happen."""


def until(
    condition: Callable[[], Any],
    what: str | Callable[[], str],
    *,
    seconds: float = 60.0,
    pause_seconds: float = 0.05,
    accept: Callable[[Any], bool] = bool,
) -> Any:
    """Call `condition` until its result is truthy, and return the result.

    `accept` replaces the test for truth, for results such as offset 0. Raises NeverHappened with `what`, which may be
    a function that describes the state then.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = condition()
        except _NOT_YET as error:
            found = error
        else:
            if accept(found):
                return found
        if time.monotonic() >= deadline:
            missing = what if isinstance(what, str) else what()
            raise NeverHappened(f"waited {seconds:g} s for {missing}; last result: {found!r}")
        time.sleep(pause_seconds)


async def until_async(
    condition: Callable[[], Awaitable[Any] | Any],
    what: str,
    *,
    seconds: float = 60.0,
    pause_seconds: float = 0.05,
    accept: Callable[[Any], bool] = bool,
) -> Any:
    """The same in an event loop. `condition` may be a coroutine function."""
    found: Any = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    found = condition()
                    if inspect.isawaitable(found):
                        found = await found
                except _NOT_YET as error:
                    found = error
                else:
                    if accept(found):
                        return found
                await asyncio.sleep(pause_seconds)
    except TimeoutError:
        raise NeverHappened(f"waited {seconds:g} s for {what}; last result: {found!r}") from None
