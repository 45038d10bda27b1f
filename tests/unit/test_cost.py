"""What one request costs, counted and not timed: the counts are the same on any machine, however busy it is.

Each case is a canned dialogue with the real switch, sessions and gates, told again and again. Counted are, of one
request:

- opcodes that the interpreter executes, ours and those of the libraries in Python that are called;
- copied: the bytes that are held at most while one event is handled, summed over its events. What passes is copied
  once; one copy more shows here;
- left: the objects that hold others, and the whole kilobytes, that stay behind once it is answered. There should be
  none (a few hundred bytes Python keeps for itself).

And of a connection that is idle: the bytes that it holds. Sockets and event loop are not in it.

A budget that is exceeded by more than a tenth fails. Then look first whether a needless copy or loop is on the way.
Where the cost is worth it, or has become smaller, `python -m tests.unit.test_cost` prints the table anew; put it in,
and say in the commit why. Opcodes differ between Python releases: each has figures of its own; one without is skipped.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from itertools import islice, pairwise
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Final

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.partitions import events as g
from fencepost_proxy.session import messages as m
from fencepost_proxy.session.switch import ForConnection, ForControl, Switch
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.wire.batch import HeaderNames
from tests.support.batches import batch, expecting
from tests.unit.test_session import Around, Unchanged, produce, produced, request, response

#: More than this above its budget fails. Opcodes do not vary at all; small changes need not touch the table.
TOLERANCE: Final = 0.10
#: Of Python's own making, and not the same on every run: free lists, dictionaries that grow.
BYTES_TOLERATED: Final = MappingProxyType({"copied_bytes": 512, "idle_bytes": 256})


@dataclass(frozen=True, slots=True)
class Cost:
    opcodes: int
    copied_bytes: int
    left_objects: int
    left_kilobytes: int
    idle_bytes: int


# fmt: off
#: By Python release: what it cost when it was measured last. (An idle connection still holds what it relayed last.)
BUDGETS: Final[dict[tuple[int, int], dict[str, Cost]]] = {
    (3, 11): {
        #                                                opcodes, copied_bytes, left_objects, left_kilobytes, idle_bytes
        "Heartbeat, relayed":                            Cost(   1420,     971,       0,       0,    5964),
        "Fetch of 1 MiB, relayed in reads of 256 KiB":   Cost(   2812, 1051021,       0,       0,  268083),
        "Produce, unguarded, 1 KB":                      Cost(   1824,    2936,       0,       0,    6017),
        "Produce, guarded, unconditional":               Cost(  11176,    8160,       0,       0,    6593),
        "Produce, conditional by header":                Cost(  11696,    8242,       0,       0,    6755),
        "Produce, conditional by base offset":           Cost(  11172,    7971,       0,       0,    6771),
        "Produce, conditional, 100 records":             Cost(  16693,   38826,       0,       0,    6784),
        "Produce, conditional, 5 in flight, all five":   Cost(  61484,  119417,       0,       0,    7650),
    },
    (3, 12): {
        #                                                opcodes, copied_bytes, left_objects, left_kilobytes, idle_bytes
        "Heartbeat, relayed":                            Cost(   1317,     947,       0,       0,    5926),
        "Fetch of 1 MiB, relayed in reads of 256 KiB":   Cost(   2591, 1051296,       0,       0,  268070),
        "Produce, unguarded, 1 KB":                      Cost(   1694,    2810,       0,       0,    5995),
        "Produce, guarded, unconditional":               Cost(  10252,    8368,       0,       0,    6659),
        "Produce, conditional by header":                Cost(  10744,    8332,       0,       0,    6666),
        "Produce, conditional by base offset":           Cost(  10244,    8258,       0,       0,    6624),
        "Produce, conditional, 100 records":             Cost(  15734,   38644,       0,       0,    6717),
        "Produce, conditional, 5 in flight, all five":   Cost(  56608,  119921,       0,       0,    7361),
    },
    (3, 13): {
        #                                                opcodes, copied_bytes, left_objects, left_kilobytes, idle_bytes
        "Heartbeat, relayed":                            Cost(   1354,     782,       0,       0,    6105),
        "Fetch of 1 MiB, relayed in reads of 256 KiB":   Cost(   2682, 1051021,       0,       0,  268221),
        "Produce, unguarded, 1 KB":                      Cost(   1704,    2810,       0,       0,    6165),
        "Produce, guarded, unconditional":               Cost(  10151,    7389,       0,       0,    6532),
        "Produce, conditional by header":                Cost(  10582,    7408,       0,       0,    6534),
        "Produce, conditional by base offset":           Cost(  10139,    7389,       0,       0,    6528),
        "Produce, conditional, 100 records":             Cost(  15058,   38545,       0,       0,    6566),
        "Produce, conditional, 5 in flight, all five":   Cost(  55711,  112661,       0,       0,    6566),
    },
}
# fmt: on

# ------------------------------------------------------------------------------------------------------- the dialogues

_FETCH, _HEARTBEAT = 1, 12
_READ_BYTES = 256 * 1024
_POLICIES = MappingProxyType(
    {
        "checked": TopicPolicy(Check.ON),
        "required": TopicPolicy(Check.REQUIRED),
        "based": TopicPolicy(Check.REQUIRED, carrier_base=True),
    }
)
#: The events of the request of this number.
Dialogue = Callable[[int], Sequence[m.Event]]


class _Process(Around):
    """Grants are the gates' to confirm."""

    switch: Switch

    def policy(self, topic: str) -> TopicPolicy | None:
        return _POLICIES.get(topic)

    def may_send(self, ticket: g.Ticket, now: float) -> bool:
        return self.switch.may_send(ticket, now)


