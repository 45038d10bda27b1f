"""Decompression of a record batch's records, under a bound.

The output buffer has a size before anything is decompressed into it and never grows past the bound, so a batch that
unpacks to gigabytes costs at most `bytes_max` bytes and the time to fill them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from struct import Struct
from typing import Any

import cramjam

from fencepost_proxy.errors import ClientProtocolError, LimitError

NONE = 0
GZIP = 1
SNAPPY = 2
LZ4 = 3
ZSTD = 4

CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")

_FIRST_TRY_BYTES_MIN = 64 * 1024
_GROWTH = 8
_MAPPED_BYTES_MIN = 1024 * 1024

#: Java's snappy stream (xerial): this magic, two 32-bit versions, then blocks with 32-bit lengths in front.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_INT32 = Struct(">i")
_XERIAL_MAGIC_HEAD: int = _INT32.unpack_from(_XERIAL_MAGIC)[0]


class MalformedBatch(ClientProtocolError):
    """A record batch is not what the format says. Kafka would answer CORRUPT_MESSAGE or INVALID_RECORD."""


def decompress(codec: int, data: memoryview, *, bytes_max: int) -> bytes | memoryview:
    """The records of a batch whose attributes name `codec` (0 to 4).

    Raises LimitError where they are more than `bytes_max`, MalformedBatch where they cannot be decompressed.
    """
    if codec == NONE:
        return data
    if codec == SNAPPY:
        return _snappy(data, bytes_max)
    if codec == GZIP:
        return _stream(cramjam.gzip.decompress_into, "gzip", data, bytes_max)
    if codec == LZ4:
        return _stream(cramjam.lz4.decompress_into, "lz4", data, bytes_max)
    if codec == ZSTD:
        return _stream(cramjam.zstd.decompress_into, "zstd", data, bytes_max)
    raise MalformedBatch(f"a record batch names the unknown compression codec {codec}")


def _too_large(name: str, data: memoryview, bytes_max: int) -> LimitError:
    return LimitError(
        f"a record batch of {len(data)} bytes unpacks ({name}) to more than the limit of {bytes_max} bytes; "
        "send smaller batches, or raise the proxy's limit on decompressed batches"
    )


def _buffer(byte_count: int) -> memoryview:
    """So many bytes to decompress into. A large bytearray would be filled with zeros first, for which Python holds all
    threads up; mapped memory is not touched before it is written to."""
    return memoryview(mmap.mmap(-1, byte_count) if byte_count > _MAPPED_BYTES_MIN else bytearray(byte_count))


def _stream(into: Callable[[Any, Any], int], name: str, data: memoryview, bytes_max: int) -> memoryview:
    """Tries a buffer that fits what compresses as records do, and larger ones where it does not."""
    capacity = min(bytes_max, max(_FIRST_TRY_BYTES_MIN, _GROWTH * len(data)))
    while True:
        out = _buffer(capacity)
        try:
            written = into(data, out)
        except cramjam.DecompressionError as error:
            # What cramjam says when the output is full; any other message means broken input.
            if "failed to write whole buffer" not in str(error):
                raise MalformedBatch(f"a record batch cannot be decompressed ({name}): {error}") from error
            if capacity == bytes_max:
                raise _too_large(name, data, bytes_max) from error
            capacity = min(bytes_max, capacity * _GROWTH)
            continue
        return out[:written]


def _snappy(data: memoryview, bytes_max: int) -> memoryview:
    """Both forms that producers write: Java's blocks, and one raw block as librdkafka has it.

    Every block tells its size, so the sum is known before anything is allocated.
    """
    blocks = _xerial_blocks(data) if data[:8] == _XERIAL_MAGIC else [data]
    try:
        sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        total = sum(sizes)
        if total > bytes_max:
            raise _too_large("snappy", data, bytes_max)
        out = _buffer(total)
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            cramjam.snappy.decompress_raw_into(block, out[at : at + size])
            at += size
    except cramjam.DecompressionError as error:
        raise MalformedBatch(f"a record batch cannot be decompressed (snappy): {error}") from error
    return out


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    blocks = []
    at = _XERIAL_HEADER_BYTES
    end = len(data)
    while at < end:
        if at + 4 > end:
            raise MalformedBatch("a snappy stream ends in the middle of a block's length")
        (size,) = _INT32.unpack_from(data, at)
        if size == _XERIAL_MAGIC_HEAD:  # a second stream behind the first, as xerial's reader allows
            at += _XERIAL_HEADER_BYTES
            continue
        at += 4
        if size < 0 or at + size > end:
            raise MalformedBatch(f"a snappy block claims {size} bytes where {end - at} are left")
        blocks.append(data[at : at + size])
        at += size
    return blocks
