"""Joins and hashes of Arrow columns, in numpy, without a Python object per row."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka.record.util import encode_varint

#: Records in one batch: size of the table of offset deltas.
BATCH_RECORDS_MAX = 1 << 16

Bodies: TypeAlias = pa.LargeBinaryArray
Int64s = npt.NDArray[np.int64]


def varint(value: int) -> bytes:
    out = bytearray()
    encode_varint(value, out.append)
    return bytes(out)


def varints(values: Int64s, suffix: bytes = b"") -> Bodies:
    """The varint of each value (from -1 up to 2^34), followed by `suffix`."""
    zigzag = (values << 1) ^ (values >> 63)
    widths = np.ones(len(values), np.int64)
    for bits in (7, 14, 21, 28):
        widths += zigzag >> bits != 0
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(widths + len(suffix), out=offsets[1:])
    data = np.zeros(int(offsets[-1]), np.uint8)
    for byte_index in range(5):
        there = np.flatnonzero(widths > byte_index)
        if not len(there):
            break
        more = (widths[there] > byte_index + 1).astype(np.uint8) << 7
        data[offsets[:-1][there] + byte_index] = (zigzag[there] >> 7 * byte_index & 0x7F).astype(np.uint8) | more
    for byte_index, byte in enumerate(suffix):
        data[offsets[1:] - len(suffix) + byte_index] = byte
    return _binary(offsets, data)


def _binary(offsets: Int64s, data: Any) -> Bodies:
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


#: Lengths below this come from a table, three times as fast as `varints`.
_TABLE_MAX = 1 << 14


@functools.cache
def _lengths_table(suffix: bytes) -> Bodies:
    return varints(np.arange(-1, _TABLE_MAX, dtype=np.int64), suffix)


def lengths_of(lengths: Int64s, suffix: bytes = b"") -> Bodies:
    if len(lengths) == 0 or int(lengths.max()) < _TABLE_MAX:
        return _lengths_table(suffix).take(pa.array(lengths + 1))
    return varints(lengths, suffix)


@functools.cache
def deltas() -> tuple[Bodies, Int64s]:
    """The offset deltas, and the size of each."""
    values = varints(np.arange(BATCH_RECORDS_MAX, dtype=np.int64))
    return values, sizes(values)


def sizes(column: Any) -> Int64s:
    """Size of each value in bytes; -1 for null."""
    lengths = pc.binary_length(column)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, -1)
    return np.asarray(lengths.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def scalar(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.large_binary())


def joined(*pieces: Any) -> Bodies:
    return pc.binary_join_element_wise(*pieces, scalar(b""))


def as_binary(column: Any) -> Any:
    """Strings as UTF-8."""
    return column if column.type == pa.large_binary() else column.cast(pa.large_binary())


def prefixed(column: Any) -> tuple[Bodies, Any]:
    """Length of each value (-1 for null), and the values."""
    lengths = lengths_of(sizes(column))
    return lengths, pc.fill_null(column, scalar(b"")) if column.null_count else column


def valid(column: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


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


def murmur2(keys: Any) -> Int64s:
    """Hash of each key (large binary) as in Java's default partitioner, which takes it modulo the partition count;
    arbitrary for null."""
    if len(keys) == 0:
        return np.zeros(0, np.int64)
    data, starts, lengths = layout(keys)
    # Longest first: the keys with an i-th word are then a prefix.
    order = np.argsort(-lengths, kind="stable") if int(lengths.min()) != int(lengths.max()) else None
    if order is not None:
        starts, lengths = starts[order], lengths[order]
    words = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))  # the word at each byte
    whole = lengths >> 2
    h = np.uint32(0x9747B28C) ^ lengths.astype(np.uint32)
    for word_index in range(int(whole[0])):
        count = len(h) if order is None else int(np.searchsorted(-whole, -word_index, "left"))
        k = words[starts[:count] + 4 * word_index] * _M
        k ^= k >> np.uint32(24)
        h[:count] = h[:count] * _M ^ k * _M
    rest = lengths & 3
    kept = (np.uint32(1) << (8 * rest).astype(np.uint32)) - np.uint32(1)
    last_word = (h ^ words[starts + (lengths & ~3)] & kept) * _M
    h = np.where(rest > 0, last_word, h)
    h = (h ^ h >> np.uint32(13)) * _M
    h ^= h >> np.uint32(15)
    found = (h & np.uint32(0x7FFFFFFF)).astype(np.int64)
    if order is None:
        return found
    placed = np.empty_like(found)
    placed[order] = found
    return placed
