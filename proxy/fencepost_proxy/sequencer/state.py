"""State of a partition, and how an append ends there: what is remembered of it, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_policies.append import Refusal, where
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.appends import Appends
from fencepost_proxy.sequencer.events import Answer, AppendedBatch, PendingAppend, SequencerLimits
from fencepost_proxy.sequencer.fence import PartitionFence
from fencepost_proxy.sequencer.log_view import LogView
from fencepost_proxy.sequencer.queued_in_brokers import QueuedInBrokers
from fencepost_proxy.sequencer.retry_cache import RetryCache
from fencepost_proxy.sequencer.transactions import PartitionTransactions
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult


@dataclass(slots=True, eq=False)
class PartitionState:
    log: LogView
    appends: Appends
    fence: PartitionFence
    transactions: PartitionTransactions
    retries: RetryCache
    queued: QueuedInBrokers

    @classmethod
    def new(cls, partition: TopicPartition, limits: SequencerLimits, names: HeaderNames) -> PartitionState:
        log = LogView(partition, limits, names, [])
        joined: dict[str, float] = {}
        fence = PartitionFence(log, joined)
        transactions = PartitionTransactions(log, fence, joined)
        return cls(log, Appends(), fence, transactions, RetryCache(limits), QueuedInBrokers(limits))

    def appended(self, pending: PendingAppend, log_append_time_ms: int, log_start_offset: int, now: float) -> None:
        """A fenced append is where it was expected."""
        assert pending.placement.at is not None
        end = pending.placement.at + pending.append.record_count
        self.fence.appended(pending, end, pending in self.appends.in_doubt, now)
        self.queued.fenced_appended(end)
        self.accept(pending, self.retries.add(pending, log_append_time_ms, now), log_start_offset)

    def accept(
        self, pending: PendingAppend, appended_batch: AppendedBatch, log_start_offset: int | None = None
    ) -> None:
        result = PartitionResult(
            partition=pending.partition.partition,
            error_code=Error.NONE,
            base_offset=appended_batch.base_offset,
            log_append_time_ms=appended_batch.log_append_time_ms,
            log_start_offset=self.fence.log_start if log_start_offset is None else log_start_offset,
        )
        self.answer(pending, result)

    def refuse(self, pending: PendingAppend, refusal: Refusal) -> None:
        result = PartitionResult(
            partition=pending.partition.partition,
            error_code=refusal.error_code,
            base_offset=refusal.base_offset,
            log_append_time_ms=refusal.log_append_time_ms,
            log_start_offset=refusal.log_start_offset if refusal.log_start_offset >= 0 else self.fence.log_start,
            error_message=refusal.message,
        )
        self.answer(pending, result, refusal.reason)

    def try_again(self, pending: PendingAppend, why: str, reason: str = "try_again") -> None:
        """Error 6: not appended, try again. Every client retries on it and refreshes its metadata."""
        self._error(pending, Error.NOT_LEADER_OR_FOLLOWER, f"TRY_AGAIN {why}", reason)

    def unknown(self, pending: PendingAppend, why: str, now: float, *, queued: bool = True) -> None:
        """Error 7: it may be in the log. If it may be `queued` in a broker, it may also be appended later."""
        self.retries.add_unresolved(pending)
        self.appends.sequence_gaps.add(pending.pipeline_key)
        if queued and pending.placement.attempts:
            self.queued.add(pending, now)
        self._error(pending, Error.REQUEST_TIMED_OUT, f"OUTCOME_UNKNOWN {why}", "outcome_unknown")

    def _error(self, pending: PendingAppend, error: Error, message: str, reason: str) -> None:
        message = f"{message} {where(pending.append)}"
        self.answer(pending, PartitionResult(pending.partition.partition, error, error_message=message), reason)

    def answer(self, pending: PendingAppend, result: PartitionResult, reason: str | None = None) -> None:
        effects = self.log.effects
        effects.append(Answer(pending, result, reason))
        if result.error_code == Error.NONE:
            self.retries.resolved(pending)  # an error covers this attempt only: an earlier one may still be queued
        effects += [Answer(waiter, result, reason) for waiter in pending.placement.duplicate_waiters]
        pending.placement.duplicate_waiters = ()
        if result.error_code != Error.NONE and pending.placement.attempts:
            self.appends.fail_pipeline_after(pending, result)

    def send_again(self, pending: PendingAppend) -> None:
        """Put it back to the head of the queue, after the appends that were sent before it."""
        if pending.placement.attempts >= self.log.limits.attempts_max:
            self.try_again(pending, f"Kafka refused the fence {pending.placement.attempts} times")
        else:
            self.appends.put_back(pending)
