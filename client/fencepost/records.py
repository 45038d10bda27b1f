"""Records of the log writers, and the record headers that carry the expected offset and partition count."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Headers = tuple[tuple[str, bytes], ...]

#: Topic configs in DescribeConfigs. The check configs are visible through the proxy only.
CHECK_CONFIG = "fencepost.check.expected.offsets"
COUNT_CHECK_CONFIG = "fencepost.check.partition.count"
MAX_MESSAGE_BYTES_CONFIG = "max.message.bytes"

#: Record headers of the contract.
EXPECTED_OFFSET = "fencepost-expected-offset"
WRITE_ID = "fencepost-write-id"
PARTITION_COUNT = "fencepost-partition-count"

_WRITE_ID_BYTES = 16
_BATCH_OVERHEAD_BYTES = 61
# Length, attributes, timestamp delta, offset delta, key length, value length, header count: longest varints.
_RECORD_OVERHEAD_BYTES = 5 + 1 + 10 + 5 + 5 + 5 + 5
_HEADER_OVERHEAD_BYTES = 5 + 5


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append. `timestamp_ms`: Unix milliseconds, None for now. Raises ValueError without key and value.

    A checked topic refuses old timestamps (INVALID_TIMESTAMP): put the event time into the value or a header.
    """

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None

    def __post_init__(self) -> None:
        if self.value is None and self.key is None:
            raise ValueError("a record needs a key or a value")


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record read from the log, including the contract's headers. `timestamp_ms`: Unix milliseconds."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


def timestamped_now(records: Sequence[Record]) -> list[Record]:
    """`records`, with the current time where the timestamp is missing: a retry must equal the first attempt."""
    now_ms = int(time.time() * 1000)
    return [replace(r, timestamp_ms=now_ms) if r.timestamp_ms is None else r for r in records]


def new_write_id() -> bytes:
    """16 random bytes that identify one write, so that a retry is recognized while the log keeps the record."""
    return secrets.token_bytes(_WRITE_ID_BYTES)


def binding_of(topic: str, partition: int, cluster_id: str | None) -> bytes:
    """What follows an expected offset: where it counts. Applications copy headers to other topics and clusters."""
    return f"@{topic}/{partition}{'' if cluster_id is None else f'@{cluster_id}'}".encode()


def stated_count(count: int, topic: str, cluster_id: str | None) -> tuple[str, bytes]:
    """The header of a partition count, and where it counts."""
    return PARTITION_COUNT, f"{count}@{topic}{'' if cluster_id is None else f'@{cluster_id}'}".encode()


def own_headers(headers: Iterable[tuple[str, Any]], *names: str) -> list[tuple[str, Any]]:
    """`headers` without those of a record that was read: statements with a binding, and its write id.

    Raises ValueError if one of `names` is left, which the caller sets (the proxy refuses repeated headers).
    """
    result = list(headers)
    copied = {name for name, value in result if _is_copied(name, value)}
    if copied:
        result = [
            (name, value)
            for name, value in result
            if not _is_copied(name, value) and not (name == WRITE_ID and EXPECTED_OFFSET in copied)
        ]
    for name, _ in result:
        if name in names:
            raise ValueError(f"header {name!r} is set by this producer (remove it from headers)")
    return result


def _is_copied(name: str, value: Any) -> bool:
    return name in (EXPECTED_OFFSET, PARTITION_COUNT) and isinstance(value, bytes) and b"@" in value


def unstated_headers(headers: Iterable[tuple[str, Any]], expected_offset: int) -> list[tuple[str, Any]]:
    """The caller's own headers of a conditional append. Raises ValueError if they have an expected offset or a write
    id, or if the offset is negative or not an int.
    """
    if isinstance(expected_offset, bool) or not isinstance(expected_offset, int) or expected_offset < 0:
        raise ValueError(f"expected_offset={expected_offset!r} is not an offset (pass an int >= 0)")
    return own_headers(headers, EXPECTED_OFFSET, WRITE_ID)


def conditional_headers(
    headers: Iterable[tuple[str, Any]], expected_offset: int, write_id: bytes, binding: bytes
) -> list[tuple[str, Any]]:
    """`unstated_headers`, plus the expected offset with its binding and the write id."""
    result = unstated_headers(headers, expected_offset)
    result.append((EXPECTED_OFFSET, b"%d%b" % (expected_offset, binding)))
    result.append((WRITE_ID, write_id))
    return result


def write_id_of(record: LogRecord) -> bytes | None:
    """The `fencepost-write-id` of a record, None if it has none."""
    return next((value for name, value in record.headers if name == WRITE_ID), None)


def batch_bytes_max(records: Sequence[Record], binding: bytes) -> int:
    """Upper bound in bytes of an uncompressed v2 batch of `records`, including the contract's headers."""
    ours = len(EXPECTED_OFFSET) + 20 + len(binding) + len(WRITE_ID) + _WRITE_ID_BYTES + 2 * _HEADER_OVERHEAD_BYTES
    return _BATCH_OVERHEAD_BYTES + sum(
        _RECORD_OVERHEAD_BYTES
        + ours
        + len(record.key or b"")
        + len(record.value or b"")
        + sum(_HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value or b"") for name, value in record.headers)
        for record in records
    )
