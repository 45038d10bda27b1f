"""Rows of one partition: to append, as Arrow arrays of record bodies, and in the log, as digests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark.commit_tags import Prefix
from fencepost.spark.native import EXECUTOR

DIGEST_BYTES = 16
_PREFIX_BYTES, _PREFIX_BITS = 4, 32
#: Size of a record without key, value and headers: length, attributes, deltas.
_ROW_BYTES = 12


def size(bodies: pa.Array) -> int:
    if not len(bodies):
        return 0
    offsets = _offsets(bodies)
    return int(offsets[-1] - offsets[0]) + _ROW_BYTES * len(bodies)


def fitting(bodies: pa.Array, limit: int) -> int:
    """How many rows fit into `limit` bytes."""
    ends = _offsets(bodies) + _ROW_BYTES * np.arange(len(bodies) + 1)
    return int(np.searchsorted(ends, ends[0] + limit, side="right")) - 1


def _offsets(bodies: pa.Array) -> npt.NDArray[Any]:
    found = np.frombuffer(bodies.buffers()[1], dtype=np.int64, count=bodies.offset + len(bodies) + 1)
    return found[bodies.offset :]


def extended(prefix: Prefix, bodies: pa.Array) -> Prefix:
    """The prefix with these rows after it. The digest is the sum of a 64-bit hash of each row and its position, so it
    does not depend on how the rows are cut into appends."""
    if not len(bodies):
        return prefix
    rows = prefix.rows + len(bodies)
    digest = prefix.digest + EXECUTOR.hash_sum(bodies, np.arange(prefix.rows, rows, dtype=np.uint64))
    return Prefix(rows, digest % (1 << 64))


def digest_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


class _Table:
    """Rows by digest, in 17 bytes each: as Python objects they would need five times as much. `_starts` has the first
    row of each range of digests, some 16 rows long."""

    __slots__ = ("_spare_bits", "_starts", "digests", "left")

    def __init__(self, digests: npt.NDArray[np.uint8]) -> None:
        prefixes = digests[:, :_PREFIX_BYTES].copy().view(">u4").ravel()
        order = np.argsort(prefixes, kind="stable")
        bits = max(0, len(order).bit_length() - 4)
        ranges = prefixes[order].astype(np.uint64) >> np.uint64(_PREFIX_BITS - bits)
        self._spare_bits = _PREFIX_BITS - bits
        self._starts = array("i", np.searchsorted(ranges, np.arange((1 << bits) + 1)).astype("i4").tobytes())
        self.digests, self.left = digests[order].tobytes(), bytearray(b"\1" * len(order))

    def rest(self) -> npt.NDArray[np.uint8]:
        rows = _by_row(self.digests)
        return rows.compress(np.frombuffer(self.left, np.uint8), axis=0)

    def take(self, digest: bytes) -> bool:
        prefix = int.from_bytes(digest[:_PREFIX_BYTES], "big") >> self._spare_bits
        at, end = self._starts[prefix] * DIGEST_BYTES, self._starts[prefix + 1] * DIGEST_BYTES
        while (at := self.digests.find(digest, at, end)) >= 0:
            row, within = divmod(at, DIGEST_BYTES)
            if not within and self.left[row]:
                self.left[row] = 0
                return True
            at += 1
        return False


def _by_row(digests: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)


class Pool:
    """Rows of this batch in one partition of the log that the input did not have yet: a multiset of digests.

    In few tables: each is at least twice as long as the next."""

    __slots__ = ("_left", "_tables")

    def __init__(self) -> None:
        self._tables: list[_Table] = []
        self._left = 0

    def __len__(self) -> int:
        return self._left

    def add(self, digests: bytes) -> None:
        """Add rows by their digests, one after another."""
        rows = _by_row(digests)
        self._left += len(rows)
        while self._tables and len(self._tables[-1].left) < 2 * len(rows):
            rows = np.concatenate((self._tables.pop().rest(), rows))
        self._tables.append(_Table(rows))

    def take(self, digest: bytes) -> bool:
        """Remove one copy; False if there is none."""
        found = any(table.take(digest) for table in self._tables)
        self._left -= found
        return found


def partitions_under(placements: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The partition of each row out of `count`. `placements`: a hash, or -1 - the partition that the row names."""
    return np.where(placements < 0, -1 - placements, placements % count)


def by_partition(
    bodies: pa.Array, partitions: npt.NDArray[np.int64]
) -> Iterator[tuple[int, pa.Array, npt.NDArray[np.int64]]]:
    """Each partition, its rows in order, and their indexes. Partitions share no memory, so queued rows of one partition
    do not keep rows of another in memory."""
    if len(bodies) == 0:
        return
    first = int(partitions[0])
    if (partitions == first).all():
        yield first, bodies, np.arange(len(bodies))
        return
    order = np.argsort(partitions, kind="stable")
    for which in np.split(order, np.flatnonzero(np.diff(partitions[order])) + 1):
        yield int(partitions[which[0]]), bodies.take(pa.array(which)), which
