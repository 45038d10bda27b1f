"""The gate of one guarded partition: where its appends wait their turn, and how each of them ends.

Sans-IO: events in, effects out, no clock of its own (every event carries `now`). One object per partition and
process; `session/` asks it for turns, `net/` does the reading that it asks for.

The idea
--------
Kafka compares for us. A conditional batch is *stamped*: it is appended under one producer id that all proxy processes
of a cluster share, with its expected offset as its sequence, `sequence = (expected - shift) mod 2^31`. Kafka appends
only the next sequence of a producer, atomically, so a batch whose expectation no longer holds is refused by the broker
itself (45), even if it sat in a queue while its connection died and other appends went past it. `shift` is the number
of offsets that were not stamped: 0, or the published base, on `required` topics; counted by this process on `true`
ones. Three things this file must get right, and each rule below exists because its absence accepted a batch at the
wrong place or called a lost one safe:

1. *Cold partitions.* A broker that does not know the producer id accepts any first sequence. So a stamp is trusted only
   while **warm**: after an acknowledged stamped append of this process, in that leader epoch, on connections from
   before it, for half of `producer.id.expiration.ms`. Cold:
   read the log end and the producer's state first, and send one append, alone, soon after the read.
2. *Doubt.* An error or an acknowledgement says something only about a batch that was sent once and answered on that
   connection. A lost connection, 7, 20, or any error beside a base offset leaves the batch **in doubt**: nothing but
   the log decides, read at the expected offset. What cannot be proved to be the client's own is never called success:
   a batch in the log is proved by its write-id, or by our stamp with this process's *tag* in it and records equal to
   those that this process sent there. Where nothing lies yet, and the partition still waits for just that stamp, the
   batch is sent again: one of the two lands.
3. *Another's success.* For Kafka an equal sequence range is a duplicate whatever its content: the loser of a race may
   be told 0 with the winner's offset. Such an answer carries a log append time on a CreateTime topic; on a
   LogAppendTime topic nothing tells it apart, so there every 0 is read back.

What an append is here (`Kind`)
-------------------------------
CONDITIONAL      has an expectation, not transactional. Stamped. Turns: one connection at a time, pipelined while warm.
PLAIN            no expectation; not idempotent, or its producer was stamped before. Stamped with wherever the log ends.
OWN              no expectation; idempotent or transactional: keeps its producer id. Shares the turn with other OWN.
OWN_CONDITIONAL  transactional with an expectation: keeps its producer id. Alone, after a read of the log end.

Phases
------
COLD        nothing known. A ticket that needs the log end starts READING.
READING     log end and producer state were asked for. They came: OPEN, or PUBLISHING; could not be read: COLD.
PUBLISHING  `required` only: the log moved without the stamp, so a new base is being agreed on. Stored: COLD.
OPEN        log end, shift and epoch known. A doubt leads to SETTLING once nothing is in flight; a surprise to COLD.
SETTLING    in-doubt appends are looked up in the log, in order. All settled: COLD; OPEN if it only confirmed them.

What may still be queued
------------------------
An append that ended unknown may sit in a broker's queue and land later. Where all are stamped that is harmless: it
lands where it expected, or never. Beside unstamped appends (`true` topics) it is not: a stamped one that waits at 5
lands at 6 if an OWN append moved the log meanwhile, since the stamp's sequence did not move. So, for as long as a
request may be expected to wait there (`queued_seconds`), OWN appends wait for what is stamped, unless a later stamp was
acknowledged, and conditional ones wait for what is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto

from fencepost_policies.append import Check, Facts, Refusal
from fencepost_policies.conditional_publish import ConditionalPublish, offset_mismatch
from fencepost_proxy.errors import Error, ProtocolError
from fencepost_proxy.partitions.events import (
    NO_PRODUCER,
    Answer,
    Answered,
    BasePublished,
    Effect,
    Event,
    Forget,
    Found,
    GateLimits,
    Grant,
    Kind,
    Look,
    Looked,
    LookResult,
    Lost,
    NotYet,
    Offered,
    OutOfRange,
    PublishBase,
    ReadTail,
    Resend,
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
    Unreadable,
    Violation,
    Withdrawn,
)
from fencepost_proxy.partitions.memory import Landed, Memory, same_write
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition
from fencepost_proxy.wire.batch import HeaderNames, digest_batch, parse_batch_header, scan_batch
from fencepost_proxy.wire.produce import PartitionResult


class Phase(Enum):
    COLD = auto()
    READING = auto()
    PUBLISHING = auto()
    OPEN = auto()
    SETTLING = auto()


#: After these the batch may be in the log although the answer is an error.
_IN_DOUBT = frozenset(
    {
        Error.UNKNOWN_SERVER_ERROR,
        Error.REQUEST_TIMED_OUT,
        Error.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        Error.KAFKA_STORAGE_ERROR,
        13,  # NETWORK_EXCEPTION
    }
)
#: Answers to a stamped batch that speak of the stamp, not of the client's batch: read the log and decide anew.
_ABOUT_THE_STAMP = frozenset(
    {
        Error.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Error.INVALID_PRODUCER_EPOCH,
        Error.UNKNOWN_PRODUCER_ID,
        90,  # PRODUCER_FENCED
    }
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
_SENT_BEHIND = "SENT_BEHIND_A_FAILED_BATCH"
_POLICY = ConditionalPublish()
_FACTS = {check: Facts(check_expected_offsets=check) for check in Check}
_NAMES = HeaderNames()


class Gate:
    """One guarded partition. See the module's docstring; `handle` is the only way in."""

    def __init__(self, partition: TopicPartition, limits: GateLimits, names: HeaderNames = _NAMES) -> None:
        self.partition = partition
        self.phase = Phase.COLD
        self._limits = limits
        self._names = names
        self._queue: deque[Ticket] = deque()
        self._granted: Ticket | None = None  # granted, not yet sent
        self._in_flight: deque[Ticket] = deque()
        self._doubts: deque[Ticket] = deque()
        self._sent_count = 0
        self._looking: list[Ticket] = []  # mismatches whose offset is being looked at; they hold no turn
        self._retry_at: float | None = None
        self._effects: list[Effect] = []
        # Known while OPEN.
        self._tail: Tail | None = None
        self._log_end = -1
        self._end_as_of = float("-inf")  # the log end was true at some moment after this
        self._shift = 0
        self._epoch = 0
        self._warm_until = float("-inf")
        self._warm_since = float("-inf")
        self._warm_epoch = -1
        # Remembered whatever the phase.
        self.memory = Memory(limits)
        self._transactions: dict[str, float] = {}  # that have joined: from when their coordinator's word counts
        self._stamped_queued_until = float("-inf")
        self._stamped_queued_to = -1  # the log end that the last of them would make
        self._own_queued_until = float("-inf")
        self._check = Check.ON
        self._clean = True  # every doubt being settled was acknowledged and only had to be confirmed
        self._read_is_stale = False
        self._settle_again = False  # the first doubt is to be looked at again at `_retry_at`
        self._reads_to_resend = False  # SETTLING, and the tail was asked for
        self._foreign: Tail | None = None  # PUBLISHING, since the partition knows an epoch that this process does not
        self._holes: set[tuple[int, int]] = set()  # chains of which a batch was not found where it should be
        self._accounted = False  # every append up to `_log_end` passed a gate, as far as this one knows
        self._last_refusal: str | None = None

    # ---- what others may look at

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is on its way: no ticks needed, and dropping the gate costs only a cold start."""
        return not (self._queue or self._granted or self._in_flight or self._doubts or self._looking)

    @property
    def in_transaction(self) -> bool:
        """It knows of a transaction here that may not be over, which nobody else could tell it again."""
        return bool(self._transactions)

    @property
    def log_end_offset(self) -> int | None:
        return self._log_end if self.phase is Phase.OPEN else None

    @property
    def shift(self) -> int:
        return self._shift

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def last_refusal(self) -> str | None:
        return self._last_refusal

    def may_send(self, ticket: Ticket, now: float) -> bool:
        """Whether a grant still holds: a cold one is good for a short time only (it was read, not yet compared)."""
        if ticket is not self._granted or ticket.behind is not None:
            return False
        if not ticket.kind.stamped and ticket.kind is not Kind.OWN_CONDITIONAL:
            return True
        return self._warm(ticket, now) or self._tail_is_fresh(now)

    # ---- the only way in

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
            case TransactionJoins(transactional_id):
                self._joined(transactional_id, float("inf"))
            case TransactionJoined(transactional_id, answered):
                self._joined(transactional_id, now if answered else now + self._limits.queued_seconds)
            case BasePublished(ok, ours):
                self._base_published(ok, ours, now)
            case Tick():
                self._tick(now)
            case Forget():
                self._forget()
        self._advance(now)
        # Given away: the last batch must not stay in memory until the partition's next one.
        effects, self._effects = self._effects, []
        return effects

    # ---- the short way: an append where nothing is unusual, in two calls instead of five events

    def take(self, ticket: Ticket, now: float) -> bool:
        """`Offered`, its `Grant` and `Sent` in one: True, send it now. False: nothing has happened; offer it."""
        if self._queue or self._granted or self._doubts or self._looking:
            return False
        append = ticket.append
        if append.transactional or _POLICY.check(append, _FACTS[ticket.check]) is not None:
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
        """What `_decide` comes to for a stamped append that fits; False for anything else."""
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
        """`Answered` with the success that was due, and its `Answer`. None: nothing has happened; tell it."""
        if self._queue or self._granted or self._doubts or self._looking or ticket.followers:
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
        self._check = ticket.check
        if ticket.kind.stamped and ticket.append.producer_id >= 0:
            self.memory.note_stamped(ticket)
        refusal = None
        if ticket.append.transactional and ticket.check is Check.REQUIRED:
            refusal = self._no_transactions(ticket)
        if refusal is None:
            refusal = _POLICY.check(ticket.append, _FACTS[ticket.check])
        if refusal is None:
            refusal = self.memory.violation_of(ticket)
        if refusal is not None:
            self._refuse(ticket, refusal)
            return
        for other in self._looking:
            if other.appended_at is not None and same_write(other, ticket):
                other.followers.append(ticket)  # its first try landed elsewhere, and is about to be told so
                return
        # A retry is known before anything is compared: its first try moved the log end itself.
        if ticket.kind.stamped and ticket.append.producer_id >= 0 and self._known_retry(ticket):
            return
        if self._is_unresolved(ticket):
            self._doubt(ticket, min(ticket.deadline, now + self._limits.settle_seconds))
            return
        if len(self._queue) >= self._limits.queue_max:
            self._answer_later(ticket, "the gate's queue is full")
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
            # The sequences of its conditional batches never reached the broker, appended or refused: behind them its
            # unconditional ones would meet a gap (45). So the gate goes on stamping them, and does Kafka's
            # deduplication itself.
            return Kind.PLAIN
        return Kind.OWN

    @staticmethod
    def _no_transactions(ticket: Ticket) -> Refusal:
        """A transaction keeps its own producer id and its marker moves the log: neither moves the stamp's sequence."""
        where = f"topic={ticket.partition.topic} partition={ticket.partition.partition}"
        return Refusal(
            Error.POLICY_VIOLATION,
            "transactions_not_guarded",
            f"TRANSACTIONS_NOT_GUARDED {where}: this topic has check.expected.offsets=required, which transactions "
            "cannot keep; set it to true to mix transactional and conditional appends",
        )

    def _known_retry(self, ticket: Ticket) -> bool:
        """Answers a batch that this process already has an answer, or a pending send, for."""
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
        """The earlier try of the same batch whose outcome is not known yet."""
        for pending in (*self._in_flight, *self._doubts):
            if (
                pending.producer == ticket.producer
                and pending.append.base_sequence == ticket.append.base_sequence
                and pending.digest == ticket.digest
            ):
                return pending
        return None

    def _is_unresolved(self, ticket: Ticket) -> bool:
        """A batch whose last try ended unknown: look where that should be before it goes again."""
        known = self.memory.unresolved(ticket)
        if known is None:
            return False
        ticket.at, ticket.stamp = known
        ticket.sent_before = True
        return True

    def _pending(self) -> tuple[Ticket, ...]:
        """All that others may follow."""
        return (*self._in_flight, *self._doubts, *self._queue, *self._looking)

    def _withdrawn(self, ticket: Ticket) -> None:
        if ticket is self._granted:
            self._granted = None
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
            # Retries that waited for its outcome: nothing became of it, so the first of them takes its place.
            heir, *rest = ticket.followers
            ticket.followers.clear()
            heir.followers.extend(rest)
            self._queue.appendleft(heir)

    def _sent(self, ticket: Ticket, now: float) -> None:
        assert ticket is self._granted, "a ticket is sent only on its grant"
        self._granted = None
        ticket.sent_at = now
        self._sent_count += 1
        ticket.sent_as = self._sent_count  # several may be sent at one moment
        ticket.attempts += 1
        self._in_flight.append(ticket)
        if ticket.kind is Kind.OWN and ticket.append.producer_id >= 0 and ticket.stamp is None:
            self.memory.add_own(ticket)
        if ticket.append.transactional:
            # Its marker will take an offset without passing here: nothing known of the end outlives it.
            self._warm_until = float("-inf")
            if ticket.transactional_id is not None:
                self._joined(ticket.transactional_id, float("inf"))

    def _answered(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        if ticket not in self._in_flight:
            return  # settled otherwise meanwhile: the log has decided
        error = result.error_code
        if error in _IN_DOUBT or (error != Error.NONE and result.base_offset != -1):
            self._lost(ticket, now)
            return
        self._in_flight.remove(ticket)
        if ticket.transactional_id is not None:
            self._joined(ticket.transactional_id, now)
        if error == Error.NONE:
            if ticket.kind.stamped:
                self._stamped_success(ticket, result, now)
            else:
                self._own_success(ticket, result, now)
        elif ticket.kind.stamped and error in _ABOUT_THE_STAMP:
            # Sent once and refused: nothing was appended. Why, only a fresh look at the log can tell.
            self._go_cold()
            self._again(ticket)
        else:
            self._go_cold()
            self._answer(ticket, result)

    def _stamped_success(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        assert ticket.at is not None
        assert self._tail is not None
        if result.log_append_time_ms != -1 or ticket.append.max_timestamp_ms < 0:
            # On a LogAppendTime topic no answer tells a fresh append from a duplicate. On another one this is a
            # duplicate: Kafka takes an equal sequence range for one, so the winner of a race lies there, or an earlier
            # try of this batch – or the topic has become a LogAppendTime one. What lies there tells. An answer
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

    def _landed_at(self, ticket: Ticket, log_append_time_ms: int, log_start_offset: int, now: float) -> None:
        self._accept(ticket, self._note_landed(ticket, log_append_time_ms, now), log_start_offset)

    def _note_landed(self, ticket: Ticket, log_append_time_ms: int, now: float) -> Landed:
        assert ticket.at is not None
        landed = self.memory.add(ticket, log_append_time_ms)
        if self._tail is not None and self.phase in (Phase.OPEN, Phase.SETTLING):
            self._log_end = max(self._log_end, ticket.at + ticket.append.record_count)
            # The log ended behind it when it was appended: by this send, if Kafka says so. If it was found in the log,
            # that may have been long ago.
            self._end_as_of = float("-inf") if ticket in self._doubts or ticket.sent_at is None else ticket.sent_at
            self._warm_until = now + self._tail.expiration_seconds / 2
            self._warm_since, self._warm_epoch = now, ticket.leader_epoch
        if ticket.at + ticket.append.record_count >= self._stamped_queued_to:
            self._stamped_queued_until = float("-inf")  # its sequence is taken now
        return landed

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
        producer_id = _producer_id(result)
        self._effects.append(Violation(self.partition, ticket.at, ticket.appended_at, producer_id=producer_id))
        message = (
            f"OFFSET_VIOLATION topic={self.partition.topic} partition={self.partition.partition} "
            f"expected={ticket.at} appended_at={ticket.appended_at} "
            f"producer_id={'unknown' if producer_id is None else producer_id}: "
            "somebody writes to this partition around the proxy"
        )
        refusal = Refusal(Error.POLICY_VIOLATION, "offset_violation", message, ticket.appended_at)
        self.memory.add_violation(ticket, refusal)
        self._refuse(ticket, refusal)

    def _own_success(self, ticket: Ticket, result: PartitionResult, now: float) -> None:
        if ticket.kind is Kind.OWN_CONDITIONAL and result.base_offset != ticket.at:
            self._landed_elsewhere(ticket, result, now)
            return
        end = result.base_offset + ticket.append.record_count
        if ticket.append.transactional or self.phase is not Phase.OPEN:
            self._go_cold()
        elif end > self._log_end:
            if result.base_offset != self._log_end and not self._in_flight:
                self._go_cold()  # somebody else moved the log too
            else:
                self._moved_by_own(end, ticket)
        self._answer(ticket, result)

    def _moved_by_own(self, end: int, ticket: Ticket) -> None:
        """The stamp's sequence did not move with the log: that is what the shift counts."""
        self._shift += end - self._log_end
        self._log_end = end
        self._end_as_of = ticket.sent_at or self._end_as_of

    def _lost(self, ticket: Ticket, now: float) -> None:
        if ticket in self._in_flight:
            self._in_flight.remove(ticket)
            self._go_cold()
            if ticket.transactional_id is not None:
                self._joined(ticket.transactional_id, now + self._limits.queued_seconds)
            if not ticket.kind.stamped and not self._kafka_knows_a_duplicate(ticket):
                # Sending it again might append it twice (or after its transaction, or for a client that may not write
                # here); reading tells nothing of a batch without a place of its own.
                self._answer_unknown(ticket, "the connection to Kafka was lost before it answered", now)
            else:
                self._doubt(ticket, now + self._limits.settle_seconds)

    @staticmethod
    def _kafka_knows_a_duplicate(ticket: Ticket) -> bool:
        own = ticket.append.producer_id >= 0 and ticket.stamp is None
        return own and ticket.may_write and not ticket.append.transactional

    def _joined(self, transactional_id: str, believe_from: float) -> None:
        """From `believe_from` on its coordinator's word that it is not here counts; before, it may not know yet."""
        self._transactions[transactional_id] = believe_from
        if len(self._transactions) > self._limits.remembered_producers_max:
            self._transactions.pop(next(iter(self._transactions)))
        self._go_cold()

    def _doubt(self, ticket: Ticket, until: float) -> None:
        ticket.settle_until = until
        self._doubts.append(ticket)

    def _forget(self) -> None:
        self.memory.clear()
        self._accounted = False
        self._read_is_stale = self.phase is Phase.READING
        for ticket in self._doubts:
            ticket.may_write = False  # there: this may be another topic by now, or another of its clients' rights
        self._go_cold()

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
            # Truncated: what is remembered above the end is gone with it.
            self.memory.forget_from(tail.log_end_offset)
        for transactional_id in tail.ended_transactions:
            if self._transactions.get(transactional_id, float("inf")) <= tail.transactions_as_of:
                del self._transactions[transactional_id]
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
                self.phase = Phase.PUBLISHING
                if accounted and (first := self._first_unstamped(tail)) is not None:
                    self._effects.append(Violation(self.partition, first, log_end_offset=tail.log_end_offset))
                self._effects.append(self._new_base(tail, reason))
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

    @staticmethod
    def _stamp_left_behind(tail: Tail) -> str | None:
        """Why the published base no longer fits the log, None if it does.

        On a `required` topic every append is stamped, so log end and next sequence move together. Where they do not,
        somebody appended around the proxies. All processes must agree on the new base before any of them uses it.
        """
        epoch, base = tail.stamp_base
        if tail.log_end_offset < base:
            return f"the log ends at {tail.log_end_offset}, before the stamp's base {base}"
        state = tail.producer_state
        if state is None:
            return None
        if state.producer_epoch > epoch:
            return f"the partition knows the stamp's epoch {state.producer_epoch}, published is {epoch}"
        next_sequence = state.next_sequence if state.producer_epoch == epoch else 0
        if next_sequence != (tail.log_end_offset - base) % SEQUENCE_MODULUS:
            return f"the log ends at {tail.log_end_offset}, the stamp's next sequence is {next_sequence} above {base}"
        return None

    def _new_base(self, tail: Tail, reason: str) -> PublishBase:
        """What the processes should agree on. An epoch has one base for ever, so a new base needs a new epoch.

        But not where somebody used the stamp's producer id under an epoch of his own: nobody has a base for that one,
        it can be the last there is, and to go on behind his last sequence is the safer way: the first append under a
        new epoch has no sequence before it to be compared with.
        """
        epoch, _ = tail.stamp_base
        state = tail.producer_state
        if state is not None and state.producer_epoch > epoch:
            self._foreign = tail
            base = tail.log_end_offset - state.next_sequence
            return PublishBase(self.partition, state.producer_epoch, base, reason)
        return PublishBase(self.partition, epoch + 1, tail.log_end_offset, reason)

    def _report_foreign_epoch(self, tail: Tail) -> None:
        last = max(tail.log_end_offset - 1, 0)  # his batch; where it begins the tail does not say
        self._effects.append(Violation(self.partition, last, log_end_offset=tail.log_end_offset))

    @staticmethod
    def _first_unstamped(tail: Tail) -> int | None:
        """Where the log left the stamp behind; None where it did not get longer but shorter, or by an unknown epoch."""
        epoch, base = tail.stamp_base
        state = tail.producer_state
        if state is None or state.producer_epoch > epoch or tail.log_end_offset < base:
            return None
        next_sequence = state.next_sequence if state.producer_epoch == epoch else 0
        missing = (tail.log_end_offset - base - next_sequence) % SEQUENCE_MODULUS
        return tail.log_end_offset - missing if 0 < missing <= tail.log_end_offset - base else None

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

    def _base_published(self, ok: bool, ours: bool, now: float) -> None:
        foreign, self._foreign = self._foreign, None
        if self.phase is Phase.PUBLISHING:
            self.phase = Phase.COLD
            if ok and ours and foreign is not None:
                # No process had published a base under that epoch: it is nobody's of ours.
                self._report_foreign_epoch(foreign)
            if not ok:
                self._retry_at = now + self._limits.read_retry_seconds

    def _tick(self, now: float) -> None:
        for ticket in [t for t in self._queue if t.deadline <= now]:
            self._queue.remove(ticket)
            self._answer_later(ticket, "the log end could not be known in time")
        for ticket in [t for t in self._looking if t.deadline <= now]:
            self._looking.remove(ticket)
            if ticket.appended_at is not None:
                self._end_violation(ticket, None)
                continue
            self._answer_later(ticket, "what lies at the expected offset could not be read in time")
        for pending in self._pending():
            for ticket in [t for t in pending.followers if t.deadline <= now]:
                pending.followers.remove(ticket)
                self._answer_unknown(ticket, "an earlier try of this batch is still in doubt", now)
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            for ticket in self._looking:
                assert ticket.append.expected_base_offset is not None
                self._effects.append(Look(ticket, ticket.append.expected_base_offset))
            if self._settle_again:
                self._settle_first()

    # ---- what may go on now

    def _advance(self, now: float) -> None:
        """Gives turns for as long as the head of the queue can have one."""
        if self._doubts and not self._in_flight and self._granted is None and self.phase in (Phase.COLD, Phase.OPEN):
            self.phase = Phase.SETTLING
            self._clean = True
            self._holes.clear()
            self._settle_first()
        while self._queue and self._granted is None and self.phase in (Phase.COLD, Phase.OPEN):
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
                # Its first try was still waiting here when it came, and has been answered since.
                self._queue.popleft()
            elif ticket.kind is Kind.OWN:
                self._grant(ticket)
            elif not self._decide(ticket, now):
                return

    def _waits_for_what_may_be_queued(self, ticket: Ticket, now: float) -> bool:
        """See the end of the module's docstring. On `required` topics nothing is unstamped."""
        if ticket.check is Check.REQUIRED:
            return False
        if not ticket.taken_over and ticket.append.expected_base_offset is not None:
            return True
        for_own = now < self._own_queued_until and ticket.append.expected_base_offset is not None
        for_stamped = now < self._stamped_queued_until and not ticket.kind.stamped
        return for_own or for_stamped

    def _let_others_pass(self, now: float) -> bool:
        """Who waits for what may be queued holds up nobody but its own chain. False if nobody else is there."""
        held: set[tuple[int, int]] = set()
        for ticket in self._queue:
            if _chain(ticket) in held or self._waits_for_what_may_be_queued(ticket, now):
                held.add(_chain(ticket))
            else:
                self._queue.remove(ticket)
                self._queue.appendleft(ticket)
                return True
        return False

    def _predecessor_is_looked_at(self, ticket: Ticket) -> bool:
        """The batch ahead of it in its chain failed, and only the log can tell how; until then it must not land."""
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
        # One connection keeps its order, and a lost predecessor makes the successor fail by its sequence: so a
        # chain may be sent ahead of its acknowledgements, but only while the broker is sure to know the stamp. And
        # while no other process stamps here: A of the chain A, B loses to X of another process, which has as many
        # records. A is a duplicate for Kafka, and B fits behind X.
        return (
            ticket.kind.stamped
            and ticket.alone
            and self.phase is Phase.OPEN
            and self._warm(ticket, now)
            and all(other.kind.stamped and other.connection == ticket.connection for other in self._in_flight)
        )

    def _decide(self, ticket: Ticket, now: float) -> bool:
        """Grants or ends the head of the queue; False if it has to wait."""
        if self.phase is Phase.COLD or not (self._in_flight or self._warm(ticket, now) or self._tail_is_fresh(now)):
            return self._read_tail(now)
        assert self._tail is not None
        if self._another_transaction_is_open(ticket, self._tail):
            self._queue.popleft()
            self._answer_later(ticket, "a transaction is open on the partition; its marker will take an offset")
            self._go_cold()
            return True
        end = self._end_of_all_sent()
        expected = end if ticket.kind is Kind.PLAIN else ticket.append.expected_base_offset
        assert expected is not None
        if expected == end and ticket.append.contradiction is None:
            refusal = self._timestamps(ticket, self._tail, now)
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
            return False  # whether it is refused depends on those before it
        if self._end_as_of < ticket.offered_at:
            # What is told as `actual` must have been the log's end at some moment of this call.
            return self._read_tail(now)
        self._queue.popleft()
        self._mismatch(ticket, expected, end)
        return True

    def _end_of_all_sent(self) -> int:
        """Where the log ends once what is in flight has landed."""
        if not self._in_flight:
            return self._log_end
        last = self._in_flight[-1]
        assert last.at is not None
        return last.at + last.append.record_count

    def _stamp(self, ticket: Ticket, at: int, tail: Tail) -> None:
        ticket.at = at
        if ticket.kind.stamped and self._limits.stamping:
            sequence = (at - self._shift) % SEQUENCE_MODULUS
            ticket.stamp = Stamp(tail.producer_id, self._epoch, sequence, ticket.tag)

    def _another_transaction_is_open(self, ticket: Ticket, tail: Tail) -> bool:
        """One that is known to have joined counts until its coordinator says that it is over, whatever the partition's
        leader says: it may not have written yet, and after an admin's abort its own marker still comes."""
        if ticket.append.expected_base_offset is None:
            return False
        return bool(
            tail.open_transactions - {ticket.append.producer_id}
            or self._transactions.keys() - {ticket.transactional_id}
        )

    @staticmethod
    def _timestamps(ticket: Ticket, tail: Tail, now: float) -> Refusal | None:
        """A batch whose records are too old would make the broker forget the stamp (it goes by record timestamps)."""
        if tail.log_append_time or not ticket.kind.stamped:
            return None
        oldest_ms = int((now + tail.wall_minus_monotonic_seconds - tail.expiration_seconds / 2) * 1000)
        if ticket.append.max_timestamp_ms > oldest_ms:
            return None
        return _POLICY.check(ticket.append, Facts(check_expected_offsets=ticket.check, oldest_timestamp_ms=oldest_ms))

    @staticmethod
    def _keep_from_stamping(ticket: Ticket) -> None:
        """On a `true` topic a batch with old timestamps goes without a stamp: appended as always, or one alone."""
        ticket.kind = Kind.OWN if ticket.kind is Kind.PLAIN else Kind.OWN_CONDITIONAL
        if ticket.append.producer_id >= 0:
            ticket.stamp = NO_PRODUCER  # the broker never saw this producer's sequences: they would meet a gap

    def _read_tail(self, now: float) -> bool:
        if self._in_flight or (self._retry_at is not None and now < self._retry_at):
            return False
        self._retry_at = None
        self.phase = Phase.READING
        self._effects.append(ReadTail(self.partition, tuple(self._transactions)))
        return False

    def _grant(self, ticket: Ticket) -> None:
        self._queue.popleft()
        self._granted = ticket
        self._effects.append(Grant(ticket))

    def _warm(self, ticket: Ticket, now: float) -> bool:
        """Whether the broker that the ticket goes to is sure to know the stamp.

        It is the one that acknowledged a stamp, as that broker and as that leader: a connection from before the
        acknowledgement does not outlive a restart, which may forget producers whose records are deleted; and a replica
        that starts anew may not have what its leader forgot.
        """
        return (
            self.phase is Phase.OPEN
            and now < self._warm_until
            and ticket.connected_at <= self._warm_since
            and ticket.leader_epoch == self._warm_epoch
            and not self._transactions
        )

    def _tail_is_fresh(self, now: float) -> bool:
        return (
            self.phase is Phase.OPEN
            and self._tail is not None
            and now <= self._tail.requested_at + self._limits.cold_send_seconds
            and self._end_as_of == self._tail.requested_at
        )

    def _go_cold(self) -> None:
        if self.phase is Phase.OPEN:
            self.phase = Phase.COLD
        self._warm_until = float("-inf")
        self._end_as_of = float("-inf")

    def _again(self, ticket: Ticket) -> None:
        """Back to the head of the queue; those that were sent before it stay before it."""
        if ticket.attempts >= self._limits.attempts_max:
            self._answer_later(ticket, f"Kafka refused its stamp {ticket.attempts} times")
            return
        position = sum(1 for t in self._queue if 0 < t.sent_as < ticket.sent_as)
        self._queue.insert(position, ticket)

    # ---- mismatches: whose batch lies there?

    def _mismatch(self, ticket: Ticket, expected: int, end: int) -> None:
        """The expectation does not hold. Before it is refused: might it be a retry whose first try is there?"""
        if not 0 <= expected < end or ticket.append.contradiction is not None:
            self._refuse(ticket, offset_mismatch(ticket.append, end, self._log_start()))
            return
        ticket.actual = end
        remembered = self.memory.landed.get(expected)
        if remembered is not None and remembered.digest != ticket.digest and not self._names_itself(ticket, remembered):
            self._end_mismatch(ticket, None)
            return
        self._looking.append(ticket)
        self._effects.append(Look(ticket, expected))

    def _end_mismatch(self, ticket: Ticket, there: Landed | None, *, deleted: bool = False) -> None:
        equal = deleted or (there is not None and there.digest == ticket.digest)
        if there is not None and equal and self._names_itself(ticket, there):
            self._accept(ticket, there)
        else:
            refusal = offset_mismatch(ticket.append, ticket.actual, self._log_start(), possibly_yours=equal)
            self._refuse(ticket, refusal)

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
            expected = ticket.append.expected_base_offset
            assert expected is not None
            there = self._read_landed(result, expected, ticket) if isinstance(result, Found) else None
            if isinstance(result, OutOfRange):
                # Deleted: by now nobody can say what lay there, unless this process remembers.
                there = self.memory.landed.get(expected)
            self._end_mismatch(ticket, there, deleted=there is None and isinstance(result, OutOfRange))

    def _read_landed(self, found: Found, offset: int, ticket: Ticket) -> Landed | None:
        """What the log has at `offset`, None if no batch begins there (or it cannot be decoded)."""
        try:
            header = parse_batch_header(found.batch)
            if header.base_offset != offset or header.is_control:
                return None
            limit = self._limits.decompressed_bytes_max
            scan = scan_batch(found.batch, self._names, carrier_base=False, decompressed_bytes_max=limit)
            digest = scan.digest
            named = scan.write_id is not None and scan.write_id == ticket.append.write_id
            if header.is_log_append_time or named:
                # The broker replaced the timestamps, or the writer did when it made its named write again (Spark does,
                # after a restart): compare the rest, and speak in the ticket's own digest.
                theirs = digest_batch(found.batch, decompressed_bytes_max=limit, ignore_timestamps=True)
                ours = digest_batch(ticket.records, decompressed_bytes_max=limit, ignore_timestamps=True)
                digest = ticket.digest if theirs == ours else theirs
        except ProtocolError:
            return None
        time_ms = header.max_timestamp_ms if header.is_log_append_time else -1
        return Landed(offset, header.record_count, digest, scan.write_id, time_ms)

    # ---- doubts: the log decides

    def _settle_first(self) -> None:
        self._settle_again = False
        ticket = self._doubts[0]
        if ticket.kind.stamped:
            assert ticket.at is not None
            self._effects.append(Look(ticket, ticket.at))
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
        | anything else                  | it can never land: its sequence is taken. Decide anew, as a mismatch  |
        | a batch not replicated yet     | look again until `settle_until`, then 7                               |
        | nothing, and it ends there     | send it again, if the partition waits for this stamp; else 7          |
        | nothing, and it ends before    | 7: its predecessor is missing. Should it come, Kafka compares it      |
        | what cannot be read now        | look again until `settle_until`, then 7                               |
        """
        assert ticket.at is not None
        match result:
            case Found():
                self._settled_by_what_is_there(ticket, result, now)
            case NotYet(log_end) if log_end <= ticket.at and ticket.sent_at is None:
                # Its last try may still be queued in Kafka. It gets the same sequence again: one of the two lands.
                self._settled(ticket)
                self._decide_anew(ticket)
            case NotYet(log_end) if log_end == ticket.at and self._may_resend(ticket):
                self._reads_to_resend = True
                self._effects.append(ReadTail(self.partition))
            case NotYet(log_end) if log_end <= ticket.at:
                self._settled(ticket)
                self._answer_unknown(ticket, "the connection to Kafka was lost before it answered", now)
            case OutOfRange():
                self._settled(ticket)
                self._answer_unknown(ticket, "what was appended there is no longer readable", now, queued=False)
            case _:
                self._settle_later(ticket, now)

    def _settled_by_what_is_there(self, ticket: Ticket, found: Found, now: float) -> None:
        assert ticket.at is not None
        there = self._read_landed(found, ticket.at, ticket)
        if there is None or there.digest != ticket.digest or not self._is_stamp(found, ticket):
            self._settled(ticket)
            self._decide_anew(ticket)
            return
        named = self._names_itself(ticket, there)
        mine = self._is_from_here(found, ticket)
        if mine is None and ticket.kind is Kind.PLAIN:
            mine = True
        elif ticket.acknowledged and parse_batch_header(found.batch).is_log_append_time:
            mine = mine is not False
        elif self._only_send_was_a_duplicate(ticket):
            mine = False
        if named or mine:
            self._landed_at(ticket, there.log_append_time_ms, self._log_start(), now)
            self._settled(ticket, clean=ticket.acknowledged and self._tail is not None and self._tail.log_append_time)
        elif mine is None:
            # This very send, or an equal batch of another client that won the race through another process.
            self._settled(ticket)
            why = "the connection to Kafka was lost; an equal batch lies there: may be yours"
            self._answer_unknown(ticket, why, now, queued=False)
        else:
            self._settled(ticket)
            self._decide_anew(ticket)

    @staticmethod
    def _only_send_was_a_duplicate(ticket: Ticket) -> bool:
        timed = ticket.append.max_timestamp_ms >= 0  # else the answer did not say
        return ticket.acknowledged and timed and ticket.kind is not Kind.PLAIN and not ticket.sent_before

    def _is_from_here(self, found: Found, ticket: Ticket) -> bool | None:
        """Whether this process sent the batch that lies where the ticket should be; None if nothing says so.

        Two clients of one process may each have sent an equal batch there, the first of them told "unknown": the
        one that is told success first has it.
        """
        assert ticket.at is not None
        if ticket.at in self.memory.landed:
            return False
        tag = parse_batch_header(found.batch).tag
        if not tag or ticket.stamp is None or not ticket.stamp.tag:
            return None
        return tag == ticket.stamp.tag

    def _decide_anew(self, ticket: Ticket) -> None:
        self._holes.add(_chain(ticket))
        if ticket.sent_at is None:  # a retry that only had to be looked up first
            ticket.at = ticket.stamp = None
            self._queue.appendleft(ticket)
        else:
            self._again(ticket)

    def _may_resend(self, ticket: Ticket) -> bool:
        """Not for a client that may not write here, and not behind a hole in its chain."""
        return ticket.may_write and _chain(ticket) not in self._holes and self._limits.stamping

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
        next_sequence = stamp.base_sequence
        if state is not None:
            same_epoch = state.producer_epoch == stamp.producer_epoch
            next_sequence = (
                state.next_sequence if same_epoch else 0 if state.producer_epoch < stamp.producer_epoch else -1
            )
        fits = (
            next_sequence == stamp.base_sequence
            and (ticket.check is not Check.REQUIRED or tail.stamp_base[0] == stamp.producer_epoch)
            and tail.producer_id == stamp.producer_id
            and not self._another_transaction_is_open(ticket, tail)
            and self._timestamps(ticket, tail, now) is None
            and now <= tail.requested_at + self._limits.cold_send_seconds
        )
        if fits and self._may_resend(ticket):
            self._tail = tail
            self._effects.append(Resend(ticket))
        else:
            self._settled(ticket)
            self._answer_unknown(ticket, "the connection to Kafka was lost before it answered", now)

    def _resent(self, ticket: Ticket, result: PartitionResult | None, now: float) -> None:
        if ticket not in self._doubts:
            return
        if ticket.kind.stamped:
            self._resent_stamped(ticket, result, now)
        elif result is not None and result.error_code == Error.NONE:
            self._settled(ticket)
            self._answer(ticket, result)
        elif result is None or result.error_code in _IN_DOUBT or result.error_code in _FOR_NOW:
            self._settle_later(ticket, now)
        else:
            # Kafka looks at size, time stamps and rights before it looks for duplicates, and forgets all but a
            # producer's last batch when it restarts: no error on a resend says that the first send was not appended.
            self._settled(ticket)
            self._answer_unknown(ticket, f"sent again, it was answered error {result.error_code}", now)

    def _resent_stamped(self, ticket: Ticket, result: PartitionResult | None, now: float) -> None:
        appended_now = result is not None and result.error_code == Error.NONE and result.log_append_time_ms == -1
        if result is None or not appended_now:
            self._settle_later(ticket, now)  # only the log can tell: one of the sends may lie there, or another's batch
        elif result.base_offset == ticket.at:
            self._landed_at(ticket, result.log_append_time_ms, result.log_start_offset, now)
            self._settled(ticket)
        else:
            self._settled(ticket)
            self._landed_elsewhere(ticket, result, now)

    def _settle_later(self, ticket: Ticket, now: float) -> None:
        if now < ticket.settle_until:
            self._settle_again = True
            self._retry_at = now + self._limits.read_retry_seconds
        else:
            self._settled(ticket)
            self._answer_unknown(ticket, "the outcome could not be read from the log in time", now)

    def _settled(self, ticket: Ticket, *, clean: bool = False) -> None:
        self._doubts.remove(ticket)
        self._clean = self._clean and clean
        if self._doubts:
            self._settle_first()
        elif self._clean:
            self.phase = Phase.OPEN
        else:
            self.phase = Phase.COLD
            self._go_cold()

    @staticmethod
    def _names_itself(ticket: Ticket, there: Landed) -> bool:
        return there.write_id is not None and there.write_id == ticket.append.write_id

    @staticmethod
    def _is_stamp(found: Found, ticket: Ticket) -> bool:
        header = parse_batch_header(found.batch)
        stamp = ticket.stamp
        return stamp is not None and (stamp.producer_id, stamp.producer_epoch, stamp.base_sequence) == (
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
        )

    # ---- answers

    def _log_start(self) -> int:
        return -1 if self._tail is None else self._tail.log_start_offset

    def _accept(self, ticket: Ticket, landed: Landed, log_start_offset: int | None = None) -> None:
        self._answer(
            ticket,
            PartitionResult(
                partition=ticket.partition.partition,
                error_code=Error.NONE,
                base_offset=landed.base_offset,
                log_append_time_ms=landed.log_append_time_ms,
                log_start_offset=self._log_start() if log_start_offset is None else log_start_offset,
            ),
        )

    def _refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        self._last_refusal = refusal.message
        result = PartitionResult(
            partition=ticket.partition.partition,
            error_code=refusal.error_code,
            base_offset=refusal.base_offset,
            log_start_offset=refusal.log_start_offset,
            error_message=refusal.message,
        )
        self._answer(ticket, result, refusal.reason)

    def _answer_later(self, ticket: Ticket, why: str) -> None:
        """6: nothing was appended, try again. It is retriable for every client, and refreshes its metadata."""
        self._answer_error(ticket, Error.NOT_LEADER_OR_FOLLOWER, f"TRY_AGAIN {why}", "try_again")

    def _answer_unknown(self, ticket: Ticket, why: str, now: float, *, queued: bool = True) -> None:
        """7: it may be in the log or not, or, if it may still be `queued` in a broker, come to be there."""
        self.memory.add_unresolved(ticket)
        self._holes.add(_chain(ticket))
        if not queued or not ticket.attempts:
            pass
        elif ticket.kind.stamped:
            assert ticket.at is not None
            self._stamped_queued_until = now + self._limits.queued_seconds
            self._stamped_queued_to = max(self._stamped_queued_to, ticket.at + ticket.append.record_count)
        else:
            self._own_queued_until = now + self._limits.queued_seconds
        self._answer_error(ticket, Error.REQUEST_TIMED_OUT, f"OUTCOME_UNKNOWN {why}", "outcome_unknown")

    def _answer_error(self, ticket: Ticket, error: Error, message: str, reason: str) -> None:
        result = PartitionResult(
            partition=ticket.partition.partition,
            error_code=error,
            error_message=f"{message} topic={self.partition.topic} partition={self.partition.partition}",
        )
        self._answer(ticket, result, reason)

    def _answer(self, ticket: Ticket, result: PartitionResult, reason: str | None = None) -> None:
        self._effects.append(Answer(ticket, result, reason))
        if result.error_code not in (Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT):
            self.memory.resolved(ticket)
        for follower in ticket.followers:
            self._effects.append(Answer(follower, result, reason))
        ticket.followers.clear()
        if result.error_code != Error.NONE and ticket.attempts:
            for other in self._sent_behind(ticket):
                other.behind = sent_behind(other, result)

    def _sent_behind(self, ticket: Ticket) -> Iterator[Ticket]:
        """The rest of a chain: from the same producer on the same connection, before it could know of a failure.

        A -> Kafka, B -> Kafka (next sequence), A is refused, B meets the gap (45). B must not be tried again by itself:
        it would land behind a hole.
        """
        granted = () if self._granted is None else (self._granted,)
        for other in (*self._in_flight, *granted, *self._doubts, *self._queue):
            if (
                (not other.sent_as or other.sent_as > ticket.sent_as)
                and other is not ticket
                and other.connection == ticket.connection
                and other.append.producer_id == ticket.append.producer_id
            ):
                yield other


def sent_behind(ticket: Ticket, failed: PartitionResult) -> PartitionResult:
    """What a batch is told that was sent behind a failed one: the same code, the same words.

    Except that an error about sequences (Kafka's word on an unconditional batch) is none of a conditional one's.
    """
    said = failed.error_message or f"error {failed.error_code}"
    code = failed.error_code
    if ticket.append.expected_base_offset is not None and code in _ABOUT_THE_STAMP:
        code = Error.POLICY_VIOLATION
    return replace(
        failed, error_code=code, error_message=said if said.startswith(_SENT_BEHIND) else f"{_SENT_BEHIND} {said}"
    )


def _chain(ticket: Ticket) -> tuple[int, int]:
    return ticket.connection, ticket.append.producer_id


def _producer_id(result: LookResult | None) -> int | None:
    """Whose batch was found there."""
    if not isinstance(result, Found):
        return None
    try:
        return parse_batch_header(result.batch).producer_id
    except ProtocolError:
        return None
