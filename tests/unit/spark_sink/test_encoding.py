"""Rows to record batches and back, compared with the parsers of aiokafka and kafka-python."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords as JavaLikeRecords
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from fencepost.spark import encoding
from fencepost.spark.encoding import BATCH_RECORDS_MAX, Encoder, Logged, UnfitRow, batches, build
from fencepost.spark.errors import SinkError

NOW_MS = 1_700_000_000_123
MARK = b'{"v":1,"sink":"flights"}'
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
BINARY = pa.binary()
Row = dict[str, Any]


def rows(*given_rows: Row, key: Any = BINARY, value: Any = BINARY, more: Any = ()) -> pa.RecordBatch:
    fields = [("key", key), ("value", value), ("headers", HEADERS), *more]
    names = [field for field in fields if any(field[0] in row for row in given_rows) or field[0] == "value"]
    return pa.RecordBatch.from_arrays(
        [pa.array([row.get(name) for row in given_rows], type_) for name, type_ in names], [name for name, _ in names]
    )


def bodies_of(batch: pa.RecordBatch) -> Any:
    return Encoder(batch.schema).bodies(batch)


def parsed(batch: bytes) -> Any:
    """By aiokafka, its checksum checked."""
    records = MemoryRecords(batch)
    found = records.next_batch()
    assert found is not None
    assert found.validate_crc()
    assert not records.has_next()
    return found


def parsed_by_kafka_python(batch: bytes) -> Any:
    found = JavaLikeRecords(batch).next_batch()
    assert found.validate_crc()
    return found


def contents(batch: Any) -> list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]]:
    return [(record.key, record.value, [tuple(header) for header in record.headers]) for record in batch]  # type: ignore[misc]


def in_log(batch: bytes, base_offset: int) -> bytes:
    """As the broker stores it."""
    return struct.pack(">q", base_offset) + batch[8:]


names = st.text(max_size=8).filter(lambda name: name not in encoding.RESERVED_HEADERS)
small = st.one_of(st.none(), st.binary(max_size=40))
a_row = st.fixed_dictionaries(
    {
        "key": small,
        "value": st.one_of(small, st.integers(60, 9000).map(lambda size: b"v" * size)),
        "headers": st.one_of(st.none(), st.lists(st.fixed_dictionaries({"key": names, "value": small}), max_size=3)),
    }
)


@given(
    st.lists(a_row, min_size=1, max_size=20),
    st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]),
    st.sampled_from([0, 1, 1 << 40]),
    st.sampled_from([None, 12]),
)
def test_built_batch_parses_and_reads_back_unchanged(
    given_rows: list[Row], compression: str, expected: int, partition_count: int | None
) -> None:
    batch = rows(*given_rows)
    bodies = bodies_of(batch)

    built = build(
        bodies,
        commit_tag=MARK,
        expected=expected,
        now_ms=NOW_MS,
        compression=compression,
        partition=("flights", 3),
        partition_count=partition_count,
    )

    requested = [
        (row["key"], row["value"], [(header["key"], header["value"]) for header in row["headers"] or ()])
        for row in given_rows
    ]
    first: list[tuple[str, bytes | None]] = [("fencepost-expected-offset", b"0@flights/3")] if expected == 0 else []
    first += [("fencepost-partition-count", b"12@flights")] if partition_count else []
    requested[0][2].extend(first)
    requested[-1][2].append(("fencepost-sink", MARK))
    for found in (parsed(built), parsed_by_kafka_python(built)):
        assert contents(found) == requested
    found = parsed(built)
    assert (found.base_offset, found.next_offset - found.base_offset) == (expected, len(given_rows))
    assert (found.producer_id, found.producer_epoch, found.base_sequence) == (-1, -1, -1)
    assert {(record.offset, record.timestamp) for record in found} == {
        (expected + delta, NOW_MS) for delta in range(len(given_rows))
    }
    logged = Logged(in_log(built, 70))
    assert (logged.base_offset, logged.next_offset, logged.commit_tag) == (70, 70 + len(given_rows), MARK)
    assert logged.bodies == bodies.to_pylist()


@pytest.mark.parametrize(("codec", "fast", "small"), [("gzip", 1, 9), ("lz4", 1, 12), ("zstd", -50, 19)])
def test_compression_level_changes_size_but_not_content(codec: str, fast: int, small: int) -> None:
    bodies = bodies_of(rows(*({"key": None, "value": f"{n:x} {n * n * 7919} {n % 13}"} for n in range(2000))))
    built = [
        build(bodies, commit_tag=MARK, expected=1, now_ms=NOW_MS, compression=codec, level=level)
        for level in (fast, small)
    ]
    assert len(built[1]) < len(built[0])
    assert contents(parsed(built[0])) == contents(parsed(built[1]))


def test_row_body_ignores_position_and_column_type() -> None:
    row = {"key": "schlüssel", "value": "wert", "headers": [{"key": "h", "value": b"1"}]}
    bytes_row = row | {"key": "schlüssel".encode(), "value": b"wert"}

    bodies = [
        *bodies_of(rows(row, key=pa.string(), value=pa.string())).to_pylist(),
        *bodies_of(rows(row, key=pa.large_string(), value=pa.large_string())).to_pylist(),
        *bodies_of(rows({"key": b"other", "value": b""}, bytes_row, bytes_row)).to_pylist()[1:],
        *bodies_of(rows(bytes_row, bytes_row, bytes_row).slice(1, 1)).to_pylist(),
    ]

    assert len(bodies) == 5
    assert len(set(bodies)) == 1


def test_a_batch_without_rows_has_no_bodies() -> None:
    row = {"key": b"k", "value": b"v", "headers": [], "timestamp": None, "partition": 0}
    empty = rows(row, more=[("timestamp", pa.timestamp("us", "UTC")), ("partition", pa.int32())]).slice(1, 0)
    assert len(bodies_of(empty)) == 0


def test_absent_columns_are_as_null_ones() -> None:
    alone, with_nulls = rows({"value": b"v"}), rows({"value": b"v", "key": None, "headers": None})
    assert bodies_of(alone).to_pylist() == bodies_of(with_nulls).to_pylist()


def test_slices_with_nulls_and_lists_are_read_correctly() -> None:
    given_rows = [
        {
            "key": None if n % 3 else b"k%d" % n,
            "value": b"v%d" % n,
            "headers": [{"key": "n", "value": b"%d" % n}] * (n % 4),
        }
        for n in range(20)
    ]

    whole = bodies_of(rows(*given_rows)).to_pylist()
    assert bodies_of(rows(*given_rows).slice(7, 6)).to_pylist() == whole[7:13]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamp_column_becomes_header_not_record_timestamp(unit: str) -> None:
    before_1970 = datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    given_rows = [
        {"value": b"a", "timestamp": datetime(2026, 1, 2, tzinfo=UTC), "headers": [{"key": "h", "value": None}]},
        {"value": b"b", "timestamp": None},
        {"value": b"c", "timestamp": before_1970},
    ]
    batch = rows(*given_rows, more=[("timestamp", pa.timestamp(unit, "UTC"))])

    built = build(bodies_of(batch), commit_tag=MARK, expected=9, now_ms=NOW_MS)

    assert [headers for _, _, headers in contents(parsed(built))] == [
        [("h", None), ("event-time", b"1767312000000")],
        [],
        [("event-time", b"-1000"), ("fencepost-sink", MARK)],
    ]
    assert parsed(built).max_timestamp == NOW_MS
    assert Logged(built).bodies == bodies_of(batch).to_pylist()


def test_event_time_of_a_copied_row_is_kept() -> None:
    """Its timestamp is when the record was written that it was read from."""
    first, own = datetime(2026, 1, 2, tzinfo=UTC), [{"key": "a", "value": b""}, {"key": "event-time", "value": b"7"}]
    batch = rows(
        {"value": b"1", "headers": [], "timestamp": first},
        {"value": b"2", "headers": own, "timestamp": first},
        {"value": b"3", "headers": [{"key": "b", "value": b""}], "timestamp": first},
        {"value": b"4", "headers": own, "timestamp": None},
        more=[("timestamp", pa.timestamp("us", "UTC"))],
    )
    built = build(bodies_of(batch), commit_tag=None, expected=9, now_ms=NOW_MS)
    added, kept = ("event-time", b"1767312000000"), [("a", b""), ("event-time", b"7")]
    assert [headers for _, _, headers in contents(parsed(built))] == [[added], kept, [("b", b""), added], kept]


def test_microseconds_before_1970_are_rounded_down() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"v"]), pa.array([-1], pa.timestamp("us"))], ["value", "timestamp"])
    (record,) = parsed(build(bodies_of(batch), commit_tag=None, expected=1, now_ms=NOW_MS))
    assert list(record.headers) == [("event-time", b"-1")]


def test_longest_records_and_fullest_batches_are_encoded() -> None:
    sizes = [0, 63, 64, 8191, 8192, 16383, 16384, 1 << 20, (1 << 20) + 5]
    bodies = Encoder(pa.schema([("value", pa.binary())]), record_bytes_max=1 << 21).bodies(
        rows(*({"value": b"x" * size} for size in sizes))
    )
    many = bodies_of(rows({"value": b"v"})).take(pa.array(np.zeros(BATCH_RECORDS_MAX, np.int64)))

    built = build(bodies, commit_tag=MARK, expected=0, now_ms=NOW_MS)
    long = build(many, commit_tag=MARK, expected=5, now_ms=NOW_MS)

    assert [len(record.value) for record in parsed(built)] == sizes
    assert [record.offset for record in parsed(long)] == list(range(5, 5 + BATCH_RECORDS_MAX))
    assert Logged(long).bodies == many.to_pylist()
    with pytest.raises(ValueError, match="not 65537"):
        build([b"\x01\x01\x00"] * (BATCH_RECORDS_MAX + 1), commit_tag=MARK, expected=5, now_ms=NOW_MS)


# --- what cannot be a record ------------------------------------------------------------------------------------------


def test_too_long_row_names_the_option_to_raise() -> None:
    batch = rows({"value": b"1"}, {"value": b"x" * 1000})
    with pytest.raises(UnfitRow, match=r"kafka\.max\.request\.size = 1000") as refused:
        Encoder(batch.schema, record_bytes_max=1000).bodies(batch)
    assert "xxx" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "fencepost-sink",
        "fencepost-expected-offset",
        "fencepost-partition-count",
        "fencepost-write-id",
        "expected-offset",
        "partition-count",
        "write-id",
    ],
)
def test_headers_with_reserved_names_are_refused(name: str) -> None:
    batch = rows(
        {"value": b"1", "headers": [{"key": "a", "value": b""}, {"key": "b", "value": b""}]},
        {"value": b"2", "headers": []},
        {"value": b"3", "headers": [{"key": "c", "value": b""}, {"key": name, "value": b"0"}]},
    )
    with pytest.raises(UnfitRow, match=rf"the header '{name}'.* NOT IN \(.*'{name}'"):
        bodies_of(batch)


def test_a_header_without_a_key_is_refused() -> None:
    batch = rows({"value": b"1"}, {"value": b"2", "headers": [{"key": None, "value": b"0"}]})
    with pytest.raises(UnfitRow, match="without a key"):
        bodies_of(batch)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ([("key", pa.string())], "no column 'value'"),
        ([("value", pa.int64())], "column 'value' is int64; it must be STRING or BINARY"),
        ([("value", pa.string()), ("headers", pa.list_(pa.string()))], "column 'headers' is"),
        ([("value", pa.string()), ("timestamp", pa.int64())], "it must be TIMESTAMP"),
        ([("value", pa.string()), ("partition", pa.string())], "it must be INT"),
    ],
)
def test_columns_of_other_types_are_refused(fields: list[tuple[str, Any]], problem: str) -> None:
    with pytest.raises(SinkError, match=problem):
        Encoder(pa.schema(fields))


# --- what others wrote ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", range(5))
def test_foreign_batches_have_bodies_and_no_commit_tag(compression: int) -> None:
    builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, -1, 1 << 20)
    builder.append(0, NOW_MS, b"k", b"v" * 300, [("h", b"1")])
    builder.append(1, NOW_MS + 100_000, None, b"this is not a header: fencepost-sink", [])
    foreign = in_log(bytes(builder.build()), 30)
    rows_of_it = rows(
        {"key": b"k", "value": b"v" * 300, "headers": [{"key": "h", "value": b"1"}]},
        {"value": b"this is not a header: fencepost-sink"},
    )

    logged = Logged(foreign)
    assert (logged.base_offset, logged.next_offset, logged.commit_tag) == (30, 32, None)
    assert logged.bodies == bodies_of(rows_of_it).to_pylist()


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("compression", [0, 1])
def test_old_format_batches_have_no_commit_tag(magic: int, compression: int) -> None:
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=compression, batch_size=1 << 20)
    builder.append(0, timestamp=NOW_MS, key=b"k", value=b"1")
    builder.append(1, timestamp=NOW_MS, key=None, value=b"2")
    found = list(batches(bytes(builder.build())))
    assert [logged.commit_tag for logged in found] == [None] * len(found)
    assert not any(logged.bodies for logged in found)
    assert found[-1].next_offset == 2


def signed(batch: bytearray) -> bytes:
    struct.pack_into(">I", batch, 17, encoding.crc32c.crc32c(bytes(batch[21:])))
    return bytes(batch)


def test_compacted_batch_keeps_its_offset_range() -> None:
    # A broker keeps base offset and last offset delta, and drops records, the flagged one among them.
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    builder.append(0, NOW_MS, b"k", b"v", [])
    compacted = bytearray(in_log(bytes(builder.build()), 100))
    struct.pack_into(">i", compacted, 23, 9)
    logged = Logged(signed(compacted))
    assert (logged.base_offset, logged.next_offset, len(logged.bodies)) == (100, 110, 1)
    assert not logged.is_whole


def test_a_batch_without_records_is_a_gap() -> None:
    empty = bytearray(build([b"\x01\x01\x00"], commit_tag=MARK, expected=3, now_ms=NOW_MS)[:61])
    struct.pack_into(">i", empty, 8, 49)
    struct.pack_into(">i", empty, 57, 0)
    logged = Logged(signed(empty))
    assert (logged.base_offset, logged.next_offset, logged.commit_tag, logged.bodies) == (3, 4, None, [])
    assert not logged.is_whole


def test_markers_are_control_batches_without_bodies() -> None:
    marker = bytearray(build([b"\x08abcd\x0cabcdef\x00"], commit_tag=None, expected=3, now_ms=NOW_MS))
    struct.pack_into(">h", marker, 21, 0x30)
    logged = Logged(signed(marker))
    assert (logged.is_control, logged.next_offset, logged.commit_tag, logged.bodies) == (True, 4, None, [])


def test_a_damaged_batch_is_not_read() -> None:
    built = bytearray(build([b"\x01\x01\x00"], commit_tag=MARK, expected=3, now_ms=NOW_MS))
    built[-1] ^= 1
    with pytest.raises(ValueError, match="offset 3 is damaged"):
        Logged(bytes(built))


def test_partial_batch_at_fetch_end_is_ignored() -> None:
    one, two = (in_log(build([b"\x01\x01\x00"], commit_tag=MARK, expected=1, now_ms=NOW_MS), at) for at in (7, 8))
    cut = random.Random(4).sample(range(1, len(two)), 10)
    assert [logged.base_offset for logged in batches(one + two)] == [7, 8]
    for at in cut:
        assert [logged.base_offset for logged in batches(one + two[:at])] == [7]
