"""Decisions of a transaction that appends to several partitions at expected offsets, without I/O.

Appends are sent one at a time, ordered by topic and partition, so all writers use the same order. A transaction that
appended to a partition blocks others there until its marker is written; they are refused (TRANSACTION_CONFLICT). The
transaction that got the last contested partition is never refused, so two transactions never refuse each other.

Outcomes:

- an append was refused or timed out: no commit was sent, so no record becomes visible. Aborted;
- the commit was acknowledged: committed. The proxy refused the commit: aborted;
- the response to the commit is missing, or the client library failed on it. A new producer with the same transactional
  id is started. The coordinator completes a commit in progress or aborts the transaction, and responds when the
  markers are written. A committed read at the expected offset then decides: committed if it returns a record with this
  write's `fencepost-write-id`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from fencepost._appending import Observation
from fencepost._checks import TopicFacts
from fencepost.errors import (
    FencepostError,
    OffsetMismatchError,
    OffsetViolationError,
    TransactionAbortedError,
    WriterFencedError,
)
from fencepost.records import CHECK_CONFIG, Record, binding_of, conditional_headers, timestamped_now, write_id_of

#: The proxy's error for a refused commit: UNKNOWN_PRODUCER_ID up to EndTxn v3, TRANSACTION_ABORTABLE later.
COMMIT_REFUSED = frozenset({59, 120})
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90
FENCED = frozenset({INVALID_PRODUCER_EPOCH, PRODUCER_FENCED})
#: OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID: a new producer can continue.
OUT_OF_SEQUENCE = frozenset({45, 59})
COMMIT_REFUSED_MESSAGE = (
    "commit refused: one of its appends was refused or is not at its expected offset, or another transaction came in "
    "between"
)

RequestedAppends = Mapping[Any, tuple[int | None, Sequence[Record]]]


@dataclass(frozen=True, slots=True)
class Part:
    """One partition's records. `key`: the caller's partition key; `expected`: None to append without a check."""

    key: Hashable
    topic: str
    partition: int
    expected: int | None
    records: tuple[Record, ...]

    @property
    def where(self) -> tuple[str, int]:
        return self.topic, self.partition

    def headers(self, index: int, write_id: bytes, cluster_id: str | None) -> list[tuple[str, bytes]]:
        """The headers of record `index`."""
        given = self.records[index].headers
        if self.expected is None:
            return list(given)
        where = binding_of(self.topic, self.partition, cluster_id)
        return conditional_headers(given, self.expected + index, write_id, where)


def parts_of(requested: RequestedAppends) -> list[Part]:
    """The parts in send order. Raises ValueError if they cannot form one conditional transaction."""
    parts = []
    for key, (expected, records) in requested.items():
        topic, partition = topic_partition(key)
        if not records:
            raise ValueError(f"{topic}-{partition}: nothing to append")
        parts.append(Part(key, topic, partition, expected, tuple(timestamped_now(records))))
    if all(part.expected is None for part in parts):
        raise ValueError("no partition has an expected offset (use the client library's own transactions)")
    if len({part.where for part in parts}) < len(parts):
        raise ValueError("a partition is named twice")
    # Parts without an expected offset never wait for other writers, so they come last.
    return sorted(parts, key=lambda part: (part.expected is None, part.where))


def topic_partition(key: Any) -> tuple[str, int]:
    """(topic, partition) of a tuple or of any client library's TopicPartition."""
    if isinstance(key, tuple):
        topic, partition = key
        return topic, partition
    return key.topic, key.partition


def refuse_required(topic: str, facts: TopicFacts) -> None:
    """Raises ValueError for a topic that refuses every transactional append."""
    if facts.required:
        raise ValueError(
            f"topic {topic!r} has {CHECK_CONFIG}=required, which refuses transactions; nothing was sent "
            f"(set {CHECK_CONFIG}=true to allow them)"
        )


def appended_batch(part: Part, offset: int) -> int:
    """Raises OffsetMismatchError if the append got another offset than expected; the transaction is then aborted."""
    if part.expected is not None and offset != part.expected:
        raise _elsewhere(part.topic, part.partition, part.expected, offset)
    return offset


def explained(
    part: Part,
    error: Exception,
    *,
    code: int | None = None,
    retriable: bool,
    transactional_id: str,
) -> Exception:
    """The error to raise for a failed append after the abort; `error` itself if no better one fits.

    `code`: the server's, None if there is none. `retriable`: the next attempt may succeed.
    """
    if isinstance(error, OffsetViolationError):
        return _elsewhere(error.topic, error.partition, error.expected, error.appended_at)
    if isinstance(error, FencepostError):
        return error
    if code in FENCED:
        return WriterFencedError(transactional_id)
    if retriable or code in OUT_OF_SEQUENCE:
        return TransactionAbortedError(f"{part.topic}-{part.partition}: not appended in time, last error: {error!r}")
    return error


def _elsewhere(topic: str, partition: int, expected: int, offset: int) -> OffsetMismatchError:
    # Not an OffsetViolationError: the abort hides the record, so nothing needs repair.
    detail = f"appended at {offset}, and aborted: a writer bypasses the proxy"
    return OffsetMismatchError(topic, partition, expected, None, detail=detail)


class Ended(Enum):
    COMMITTED = auto()
    ABORTED = auto()
    DELETED = auto()


def resolve(part: Part, write_id: bytes, observation: Observation | None) -> Ended | None:
    """The outcome of the transaction; None if it has not ended, or its end is not visible yet.

    `part`: a part with an expected offset, acknowledged there. `observation`: a committed read, which shows nothing
    after the start of an open transaction.
    """
    assert part.expected is not None
    if observation is None:
        return None
    if observation.log_start > part.expected:
        return Ended.DELETED
    if observation.first is not None and observation.first.offset == part.expected:
        return Ended.COMMITTED if write_id_of(observation.first) == write_id else Ended.ABORTED
    # An aborted record or a marker is there.
    return Ended.ABORTED if observation.log_end > part.expected else None
