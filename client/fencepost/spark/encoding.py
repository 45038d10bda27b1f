"""Encodes rows as record batches and back, by column, without a Python object per written row.

The body of a record (`columns.py`) is built once per row. A batch adds to each what depends on its index there.

Bodies also identify rows on reading: `Logged.bodies` returns the bytes of `Encoder.bodies`, whatever the compression.
It removes the headers that the sink adds to the first or last record of a batch; rows cannot use those header names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cramjam
import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka import codec
from aiokafka.record.legacy_records import LegacyRecordBatch
from aiokafka.record.util import decode_varint

from fencepost.records import EXPECTED_OFFSET, PARTITION_COUNT, WRITE_ID
from fencepost.spark.columns import Bodies, Decimals, Headers, as_binary, sealed, sizes, valid, varint
from fencepost.spark.commit_tags import HEADER as COMMIT_TAG_HEADER
from fencepost.spark.errors import SinkError
from fencepost.spark.native import EXECUTOR

#: On each record whose row has a timestamp and not this header: milliseconds since 1970, decimal.
EVENT_TIME_HEADER = "event-time"
#: Headers that the sink may add to the first or last record of a batch.
_ADDED = frozenset({COMMIT_TAG_HEADER, EXPECTED_OFFSET, PARTITION_COUNT})
#: Headers that rows may not have: the sink and the proxy interpret them; the proxy also without the prefix.
RESERVED_HEADERS = (
    *sorted(_ADDED),
    WRITE_ID,
    *(name.removeprefix("fencepost-") for name in (EXPECTED_OFFSET, PARTITION_COUNT, WRITE_ID)),
)

#: Java's default of `max.request.size`.
REQUEST_BYTES_MAX = 1 << 20
#: Largest size of a record without its body: length (5), attributes, timestamp delta, offset delta (3).
RECORD_OVERHEAD_BYTES = 10
#: Records in one batch.
BATCH_RECORDS_MAX = 1 << 16

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}

_HEADER = struct.Struct(">qiibIhiqqqhii")
_HEADER_BYTES = _HEADER.size
_LENGTH_AT, _MAGIC_AT, _CRC_AT, _CHECKED_AT = 8, 16, 17, 21
_CODEC_MASK, _CONTROL = 0x07, 0x20


class UnfitRow(SinkError):
    """A row that cannot become a record."""


# --- rows to bodies ---------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes rows with the column `value` and optionally `key`, `headers`, `timestamp` and `partition`, in the types
    of Spark's Kafka sink. Ignores other columns.

    `record_bytes_max`: longest record (`kafka.max.request.size`).
    """

    def __init__(self, schema: pa.Schema, *, record_bytes_max: int = REQUEST_BYTES_MAX) -> None:
        self._has = frozenset(schema.names)
        self._record_bytes_max = record_bytes_max
        if "value" not in self._has:
            raise SinkError("no column 'value' (add one, as in df.selectExpr('to_json(struct(*)) AS value'))")
        for name, fits, type_names in _TYPES:
            if name in self._has and not fits(schema.field(name).type):
                raise SinkError(f"column {name!r} is {schema.field(name).type}; it must be {type_names}")

    def bodies(self, batch: pa.RecordBatch) -> Bodies:
        """The body of each row. Raises UnfitRow."""
        key = as_binary(batch.column("key")) if "key" in self._has else None
        headers = _headers(batch.column("headers")) if "headers" in self._has else None
        time = _event_times(batch.column("timestamp"), headers) if "timestamp" in self._has else None
        bodies = EXECUTOR.bodies(key, as_binary(batch.column("value")), headers, time)
        if len(bodies):
            record_bytes = int(sizes(bodies).max()) + RECORD_OVERHEAD_BYTES + _HEADER_BYTES
            if record_bytes > self._record_bytes_max:
                raise UnfitRow(
                    f"a row needs {record_bytes} bytes as a record, more than kafka.max.request.size "
                    f"= {self._record_bytes_max} (raise that option and the topic's max.message.bytes)",
                )
        return bodies


def _headers(column: Any) -> Headers:
    """Raises UnfitRow."""
    counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)).astype(np.int64)
    headers = pc.list_flatten(column)
    names = pc.struct_field(headers, [0])
    if headers.null_count or names.null_count:
        raise UnfitRow("a row has a header without a key")
    reserved = pc.is_in(names, pa.array(RESERVED_HEADERS, names.type)).index(True).as_py()
    if reserved >= 0:
        raise UnfitRow(
            f"a row has the header {names[reserved].as_py()!r}, which the sink or the proxy reserves "
            f"(drop it: filter(headers, h -> h.key NOT IN ({', '.join(map(repr, RESERVED_HEADERS))})))",
        )
    return Headers(counts, as_binary(names), as_binary(pc.struct_field(headers, [1])))


_UNITS_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}


