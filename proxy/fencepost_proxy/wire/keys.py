"""Reads the record keys of a batch, to verify their partitions. Layout: see `batch.py`."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost_proxy.wire.batch import HEADER_BYTES, parse_batch_header
from fencepost_proxy.wire.compression import MalformedBatch, decompress
from fencepost_proxy.wire.primitives import MALFORMED, reason_of
from fencepost_proxy.wire.records import keys_in


def record_keys(records: memoryview, *, decompressed_bytes_max: int) -> Iterator[bytes | None]:
    """Keys of one complete batch, in record order. None for a record without a key, b"" for an empty key.

    Iteration raises `MalformedBatch` and `LimitError`, as `scan_batch` does.
    """
    header = parse_batch_header(records)
    data = bytes(decompress(header.compression, records[HEADER_BYTES:], bytes_max=decompressed_bytes_max))
    try:
        yield from keys_in(data, header.record_count)
    except MALFORMED as error:
        raise MalformedBatch(f"malformed record: {reason_of(error)}") from error
