"""The fast path, native code and the general path have the same results.

A dialogue is a program of the fuzzer's kind: requests of several clients in pieces of any size, an upstream that
answers rightly, wrongly, late or never, connections that break, time that passes. It is run twice: as
`transport/proxied_connection.py` does, and with every request and answer as an event.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session.connection.draining import READ_SECONDS
from fencepost_proxy.session.dispatcher import Dispatcher, ForConnection
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.frames.services import RELAYED_VERSIONS
from fencepost_proxy.session.relay.fast_path import FastPath
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import (
    PartitionData,
    ProduceRequest,
    TopicData,
    encode_produce_request,
    parse_produce_request,
    parse_produce_response,
)
from tests.fuzz import dialogue as dialogue_module
from tests.fuzz.dialogue import LIMITS, NOW_MS, SERVED, TOPIC_IDS, Dialogue, Requested, _Run
from tests.fuzz.engine import Failure, Op, Program, Untraced
from tests.support import native_counts
from tests.support.batches import batch, expecting
from tests.support.executors import MODULE, NATIVE, NOT_BUILT, PYTHON, each_executor, executing, needs_native
from tests.support.mutants import Change, Mutant, edit
from tests.support.sequencer_view import log_end_read
from tests.unit import test_throttling
from tests.unit.test_session import ServicesStandIn, Talk, Unchanged, produce, produced

_PROGRAMS = 40
#: How often each thing happens in a block of programs.
_LEAST = {PYTHON: 5, NATIVE: 1}
_RELAYED = [(key, version) for key, version in SERVED if key in RELAYED_VERSIONS]
_OPS = 60
#: In how many steps of native code the states of sequencers are compared.
_STATES_SHARE = 0.05
_FIELDS_OF_APPENDS = ("at", "fence", "kind", "sent_at", "attempts", "predecessor_result")
#: The first orders the queue, which the fast path does not enter. The second orders what was sent: see `_state_of`.
_NOT_COMPARED = ("_submitted_count", "_sent_count", "names")


class _GeneralRun(_Run):
    """Every byte is an event."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.call = self._event_only(self.call)

    @staticmethod
    def _event_only(call: Any) -> Any:
        def reported(function: Any, *args: Any) -> Any:
            if function.__name__ in ("take_up", "take_down"):
                return 0, []
            return call(function, *args)

        return reported


class _Remembers(_Run):
    """As much as native code does a while on its own."""

    limits = replace(LIMITS, remembered_batches_max=12, in_flight_max=4)


class _GeneralRemembers(_GeneralRun, _Remembers):
    pass


def _produce_frame(version: int, acks: int, parts: list[Any]) -> dict[str, Any]:
    settings = {"version": version, "acks": acks, "timeout": 30_000, "transaction": False}
    return {"kind": "produce", **settings, "parts": parts, "changes": []}


