"""The switch under test with somebody who looks on: whose turn it was, and how old a cold grant is when it is used."""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.partitions import events as g
from fencepost_proxy.partitions.gate import Gate
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.session.exchange import Exchanges
from fencepost_proxy.session.session import Session
from fencepost_proxy.session.surroundings import Surroundings
from fencepost_proxy.session.switch import Switch
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames
from tests.simulation.clock import Sim
from tests.simulation.history import History

_LATE_SECONDS = 1.0


class WatchedSwitch(Switch):
    """Notes in `history` what no answer shows. A ticket's place is that of its offer; a retry that waited for another
    try of the same batch has that one's place."""

    def __init__(
        self,
        around: Surroundings,
        exchanges: Exchanges,
        limits: g.GateLimits,
        names: HeaderNames,
        *,
        sim: Sim,
        history: History,
    ) -> None:
        super().__init__(around, exchanges, limits, names)
        self._sim = sim
        self._history = history
        self._cold_send_seconds = limits.cold_send_seconds
        self._offers = 0
        self._places: dict[g.Ticket, int] = {}
        self._held: set[g.Ticket] = set()  # that waited for what may be queued: others may have passed them
        #: Of each chain the last that failed: its place, and when.
        self._failed: dict[tuple[TopicPartition, int, int], tuple[int, float]] = {}

    def _route(self, session: Session, command: sessions.Command) -> None:
        if isinstance(command, sessions.ToGate):
            ticket = command.ticket
            match command.event:
                case g.Offered():
                    self._offers += 1
                    self._places[ticket] = self._offers
                case g.Withdrawn():
                    if ticket.followers:
                        self._places[ticket.followers[0]] = self._places[ticket]
                case g.Sent():
                    self._check_age(ticket)
                case _:
                    pass
        super()._route(session, command)

    def _new_gate(self, partition: TopicPartition) -> Gate:
        return _WatchedGate(partition, self._limits, self._names, self)

    def take(self, gate: Gate, take: Callable[[g.Ticket, float], bool], ticket: g.Ticket, now: float) -> bool:
        """The short way: offer, turn and sending in one."""
        is_cold = not gate._in_flight and now >= gate._warm_until
        held = {_chain(t) for t in gate._queue if gate._waits_for_what_may_be_queued(t, now)}
        before = [t for t in gate._queue if t.connection != ticket.connection and _chain(t) not in held]
        if not take(ticket, now):
            return False
        self._offers += 1
        self._places[ticket] = self._offers
        if is_cold:
            self._check_read(gate, ticket)
        if before:
            self._note(f"UNFAIR: a turn at {gate.partition} goes past {len(before)} that came before")
        return True

    def note_held(self, gate: Gate) -> None:
        self._held.update(t for t in gate._queue if gate._waits_for_what_may_be_queued(t, self._sim.now))

    def _carry_out(self, gate: Gate, effect: g.Effect, now: float) -> None:
        self.note_held(gate)
        match effect:
            case g.Grant(ticket):
                self._check_place(gate, ticket)
                if ticket.connection not in self.sessions and ticket.followers:
                    self._places[ticket.followers[0]] = self._places[ticket]  # its client is gone
            case g.Resend(ticket) if ticket.kind.stamped:
                self._check_chain(gate, ticket)
            case g.Answer(ticket, result):
                self._held.discard(ticket)
                place = self._places.pop(ticket, 0)
                if result.error_code and ticket.attempts:
                    self._failed[_chain(ticket)] = place, self._sim.now
            case _:
                pass
        super()._carry_out(gate, effect, now)

    def _check_place(self, gate: Gate, ticket: g.Ticket) -> None:
        """First come, first served; a batch in doubt, sent or looked up, holds the turn until it is settled."""
        if ticket.attempts and (ticket.append.producer_id >= 0 or ticket.append.expected_base_offset is not None):
            self._check_chain(gate, ticket)
        if ticket.attempts or ticket.settle_until:
            return
        mine = self._places[ticket]
        # Whoever waits for what may still be in a broker's queue holds up nobody but its own chain.
        held = {_chain(t) for t in gate._queue if t in self._held}
        before = [
            t
            for t in gate._queue
            if self._places.get(t, mine) < mine and t.connection != ticket.connection and _chain(t) not in held
        ]
        if before:
            self._note(f"UNFAIR: a turn at {gate.partition} goes past {len(before)} that came before")

    def _check_chain(self, gate: Gate, ticket: g.Ticket) -> None:
        """A batch that has been sent cannot go again after one ahead of it in its chain failed, or may yet fail."""
        mine = self._places.get(ticket, 0)
        before = [t for t in gate._looking if t.attempts and _chain(t) == _chain(ticket) and self._places[t] < mine]
        place, failed_at = self._failed.get(_chain(ticket), (0, 0.0))
        if before or (0 < place < mine and failed_at >= ticket.offered_at):
            self._note(f"BEHIND A HOLE: at {gate.partition} a batch goes again behind one that failed")

    def _check_age(self, ticket: g.Ticket) -> None:
        """What was read of a cold partition may be relied on for a short time only: nothing compares there."""
        gate = self.gates.get(ticket.partition)
        if gate is not None and self._sim.now >= gate._warm_until and not gate._in_flight:
            self._check_read(gate, ticket)

    def _check_read(self, gate: Gate, ticket: g.Ticket) -> None:
        tail = gate._tail
        if tail is None or not ticket.kind.stamped:
            return
        age = self._sim.now - tail.requested_at
        if age > self._cold_send_seconds + 0.001:
            self._note(f"COLD AND LATE: sent to {ticket.partition} {age:.2f} s after its end was read")

    def _note(self, what: str) -> None:
        self._sim.log(what)
        self._history.broken.append(what)

    def overdue(self) -> list[str]:
        """Who has waited for longer than was promised. Only true of a process that runs."""
        return [
            f"STARVED: a turn at {gate.partition} is {self._sim.now - ticket.deadline:.2f} s late"
            for gate in self.gates.values()
            for ticket in gate._queue
            if ticket.deadline + _LATE_SECONDS < self._sim.now and not ticket.attempts
        ]


def _chain(ticket: g.Ticket) -> tuple[TopicPartition, int, int]:
    return ticket.partition, ticket.connection, ticket.append.producer_id


class _WatchedGate(Gate):
    def __init__(self, partition: TopicPartition, limits: g.GateLimits, names: HeaderNames, by: WatchedSwitch) -> None:
        super().__init__(partition, limits, names)
        self._by = by

    def handle(self, event: g.Event, now: float) -> list[g.Effect]:
        effects = super().handle(event, now)
        self._by.note_held(self)  # who may pass them was decided by this event
        return effects

    def take(self, ticket: g.Ticket, now: float) -> bool:
        return self._by.take(self, super().take, ticket, now)
