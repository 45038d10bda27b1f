"""What Kafka's answer to an append means, or a lost connection instead of one."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_policies.conditional_publish import offset_mismatch
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.appends import FENCE_ERRORS
from fencepost_proxy.sequencer.events import NO_PRODUCER, AppendMode, Late, PendingAppend
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.in_doubt import IN_DOUBT, MAY_BE_FINAL, InDoubtResolver, Lookups
from fencepost_proxy.sequencer.state import PartitionState
from fencepost_proxy.wire.produce import PartitionResult


@dataclass(slots=True, eq=False)
class KafkaAnswers:
    _state: PartitionState
    _lookups: Lookups
    _resolver: InDoubtResolver

    def sent(self, pending: PendingAppend, now: float) -> None:
        self._state.appends.send(pending, now)
        kind, fence = pending.placement.kind, pending.placement.fence
        if kind is AppendMode.PASS_THROUGH and fence is None and pending.append.producer_id >= 0:
            self._state.retries.add_pass_through(pending.producer, pending.append.base_sequence)
        if pending.append.transactional:
            self._state.transactions.sent(pending)

    def answered(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        if pending not in self._state.appends.in_flight:
            if pending.outcome.late and self._state.log.retry_at is not None:
                self._state.log.retry_at = now  # the log shows it now
            return  # resolved from the log meanwhile
        error = result.error_code
        may_be_final = error in MAY_BE_FINAL and result.base_offset == -1
        in_doubt = error in IN_DOUBT or (error != Error.NONE and result.base_offset != -1)
        # Kafka's answer is final for an unconditional append under its own producer id, as without a proxy.
        if in_doubt and not (may_be_final and pending.placement.kind is AppendMode.PASS_THROUGH):
            pending.outcome.error_code = error if may_be_final else 0
            self.lost(pending, now, answered=True)
            return
        self._state.appends.in_flight.remove(pending)
        if pending.transactional_id is not None:
            self._state.transactions.believe_from(pending.transactional_id, now)
        if error == Error.NONE:
            if pending.placement.kind.fenced:
                self._fenced_success(pending, result, now)
            else:
                self._pass_through_success(pending, result, now)
            return
        self._state.fence.unconfirm()
        if pending.placement.kind.fenced and error in FENCE_ERRORS:
            # Sent once and refused: nothing was appended. Only the log shows why.
            self._state.send_again(pending)
        elif pending.outcome.is_there and error in FENCE_ERRORS:
            # After a restart Kafka knows only the last batch of a producer.
            refusal = offset_mismatch(
                pending.append, pending.placement.actual, self._state.fence.log_start, possibly_yours=True
            )
            self._state.refuse(pending, refusal)
        else:
            self._state.answer(pending, result)

    def _fenced_success(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        assert pending.placement.at is not None
        assert self._state.fence.snapshot is not None
        if result.log_append_time_ms != -1 or pending.append.max_timestamp_ms < 0:
            # On a LogAppendTime topic every answer has a time. Elsewhere a time marks a duplicate: of the winner of a
            # race, or of an earlier attempt. Or the topic has become a LogAppendTime one. The log decides. An answer
            # without a time is a fresh append, unless the batch has no timestamps: then its duplicate has none either.
            if not self._state.fence.snapshot.log_append_time:
                self._state.fence.unconfirm()
            pending.outcome.acknowledged = True
            if pending.placement.kind is AppendMode.SEQUENCED:
                pending.placement.at = result.base_offset
            self._resolver.add(pending, now + self._state.log.limits.resolve_seconds)
        elif result.base_offset != pending.placement.at:
            self._lookups.appended_elsewhere(pending, result, now)
        else:
            self._state.appended(pending, result.log_append_time_ms, result.log_start_offset, now)

    def _pass_through_success(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        fence = self._state.fence
        self._state.queued.appended(pending)
        conditional = pending.placement.kind is AppendMode.TRANSACTIONAL_CONDITIONAL
        if pending.append.transactional and result.log_append_time_ms != -1:
            # A duplicate, or on a LogAppendTime topic possibly a fresh append.
            if not conditional:
                pending.placement.at = result.base_offset
            self._lookups.duplicate(pending, result.base_offset)
            return
        if conditional and result.base_offset != pending.placement.at:
            self._lookups.appended_elsewhere(pending, result, now)
            return
        if pending.placement.fence == NO_PRODUCER and pending.append.producer_id >= 0:
            pending.placement.at = result.base_offset
            self._state.retries.add(pending, result.log_append_time_ms, now)  # Kafka would not recognise a retry
        end = result.base_offset + pending.append.record_count
        if fence.phase is not Phase.OPEN:  # always after a transactional append
            fence.unconfirm()
        elif end > fence.log_end:
            if result.base_offset != fence.log_end and not self._state.appends.in_flight:
                fence.unconfirm()  # another writer moved the log, too
            else:
                fence.appended_unfenced(pending, end)
        self._state.answer(pending, result)

    def lost(self, pending: PendingAppend, now: float, *, answered: bool = False) -> None:
        """The outcome is unknown. `answered`: Kafka has finished with it, so it is in the log or never will be."""
        if pending not in self._state.appends.in_flight:
            return
        self._state.appends.in_flight.remove(pending)
        self._state.fence.unconfirm()
        pending.outcome.unanswered = pending.outcome.unanswered or not answered
        if pending.transactional_id is not None:
            until = now if answered else now + self._state.log.limits.queued_seconds
            self._state.transactions.believe_from(pending.transactional_id, until)
        if pending.placement.kind.fenced or self._kafka_detects_duplicate(pending):
            until = max(now + self._state.log.limits.resolve_seconds, pending.sending.may_arrive_until)
            self._resolver.add(pending, until)
        else:
            # A resend might append it twice, after its transaction, or for an unauthorized client. A read proves
            # nothing for a batch without an expected offset.
            why = "Kafka's answer is not conclusive" if answered else "connection to Kafka lost before the answer"
            self._state.unknown(pending, why, now, queued=not answered)

    def report_late(self, now: float) -> None:
        """Report appends that Kafka does not answer, although another client's append waits for them.

        Kafka may not read their connection: a quota, a slow network. The log decides, as after a lost connection. Only
        appends that can be sent again without harm, since the first attempt may still arrive.
        """
        appends = self._state.appends
        sent_before = now - self._state.log.limits.answer_seconds
        late = {
            each.connection: None
            for each in appends.in_flight
            if not each.outcome.late and each.placement.sent_at is not None and each.placement.sent_at <= sent_before
        }
        if not late or all(each.connection in late for each in appends.queue):
            return
        for connection in late:
            pending_appends = tuple(each for each in appends.in_flight if each.connection == connection)
            for each in pending_appends:
                each.outcome.late = True
            if all(each.placement.kind.fenced or self._is_named(each) for each in pending_appends):
                self._state.log.effects.append(Late(pending_appends))

    def _kafka_detects_duplicate(self, pending: PendingAppend) -> bool:
        return self._is_named(pending) and pending.sending.may_write

    @staticmethod
    def _is_named(pending: PendingAppend) -> bool:
        """Whether Kafka recognizes a resend by its producer's sequence."""
        return pending.append.producer_id >= 0 and pending.placement.fence is None and not pending.append.transactional
