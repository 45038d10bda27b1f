"""Uncompressed batches, written and read by another implementation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from fencepost_proxy.types import Offset
from fencepost_proxy.wire.batch import parse_batch_header, require_single_batch
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.uncompressed_batch import (
    StateTopicRecord,
    encode_uncompressed_batch,
    read_uncompressed_records,
)
from tests.support.batches import built_by
from tests.support.properties import some

RECORDS: list[tuple[bytes | None, bytes | None]] = [(b"k", b"v"), (None, b""), (b"x" * 300, None)]


def read(batch: bytes) -> list[StateTopicRecord]:
    view = memoryview(batch)
    return list(read_uncompressed_records(parse_batch_header(view), view))


@some
@given(st.lists(st.tuples(st.none() | st.binary(max_size=300), st.none() | st.binary(max_size=300)), min_size=1))
def test_kafka_python_reads_what_we_write(pairs: list[tuple[bytes | None, bytes | None]]) -> None:
    written = encode_uncompressed_batch(pairs, 1234)
    batch = MemoryRecords(written).next_batch()

    assert batch.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value) for r in batch] == [
        (offset, 1234, key, value) for offset, (key, value) in enumerate(pairs)
    ]
    header = require_single_batch(memoryview(written))
    assert (header.record_count, header.producer_id, header.max_timestamp_ms) == (len(pairs), -1, 1234)
    assert [(each.key, each.value) for each in read(written)] == pairs


def test_kafka_python_batch_with_headers_is_readable() -> None:
    rows = [(77 + offset, key, value, [("h", b"1")]) for offset, (key, value) in enumerate(RECORDS)]
    batch = bytearray(built_by(DefaultRecordBatchBuilder, rows, producer=(5, 0, 9)))
    batch[0:8] = (41).to_bytes(8, "big")  # as the log has it

    assert read(bytes(batch)) == [StateTopicRecord(Offset(41 + offset), *pair) for offset, pair in enumerate(RECORDS)]


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
