"""The transaction monitor: its queries, their rate, and how it concludes that a transaction hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from fencepost_proxy.transactions import rounds, watching
from fencepost_proxy.transactions.observed import PARTITIONS_AT_ONCE, PRODUCERS_AT_ONCE
from fencepost_proxy.transactions.watched import (
    MARKERS_MISSING,
    NOT_LISTED,
    OPEN_STATES,
    OVERDUE,
    UNKNOWN_TO_COORDINATOR,
    Answer,
    Described,
    DescribeTransactions,
    Descriptions,
    FindLeaders,
    Leaders,
    Listed,
    Listing,
    ListTransactions,
    OpenInLog,
    PartitionProbe,
    PartitionProbes,
    ProbePartitions,
    Query,
    TransactionsReport,
)
from fencepost_proxy.transactions.watching import Pace, TransactionMonitor
from fencepost_proxy.types import NodeId, Offset, ProducerId, TopicPartition

ONE, TWO = NodeId(1), NodeId(2)
P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
EMPTY = PartitionProbe(Offset(0), Offset(0), 0)
UNKNOWN_TOPIC, NOT_LEADER, NOT_ALLOWED = 3, 6, 29
PACE = Pace(150.0)


def described(name: str, *partitions: TopicPartition, producer: int = 7, started_at: float = 0.0) -> Described:
    return Described(name, ProducerId(producer), 0, "Ongoing", 60_000, round(started_at * 1000), frozenset(partitions))


def open_from(offset: int, *, producer: int = 7, end: int | None = None) -> PartitionProbe:
    """A leader's probe: nothing is committed from `offset` on."""
    here = OpenInLog(ProducerId(producer), 0, 0, Offset(offset), 1)
    return PartitionProbe(Offset(offset + 1 if end is None else end), Offset(offset), 1, (here,))


@dataclass
class Cluster:
    """A cluster and a clock. Every query is answered at once, unless its broker is silent."""

    probes: dict[TopicPartition, PartitionProbe | int] = field(default_factory=dict)
    leaders: dict[TopicPartition, NodeId] = field(default_factory=dict)
    transactions: dict[NodeId, list[Described]] = field(default_factory=lambda: {ONE: [], TWO: []})
    silent: set[NodeId] = field(default_factory=set)
    #: After which a query to a silent broker fails.
    timeout_seconds: float = 0.0
    timeouts: list[tuple[float, Query]] = field(default_factory=list)
    coordinators: bool = True
    pace: Pace = PACE
    now: float = 1000.0
    queried: list[tuple[float, Query]] = field(default_factory=list)
    before_answering: Callable[[Query], None] = lambda query_message: None

    def __post_init__(self) -> None:
        self.watching = TransactionMonitor(self.pace)
        for partition in self.probes:
            self.leaders.setdefault(partition, ONE)

    @property
    def report(self) -> TransactionsReport:
        return self.watching.report(self.now, self.now * 1000, 20)

    def answer(self, query_message: Query) -> Answer | None:
        self.before_answering(query_message)
        match query_message:
            case FindLeaders():
                by_node: dict[NodeId, list[TopicPartition]] = {}
                for partition in self.probes:
                    by_node.setdefault(self.leaders[partition], []).append(partition)
                return Leaders(by_node, self.coordinators)
            case _ if query_message.node_id in self.silent:
                return None
            case ProbePartitions(node_id, partitions):
                assert len(partitions) <= PARTITIONS_AT_ONCE
                return PartitionProbes(
                    {
                        each: self.probes.get(each, UNKNOWN_TOPIC) if self.leaders[each] == node_id else NOT_LEADER
                        for each in partitions
                    }
                )
            case ListTransactions(node_id, states, producer_ids):
                return Listing(
                    [
                        Listed(each.transactional_id, each.producer_id, each.state)
                        for each in self.transactions[node_id]
                        if (not states or each.state in states)
                        and (not producer_ids or each.producer_id in producer_ids)
                    ]
                )
            case DescribeTransactions(node_id, names):
                return Descriptions([each for each in self.transactions[node_id] if each.transactional_id in names])

    def query(self) -> None:
        """Until the monitor has no query at this moment."""
        while queries := self.watching.next(self.transactions, self.now):
            nodes = [query_message.node_id for query_message in queries if not isinstance(query_message, FindLeaders)]
            assert len(nodes) == len(set(nodes)), "one query per broker at a time"
            for query_message in queries:
                self.queried.append((self.now, query_message))
                if self.timeout_seconds and getattr(query_message, "node_id", None) in self.silent:
                    self.timeouts.append((self.now + self.timeout_seconds, query_message))
                    continue
                self.watching.answered(query_message, self.answer(query_message), self.now)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for at, query_message in [each for each in self.timeouts if each[0] <= self.now]:
                self.timeouts.remove((at, query_message))
                self.watching.answered(query_message, None, self.now)
            self.query()
            self.now += 1.0

    def probed_at(self, since: float = 0.0) -> int:
        return sum(
            len(each.partitions) for at, each in self.queried if isinstance(each, ProbePartitions) and at >= since
        )


