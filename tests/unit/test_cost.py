"""What one request costs, counted and not timed: the counts are the same on any machine, at any load.

Each case repeats a fixed dialogue on real sockets with real proxied connections, dispatcher, sessions and sequencers.
Only the event loop and Kafka are stand-ins. The counts of one request are:

- opcodes that the interpreter executes, ours and those of the libraries in Python that are called;
- held_bytes: the peak of allocated bytes while one read is handled, summed over its reads. It shows copies of
  relayed bytes;
- left: the objects that hold others, and the whole kilobytes, that remain after the answer. There should be
  none (a few hundred bytes Python keeps for itself).

And of a connection that is idle: the bytes that it holds, without its sockets.

A budget that is exceeded by more than a tenth fails. Then look first whether a needless copy or loop is on the way.
Where the cost is worth it, or has become smaller, `python -m tests.unit.test_cost` prints the new table; put it in,
and say in the commit why. Opcodes differ between Python releases: each has its figures; one without is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import json
import os
import select
import socket
import subprocess
import sys
import termios
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from itertools import islice, pairwise
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Final, NamedTuple, Self

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.metrics import Traffic
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.dispatcher import Dispatcher, ForConnection, ForControl
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.relay.native import MODULE
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transport import proxied_socket as side_module
from fencepost_proxy.transport.proxied_connection import ClientSocket, ProxiedConnection, UpstreamSocket
from fencepost_proxy.transport.proxied_socket import Buffers
from fencepost_proxy.types import Address
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult, ProduceResponse, TopicResult, encode_produce_response
from tests.support.batches import batch, expecting
from tests.support.sequencer_view import log_end_read
from tests.unit.test_session import T_ID, ServicesStandIn, Unchanged, produce, produced, request, response

#: More than this above its budget fails. Opcodes do not vary at all; small changes need not touch the table.
TOLERANCE: Final = 0.10
#: Python's free lists and resized dictionaries differ between runs.
BYTES_TOLERATED: Final = MappingProxyType({"held_bytes": 512, "idle_bytes": 256})


@dataclass(frozen=True, slots=True)
class Cost:
    opcodes: int
    held_bytes: int
    left_objects: int
    left_kilobytes: int
    idle_bytes: int


# fmt: off
#: By Python release: what it cost when it was measured last.
BUDGETS: Final[dict[tuple[int, int], dict[str, Cost]]] = {
    (3, 11): {
        #                                                opcodes, held_bytes, left_objects, left_kilobytes, idle_bytes
        "Heartbeat, relayed":                            Cost(   1034,    2193,       0,       0,    3798),
        "Fetch of 1 MiB, relayed in pieces of 64 KiB":   Cost(  10825,    3656,       0,       0,    3854),
        "Produce, unchecked, 1 KB":                      Cost(   1315,    2448,       0,       0,    4418),
        "Produce, checked, unconditional":               Cost(  11386,   17663,       0,       0,    6229),
        "Produce, conditional by header":                Cost(  11704,   17754,       0,       0,    6233),
        "Produce, conditional by base offset":           Cost(  11359,   17663,       0,       0,    6221),
        "Produce, conditional, 100 records":             Cost(  12191,   61197,       0,       0,    6265),
        "Produce, conditional, 5 in flight, all five":   Cost(  61330,  214176,       0,       0,    6265),
        "Produce, conditional, 10 partitions":           Cost(  60088,   65732,       0,       0,    6265),
    },
    (3, 12): {
        #                                                opcodes, held_bytes, left_objects, left_kilobytes, idle_bytes
        "Heartbeat, relayed":                            Cost(    948,    2121,       0,       0,    3798),
        "Fetch of 1 MiB, relayed in pieces of 64 KiB":   Cost(  10001,    3481,       0,       0,    3854),
        "Produce, unchecked, 1 KB":                      Cost(   1214,    2352,       0,       0,    4410),
        "Produce, checked, unconditional":               Cost(  10612,   17343,       0,       0,    6205),
        "Produce, conditional by header":                Cost(  10907,   17426,       0,       0,    6209),
        "Produce, conditional by base offset":           Cost(  10582,   17280,       0,       0,    6197),
        "Produce, conditional, 100 records":             Cost(  11376,   60743,       0,       0,    6241),
        "Produce, conditional, 5 in flight, all five":   Cost(  57174,  211667,       0,       0,    6241),
        "Produce, conditional, 10 partitions":           Cost(  56421,   65382,       0,       0,    6241),
    },
    (3, 13): {
        #                                                opcodes, held_bytes, left_objects, left_kilobytes, idle_bytes
        "Heartbeat, relayed":                            Cost(    937,    2090,       0,       0,    3862),
        "Fetch of 1 MiB, relayed in pieces of 64 KiB":   Cost(  10363,    3417,       0,       0,    3854),
        "Produce, unchecked, 1 KB":                      Cost(   1192,    2224,       0,       0,    4474),
        "Produce, checked, unconditional":               Cost(  10412,   17082,       0,       0,    6205),
        "Produce, conditional by header":                Cost(  10676,   17165,       0,       0,    6209),
        "Produce, conditional by base offset":           Cost(  10380,   17066,       0,       0,    6197),
        "Produce, conditional, 100 records":             Cost(  11123,   60592,       0,       0,    6241),
        "Produce, conditional, 5 in flight, all five":   Cost(  55896,  209392,       0,       0,    6241),
        "Produce, conditional, 10 partitions":           Cost(  54707,   65183,       0,       0,    6241),
    },
}
# fmt: on

#: Of one conditional append and its response without native code: calls, and files that define what is called.
WALK_MAX: Final = (363, 56)

# ------------------------------------------------------------------------------------------------------- the dialogues

_ROOT = Path(__file__).parents[2]
_FETCH, _HEARTBEAT = 1, 12
_IN_PIECES = "Fetch of 1 MiB, relayed in pieces of 64 KiB"
_BY_HEADER = "Produce, conditional by header"
_PIPELINED = "Produce, conditional, 5 in flight, all five"
#: What is sent at once, and taken from the other end before more is: any socket holds that much.
_PIECE_BYTES = 64 * 1024
_POLICIES = MappingProxyType(
    {
        "checked": TopicPolicy(Check.ON),
        "required": TopicPolicy(Check.REQUIRED),
        "based": TopicPolicy(Check.REQUIRED, source_is_base=True),
    }
)


class Piece(NamedTuple):
    by_client: bool
    data: memoryview


#: The pieces for the request of this number.
Dialogue = Callable[[int], Sequence[Piece]]


class _Process(ServicesStandIn):
    def policy(self, topic: str) -> TopicPolicy | None:
        return _POLICIES.get(topic)


class Wire(NamedTuple):
    """The near ends are the proxy's."""

    client: socket.socket
    near_client: socket.socket
    kafka: socket.socket
    near_kafka: socket.socket


