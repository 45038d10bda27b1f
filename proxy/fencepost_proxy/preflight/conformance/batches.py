"""Record batches for cases: made exactly as stated, wrong fields included, and read back from a log."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import crc32c

from fencepost_proxy.wire.batch import HEADER_BYTES, BatchHeader, split_batches
from fencepost_proxy.wire.primitives import read_varint, write_varlong
from fencepost_proxy.wire.records import payload_of, records_in

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_TRANSACTIONAL: Final = 0x10
_PAYLOAD_BYTES_MAX: Final = 1 << 20
Headers = Sequence[tuple[bytes, bytes]]


class Producer(NamedTuple):
    """The producer fields of a batch."""

    id: int = -1
    epoch: int = -1
    sequence: int = -1


NO_PRODUCER: Final = Producer()


class Logged(NamedTuple):
    """One batch in Kafka's log. `payload`: its records, decompressed. `values`: None for each control record."""

    base_offset: int
    producer_id: int
    producer_epoch: int
    is_control: bool
    attributes: int
    values: tuple[bytes | None, ...]
    payload: bytes


def make_batch(
    values: Sequence[bytes],
    *,
    timestamp_ms: int,
    producer: Producer = NO_PRODUCER,
    transactional: bool = False,
    base_offset: int = 0,
    attributes: int = 0,
    headers: Headers = (),
) -> bytes:
    """One uncompressed v2 batch. `headers` are those of each record."""
    payload = b"".join(_record(offset, value, headers) for offset, value in enumerate(values))
    attributes |= _TRANSACTIONAL if transactional else 0
    length, last = HEADER_BYTES - 12 + len(payload), len(values) - 1
    times = timestamp_ms, timestamp_ms
    out = bytearray(_HEADER.pack(base_offset, length, -1, 2, 0, attributes, last, *times, *producer, len(values)))
    out += payload
    sign(out)
    return bytes(out)


def sign(records: bytearray) -> None:
    """Set the right CRC in a changed batch."""
    struct.pack_into(">I", records, 17, crc32c.crc32c(bytes(records[21:])))


def read_batches(data: bytes) -> Iterator[Logged]:
    """The complete batches of a Fetch response."""
    for header, records in split_batches(memoryview(data)):
        payload = payload_of(records, header, _PAYLOAD_BYTES_MAX)
        values = (None,) * header.record_count if header.is_control else _values(payload, header)
        identity = header.base_offset, header.producer_id, header.producer_epoch
        yield Logged(*identity, header.is_control, header.attributes, values, payload)


def _record(offset_delta: int, value: bytes, headers: Headers) -> bytes:
    body = bytearray(b"\0")
    for number in (0, offset_delta, -1, len(value)):  # timestamp delta, offset delta, no key, value
        write_varlong(body, number)
    body += value
    write_varlong(body, len(headers))
    for header in headers:
        for part in header:
            write_varlong(body, len(part))
            body += part
    out = bytearray()
    write_varlong(out, len(body))
    return bytes(out + body)


def _values(payload: bytes, header: BatchHeader) -> tuple[bytes | None, ...]:
    return tuple(_value(rest) for _, _, rest in records_in(payload, header.record_count))


def _value(rest: bytes) -> bytes | None:
    """`rest`: a record from its offset delta on."""
    _, at = read_varint(rest, 0)
    key_length, at = read_varint(rest, at)
    value_length, at = read_varint(rest, at + max(key_length, 0))
    return None if value_length < 0 else rest[at : at + value_length]
