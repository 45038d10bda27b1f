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

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fencepost_proxy.transactions.observed import OpenTransactions, Partitions
from fencepost_proxy.transactions.rounds import Round
from fencepost_proxy.transactions.sending import BrokerQueues, Sweep
from fencepost_proxy.transactions.watched import (
    LEADERLESS_MAX,
    OPEN_STATES,
    WHY,
    Answer,
    FindLeaders,
    HangingTransaction,
    Leaders,
    Listed,
    Listing,
    ListTransactions,
    PartitionProbes,
    ProbePartitions,
    Query,
    TransactionsReport,
)
from fencepost_proxy.types import NodeId

#: After a count of n ids, the next one is n / `IDS_PER_SECOND` later, but not before `Pace.count_seconds`.
IDS_PER_SECOND: Final = 2_000


@dataclass(frozen=True, slots=True)
class Pace:
    """`partitions_per_second`: of the sweep. `sweep_seconds`: minimum time between two starts of a sweep."""

    partitions_per_second: float
    round_seconds: float = 10.0
    sweep_seconds: float = 30.0
    count_seconds: float = 60.0
    partitions_max: int = 200_000


class TransactionMonitor:
    """`next` returns the queries to send; pass each one's reply to `answered`, or None if there is none."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._queues = BrokerQueues()
        self._partitions = Partitions(pace.partitions_max)
        self._open = OpenTransactions()
        self._round: Round | None = None
        self._round_at = float("-inf")
        self._sweep = Sweep(pace.partitions_per_second, pace.sweep_seconds)
        self._counts: dict[NodeId, Counter[str]] = {}
        self._count_at: dict[NodeId, float] = {}
        self.rounds = 0
        self.problem: str | None = None

    # ---- queries

    def next(self, nodes: Iterable[NodeId], now: float) -> list[Query]:
        """`nodes`: the current brokers. Call it after every reply, and once a second."""
        self._nodes_are(tuple(sorted(nodes)), now)
        self._sweep.refill(now)
        if not self._queues.nodes:
            return []
        if self._round is None and now - self._round_at >= self._pace.round_seconds:
            self._round_at = now
            self._round = Round(self._queues, self._open, self._partitions)
        if self._sweep.begin_if_due(now):
            self._queues.find_leaders()
        for node_id in self._queues.nodes:
            if now >= self._count_at.get(node_id, float("-inf")):
                self._count_at[node_id] = float("inf")
                self._queues.put(ListTransactions(node_id))
        return self._queues.next(lambda node_id: self._sweep.next(node_id, self._partitions.chunk), now)

    def _nodes_are(self, nodes: tuple[NodeId, ...], now: float) -> None:
        for removed in set(self._queues.nodes) - set(nodes):
            self._sweep.remove_broker(removed)
            self._counts.pop(removed, None)
            self._count_at.pop(removed, None)
        for dropped in self._queues.nodes_are(nodes):
            self._answer_round(dropped, None, now)

    # ---- replies

    def answered(self, query: Query, answer: Answer | None, now: float) -> None:
        queried_at = self._queues.answered(query, now)
        match query, answer:
            case FindLeaders(), Leaders():
                for node_id, partitions in self._partitions.leaders_are(answer).items():
                    if node_id in self._queues.nodes:
                        self._sweep.put(node_id, partitions)
            case FindLeaders(), _:
                self._sweep.leaders_are_unknown()
            case ProbePartitions(), PartitionProbes():
                for partition, probe in answer.found.items():
                    self._partitions.probed(partition, probe, queried_at, now)
            case ListTransactions(listing, (), ()), _:
                self._ids_listed(listing, answer.transactions if isinstance(answer, Listing) else None, now)
        self._answer_round(query, answer, now)
        if self._sweep.running and not self._sweep.unsent and not self._queues.sends_or_finds():
            self._sweep.end(now)

    def _answer_round(self, query: Query, answer: Answer | None, now: float) -> None:
        if self._round is None:
            return
        self._round.answered(query, answer, now)
        if self._round.over:
            self._round = None
            self.rounds += 1

    def _ids_listed(self, node_id: NodeId, answer: Sequence[Listed] | None, now: float) -> None:
        if node_id not in self._queues.nodes:
            return
        pause = self._pace.count_seconds
        if answer is not None:
            self._counts[node_id] = Counter(each.state for each in answer)
            pause = max(pause, len(answer) / IDS_PER_SECOND)
        self._count_at[node_id] = now + pause

    # ---- report

    @property
    def sweeps(self) -> int:
        return self._sweep.completed

    @property
    def all_ids_listed(self) -> bool:
        """Whether every broker has listed its transactional ids."""
        return bool(self._queues.nodes) and self._counts.keys() >= set(self._queues.nodes)

    @property
    def undecided(self) -> bool:
        """Whether a log has an open transaction that is not yet known to hang, or whose coordinator is unknown."""
        return self._partitions.suspects.undecided(self._open.described)

    def hanging(self, now: float) -> Iterator[HangingTransaction]:
        return self._partitions.suspects.hanging(now)

    def report(self, now: float, now_ms: float, shown_max: int) -> TransactionsReport:
        opened = self._open.rows(now, now_ms)
        opened.sort(key=lambda each: (each.stuck is None, -(each.age_seconds or 0)))
        hanging = sorted(self.hanging(now), key=lambda each: -each.observed_seconds)
        reasons = Counter(dict.fromkeys(WHY, 0))
        reasons.update(each.why for each in hanging)
        reasons.update(each.stuck for each in opened if each.stuck is not None)
        states: Counter[str] = Counter(dict.fromkeys(OPEN_STATES, 0))
        for by_state in self._counts.values():
            states.update({state: count for state, count in by_state.items() if state not in OPEN_STATES})
        states.update(each.state for each in opened)
        lags = self._partitions.lags
        return TransactionsReport(
            producer_ids=self._partitions.producers,
            partitions=len(self._partitions),
            partitions_unreadable=self._partitions.unreadable,
            partitions_left_out=self._partitions.left_out,
            leaderless=tuple(self._partitions.leaderless[:LEADERLESS_MAX]),
            lagging_partitions=len(lags),
            lag_total=sum(lags),
            lag_max=max(lags, default=0),
            lag_seconds_max=self._partitions.lagging_seconds_max(now),
            transactional_ids=dict(sorted(states.items())),
            open_transactions=len(opened),
            oldest_seconds=max((each.age_seconds or 0.0 for each in opened), default=0.0),
            hanging_by_reason=dict(reasons),
            open=tuple(opened[:shown_max]),
            hanging=tuple(hanging[:shown_max]),
            lagging=tuple(self._partitions.most_lagging(shown_max, now)),
            most_producers=tuple(self._partitions.most_producers(shown_max)),
            sweep_seconds=self._sweep.seconds,
            sweep_age_seconds=None if self._sweep.ended_at is None else now - self._sweep.ended_at,
            requests=self._queues.requests,
            problem=self.problem,
        )
