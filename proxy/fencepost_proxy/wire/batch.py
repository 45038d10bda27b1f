"""Record batches (magic 2): reading headers for the proxy, comparing batches, and fencing them.

    0 base offset i64 | 8 batch length i32 | 12 partition leader epoch i32 | 16 magic i8 | 17 CRC32C u32
    21 attributes i16 | 23 last offset delta i32 | 27 base timestamp i64 | 35 max timestamp i64
    43 producer id i64 | 51 producer epoch i16 | 53 base sequence i32 | 57 record count i32 | 61 records

The length counts from byte 12, the CRC covers byte 21 to the end. A record: length varint, attributes i8, timestamp
delta varlong, offset delta varint, key, value (varint length, -1 for null), header count varint, then each header's
name and value in the same form. Source: DefaultRecordBatch.java and DefaultRecord.java.

Sources of the expected offset:

- Record header `fencepost-expected-offset`, ASCII decimal: the offset that *this record* must get. "-1" means no
  expectation. Leading zeros are allowed. A sign (except "-1"), spaces, more than 19 digits or a value above 2^63-1 are
  unreadable. The first record with an expectation determines that of the batch; the first later record that disagrees
  is the contradiction.
- The batch's base offset, if no record header has an expectation. With `source_is_base` it counts literally (0 is 0),
  otherwise only above 0, because ordinary clients write 0. -1 means no expectation. Headers override the base offset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import crc32c
from stringzilla import find
from xxhash import xxh3_128, xxh3_128_digest

from fencepost_policies.append import Contradiction, Unreadable
from fencepost_proxy.errors import LimitError, UpstreamProtocolError
from fencepost_proxy.wire.compression import CODEC_NAMES, MalformedBatch, decompress
from fencepost_proxy.wire.primitives import (
    INT32,
    INT64,
    MALFORMED,
    Malformed,
    read_varint,
    read_varlong,
    reason_of,
)

__all__ = [
    "RECORDS_MAX",
    "BatchHeader",
    "BatchScan",
    "Effort",
    "HeaderNames",
    "MalformedBatch",
    "digest_batch",
    "fence_batch",
    "fenced_header",
    "may_be_rewritten",
    "parse_batch_header",
    "require_single_batch",
    "same_bytes",
    "scan_batch",
    "sequence_add",
    "split_batches",
    "verify_crc",
    "zero_base_offset",
]

HEADER_BYTES = 61
#: Limit on records per batch and on record headers per scan. Each costs CPU time: 14 million records of 7 bytes are
#: only 145 KB with gzip, but would take a minute.
RECORDS_MAX = 1_000_000
MAGIC = 2

_HEADER = Struct(">qiibIhiqqqhii")
_LENGTH_AND_MAGIC = Struct(">i4xb")
_LENGTH_AT = 8
_LENGTH_ENDS = 12
_LEADER_EPOCH_AT = 12
_MAGIC_AT = 16
_CRC_AT = 17
_ATTRIBUTES_AT = 21
#: The instance id is in attribute bits 7 to 14, which Kafka has not assigned.
_INSTANCE_ID_SHIFT = 7
INSTANCE_ID_MAX = 0xFF
_PRODUCER_AT = 43

_UINT32 = Struct(">I")
_UINT16 = Struct(">H")
_PRODUCER = Struct(">qhi")

#: Larger payloads are only searched: a walk needs a copy as `bytes`, which takes long.
_COPIED_BYTES_MAX = 32 << 20
_SMALL_BYTES = 1 << 20

_NO_TIMESTAMP = -1
_INT32_MAX = 0x7FFFFFFF
_INT64_MAX = 0x7FFFFFFFFFFFFFFF
_DIGITS_MAX = 19
_SHOWN_BYTES_MAX = 20


class BatchHeader(NamedTuple):
    """The first 61 bytes of a batch. Timestamps are Unix milliseconds, -1 for none."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd; 5 to 7 are unassigned."""
        return self.attributes & 0x07

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & 0x08)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & 0x10)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & 0x20)

    @property
    def instance_id(self) -> int:
        """Id of the instance that fenced the batch, 1 to 255 (see `fence_batch`); 0 for none."""
        return (self.attributes >> _INSTANCE_ID_SHIFT) & INSTANCE_ID_MAX


