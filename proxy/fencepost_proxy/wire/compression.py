"""Bounded decompression of record batches, with Kafka's tolerance of malformed data.

- LZ4: Kafka reads only the first frame, and ignores its content size and content checksum.
- gzip: Kafka ignores data after a member that is not another member.
- Kafka responds UNKNOWN_SERVER_ERROR to data that it cannot decompress (`UndecodableBatch`).

`tests/integration/test_compressed_forms.py` compares every form. The output buffer never exceeds `bytes_max`: a
batch that decompresses to gigabytes costs at most that memory and the time to fill it.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

from fencepost_proxy.errors import ClientProtocolError, LimitError

NONE = 0
GZIP = 1
SNAPPY = 2
LZ4 = 3
ZSTD = 4

CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")

_FIRST_TRY_BYTES_MIN = 64 * 1024
_BUFFER_FACTOR = 8
_MAPPED_BYTES_MIN = 1024 * 1024

#: Java's snappy stream (xerial): this magic, two 32-bit versions, then blocks preceded by 32-bit lengths.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_INT32 = Struct(">i")
_XERIAL_MAGIC_HEAD: int = _INT32.unpack_from(_XERIAL_MAGIC)[0]


#: LZ4 frame: magic, version and flags of the descriptor. In a frame of more than `_LZ4_BLOCKS_MAX` blocks the end is
#: not searched.
_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_VERSION = 0x40
_LZ4_INDEPENDENT = 0x20
_LZ4_BLOCK_CHECKSUMS = 0x10
_LZ4_CONTENT_SIZE = 0x08
_LZ4_RESERVED = 0x03
_LZ4_BLOCK_SIZES = frozenset({0x40, 0x50, 0x60, 0x70})
_LZ4_BLOCKS_MAX = 20_000
_LITTLE32 = Struct("<I")

_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_HEADER_BYTES, _GZIP_TRAILER_BYTES = 10, 8
_GZIP_HEADER_CRC, _GZIP_EXTRA, _GZIP_NAME, _GZIP_COMMENT = 2, 4, 8, 16
_GZIP_PIECE_BYTES = 4096
_RAW_DEFLATE = -15


@cache
def _library() -> Any:
    """cramjam takes 2.4 MB, which a proxy that decompresses nothing saves."""
    import cramjam  # noqa: PLC0415

    return cramjam


class MalformedBatch(ClientProtocolError):
    """A record batch violates the format. Kafka responds CORRUPT_MESSAGE or INVALID_RECORD."""


class UndecodableBatch(MalformedBatch):
    """The records cannot be decompressed. Kafka responds UNKNOWN_SERVER_ERROR."""


def decompress(codec: int, data: memoryview, *, bytes_max: int) -> bytes | memoryview:
    """The decompressed records of a batch with `codec` 0 to 4.

    Raises `LimitError` above `bytes_max` bytes, `MalformedBatch` if they cannot be decompressed.
    """
    if codec == NONE:
        return data
    if codec == SNAPPY:
        return _snappy(data, bytes_max)
    if codec == GZIP:
        try:
            return _stream(_library().gzip.decompress_into, "gzip", data, bytes_max)
        except UndecodableBatch:
            return _gzip_members(data, bytes_max)
    if codec == LZ4:
        return _stream(_library().lz4.decompress_into, "lz4", _first_lz4_frame(data), bytes_max)
    if codec == ZSTD:
        return _stream(_library().zstd.decompress_into, "zstd", data, bytes_max) if data else data
    raise UndecodableBatch(f"record batch has unknown compression codec {codec}")


def _too_large(name: str, data: memoryview, bytes_max: int) -> LimitError:
    return LimitError(
        f"record batch of {len(data)} bytes decompresses ({name}) to more than the limit of {bytes_max} bytes "
        "(send smaller batches, or raise limits.decompressed_bytes_max)"
    )


def _buffer(byte_count: int) -> memoryview:
    """An output buffer. Large ones are mapped memory, because Python blocks all threads while it zeroes a bytearray."""
    return memoryview(mmap.mmap(-1, byte_count) if byte_count > _MAPPED_BYTES_MIN else bytearray(byte_count))


def _stream(into: Callable[[Any, Any], int], name: str, data: memoryview, bytes_max: int) -> memoryview:
    """Decompresses into a buffer of `_BUFFER_FACTOR` times the input, and into larger ones while it is too small."""
    capacity = min(bytes_max, max(_FIRST_TRY_BYTES_MIN, _BUFFER_FACTOR * len(data)))
    while True:
        out = _buffer(capacity)
        try:
            written = into(data, out)
        except _library().DecompressionError as error:
            # This message means that the output is full; any other one means malformed input.
            if "failed to write whole buffer" not in str(error):
                raise UndecodableBatch(f"record batch cannot be decompressed ({name}): {error}") from error
            if capacity == bytes_max:
                raise _too_large(name, data, bytes_max) from error
            capacity = min(bytes_max, capacity * _BUFFER_FACTOR)
            continue
        return out[:written]


def _gzip_members(data: memoryview, bytes_max: int) -> memoryview:
    """Decompresses as Java's GZIPInputStream does.

    A truncated member or a wrong trailer is an error. Data after a member that is not another member is ignored.
    """
    out = _buffer(bytes_max)
    written = 0
    at = _gzip_header_end(data, 0)
    if at is None:
        raise UndecodableBatch("record batch cannot be decompressed (gzip): no member header")
    while at is not None:
        inflater = zlib.decompressobj(_RAW_DEFLATE)
        crc, began = 0, written
        while not inflater.eof:
            piece = inflater.unconsumed_tail or data[at : at + _GZIP_PIECE_BYTES]
            if not inflater.unconsumed_tail:
                at += len(piece)
            try:
                found = inflater.decompress(piece, bytes_max - written + 1)
            except zlib.error as error:
                raise UndecodableBatch(f"record batch cannot be decompressed (gzip): {error}") from error
            if written + len(found) > bytes_max:
                raise _too_large("gzip", data, bytes_max)
            if not (piece or found):
                raise UndecodableBatch("record batch cannot be decompressed (gzip): truncated")
            out[written : written + len(found)] = found
            written += len(found)
            crc = zlib.crc32(found, crc)
        at -= len(inflater.unused_data)
        trailer = bytes(data[at : at + _GZIP_TRAILER_BYTES])
        if trailer != _LITTLE32.pack(crc) + _LITTLE32.pack((written - began) & 0xFFFFFFFF):
            raise UndecodableBatch("record batch cannot be decompressed (gzip): wrong checksum or size")
        at += _GZIP_TRAILER_BYTES
        # Java reads another member only if enough bytes remain.
        at = _gzip_header_end(data, at) if len(data) - at > _GZIP_HEADER_BYTES + _GZIP_TRAILER_BYTES else None
    return out[:written]


def _gzip_header_end(data: memoryview, at: int) -> int | None:
    """End of the member header at `at`; None if there is none."""
    if data[at : at + 3] != _GZIP_MAGIC or len(data) < at + _GZIP_HEADER_BYTES:
        return None
    flags = data[at + 3]
    end = at + _GZIP_HEADER_BYTES
    if flags & _GZIP_EXTRA:
        end += 2 + int.from_bytes(data[end : end + 2], "little")
    for flag in (_GZIP_NAME, _GZIP_COMMENT):
        if flags & flag:
            end = bytes(data[end : end + _GZIP_PIECE_BYTES]).find(b"\0") + 1 + end
    if flags & _GZIP_HEADER_CRC:
        if int.from_bytes(data[end : end + 2], "little") != zlib.crc32(data[at:end]) & 0xFFFF:
            return None
        end += 2
    return end if end <= len(data) else None


def _lz4_descriptor_end(data: memoryview) -> int:
    """Start of the blocks of the first frame. Raises `UndecodableBatch` in the cases in which Kafka fails."""
    if len(data) < 7 or data[:4] != _LZ4_MAGIC:
        raise UndecodableBatch("record batch cannot be decompressed (lz4): no frame header")
    flags, block_size = data[4], data[5]
    if flags & 0xC0 != _LZ4_VERSION or flags & _LZ4_RESERVED or block_size not in _LZ4_BLOCK_SIZES:
        raise UndecodableBatch("record batch cannot be decompressed (lz4): version or flags not supported by Kafka")
    if not flags & _LZ4_INDEPENDENT:
        raise UndecodableBatch("record batch cannot be decompressed (lz4): linked blocks are not supported by Kafka")
    end = 6 + (8 if flags & _LZ4_CONTENT_SIZE else 0)
    if len(data) <= end or data[end] != _xxh32_of_few(bytes(data[4:end])) >> 8 & 0xFF:
        raise UndecodableBatch("record batch cannot be decompressed (lz4): wrong descriptor checksum")
    return end + 1


def _first_lz4_frame(data: memoryview) -> memoryview:
    """The first frame without content size and content checksum, which Kafka ignores."""
    blocks_at = _lz4_descriptor_end(data)
    flags = _LZ4_VERSION | _LZ4_INDEPENDENT | data[4] & _LZ4_BLOCK_CHECKSUMS
    checksum_bytes = 4 if flags & _LZ4_BLOCK_CHECKSUMS else 0
    at = blocks_at
    for _ in range(_LZ4_BLOCKS_MAX):
        if at + 4 > len(data):
            raise UndecodableBatch("record batch cannot be decompressed (lz4): frame has no end mark")
        (size,) = _LITTLE32.unpack_from(data, at)
        at += 4
        if not size:
            break
        at += (size & 0x7FFFFFFF) + checksum_bytes
    else:
        return data  # searching the end would take too long
    if at == len(data) and flags == data[4]:
        return data
    descriptor = bytes([flags, data[5]])
    check = _xxh32_of_few(descriptor) >> 8 & 0xFF
    return memoryview(_LZ4_MAGIC + descriptor + bytes([check]) + data[blocks_at:at])


def _xxh32_of_few(data: bytes) -> int:
    """XXH32 of less than 16 bytes."""
    one, two, three, four, five = 2654435761, 2246822519, 3266489917, 668265263, 374761393
    mask = 0xFFFFFFFF
    found, at = five + len(data) & mask, 0
    while at + 4 <= len(data):
        found = found + _LITTLE32.unpack_from(data, at)[0] * three & mask
        found = (found << 17 | found >> 15) * four & mask
        at += 4
    for byte in data[at:]:
        found = found + byte * five & mask
        found = (found << 11 | found >> 21) * one & mask
    found = (found ^ found >> 15) * two & mask
    found = (found ^ found >> 13) * three & mask
    return found ^ found >> 16


def _snappy(data: memoryview, bytes_max: int) -> memoryview:
    """Decompresses both forms that producers write: Java's blocks, and one raw block (librdkafka).

    Every block contains its decompressed size, so the total is known before allocation.
    """
    blocks = _xerial_blocks(data) if data[:8] == _XERIAL_MAGIC else [data]
    try:
        sizes = [_library().snappy.decompress_raw_len(block) for block in blocks]
        total = sum(sizes)
        if total > bytes_max:
            raise _too_large("snappy", data, bytes_max)
        out = _buffer(total)
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            _library().snappy.decompress_raw_into(block, out[at : at + size])
            at += size
    except _library().DecompressionError as error:
        raise UndecodableBatch(f"record batch cannot be decompressed (snappy): {error}") from error
    return out


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    blocks = []
    at = _XERIAL_HEADER_BYTES
    end = len(data)
    while at < end:
        if at + 4 > end:
            break  # incomplete length: xerial's reader treats it as the end
        (size,) = _INT32.unpack_from(data, at)
        if size == _XERIAL_MAGIC_HEAD:  # another stream after the first: xerial's reader accepts it
            at += _XERIAL_HEADER_BYTES
            continue
        at += 4
        if size < 0 or at + size > end:
            raise UndecodableBatch(f"snappy block of {size} bytes exceeds the remaining {end - at} bytes")
        blocks.append(data[at : at + size])
        at += size
    return blocks
