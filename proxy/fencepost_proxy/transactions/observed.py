"""What the monitor of a cluster's transactions knows: partitions by their leaders' logs, and open transactions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Final

from fencepost_proxy.transactions.watched import (
    MARKERS_MISSING,
    NOT_LISTED,
    ONGOING,
    OPEN_STATES,
    OVERDUE,
    PREPARED,
    UNKNOWN_TO_COORDINATOR,
    Described,
    HangingTransaction,
    LaggingPartition,
    Leaders,
    Listed,
    OpenInLog,
    OpenTransaction,
    PartitionProbe,
    PartitionProducers,
)
from fencepost_proxy.types import NodeId, Offset, ProducerId, TopicPartition

PARTITIONS_AT_ONCE: Final = 100
#: A target, by the partitions' last counts: decoding an answer blocks the event loop.
PRODUCERS_AT_ONCE: Final = 2_000
_PRODUCERS_ASSUMED: Final = 20
INQUIRED_MAX: Final = 100
#: A coordinator checks for timed-out transactions every ten seconds.
OVERDUE_SECONDS: Final = 60.0
#: How long a description is reported; those of many open transactions are renewed in rotation.
_DESCRIBED_SECONDS: Final = 50.0
#: Open transactions in one log; the rest is not reported.
_OPEN_MAX: Final = 1_000
_ABSENCES: Final = 2
_FIRST_PARTITIONS: Final = 10

SuspectKey = tuple[TopicPartition, ProducerId, Offset]
#: A transactional id and its coordinator.
Found = tuple[Listed, NodeId]


# --- open in logs ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Suspect:
    """Open in a log. `absences`: how often no coordinator knew it, the last time at `absent_at`."""

    open: OpenInLog
    first_observed_at: float
    observed_at: float
    absences: int = 0
    absent_at: float = 0.0
    transactional_id: str | None = None

    @property
    def hanging(self) -> bool:
        return self.absences >= _ABSENCES and self.observed_at > self.absent_at


class Suspects:
    """Transactions that are open in a log; whether a coordinator knows them."""

    def __init__(self) -> None:
        self._suspects: dict[SuspectKey, _Suspect] = {}
        self._of_partition: dict[TopicPartition, set[SuspectKey]] = {}

    @property
    def partitions(self) -> Iterable[TopicPartition]:
        return self._of_partition.keys()

    def observe(self, partition: TopicPartition, opened: tuple[OpenInLog, ...], queried_at: float) -> None:
        """`opened`: all open transactions at the partition's leader."""
        before = self._of_partition.get(partition)
        if not opened and not before:
            return
        keys = set()
        for each in opened[:_OPEN_MAX]:
            key = (partition, each.producer_id, each.start_offset)
            keys.add(key)
            suspect = self._suspects.get(key)
            if suspect is None:
                self._suspects[key] = _Suspect(each, queried_at, queried_at)
            else:
                suspect.open, suspect.observed_at = each, queried_at
        for removed in (before or set()) - keys:
            del self._suspects[removed]
        if keys:
            self._of_partition[partition] = keys
        else:
            self._of_partition.pop(partition, None)

    def forget(self, partition: TopicPartition) -> None:
        for key in self._of_partition.pop(partition, ()):
            del self._suspects[key]

    def to_inquire(
        self, described: Iterable[Described], undescribed: set[ProducerId]
    ) -> tuple[list[SuspectKey], tuple[ProducerId, ...]]:
        """Those observed twice that are not `described`, and their producers. `undescribed`: producers whose open
        transaction's partitions are not known."""
        known = {(each.producer_id, partition) for each in described for partition in each.partitions}
        keys: list[SuspectKey] = []
        producer_ids: dict[ProducerId, None] = {}
        for key, suspect in self._suspects.items():
            partition, producer_id, _ = key
            if (producer_id, partition) in known:
                suspect.absences = 0
            elif producer_id not in undescribed and suspect.observed_at > suspect.first_observed_at:
                producer_ids[producer_id] = None
                if len(producer_ids) > INQUIRED_MAX:
                    break
                keys.append(key)
        return keys, tuple(islice(producer_ids, INQUIRED_MAX))

    def conclude(
        self,
        keys: Iterable[SuspectKey],
        described: Mapping[ProducerId, Described],
        listed: Mapping[ProducerId, Found],
        now: float,
    ) -> None:
        """Every coordinator was queried for the producers of `keys`; `described`, `listed`: their replies."""
        for key in keys:
            suspect = self._suspects.get(key)
            if suspect is None:
                continue
            partition, producer_id, _ = key
            at_coordinator = described.get(producer_id)
            if at_coordinator is not None and partition in at_coordinator.partitions:
                suspect.absences = 0
                continue
            found = listed.get(producer_id)
            suspect.transactional_id = None if found is None else found[0].transactional_id
            if suspect.absences < _ABSENCES:
                suspect.absences += 1
                suspect.absent_at = now

    def undecided(self, described: Iterable[Described]) -> bool:
        """Whether one is neither known to hang, nor `described` by its coordinator."""
        known = {(each.producer_id, partition) for each in described for partition in each.partitions}
        return any(
            not suspect.hanging and (producer_id, partition) not in known
            for (partition, producer_id, _), suspect in self._suspects.items()
        )

    def hanging(self, now: float) -> Iterator[HangingTransaction]:
        for (partition, _, _), suspect in self._suspects.items():
            if suspect.hanging:
                yield HangingTransaction(
                    partition.topic,
                    partition.partition,
                    suspect.open.start_offset,
                    suspect.open.producer_id,
                    suspect.open.producer_epoch,
                    suspect.open.coordinator_epoch,
                    suspect.open.last_timestamp_ms,
                    now - suspect.first_observed_at,
                    suspect.transactional_id,
                    NOT_LISTED if suspect.transactional_id is None else UNKNOWN_TO_COORDINATOR,
                )


