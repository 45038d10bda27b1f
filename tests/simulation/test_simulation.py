"""Run the proxy without sockets on more than a thousand seeds (`scenarios.py`, `checkers.py`).

`make test-all` and `make simulate SEEDS=20000` run more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .scenarios import SCENARIOS, run

#: CPU time: almost four minutes with forty processes on two cores.
pytestmark = pytest.mark.timeout(900)

#: Runs of one scenario per test.
_BATCH = 12
_SEEDS, _LONG_SEEDS = 24, 240


def _batches() -> Iterator[Any]:
    for first in range(0, _LONG_SEEDS, _BATCH):
        yield pytest.param(first, marks=[] if first < _SEEDS else pytest.mark.soak)


@pytest.mark.no_cover  # three times slower; `test_runs_are_not_idle` covers the same code
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
        # (1) Two of three appends in a request were refused, the third waited. (2) The connection broke. (3) The two
        # stayed pending indefinitely, and delayed later commits of that epoch.
        ("atomic-cluster", 20019),
        ("atomic-roaming", 126),
        # (1) A late request of a committed transaction began the next one. (2) The first was reported as refused.
        ("atomic-cluster", 40303),
    ],
)
def test_what_once_failed_holds(name: str, seed: int) -> None:
    outcome = run(SCENARIOS[name], seed)
    assert not outcome.found


@pytest.mark.no_cover
def test_seed_gives_the_same_run_in_every_process() -> None:
    """Byte for byte, for every scenario and hash seed."""
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
    """In every scenario some appends are accepted and some refused or lost."""
    for name, scenario in SCENARIOS.items():
        outcomes = [run(scenario, seed) for seed in range(3)]
        assert sum(o.accepted for o in outcomes) > 20, name
        assert sum(o.refused + o.unknown for o in outcomes) > 0, name