class _Programs(Dialogue):
    """More fast-path appends than the fuzzer makes, and nothing malformed, which the fuzzer covers."""

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
        producer, version, topic = rng.choice((0, 1, 2)), rng.choice((9, 12, 13)), rng.choice((0, 0, 1, 2))
        frames, ahead, sequence = [], 0, rng.choice((rng.randrange(6), rng.randrange(1000)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            count = rng.choice((1, 1, 2))
            how = "end" if topic == 1 or rng.random() < 0.7 else "none"
            part = [topic, 0, [how, ahead, count, producer, sequence, 0, 0]]
            frames.append(_produce_frame(version, rng.choice((-1, -1, -1, 1)), [part]))
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


def _state_of(part: Any, sent_count: int = 0) -> Any:
    """All that decides about the future of a sequencer: its parts and their fields, nested.

    `sent_count`: appends are numbered when they are sent. Native code does not number those that it completes.
    """
    if isinstance(part, g.PendingAppend):
        placement = part.placement
        before_last = placement.sent_as and 1 + sent_count - placement.sent_as
        decided = [getattr(placement, name) for name in _FIELDS_OF_APPENDS]
        return decided, part.sending.may_write, before_last, len(placement.duplicate_waiters)
    if isinstance(part, deque | list):
        return [_state_of(each, sent_count) for each in part]
    if is_dataclass(part) and type(part).__module__.startswith("fencepost_proxy.sequencer"):
        sent_count = getattr(part, "_sent_count", sent_count)
        return {
            each.name: _state_of(getattr(part, each.name), sent_count)
            for each in fields(part)
            if each.name not in _NOT_COMPARED
        }
    return part


def _observed(run: _Run) -> list[Any]:
    """All that is observable from outside."""
    observed: list[Any] = []
    for wires in run.wires:
        frames, rest = dialogue_module.frames_of(wires.upstream_got, 8)
        observed += [
            b"" if wires.proxy_closed_client else bytes(wires.client_got),  # else see `_same_answers`
            [_meaning(frame) for frame in frames],
            rest,
            wires.proxy_closed_client,
            wires.client_paused and not wires.proxy_closed_client,
            wires.proxy_closed_upstream,
            wires.upstream_paused,
        ]
    for partition, log in run.logs.items():
        observed.append((partition, log.end, log.batches))
    observed.append([(each.partition, type(each.effect)) for each in run.control])
    return observed


def _decisive(run: _Run) -> list[Any]:
    """What decides about the future. It takes back every permit."""
    states: list[Any] = []
    for partition, sequencer in run.dispatcher.sequencers.items():
        sequencer.issued.take_back()
        states += [partition, _state_of(sequencer.state)]
    return states


def _same_answers(one: _Run, other: _Run) -> bool:
    """A client that violates the protocol is disconnected before or after it gets the answers of that moment."""
    return all(
        longer.startswith(shorter)
        for ours, theirs in zip(one.wires, other.wires, strict=True)
        for shorter, longer in [sorted((bytes(ours.client_got), bytes(theirs.client_got)), key=len)]
    )


def _run_both(
    program: Program, executor: str = PYTHON, kinds: tuple[type[_Run], type[_Run]] = (_GeneralRun, _Run)
) -> Counter[str]:
    """Compare after each step; count how often the fast path was taken.

    The state of sequencers is compared after each step of Python, and after few of native code, whose permits end by
    that.
    """
    taken: Counter[str] = Counter()
    observed: set[Any] = set()
    with executing(PYTHON):
        general = kinds[0](program, observed, Untraced())
    with executing(executor):
        short = kinds[1](program, observed, Untraced())
    native_counts.count(short.services, taken)
    rng = random.Random(len(program.to_json()))
    for run in (general, short):
        # The general path buffers long relayed requests; waiting for memory is not compared.
        run.services.free_bytes = run.services.memory_bytes = 1 << 30
    up, down = FastPath.take_up, FastPath.take_down

    def count_up(self: FastPath, *args: Any) -> Any:
        result = up(self, *args)
        taken["taken up" if result[0] else "not taken up"] += 1
        return result

    def count_down(self: FastPath, *args: Any) -> Any:
        result = down(self, *args)
        taken["taken down" if result[0] else "not taken down"] += 1
        return result

    patch = pytest.MonkeyPatch()
    with patch.context() as on:
        on.setattr(FastPath, "take_up", count_up)
        on.setattr(FastPath, "take_down", count_down)
        native_counts.count_adopted(on, taken)
        for number, op in enumerate(program.ops):
            general._do(op)
            short._do(op)
            ours, theirs = _observed(short), _observed(general)
            assert ours == theirs, f"after op {number} {op} of {program.to_json()}"
            assert _same_answers(short, general), f"after op {number} {op} of {program.to_json()}"
            if executor == PYTHON or rng.random() < _STATES_SHARE:
                assert _decisive(short) == _decisive(general), f"after op {number} {op} of {program.to_json()}"
        assert _decisive(short) == _decisive(general), program.to_json()
        for run in (general, short):
            if program.setup["calm"]:
                run._calm_down()
            run._end_everything()
        assert _observed(short) == _observed(general), program.to_json()
        assert _decisive(short) == _decisive(general), program.to_json()
        for wires in short.wires:
            short._check_wires(wires)
    return taken


class _TwoPartitions(_Programs):
    """Most requests append to both partitions of their topic."""

    def _round(self, rng: random.Random) -> list[Op]:
        ops = super()._round(rng)
        for frame in ops[0][2] if rng.random() < 0.8 else ():
            ((topic, _, records),) = frame["parts"]
            frame["parts"] = [[topic, partition, records] for partition in rng.sample((0, 1), 2)]
        return ops


class _Steady(_Programs):
    """Clients that keep to their habits for a while, as real ones do: most requests need no decision."""

    topics = (0, 0, 1, 1, 1, 2)
    relayed_share = 0.2

    def program(self, seed: int) -> Program:
        rng = random.Random(f"steady {seed}")
        setup = self.setup(rng) | {"produce": 13, "append_time": False, "whole": False}
        noise = rng.choice((0.0, 0.02, 0.05, 0.15))
        habits = [self._habit(rng), self._habit(rng)]
        ahead: Counter[tuple[int, int]] = Counter()
        sequences: Counter[tuple[int, int, int]] = Counter()
        ops: list[Op] = [["deliver", 0, 1], ["deliver", 1, 1]]
        while len(ops) < 2 * _OPS:
            if rng.random() < noise:
                ops.append(self._noise(rng))
                continue
            connection = rng.choice((0, 0, 0, 0, 0, 0, 1))
            if rng.random() < 0.05:
                habits[connection] = self._habit(rng)
            ops += self._steady_round(rng, connection, habits[connection], ahead, sequences)
        return Program(setup, ops)

    def _habit(self, rng: random.Random) -> dict[str, Any]:
        topic = rng.choice(self.topics)
        return {
            "version": rng.choice((8, 9, 12, 13)),
            "acks": rng.choice((-1, -1, -1, 1)),
            "topic": topic,
            "partitions": rng.choice(([0], [0], [1], [0, 1], [1, 0])),
            "producer": rng.choice((0, 0, 1, 2, 3)),
            "how": rng.choice((["end"], ["end", "none"], ["none"])) if topic != 1 else ["end"],
            "age": rng.choice((0, 0, 0, 0, 90_000, -1)),
            "write id": rng.choice((0, 0, 0, 1)),
        }

    def _steady_round(
        self,
        rng: random.Random,
        connection: int,
        habit: dict[str, Any],
        ahead: Counter[tuple[int, int]],
        sequences: Counter[tuple[int, int, int]],
    ) -> list[Op]:
        frames: list[dict[str, Any]] = []
        topic, producer = habit["topic"], habit["producer"]
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < self.relayed_share:
                key, version = rng.choice(_RELAYED)
                frames.append({"kind": "api", "key": key, "version": version, "variant": 1, "changes": []})
            parts = []
            for partition in habit["partitions"]:
                count, where = rng.choice((1, 1, 2)), (topic, partition)
                number, sequence = ahead[where], sequences[producer, *where]
                if rng.random() < 0.03:
                    number += rng.choice((-1, 1))  # a wrong offset
                if rng.random() < 0.03:
                    sequence += rng.choice((-1, 1))  # a retry, or a gap
                flags = habit["write id"] | rng.randrange(4) << 5
                how = rng.choice(habit["how"])
                parts.append([topic, partition, [how, max(0, number), count, producer, sequence, flags, habit["age"]]])
                ahead[where] += count
                sequences[producer, *where] += count
            frames.append(_produce_frame(habit["version"], habit["acks"], parts))
        cuts = rng.choice(([], [], [], [], [37], [rng.randint(1, 400)]))
        ops: list[Op] = [["send", connection, frames, cuts]]
        if rng.random() < 0.3:
            # One by one: the beginning of a frame takes the permits back.
            ops = [["send", connection, [frame], rng.choice(([], [], [7, 1000]))] for frame in frames]
        ops += [["control", 0, "true", 0]] * rng.choice((0, 0, 0, 1, 2))
        if rng.random() < 0.05:
            ops.append(["answer", connection, rng.choice(("error", "append-error", "partitions")), 6, 0, 1])
        if rng.random() < 0.8:
            # All, in pieces or at once.
            ops.append(["answer", connection, "ok", 0, rng.choice((0, 0, 0, 0, 0, 9, 40)), 8])
            ops += [["control", 0, "true", 0]] * 2
            ahead.clear()
        if rng.random() < 0.1:
            ops.append(["tick", rng.choice((20, 20, 400, 3100))])
        return ops


class _Relaying(_Steady):
    """Most requests are relayed: without native code, only these take the fast path."""

    topics = (0, 1, 2, 2, 2, 2)
    relayed_share = 0.5


@pytest.mark.parametrize(
    ("executor", "programs"),
    [
        pytest.param(PYTHON, _Relaying(), id="relaying"),
        pytest.param(NATIVE, _Programs(), id="native, one partition", marks=needs_native),
        pytest.param(NATIVE, _TwoPartitions(), id="native, two partitions", marks=needs_native),
        pytest.param(NATIVE, _Steady(), id="native, steady", marks=needs_native),
    ],
)
@pytest.mark.parametrize("block", [0, *(pytest.param(number, marks=pytest.mark.soak) for number in (1, 2, 3))])
def test_fast_path_and_general_path_agree(block: int, executor: str, programs: _Programs) -> None:
    taken: Counter[str] = Counter()
    count = 2 * _PROGRAMS if type(programs) is _Steady else _PROGRAMS
    for seed in range(block * count, (block + 1) * count):
        remembers = isinstance(programs, _Steady) and seed % 2
        kinds = (_GeneralRemembers, _Remembers) if remembers else (_GeneralRun, _Run)
        taken += _run_both(programs.program(seed), executor, kinds)
    print(taken)
    # Not by never taking it, nor by never leaving it.
    expected: tuple[str, ...] = ()
    if executor == PYTHON:
        expected = ("taken up", "not taken up", "taken down", "not taken down")
    elif isinstance(programs, _Steady):
        expected = native_counts.EXPECTED
    assert all(taken[each] > _LEAST[executor] for each in expected), taken


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(3456, id="in-doubt appends are resolved in the order sent"),
        pytest.param(1494, id="a relayed response leaves the next one to its waiting sequencer"),
    ],
)
@each_executor
def test_past_path_differences_stay_fixed(executor: str, seed: int) -> None:
    _run_both(_Programs().program(seed), executor)


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
        """After it the fence is confirmed."""
        self.sends(_append("required", 0))
        self._control(0, "true", 0)
        self._answer(self.client, "ok", 0, 0)
        assert self.logs[TopicPartition("required", 0)].end == 1

    def requested(self) -> list[tuple[int, str]]:
        """What went upstream: version and topic."""
        frames, _ = dialogue_module.frames_of(self.client.upstream_got, 8)
        return [(Requested(frame).version, topic) for frame in frames for topic, _ in self._parts(Requested(frame))]


