"""The classes of `fencepost.recipes` for the log writers of aiokafka: awaited, and started by `async with`."""

from __future__ import annotations

from fencepost.aiokafka import LogWriter
from fencepost.aiokafka._writers import _Stopping
from fencepost.recipes._leader import Claim, LeaderBase
from fencepost.recipes._loader import LoaderBase
from fencepost.recipes._lock import Holder, LockBase
from fencepost.recipes._queue import QueueBase
from fencepost.recipes._recipe import Awaited, Recipe
from fencepost.recipes._registry import Entry, RegistryBase, SequenceBase
from fencepost.recipes._snapshot import Entry as TableEntry
from fencepost.recipes._table import ABSENT, TableBase


class _Async(Awaited, _Stopping):
    WRITER = LogWriter


class AsyncRecipe(_Async, Recipe):
    async def start(self) -> None:
        """Start the log writer."""
        await self._log.start()  # type: ignore[attr-defined]

    async def stop(self) -> None:
        """Stop the log writer."""
        await self._log.stop()  # type: ignore[attr-defined]


class Leader(AsyncRecipe, LeaderBase):
    __doc__ = LeaderBase.__doc__


class Registry(AsyncRecipe, RegistryBase):
    __doc__ = RegistryBase.__doc__


class Sequence(AsyncRecipe, SequenceBase):
    __doc__ = SequenceBase.__doc__


class Lock(AsyncRecipe, LockBase):
    __doc__ = LockBase.__doc__


class Table(AsyncRecipe, TableBase):
    __doc__ = TableBase.__doc__


class Queue(Leader, QueueBase):
    __doc__ = QueueBase.__doc__

    async def start(self) -> None:
        """Start the log reader and the log writer."""
        await self._items.start()  # type: ignore[attr-defined]
        await super().start()

    async def stop(self) -> None:
        """Stop them."""
        await super().stop()
        await self._items.stop()  # type: ignore[attr-defined]


class Loader(_Async, LoaderBase):
    __doc__ = LoaderBase.__doc__

    async def start(self) -> None:
        """Start the log writers, and find the position in the log."""
        for log in self._logs:
            await log.start()  # type: ignore[attr-defined]
        await self._find()

    async def stop(self) -> None:
        """Stop the log writers. Rows that were not flushed are appended after the next start."""
        for log in self._logs:
            await log.stop()  # type: ignore[attr-defined]

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            await self.stop()


__all__ = [
    "ABSENT",
    "Claim",
    "Entry",
    "Holder",
    "Leader",
    "Loader",
    "Lock",
    "Queue",
    "Registry",
    "Sequence",
    "Table",
    "TableEntry",
]
