"""The partition sequencer: orders the appends to one checked partition and decides the answer to each.

Sans-IO: calls in, effects out, no clock (every call has `now`). One object per partition and process. `session/`
submits appends, `services/` does the reads.

Principle
---------
A conditional append is *fenced*. It is appended under one producer id that all instances share. Its sequence is its
expected offset: `sequence = (expected - sequence_offset) mod 2^31`. Kafka appends only the next sequence of a producer,
atomically. So the broker refuses (45) an append whose expectation no longer holds, even one that waited in a queue
while its connection closed and other appends passed it. `sequence_offset` is the number of unfenced offsets. On
`required` topics it is the published base (0 at first). On `true` topics this process counts it.

Three hazards; without its rule, each led to an append at the wrong offset or to a lost append reported as safe:

1. *Fence unconfirmed.* A broker that does not know the producer id accepts any first sequence. So a fence is relied on
   only while **confirmed**: after a fenced append of this process was acknowledged, in that leader epoch, on
   connections opened before it, for a quarter of `producer.id.expiration.ms`, and at most `KNOWN_SECONDS` after that
   setting was read (`services/log_reader.py`). While unconfirmed: read the log end and the producer's state, then send
   one append, alone, soon after the read.
2. *In-doubt appends.* An error or an acknowledgement is conclusive only for a batch that was sent once and answered on
   that connection. After a lost connection, 7, 20, or any error with a base offset, only the log decides. It is read at
   the expected offset (`in_doubt.py`).
3. *Another append's success.* Kafka takes an equal sequence range for a duplicate, whatever it contains. The loser of a
   race may get error 0 with the winner's offset. On a CreateTime topic that answer carries a log append time. On a
   LogAppendTime topic it looks like any success, so there every success is read back.

Append modes (`AppendMode`)
---------------------
CONDITIONAL   has an expected offset, not transactional. Fenced. One connection at a time; pipelined while the fence is
              confirmed.
SEQUENCED     no expected offset; not idempotent, or its producer had fenced appends before. Fenced at the log end.
PASS_THROUGH  no expected offset; idempotent or transactional. Keeps its producer id. Runs alongside others of its mode.
TRANSACTIONAL_CONDITIONAL
              transactional with an expected offset. Keeps its producer id. Runs alone, after a read of the log end.
              Kafka does not compare: its answer shows its offset, which is checked again before the transaction commits
              (`transactions/`).

Phases
------
UNCONFIRMED  nothing known. An append that needs the log end starts READING.
READING      log end and producer state requested. Read: OPEN or PUBLISHING. Read failed: UNCONFIRMED.
PUBLISHING   `required` only: the log moved without the fence, so the instances agree on a new base. Stored:
             UNCONFIRMED.
OPEN         log end, sequence offset and epoch known. In-doubt appends: RESOLVING once none is in flight. Unexpected
             offset: UNCONFIRMED.
RESOLVING    in-doubt appends are looked up in the log, in order. Afterwards UNCONFIRMED; OPEN if all were only
             confirmed.

Appends that may still be queued
--------------------------------
An append with an unknown outcome may wait in a broker's queue and be appended later. If all appends are fenced that is
harmless: it is appended where it expected, or never. On `true` topics there are unfenced appends, too:

1. A fenced append for offset 5 waits in a broker's queue.
2. A PASS_THROUGH append takes offset 5. The fence's sequence does not move.
3. The fenced append is appended at 6.

So, while a request may still be queued (`queued_seconds`), PASS_THROUGH appends wait for fenced ones, unless a later
fenced append was acknowledged. Conditional appends wait for unfenced ones, except the retry of that batch. The retry of
a fenced append is looked up at its first attempt's offset. It gets the same sequence, or is not sent while the first
attempt may still be appended.

Transactions
------------
A marker takes an offset without passing the sequencer. So a fenced append and a possible marker are never in flight
together. A transaction joins the partition only after all fenced appends in flight are answered (`join`, `MayJoin`).
Fenced conditional appends are then answered "try again" until its marker is read back.
A transaction that has records here owns the partition. Another transaction's conditional append is answered "try
again". It is refused if its transaction owns a partition, too, since the two might deadlock.
Kafka adds a batch to an open transaction by producer id alone, whatever transactional id the client may use. The
sequencer does not: with an expected offset, the producer id must belong to the transactional id.
"""

from __future__ import annotations

from fencepost_policies.append import NO_FACTS, Check, Refusal
from fencepost_policies.conditional_publish import offset_mismatch
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import (
    NO_PRODUCER,
    Admit,
    AppendMode,
    BasePublished,
    BatchRead,
    Effect,
    Event,
    Fence,
    Forget,
    LogEndRead,
    LogEndSnapshot,
    LogEndUnknown,
    MayJoin,
    PendingAppend,
    ReadBatch,
    ReadLogEnd,
    Resent,
    Tick,
    Violation,
)
from fencepost_proxy.sequencer.fence import (
    FENCE_ERRORS,
    IN_DOUBT,
    MAY_BE_FINAL,
    POLICY,
    Phase,
    SequencerView,
    pipeline_key_of,
    sent_after,
)
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver
from fencepost_proxy.sequencer.retry_cache import same_write
from fencepost_proxy.types import MARKER, SEQUENCE_MODULUS
from fencepost_proxy.wire.produce import PartitionResult


