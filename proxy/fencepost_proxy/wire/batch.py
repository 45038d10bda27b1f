"""Record batches (magic 2): what a producer says in one, and the few bytes of one that we change.

    0 base offset i64 | 8 batch length i32 | 12 partition leader epoch i32 | 16 magic i8 | 17 CRC32C u32
    21 attributes i16 | 23 last offset delta i32 | 27 base timestamp i64 | 35 max timestamp i64
    43 producer id i64 | 51 producer epoch i16 | 53 base sequence i32 | 57 record count i32 | 61 records

The length counts from byte 12, the CRC covers byte 21 to the end. A record: length varint, attributes i8, timestamp
delta varlong, offset delta varint, key, value (varint length, -1 for null), header count varint, then each header's
name and value likewise. Source: DefaultRecordBatch.java and DefaultRecord.java.

An expectation, in either carrier:

- record header `expected-offset`, ASCII decimal: the offset that *this record* must get. "-1" says nothing. Leading
  zeros are fine; a sign (but for "-1"), spaces, more than 19 digits or a value above 2^63-1 make it unreadable. What
  the batch expects follows from the first record that says something; the first later one that disagrees is the
  contradiction.
- the batch's base offset, where no record header says anything: with `carrier_base` literally (0 is 0), otherwise only
  above 0, since every ordinary client writes 0. -1 says nothing. A base offset that disagrees with a header is ignored.
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
from fencepost_policies.values import value
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
    "may_be_rewritten",
    "parse_batch_header",
    "require_single_batch",
    "same_bytes",
    "scan_batch",
    "sequence_add",
    "split_batches",
    "stamp_batch",
    "stamped_header",
    "verify_crc",
    "zero_base_offset",
]

HEADER_BYTES = 61
#: Records of one batch, and record headers in one, that a scan takes. Each costs time in Python, which a batch of few
#: bytes could otherwise claim for a minute: 14 million records of 7 bytes are 145 KB with gzip.
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
#: Bits 7 to 14 of the attributes, which Kafka has not assigned.
_TAG_SHIFT = 7
TAG_MAX = 0xFF
_PRODUCER_AT = 43

_UINT32 = Struct(">I")
_UINT16 = Struct(">H")
_PRODUCER = Struct(">qhi")

#: Above, records are searched where they are unpacked; a copy of more takes long, and a walk needs one.
_COPIED_BYTES_MAX = 32 << 20
_SMALL_BYTES = 1 << 20

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
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd; 5 to 7 are not assigned."""
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
    def tag(self) -> int:
        """Which process stamped it, 1 to 255: see `stamp_batch`. 0 where nobody says."""
        return (self.attributes >> _TAG_SHIFT) & TAG_MAX


def parse_batch_header(records: memoryview) -> BatchHeader:
    """The header of the batch that starts here; whether the batch is complete is not looked at.

    Raises MalformedBatch where this is no v2 batch. For a Produce request see `require_single_batch`.
    """
    if len(records) > _MAGIC_AT and records[_MAGIC_AT] != MAGIC:
        raise MalformedBatch(f"a record batch has the magic {records[_MAGIC_AT]}; only magic {MAGIC} is supported")
    if len(records) < HEADER_BYTES:
        raise MalformedBatch(f"a record batch of {len(records)} bytes is shorter than its header")
    header = BatchHeader._make(_HEADER.unpack_from(records))
    if header.batch_length < HEADER_BYTES - _LENGTH_ENDS:
        raise MalformedBatch(f"a record batch claims a length of {header.batch_length} bytes")
    return header


def require_single_batch(records: memoryview) -> BatchHeader:
    """The header of a partition's records in a Produce request, which must be exactly one complete v2 batch.

    Raises MalformedBatch for anything else, for a batch without records, for a record count that does not agree with
    the last offset delta, and for an unknown codec: the broker refuses these, too. A control batch is let through to
    the caller (`is_control`), and so is a wrong CRC (`verify_crc`).
    """
    header = parse_batch_header(records)
    if header.batch_length + _LENGTH_ENDS != len(records):
        raise MalformedBatch(
            f"a partition's records are {len(records)} bytes, but not one batch: the first says that it has "
            f"{header.batch_length + _LENGTH_ENDS}"
        )
    if header.record_count <= 0 or header.record_count != header.last_offset_delta + 1:
        raise MalformedBatch(
            f"a record batch claims {header.record_count} records and the last offset delta {header.last_offset_delta}"
        )
    if header.compression >= len(CODEC_NAMES):
        raise MalformedBatch(f"a record batch names the unknown compression codec {header.compression}")
    return header


