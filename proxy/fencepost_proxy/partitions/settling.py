"""Resolver: decides from the log how an in-doubt append ended, and which batch lies at an expected offset.

Three cases need a read (`Look`) at the offset where an append was expected:

- *In doubt*: its connection was lost, or its answer is not conclusive. Only a batch proved to be the client's own is
  reported as success. Proof is its write-id, or the fence with this process's *instance id* and the records that this
  process sent there. If the log still ends there and waits for this fence, the batch is sent again: only one of the two
  is appended. The cases are in `_settled_by_look`.
- *Mismatch*: the expectation does not hold. Before it is refused: it may be a retry that is already in the log.
- *Violation*: it was appended at another offset. The report names the producer of the batch at the expected one.

In-doubt appends are resolved one by one, in order, and block all admissions. The other two cases block none.
"""

from __future__ import annotations

from fencepost_policies.append import Check, Refusal
from fencepost_policies.conditional_publish import offset_mismatch
from fencepost_proxy.errors import Error, ProtocolError
from fencepost_proxy.partitions.events import (
    Found,
    Kind,
    Look,
    LookResult,
    NotYet,
    OutOfRange,
    ReadTail,
    Resend,
    Tail,
    Ticket,
    Unreadable,
    Violation,
)
from fencepost_proxy.partitions.gate_state import IN_DOUBT, MAY_BE_FINAL, Phase, chain_of
from fencepost_proxy.partitions.landed import Landed, read_landed
from fencepost_proxy.partitions.publishing import Publishing
from fencepost_proxy.types import SEQUENCE_MODULUS
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.produce import PartitionResult

#: Cause of a violation if the batch at the expected offset has the same fence sequence, which Kafka would refuse.
FORGOTTEN = (
    "Kafka had forgotten the proxy's producer id and did not compare: producer.id.expiration.ms was lowered, or its "
    "clock was moved"
)
#: Answers to a resend that are temporary.
_FOR_NOW = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.NOT_ENOUGH_REPLICAS,
    }
)


