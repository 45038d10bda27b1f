"""One transaction that appends to several partitions, each where it was expected to end: the decisions, without I/O.

Its appends are sent one after the other, in the order of topic and partition, which is the same for all writers. Who
has appended to a partition owns it until its marker is there, and is refused at the next one if another has that
(TRANSACTION_CONFLICT). The one at the last of the contested partitions never is, so no two are refused for each other.

How it ends:

- an append was refused, or not answered in time: no commit was sent, so nothing will ever be visible. Aborted;
- the commit was answered: committed. Or refused by the proxy: nothing committed, aborted;
- whether it was answered is not known, or the client library died of the answer. Then a new producer with the same
  transactional id is started: the coordinator completes a commit that it has begun, aborts anything else, and answers
  when the markers are there. After that the log tells: a record with this write's `write-id` where it was expected,
  read committed, or none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from fencepost._appending import Sight
from fencepost._checks import TopicFacts
from fencepost._log_writer import stamped_now
from fencepost._refusals import POLICY_VIOLATION
from fencepost.errors import (
    FencepostError,
    OffsetMismatch,
    OffsetViolation,
    TransactionAborted,
    TransactionConflict,
    WriterFenced,
)
from fencepost.records import CHECK_CONFIG, HeaderNames, Record, conditional_headers, write_id_of

#: What a proxy answers to a commit that it refuses: UNKNOWN_PRODUCER_ID up to EndTxn v3, TRANSACTION_ABORTABLE then.
COMMIT_REFUSED = frozenset({59, 120})
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90
FENCED = frozenset({INVALID_PRODUCER_EPOCH, PRODUCER_FENCED})
#: OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID: another producer goes on.
OUT_OF_SEQUENCE = frozenset({45, 59})
REFUSED_AT_THE_END = (
    "its commit was refused: an append of it was refused, or does not lie where it was expected, or another "
    "transaction was in between"
)

Wanted = Mapping[Any, tuple[int | None, Sequence[Record]]]


@dataclass(frozen=True, slots=True)
class Part:
    """What one partition gets. `key` – as the caller names the partition; `expected` – None: wherever the log ends."""

    key: Hashable
    topic: str
    partition: int
    expected: int | None
    records: tuple[Record, ...]

    @property
    def where(self) -> tuple[str, int]:
        return self.topic, self.partition

    def headers(self, index: int, names: HeaderNames, write_id: bytes) -> list[tuple[str, bytes]]:
        """Of the `index`-th record."""
        given = self.records[index].headers
        if self.expected is None:
            return list(given)
        return conditional_headers(names, given, self.expected + index, write_id)


def parts_of(wanted: Wanted) -> list[Part]:
    """In the order in which they are sent. Raises ValueError where it cannot be one transaction with expectations."""
    parts = []
    for key, (expected, records) in wanted.items():
        topic, partition = place(key)
        if not records:
            raise ValueError(f"{topic}-{partition}: nothing to append")
        parts.append(Part(key, topic, partition, expected, tuple(stamped_now(records))))
    if all(part.expected is None for part in parts):
        raise ValueError("no partition has an expected offset: use the client library's own transactions")
    if len({part.where for part in parts}) < len(parts):
        raise ValueError("a partition is named twice")
    # Those without an expectation wait for nobody, so they come last.
    return sorted(parts, key=lambda part: (part.expected is None, part.where))


def place(key: Any) -> tuple[str, int]:
    """A (topic, partition) tuple, or any client library's TopicPartition."""
    if isinstance(key, tuple):
        topic, partition = key
        return topic, partition
    return key.topic, key.partition


def refuse_required(topic: str, facts: TopicFacts) -> None:
    """Raises ValueError: it would be refused each time."""
    if facts.required:
        raise ValueError(
            f"topic {topic!r} has {CHECK_CONFIG}=required, where nobody may write within a transaction: nothing sent. "
            f"With {CHECK_CONFIG}=true transactions may"
        )


def landed(part: Part, offset: int) -> int:
    """Raises OffsetMismatch for an append that was made elsewhere; with its transaction it is aborted."""
    if part.expected is not None and offset != part.expected:
        raise _elsewhere(part.topic, part.partition, part.expected, offset)
    return offset


def explained(
    part: Part,
    error: Exception,
    *,
    code: int | None = None,
    message: str | None = None,
    passing: bool,
    transactional_id: str,
) -> Exception:
    """What to raise for a failed append, once its transaction is aborted. `error` itself where there is nothing better.

    `code`, `message` – the server's, None where there is none. `passing` – it may be otherwise at the next try.
    """
    if isinstance(error, OffsetViolation):
        return _elsewhere(error.topic, error.partition, error.expected, error.appended_at)
    if isinstance(error, FencepostError):
        return error
    if code in FENCED:
        return WriterFenced(transactional_id)
    if code == POLICY_VIOLATION and part.expected is not None:
        return TransactionConflict(f"{part.topic}-{part.partition}: {message or 'another transaction holds it'}")
    if passing or code in OUT_OF_SEQUENCE:
        return TransactionAborted(f"{part.topic}-{part.partition}: not appended in time, at last: {error!r}")
    return error


def _elsewhere(topic: str, partition: int, expected: int, offset: int) -> OffsetMismatch:
    # That is for writers without a transaction to repair by hand; here it is aborted, so nobody will see it.
    detail = f"appended at {offset}, and aborted: a writer goes around the proxy"
    return OffsetMismatch(topic, partition, expected, None, detail=detail)


class Ended(Enum):
    COMMITTED = auto()
    ABORTED = auto()
    GONE = auto()


def settle(part: Part, write_id: bytes, sight: Sight | None, names: HeaderNames) -> Ended | None:
    """What became of the transaction; None: it has not ended, or that cannot be seen yet.

    `part` – one that has an expectation, and was acknowledged there; `sight` – read committed, so it shows nothing of
    what lies behind the beginning of an open transaction.
    """
    assert part.expected is not None
    if sight is None:
        return None
    if sight.log_start > part.expected:
        return Ended.GONE
    if sight.first is not None and sight.first.offset == part.expected:
        return Ended.COMMITTED if write_id_of(names, sight.first) == write_id else Ended.ABORTED
    # Something aborted lies there, or a marker.
    return Ended.ABORTED if sight.log_end > part.expected else None