def _append(
    topic: str,
    expected: int,
    *,
    version: int = 9,
    client_id: str = "c",
    correlation_id: int = 1,
    producer: tuple[int, int, int] = (-1, -1, -1),
    partitions: int = 1,
) -> bytes:
    headers = [[("fencepost-expected-offset", b"%d" % expected)]]
    records = memoryview(bytes(batch(b"v", headers=headers, timestamp_ms=NOW_MS, producer=producer)))
    data = tuple(PartitionData(partition, records) for partition in range(partitions))
    request = ProduceRequest(
        version, correlation_id, client_id, b"", None, -1, 30_000, (TopicData(topic, TOPIC_IDS.get(topic), data),)
    )
    return b"".join(encode_produce_request(request))


@pytest.mark.parametrize("version", [8, 9])
def test_long_client_id_hides_no_topic(version: int) -> None:
    talk, client_id = _Talk(), "c" * 5000
    # Given a request to an unchecked topic, with so many bytes before its name that only these are parsed
    talk.sends(_append("relay", 0, version=version, client_id=client_id))
    assert talk.requested() == [(version, "relay")]
    # When the next one of the client is for a checked topic
    talk.sends(_append("required", 7, version=version, client_id=client_id, correlation_id=2))
    # Then it goes to its sequencer, which reads the log end
    assert talk.requested() == [(version, "relay")]
    assert [type(each.effect) for each in talk.control] == [g.ReadLogEnd]


