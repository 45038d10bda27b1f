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
from fencepost.recipes._recipe import BlockingRecipe, blocking
from fencepost.recipes._registry import Entry, RegistryBase, SequenceBase
from fencepost.recipes._snapshot import Entry as TableEntry
from fencepost.recipes._table import ABSENT, TableBase


class Leader(BlockingRecipe, LeaderBase):
    __doc__ = LeaderBase.__doc__

    read_to_end = blocking(LeaderBase._read_to_end)
    claim = blocking(LeaderBase._claim)
    append = blocking(LeaderBase._append)


class Registry(BlockingRecipe, RegistryBase):
    __doc__ = RegistryBase.__doc__

    register = blocking(RegistryBase._register)
    get = blocking(RegistryBase._get)


class Sequence(BlockingRecipe, SequenceBase):
    __doc__ = SequenceBase.__doc__

    take = blocking(SequenceBase._take)


class Lock(BlockingRecipe, LockBase):
    __doc__ = LockBase.__doc__

    acquire = blocking(LockBase._acquire)
    renew = blocking(LockBase._renew)
    release = blocking(LockBase._release)


class Table(BlockingRecipe, TableBase):
    __doc__ = TableBase.__doc__

    read_to_end = blocking(TableBase._read_to_end)
    get = blocking(TableBase._get)
    put = blocking(TableBase._put)
    delete = blocking(TableBase._delete)
    save = blocking(TableBase._save)


class Queue(Leader, QueueBase):
    __doc__ = QueueBase.__doc__

    take = blocking(QueueBase._take)
    finish = blocking(QueueBase._finish)

    def close(self) -> None:
        super().close()
        self._items.close()  # type: ignore[attr-defined]


class Loader(LoaderBase):
    __doc__ = LoaderBase.__doc__

    start = blocking(LoaderBase._start)
    append = blocking(LoaderBase._append)
    flush = blocking(LoaderBase._flush)

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