# --- partitions -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Observed:
    probe: PartitionProbe
    lagging_since: float | None = None

    def lagging_seconds(self, now: float) -> float:
        return 0.0 if self.lagging_since is None else now - self.lagging_since


class Partitions:
    """The cluster's partitions: leaders and last probes. `left_out`: beyond `partitions_max`, not probed.

    `coordinators`: whether every partition of `__transaction_state` had a leader. `producers`: sum of their producers.
    `leaderless`: without a leader.
    """

    def __init__(self, partitions_max: int) -> None:
        self._partitions_max = partitions_max
        self._leader: dict[TopicPartition, NodeId] = {}
        self._observed: dict[TopicPartition, _Observed] = {}
        self._errors: dict[TopicPartition, int] = {}
        self._lagging: dict[TopicPartition, _Observed] = {}
        self.coordinators = False
        self.leaderless: list[TopicPartition] = []
        self.left_out = 0
        self.producers = 0
        self.suspects = Suspects()

    def __len__(self) -> int:
        return len(self._observed)

    @property
    def unreadable(self) -> int:
        return len(self._errors)

    @property
    def lagging(self) -> Iterable[TopicPartition]:
        return self._lagging.keys()

    @property
    def lags(self) -> list[int]:
        return [observed.probe.lag for observed in self._lagging.values()]

    def lagging_seconds_max(self, now: float) -> float:
        return max((each.lagging_seconds(now) for each in self._lagging.values()), default=0.0)

    def leaders_are(self, leaders: Leaders) -> dict[NodeId, list[TopicPartition]]:
        """Forget deleted partitions. Return those to probe, by leader."""
        self.coordinators = leaders.coordinators
        by_leader = {}
        left = self._partitions_max
        self.left_out = 0
        for node_id, partitions in leaders.by_node.items():
            taken = by_leader[node_id] = list(partitions[:left])
            left -= len(taken)
            self.left_out += len(partitions) - len(taken)
        self.leaderless = by_leader.get(NodeId(-1), [])
        self._leader = {partition: node_id for node_id, taken in by_leader.items() for partition in taken}
        for removed in self._observed.keys() - self._leader.keys():
            self._forget(removed)
        for removed in self._errors.keys() - self._leader.keys():
            del self._errors[removed]
        return by_leader

    def _forget(self, partition: TopicPartition) -> None:
        self.producers -= self._observed.pop(partition).probe.producers
        self._lagging.pop(partition, None)
        self.suspects.forget(partition)

    def by_leader(self, partitions: Iterable[TopicPartition]) -> dict[NodeId, list[TopicPartition]]:
        found: dict[NodeId, list[TopicPartition]] = {}
        for partition in partitions:
            node_id = self._leader.get(partition)
            if node_id is not None:
                found.setdefault(node_id, []).append(partition)
        return found

    def chunk(self, partitions: Iterable[TopicPartition]) -> tuple[TopicPartition, ...]:
        """As many of the first partitions as one query may probe."""
        chunk: list[TopicPartition] = []
        producers = 0
        for partition in islice(partitions, PARTITIONS_AT_ONCE):
            observed = self._observed.get(partition)
            producers += _PRODUCERS_ASSUMED if observed is None else observed.probe.producers
            if chunk and producers > PRODUCERS_AT_ONCE:
                break
            chunk.append(partition)
        return tuple(chunk)

    def probed(self, partition: TopicPartition, probe: PartitionProbe | int, queried_at: float, now: float) -> None:
        """`probe`: or Kafka's error code."""
        if partition not in self._leader:
            return  # deleted meanwhile
        if isinstance(probe, int):
            self._errors[partition] = probe
            return
        self._errors.pop(partition, None)
        observed = self._observed.get(partition)
        if observed is None:
            observed = self._observed[partition] = _Observed(probe)
            self.producers += probe.producers
        else:
            self.producers += probe.producers - observed.probe.producers
        moved = observed.probe.last_stable_offset != probe.last_stable_offset
        observed.probe = probe
        if not probe.lag:
            observed.lagging_since = None
            self._lagging.pop(partition, None)
        else:
            self._lagging[partition] = observed
            if moved or observed.lagging_since is None:
                observed.lagging_since = now
        self.suspects.observe(partition, probe.open, queried_at)

    def most_lagging(self, shown_max: int, now: float) -> Iterator[LaggingPartition]:
        for partition, observed in nlargest(shown_max, self._lagging.items(), key=lambda item: item[1].probe.lag):
            yield LaggingPartition(
                partition.topic,
                partition.partition,
                observed.probe.last_stable_offset,
                observed.probe.high_watermark,
                observed.probe.lag,
                observed.lagging_seconds(now),
            )

    def most_producers(self, shown_max: int) -> Iterator[PartitionProducers]:
        most = nlargest(shown_max, self._observed.items(), key=lambda item: item[1].probe.producers)
        for partition, observed in most:
            if observed.probe.producers:
                yield PartitionProducers(partition.topic, partition.partition, observed.probe.producers)


