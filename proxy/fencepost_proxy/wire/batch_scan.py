"""What a producer states in a batch: expected offset, partition count, write id; and fields that policies read.

Sources of the expected offset:

- Record header `fencepost-expected-offset` (`statements.py`): the offset that *this record* must get. "-1" means no
  expectation. Leading zeros are allowed. A sign (except "-1"), spaces, more than 19 digits or a value above 2^63-1 are
  unreadable. The first record with an expectation determines that of the batch; the first later record that disagrees
  is the contradiction. One bound to another partition or cluster counts as absent, and so do the write ids of its
  record: an application has copied them (`BatchScan.copied_from`).
- The batch's base offset, if no record header has an expectation. With `source_is_base` it counts literally (0 is 0),
  otherwise only above 0, because ordinary clients write 0. -1 means no expectation. Headers override the base offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fencepost_policies.append import Contradiction, Unreadable
from fencepost_policies.fields import Field
from fencepost_proxy.errors import LimitError
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HEADER_BYTES, INT32_MAX, INT64_MAX, BatchHeader, require_single_batch
from fencepost_proxy.wire.batch_digest import digest_payload
from fencepost_proxy.wire.compression import MalformedBatch, decompress
from fencepost_proxy.wire.primitives import (
    MALFORMED,
    Malformed,
    read_varint,
    reason_of,
    write_uvarint,
)
from fencepost_proxy.wire.records import (
    ONE_BYTE_LENGTH,
    RECORDS_MAX,
    SMALL_BYTES,
    TWO_BYTE_LENGTH,
    Effort,
    PayloadRecords,
    payload_of,
    record_start,
    records_in,
    timestamp_of,
    too_many,
)
from fencepost_proxy.wire.statements import NO_EXPECTATION, Statement, read_statement

#: Larger payloads are only searched: a walk needs a copy as `bytes`, which takes long.
_COPIED_BYTES_MAX = 32 << 20
_SHOWN_BYTES_MAX = 20


class HeaderNames:
    """Names of the record headers that the proxy reads, as UTF-8. Of `fencepost-NAME`, `NAME` is an alias.

    `needles`: aliases, or names without the prefix; every spelling contains its needle. `spellings`: the name by each
    spelling of it. `cluster_id`: of Kafka, for values that name a cluster; None until known.
    """

    __slots__ = ("cluster_id", "expected_offset", "needles", "partition_count", "spellings", "write_id")

    def __init__(
        self,
        expected_offset: bytes = b"fencepost-expected-offset",
        partition_count: bytes = b"fencepost-partition-count",
        write_id: bytes = b"fencepost-write-id",
        *,
        cluster_id: bytes | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.expected_offset, self.partition_count, self.write_id = expected_offset, partition_count, write_id
        names = (expected_offset, partition_count, write_id)
        self.needles = tuple(name.removeprefix(b"fencepost-") for name in names)
        self.spellings = {**dict(zip(self.needles, names, strict=True)), **{name: name for name in names}}


BATCH_STEPS = 10


class BatchScan(NamedTuple):
    """Result of `scan_batch`.

    `expected_base_offset`: None without an expectation; negative if a record expects less than its own delta.
    `unreadable`: the first unreadable header of the proxy. Later headers were not read.
    `max_timestamp_ms`: maximum over the records that were read. The broker's maximum over all records is never older.
    It is at most a second newer if the header's maximum is correct and is reached within the first
    `_TIMED_RECORDS_MAX` records.
    `digest`: equal for two batches with equal decompressed record bytes and equal absolute timestamps. It may differ
    for a batch that the broker rewrote: see `digest_batch`, `may_be_rewritten`.
    `copied_from`: what the first statement is bound to that is bound to something else; None without such.
    `fields`: the requested ones; None without such.
    """

    header: BatchHeader
    expected_base_offset: int | None
    contradiction: Contradiction | None
    unreadable: Unreadable | None
    partition_count: int | None
    write_id: bytes | None
    max_timestamp_ms: int
    digest: bytes
    copied_from: str | None = None
    fields: Mapping[Field[Any], Any] | None = None


def scan_batch(
    records: memoryview,
    names: HeaderNames,
    where: TopicPartition,
    *,
    source_is_base: bool,
    fields: Sequence[Field[Any]] = (),
    decompressed_bytes_max: int,
    header: BatchHeader | None = None,
    effort: Effort | None = None,
) -> BatchScan:
    """Reads one complete batch, of a Produce request for `where` or of its log.

    For every batch that Kafka accepts, the result equals that of a walk over all records. Only records that may contain
    a header of the proxy are parsed, so a malformed record may go unnoticed: Kafka parses all records before it appends
    any, and refuses the batch (`test_malformed_records.py`). Kafka does not check offset deltas of uncompressed
    batches. The scan therefore requires, for records with such headers, that the delta is the index in the batch.

    Raises `MalformedBatch` if `require_single_batch` does, or if a parsed record is malformed. Raises `LimitError`
    above `decompressed_bytes_max` bytes or `RECORDS_MAX` records, or if `effort`, which is charged, is used up.
    The CRC is not checked. `fields`: to compute one takes a walk over the records. `header` is the result of
    `require_single_batch`, if known.
    """
    if header is None:
        header = require_single_batch(records)
    if header.record_count > RECORDS_MAX:
        raise too_many(f"{header.record_count} records", RECORDS_MAX)
    effort = effort or Effort(max(decompressed_bytes_max, len(records)), 2 * RECORDS_MAX)
    payload = _payload(records, header, names, decompressed_bytes_max, effort)
    try:
        end, first, rest_at = record_start(payload, 0)
        if end > len(payload):
            raise Malformed("the first record is longer than its batch")
        newest = first if header.record_count == 1 else _newest_delta(payload, header, first)
        computed = _computed(fields, PayloadRecords(payload, header, effort)) if fields else None
        stated = _Stated(names, where, effort)
        if isinstance(payload, bytes):
            if header.record_count == 1:
                stated.read_record(payload, rest_at, end, 0)
                _require_end(end, payload, 1)
            else:
                _read_headers(payload, header.record_count, stated)
        digest = digest_payload(payload, header, first)
    except MALFORMED as error:
        raise MalformedBatch(f"malformed record: {reason_of(error)}") from error
    expected, unreadable = _expected(header, stated, source_is_base=source_is_base)
    return BatchScan(
        header,
        expected,
        stated.contradiction,
        unreadable,
        stated.partition_count,
        stated.write_id,
        timestamp_of(header, newest),
        digest,
        stated.copied_from,
        computed,
    )


def find(data: bytes | memoryview, name: bytes, start: int = 0) -> int:
    """stringzilla's, which replaces this at the first call: a process without checked topics does not load it."""
    from stringzilla import find as found  # noqa: PLC0415

    globals()["find"] = found
    return int(found(data, name, start))


