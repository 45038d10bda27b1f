"""Digests of batches: whether two batches have the same records."""

from __future__ import annotations

import os
from struct import Struct

from xxhash import xxh3_128, xxh3_128_digest

from fencepost_proxy.wire.batch import UINT64_MAX, BatchHeader, parse_batch_header
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.primitives import (
    INT32,
    MALFORMED,
    reason_of,
)
from fencepost_proxy.wire.records import RECORDS_MAX, payload_of, records_in, too_many


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
        raise too_many(f"{header.record_count} records", RECORDS_MAX)
    payload = payload_of(records, header, decompressed_bytes_max)
    digest = xxh3_128(INT32.pack(header.record_count), SEED)
    try:
        for attributes, delta, rest in records_in(payload, header.record_count):
            timestamp = 0 if ignore_timestamps else header.base_timestamp_ms + delta & UINT64_MAX
            digest.update(_RECORD.pack(timestamp, len(rest), attributes) + rest)
    except MALFORMED as error:
        raise MalformedBatch(f"malformed record batch: {reason_of(error)}") from error
    return (b"no timestamps" if ignore_timestamps else b"timestamps") + digest.digest()


#: XXH3-128 with a random seed per process: clients cannot construct collisions, and it is 20 times as fast as BLAKE2
#: (a second per gigabyte).
SEED = int.from_bytes(os.urandom(8))
_DIGEST = Struct(">Qi")  # timestamp of the first record, number of records
_FIRST_TIME_BYTES = 8
_RECORD = Struct(">QIc")  # of one record: timestamp, length of the rest, attributes


def digest_payload(payload: bytes | memoryview, header: BatchHeader, first: int) -> bytes:
    """`first` is the timestamp delta of the first record."""
    start = _DIGEST.pack((header.base_timestamp_ms + first) & UINT64_MAX, header.record_count)
    return start + xxh3_128_digest(payload, SEED)


def may_be_rewritten(one: bytes, other: bytes) -> bool:
    """For two different `BatchScan.digest`s: whether `digest_batch` may still be equal.

    Clients may choose any base timestamp. A broker that recompresses a batch uses the first record's timestamp. Record
    count and first timestamp stay equal.
    """
    return one[: _DIGEST.size] == other[: _DIGEST.size]


def same_first_time(one: bytes, other: bytes) -> bool:
    """For two `BatchScan.digest`s: whether the first records have the same timestamp."""
    return one[:_FIRST_TIME_BYTES] == other[:_FIRST_TIME_BYTES]


def same_bytes(one: bytes, other: bytes) -> bool:
    """For two `BatchScan.digest`s: whether the record bytes are equal, regardless of the base timestamp."""
    return one[_DIGEST.size :] == other[_DIGEST.size :]
