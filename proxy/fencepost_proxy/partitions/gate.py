"""The partition sequencer: orders the appends to one checked partition and decides the answer to each.

Sans-IO: events in, effects out, no clock (every event carries `now`). One object per partition and process. `session/`
submits appends, `net/` does the reads.

Principle
---------
A conditional append is *fenced*. It is appended under one producer id that all instances share. Its sequence is its
expected offset: `sequence = (expected - shift) mod 2^31`. Kafka appends only the next sequence of a producer,
atomically. So the broker refuses (45) an append whose expectation no longer holds, even one that waited in a queue
while its connection closed and other appends passed it. `shift` is the number of unfenced offsets. On `required` topics
it is the published base (0 at first). On `true` topics this process counts it.

Three hazards; without its rule, each led to an append at the wrong offset or to a lost append reported as safe:

1. *Fence unconfirmed.* A broker that does not know the producer id accepts any first sequence. So a fence is relied on
   only while **confirmed**: after a fenced append of this process was acknowledged, in that leader epoch, on
   connections opened before it, for a quarter of `producer.id.expiration.ms`, and at most `KNOWN_SECONDS` after that
   setting was read (`net/reads.py`). While unconfirmed: read the log end and the producer's state, then send one
   append, alone, soon after the read.
2. *In-doubt appends.* An error or an acknowledgement is conclusive only for a batch that was sent once and answered on
   that connection. After a lost connection, 7, 20, or any error with a base offset, only the log decides. It is read at
   the expected offset (`settling.py`).
3. *Another append's success.* Kafka takes an equal sequence range for a duplicate, whatever it contains. The loser of a
   race may get error 0 with the winner's offset. On a CreateTime topic that answer carries a log append time. On a
   LogAppendTime topic it looks like any success, so there every success is read back.

Append modes (`Kind`)
---------------------
CONDITIONAL      has an expected offset, not transactional. Fenced. One connection at a time; pipelined while the fence
                 is confirmed.
PLAIN            no expected offset; not idempotent, or its producer had fenced appends before. Fenced at the log end.
OWN              no expected offset; idempotent or transactional. Keeps its producer id. Runs alongside other OWN.
OWN_CONDITIONAL  transactional with an expected offset. Keeps its producer id. Runs alone, after a read of the log end.
                 Kafka does not compare: its answer shows its offset, which is checked again before the transaction
                 commits (`transactions/`).

Phases
------
COLD        nothing known. An append that needs the log end starts READING.
READING     log end and producer state requested. Read: OPEN or PUBLISHING. Read failed: COLD.
PUBLISHING  `required` only: the log moved without the fence, so the instances agree on a new base. Stored: COLD.
OPEN        log end, shift and epoch known. In-doubt appends: SETTLING once none is in flight. Unexpected offset: COLD.
SETTLING    in-doubt appends are looked up in the log, in order. Afterwards COLD; OPEN if all were only confirmed.

Appends that may still be queued
--------------------------------
An append with an unknown outcome may wait in a broker's queue and be appended later. If all appends are fenced that is
harmless: it is appended where it expected, or never. On `true` topics there are unfenced appends, too:

1. A fenced append for offset 5 waits in a broker's queue.
2. An OWN append takes offset 5. The fence's sequence does not move.
3. The fenced append is appended at 6.

So, while a request may still be queued (`queued_seconds`), OWN appends wait for fenced ones, unless a later fenced
append was acknowledged. Conditional appends wait for unfenced ones, except the retry of that batch. The retry of a
fenced append is looked up at its first attempt's offset. It gets the same sequence, or is not sent while the first
attempt may still be appended.

Transactions
------------
A marker takes an offset without passing the sequencer. So a fenced append and a possible marker are never in flight
together. A transaction joins the partition only after all fenced appends in flight are answered (`TransactionJoins`,
`MayJoin`). Fenced conditional appends are then answered "try again" until its marker is read back.
A transaction that has records here owns the partition. Another transaction's conditional append is answered "try
again". It is refused if its transaction owns a partition, too, since the two might deadlock.
Kafka adds a batch to an open transaction by producer id alone, whatever transactional id the client may use. The
sequencer does not: with an expected offset, the producer id must belong to the transactional id.
"""

from __future__ import annotations