def _payload(
    records: memoryview, header: BatchHeader, names: HeaderNames, decompressed_bytes_max: int, effort: Effort
) -> bytes | memoryview:
    """The decompressed records; `bytes` if they may contain a header of the proxy."""
    unpacked = decompress(
        header.compression, records[HEADER_BYTES:], bytes_max=min(decompressed_bytes_max, effort.bytes_left)
    )
    effort.take(len(unpacked), BATCH_STEPS)
    says_something = len(unpacked) <= SMALL_BYTES or any(find(unpacked, name) >= 0 for name in names.needles)
    if says_something and len(unpacked) > _COPIED_BYTES_MAX:
        raise LimitError(
            f"record batch with headers for the proxy has {len(unpacked)} bytes once decompressed, above the limit of "
            f"{_COPIED_BYTES_MAX} (send smaller batches: no setting raises it)"
        )
    return bytes(unpacked) if says_something else unpacked


def _expected(header: BatchHeader, stated: _Stated, *, source_is_base: bool) -> tuple[int | None, Unreadable | None]:
    """Source of the expected offset: a record header, or else the base offset of the batch. Also what is unreadable."""
    expected, unreadable = stated.expected_base_offset, stated.unreadable
    if expected is None:
        base = header.base_offset
        expected = base if base > 0 or (source_is_base and base == 0) else None
        if base < -1 and unreadable is None:
            unreadable = Unreadable(0, "baseOffset", f"{base} is not an offset (-1: no expectation)")
    return expected, unreadable


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
        at, delta, _ = record_start(payload, at)
        if at > len(payload):
            raise Malformed("longer than its batch")
        newest = max(newest, delta)
    return newest


