"""The append barrier of a topic: what an expansion may rely on once it is empty."""

from __future__ import annotations

import pytest

from fencepost_proxy.expansion.barrier import AppendBarrier

NOW = 1000.0


def _barrier(**how: float) -> AppendBarrier:
    return AppendBarrier("orders", **{"in_doubt_seconds": 30.0, **how})


def test_late_append_enters_after_reopening_with_new_count() -> None:
    barrier = _barrier()
    barrier.close(NOW, but_for=[(7, 0)])
    assert not barrier.enter("a", NOW + 1)

    barrier.open(3)

    assert barrier.enter("a", NOW + 2)
    assert barrier.count == 3
    assert barrier.closed_at is None
    barrier.close(NOW + 3)
    assert not barrier.enter("b", NOW + 3, {(7, 0)}), "it is not excepted from the next expansion"


def test_in_doubt_append_keeps_barrier_occupied_until_expiry() -> None:
    barrier = _barrier(in_doubt_seconds=30.0)
    barrier.enter("a", NOW)
    barrier.close(NOW + 1)
    barrier.leave("a", NOW + 2, in_doubt=True)
    assert barrier.in_flight == 0
    assert not barrier.empty(NOW + 31.9)
    assert barrier.empty(NOW + 32)
    assert barrier.empty_at == NOW + 32


def test_latest_in_doubt_append_sets_the_wait() -> None:
    barrier = _barrier(in_doubt_seconds=30.0)
    for name in "ab":
        barrier.enter(name, NOW)
    barrier.leave("a", NOW + 5, in_doubt=True)
    barrier.leave("b", NOW + 1, in_doubt=True)
    assert barrier.empty_at == NOW + 35


def test_new_barrier_is_not_empty_before_clear_time() -> None:
    barrier = _barrier(clear_at=NOW + 33)
    assert barrier.enter("a", NOW)
    barrier.leave("a", NOW + 1)
    assert not barrier.empty(NOW + 32.9)
    assert barrier.empty(NOW + 33)
    barrier.not_empty_before(NOW + 40)
    assert not barrier.empty(NOW + 39)


def test_excepted_transactions_enter_a_closed_barrier() -> None:
    barrier = _barrier()
    barrier.close(NOW, but_for=[(7, 0)])

    assert barrier.enter("commit soon", NOW, {(7, 0)})
    assert not barrier.enter("another producer", NOW, {(8, 0)})
    assert not barrier.enter("its next transaction", NOW, {(7, 1)})
    assert not barrier.enter("both", NOW, {(7, 0), (8, 0)})
    assert not barrier.enter("no transaction", NOW)
    assert not barrier.empty(NOW)
    barrier.close(NOW + 5)
    assert not barrier.enter("too late", NOW + 5, {(7, 0)})
    assert barrier.closed_at == NOW, "it was closed all the time"


def test_duplicate_enter_or_unknown_leave_is_an_error() -> None:
    barrier = _barrier()
    barrier.enter("a", NOW)
    with pytest.raises(ValueError, match="orders"):
        barrier.enter("a", NOW)
    with pytest.raises(KeyError):
        barrier.leave("b", NOW)