@pytest.fixture
def kafka() -> Cluster:
    return hanging()


# ---- what is open


def test_open_transaction_is_reported_with_age_and_partitions() -> None:
    kafka = Cluster({P0: open_from(5, end=8), P1: EMPTY})
    kafka.transactions[TWO] = [described("payments", P0, started_at=kafka.now - 20)]
    kafka.run(11)

    (found,) = kafka.report.open
    assert (found.transactional_id, found.coordinator, found.partitions) == ("payments", TWO, 1)
    assert found.first_partitions == ("orders-0",)
    assert found.age_seconds == pytest.approx(31)
    assert kafka.report.oldest_seconds == found.age_seconds
    (lagging,) = kafka.report.lagging
    assert (lagging.topic, lagging.partition, lagging.last_stable_offset, lagging.lag) == ("orders", 0, 5, 3)
    assert sum(kafka.report.hanging_by_reason.values()) == 0


def test_ended_transaction_is_no_longer_reported() -> None:
    kafka = Cluster({P0: open_from(5)})
    kafka.transactions[ONE] = [described("payments", P0)]
    kafka.run(11)
    kafka.transactions[ONE] = [replace(described("payments"), state="CompleteCommit", started_at_ms=-1)]
    kafka.probes[P0] = PartitionProbe(Offset(7), Offset(7), 1)
    kafka.run(61)
    assert kafka.report.open_transactions == kafka.report.lagging_partitions == 0
    assert kafka.report.transactional_ids["CompleteCommit"] == 1
    assert kafka.report.transactional_ids["Ongoing"] == 0


def test_overdue_transaction_is_stuck() -> None:
    kafka = Cluster({P0: open_from(5)})
    kafka.transactions[ONE] = [described("payments", P0, started_at=kafka.now - 100)]
    kafka.run(11)
    assert kafka.report.open[0].stuck is None
    kafka.run(20)
    assert kafka.report.open[0].stuck == OVERDUE
    assert kafka.report.hanging_by_reason[OVERDUE] == 1


def test_one_whose_markers_are_not_written_is_stuck() -> None:
    kafka = Cluster({P0: open_from(5)})
    kafka.transactions[ONE] = [replace(described("payments", P0, started_at=kafka.now), state="PrepareCommit")]
    kafka.run(50)
    assert kafka.report.open[0].stuck is None
    kafka.run(30)
    assert kafka.report.hanging_by_reason[MARKERS_MISSING] == 1


def test_old_description_is_not_reported_for_next_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "DESCRIBED_MAX", 20)
    # Given more open transactions than are described in one round, among them one that goes on for a while
    kafka = Cluster({P0: EMPTY})
    kafka.transactions[ONE] = [described(f"id-{each}", started_at=kafka.now) for each in range(240)]
    # When many rounds have passed
    kafka.run(200)
    # Then only recently described ones have an age
    ages = [each.age_seconds for each in kafka.watching.report(kafka.now, kafka.now * 1000, 100_000).open]
    assert len(ages) == 240
    assert 0 < sum(each is not None for each in ages) <= 120
    # and each was described.
    queried = {
        name for _, each in kafka.queried if isinstance(each, DescribeTransactions) for name in each.transactional_ids
    }
    assert len(queried) == 240


