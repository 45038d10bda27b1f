"""Partition counts of a process: which source holds, grace periods, and the counts that clients were served."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import pytest

from fencepost_proxy.expansion.counts import Client, Counts
from fencepost_proxy.expansion.history import NO_EXPANSIONS, Expansion, ExpansionHistory

ORDERS, ANEW, PROPOSAL = UUID(int=1), UUID(int=2), UUID(int=3)
NOW, NOW_MS = 1000.0, 1_700_000_000_000
ME, ANOTHER = Client("10.0.0.1", "app"), Client("10.0.0.2", "app")


@dataclass
class World:
    """One topic `orders`, in metadata and in the state topic."""

    last_observed: tuple[UUID, int] | None = (ORDERS, 2)
    history: ExpansionHistory = NO_EXPANSIONS
    served_max: int = 3
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = Counts(
            lambda topic: self.last_observed,
            lambda topic, topic_id: self.history if topic_id == ORDERS else NO_EXPANSIONS,
            lambda: NOW_MS,
            resolve_seconds=900.0,
            served_max=self.served_max,
        )

    def count(self, at: float = NOW) -> int | None:
        return self.counts.count("orders", at)

    def in_grace_period(self, at: float = NOW) -> bool:
        self.count(at)
        return self.counts.in_grace_period("orders", at)


def _expansion(to: int, *, ended_at_ms: int | None = None) -> Expansion:
    return Expansion("orders", ORDERS, 2, to, PROPOSAL, NOW_MS, ended_at_ms=ended_at_ms)


def test_the_largest_count_that_is_known_is_true() -> None:
    assert World(last_observed=None).count() is None
    world = World()
    assert world.count() == 2
    world.history = ExpansionHistory(first_count=3)
    assert world.count() == 3, "metadata lags"
    world.last_observed = (ORDERS, 8)
    assert world.count() == 8, "it was expanded at Kafka"
    world.last_observed = (ORDERS, 3)
    assert world.count() == 8, "partitions are never taken away: this broker lags"


def test_partitions_of_a_pending_expansion_do_not_count() -> None:
    world = World(last_observed=(ORDERS, 3), history=ExpansionHistory(first_count=2, pending=_expansion(3)))
    assert world.count() == 2
    world.history = ExpansionHistory(expansions=(_expansion(3, ended_at_ms=NOW_MS),))
    assert world.count() == 3


def test_recreated_topic_has_its_own_count() -> None:
    world = World(last_observed=(ORDERS, 8))
    world.count()
    world.last_observed = (ANEW, 2)
    assert world.count() == 2
    assert not world.in_grace_period()


def test_grace_period_starts_when_expansion_is_observed() -> None:
    world = World()
    assert not world.in_grace_period(), "no expansion is known"
    world.last_observed = (ORDERS, 3)
    assert world.in_grace_period(NOW + 1)
    assert world.in_grace_period(NOW + 900)
    assert not world.in_grace_period(NOW + 902)
    assert World(last_observed=(ORDERS, 3), history=ExpansionHistory(first_count=2)).in_grace_period(), "unrecorded"


@pytest.mark.parametrize(
    ("ended_ms_ago", "grace"), [(800_000, True), (901_000, False), (-5000, True)], ids=["", "long ago", "another clock"]
)
def test_grace_period_after_restart_follows_last_expansion(ended_ms_ago: int, grace: bool) -> None:
    expansion = _expansion(3, ended_at_ms=NOW_MS - ended_ms_ago)
    world = World(last_observed=(ORDERS, 3), history=ExpansionHistory(3, (expansion,)))
    assert not world.counts.in_grace_period("orders", NOW), "no query yet"
    assert world.in_grace_period() is grace


def test_count_is_confirmed_by_a_later_query() -> None:
    world = World()
    assert not world.counts.confirmed_since("orders", NOW)
    world.counts.confirm("orders", NOW, NOW + 1)
    assert world.counts.confirmed_since("orders", NOW)
    assert not world.counts.confirmed_since("orders", NOW + 0.5), "that query was earlier"
    world.counts.confirm("orders", NOW - 5, NOW + 2)
    assert world.counts.confirmed_since("orders", NOW), "an older query changes nothing"
    world.counts.forget("orders")
    assert not world.counts.confirmed_since("orders", NOW)


def test_absence_of_a_topic_can_be_confirmed() -> None:
    world = World(last_observed=None)
    world.counts.confirm("orders", NOW, NOW + 1)
    assert world.counts.confirmed_since("orders", NOW)
    assert not world.counts.confirmed_since("orders", NOW + 0.5)
    world.last_observed = (ORDERS, 2)
    assert not world.counts.confirmed_since("orders", NOW), "the topic exists now"


def test_a_pending_expansion_confirms_nothing_and_breaks_nothing() -> None:
    world = World(last_observed=(ORDERS, 3), history=ExpansionHistory(first_count=2, pending=_expansion(3)))
    world.counts.confirm("orders", NOW, NOW)
    assert not world.counts.confirmed_since("orders", NOW)


def test_each_client_has_the_count_last_served() -> None:
    counts = World().counts
    counts.serve(ME, [("orders", 2), ("payments", 5)])
    counts.serve(ANOTHER, [("orders", 3)])
    assert counts.served(ME, "orders", NOW) == 2
    assert counts.served(ANOTHER, "orders", NOW) == 3
    assert counts.served(ANOTHER, "payments", NOW) is None
    counts.serve(ME, [("orders", 3)])
    assert counts.served(ME, "orders", NOW) == 3


def test_repeated_refusals_discard_the_served_count() -> None:
    counts = World().counts
    counts.serve(ME, [("orders", 2)])
    counts.refused(ME, "orders", NOW)
    assert counts.served(ME, "orders", NOW + 4) == 2
    counts.refused(ME, "orders", NOW + 4)
    assert counts.served(ME, "orders", NOW + 5.1) is None, "counted from the first refusal: it would never end"
    assert counts.served(ME, "orders", NOW) is None


def test_served_counts_are_bounded_and_evicted_oldest_first() -> None:
    counts = World(served_max=3).counts
    for number in range(5):
        counts.serve(Client("10.0.0.1", f"app-{number}"), [("orders", number)])
    reported = [counts.served(Client("10.0.0.1", f"app-{number}"), "orders", NOW) for number in range(5)]
    assert reported == [None, None, 2, 3, 4]