def _event_times(column: Any, headers: Headers | None) -> Decimals:
    """A row that was read with its header keeps that one: the timestamp of its record is when that was written."""
    known = valid(column)
    if headers is not None:
        named = np.flatnonzero(pc.equal(headers.names, EVENT_TIME_HEADER.encode()).to_numpy(zero_copy_only=False))
        known = known.copy()
        known[np.searchsorted(np.cumsum(headers.counts), named, "right")] = False
    ticks = np.asarray(pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)).astype(np.int64)
    ms = ticks * 1000 if column.type.unit == "s" else ticks // _UNITS_PER_MS[column.type.unit]
    return Decimals(EVENT_TIME_HEADER.encode(), known, ms)


def _is_binary(type_: pa.DataType) -> bool:
    return type_ in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


def _is_headers(type_: pa.DataType) -> bool:
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)) or not pa.types.is_struct(type_.value_type):
        return False
    fields = list(type_.value_type)
    return [each.name for each in fields] == ["key", "value"] and all(_is_binary(each.type) for each in fields)


_TYPES = (
    ("value", _is_binary, "STRING or BINARY"),
    ("key", _is_binary, "STRING or BINARY"),
    ("headers", _is_headers, "ARRAY<STRUCT<key: STRING, value: BINARY>>"),
    ("timestamp", pa.types.is_timestamp, "TIMESTAMP"),
    ("partition", pa.types.is_integer, "INT"),
)


# --- bodies to batches ------------------------------------------------------------------------------------------------


def build(
    bodies: Bodies | Sequence[bytes],
    *,
    commit_tag: bytes | None,
    expected: int,
    now_ms: int,
    partition: tuple[str, int] | None = None,
    compression: str | None = None,
    level: int | None = None,
    partition_count: int | None = None,
) -> bytes:
    """One v2 record batch with expected offset `expected` and the commit tag on its last record.

    `partition`: what its headers on the first record are bound to, because applications copy headers to other topics.
    `partition_count`: one of them. `level`: compression level, if the codec has levels.
    """
    column = bodies if isinstance(bodies, pa.Array) else pa.array(bodies, pa.large_binary())
    count = len(column)
    if not 0 < count <= BATCH_RECORDS_MAX:
        raise ValueError(f"a batch has 1 to {BATCH_RECORDS_MAX} records, not {count}")
    topic = "" if partition is None else f"@{partition[0]}"
    binding = "" if partition is None else f"{topic}/{partition[1]}"
    # Base offset 0 does not state that offset 0 is expected.
    first: list[tuple[str, bytes]] = [(EXPECTED_OFFSET, f"0{binding}".encode())] if expected == 0 else []
    if partition_count is not None:
        first.append((PARTITION_COUNT, f"{partition_count}{topic}".encode()))
    last = [] if commit_tag is None else [(COMMIT_TAG_HEADER, commit_tag)]
    if count == 1:
        first, last = [], first + last
    begin = 1 if first else 0
    middle = column.slice(begin, count - begin - (1 if last else 0))
    records = (
        _record(0, _with_headers(column[0].as_py(), first)) if first else b"",
        middle,
        begin,
        _record(count - 1, _with_headers(column[count - 1].as_py(), last)) if last else b"",
    )

    def header(attributes: int) -> bytes:
        """Without length and CRC."""
        return _HEADER.pack(expected, 0, -1, 2, 0, attributes, count - 1, now_ms, now_ms, -1, -1, -1, count)

    if compression in (None, "none"):
        return EXECUTOR.batch(header(0), *records)
    joined = EXECUTOR.batch(None, *records)
    compressed = _compress(joined, compression, level)
    if len(compressed) < len(joined):
        return sealed(header(CODECS[compression]), compressed)
    # Unlike the Java client, send a batch uncompressed if compression enlarges it.
    return sealed(header(0), joined)


def _record(delta: int, body: bytes) -> bytes:
    delta_bytes = varint(delta)
    return b"".join([varint(2 + len(delta_bytes) + len(body)), b"\0\0", delta_bytes, body])


def _compress(records: bytes, compression: str, level: int | None) -> Any:
    # Default levels are Java's. Java's lz4 uses the fast compressor, although its documentation says level 9.
    if compression == "gzip":
        return cramjam.gzip.compress(records, level=6 if level is None else level)
    if compression == "snappy":
        return codec.snappy_encode(records)
    if compression == "lz4":
        # Kafka cannot read linked blocks.
        compressor = cramjam.lz4.Compressor(
            level=1 if level is None else level, content_checksum=False, block_linked=False
        )
        compressor.compress(records)
        return compressor.finish()
    return cramjam.zstd.compress(records, level=3 if level is None else level)


# --- batches to bodies ------------------------------------------------------------------------------------------------


def _split_headers(body: bytes) -> tuple[bytes, list[tuple[bytes, bytes | None]]]:
    """The body up to its header count, and the headers."""
    at = 0
    for _ in range(2):
        size, at = decode_varint(body, at)
        at += max(size, 0)
    front = body[:at]
    count, at = decode_varint(body, at)
    headers: list[tuple[bytes, bytes | None]] = []
    for _ in range(count):
        size, at = decode_varint(body, at)
        name = body[at : at + size]
        at += size
        size, at = decode_varint(body, at)
        headers.append((name, body[at : at + size] if size >= 0 else None))
        at += max(size, 0)
    return front, headers


