"""Reads the record keys of a batch, to verify their partitions. Layout: see `batch.py`."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost_proxy.wire.batch import HEADER_BYTES, parse_batch_header
from fencepost_proxy.wire.compression import MalformedBatch, decompress
from fencepost_proxy.wire.primitives import MALFORMED, Malformed, read_varint, read_varlong, reason_of


def record_keys(records: memoryview, *, decompressed_bytes_max: int) -> Iterator[bytes | None]:
    """Keys of one complete batch, in record order. None for a record without a key, b"" for an empty key.

    Iteration raises `MalformedBatch` and `LimitError`, as `scan_batch` does.
    """
    header = parse_batch_header(records)
    data = bytes(decompress(header.compression, records[HEADER_BYTES:], bytes_max=decompressed_bytes_max))
    try:
        yield from _keys(data, header.record_count)
    except MALFORMED as error:
        raise MalformedBatch(f"malformed record: {reason_of(error)}") from error


def _keys(data: bytes, count: int) -> Iterator[bytes | None]:
    at = 0
    for _ in range(count):
        length, at = read_varint(data, at)
        end = at + length
        if length < 0 or end > len(data):
            raise Malformed("longer than its batch")
        _, at = read_varlong(data, at + 1)
        _, at = read_varint(data, at)
        length, at = read_varint(data, at)
        if at + length > end:
            raise Malformed(f"invalid key length {length}")
        yield None if length < 0 else data[at : at + length]
        at = end
    if at != len(data):
        raise Malformed(f"{len(data) - at} extra bytes after {count} records")