def parse_batch_header(records: memoryview) -> BatchHeader:
    """The header of the batch at the start of `records`, complete or not.

    Raises `MalformedBatch` if it is not a v2 batch. For a Produce request see `require_single_batch`.
    """
    if len(records) > _MAGIC_AT and records[_MAGIC_AT] != MAGIC:
        raise MalformedBatch(f"record batch has magic {records[_MAGIC_AT]}: only magic {MAGIC} is supported")
    if len(records) < HEADER_BYTES:
        raise MalformedBatch(f"record batch of {len(records)} bytes is shorter than its header")
    header = BatchHeader._make(_HEADER.unpack_from(records))
    if header.batch_length < HEADER_BYTES - _LENGTH_ENDS:
        raise MalformedBatch(f"record batch has an invalid length of {header.batch_length} bytes")
    return header


def require_single_batch(records: memoryview) -> BatchHeader:
    """The header of a partition's records in a Produce request, which must be exactly one complete v2 batch.

    Raises `MalformedBatch` for anything else, for a batch without records, for a record count that contradicts the last
    offset delta, and for an unknown codec. The broker refuses these too. The caller checks for control batches
    (`is_control`) and a wrong CRC (`verify_crc`).
    """
    header = parse_batch_header(records)
    if header.batch_length + _LENGTH_ENDS != len(records):
        raise MalformedBatch(
            f"records of a partition are not one batch: {len(records)} bytes, but the first batch has "
            f"{header.batch_length + _LENGTH_ENDS}"
        )
    if header.record_count <= 0 or header.record_count != header.last_offset_delta + 1:
        raise MalformedBatch(
            f"record batch has {header.record_count} records, but last offset delta {header.last_offset_delta}"
        )
    if header.compression >= len(CODEC_NAMES):
        raise MalformedBatch(f"record batch has unknown compression codec {header.compression}")
    return header


def verify_crc(records: memoryview) -> bool:
    """Whether a complete batch's CRC32C is correct. Call it before `fence_batch`, which computes a new CRC."""
    (crc,) = _UINT32.unpack_from(records, _CRC_AT)
    return bool(crc32c.crc32c(records[_ATTRIBUTES_AT:]) == crc)


# --- scanning record headers ------------------------------------------------------------------------------------------


class HeaderNames:
    """Names of the record headers that the proxy reads, as UTF-8. Of `fencepost-NAME`, `NAME` is an alias.

    `needles`: aliases, or names without the prefix; every spelling contains its needle. `spellings`: the name by each
    spelling of it.
    """

    __slots__ = ("expected_offset", "needles", "partition_count", "spellings", "write_id")

    def __init__(
        self,
        expected_offset: bytes = b"fencepost-expected-offset",
        partition_count: bytes = b"fencepost-partition-count",
        write_id: bytes = b"fencepost-write-id",
    ) -> None:
        self.expected_offset, self.partition_count, self.write_id = expected_offset, partition_count, write_id
        names = (expected_offset, partition_count, write_id)
        self.needles = tuple(name.removeprefix(b"fencepost-") for name in names)
        self.spellings = {**dict(zip(self.needles, names, strict=True)), **{name: name for name in names}}


class Effort:
    """Budget for reading the batches of a request: decompressed bytes, and steps.

    A record or a record header costs one step, a batch `_BATCH_STEPS`.
    """

    __slots__ = ("bytes_left", "steps_left")

    def __init__(self, bytes_left: int, steps_left: int) -> None:
        self.bytes_left = bytes_left
        self.steps_left = steps_left

    def take(self, byte_count: int, steps: int) -> None:
        """Raises `LimitError` if the budget is exceeded."""
        if byte_count > self.bytes_left or steps > self.steps_left:
            raise LimitError(
                f"record batches of a request are too large to read: {self.bytes_left} bytes once decompressed and "
                f"{self.steps_left} records and record headers were left (send smaller batches)"
            )
        self.bytes_left -= byte_count
        self.steps_left -= steps


_BATCH_STEPS = 10