def _body(front: bytes, headers: Sequence[tuple[bytes, bytes | None]]) -> bytes:
    pieces = [front, varint(len(headers))]
    for name, value in headers:
        pieces += [varint(len(name)), name, varint(-1 if value is None else len(value)), value or b""]
    return b"".join(pieces)


def _with_headers(body: bytes, more: Iterable[tuple[str, bytes]]) -> bytes:
    front, headers = _split_headers(body)
    return _body(front, [*headers, *((name.encode(), value) for name, value in more)])


class Logged:
    """A batch read from the log. Raises ValueError for a damaged one.

    `commit_tag`: None for other clients' batches. Records are parsed only if the batch may have one.
    """

    __slots__ = ("_raw", "_records", "_spans", "attributes", "base_offset", "commit_tag", "next_offset")

    def __init__(self, raw: bytes) -> None:
        self.commit_tag: bytes | None = None
        self._raw = raw
        self._records: bytes | None = None
        self._spans: list[tuple[int, int]] | None = None
        if raw[_MAGIC_AT] < 2:  # written before Kafka 0.11, not by this sink
            legacy = LegacyRecordBatch(raw, raw[_MAGIC_AT])
            offsets = [record.offset for record in legacy]
            self.attributes = 0
            self.base_offset, self.next_offset = offsets[0], offsets[-1] + 1
            return
        self.base_offset, length, _, _, crc, self.attributes, last, *_ = _HEADER.unpack_from(raw)
        self.next_offset = self.base_offset + last + 1
        if len(raw) != length + 12 or crc32c.crc32c(memoryview(raw)[_CHECKED_AT:]) != crc:
            raise ValueError(f"the batch at offset {self.base_offset} is damaged")
        if not self.is_control and self._record_count:
            self._find_commit_tag()

    @property
    def is_control(self) -> bool:
        """A control batch: transaction markers, no records."""
        return bool(self.attributes & _CONTROL)

    @property
    def is_whole(self) -> bool:
        """Compaction removed no record."""
        if self._raw[_MAGIC_AT] < 2 or self.is_control:
            return True
        return bool(self._record_count == self.next_offset - self.base_offset)

    @property
    def bodies(self) -> list[bytes]:
        """The bodies in order, as from `Encoder.bodies`: without the headers that the sink adds. None for a batch in an
        old format, which is not the sink's."""
        if self._raw[_MAGIC_AT] < 2 or self.is_control:
            return []
        records = self._decompressed()
        spans = _walk(records, self._record_count) if self._spans is None else self._spans
        bodies = [records[begin:end] for begin, end in spans]
        if self.commit_tag is not None:
            for at in {0, len(bodies) - 1}:
                front, headers = _split_headers(bodies[at])
                kept = [header for header in headers if header[0].decode() not in _ADDED]
                if len(kept) < len(headers):
                    bodies[at] = _body(front, kept)
        return bodies

    @property
    def _record_count(self) -> int:
        return int.from_bytes(self._raw[_HEADER_BYTES - 4 : _HEADER_BYTES], "big")

    def _decompressed(self) -> bytes:
        if self._records is None:
            records = memoryview(self._raw)[_HEADER_BYTES:]
            decode = _DECODERS[self.attributes & _CODEC_MASK]
            self._records = bytes(decode(records))
        return self._records

    def _find_commit_tag(self) -> None:
        records = self._decompressed()
        if records.rfind(COMMIT_TAG_HEADER.encode()) < 0:
            self._records = None
            return
        self._spans = _walk(records, self._record_count)
        headers = dict(_split_headers(records[slice(*self._spans[-1])])[1])
        self.commit_tag = headers.get(COMMIT_TAG_HEADER.encode())

    def __repr__(self) -> str:
        return f"Logged({self.base_offset}..{self.next_offset}, {'tagged' if self.commit_tag else 'foreign'})"


_DECODERS: dict[int, Any] = {
    0: bytes,
    1: codec.gzip_decode,
    2: codec.snappy_decode,
    3: codec.lz4_decode,
    4: codec.zstd_decode,
}


def _walk(records: bytes, count: int) -> list[tuple[int, int]]:
    """Start and end of each body. Varint decoding is inlined for speed: it runs for each row read."""
    spans = []
    at = 0
    for _ in range(count):
        low = records[at]
        if low < 0x80:
            at += 1
            end = at + (low >> 1)
        elif records[at + 1] < 0x80:
            end = at + 2 + ((low & 0x7F | records[at + 1] << 7) >> 1)
            at += 2
        else:
            length, at = decode_varint(records, at)
            end = at + length
        at += 1  # attributes
        while records[at] >= 0x80:  # timestamp delta
            at += 1
        at += 1
        while records[at] >= 0x80:  # offset delta
            at += 1
        at += 1
        spans.append((at, end))
        at = end
    return spans


def batches(fetched: bytes) -> Iterator[Logged]:
    """The complete batches of a Fetch response; the last one may be truncated."""
    at = 0
    while at + 12 <= len(fetched):
        end = at + 12 + int.from_bytes(fetched[at + _LENGTH_AT : at + 12], "big")
        if end > len(fetched):
            return
        yield Logged(fetched[at:end])
        at = end
