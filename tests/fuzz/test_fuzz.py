"""Replay the corpus, run the fuzzer for a short time, and verify that it detects defects."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.__main__ import TARGETS, replay
from tests.fuzz.defects import DEFECTS, SLOW
from tests.fuzz.engine import CORPUS, Program, TooSlow, check_time, fuzz, slowest_call
from tests.support.executors import each_executor, executing
from tests.support.mutants import Mutant

SEED = 1
SHORT_RUN = {"session": 120, "sequencer": 500, "wire": 1500, "large": 12}


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
@each_executor
def test_what_failed_once_holds(executor: str, path: Path) -> None:
    with executing(executor):
        replay(path)


@pytest.mark.parametrize("name", TARGETS)
@each_executor
def test_a_short_run_finds_nothing(executor: str, name: str) -> None:
    """Not guided: coverage measurement uses the same tracing."""
    with executing(executor):
        result = fuzz(TARGETS[name][0], SEED, inputs=SHORT_RUN[name], guided=False)
    print(f"seed {SEED}, executor {executor}: {result.inputs} inputs, {result.events} events, {result.features} states")
    assert not result.failures, "\n".join(
        f"{found.signature}: {found.message}\n{found.program.to_json()}" for found in result.failures
    )


@pytest.mark.parametrize("name", TARGETS)
def test_seed_gives_the_same_run_twice(name: str) -> None:
    target = TARGETS[name][0]
    inputs = 25 if name != "large" else 3
    digests = {fuzz(target, 7, inputs=inputs, guided=False, minimised=False).digest for _ in range(2)}
    assert len(digests) == 1
    assert fuzz(target, 8, inputs=inputs, guided=False, minimised=False).digest not in digests


# ---- defects that it must detect


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize(("defect", "inputs"), [pytest.param(*each, id=each[0].name) for each in DEFECTS])
def test_defect_is_detected(defect: Mutant, inputs: int) -> None:
    target = TARGETS[defect.where[0]][0]
    with defect.live():
        assert any(
            fuzz(target, seed, inputs=20, guided=False, minimised=False).failures for seed in range(inputs // 20)
        )


# ---- time


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize(("no_limit", "frame"), [pytest.param(*each, id=each[0].name) for each in SLOW])
def test_slow_call_is_detected(no_limit: Mutant, frame: dict[str, Any]) -> None:
    setup = {"whole": False, "produce": 12, "append_time": False, "upstream_first": True, "calm": False}
    stored = [["stored", 0, 1]] * 5
    answer = ["answer", 0, "ok", frame.get("variant", 1), 0, 1]
    quota_is_renewed = ["tick", 1]
    program = Program(setup, [["send", 0, [frame], []], *stored, answer, quota_is_renewed, answer, *stored])
    assert check_time(TARGETS["large"][0], program) > 0
    tracing = sys.gettrace()
    sys.settrace(None)  # a traced call is too slow to measure
    try:
        with no_limit.live(), pytest.raises(TooSlow):
            check_time(TARGETS["large"][0], program)
    finally:
        sys.settrace(tracing)


def test_slowest_input_is_named_and_can_be_replayed() -> None:
    result = fuzz(TARGETS["sequencer"][0], SEED, inputs=20, guided=False)
    assert result.slowest is not None
    assert result.slowest_seconds > 0
    assert slowest_call(TARGETS["sequencer"][0], result.slowest) > 0
