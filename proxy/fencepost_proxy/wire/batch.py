"""Record batches (magic 2): their headers, and fencing them.

    0 base offset i64 | 8 batch length i32 | 12 partition leader epoch i32 | 16 magic i8 | 17 CRC32C u32
    21 attributes i16 | 23 last offset delta i32 | 27 base timestamp i64 | 35 max timestamp i64
    43 producer id i64 | 51 producer epoch i16 | 53 base sequence i32 | 57 record count i32 | 61 records

The length counts from byte 12, the CRC covers byte 21 to the end. A record: length varint, attributes i8, timestamp
delta varlong, offset delta varint, key, value (varint length, -1 for null), header count varint, then each header's
name and value in the same form. Source: DefaultRecordBatch.java and DefaultRecord.java.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from fencepost_proxy.errors import UpstreamProtocolError
from fencepost_proxy.wire.checksum import crc32c
from fencepost_proxy.wire.compression import CODEC_NAMES, MalformedBatch
from fencepost_proxy.wire.primitives import (
    INT32,
    INT64,
)

HEADER_BYTES = 61
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
INT32_MAX = 0x7FFFFFFF
INT64_MAX = 0x7FFFFFFFFFFFFFFF


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
    return bool(crc32c(records[_ATTRIBUTES_AT:]) == crc)


UINT64_MAX = 0xFFFFFFFFFFFFFFFF


def fence_batch(
    records: memoryview, *, producer_id: int, producer_epoch: int, base_sequence: int, instance_id: int = 0
) -> bytearray:
    """Fenced append: a copy of a batch with a fence as its producer, base offset 0, leader epoch -1 and a new CRC32C.

    `instance_id` is the id of the instance, 1 to 255, or 0 for none. It is stored in attribute bits that Kafka has not
    assigned. Brokers store these bits and consumers mask them (DefaultRecordBatch.java, `test_fenced_batches.py`). A
    broker that rewrites the batch (LogAppendTime, other compression, compaction) drops them.

    The batch must be complete. All other bytes are unchanged, including the transactional bit. Do not use it for a
    transactional batch, which must keep its producer. A wrong CRC becomes correct: call `verify_crc` before.
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
    _UINT32.pack_into(out, _CRC_AT, crc32c(bytes(out[_ATTRIBUTES_AT:]), records[HEADER_BYTES:]))
    return out


def without_producer(records: memoryview) -> bytearray:
    """The batch as a producer that is not idempotent would have sent it."""
    return fence_batch(records, producer_id=-1, producer_epoch=-1, base_sequence=-1)


def zero_base_offset(records: memoryview) -> bytearray:
    """A copy of a batch with base offset 0, as brokers require. The CRC does not cover it."""
    out = bytearray(records)
    INT64.pack_into(out, 0, 0)
    return out


def sequence_add(sequence: int, count: int) -> int:
    """Adds to a sequence, which wraps after 2^31-1 (DefaultRecordBatch.incrementSequence)."""
    return (sequence + count) & INT32_MAX


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
