"""The short way of guarded appends, against the general one: the same dialogue by both comes to the same.

A dialogue is a program of the fuzzer's kind: requests of several clients in pieces of any size, an upstream that
answers rightly, wrongly, late or never, connections that break, time that passes. It is run twice: as `net/link.py`
does, and with every request and answer as an event.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.partitions import events as g
from fencepost_proxy.partitions.gate import Gate
from fencepost_proxy.session.session import Session
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    TopicData,
    encode_produce_request,
    parse_produce_request,
)
from tests.fuzz import dialogue as dialogue_module
from tests.fuzz.dialogue import NOW_MS, TOPIC_IDS, Asked, Dialogue, _Run
from tests.fuzz.engine import Op, Program, Untraced
from tests.support.batches import batch

_PROGRAMS = 40
_OPS = 60


class _GeneralRun(_Run):
    """Every byte is an event, and no append takes the short way from within one either."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.around.gate = lambda partition: None  # type: ignore[method-assign]
        self.call = self._event_only(self.call)

    @staticmethod
    def _event_only(call: Any) -> Any:
        def told(function: Any, *args: Any) -> Any:
            if getattr(function, "__func__", None) in (Session.take_up, Session.take_down):
                return 0, []
            return call(function, *args)

        return told


class _Programs(Dialogue):
    """More of what takes the short way than the fuzzer makes, and nothing malformed: that is its business."""

    def program(self, seed: int) -> Program:
        rng = random.Random(f"short {seed}")
        setup = self.setup(rng) | {"produce": rng.choice((12, 13, 13, 13, 13, 13, 13))}
        noise = rng.choice((0.03, 0.1, 0.3, 0.6))
        # Two clients that are there before anything is acknowledged.
        ops: list[Op] = [["deliver", 0, 1], ["deliver", 1, 1]]
        while len(ops) < _OPS:
            ops += [self._noise(rng)] if rng.random() < noise else self._round(rng)
        return Program(setup, ops)

    def _noise(self, rng: random.Random) -> Op:
        op = self.op(rng)
        if op[0] == "send":
            for frame in op[2]:
                frame["changes"] = []
        return op

    def _round(self, rng: random.Random) -> list[Op]:
        """A few requests of one client, each the next at its partition as far as it can know; and their answers."""
        connection = rng.choice((0, 0, 0, 1))
        producer, version, topic = rng.choice((0, 1, 2)), rng.choice((9, 12)), rng.choice((0, 0, 1, 2))
        frames, ahead, sequence = [], 0, rng.choice((rng.randrange(6), rng.randrange(1000)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            count = rng.choice((1, 1, 2))
            how = "end" if topic == 1 or rng.random() < 0.7 else "none"
            frames.append(
                {
                    "kind": "produce",
                    "version": version,
                    "acks": rng.choice((-1, -1, -1, 1)),
                    "timeout": 30_000,
                    "transaction": False,
                    "parts": [[topic, 0, [how, ahead, count, producer, sequence, 0, 0]]],
                    "changes": [],
                }
            )
            ahead += count
            sequence += count
        cuts = rng.choice(([], [], [], [1], [37], [rng.randint(1, 400)]))
        ops: list[Op] = [["send", connection, frames, cuts]]
        ops += [["control", 0, "true", 0]] * rng.choice((0, 1, 1, 2))
        answered = ["answer", connection, "ok", 0, rng.choice((0, 0, 0, 1, 9)), rng.choice((1, 2, 3))]
        return ops + [answered] * rng.choice((0, 1, 1, 1, 2))


def _meaning(frame: bytes) -> Any:
    """Of a request that went upstream."""
    if int.from_bytes(frame[:2], "big") != PRODUCE:
        return frame
    try:
        request = parse_produce_request(memoryview(frame))
    except ProtocolError:
        return frame
    topics = tuple(
        replace(topic, partitions=tuple(replace(d, records=bytes(d.records or b"")) for d in topic.partitions))  # type: ignore[arg-type]
        for topic in request.topics
    )
    return replace(request, topics=topics)


def _seen(run: _Run) -> list[Any]:
    """All that anybody outside can tell, and what decides about the future."""
    seen: list[Any] = []
    for wires in run.wires:
        frames, rest = dialogue_module.frames_of(wires.upstream_got, 8)
        seen += [
            bytes(wires.client_got),
            [_meaning(frame) for frame in frames],
            rest,
            wires.client_closed,
            wires.client_paused and not wires.client_closed,
            wires.upstream_closed,
            wires.upstream_paused,
        ]
    for partition, log in run.logs.items():
        seen.append((partition, log.end, log.batches))
    for partition, gate in run.switch.gates.items():
        memory = gate.memory
        seen.append(
            (
                partition,
                (gate.phase, gate.idle, gate.waiting, gate.in_transaction, gate.last_refusal),
                (gate._log_end, gate._end_as_of, gate._shift, gate._epoch, gate._check, gate._accounted),
                (gate._warm_until, gate._warm_since, gate._warm_epoch, gate._retry_at, gate._sent_count),
                (gate._stamped_queued_until, gate._stamped_queued_to, gate._own_queued_until, gate._holes),
                (memory.landed, memory.stamped, memory._own, memory._unresolved, memory._violations),
                [
                    [(t.at, t.stamp, t.kind, t.sent_at, t.sent_as, t.attempts, t.may_write) for t in tickets]
                    for tickets in (gate._in_flight, gate._doubts, gate._queue, gate._looking)
                ],
            )
        )
    seen.append([(each.partition, type(each.effect)) for each in run.control])
    return seen


def _run_both(program: Program) -> Counter[str]:
    """Step by step, compared after each. How often the short way was taken."""
    taken: Counter[str] = Counter()
    seen: set[Any] = set()
    general = _GeneralRun(program, seen, Untraced())
    short = _Run(program, seen, Untraced())
    for run in (general, short):
        # What only passes is held in memory by the general way if it is long; who waits for memory is no matter here.
        run.around.free_bytes = run.around.memory_bytes = 1 << 30
    take, landed, back = Gate.take, Gate.landed, Session._no_short_ways

    def counted_take(self: Gate, ticket: g.Ticket, now: float) -> bool:
        took = take(self, ticket, now)
        taken["taken" if took else "not taken"] += 1
        taken[f"taken {ticket.kind.name}"] += took
        return took

    def counted_landed(self: Gate, ticket: g.Ticket, result: PartitionResult, now: float) -> PartitionResult | None:
        told = landed(self, ticket, result, now)
        taken["not landed" if told is None else "landed"] += 1
        return told

    def counted_back(self: Session) -> None:
        taken["taken back"] += sum(slot.single is not None for slot in self._from_upstream)
        back(self)

    patch = pytest.MonkeyPatch()
    with patch.context() as on:
        on.setattr(Gate, "take", counted_take)
        on.setattr(Gate, "landed", counted_landed)
        on.setattr(Session, "_no_short_ways", counted_back)
        for number, op in enumerate(program.ops):
            general._do(op)
            short._do(op)
            ours, theirs = _seen(short), _seen(general)
            assert ours == theirs, f"after op {number} {op} of {program.to_json()}"
        for run in (general, short):
            if program.setup["calm"]:
                run._calm_down()
            run._end_everything()
        assert _seen(short) == _seen(general), program.to_json()
        for wires in short.wires:
            short._check_wires(wires)
    return taken


@pytest.mark.parametrize("block", range(4))
def test_both_ways_come_to_the_same(block: int) -> None:
    taken: Counter[str] = Counter()
    for seed in range(block * _PROGRAMS, (block + 1) * _PROGRAMS):
        taken += _run_both(_Programs().program(seed))
    print(taken)
    # Not by never taking it, nor by never leaving it.
    assert min(taken[each] for each in ("taken", "not taken", "landed", "not landed", "taken back")) > 10, taken


# --- requests that only look like the one before ----------------------------------------------------------------------


class _Talk(_Run):
    """One client that does not belong to any program."""

    def __init__(self) -> None:
        setup = {"whole": False, "produce": 13, "append_time": False, "upstream_first": True, "calm": True}
        super().__init__(Program(setup, []), set(), Untraced())
        self.client = self._wires(0)

    def sends(self, data: bytes) -> None:
        self.client.client_wrote += data
        self._deliver_client(self.client, [])

    def appends_the_first(self) -> None:
        """After it the gate is warm."""
        self.sends(_append("required", 0))
        self._control(0, "true", 0)
        self._answer(self.client, "ok", 0, 0)
        assert self.logs[TopicPartition("required", 0)].end == 1

    def asked_for(self) -> list[tuple[int, str]]:
        """What went upstream: version and topic."""
        frames, _ = dialogue_module.frames_of(self.client.upstream_got, 8)
        return [(Asked(frame).version, topic) for frame in frames for topic, _ in self._parts(Asked(frame))]


def _append(topic: str, expected: int, *, version: int = 9, client_id: str = "c", correlation_id: int = 1) -> bytes:
    records = batch(b"v", headers=[[("expected-offset", b"%d" % expected)]], timestamp_ms=NOW_MS)
    data = (PartitionData(0, memoryview(bytes(records))),)
    request = ProduceRequest(version, correlation_id, client_id, b"", None, -1, 30_000, (TopicData(topic, None, data),))
    return b"".join(encode_produce_request(request))


@pytest.mark.parametrize("version", [8, 9])
def test_a_client_id_longer_than_what_is_looked_at_hides_no_topic(version: int) -> None:
    talk, client_id = _Talk(), "c" * 5000
    # Given a request to a topic that is not guarded, and so much before its name that this is all that was looked at
    talk.sends(_append("plain", 0, version=version, client_id=client_id))
    assert talk.asked_for() == [(version, "plain")]
    # When the next one of the client is for a guarded topic
    talk.sends(_append("required", 7, version=version, client_id=client_id, correlation_id=2))
    # Then it goes to its gate, which wants to know where the log ends
    assert talk.asked_for() == [(version, "plain")]
    assert [type(each.effect) for each in talk.control] == [g.ReadTail]


@pytest.mark.parametrize("at", ["name", "topics"])
def test_lengths_that_are_written_longer_than_they_have_to_be_shift_nothing(at: str) -> None:
    talk = _Talk()
    talk.appends_the_first()
    for expected in (1, 2):
        frame = bytearray(_append("required", expected, correlation_id=expected + 1))
        name_at = frame.index(b"\x09required")
        where = name_at if at == "name" else name_at - 1
        frame[where : where + 1] = bytes((frame[where] | 0x80, 0))
        frame[:4] = (len(frame) - 4).to_bytes(4, "big")
        talk.sends(bytes(frame))
        asked = talk.client.asked[-1]
        assert parse_produce_request(memoryview(asked.frame)).timeout_ms == 30_000
        talk._answer(talk.client, "ok", 0, 0)
    assert talk.asked_for() == [(13, "required")] * 3
    assert talk.logs[TopicPartition("required", 0)].end == 3
    talk._check_wires(talk.client)


def test_an_answer_about_another_topic_is_no_answer() -> None:
    talk = _Talk()
    talk.appends_the_first()
    talk.sends(_append("required", 1, correlation_id=2))
    answer = bytearray(talk._produced(talk.client.asked[-1], "ok", 0))
    at = answer.index(TOPIC_IDS["required"].bytes)
    answer[at : at + 16] = TOPIC_IDS["checked"].bytes
    got = len(talk.client.client_got)
    talk.client.upstream_wrote += answer
    talk._deliver_upstream(talk.client, 0)
    assert talk.client.client_closed
    assert len(talk.client.client_got) == got


def test_a_request_that_ends_too_early_is_not_taken_for_the_one_before() -> None:
    talk = _Talk()
    usual = _append("plain", 0)
    talk.sends(usual)
    # When a frame claims to be shorter, and the bytes behind its end go on as the one before did
    length = usual.index(b"plain") + 2 - 4
    talk.sends(length.to_bytes(4, "big") + usual[4:])
    # Then it is malformed, and not for a broker to find out
    assert bytes(talk.client.upstream_got) == usual
    assert talk.client.client_closed
