"""Rows of one partition, as Arrow arrays of record bodies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark.encoding import split

DIGEST_BYTES = 16
#: Size of a record without key, value and headers: length, attributes, deltas.
_ROW_BYTES = 12


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
