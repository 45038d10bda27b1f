"""The lock, over a partition in memory with every fault of a real one. Time passes by sleeping only."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from fencepost import (
    ForeignRecordError,
    InDoubtError,
    LockHeldError,
    LockLostError,
    OffsetMismatchError,
    PositionLostError,
    Record,
)
from fencepost.recipes import Holder, Lock
from tests.support.faulty_log import clock
from tests.support.recipe_log import RecipePartition, partition

__all__ = ["clock", "partition"]  # fixtures


def _lock(partition: RecipePartition, name: str = "a", problem: float = 0.0, **options: float) -> Lock:
    return Lock(partition.writer(problem), name, **options)


def test_token_is_the_offset_and_later_tokens_are_greater(clock: SimpleNamespace, partition: RecipePartition) -> None:
    a, b = _lock(partition, "a"), _lock(partition, "b")
    assert a.acquire() == a.token == 0
    a.renew()
    assert a.token == 0
    a.release()
    assert (a.token, a.has_lease) == (None, False)
    assert b.acquire(timeout_seconds=0) == 3
    assert [json.loads(value or b"") for value in partition.values] == [
        {"holder": "a", "lease_ms": 10_000},
        {"holder": "a", "lease_ms": 10_000, "token": 0},
        {"holder": "a", "token": 0},
        {"holder": "b", "lease_ms": 10_000},
    ]
    kinds = [record.headers[0][1] for record in partition.records if record is not None]
    assert kinds == [b"lock/1 acquire", b"lock/1 renew", b"lock/1 release", b"lock/1 acquire"]


def test_waiter_takes_the_lock_only_after_the_lease(clock: SimpleNamespace, partition: RecipePartition) -> None:
    holder, waiter = _lock(partition, "holder"), _lock(partition, "waiter")
    holder.acquire()
    with pytest.raises(LockHeldError, match=r"not acquired in time: 'holder' holds it with token 0 \(try later\)"):
        waiter.acquire(timeout_seconds=5)
    assert waiter.holder == Holder(0, "holder", 10.0)
    clock.seconds = 8
    holder.renew()
    with pytest.raises(LockHeldError):
        waiter.acquire(timeout_seconds=4)
    begun = clock.seconds
    assert waiter.acquire(timeout_seconds=20) == 2
    assert clock.seconds - begun < 10
    assert not holder.has_lease


def test_late_holder_notices_the_loss(clock: SimpleNamespace, partition: RecipePartition) -> None:
    holder, waiter = _lock(partition, "holder"), _lock(partition, "waiter")
    holder.acquire()
    waiter.acquire()
    with pytest.raises(LockLostError, match="does not hold the lock: 'waiter' acquired it with token 1"):
        holder.renew()
    for act in (holder.renew, holder.release):
        with pytest.raises(LockLostError, match="it was not acquired"):
            act()
    assert holder.token is None
    assert len(partition.records) == 2
    assert waiter.has_lease


def test_tokens_and_leases_under_faults(clock: SimpleNamespace) -> None:
    """At each time one process at most holds the lock by its own clock, and each acquisition has a greater token."""
    for seed in range(40):
        rng = random.Random(seed)
        partition = RecipePartition(rng)
        problem = rng.choice([0.0, 0.2, 0.5])
        locks = [_lock(partition, f"{number}", problem, lease_seconds=3) for number in range(3)]
        newest = -1
        for _ in range(60):
            at = rng.randrange(3)
            lock = locks[at]
            try:
                if lock.token is None:
                    token = lock.acquire(timeout_seconds=rng.choice([0, 1, 4]))
                    assert token > newest, f"seed {seed}: a token twice"
                    newest = token
                else:
                    rng.choice([lock.renew, lock.release])()
            except PositionLostError:  # the high watermark of this stand-in may go back; Kafka's does not
                locks[at] = _lock(partition, f"{at}", problem, lease_seconds=3)
            except (OffsetMismatchError, InDoubtError, LockHeldError, LockLostError, ConnectionError):
                pass
            assert sum(each.has_lease for each in locks) <= 1, f"seed {seed}: two holders"
            clock.seconds += rng.uniform(0, 2)


def test_unreadable_log_is_no_free_lock(clock: SimpleNamespace, partition: RecipePartition) -> None:
    holder, waiter = _lock(partition, "holder"), _lock(partition, "waiter")
    holder.acquire()
    waiter._log._reading.consumer.problem = 1.1
    with pytest.raises(ConnectionError):
        waiter.acquire(timeout_seconds=100)
    assert clock.seconds > 10
    assert partition.values == [partition.values[0]]


def test_acquisition_of_a_held_lock_is_an_error() -> None:
    lock = _lock(RecipePartition.quiet())
    lock.acquire()
    with pytest.raises(RuntimeError, match="this process holds the lock"):
        lock.acquire()
    with pytest.raises(ValueError, match="lease_seconds=0 must be > 0"):
        _lock(RecipePartition.quiet(), lease_seconds=0)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Record(b"x"), "it is no record of a lock"),
        (
            Record(b'{"holder": "a", "lease_ms": 1e999}', headers=(("fencepost-recipe", b"lock/1 acquire"),)),
            "it is no record of a lock",
        ),
        (
            Record(b'{"holder": "a", "lease_ms": 1, "token": 7}', headers=(("fencepost-recipe", b"lock/1 renew"),)),
            "it is of token 7, which does not hold the lock",
        ),
    ],
)
def test_record_without_the_format_stops_reading(record: Record, why: str, partition: RecipePartition) -> None:
    partition.append_foreign(record)
    with pytest.raises(ForeignRecordError, match=f"at offset 0: {why}"):
        _lock(partition).acquire()