def verify_crc(records: memoryview) -> bool:
    """Whether a complete batch's CRC32C is right. Stamping computes a new one, so look before you stamp: afterwards
    bytes that were damaged on their way look sound."""
    (crc,) = _UINT32.unpack_from(records, _CRC_AT)
    return bool(crc32c.crc32c(records[_ATTRIBUTES_AT:]) == crc)


# --- what a batch says ------------------------------------------------------------------------------------------------


@value
class HeaderNames:
    """Names of the record headers that we read, as UTF-8."""

    expected_offset: bytes = b"expected-offset"
    partition_count: bytes = b"partition-count"
    write_id: bytes = b"write-id"

    @property
    def all(self) -> tuple[bytes, bytes, bytes]:
        return self.expected_offset, self.partition_count, self.write_id


class Effort:
    """What reading may still take: bytes once unpacked, and steps. A step is a record walked over, or a header of one;
    so as not to be for nothing, a batch is some."""

    __slots__ = ("bytes_left", "steps_left")

    def __init__(self, bytes_left: int, steps_left: int) -> None:
        self.bytes_left = bytes_left
        self.steps_left = steps_left

    def take(self, byte_count: int, steps: int) -> None:
        """Raises LimitError where there is not so much left."""
        if byte_count > self.bytes_left or steps > self.steps_left:
            raise LimitError(
                f"record batches of a request take more than is left to read them: {self.bytes_left} bytes once "
                f"decompressed, {self.steps_left} records and record headers; send smaller batches"
            )
        self.bytes_left -= byte_count
        self.steps_left -= steps


_BATCH_STEPS = 10


class BatchScan(NamedTuple):
    """What one batch says, and over which records.

    `expected_base_offset` – None where nothing is said; negative where a record asks for less than its own delta.
    `unreadable` – the first header of ours that could not be read; what stands behind it was not looked at.
    `max_timestamp_ms` – over the records that were looked at. The broker computes the newest over all: it is never
    older than ours, and newer by at most a second if the batch's header tells the truth and has its newest record among
    the first `_TIMED_RECORDS_MAX`.
    `digest` – equal for two batches with equal bytes of records, once decompressed, and equal absolute timestamps. A
    batch that the broker wrote anew may have another one: see `digest_batch`, `may_be_rewritten`.
    """

    header: BatchHeader
    expected_base_offset: int | None
    contradiction: Contradiction | None
    unreadable: Unreadable | None
    partition_count: int | None
    write_id: bytes | None
    max_timestamp_ms: int
    digest: bytes


