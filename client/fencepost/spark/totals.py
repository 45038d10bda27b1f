"""The total of a load's rows: their number and a hash that depends neither on their order nor on their tasks.

The hash is the sum of a 64-bit hash of each row. So tasks add theirs, and the driver compares the sum with that of a
finished load without reading a row.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fencepost.spark.native import EXECUTOR


class Total(NamedTuple):
    """`hash`: the sum of the hashes of the rows, modulo 2^64."""

    rows: int = 0
    hash: int = 0

    def plus(self, other: Total) -> Total:
        return Total(self.rows + other.rows, (self.hash + other.hash) % (1 << 64))


NO_ROWS = Total()


def total_of(topic: str, bodies: Any, partitions: npt.NDArray[Any], explicit: npt.NDArray[np.bool_] | None) -> Total:
    """The total of rows (record bodies, large binary) of a topic. `explicit`: which of them name their partition, which
    is then a part of the row; None: none."""
    if not len(bodies):
        return NO_ROWS
    seeds = np.full(len(bodies), zlib.crc32(topic.encode()), np.uint64)
    if explicit is not None:
        seeds += np.where(explicit, partitions.astype(np.int64) + 1, 0).astype(np.uint64) << np.uint64(32)
    return Total(len(bodies), EXECUTOR.hash_sum(bodies, seeds))
