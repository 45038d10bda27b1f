"""Monitor of a cluster's transactions and producers: its state, and which queries to send next. No I/O.

Kafka does not report hanging transactions: read-committed consumers just stop at the last stable offset. Two kinds of
brokers each know half of it: coordinators know transactions, leaders know what is open in their logs.

    every `round_seconds`   ListTransactions (open ones) of every broker; DescribeTransactions of some hundred of them;
                            probes of partitions with open transactions; queries for those that no coordinator listed
    continuously            the sweep: every partition of the cluster is probed in turn, at a fixed rate
    from time to time       ListTransactions of all ids, to count them by state

A *probe* of a partition is ListOffsets (high watermark), ListOffsets (last stable offset) and DescribeProducers, in
this order, so that the lag is never overestimated.

**A transaction hangs** if a leader has it open and its coordinator does not know it any more: no marker will come, and
the partition's read-committed consumers are blocked indefinitely. Kafka's own tool waits for
transaction.max.timeout.ms. Here a sequence of events proves it, without a clock:

    1. A leader reports a transaction that began at offset S as open.
    2. Then all coordinators report that this producer has no transaction with this partition.
    3. Then the leader still reports it, with the same S.

A coordinator forgets a partition only when its marker is written there, so in step 3 it would be closed. A transaction
that begins after step 2 begins at another offset. Step 2 counts only if every broker answered and every partition of
`__transaction_state` had a leader. It is done twice, a round apart, since a coordinator that moves is briefly at no
broker.

Bounded: one query at a time per broker, of at most `PARTITIONS_AT_ONCE` partitions and about `PRODUCERS_AT_ONCE`
producers. The sweep has a fixed rate. The descriptions and queries of a round are limited.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
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
    WHY,
    Answer,
    Described,
    DescribeTransactions,
    Descriptions,
    FindLeaders,
    HangingTransaction,
    LaggingPartition,
    Leaders,
    Listed,
    Listing,
    ListTransactions,
    OpenInLog,
    OpenTransaction,
    PartitionProbe,
    PartitionProbes,
    PartitionProducers,
    ProbePartitions,
    Query,
    TransactionsReport,
)
from fencepost_proxy.types import NodeId, Offset, ProducerId, TopicPartition

PARTITIONS_AT_ONCE: Final = 100
#: A target, by the partitions' last counts: decoding an answer blocks the event loop.
PRODUCERS_AT_ONCE: Final = 2_000
_PRODUCERS_ASSUMED: Final = 20
TRANSACTIONS_AT_ONCE: Final = 100
#: Per round.
DESCRIBED_MAX: Final = 500
PROBED_CLOSELY_MAX: Final = 500
INQUIRED_MAX: Final = 100
#: After a count of n ids, the next one is n / `IDS_PER_SECOND` later, but not before `Pace.count_seconds`.
IDS_PER_SECOND: Final = 2_000
#: A coordinator checks for timed-out transactions every ten seconds.
OVERDUE_SECONDS: Final = 60.0
#: How long a description is reported; those of many open transactions are renewed in rotation.
_DESCRIBED_SECONDS: Final = 50.0
#: Open transactions in one log; the rest is not reported.
_OPEN_MAX: Final = 1_000
_ABSENCES: Final = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """`partitions_per_second`: of the sweep. `sweep_seconds`: minimum time between two starts of a sweep."""

    partitions_per_second: float
    round_seconds: float = 10.0
    sweep_seconds: float = 30.0
    count_seconds: float = 60.0
    partitions_max: int = 200_000


# --- state ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Observed:
    probe: PartitionProbe
    lagging_since: float | None = None


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


@dataclass(slots=True)
class _Open:
    """`since`: when it was first listed in this state, by our clock."""

    listed: Listed
    node_id: NodeId
    since: float
    described: Described | None = None
    described_at: float = float("-inf")

    def fresh(self, now: float) -> Described | None:
        """An older description may be another transaction's: an id's next transaction may not be visible here."""
        return self.described if now - self.described_at < _DESCRIBED_SECONDS else None


_SuspectKey = tuple[TopicPartition, ProducerId, Offset]


@dataclass(slots=True)
class _Round:
    """Current round. `queried`: unanswered queries of this step; `failed`: brokers that gave no answer.

    Steps: list open transactions; describe them; query those open in logs but not among them; describe these.
    """

    step: int = 0
    queried: set[Query] = field(default_factory=set)
    failed: set[NodeId | None] = field(default_factory=set)
    listed: dict[str, tuple[Listed, NodeId]] = field(default_factory=dict)
    described: dict[str, Described] = field(default_factory=dict)
    inquired: list[_SuspectKey] = field(default_factory=list)
    found: dict[ProducerId, tuple[Listed, NodeId]] = field(default_factory=dict)
    found_described: dict[ProducerId, Described] = field(default_factory=dict)


class TransactionMonitor:
    """`next` returns the queries to send; pass each one's reply to `answered`, or None if there is none."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._nodes: tuple[NodeId, ...] = ()
        self._queues: dict[NodeId, deque[Query]] = {}
        self._queried: dict[Query, float] = {}
        self._busy: set[NodeId] = set()
        self._leader: dict[TopicPartition, NodeId] = {}
        self._left_out = 0
        self._coordinators = False
        self._finding = False
        self._partitions: dict[TopicPartition, _Observed] = {}
        self._errors: dict[TopicPartition, int] = {}
        self._lagging: dict[TopicPartition, _Observed] = {}
        self._producers = 0
        self._suspects: dict[_SuspectKey, _Suspect] = {}
        self._suspected: dict[TopicPartition, set[_SuspectKey]] = {}
        self._open: dict[str, _Open] = {}
        self._round: _Round | None = None
        self._round_at = float("-inf")
        self._counts: dict[NodeId, Counter[str]] = {}
        self._count_at: dict[NodeId, float] = {}
        self._sweep: dict[NodeId, deque[TopicPartition]] = {}
        self._sweeping = False
        self._sweep_began_at = float("-inf")
        self._swept_at: float | None = None
        self._sweep_seconds: float | None = None
        self._tokens = 0.0
        self._tokens_at: float | None = None
        self._rotation = 0
        self.rounds = 0
        self.sweeps = 0
        self.requests = 0
        self.problem: str | None = None

    # ---- queries

    def next(self, nodes: Iterable[NodeId], now: float) -> list[Query]:
        """`nodes`: the current brokers. Call it after every reply, and once a second."""
        self._nodes_are(tuple(sorted(nodes)), now)
        self._refill(now)
        if self._round is None and now - self._round_at >= self._pace.round_seconds and self._nodes:
            self._begin_round(now)
        if not self._sweeping and now - self._sweep_began_at >= self._pace.sweep_seconds and self._nodes:
            self._sweeping, self._sweep_began_at = True, now
            self._sweep.clear()
            self._finding = True
        for node_id in self._nodes:
            if now >= self._count_at.get(node_id, float("-inf")):
                self._count_at[node_id] = float("inf")
                self._queues[node_id].append(ListTransactions(node_id))
        queries_to_send: list[Query] = []
        if self._finding and FindLeaders() not in self._queried and self._nodes:
            self._finding = False
            queries_to_send.append(FindLeaders())
        self._rotation += 1
        rotation = self._rotation % max(1, len(self._nodes))
        for node_id in (*self._nodes[rotation:], *self._nodes[:rotation]):
            if node_id not in self._busy and (query_message := self._for(node_id)) is not None:
                self._busy.add(node_id)
                queries_to_send.append(query_message)
        for query_message in queries_to_send:
            self._queried[query_message] = now
            self.requests += 3 if isinstance(query_message, ProbePartitions) else 1
        return queries_to_send

    def _for(self, node_id: NodeId) -> Query | None:
        queue = self._queues[node_id]
        if queue:
            return queue.popleft()
        rest = self._sweep.get(node_id)
        if rest:
            chunk = self._chunk(rest)
            if self._tokens >= len(chunk):
                self._tokens -= len(chunk)
                for _ in chunk:
                    rest.popleft()
                return ProbePartitions(node_id, chunk)
        return None

    def _chunk(self, partitions: Iterable[TopicPartition]) -> tuple[TopicPartition, ...]:
        chunk: list[TopicPartition] = []
        producers = 0
        for partition in islice(partitions, PARTITIONS_AT_ONCE):
            observed = self._partitions.get(partition)
            producers += _PRODUCERS_ASSUMED if observed is None else observed.probe.producers
            if chunk and producers > PRODUCERS_AT_ONCE:
                break
            chunk.append(partition)
        return tuple(chunk)

    def _refill(self, now: float) -> None:
        if self._tokens_at is not None:
            self._tokens += (now - self._tokens_at) * self._pace.partitions_per_second
        self._tokens = min(self._tokens, PARTITIONS_AT_ONCE + self._pace.partitions_per_second)
        self._tokens_at = now

    def _nodes_are(self, nodes: tuple[NodeId, ...], now: float) -> None:
        if nodes == self._nodes:
            return
        unanswered: list[Query] = []
        for removed in set(self._nodes) - set(nodes):
            unanswered += self._queues.pop(removed)
            self._sweep.pop(removed, None)
            self._counts.pop(removed, None)
            self._count_at.pop(removed, None)
        for new in set(nodes) - set(self._nodes):
            self._queues[new] = deque()
        self._nodes = nodes
        for query_message in unanswered:
            self._of_round(query_message, None, now)

    # ---- replies

    def answered(self, query_message: Query, answer: Answer | None, now: float) -> None:
        queried_at = self._queried.pop(query_message, now)
        node_id = getattr(query_message, "node_id", None)
        if node_id is not None:
            self._busy.discard(node_id)
        match query_message, answer:
            case FindLeaders(), Leaders():
                self._leaders_are(answer)
            case FindLeaders(), _ if not self._sweep:
                self._sweeping = False
            case ProbePartitions(), PartitionProbes():
                for partition, probe in answer.found.items():
                    self._probed(partition, probe, queried_at, now)
            case ListTransactions(listing, (), ()), _:
                self._ids_listed(listing, answer.transactions if isinstance(answer, Listing) else None, now)
        self._of_round(query_message, answer, now)
        if self._sweeping and not self._sweep_goes_on():
            self._sweeping = False
            self._swept_at, self._sweep_seconds = now, now - self._sweep_began_at
            self.sweeps += 1

    def _of_round(self, query_message: Query, answer: Answer | None, now: float) -> None:
        if self._round is None or query_message not in self._round.queried:
            return
        self._round.queried.discard(query_message)
        if answer is None:
            self._failed(self._round, getattr(query_message, "node_id", None))
        else:
            self._observe(self._round, query_message, answer)
        self._advance(self._round, now)

    def _failed(self, found: _Round, node_id: NodeId | None) -> None:
        """A broker that does not answer is not queried again in this round: each query would wait for its timeout, and
        what the others reported would be out of date."""
        found.failed.add(node_id)
        if found.step == 0 and node_id in self._queues:
            queue = self._queues[node_id]
            dropped = found.queried.intersection(queue)
            found.queried -= dropped
            self._queues[node_id] = deque(each for each in queue if each not in dropped)

    def _sweep_goes_on(self) -> bool:
        return (
            self._finding
            or any(self._sweep.values())
            or any(isinstance(each, FindLeaders | ProbePartitions) for each in self._queried)
        )

    def _leaders_are(self, leaders: Leaders) -> None:
        self._coordinators = leaders.coordinators
        known: dict[TopicPartition, NodeId] = {}
        left = self._pace.partitions_max
        self._left_out = 0
        for node_id, partitions in leaders.by_node.items():
            taken = partitions[:left]
            left -= len(taken)
            self._left_out += len(partitions) - len(taken)
            known.update(dict.fromkeys(taken, node_id))
            if self._sweeping and node_id in self._queues and node_id not in self._sweep:
                self._sweep[node_id] = deque(taken)
        for removed in self._partitions.keys() - known.keys():
            self._forget(removed)
        for removed in self._errors.keys() - known.keys():
            del self._errors[removed]
        self._leader = known

    def _forget(self, partition: TopicPartition) -> None:
        observed = self._partitions.pop(partition, None)
        if observed is not None:
            self._producers -= observed.probe.producers
        self._lagging.pop(partition, None)
        for key in self._suspected.pop(partition, ()):
            del self._suspects[key]

    def _probed(self, partition: TopicPartition, probe: PartitionProbe | int, queried_at: float, now: float) -> None:
        if partition not in self._leader:
            return  # deleted meanwhile
        if isinstance(probe, int):
            self._errors[partition] = probe
            return
        self._errors.pop(partition, None)
        observed = self._partitions.get(partition)
        if observed is None:
            observed = self._partitions[partition] = _Observed(probe)
            self._producers += probe.producers
        else:
            self._producers += probe.producers - observed.probe.producers
        moved = observed.probe.last_stable_offset != probe.last_stable_offset
        observed.probe = probe
        if not probe.lag:
            observed.lagging_since = None
            self._lagging.pop(partition, None)
        else:
            self._lagging[partition] = observed
            if moved or observed.lagging_since is None:
                observed.lagging_since = now
        self._suspect(partition, probe, queried_at)

    def _suspect(self, partition: TopicPartition, probe: PartitionProbe, queried_at: float) -> None:
        before = self._suspected.get(partition)
        if not probe.open and not before:
            return
        keys = set()
        for each in probe.open[:_OPEN_MAX]:
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
            self._suspected[partition] = keys
        else:
            self._suspected.pop(partition, None)

    def _ids_listed(self, node_id: NodeId, answer: Sequence[Listed] | None, now: float) -> None:
        if node_id not in self._queues:
            return
        pause = self._pace.count_seconds
        if answer is not None:
            self._counts[node_id] = Counter(each.state for each in answer)
            pause = max(pause, len(answer) / IDS_PER_SECOND)
        self._count_at[node_id] = now + pause

    # ---- a round

    def _begin_round(self, now: float) -> None:
        self._round_at = now
        self._round = _Round()
        for node_id in self._nodes:
            self._query(ListTransactions(node_id, OPEN_STATES))
        for node_id, partitions in self._by_leader(self._to_probe_closely()).items():
            while partitions:
                chunk = self._chunk(partitions)
                del partitions[: len(chunk)]
                self._query(ProbePartitions(node_id, chunk))

    def _to_probe_closely(self) -> list[TopicPartition]:
        """Partitions that have, or may have, an open transaction."""
        requested: dict[TopicPartition, None] = {}
        for found in (
            self._suspected,
            self._lagging,
            (each for known in self._open.values() if known.described for each in known.described.partitions),
        ):
            for partition in found:
                if len(requested) >= PROBED_CLOSELY_MAX:
                    return list(requested)
                requested[partition] = None
        return list(requested)

    def _by_leader(self, partitions: Iterable[TopicPartition]) -> dict[NodeId, list[TopicPartition]]:
        found: dict[NodeId, list[TopicPartition]] = {}
        for partition in partitions:
            node_id = self._leader.get(partition)
            if node_id in self._queues:
                found.setdefault(node_id, []).append(partition)
        return found

    def _query(self, query_message: ListTransactions | DescribeTransactions | ProbePartitions) -> None:
        assert self._round is not None
        if query_message.node_id not in self._queues or query_message.node_id in self._round.failed:
            return
        if query_message not in self._round.queried:
            self._round.queried.add(query_message)
            if query_message not in self._queried:  # the sweep may have sent the same query
                self._queues[query_message.node_id].append(query_message)

    @staticmethod
    def _observe(found: _Round, query_message: Query, answer: Answer) -> None:
        match query_message, answer:
            case ListTransactions(node_id, _, ()), Listing(transactions):
                found.listed.update((each.transactional_id, (each, node_id)) for each in transactions)
            case ListTransactions(node_id, _, _), Listing(transactions):
                found.found.update((each.producer_id, (each, node_id)) for each in transactions)
            case DescribeTransactions(), Descriptions(described) if found.step == 1:
                found.described.update((each.transactional_id, each) for each in described)
            case DescribeTransactions(), Descriptions(described):
                found.found_described.update((each.producer_id, each) for each in described)

    def _advance(self, found: _Round, now: float) -> None:
        """Advance to the next step that has queries."""
        while not found.queried:
            found.step += 1
            match found.step:
                case 1:
                    self._describe(self._worth_describing(found), found)
                case 2:
                    self._take_over(found, now)
                    self._inquire(found)
                case 3:
                    if found.inquired and not found.failed:
                        self._describe([(each.transactional_id, node) for each, node in found.found.values()], found)
                case _:
                    if found.inquired and not found.failed and self._coordinators:
                        self._conclude(found, now)
                    self._round = None
                    self.rounds += 1
                    return

    def _worth_describing(self, found: _Round) -> list[tuple[str, NodeId]]:
        """First those that were open in the last round: most others end before they can be described."""
        again: list[tuple[str, NodeId]] = []
        new: list[tuple[str, NodeId]] = []
        for name, (listed, node_id) in found.listed.items():
            known = self._open.get(name)
            same = known is not None and known.listed.producer_id == listed.producer_id
            (again if same else new).append((name, node_id))
        again.sort(key=lambda each: self._open[each[0]].described_at)
        return [*again, *new][:DESCRIBED_MAX]

    def _describe(self, requested: Iterable[tuple[str, NodeId]], found: _Round) -> None:
        by_node: dict[NodeId, list[str]] = {}
        for name, node_id in requested:
            by_node.setdefault(node_id, []).append(name)
        for node_id, names in by_node.items():
            for start in range(0, len(names), TRANSACTIONS_AT_ONCE):
                self._query(DescribeTransactions(node_id, tuple(names[start : start + TRANSACTIONS_AT_ONCE])))

    def _take_over(self, found: _Round, now: float) -> None:
        """Update the open transactions. If a broker did not answer, its transactions stay."""
        opened = {name: each for name, each in self._open.items() if each.node_id in found.failed}
        for name, (listed, node_id) in found.listed.items():
            known, described = self._open.get(name), found.described.get(name)
            same = known is not None and known.listed == listed
            if described is not None and described.state not in OPEN_STATES:
                opened.pop(name, None)  # over meanwhile
                continue
            since = known.since if known is not None and same else now
            if described is not None:
                opened[name] = _Open(listed, node_id, since, described, now)
            elif known is not None and same:
                opened[name] = _Open(listed, node_id, since, known.described, known.described_at)
            else:
                opened[name] = _Open(listed, node_id, since)
        self._open = opened

    def _inquire(self, found: _Round) -> None:
        """Query those that were open in a log at two probes, and are not among the open transactions."""
        known = {(each.producer_id, partition) for each in found.described.values() for partition in each.partitions}
        undescribed = {each.producer_id for name, (each, _) in found.listed.items() if name not in found.described}
        producer_ids: dict[ProducerId, None] = {}
        for key, suspect in self._suspects.items():
            partition, producer_id, _ = key
            if (producer_id, partition) in known:
                suspect.absences = 0
            elif producer_id not in undescribed and suspect.observed_at > suspect.first_observed_at:
                producer_ids[producer_id] = None
                if len(producer_ids) > INQUIRED_MAX:
                    break
                found.inquired.append(key)
        if not found.inquired:
            return
        self._finding = True  # for whether the transaction log has leaders now
        found.queried.add(FindLeaders())
        queried = tuple(islice(producer_ids, INQUIRED_MAX))
        for node_id in self._nodes:
            self._query(ListTransactions(node_id, (), queried))

    def _conclude(self, found: _Round, now: float) -> None:
        for key in found.inquired:
            suspect = self._suspects.get(key)
            if suspect is None:
                continue
            partition, producer_id, _ = key
            described = found.found_described.get(producer_id)
            if described is not None and partition in described.partitions:
                suspect.absences = 0
                continue
            listed = found.found.get(producer_id)
            suspect.transactional_id = None if listed is None else listed[0].transactional_id
            if suspect.absences < _ABSENCES:
                suspect.absences += 1
                suspect.absent_at = now

    # ---- report

    @property
    def all_ids_listed(self) -> bool:
        """Whether every broker has listed its transactional ids."""
        return bool(self._nodes) and self._counts.keys() >= set(self._nodes)

    @property
    def undecided(self) -> bool:
        """Whether a log has an open transaction that is not yet known to hang, or whose coordinator is unknown."""
        known = {
            (each.described.producer_id, partition)
            for each in self._open.values()
            if each.described is not None
            for partition in each.described.partitions
        }
        return any(
            not suspect.hanging and (producer_id, partition) not in known
            for (partition, producer_id, _), suspect in self._suspects.items()
        )

    def report(self, now: float, now_ms: float, shown_max: int) -> TransactionsReport:
        opened = [self._of_open(each, now, now_ms) for each in self._open.values()]
        opened.sort(key=lambda each: (each.stuck is None, -(each.age_seconds or 0)))
        hanging = list(self.hanging(now))
        hanging.sort(key=lambda each: -each.observed_seconds)
        reasons = Counter(dict.fromkeys(WHY, 0))
        reasons.update(each.why for each in hanging)
        reasons.update(each.stuck for each in opened if each.stuck is not None)
        states: Counter[str] = Counter(dict.fromkeys(OPEN_STATES, 0))
        for by_state in self._counts.values():
            states.update({state: count for state, count in by_state.items() if state not in OPEN_STATES})
        states.update(each.state for each in opened)
        lags = [observed.probe.lag for observed in self._lagging.values()]
        worst = nlargest(shown_max, self._lagging.items(), key=lambda item: item[1].probe.lag)
        most = nlargest(shown_max, self._partitions.items(), key=lambda item: item[1].probe.producers)
        return TransactionsReport(
            producer_ids=self._producers,
            partitions=len(self._partitions),
            partitions_unreadable=len(self._errors),
            partitions_left_out=self._left_out,
            lagging_partitions=len(lags),
            lag_total=sum(lags),
            lag_max=max(lags, default=0),
            lag_seconds_max=max((_seconds(each, now) for each in self._lagging.values()), default=0.0),
            transactional_ids=dict(sorted(states.items())),
            open_transactions=len(opened),
            oldest_seconds=max((each.age_seconds or 0.0 for each in opened), default=0.0),
            hanging_by_reason=dict(reasons),
            open=tuple(opened[:shown_max]),
            hanging=tuple(hanging[:shown_max]),
            lagging=tuple(
                LaggingPartition(
                    partition.topic,
                    partition.partition,
                    observed.probe.last_stable_offset,
                    observed.probe.high_watermark,
                    observed.probe.lag,
                    _seconds(observed, now),
                )
                for partition, observed in worst
            ),
            most_producers=tuple(
                PartitionProducers(partition.topic, partition.partition, observed.probe.producers)
                for partition, observed in most
                if observed.probe.producers
            ),
            sweep_seconds=self._sweep_seconds,
            sweep_age_seconds=None if self._swept_at is None else now - self._swept_at,
            requests=self.requests,
            problem=self.problem,
        )

    @staticmethod
    def _of_open(known: _Open, now: float, now_ms: float) -> OpenTransaction:
        return of_open(known.listed, known.fresh(now), known.node_id, now - known.since, now_ms)

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


_FIRST_PARTITIONS: Final = 10


def of_open(
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


def _seconds(observed: _Observed, now: float) -> float:
    return 0.0 if observed.lagging_since is None else now - observed.lagging_since