class _Loop:
    """An event loop whose iterations the test controls."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        del self.readers[fd]

    def run_ready(self, wire: Wire) -> None:
        """Call readers until none is ready."""
        ends = (wire.near_client.fileno(), wire.near_kafka.fileno())
        while ready := select.select([fd for fd in ends if fd in self.readers], [], [], 0)[0]:
            for fd in ready:
                self.readers[fd]()

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        raise AssertionError("so little does not fill a socket")

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        raise AssertionError("no connection ends here")


class Stage:
    """The process between clients and one broker, whose log begins empty. Sequencers soon remember their maximum."""

    def __init__(self, connections: int = 1) -> None:
        services = _Process(frame_bytes_max=1 << 24, free_bytes=1 << 24, newest_produce=13, in_flight_requests_max=100)
        # A permit ends when the sequencer's memory would be full.
        limits = g.SequencerLimits(remembered_batches_max=8 if MODULE is None else 10_000)
        self.dispatcher = services.sequencers = Dispatcher(services, Unchanged(), limits, HeaderNames())  # type: ignore[arg-type]
        self.traffic = Traffic()
        self._loop = _Loop()
        self._buffers = Buffers()
        self._proxied_connections: dict[int, ProxiedConnection] = {}
        self._taken = bytearray(_PIECE_BYTES)
        with socket.create_server(("127.0.0.1", 0), backlog=2 * connections) as server:
            self._wires = [Wire(*_pair(server), *_pair(server)) for _ in range(connections)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.pipes.close()
        for wire in self._wires:
            for each in wire:
                each.close()

    def connect(self) -> int:
        connection = len(self._proxied_connections)
        wire = self._wires[connection]
        asyncio._set_running_loop(self._loop)  # type: ignore[arg-type]
        try:
            proxied = ProxiedConnection(
                connection,
                wire.near_client,
                self,
                self._buffers,
                peer=Address("127.0.0.1", 1),
                local_host="127.0.0.1",
                node_id=None,
            )
        finally:
            asyncio._set_running_loop(None)
        self._proxied_connections[connection] = proxied
        proxied.connected(wire.near_kafka)
        return connection

    def report(self, connection: int, stated: Piece) -> None:
        wire = self._wires[connection]
        far = wire.client if stated.by_client else wire.kafka
        for at in range(0, len(stated.data), _PIECE_BYTES):
            piece = stated.data[at : at + _PIECE_BYTES]
            far.sendall(piece)
            _arrived(wire.near_client if stated.by_client else wire.near_kafka, len(piece))
            self._loop.run_ready(wire)
            self._take(wire.client)
            self._take(wire.kafka)

    def _take(self, far: socket.socket) -> None:
        with suppress(BlockingIOError):
            while far.recv_into(self._taken, flags=socket.MSG_DONTWAIT):
                pass

    # ---- what a proxied connection reports to the process

    @property
    def now(self) -> float:
        return time.monotonic()  # as links have it

    def keep_time(self, session: Session) -> None:
        self.dispatcher.keep_time(session)

    def proxied_opened(self, proxied: ProxiedConnection) -> Session:
        # Opened long ago: what sequencers know holds for it.
        return self.dispatcher.open(proxied.connection, proxied.local_host, 0.0)

    def proxied_closed(self, proxied: ProxiedConnection) -> None:
        raise AssertionError("no connection ends here")

    def session_event(self, connection: int, event: m.Event) -> None:
        actions = self.dispatcher.session_event(connection, event, self.now)
        while actions:
            more = []
            for action in actions:
                if isinstance(action, ForControl):
                    assert isinstance(action.effect, g.ReadLogEnd), "only the first append has to look at the log"
                    more += self.dispatcher.sequencer_event(action.partition, log_end_read(0, self.now), self.now)
                else:
                    assert isinstance(action, ForConnection), action
                    assert not isinstance(action.command, m.CloseClient), action.command.reason
                    self._proxied_connections[action.connection].perform(action.command)
            actions = more


def _arrived(near: socket.socket, count: int) -> None:
    """A kernel with much to do takes its time also on its way from here to here."""
    give_up = time.monotonic() + 60
    waiting = bytearray(4)
    while int.from_bytes(waiting, sys.byteorder) < count:
        assert time.monotonic() < give_up, f"{count} bytes do not arrive"
        fcntl.ioctl(near, termios.FIONREAD, waiting)


def _pair(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    far = socket.create_connection(server.getsockname())
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return far, server.accept()[0]


def _queried(frame: bytes) -> Piece:
    return Piece(True, memoryview(frame))


def _answered(frame: bytes) -> Piece:
    return Piece(False, memoryview(frame))


def _relayed(api_key: int, version: int, answer_bytes: int) -> Dialogue:
    stated = [_queried(request(api_key, version, 1, b"q" * 60)), _answered(response(1, bytes(answer_bytes)))]
    return lambda number: stated


def _unchecked(number: int) -> list[Piece]:
    query = produce(("unchecked", 0, batch(b"v" * 1000)), correlation=number, acks=-1)
    return [_queried(query), _answered(produced(("unchecked", 0, 0, number), correlation=number))]


def _checked(
    topic: str, make: Callable[[int], memoryview], *, records: int = 1, together: int = 1, partitions: int = 1
) -> Dialogue:
    """Accepted requests, one after the other; `together` of them are sent before the first is answered."""

    def query(number: int) -> Piece:
        batches = [(topic, partition, make(number * records)) for partition in range(partitions)]
        return _queried(produce(*batches, correlation=number, acks=-1, timeout_ms=30_000))

    def answer(number: int) -> Piece:
        results = tuple(PartitionResult(each, 0, number * records, -1, 0) for each in range(partitions))
        reported = ProduceResponse(number, (TopicResult("", T_ID, results),), 0)
        return _answered(encode_produce_response(reported, 13))

    def stated(number: int) -> list[Piece]:
        numbers = range(number * together, (number + 1) * together)
        return [*map(query, numbers), *map(answer, numbers)]

    return stated


def _of_idempotent_client(offset: int) -> memoryview:
    return expecting(offset, b"v" * 100, producer=(4000, 0, offset))


_IN_FLIGHT = 5
CASES: Final[dict[str, Dialogue]] = {
    "Heartbeat, relayed": _relayed(_HEARTBEAT, 4, 20),
    _IN_PIECES: _relayed(_FETCH, 12, 16 * _PIECE_BYTES - 8),
    "Produce, unchecked, 1 KB": _unchecked,
    "Produce, checked, unconditional": _checked("checked", lambda offset: batch(b"v" * 100)),
    _BY_HEADER: _checked("required", lambda offset: expecting(offset, b"v" * 100)),
    "Produce, conditional by base offset": _checked("based", lambda offset: batch(b"v" * 100, base_offset=offset)),
    "Produce, conditional, 100 records": _checked(
        "required", lambda offset: expecting(offset, *[b"v" * 100] * 100), records=100
    ),
    _PIPELINED: _checked("required", _of_idempotent_client, together=_IN_FLIGHT),
    "Produce, conditional, 10 partitions": _checked(
        "required", lambda offset: expecting(offset, b"v" * 100), partitions=10
    ),
}

# ------------------------------------------------------------------------------------------------------------- counting

_WARM_UP, _MEASURED, _WEIGHED = 24, 3, 8
#: So many snapshots of what is left, after so many requests each.
_SNAPSHOTS, _BETWEEN_SNAPSHOTS = 2, 40
_CONNECTIONS = 20
#: Not counted: the stand-ins for the services of the dispatcher.
_STAND_INS = frozenset(
    {__file__, *(each.__code__.co_filename for each in (ServicesStandIn.policy, ServicesStandIn.release))}
)
_PACKAGES = frozenset({"fencepost_proxy", "fencepost_policies"})
_NOTHING_MUCH = CASES["Heartbeat, relayed"](0)

Report = Callable[[Sequence[Piece]], None]


def measure(name: str) -> Cost:
    dialogue = CASES[name]
    reported = iter(
        [dialogue(number) for number in range(_WARM_UP + _MEASURED + _WEIGHED + _SNAPSHOTS * _BETWEEN_SNAPSHOTS)]
    )
    with _undisturbed(), Stage() as stage:
        connection = stage.connect()

        def report(stated: Sequence[Piece]) -> None:
            for each in stated:
                stage.report(connection, each)

        for stated in islice(reported, _WARM_UP):
            report(stated)
        counts = {_opcodes(report, stated) for stated in islice(reported, _MEASURED)}
        peak = min(_paused(report, stated) for stated in islice(reported, _WEIGHED))
        probes = [_resolved()]
        while more := list(islice(reported, _BETWEEN_SNAPSHOTS)):
            for stated in more:
                report(stated)
            probes.append(_resolved())
    assert stage.dispatcher.sessions[connection].drained, "the dialogue is out of step with the code"
    assert len(counts) == 1, f"the opcodes of one request vary: {sorted(counts)}"
    left = [min(after[of] - before[of] for before, after in pairwise(probes)) for of in range(2)]
    left_objects, left_bytes = (max(0, each) // _BETWEEN_SNAPSHOTS for each in left)
    return Cost(min(counts), peak, left_objects, left_bytes // 1024, _idle_bytes(dialogue))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without tracer (coverage's would be counted, too) and garbage collection; allocations are traced."""
    tracer, collecting = sys.gettrace(), gc.isenabled()
    sys.settrace(None)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        if collecting:
            gc.enable()
        sys.settrace(tracer)


