"""The jobs that compare-and-append is used for, as small classes over a LogWriter: docs/recipes/.

These are for the log writers of kafka-python and confluent-kafka. `fencepost.recipes.aiokafka` has the same classes,
awaited. Each keeps its state in one partition, in a documented format.
"""

from __future__ import annotations

from typing import Self

from fencepost.recipes._leader import Claim, LeaderBase
from fencepost.recipes._loader import LoaderBase, by_key
from fencepost.recipes._lock import Holder, LockBase
from fencepost.recipes._queue import QueueBase
from fencepost.recipes._recipe import Blocking, BlockingRecipe
from fencepost.recipes._registry import Entry, RegistryBase, SequenceBase
from fencepost.recipes._snapshot import Entry as TableEntry
from fencepost.recipes._table import ABSENT, TableBase


class Leader(BlockingRecipe, LeaderBase):
    __doc__ = LeaderBase.__doc__


class Registry(BlockingRecipe, RegistryBase):
    __doc__ = RegistryBase.__doc__


class Sequence(BlockingRecipe, SequenceBase):
    __doc__ = SequenceBase.__doc__


class Lock(BlockingRecipe, LockBase):
    __doc__ = LockBase.__doc__


class Table(BlockingRecipe, TableBase):
    __doc__ = TableBase.__doc__


class Queue(Leader, QueueBase):
    __doc__ = QueueBase.__doc__

    def close(self) -> None:
        super().close()
        self._items.close()  # type: ignore[attr-defined]


class Loader(Blocking, LoaderBase):
    __doc__ = LoaderBase.__doc__

    def start(self) -> None:
        """Find the position in the log."""
        self._find()

    def close(self) -> None:
        """Close the log writers. Rows that were not flushed are appended after the next start."""
        for log in self._logs:
            log.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


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
    "by_key",
]