def test_log_ends_of_a_request_are_read_at_once() -> None:
    talk, partitions = _Talk(), [TopicPartition("required", partition) for partition in (0, 1)]
    talk.sends(_append("required", 0, partitions=2))
    assert [each.effect for each in talk.control] == [g.ReadLogEnd(partition) for partition in partitions]
    # The second one's is known before the first one's. Both are sent together, and none is read again.
    talk._control(1, "true", 0)
    talk._control(0, "true", 0)
    assert not talk.control
    assert talk.requested() == [(13, "required")] * 2
    assert len(talk.client.queried) == 1
    talk._answer(talk.client, "ok", 0, 0)
    # For the next request none is read.
    talk.sends(_append("required", 1, partitions=2, correlation_id=2))
    assert not talk.control
    assert len(talk.client.queried) == 1


@pytest.mark.parametrize("at", ["name", "topics"])
def test_overlong_varint_lengths_shift_no_field(at: str) -> None:
    talk = _Talk()
    talk.appends_the_first()
    for expected in (1, 2):
        frame = bytearray(_append("required", expected, correlation_id=expected + 1))
        name_at = frame.index(b"\x09required")
        where = name_at if at == "name" else name_at - 1
        frame[where : where + 1] = bytes((frame[where] | 0x80, 0))
        frame[:4] = (len(frame) - 4).to_bytes(4, "big")
        talk.sends(bytes(frame))
        queried = talk.client.queried[-1]
        assert parse_produce_request(memoryview(queried.frame)).timeout_ms == 30_000
        talk._answer(talk.client, "ok", 0, 0)
    assert talk.requested() == [(13, "required")] * 3
    assert talk.logs[TopicPartition("required", 0)].end == 3
    talk._check_wires(talk.client)