class Settling(Publishing):
    """Phase SETTLING, and the appends of any phase that are being looked up without blocking others."""

    def _looked(self, ticket: Ticket, result: LookResult, now: float) -> None:
        if ticket in self._doubts:
            self._settled_by_look(ticket, result, now)
        elif ticket in self._looking:
            if isinstance(result, (NotYet, Unreadable)):
                self._retry_at = now + self._limits.read_retry_seconds
                return
            self._looking.remove(ticket)
            if ticket.appended_at is not None:
                self._end_violation(ticket, result)
                return
            if ticket.said_at is not None:
                self._end_duplicate(ticket, result, now)
                return
            expected = ticket.append.expected_base_offset
            assert expected is not None
            there = self._read_landed(result, expected, ticket) if isinstance(result, Found) else None
            if isinstance(result, Found) and there is not None and self._is_itself(result, there, ticket):
                self._is_not_queued(ticket)
                self._accept(ticket, there)
                return
            gone = isinstance(result, OutOfRange) or (isinstance(result, Found) and _is_compacted(result, ticket))
            if gone:
                # Deleted: only this process's memory can show what lay there.
                there = self.memory.landed.get(expected)
            self._end_mismatch(ticket, there, now, deleted=there is None and gone)

    def _read_landed(self, found: Found, offset: int, ticket: Ticket) -> Landed | None:
        if found.landed_at == offset:
            return found.landed
        return read_landed(found.batch, offset, ticket, self._names, self._limits.decompressed_bytes_max)

    # ---- mismatches: which batch lies there?

    def _mismatch(self, ticket: Ticket, expected: int, end: int, now: float) -> None:
        """The expectation does not hold. Before refusing, check whether it is a retry that is already in the log."""
        ticket.actual = end
        if not 0 <= expected < end or ticket.append.contradiction is not None:
            self._end_mismatch(ticket, None, now)
            return
        ticket.is_there = self._sequence_is_taken(ticket)
        remembered = self.memory.landed.get(expected)
        if remembered is not None and remembered.digest != ticket.digest and not self._names_itself(ticket, remembered):
            self._end_mismatch(ticket, None, now)
            return
        self._looking.append(ticket)
        self._effects.append(Look(ticket, expected))

    def _sequence_is_taken(self, ticket: Ticket) -> bool:
        """Its open transaction here has passed its sequence, so the log has it, at some offset. A resend is a
        duplicate, and Kafka reports the offset."""
        if not ticket.append.transactional or self._tail is None:
            return False
        known = self._tail.in_transaction.get(ticket.append.producer_id)
        if known is None or known.producer_epoch != ticket.append.producer_epoch:
            return False
        return 0 < (known.next_sequence - ticket.append.base_sequence) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2

    @staticmethod
    def _is_itself(found: Found, there: Landed, ticket: Ticket) -> bool:
        """For a transactional batch: whether it is the one found, by its producer's sequence."""
        append = ticket.append
        if not append.transactional or there.digest != ticket.digest:
            return False
        header = parse_batch_header(found.batch)
        return (append.producer_id, append.producer_epoch, append.base_sequence) == (
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
        )

    def _end_mismatch(self, ticket: Ticket, there: Landed | None, now: float, *, deleted: bool = False) -> None:
        if ticket.is_there:
            ticket.at = ticket.append.expected_base_offset
            self._queue.appendleft(ticket)
            return
        equal = deleted or (there is not None and there.digest == ticket.digest)
        if there is not None and equal and self._names_itself(ticket, there):
            self._accept(ticket, there)
        elif self._own_queued_until > now and self._is_queued(ticket, now):
            # It might be appended after its refusal, in its producer's next transaction if that has the same epoch.
            self._answer_later(ticket, "an earlier attempt of this batch may still be queued")
        else:
            refusal = offset_mismatch(ticket.append, ticket.actual, self._log_start(), possibly_yours=equal)
            self._refuse(ticket, refusal)

    def _confirm(self, ticket: Ticket, result: PartitionResult) -> None:
        """Kafka reports that a batch under its own producer id is there: this one, or another with its sequence.

        That may be one of an earlier transaction that waited in a broker's queue while its transaction was aborted.
        """
        ticket.said_at = result.base_offset
        self._looking.append(ticket)
        self._effects.append(Look(ticket, result.base_offset))

    def _end_duplicate(self, ticket: Ticket, result: LookResult | None, now: float) -> None:
        at, ticket.said_at = ticket.said_at, None
        assert at is not None
        there = self._read_landed(result, at, ticket) if isinstance(result, Found) else None
        if isinstance(result, Found) and there is not None and self._is_itself(result, there, ticket):
            self._is_not_queued(ticket)
            if at == ticket.at:
                self._accept(ticket, there)
            else:
                self._landed_elsewhere(ticket, PartitionResult(ticket.partition.partition, Error.NONE, at), now)
        elif isinstance(result, Found):
            where = f"topic={self.partition.topic} partition={self.partition.partition}"
            message = (
                f"SEQUENCE_TAKEN {where} offset={at}: an earlier batch of this producer has its sequence number "
                f"({ticket.append.base_sequence}) and other records (abort the transaction and begin a new epoch)"
            )
            self._refuse(ticket, Refusal(Error.POLICY_VIOLATION, "sequence_taken", message))
        else:
            self._answer_unknown(
                ticket, "Kafka reports it as a duplicate, but it could not be read back", now, queued=False
            )

    @staticmethod
    def _names_itself(ticket: Ticket, there: Landed) -> bool:
        return there.write_id is not None and there.write_id == ticket.append.write_id

    # ---- violations: which batch lies at the expected offset?

    def _landed_elsewhere(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        assert ticket.at is not None
        self._go_cold()
        if ticket.kind is Kind.PLAIN:
            ticket.at = result.base_offset
            self._accept(ticket, self.memory.add(ticket, result.log_append_time_ms), result.log_start_offset)
            return
        self._accounted = False  # this report covers what the next read of the log would find
        ticket.appended_at = result.base_offset
        ticket.deadline = now + self._limits.violation_seconds
        self._looking.append(ticket)
        self._effects.append(Look(ticket, ticket.at))

    def _end_violation(self, ticket: Ticket, result: LookResult | None) -> None:
        assert ticket.at is not None
        assert ticket.appended_at is not None
        producer_id, is_marker = _producer_of(result)
        if is_marker and (ticket.append.transactional or ticket.seen_to is not None):
            # Of a transaction that had only joined, as allowed, or joined after this append's outcome became unknown:
            # no writer bypasses the proxy.
            why = "the marker of another transaction came between"
        else:
            forgotten = isinstance(result, Found) and _has_its_sequence(result, ticket)
            why = FORGOTTEN if forgotten else "a client bypasses the proxy and writes to this partition"
            self._effects.append(
                Violation(self.partition, ticket.at, ticket.appended_at, producer_id=producer_id, forgotten=forgotten)
            )
        message = (
            f"OFFSET_VIOLATION topic={self.partition.topic} partition={self.partition.partition} "
            f"expected={ticket.at} appended_at={ticket.appended_at} "
            f"producer_id={'unknown' if producer_id is None else producer_id}: {why}"
        )
        refusal = Refusal(Error.POLICY_VIOLATION, "offset_violation", message, ticket.appended_at)
        self.memory.add_violation(ticket, refusal)
        self._refuse(ticket, refusal)

    # ---- in-doubt appends

    def _doubt(self, ticket: Ticket, until: float) -> None:
        ticket.settle_until = until
        ticket.seen_to = None
        self._doubts.append(ticket)

    def _settle(self, now: float) -> None:
        """No append is in flight or admitted."""
        self.phase = Phase.SETTLING
        self._clean = True
        self._holes.clear()
        self._settle_first(now)

    def _settle_first(self, now: float) -> None:
        self._settle_again = False
        ticket = self._doubts[0]
        if ticket.kind.stamped:
            at = ticket.at if ticket.seen_to is None else ticket.seen_to
            assert at is not None
            self._effects.append(Look(ticket, at))
        elif ticket.behind is not None or chain_of(ticket) in self._holes:
            # Kafka would find the gap, but only if it knows this producer.
            self._settled(ticket, now)
            self._answer_unknown(ticket, "an append sent before it failed or has an unknown outcome", now)
        else:
            self._effects.append(Resend(ticket))

    def _settled_by_look(self, ticket: Ticket, result: LookResult, now: float) -> None:
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
        | a batch not replicated yet     | read again until `settle_until`, then 7                               |
        | nothing, and it ends there     | send it again if the partition waits for this fence; else 7           |
        | … Kafka gave the same error    |                                                                       |
        | to it twice (`MAY_BE_FINAL`)   | that error: it was not appended, and would not be next time           |
        | nothing, and it ends before    | 7: its predecessor is missing. If that arrives, Kafka compares it     |
        | unreadable now                 | read again until `settle_until`, then 7                               |
        """
        assert ticket.at is not None
        match result:
            case Found():
                self._settled_by_what_is_there(ticket, result, now)
            case NotYet(log_end) if ticket.seen_to is not None and log_end <= ticket.seen_to:
                if ticket.sent_at is None and now >= self._stamped_queued_until:
                    self._sequence_is_lost(ticket, now)
                else:
                    self._settled(ticket, now)
                    self._answer_unknown(
                        ticket, "another append came first, and it may still be appended after that", now
                    )
            case NotYet(log_end) if log_end <= ticket.at and ticket.sent_at is None:
                # Its last attempt may still be queued in Kafka: `_first_try_decides` handles it.
                self._settled(ticket, now)
                self._decide_anew(ticket)
            case NotYet(log_end) if log_end == ticket.at and self._may_decide(ticket):
                self._reads_to_resend = True
                self._effects.append(ReadTail(self.partition))
            case NotYet(log_end) if log_end <= ticket.at:
                self._settled(ticket, now)
                self._answer_in_doubt(ticket, now)
            case OutOfRange():
                self._settled(ticket, now)
                self._answer_unknown(
                    ticket, "the record at the expected offset is no longer readable", now, queued=False
                )
            case _:
                self._settle_later(ticket, now)

    def _settled_by_what_is_there(self, ticket: Ticket, found: Found, now: float) -> None:
        behind = _end_of_what_has_another_sequence(found, ticket)
        if behind is not None:
            self._look_behind(ticket, behind, now)
            return
        at = ticket.at if ticket.seen_to is None else ticket.seen_to
        assert at is not None
        there = self._read_landed(found, at, ticket)
        if self._is_stamp(found, ticket) and _is_compacted(found, ticket):
            self._settled(ticket, now)
            self._answer_unknown(
                ticket, "the record at the expected offset is compacted: may be yours", now, queued=False
            )
            return
        if there is None or there.digest != ticket.digest or not self._is_stamp(found, ticket):
            self._sequence_is_lost(ticket, now)
            return
        named = self._names_itself(ticket, there)
        mine = self._is_from_here(found, ticket, at)
        if mine is None and ticket.kind is Kind.PLAIN:
            mine = True
        elif ticket.acknowledged and parse_batch_header(found.batch).is_log_append_time:
            mine = mine is not False
        elif self._only_send_was_a_duplicate(ticket):
            mine = False
        if (named or mine) and ticket.seen_to is not None:
            self._settled(ticket, now)
            self._landed_elsewhere(ticket, PartitionResult(ticket.partition.partition, Error.NONE, at), now)
        elif named or mine:
            self._landed_at(ticket, there.log_append_time_ms, self._log_start(), now)
            self._settled(
                ticket, now, clean=ticket.acknowledged and self._tail is not None and self._tail.log_append_time
            )
        elif mine is None:
            # This send, or an equal batch of another client that won the race through another instance.
            self._settled(ticket, now)
            why = "connection to Kafka lost, and an equal batch is at the expected offset: may be yours"
            self._answer_unknown(ticket, why, now, queued=False)
        else:
            self._sequence_is_lost(ticket, now)

    def _look_behind(self, ticket: Ticket, offset: int, now: float) -> None:
        """Search for the batch after `offset`.

        1. F, fenced for 10, is sent. 2. A transaction marker takes 10. 3. F's sequence still fits: it is appended at
        11. If F were taken for lost, it would be appended again, or refused although it is in the log.
        """
        if ticket.kind is Kind.PLAIN:
            ticket.at = offset
            if ticket.sent_before:
                self.memory.add_unresolved(ticket)
        else:
            ticket.seen_to = offset
        if now < ticket.settle_until:
            self._settle_first(now)
        else:
            self._settle_later(ticket, now)

    def _sequence_is_lost(self, ticket: Ticket, now: float) -> None:
        """Another batch used the sequence: none of its attempts can be appended any more."""
        self.memory.resolved(ticket)
        self._settled(ticket, now)
        self._decide_anew(ticket)

    @staticmethod
    def _only_send_was_a_duplicate(ticket: Ticket) -> bool:
        timed = ticket.append.max_timestamp_ms >= 0  # otherwise the answer does not show it
        return ticket.acknowledged and timed and ticket.kind is not Kind.PLAIN and not ticket.sent_before

    def _is_from_here(self, found: Found, ticket: Ticket, at: int) -> bool | None:
        """Whether this process sent the batch at `at`; None if the log does not show it.

        Two clients of this process may have sent equal batches there, the first of them answered "unknown". The batch
        belongs to the one that is answered success first.
        """
        if at in self.memory.landed:
            return False
        tag = parse_batch_header(found.batch).tag
        if not tag or ticket.stamp is None or not ticket.stamp.tag:
            return None
        return tag == ticket.stamp.tag

    @staticmethod
    def _is_stamp(found: Found, ticket: Ticket) -> bool:
        header = parse_batch_header(found.batch)
        stamp = ticket.stamp
        return stamp is not None and (stamp.producer_id, stamp.producer_epoch, stamp.base_sequence) == (
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
        )

    def _decide_anew(self, ticket: Ticket) -> None:
        self._holes.add(chain_of(ticket))
        if ticket.sent_at is None:  # a retry that only had to be looked up first
            ticket.at = ticket.stamp = None
            ahead = sum(1 for each in self._queue if each.offered_as < ticket.offered_as)
            self._queue.insert(ahead, ticket)
        else:
            self._again(ticket)

    # ---- resend

    def _may_resend(self, ticket: Ticket) -> bool:
        """Not for a client without write access, and not after a gap in its pipeline."""
        return ticket.may_write and chain_of(ticket) not in self._holes and self._limits.stamping

    def _may_decide(self, ticket: Ticket) -> bool:
        """Whether to read the log end: for a resend, or because Kafka's answer may be final."""
        return self._may_resend(ticket) or bool(ticket.error_code and ticket.stamp)

    def _resend(self, ticket: Ticket, tail: Tail, now: float) -> None:
        """No batch lay at the in-doubt append's offset; `tail` is the log-end snapshot after that read.

        As with an unconfirmed fence it is one append alone, soon after the read, and only if log end and next sequence
        are those that it was fenced for. So it is appended there, unless its first send, or another batch, is.
        """
        assert ticket.at is not None
        assert ticket.stamp is not None
        stamp, state = ticket.stamp, tail.producer_state
        if tail.log_end_offset != ticket.at:
            self._settle_later(ticket, now)
            return
        epochs = self._limits.producer_epochs
        epoch = tail.stamp_base[0] // epochs * epochs + stamp.producer_epoch
        next_sequence = stamp.base_sequence
        if state is not None:
            same_epoch = state.producer_epoch == epoch
            next_sequence = state.next_sequence if same_epoch else 0 if state.producer_epoch < epoch else -1
        unmoved = next_sequence == stamp.base_sequence and tail.producer_id == stamp.producer_id
        again = self._may_resend(ticket)
        if unmoved and ticket.error_code and (ticket.repeated or not again):
            self._settled(ticket, now)
            if ticket.unanswered or ticket.sent_before:
                self._answer_in_doubt(ticket, now)
            else:
                self._answer(ticket, PartitionResult(ticket.partition.partition, ticket.error_code))
            return
        fits = (
            unmoved
            and (ticket.check is not Check.REQUIRED or tail.stamp_base[0] == epoch)
            and not self._another_transaction_is_open(ticket, tail)
            and self._timestamps(ticket, tail, now) is None
            and now <= tail.requested_at + self._limits.cold_send_seconds
        )
        if fits and again:
            self._tail = tail
            self._effects.append(Resend(ticket))
        else:
            self._settled(ticket, now)
            self._answer_in_doubt(ticket, now)

    def _answer_in_doubt(self, ticket: Ticket, now: float) -> None:
        queued = ticket.unanswered or ticket.sent_before or not ticket.error_code
        why = "connection to Kafka lost before the answer"
        if ticket.error_code:
            why = f"Kafka's answer, error {ticket.error_code}, is not conclusive"
        self._answer_unknown(ticket, why, now, queued=queued)

    def _resent(self, ticket: Ticket, result: PartitionResult | None, now: float) -> None:
        if ticket not in self._doubts:
            return
        if result is None:
            ticket.unanswered = True
        shows_nothing = result is not None and result.error_code in MAY_BE_FINAL and result.base_offset == -1
        error_code = result.error_code if result is not None and shows_nothing else 0
        ticket.repeated = shows_nothing and error_code == ticket.error_code
        ticket.error_code = error_code
        if ticket.kind.stamped:
            self._resent_stamped(ticket, result, now)
        elif result is not None and result.error_code == Error.NONE:
            self._is_not_queued(ticket)
            self._settled(ticket, now)
            self._answer(ticket, result)
        elif result is None or result.error_code in (IN_DOUBT - MAY_BE_FINAL) | _FOR_NOW:
            self._settle_later(ticket, now)
        else:
            # Kafka checks size, timestamps and ACLs before duplicates, and after a restart knows only a producer's last
            # batch. So no error on a resend proves that the first send was not appended.
            self._holes.add(chain_of(ticket))
            self._settled(ticket, now)
            self._answer_unknown(ticket, f"the resend was answered with error {result.error_code}", now)

    def _resent_stamped(self, ticket: Ticket, result: PartitionResult | None, now: float) -> None:
        appended_now = result is not None and result.error_code == Error.NONE and result.log_append_time_ms == -1
        if ticket.repeated:
            self._settle_first(now)
        elif result is None or not appended_now:
            self._settle_later(ticket, now)  # one of the sends may lie there, or another's batch
        elif result.base_offset == ticket.at:
            self._landed_at(ticket, result.log_append_time_ms, result.log_start_offset, now)
            self._settled(ticket, now)
        else:
            self._settled(ticket, now)
            self._landed_elsewhere(ticket, result, now)

    # ---- resolved, or retry later

    def _settle_later(self, ticket: Ticket, now: float) -> None:
        if now < ticket.settle_until:
            self._settle_again = True
            self._retry_at = now + self._limits.read_retry_seconds
        else:
            self._holes.add(chain_of(ticket))  # before the next one of its pipeline is read
            self._settled(ticket, now)
            self._answer_unknown(ticket, "the outcome could not be read from the log in time", now)

    def _settled(self, ticket: Ticket, now: float, *, clean: bool = False) -> None:
        self._doubts.remove(ticket)
        self._clean = self._clean and clean
        if self._doubts:
            self._settle_first(now)
        elif self._clean:
            self.phase = Phase.OPEN
        else:
            self.phase = Phase.COLD
            self._go_cold()


def _is_compacted(found: Found, ticket: Ticket) -> bool:
    """It was as long as the append's batch, and some of its records are deleted."""
    header = parse_batch_header(found.batch)
    return header.record_count <= header.last_offset_delta == ticket.append.record_count - 1


def _end_of_what_has_another_sequence(found: Found, ticket: Ticket) -> int | None:
    """End of the found batch, if the append may follow it; None if it is that append, or has its sequence or a later
    one."""
    header, stamp = parse_batch_header(found.batch), ticket.stamp
    if stamp is None:
        return None
    end = header.base_offset + header.last_offset_delta + 1
    if header.producer_id != stamp.producer_id:
        return end
    if header.producer_epoch != stamp.producer_epoch:
        return end if header.producer_epoch < stamp.producer_epoch else None
    ahead = (stamp.base_sequence - header.base_sequence) % SEQUENCE_MODULUS
    return end if header.last_offset_delta < ahead < SEQUENCE_MODULUS // 2 else None


def _has_its_sequence(found: Found, ticket: Ticket) -> bool:
    """Whether the record at the expected offset has the append's producer id, epoch and sequence."""
    header, stamp = parse_batch_header(found.batch), ticket.stamp
    if stamp is None or ticket.at is None:
        return False
    sequence = (header.base_sequence + ticket.at - header.base_offset) % SEQUENCE_MODULUS
    return (header.producer_id, header.producer_epoch, sequence) == (
        stamp.producer_id,
        stamp.producer_epoch,
        stamp.base_sequence,
    )


def _producer_of(result: LookResult | None) -> tuple[int | None, bool]:
    """Producer id of the batch found there, and whether it is a marker."""
    if not isinstance(result, Found):
        return None, False
    try:
        header = parse_batch_header(result.batch)
    except ProtocolError:
        return None, False
    return header.producer_id, header.is_control
