"""Rows of one partition: to append, as Arrow arrays of record bodies, and in the log, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark.commit_tags import Prefix
from fencepost.spark.native import EXECUTOR

DIGEST_BYTES = 16
_DIGEST = f"S{DIGEST_BYTES}"
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


class Pool:
    """Rows of this batch in one partition of the log that the input did not have yet: a multiset of digests, in 20
    bytes each. As Python objects they would need four times as much."""

    __slots__ = ("_digests", "_left", "_taken")

    def __init__(self) -> None:
        self._digests = np.array([], _DIGEST)
        #: At the first copy of a digest: how many of its copies were taken.
        self._taken = np.zeros(1, np.uint32)
        self._left = 0

    def __len__(self) -> int:
        return self._left

    def add(self, digests: bytes) -> None:
        """Add rows by their digests, one after another."""
        rows = np.frombuffer(digests, _DIGEST)
        if self._left:
            first = np.searchsorted(self._digests, self._digests)
            rest = self._digests[np.arange(len(first)) - first >= self._taken[first]]
            rows = np.concatenate((rest, rows))
        self._digests, self._taken = np.sort(rows, kind="stable"), np.zeros(len(rows) + 1, np.uint32)
        self._left = len(rows)

    def take(self, bodies: pa.Array) -> npt.NDArray[np.bool_]:
        """Remove a copy of each of these rows. Returns which ones there were."""
        found = np.zeros(len(bodies), bool)
        if self._left:
            rows = np.array([digest_of(body) for body in bodies.to_pylist()], _DIGEST)
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            first, end = (np.searchsorted(self._digests, rows, side) for side in ("left", "right"))
            copy = np.arange(len(rows)) - np.searchsorted(rows, rows)
            found[order] = first + self._taken[first] + copy < end
            np.add.at(self._taken, first[found[order]], 1)
            self._left -= int(found.sum())
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
