"""Rows of one partition: to append, as Arrow arrays of record bodies, and in the log, as digests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark.encoding import split

DIGEST_BYTES = 16
_PREFIX_BYTES, _PREFIX_BITS = 4, 32
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


class _Table:
    """Rows by digest, in 20 bytes each: as Python objects they would need five times as much. A row that was taken has
    group -1. `_starts` has the first row of each range of digests, some 16 rows long."""

    __slots__ = ("_spare_bits", "_starts", "digests", "groups")

    def __init__(self, digests: npt.NDArray[np.uint8], groups: npt.NDArray[np.int32]) -> None:
        prefixes = digests[:, :_PREFIX_BYTES].copy().view(">u4").ravel()
        order = np.flatnonzero(groups >= 0)
        order = order[np.argsort(prefixes[order], kind="stable")]
        bits = max(0, len(order).bit_length() - 4)
        ranges = prefixes[order].astype(np.uint64) >> np.uint64(_PREFIX_BITS - bits)
        self._spare_bits = _PREFIX_BITS - bits
        self._starts = array("i", np.searchsorted(ranges, np.arange((1 << bits) + 1)).astype("i4").tobytes())
        self.digests, self.groups = digests[order].tobytes(), array("i", groups[order].tobytes())

    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        return _by_row(self.digests), np.frombuffer(self.groups, np.int32)

    def rows_of(self, digest: bytes) -> Iterator[int]:
        prefix = int.from_bytes(digest[:_PREFIX_BYTES], "big") >> self._spare_bits
        at, end = self._starts[prefix] * DIGEST_BYTES, self._starts[prefix + 1] * DIGEST_BYTES
        while (at := self.digests.find(digest, at, end)) >= 0:
            if at % DIGEST_BYTES == 0:
                yield at // DIGEST_BYTES
            at += 1


def _by_row(digests: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)


class Pool:
    """Rows of this batch in one partition of the log that the input did not have yet, with the group of each.

    In few tables: each is at least twice as long as the next."""

    __slots__ = ("_tables",)

    def __init__(self) -> None:
        self._tables: list[_Table] = []

    def add(self, digests: bytes, group: int) -> None:
        """Add rows by their digests, one after another."""
        rows = _by_row(digests)
        table = _Table(rows, np.full(len(rows), group, np.int32))
        while self._tables and len(self._tables[-1].groups) < 2 * len(table.groups):
            (digests_before, groups_before), (digests_after, groups_after) = self._tables.pop().arrays(), table.arrays()
            table = _Table(
                np.concatenate((digests_before, digests_after)), np.concatenate((groups_before, groups_after))
            )
        self._tables.append(table)

    def take(self, digest: bytes, groups: Sequence[Group], most: int) -> int | None:
        """Remove one copy and return its group: the task's own first, none with an origin above `most`."""
        origin, found = most + 1, None
        for table in self._tables:
            for row in table.rows_of(digest):
                group = table.groups[row]
                if group >= 0 and groups[group].origin < origin:
                    origin, found = groups[group].origin, (table.groups, row)
        if found is None:
            return None
        among, row = found
        group, among[row] = among[row], -1
        return group

    def left(self) -> Iterator[tuple[bytes, int]]:
        """Digest and group of each row."""
        for table in self._tables:
            for row, group in enumerate(table.groups):
                if group >= 0:
                    yield table.digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES], group

    def count(self, groups: Sequence[Group], origin: int) -> int:
        return sum(groups[group].origin == origin for _, group in self.left())
