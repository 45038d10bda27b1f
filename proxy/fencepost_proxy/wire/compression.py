"""Decompression of a record batch's records, as Kafka does it, under a bound.

Kafka is lenient: it reads the first LZ4 frame alone and neither its content size nor its content checksum, and takes
whatever follows a gzip member for rubbish where it is no other one. What it cannot decompress it answers with
UNKNOWN_SERVER_ERROR (`UndecodableBatch`). `tests/integration/test_compressed_forms.py` compares every form.

The output buffer has a size before anything is decompressed into it and never grows past the bound, so a batch that
unpacks to gigabytes costs at most `bytes_max` bytes and the time to fill them.
"""

from __future__ import annotations

import mmap
import zlib
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


#: What begins an LZ4 frame; its version; flags of its descriptor. Of a frame of more blocks its end is not looked for.
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


class MalformedBatch(ClientProtocolError):
    """A record batch is not what the format says. Kafka would answer CORRUPT_MESSAGE or INVALID_RECORD."""


class UndecodableBatch(MalformedBatch):
    """Its records cannot be decompressed. Kafka answers UNKNOWN_SERVER_ERROR."""


def decompress(codec: int, data: memoryview, *, bytes_max: int) -> bytes | memoryview:
    """The records of a batch whose attributes name `codec` (0 to 4).

    Raises LimitError where they are more than `bytes_max`, MalformedBatch where they cannot be decompressed.
    """
    if codec == NONE:
        return data
    if codec == SNAPPY:
        return _snappy(data, bytes_max)
    if codec == GZIP:
        try:
            return _stream(cramjam.gzip.decompress_into, "gzip", data, bytes_max)
        except UndecodableBatch:
            return _gzip_members(data, bytes_max)
    if codec == LZ4:
        return _stream(cramjam.lz4.decompress_into, "lz4", _first_lz4_frame(data), bytes_max)
    if codec == ZSTD:
        return _stream(cramjam.zstd.decompress_into, "zstd", data, bytes_max) if data else data
    raise UndecodableBatch(f"a record batch names the unknown compression codec {codec}")


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
                raise UndecodableBatch(f"a record batch cannot be decompressed ({name}): {error}") from error
            if capacity == bytes_max:
                raise _too_large(name, data, bytes_max) from error
            capacity = min(bytes_max, capacity * _GROWTH)
            continue
        return out[:written]


def _gzip_members(data: memoryview, bytes_max: int) -> memoryview:
    """As Java's GZIPInputStream: a member that ends too early or has a wrong trailer is an error, but whatever follows
    one and does not begin as another is not read."""
    out = _buffer(bytes_max)
    written = 0
    at = _gzip_header_end(data, 0)
    if at is None:
        raise UndecodableBatch("a record batch cannot be decompressed (gzip): it does not begin as a member does")
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
                raise UndecodableBatch(f"a record batch cannot be decompressed (gzip): {error}") from error
            if written + len(found) > bytes_max:
                raise _too_large("gzip", data, bytes_max)
            if not (piece or found):
                raise UndecodableBatch("a record batch cannot be decompressed (gzip): it ends in the middle")
            out[written : written + len(found)] = found
            written += len(found)
            crc = zlib.crc32(found, crc)
        at -= len(inflater.unused_data)
        trailer = bytes(data[at : at + _GZIP_TRAILER_BYTES])
        if trailer != _LITTLE32.pack(crc) + _LITTLE32.pack((written - began) & 0xFFFFFFFF):
            raise UndecodableBatch("a record batch cannot be decompressed (gzip): a wrong checksum or size")
        at += _GZIP_TRAILER_BYTES
        # Java looks for another member only if there is room for one.
        at = _gzip_header_end(data, at) if len(data) - at > _GZIP_HEADER_BYTES + _GZIP_TRAILER_BYTES else None
    return out[:written]


def _gzip_header_end(data: memoryview, at: int) -> int | None:
    """None: no member begins there."""
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
    """Where the blocks of its first frame begin. Raises where Kafka's reader does."""
    if len(data) < 7 or data[:4] != _LZ4_MAGIC:
        raise UndecodableBatch("a record batch cannot be decompressed (lz4): it does not begin as a frame does")
    flags, block_size = data[4], data[5]
    if flags & 0xC0 != _LZ4_VERSION or flags & _LZ4_RESERVED or block_size not in _LZ4_BLOCK_SIZES:
        raise UndecodableBatch(
            "a record batch cannot be decompressed (lz4): a version, or flags, that Kafka does not take"
        )
    if not flags & _LZ4_INDEPENDENT:
        raise UndecodableBatch(
            "a record batch cannot be decompressed (lz4): its blocks are linked, which Kafka does not take"
        )
    end = 6 + (8 if flags & _LZ4_CONTENT_SIZE else 0)
    if len(data) <= end or data[end] != _xxh32_of_few(bytes(data[4:end])) >> 8 & 0xFF:
        raise UndecodableBatch("a record batch cannot be decompressed (lz4): a wrong checksum of its descriptor")
    return end + 1


def _first_lz4_frame(data: memoryview) -> memoryview:
    """The same blocks in a frame that says no more of them than Kafka reads: neither their size nor a checksum."""
    blocks_at = _lz4_descriptor_end(data)
    flags = _LZ4_VERSION | _LZ4_INDEPENDENT | data[4] & _LZ4_BLOCK_CHECKSUMS
    checksum_bytes = 4 if flags & _LZ4_BLOCK_CHECKSUMS else 0
    at = blocks_at
    for _ in range(_LZ4_BLOCKS_MAX):
        if at + 4 > len(data):
            raise UndecodableBatch("a record batch cannot be decompressed (lz4): its frame has no end")
        (size,) = _LITTLE32.unpack_from(data, at)
        at += 4
        if not size:
            break
        at += (size & 0x7FFFFFFF) + checksum_bytes
    else:
        return data  # to find its end would take long
    if at == len(data) and flags == data[4]:
        return data
    descriptor = bytes([flags, data[5]])
    check = _xxh32_of_few(descriptor) >> 8 & 0xFF
    return memoryview(_LZ4_MAGIC + descriptor + bytes([check]) + data[blocks_at:at])


def _xxh32_of_few(data: bytes) -> int:
    """Of less than 16 bytes."""
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
        raise UndecodableBatch(f"a record batch cannot be decompressed (snappy): {error}") from error
    return out


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    blocks = []
    at = _XERIAL_HEADER_BYTES
    end = len(data)
    while at < end:
        if at + 4 > end:
            break  # part of a length: for xerial's reader the stream has ended
        (size,) = _INT32.unpack_from(data, at)
        if size == _XERIAL_MAGIC_HEAD:  # a second stream behind the first, as xerial's reader allows
            at += _XERIAL_HEADER_BYTES
            continue
        at += 4
        if size < 0 or at + size > end:
            raise UndecodableBatch(f"a snappy block claims {size} bytes where {end - at} are left")
        blocks.append(data[at : at + size])
        at += size
    return blocks
