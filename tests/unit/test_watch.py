"""Members that have less than they were assigned: when they rejoin or get the rest."""

from __future__ import annotations

from uuid import UUID

from fencepost_proxy.expansion.watch import Watch, without
from fencepost_proxy.types import TopicPartition

P0, P2, P3 = (TopicPartition("orders", each) for each in (0, 2, 3))
ID = UUID(int=7)
IDS = {"orders": ID}
ALL = ((ID, (0, 2, 3)),)


def _watch(*gated: TopicPartition) -> Watch:
    watch = Watch()
    watch.track_gated("g", gated, gated)
    return watch


# ---- the classic protocol


def test_member_rejoins_once_its_missing_partition_is_released() -> None:
    watch = _watch(P2)
    watch.synced("g", "m", 5, frozenset({P2}))
    assert not watch.must_rejoin("g", "m", 5, 0.0)
    watch.update("g", frozenset())
    assert watch.must_rejoin("g", "m", 5, 1.0)
    assert watch.must_rejoin("g", "m", 5, 2.0)  # until it has
    watch.synced("g", "m", 5, frozenset())  # another member gets the same generation again
    assert not watch.must_rejoin("g", "m", 5, 3.0)


def test_only_members_that_lack_a_released_partition_rejoin() -> None:
    watch = _watch(P2, P3)
    for group, member, lacks in (
        ("g", "two", {P2}),
        ("g", "three", {P3}),
        ("g", "has all", ()),
        ("other", "two", {P2}),
    ):
        watch.synced(group, member, 5, frozenset(lacks))
    watch.update("g", frozenset({P3}))

    members = [("g", "two", 5), ("g", "two", 6), ("g", "three", 5), ("g", "has all", 5), ("other", "two", 5)]
    assert [each for each in members if watch.must_rejoin(*each, 0.0)] == [("g", "two", 5)]


def test_unknown_member_rejoins_after_recorded_partitions_are_released() -> None:
    # Given a process that was just started: it has the state topic, and no member.
    watch = Watch()
    watch.record("g", frozenset({P2}))
    # Then it does nothing before it knows how far the group is.
    assert not watch.must_rejoin("g", "m", 5, 0.0)
    watch.update("g", frozenset({P2}))
    assert not watch.must_rejoin("g", "m", 5, 0.0)
    # And brings them to join once what they may lack is released.
    watch.update("g", frozenset())
    assert watch.must_rejoin("g", "m", 5, 0.0)
    watch.synced("g", "m", 6, frozenset())
    assert not watch.must_rejoin("g", "m", 6, 0.0)


def test_unqueried_partition_is_not_assumed_released_after_start() -> None:
    watch = Watch()
    watch.record("g", frozenset({P2, P3}))
    watch.track_gated("g", frozenset({P2}), frozenset({P2}))  # one member joins, and is about to get P2
    assert not watch.must_rejoin("g", "another", 5, 0.0)


# ---- KIP-848


NONE = ((ID, ()),)
ONE = ((ID, (0,)),)
TWO = ((ID, (0, 2)),)


def _reported(watch: Watch, *lacking: TopicPartition) -> None:
    owned = without(ALL, {(ID, each.partition) for each in lacking})
    watch.consumer_heartbeat("g", "m", NONE, 0.0)
    watch.consumer_assigned("g", "m", ALL, owned, frozenset(lacking))


def test_member_receives_only_released_partitions() -> None:
    watch = _watch(P2, P3)
    _reported(watch, P2, P3)
    assert watch.consumer_gets("g", "m", IDS) is None
    watch.update("g", frozenset({P3}))
    assert watch.consumer_gets("g", "m", IDS) == TWO
    watch.consumer_heartbeat("g", "m", TWO, 0.0)
    assert watch.consumer_gets("g", "m", IDS) is None
    watch.update("g", frozenset())
    assert watch.consumer_gets("g", "m", IDS) == ALL
    watch.consumer_heartbeat("g", "m", ALL, 0.0)
    assert watch.consumer_gets("g", "m", IDS) is None


def test_member_that_ignores_a_release_is_sent_again() -> None:
    watch = _watch(P2)
    _reported(watch, P2)
    watch.update("g", frozenset())
    reported = [watch.consumer_gets("g", "m", IDS) is not None for _ in range(7)]
    assert reported == [True, False, True, False, False, True, False]


def test_what_the_coordinator_says_is_the_later_word() -> None:
    watch = _watch(P2)
    _reported(watch, P2)
    watch.consumer_assigned("g", "m", ONE, ONE, frozenset())
    watch.update("g", frozenset())
    assert watch.consumer_gets("g", "m", IDS) is None


def test_silent_member_is_assumed_to_own_its_assignment() -> None:
    # Given a process that was just started, and a member that was there before.
    watch = _watch(P2)
    watch.consumer_assigned("g", "m", TWO, ONE, frozenset({P2}))
    watch.consumer_assigned("g", "m", ONE, ONE, frozenset())
    stated = [watch.consumer_heartbeat("g", "m", None, 0.0) for _ in range(5)]
    assert stated == [None, None, ONE, None, None]


def test_reporting_member_is_not_answered_for() -> None:
    watch = _watch(P2)
    watch.consumer_heartbeat("g", "m", NONE, 0.0)
    watch.consumer_assigned("g", "m", TWO, ONE, frozenset({P2}))
    assert watch.consumer_heartbeat("g", "m", ONE, 0.0) is None
    assert watch.consumer_heartbeat("g", "m", None, 0.0) is None


def test_group_without_gated_partitions_is_not_watched() -> None:
    watch = Watch()
    watch.track_gated("g", (), (P2,))
    watch.synced("g", "m", 1, frozenset())
    watch.consumer_assigned("g", "m", ALL, ALL, frozenset())
    assert not watch.groups
    assert watch.consumer("g", "m") is None