def _opcodes(report: Report, stated: Sequence[Piece]) -> int:
    return (_opcodes_monitored if sys.version_info >= (3, 12) else _opcodes_traced)(report, stated)


def _opcodes_traced(report: Report, stated: Sequence[Piece]) -> int:
    count = 0

    def each_opcode(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return each_opcode

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename in _STAND_INS:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return each_opcode

    sys.settrace(each_call)
    try:
        report(stated)
    finally:
        sys.settrace(None)
    return count


def _opcodes_monitored(report: Report, stated: Sequence[Piece]) -> int:
    """Since Python 3.12 tracing stands on monitoring, and misses some opcodes."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    count = 0

    def each_opcode(code: CodeType, offset: int) -> None:
        nonlocal count
        count += code.co_filename not in _STAND_INS

    tool = next(each for each in range(6) if monitoring.get_tool(each) is None)
    monitoring.use_tool_id(tool, "cost")
    try:
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, each_opcode)
        monitoring.set_events(tool, monitoring.events.INSTRUCTION)
        report(stated)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def _paused(report: Report, stated: Sequence[Piece]) -> int:
    report(_NOTHING_MUCH)  # what was kept of the request before is not taken for granted
    before, peak = tracemalloc.get_traced_memory()[0], 0
    for each in stated:
        tracemalloc.reset_peak()
        report((each,))
        peak += tracemalloc.get_traced_memory()[1] - before
    return peak


def _resolved() -> tuple[int, int]:
    """Objects that hold others, and bytes."""
    gc.collect()  # empties the interpreter's free lists
    sys._clear_type_cache()  # a class pattern leaves a new name in it, each time
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]


def _idle_bytes(dialogue: Dialogue) -> int:
    """Of a connection that is idle after this request; connections share the sequencer's memory."""
    reported = [dialogue(number) for number in range(2 * _CONNECTIONS)]
    with _undisturbed(), Stage(len(reported)) as stage:

        def come(stated: Sequence[Piece]) -> None:
            connection = stage.connect()
            for each in stated:
                stage.report(connection, each)

        for stated in reported[:_CONNECTIONS]:
            come(stated)
        before = _resolved()[1]
        for stated in reported[_CONNECTIONS:]:
            come(stated)
        return (_resolved()[1] - before) // _CONNECTIONS


def walk(name: str) -> list[tuple[int, str, str]]:
    """The functions that one request and its response pass, in order: depth, name and file."""
    dialogue, found, depth = CASES[name], [], 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and _PACKAGES & set(path.parts) and path != Path(__file__):
            if event == "call":
                found.append((depth, frame.f_code.co_qualname, "/".join(path.parts[-2:])))
            depth += 1 if event == "call" else -1

    with Stage() as stage:
        connection = stage.connect()
        for stated in [dialogue(number) for number in range(_WARM_UP + 1)]:
            found.clear()
            sys.setprofile(called)
            try:
                for each in stated:
                    stage.report(connection, each)
            finally:
                sys.setprofile(None)
    return found


# -------------------------------------------------------------------------------------------------------------- budgets


def too_much(cost: Cost, budget: Cost) -> list[str]:
    found = []
    for field in fields(Cost):
        now, then = getattr(cost, field.name), getattr(budget, field.name)
        if now > then * (1 + TOLERANCE) + BYTES_TOLERATED.get(field.name, 0):
            found.append(f"{field.name} {now}, budget {then}")
    return found


def _budgets() -> dict[str, Cost]:
    release = sys.version_info[:2]
    if sys.implementation.name != "cpython" or release not in BUDGETS:
        pytest.skip(f"no budgets for this Python {release[0]}.{release[1]}; `python -m tests.unit.test_cost` has them")
    return BUDGETS[release]


def _measured(*arguments: str, native: bool = False) -> dict[str, Cost]:
    printed = _printed("--json", *arguments, native=native)
    return {name: Cost(*figures) for name, figures in json.loads(printed).items()}


def _printed(*arguments: str, native: bool) -> str:
    """In a separate process: allocations by threads of other tests would be counted, too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment["FENCEPOST_NATIVE"] = "on" if native else "off"
    command = [sys.executable, "-m", "tests.unit.test_cost", *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    _budgets()
    return _measured()


@pytest.mark.parametrize("name", CASES)
def test_a_request_costs_no_more_than_its_budget(name: str, costs: dict[str, Cost]) -> None:
    found = too_much(costs[name], _budgets()[name])
    assert not found, f"{name}: {'; '.join(found)}. The head of {Path(__file__).name} says what to do"


def test_a_conditional_append_passes_no_more_functions_and_files() -> None:
    calls = [line.split() for line in _printed("--walk", _BY_HEADER, native=False).splitlines()]
    assert len(calls) <= WALK_MAX[0]
    assert len({file for _, file in calls}) <= WALK_MAX[1]


@pytest.mark.skipif(MODULE is None, reason="fencepost_native is not built: make native")
def test_native_code_leaves_python_almost_nothing_to_do() -> None:
    """The rest is calls of the process's services."""
    for name, cost in _measured(native=True).items():
        if name != _IN_PIECES:
            requests = 5 if name == _PIPELINED else 1
            assert cost.opcodes <= 80 * requests, name
        assert (cost.left_objects, cost.left_kilobytes) == (0, 0), name


def test_each_release_has_a_budget_for_every_case() -> None:
    for release, budgets in BUDGETS.items():
        assert list(budgets) == list(CASES), release


# Each of these is done for every read, as a careless line in the product would.
_WASTE = {
    "opcodes": "for _ in range(100): pass",
    "held_bytes": "copy = bytes(bytearray(data))",
    "left_objects": "kept.append([])",
    "left_kilobytes": "kept.append(bytes(1000))",
    "idle_bytes": "by_id[id(self)] = bytes(1000)",
}


@pytest.mark.parametrize("what", _WASTE)
def test_waste_is_noticed(what: str, costs: dict[str, Cost]) -> None:
    name = "Produce, conditional, 100 records" if what == "held_bytes" else "Heartbeat, relayed"
    wasteful = _measured("--case", name, "--waste", what)[name]
    assert what in " ".join(too_much(wasteful, costs[name]))


def _waste(what: str) -> None:
    code = f"def wasteful(self, data):\n {_WASTE[what]}\n real(self, data)"
    for side in (ClientSocket, UpstreamSocket):
        names: dict[str, Any] = {"real": side._received, "kept": [], "by_id": {}}
        exec(compile(code, "<waste>", "exec"), names)
        side._received = names["wasteful"]  # type: ignore[method-assign]


def table() -> str:
    release = sys.version_info[:2]
    lines = [f"    {release}: {{", f"        # {'':46} {', '.join(field.name for field in fields(Cost))}"]
    for name in CASES:
        figures = ", ".join(f"{figure:7}" for figure in astuple(measure(name)))
        lines.append(f'        "{name}":{" " * (46 - len(name))}Cost({figures}),')
    return "\n".join([*lines, "    },"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.unit.test_cost", description="Prints the table of budgets.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--walk", choices=CASES, help="print the functions that one such request passes, and stop")
    parser.add_argument("--waste", choices=_WASTE)
    options = parser.parse_args()
    side_module._READ_SECONDS_MAX = float("inf")  # being counted takes long
    if options.waste:
        _waste(options.waste)
    if options.walk:
        for depth, function, file in walk(options.walk):
            print(f"{'  ' * depth}{function.replace(' ', '')} {file}")
    elif options.json:
        print(json.dumps({name: astuple(measure(name)) for name in options.case or CASES}))
    else:
        print(table())


if __name__ == "__main__":
    main()