def test_an_answer_about_another_topic_is_no_answer() -> None:
    talk = _Talk()
    talk.appends_the_first()
    talk.sends(_append("required", 1, correlation_id=2))
    answer = bytearray(talk._produced(talk.client.queried[-1], "ok", 0))
    at = answer.index(TOPIC_IDS["required"].bytes)
    answer[at : at + 16] = TOPIC_IDS["checked"].bytes
    got = len(talk.client.client_got)
    talk.client.upstream_wrote += answer
    talk._deliver_upstream(talk.client, 0)
    assert talk.client.proxy_closed_client
    assert len(talk.client.client_got) == got


def test_truncated_request_is_not_taken_for_its_predecessor() -> None:
    talk = _Talk()
    usual = _append("relay", 0)
    talk.sends(usual)
    # When a frame claims to be shorter, and the bytes after its end go on as the one before did
    length = usual.index(b"relay") + 2 - 4
    talk.sends(length.to_bytes(4, "big") + usual[4:])
    # Then it is malformed, and not for a broker to find out
    assert bytes(talk.client.upstream_got) == usual
    assert not talk.client.proxy_closed_client
    talk._answer(talk.client, "ok", 0, 0)
    assert talk.client.client_got
    talk._pass_time(READ_SECONDS)
    assert talk.client.proxy_closed_client


# --- what is under way by it, and does not end as usual ---------------------------------------------------------------


def test_duplicate_of_fast_path_append_is_answered_too() -> None:
    talk = _Talk()
    other = talk._wires(1)
    talk.appends_the_first()
    # Given an append that took the fast path, and the same one again by another connection of its producer
    again = _append("required", 1, correlation_id=2, producer=(5, 0, 3))
    talk.sends(again)
    assert len(talk.client.queried) == 1
    other.client_wrote += again
    talk._deliver_client(other, [])
    assert not other.queried
    talk.dispatcher.sessions[other.number]._core.proofs.may_write["required"] = float("inf")
    # When the first is answered
    talk._answer(talk.client, "ok", 0, 0)
    # Then so is the second, by the same
    reported = parse_produce_response(memoryview(bytes(talk.client.client_got[-len(other.client_got) + 4 :])), 9)
    assert parse_produce_response(memoryview(other.client_got)[4:], 9).topics == reported.topics
    assert reported.topics[0].partitions[0].base_offset == 1


def test_unknown_outcome_is_reported_in_time() -> None:
    talk = _Talk()
    talk.appends_the_first()
    got = len(talk.client.client_got)
    talk.sends(_append("required", 1, correlation_id=2))
    talk._pass_time(26.9)
    assert len(talk.client.client_got) == got
    talk._pass_time(0.2)
    response = parse_produce_response(memoryview(talk.client.client_got)[got + 4 :], 9)
    assert [each.error_code for each in response.topics[0].partitions] == [7]


