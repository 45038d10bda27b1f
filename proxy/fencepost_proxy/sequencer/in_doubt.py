"""In-doubt append: it was sent to Kafka, and only the log shows whether it was appended.

Five cases need a read at the offset where an append was expected:

- *In doubt*: its connection was lost, or its answer is not conclusive. Only a batch proved to be the client's own is
  reported as success. Proof is its write-id, or the fence with this process's *instance id* and the records that this
  process sent there. If the log still ends there and waits for this fence, the batch is sent again: only one of the two
  is appended. The cases are in `InDoubtResolver.found`.
- *Mismatch*: the expectation does not hold. Before it is refused: it may be a retry that is already in the log, perhaps
  cut into other batches.
- *Remembered*: a retry of a batch that this process has acknowledged, but under another leader or before a restart of
  it. The log may have lost its last records since.
- *Duplicate*: Kafka reports that a batch under its own producer id is there: this one, or another with its sequence.
  That may be one of an earlier transaction that waited in a broker's queue while its transaction was aborted.
- *Violation*: it was appended at another offset. The report names the producer of the batch at the expected one.

In-doubt appends are resolved one by one, in order, and block all admissions. The other cases block none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_policies.append import Check, Refusal, where
from fencepost_policies.conditional_publish import COPIED_HEADERS, offset_mismatch
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.sequencer.events import (
    AppendedBatch,
    AppendMode,
    BatchReadResult,
    Found,
    LogEndSnapshot,
    LostRecords,
    NotYet,
    OutOfRange,
    PendingAppend,
    ReadLogEnd,
    Resend,
    Unreadable,
    Violation,
)
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.log_view import end_of_other_sequence, has_its_sequence, is_compacted, producer_of
from fencepost_proxy.sequencer.retry_cache import same_write
from fencepost_proxy.sequencer.state import PartitionState
from fencepost_proxy.sequencer.transactions import expected_of
from fencepost_proxy.types import SEQUENCE_MODULUS
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.batch_digest import same_first_time
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.record_comparison import RecordComparison

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
#: Answers to a resend that are temporary.
_FOR_NOW = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.NOT_ENOUGH_REPLICAS,
    }
)
_COPIED = (
    "the log has its write-id with another timestamp: copied headers (leave the fencepost headers out of a record that "
    "is written again; a retry repeats the timestamp)"
)
_TOO_OLD = "its write-id is in the log, but its records are too old for a retry"
#: Cause of a violation if the batch at the expected offset has the same fence sequence, which Kafka would refuse.
FORGOTTEN = (
    "Kafka had forgotten the proxy's producer id and did not compare: producer.id.expiration.ms was lowered, or its "
    "clock was moved"
)


@dataclass(slots=True, eq=False)
class Lookups:
    """Mismatches, remembered appends, duplicates and violations: `Appends.being_read`."""

    _state: PartitionState

    def _begin(self, pending: PendingAppend, offset: int) -> None:
        self._state.appends.being_read.append(pending)
        self._state.log.read(pending, offset)

    def read_again(self) -> None:
        for pending in self._state.appends.being_read:
            self._state.log.read(pending, self._read_at(pending))

    @staticmethod
    def _read_at(pending: PendingAppend) -> int:
        if pending.outcome.remembered is not None:
            return pending.outcome.remembered.base_offset
        if pending.outcome.comparison is not None:
            return pending.outcome.comparison.at
        at = pending.append.expected_base_offset if pending.outcome.reported_at is None else pending.outcome.reported_at
        assert at is not None
        return at

    def found(self, pending: PendingAppend, result: BatchReadResult, now: float) -> None:
        if pending not in self._state.appends.being_read:
            return
        if isinstance(result, (NotYet, Unreadable)) and not self._is_lost(pending, result):
            self._state.log.retry(now)
            return
        self._state.appends.being_read.remove(pending)
        if pending.outcome.remembered is not None:
            self._end_remembered(pending, result, now)
        elif pending.outcome.appended_at is not None:
            self._end_violation(pending, result)
        elif pending.outcome.reported_at is not None:
            self._end_duplicate(pending, result, now)
        else:
            self._end_mismatch_read(pending, result, now)

    def end_late(self, now: float) -> None:
        for pending in [each for each in self._state.appends.being_read if each.placement.deadline <= now]:
            self._state.appends.being_read.remove(pending)
            if pending.outcome.appended_at is not None:
                self._end_violation(pending, None)
            elif pending.outcome.reported_at is not None:
                self._end_duplicate(pending, None, now)
            else:
                self._state.try_again(pending, "the record at the expected offset could not be read in time")

    # ---- remembered appends

    def remembered(self, pending: PendingAppend, appended_batch: AppendedBatch) -> None:
        pending.outcome.remembered = appended_batch
        self._begin(pending, appended_batch.base_offset)

    @staticmethod
    def _is_lost(pending: PendingAppend, result: BatchReadResult) -> bool:
        at = None if pending.outcome.remembered is None else pending.outcome.remembered.base_offset
        return at is not None and isinstance(result, NotYet) and result.log_end_offset <= at

    def _end_remembered(self, pending: PendingAppend, result: BatchReadResult, now: float) -> None:
        assert pending.outcome.remembered is not None
        at = pending.outcome.remembered.base_offset
        there = self._state.log.decode(result, at, pending)
        if there is not None and there.digest == pending.digest:
            self._state.accept(pending, pending.outcome.remembered)
        elif isinstance(result, OutOfRange) or (isinstance(result, Found) and is_compacted(result, pending)):
            # Another history of the log may have had other records there.
            pending.outcome.remembered = None
            self._state.unknown(pending, "its records are deleted, and may have been lost before", now, queued=False)
        else:
            self._end_lost(pending, result.log_end_offset if isinstance(result, NotYet) else None)

    def _end_lost(self, pending: PendingAppend, log_end: int | None) -> None:
        """The log does not have what was acknowledged. The append is decided like a new one."""
        assert pending.outcome.remembered is not None
        remembered, pending.outcome.remembered = pending.outcome.remembered, None
        retries, lost_from = self._state.retries, remembered.base_offset if log_end is None else log_end
        if retries.retry_of(pending) is not None:  # else a read of the log end has shown it meanwhile
            end = max(remembered.end, retries.acknowledged_end)
            self._state.log.effects.append(LostRecords(pending.partition, lost_from, end, log_end))
            retries.forget_from(lost_from)
        self._state.fence.unconfirm()
        self._state.appends.put_back(pending)

    # ---- mismatches

    def mismatch(self, pending: PendingAppend, expected: int, end: int, now: float) -> None:
        pending.placement.actual = end
        if not 0 <= expected < end or pending.append.contradiction is not None:
            self._end_mismatch(pending, None, now)
            return
        pending.outcome.is_there = self._sequence_is_taken(pending)
        if self._is_remembered_as_other(pending, expected):
            self._end_mismatch(pending, None, now)
            return
        pending.outcome.comparison = RecordComparison(pending.partition, expected, pending.append.record_count)
        self._begin(pending, expected)

    def _is_remembered_as_other(self, pending: PendingAppend, expected: int) -> bool:
        """Whether its only record is certainly not at its expected offset. Saves a read of the log."""
        there = self._state.retries.appended_batch.get(expected)
        return (
            there is not None
            and there.holds_for(pending)
            and pending.append.record_count == 1
            and there.digest != pending.digest
            and not there.has_write_id_of(pending)
            and (there.record_count == 1 or not same_first_time(there.digest, pending.digest))
        )

    def _sequence_is_taken(self, pending: PendingAppend) -> bool:
        """Its open transaction here has passed its sequence, so the log has it, at some offset. A resend is a
        duplicate, and Kafka reports the offset."""
        if not pending.append.transactional or self._state.fence.snapshot is None:
            return False
        known = self._state.fence.snapshot.in_transaction.get(pending.append.producer_id)
        if known is None or known.producer_epoch != pending.append.producer_epoch:
            return False
        return 0 < (known.next_sequence - pending.append.base_sequence) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2

    def _end_mismatch_read(self, pending: PendingAppend, result: BatchReadResult, now: float) -> None:
        expected, compared = pending.append.expected_base_offset, pending.outcome.comparison
        assert expected is not None
        assert compared is not None
        there = self._state.log.decode(result, expected, pending) if compared.at == expected else None
        if there is not None and self._is_itself(result, there, pending):
            self._state.queued.appended(pending)
            self._state.accept(pending, there)
            return
        if isinstance(result, OutOfRange):
            # Only this process's memory can show what lay there.
            there = self._state.retries.appended_batch.get(expected)
            if there is not None and not (there.holds_for(pending) and there.digest == pending.digest):
                there = None
            compared.missing += there is None
        elif isinstance(result, Found) and (there is None or there.digest != pending.digest):
            there, overlap = None, self._state.log.overlap(result, compared.at, pending)
            if overlap is None:
                compared.missing += 1  # it cannot be read
            else:
                compared.add(overlap)
                # A transaction's batches are sent again as they were.
                if not pending.append.transactional and compared.goes_on(pending.placement.actual):
                    self._begin(pending, compared.at)
                    return
        self._end_mismatch(pending, there, now)

    @staticmethod
    def _is_itself(found: BatchReadResult, there: AppendedBatch, pending: PendingAppend) -> bool:
        """For a transactional batch: whether it is the one found, by its producer's sequence."""
        if not isinstance(found, Found) or not pending.append.transactional or there.digest != pending.digest:
            return False
        header = parse_batch_header(found.batch)
        return pending.batch_name == ((header.producer_id, header.producer_epoch), header.base_sequence)

    def _end_mismatch(self, pending: PendingAppend, there: AppendedBatch | None, now: float) -> None:
        """`there`: a batch with equal records at the expected offset; else `Outcome.comparison` shows what is there."""
        compared, pending.outcome.comparison = pending.outcome.comparison, None
        if pending.outcome.is_there:
            pending.placement.at = pending.append.expected_base_offset
            self._state.appends.queue.appendleft(pending)
        elif (earlier := self._proved(pending, there, compared, now)) is not None:
            self._state.accept(pending, earlier)
        elif self._state.queued.contains(pending, now):
            # It might be appended after its refusal, in its producer's next transaction if that has the same epoch.
            self._state.try_again(pending, "an earlier attempt of this batch may still be queued")
        else:
            self._state.refuse(pending, self._refusal(pending, there, compared, now))

    def _proved(
        self, pending: PendingAppend, there: AppendedBatch | None, compared: RecordComparison | None, now: float
    ) -> AppendedBatch | None:
        """The append as an earlier attempt left it, if its write-ids prove that.

        A record that was read and written again with its headers has the same write-id, too, but another timestamp. One
        that keeps its timestamp is taken for a retry while it is young.
        """
        snapshot, append = self._state.fence.snapshot, pending.append
        if append.transactional or snapshot is None or append.max_timestamp_ms <= snapshot.oldest_ms(now):
            return None
        if there is not None:
            return there if there.same_times and there.has_write_id_of(pending) else None
        if compared is None or not compared.equal == compared.named == append.record_count:
            return None
        return AppendedBatch(compared.expected, append.record_count, pending.digest, append.write_id, -1)

    def _refusal(
        self, pending: PendingAppend, there: AppendedBatch | None, compared: RecordComparison | None, now: float
    ) -> Refusal:
        reason, why = "offset_mismatch", None
        count, actual = pending.append.record_count, pending.placement.actual
        possibly_yours = there is not None
        if there is not None and not there.same_times and there.has_write_id_of(pending):
            reason, why = COPIED_HEADERS, _COPIED
        elif there is not None and there.has_write_id_of(pending) and not pending.append.transactional:
            why = _TOO_OLD
        elif compared is not None and compared.copied:
            possibly_yours, reason, why = True, COPIED_HEADERS, _COPIED
        elif compared is not None and compared.equal:
            possibly_yours = True
            if compared.named == count and not pending.append.transactional:
                why = _TOO_OLD
            elif compared.equal < count:
                why = f"{compared.equal} of {count} of these records are in the log"
        elif compared is not None and compared.missing:
            possibly_yours = True
        elif pending.append.contradiction is None and actual < (pending.append.expected_base_offset or 0):
            possibly_yours = not pending.context.taken_over or self._state.queued.may_append_later(pending, now)
            why = "an earlier attempt may still be appended" if possibly_yours else None
        log_start = self._state.fence.log_start
        return offset_mismatch(pending.append, actual, log_start, possibly_yours=possibly_yours, why=why, reason=reason)

    # ---- duplicates

    def duplicate(self, pending: PendingAppend, offset: int) -> None:
        pending.outcome.reported_at = offset
        self._begin(pending, offset)

    def _end_duplicate(self, pending: PendingAppend, result: BatchReadResult | None, now: float) -> None:
        at, pending.outcome.reported_at = pending.outcome.reported_at, None
        assert at is not None
        if not isinstance(result, Found):
            why = "Kafka reports it as a duplicate, but it could not be read back"
            self._state.unknown(pending, why, now, queued=False)
            return
        there = self._state.log.decode(result, at, pending)
        if there is not None and self._is_itself(result, there, pending):
            self._state.queued.appended(pending)
            if at == pending.placement.at:
                self._state.accept(pending, there)
            else:
                self.appended_elsewhere(pending, PartitionResult(pending.partition.partition, Error.NONE, at), now)
            return
        message = (
            f"SEQUENCE_TAKEN {where(pending.append)} offset={at}: an earlier batch of this producer has its sequence "
            f"number ({pending.append.base_sequence}) and other records (abort the transaction and begin a new epoch)"
        )
        self._state.refuse(pending, Refusal(Error.POLICY_VIOLATION, "sequence_taken", message, expected_of(pending)))

    # ---- violations

    def appended_elsewhere(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        assert pending.placement.at is not None
        self._state.fence.unconfirm()
        if pending.placement.kind is AppendMode.SEQUENCED:
            pending.placement.at = result.base_offset
            appended_batch = self._state.retries.add(pending, result.log_append_time_ms, now)
            self._state.accept(pending, appended_batch, result.log_start_offset)
            return
        self._state.fence.accounted = False  # this report covers what the next read of the log would find
        pending.outcome.appended_at = result.base_offset
        pending.placement.deadline = now + self._state.log.limits.violation_seconds
        self._begin(pending, pending.placement.at)

    def is_violation(self, pending: PendingAppend) -> bool:
        """Whether an earlier attempt was appended elsewhere, and is about to be answered so, and this one with it."""
        for other in self._state.appends.being_read:
            if other.outcome.appended_at is not None and same_write(other, pending):
                other.placement.duplicate_waiters += (pending,)
                return True
        return False

    def _end_violation(self, pending: PendingAppend, result: BatchReadResult | None) -> None:
        expected, appended_at = pending.placement.at, pending.outcome.appended_at
        assert expected is not None
        assert appended_at is not None
        producer_id, is_marker = producer_of(result)
        if is_marker and (pending.append.transactional or pending.outcome.searched_to is not None):
            # Of a transaction that had only joined, as allowed, or joined after this append's outcome became unknown:
            # no writer bypasses the proxy.
            why = "the marker of another transaction came between"
        else:
            forgotten = isinstance(result, Found) and has_its_sequence(result, pending, expected)
            why = FORGOTTEN if forgotten else "a client bypasses the proxy and writes to this partition"
            self._state.log.effects.append(
                Violation(pending.partition, expected, appended_at, producer_id=producer_id, forgotten=forgotten)
            )
        message = (
            f"OFFSET_VIOLATION {where(pending.append)} "
            f"expected={expected} appended_at={appended_at} "
            f"producer_id={'unknown' if producer_id is None else producer_id}: {why}"
        )
        appended_ms = max(0, pending.append.max_timestamp_ms)
        refusal = Refusal(
            Error.POLICY_VIOLATION, "offset_violation", message, appended_at, log_append_time_ms=appended_ms
        )
        self._state.retries.add_violation(pending, refusal)
        self._state.refuse(pending, refusal)


@dataclass(slots=True, eq=False)
class InDoubtResolver:
    """Resolver: reads the log to find out how in-doubt appends ended, one by one. Phase RESOLVING.

    It reads on after another batch at the expected offset, for the fence may still fit:

    1. F is fenced for offset 10.
    2. A transaction marker takes 10. The fence's sequence does not move.
    3. F is appended at 11.
    """

    _state: PartitionState
    _lookups: Lookups
    _clean: bool = True  # every in-doubt append so far was acknowledged and only had to be confirmed
    _resolve_again: bool = False  # read again for the first in-doubt append when `LogView.retry_at` is due
    _reads_to_resend: bool = False  # a log-end snapshot was requested

    def add(self, pending: PendingAppend, until: float) -> None:
        pending.outcome.resolve_until = until
        pending.outcome.searched_to = None
        self._state.appends.in_doubt.append(pending)

    def begin(self, now: float) -> None:
        """No append is in flight or admitted."""
        self._state.fence.phase = Phase.RESOLVING
        self._clean = True
        self._state.appends.sequence_gaps.clear()
        self._resolve_first(now)

    def read_again(self, now: float) -> None:
        if self._resolve_again:
            self._resolve_first(now)

    def _resolve_first(self, now: float) -> None:
        self._resolve_again = False
        pending = self._state.appends.in_doubt[0]
        placement = pending.placement
        if placement.kind.fenced:
            at = placement.at if pending.outcome.searched_to is None else pending.outcome.searched_to
            assert at is not None
            self._state.log.read(pending, at)
        elif placement.predecessor_result is not None or pending.pipeline_key in self._state.appends.sequence_gaps:
            # Kafka would find the gap, but only if it knows this producer.
            self._end_unknown(pending, "an earlier append failed or has an unknown outcome", now)
        else:
            self._state.log.effects.append(Resend(pending))

    # ---- results of reads

    def log_end_read(self, snapshot: LogEndSnapshot | None, now: float) -> None:
        """None: it could not be read."""
        if self._state.fence.phase is Phase.RESOLVING and self._reads_to_resend:
            self._reads_to_resend = False
            pending = self._state.appends.in_doubt[0]
            if snapshot is None:
                self._resolve_later(pending, now)
            else:
                self._resend(pending, snapshot, now)

    def found(self, pending: PendingAppend, result: BatchReadResult, now: float) -> None:
        """Cases, by what lies at the offset where the in-doubt batch should be.

        | the log has there              | then                                                                  |
        |--------------------------------|-----------------------------------------------------------------------|
        | our fence, our records, and    |                                                                       |
        | … its write-id                 | success                                                               |
        | … our instance id              | success; "any other batch" if its only send was answered as duplicate |
        | … another instance's id        | as "any other batch": that instance's client won with an equal batch  |
        | … no instance id (the broker   | success if Kafka answered 0 (LogAppendTime) or nothing was expected;  |
        | rewrote the batch)             | else 7, "may be yours"                                                |
        | our fence, compacted           | 7: the sender cannot be found out                                     |
        | another producer id,           | it may lie, or still be appended, after that: read there. If found,   |
        | or an earlier sequence         | the expectation did not hold: a violation; else 7                     |
        | any other batch                | its sequence is used, it is never appended. Decide again as mismatch  |
        | a batch not replicated yet     | read again until `resolve_until`, then 7                               |
        | nothing, and it ends there     | send it again if the partition waits for this fence; else 7           |
        | … Kafka gave the same error    |                                                                       |
        | to it twice (`MAY_BE_FINAL`)   | that error: it was not appended, and would not be next time           |
        | nothing, and it ends before    | 7: its predecessor is missing. If that arrives, Kafka compares it     |
        | unreadable now                 | read again until `resolve_until`, then 7                               |
        """
        assert pending.placement.at is not None
        match result:
            case Found():
                self._batch_found(pending, result, now)
            case NotYet(log_end) if pending.outcome.searched_to is not None and log_end <= pending.outcome.searched_to:
                if pending.placement.sent_at is None and now >= self._state.queued.fenced_until:
                    self._sequence_is_lost(pending, now)
                else:
                    why = "another append came first, and it may still be appended after that"
                    self._end_unknown(pending, why, now)
            case NotYet(log_end) if log_end <= pending.placement.at and pending.placement.sent_at is None:
                # Its last attempt may still be queued in Kafka: `_first_try_decides` handles it.
                self._resolved(pending, now)
                self._decide_again(pending)
            case NotYet(log_end) if log_end == pending.placement.at and self._may_decide(pending):
                self._reads_to_resend = True
                self._state.log.effects.append(ReadLogEnd(pending.partition))
            case NotYet(log_end) if log_end <= pending.placement.at:
                self._end_in_doubt(pending, now)
            case OutOfRange():
                why = "the record at the expected offset is no longer readable"
                self._end_unknown(pending, why, now, queued=False)
            case _:
                self._resolve_later(pending, now)

    def _batch_found(self, pending: PendingAppend, found: Found, now: float) -> None:
        end = end_of_other_sequence(found, pending)
        if end is not None:
            self._search_after(pending, end, now)
            return
        at = pending.placement.at if pending.outcome.searched_to is None else pending.outcome.searched_to
        assert at is not None
        there = self._state.log.decode(found, at, pending)
        if has_its_sequence(found, pending) and is_compacted(found, pending):
            why = "the record at the expected offset is compacted: may be yours"
            self._end_unknown(pending, why, now, queued=False)
            return
        if there is None or there.digest != pending.digest or not has_its_sequence(found, pending):
            self._sequence_is_lost(pending, now)
            return
        named = there.has_write_id_of(pending)
        mine = self._is_from_here(found, pending, at)
        if mine is None and pending.placement.kind is AppendMode.SEQUENCED:
            mine = True
        elif pending.outcome.acknowledged and parse_batch_header(found.batch).is_log_append_time:
            mine = mine is not False
        elif self._only_send_was_a_duplicate(pending):
            mine = False
        if (named or mine) and pending.outcome.searched_to is not None:
            self._resolved(pending, now)
            result = PartitionResult(pending.partition.partition, Error.NONE, at)
            self._lookups.appended_elsewhere(pending, result, now)
        elif named or mine:
            self._state.appended(pending, there.log_append_time_ms, self._state.fence.log_start, now)
            snapshot = self._state.fence.snapshot
            clean = pending.outcome.acknowledged and snapshot is not None and snapshot.log_append_time
            self._resolved(pending, now, clean=clean)
        elif mine is None:
            # This send, or an equal batch of another client that won the race through another instance.
            why = "connection to Kafka lost, and an equal batch is at the expected offset: may be yours"
            self._end_unknown(pending, why, now, queued=False)
        else:
            self._sequence_is_lost(pending, now)

    def _search_after(self, pending: PendingAppend, offset: int, now: float) -> None:
        """Search for the batch after `offset`.

        1. F, fenced for 10, is sent. 2. A transaction marker takes 10. 3. F's sequence still fits: it is appended at
        11. If F were taken for lost, it would be appended again, or refused although it is in the log.
        """
        if pending.placement.kind is AppendMode.SEQUENCED:
            pending.placement.at = offset
            if pending.placement.sent_before:
                self._state.retries.add_unresolved(pending)
        else:
            pending.outcome.searched_to = offset
        if now < pending.outcome.resolve_until:
            self._resolve_first(now)
        else:
            self._resolve_later(pending, now)

    def _sequence_is_lost(self, pending: PendingAppend, now: float) -> None:
        """Another batch used the sequence: none of its attempts can be appended any more."""
        self._state.retries.resolved(pending)
        self._resolved(pending, now)
        self._decide_again(pending)

    @staticmethod
    def _only_send_was_a_duplicate(pending: PendingAppend) -> bool:
        timed = pending.append.max_timestamp_ms >= 0  # otherwise the answer does not show it
        own_sequence, sent_before = pending.placement.kind is AppendMode.SEQUENCED, pending.placement.sent_before
        return pending.outcome.acknowledged and timed and not own_sequence and not sent_before

    def _is_from_here(self, found: Found, pending: PendingAppend, at: int) -> bool | None:
        """Whether this process sent the batch at `at`; None if the log does not show it.

        Two clients of this process may have sent equal batches there, the first of them answered "unknown". The batch
        belongs to the one that is answered success first.
        """
        if at in self._state.retries.appended_batch:
            return False
        instance_id = parse_batch_header(found.batch).instance_id
        if not instance_id or pending.placement.fence is None or not pending.placement.fence.instance_id:
            return None
        return instance_id == pending.placement.fence.instance_id

    def _decide_again(self, pending: PendingAppend) -> None:
        self._state.appends.sequence_gaps.add(pending.pipeline_key)
        if pending.placement.sent_at is None:  # a retry that only had to be looked up first
            pending.placement.at = pending.placement.fence = None
        self._state.send_again(pending)

    # ---- resend

    def _may_resend(self, pending: PendingAppend) -> bool:
        """Not for a client without write access, and not after a gap in its pipeline."""
        return (
            pending.sending.may_write
            and pending.pipeline_key not in self._state.appends.sequence_gaps
            and self._state.log.limits.fencing
        )

    def _may_decide(self, pending: PendingAppend) -> bool:
        """Whether to read the log end: for a resend, or because Kafka's answer may be final."""
        return self._may_resend(pending) or bool(pending.outcome.error_code and pending.placement.fence)

    def _resend(self, pending: PendingAppend, snapshot: LogEndSnapshot, now: float) -> None:
        """No batch lay at the in-doubt append's offset; `snapshot` is the log end after that read.

        As with an unconfirmed fence it is one append alone, soon after the read, and only if log end and next sequence
        are those that it was fenced for. So it is appended there, unless its first send, or another batch, is.
        """
        assert pending.placement.at is not None
        assert pending.placement.fence is not None
        fence, state = pending.placement.fence, snapshot.producer_state
        if snapshot.log_end_offset != pending.placement.at:
            self._resolve_later(pending, now)
            return
        epochs = self._state.log.limits.producer_epochs
        epoch = snapshot.fence_base[0] // epochs * epochs + fence.producer_epoch
        next_sequence = fence.base_sequence
        if state is not None:
            same_epoch = state.producer_epoch == epoch
            next_sequence = state.next_sequence if same_epoch else 0 if state.producer_epoch < epoch else -1
        unmoved = next_sequence == fence.base_sequence and snapshot.producer_id == fence.producer_id
        again = self._may_resend(pending)
        if unmoved and pending.outcome.error_code and (pending.outcome.repeated or not again):
            if pending.outcome.unanswered or pending.placement.sent_before:
                self._end_in_doubt(pending, now)
            else:
                self._resolved(pending, now)
                self._state.answer(pending, PartitionResult(pending.partition.partition, pending.outcome.error_code))
            return
        fits = (
            unmoved
            and (pending.check is not Check.REQUIRED or snapshot.fence_base[0] == epoch)
            and not self._state.transactions.another_is_open(pending, snapshot)
            and self._state.fence.too_old(pending, snapshot, now) is None
            and now <= snapshot.requested_at + self._state.log.limits.unconfirmed_send_seconds
        )
        if fits and again:
            self._state.fence.snapshot = snapshot
            self._state.log.effects.append(Resend(pending))
        else:
            self._end_in_doubt(pending, now)

    def _end_in_doubt(self, pending: PendingAppend, now: float) -> None:
        queued = pending.outcome.unanswered or pending.placement.sent_before or not pending.outcome.error_code
        why = "connection to Kafka lost before the answer"
        if pending.outcome.error_code:
            why = f"Kafka's answer, {error_name(pending.outcome.error_code)}, is not conclusive"
        self._end_unknown(pending, why, now, queued=queued)

    def resent(self, pending: PendingAppend, result: PartitionResult | None, now: float) -> None:
        if pending not in self._state.appends.in_doubt:
            return
        if result is None:
            pending.outcome.unanswered = True
        shows_nothing = result is not None and result.error_code in MAY_BE_FINAL and result.base_offset == -1
        error_code = result.error_code if result is not None and shows_nothing else 0
        pending.outcome.repeated = shows_nothing and error_code == pending.outcome.error_code
        pending.outcome.error_code = error_code
        if pending.placement.kind.fenced:
            self._resent_fenced(pending, result, now)
        elif result is not None and result.error_code == Error.NONE:
            self._state.queued.appended(pending)
            self._resolved(pending, now)
            self._state.answer(pending, result)
        elif result is None or result.error_code in (IN_DOUBT - MAY_BE_FINAL) | _FOR_NOW:
            self._resolve_later(pending, now)
        else:
            # Kafka checks size, timestamps and ACLs before duplicates, and after a restart knows only a producer's last
            # batch. So no error on a resend proves that the first send was not appended.
            self._state.appends.sequence_gaps.add(pending.pipeline_key)
            self._end_unknown(pending, f"the resend was answered with {error_name(result.error_code)}", now)

    def _resent_fenced(self, pending: PendingAppend, result: PartitionResult | None, now: float) -> None:
        appended_now = result is not None and result.error_code == Error.NONE and result.log_append_time_ms == -1
        if pending.outcome.repeated:
            self._resolve_first(now)
        elif result is None or not appended_now:
            self._resolve_later(pending, now)  # one of the sends may lie there, or another's batch
        elif result.base_offset == pending.placement.at:
            self._state.appended(pending, result.log_append_time_ms, result.log_start_offset, now)
            self._resolved(pending, now)
        else:
            self._resolved(pending, now)
            self._lookups.appended_elsewhere(pending, result, now)

    # ---- resolved, or retry later

    def _resolve_later(self, pending: PendingAppend, now: float) -> None:
        if now < pending.outcome.resolve_until:
            self._resolve_again = True
            # A late append may be in the log and not replicated yet: the cluster may be slow for every client.
            self._state.log.retry(now, late=pending.outcome.late)
        else:
            self._state.appends.sequence_gaps.add(pending.pipeline_key)  # before the next one of its pipeline is read
            self._end_unknown(pending, "the outcome could not be read from the log in time", now)

    def _end_unknown(self, pending: PendingAppend, why: str, now: float, *, queued: bool = True) -> None:
        self._resolved(pending, now)
        self._state.unknown(pending, why, now, queued=queued)

    def _resolved(self, pending: PendingAppend, now: float, *, clean: bool = False) -> None:
        self._state.appends.in_doubt.remove(pending)
        self._clean = self._clean and clean
        if self._state.appends.in_doubt:
            self._resolve_first(now)
        elif self._clean:
            self._state.fence.phase = Phase.OPEN
        else:
            self._state.fence.phase = Phase.UNCONFIRMED
            self._state.fence.unconfirm()
