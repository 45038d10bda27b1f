"""Comparison of two checkouts: equal ones show no difference, one changed byte does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.same_bytes import difference, fuzzed, simulated
from tests.simulation.clock import Sim, Wire

ROOT = Path(__file__).parents[2]


@pytest.mark.no_cover
def test_a_checkout_is_the_same_as_itself() -> None:
    command = [sys.executable, "-m", "tests.same_bytes", str(ROOT), "--seeds", "1", "--inputs", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": the same, ") == 5


def test_one_byte_on_a_wire_changes_the_digest() -> None:
    written = []
    for data in (b"same", b"sane"):
        sim = Sim(1)
        Wire(sim, lambda: 0.0, lambda _: None).write(data)
        written.append(sim.written)
    assert len(set(written)) == 2


def test_a_digest_that_differs_is_found() -> None:
    assert simulated(["digest calm 0 5/ab/cd", "calm 1"]) == ["calm 0 5/ab/cd"]
    header = "target inputs events seconds states failures digest"
    assert fuzzed(["x", header, "sequencer 1 2 9 3 0 ff", "slowest call: 2 ms"]) == ["sequencer 1 2 3 0 ff"]
    assert difference(["a 1"], ["a 1"]) == ""
    assert difference(["a 1", "b 2"], ["a 1", "b 3"]) == "- b 3\n+ b 2"
    assert difference([], [])
    assert difference(["a 1"], [])