def test_unreported_sequencer_decision_is_not_overtaken() -> None:
    services = ServicesStandIn(newest_produce=13)
    dispatcher = services.sequencers = Dispatcher(services, Unchanged(), g.SequencerLimits(), HeaderNames())  # type: ignore[arg-type]
    for connection in (1, 2):
        dispatcher.open(connection, "proxy.local", 0.0)._core.proofs.may_write = {"checked": float("inf")}

    def client(connection: int, now: float, *frames: bytes) -> None:
        dispatcher.session_event(connection, m.ClientBytes(memoryview(b"".join(frames))), now)

    def query(number: int, partition: int, records: memoryview) -> bytes:
        return produce(("checked", partition, records), correlation=number, timeout_ms=30_000)

    # Given a partition where what keeps its own producer id has to wait for 5 s, and another client's does
    waiting, other = TopicPartition("checked", 0), TopicPartition("checked", 1)
    dispatcher.sequencers[waiting] = PartitionSequencer(waiting, g.SequencerLimits(), HeaderNames())
    dispatcher.sequencers[waiting].state.queued.fenced_until = 105.0
    client(2, 99.0, query(1, 0, batch(b"x", producer=(9, 0, 0))))
    # And A at another one, whose fence Kafka refused: the sequencer reads whether A was appended already
    client(1, 99.5, query(1, 1, expecting(5, b"a")))
    dispatcher.sequencer_event(other, log_end_read(5, 99.5), 99.5)
    refused = produced(("", 1, 45, -1), version=13, by_id=True)
    dispatcher.session_event(1, m.UpstreamBytes(memoryview(refused)), 104.4)
    dispatcher.sequencer_event(other, log_end_read(6, 104.4), 104.4)
    # And after it one that waits at the first partition, and B, which follows A
    client(1, 104.4, query(2, 0, batch(b"y", producer=(8, 0, 0))), query(3, 1, expecting(6, b"b")))
    # When at the same moment the first is admitted and A times out
    actions = dispatcher.tick(105.1)
    # Then B falls with A, though it would fit
    sent = b"".join(
        b"".join(each.command.chunks)
        for each in actions
        if isinstance(each, ForConnection) and isinstance(each.command, m.ToUpstream) and each.connection == 1
    )
    assert len(sent) == 4 + int.from_bytes(sent[:4], "big"), "one request"
    request = parse_produce_request(memoryview(sent)[4:])
    assert [data.partition for topic in request.topics for data in topic.partitions] == [0]
    assert dispatcher.sequencers[other].idle


# --- defects of the fast path that only a comparison shows: what they do, and a seed that shows it --------------------


def _is_noticed(defect: Change, run: Callable[[int], object], first: int) -> bool:
    """`first`: a seed that showed the defect. After a change of the programs or of the table of APIs, another may."""
    with Mutant("fast path", "", (), defect).live():
        for seed in (first, *range(1000)):
            try:
                run(seed)
            except (AssertionError, Failure):
                return True
    return False


_SESSION_DEFECTS = {
    ("ignores the throttle time of a relayed response", 0): edit(
        FastPath, "take_down", ("data[at + throttled_at : at + throttled_at + 4] != NOT_THROTTLED", "False")
    ),
    ("sends requests of a throttled client", 0): edit(
        FastPath, "_may_take_up", ("holds.throttling.is_watched(now)", "False")
    ),
    ("leaves an answer unsent", 40): edit(FastPath, "take_down", ("len(to_client) > 1 and to_client[1].done", "False")),
    ("overtakes a waiting request", 45): edit(
        FastPath,
        "_may_take_up",
        ("holds.waiting_produce is not None", "False"),
        ("holds.client_paused", "False"),
    ),
    ("lets a client near the state topic", 501): edit(
        FastPath, "take_up", ("self._concerns_state_topic(data[at:end])", "False")
    ),
}


@pytest.mark.no_cover  # of what is broken
@pytest.mark.parametrize(("defect", "first"), _SESSION_DEFECTS)
def test_defective_session_fast_path_is_noticed(defect: str, first: int) -> None:
    programs, executor = _Relaying() if "state topic" in defect else _Programs(), PYTHON
    if "overtakes" in defect:  # only appends do, in native code
        if MODULE is None:
            pytest.skip(NOT_BUILT)
        programs, executor = _Steady(), NATIVE

    def run(seed: int) -> None:
        if "throttle" in defect:
            test_throttling.test_fast_path_leaves_throttled_responses_and_clients(Talk())
        else:
            _run_both(programs.program(seed), executor)

    assert _is_noticed(_SESSION_DEFECTS[defect, first], run, first)
