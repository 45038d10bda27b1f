"""The classes of `fencepost.recipes` for the log writers of aiokafka: awaited, and started by `async with`."""

from __future__ import annotations

from fencepost.aiokafka import LogWriter
from fencepost.aiokafka._writers import _Stopping
from fencepost.recipes._leader import Claim, LeaderBase
from fencepost.recipes._recipe import Recipe, awaited
from fencepost.recipes._registry import Entry, RegistryBase, SequenceBase


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


__all__ = ["Claim", "Entry", "Leader", "Registry", "Sequence"]