class Stage:
    """A switch between clients and one broker, whose log begins empty. Gates remember little, so that they soon do."""

    def __init__(self) -> None:
        around = _Process(frame_bytes_max=1 << 24, free_bytes=1 << 24, newest_produce=13, in_flight_requests_max=100)
        limits = g.GateLimits(remembered_batches_max=8)
        self.switch = around.switch = Switch(around, Unchanged(), limits, HeaderNames())  # type: ignore[arg-type]
        self.now = 100.0
        self.connections = 0

    def connect(self) -> int:
        self.connections += 1
        self.switch.open(self.connections, "127.0.0.1", self.now)
        return self.connections

    def tell(self, connection: int, event: m.Event) -> None:
        actions = self.switch.session_event(connection, event, self.now)
        while actions:
            more = []
            for action in actions:
                if isinstance(action, ForControl):
                    assert isinstance(action.effect, g.ReadTail), "only the first append has to look at the log"
                    more += self.switch.gate_event(action.partition, g.TailRead(self._empty_log()), self.now)
                else:
                    assert isinstance(action, ForConnection), action
                    assert not isinstance(action.command, m.CloseClient), action.command.reason
            actions = more

    def _empty_log(self) -> g.Tail:
        return g.Tail(
            requested_at=self.now,
            log_end_offset=0,
            log_start_offset=0,
            producer_id=7000,
            producer_state=None,
            stamp_base=(0, 0),
            open_transactions=frozenset(),
            log_append_time=False,
            expiration_seconds=86_400.0,
            wall_minus_monotonic_seconds=time.time() - self.now,
            transactions_as_of=self.now,
        )


def _asked(frame: bytes) -> m.Event:
    return m.ClientBytes(memoryview(frame))


def _said(frame: bytes) -> list[m.Event]:
    """As the socket gives it: in reads of the receive buffer's size."""
    return [m.UpstreamBytes(memoryview(frame)[at : at + _READ_BYTES]) for at in range(0, len(frame), _READ_BYTES)]


