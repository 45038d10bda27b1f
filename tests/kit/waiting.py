"""Wait until a condition is true. An unreachable peer counts as a condition that is not true yet."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fencepost_proxy.cluster.broker import UpstreamUnavailable

_NOT_YET = (OSError, UpstreamUnavailable)


def until(
    condition: Callable[[], Any],
    what: str,
    *,
    seconds: float = 60.0,
    pause_seconds: float = 0.05,
    accept: Callable[[Any], bool] = bool,
) -> Any:
    """Call `condition` until its result is truthy, and return the result.

    `accept` replaces the test for truth, for results such as offset 0. Raises AssertionError with `what`.
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
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}; last result: {found!r}"
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
        raise AssertionError(f"waited {seconds:g} s for {what}; last result: {found!r}") from None
