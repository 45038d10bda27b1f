"""One partition sequencer with events in every order that sessions and the control client can produce.

Sessions guarantee: an admitted append is sent or canceled; a sent one is answered in its connection's order, or lost
with its connection; every requested read is answered once.

Invariants: nothing is raised; each append that is not canceled is answered exactly once; success is reported only at
the expected offset; one read of each kind at a time; at the end nothing waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

from fencepost_policies.append import Check, Refusal
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.appends import batch_to_send
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult
from tests.fuzz.dialogue import LIMITS, NOW_MS, SEQUENCER_MODULES, make_batch
from tests.fuzz.engine import Failure, Op, Program, Tracer, Untraced
from tests.fuzz.log import SHARED, Log, carry_out
from tests.support.pending import pending_append
from tests.support.sequencer_view import view_of

PARTITION = TopicPartition("checked", 0)
_CONNECTIONS = 3
_QUIET_ROUNDS = 20
_ROUNDS_MAX = 300


class Sequencers:
    name = "sequencer"
    modules = SEQUENCER_MODULES

    def setup(self, rng: random.Random) -> dict[str, Any]:
        return {"required": rng.random() < 0.5, "append_time": rng.random() < 0.25, "calm": rng.random() < 0.6}

    def op(self, rng: random.Random) -> Op:
        draw = rng.random()
        error = rng.choice((0, 1, 2, 3, 6, 7, 10, 19, 20, 29, 45, 47, 56, 59, 87, -1))
        if draw < 0.25:
            how = rng.choice(("end", "end", "end", "is", "none"))
            number = rng.choice((0, 0, 0, 1, 2, -1)) if how == "end" else rng.randrange(5)
            age = rng.choice((0, 0, 0, 0, 90_000, -1))
            batch = [
                how,
                number,
                rng.randint(1, 3),
                rng.randrange(4),
                rng.randrange(4),
                rng.choice((0, 0, 1, 33, 8)),
                age,
            ]
            return ["submit", rng.randrange(_CONNECTIONS), batch]
        if draw < 0.45:
            return ["send"]
        if draw < 0.65:
            kind = rng.choice(("ok",) * 6 + ("error", "append-error", "elsewhere"))
            return ["answer", rng.randrange(_CONNECTIONS), kind, error]
        if draw < 0.82:
            kind = rng.choice(
                ("true",) * 6 + ("unknown", "no-topic", "unreadable", "not-yet", "deleted", "open", "error")
            )
            return ["control", rng.randrange(3), kind, error]
        return rng.choice(
            [
                ["tick", rng.choice((10, 60, 400, 600, 2500))],
                ["tick", 60],
                ["again", rng.randrange(4), rng.randrange(_CONNECTIONS)],
                ["cancel", rng.randrange(4)],
                ["give-back"],
                ["lose", rng.randrange(_CONNECTIONS)],
                ["forget"],
                ["move", rng.randint(1, 3)],
                ["truncate", rng.randrange(4)],
            ]
        )

    def execute(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> bytes:
        return _Run(program, observed, tracer).run()


class _Run:
    def __init__(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> None:
        self.program, self.observed, self.call = program, observed, tracer.call
        self.sequencer = PartitionSequencer(PARTITION, LIMITS)
        self.log = Log(log_append_time_ms=NOW_MS if program.setup["append_time"] else None)
        self.bases: dict[TopicPartition, tuple[int, int]] = {}
        self.now = 1000.0
        self.submitted: list[g.PendingAppend] = []  # all appends
        self.waiting: dict[g.PendingAppend, None] = {}  # submitted, neither answered nor canceled
        self.left: set[g.PendingAppend] = set()  # canceled: an admission is returned, an answer dropped
        self.admitted: g.PendingAppend | None = None
        self.sent: list[g.PendingAppend] = []  # in flight, in order
        self.control: list[tuple[Any, float]] = []
        self.transcript: list[str] = []

    def run(self) -> bytes:
        for op in self.program.ops:
            self._do(op)
        self._end()
        return "\n".join(self.transcript).encode()

    def _do(self, op: Op) -> None:
        kind, *rest = op
        match kind:
            case "submit":
                self._submit(make_batch(self.log.end, rest[1]), rest[0] % _CONNECTIONS)
            case "again" if self.submitted:
                self._submit(bytes(self.submitted[rest[0] % len(self.submitted)].records), rest[1] % _CONNECTIONS)
            case "send":
                self._send()
            case "give-back" if self.admitted is not None:
                # its request waited for another sequencer too long
                pending, self.admitted = self.admitted, None
                self._call(self.sequencer.cancel, pending)
                self._call(self.sequencer.submit, pending)
            case "cancel" if self.waiting:
                # a sent append is canceled only if it is admitted again without a client
                waiting = [each for each in self.waiting if not each.placement.attempts or each is self.admitted]
                if waiting:
                    self._cancel(waiting[rest[0] % len(waiting)])
            case "answer":
                self._answer(rest[0] % _CONNECTIONS, rest[1], rest[2])
            case "lose":
                self._lose(rest[0] % _CONNECTIONS)
            case "control" if self.control:
                self._control(rest[0] % len(self.control), rest[1], rest[2])
            case "tick":
                self._pass_time(abs(rest[0]) % 10_000 / 1000)
            case "forget":
                self._event(g.Forget())
            case "move":
                self.log.move(abs(rest[0]) % 100)
            case "truncate":
                self.log.truncate(abs(rest[0]))
            case _:
                pass

    # ---- events of sessions

    def _submit(self, records: bytes, connection: int) -> None:
        check = Check.REQUIRED if self.program.setup["required"] else Check.ON
        pending = pending_append(
            PARTITION,
            memoryview(records),
            TopicPolicy(check),
            frozenset({SHARED}),
            now=self.now,
            wait=1.0,
            connection=connection,
            context=g.AppendContext(instance_id=5),
            bytes_max=20_000,
        )
        if isinstance(pending, Refusal):
            return
        self.submitted.append(pending)
        self.waiting[pending] = None
        self._call(self.sequencer.submit, pending)

    def _send(self) -> None:
        pending = self.admitted
        if pending is None:
            return
        self.admitted = None
        if self.sequencer.may_send(pending, self.now):
            self.sent.append(pending)
            self._call(self.sequencer.sent, pending)
        else:
            self._call(self.sequencer.cancel, pending)
            self._call(self.sequencer.submit, pending)

    def _cancel(self, pending: g.PendingAppend) -> None:
        if pending is self.admitted:
            self.admitted = None
        del self.waiting[pending]
        self.left.add(pending)
        self._call(self.sequencer.cancel, pending)

    def _lose(self, connection: int) -> None:
        for pending in [each for each in self.sent if each.connection == connection]:
            self.sent.remove(pending)
            pending.sending.may_write = True
            self._call(self.sequencer.lost, pending)
        # Cancel appends that are not in flight. Those in flight are resolved, without a client.
        for pending in [each for each in self.waiting if each.connection == connection and not each.placement.attempts]:
            if pending in self.waiting:
                self._cancel(pending)

    def _answer(self, connection: int, kind: str, error: int) -> None:
        pending = next((each for each in self.sent if each.connection == connection), None)
        if pending is None:
            return
        self.sent.remove(pending)
        pending.sending.may_write = True
        code, base, at = error, -1, -1
        if kind != "error" or not error:
            if kind == "elsewhere":
                self.log.move(1)
            code, base, at = self.log.append(bytes(batch_to_send(pending)))
            if kind == "append-error" and not code:
                code, base = error, base if error % 2 else -1
        self._call(self.sequencer.answered, pending, PartitionResult(0, code, base, at, 0))

    def _control(self, index: int, kind: str, error: int) -> None:
        effect, queried_at = self.control.pop(index)
        self._event(carry_out(effect, PARTITION, self.log, self.bases, queried_at=queried_at, kind=kind, error=error))

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._event(g.Tick())

    # ---- effects

    def _event(self, event: g.Event) -> None:
        self._call(self.sequencer.handle, event)

    def _call(self, function: Callable[..., list[g.Effect]], *arguments: Any) -> None:
        effects = self.call(function, *arguments, self.now)
        for effect in effects:
            self.transcript.append(f"{type(effect).__name__}")
            match effect:
                case g.Admit(pending) if pending in self.left:
                    self._call(self.sequencer.cancel, pending)
                case g.Answer(pending) if pending in self.left:
                    pass
                case g.Admit(pending):
                    if self.admitted is not None:
                        raise Failure("two appends admitted")
                    if pending in self.sent:
                        raise Failure("an append in flight is admitted")
                    if pending not in self.waiting:
                        raise Failure("an answered or canceled append is admitted")
                    self.admitted = pending
                case g.Answer(pending, result, reason):
                    self.transcript.append(f"{result.error_code} {result.base_offset} {reason}")
                    self._answered(pending, result, reason)
                case g.Violation() | g.LostRecords() | g.MayJoin() | g.Late():
                    pass
                case _:
                    same = [each for each, _ in self.control if type(each) is type(effect)]
                    if same and not isinstance(effect, g.ReadBatch | g.Resend):
                        raise Failure("a second read of the same kind", type(effect).__name__)
                    self.control.append((effect, self.now))
        sequencer, view = self.sequencer, view_of(self.sequencer, self.now)
        if (
            len(sequencer.state.retries.appended_batch) > LIMITS.remembered_batches_max
            or len(sequencer.state.retries.fenced) > LIMITS.remembered_producers_max
        ):
            raise Failure("a sequencer remembers too much")
        if len(view.in_flight) > LIMITS.in_flight_max:
            raise Failure("more in flight than allowed")
        if len(self.control) > 50 * (1 + len(self.waiting)):
            raise Failure("too many reads", len(self.control))
        kinds = tuple(each.placement.kind for each in view.queued[:2])
        self.observed.add(
            (
                sequencer.phase,
                kinds,
                min(len(view.in_flight), 3),
                min(len(view.in_doubt), 2),
                len(view.being_read) > 0,
            )
        )
        what = type(arguments[0]) if function == self.sequencer.handle else function.__name__
        self.observed.add((what, sequencer.phase, view.fence_confirmed, self.admitted is not None))

    def _answered(self, pending: g.PendingAppend, result: PartitionResult, reason: str | None) -> None:
        if pending not in self.waiting:
            raise Failure("a second answer for an append")
        if pending is self.admitted:
            raise Failure("an answer for an admitted append")
        del self.waiting[pending]
        self.observed.add((result.error_code, reason, pending.placement.kind))
        expected = pending.append.expected_base_offset
        if not result.error_code and expected is not None and result.base_offset != expected:
            raise Failure("success at another offset", (expected, result.base_offset))

    # ---- end

    def _end(self) -> None:
        if not self.program.setup["calm"]:
            for connection in range(_CONNECTIONS):
                self._lose(connection)
        quiet = 0
        for _ in range(_ROUNDS_MAX):
            moved = bool(self.admitted or self.sent or self.control)
            self._send()
            for connection in range(_CONNECTIONS):
                self._answer(connection, "ok", 0)
            for _ in range(len(self.control)):
                self._control(0, "true" if self.program.setup["calm"] else "unreadable", 0)
            quiet = 0 if moved else quiet + 1
            if quiet > _QUIET_ROUNDS:
                break
            self._pass_time(0.06 if quiet < 3 else 1.0)
        if self.waiting:
            pending = next(iter(self.waiting))
            raise Failure(
                "an append is never answered", f"{pending.placement.kind.name} in {self.sequencer.phase.name}"
            )
        if not self.sequencer.idle:
            raise Failure("a sequencer is stuck without pending appends", self.sequencer.phase.name)
