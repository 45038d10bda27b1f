"""Records as this library's log writers take and give them, and the headers by which a write says what it expects."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Headers = tuple[tuple[str, bytes], ...]

#: Topic configs as DescribeConfigs names them. The checks exist only through the proxy.
CHECK_CONFIG = "check.expected.offsets"
COUNT_CHECK_CONFIG = "check.partition.count"
MAX_MESSAGE_BYTES_CONFIG = "max.message.bytes"

_WRITE_ID_BYTES = 16
_BATCH_OVERHEAD_BYTES = 61
# Length, attributes, timestamp delta, offset delta, key length, value length, header count: varints at their longest.
_RECORD_OVERHEAD_BYTES = 5 + 1 + 10 + 5 + 5 + 5 + 5
_HEADER_OVERHEAD_BYTES = 5 + 5


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """The record headers of the contract; differ only where the proxy's configuration renames them."""

    expected_offset: str = "expected-offset"
    write_id: str = "write-id"
    partition_count: str = "partition-count"


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append. `timestamp_ms`: Unix milliseconds; None is now.

    On a checked topic old timestamps are refused (INVALID_TIMESTAMP): put the event time into the value or a header.
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
    """A record as it lies in the log, headers of the contract included."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


def new_write_id() -> bytes:
    """16 random bytes: names one write, so that a retry of it is known as such for as long as the log keeps it."""
    return secrets.token_bytes(_WRITE_ID_BYTES)


def conditional_headers(
    names: HeaderNames, headers: Iterable[tuple[str, bytes]], expected_offset: int, write_id: bytes
) -> list[tuple[str, bytes]]:
    """`headers` with the contract's added.

    Raises ValueError where the caller sets one of them by hand (a repeated header is refused by the proxy), or for an
    offset that no record can have.
    """
    if isinstance(expected_offset, bool) or not isinstance(expected_offset, int) or expected_offset < 0:
        raise ValueError(f"expected_offset={expected_offset!r} is not an offset: give an int of 0 or more")
    result = list(headers)
    for name, _ in result:
        if name in (names.expected_offset, names.write_id):
            raise ValueError(f"header {name!r} is set by expected_offset= and write_id=; leave it out of headers")
    result.append((names.expected_offset, b"%d" % expected_offset))
    result.append((names.write_id, write_id))
    return result


def write_id_of(names: HeaderNames, record: LogRecord) -> bytes | None:
    """The `write-id` of a record, None if it has none."""
    return next((value for name, value in record.headers if name == names.write_id), None)


def batch_bytes_max(names: HeaderNames, records: Sequence[Record]) -> int:
    """An upper bound of the size of the v2 batch that holds `records`, uncompressed, contract headers included."""
    ours = len(names.expected_offset) + 20 + len(names.write_id) + _WRITE_ID_BYTES + 2 * _HEADER_OVERHEAD_BYTES
    return _BATCH_OVERHEAD_BYTES + sum(
        _RECORD_OVERHEAD_BYTES
        + ours
        + len(record.key or b"")
        + len(record.value or b"")
        + sum(_HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value or b"") for name, value in record.headers)
        for record in records
    )