def test_oldest_of_many_transactions_keeps_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions rotate: between two of them, the oldest transaction would be missing from the metric."""
    monkeypatch.setattr(rounds, "DESCRIBED_MAX", 20)
    kafka = Cluster({P0: EMPTY})
    names, begun = [f"id-{each}" for each in range(400)], kafka.now
    kafka.transactions[ONE] = [described(each, started_at=begun - (900 if each == "id-7" else 0)) for each in names]
    kafka.run(400)
    for _ in range(60):
        kafka.run(2)
        oldest = kafka.watching.report(kafka.now, kafka.now * 1000, 10).oldest_seconds
        assert oldest >= kafka.now - begun + 890


# ---- what hangs


def hanging(**settings: object) -> Cluster:
    """Open in the log of orders-0; the coordinator has ended this producer's last transaction."""
    kafka = Cluster({P0: open_from(5), P1: EMPTY}, **settings)  # type: ignore[arg-type]
    kafka.transactions[TWO] = [replace(described("payments"), state="CompleteCommit", started_at_ms=-1)]
    return kafka


@pytest.mark.parametrize(
    ("listed", "name", "why"),
    [(True, "payments", UNKNOWN_TO_COORDINATOR), (False, None, NOT_LISTED)],
    ids=["ended", "expired or hidden"],
)
def test_what_no_coordinator_knows_of_hangs(listed: bool, name: str | None, why: str, kafka: Cluster) -> None:
    if not listed:
        kafka.transactions[TWO] = []
    kafka.run(60)
    (found,) = kafka.report.hanging
    assert (found.topic, found.partition, found.start_offset, found.producer_id) == ("orders", 0, 5, 7)
    assert (found.transactional_id, found.why) == (name, why)
    assert kafka.report.hanging_by_reason[why] == 1


def test_aborted_hanging_transaction_is_no_longer_reported(kafka: Cluster) -> None:
    kafka.run(60)
    kafka.probes[P0] = PartitionProbe(Offset(7), Offset(7), 1)
    kafka.run(11)
    assert not kafka.report.hanging
    assert not kafka.watching.undecided


@pytest.mark.parametrize(("partition", "hangs"), [(P0, 0), (P1, 1)])
def test_coordinators_transaction_hangs_only_on_other_partitions(
    partition: TopicPartition, hangs: int, kafka: Cluster
) -> None:
    kafka.transactions[TWO] = [described("payments", partition, started_at=kafka.now)]
    kafka.run(60)
    assert len(kafka.report.hanging) == hangs


@pytest.mark.parametrize("inquiry", [1, 2])
def test_a_marker_that_comes_late_is_waited_for(inquiry: int, kafka: Cluster) -> None:
    # Given a leader whose log shows the transaction until just after the query of its coordinator
    inquiries = []

    def marker(query_message: Query) -> None:
        assert not kafka.report.hanging  # at no moment
        if isinstance(query_message, ListTransactions) and query_message.producer_ids and query_message.node_id == TWO:
            inquiries.append(kafka.now)
            if len(inquiries) == inquiry:
                kafka.probes[P0] = PartitionProbe(Offset(7), Offset(7), 1)

    kafka.before_answering = marker
    for _ in range(60):
        kafka.run(1)
        assert not kafka.report.hanging
    assert len(inquiries) == inquiry


def test_consecutive_transactions_on_a_partition_do_not_hang(kafka: Cluster) -> None:
    # Given a producer with a new transaction at each probe, which has ended at each query of its coordinator
    def another(query_message: Query) -> None:
        assert not kafka.report.hanging
        # Nor is an earlier transaction queried.
        assert not isinstance(query_message, ListTransactions) or not query_message.producer_ids
        if isinstance(query_message, ProbePartitions):
            kafka.probes[P0] = open_from(round(kafka.now) * 10)

    kafka.before_answering = another
    kafka.run(90)