def _relayed(api_key: int, version: int, answer_bytes: int) -> Dialogue:
    events = [_asked(request(api_key, version, 1, b"q" * 60)), *_said(response(1, bytes(answer_bytes)))]
    return lambda number: events


def _unguarded(number: int) -> list[m.Event]:
    ask = produce(("plain", 0, batch(b"v" * 1000)), correlation=number, acks=-1)
    return [_asked(ask), *_said(produced(("plain", 0, 0, number), correlation=number))]


def _guarded(topic: str, make: Callable[[int], memoryview], *, records: int = 1, together: int = 1) -> Dialogue:
    """Appends that are accepted, one behind the other; `together` of them are sent before the first is answered."""

    def ask(number: int) -> m.Event:
        return _asked(produce((topic, 0, make(number * records)), correlation=number, acks=-1, timeout_ms=30_000))

    def answer(number: int) -> list[m.Event]:
        return _said(produced((topic, 0, 0, number * records), correlation=number, version=13, by_id=True))

    def events(number: int) -> list[m.Event]:
        numbers = range(number * together, (number + 1) * together)
        return [*map(ask, numbers), *(event for each in numbers for event in answer(each))]

    return events


def _of_idempotent_client(offset: int) -> memoryview:
    return expecting(offset, b"v" * 100, producer=(4000, 0, offset))


_IN_FLIGHT = 5
CASES: Final[dict[str, Dialogue]] = {
    "Heartbeat, relayed": _relayed(_HEARTBEAT, 4, 20),
    "Fetch of 1 MiB, relayed in reads of 256 KiB": _relayed(_FETCH, 12, 4 * _READ_BYTES - 8),
    "Produce, unguarded, 1 KB": _unguarded,
    "Produce, guarded, unconditional": _guarded("checked", lambda offset: batch(b"v" * 100)),
    "Produce, conditional by header": _guarded("required", lambda offset: expecting(offset, b"v" * 100)),
    "Produce, conditional by base offset": _guarded("based", lambda offset: batch(b"v" * 100, base_offset=offset)),
    "Produce, conditional, 100 records": _guarded(
        "required", lambda offset: expecting(offset, *[b"v" * 100] * 100), records=100
    ),
    "Produce, conditional, 5 in flight, all five": _guarded("required", _of_idempotent_client, together=_IN_FLIGHT),
}

# ------------------------------------------------------------------------------------------------------------- counting

_WARM_UP, _COUNTED, _WEIGHED = 24, 3, 8
#: What is left is looked at so many times, after so many requests each.
_LOOKS, _BETWEEN_LOOKS = 2, 40
_CONNECTIONS = 20
#: Not counted: what stands here for the process around the switch.
_STAND_INS = frozenset({__file__, Around.policy.__code__.co_filename})
_NOTHING_MUCH = CASES["Heartbeat, relayed"](0)

Tell = Callable[[Sequence[m.Event]], None]


