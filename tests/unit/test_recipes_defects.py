"""Defects of the recipes, each with tests that detect it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost import FencepostError
from fencepost.recipes._leader import LeaderBase
from fencepost.recipes._loader import LoaderBase
from fencepost.recipes._lock import LockBase
from fencepost.recipes._queue import QueueBase
from fencepost.recipes._recipe import Recipe
from fencepost.recipes._registry import Numbered, RegistryBase, SequenceBase
from fencepost.recipes._table import TableBase
from tests.support.faulty_log import clock
from tests.support.mutants import Mutant, body, edit
from tests.support.recipe_log import RecipePartition
from tests.unit import test_recipes_leader as leader
from tests.unit import test_recipes_loader as loader
from tests.unit import test_recipes_lock as lock
from tests.unit import test_recipes_queue as queue
from tests.unit import test_recipes_registry as registry
from tests.unit import test_recipes_table as table

__all__ = ["clock"]  # a fixture

_AGAIN_AT_THE_NEW_END = """
while True:
    try:
        return (yield from self._write(records))
    except OffsetMismatchError:
        yield from self._read(lambda record: None)
"""
_SAME_NUMBER_AT_THE_NEW_END = """
yield from self._read(self._passed)
decided, number = record(), self.last + 1
if decided is None:
    return None
while True:
    try:
        headers = self._header(self.KIND), (NUMBER, b"%d" % number)
        offset = yield from self._write([Record(decided.value, decided.key, headers)])
    except OffsetMismatchError:
        yield from self._read(lambda record: None)
    else:
        self.last = number
        return offset
"""

LEASE, HELD = "begun >= self._observed + holder.lease_seconds", "self.holder is None or self.holder.token != self.token"
VERSION = "version is not None and self._version(key) != version"

DEFECTS: dict[str, tuple[Any, ...]] = {
    "leader: reads over a claim": (
        edit(LeaderBase, "_passed", ("self.term is not None", "False")),
        leader.test_stale_leader_is_refused,
        leader.test_reading_ends_at_a_foreign_claim,
        leader.test_nothing_of_an_old_term_follows_a_later_claim,
        queue.test_former_leader_finishes_nothing,
    ),
    "leader: after a refusal, reads on and appends again": (
        body(LeaderBase, "_append", _AGAIN_AT_THE_NEW_END),
        leader.test_stale_leader_is_refused,
        leader.test_nothing_of_an_old_term_follows_a_later_claim,
    ),
    "leader: claims after the claim of another": (
        edit(LeaderBase, "_claim", ("self.current != observed", "False")),
        leader.test_only_one_of_two_contenders_wins,
    ),
    "leader: a claim does not read on first": (
        edit(Recipe, "_read", ("apply(item.value)", "None")),
        leader.test_busy_leader_can_be_deposed,
    ),
    "loader: rows that are there are not skipped": (
        edit(LoaderBase, "_is_there", ("progress.rows <= found.rows", "False")),
        loader.test_load_can_be_killed_anywhere,
    ),
    "loader: skips the whole unit": (
        edit(LoaderBase, "_is_there", ("progress.rows <= found.rows", "True")),
        loader.test_load_can_be_killed_anywhere,
    ),
    "loader: positions are not compared": (
        edit(LoaderBase, "_is_there", ("progress.at != found.at", "False")),
        loader.test_changed_source_is_refused,
    ),
    "loader: appends after another loader": (
        edit(LoaderBase, "_write", ("progress is not None", "False")),
        loader.test_older_loader_is_refused,
    ),
    "loader: states what is not appended yet": (
        edit(LoaderBase, "_stated", ("self._complete", "self._unit"), ("self.position", "self._taken_to")),
        loader.test_load_can_be_killed_anywhere,
    ),
    "loader: new partition count for old units": (
        edit(LoaderBase, "_take", ("self._unit > boundary", "True")),
        loader.test_rows_stay_in_place_when_the_topic_is_expanded,
    ),
    "loader: starts again if its position was deleted": (
        edit(LoaderBase, "_start", ("any_deleted", "False")),
        loader.test_deleted_position_is_an_error,
    ),
    "lock: a waiter does not wait for the lease": (
        edit(LockBase, "_acquire", (LEASE, "True")),
        lock.test_waiter_takes_the_lock_only_after_the_lease,
        lock.test_tokens_and_leases_under_faults,
    ),
    "lock: a holder that lost the lock renews it": (
        edit(LockBase, "_passed", ("self.token is not None", "False")),
        edit(LockBase, "_kept", (HELD, "False")),
        lock.test_late_holder_notices_the_loss,
    ),
    "lock: the holder counts its lease from the response": (
        edit(LockBase, "_stated", ("begun + self.lease_seconds", "now() + 2 * self.lease_seconds")),
        lock.test_tokens_and_leases_under_faults,
    ),
    "queue: the position of another process's results is not used": (
        edit(QueueBase, "_take", ("self._at.next_offset = self.position", "pass")),
        queue.test_next_leader_continues_at_the_position,
        queue.test_each_item_has_one_result_under_faults,
    ),
    "queue: after an unknown outcome, the position is not read again": (
        edit(QueueBase, "_take", ("yield from self._read_to_end()", "yield from self._read(lambda record: None)")),
        queue.test_each_item_has_one_result_under_faults,
    ),
    "registry: the number of a refused append is appended at the new end": (
        body(Numbered, "_added", _SAME_NUMBER_AT_THE_NEW_END),
        registry.test_two_masters_never_give_one_number_twice,
        registry.test_two_takers_never_get_one_number,
        registry.test_registry_under_faults,
    ),
    "registry: a name that another writer registered is registered again": (
        edit(RegistryBase, "_new", ("name in self._entries", "False")),
        registry.test_two_masters_never_give_one_number_twice,
    ),
    "sequence: the number of an append with unknown outcome is never returned": (
        edit(SequenceBase, "_next", ("purpose in self._found", "False")),
        registry.test_number_of_an_unknown_outcome_is_returned,
    ),
    "table: a get does not read to the end": (
        edit(TableBase, "_get", ("yield from self._read_to_end()", "yield from ()")),
        table.test_get_shows_what_others_put,
        table.test_history_is_linearizable_under_faults,
    ),
    "table: after a refusal, the version is not compared again": (
        edit(TableBase, "_changed_to", (VERSION, f"tries == 1 and {VERSION}")),
        table.test_stale_put_is_refused,
        table.test_history_is_linearizable_under_faults,
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_fails_each_of_its_tests(defect: str, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [each for each in DEFECTS[defect] if each.__name__.startswith("test_")]
    with Mutant(defect, defect, (), *[each for each in DEFECTS[defect] if each not in tests]).live():
        for test in tests:
            clock.seconds = 0.0
            fixtures = {"clock": clock, "monkeypatch": monkeypatch, "partition": RecipePartition.quiet()}
            with pytest.raises((AssertionError, FencepostError, pytest.fail.Exception)):
                test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
