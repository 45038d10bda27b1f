"""Traces of the real sequencer, from simulation runs, are behaviors of the specification."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest

from tests.specification.recorder import Trace
from tests.specification.traces import coverage, record, validate

#: Each must occur, or the traces show too little.
EVENTS = ("submit", "read", "sent", "answered appended", "answer success", "mismatch", "answer failed")
SEEDS = range(2)
#: Of `required` topics, without what the specification does not have: old timestamps, LogAppendTime, claims.
SCENARIOS = [
    "race",
    "late",
    "throttled",
    "pipelines",
    "idle-pipelines",
    "refused-pipelines",
    "server-errors-required",
    "retries",
    "crowd",
    "one-broker",
    "cluster",
    "unclean",
    "lost-records",
    "proposals",
    "hanging",
    "rolling",
    "whole-requests",
    "compacted",
    "restarted-clients",
]


def _missing(traces: list[Trace]) -> list[str]:
    covered = coverage(traces)
    pipelined = any(each.get("after") for trace in traces for each in trace.events)
    return [each for each in EVENTS if covered[each] < 5] + ([] if pipelined else ["pipelined"])


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return record("pipelines", SEEDS)


def test_pipelined_traces_are_behaviors_of_the_specification(traces: list[Trace]) -> None:
    assert _missing(traces) == []
    assert validate(traces) is None


@pytest.mark.parametrize("scenario", ["refused-pipelines", "late"])
def test_traces_with_faults_are_behaviors_of_the_specification(scenario: str) -> None:
    assert validate(record(scenario, range(1))) is None


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_traces_are_behaviors_of_the_specification(say: Callable[[str], None]) -> None:
    traces = [trace for name in SCENARIOS for trace in record(name, range(40))]
    with ThreadPoolExecutor(os.cpu_count()) as runs:
        found = [each for each in runs.map(lambda trace: validate([trace], 600.0), traces) if each is not None]
    say(f"{len(traces)} traces, {sum(coverage(traces).values())} events, {len(found)} not in the specification")
    assert len(traces) >= 1_000
    assert found == []


def _with(trace: Trace, name: str, **fields: object) -> Trace:
    """The trace with other values in its last event of that name."""
    changed = copy(trace)
    changed.events = [dict(each) for each in trace.events]
    next(each for each in reversed(changed.events) if each["name"] == name).update(fields)
    return changed


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sent", {"seq": 77}),
        ("answered", {"kind": "duplicate"}),
        ("read", {"end": 99}),
    ],
    ids=["sequence", "duplicate taken for success", "log end"],
)
def test_planted_bad_trace_is_rejected(traces: list[Trace], name: str, fields: dict[str, object]) -> None:
    found = validate([_with(traces[0], name, **fields)])
    assert found is not None
    assert "is no step" in found


def test_traces_that_cover_too_little_are_rejected(traces: list[Trace]) -> None:
    beginning = copy(traces[0])
    beginning.events = beginning.events[:5]
    assert _missing([beginning]) != []


def test_recording_is_off_by_default() -> None:
    from fencepost_proxy.sequencer.sequencer import PartitionSequencer  # noqa: PLC0415
    from fencepost_proxy.session import dispatcher  # noqa: PLC0415

    assert dispatcher.PartitionSequencer is PartitionSequencer
