"""Shares of the event loop for work that clients cause before their first request, or without any."""

from __future__ import annotations

import asyncio
import time
from collections import deque


class Turns:
    """Admits one waiter in each turn of the event loop, in order. In one turn, each socket that is ready is handled."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next_turn)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # the waiter was not cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next_turn)
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
        """Returns once more may be used."""
        while seconds := self.wait_seconds:  # noqa: ASYNC110 - others charge meanwhile
            await asyncio.sleep(seconds)
