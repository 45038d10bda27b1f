"""Permit: lets native code execute appends to a partition that need no decision, without the partition sequencer.

A permit states what `Admitter` and `KafkaAnswers` look at for an append without complications. While one is issued, it
has the log end, the sequence offset and the appends in flight. Every call of the sequencer takes it back first, but for
the expected success of an append that it has adopted. While the log end is not known, a permit is for PASS_THROUGH
appends only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import NO_PRODUCER, AppendedBatch, AppendMode, Fence, PendingAppend
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.state import PartitionState
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import sequence_add
from fencepost_proxy.wire.produce import PartitionResult

if TYPE_CHECKING:
    from fencepost_native import Permit


#: As numbered by `Permit`.
_MODES = (AppendMode.CONDITIONAL, AppendMode.SEQUENCED, AppendMode.PASS_THROUGH)


class PermitTerms(NamedTuple):
    """What a permit allows. Times are monotonic seconds.

    `is_open`: the log end is known. `fences`: appends may be fenced; else only those that keep their producer id.
    `exclusive`: no other process fences here.
    """

    is_open: bool
    fences: bool
    exclusive: bool
    producer_id: int
    producer_epoch: int
    sequence_offset: int
    log_end: int
    end_as_of: float
    confirmed_until: float
    confirmed_since: float
    confirmed_epoch: int
    expiration_seconds: float
    expiration_known_until: float
    clock_offset_seconds: float
    in_flight_max: int
    remembered_max: int


class IssuedPermit:
    """`permit`: None while none is issued."""

    __slots__ = ("_adopted", "_partition", "_state", "permit")

    def __init__(self, partition: TopicPartition, state: PartitionState) -> None:
        self._partition = partition
        self._state = state
        self._adopted: list[PendingAppend] = []  # in flight when it was issued
        self.permit: Permit | None = None

    @property
    def idle(self) -> bool:
        return self.permit is None or self.permit.idle

    def issue(self, make: type[Permit], now: float) -> Permit | None:
        """None while the next append may need a decision."""
        if self.permit is None and _may_issue(self._state, now):
            self._adopted = list(self._state.appends.in_flight)
            self.permit = permit_for(make, self, self._partition, self._state)
        return self.permit

    def take_back(self) -> None:
        """It must not be used while the sequencer decides."""
        if self.permit is not None:
            permit, self.permit, self._adopted = self.permit, None, []
            _take_back(permit, self._state)

    def complete(self, pending: PendingAppend, result: PartitionResult, now: float) -> bool:
        """`KafkaAnswers.answered`, if it is the expected success of an append that the permit has adopted.

        The permit stays. False: nothing has happened.
        """
        if self.permit is None or result.error_code != Error.NONE or pending.placement.fence == NO_PRODUCER:
            return False
        if not self.permit.may_complete_adopted(pending, result.base_offset, result.log_append_time_ms):
            return False
        self.permit.complete_adopted(result.base_offset, now)
        if pending.placement.kind.fenced:
            appended = self._state.retries.add(pending, result.log_append_time_ms, now)
            self._state.accept(pending, appended, result.log_start_offset)
        else:
            self._state.answer(pending, result)
        return True

    def next_fenced_sequence(self, producer_id: int, producer_epoch: int) -> int | None:
        """For the permit: -1 if not known; None if the producer's batches keep their sequences."""
        producer = producer_id, producer_epoch
        for pending in reversed(self._adopted):
            if pending.producer == producer and pending.placement.kind.fenced:
                return sequence_add(pending.append.base_sequence, pending.append.record_count)
        return self._state.retries.next_fenced_sequence(producer)


def _may_issue(state: PartitionState, now: float) -> bool:
    fence, appends = state.fence, state.appends
    if fence.phase not in (Phase.OPEN, Phase.UNCONFIRMED) or state.log.retry_at is not None:
        return False
    if appends.queue or appends.admitted or appends.in_doubt or appends.being_read:
        return False
    is_open = fence.phase is Phase.OPEN
    if not all(_may_adopt(pending) and (is_open or not pending.placement.kind.fenced) for pending in appends.in_flight):
        return False
    if state.transactions.occupied(now) or state.queued.any(now) or state.retries.has_unknown:
        return False
    return not fence.bases.is_last_epoch(fence.epoch)  # on a `required` topic an append ends it


