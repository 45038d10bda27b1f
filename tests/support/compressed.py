"""Compressed record batches in every form that a client may send: by libraries, unusual, and invalid.

The forms differ only in their framing. All claim `RECORDS` records, in one or two blocks.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from typing import Final

import cramjam
import crc32c

from tests.support.bytewise import NOW_MS, record

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
RECORDS: Final = (record(0, value=b"first" * 20), record(1, value=b"second" * 20))
ALL: Final = b"".join(RECORDS)
_HEADER = 10  # of a gzip member
_MASK = 0xFFFFFFFF
_PRIMES = 2654435761, 2246822519, 3266489917, 668265263, 374761393


def xxh32(data: bytes) -> int:
    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & _MASK

    one, two, three, four, five = _PRIMES
    at, size = 0, len(data)
    if size < 16:
        found = five
    else:
        accumulators = [(one + two) & _MASK, two, 0, -one & _MASK]
        while at + 16 <= size:
            for purpose, word in enumerate(struct.unpack_from("<4I", data, at)):
                accumulators[purpose] = rotated((accumulators[purpose] + word * two) & _MASK, 13) * one & _MASK
            at += 16
        found = sum(rotated(value, bits) for value, bits in zip(accumulators, (1, 7, 12, 18), strict=True)) & _MASK
    found = (found + size) & _MASK
    while at + 4 <= size:
        found = rotated((found + struct.unpack_from("<I", data, at)[0] * three) & _MASK, 17) * four & _MASK
        at += 4
    for byte in data[at:]:
        found = rotated((found + byte * five) & _MASK, 11) * one & _MASK
    found = (found ^ found >> 15) * two & _MASK
    found = (found ^ found >> 13) * three & _MASK
    return found ^ found >> 16


def lz4(
    *blocks: bytes,
    flags: int = 0x60,
    block_size: int = 0x40,
    content_size: int | None = None,
    checksum: int | None = None,
    block_checksum: int | None = None,
    header_error: int = 0,
    end: bool = True,
    dictionary: int | None = None,
) -> bytes:
    """One frame. `flags`: version 1 and independent blocks. Checksums: the value to write, -1 for the right one."""
    flags |= (content_size is not None) << 3 | (checksum is not None) << 2 | (block_checksum is not None) << 4
    flags |= dictionary is not None
    described = bytes([flags, block_size])
    if content_size is not None:
        described += struct.pack("<Q", content_size)
    if dictionary is not None:
        described += struct.pack("<I", dictionary)
    out = struct.pack("<I", 0x184D2204) + described + bytes([(xxh32(described) >> 8 & 0xFF) ^ header_error])
    for block in blocks:
        packed = bytes(cramjam.lz4.compress_block(block, store_size=False))
        out += struct.pack("<I", len(packed)) + packed
        if block_checksum is not None:
            out += struct.pack("<I", xxh32(packed) if block_checksum < 0 else block_checksum)
    if end:
        out += struct.pack("<I", 0)
        if checksum is not None:
            out += struct.pack("<I", xxh32(b"".join(blocks)) if checksum < 0 else checksum)
    return out


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def _xerial(*blocks: bytes, versions: tuple[int, int] = (1, 1)) -> bytes:
    out = b"\x82SNAPPY\0" + struct.pack(">ii", *versions)
    for block in blocks:
        packed = bytes(cramjam.snappy.compress_raw(block))
        out += struct.pack(">i", len(packed)) + packed
    return out


def _zstd(data: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(data))


def _zstd_stored(data: bytes, *, checksum: int | None = None, content_size: int | None = None) -> bytes:
    descriptor = (content_size is not None) << 5 | (checksum is not None) << 2
    window_or_size = 0x58 if content_size is None else content_size
    out = struct.pack("<IBB", 0xFD2FB528, descriptor, window_or_size)
    out += struct.pack("<I", 1 | len(data) << 3)[:3] + data
    return out if checksum is None else out + struct.pack("<I", checksum)


_SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"
_RAW = bytes(cramjam.snappy.compress_raw(ALL))

FORMS: Final[dict[str, tuple[int, bytes]]] = {
    "gzip": (GZIP, _gzip(ALL)),
    "gzip, trailing zeros": (GZIP, _gzip(ALL) + bytes(8)),
    "gzip, trailing bytes": (GZIP, _gzip(ALL) + b"trailing"),
    "gzip, two members": (GZIP, _gzip(RECORDS[0]) + _gzip(RECORDS[1])),
    "gzip, an empty member after": (GZIP, _gzip(ALL) + _gzip(b"")),
    "gzip, a member too many": (GZIP, _gzip(ALL) + _gzip(RECORDS[1])),
    "gzip, wrong size": (GZIP, _gzip(ALL)[:-4] + b"\1\2\3\4"),
    "gzip, wrong CRC": (GZIP, _gzip(ALL)[:-8] + b"\1\2\3\4" + _gzip(ALL)[-4:]),
    "gzip, no trailer": (GZIP, _gzip(ALL)[:-8]),
    "gzip, half a trailer": (GZIP, _gzip(ALL)[:-4]),
    "gzip, cut off": (GZIP, _gzip(ALL)[:-14]),
    "gzip, file name": (GZIP, b"\x1f\x8b\x08\x08" + _gzip(ALL)[4:_HEADER] + b"name\0" + _gzip(ALL)[_HEADER:]),
    "gzip, reserved flag": (GZIP, b"\x1f\x8b\x08\x80" + _gzip(ALL)[4:]),
    "gzip, other method": (GZIP, b"\x1f\x8b\x07" + _gzip(ALL)[3:]),
    "gzip, no magic": (GZIP, b"\0\0" + _gzip(ALL)[2:]),
    "gzip, nothing": (GZIP, b""),
    "lz4": (LZ4, lz4(ALL)),
    "lz4, two blocks": (LZ4, lz4(*RECORDS)),
    "lz4, trailing zeros": (LZ4, lz4(ALL) + bytes(8)),
    "lz4, trailing bytes": (LZ4, lz4(ALL) + b"trailing"),
    "lz4, content size": (LZ4, lz4(ALL, content_size=len(ALL))),
    "lz4, wrong content size": (LZ4, lz4(ALL, content_size=len(ALL) + 7)),
    "lz4, no end mark": (LZ4, lz4(ALL, end=False)),
    "lz4, two frames": (LZ4, lz4(RECORDS[0]) + lz4(RECORDS[1])),
    "lz4, an empty frame after": (LZ4, lz4(ALL) + lz4()),
    "lz4, a frame too many": (LZ4, lz4(ALL) + lz4(RECORDS[1])),
    "lz4, skippable frame before": (LZ4, _SKIPPABLE + lz4(ALL)),
    "lz4, skippable frame after": (LZ4, lz4(ALL) + _SKIPPABLE),
    "lz4, content checksum": (LZ4, lz4(ALL, checksum=-1)),
    "lz4, wrong content checksum": (LZ4, lz4(ALL, checksum=1)),
    "lz4, missing content checksum": (LZ4, lz4(ALL, checksum=-1)[:-4]),
    "lz4, block checksums": (LZ4, lz4(ALL, block_checksum=-1)),
    "lz4, wrong block checksum": (LZ4, lz4(ALL, block_checksum=1)),
    "lz4, linked blocks": (LZ4, lz4(*RECORDS, flags=0x40)),
    "lz4, wrong header checksum": (LZ4, lz4(ALL, header_error=1)),
    "lz4, reserved flag": (LZ4, lz4(ALL, flags=0x62)),
    "lz4, reserved block bits": (LZ4, lz4(ALL, block_size=0x41)),
    "lz4, unknown block size": (LZ4, lz4(ALL, block_size=0x30)),
    "lz4, other version": (LZ4, lz4(ALL, flags=0xA0)),
    "lz4, dictionary": (LZ4, lz4(ALL, dictionary=1)),
    "lz4, legacy frame": (LZ4, struct.pack("<I", 0x184C2102) + lz4(ALL)[7:-4]),
    "lz4, block above its size": (LZ4, lz4(ALL + bytes(70_000))),
    "lz4, cut off": (LZ4, lz4(ALL)[:-10]),
    "lz4, broken block": (LZ4, lz4(ALL)[:11] + b"\xff" * 20 + lz4(ALL)[31:]),
    "lz4, nothing": (LZ4, b""),
    "snappy, one raw block": (SNAPPY, _RAW),
    "snappy, raw, trailing bytes": (SNAPPY, _RAW + b"trailing"),
    "snappy, raw, cut off": (SNAPPY, _RAW[:-5]),
    "snappy, raw, wrong size": (SNAPPY, bytes([_RAW[0] + 1]) + _RAW[1:]),
    "snappy, blocks": (SNAPPY, _xerial(*RECORDS)),
    "snappy, blocks, trailing zeros": (SNAPPY, _xerial(ALL) + bytes(8)),
    "snappy, blocks, trailing bytes": (SNAPPY, _xerial(ALL) + b"trailing"),
    "snappy, blocks, two trailing bytes": (SNAPPY, _xerial(ALL) + b"tr"),
    "snappy, blocks, two streams": (SNAPPY, _xerial(RECORDS[0]) + _xerial(RECORDS[1])),
    "snappy, blocks, one too many": (SNAPPY, _xerial(ALL, RECORDS[1])),
    "snappy, blocks, newer version": (SNAPPY, _xerial(ALL, versions=(2, 2))),
    "snappy, blocks, older version": (SNAPPY, _xerial(ALL, versions=(0, 0))),
    "snappy, blocks, cut off": (SNAPPY, _xerial(*RECORDS)[:-5]),
    "snappy, blocks, none": (SNAPPY, _xerial()),
    "snappy, nothing": (SNAPPY, b""),
    "zstd": (ZSTD, _zstd(ALL)),
    "zstd, trailing zeros": (ZSTD, _zstd(ALL) + bytes(8)),
    "zstd, trailing bytes": (ZSTD, _zstd(ALL) + b"trailing"),
    "zstd, two frames": (ZSTD, _zstd(RECORDS[0]) + _zstd(RECORDS[1])),
    "zstd, a frame too many": (ZSTD, _zstd(ALL) + _zstd(RECORDS[1])),
    "zstd, skippable frame before": (ZSTD, _SKIPPABLE + _zstd(ALL)),
    "zstd, skippable frame after": (ZSTD, _zstd(ALL) + _SKIPPABLE),
    "zstd, stored": (ZSTD, _zstd_stored(ALL)),
    "zstd, wrong checksum": (ZSTD, _zstd_stored(ALL, checksum=1)),
    "zstd, missing checksum": (ZSTD, _zstd_stored(ALL, checksum=1)[:-4]),
    "zstd, wrong content size": (ZSTD, _zstd_stored(ALL, content_size=len(ALL) + 7)),
    "zstd, cut off": (ZSTD, _zstd(ALL)[:-5]),
    "zstd, nothing": (ZSTD, b""),
}


def batch(
    codec: int, compressed: bytes, *, base_timestamp_ms: int = NOW_MS, records: Sequence[bytes] = RECORDS
) -> bytes:
    count = len(records)
    covered = struct.pack(">hiqqqhii", codec, count - 1, base_timestamp_ms, base_timestamp_ms, -1, -1, -1, count)
    covered += compressed
    return struct.pack(">qiibI", 0, len(covered) + 9, -1, 2, crc32c.crc32c(covered)) + covered
