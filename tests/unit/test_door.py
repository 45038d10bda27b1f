"""The door of a counted topic: what an expansion may rely on once it is empty."""

from __future__ import annotations

import pytest

from fencepost_proxy.topics.door import Door

NOW = 1000.0


def _door(**how: float) -> Door:
    return Door("orders", **{"doubt_seconds": 30.0, **how})


def test_it_is_open_at_first_and_empty() -> None:
    door = _door()

    assert not door.closed
    assert door.empty(NOW)
    assert door.count is None


def test_who_is_inside_keeps_an_expansion_waiting() -> None:
    door = _door()
    assert door.enter("a", NOW)
    assert door.enter("b", NOW)
    door.close(NOW + 1)

    assert not door.enter("c", NOW + 1)
    assert door.in_flight == 2
    door.leave("a", NOW + 2)
    assert not door.empty(NOW + 2)
    door.leave("b", NOW + 3)
    assert door.empty(NOW + 3)


def test_who_came_too_late_enters_once_it_opens_with_the_new_count() -> None:
    door = _door()
    door.close(NOW)
    assert not door.enter("a", NOW + 1)

    door.open(3)

    assert door.enter("a", NOW + 2)
    assert door.count == 3
    assert door.closed_at is None


def test_an_append_whose_connection_broke_holds_it_as_long_as_a_broker_may_have_it_queued() -> None:
    door = _door(doubt_seconds=30.0)
    door.enter("a", NOW)
    door.close(NOW + 1)
    door.leave("a", NOW + 2, in_doubt=True)

    assert door.in_flight == 0
    assert not door.empty(NOW + 31.9)
    assert door.empty(NOW + 32)
    assert door.empty_at == NOW + 32


def test_a_later_doubt_counts_and_an_earlier_one_does_not_shorten_it() -> None:
    door = _door(doubt_seconds=30.0)
    for name in "ab":
        door.enter(name, NOW)
    door.leave("a", NOW + 5, in_doubt=True)
    door.leave("b", NOW + 1, in_doubt=True)

    assert door.empty_at == NOW + 35


def test_what_never_entered_holds_a_new_door() -> None:
    door = _door(clear_at=NOW + 33)

    assert door.enter("a", NOW)
    door.leave("a", NOW + 1)
    assert not door.empty(NOW + 32.9)
    assert door.empty(NOW + 33)
    door.not_empty_before(NOW + 40)
    assert not door.empty(NOW + 39)


def test_transactions_that_are_waited_for_may_end() -> None:
    door = _door()
    door.close(NOW, but_for=[(7, 0)])

    assert door.enter("commit soon", NOW, {(7, 0)})
    assert not door.enter("another producer", NOW, {(8, 0)})
    assert not door.enter("its next transaction", NOW, {(7, 1)})
    assert not door.enter("both", NOW, {(7, 0), (8, 0)})
    assert not door.enter("no transaction", NOW)
    assert not door.empty(NOW)
    door.close(NOW + 5)
    assert not door.enter("too late", NOW + 5, {(7, 0)})
    assert door.closed_at == NOW, "it was closed all the time"


def test_opening_ends_the_exceptions() -> None:
    door = _door()
    door.close(NOW, but_for=[(7, 0)])
    door.open(2)
    door.close(NOW + 1)

    assert not door.enter("a", NOW + 1, {(7, 0)})


def test_a_pass_is_used_once_at_a_time() -> None:
    door = _door()
    door.enter("a", NOW)

    with pytest.raises(ValueError, match="orders"):
        door.enter("a", NOW)
    with pytest.raises(KeyError):
        door.leave("b", NOW)
