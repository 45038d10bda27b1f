"""The classes of `fencepost.recipes` for the log writers of aiokafka: awaited, and started by `async with`."""

from __future__ import annotations

from typing import Self

from fencepost.aiokafka import LogWriter
from fencepost.aiokafka._writers import _Stopping
from fencepost.recipes._leader import Claim, LeaderBase
from fencepost.recipes._loader import LoaderBase
from fencepost.recipes._lock import Holder, LockBase
from fencepost.recipes._queue import QueueBase
from fencepost.recipes._recipe import Recipe, awaited
from fencepost.recipes._registry import Entry, RegistryBase, SequenceBase
from fencepost.recipes._snapshot import Entry as TableEntry
from fencepost.recipes._table import ABSENT, TableBase


class AsyncRecipe(Recipe, _Stopping):
    WRITER = LogWriter

    async def start(self) -> None:
        """Start the log writer."""
        await self._log.start()  # type: ignore[attr-defined]

    async def stop(self) -> None:
        """Stop the log writer."""
        await self._log.stop()  # type: ignore[attr-defined]


class Leader(AsyncRecipe, LeaderBase):
    __doc__ = LeaderBase.__doc__

    read_to_end = awaited(LeaderBase._read_to_end)
    claim = awaited(LeaderBase._claim)
    append = awaited(LeaderBase._append)


class Registry(AsyncRecipe, RegistryBase):
    __doc__ = RegistryBase.__doc__

    register = awaited(RegistryBase._register)
    get = awaited(RegistryBase._get)


class Sequence(AsyncRecipe, SequenceBase):
    __doc__ = SequenceBase.__doc__

    take = awaited(SequenceBase._take)


class Lock(AsyncRecipe, LockBase):
    __doc__ = LockBase.__doc__

    acquire = awaited(LockBase._acquire)
    renew = awaited(LockBase._renew)
    release = awaited(LockBase._release)


class Table(AsyncRecipe, TableBase):
    __doc__ = TableBase.__doc__

    read_to_end = awaited(TableBase._read_to_end)
    get = awaited(TableBase._get)
    put = awaited(TableBase._put)
    delete = awaited(TableBase._delete)
    save = awaited(TableBase._save)


class Queue(Leader, QueueBase):
    __doc__ = QueueBase.__doc__

    take = awaited(QueueBase._take)
    finish = awaited(QueueBase._finish)

    async def start(self) -> None:
        """Start the log reader and the log writer."""
        await self._items.start()  # type: ignore[attr-defined]
        await super().start()

    async def stop(self) -> None:
        """Stop them."""
        await super().stop()
        await self._items.stop()  # type: ignore[attr-defined]


class Loader(LoaderBase):
    __doc__ = LoaderBase.__doc__

    _find = awaited(LoaderBase._start)
    append = awaited(LoaderBase._append)
    flush = awaited(LoaderBase._flush)

    async def start(self) -> None:
        """Start the log writers, and find the position in the log."""
        for log in self._logs:
            await log.start()  # type: ignore[attr-defined]
        await self._find()

    async def stop(self) -> None:
        """Stop the log writers. Rows that were not flushed are appended after the next start."""
        for log in self._logs:
            await log.stop()  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

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