def _computed(fields: Sequence[Field[Any]], records: PayloadRecords) -> Mapping[Field[Any], Any]:
    return {each: each.compute(records) for each in fields}


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
        end, _, rest_at = record_start(payload, at)
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
    prefix = binding = b""
    at = index = 0
    while stated.unreadable is None:
        others_at = count_at if count_at < id_at else id_at
        hit = offset_at if offset_at < others_at else others_at
        if hit == total:
            break
        while index < walked_max:
            length = payload[at]
            if length < 0x80:
                end = at + ONE_BYTE_LENGTH[length]
            elif (second := payload[at + 1]) < 0x80:
                end = at + TWO_BYTE_LENGTH[length] + (second << 6)
            else:
                end, _, _ = record_start(payload, at)
                length = _LONG
            if end > hit:
                break
            at = end
            index += 1
        else:
            if index < count:
                raise too_many("records before a header for the proxy", walked_max)
            raise Malformed(f"{total - at} extra bytes after {count} records")
        agrees = end <= total and _is_in_place(payload, at, length, index)
        if offset_at < end:
            offset = base + index
            if offset < digits_end:
                agrees = agrees and startswith(b"%b%d%b" % (prefix, offset, binding), offset_at)
            elif 0 <= offset <= INT64_MAX:
                digits, binding = len(str(offset)), stated.binding
                digits_end = min(10**digits, INT64_MAX + 1)
                prefix = offset_name + _length(digits + len(binding))
                agrees = agrees and startswith(b"%b%d%b" % (prefix, offset, binding), offset_at)
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
            end, _, rest_at = record_start(payload, at)
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


def _length(byte_count: int) -> bytes:
    """The length of a header's value."""
    out = bytearray()
    write_uvarint(out, 2 * byte_count)
    return bytes(out)