def scan_batch(
    records: memoryview,
    names: HeaderNames,
    *,
    carrier_base: bool,
    decompressed_bytes_max: int,
    header: BatchHeader | None = None,
    effort: Effort | None = None,
) -> BatchScan:
    """Reads one complete batch of a Produce request.

    What its headers say is what a walk over all records would find, in every batch that Kafka takes. Records are only
    looked at where they could say something, so a malformed one may go unnoticed: Kafka takes all of them apart before
    it appends any, and refuses the batch (`test_malformed_records.py`). Only offset deltas it does not look at where
    the batch is not compressed: those of records with headers of ours must be their places in the batch.

    Raises MalformedBatch where the batch is not what `require_single_batch` wants, or a record that is looked at is
    malformed; LimitError where it unpacks to more than `decompressed_bytes_max` bytes, has more than `RECORDS_MAX`
    records, or takes more than is left of `effort`, from which is taken what it has used. The CRC is not checked.
    `header` is what `require_single_batch` said, if it was asked already.
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
    says_something = len(unpacked) <= _SMALL_BYTES or any(find(unpacked, name) >= 0 for name in names.all)
    if says_something and len(unpacked) > _COPIED_BYTES_MAX:
        raise LimitError(
            f"a record batch with headers for the proxy has {len(unpacked)} bytes once decompressed, and the limit is "
            f"{_COPIED_BYTES_MAX}; send smaller batches"
        )
    payload = bytes(unpacked) if says_something else unpacked
    try:
        end, first, _ = _record_start(payload, 0)
        if end > len(payload):
            raise Malformed("the first claims more bytes than its batch has")
        newest = _newest_delta(payload, header, first)
        said = _Said(names, effort)
        if isinstance(payload, bytes):
            _read_headers(payload, header.record_count, said)
        digest = _digest(payload, header, first)
    except MALFORMED as error:
        raise MalformedBatch(f"a record of a batch is malformed: {reason_of(error)}") from error
    expected = said.expected_base_offset
    unreadable = said.unreadable
    if expected is None:
        expected = header.base_offset if header.base_offset > 0 or (carrier_base and header.base_offset == 0) else None
        if header.base_offset < -1 and unreadable is None:
            unreadable = Unreadable(0, "baseOffset", f"{header.base_offset} is not an offset; -1 says nothing")
    return BatchScan(
        header,
        expected,
        said.contradiction,
        unreadable,
        said.partition_count,
        said.write_id,
        _timestamp(header, newest),
        digest,
    )


def _too_many(what: str, limit: int) -> LimitError:
    return LimitError(f"a record batch has {what}, and the limit is {limit}; send smaller batches")


def _payload(records: memoryview, header: BatchHeader, bytes_max: int) -> bytes:
    """The records section, unpacked. As bytes, since indexing those is what Python does fastest."""
    return bytes(decompress(header.compression, records[HEADER_BYTES:], bytes_max=bytes_max))


def _timestamp(header: BatchHeader, delta: int) -> int:
    timestamp = header.base_timestamp_ms + delta
    # Java's long would wrap, and Kafka then see an old timestamp where we see a new one.
    if not -_INT64_MAX - 1 <= timestamp <= _INT64_MAX:
        raise MalformedBatch("a record's timestamp does not fit 64 bits")
    return timestamp


def _record_start(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """Where the record at `at` ends, its timestamp delta, and where its offset delta is."""
    length, at = read_varint(data, at)
    if length < 0:
        raise Malformed("it has a negative length")
    delta, rest_at = read_varlong(data, at + 1)
    return at + length, delta, rest_at


#: What the first byte of a record adds to its length, its own size included, if one byte or two tell that length. An
#: odd byte means a negative length: it points far behind any batch.
_ONE_BYTE_LENGTH = [1 + (byte >> 1) if byte & 1 == 0 else 1 << 40 for byte in range(0x80)]
_TWO_BYTE_LENGTH = [2 + ((byte & 0x7F) >> 1) if byte & 1 == 0 else 1 << 40 for byte in range(0x100)]


# The newest timestamp decides how long Kafka remembers the batch's producer, and Kafka computes it from the records,
# whatever the batch's header says. What we say must never be newer than that. The first record's is not, and where the
# header claims but little more, it will do: a batch is refused for it only if it is as old as the limit, to the second.
_TIMESTAMP_SLACK_MS = 1000
#: Where it claims more, so many records are looked at: a batch whose first ones are as old as the limit is refused,
#: even if a later one is not.
_TIMED_RECORDS_MAX = 1000


def _newest_delta(payload: bytes | memoryview, header: BatchHeader, first: int) -> int:
    """The highest timestamp delta of the records looked at: the first, or more where that says too little."""
    first_ms = header.base_timestamp_ms + first
    if header.record_count == 1 or 0 <= first_ms <= header.max_timestamp_ms <= first_ms + _TIMESTAMP_SLACK_MS:
        return first
    newest, at = first, 0
    for _ in range(min(header.record_count, _TIMED_RECORDS_MAX)):
        at, delta, _ = _record_start(payload, at)
        if at > len(payload):
            raise Malformed("it claims more bytes than its batch has")
        newest = max(newest, delta)
    return newest


#: So few are faster walked over than searched.
_WALKED_RECORDS_MAX = 2


def _read_headers(payload: bytes, count: int, said: _Said) -> None:
    if count <= _WALKED_RECORDS_MAX:
        _walk_headers(payload, count, said)
    else:
        _search_headers(payload, count, said)


def _walk_headers(payload: bytes, count: int, said: _Said) -> None:
    """The plain way: every record is taken apart."""
    total = len(payload)
    at = 0
    for index in range(count):
        end, _, rest_at = _record_start(payload, at)
        if end > total:
            raise Malformed("it claims more bytes than its batch has")
        said.read_record(payload, rest_at, end, index)
        at = end
    if at != total:
        raise Malformed(f"{total - at} bytes are left over behind the {count} records")


def _search_headers(payload: bytes, count: int, said: _Said) -> None:
    """What the plain way finds, at the speed of a search for bytes (by SIMD: a fiftieth of what `bytes.find` takes).

    A record can have a header of ours only if that name occurs in its bytes. So nothing is looked at behind the last
    occurrence, and before it only the lengths, to find the record that an occurrence lies in. That record is taken
    apart, since a key or a value may contain the name as well, unless it makes no difference: where each name occurs
    once at most in the record, and what follows is what a header would say that agrees with those before it, then the
    record adds nothing, be it a header or not. That spares most of the work where each record has its own expectation.
    """
    total = len(payload)
    walked_max = min(count, said.effort.steps_left)
    startswith = payload.startswith
    offset_name, count_name, id_name = said.needles
    offset_at, count_at, id_at = (_find(payload, name, 0) for name in said.needles)
    base = digits_end = _NO_BASE
    prefix = b""
    at = index = 0
    while said.unreadable is None:
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
                raise _too_many("a header of ours behind too many records", walked_max)
            raise Malformed(f"{total - at} bytes are left over behind the {count} records")
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
                agrees = agrees and said.partition_count is not None and startswith(said.agreeing_count, count_at)
                count_at = _find(payload, count_name, count_at + 1)
                if count_at < end:
                    agrees = False
                    count_at = _find(payload, count_name, end)
            if id_at < end:
                behind = id_at + len(id_name)
                agrees = agrees and said.write_id is not None and payload[behind : behind + 1] in _SHORT_LENGTHS
                id_at = _find(payload, id_name, id_at + 1)
                if id_at < end:
                    agrees = False
                    id_at = _find(payload, id_name, end)
        if not agrees:
            end, _, rest_at = _record_start(payload, at)
            if end > total:
                raise Malformed("it claims more bytes than its batch has")
            said.read_record(payload, rest_at, end, index)
            if said.expected_base_offset is not None:
                base = said.expected_base_offset
                digits_end = _NO_BASE
        at = end
        index += 1
    said.effort.take(0, index)


def _is_in_place(payload: bytes, at: int, length: int, index: int) -> bool:
    """Whether the offset delta of the record at `at` is surely `index`; `length` is its first byte, or `_LONG`.

    Kafka does not look at the offset deltas of an uncompressed batch: such a record would lie at another offset than
    the one that it expects.
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
    """The first occurrence from `at` on, the payload's end if there is none."""
    found = find(payload, name, at)
    return len(payload) if found < 0 else found


