"""Shares of the event loop for work that clients cause before their first request, or without any."""

from __future__ import annotations

import asyncio
import time
from collections import deque


class OnePerIteration:
    """Admits one waiter in each iteration of the event loop, in order. An iteration handles every ready socket."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._admit_next)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _admit_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # not cancelled
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._admit_next)
                return
        self._taken = False


class Share:
    """Limits one kind of work to a share of the event loop's time. `credit_seconds` of it are done at once."""

    def __init__(self, share: float, credit_seconds: float) -> None:
        self._share = share
        self._credit_seconds = credit_seconds
        self._free_at = 0.0

    def charge(self, seconds: float) -> None:
        """That much time was used."""
        earliest = time.monotonic() - self._credit_seconds / self._share
        self._free_at = max(self._free_at, earliest) + seconds / self._share

    @property
    def wait_seconds(self) -> float:
        return max(0.0, self._free_at - time.monotonic())

    async def free(self) -> None:
        """Returns when the share is not used up."""
        while seconds := self.wait_seconds:  # noqa: ASYNC110 - others charge meanwhile
            await asyncio.sleep(seconds)
