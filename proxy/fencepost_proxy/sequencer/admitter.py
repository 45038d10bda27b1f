"""From the submission of an append to its admission: retries and refusals, then the queue, then the fence."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_policies.append import Check
from fencepost_policies.conditional_publish import check_statements
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer import transactions
from fencepost_proxy.sequencer.appends import not_authorized
from fencepost_proxy.sequencer.events import (
    NO_PRODUCER,
    TRANSACTION_OPEN,
    Admit,
    AppendMode,
    LogEndSnapshot,
    PendingAppend,
    ReadLogEnd,
)
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver, Lookups
from fencepost_proxy.sequencer.state import PartitionState
from fencepost_proxy.wire.produce import PartitionResult


@dataclass(slots=True, eq=False)
class Admitter:
    _state: PartitionState
    _lookups: Lookups
    _resolver: InDoubtResolver

    # ---- submission

    def submit(self, pending: PendingAppend, now: float) -> None:
        kind = pending.placement.kind = self.mode_of(pending, now)
        pending.placement.fence = None  # of a canceled admission; the mode may have changed since
        self._state.appends.number(pending)
        self._state.fence.check = pending.check
        if kind.fenced and pending.append.producer_id >= 0:
            self._state.retries.record_fenced(pending)
        refusal = check_statements(pending.append, pending.check) or self._state.retries.violation_of(pending)
        if pending.append.transactional and pending.check is Check.REQUIRED:
            refusal = transactions.not_supported(pending)
        if refusal is not None:
            self._state.refuse(pending, refusal)
            return
        # Before any comparison: a retry's first attempt moved the log end.
        if self._lookups.is_violation(pending) or self._is_known_retry(pending):
            return
        if self._mark_first_try_in_doubt(pending, now):
            return
        queue = self._state.appends.queue
        if len(queue) >= self._state.log.limits.queue_max:
            self._state.try_again(pending, "the partition's queue is full")
        else:
            queue.append(pending)

    def mode_of(self, pending: PendingAppend, now: float) -> AppendMode:
        append, snapshot = pending.append, self._state.fence.snapshot
        conditional = append.expected_base_offset is not None
        if append.transactional:
            return AppendMode.TRANSACTIONAL_CONDITIONAL if conditional else AppendMode.PASS_THROUGH
        if conditional:
            return AppendMode.CONDITIONAL
        if self._state.retries.went_as_pass_through(pending):
            return AppendMode.PASS_THROUGH
        if append.producer_id < 0 and snapshot is not None and snapshot.cannot_be_fenced(append, now):
            return AppendMode.PASS_THROUGH  # as `_admit_at` decides after a read of the log end
        if append.producer_id < 0 or self._state.retries.is_fenced(pending):
            # The broker never got the sequences of its conditional batches, so the next unconditional one would meet a
            # gap (45). The sequencer keeps fencing them, and deduplicates in Kafka's place.
            return AppendMode.SEQUENCED
        return AppendMode.PASS_THROUGH

    def _is_known_retry(self, pending: PendingAppend) -> bool:
        """Answer a retry of a batch that this process has answered, or let it wait for the one in flight."""
        if not pending.placement.kind.fenced or pending.append.producer_id < 0:
            return False
        appended_batch = self._state.retries.retry_of(pending)
        if appended_batch is not None:
            if appended_batch.holds_for(pending):
                self._state.accept(pending, appended_batch)
            else:
                self._lookups.remembered(pending, appended_batch)
            return True
        earlier = self._state.appends.earlier_attempt(pending)
        if earlier is None:
            return False
        earlier.placement.duplicate_waiters += (pending,)
        return True

    def _mark_first_try_in_doubt(self, pending: PendingAppend, now: float) -> bool:
        """A batch whose last attempt ended unknown: look it up in the log before sending it again."""
        known = self._state.retries.unresolved(pending)
        if known is None:
            return False
        pending.placement.at, pending.placement.fence = known
        pending.placement.sent_before = True
        if pending.placement.fence == NO_PRODUCER:
            # Unfenced: neither its offset nor its sender can be found out, and Kafka would append it again.
            why = "an earlier attempt, too old to be fenced, may have been appended"
            self._state.unknown(pending, why, now)
        else:
            self._resolver.add(pending, min(pending.placement.deadline, now + self._state.log.limits.resolve_seconds))
        return True

    # ---- the queue

    def read_ahead(self, pending: PendingAppend, now: float) -> None:
        """Read the log end if the append, which nothing precedes, would wait for that."""
        fence, append = self._state.fence, pending.append
        if append.transactional or self.mode_of(pending, now) is AppendMode.PASS_THROUGH:
            return
        if fence.phase in (Phase.UNCONFIRMED, Phase.OPEN) and not (
            fence.is_confirmed(pending, now) or fence.is_fresh(now)
        ):
            self._read_log_end(now)

    def advance(self, now: float) -> None:
        """Admit appends while the head of the queue can proceed."""
        appends, fence = self._state.appends, self._state.fence
        if (
            appends.in_doubt
            and not appends.in_flight
            and appends.admitted is None
            and fence.phase in (Phase.UNCONFIRMED, Phase.OPEN)
        ):
            self._resolver.begin(now)
        while appends.queue and appends.admitted is None and fence.phase in (Phase.UNCONFIRMED, Phase.OPEN):
            # Before any append passes another: an in-doubt retry may return to its place in the queue.
            if appends.in_doubt or self._state.transactions.awaits_marker(now):
                return
            # An append that waits for a possibly queued one lets others pass.
            if self._state.queued.block(appends.queue[0], now) and not appends.let_others_pass(
                lambda pending: self._state.queued.block(pending, now)
            ):
                return
            pending = appends.queue[0]
            if not self.fits_with_in_flight(pending, now) or appends.predecessor_is_read(pending):
                return
            if pending.placement.predecessor_result is not None:
                appends.queue.popleft()
                self._state.answer(pending, pending.placement.predecessor_result, "predecessor_failed")
            elif self._is_known_retry(pending):
                # Its first attempt was still queued here when it came, and has been answered since.
                appends.queue.popleft()
            elif pending.placement.kind is AppendMode.PASS_THROUGH or pending.outcome.is_there:
                self._admit(pending)
            elif not self._decide(pending, now):
                return

    def fits_with_in_flight(self, pending: PendingAppend, now: float) -> bool:
        in_flight = self._state.appends.in_flight
        if not in_flight:
            return True
        if len(in_flight) >= self._state.log.limits.in_flight_max:
            return False
        if pending.placement.kind is AppendMode.PASS_THROUGH:
            return all(other.placement.kind is AppendMode.PASS_THROUGH for other in in_flight)
        # One connection keeps its order, and a lost predecessor makes the successor fail by its sequence. So appends
        # are pipelined, but only while the fence is confirmed and no other instance fences here. Otherwise: 1. This
        # process sends A, B. 2. Another instance's X, with as many records as A, is appended first. 3. Kafka takes A
        # for a duplicate of X. 4. B's sequence fits, so B is appended after X. A claim keeps other processes out.
        if not (
            pending.placement.kind.fenced
            and self._state.fence.is_confirmed(pending, now)
            and all(other.placement.kind.fenced and other.connection == pending.connection for other in in_flight)
        ):
            return False
        if now < self._state.queued.fenced_until:
            # 1. A, B are lost and unknown. 2. X takes A's sequence. 3. C, D are sent. 4. B comes first, after X.
            # 5. Kafka takes C for a duplicate of B, and D's sequence fits.
            return False
        if not (pending.context.alone or self._state.fence.exclusive):
            self._state.fence.bases.waited(pending.submitted_at)
            return False
        return True

    def end_of_all_sent(self) -> int:
        """The log end once all appends in flight are appended."""
        if not self._state.appends.in_flight:
            return self._state.fence.log_end
        last = self._state.appends.in_flight[-1]
        assert last.placement.at is not None
        return last.placement.at + last.append.record_count

    # ---- the head of the queue

    def _decide(self, pending: PendingAppend, now: float) -> bool:
        """Admit or end the head of the queue; False if it has to wait."""
        state, queue = self._state, self._state.appends.queue
        fence, in_flight, snapshot = state.fence, state.appends.in_flight, state.fence.snapshot
        if not (in_flight or fence.is_confirmed(pending, now) or fence.is_fresh(now)):
            return self._read_log_end(now)
        assert snapshot is not None
        if snapshot.may_claim and not in_flight and fence.is_confirmed(pending, now) and fence.claims(snapshot, now):
            return False
        if pending.append.transactional:
            if not state.transactions.is_known(pending, snapshot):
                # The read predates the marker of its producer's last transaction, or an earlier attempt of the append.
                return self._read_log_end(now)
            if state.transactions.is_anothers_producer(pending, snapshot):
                queue.popleft()
                state.refuse(pending, transactions.anothers_producer(pending))
                return True
        end = self.end_of_all_sent()
        expected = end if pending.placement.kind is AppendMode.SEQUENCED else pending.append.expected_base_offset
        assert expected is not None
        # Waiting for a marker would not free the offset. It may be a retry of an append in its own transaction.
        passed = pending.append.transactional and expected < end
        if not passed and state.transactions.another_is_open(pending, snapshot):
            queue.popleft()
            if state.transactions.may_not_wait(pending, snapshot, now):
                state.refuse(pending, transactions.conflict(pending))
            else:
                why = "a transaction is open on the partition; its marker will take an offset"
                state.try_again(pending, why, TRANSACTION_OPEN)
            fence.unconfirm()
            return True
        decided = self._first_try_decides(pending, end, now)
        if decided is not None:
            return decided
        if expected == end and pending.append.contradiction is None:
            self._admit_at(pending, end, snapshot, now)
            return True
        if in_flight:
            return False  # the outcome depends on the appends before it
        if fence.end_as_of < pending.submitted_at:
            # The reported `actual` must have been the log end at some moment during this call.
            return self._read_log_end(now)
        queue.popleft()
        self._lookups.mismatch(pending, expected, end, now)
        return True

    def _first_try_decides(self, pending: PendingAppend, end: int, now: float) -> bool | None:
        """For a batch whose first attempt may still be queued in Kafka: as `_decide`; None if that does not matter.

        The log did not have it when it was read. With the same sequence, only one of the two attempts is appended. With
        another sequence both may be, and one may be appended after it was refused.
        """
        known = self._state.retries.unresolved(pending)
        if known is None:
            return None
        pending.placement.sent_before = True  # also if that attempt ended while this one waited here
        if known[0] == end:
            return None
        if self._state.appends.in_flight:
            return False  # its offset depends on the appends before it
        if end > known[0]:
            # It has been appended since, or another batch has.
            self._state.appends.queue.popleft()
            self._mark_first_try_in_doubt(pending, now)
            if self._state.appends.in_doubt:
                self._resolver.begin(now)
            return True
        if now < self._state.queued.fenced_until:
            self._state.appends.queue.popleft()
            self._state.unknown(pending, "an earlier attempt may still be appended after one sent before it", now)
            return True
        self._state.retries.resolved(pending)
        return None

    def _admit_at(self, pending: PendingAppend, end: int, snapshot: LogEndSnapshot, now: float) -> None:
        """The expectation holds: admit it, unless its timestamps are too old for a fence."""
        refusal = self._state.fence.too_old(pending, snapshot, now)
        if refusal is None:
            self._state.fence.put_on(pending, end, snapshot)
            self._admit(pending)
        elif self._state.retries.unresolved(pending) and now < self._state.queued.fenced_until:
            # Its first attempt was fenced and may still be appended, in addition to this one, which would not be
            # fenced.
            self._state.appends.queue.popleft()
            self._state.unknown(pending, "an earlier attempt of this batch may still be appended", now)
        elif pending.check is Check.REQUIRED:
            self._state.appends.queue.popleft()
            self._state.refuse(pending, refusal)
        else:
            # On a `true` topic a batch with old timestamps is not fenced: appended unconditionally, or alone.
            sequenced = pending.placement.kind is AppendMode.SEQUENCED
            pending.placement.kind = AppendMode.PASS_THROUGH if sequenced else AppendMode.TRANSACTIONAL_CONDITIONAL
            if pending.append.producer_id >= 0:
                # The broker never got this producer's sequences, and would find a gap.
                pending.placement.fence = NO_PRODUCER

    def _read_log_end(self, now: float) -> bool:
        log = self._state.log
        if self._state.appends.in_flight or (log.retry_at is not None and now < log.retry_at):
            return False
        log.retry_at = None
        self._state.fence.phase = Phase.READING
        queried = tuple(self._state.transactions.joined)
        queue = self._state.appends.queue
        mine = queue[0].transactional_id if queue else None
        if mine is not None and mine not in queried:
            queried += (mine,)
        log.effects.append(ReadLogEnd(log.partition, queried))
        return False

    def _admit(self, pending: PendingAppend) -> None:
        appends = self._state.appends
        appends.queue.popleft()
        appends.admitted = pending
        self._state.log.effects.append(Admit(pending))

    # ---- time, and what is not known

    def answer_late(self, now: float) -> None:
        why = "the log end could not be read in time"
        if self._state.transactions.awaits_marker(now):
            why = "a transaction marker is being written"
        for pending in [each for each in self._state.appends.queue if each.placement.deadline <= now]:
            self._state.appends.queue.remove(pending)
            self._state.try_again(pending, why)

    def answer_late_duplicates(self, now: float) -> None:
        for earlier in self._state.appends.with_duplicate_waiters():
            for pending in [each for each in earlier.placement.duplicate_waiters if each.placement.deadline <= now]:
                earlier.placement.waits_no_longer(pending)
                self._state.unknown(pending, "an earlier attempt of this batch is still in doubt", now)

    def log_end_unknown(self, error_code: int | None, now: float) -> None:
        if self._state.fence.phase is not Phase.READING:
            return
        self._state.fence.phase = Phase.UNCONFIRMED
        self._state.log.retry(now)
        if error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
            while self._state.appends.queue:
                pending = self._state.appends.queue.popleft()
                self._state.answer(pending, PartitionResult(pending.partition.partition, error_code))
        elif error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            while self._state.appends.queue:
                pending = self._state.appends.queue.popleft()
                if self._state.retries.unresolved(pending) is None:
                    self._state.refuse(pending, not_authorized(pending.partition.topic))
                else:
                    self._state.unknown(pending, "an earlier attempt of this batch is still in doubt", now)