class _Stated:
    """Collects the header values of one batch, record by record."""

    __slots__ = (
        "agreeing_count",
        "binding",
        "contradiction",
        "copied_from",
        "effort",
        "expected_base_offset",
        "names",
        "partition_count",
        "unreadable",
        "where",
        "write_id",
    )

    def __init__(self, names: HeaderNames, where: TopicPartition, effort: Effort) -> None:
        self.names = names
        self.where = where
        self.effort = effort
        self.copied_from: str | None = None
        #: What follows the number in the last expected offset that counts.
        self.binding = b""
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
            raise too_many("record headers", RECORDS_MAX)
        self.effort.steps_left -= header_count
        spellings = self.names.spellings
        found: list[tuple[bytes, bytes, bytes | None]] = []
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
            if (ours := spellings.get(name)) is not None:
                found.append((name, ours, None if length < 0 else data[at : at + length]))
            if length > 0:
                at += length
        if at != end:
            raise Malformed("shorter than its length field says")
        if found and self.unreadable is None:
            self._read_headers(index, found)

    def _read_headers(self, index: int, found: list[tuple[bytes, bytes, bytes | None]]) -> None:
        """Those of one record: spelling, name and value. Write ids come last."""
        observed, is_copy = set(), False
        for spelling, name, value in found:
            if name == self.names.write_id:
                continue
            if (statement := self._statement(index, name, value)) is None:
                return
            if statement.number is None:
                self.copied_from = self.copied_from or statement.other_binding
                is_copy = is_copy or name == self.names.expected_offset
            elif name in observed:
                self._unreadable(index, spelling, "duplicate header in one record")
                return
            else:
                observed.add(name)
                self._read_statement(index, name, statement)
        write_ids = [value for _, name, value in found if name == self.names.write_id]
        if write_ids and not is_copy and self.unreadable is None:
            self._read_write_ids(index, write_ids)

    def _statement(self, index: int, name: bytes, value: bytes | None) -> Statement | None:
        """None if it is unreadable."""
        of_partition = name == self.names.expected_offset
        if value is None:
            self._unreadable(index, name, "value is null")
            return None
        try:
            return read_statement(value, self.where, self.names.cluster_id, of_partition=of_partition)
        except ValueError as error:
            self._unreadable(index, name, f"{_shown(value)} {error}")
            return None

    def _read_statement(self, index: int, name: bytes, statement: Statement) -> None:
        assert statement.number is not None
        if name == self.names.partition_count:
            self._read_partition_count(index, statement)
        elif statement.number != NO_EXPECTATION:
            self.binding = statement.binding
            self._read_expected_offset(index, statement.number)

    def _read_write_ids(self, index: int, write_ids: list[bytes | None]) -> None:
        """All those of a record."""
        name, first = self.names.write_id, write_ids[0]
        if not first:
            self._unreadable(index, name, "value is null" if first is None else "value is empty")
        elif len(write_ids) > 1:
            self._unreadable(index, name, "duplicate header in one record")
        elif self.write_id is None:
            self.write_id = first

    def _read_expected_offset(self, index: int, expected: int) -> None:
        if expected > INT64_MAX:
            self._unreadable(index, self.names.expected_offset, f"{expected} does not fit 64 bits")
        elif self.expected_base_offset is None:
            self.expected_base_offset = expected - index
        elif self.expected_base_offset != expected - index and self.contradiction is None:
            self.contradiction = Contradiction(record=index, expected=expected, offset_delta=index)

    def _read_partition_count(self, index: int, statement: Statement) -> None:
        name, count = self.names.partition_count, statement.number
        assert count is not None
        if not 1 <= count <= INT32_MAX:
            self._unreadable(index, name, f"{count} is not a number of partitions")
        elif self.partition_count is None:
            self.partition_count = count
            self.agreeing_count = b"%b%b%b" % (self.names.needles[1], _length(len(statement.text)), statement.text)
        elif self.partition_count != count:
            self._unreadable(index, name, f"{count} contradicts {self.partition_count} in an earlier record")

    def _unreadable(self, index: int, name: bytes, reason: str) -> None:
        self.unreadable = Unreadable(index, name.decode(errors="backslashreplace"), reason)


def write_id_of_record(rest: bytes, names: HeaderNames, where: TopicPartition) -> bytes | None:
    """Of one record, from its offset delta on; None if it has none that counts at `where`, or is malformed."""
    try:
        stated = _Stated(names, where, Effort(len(rest), len(rest)))
        stated.read_record(rest, 0, len(rest), read_varint(rest, 0)[0])
    except MALFORMED:
        return None
    return stated.write_id


def _shown(value: bytes) -> str:
    return repr(value[:_SHOWN_BYTES_MAX])[1:] + ("…" if len(value) > _SHOWN_BYTES_MAX else "")


def record_offset_deltas(records: memoryview, header: BatchHeader, *, decompressed_bytes_max: int) -> list[int]:
    """Offset deltas of the records in a batch of the log. Compaction removes records but keeps the header's range.

    Raises `MalformedBatch`, `LimitError`.
    """
    try:
        payload = payload_of(records, header, decompressed_bytes_max)
        return [read_varint(rest, 0)[0] for _, _, rest in records_in(payload, header.record_count)]
    except MalformedBatch:
        raise
    except MALFORMED as error:
        raise MalformedBatch(reason_of(error)) from error