#: In place of the first byte of a record whose length takes more than two bytes.
_LONG = -1
#: Stands for "nothing is expected yet": no record's index makes it an offset.
_NO_BASE = -1 << 80
#: Of a write-id that is neither null nor empty and shorter than 64 bytes.
_SHORT_LENGTHS = frozenset(bytes([2 * length]) for length in range(1, 64))


_KEY_AND_VALUE = (0, 1)


class _Said:
    """Collects what the headers of one batch say, record by record."""

    __slots__ = (
        "agreeing_count",
        "contradiction",
        "effort",
        "expected_base_offset",
        "names",
        "needles",
        "partition_count",
        "unreadable",
        "write_id",
    )

    def __init__(self, names: HeaderNames, effort: Effort) -> None:
        self.names = names
        self.effort = effort
        self.needles = names.all
        self.expected_base_offset: int | None = None
        self.contradiction: Contradiction | None = None
        self.unreadable: Unreadable | None = None
        self.partition_count: int | None = None
        self.write_id: bytes | None = None
        #: A header's name and value as they are where they say this partition count once more.
        self.agreeing_count = b""

    def read_record(self, data: bytes, at: int, end: int, index: int) -> None:
        """Takes one record apart, from its offset delta on: that must be its index, and the record fill its length."""
        # Integers of one byte, which most are, are read right here.
        delta = data[at]
        if delta < 0x80:
            delta = (delta >> 1) ^ -(delta & 1)
            at += 1
        else:
            delta, at = read_varint(data, at)
        if delta != index:
            raise Malformed(f"its offset delta is {delta}, not its place in the batch")
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
        header_count, at = read_varint(data, at)
        if header_count < 0 or header_count * 2 > end - at:
            raise Malformed(f"it claims {header_count} headers")
        if header_count > self.effort.steps_left:
            raise _too_many("more record headers than are read", RECORDS_MAX)
        self.effort.steps_left -= header_count
        needles = self.needles
        seen: tuple[bytes, ...] = ()
        for _ in range(header_count):
            length, at = read_varint(data, at)
            if length < 0 or at + length > end:
                raise Malformed(f"it has a header name of {length} bytes")
            name = data[at : at + length]
            length, at = read_varint(data, at + length)
            if length > end - at:
                raise Malformed(f"it has a header value of {length} bytes")
            if name in needles and self.unreadable is None:
                if name in seen:
                    self._unreadable(index, name, "it occurs twice in this record")
                else:
                    seen = (*seen, name)
                    self._read_header(index, name, None if length < 0 else data[at : at + length])
            if length > 0:
                at += length
        if at != end:
            raise Malformed("it does not fill its length")

    def _read_header(self, index: int, name: bytes, value: bytes | None) -> None:
        names = self.names
        if value is None:
            self._unreadable(index, name, "its value is null")
        elif name == names.write_id:
            if not value:
                self._unreadable(index, name, "its value is empty")
            elif self.write_id is None:
                self.write_id = value
        elif value.isdigit() and len(value) <= _DIGITS_MAX:
            if name == names.expected_offset:
                self._read_expected_offset(index, int(value))
            else:
                self._read_partition_count(index, value)
        elif value != b"-1":
            self._unreadable(index, name, f"{_shown(value)} is not a decimal number in ASCII of at most 19 digits")
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
            self.agreeing_count = name + bytes([2 * len(value)]) + value
        elif self.partition_count != count:
            self._unreadable(index, name, f"it says {count} where a record before it says {self.partition_count}")

    def _unreadable(self, index: int, name: bytes, reason: str) -> None:
        self.unreadable = Unreadable(index, name.decode(errors="backslashreplace"), reason)


