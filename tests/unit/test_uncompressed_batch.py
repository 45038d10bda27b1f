"""Batches of our own making, against another implementation's reading and writing."""

from __future__ import annotations

import pytest

from fencepost_proxy.types import Offset
from fencepost_proxy.wire.batch import MalformedBatch, parse_batch_header, require_single_batch
from fencepost_proxy.wire.uncompressed_batch import (
    StateTopicRecord,
    encode_uncompressed_batch,
    read_uncompressed_records,
)

RECORDS: list[tuple[bytes | None, bytes | None]] = [(b"k", b"v"), (None, b""), (b"x" * 300, None)]


def read(batch: bytes) -> list[StateTopicRecord]:
    view = memoryview(batch)
    return list(read_uncompressed_records(parse_batch_header(view), view))


def test_kafka_python_reads_what_we_write() -> None:
    records = pytest.importorskip("kafka.record.memory_records").MemoryRecords(encode_uncompressed_batch(RECORDS, 1234))
    batch = records.next_batch()

    assert batch.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value) for r in batch] == [
        (offset, 1234, key, value) for offset, (key, value) in enumerate(RECORDS)
    ]


def test_kafka_python_batch_with_headers_is_readable() -> None:
    builder = pytest.importorskip("kafka.record.default_records").DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=False, producer_id=5, producer_epoch=0, base_sequence=9,
        batch_size=100_000,
    )  # fmt: skip
    for offset, (key, value) in enumerate(RECORDS):
        builder.append(offset, timestamp=77 + offset, key=key, value=value, headers=[("h", b"1")])
    batch = bytearray(builder.build())
    batch[0:8] = (41).to_bytes(8, "big")  # as the log has it

    assert read(bytes(batch)) == [StateTopicRecord(Offset(41 + offset), *pair) for offset, pair in enumerate(RECORDS)]


def test_encoded_batch_meets_the_single_batch_rules() -> None:
    header = require_single_batch(memoryview(encode_uncompressed_batch(RECORDS, 5)))

    assert (header.record_count, header.producer_id, header.max_timestamp_ms) == (3, -1, 5)


def test_every_damaged_byte_after_the_crc_is_noticed() -> None:
    batch = encode_uncompressed_batch([(b"key", b"value")], 1)

    for at in range(17, len(batch)):
        damaged = bytearray(batch)
        damaged[at] ^= 0x40
        with pytest.raises(MalformedBatch):
            read(bytes(damaged))


def test_a_compressed_batch_is_not_unpacked() -> None:
    batch = bytearray(encode_uncompressed_batch([(b"key", b"value")], 1))
    batch[22] |= 4

    with pytest.raises(MalformedBatch, match="compressed"):
        read(bytes(batch))
