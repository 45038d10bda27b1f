"""What only the log can tell: how an append in doubt ended, and whose batch lies where one should be.

Three questions are answered by a look (`Look`) at the offset where an append expected to be:

- *In doubt*: its connection was lost, or its answer says nothing certain. What cannot be proved to be the client's own
  is never called success: a batch in the log is proved by its write-id, or by our stamp with this process's *tag* in it
  and records equal to those that this process sent there. Where nothing lies yet, and the partition still waits for
  just that stamp, the batch is sent again: one of the two lands. The table is at `_settled_by_look`.
- *A mismatch*: its expectation does not hold. Before it is refused: it may be a retry whose first try is there.
- *A violation*: it was appended elsewhere than it expected. The report names who lies where it should be.

Doubts are settled one by one, in order; meanwhile nobody else gets a turn. Those of the other two kinds hold no turn.
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

#: The cause where an append with the same fence sequence lies at the expected offset: Kafka refuses the second one.
FORGOTTEN = (
    "Kafka had forgotten the proxy's producer id and did not compare: producer.id.expiration.ms was lowered, or its "
    "clock was moved"
)
#: Answers to a resend that only say that it cannot be had now.
_FOR_NOW = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.NOT_ENOUGH_REPLICAS,
    }
)


class Settling(Publishing):
    """Phase SETTLING, and those appends of any phase that hold no turn since they are being looked at."""

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
                # Deleted: by now nobody can say what lay there, unless this process remembers.
                there = self.memory.landed.get(expected)
            self._end_mismatch(ticket, there, now, deleted=there is None and gone)

    def _read_landed(self, found: Found, offset: int, ticket: Ticket) -> Landed | None:
        if found.landed_at == offset:
            return found.landed
        return read_landed(found.batch, offset, ticket, self._names, self._limits.decompressed_bytes_max)

    # ---- mismatches: whose batch lies there?

    def _mismatch(self, ticket: Ticket, expected: int, end: int, now: float) -> None:
        """The expectation does not hold. Before it is refused: might it be a retry whose first try is there?"""
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
        """Its transaction is open here and has come past it: so the log has it, at whatever offset. Sent again, it is a
        duplicate, and Kafka says where it lies."""
        if not ticket.append.transactional or self._tail is None:
            return False
        known = self._tail.in_transaction.get(ticket.append.producer_id)
        if known is None or known.producer_epoch != ticket.append.producer_epoch:
            return False
        return 0 < (known.next_sequence - ticket.append.base_sequence) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2

    @staticmethod
    def _is_itself(found: Found, there: Landed, ticket: Ticket) -> bool:
        """Of a transactional batch: it is the one that was found. By its producer's sequence it names itself."""
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
            # It would land behind its refusal: in its producer's next transaction, if that has the same epoch.
            self._answer_later(ticket, "an earlier try of this batch may still be on its way")
        else:
            refusal = offset_mismatch(ticket.append, ticket.actual, self._log_start(), possibly_yours=equal)
            self._refuse(ticket, refusal)

    def _confirm(self, ticket: Ticket, result: PartitionResult) -> None:
        """Kafka says that a batch under its producer's own id is there: this one, or another one with its sequence.

        That may be one of a transaction before, which sat in a broker's queue while that was aborted.
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
                f"({ticket.append.base_sequence}) and other records; abort the transaction and begin a new epoch"
            )
            self._refuse(ticket, Refusal(Error.POLICY_VIOLATION, "sequence_taken", message))
        else:
            self._answer_unknown(ticket, "Kafka has it, but it could not be read back", now, queued=False)

    @staticmethod
    def _names_itself(ticket: Ticket, there: Landed) -> bool:
        return there.write_id is not None and there.write_id == ticket.append.write_id

    # ---- violations: who lies where it should be?

    def _landed_elsewhere(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        assert ticket.at is not None
        self._go_cold()
        if ticket.kind is Kind.PLAIN:
            ticket.at = result.base_offset
            self._accept(ticket, self.memory.add(ticket, result.log_append_time_ms), result.log_start_offset)
            return
        self._accounted = False  # what the next look at the log would find is reported by this
        # The report names who lies where it should be.
        ticket.appended_at = result.base_offset
        ticket.deadline = now + self._limits.violation_seconds
        self._looking.append(ticket)
        self._effects.append(Look(ticket, ticket.at))

    def _end_violation(self, ticket: Ticket, result: LookResult | None) -> None:
        assert ticket.at is not None
        assert ticket.appended_at is not None
        producer_id, is_marker = _producer_of(result)
        if is_marker and (ticket.append.transactional or ticket.seen_to is not None):
            # Of a transaction that had only joined, as it may, or joined when nobody knew any more whether this one
            # would come: nobody writes around the proxy.
            why = "the marker of another transaction came between"
        else:
            forgotten = isinstance(result, Found) and _has_its_sequence(result, ticket)
            why = FORGOTTEN if forgotten else "somebody writes to this partition around the proxy"
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

    # ---- doubts: the log decides

    def _doubt(self, ticket: Ticket, until: float) -> None:
        ticket.settle_until = until
        ticket.seen_to = None
        self._doubts.append(ticket)

    def _settle(self, now: float) -> None:
        """Nothing is in flight or granted."""
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
            # Kafka would find a gap, but only if it knows this producer.
            self._settled(ticket, now)
            self._answer_unknown(ticket, "what was sent before it has failed, or its outcome is not known", now)
        else:
            self._effects.append(Resend(ticket))

    def _settled_by_look(self, ticket: Ticket, result: LookResult, now: float) -> None:
        """One row per thing that can lie at the offset where the in-doubt batch should be.

        | the log has there              | then                                                                  |
        |--------------------------------|-----------------------------------------------------------------------|
        | our stamp, our records, and    |                                                                       |
        | … its write-id                 | success                                                               |
        | … our tag                      | success; but as anything else if its only send was called a duplicate |
        | … another process's tag        | as anything else: that process's client won with an equal batch       |
        | … no tag (the broker wrote the | success if Kafka said 0 (LogAppendTime) or nothing was expected; else |
        | batch anew)                    | 7, "may be yours"                                                     |
        | our stamp, compacted           | 7: whose it was nobody can say                                        |
        | what has another producer id,  | it may lie behind that, or come there yet: look there. An expectation |
        | or a sequence before its own   | did not hold then: a violation if it is found; else 7                 |
        | anything else                  | it can never land: its sequence is taken. Decide anew, as a mismatch  |
        | a batch not replicated yet     | look again until `settle_until`, then 7                               |
        | nothing, and it ends there     | send it again, if the partition waits for this stamp; else 7. If      |
        | … Kafka gave the same error    |                                                                       |
        | to it twice (`MAY_BE_FINAL`)   | that error: it was not appended, and would not be the next time       |
        | nothing, and it ends before    | 7: its predecessor is missing. Should it come, Kafka compares it      |
        | what cannot be read now        | look again until `settle_until`, then 7                               |
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
                    self._answer_unknown(ticket, "another append came before it, and it may still land behind", now)
            case NotYet(log_end) if log_end <= ticket.at and ticket.sent_at is None:
                # Its last try may still be queued in Kafka: see `_first_try_decides` at its turn.
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
                self._answer_unknown(ticket, "what was appended there is no longer readable", now, queued=False)
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
            self._answer_unknown(ticket, "what was appended there is compacted: may be yours", now, queued=False)
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
            # This very send, or an equal batch of another client that won the race through another process.
            self._settled(ticket, now)
            why = "the connection to Kafka was lost; an equal batch lies there: may be yours"
            self._answer_unknown(ticket, why, now, queued=False)
        else:
            self._sequence_is_lost(ticket, now)

    def _look_behind(self, ticket: Ticket, offset: int, now: float) -> None:
        """F, stamped for 10, is sent; before it is appended a transaction's marker takes 10. F's sequence fits all the
        same, and it lies at 11. Taken for lost, it would be appended once more, or called refused.
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
        """Another's batch has it: none of its tries can land any more."""
        self.memory.resolved(ticket)
        self._settled(ticket, now)
        self._decide_anew(ticket)

    @staticmethod
    def _only_send_was_a_duplicate(ticket: Ticket) -> bool:
        timed = ticket.append.max_timestamp_ms >= 0  # else the answer did not say
        return ticket.acknowledged and timed and ticket.kind is not Kind.PLAIN and not ticket.sent_before

    def _is_from_here(self, found: Found, ticket: Ticket, at: int) -> bool | None:
        """Whether this process sent the batch that lies there; None if nothing says so.

        Two clients of one process may each have sent an equal batch there, the first of them told "unknown": the
        one that is told success first has it.
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

    # ---- sent again

    def _may_resend(self, ticket: Ticket) -> bool:
        """Not for a client that may not write here, and not behind a hole in its chain."""
        return ticket.may_write and chain_of(ticket) not in self._holes and self._limits.stamping

    def _may_decide(self, ticket: Ticket) -> bool:
        """Whether the tail is worth reading: to send it again, or since Kafka's answer may be final."""
        return self._may_resend(ticket) or bool(ticket.error_code and ticket.stamp)

    def _resend(self, ticket: Ticket, tail: Tail, now: float) -> None:
        """Nothing lay where the in-doubt batch should be; this is the tail as of after that look.

        As a cold send it is one append alone, soon after the read, and only if log end and next sequence are those
        that it was stamped for: so it lands there, unless its first send, or another's, does.
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
        why = "the connection to Kafka was lost before it answered"
        if ticket.error_code:
            why = f"Kafka's answer, error {ticket.error_code}, does not say"
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
            # Kafka looks at size, time stamps and rights before it looks for duplicates, and forgets all but a
            # producer's last batch when it restarts: no error on a resend says that the first send was not appended.
            self._holes.add(chain_of(ticket))
            self._settled(ticket, now)
            self._answer_unknown(ticket, f"sent again, it was answered error {result.error_code}", now)

    def _resent_stamped(self, ticket: Ticket, result: PartitionResult | None, now: float) -> None:
        appended_now = result is not None and result.error_code == Error.NONE and result.log_append_time_ms == -1
        if ticket.repeated:
            self._settle_first(now)
        elif result is None or not appended_now:
            self._settle_later(ticket, now)  # only the log can tell: one of the sends may lie there, or another's batch
        elif result.base_offset == ticket.at:
            self._landed_at(ticket, result.log_append_time_ms, result.log_start_offset, now)
            self._settled(ticket, now)
        else:
            self._settled(ticket, now)
            self._landed_elsewhere(ticket, result, now)

    # ---- settled, or not yet

    def _settle_later(self, ticket: Ticket, now: float) -> None:
        if now < ticket.settle_until:
            self._settle_again = True
            self._retry_at = now + self._limits.read_retry_seconds
        else:
            self._holes.add(chain_of(ticket))  # before the next one of it is looked at
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
    """It was as long as the ticket's batch, and records of it are gone."""
    header = parse_batch_header(found.batch)
    return header.record_count <= header.last_offset_delta == ticket.append.record_count - 1


def _end_of_what_has_another_sequence(found: Found, ticket: Ticket) -> int | None:
    """Where the batch that was found ends, if the ticket's may follow it; None if it is that one, or has its sequence,
    or one behind it."""
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
    """At the expected offset lies a record with the producer id, epoch and sequence that the ticket was sent with."""
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
    """Whose batch was found there; and whether it is a marker."""
    if not isinstance(result, Found):
        return None, False
    try:
        header = parse_batch_header(result.batch)
    except ProtocolError:
        return None, False
    return header.producer_id, header.is_control