class BatchScan(NamedTuple):
    """Result of `scan_batch`.

    `expected_base_offset`: None without an expectation; negative if a record expects less than its own delta.
    `unreadable`: the first unreadable header of the proxy. Later headers were not read.
    `max_timestamp_ms`: maximum over the records that were read. The broker's maximum over all records is never older.
    It is at most a second newer if the header's maximum is correct and is reached within the first
    `_TIMED_RECORDS_MAX` records.
    `min_timestamp_ms`: minimum over all records that have one; None if none has, or if `timestamps` was not set.
    `digest`: equal for two batches with equal decompressed record bytes and equal absolute timestamps. It may differ
    for a batch that the broker rewrote: see `digest_batch`, `may_be_rewritten`.
    """

    header: BatchHeader
    expected_base_offset: int | None
    contradiction: Contradiction | None
    unreadable: Unreadable | None
    partition_count: int | None
    write_id: bytes | None
    max_timestamp_ms: int
    digest: bytes
    min_timestamp_ms: int | None = None


def scan_batch(
    records: memoryview,
    names: HeaderNames,
    *,
    source_is_base: bool,
    timestamps: bool = False,
    decompressed_bytes_max: int,
    header: BatchHeader | None = None,
    effort: Effort | None = None,
) -> BatchScan:
    """Reads one complete batch of a Produce request.

    For every batch that Kafka accepts, the result equals that of a walk over all records. Only records that may contain
    a header of the proxy are parsed, so a malformed record may go unnoticed: Kafka parses all records before it appends
    any, and refuses the batch (`test_malformed_records.py`). Kafka does not check offset deltas of uncompressed
    batches. The scan therefore requires, for records with such headers, that the delta is the index in the batch.

    Raises `MalformedBatch` if `require_single_batch` does, or if a parsed record is malformed. Raises `LimitError`
    above `decompressed_bytes_max` bytes or `RECORDS_MAX` records, or if `effort`, which is charged, is used up.
    The CRC is not checked. `timestamps`: find the oldest one, which takes a walk over all records. `header` is the
    result of `require_single_batch`, if known.
    """
    if header is None:
        header = require_single_batch(records)
    if header.record_count > RECORDS_MAX:
        raise _too_many(f"{header.record_count} records", RECORDS_MAX)
    effort = effort or Effort(max(decompressed_bytes_max, len(records)), 2 * RECORDS_MAX)
    unpacked = decompress(
        header.compression, records[HEADER_BYTES:], bytes_max=min(decompressed_bytes_max, effort.bytes_left)
    )
    effort.take(len(unpacked), _BATCH_STEPS)
    says_something = len(unpacked) <= _SMALL_BYTES or any(find(unpacked, name) >= 0 for name in names.needles)
    if says_something and len(unpacked) > _COPIED_BYTES_MAX:
        raise LimitError(
            f"record batch with headers for the proxy has {len(unpacked)} bytes once decompressed, above the limit of "
            f"{_COPIED_BYTES_MAX} (send smaller batches)"
        )
    payload = bytes(unpacked) if says_something else unpacked
    try:
        end, first, rest_at = _record_start(payload, 0)
        if end > len(payload):
            raise Malformed("the first record is longer than its batch")
        newest = first if header.record_count == 1 else _newest_delta(payload, header, first)
        oldest_ms = _oldest_ms(payload, header, effort) if timestamps else None
        stated = _Stated(names, effort)
        if isinstance(payload, bytes):
            if header.record_count == 1:
                stated.read_record(payload, rest_at, end, 0)
                _require_end(end, payload, 1)
            else:
                _read_headers(payload, header.record_count, stated)
        digest = _digest(payload, header, first)
    except MALFORMED as error:
        raise MalformedBatch(f"malformed record: {reason_of(error)}") from error
    expected = stated.expected_base_offset
    unreadable = stated.unreadable
    if expected is None:
        expected = (
            header.base_offset if header.base_offset > 0 or (source_is_base and header.base_offset == 0) else None
        )
        if header.base_offset < -1 and unreadable is None:
            unreadable = Unreadable(0, "baseOffset", f"{header.base_offset} is not an offset (-1: no expectation)")
    return BatchScan(
        header,
        expected,
        stated.contradiction,
        unreadable,
        stated.partition_count,
        stated.write_id,
        _timestamp(header, newest),
        digest,
        oldest_ms,
    )


