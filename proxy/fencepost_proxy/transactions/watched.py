"""Queries about a cluster's transactions and producers, Kafka's replies, and the report: values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fencepost_proxy.topics.transactions import NO_PARTITION
from fencepost_proxy.types import NodeId, Offset, ProducerId, TopicPartition
from fencepost_proxy.wire.schema import Message

ONGOING: Final = "Ongoing"
PREPARED: Final = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
OPEN_STATES: Final = (ONGOING, *PREPARED)

LEADERLESS_MAX: Final = 1_000
UNKNOWN_TO_COORDINATOR: Final = "unknown_to_coordinator"
NOT_LISTED: Final = "not_listed"
OVERDUE: Final = "overdue"
MARKERS_MISSING: Final = "markers_missing"
#: Why a transaction hangs, for users.
WHY: Final[Mapping[str, str]] = {
    UNKNOWN_TO_COORDINATOR: "its coordinator does not know of it: no marker will be written",
    NOT_LISTED: "no coordinator lists its producer: its transactional id expired, or the proxy lacks DESCRIBE on it",
    OVERDUE: "its coordinator knows of it, and should have aborted it by now",
    MARKERS_MISSING: "it has ended, and its markers are not written (check for partitions without a leader)",
}


# --- Kafka's replies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """One transactional id, as listed by its coordinator."""

    transactional_id: str
    producer_id: ProducerId
    state: str


@dataclass(frozen=True, slots=True)
class Described:
    """`started_at_ms`: below 0 if no transaction is open. `partitions`: those that still need a marker."""

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: int
    state: str
    timeout_ms: int
    started_at_ms: int
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class OpenInLog:
    """An open transaction at a partition's leader. `last_timestamp_ms`: of its producer's last batch there."""

    producer_id: ProducerId
    producer_epoch: int
    coordinator_epoch: int
    start_offset: Offset
    last_timestamp_ms: int


def abort_marker(tp: TopicPartition, opened: OpenInLog) -> Message:
    """The WriteTxnMarkers request for one partition."""
    marker = Message(
        producer_id=opened.producer_id,
        producer_epoch=opened.producer_epoch,
        transaction_result=False,
        topics=[Message(name=tp.topic, partition_indexes=[tp.partition])],
        coordinator_epoch=max(opened.coordinator_epoch, 0),
    )
    return Message(markers=[marker])


def marker_probe(topic: str) -> tuple[TopicPartition, OpenInLog]:
    """For `abort_marker`: Kafka's answer shows whether the sender may write transaction markers.

    The partition does not exist. Kafka checks the permission first (KafkaApis.handleWriteTxnMarkersRequest).
    """
    return TopicPartition(topic, NO_PARTITION), OpenInLog(ProducerId(0), 0, 0, Offset(-1), -1)


@dataclass(frozen=True, slots=True)
class PartitionProbe:
    high_watermark: Offset
    last_stable_offset: Offset
    producers: int
    open: tuple[OpenInLog, ...] = ()

    @property
    def lag(self) -> int:
        return max(0, self.high_watermark - self.last_stable_offset)


@dataclass(frozen=True, slots=True)
class Leaders:
    """`coordinators`: every partition of `__transaction_state` has a leader, or the topic does not exist yet."""

    by_node: Mapping[NodeId, Sequence[TopicPartition]]
    coordinators: bool = True


# --- queries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """The reply is `Listing`. `states` empty: all; `producer_ids` empty: all."""

    node_id: NodeId
    states: tuple[str, ...] = ()
    producer_ids: tuple[ProducerId, ...] = ()


@dataclass(frozen=True, slots=True)
class DescribeTransactions:
    """The reply is `Descriptions`, without unknown ids."""

    node_id: NodeId
    transactional_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FindLeaders:
    """Leaders of all partitions of the cluster, from any broker. The reply is `Leaders`."""


@dataclass(frozen=True, slots=True)
class ProbePartitions:
    """The reply is `PartitionProbes`."""

    node_id: NodeId
    partitions: tuple[TopicPartition, ...]


Query = ListTransactions | DescribeTransactions | FindLeaders | ProbePartitions


@dataclass(frozen=True, slots=True)
class Listing:
    transactions: Sequence[Listed]


@dataclass(frozen=True, slots=True)
class Descriptions:
    transactions: Sequence[Described]


@dataclass(frozen=True, slots=True)
class PartitionProbes:
    """A probe of each partition, or Kafka's error code."""

    found: Mapping[TopicPartition, PartitionProbe | int]


Answer = Listing | Descriptions | Leaders | PartitionProbes


# --- report ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """`age_seconds`: by the coordinator's clock and ours, None until described. `coordinator`: broker id.

    `stuck`: OVERDUE or MARKERS_MISSING. `partitions`: their number; `first_partitions`: the first of them.
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
    """Open in a partition's log, and no coordinator will end it. `transactional_id`: of its producer, if known.

    `observed_seconds`: since this process first saw it. `why`: NOT_LISTED if the id is unknown. Kafka silently omits
    ids that the proxy may not describe, so such a transaction need not hang.
    """

    topic: str
    partition: int
    start_offset: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    last_timestamp_ms: int
    observed_seconds: float
    transactional_id: str | None
    why: str


@dataclass(frozen=True, slots=True)
class LaggingPartition:
    """A partition with records that read-committed consumers cannot read. `seconds`: since its LSO last moved."""

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
    """The whole report; lists are cut to the worst entries. `hanging_by_reason` counts those in `hanging` and `open`.

    `producer_ids`: sum over the partitions, that is, entries in Kafka's map of producers and sequences.
    `sweep_seconds`, `sweep_age_seconds`: duration of the last complete sweep, and time since its end; None before.
    `problem`: why something is unknown.
    `leaderless`: partitions without a leader at the start of the last sweep, at most `LEADERLESS_MAX`.
    """

    producer_ids: int
    partitions: int
    partitions_unreadable: int
    partitions_left_out: int
    lagging_partitions: int
    lag_total: int
    lag_max: int
    lag_seconds_max: float
    transactional_ids: Mapping[str, int]
    open_transactions: int
    oldest_seconds: float
    hanging_by_reason: Mapping[str, int]
    open: tuple[OpenTransaction, ...]
    hanging: tuple[HangingTransaction, ...]
    lagging: tuple[LaggingPartition, ...]
    most_producers: tuple[PartitionProducers, ...]
    sweep_seconds: float | None
    sweep_age_seconds: float | None
    requests: int
    problem: str | None
    leaderless: tuple[TopicPartition, ...] = ()