@pytest.mark.parametrize(("silent", "coordinators"), [({ONE}, True), ({TWO}, True), (set(), False)])
def test_nothing_is_concluded_without_brokers_or_coordinators(
    silent: set[NodeId], coordinators: bool, kafka: Cluster
) -> None:
    kafka.run(5)  # probed once
    kafka.silent, kafka.coordinators = silent, coordinators
    kafka.run(90)
    assert not kafka.report.hanging
    kafka.silent, kafka.coordinators = set(), True
    kafka.run(60)
    assert len(kafka.report.hanging) == 1


def test_moving_coordinator_does_not_make_transactions_hang(kafka: Cluster) -> None:
    # Given an open transaction that no broker lists at the one moment when it is inquired about
    there = [described("payments", P0, started_at=kafka.now)]
    inquiries = []

    def moving(query_message: Query) -> None:
        assert not kafka.report.hanging
        if isinstance(query_message, ListTransactions):
            if query_message.producer_ids and query_message.node_id == TWO:
                inquiries.append(kafka.now)
            kafka.transactions[TWO] = [] if len(inquiries) < 1 or kafka.now == inquiries[0] else there

    kafka.before_answering = moving
    kafka.run(60)
    assert inquiries


# ---- how gently


def many(count: int, producers: int = 1) -> dict[TopicPartition, PartitionProbe | int]:
    return {TopicPartition("t", each): PartitionProbe(Offset(9), Offset(9), producers) for each in range(count)}


def test_ten_thousand_partitions_are_probed_at_bounded_rate() -> None:
    kafka = Cluster(many(10_000))
    kafka.leaders = {each: (ONE, TWO)[each.partition % 2] for each in kafka.probes}
    kafka.run(10_000 / 150 + 3)

    assert kafka.watching.sweeps == 1
    assert kafka.report.partitions == kafka.report.producer_ids == 10_000
    for second in range(1000, round(kafka.now)):
        probed_at = sum(
            len(each.partitions) for at, each in kafka.queried if isinstance(each, ProbePartitions) and at == second
        )
        assert probed_at <= 150 + PARTITIONS_AT_ONCE
    # Three requests for each hundred of partitions, and the lists.
    assert kafka.report.requests < 3 * 10_000 / PARTITIONS_AT_ONCE + 60


def test_small_cluster_is_probed_once_per_sweep_interval() -> None:
    kafka = Cluster({P0: EMPTY, P1: EMPTY})
    kafka.run(300)
    assert kafka.probed_at() == 2 * 300 / PACE.sweep_seconds


def test_partitions_with_many_producers_are_probed_few_together() -> None:
    kafka = Cluster(many(100, producers=500))
    kafka.run(10)
    at = kafka.now
    kafka.run(60)
    later = [each for when, each in kafka.queried if isinstance(each, ProbePartitions) and when > at]
    assert max(len(each.partitions) for each in later) == PRODUCERS_AT_ONCE // 500
    assert kafka.report.most_producers[0].producer_ids == 500
    assert kafka.report.producer_ids == 50_000

    kafka.probes.update(many(100, producers=3))
    kafka.run(60)
    assert kafka.report.producer_ids == 300


def test_many_transactional_ids_are_listed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "IDS_PER_SECOND", 20)
    kafka = Cluster()
    kafka.transactions[TWO] = [replace(described(f"id-{each}"), state="Empty") for each in range(4_000)]
    kafka.run(190)
    counts = [each for _, each in kafka.queried if each == ListTransactions(TWO)]
    assert len(counts) == 1
    assert kafka.report.transactional_ids["Empty"] == 4_000
    assert len([each for _, each in kafka.queried if each == ListTransactions(ONE)]) == 4


def test_partitions_above_the_limit_are_reported_as_omitted() -> None:
    kafka = Cluster(many(300), pace=replace(PACE, partitions_max=200))
    kafka.run(20)
    assert (kafka.report.partitions, kafka.report.partitions_left_out) == (200, 100)


