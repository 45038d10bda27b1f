"""The total of a load's rows: their number and a hash that depends neither on their order nor on their tasks.

The hash is the sum of a 64-bit hash of each row. So tasks add theirs, and the driver compares the sum with that of a
finished load without reading a row.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fencepost.spark.columns import layout

#: Longer rows are hashed one by one, since each word of the longest row of an array costs several numpy calls.
_LONG_BYTES = 2048
_WORD_BYTES = 8
_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)

_Hashes = npt.NDArray[np.uint64]


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
        seeds += np.where(explicit, partitions.astype(np.int64) + 1, 0).astype(np.uint64) << _HALF
    return Total(len(bodies), int(_hashes(bodies, seeds).sum(dtype=np.uint64)))


def _hashes(bodies: Any, seeds: _Hashes) -> _Hashes:
    """The hash of each row, in any order."""
    data, starts, lengths = layout(bodies, spare_bytes=_WORD_BYTES)
    h = _mixed(lengths.astype(np.uint64) * _M2 + seeds)
    longest = int(lengths.max())
    if longest > _LONG_BYTES:
        long = np.flatnonzero(lengths > _LONG_BYTES)
        for row in long:
            digest = hashlib.blake2b(data[starts[row] : starts[row] + lengths[row]].data, digest_size=8).digest()
            h[row] ^= np.uint64(int.from_bytes(digest, "little"))
        short = np.flatnonzero(lengths <= _LONG_BYTES)
        h[short] = _hash_words(data, starts[short], lengths[short], h[short])
    else:
        h = _hash_words(data, starts, lengths, h)
    return _mixed(h)


def _hash_words(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], h: _Hashes
) -> _Hashes:
    """Mix each word of each row into `h`. The result is in another order."""
    if not len(h):
        return h
    if int(lengths.min()) != int(lengths.max()):
        # Longest first: the rows with an i-th word are then a prefix. numpy sorts 16-bit numbers by radix.
        order = np.argsort(-lengths.astype(np.int16), kind="stable")
        starts, lengths, h = starts[order], lengths[order], h[order]
    words = np.ndarray((len(data) - _WORD_BYTES + 1,), "<u8", data, strides=(1,))  # the word at each byte
    whole = lengths >> 3
    for index in range(int(whole[0])):
        count = int(np.searchsorted(-whole, -index, "left"))
        some = h[:count]
        some ^= words[starts[:count] + _WORD_BYTES * index]
        some *= _M1
        some ^= some >> _HALF
    rest = (lengths & 7).astype(np.uint64)
    kept = (np.uint64(1) << (np.uint64(8) * rest)) - np.uint64(1)
    h ^= words[starts + (lengths & ~7)] & kept
    return h


def _mixed(h: _Hashes) -> _Hashes:
    h = (h ^ h >> _HALF) * _M1
    h = (h ^ h >> np.uint64(29)) * _M2
    return h ^ h >> _HALF
