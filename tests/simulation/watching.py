"""The dispatcher under test, with checks that responses do not show: the order of appends, and stale reads."""

from __future__ import annotations

from typing_extensions import override

from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult
from tests.simulation.clock import Sim
from tests.simulation.history import History
from tests.support.sequencer_view import SequencerView, view_of

_LATE_SECONDS = 1.0
_Pipeline = tuple[TopicPartition, int, int]


class WatchedDispatcher(Dispatcher):
    """Records violations in `history`. Appends are ordered by their submission. A duplicate waiter takes over the order
    of the append that it waited for.
    """

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
        self._unconfirmed_send_seconds = limits.unconfirmed_send_seconds
        self._submits = 0
        self._order: dict[g.PendingAppend, int] = {}
        self._overtakable: set[g.PendingAppend] = set()
        #: Failed appends by pipeline, whether they are independent, and batch: place in the order, and when it failed.
        self._failed: dict[tuple[_Pipeline, bool], dict[tuple[int, bytes], tuple[int, float]]] = {}

    @override
    def submit(self, pending: g.PendingAppend) -> g.Admit | g.Answer | None:
        self._submits += 1
        self._order[pending] = self._submits
        decision = super().submit(pending)
        if decision is not None:
            self._watch(self.sequencers[pending.partition], decision)
        return decision

    @override
    def answered(self, pending: g.PendingAppend, result: PartitionResult) -> g.Answer | None:
        decision = super().answered(pending, result)
        if decision is not None:
            self._watch(self.sequencers[pending.partition], decision)
        return decision

    @override
    def cancel(self, pending: g.PendingAppend) -> None:
        if pending.placement.duplicate_waiters:
            self._order[pending.placement.duplicate_waiters[0]] = self._order[pending]
        super().cancel(pending)

    @override
    def sent(self, pending: g.PendingAppend) -> None:
        self._check_age(pending)
        super().sent(pending)

    @override
    def _new_sequencer(self, partition: TopicPartition) -> PartitionSequencer:
        return WatchedSequencer(partition, self._limits, self._names, self)

    def record_overtakable(self, sequencer: PartitionSequencer) -> None:
        self._overtakable |= view_of(sequencer, self._sim.now).overtakable

    @override
    def _carry_out(self, sequencer: PartitionSequencer, effect: g.Effect, now: float) -> None:
        self._watch(sequencer, effect)
        super()._carry_out(sequencer, effect, now)

    def _watch(self, sequencer: PartitionSequencer, effect: g.Effect) -> None:
        self.record_overtakable(sequencer)
        match effect:
            case g.Admit(pending):
                self._check_order(sequencer, pending)
                if pending.connection not in self.sessions and pending.placement.duplicate_waiters:
                    self._order[pending.placement.duplicate_waiters[0]] = self._order[
                        pending
                    ]  # its client has disconnected
            case g.Resend(pending) if pending.placement.kind.fenced:
                self._check_pipeline(sequencer, pending)
            case g.Answer(pending, result):
                self._overtakable.discard(pending)
                order = self._order.pop(pending, 0)
                if result.error_code and pending.placement.attempts:
                    failed = self._failed.setdefault((_pipeline(pending), _is_independent(pending)), {})
                    failed[_batch(pending)] = order, self._sim.now
            case _:
                pass

    def _check_order(self, sequencer: PartitionSequencer, pending: g.PendingAppend) -> None:
        """First come, first served. An in-doubt append blocks others until it is resolved."""
        if pending.placement.attempts:
            self._check_pipeline(sequencer, pending)
        if pending.placement.attempts or pending.outcome.resolve_until:
            return
        mine, view = self._order[pending], view_of(sequencer, self._sim.now)
        # An append that waits for requests queued at a broker blocks only its own pipeline.
        overtakable = {_pipeline(t) for t in view.queued if t in self._overtakable}
        before = [
            t
            for t in view.queued
            if self._order.get(t, mine) < mine
            and t.connection != pending.connection
            and _pipeline(t) not in overtakable
        ]
        if before:
            self._record(f"UNFAIR: an append to {sequencer.partition} overtakes {len(before)} earlier ones")

    def _check_pipeline(self, sequencer: PartitionSequencer, pending: g.PendingAppend) -> None:
        """A sent batch must not be sent again after a predecessor in its pipeline failed, or while it may fail.

        Of two independent batches, neither is the other's predecessor.
        """
        mine = self._order.get(pending, 0)
        before = [
            t
            for t in view_of(sequencer, self._sim.now).being_read
            if t.placement.attempts and _pipeline(t) == _pipeline(pending) and self._order[t] < mine
        ]
        failed = [
            found
            for independent in ((False,) if _is_independent(pending) else (False, True))
            for batch, found in self._failed.get((_pipeline(pending), independent), {}).items()
            if batch != _batch(pending)  # its own first try
        ]
        if before or any(0 < order < mine and failed_at >= pending.submitted_at for order, failed_at in failed):
            self._record(f"APPENDED AFTER FAILURE: {sequencer.partition}: a batch is resent after a failed predecessor")

    def _check_age(self, pending: g.PendingAppend) -> None:
        """With an unconfirmed fence Kafka compares nothing, so a read is valid for a short time only."""
        sequencer = self.sequencers.get(pending.partition)
        if sequencer is not None:
            view = view_of(sequencer, self._sim.now)
            if not (view.in_flight or view.fence_confirmed):
                self._check_read(view, pending)

    def _check_read(self, view: SequencerView, pending: g.PendingAppend) -> None:
        if view.read_at is None or not pending.placement.kind.fenced:
            return
        age = self._sim.now - view.read_at
        if age > self._unconfirmed_send_seconds + 0.001:
            self._record(f"STALE READ: sent to {pending.partition} {age:.2f} s after the log end was read")

    def _record(self, what: str) -> None:
        self._sim.log(what)
        self._history.broken.append(what)

    def overdue(self) -> list[str]:
        """Appends that waited longer than promised. Valid only while the process runs."""
        return [
            f"STARVED: an append to {sequencer.partition} is {self._sim.now - pending.placement.deadline:.2f} s late"
            for sequencer in self.sequencers.values()
            for pending in view_of(sequencer, self._sim.now).queued
            if pending.placement.deadline + _LATE_SECONDS < self._sim.now and not pending.placement.attempts
        ]


def _pipeline(pending: g.PendingAppend) -> _Pipeline:
    return pending.partition, pending.connection, pending.append.producer_id


def _batch(pending: g.PendingAppend) -> tuple[int, bytes]:
    return pending.append.base_sequence, pending.digest


def _is_independent(pending: g.PendingAppend) -> bool:
    return pending.append.producer_id < 0 and pending.append.expected_base_offset is None


class WatchedSequencer(PartitionSequencer):
    def __init__(
        self, partition: TopicPartition, limits: g.SequencerLimits, names: HeaderNames, by: WatchedDispatcher
    ) -> None:
        super().__init__(partition, limits, names)
        self._by = by

    @override
    def _finish(self, now: float) -> list[g.Effect]:
        effects = super()._finish(now)
        self._by.record_overtakable(self)  # this call decided which appends may overtake
        return effects
