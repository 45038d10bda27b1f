"""Waiting for what real Kafka does in its own time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(happened: Callable[[], Awaitable[bool] | bool], *, seconds: float = 60.0) -> None:
    """Asks until the answer is yes. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            answer = happened()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.05)
