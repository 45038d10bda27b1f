"""Record batches for tests, made by kafka-python's builder, independently of the code under test."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

from kafka.record.default_records import DefaultRecordBatchBuilder

Header = tuple[str, bytes]
#: Timestamp, key, value, headers.
Row = tuple[int, bytes | None, bytes | None, Sequence[tuple[str, bytes | None]]]


def now_ms() -> int:
    return int(time.time() * 1000)


def batch(
    *values: bytes,
    headers: Sequence[Sequence[Header]] = (),
    timestamp_ms: int | None = None,
    producer: tuple[int, int, int] = (-1, -1, -1),
    transactional: bool = False,
    compression: int = 0,
    base_offset: int = 0,
    key: bytes | None = None,
) -> memoryview:
    """A v2 batch with one record per value; `headers` are per record, `producer` is (id, epoch, first sequence)."""
    producer_id, producer_epoch, base_sequence = producer
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=transactional,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=1 << 24,
    )
    at = now_ms() if timestamp_ms is None else timestamp_ms
    for delta, value in enumerate(values):
        of_record = list(headers[delta]) if delta < len(headers) else []
        builder.append(delta, at, key, value, of_record)
    built = bytearray(builder.build())
    struct.pack_into(">q", built, 0, base_offset)
    return memoryview(bytes(built))


def built_by(
    builder_class: Any, rows: Sequence[Row], *, codec: int = 0, producer: tuple[int, int, int] = (-1, -1, -1)
) -> memoryview:
    """By a client library's builder."""
    producer_id, producer_epoch, base_sequence = producer
    builder = builder_class(
        magic=2,
        compression_type=codec,
        is_transactional=0,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=1 << 24,
    )
    for index, (timestamp, key, value, headers) in enumerate(rows):
        assert builder.append(index, timestamp, key, value, list(headers))
    return memoryview(bytes(builder.build()))


def expecting(offset: int, *values: bytes, write_id: bytes | None = None, **more: object) -> memoryview:
    """A batch whose first record has its expected offset, and a write-id if one is given."""
    first: list[Header] = [("fencepost-expected-offset", b"%d" % offset)]
    if write_id is not None:
        first.append(("fencepost-write-id", write_id))
    return batch(*values, headers=[first], **more)  # type: ignore[arg-type]