def _too_many(what: str, limit: int) -> LimitError:
    return LimitError(f"{what} in a record batch exceed the limit of {limit} (send smaller batches)")


def _payload(records: memoryview, header: BatchHeader, bytes_max: int) -> bytes:
    """The decompressed records section, as `bytes` because Python indexes those fastest."""
    return bytes(decompress(header.compression, records[HEADER_BYTES:], bytes_max=bytes_max))


def _timestamp(header: BatchHeader, delta: int) -> int:
    timestamp = header.base_timestamp_ms + delta
    # Java's long would wrap, and Kafka would see another timestamp.
    if not -_INT64_MAX - 1 <= timestamp <= _INT64_MAX:
        raise MalformedBatch("record timestamp does not fit 64 bits")
    return timestamp


def _record_start(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """End of the record at `at`, its timestamp delta, and the position of its offset delta."""
    length, at = read_varint(data, at)
    if length < 0:
        raise Malformed("negative length")
    delta, rest_at = read_varlong(data, at + 1)
    return at + length, delta, rest_at


#: Size of a record, including its length field, by the first byte of a one-byte or two-byte length. An odd byte means a
#: negative length; the entry then points beyond any batch.
_ONE_BYTE_LENGTH = [1 + (byte >> 1) if byte & 1 == 0 else 1 << 40 for byte in range(0x80)]
_TWO_BYTE_LENGTH = [2 + ((byte & 0x7F) >> 1) if byte & 1 == 0 else 1 << 40 for byte in range(0x100)]


# The newest timestamp determines how long Kafka keeps the producer's state. Kafka computes it from the records and
# ignores the batch's header. The scan must never report a newer one. It uses the first record's timestamp if the
# header's maximum is at most this much newer: then only a batch within a second of the age limit is refused wrongly.
_TIMESTAMP_SLACK_MS = 1000
#: Otherwise this many records are read. A batch is refused if all of them are too old, even if a later one is not.
_TIMED_RECORDS_MAX = 1000


def _newest_delta(payload: bytes | memoryview, header: BatchHeader, first: int) -> int:
    """The highest timestamp delta of the first record, or of more records if the header claims a newer one."""
    first_ms = header.base_timestamp_ms + first
    if header.record_count == 1 or 0 <= first_ms <= header.max_timestamp_ms <= first_ms + _TIMESTAMP_SLACK_MS:
        return first
    newest, at = first, 0
    for _ in range(min(header.record_count, _TIMED_RECORDS_MAX)):
        at, delta, _ = _record_start(payload, at)
        if at > len(payload):
            raise Malformed("longer than its batch")
        newest = max(newest, delta)
    return newest


def _oldest_ms(payload: bytes | memoryview, header: BatchHeader, effort: Effort) -> int | None:
    effort.take(0, header.record_count)
    oldest, at = None, 0
    for _ in range(header.record_count):
        at, delta, _ = _record_start(payload, at)
        if at > len(payload):
            raise Malformed("longer than its batch")
        timestamp = header.base_timestamp_ms + delta
        if timestamp != _NO_TIMESTAMP and (oldest is None or timestamp < oldest):
            oldest = timestamp
    return oldest


#: Up to this many records a walk is faster than a search.
_WALKED_RECORDS_MAX = 2


def _read_headers(payload: bytes, count: int, stated: _Stated) -> None:
    if count <= _WALKED_RECORDS_MAX:
        _walk_headers(payload, count, stated)
    else:
        _search_headers(payload, count, stated)


def _walk_headers(payload: bytes, count: int, stated: _Stated) -> None:
    """Reference implementation: parses every record."""
    total = len(payload)
    at = 0
    for index in range(count):
        end, _, rest_at = _record_start(payload, at)
        if end > total:
            raise Malformed("longer than its batch")
        stated.read_record(payload, rest_at, end, index)
        at = end
    _require_end(at, payload, count)


def _require_end(at: int, payload: bytes, count: int) -> None:
    if at != len(payload):
        raise Malformed(f"{len(payload) - at} extra bytes after {count} records")


def _search_headers(payload: bytes, count: int, stated: _Stated) -> None:
    """Same result as `_walk_headers`, at the speed of a SIMD byte search (50 times that of `bytes.find`).

    A record can have a header of the proxy only if the header's name occurs in its bytes.

    1. Records after the last occurrence of any name are skipped.
    2. Of other records only the lengths are read, to find the record that contains an occurrence.
    3. That record is parsed, because a key or value may also contain the name.
    4. Exception to 3: each name occurs at most once in the record, and the bytes after it are those of a header that
       agrees with earlier headers. Then the record adds nothing, whether it is a header or not.

    Step 4 saves most of the work if every record has an expected offset.
    """
    total = len(payload)
    walked_max = min(count, stated.effort.steps_left)
    startswith = payload.startswith
    offset_name, count_name, id_name = needles = stated.names.needles
    offset_at, count_at, id_at = (_find(payload, name, 0) for name in needles)
    base = digits_end = _NO_BASE
    prefix = b""
    at = index = 0
    while stated.unreadable is None:
        others_at = count_at if count_at < id_at else id_at
        hit = offset_at if offset_at < others_at else others_at
        if hit == total:
            break
        while index < walked_max:
            length = payload[at]
            if length < 0x80:
                end = at + _ONE_BYTE_LENGTH[length]
            elif (second := payload[at + 1]) < 0x80:
                end = at + _TWO_BYTE_LENGTH[length] + (second << 6)
            else:
                end, _, _ = _record_start(payload, at)
                length = _LONG
            if end > hit:
                break
            at = end
            index += 1
        else:
            if index < count:
                raise _too_many("records before a header for the proxy", walked_max)
            raise Malformed(f"{total - at} extra bytes after {count} records")
        agrees = end <= total and _is_in_place(payload, at, length, index)
        if offset_at < end:
            offset = base + index
            if offset < digits_end:
                agrees = agrees and startswith(b"%b%d" % (prefix, offset), offset_at)
            elif 0 <= offset <= _INT64_MAX:
                digits = len(str(offset))
                digits_end = min(10**digits, _INT64_MAX + 1)
                prefix = offset_name + bytes([2 * digits])
                agrees = agrees and startswith(b"%b%d" % (prefix, offset), offset_at)
            else:
                agrees = False
            offset_at = find(payload, offset_name, offset_at + 1)
            if offset_at < 0:
                offset_at = total
            elif offset_at < end:
                agrees = False
                offset_at = _find(payload, offset_name, end)
        if others_at < end:
            if count_at < end:
                agrees = agrees and stated.partition_count is not None and startswith(stated.agreeing_count, count_at)
                count_at = _find(payload, count_name, count_at + 1)
                if count_at < end:
                    agrees = False
                    count_at = _find(payload, count_name, end)
            if id_at < end:
                length_at = id_at + len(id_name)
                agrees = agrees and stated.write_id is not None and payload[length_at : length_at + 1] in _SHORT_LENGTHS
                id_at = _find(payload, id_name, id_at + 1)
                if id_at < end:
                    agrees = False
                    id_at = _find(payload, id_name, end)
        if not agrees:
            end, _, rest_at = _record_start(payload, at)
            if end > total:
                raise Malformed("longer than its batch")
            stated.read_record(payload, rest_at, end, index)
            if stated.expected_base_offset is not None:
                base = stated.expected_base_offset
                digits_end = _NO_BASE
        at = end
        index += 1
    stated.effort.take(0, index)


def _is_in_place(payload: bytes, at: int, length: int, index: int) -> bool:
    """Whether the offset delta of the record at `at` is certainly `index`. `length` is its first byte, or `_LONG`.

    Kafka does not check offset deltas of uncompressed batches: such a record would get another offset than it expects.
    """
    if length == _LONG:
        return False
    at += 3 if length < 0x80 else 4
    if payload[at - 1] >= 0x80:
        at += 1
        if payload[at - 1] >= 0x80:
            return False
    if index < 64:
        return payload[at] == index << 1
    return index < 8192 and payload[at] == (index << 1 & 0x7F | 0x80) and payload[at + 1] == index >> 6


def _find(payload: bytes, name: bytes, at: int) -> int:
    """Position of the first occurrence from `at`, or the payload's end."""
    found = find(payload, name, at)
    return len(payload) if found < 0 else found


#: Replaces the first byte of a record whose length takes more than two bytes.
_LONG = -1
#: No expectation yet: with no record's index is it a valid offset.
_NO_BASE = -1 << 80
#: Length bytes of a write-id of 1 to 63 bytes.
_SHORT_LENGTHS = frozenset(bytes([2 * length]) for length in range(1, 64))


_KEY_AND_VALUE = (0, 1)


class _Stated:
    """Collects the header values of one batch, record by record."""

    __slots__ = (
        "agreeing_count",
        "contradiction",
        "effort",
        "expected_base_offset",
        "names",
        "partition_count",
        "unreadable",
        "write_id",
    )

    def __init__(self, names: HeaderNames, effort: Effort) -> None:
        self.names = names
        self.effort = effort
        self.expected_base_offset: int | None = None
        self.contradiction: Contradiction | None = None
        self.unreadable: Unreadable | None = None
        self.partition_count: int | None = None
        self.write_id: bytes | None = None
        #: Bytes of a header (needle of its name, and value) that repeats this partition count.
        self.agreeing_count = b""

    def read_record(self, data: bytes, at: int, end: int, index: int) -> None:
        """Parses one record from its offset delta on. The delta must be `index`, and the record must end at `end`."""
        # Fast path for one-byte integers.
        delta = data[at]
        if delta < 0x80:
            delta = (delta >> 1) ^ -(delta & 1)
            at += 1
        else:
            delta, at = read_varint(data, at)
        if delta != index:
            raise Malformed(f"offset delta {delta} is not its index in the batch")
        for _ in _KEY_AND_VALUE:
            length = data[at]
            if length < 0x80:
                at += 1 + (0 if length & 1 else length >> 1)
            else:
                length, at = read_varint(data, at)
                if length > 0:
                    at += length
        header_count = data[at]
        if header_count == 0 and at == end - 1:
            return
        if header_count < 0x80:
            header_count = (header_count >> 1) ^ -(header_count & 1)
            at += 1
        else:
            header_count, at = read_varint(data, at)
        if header_count < 0 or header_count * 2 > end - at:
            raise Malformed(f"invalid header count {header_count}")
        if header_count > self.effort.steps_left:
            raise _too_many("record headers", RECORDS_MAX)
        self.effort.steps_left -= header_count
        spellings = self.names.spellings
        observed: tuple[bytes, ...] = ()
        for _ in range(header_count):
            length = data[at]
            if length < 0x80:
                length = (length >> 1) ^ -(length & 1)
                at += 1
            else:
                length, at = read_varint(data, at)
            if length < 0 or at + length > end:
                raise Malformed(f"invalid header name length {length}")
            name = data[at : at + length]
            length, at = read_varint(data, at + length)
            if length > end - at:
                raise Malformed(f"invalid header value length {length}")
            if (ours := spellings.get(name)) is not None and self.unreadable is None:
                if ours in observed:
                    self._unreadable(index, name, "duplicate header in one record")
                else:
                    observed = (*observed, ours)
                    self._read_header(index, ours, None if length < 0 else data[at : at + length])
            if length > 0:
                at += length
        if at != end:
            raise Malformed("shorter than its length field says")

    def _read_header(self, index: int, name: bytes, value: bytes | None) -> None:
        names = self.names
        if value is None:
            self._unreadable(index, name, "value is null")
        elif name == names.write_id:
            if not value:
                self._unreadable(index, name, "value is empty")
            elif self.write_id is None:
                self.write_id = value
        elif value.isdigit() and len(value) <= _DIGITS_MAX:
            if name == names.expected_offset:
                self._read_expected_offset(index, int(value))
            else:
                self._read_partition_count(index, value)
        elif value != b"-1":
            self._unreadable(index, name, f"{_shown(value)} is not an ASCII decimal number of at most 19 digits")
        elif name == names.partition_count:
            self._unreadable(index, name, "a topic has at least one partition")

    def _read_expected_offset(self, index: int, expected: int) -> None:
        if expected > _INT64_MAX:
            self._unreadable(index, self.names.expected_offset, f"{expected} does not fit 64 bits")
        elif self.expected_base_offset is None:
            self.expected_base_offset = expected - index
        elif self.expected_base_offset != expected - index and self.contradiction is None:
            self.contradiction = Contradiction(record=index, expected=expected, offset_delta=index)

    def _read_partition_count(self, index: int, value: bytes) -> None:
        name = self.names.partition_count
        count = int(value)
        if not 1 <= count <= _INT32_MAX:
            self._unreadable(index, name, f"{count} is not a number of partitions")
        elif self.partition_count is None:
            self.partition_count = count
            self.agreeing_count = self.names.needles[1] + bytes([2 * len(value)]) + value
        elif self.partition_count != count:
            self._unreadable(index, name, f"{count} contradicts {self.partition_count} in an earlier record")

    def _unreadable(self, index: int, name: bytes, reason: str) -> None:
        self.unreadable = Unreadable(index, name.decode(errors="backslashreplace"), reason)


def _shown(value: bytes) -> str:
    return repr(value[:_SHOWN_BYTES_MAX])[1:] + ("…" if len(value) > _SHOWN_BYTES_MAX else "")


# --- comparing batches ------------------------------------------------------------------------------------------------


def digest_batch(records: memoryview, *, decompressed_bytes_max: int, ignore_timestamps: bool = False) -> bytes:
    """A digest that is equal for two batches with equal records, even if the broker rewrote the batch.

    Included: record count, and for each record attributes, offset delta, key, value, ordered headers and absolute
    timestamp. Not included: compression, base offset, leader epoch, CRC, producer id, epoch and sequence, attributes
    and max timestamp of the batch. `ignore_timestamps` also excludes record timestamps. Use it on both sides for a
    LogAppendTime topic, where the broker may replace them. The two kinds of digest, and `BatchScan.digest`, are never
    equal to each other.

    Every record is parsed; `may_be_rewritten` says when that is needed. The digest is valid in this process only and is
    never stored or sent.

    Variable-length integers are compared by their bytes. If a producer encodes them longer than needed, its batch may
    differ after the broker repacked it; it never equals another batch.

    Raises as `scan_batch` does.
    """
    header = parse_batch_header(records)
    if header.record_count > RECORDS_MAX:
        raise _too_many(f"{header.record_count} records", RECORDS_MAX)
    payload = _payload(records, header, decompressed_bytes_max)
    digest = xxh3_128(INT32.pack(header.record_count), _SEED)
    try:
        for attributes, delta, rest in _records(payload, header.record_count):
            timestamp = 0 if ignore_timestamps else header.base_timestamp_ms + delta & _UINT64_MAX
            digest.update(_RECORD.pack(timestamp, len(rest), attributes) + rest)
    except MALFORMED as error:
        raise MalformedBatch(f"malformed record batch: {reason_of(error)}") from error
    return (b"no timestamps" if ignore_timestamps else b"timestamps") + digest.digest()


#: XXH3-128 with a random seed per process: clients cannot construct collisions, and it is 20 times as fast as BLAKE2
#: (a second per gigabyte).
_SEED = int.from_bytes(os.urandom(8))
_DIGEST = Struct(">Qi")  # timestamp of the first record, number of records
_RECORD = Struct(">QIc")  # of one record: timestamp, length of the rest, attributes
_UINT64_MAX = 0xFFFFFFFFFFFFFFFF


def _digest(payload: bytes | memoryview, header: BatchHeader, first: int) -> bytes:
    """`first` is the timestamp delta of the first record."""
    start = _DIGEST.pack((header.base_timestamp_ms + first) & _UINT64_MAX, header.record_count)
    return start + xxh3_128_digest(payload, _SEED)


def may_be_rewritten(one: bytes, other: bytes) -> bool:
    """For two different `BatchScan.digest`s: whether `digest_batch` may still be equal.

    Clients may choose any base timestamp. A broker that recompresses a batch uses the first record's timestamp. Record
    count and first timestamp stay equal.
    """
    return one[: _DIGEST.size] == other[: _DIGEST.size]


def same_bytes(one: bytes, other: bytes) -> bool:
    """For two `BatchScan.digest`s: whether the record bytes are equal, regardless of the base timestamp."""
    return one[_DIGEST.size :] == other[_DIGEST.size :]


def _records(payload: bytes, count: int) -> Iterator[tuple[bytes, int, bytes]]:
    """For each record: attributes, timestamp delta, and the remaining bytes."""
    at = 0
    for _ in range(count):
        length, start = read_varint(payload, at)
        at = start + length
        if length < 0 or at > len(payload):
            raise Malformed("a record is longer than its batch")
        delta, rest_at = read_varlong(payload, start + 1)
        yield payload[start : start + 1], delta, payload[rest_at:at]


def record_offset_deltas(records: memoryview, header: BatchHeader, *, decompressed_bytes_max: int) -> list[int]:
    """Offset deltas of the records in a batch of the log. Compaction removes records but keeps the header's range.

    Raises `MalformedBatch`, `LimitError`.
    """
    try:
        payload = _payload(records, header, decompressed_bytes_max)
        return [read_varint(rest, 0)[0] for _, _, rest in _records(payload, header.record_count)]
    except MalformedBatch:
        raise
    except MALFORMED as error:
        raise MalformedBatch(reason_of(error)) from error


# --- fencing a batch --------------------------------------------------------------------------------------------------


def fence_batch(
    records: memoryview, *, producer_id: int, producer_epoch: int, base_sequence: int, instance_id: int = 0
) -> bytearray:
    """A copy of a complete batch with another producer, base offset 0, leader epoch -1 and a new CRC32C.

    `instance_id` is the id of the instance, 1 to 255, or 0 for none. It is stored in attribute bits that Kafka has not
    assigned. Brokers store these bits and consumers mask them (DefaultRecordBatch.java, `test_fenced_batches.py`). A
    broker that rewrites the batch (LogAppendTime, other compression, compaction) drops them.

    All other bytes are unchanged, including the transactional bit. Do not use it for a transactional batch, which must
    keep its producer. A wrong CRC becomes correct: call `verify_crc` before.
    """
    header = fenced_header(
        records,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        instance_id=instance_id,
    )
    return bytearray(header + records[HEADER_BYTES:])


def fenced_header(
    records: memoryview, *, producer_id: int, producer_epoch: int, base_sequence: int, instance_id: int
) -> bytearray:
    """The new 61-byte header of `fence_batch`; the records after it are unchanged."""
    out = bytearray(records[:HEADER_BYTES])
    INT64.pack_into(out, 0, 0)
    INT32.pack_into(out, _LEADER_EPOCH_AT, -1)
    (attributes,) = _UINT16.unpack_from(out, _ATTRIBUTES_AT)
    _UINT16.pack_into(
        out,
        _ATTRIBUTES_AT,
        (attributes & ~(INSTANCE_ID_MAX << _INSTANCE_ID_SHIFT)) | (instance_id << _INSTANCE_ID_SHIFT),
    )
    _PRODUCER.pack_into(out, _PRODUCER_AT, producer_id, producer_epoch, base_sequence)
    covered = crc32c.crc32c(bytes(out[_ATTRIBUTES_AT:]))
    _UINT32.pack_into(out, _CRC_AT, crc32c.crc32c(records[HEADER_BYTES:], covered))
    return out


def zero_base_offset(records: memoryview) -> bytearray:
    """A copy of a batch with base offset 0, as brokers require. The CRC does not cover it."""
    out = bytearray(records)
    INT64.pack_into(out, 0, 0)
    return out


def sequence_add(sequence: int, count: int) -> int:
    """Adds to a sequence, which wraps after 2^31-1 (DefaultRecordBatch.incrementSequence)."""
    return (sequence + count) & _INT32_MAX


def split_batches(data: memoryview) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The complete v2 batches in the records of a Fetch response, in order. A truncated last batch is skipped.

    Message sets of magic 0 and 1 are skipped: the proxy never wrote one. Raises `UpstreamProtocolError` for an unknown
    magic or an invalid length.
    """
    at = 0
    while len(data) - at > _MAGIC_AT:
        length, magic = _LENGTH_AND_MAGIC.unpack_from(data, at + _LENGTH_AT)
        end = at + _LENGTH_ENDS + length
        if not 0 <= magic <= MAGIC or length <= _MAGIC_AT - _LENGTH_ENDS:
            raise UpstreamProtocolError(f"fetched record batch has magic {magic} and length {length}")
        if end > len(data):
            return
        if magic == MAGIC:
            batch = data[at:end]
            try:
                header = parse_batch_header(batch)
            except MalformedBatch as error:
                raise UpstreamProtocolError(f"malformed fetched records: {error}") from error
            yield header, batch
        at = end