def _shown(value: bytes) -> str:
    return repr(value[:_SHOWN_BYTES_MAX])[1:] + ("…" if len(value) > _SHOWN_BYTES_MAX else "")


# --- what makes two batches the same ----------------------------------------------------------------------------------


def digest_batch(records: memoryview, *, decompressed_bytes_max: int, ignore_timestamps: bool = False) -> bytes:
    """A few bytes that are equal for two batches with equal records, however the broker rewrote the batch around them.

    Compared are the number of records and, of each, attributes, offset delta, key, value, headers in their order, and
    the absolute timestamp. Not compared: compression, base offset, leader epoch, CRC, producer id, epoch and sequence,
    the batch's attributes and its max timestamp. With `ignore_timestamps` the records' timestamps are left out as well,
    which a LogAppendTime topic needs, on both sides: the broker may have replaced them. The two kinds of digest, and
    `BatchScan.digest`, never equal each other.

    Every record is taken apart: see `may_be_rewritten` for when that is needed.

    A digest means something to this process only: it is never stored, nor sent.

    Variable-length integers are compared as they are written: a producer that writes them longer than needed may find
    its batch unequal after the broker repacked it, never equal to a foreign one.

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
        raise MalformedBatch(f"a record batch cannot be read: {reason_of(error)}") from error
    return (b"no timestamps" if ignore_timestamps else b"timestamps") + digest.digest()


#: XXH3-128 under a seed that each process draws for itself: 128 bits that no client can aim at, and 20 times the speed
#: of BLAKE2, which would take a second for each gigabyte.
_SEED = int.from_bytes(os.urandom(8))
_DIGEST = Struct(">Qi")  # timestamp of the first record, number of records
_RECORD = Struct(">QIc")  # of one record: timestamp, length of the rest, attributes
_UINT64_MAX = 0xFFFFFFFFFFFFFFFF


def _digest(payload: bytes | memoryview, header: BatchHeader, first: int) -> bytes:
    """`first` is the timestamp delta of the first record."""
    start = _DIGEST.pack((header.base_timestamp_ms + first) & _UINT64_MAX, header.record_count)
    return start + xxh3_128_digest(payload, _SEED)


def may_be_rewritten(one: bytes, other: bytes) -> bool:
    """Of two `BatchScan.digest`s that differ: whether `digest_batch` may be equal.

    A client may measure timestamps from anything; the broker, where it compresses a batch in another way, measures from
    the first record. Number of records and first timestamp are the same then.
    """
    return one[: _DIGEST.size] == other[: _DIGEST.size]


def same_bytes(one: bytes, other: bytes) -> bool:
    """Of two `BatchScan.digest`s: whether the records are equal byte by byte, whatever the batch measures time from."""
    return one[_DIGEST.size :] == other[_DIGEST.size :]


def _records(payload: bytes, count: int) -> Iterator[tuple[bytes, int, bytes]]:
    """Of each record: its attributes, its timestamp delta, and everything behind."""
    at = 0
    for _ in range(count):
        length, start = read_varint(payload, at)
        at = start + length
        if length < 0 or at > len(payload):
            raise Malformed("a record claims more bytes than its batch has")
        delta, rest_at = read_varlong(payload, start + 1)
        yield payload[start : start + 1], delta, payload[rest_at:at]


def record_offset_deltas(records: memoryview, header: BatchHeader, *, decompressed_bytes_max: int) -> list[int]:
    """Of each record that is left in a batch of the log: compaction takes some out and leaves the header's range.

    Raises MalformedBatch, LimitError.
    """
    try:
        payload = _payload(records, header, decompressed_bytes_max)
        return [read_varint(rest, 0)[0] for _, _, rest in _records(payload, header.record_count)]
    except MalformedBatch:
        raise
    except MALFORMED as error:
        raise MalformedBatch(reason_of(error)) from error


# --- changing a batch -------------------------------------------------------------------------------------------------


def stamp_batch(
    records: memoryview, *, producer_id: int, producer_epoch: int, base_sequence: int, tag: int = 0
) -> bytearray:
    """A copy of a complete batch under another producer: base offset 0, leader epoch -1, CRC32C computed anew.

    `tag` – 1 to 255, says which process stamped it; 0 for none. It stands in attribute bits that Kafka has not
    assigned: brokers store them and consumers mask them out (DefaultRecordBatch.java; `test_stamped_batches.py` shows
    both). A broker that writes the batch anew (LogAppendTime, another compression, compaction) drops them.

    Everything else is untouched, the transactional bit included: a transactional batch keeps its own producer, so do
    not stamp it. A CRC that was wrong before is right afterwards: see `verify_crc`.
    """
    header = stamped_header(
        records, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence, tag=tag
    )
    return bytearray(header + records[HEADER_BYTES:])


def stamped_header(
    records: memoryview, *, producer_id: int, producer_epoch: int, base_sequence: int, tag: int
) -> bytearray:
    """Of `stamp_batch` the 61 bytes that differ; the records behind them are as they were."""
    out = bytearray(records[:HEADER_BYTES])
    INT64.pack_into(out, 0, 0)
    INT32.pack_into(out, _LEADER_EPOCH_AT, -1)
    (attributes,) = _UINT16.unpack_from(out, _ATTRIBUTES_AT)
    _UINT16.pack_into(out, _ATTRIBUTES_AT, (attributes & ~(TAG_MAX << _TAG_SHIFT)) | (tag << _TAG_SHIFT))
    _PRODUCER.pack_into(out, _PRODUCER_AT, producer_id, producer_epoch, base_sequence)
    covered = crc32c.crc32c(bytes(out[_ATTRIBUTES_AT:]))
    _UINT32.pack_into(out, _CRC_AT, crc32c.crc32c(records[HEADER_BYTES:], covered))
    return out


def zero_base_offset(records: memoryview) -> bytearray:
    """A copy of a batch with base offset 0, which brokers insist on. The CRC does not cover it."""
    out = bytearray(records)
    INT64.pack_into(out, 0, 0)
    return out


def sequence_add(sequence: int, count: int) -> int:
    """Sequences run from 0 to 2^31-1 and wrap (DefaultRecordBatch.incrementSequence)."""
    return (sequence + count) & _INT32_MAX


def split_batches(data: memoryview) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The complete v2 batches of a Fetch answer's records, in their order. A last one that is cut off is left out.

    Message sets of magic 0 and 1 are stepped over: we never wrote one. Raises UpstreamProtocolError for an unknown
    magic or an impossible length.
    """
    at = 0
    while len(data) - at > _MAGIC_AT:
        length, magic = _LENGTH_AND_MAGIC.unpack_from(data, at + _LENGTH_AT)
        end = at + _LENGTH_ENDS + length
        if not 0 <= magic <= MAGIC or length <= _MAGIC_AT - _LENGTH_ENDS:
            raise UpstreamProtocolError(f"a fetched record batch has the magic {magic} and the length {length}")
        if end > len(data):
            return
        if magic == MAGIC:
            batch = data[at:end]
            try:
                header = parse_batch_header(batch)
            except MalformedBatch as error:
                raise UpstreamProtocolError(f"fetched records are malformed: {error}") from error
            yield header, batch
        at = end
