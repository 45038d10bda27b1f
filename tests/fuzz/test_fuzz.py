"""Replay the corpus, run the fuzzer for a short time, and verify that it detects defects."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.sequencer.admitter import Admitter
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver, Lookups
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import arrival, control, reading, session
from fencepost_proxy.session.cutter import FrameCutter
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.session import Session
from fencepost_proxy.wire import primitives, produce
from fencepost_proxy.wire.apis import CREATE_TOPICS, DESCRIBE_CONFIGS, METADATA
from tests.fuzz import large
from tests.fuzz.__main__ import TARGETS, replay
from tests.fuzz.engine import CORPUS, Program, TooSlow, check_time, fuzz, slowest_call
from tests.fuzz.large import READ, Large
from tests.support.mutants import Change, Mutant, body, edit, put

SEED = 1
SHORT_RUN = {"session": 120, "sequencer": 500, "wire": 1500, "large": 12}


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_failed_once_holds(path: Path) -> None:
    replay(path)


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_finds_nothing(name: str) -> None:
    """Not guided: coverage measurement uses the same tracing."""
    result = fuzz(TARGETS[name][0], SEED, inputs=SHORT_RUN[name], guided=False)
    print(f"seed {SEED}: {result.inputs} inputs, {result.events} events, {result.features} states")
    assert not result.failures, "\n".join(
        f"{found.signature}: {found.message}\n{found.program.to_json()}" for found in result.failures
    )


@pytest.mark.parametrize("name", TARGETS)
def test_seed_gives_the_same_run_twice(name: str) -> None:
    target = TARGETS[name][0]
    inputs = 25 if name != "large" else 3
    digests = {fuzz(target, 7, inputs=inputs, guided=False).digest for _ in range(2)}
    assert len(digests) == 1
    assert fuzz(target, 8, inputs=inputs, guided=False).digest not in digests


# ---- defects that it must detect

DEFECTS: dict[str, list[tuple[str, int, Change]]] = {
    "session": [
        ("views are stored", 600, edit(FrameCutter, "collected", ("bytes(here)", "here"))),
        (
            "responses out of order",
            200,
            body(
                Session,
                "_answer_front",
                "for pending_response in [each for each in self._to_client if each.done]:\n"
                "    self._to_client.remove(pending_response)\n"
                "    self._client_out += pending_response.chunks",
            ),
        ),
        (
            "memory is not released",
            200,
            edit(Session, "_client_lost", ("self._services.release(self._collecting_bytes)", "pass")),
        ),
        ("admissions are not returned", 60, body(Session, "_return_waiting_produce", "self._waiting_produce = None")),
        ("lost appends are not reported", 100, body(Dispatcher, "lost", "pass")),
        ("a partition is missing in a response", 200, body(ProduceExchange, "complete", "return bool(self.results)")),
    ],
    "sequencer": [
        ("success anywhere", 300, body(Lookups, "appended_elsewhere", "self._state.answer(pending, result)")),
        ("in-doubt appends are not resolved", 300, body(InDoubtResolver, "_resolve_later", "pass")),
        ("queued appends never time out", 200, body(PartitionSequencer, "_tick", "pass")),
        (
            "admitted twice",
            200,
            edit(
                Admitter,
                "_admit",
                ("appends.queue.popleft()", "if pending.append.record_count != 3: appends.queue.popleft()"),
            ),
        ),
    ],
    "wire": [("an index error is not caught", 500, put(produce, "MALFORMED", (ValueError,)))],
}


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize(
    ("target", "inputs", "defect"),
    [
        pytest.param(target, inputs, Mutant(name, name, (target,), change), id=f"{target}-{name}")
        for target, defects in DEFECTS.items()
        for name, inputs, change in defects
    ],
)
def test_defect_is_detected(target: str, inputs: int, defect: Mutant) -> None:
    with defect.live():
        assert any(
            fuzz(TARGETS[target][0], seed, inputs=20, guided=False, minimised=False).failures
            for seed in range(inputs // 20)
        )


# ---- time


def _control(key: int, version: int, variant: int, elements: int = 20_000) -> dict[str, Any]:
    count = READ.index((key, version)) - variant
    return {"kind": "control", "count": count, "bytes": 0, "where": 0, "variant": variant, "elements": elements}


_UNLIMITED = 1 << 30
_ANY_NUMBER_OF_PARTITIONS = (put(arrival, "PARTITIONS_MAX", 100_000),)
_BATCHES_READ_HERE = (put(large, "HERE_BYTES_MAX", _UNLIMITED), put(reading, "HERE_STEPS_MAX", _UNLIMITED))
_CONTROL_READ_HERE = (put(control, "HERE_BYTES_MAX", _UNLIMITED),)
_LARGE = Large().frame(random.Random(1)) | {"version": 9, "acks": -1, "topic": 0, "transaction": False, "codec": 4}
SLOW: dict[str, tuple[tuple[Change, ...], dict[str, Any]]] = {
    "65,536 partitions": (_ANY_NUMBER_OF_PARTITIONS, {"kind": "partitions", "topics": 1, "count": 65_536, "ours": 0}),
    "65,536 topics": (
        _ANY_NUMBER_OF_PARTITIONS,
        {"kind": "partitions", "topics": 65_536, "count": 65_536, "ours": 0, "topic": 2},
    ),
    "983,040 records": (
        _BATCHES_READ_HERE,
        {"kind": "records", "count": 65_536, "bytes": 0, "delta": 0, "ours": 2, "where": 0},
    ),
    "65,536 tagged fields of each partition": (
        (put(primitives, "TAGS_MAX", _UNLIMITED),),
        {"kind": "tags", "count": 65_536, "where": 1},
    ),
    "CreateTopics of 20,000 topics": (_CONTROL_READ_HERE, _control(CREATE_TOPICS, 7, 0)),
    "a DescribeConfigs response of 20,000 resources": (_CONTROL_READ_HERE, _control(DESCRIBE_CONFIGS, 4, 2)),
    "a Metadata response of 20,000 topics": (_CONTROL_READ_HERE, _control(METADATA, 13, 2)),
    "a Produce response of 65,536 partitions that names brokers": (
        (put(session, "PRODUCED_HERE_BYTES_MAX", _UNLIMITED),),
        {"kind": "partitions", "topics": 1, "count": 65_536, "ours": 1, "topic": 2, "version": 12},
    ),
}


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize("name", SLOW)
def test_slow_call_is_detected(name: str) -> None:
    limits, spec = SLOW[name]
    setup = {"whole": False, "produce": 12, "append_time": False, "upstream_first": True, "calm": False}
    stored = [["stored", 0, 1]] * 5
    answer = ["answer", 0, "ok", spec.get("variant", 1), 0, 1]
    quota_is_renewed = ["tick", 1]
    program = Program(setup, [["send", 0, [_LARGE | spec], []], *stored, answer, quota_is_renewed, answer, *stored])
    assert check_time(TARGETS["large"][0], program) > 0
    tracing = sys.gettrace()
    sys.settrace(None)  # a traced call is too slow to measure
    try:
        with Mutant(name, "unlimited work in the event loop", (), *limits).live(), pytest.raises(TooSlow):
            check_time(TARGETS["large"][0], program)
    finally:
        sys.settrace(tracing)


def test_slowest_input_is_named_and_can_be_replayed() -> None:
    result = fuzz(TARGETS["sequencer"][0], SEED, inputs=20, guided=False)
    assert result.slowest is not None
    assert result.slowest_seconds > 0
    assert slowest_call(TARGETS["sequencer"][0], result.slowest) > 0
