"""Joins and hashes of Arrow columns, in numpy, without a Python object per row.

The native module (`native.py`) replaces `bodies`, `batch`, `java_partitions` and `hash_sum`. These are its reference,
and run where it is not installed.

A v2 batch stores a record as

    length | attributes, timestamp delta (0, 0) | offset delta | body

The *body* is the row's own content: key, value and headers, each with its length. It is built once per row.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import Any, NamedTuple, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka.record.util import encode_varint

Bodies: TypeAlias = pa.LargeBinaryArray
Int64s = npt.NDArray[np.int64]

#: Where a batch's header has the batch's length, and its CRC-32C of all that follows.
LENGTH_AT, CRC_AT = slice(8, 12), slice(17, 21)


class Headers(NamedTuple):
    """Headers of all rows, in order. `counts`: of each row. `names`, `values`: large binary."""

    counts: Int64s
    names: pa.Array
    values: pa.Array


class Decimals(NamedTuple):
    """A header whose value is a decimal number. `known`: the rows that have it."""

    name: bytes
    known: npt.NDArray[np.bool_]
    values: Int64s


def varint(value: int) -> bytes:
    out = bytearray()
    encode_varint(value, out.append)
    return bytes(out)


#: Smaller numbers, and the offset deltas of a batch, are taken from a table, which is faster than to encode them.
_TABLE_MAX = 1 << 16


@functools.cache
def _table() -> Bodies:
    return _encoded(np.arange(-1, _TABLE_MAX))


def _varints(values: Int64s) -> Bodies:
    """The varint of each value (from -1 up to 2^34)."""
    if len(values) == 0 or int(values.max()) < _TABLE_MAX:
        return _table().take(pa.array(values + 1))
    return _encoded(values)


def _encoded(values: Int64s) -> Bodies:
    zigzag = (values << 1) ^ (values >> 63)
    widths = np.ones(len(values), np.int64)
    for bits in (7, 14, 21, 28):
        widths += zigzag >> bits != 0
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(widths, out=offsets[1:])
    data = np.zeros(int(offsets[-1]), np.uint8)
    for byte_index in range(5):
        there = np.flatnonzero(widths > byte_index)
        more = (widths[there] > byte_index + 1).astype(np.uint8) << 7
        data[offsets[:-1][there] + byte_index] = (zigzag[there] >> 7 * byte_index & 0x7F).astype(np.uint8) | more
    return pa.Array.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def sizes(column: Any) -> Int64s:
    """Size of each value in bytes; -1 for null."""
    lengths = pc.binary_length(column)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, -1)
    return np.asarray(lengths.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def _scalar(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.large_binary())


def _joined(*pieces: Any) -> Bodies:
    return pc.binary_join_element_wise(*pieces, _scalar(b""))


def as_binary(column: Any) -> Any:
    """Strings as UTF-8."""
    return column if column.type == pa.large_binary() else column.cast(pa.large_binary())


def _prefixed(column: Any) -> tuple[Bodies, Any]:
    """Length of each value (-1 for null), and the values."""
    return _varints(sizes(column)), pc.fill_null(column, _scalar(b"")) if column.null_count else column


def valid(column: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def bodies(key: Any, value: Any, headers: Headers | None, time: Decimals | None) -> Bodies:
    """The body of each row. `key`, `value`: large binary; None: no row has a key."""
    counts = np.zeros(len(value), np.int64)
    pieces: list[Any] = []
    if headers is not None:
        counts += headers.counts
        pieces.append(_lists(headers))
    if time is not None:
        counts += time.known
        digits = pa.array(time.values).cast(pa.large_string()).cast(pa.large_binary())
        header = _joined(_scalar(varint(len(time.name)) + time.name), *_prefixed(digits))
        pieces.append(pc.if_else(pa.array(time.known), header, _scalar(b"")))
    keys = [_scalar(b"\x01")] if key is None else _prefixed(key)
    return _joined(*keys, *_prefixed(value), _varints(counts) if pieces else _scalar(b"\0"), *pieces)


def _lists(headers: Headers) -> Any:
    """The encoded headers of each row."""
    encoded = _joined(*_prefixed(headers.names), *_prefixed(headers.values))
    offsets = np.zeros(len(headers.counts) + 1, np.int64)
    np.cumsum(headers.counts, out=offsets[1:])
    return pc.binary_join(pa.LargeListArray.from_arrays(pa.array(offsets), encoded), _scalar(b""))


def batch(header: bytes | None, first: bytes, bodies: Bodies, delta: int, last: bytes) -> bytes:
    """A batch of the records `first`, one of each body, and `last`. `delta`: offset delta of the first body.

    `header`: see `sealed`; None: only the records.
    """
    records = b"".join([first, _records(bodies, delta), last])
    return records if header is None else sealed(header, records)


def _records(bodies: Bodies, delta: int) -> Any:
    if not len(bodies):
        return b""
    deltas = _table().slice(delta + 1, len(bodies))
    # Arrow pads the capacity of buffers, not their size.
    return _joined(_varints(sizes(bodies) + sizes(deltas) + 2), _scalar(b"\0\0"), deltas, bodies).buffers()[2]


def sealed(header: bytes, records: bytes) -> bytes:
    """A batch. `header`: its header, in which length and CRC are set."""
    sealed = bytearray(header)
    sealed[LENGTH_AT] = struct.pack(">i", len(header) - LENGTH_AT.stop + len(records))
    sealed[CRC_AT] = struct.pack(">I", crc32c.crc32c(records, crc32c.crc32c(sealed[CRC_AT.stop :])))
    return bytes(sealed) + records


def layout(column: Any, spare_bytes: int = 4) -> tuple[npt.NDArray[np.uint8], Int64s, Int64s]:
    """Bytes of all values plus zero bytes, start of each value, and its length (arbitrary for null)."""
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + spare_bytes, np.uint8)
    if data_buffer is not None:
        data[:-spare_bytes] = np.frombuffer(data_buffer, np.uint8)[first:last]
    return data, offsets[:-1] - first, np.diff(offsets)


_M = np.uint32(0x5BD1E995)


def java_partitions(keys: Any, partition_count: int) -> npt.NDArray[np.int32]:
    """The partition of each key (large binary) as by Java's default partitioner: its murmur2 hash, modulo the partition
    count. Arbitrary for null."""
    if len(keys) == 0:
        return np.zeros(0, np.int32)
    data, starts, lengths = layout(keys)
    order = np.argsort(-lengths, kind="stable")  # longest first: the keys with an i-th word are then a prefix
    starts, lengths = starts[order], lengths[order]
    words = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))  # the word at each byte
    whole = lengths >> 2
    h = np.uint32(0x9747B28C) ^ lengths.astype(np.uint32)
    for word_index in range(int(whole[0])):
        count = int(np.searchsorted(-whole, -word_index, "left"))
        k = words[starts[:count] + 4 * word_index] * _M
        k ^= k >> np.uint32(24)
        h[:count] = h[:count] * _M ^ k * _M
    rest = lengths & 3
    kept = (np.uint32(1) << (8 * rest).astype(np.uint32)) - np.uint32(1)
    last_word = (h ^ words[starts + (lengths & ~3)] & kept) * _M
    h = np.where(rest > 0, last_word, h)
    h = (h ^ h >> np.uint32(13)) * _M
    h ^= h >> np.uint32(15)
    placed = np.empty(len(keys), np.int32)
    placed[order] = (h & np.uint32(0x7FFFFFFF)) % np.uint32(partition_count)
    return placed


#: Longer rows are hashed one by one, since each word of the longest row of an array costs several numpy calls.
LONG_BYTES = 2048
_WORD_BYTES = 8
_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)

_Hashes = npt.NDArray[np.uint64]


def hash_sum(bodies: Any, seeds: _Hashes) -> int:
    """The sum of a 64-bit hash of each row (large binary), modulo 2^64. `seeds`: of the rows."""
    data, starts, lengths = layout(bodies, spare_bytes=_WORD_BYTES)
    h = _mixed(lengths.astype(np.uint64) * _M2 + seeds)
    longest = int(lengths.max())
    if longest > LONG_BYTES:
        long = np.flatnonzero(lengths > LONG_BYTES)
        for row in long:
            digest = hashlib.blake2b(data[starts[row] : starts[row] + lengths[row]].data, digest_size=8).digest()
            h[row] ^= np.uint64(int.from_bytes(digest, "little"))
        short = np.flatnonzero(lengths <= LONG_BYTES)
        h[short] = _hash_words(data, starts[short], lengths[short], h[short])
    else:
        h = _hash_words(data, starts, lengths, h)
    return int(_mixed(h).sum(dtype=np.uint64))


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
