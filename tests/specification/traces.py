"""Replays traces of real sequencers through `specification/SequencerTrace.tla`, all in one run of TLC."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.simulation.scenarios import SCENARIOS, run
from tests.specification import tlc
from tests.specification.recorder import Trace, recording


def record(scenario: str, seeds: Iterable[int]) -> list[Trace]:
    """Odd seeds: appends by permit of the native module do not reach a sequencer. TLC's integers have 32 bits."""
    with recording() as traces:
        for seed in seeds:
            run(replace(SCENARIOS[scenario], start_offsets=(0,), proxies=1), 2 * seed + 1)
    return _complete(traces)


def _complete(traces: Iterable[Trace]) -> list[Trace]:
    """Without the events from the first one on of which the run ended before they were complete."""
    for trace in traces:
        if trace.undecided:
            first = min(index for index, each in enumerate(trace.events) if each in trace.undecided.values())
            del trace.events[first:]
    return [trace for trace in traces if trace.events]


def written(directory: Path) -> list[Trace]:
    """What proxies wrote (`recorded_proxy.py`)."""
    traces = []
    for file in sorted(directory.glob("*.json")):
        trace, fields = Trace(), json.loads(file.read_text())
        trace.events, trace.sizes, trace.contents = fields["events"], fields["sizes"], fields["contents"]
        trace.named = set(fields["named"])
        trace.undecided = {number: trace.events[index] for number, index in enumerate(fields["undecided"])}
        traces.append(trace)
    return _complete(traces)


def coverage(traces: Iterable[Trace]) -> Counter[str]:
    """How often each event, and each kind of answer, occurs."""
    counted: Counter[str] = Counter()
    for trace in traces:
        counted.update(f"{each['name']} {each.get('kind', each.get('code', ''))}".strip() for each in trace.events)
    return counted


def _expression(value: object) -> str:
    if isinstance(value, dict):
        return "[" + ", ".join(f"{key} |-> {_expression(each)}" for key, each in value.items()) + "]"
    if isinstance(value, str):
        return value if value in ("Nothing", "P") else f'"{value}"'
    return str(value)


def validate(traces: Sequence[Trace], timeout_seconds: float = 100.0) -> str | None:
    """The event of a trace that is no step of the specification; None: all are."""
    for number, trace in enumerate(traces, 1):
        found = _validated(trace, timeout_seconds)
        if found is not None:
            return f"trace {number}: {found}"
    return None


def _validated(trace: Trace, timeout_seconds: float) -> str | None:
    # One run of TLC for each: its steps take as long as there are appends.
    events = "<<" + ",\n  ".join(map(_expression, trace.events)) + ">>"
    constants = {
        "Processes": "{p1}",
        "Serving": "{p1}",
        "Earlier": "0",
        "Lost": "0",
        "Bypassed": "0",
        "MaxEpoch": "0",
        "MaxBases": "2",
        "Forgetful": "FALSE",
        "LogAppendTime": "FALSE",
        "Without": "{}",
        "Remembered": "5",
        "EpochsPerId": "32768",
        "Appends": f"1..{len(trace.sizes)}",
        "Sizes": f"<<{', '.join(map(str, trace.sizes))}>>",
        "Contents": "<<" + ", ".join(f'"{each}"' for each in trace.contents) + ">>",
        "Named": "{" + ", ".join(map(str, trace.named)) + "}",
        "Budget": "[none |-> 0]",
        "Traces": f"<<{events}>>",
    }
    found = tlc.check(
        "SequencerTrace", constants, ("Accepted",), timeout_seconds=timeout_seconds, specification="TraceSpec"
    )
    if found.violated is None:
        return None
    step = int(re.findall(r"/\\ at = (\d+)", found.counterexample)[-1])
    before = "\n  ".join(map(str, trace.events[max(0, step - 6) : step - 1]))
    return f"event {step} is no step: {trace.events[step - 1]}\n  {before}"
