"""Over a thousand short runs of the whole proxy without a socket in it, by seed (`scenarios.py`, `checkers.py`).

`make test-long` and `make simulate SEEDS=20000` run more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .scenarios import SCENARIOS, run

#: All of it is work: four minutes were nearly used up on a machine with forty processes that wanted its two cores.
pytestmark = pytest.mark.timeout(900)

#: Runs of each scenario, in batches of which a failure names the seed.
_BATCH = 12
_SEEDS, _LONG_SEEDS = 24, 240


def _batches() -> Iterator[Any]:
    for first in range(0, _LONG_SEEDS, _BATCH):
        yield pytest.param(first, marks=[] if first < _SEEDS else pytest.mark.soak)


@pytest.mark.no_cover  # it would take three times as long; `test_runs_are_not_idle` goes the same ways
@pytest.mark.parametrize("first", list(_batches()))
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_seed_keeps_the_promises(name: str, first: int) -> None:
    for seed in range(first, first + _BATCH):
        outcome = run(SCENARIOS[name], seed)
        replay = f"python -m tests.simulation --scenario {name} --seed {seed} --trace"
        assert not outcome.found, f"seed {seed} of {name}: {'; '.join(outcome.found)}\nreplay: {replay}"


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        # Of a bundle of three two were refused, the third waited at its gate, and the connection broke: the two were
        # taken for under way ever after, and kept the next transactions of the same epoch from committing.
        ("atomic-cluster", 20019),
        ("atomic-roaming", 126),
        # A late request of a transaction that was committed began the next one, and "refused" was told of the first.
        ("atomic-cluster", 40303),
    ],
)
def test_what_once_failed_holds(name: str, seed: int) -> None:
    outcome = run(SCENARIOS[name], seed)
    assert not outcome.found


@pytest.mark.no_cover
def test_seed_gives_the_same_run_in_every_process() -> None:
    """Byte for byte, in every scenario, and whatever Python's hashes are."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", "5", "--trace"]
    traces = []
    for hashes in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hashes}
        traces.append(subprocess.run(command, capture_output=True, text=True, check=False, env=env).stdout)
    assert traces[0] == traces[1]
    for name in SCENARIOS:
        assert f"\n{name} seed 5: " in traces[0]
    assert len(traces[0].splitlines()) > 100 * len(SCENARIOS)


def test_runs_are_not_idle() -> None:
    """What is simulated happens: appends are accepted, refused, and lost, in every scenario."""
    for name, scenario in SCENARIOS.items():
        outcomes = [run(scenario, seed) for seed in range(3)]
        assert sum(o.accepted for o in outcomes) > 20, name
        assert sum(o.refused + o.unknown for o in outcomes) > 0, name