def measure(name: str) -> Cost:
    dialogue = CASES[name]
    told = iter([dialogue(number) for number in range(_WARM_UP + _COUNTED + _WEIGHED + _LOOKS * _BETWEEN_LOOKS)])
    with _undisturbed():
        stage = Stage()
        connection = stage.connect()

        def tell(events: Sequence[m.Event]) -> None:
            for event in events:
                stage.tell(connection, event)

        for events in islice(told, _WARM_UP):
            tell(events)
        counts = {_opcodes(tell, events) for events in islice(told, _COUNTED)}
        copied = min(_copied(tell, events) for events in islice(told, _WEIGHED))
        looks = [_settled()]
        while more := list(islice(told, _BETWEEN_LOOKS)):
            for events in more:
                tell(events)
            looks.append(_settled())
    assert stage.switch.sessions[connection].drained, "the dialogue is out of step with the code"
    assert len(counts) == 1, f"the opcodes of one request vary: {sorted(counts)}"
    left = [min(after[of] - before[of] for before, after in pairwise(looks)) for of in range(2)]
    left_objects, left_bytes = (max(0, each) // _BETWEEN_LOOKS for each in left)
    return Cost(counts.pop(), copied, left_objects, left_bytes // 1024, _idle_bytes(dialogue))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Nobody else counts meanwhile (coverage's tracer would be counted too), or collects; allocations are watched."""
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


def _opcodes(tell: Tell, events: Sequence[m.Event]) -> int:
    return (_opcodes_monitored if sys.version_info >= (3, 12) else _opcodes_traced)(tell, events)


def _opcodes_traced(tell: Tell, events: Sequence[m.Event]) -> int:
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
        tell(events)
    finally:
        sys.settrace(None)
    return count


def _opcodes_monitored(tell: Tell, events: Sequence[m.Event]) -> int:
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
        tell(events)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def _copied(tell: Tell, events: Sequence[m.Event]) -> int:
    tell(_NOTHING_MUCH)  # what was kept of the request before is not taken for granted
    before, copied = tracemalloc.get_traced_memory()[0], 0
    for event in events:
        tracemalloc.reset_peak()
        tell((event,))
        copied += tracemalloc.get_traced_memory()[1] - before
    return copied


def _settled() -> tuple[int, int]:
    """Objects that hold others, and bytes."""
    gc.collect()  # empties the interpreter's free lists
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]


def _idle_bytes(dialogue: Dialogue) -> int:
    """Of a connection that is idle after this request; what its gate keeps is shared by all."""
    told = [dialogue(number) for number in range(2 * _CONNECTIONS)]
    with _undisturbed():
        stage = Stage()

        def come(events: Sequence[m.Event]) -> None:
            connection = stage.connect()
            for event in events:
                stage.tell(connection, event)

        for events in told[:_CONNECTIONS]:
            come(events)
        before = _settled()[1]
        for events in told[_CONNECTIONS:]:
            come(events)
        return (_settled()[1] - before) // _CONNECTIONS


# -------------------------------------------------------------------------------------------------------------- judging


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


@pytest.mark.parametrize("name", CASES)
def test_a_request_costs_no_more_than_its_budget(name: str) -> None:
    budget = _budgets()[name]
    found = too_much(measure(name), budget)
    assert not found, f"{name}: {'; '.join(found)}. The head of {__name__} says what to do"


def test_each_release_has_a_budget_for_every_case() -> None:
    for release, budgets in BUDGETS.items():
        assert list(budgets) == list(CASES), release


# Each of these is done for every event, as a careless line in the product would.
_WASTE = {
    "copied_bytes": "copy = bytes(bytearray(event.data))",
    "opcodes": "for _ in range(100): pass",
    "left_objects": "kept.append([])",
    "left_kilobytes": "kept.append(bytes(1000))",
    "idle_bytes": "held[connection] = bytes(1000)",
}


@pytest.mark.parametrize("what", _WASTE)
def test_waste_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Fetch of 1 MiB, relayed in reads of 256 KiB" if what == "copied_bytes" else "Heartbeat, relayed"
    budget = measure(name)
    assert too_much(measure(name), budget) == []

    code = f"def wasteful(self, connection, event, now):\n {_WASTE[what]}\n return real(self, connection, event, now)"
    names: dict[str, Any] = {"real": Switch.session_event, "kept": [], "held": {}}
    exec(compile(code, "<waste>", "exec"), names)
    monkeypatch.setattr(Switch, "session_event", names["wasteful"])

    assert what in " ".join(too_much(measure(name), budget))


def table() -> str:
    release = sys.version_info[:2]
    lines = [f"    {release}: {{", f"        # {'':46} {', '.join(field.name for field in fields(Cost))}"]
    for name in CASES:
        figures = ", ".join(f"{figure:7}" for figure in astuple(measure(name)))
        lines.append(f'        "{name}":{" " * (46 - len(name))}Cost({figures}),')
    return "\n".join([*lines, "    },"])


if __name__ == "__main__":
    print(table())
