"""What is asked about a cluster's transactions and producers, what Kafka says, and what is told of it: values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fencepost_proxy.types import NodeId, Offset, ProducerId, TopicPartition

ONGOING: Final = "Ongoing"
PREPARED: Final = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
OPEN_STATES: Final = (ONGOING, *PREPARED)

UNKNOWN_TO_COORDINATOR: Final = "unknown_to_coordinator"
NOT_LISTED: Final = "not_listed"
OVERDUE: Final = "overdue"
MARKERS_MISSING: Final = "markers_missing"
#: Why a transaction hangs, and what that means.
WHY: Final[Mapping[str, str]] = {
    UNKNOWN_TO_COORDINATOR: "its coordinator does not know of it: no marker will come by itself",
    NOT_LISTED: "no coordinator lists its producer: its transactional id has expired, or DESCRIBE on it is missing",
    OVERDUE: "its coordinator knows of it, and should have aborted it by now",
    MARKERS_MISSING: "it has ended, and its markers are not written: look for partitions without a leader",
}


# --- what Kafka says ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """One transactional id, as its coordinator lists it."""

    transactional_id: str
    producer_id: ProducerId
    state: str


@dataclass(frozen=True, slots=True)
class Described:
    """`started_at_ms` is below 0 where none is open. `partitions` – whose markers are still to be written."""

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: int
    state: str
    timeout_ms: int
    started_at_ms: int
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class OpenInLog:
    """A transaction that a partition's leader has open. `last_timestamp_ms` – of its producer's last batch there."""

    producer_id: ProducerId
    producer_epoch: int
    coordinator_epoch: int
    start_offset: Offset
    last_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Look:
    high_watermark: Offset
    last_stable_offset: Offset
    producers: int
    open: tuple[OpenInLog, ...] = ()

    @property
    def lag(self) -> int:
        return max(0, self.high_watermark - self.last_stable_offset)


@dataclass(frozen=True, slots=True)
class Leaders:
    """`coordinators` – whether every partition of `__transaction_state` has one, or there are none yet."""

    by_node: Mapping[NodeId, Sequence[TopicPartition]]
    coordinators: bool = True


# --- what is asked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """Answered by a `Listing`. `states` empty: all; `producer_ids` empty: all."""

    node_id: NodeId
    states: tuple[str, ...] = ()
    producer_ids: tuple[ProducerId, ...] = ()


@dataclass(frozen=True, slots=True)
class DescribeTransactions:
    """Answered by `Descriptions`; those that are not there are left out."""

    node_id: NodeId
    transactional_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FindLeaders:
    """Of all partitions of the cluster; of any broker. Answered by `Leaders`."""


@dataclass(frozen=True, slots=True)
class LookAt:
    """Answered by `Looks`."""

    node_id: NodeId
    partitions: tuple[TopicPartition, ...]


Question = ListTransactions | DescribeTransactions | FindLeaders | LookAt


@dataclass(frozen=True, slots=True)
class Listing:
    transactions: Sequence[Listed]


@dataclass(frozen=True, slots=True)
class Descriptions:
    transactions: Sequence[Described]


@dataclass(frozen=True, slots=True)
class Looks:
    """A look at each partition, or Kafka's error code."""

    found: Mapping[TopicPartition, Look | int]


Answer = Listing | Descriptions | Leaders | Looks


# --- what is told ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """`age_seconds` – by the coordinator's clock and ours, None before it was described. `coordinator` – broker id.

    `stuck` – OVERDUE or MARKERS_MISSING. `partitions` – so many, the first of which are `first_partitions`.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int | None
    state: str
    coordinator: int
    age_seconds: float | None
    timeout_ms: int | None
    partitions: int | None
    first_partitions: tuple[str, ...]
    stuck: str | None


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """Open in a partition's log, and no coordinator will end it. `transactional_id` – whose producer it was, if known.

    `seen_seconds` – since when this process sees it. `why` – NOT_LISTED where the id is not known: Kafka leaves out,
    without a word, what the asker may not describe, so that need not hang at all.
    """

    topic: str
    partition: int
    start_offset: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    last_timestamp_ms: int
    seen_seconds: float
    transactional_id: str | None
    why: str


@dataclass(frozen=True, slots=True)
class PartitionBehind:
    """A partition whose committed readers cannot read all that is there. `seconds` – since when it stands there."""

    topic: str
    partition: int
    last_stable_offset: int
    high_watermark: int
    lag: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PartitionProducers:
    topic: str
    partition: int
    producer_ids: int


@dataclass(frozen=True, slots=True)
class TransactionsReport:
    """All of it, lists cut to so many of the worst. `hanging_by_reason` counts what `hanging` and `open` have of each.

    `producer_ids` – the sum over the partitions: entries of Kafka's map of producers and sequences.
    `sweep_seconds`, `sweep_age_seconds` – how long the last whole sweep took, and how long ago it ended; None before.
    `problem` – why something is not known.
    """

    producer_ids: int
    partitions: int
    partitions_unreadable: int
    partitions_left_out: int
    partitions_behind: int
    lag_total: int
    lag_max: int
    behind_seconds_max: float
    transactional_ids: Mapping[str, int]
    open_transactions: int
    oldest_seconds: float
    hanging_by_reason: Mapping[str, int]
    open: tuple[OpenTransaction, ...]
    hanging: tuple[HangingTransaction, ...]
    behind: tuple[PartitionBehind, ...]
    most_producers: tuple[PartitionProducers, ...]
    sweep_seconds: float | None
    sweep_age_seconds: float | None
    requests: int
    problem: str | None
