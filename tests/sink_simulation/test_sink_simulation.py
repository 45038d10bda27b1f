"""A few seeds of each story, and the mutants. `python -m tests.sink_simulation` runs more seeds."""

from __future__ import annotations

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
@pytest.mark.parametrize("partitions", [4, 40])
def test_tasks_need_no_requests_but_appends(partitions: int, load: bool) -> None:
    batches = 1 if load else 2
    story = Story("requests", Faults(), partitions=partitions, batches=batches, rows=600, explicit=True, load=load)
    world = play(story, seed=1).world
    assert world.sent <= 1.1 * world.appends
    assert (world.tasks.queries, world.tasks.read_bytes) == (0, 0)
    # Also of later runs of a finished load.
    assert world.drivers.queries <= 2 * partitions * batches + (30 if load else 0)


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
