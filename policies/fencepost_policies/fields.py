"""What checks read of a batch besides its header: Fencepost's record headers, and fields computed from its records.

To let a policy read something new, add a `Field`. The proxy computes it for topics with a policy that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar

V = TypeVar("V")


class RecordHeader(Enum):
    """A record header of Fencepost. `Append` has its value."""

    EXPECTED_OFFSET = "fencepost-expected-offset"
    PARTITION_COUNT = "fencepost-partition-count"
    WRITE_ID = "fencepost-write-id"


class Records(Protocol):
    """The records of one batch, in order. Each call walks over them, as far as its result is used."""

    def timestamps_ms(self) -> Iterator[int]:
        """Unix milliseconds, of the records that have a timestamp."""

    def keys(self) -> Iterator[bytes | None]:
        """None for a record without a key, b"" for an empty key."""


@dataclass(frozen=True, slots=True, eq=False)
class Field(Generic[V]):
    """A value of a batch: `Append.field` returns what `compute` made of the records."""

    compute: Callable[[Records], V]


Reads = RecordHeader | Field[Any]

#: None if no record has a timestamp.
OLDEST_TIMESTAMP_MS: Final[Field[int | None]] = Field(lambda records: min(records.timestamps_ms(), default=None))