def test_reports_name_the_worst_only() -> None:
    kafka = Cluster({TopicPartition("t", each): open_from(0, end=each) for each in range(1, 60)})
    kafka.run(10)
    assert (len(kafka.report.lagging), kafka.report.lagging_partitions) == (20, 59)
    assert (kafka.report.lagging[0].lag, kafka.report.lag_max) == (59, 59)


# ---- what changes meanwhile


def test_unauthorized_partitions_are_reported_as_unreadable() -> None:
    kafka = Cluster({P0: EMPTY, P1: NOT_ALLOWED})
    kafka.run(10)
    assert (kafka.report.partitions, kafka.report.partitions_unreadable) == (1, 1)
    kafka.probes[P1] = EMPTY
    kafka.run(40)
    assert (kafka.report.partitions, kafka.report.partitions_unreadable) == (2, 0)


def test_a_topic_that_was_deleted_is_forgotten(kafka: Cluster) -> None:
    kafka.run(60)
    assert (kafka.report.producer_ids, len(kafka.report.hanging)) == (1, 1)
    del kafka.probes[P0]
    kafka.run(40)
    assert (kafka.report.producer_ids, kafka.report.partitions, kafka.report.lagging_partitions) == (0, 1, 0)
    assert not kafka.report.hanging


def test_a_broker_that_leaves_stops_nothing() -> None:
    # Given a round with queries for both brokers
    kafka = Cluster({P0: EMPTY, P1: open_from(5)}, leaders={P0: ONE, P1: TWO})
    kafka.transactions[TWO] = [described("payments", P1, started_at=kafka.now)]
    kafka.run(20)
    queries = kafka.watching.next([ONE, TWO], kafka.now)
    # When one broker leaves, with some of its queries sent and some not
    assert ListTransactions(TWO, OPEN_STATES) in queries
    kafka.leaders[P1] = ONE
    payments = kafka.transactions.pop(TWO)
    kafka.transactions[ONE] = payments
    kafka.watching.next([ONE], kafka.now)
    for query_message in queries:
        left = getattr(query_message, "node_id", None) == TWO
        kafka.watching.answered(query_message, None if left else kafka.answer(query_message), kafka.now)
    # Then its partitions and transactions are probed at their new broker
    kafka.run(60)
    assert kafka.report.partitions == 2
    assert [each.coordinator for each in kafka.report.open] == [ONE]
    assert kafka.watching.rounds >= 7


def test_transactions_of_silent_coordinator_stay_reported() -> None:
    kafka = Cluster({P0: open_from(5)})
    kafka.transactions[TWO] = [described("payments", P0, started_at=kafka.now)]
    kafka.run(11)
    kafka.silent = {TWO}
    kafka.run(30)
    assert kafka.report.open_transactions == 1


def test_silent_broker_does_not_delay_reports_of_others() -> None:
    of_two = [TopicPartition("shipments", each) for each in range(300)]
    kafka = Cluster({P0: open_from(5), **{each: open_from(5, producer=8) for each in of_two}})
    kafka.leaders.update(dict.fromkeys(of_two, TWO))
    kafka.transactions[ONE] = [described("payments", P0, started_at=kafka.now - 1000)]
    kafka.run(15)
    kafka.silent, kafka.timeout_seconds = {TWO}, 10.0
    for _ in range(200):
        kafka.run(1)
        assert [each.stuck for each in kafka.report.open] == [OVERDUE]


def test_age_of_last_stable_offset_lag_is_reported() -> None:
    kafka = Cluster({P0: open_from(5)})
    kafka.transactions[ONE] = [described("payments", P0, started_at=kafka.now)]
    kafka.run(40)
    assert kafka.report.lag_seconds_max == pytest.approx(40, abs=2)
    kafka.probes[P0] = open_from(9)  # one is over, the next one open
    kafka.run(11)
    assert kafka.report.lag_seconds_max < 12
