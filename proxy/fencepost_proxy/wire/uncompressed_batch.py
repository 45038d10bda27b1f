"""Record batches of the state topic: keys and values, without headers, compression or producer.

`batch.py` describes the layout, and reads batches of clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from fencepost_proxy.types import Offset
from fencepost_proxy.wire.batch import HEADER_BYTES, MAGIC, BatchHeader, verify_crc
from fencepost_proxy.wire.checksum import crc32c
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.primitives import MALFORMED, read_varint, read_varlong, reason_of, write_varlong

_BEFORE_CRC: Final = Struct(">qiib")  # base offset, length, partition leader epoch, magic
_AFTER_CRC: Final = Struct(">hiqqqhii")
_UINT32: Final = Struct(">I")
_LENGTH_ENDS: Final = 12


class StateTopicRecord(NamedTuple):
    offset: Offset
    key: bytes | None
    value: bytes | None


def encode_uncompressed_batch(records: Sequence[tuple[bytes | None, bytes | None]], timestamp_ms: int) -> bytes:
    """Encodes (key, value) pairs with one timestamp (Unix ms) as a batch of a Produce request."""
    payload = bytearray()
    for delta, (key, value) in enumerate(records):
        record = bytearray(1)  # attributes: none
        write_varlong(record, 0)
        write_varlong(record, delta)
        _write_bytes(record, key)
        _write_bytes(record, value)
        write_varlong(record, 0)
        write_varlong(payload, len(record))
        payload += record
    count = len(records)
    covered = _AFTER_CRC.pack(0, count - 1, timestamp_ms, timestamp_ms, -1, -1, -1, count) + payload
    length = _BEFORE_CRC.size + _UINT32.size + len(covered) - _LENGTH_ENDS
    return _BEFORE_CRC.pack(0, length, -1, MAGIC) + _UINT32.pack(crc32c(covered)) + covered


def read_uncompressed_records(header: BatchHeader, batch: memoryview) -> Iterator[StateTopicRecord]:
    """The records of one complete batch with their log offsets. Record headers are skipped.

    Raises `MalformedBatch` for a compressed batch, a wrong CRC and malformed records.
    """
    if header.compression:
        raise MalformedBatch("compressed batch")
    if not verify_crc(batch):
        raise MalformedBatch("wrong CRC")
    data = bytes(batch[HEADER_BYTES:])
    at = 0
    try:
        for _ in range(header.record_count):
            length, start = read_varint(data, at)
            at = start + length
            if length < 0 or at > len(data):
                raise MalformedBatch("a record is longer than its batch")
            _, pos = read_varlong(data, start + 1)
            delta, pos = read_varint(data, pos)
            key, pos = _read_bytes(data, pos)
            value, pos = _read_bytes(data, pos)
            yield StateTopicRecord(Offset(header.base_offset + delta), key, value)
    except MalformedBatch:
        raise
    except MALFORMED as error:
        raise MalformedBatch(reason_of(error)) from error


def _write_bytes(out: bytearray, value: bytes | None) -> None:
    write_varlong(out, -1 if value is None else len(value))
    out += value or b""


def _read_bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    length, at = read_varint(data, at)
    if length < 0:
        return None, at
    if at + length > len(data):
        raise MalformedBatch("a key or value is longer than its batch")
    return data[at : at + length], at + length