class PartitionSequencer(InDoubtResolver):
    """Sequencer of one checked partition; see the module. Enter through its public methods only."""

    def may_send(self, pending: PendingAppend, now: float) -> bool:
        """Whether the append may still be sent. With an unconfirmed fence, only shortly after the read of the log
        end."""
        if pending is not self._admitted or pending.predecessor_result is not None:
            return False
        if pending.is_there or (not pending.kind.fenced and pending.kind is not AppendMode.TRANSACTIONAL_CONDITIONAL):
            return True
        return self._is_confirmed(pending, now) or self._snapshot_is_fresh(now)

    def view(self, now: float) -> SequencerView:
        return SequencerView(
            queued=tuple(self._queue),
            overtakable=frozenset(pending for pending in self._queue if self._waits_for_queued(pending, now)),
            admitted=self._admitted,
            in_flight=tuple(self._in_flight),
            in_doubt=tuple(self._in_doubt_appends),
            being_read=tuple(self._being_read),
            fence_confirmed=now < self._confirmed_until,
            read_at=None if self._snapshot is None else self._snapshot.requested_at,
        )

    # ---- calls of sessions: each returns what follows from it

    def submit(self, pending: PendingAppend, now: float) -> list[Effect]:
        self._submitted(pending, now)
        return self._finish(now)

    def cancel(self, pending: PendingAppend, now: float) -> list[Effect]:
        """It will not be sent: its client has disconnected, or another partition refused its request."""
        self._canceled(pending)
        return self._finish(now)

    def sent(self, pending: PendingAppend, now: float) -> list[Effect]:
        """An admitted append was passed to its connection."""
        self._sent(pending, now)
        return self._finish(now)

    def answered(self, pending: PendingAppend, result: PartitionResult, now: float) -> list[Effect]:
        self._answered(pending, result, now)
        return self._finish(now)

    def lost(self, pending: PendingAppend, now: float) -> list[Effect]:
        """The connection was lost between `sent` and the answer."""
        self._lost(pending, now)
        return self._finish(now)

    def join(self, transactional_id: str, connection: int, now: float) -> list[Effect]:
        """A transaction is about to add this partition; a marker will follow, with or without records.

        `connection` waits for `MayJoin` before it sends the request. `transactional_id`: `MARKER` if the client sends a
        marker itself.
        """
        if transactional_id == MARKER:
            self._marker_comes()
        else:
            self._joined(transactional_id, float("inf"))
        self._joining[transactional_id, connection] = None
        return self._finish(now)

    def joined(self, transactional_id: str, answered: bool, now: float) -> list[Effect]:
        """The coordinator has `answered`, or will not get the request. Otherwise the connection was lost, and the
        request may still arrive."""
        until = now if answered else now + self._limits.queued_seconds
        if transactional_id == MARKER:
            self._marker_answered(until)
        else:
            self._joining = {each: None for each in self._joining if each[0] != transactional_id}
            self._joined(transactional_id, until)
        return self._finish(now)

    # ---- results of reads, and time

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case LogEndRead(snapshot):
                self._log_end_read(snapshot, now)
            case LogEndUnknown(_, error_code):
                self._log_end_unknown(error_code, now)
            case BatchRead(pending, result):
                self._probed(pending, result, now)
            case Resent(pending, result):
                self._resent(pending, result, now)
            case BasePublished(ok, ours):
                self._base_published(ok, ours, now)
            case Tick():
                self._tick(now)
            case Forget(same_log):
                self._forget(same_log=same_log)
        return self._finish(now)

    def _finish(self, now: float) -> list[Effect]:
        if self._joining:
            self._let_join()
        self._advance(now)
        # Copied out: the last batch must not stay in memory until the partition's next one.
        effects, self._effects = self._effects, []
        return effects

    # ---- fast path: an append without complications

    def may_take(self, pending: PendingAppend, now: float) -> bool:
        """Whether `take` may follow: the append fits at once. Sets its mode, offset and fence; changes nothing else."""
        if self._queue or self._admitted or self._in_doubt_appends or self._being_read or self._awaits_marker(now):
            return False
        append = pending.append
        if append.transactional or POLICY.check(append, pending.check, NO_FACTS) is not None:
            return False
        kind = pending.kind = self._kind_of(pending)
        if self.phase is not Phase.OPEN and (
            kind is not AppendMode.PASS_THROUGH or self.phase is not Phase.UNCONFIRMED
        ):
            return False
        if append.producer_id >= 0 or append.write_id is not None:
            memory = self.memory
            if memory.violation_of(pending) is not None or memory.unresolved(pending) is not None:
                return False
            its_retry_is_known_here = kind.fenced and append.producer_id >= 0
            if its_retry_is_known_here and (memory.retry_of(pending) or self._follows(pending)):
                return False
        if self._waits_for_queued(pending, now) or not self._fits_with_in_flight(pending, now):
            return False
        return kind is AppendMode.PASS_THROUGH or self._fence_at_end(pending, now)

    def take(self, pending: PendingAppend, now: float) -> None:
        """`submit`, `Admit` and `sent` in one, after `may_take`."""
        self._check = pending.check
        if pending.kind.fenced and pending.append.producer_id >= 0:
            self.memory.record_fenced(pending)
        self._admitted = pending
        self._sent(pending, now)

    def _fence_at_end(self, pending: PendingAppend, now: float) -> bool:
        """What `_decide` does for a fenced append that fits; False in all other cases."""
        if not (self._in_flight or self._is_confirmed(pending, now) or self._snapshot_is_fresh(now)):
            return False
        snapshot = self._snapshot
        assert snapshot is not None
        if self._another_transaction_is_open(pending, snapshot) or pending.append.contradiction is not None:
            return False
        end = self._end_of_all_sent()
        expected = end if pending.kind is AppendMode.SEQUENCED else pending.append.expected_base_offset
        if expected != end or self._timestamps(pending, snapshot, now) is not None:
            return False
        self._fence(pending, end, snapshot)
        return True

    def may_complete(self, pending: PendingAppend, result: PartitionResult) -> bool:
        """Whether `complete` may follow: the result is the expected success. Changes nothing."""
        if (
            self._queue
            or self._admitted
            or self._in_doubt_appends
            or self._being_read
            or self._joining
            or pending.duplicate_waiters
        ):
            return False
        if not self._in_flight or self._in_flight[0] is not pending or result.error_code != Error.NONE:
            return False
        if not pending.kind.fenced:
            if self.phase is Phase.OPEN:
                return result.base_offset == self._log_end
            return self.phase is Phase.UNCONFIRMED
        return (
            result.base_offset == pending.at
            and result.log_append_time_ms == -1
            and pending.append.max_timestamp_ms >= 0
            and self._snapshot is not None
        )

    def complete(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        """`answered` with the expected success, and its `Answer`, after `may_complete`."""
        self._in_flight.popleft()
        if pending.kind.fenced:
            self._record_appended(pending, result.log_append_time_ms, now)
        elif self.phase is Phase.OPEN:
            self._moved_by_pass_through(result.base_offset + pending.append.record_count, pending)
        self.memory.resolved(pending)

    # ---- what the calls do

    def _submitted(self, pending: PendingAppend, now: float) -> None:
        pending.kind = self._kind_of(pending)
        pending.fence = None  # of a cancelled admission; the mode may have changed since
        self._submitted_count += 1
        pending.submitted_as = self._submitted_count
        self._check = pending.check
        if pending.kind.fenced and pending.append.producer_id >= 0:
            self.memory.record_fenced(pending)
        refusal = None
        if pending.append.transactional and pending.check is Check.REQUIRED:
            refusal = self._no_transactions(pending)
        if refusal is None:
            refusal = POLICY.check(pending.append, pending.check, NO_FACTS)
        if refusal is None:
            refusal = self.memory.violation_of(pending)
        if refusal is not None:
            self._refuse(pending, refusal)
            return
        for other in self._being_read:
            if other.appended_at is not None and same_write(other, pending):
                other.duplicate_waiters.append(
                    pending
                )  # its first attempt was appended elsewhere, and is about to be answered so
                return
        # Before any comparison: a retry's first attempt moved the log end.
        if pending.kind.fenced and pending.append.producer_id >= 0 and self._known_retry(pending):
            return
        if self._mark_first_try_in_doubt(pending, now):
            return
        if len(self._queue) >= self._limits.queue_max:
            self._answer_later(pending, "the partition's queue is full")
            return
        self._queue.append(pending)

    def _kind_of(self, pending: PendingAppend) -> AppendMode:
        append = pending.append
        conditional = append.expected_base_offset is not None
        if append.transactional:
            return AppendMode.TRANSACTIONAL_CONDITIONAL if conditional else AppendMode.PASS_THROUGH
        if conditional:
            return AppendMode.CONDITIONAL
        if self.memory.went_as_pass_through(pending):
            return AppendMode.PASS_THROUGH
        if append.producer_id < 0 or self.memory.is_fenced(pending):
            # The broker never got the sequences of its conditional batches, so the next unconditional one would meet a
            # gap (45). The sequencer keeps fencing them, and deduplicates in Kafka's place.
            return AppendMode.SEQUENCED
        return AppendMode.PASS_THROUGH

    @staticmethod
    def _no_transactions(pending: PendingAppend) -> Refusal:
        """A transaction keeps its own producer id, and its marker moves the log. Neither moves the fence's sequence."""
        where = f"topic={pending.partition.topic} partition={pending.partition.partition}"
        return Refusal(
            Error.POLICY_VIOLATION,
            "transactions_not_supported",
            f"TRANSACTIONS_NOT_SUPPORTED {where}: fencepost.check.expected.offsets=required does not allow "
            "transactions (set it to true to mix transactional and conditional appends)",
        )

    @staticmethod
    def _transaction_conflict(pending: PendingAppend) -> Refusal:
        where = f"topic={pending.partition.topic} partition={pending.partition.partition}"
        return Refusal(
            Error.POLICY_VIOLATION,
            "transaction_conflict",
            f"TRANSACTION_CONFLICT {where}: another transaction has an open append here, and this one has "
            "appended to other partitions: waiting could deadlock (abort and retry the transaction)",
        )

    @staticmethod
    def _anothers_producer(pending: PendingAppend) -> Refusal:
        where = f"topic={pending.partition.topic} partition={pending.partition.partition}"
        return Refusal(
            Error.INVALID_PRODUCER_ID_MAPPING,
            "anothers_producer",
            f"ANOTHERS_PRODUCER {where}: producer id {pending.append.producer_id} is not that of the transactional id",
        )

    def _known_retry(self, pending: PendingAppend) -> bool:
        """Answer a retry of a batch that this process has answered, or let it wait for the one in flight."""
        appended_batch = self.memory.retry_of(pending)
        if appended_batch is not None:
            self._accept(pending, appended_batch)
            return True
        earlier = self._follows(pending)
        if earlier is None:
            return False
        earlier.duplicate_waiters.append(pending)
        return True

    def _follows(self, pending: PendingAppend) -> PendingAppend | None:
        """The earlier attempt of the same batch whose outcome is not known yet."""
        for earlier in (*self._in_flight, *self._in_doubt_appends):
            if (
                earlier.producer == pending.producer
                and earlier.append.base_sequence == pending.append.base_sequence
                and earlier.digest == pending.digest
            ):
                return earlier
        return None

    def _mark_first_try_in_doubt(self, pending: PendingAppend, now: float) -> bool:
        """A batch whose last attempt ended unknown: look it up in the log before sending it again."""
        known = self.memory.unresolved(pending)
        if known is None:
            return False
        pending.at, pending.fence = known
        pending.sent_before = True
        if pending.fence == NO_PRODUCER:
            # Unfenced: neither its offset nor its sender can be found out, and Kafka would append it again.
            self._answer_unknown(pending, "an earlier attempt, too old to be fenced, may have been appended", now)
            return True
        self._mark_in_doubt(pending, min(pending.deadline, now + self._limits.resolve_seconds))
        return True

    def _pending(self) -> tuple[PendingAppend, ...]:
        """All appends that may have duplicate waiters."""
        return (*self._in_flight, *self._in_doubt_appends, *self._queue, *self._being_read)

    def _canceled(self, pending: PendingAppend) -> None:
        if pending is self._admitted:
            self._admitted = None
            if pending.attempts:
                self._not_sent_again(pending)
        elif pending in self._queue:
            self._queue.remove(pending)
        elif pending in self._being_read:
            self._being_read.remove(pending)
        else:
            for earlier in self._pending():
                if pending in earlier.duplicate_waiters:
                    earlier.duplicate_waiters.remove(pending)
            return
        if pending.duplicate_waiters:
            # Duplicate waiters: the append had no outcome, so the first of them takes its place.
            next_waiter, *rest = pending.duplicate_waiters
            pending.duplicate_waiters.clear()
            next_waiter.duplicate_waiters.extend(rest)
            self._queue.appendleft(next_waiter)

    def _not_sent_again(self, pending: PendingAppend) -> None:
        """1. A and B are sent. 2. Kafka refuses both fences. 3. A cannot be resent. 4. B must not be appended alone."""
        where = f"topic={self.partition.topic} partition={self.partition.partition}"
        reported = PartitionResult(
            partition=self.partition.partition,
            error_code=Error.NOT_LEADER_OR_FOLLOWER,
            error_message=f"TRY_AGAIN an earlier append was not resent {where}",
        )
        for other in self._sent_after(pending):
            other.predecessor_result = sent_after(other, reported)

    def _sent(self, pending: PendingAppend, now: float) -> None:
        assert pending is self._admitted, "an append is sent only after it was admitted"
        self._admitted = None
        pending.sent_at = now
        self._sent_count += 1
        pending.sent_as = self._sent_count  # several may be sent at the same `now`
        pending.attempts += 1
        self._in_flight.append(pending)
        if pending.kind is AppendMode.PASS_THROUGH and pending.append.producer_id >= 0 and pending.fence is None:
            self.memory.add_pass_through(pending)
        if pending.append.transactional:
            # Its marker will take an offset without passing here, so what is known of the log end expires.
            self._confirmed_until = float("-inf")
            if pending.transactional_id is not None:
                self._joined(pending.transactional_id, float("inf"))
                self._producers[pending.transactional_id] = pending.append.producer_id
                self._try_again_at.pop(pending.append.producer_id, None)

    def _answered(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        if pending not in self._in_flight:
            return  # resolved from the log meanwhile
        error = result.error_code
        may_be_final = error in MAY_BE_FINAL and result.base_offset == -1
        in_doubt = error in IN_DOUBT or (error != Error.NONE and result.base_offset != -1)
        # Kafka's answer is final for an unconditional append under its own producer id, as without a proxy.
        if in_doubt and not (may_be_final and pending.kind is AppendMode.PASS_THROUGH):
            pending.error_code = error if may_be_final else 0
            self._lost(pending, now, answered=True)
            return
        self._in_flight.remove(pending)
        if pending.transactional_id is not None:
            self._joined(pending.transactional_id, now)
        if error == Error.NONE:
            if pending.kind.fenced:
                self._fenced_success(pending, result, now)
            else:
                self._pass_through_success(pending, result, now)
        elif pending.kind.fenced and error in FENCE_ERRORS:
            # Sent once and refused: nothing was appended. Only the log shows why.
            self._unconfirm()
            self._again(pending)
        elif pending.is_there and error in FENCE_ERRORS:
            # After a restart Kafka knows only the last batch of a producer.
            self._unconfirm()
            self._refuse(
                pending, offset_mismatch(pending.append, pending.actual, self._log_start(), possibly_yours=True)
            )
        else:
            self._unconfirm()
            self._answer(pending, result)

    def _fenced_success(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        assert pending.at is not None
        assert self._snapshot is not None
        if result.log_append_time_ms != -1 or pending.append.max_timestamp_ms < 0:
            # On a LogAppendTime topic every answer has a time. Elsewhere a time marks a duplicate: of the winner of a
            # race, or of an earlier attempt. Or the topic has become a LogAppendTime one. The log decides. An answer
            # without a time is a fresh append, unless the batch has no timestamps: then its duplicate has none either.
            if not self._snapshot.log_append_time:
                self._unconfirm()
            pending.acknowledged = True
            if pending.kind is AppendMode.SEQUENCED:
                pending.at = result.base_offset
            self._mark_in_doubt(pending, now + self._limits.resolve_seconds)
        elif result.base_offset != pending.at:
            self._appended_elsewhere(pending, result, now)
        else:
            self._appended_at(pending, result.log_append_time_ms, result.log_start_offset, now)

    def _pass_through_success(self, pending: PendingAppend, result: PartitionResult, now: float) -> None:
        self._is_not_queued(pending)
        conditional = pending.kind is AppendMode.TRANSACTIONAL_CONDITIONAL
        if pending.append.transactional and result.log_append_time_ms != -1:
            # A duplicate, or on a LogAppendTime topic possibly a fresh append.
            self._unconfirm()
            if not conditional:
                pending.at = result.base_offset
            self._confirm(pending, result)
            return
        if conditional and result.base_offset != pending.at:
            self._appended_elsewhere(pending, result, now)
            return
        if pending.fence == NO_PRODUCER and pending.append.producer_id >= 0:
            pending.at = result.base_offset
            self.memory.add(pending, result.log_append_time_ms)  # Kafka would not recognise a retry
        end = result.base_offset + pending.append.record_count
        if pending.append.transactional or self.phase is not Phase.OPEN:
            self._unconfirm()
        elif end > self._log_end:
            if result.base_offset != self._log_end and not self._in_flight:
                self._unconfirm()  # another writer moved the log, too
            else:
                self._moved_by_pass_through(end, pending)
        self._answer(pending, result)

    def _moved_by_pass_through(self, end: int, pending: PendingAppend) -> None:
        """The log moved without the fence's sequence: add the difference to the sequence offset."""
        self._sequence_offset += end - self._log_end
        self._log_end = end
        self._end_as_of = pending.sent_at or self._end_as_of

    def _lost(self, pending: PendingAppend, now: float, *, answered: bool = False) -> None:
        """The outcome is unknown. `answered`: Kafka has finished with it, so it is in the log or never will be."""
        if pending in self._in_flight:
            self._in_flight.remove(pending)
            self._unconfirm()
            pending.unanswered = pending.unanswered or not answered
            if pending.transactional_id is not None:
                self._joined(pending.transactional_id, now if answered else now + self._limits.queued_seconds)
            if not pending.kind.fenced and not self._kafka_detects_duplicate(pending):
                # A resend might append it twice, after its transaction, or for an unauthorized client. A read proves
                # nothing for a batch without an expected offset.
                why = "Kafka's answer is not conclusive" if answered else "connection to Kafka lost before the answer"
                self._answer_unknown(pending, why, now, queued=not answered)
            else:
                self._mark_in_doubt(pending, now + self._limits.resolve_seconds)

    @staticmethod
    def _kafka_detects_duplicate(pending: PendingAppend) -> bool:
        keeps_id = pending.append.producer_id >= 0 and pending.fence is None
        return keeps_id and pending.may_write and not pending.append.transactional

    def _joined(self, transactional_id: str, believe_from: float) -> None:
        """From `believe_from` on, the coordinator's "not on this partition" counts. Before, it may not know yet."""
        self._transactions[transactional_id] = believe_from
        if len(self._transactions) > self._limits.remembered_producers_max:
            self._forget_transaction(next(iter(self._transactions)))
        self._unconfirm()

    def _marker_comes(self) -> None:
        self._markers += 1
        self._moves_unfenced()

    def _marker_answered(self, written_by: float) -> None:
        self._markers = max(0, self._markers - 1)  # the sequencer may have been created since
        self._written_by = max(self._written_by, written_by)
        self._moves_unfenced()

    def _awaits_marker(self, now: float) -> bool:
        """No append with an expected offset is sent meanwhile: a marker takes an offset."""
        return self._markers > 0 or now < self._written_by

    def _moves_unfenced(self) -> None:
        """The log end moves, but not by a client that bypasses the proxy."""
        self._accounted = False
        self._read_is_stale = self.phase is Phase.READING
        self._unconfirm()

    def _forget_transaction(self, transactional_id: str) -> None:
        del self._transactions[transactional_id]
        self._producers.pop(transactional_id, None)

    def _let_join(self) -> None:
        """Let waiting transactions join once no fenced append is in flight or in doubt. Otherwise the marker could
        take the offset of one of them. Later admissions read the log end first."""
        if not any(pending.kind.fenced for pending in (*self._in_flight, *self._in_doubt_appends)):
            self._effects += [MayJoin(connection) for _, connection in self._joining]
            self._joining = {}

    def _forget(self, *, same_log: bool) -> None:
        if not same_log:
            self.memory.clear()
        self._moves_unfenced()
        for pending in self._in_doubt_appends:
            pending.may_write = False  # the topic may have been recreated, or its ACLs changed

    def _log_end_read(self, snapshot: LogEndSnapshot, now: float) -> None:
        if self.phase is Phase.RESOLVING and self._reads_to_resend:
            self._reads_to_resend = False
            self._resend(self._in_doubt_appends[0], snapshot, now)
        if self.phase is not Phase.READING:
            return
        if self._read_is_stale:
            self._read_is_stale = False
            self.phase = Phase.UNCONFIRMED
            return
        if snapshot.log_end_offset < self._log_end:
            # Truncated: forget what was appended above the end.
            self.memory.forget_from(snapshot.log_end_offset)
        for transactional_id in snapshot.ended_transactions:
            if self._transactions.get(transactional_id, float("inf")) <= snapshot.transactions_as_of:
                self._forget_transaction(transactional_id)
        accounted, self._accounted = self._accounted, False
        self._snapshot = snapshot
        published_epoch, base = snapshot.fence_base
        state = snapshot.producer_state
        self._log_end = snapshot.log_end_offset
        self._end_as_of = snapshot.requested_at
        self._confirmed_until = float("-inf")
        if self._check is Check.REQUIRED:
            reason = self._fence_outside_log(snapshot)
            if reason is not None:
                if accounted and (first := self._first_unfenced(snapshot)) is not None:
                    self._effects.append(Violation(self.partition, first, log_end_offset=snapshot.log_end_offset))
                self._publish(snapshot, reason, now)
                return
            self._epoch, self._sequence_offset = published_epoch, base
            self._accounted = True
        elif state is None:
            self._epoch, self._sequence_offset = published_epoch, base
        else:
            if state.producer_epoch > max(published_epoch, self._epoch):
                self._report_foreign_epoch(snapshot)
            self._epoch = state.producer_epoch
            self._sequence_offset = (snapshot.log_end_offset - state.next_sequence) % SEQUENCE_MODULUS
        self.phase = Phase.OPEN

    def _log_end_unknown(self, error_code: int | None, now: float) -> None:
        if self.phase is Phase.RESOLVING and self._reads_to_resend:
            self._reads_to_resend = False
            self._resolve_later(self._in_doubt_appends[0], now)
        if self.phase is not Phase.READING:
            return
        self.phase = Phase.UNCONFIRMED
        self._retry_at = now + self._limits.read_retry_seconds
        if error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
            while self._queue:
                pending = self._queue.popleft()
                self._answer(pending, PartitionResult(pending.partition.partition, error_code))

    def _tick(self, now: float) -> None:
        why = "the log end could not be read in time"
        if self._awaits_marker(now):
            why = "a transaction marker is being written"
        for pending in [t for t in self._queue if t.deadline <= now]:
            self._queue.remove(pending)
            self._answer_later(pending, why)
        for pending in [t for t in self._being_read if t.deadline <= now]:
            self._being_read.remove(pending)
            if pending.appended_at is not None:
                self._end_violation(pending, None)
                continue
            if pending.reported_at is not None:
                self._end_duplicate(pending, None, now)
                continue
            self._answer_later(pending, "the record at the expected offset could not be read in time")
        for earlier in self._pending():
            for pending in [t for t in earlier.duplicate_waiters if t.deadline <= now]:
                earlier.duplicate_waiters.remove(pending)
                self._answer_unknown(pending, "an earlier attempt of this batch is still in doubt", now)
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            for pending in self._being_read:
                at = pending.append.expected_base_offset if pending.reported_at is None else pending.reported_at
                assert at is not None
                self._effects.append(ReadBatch(pending, at))
            if self._resolve_again:
                self._resolve_first(now)

    # ---- admission

    def _advance(self, now: float) -> None:
        """Admit appends while the head of the queue can proceed."""
        if (
            self._in_doubt_appends
            and not self._in_flight
            and self._admitted is None
            and self.phase in (Phase.UNCONFIRMED, Phase.OPEN)
        ):
            self._resolve(now)
        while self._queue and self._admitted is None and self.phase in (Phase.UNCONFIRMED, Phase.OPEN):
            # Before any append passes another: an in-doubt retry may return to its place in the queue.
            if self._in_doubt_appends or self._awaits_marker(now):
                return
            if self._waits_for_queued(self._queue[0], now) and not self._let_others_pass(now):
                return
            if not self._fits_with_in_flight(self._queue[0], now):
                return
            pending = self._queue[0]
            if self._predecessor_is_read(pending):
                return
            if pending.predecessor_result is not None:
                self._queue.popleft()
                self._answer(pending, pending.predecessor_result, "predecessor_failed")
            elif pending.kind.fenced and pending.append.producer_id >= 0 and self._known_retry(pending):
                # Its first attempt was still queued here when it came, and has been answered since.
                self._queue.popleft()
            elif pending.kind is AppendMode.PASS_THROUGH or pending.is_there:
                self._admit(pending)
            elif not self._decide(pending, now):
                return

    def _waits_for_queued(self, pending: PendingAppend, now: float) -> bool:
        """See "Appends that may still be queued" in the module. On `required` topics no append is unfenced."""
        if pending.check is Check.REQUIRED:
            return False
        if not pending.taken_over and pending.append.expected_base_offset is not None:
            return True
        for_pass_through = (
            now < self._pass_through_queued_until
            and pending.append.expected_base_offset is not None
            and not (pending.append.transactional and self._only_itself_is_queued(pending, now))
        )
        for_fenced = now < self._fenced_queued_until and not pending.kind.fenced
        return for_pass_through or for_fenced

    def _let_others_pass(self, now: float) -> bool:
        """An append that waits for a possibly queued one blocks only its own pipeline. False if no other can pass."""
        blocked: set[tuple[int, int]] = set()
        for pending in self._queue:
            if pipeline_key_of(pending) in blocked or self._waits_for_queued(pending, now):
                blocked.add(pipeline_key_of(pending))
            else:
                self._queue.remove(pending)
                self._queue.appendleft(pending)
                return True
        return False

    def _predecessor_is_read(self, pending: PendingAppend) -> bool:
        """Its predecessor in the pipeline failed and is being looked up; until that ends, it must not be appended."""
        return any(
            other.attempts
            and other.connection == pending.connection
            and other.append.producer_id == pending.append.producer_id
            for other in self._being_read
        )

    def _fits_with_in_flight(self, pending: PendingAppend, now: float) -> bool:
        if not self._in_flight:
            return True
        if len(self._in_flight) >= self._limits.in_flight_max:
            return False
        if pending.kind is AppendMode.PASS_THROUGH:
            return all(other.kind is AppendMode.PASS_THROUGH for other in self._in_flight)
        # One connection keeps its order, and a lost predecessor makes the successor fail by its sequence. So appends
        # are pipelined, but only while the fence is confirmed and no other instance fences here. Otherwise: 1. This
        # process sends A, B. 2. Another instance's X, with as many records as A, is appended first. 3. Kafka takes A
        # for a duplicate of X. 4. B's sequence fits, so B is appended after X.
        return (
            pending.kind.fenced
            and pending.alone
            and self.phase is Phase.OPEN
            and self._is_confirmed(pending, now)
            and all(other.kind.fenced and other.connection == pending.connection for other in self._in_flight)
        )

    def _decide(self, pending: PendingAppend, now: float) -> bool:
        """Admit or end the head of the queue; False if it has to wait."""
        if self.phase is Phase.UNCONFIRMED or not (
            self._in_flight or self._is_confirmed(pending, now) or self._snapshot_is_fresh(now)
        ):
            return self._read_log_end(now)
        assert self._snapshot is not None
        if pending.append.transactional:
            if not self._knows_transaction(pending, self._snapshot):
                # The read predates the marker of its producer's last transaction, or an earlier attempt of the append.
                return self._read_log_end(now)
            if self._is_anothers_producer(pending, self._snapshot):
                self._queue.popleft()
                self._refuse(pending, self._anothers_producer(pending))
                return True
        end = self._end_of_all_sent()
        expected = end if pending.kind is AppendMode.SEQUENCED else pending.append.expected_base_offset
        assert expected is not None
        # Waiting for a marker would not free the offset. It may be a retry of an append in its own transaction.
        passed = pending.append.transactional and expected < end
        if not passed and self._another_transaction_is_open(pending, self._snapshot):
            self._queue.popleft()
            if self._may_not_wait(pending, self._snapshot, now):
                self._refuse(pending, self._transaction_conflict(pending))
            else:
                self._answer_later(pending, "a transaction is open on the partition; its marker will take an offset")
            self._unconfirm()
            return True
        decided = self._first_try_decides(pending, end, now)
        if decided is not None:
            return decided
        if expected == end and pending.append.contradiction is None:
            refusal = self._timestamps(pending, self._snapshot, now)
            if refusal is not None and self.memory.unresolved(pending) and now < self._fenced_queued_until:
                # Its first attempt was fenced and may still be appended, in addition to this one, which would not be
                # fenced.
                self._queue.popleft()
                self._answer_unknown(pending, "an earlier attempt of this batch may still be appended", now)
                return True
            if refusal is not None and pending.check is Check.REQUIRED:
                self._queue.popleft()
                self._refuse(pending, refusal)
                return True
            if refusal is not None:
                self._send_unfenced(pending)
                return True
            self._fence(pending, expected, self._snapshot)
            self._admit(pending)
            return True
        if self._in_flight:
            return False  # the outcome depends on the appends before it
        if self._end_as_of < pending.submitted_at:
            # The reported `actual` must have been the log end at some moment during this call.
            return self._read_log_end(now)
        self._queue.popleft()
        self._mismatch(pending, expected, end, now)
        return True

    def _first_try_decides(self, pending: PendingAppend, end: int, now: float) -> bool | None:
        """For a batch whose first attempt may still be queued in Kafka: as `_decide`; None if that does not matter.

        The log did not have it when it was read. With the same sequence, only one of the two attempts is appended. With
        another sequence both may be, and one may be appended after it was refused.
        """
        known = self.memory.unresolved(pending)
        if known is None:
            return None
        pending.sent_before = True  # also if that attempt ended while this one waited here
        if known[0] == end:
            return None
        if self._in_flight:
            return False  # its offset depends on the appends before it
        if end > known[0]:
            # It has been appended since, or another batch has.
            self._queue.popleft()
            self._mark_first_try_in_doubt(pending, now)
            if self._in_doubt_appends:
                self._resolve(now)
            return True
        if now < self._fenced_queued_until:
            self._queue.popleft()
            self._answer_unknown(pending, "an earlier attempt may still be appended after one sent before it", now)
            return True
        self.memory.resolved(pending)
        return None

    def _end_of_all_sent(self) -> int:
        """The log end once all appends in flight are appended."""
        if not self._in_flight:
            return self._log_end
        last = self._in_flight[-1]
        assert last.at is not None
        return last.at + last.append.record_count

    def _fence(self, pending: PendingAppend, at: int, snapshot: LogEndSnapshot) -> None:
        pending.at = at
        if pending.kind.fenced and self._limits.fencing:
            sequence = (at - self._sequence_offset) % SEQUENCE_MODULUS
            pending.fence = Fence(
                snapshot.producer_id, self._epoch % self._limits.producer_epochs, sequence, pending.instance_id
            )

    @staticmethod
    def _send_unfenced(pending: PendingAppend) -> None:
        """On a `true` topic a batch with old timestamps is not fenced: appended unconditionally, or alone."""
        pending.kind = (
            AppendMode.PASS_THROUGH if pending.kind is AppendMode.SEQUENCED else AppendMode.TRANSACTIONAL_CONDITIONAL
        )
        if pending.append.producer_id >= 0:
            pending.fence = NO_PRODUCER  # the broker never got this producer's sequences and would find a gap

    def _read_log_end(self, now: float) -> bool:
        if self._in_flight or (self._retry_at is not None and now < self._retry_at):
            return False
        self._retry_at = None
        self.phase = Phase.READING
        queried = tuple(self._transactions)
        mine = self._queue[0].transactional_id
        if mine is not None and mine not in self._transactions:
            queried += (mine,)
        self._effects.append(ReadLogEnd(self.partition, queried))
        return False

    def _admit(self, pending: PendingAppend) -> None:
        self._queue.popleft()
        self._admitted = pending
        self._effects.append(Admit(pending))