def permit_for(make: type[Permit], issuer: IssuedPermit, partition: TopicPartition, state: PartitionState) -> Permit:
    fence, appends, limits = state.fence, state.appends, state.log.limits
    snapshot = fence.snapshot
    producer_id, expiration_seconds, known_until, clock_offset_seconds = -1, 0.0, 0.0, 0.0
    fences = False
    if fence.phase is Phase.OPEN and snapshot is not None:
        fences = limits.fencing and not (snapshot.log_append_time or snapshot.open_transactions)
        producer_id, clock_offset_seconds = snapshot.producer_id, snapshot.clock_offset_seconds
        expiration_seconds, known_until = snapshot.expiration_seconds, snapshot.expiration_known_until
    terms = PermitTerms(
        is_open=fence.phase is Phase.OPEN,
        fences=fences,
        exclusive=fence.exclusive,
        producer_id=producer_id,
        producer_epoch=fence.epoch % limits.producer_epochs,
        sequence_offset=fence.sequence_offset,
        log_end=fence.log_end,
        end_as_of=fence.end_as_of,
        confirmed_until=fence.confirmed_until,
        confirmed_since=fence.confirmed_since,
        confirmed_epoch=fence.confirmed_epoch,
        expiration_seconds=expiration_seconds,
        expiration_known_until=known_until,
        clock_offset_seconds=clock_offset_seconds,
        in_flight_max=limits.in_flight_max,
        remembered_max=limits.remembered_batches_max,
    )
    permit = make(issuer, partition, terms)
    for pending in appends.in_flight:
        placement = pending.placement
        at, sent_at = -1 if placement.at is None else placement.at, placement.sent_at or 0.0
        sent = _MODES.index(placement.kind), at, sent_at, pending.sending.leader_epoch
        permit.adopt(pending, pending.append, pending.connection, sent)
    appends.in_flight.clear()
    return permit


def _may_adopt(pending: PendingAppend) -> bool:
    return (
        pending.placement.attempts == 1
        and pending.placement.kind in _MODES
        and not (pending.append.transactional or pending.placement.duplicate_waiters or pending.outcome.acknowledged)
        and not (pending.outcome.is_there or pending.placement.sent_before)
        and pending.placement.predecessor_result is None
    )


def _take_back(permit: Permit, state: PartitionState) -> None:
    log, confirmed, remembered, pass_through, in_flight, topic_settings = permit.take_back()
    fence, appends = state.fence, state.appends
    fence.log_end, fence.sequence_offset, fence.end_as_of = log
    fence.confirmed_until, fence.confirmed_since, fence.confirmed_epoch = confirmed
    if topic_settings is not None:
        fence.check = topic_settings.policy.check
    for at, record_count, digest, write_id, (producer_id, epoch, first), acknowledged in remembered:
        batch = AppendedBatch(at, record_count, digest, write_id, -1, *acknowledged)
        state.retries.remember(batch, (producer_id, epoch), first)
    for producer_id, epoch, first in pass_through:
        state.retries.add_pass_through((producer_id, epoch), first)
    for each in in_flight:
        if len(each) == 2:
            appends.in_flight.append(each[1])
            continue
        number, source, sent, fenced = each
        pending = source[0].maker.permitted_append(source, sent, fenced)
        mode, at, sent_at, *_ = sent
        pending.placement.kind = _MODES[mode]
        fence.check = pending.check
        if fenced is not None:
            pending.placement.at, pending.placement.fence = at, Fence(*fenced)
            if pending.append.producer_id >= 0:
                state.retries.record_fenced(pending)
        appends.send(pending, sent_at)
        permit.keep(number, pending)
