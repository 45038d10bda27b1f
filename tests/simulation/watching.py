"""The switch under test with somebody who looks on: whose turn it was, and how old a cold grant is when it is used."""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.rewriters import RequestRewriters
from fencepost_proxy.session.services import Services
from fencepost_proxy.session.session import Session
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames
from tests.simulation.clock import Sim
from tests.simulation.history import History

_LATE_SECONDS = 1.0


class WatchedSwitch(Dispatcher):
    """Notes in `history` what no answer shows. A ticket's place is that of its offer; a retry that waited for another
    try of the same batch has that one's place."""

    def __init__(
        self,
        services: Services,
        rewriters: RequestRewriters,
        limits: g.SequencerLimits,
        names: HeaderNames,
        *,
        sim: Sim,
        history: History,
    ) -> None:
        super().__init__(services, rewriters, limits, names)
        self._sim = sim
        self._history = history
        self._cold_send_seconds = limits.unconfirmed_send_seconds
        self._submits = 0
        self._places: dict[g.PendingAppend, int] = {}
        self._paused: set[g.PendingAppend] = set()  # that waited for what may be queued: others may have passed them
        #: Of each chain the last that failed: its place, and when.
        self._failed: dict[tuple[TopicPartition, int, int], tuple[int, float]] = {}

    def _route(self, session: Session, command: sessions.Command) -> None:
        if isinstance(command, sessions.ToSequencer):
            pending = command.pending
            match command.event:
                case g.Submitted():
                    self._submits += 1
                    self._places[pending] = self._submits
                case g.Canceled():
                    if pending.duplicate_waiters:
                        self._places[pending.duplicate_waiters[0]] = self._places[pending]
                case g.Sent():
                    self._check_age(pending)
                case _:
                    pass
        super()._route(session, command)

    def _new_sequencer(self, partition: TopicPartition) -> PartitionSequencer:
        return _WatchedGate(partition, self._limits, self._names, self)

    def take(
        self,
        sequencer: PartitionSequencer,
        take: Callable[[g.PendingAppend, float], bool],
        pending: g.PendingAppend,
        now: float,
    ) -> bool:
        """The short way: offer, turn and sending in one."""
        is_cold = not sequencer._in_flight and now >= sequencer._confirmed_until
        held = {_chain(t) for t in sequencer._queue if sequencer._waits_for_what_may_be_queued(t, now)}
        before = [t for t in sequencer._queue if t.connection != pending.connection and _chain(t) not in held]
        if not take(pending, now):
            return False
        self._submits += 1
        self._places[pending] = self._submits
        if is_cold:
            self._check_read(sequencer, pending)
        if before:
            self._record(f"UNFAIR: a turn at {sequencer.partition} goes past {len(before)} that came before")
        return True

    def note_held(self, sequencer: PartitionSequencer) -> None:
        self._paused.update(t for t in sequencer._queue if sequencer._waits_for_what_may_be_queued(t, self._sim.now))

    def _carry_out(self, sequencer: PartitionSequencer, effect: g.Effect, now: float) -> None:
        self.note_held(sequencer)
        match effect:
            case g.Admit(pending):
                self._check_place(sequencer, pending)
                if pending.connection not in self.sessions and pending.duplicate_waiters:
                    self._places[pending.duplicate_waiters[0]] = self._places[pending]  # its client is gone
            case g.Resend(pending) if pending.kind.fenced:
                self._check_chain(sequencer, pending)
            case g.Answer(pending, result):
                self._paused.discard(pending)
                place = self._places.pop(pending, 0)
                if result.error_code and pending.attempts:
                    self._failed[_chain(pending)] = place, self._sim.now
            case _:
                pass
        super()._carry_out(sequencer, effect, now)

    def _check_place(self, sequencer: PartitionSequencer, pending: g.PendingAppend) -> None:
        """First come, first served; a batch in doubt, sent or looked up, holds the turn until it is settled."""
        if pending.attempts and (pending.append.producer_id >= 0 or pending.append.expected_base_offset is not None):
            self._check_chain(sequencer, pending)
        if pending.attempts or pending.resolve_until:
            return
        mine = self._places[pending]
        # Whoever waits for what may still be in a broker's queue holds up nobody but its own chain.
        held = {_chain(t) for t in sequencer._queue if t in self._paused}
        before = [
            t
            for t in sequencer._queue
            if self._places.get(t, mine) < mine and t.connection != pending.connection and _chain(t) not in held
        ]
        if before:
            self._record(f"UNFAIR: a turn at {sequencer.partition} goes past {len(before)} that came before")

    def _check_chain(self, sequencer: PartitionSequencer, pending: g.PendingAppend) -> None:
        """A batch that has been sent cannot go again after one ahead of it in its chain failed, or may yet fail."""
        mine = self._places.get(pending, 0)
        before = [
            t for t in sequencer._being_read if t.attempts and _chain(t) == _chain(pending) and self._places[t] < mine
        ]
        place, failed_at = self._failed.get(_chain(pending), (0, 0.0))
        if before or (0 < place < mine and failed_at >= pending.submitted_at):
            self._record(f"APPENDED AFTER FAILURE: at {sequencer.partition} a batch goes again behind one that failed")

    def _check_age(self, pending: g.PendingAppend) -> None:
        """What was read of a cold partition may be relied on for a short time only: nothing compares there."""
        sequencer = self.sequencers.get(pending.partition)
        if sequencer is not None and self._sim.now >= sequencer._confirmed_until and not sequencer._in_flight:
            self._check_read(sequencer, pending)

    def _check_read(self, sequencer: PartitionSequencer, pending: g.PendingAppend) -> None:
        tail = sequencer._snapshot
        if tail is None or not pending.kind.fenced:
            return
        age = self._sim.now - tail.requested_at
        if age > self._cold_send_seconds + 0.001:
            self._record(f"STALE READ: sent to {pending.partition} {age:.2f} s after its end was read")

    def _record(self, what: str) -> None:
        self._sim.log(what)
        self._history.broken.append(what)

    def overdue(self) -> list[str]:
        """Who has waited for longer than was promised. Only true of a process that runs."""
        return [
            f"STARVED: a turn at {sequencer.partition} is {self._sim.now - pending.deadline:.2f} s late"
            for sequencer in self.sequencers.values()
            for pending in sequencer._queue
            if pending.deadline + _LATE_SECONDS < self._sim.now and not pending.attempts
        ]


def _chain(pending: g.PendingAppend) -> tuple[TopicPartition, int, int]:
    return pending.partition, pending.connection, pending.append.producer_id


class _WatchedGate(PartitionSequencer):
    def __init__(
        self, partition: TopicPartition, limits: g.SequencerLimits, names: HeaderNames, by: WatchedSwitch
    ) -> None:
        super().__init__(partition, limits, names)
        self._by = by

    def handle(self, event: g.Event, now: float) -> list[g.Effect]:
        effects = super().handle(event, now)
        self._by.note_held(self)  # who may pass them was decided by this event
        return effects

    def take(self, pending: g.PendingAppend, now: float) -> bool:
        return self._by.take(self, super().take, pending, now)