# --- open at coordinators -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """`since`: when it was first listed in this state, by our clock."""

    listed: Listed
    node_id: NodeId
    since: float
    described: Described | None = None
    described_at: float = float("-inf")

    @property
    def started_at_ms(self) -> float:
        """When it began, as last described; the future if that is not known."""
        described = self.described
        return float("inf") if described is None or described.started_at_ms < 0 else described.started_at_ms

    def fresh(self, now: float) -> Described | None:
        """An older description may be another transaction's: an id's next transaction may not be visible here."""
        return self.described if now - self.described_at < _DESCRIBED_SECONDS else None


class OpenTransactions:
    """Open transactions of the last round, by transactional id."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    @property
    def described(self) -> Iterator[Described]:
        return (each.described for each in self._open.values() if each.described is not None)

    def in_order_of_description(self, listed: Mapping[str, Found], oldest_first: int) -> list[tuple[str, NodeId]]:
        """First the oldest, whose age is a metric, then others that were open in the last round, longest not described
        first: most of the rest end before they can be described."""
        again: list[tuple[str, NodeId]] = []
        new: list[tuple[str, NodeId]] = []
        for name, (one, node_id) in listed.items():
            known = self._open.get(name)
            same = known is not None and known.listed.producer_id == one.producer_id
            (again if same else new).append((name, node_id))
        again.sort(key=lambda each: self._open[each[0]].described_at)
        oldest = nsmallest(oldest_first, again, key=lambda each: self._open[each[0]].started_at_ms)
        return [*dict.fromkeys((*oldest, *again)), *new]

    def update(
        self,
        listed: Mapping[str, Found],
        described: Mapping[str, Described],
        failed: set[NodeId | None],
        now: float,
    ) -> None:
        """`failed`: coordinators that did not answer; their transactions stay."""
        opened = {name: each for name, each in self._open.items() if each.node_id in failed}
        for name, (one, node_id) in listed.items():
            known, description = self._open.get(name), described.get(name)
            if description is not None and description.state not in OPEN_STATES:
                opened.pop(name, None)  # over meanwhile
                continue
            same = known if known is not None and known.listed == one else None
            opened[name] = found = _Open(one, node_id, now if same is None else same.since)
            if description is not None:
                found.described, found.described_at = description, now
            elif same is not None:
                found.described, found.described_at = same.described, same.described_at
        self._open = opened

    def rows(self, now: float, now_ms: float) -> list[OpenTransaction]:
        return [
            _row(each.listed, each.fresh(now), each.node_id, now - each.since, now_ms) for each in self._open.values()
        ]


def _row(
    listed: Listed, described: Described | None, node_id: NodeId, seconds_in_state: float, now_ms: float
) -> OpenTransaction:
    """`seconds_in_state`: how long it is known to be in this state."""
    age = stuck = None
    if described is not None and described.started_at_ms >= 0:
        age = max(0.0, (now_ms - described.started_at_ms) / 1000)
        if described.state == ONGOING and age > described.timeout_ms / 1000 + OVERDUE_SECONDS:
            stuck = OVERDUE
    if listed.state in PREPARED and seconds_in_state > OVERDUE_SECONDS:
        stuck = MARKERS_MISSING
    return OpenTransaction(
        listed.transactional_id,
        listed.producer_id,
        None if described is None else described.producer_epoch,
        listed.state,
        node_id,
        age,
        None if described is None else described.timeout_ms,
        None if described is None else len(described.partitions),
        () if described is None else tuple(map(str, sorted(described.partitions)[:_FIRST_PARTITIONS])),
        stuck,
    )
