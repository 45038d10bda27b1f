"""State of a partition sequencer, how long it may be relied on, and how appends are answered.

A sequencer is a stack of base classes:

    SequencerState      state of the partition, and answers
    Publishing          agreement on a new fence base
    InDoubtResolver     what only the log can decide: in-doubt appends, and what lies at an expected offset
    PartitionSequencer  the state machine: admission and events (its module describes the theory)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from fencepost_policies.append import Check, Facts, Refusal
from fencepost_policies.conditional_publish import ConditionalPublish
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import (
    Answer,
    AppendedBatch,
    Effect,
    LogEndSnapshot,
    PendingAppend,
    SequencerLimits,
)
from fencepost_proxy.sequencer.retry_cache import RetryCache
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult


class Phase(Enum):
    UNCONFIRMED = auto()
    READING = auto()
    PUBLISHING = auto()
    OPEN = auto()
    RESOLVING = auto()


#: After these the batch may be in the log although the answer is an error.
IN_DOUBT = frozenset(
    {
        Error.UNKNOWN_SERVER_ERROR,
        Error.REQUEST_TIMED_OUT,
        Error.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        Error.KAFKA_STORAGE_ERROR,
        13,  # NETWORK_EXCEPTION
    }
)
#: Those that Kafka gives before it appends, or after an unexpected failure at any moment. If the same batch gets the
#: same one again while log end and sequence do not move, it was not appended and will not be.
MAY_BE_FINAL = frozenset({Error.UNKNOWN_SERVER_ERROR, Error.KAFKA_STORAGE_ERROR})
#: Errors of a fenced batch that concern the fence, not the client's batch: read the log and decide again.
FENCE_ERRORS = frozenset(
    {
        Error.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Error.INVALID_PRODUCER_EPOCH,
        Error.UNKNOWN_PRODUCER_ID,
        90,  # PRODUCER_FENCED
    }
)
#: A batch under its own producer id: (producer id, epoch), sequence. (None, -1): batches without a name.
BatchName = tuple[tuple[int, int] | None, int]
_PREDECESSOR_FAILED = "PREDECESSOR_FAILED"
POLICY = ConditionalPublish()
DEFAULT_NAMES = HeaderNames()


class SequencerView(NamedTuple):
    """What a sequencer has in progress. `overtakable`: queued appends that let other pipelines pass. `read_at`: when
    the last successful read of the log end was requested."""

    queued: tuple[PendingAppend, ...]
    overtakable: frozenset[PendingAppend]
    admitted: PendingAppend | None
    in_flight: tuple[PendingAppend, ...]
    in_doubt: tuple[PendingAppend, ...]
    being_read: tuple[PendingAppend, ...]
    fence_confirmed: bool
    read_at: float | None


class SequencerState:
    """`names`: the record headers that carry the expected offset."""

    def __init__(self, partition: TopicPartition, limits: SequencerLimits, names: HeaderNames = DEFAULT_NAMES) -> None:
        self.partition = partition
        self.phase = Phase.UNCONFIRMED
        self._limits = limits
        self._names = names
        self._queue: deque[PendingAppend] = deque()
        self._admitted: PendingAppend | None = None  # admitted, not yet sent
        self._in_flight: deque[PendingAppend] = deque()
        self._in_doubt_appends: deque[PendingAppend] = deque()
        self._submitted_count = 0
        self._sent_count = 0
        self._being_read: list[PendingAppend] = []  # mismatches whose offset is being read; they do not block the queue
        self._retry_at: float | None = None
        self._effects: list[Effect] = []
        # Known while OPEN.
        self._snapshot: LogEndSnapshot | None = None
        self._log_end = -1
        self._end_as_of = float("-inf")  # the log end was true at some moment after this
        self._sequence_offset = 0
        self._epoch = 0
        self._confirmed_until = float("-inf")
        self._confirmed_since = float("-inf")
        self._confirmed_epoch = -1
        # Remembered whatever the phase.
        self.memory = RetryCache(limits)
        self._transactions: dict[
            str, float
        ] = {}  # transactions that joined: time from which the coordinator's answer counts
        self._producers: dict[str, int] = {}  # producer ids of the transactions that have sent an append here
        self._joining: dict[tuple[str, int], None] = {}  # (transactional id, connection) that wait to join
        self._try_again_at: OrderedDict[int, tuple[float, float]] = (
            OrderedDict()
        )  # producer id: (first, last) time of its "try again"
        self._fenced_queued_until = float("-inf")
        self._fenced_queued_to = -1  # the log end after the last of them
        self._pass_through_queued_until = float("-inf")
        self._pass_through_queued: OrderedDict[BatchName, float] = (
            OrderedDict()
        )  # the appends to which `_pass_through_queued_until` applies, by name
        self._check = Check.ON
        self._clean = True  # every in-doubt append so far was acknowledged and only had to be confirmed
        self._read_is_stale = False
        self._resolve_again = False  # read again for the first in-doubt append at `_retry_at`
        self._reads_to_resend = False  # RESOLVING, and a log-end snapshot was requested
        self._markers = 0  # markers that connections are about to send, or wait for
        self._written_by = float("-inf")  # latest time at which a marker without an answer is written
        self._foreign: LogEndSnapshot | None = (
            None  # PUBLISHING because the partition knows an epoch that this process does not
        )
        self._sequence_gaps: set[tuple[int, int]] = set()  # pipelines with a batch that was not found at its offset
        self._accounted = False  # every append up to `_log_end` passed a sequencer, as far as known here
        self._bases_due = float("-inf")  # when its bases would have been published at one per `base_seconds`

    # ---- properties

    @property
    def idle(self) -> bool:
        """No append waits or is in flight. No ticks are needed, and dropping the object costs only a new read."""
        return not (self._queue or self._admitted or self._in_flight or self._in_doubt_appends or self._being_read)

    @property
    def in_transaction(self) -> bool:
        """A transaction here may not be over, and only this process knows."""
        return bool(self._transactions or self._markers)

    @property
    def log_end_offset(self) -> int | None:
        return self._log_end if self.phase is Phase.OPEN else None

    @property
    def sequence_offset(self) -> int:
        return self._sequence_offset

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # ---- validity of what is known

    def _is_confirmed(self, pending: PendingAppend, now: float) -> bool:
        """Whether the broker on the append's connection is certain to know the fence.

        It must be the same broker process and the same leader that acknowledged a fence. A restart may forget producers
        whose records are deleted; a connection opened before the acknowledgement would not survive it. A replica that
        restarts may lack what its leader has forgotten.
        """
        return (
            self.phase is Phase.OPEN
            and now < self._confirmed_until
            and pending.connected_at <= self._confirmed_since
            and pending.leader_epoch == self._confirmed_epoch
            and not self._transactions
        )

    def _is_last_epoch(self, epoch: int) -> bool:
        """The last epoch of its producer id. On `required` topics it serves one append, with sequence 0
        (`Publishing`)."""
        return epoch % self._limits.producer_epochs == self._limits.producer_epochs - 1

    def _snapshot_is_fresh(self, now: float) -> bool:
        return (
            self.phase is Phase.OPEN
            and self._snapshot is not None
            and now <= self._snapshot.requested_at + self._limits.unconfirmed_send_seconds
            and self._end_as_of == self._snapshot.requested_at
        )

    def _unconfirm(self) -> None:
        if self.phase is Phase.OPEN:
            self.phase = Phase.UNCONFIRMED
        self._confirmed_until = float("-inf")
        self._end_as_of = float("-inf")

    def _another_transaction_is_open(self, pending: PendingAppend, snapshot: LogEndSnapshot) -> bool:
        """A transaction that joined counts until its coordinator reports its end, whatever the partition leader
        reports: it may not have written yet, and after an admin's abort its own marker is still to come.

        Two transactions that have only joined each other's partitions must not wait for each other. So a joined
        transaction counts for another only once the leader knows a record of it, or when it is ending. If its marker
        comes in between, the other append's offset shows it.
        """
        if pending.append.expected_base_offset is None:
            return False
        if snapshot.open_transactions - {pending.append.producer_id}:
            return True
        joined = self._transactions.keys() - {pending.transactional_id}
        if not pending.append.transactional:
            return bool(joined)
        # Its own transactional id may be ending, too: the producer's previous transaction.
        return pending.transactional_id in snapshot.ending_transactions or not joined.isdisjoint(
            snapshot.ending_transactions
        )

    @staticmethod
    def _knows_transaction(pending: PendingAppend, snapshot: LogEndSnapshot) -> bool:
        """Whether the coordinator was queried after the append arrived."""
        if snapshot.transactions_as_of < pending.submitted_at:
            return False
        named, known = pending.transactional_id, snapshot.producer_ids
        return named is None or known is None or named in known

    @staticmethod
    def _is_anothers_producer(pending: PendingAppend, snapshot: LogEndSnapshot) -> bool:
        if pending.transactional_id is None or snapshot.producer_ids is None:
            return False
        return snapshot.producer_ids.get(pending.transactional_id, -1) not in (-1, pending.append.producer_id)

    @staticmethod
    def _timestamps(pending: PendingAppend, snapshot: LogEndSnapshot, now: float) -> Refusal | None:
        """Refuse a batch with too old records: the broker ages a producer by record timestamps and would forget the
        fence."""
        if snapshot.log_append_time or not pending.kind.fenced:
            return None
        oldest_ms = int((now + snapshot.clock_offset_seconds - snapshot.expiration_seconds / 2) * 1000)
        if pending.append.max_timestamp_ms > oldest_ms:
            return None
        return POLICY.check(pending.append, pending.check, Facts(oldest_timestamp_ms=oldest_ms))

    def _log_start(self) -> int:
        return -1 if self._snapshot is None else self._snapshot.log_start_offset

    def _record_appended(self, pending: PendingAppend, log_append_time_ms: int, now: float) -> AppendedBatch:
        assert pending.at is not None
        appended_batch = self.memory.add(pending, log_append_time_ms)
        if self._snapshot is not None and self.phase in (Phase.OPEN, Phase.RESOLVING):
            self._log_end = max(self._log_end, pending.at + pending.append.record_count)
            # The log ended before it when it was appended: at this send, if Kafka reports so. If it was found in the
            # log, the append may be much older.
            self._end_as_of = (
                float("-inf") if pending in self._in_doubt_appends or pending.sent_at is None else pending.sent_at
            )
            # Records may be half of the setting old when sent. The remaining quarter covers requests in a queue.
            snapshot = self._snapshot
            self._confirmed_until = min(now + snapshot.expiration_seconds / 4, snapshot.expiration_known_until)
            self._confirmed_since, self._confirmed_epoch = now, pending.leader_epoch
            if self._check is Check.REQUIRED and self._is_last_epoch(self._epoch):
                self._unconfirm()
        if pending.at + pending.append.record_count >= self._fenced_queued_to:
            self._fenced_queued_until = float("-inf")  # its sequence is used now
        return appended_batch

    # ---- answers

    def _appended_at(self, pending: PendingAppend, log_append_time_ms: int, log_start_offset: int, now: float) -> None:
        self._accept(pending, self._record_appended(pending, log_append_time_ms, now), log_start_offset)

    def _accept(
        self, pending: PendingAppend, appended_batch: AppendedBatch, log_start_offset: int | None = None
    ) -> None:
        self._answer(
            pending,
            PartitionResult(
                partition=pending.partition.partition,
                error_code=Error.NONE,
                base_offset=appended_batch.base_offset,
                log_append_time_ms=appended_batch.log_append_time_ms,
                log_start_offset=self._log_start() if log_start_offset is None else log_start_offset,
            ),
        )

    def _may_not_wait(self, pending: PendingAppend, snapshot: LogEndSnapshot, now: float) -> bool:
        """Another transaction owns what this one needs. A transaction that owns a partition must give up, since the
        other may need that one, unless the other is ending. What this transaction owns through other instances is not
        known here, so then it waits for `transaction_wait_seconds`.
        """
        if not pending.append.transactional:
            return False
        ending = {self._producers[each] for each in self._producers.keys() & snapshot.ending_transactions}
        if snapshot.open_transactions <= ending | {pending.append.producer_id}:
            return False
        if pending.has_partitions:
            return True
        producer_id = pending.append.producer_id
        since, last = self._try_again_at.pop(producer_id, (now, now))
        if now - last > self._limits.transaction_wait_seconds:
            since = now  # an earlier, separate wait
        waited = now - since > self._limits.transaction_wait_seconds
        if waited and not pending.alone:
            return True
        self._try_again_at[producer_id] = since, now
        if len(self._try_again_at) > self._limits.remembered_producers_max:
            self._try_again_at.popitem(last=False)
        return False

    def _refuse(self, pending: PendingAppend, refusal: Refusal) -> None:
        result = PartitionResult(
            partition=pending.partition.partition,
            error_code=refusal.error_code,
            base_offset=refusal.base_offset,
            log_start_offset=refusal.log_start_offset if refusal.log_start_offset >= 0 else self._log_start(),
            error_message=refusal.message,
        )
        self._answer(pending, result, refusal.reason)

    def _answer_later(self, pending: PendingAppend, why: str) -> None:
        """Error 6: not appended, try again. Every client retries on it and refreshes its metadata."""
        self._answer_error(pending, Error.NOT_LEADER_OR_FOLLOWER, f"TRY_AGAIN {why}", "try_again")

    def _answer_unknown(self, pending: PendingAppend, why: str, now: float, *, queued: bool = True) -> None:
        """Error 7: it may be in the log. If it may be `queued` in a broker, it may also be appended later."""
        self.memory.add_unresolved(pending)
        self._sequence_gaps.add(pipeline_key_of(pending))
        if not queued or not pending.attempts:
            pass
        elif pending.kind.fenced:
            assert pending.at is not None
            self._fenced_queued_until = now + self._limits.queued_seconds
            self._fenced_queued_to = max(self._fenced_queued_to, pending.at + pending.append.record_count)
        else:
            self._pass_through_queued_until = now + self._limits.queued_seconds
            self._record_pass_through_queued(pending)
        self._answer_error(pending, Error.REQUEST_TIMED_OUT, f"OUTCOME_UNKNOWN {why}", "outcome_unknown")

    def _record_pass_through_queued(self, pending: PendingAppend) -> None:
        """So that its own retry need not wait for it: Kafka decides which of the two comes first."""
        named = pending.fence is None and pending.append.producer_id >= 0
        name = (pending.producer, pending.append.base_sequence) if named else (None, -1)
        self._pass_through_queued[name] = self._pass_through_queued_until
        self._pass_through_queued.move_to_end(name)
        if len(self._pass_through_queued) > self._limits.remembered_batches_max:
            until = self._pass_through_queued.popitem(last=False)[1]
            self._pass_through_queued[None, -1] = max(until, self._pass_through_queued.get((None, -1), until))

    def _only_itself_is_queued(self, pending: PendingAppend, now: float) -> bool:
        mine = (pending.producer, pending.append.base_sequence)
        return not any(until > now and name != mine for name, until in self._pass_through_queued.items())

    def _is_queued(self, pending: PendingAppend, now: float) -> bool:
        return self._pass_through_queued.get((pending.producer, pending.append.base_sequence), now) > now

    def _is_not_queued(self, pending: PendingAppend) -> None:
        """The log has it. If an earlier attempt still reaches a broker, Kafka takes it for a duplicate."""
        if self._pass_through_queued.pop((pending.producer, pending.append.base_sequence), None) is not None:
            self._pass_through_queued_until = max(self._pass_through_queued.values(), default=float("-inf"))

    def _answer_error(self, pending: PendingAppend, error: Error, message: str, reason: str) -> None:
        result = PartitionResult(
            partition=pending.partition.partition,
            error_code=error,
            error_message=f"{message} topic={self.partition.topic} partition={self.partition.partition}",
        )
        self._answer(pending, result, reason)

    def _answer(self, pending: PendingAppend, result: PartitionResult, reason: str | None = None) -> None:
        self._effects.append(Answer(pending, result, reason))
        if result.error_code == Error.NONE:
            self.memory.resolved(pending)  # an error covers this attempt only: an earlier one may still be queued
        for duplicate_waiter in pending.duplicate_waiters:
            self._effects.append(Answer(duplicate_waiter, result, reason))
        pending.duplicate_waiters.clear()
        if result.error_code != Error.NONE and pending.attempts:
            for other in self._sent_after(pending):
                other.predecessor_result = sent_after(other, result)

    def _sent_after(self, pending: PendingAppend) -> Iterator[PendingAppend]:
        """The rest of a pipeline: same producer, same connection, sent before the failure was known. Batches without a
        producer id are pipelined only if one of the two has an expected offset.

        1. A and B (the next sequence) are sent. 2. Kafka refuses A. 3. B fails at the gap (45).
        B must not be sent again alone: it would be appended after a gap.
        """
        admitted = () if self._admitted is None else (self._admitted,)
        for other in (*self._in_flight, *admitted, *self._in_doubt_appends, *self._queue):
            if (
                (not other.sent_as or other.sent_as > pending.sent_as)
                and other is not pending
                and other.connection == pending.connection
                and pending.pipeline in other.follows
            ):
                yield other

    def _again(self, pending: PendingAppend) -> None:
        """Put it back to the head of the queue, after the appends that were sent before it."""
        if pending.attempts >= self._limits.attempts_max:
            self._answer_later(pending, f"Kafka refused the fence {pending.attempts} times")
            return
        position = sum(1 for t in self._queue if 0 < t.sent_as < pending.sent_as)
        self._queue.insert(position, pending)


def sent_after(pending: PendingAppend, failed: PartitionResult) -> PartitionResult:
    """Answer of a batch that was sent after a failed one: same code and message.

    Kafka's errors about sequences do not apply to a conditional append: it gets POLICY_VIOLATION instead.
    """
    stated = failed.error_message or f"error {failed.error_code}"
    code = failed.error_code
    if pending.append.expected_base_offset is not None and code in FENCE_ERRORS:
        code = Error.POLICY_VIOLATION
    return replace(
        failed,
        error_code=code,
        record_errors=(),  # those are records of the failed batch
        error_message=stated if stated.startswith(_PREDECESSOR_FAILED) else f"{_PREDECESSOR_FAILED} {stated}",
    )


def pipeline_key_of(pending: PendingAppend) -> tuple[int, int]:
    return pending.connection, pending.append.producer_id
