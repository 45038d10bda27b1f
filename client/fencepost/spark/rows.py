"""Rows of one partition: to append, as Arrow arrays of record bodies, and in the log, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark.encoding import split

DIGEST_BYTES = 16
#: Size of a record without key, value and headers: length, attributes, deltas.
_ROW_BYTES = 12
#: Origin of an append: this task and run; the same task number in another run; another number in another run.
THIS_RUN, SAME_NUMBER, FOREIGN = range(3)


@dataclass(slots=True)
class Rows:
    """Rows of one partition, in order. `explicit`: which of them name their partition; None: none."""

    bodies: pa.Array
    explicit: npt.NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.bodies)

    def bytes(self) -> int:
        return size(self.bodies)

    def sliced(self, start: int, count: int) -> Rows:
        chosen = None if self.explicit is None else self.explicit[start : start + count]
        return Rows(self.bodies.slice(start, count), chosen)

    def kept(self, keep: list[bool]) -> Rows:
        mask = np.array(keep, dtype=bool)
        return Rows(self.bodies.filter(pa.array(mask)), None if self.explicit is None else self.explicit[mask])


def size(bodies: pa.Array) -> int:
    if not len(bodies):
        return 0
    offsets = _offsets(bodies)
    return int(offsets[-1] - offsets[0]) + _ROW_BYTES * len(bodies)


def fitting(bodies: pa.Array, limit: int) -> int:
    """How many rows fit into `limit` bytes."""
    ends = _offsets(bodies) + _ROW_BYTES * np.arange(len(bodies) + 1)
    return int(np.searchsorted(ends, ends[0] + limit, side="right")) - 1


def chunked(bodies: pa.Array, bytes_max: int, rows_max: int) -> Iterator[pa.Array]:
    """The rows in parts of at least one row and at most these limits."""
    while len(bodies):
        count = max(1, min(rows_max, fitting(bodies, bytes_max)))
        yield bodies.slice(0, count)
        bodies = bodies.slice(count)


def joined(pieces: list[Rows]) -> Rows:
    bodies = pa.concat_arrays([piece.bodies for piece in pieces])
    if all(piece.explicit is None for piece in pieces):
        return Rows(bodies, None)
    parts = [np.zeros(len(piece), dtype=bool) if piece.explicit is None else piece.explicit for piece in pieces]
    return Rows(bodies, np.concatenate(parts))


def by_partition(
    bodies: pa.Array, partitions: npt.NDArray[Any], explicit: npt.ArrayLike | None
) -> Iterator[tuple[int, Rows]]:
    """Rows of each partition, in order."""
    marked = None if explicit is None else np.asarray(explicit, dtype=bool)
    for partition, chosen, which in split(bodies, partitions):
        yield partition, Rows(chosen, None if marked is None else marked[which])


def digest_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _offsets(bodies: pa.Array) -> npt.NDArray[Any]:
    found = np.frombuffer(bodies.buffers()[1], dtype=np.int64, count=bodies.offset + len(bodies) + 1)
    return found[bodies.offset :]


@dataclass(slots=True)
class Group:
    """The appends of one task number of one run. `size`: their rows; `matched`: how many of them are this task's;
    `has_unmatched`: their task also lacked rows under its own number."""

    run: str
    task: int
    origin: int
    size: int = 0
    matched: int = 0
    has_unmatched: bool = False


class Pool:
    """Rows of this batch in one partition of the log that the input did not have yet, with the group of each."""

    __slots__ = ("_more", "_once")

    def __init__(self) -> None:
        self._once: dict[bytes, int] = {}
        #: Copies per group, for rows with several copies.
        self._more: dict[bytes, dict[int, int]] = {}

    def add(self, digests: Sequence[bytes], group: int) -> None:
        fresh = dict.fromkeys(digests, group)
        if len(fresh) == len(digests) and not self._more and self._once.keys().isdisjoint(fresh):
            self._once.update(fresh)
            return
        for digest in digests:
            if digest in self._more:
                among = self._more[digest]
            elif digest in self._once:
                among = self._more[digest] = {self._once.pop(digest): 1}
            else:
                self._once[digest] = group
                continue
            among[group] = among.get(group, 0) + 1

    def take(self, digest: bytes, groups: Sequence[Group], most: int) -> int | None:
        """Remove one copy and return its group: the task's own first, none with an origin above `most`."""
        group = self._once.get(digest)
        if group is not None:
            if groups[group].origin > most:
                return None
            del self._once[digest]
            return group
        among = self._more.get(digest)
        if among is None:
            return None
        group = min(among, key=lambda each: groups[each].origin)
        if groups[group].origin > most:
            return None
        if among[group] > 1:
            among[group] -= 1
        elif len(among) > 1:
            del among[group]
        else:
            del self._more[digest]
        return group

    def left(self) -> Iterator[tuple[bytes, int, int]]:
        """Digest, group, count."""
        for digest, group in self._once.items():
            yield digest, group, 1
        for digest, among in self._more.items():
            for group, count in among.items():
                yield digest, group, count

    def count(self, groups: Sequence[Group], origin: int) -> int:
        return sum(count for _, group, count in self.left() if groups[group].origin == origin)
