"""Waiting for what real Kafka does in its own time, and tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps

from fencepost_proxy.net.control import UpstreamUnavailable


async def until(happened: Callable[[], Awaitable[bool] | bool], *, seconds: float = 60.0) -> None:
    """Asks until the answer is yes; that Kafka cannot be asked is none. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            with suppress(UpstreamUnavailable):
                answer = happened()
                if answer if isinstance(answer, bool) else await answer:
                    return
            await asyncio.sleep(0.05)


def in_event_loop(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(story)
    def run(*arguments: object, **fixtures: object) -> None:
        async def whole() -> None:
            await story(*arguments, **fixtures)

        asyncio.run(whole())

    return run
