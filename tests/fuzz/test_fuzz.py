"""Replay the corpus, run the fuzzer for a short time, and verify that it detects defects."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import checked_produce as checked_produce_module
from fencepost_proxy.session import control as control_module
from fencepost_proxy.session import cutter as cutter_module
from fencepost_proxy.session import reading as reading_module
from fencepost_proxy.session import session as session_module
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.session import Session
from fencepost_proxy.wire import primitives, produce
from fencepost_proxy.wire.apis import CREATE_TOPICS, DESCRIBE_CONFIGS, METADATA
from tests.fuzz import large as large_module
from tests.fuzz.__main__ import TARGETS, replay
from tests.fuzz.engine import CORPUS, Program, TooSlow, check_time, fuzz, slowest_call
from tests.fuzz.large import READ, Large

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


# --- defects that it must detect --------------------------------------------------------------------------------------


def _views_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored data is not copied out of the receive buffer."""
    monkeypatch.setattr(cutter_module, "bytes", lambda view: view, raising=False)


def _responses_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: Session) -> None:
        for pending_response in [each for each in self._to_client if each.done]:
            self._to_client.remove(pending_response)
            self._client_out += pending_response.chunks

    monkeypatch.setattr(Session, "_answer_front", answer)


def _memory_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Session._client_lost

    def client_lost(self: Session, now: float) -> None:
        self._collecting_bytes = 0
        lost(self, now)

    monkeypatch.setattr(Session, "_client_lost", client_lost)


def _admissions_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Session) -> None:
        self._waiting_produce = None

    monkeypatch.setattr(Session, "_return_waiting_produce", forget)


def _lost_appends_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_produce_module, "Lost", lambda pending: g.Tick())


def _partition_is_missing_in_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProduceExchange, "complete", property(lambda self: bool(self.results)))


def _success_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def appended_elsewhere(self: PartitionSequencer, pending: g.PendingAppend, result: produce.PartitionResult) -> None:
        self._answer(pending, result)

    monkeypatch.setattr(PartitionSequencer, "_appended_elsewhere", appended_elsewhere)


def _in_doubt_appends_are_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionSequencer, "_resolve_later", lambda self, pending, now: None)


def _queued_appends_never_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionSequencer, "_tick", lambda self, now: None)


def _admitted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = PartitionSequencer._admit

    def admit_again(self: PartitionSequencer, pending: g.PendingAppend) -> None:
        admit(self, pending)
        if pending.append.record_count == 3:
            self._queue.append(pending)

    monkeypatch.setattr(PartitionSequencer, "_admit", admit_again)


def _index_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "MALFORMED", (ValueError,))


def _any_number_of_partitions_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_produce_module, "PARTITIONS_MAX", 100_000)


def _batches_are_read_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_module, "HERE_BYTES_MAX", 1 << 30)
    monkeypatch.setattr(reading_module, "HERE_STEPS_MAX", 1 << 30)


def _any_number_of_tagged_fields_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "TAGS_MAX", 1 << 30)


def _control_messages_are_read_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "HERE_BYTES_MAX", 1 << 30)


def _produce_responses_are_rewritten_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PRODUCED_HERE_BYTES_MAX", 1 << 30)


def _control(key: int, version: int, variant: int, elements: int = 20_000) -> dict[str, Any]:
    count = READ.index((key, version)) - variant
    return {"kind": "control", "count": count, "bytes": 0, "where": 0, "variant": variant, "elements": elements}


DEFECTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], int]] = [
    ("session", _views_are_stored, 60),
    ("session", _responses_out_of_order, 200),
    ("session", _memory_is_not_released, 200),
    ("session", _admissions_are_not_returned, 60),
    ("session", _lost_appends_are_not_reported, 100),
    ("session", _partition_is_missing_in_a_response, 200),
    ("sequencer", _success_anywhere, 300),
    ("sequencer", _in_doubt_appends_are_not_resolved, 300),
    ("sequencer", _queued_appends_never_time_out, 200),
    ("sequencer", _admitted_twice, 200),
    ("wire", _index_error, 500),
]


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize(
    ("name", "break_it", "inputs"), DEFECTS, ids=[f"{name}{defect.__name__}" for name, defect, _ in DEFECTS]
)
def test_defect_is_detected(
    name: str, break_it: Callable[[pytest.MonkeyPatch], None], inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    found: Any = None
    for seed in range(inputs // 20):
        result = fuzz(TARGETS[name][0], seed, inputs=20, guided=False, minimised=False)
        found = result.failures or found
        if found:
            break
    assert found


# --- time -------------------------------------------------------------------------------------------------------------

_LARGE = Large().frame(random.Random(1)) | {"version": 9, "acks": -1, "topic": 0, "transaction": False, "codec": 4}
SLOW: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "65,536 partitions": (
        _any_number_of_partitions_is_read,
        {"kind": "partitions", "topics": 1, "count": 65_536, "ours": 0},
    ),
    "65,536 topics": (
        _any_number_of_partitions_is_read,
        {"kind": "partitions", "topics": 65_536, "count": 65_536, "ours": 0, "topic": 2},
    ),
    "983,040 records": (
        _batches_are_read_in_the_event_loop,
        {"kind": "records", "count": 65_536, "bytes": 0, "delta": 0, "ours": 2, "where": 0},
    ),
    "65,536 tagged fields of each partition": (
        _any_number_of_tagged_fields_is_read,
        {"kind": "tags", "count": 65_536, "where": 1},
    ),
    "CreateTopics of 20,000 topics": (_control_messages_are_read_in_the_event_loop, _control(CREATE_TOPICS, 7, 0)),
    "a DescribeConfigs response of 20,000 resources": (
        _control_messages_are_read_in_the_event_loop,
        _control(DESCRIBE_CONFIGS, 4, 2),
    ),
    "a Metadata response of 20,000 topics": (
        _control_messages_are_read_in_the_event_loop,
        _control(METADATA, 13, 2),
    ),
    "a Produce response of 65,536 partitions that names brokers": (
        _produce_responses_are_rewritten_in_the_event_loop,
        {"kind": "partitions", "topics": 1, "count": 65_536, "ours": 1, "topic": 2, "version": 12},
    ),
}


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize("name", SLOW)
def test_slow_call_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, spec = SLOW[name]
    setup = {"whole": False, "produce": 12, "append_time": False, "upstream_first": True, "calm": False}
    stored = [["stored", 0, 1]] * 5
    answer = ["answer", 0, "ok", spec.get("variant", 1), 0, 1]
    quota_is_renewed = ["tick", 1]
    program = Program(setup, [["send", 0, [_LARGE | spec], []], *stored, answer, quota_is_renewed, answer, *stored])
    assert check_time(TARGETS["large"][0], program) > 0
    break_it(monkeypatch)
    tracing = sys.gettrace()
    sys.settrace(None)  # a traced call is too slow to measure
    try:
        with pytest.raises(TooSlow):
            check_time(TARGETS["large"][0], program)
    finally:
        sys.settrace(tracing)


def test_slowest_input_is_named_and_can_be_replayed() -> None:
    result = fuzz(TARGETS["sequencer"][0], SEED, inputs=20, guided=False)
    assert result.slowest is not None
    assert result.slowest_seconds > 0
    assert slowest_call(TARGETS["sequencer"][0], result.slowest) > 0
