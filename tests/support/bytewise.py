"""Record batches built byte by byte, for tests with unusual or invalid batches that no client library builds."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import cramjam
import crc32c

NOW_MS = 1_700_000_000_000


def _lz4(data: bytes) -> bytes:
    """Kafka accepts only frames with independent blocks."""
    compressor = cramjam.lz4.Compressor(block_linked=False)
    compressor.compress(data)
    return bytes(compressor.finish())


#: Codec number in a batch's attributes → codec.
CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "none": (0, bytes),
    "gzip": (1, lambda data: bytes(cramjam.gzip.compress(data))),
    "snappy": (2, lambda data: bytes(cramjam.snappy.compress_raw(data))),
    "lz4": (3, _lz4),
    "zstd": (4, lambda data: bytes(cramjam.zstd.compress(data))),
}


def varint(value: int) -> bytes:
    raw = value << 1 if value >= 0 else -(value << 1) - 1
    out = bytearray()
    while raw > 127:
        out.append(raw & 127 | 128)
        raw >>= 7
    return bytes([*out, raw])


def sized(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def record(
    offset_delta: int,
    headers: Sequence[tuple[bytes, bytes | None]] = (),
    *,
    timestamp_delta: int = 0,
    key: bytes | None = None,
    value: bytes | None = b"value",
) -> bytes:
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + sized(key) + sized(value)
    return framed(body + varint(len(headers)) + b"".join(sized(name) + sized(data) for name, data in headers))


def framed(body: bytes) -> bytes:
    return varint(len(body)) + body


def batch(
    records: Sequence[bytes],
    *,
    base_offset: int = 0,
    attributes: int = 0,
    base_timestamp_ms: int = NOW_MS,
    max_timestamp_ms: int = -1,
    count: int | None = None,
    last_offset_delta: int | None = None,
    codec: str = "none",
    magic: int = 2,
) -> memoryview:
    """`count` is the number that the batch claims, if different from the number of its records."""
    count = len(records) if count is None else count
    last_offset_delta = count - 1 if last_offset_delta is None else last_offset_delta
    number, compress = CODECS[codec]
    covered = struct.pack(
        ">hiqqqhii", attributes | number, last_offset_delta, base_timestamp_ms, max_timestamp_ms, -1, -1, -1, count
    ) + compress(b"".join(records))
    head = struct.pack(">qiibI", base_offset, len(covered) + 9, -1, magic, crc32c.crc32c(covered))
    return memoryview(head + covered)


def altered(data: memoryview) -> Iterator[memoryview]:
    """With one byte replaced: each, by several others."""
    for at in range(len(data)):
        for value in (0, 1, 0x7F, 0x80, 0xFE, 0xFF, data[at] ^ 0x01, data[at] ^ 0x10, (data[at] + 1) & 0xFF):
            if value != data[at]:
                yield memoryview(b"".join((data[:at], bytes([value]), data[at + 1 :])))