from fencepost_policies.append import Check, Facts, Refusal
from fencepost_policies.conditional_publish import offset_mismatch
from fencepost_proxy.errors import Error
from fencepost_proxy.partitions.events import (
    NO_PRODUCER,
    Answered,
    BasePublished,
    Effect,
    Event,
    Forget,
    Grant,
    Kind,
    Look,
    Looked,
    Lost,
    MayJoin,
    Offered,
    ReadTail,
    Resent,
    Sent,
    Stamp,
    Tail,
    TailRead,
    TailUnknown,
    Tick,
    Ticket,
    TransactionJoined,
    TransactionJoins,
    Violation,
    Withdrawn,
)
from fencepost_proxy.partitions.gate_state import (
    ABOUT_THE_STAMP,
    IN_DOUBT,
    MAY_BE_FINAL,
    POLICY,
    Phase,
    chain_of,
    sent_behind,
)
from fencepost_proxy.partitions.memory import same_write
from fencepost_proxy.partitions.settling import Settling
from fencepost_proxy.types import MARKER, SEQUENCE_MODULUS
from fencepost_proxy.wire.produce import PartitionResult

_FACTS = {check: Facts(check_expected_offsets=check) for check in Check}


class Gate(Settling):
    """Sequencer of one checked partition; see the module. Enter through `handle`, `take` or `landed` only."""

    def may_send(self, ticket: Ticket, now: float) -> bool:
        """Whether the append may still be sent. With an unconfirmed fence, only shortly after the read of the log
        end."""
        if ticket is not self._granted or ticket.behind is not None:
            return False
        if ticket.is_there or (not ticket.kind.stamped and ticket.kind is not Kind.OWN_CONDITIONAL):
            return True
        return self._warm(ticket, now) or self._tail_is_fresh(now)

    # ---- entry point

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Offered(ticket):
                self._offered(ticket, now)
            case Withdrawn(ticket):
                self._withdrawn(ticket)
            case Sent(ticket):
                self._sent(ticket, now)
            case Answered(ticket, result):
                self._answered(ticket, result, now)
            case Lost(ticket):
                self._lost(ticket, now)
            case TailRead(tail):
                self._tail_read(tail, now)
            case TailUnknown(_, error_code):
                self._tail_unknown(error_code, now)
            case Looked(ticket, result):
                self._looked(ticket, result, now)
            case Resent(ticket, result):
                self._resent(ticket, result, now)
            case TransactionJoins(transactional_id, connection):
                if transactional_id == MARKER:
                    self._marker_comes()
                else:
                    self._joined(transactional_id, float("inf"))
                self._joining[transactional_id, connection] = None
            case TransactionJoined(transactional_id, answered) if transactional_id == MARKER:
                self._marker_answered(now if answered else now + self._limits.queued_seconds)
            case TransactionJoined(transactional_id, answered):
                self._joining = {each: None for each in self._joining if each[0] != transactional_id}
                self._joined(transactional_id, now if answered else now + self._limits.queued_seconds)
            case BasePublished(ok, ours):
                self._base_published(ok, ours, now)
            case Tick():
                self._tick(now)
            case Forget(same_log):
                self._forget(same_log=same_log)
        if self._joining:
            self._let_join()
        self._advance(now)
        # Copied out: the last batch must not stay in memory until the partition's next one.
        effects, self._effects = self._effects, []
        return effects

    # ---- fast path: an append without complications, in two calls instead of five events

    def take(self, ticket: Ticket, now: float) -> bool:
        """`Offered`, `Grant` and `Sent` in one. True: send it now. False: nothing changed, submit it instead."""
        if self._queue or self._granted or self._doubts or self._looking or self._awaits_marker(now):
            return False
        append = ticket.append
        if append.transactional or POLICY.check(append, _FACTS[ticket.check]) is not None:
            return False
        kind = ticket.kind = self._kind_of(ticket)
        if self.phase is not Phase.OPEN and (kind is not Kind.OWN or self.phase is not Phase.COLD):
            return False
        if append.producer_id >= 0 or append.write_id is not None:
            memory = self.memory
            if memory.violation_of(ticket) is not None or memory.unresolved(ticket) is not None:
                return False
            its_retry_is_known_here = kind.stamped and append.producer_id >= 0
            if its_retry_is_known_here and (memory.retry_of(ticket) or self._follows(ticket)):
                return False
        if self._waits_for_what_may_be_queued(ticket, now) or not self._fits_beside_in_flight(ticket, now):
            return False
        if kind is not Kind.OWN and not self._stamp_at_end(ticket, now):
            return False
        self._check = ticket.check
        if kind.stamped and append.producer_id >= 0:
            self.memory.note_stamped(ticket)
        self._granted = ticket
        self._sent(ticket, now)
        return True

    def _stamp_at_end(self, ticket: Ticket, now: float) -> bool:
        """What `_decide` does for a fenced append that fits; False in all other cases."""
        if not (self._in_flight or self._warm(ticket, now) or self._tail_is_fresh(now)):
            return False
        tail = self._tail
        assert tail is not None
        if self._another_transaction_is_open(ticket, tail) or ticket.append.contradiction is not None:
            return False
        end = self._end_of_all_sent()
        expected = end if ticket.kind is Kind.PLAIN else ticket.append.expected_base_offset
        if expected != end or self._timestamps(ticket, tail, now) is not None:
            return False
        self._stamp(ticket, end, tail)
        return True

    def landed(self, ticket: Ticket, result: PartitionResult, now: float) -> PartitionResult | None:
        """`Answered` with the expected success, and its `Answer`. None: nothing changed, use the event instead."""
        if self._queue or self._granted or self._doubts or self._looking or self._joining or ticket.followers:
            return None
        if not self._in_flight or self._in_flight[0] is not ticket or result.error_code != Error.NONE:
            return None
        if not ticket.kind.stamped:
            if self.phase is Phase.OPEN:
                if result.base_offset != self._log_end:
                    return None
                self._moved_by_own(result.base_offset + ticket.append.record_count, ticket)
            elif self.phase is not Phase.COLD:
                return None
            self._in_flight.popleft()
            self.memory.resolved(ticket)
            return result
        if (
            result.base_offset != ticket.at
            or result.log_append_time_ms != -1
            or ticket.append.max_timestamp_ms < 0
            or self._tail is None
        ):
            return None
        self._in_flight.popleft()
        self._note_landed(ticket, result.log_append_time_ms, now)
        self.memory.resolved(ticket)
        return result

    # ---- events

    def _offered(self, ticket: Ticket, now: float) -> None:
        ticket.kind = self._kind_of(ticket)
        ticket.stamp = None  # of a cancelled grant; the mode may have changed since
        self._offered_count += 1
        ticket.offered_as = self._offered_count
        self._check = ticket.check
        if ticket.kind.stamped and ticket.append.producer_id >= 0:
            self.memory.note_stamped(ticket)
        refusal = None
        if ticket.append.transactional and ticket.check is Check.REQUIRED:
            refusal = self._no_transactions(ticket)
        if refusal is None:
            refusal = POLICY.check(ticket.append, _FACTS[ticket.check])
        if refusal is None:
            refusal = self.memory.violation_of(ticket)
        if refusal is not None:
            self._refuse(ticket, refusal)
            return
        for other in self._looking:
            if other.appended_at is not None and same_write(other, ticket):
                other.followers.append(
                    ticket
                )  # its first attempt was appended elsewhere, and is about to be answered so
                return
        # Before any comparison: a retry's first attempt moved the log end.
        if ticket.kind.stamped and ticket.append.producer_id >= 0 and self._known_retry(ticket):
            return
        if self._doubt_first_try(ticket, now):
            return
        if len(self._queue) >= self._limits.queue_max:
            self._answer_later(ticket, "the partition's queue is full")
            return
        self._queue.append(ticket)

    def _kind_of(self, ticket: Ticket) -> Kind:
        append = ticket.append
        conditional = append.expected_base_offset is not None
        if append.transactional:
            return Kind.OWN_CONDITIONAL if conditional else Kind.OWN
        if conditional:
            return Kind.CONDITIONAL
        if self.memory.went_as_own(ticket):
            return Kind.OWN
        if append.producer_id < 0 or self.memory.is_stamped(ticket):
            # The broker never got the sequences of its conditional batches, so the next unconditional one would meet a
            # gap (45). The sequencer keeps fencing them, and deduplicates in Kafka's place.
            return Kind.PLAIN
        return Kind.OWN

    @staticmethod
    def _no_transactions(ticket: Ticket) -> Refusal:
        """A transaction keeps its own producer id, and its marker moves the log. Neither moves the fence's sequence."""
        where = f"topic={ticket.partition.topic} partition={ticket.partition.partition}"
        return Refusal(
            Error.POLICY_VIOLATION,
            "transactions_not_guarded",
            f"TRANSACTIONS_NOT_GUARDED {where}: check.expected.offsets=required does not allow transactions "
            "(set it to true to mix transactional and conditional appends)",
        )

    @staticmethod
    def _transaction_conflict(ticket: Ticket) -> Refusal:
        where = f"topic={ticket.partition.topic} partition={ticket.partition.partition}"
        return Refusal(
            Error.POLICY_VIOLATION,
            "transaction_conflict",
            f"TRANSACTION_CONFLICT {where}: another transaction has an open append here, and this one has "
            "appended to other partitions: waiting could deadlock (abort and retry the transaction)",
        )

    @staticmethod
    def _anothers_producer(ticket: Ticket) -> Refusal:
        where = f"topic={ticket.partition.topic} partition={ticket.partition.partition}"
        return Refusal(
            Error.INVALID_PRODUCER_ID_MAPPING,
            "anothers_producer",
            f"ANOTHERS_PRODUCER {where}: producer id {ticket.append.producer_id} is not that of the transactional id",
        )

    def _known_retry(self, ticket: Ticket) -> bool:
        """Answer a retry of a batch that this process has answered, or let it wait for the one in flight."""
        landed = self.memory.retry_of(ticket)
        if landed is not None:
            self._accept(ticket, landed)
            return True
        pending = self._follows(ticket)
        if pending is None:
            return False
        pending.followers.append(ticket)
        return True

    def _follows(self, ticket: Ticket) -> Ticket | None:
        """The earlier attempt of the same batch whose outcome is not known yet."""
        for pending in (*self._in_flight, *self._doubts):
            if (
                pending.producer == ticket.producer
                and pending.append.base_sequence == ticket.append.base_sequence
                and pending.digest == ticket.digest
            ):
                return pending
        return None

    def _doubt_first_try(self, ticket: Ticket, now: float) -> bool:
        """A batch whose last attempt ended unknown: look it up in the log before sending it again."""
        known = self.memory.unresolved(ticket)
        if known is None:
            return False
        ticket.at, ticket.stamp = known
        ticket.sent_before = True
        if ticket.stamp == NO_PRODUCER:
            # Unfenced: neither its offset nor its sender can be found out, and Kafka would append it again.
            self._answer_unknown(ticket, "an earlier attempt, too old to be fenced, may have been appended", now)
            return True
        self._doubt(ticket, min(ticket.deadline, now + self._limits.settle_seconds))
        return True

    def _pending(self) -> tuple[Ticket, ...]:
        """All appends that may have duplicate waiters."""
        return (*self._in_flight, *self._doubts, *self._queue, *self._looking)

    def _withdrawn(self, ticket: Ticket) -> None:
        if ticket is self._granted:
            self._granted = None
            if ticket.attempts:
                self._not_sent_again(ticket)
        elif ticket in self._queue:
            self._queue.remove(ticket)
        elif ticket in self._looking:
            self._looking.remove(ticket)
        else:
            for pending in self._pending():
                if ticket in pending.followers:
                    pending.followers.remove(ticket)
            return
        if ticket.followers:
            # Duplicate waiters: the append had no outcome, so the first of them takes its place.
            heir, *rest = ticket.followers
            ticket.followers.clear()
            heir.followers.extend(rest)
            self._queue.appendleft(heir)

    def _not_sent_again(self, ticket: Ticket) -> None:
        """A and B are sent, Kafka refuses both fences, A cannot be sent again: B must not be appended without A."""
        where = f"topic={self.partition.topic} partition={self.partition.partition}"
        told = PartitionResult(
            partition=self.partition.partition,
            error_code=Error.NOT_LEADER_OR_FOLLOWER,
            error_message=f"TRY_AGAIN an append sent before it was not sent again {where}",
        )
        for other in self._sent_behind(ticket):
            other.behind = sent_behind(other, told)

    def _sent(self, ticket: Ticket, now: float) -> None:
        assert ticket is self._granted, "an append is sent only after it was admitted"
        self._granted = None
        ticket.sent_at = now
        self._sent_count += 1
        ticket.sent_as = self._sent_count  # several may be sent at the same `now`
        ticket.attempts += 1
        self._in_flight.append(ticket)
        if ticket.kind is Kind.OWN and ticket.append.producer_id >= 0 and ticket.stamp is None:
            self.memory.add_own(ticket)
        if ticket.append.transactional:
            # Its marker will take an offset without passing here, so what is known of the log end expires.
            self._warm_until = float("-inf")
            if ticket.transactional_id is not None:
                self._joined(ticket.transactional_id, float("inf"))
                self._producers[ticket.transactional_id] = ticket.append.producer_id
                self._told_to_wait.pop(ticket.append.producer_id, None)

    def _answered(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        if ticket not in self._in_flight:
            return  # resolved from the log meanwhile
        error = result.error_code
        may_be_final = error in MAY_BE_FINAL and result.base_offset == -1
        in_doubt = error in IN_DOUBT or (error != Error.NONE and result.base_offset != -1)
        # Kafka's answer is final for an unconditional append under its own producer id, as without a proxy.
        if in_doubt and not (may_be_final and ticket.kind is Kind.OWN):
            ticket.error_code = error if may_be_final else 0
            self._lost(ticket, now, answered=True)
            return
        self._in_flight.remove(ticket)
        if ticket.transactional_id is not None:
            self._joined(ticket.transactional_id, now)
        if error == Error.NONE:
            if ticket.kind.stamped:
                self._stamped_success(ticket, result, now)
            else:
                self._own_success(ticket, result, now)
        elif ticket.kind.stamped and error in ABOUT_THE_STAMP:
            # Sent once and refused: nothing was appended. Only the log shows why.
            self._go_cold()
            self._again(ticket)
        elif ticket.is_there and error in ABOUT_THE_STAMP:
            # After a restart Kafka knows only the last batch of a producer.
            self._go_cold()
            self._refuse(ticket, offset_mismatch(ticket.append, ticket.actual, self._log_start(), possibly_yours=True))
        else:
            self._go_cold()
            self._answer(ticket, result)

    def _stamped_success(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        assert ticket.at is not None
        assert self._tail is not None
        if result.log_append_time_ms != -1 or ticket.append.max_timestamp_ms < 0:
            # On a LogAppendTime topic every answer has a time. Elsewhere a time marks a duplicate: of the winner of a
            # race, or of an earlier attempt. Or the topic has become a LogAppendTime one. The log decides. An answer
            # without a time is a fresh append, unless the batch has no timestamps: then its duplicate has none either.
            if not self._tail.log_append_time:
                self._go_cold()
            ticket.acknowledged = True
            if ticket.kind is Kind.PLAIN:
                ticket.at = result.base_offset
            self._doubt(ticket, now + self._limits.settle_seconds)
        elif result.base_offset != ticket.at:
            self._landed_elsewhere(ticket, result, now)
        else:
            self._landed_at(ticket, result.log_append_time_ms, result.log_start_offset, now)

    def _own_success(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        self._is_not_queued(ticket)
        conditional = ticket.kind is Kind.OWN_CONDITIONAL
        if ticket.append.transactional and result.log_append_time_ms != -1:
            # A duplicate, or on a LogAppendTime topic possibly a fresh append.
            self._go_cold()
            if not conditional:
                ticket.at = result.base_offset
            self._confirm(ticket, result)
            return
        if conditional and result.base_offset != ticket.at:
            self._landed_elsewhere(ticket, result, now)
            return
        if ticket.stamp == NO_PRODUCER and ticket.append.producer_id >= 0:
            ticket.at = result.base_offset
            self.memory.add(ticket, result.log_append_time_ms)  # Kafka would not recognise a retry
        end = result.base_offset + ticket.append.record_count
        if ticket.append.transactional or self.phase is not Phase.OPEN:
            self._go_cold()
        elif end > self._log_end:
            if result.base_offset != self._log_end and not self._in_flight:
                self._go_cold()  # another writer moved the log, too
            else:
                self._moved_by_own(end, ticket)
        self._answer(ticket, result)

    def _moved_by_own(self, end: int, ticket: Ticket) -> None:
        """The log moved without the fence's sequence: add the difference to the shift."""
        self._shift += end - self._log_end
        self._log_end = end
        self._end_as_of = ticket.sent_at or self._end_as_of

    def _lost(self, ticket: Ticket, now: float, *, answered: bool = False) -> None:
        """The outcome is unknown. `answered`: Kafka has finished with it, so it is in the log or never will be."""
        if ticket in self._in_flight:
            self._in_flight.remove(ticket)
            self._go_cold()
            ticket.unanswered = ticket.unanswered or not answered
            if ticket.transactional_id is not None:
                self._joined(ticket.transactional_id, now if answered else now + self._limits.queued_seconds)
            if not ticket.kind.stamped and not self._kafka_knows_a_duplicate(ticket):
                # A resend might append it twice, after its transaction, or for an unauthorized client. A read proves
                # nothing for a batch without an expected offset.
                why = "Kafka's answer is not conclusive" if answered else "connection to Kafka lost before the answer"
                self._answer_unknown(ticket, why, now, queued=not answered)
            else:
                self._doubt(ticket, now + self._limits.settle_seconds)

    @staticmethod
    def _kafka_knows_a_duplicate(ticket: Ticket) -> bool:
        own = ticket.append.producer_id >= 0 and ticket.stamp is None
        return own and ticket.may_write and not ticket.append.transactional

    def _joined(self, transactional_id: str, believe_from: float) -> None:
        """From `believe_from` on, the coordinator's "not on this partition" counts. Before, it may not know yet."""
        self._transactions[transactional_id] = believe_from
        if len(self._transactions) > self._limits.remembered_producers_max:
            self._forget_transaction(next(iter(self._transactions)))
        self._go_cold()

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
        self._go_cold()

    def _forget_transaction(self, transactional_id: str) -> None:
        del self._transactions[transactional_id]
        self._producers.pop(transactional_id, None)

    def _let_join(self) -> None:
        """Let waiting transactions join once no fenced append is in flight or in doubt. Otherwise the marker could
        shift one that is in flight, or lie where an in-doubt one is looked up. Later grants read the log end first."""
        if not any(ticket.kind.stamped for ticket in (*self._in_flight, *self._doubts)):
            self._effects += [MayJoin(connection) for _, connection in self._joining]
            self._joining = {}

    def _forget(self, *, same_log: bool) -> None:
        if not same_log:
            self.memory.clear()
        self._moves_unfenced()
        for ticket in self._doubts:
            ticket.may_write = False  # the topic may have been recreated, or its ACLs changed

    def _tail_read(self, tail: Tail, now: float) -> None:
        if self.phase is Phase.SETTLING and self._reads_to_resend:
            self._reads_to_resend = False
            self._resend(self._doubts[0], tail, now)
        if self.phase is not Phase.READING:
            return
        if self._read_is_stale:
            self._read_is_stale = False
            self.phase = Phase.COLD
            return
        if tail.log_end_offset < self._log_end:
            # Truncated: forget what was appended above the end.
            self.memory.forget_from(tail.log_end_offset)
        for transactional_id in tail.ended_transactions:
            if self._transactions.get(transactional_id, float("inf")) <= tail.transactions_as_of:
                self._forget_transaction(transactional_id)
        accounted, self._accounted = self._accounted, False
        self._tail = tail
        published_epoch, base = tail.stamp_base
        state = tail.producer_state
        self._log_end = tail.log_end_offset
        self._end_as_of = tail.requested_at
        self._warm_until = float("-inf")
        if self._check is Check.REQUIRED:
            reason = self._stamp_left_behind(tail)
            if reason is not None:
                if accounted and (first := self._first_unstamped(tail)) is not None:
                    self._effects.append(Violation(self.partition, first, log_end_offset=tail.log_end_offset))
                self._publish(tail, reason, now)
                return
            self._epoch, self._shift = published_epoch, base
            self._accounted = True
        elif state is None:
            self._epoch, self._shift = published_epoch, base
        else:
            if state.producer_epoch > max(published_epoch, self._epoch):
                self._report_foreign_epoch(tail)
            self._epoch = state.producer_epoch
            self._shift = (tail.log_end_offset - state.next_sequence) % SEQUENCE_MODULUS
        self.phase = Phase.OPEN

    def _tail_unknown(self, error_code: int | None, now: float) -> None:
        if self.phase is Phase.SETTLING and self._reads_to_resend:
            self._reads_to_resend = False
            self._settle_later(self._doubts[0], now)
        if self.phase is not Phase.READING:
            return
        self.phase = Phase.COLD
        self._retry_at = now + self._limits.read_retry_seconds
        if error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
            while self._queue:
                ticket = self._queue.popleft()
                self._answer(ticket, PartitionResult(ticket.partition.partition, error_code))

    def _tick(self, now: float) -> None:
        why = "the log end could not be read in time"
        if self._awaits_marker(now):
            why = "a transaction marker is being written"
        for ticket in [t for t in self._queue if t.deadline <= now]:
            self._queue.remove(ticket)
            self._answer_later(ticket, why)
        for ticket in [t for t in self._looking if t.deadline <= now]:
            self._looking.remove(ticket)
            if ticket.appended_at is not None:
                self._end_violation(ticket, None)
                continue
            if ticket.said_at is not None:
                self._end_duplicate(ticket, None, now)
                continue
            self._answer_later(ticket, "the record at the expected offset could not be read in time")
        for pending in self._pending():
            for ticket in [t for t in pending.followers if t.deadline <= now]:
                pending.followers.remove(ticket)
                self._answer_unknown(ticket, "an earlier attempt of this batch is still in doubt", now)
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            for ticket in self._looking:
                at = ticket.append.expected_base_offset if ticket.said_at is None else ticket.said_at
                assert at is not None
                self._effects.append(Look(ticket, at))
            if self._settle_again:
                self._settle_first(now)

    # ---- admission

    def _advance(self, now: float) -> None:
        """Admit appends while the head of the queue can proceed."""
        if self._doubts and not self._in_flight and self._granted is None and self.phase in (Phase.COLD, Phase.OPEN):
            self._settle(now)
        while self._queue and self._granted is None and self.phase in (Phase.COLD, Phase.OPEN):
            if self._awaits_marker(now):
                return
            if self._waits_for_what_may_be_queued(self._queue[0], now) and not self._let_others_pass(now):
                return
            if self._doubts or not self._fits_beside_in_flight(self._queue[0], now):
                return
            ticket = self._queue[0]
            if self._predecessor_is_looked_at(ticket):
                return
            if ticket.behind is not None:
                self._queue.popleft()
                self._answer(ticket, ticket.behind, "behind_refused")
            elif ticket.kind.stamped and ticket.append.producer_id >= 0 and self._known_retry(ticket):
                # Its first attempt was still queued here when it came, and has been answered since.
                self._queue.popleft()
            elif ticket.kind is Kind.OWN or ticket.is_there:
                self._grant(ticket)
            elif not self._decide(ticket, now):
                return

    def _waits_for_what_may_be_queued(self, ticket: Ticket, now: float) -> bool:
        """See "Appends that may still be queued" in the module. On `required` topics no append is unfenced."""
        if ticket.check is Check.REQUIRED:
            return False
        if not ticket.taken_over and ticket.append.expected_base_offset is not None:
            return True
        for_own = (
            now < self._own_queued_until
            and ticket.append.expected_base_offset is not None
            and not (ticket.append.transactional and self._only_itself_is_queued(ticket, now))
        )
        for_stamped = now < self._stamped_queued_until and not ticket.kind.stamped
        return for_own or for_stamped

    def _let_others_pass(self, now: float) -> bool:
        """An append that waits for a possibly queued one blocks only its own pipeline. False if no other can pass."""
        held: set[tuple[int, int]] = set()
        for ticket in self._queue:
            if chain_of(ticket) in held or self._waits_for_what_may_be_queued(ticket, now):
                held.add(chain_of(ticket))
            else:
                self._queue.remove(ticket)
                self._queue.appendleft(ticket)
                return True
        return False

    def _predecessor_is_looked_at(self, ticket: Ticket) -> bool:
        """Its predecessor in the pipeline failed and is being looked up; until that ends, it must not be appended."""
        return any(
            other.attempts
            and other.connection == ticket.connection
            and other.append.producer_id == ticket.append.producer_id
            for other in self._looking
        )

    def _fits_beside_in_flight(self, ticket: Ticket, now: float) -> bool:
        if not self._in_flight:
            return True
        if len(self._in_flight) >= self._limits.in_flight_max:
            return False
        if ticket.kind is Kind.OWN:
            return all(other.kind is Kind.OWN for other in self._in_flight)
        # One connection keeps its order, and a lost predecessor makes the successor fail by its sequence. So appends
        # are pipelined, but only while the fence is confirmed and no other instance fences here. Otherwise: 1. This
        # process sends A, B. 2. Another instance's X, with as many records as A, is appended first. 3. Kafka takes A
        # for a duplicate of X. 4. B's sequence fits, so B is appended after X.
        return (
            ticket.kind.stamped
            and ticket.alone
            and self.phase is Phase.OPEN
            and self._warm(ticket, now)
            and all(other.kind.stamped and other.connection == ticket.connection for other in self._in_flight)
        )

    def _decide(self, ticket: Ticket, now: float) -> bool:
        """Admit or end the head of the queue; False if it has to wait."""
        if self.phase is Phase.COLD or not (self._in_flight or self._warm(ticket, now) or self._tail_is_fresh(now)):
            return self._read_tail(now)
        assert self._tail is not None
        if ticket.append.transactional:
            if not self._knows_transaction(ticket, self._tail):
                # The read predates the marker of its producer's last transaction, or an earlier attempt of the append.
                return self._read_tail(now)
            if self._is_anothers_producer(ticket, self._tail):
                self._queue.popleft()
                self._refuse(ticket, self._anothers_producer(ticket))
                return True
        end = self._end_of_all_sent()
        expected = end if ticket.kind is Kind.PLAIN else ticket.append.expected_base_offset
        assert expected is not None
        # Waiting for a marker would not free the offset. It may be a retry of an append in its own transaction.
        passed = ticket.append.transactional and expected < end
        if not passed and self._another_transaction_is_open(ticket, self._tail):
            self._queue.popleft()
            if self._may_not_wait(ticket, self._tail, now):
                self._refuse(ticket, self._transaction_conflict(ticket))
            else:
                self._answer_later(ticket, "a transaction is open on the partition; its marker will take an offset")
            self._go_cold()
            return True
        decided = self._first_try_decides(ticket, end, now)
        if decided is not None:
            return decided
        if expected == end and ticket.append.contradiction is None:
            refusal = self._timestamps(ticket, self._tail, now)
            if refusal is not None and self.memory.unresolved(ticket) and now < self._stamped_queued_until:
                # Its first attempt was fenced and may still be appended, in addition to this one, which would not be
                # fenced.
                self._queue.popleft()
                self._answer_unknown(ticket, "an earlier attempt of this batch may still be appended", now)
                return True
            if refusal is not None and ticket.check is Check.REQUIRED:
                self._queue.popleft()
                self._refuse(ticket, refusal)
                return True
            if refusal is not None:
                self._keep_from_stamping(ticket)
                return True
            self._stamp(ticket, expected, self._tail)
            self._grant(ticket)
            return True
        if self._in_flight:
            return False  # the outcome depends on the appends before it
        if self._end_as_of < ticket.offered_at:
            # The reported `actual` must have been the log end at some moment during this call.
            return self._read_tail(now)
        self._queue.popleft()
        self._mismatch(ticket, expected, end, now)
        return True

    def _first_try_decides(self, ticket: Ticket, end: int, now: float) -> bool | None:
        """For a batch whose first attempt may still be queued in Kafka: as `_decide`; None if that does not matter.

        The log did not have it when it was read. With the same sequence, only one of the two attempts is appended. With
        another sequence both may be, and one may be appended after it was refused.
        """
        known = self.memory.unresolved(ticket)
        if known is None:
            return None
        ticket.sent_before = True  # also if that attempt ended while this one waited here
        if known[0] == end:
            return None
        if self._in_flight:
            return False  # its offset depends on the appends before it
        if end > known[0]:
            # It has been appended since, or another batch has.
            self._queue.popleft()
            self._doubt_first_try(ticket, now)
            if self._doubts:
                self._settle(now)
            return True
        if now < self._stamped_queued_until:
            self._queue.popleft()
            self._answer_unknown(ticket, "an earlier attempt may still be appended after one sent before it", now)
            return True
        self.memory.resolved(ticket)
        return None

    def _end_of_all_sent(self) -> int:
        """The log end once all appends in flight are appended."""
        if not self._in_flight:
            return self._log_end
        last = self._in_flight[-1]
        assert last.at is not None
        return last.at + last.append.record_count

    def _stamp(self, ticket: Ticket, at: int, tail: Tail) -> None:
        ticket.at = at
        if ticket.kind.stamped and self._limits.stamping:
            sequence = (at - self._shift) % SEQUENCE_MODULUS
            ticket.stamp = Stamp(tail.producer_id, self._epoch % self._limits.producer_epochs, sequence, ticket.tag)

    @staticmethod
    def _keep_from_stamping(ticket: Ticket) -> None:
        """On a `true` topic a batch with old timestamps is not fenced: appended unconditionally, or alone."""
        ticket.kind = Kind.OWN if ticket.kind is Kind.PLAIN else Kind.OWN_CONDITIONAL
        if ticket.append.producer_id >= 0:
            ticket.stamp = NO_PRODUCER  # the broker never got this producer's sequences and would find a gap

    def _read_tail(self, now: float) -> bool:
        if self._in_flight or (self._retry_at is not None and now < self._retry_at):
            return False
        self._retry_at = None
        self.phase = Phase.READING
        asked = tuple(self._transactions)
        mine = self._queue[0].transactional_id
        if mine is not None and mine not in self._transactions:
            asked += (mine,)
        self._effects.append(ReadTail(self.partition, asked))
        return False

    def _grant(self, ticket: Ticket) -> None:
        self._queue.popleft()
        self._granted = ticket
        self._effects.append(Grant(ticket))
