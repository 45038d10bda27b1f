"""A few seeds of each story, and the mutants. `python -m tests.sink_simulation` runs more seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.mutants import Mutant

from .mixes import mixed
from .model import Faults
from .mutants import MUTANTS, hunt
from .stories import STORIES, Story, play

_SEEDS = 6
_HUNTING_SEEDS = 60
_MIXES = 40


@pytest.mark.parametrize("name", STORIES)
def test_each_row_is_there_once(name: str) -> None:
    runs = [play(STORIES[name], seed) for seed in range(_SEEDS)]
    assert all(run.complete or run.errors for run in runs)


def test_each_row_is_there_once_in_mixed_stories() -> None:
    for seed in range(_MIXES):
        try:
            play(mixed(seed), seed)
        except BaseException:
            print(f"--mixes 1 --seed {seed}: {mixed(seed)}")
            raise


@pytest.mark.parametrize("load", [False, True], ids=["stream", "load"])
@pytest.mark.parametrize(("tasks", "partitions"), [(2, 4), (4, 4), (12, 4), (5, 10), (12, 40)])
def test_tasks_of_one_machine_need_no_requests_but_appends(tasks: int, partitions: int, load: bool) -> None:
    batches = 1 if load else 2
    story = Story(
        "requests", Faults(), tasks=tasks, partitions=partitions, batches=batches, rows=600, explicit=True, load=load
    )
    world = play(replace(story, machines=1), seed=1).world
    assert world.sent <= 1.1 * world.appends
    assert (world.tasks.queries, world.tasks.read_bytes) == (0, 0)
    assert world.drivers.queries <= 2 * partitions * batches + (20 if load else 0)  # of later runs of a finished load


@pytest.mark.parametrize(("tasks", "limit"), [(4, 1.3), (12, 1.5)])
def test_tasks_of_several_machines_are_seldom_refused(tasks: int, limit: float) -> None:
    story = Story("requests", Faults(), tasks=tasks, partitions=4, rows=600, explicit=True, machines=3)
    worlds = [play(story, seed=seed).world for seed in (1, 2, 3)]
    assert sum(world.sent for world in worlds) <= limit * sum(world.appends for world in worlds)


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defect_is_detected(mutant: Mutant) -> None:
    assert hunt(mutant, _HUNTING_SEEDS) is not None, f"not detected: {mutant.breaks}"


def test_seed_gives_the_same_run_twice() -> None:
    one, other = (play(STORIES["zombies, other order"], 3) for _ in range(2))
    assert [p.stored for p in one.world.topics["t"]] != []
    assert (one.world.appends, one.world.refusals, one.found) == (
        other.world.appends,
        other.world.refusals,
        other.found,
    )


def test_keyless_rows_may_duplicate_after_changed_split() -> None:
    """Decision 13, limits: with another split they belong to another partition, where no task searches for them."""
    story = replace(STORIES["changed split, no keys"], zombies=1.0, quiet=False)

    def try_seeds() -> None:
        for seed in range(200):
            play(story, seed)

    with pytest.raises(AssertionError, match="2 times instead of 1"):
        try_seeds()
