"""The records of a batch, once it is decompressed, and limits of what is read of them."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost_proxy.errors import LimitError
from fencepost_proxy.wire.batch import HEADER_BYTES, INT64_MAX, BatchHeader
from fencepost_proxy.wire.compression import MalformedBatch, decompress
from fencepost_proxy.wire.primitives import (
    Malformed,
    read_varint,
    read_varlong,
)

#: Limit on records per batch and on record headers per scan. Each costs CPU time: 14 million records of 7 bytes are
#: only 145 KB with gzip, but would take a minute.
RECORDS_MAX = 1_000_000
SMALL_BYTES = 1 << 20
NO_TIMESTAMP = -1


class Effort:
    """Budget for reading the batches of a request: decompressed bytes, and steps.

    A record or a record header costs one step, a batch `BATCH_STEPS`.
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


def too_many(what: str, limit: int) -> LimitError:
    return LimitError(f"{what} in a record batch exceed the limit of {limit} (send smaller batches)")


def payload_of(records: memoryview, header: BatchHeader, bytes_max: int) -> bytes:
    """The decompressed records section, as `bytes` because Python indexes those fastest."""
    return bytes(decompress(header.compression, records[HEADER_BYTES:], bytes_max=bytes_max))


def timestamp_of(header: BatchHeader, delta: int) -> int:
    timestamp = header.base_timestamp_ms + delta
    # Java's long would wrap, and Kafka would see another timestamp.
    if not -INT64_MAX - 1 <= timestamp <= INT64_MAX:
        raise MalformedBatch("record timestamp does not fit 64 bits")
    return timestamp


def record_start(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """End of the record at `at`, its timestamp delta, and the position of its offset delta."""
    length, at = read_varint(data, at)
    if length < 0:
        raise Malformed("negative length")
    delta, rest_at = read_varlong(data, at + 1)
    return at + length, delta, rest_at


#: Size of a record, including its length field, by the first byte of a one-byte or two-byte length. An odd byte means a
#: negative length; the entry then points beyond any batch.
ONE_BYTE_LENGTH = [1 + (byte >> 1) if byte & 1 == 0 else 1 << 40 for byte in range(0x80)]
TWO_BYTE_LENGTH = [2 + ((byte & 0x7F) >> 1) if byte & 1 == 0 else 1 << 40 for byte in range(0x100)]


def records_in(payload: bytes, count: int) -> Iterator[tuple[bytes, int, bytes]]:
    """For each record: attributes, timestamp delta, and the remaining bytes."""
    at = 0
    for _ in range(count):
        length, start = read_varint(payload, at)
        at = start + length
        if length < 0 or at > len(payload):
            raise Malformed("a record is longer than its batch")
        delta, rest_at = read_varlong(payload, start + 1)
        yield payload[start : start + 1], delta, payload[rest_at:at]


class PayloadRecords:
    """The decompressed records of a batch, for the fields that policies read. Iteration raises as `scan_batch` does."""

    __slots__ = ("_effort", "_header", "_payload")

    def __init__(self, payload: bytes | memoryview, header: BatchHeader, effort: Effort) -> None:
        self._payload = payload
        self._header = header
        self._effort = effort

    def timestamps_ms(self) -> Iterator[int]:
        payload, base_ms, at = self._payload, self._header.base_timestamp_ms, 0
        self._effort.take(0, self._header.record_count)
        for _ in range(self._header.record_count):
            at, delta, _ = record_start(payload, at)
            if at > len(payload):
                raise Malformed("longer than its batch")
            timestamp = base_ms + delta
            if timestamp != NO_TIMESTAMP:
                yield timestamp

    def keys(self) -> Iterator[bytes | None]:
        self._effort.take(0, self._header.record_count)
        return keys_in(self._payload, self._header.record_count)


def keys_in(payload: bytes | memoryview, count: int) -> Iterator[bytes | None]:
    """None for a record without a key, b"" for an empty key."""
    at = 0
    for _ in range(count):
        end, _, key_at = record_start(payload, at)
        if end > len(payload):
            raise Malformed("longer than its batch")
        _, key_at = read_varint(payload, key_at)
        length, key_at = read_varint(payload, key_at)
        if key_at + length > end:
            raise Malformed(f"invalid key length {length}")
        yield None if length < 0 else bytes(payload[key_at : key_at + length])
        at = end
    if at != len(payload):
        raise Malformed(f"{len(payload) - at} extra bytes after {count} records")
