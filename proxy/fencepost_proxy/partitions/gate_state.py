"""State of a partition sequencer, how long it may be relied on, and how appends are answered.

A sequencer is a stack of base classes:

    GateState     state of the partition, and answers
    Publishing    agreement on a new fence base
    Settling      what only the log can decide: in-doubt appends, and what lies at an expected offset
    Gate          the state machine: admission and events (its module describes the theory)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto

from fencepost_policies.append import Check, Facts, Refusal
from fencepost_policies.conditional_publish import ConditionalPublish
from fencepost_proxy.errors import Error
from fencepost_proxy.partitions.events import Answer, Effect, GateLimits, Tail, Ticket
from fencepost_proxy.partitions.landed import Landed
from fencepost_proxy.partitions.memory import Memory
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult


class Phase(Enum):
    COLD = auto()
    READING = auto()
    PUBLISHING = auto()
    OPEN = auto()
    SETTLING = auto()


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
ABOUT_THE_STAMP = frozenset(
    {
        Error.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Error.INVALID_PRODUCER_EPOCH,
        Error.UNKNOWN_PRODUCER_ID,
        90,  # PRODUCER_FENCED
    }
)
#: A batch under its own producer id: (producer id, epoch), sequence. (None, -1): batches without a name.
BatchName = tuple[tuple[int, int] | None, int]
_SENT_BEHIND = "SENT_BEHIND_A_FAILED_BATCH"
POLICY = ConditionalPublish()
DEFAULT_NAMES = HeaderNames()


class GateState:
    """`names`: the record headers that carry the expected offset."""

    def __init__(self, partition: TopicPartition, limits: GateLimits, names: HeaderNames = DEFAULT_NAMES) -> None:
        self.partition = partition
        self.phase = Phase.COLD
        self._limits = limits
        self._names = names
        self._queue: deque[Ticket] = deque()
        self._granted: Ticket | None = None  # admitted, not yet sent
        self._in_flight: deque[Ticket] = deque()
        self._doubts: deque[Ticket] = deque()
        self._offered_count = 0
        self._sent_count = 0
        self._looking: list[Ticket] = []  # mismatches whose offset is being read; they do not block the queue
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
        self._transactions: dict[
            str, float
        ] = {}  # transactions that joined: time from which the coordinator's word counts
        self._producers: dict[str, int] = {}  # producer ids of the transactions that have sent an append here
        self._joining: dict[tuple[str, int], None] = {}  # (transactional id, connection) that wait to join
        self._told_to_wait: OrderedDict[int, tuple[float, float]] = (
            OrderedDict()
        )  # producer id: (first, last) time of its "try again"
        self._stamped_queued_until = float("-inf")
        self._stamped_queued_to = -1  # the log end after the last of them
        self._own_queued_until = float("-inf")
        self._own_queued: OrderedDict[BatchName, float] = (
            OrderedDict()
        )  # the appends behind `_own_queued_until`, by name
        self._check = Check.ON
        self._clean = True  # every in-doubt append so far was acknowledged and only had to be confirmed
        self._read_is_stale = False
        self._settle_again = False  # read again for the first in-doubt append at `_retry_at`
        self._reads_to_resend = False  # SETTLING, and a log-end snapshot was requested
        self._markers = 0  # markers that connections are about to send, or wait for
        self._written_by = float("-inf")  # latest time at which a marker without an answer is written
        self._foreign: Tail | None = None  # PUBLISHING because the partition knows an epoch that this process does not
        self._holes: set[tuple[int, int]] = set()  # pipelines with a batch that was not found at its offset
        self._accounted = False  # every append up to `_log_end` passed a sequencer, as far as known here
        self._bases_due = float("-inf")  # when its bases would have been published at one per `base_seconds`

    # ---- properties

    @property
    def idle(self) -> bool:
        """No append waits or is in flight. No ticks are needed, and dropping the object costs only a new read."""
        return not (self._queue or self._granted or self._in_flight or self._doubts or self._looking)

    @property
    def in_transaction(self) -> bool:
        """A transaction here may not be over, and only this process knows."""
        return bool(self._transactions or self._markers)

    @property
    def log_end_offset(self) -> int | None:
        return self._log_end if self.phase is Phase.OPEN else None

    @property
    def shift(self) -> int:
        return self._shift

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # ---- validity of what is known

    def _warm(self, ticket: Ticket, now: float) -> bool:
        """Whether the broker on the append's connection is certain to know the fence.

        It must be the same broker process and the same leader that acknowledged a fence. A restart may forget producers
        whose records are deleted; a connection opened before the acknowledgement would not survive it. A replica that
        restarts may lack what its leader has forgotten.
        """
        return (
            self.phase is Phase.OPEN
            and now < self._warm_until
            and ticket.connected_at <= self._warm_since
            and ticket.leader_epoch == self._warm_epoch
            and not self._transactions
        )

    def _is_last_epoch(self, epoch: int) -> bool:
        """The last epoch of its producer id. On `required` topics it serves one append, with sequence 0
        (`Publishing`)."""
        return epoch % self._limits.producer_epochs == self._limits.producer_epochs - 1

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

    def _another_transaction_is_open(self, ticket: Ticket, tail: Tail) -> bool:
        """A transaction that joined counts until its coordinator reports its end, whatever the partition leader
        reports: it may not have written yet, and after an admin's abort its own marker is still to come.

        Two transactions that have only joined each other's partitions must not wait for each other. So a joined
        transaction counts for another only once the leader knows a record of it, or when it is ending. If its marker
        comes in between, the other append's offset shows it.
        """
        if ticket.append.expected_base_offset is None:
            return False
        if tail.open_transactions - {ticket.append.producer_id}:
            return True
        joined = self._transactions.keys() - {ticket.transactional_id}
        if not ticket.append.transactional:
            return bool(joined)
        # Its own transactional id may be ending, too: the producer's previous transaction.
        return ticket.transactional_id in tail.ending_transactions or not joined.isdisjoint(tail.ending_transactions)

    @staticmethod
    def _knows_transaction(ticket: Ticket, tail: Tail) -> bool:
        """Whether the coordinator was queried after the append arrived."""
        if tail.transactions_as_of < ticket.offered_at:
            return False
        named, known = ticket.transactional_id, tail.producer_ids
        return named is None or known is None or named in known

    @staticmethod
    def _is_anothers_producer(ticket: Ticket, tail: Tail) -> bool:
        if ticket.transactional_id is None or tail.producer_ids is None:
            return False
        return tail.producer_ids.get(ticket.transactional_id, -1) not in (-1, ticket.append.producer_id)

    @staticmethod
    def _timestamps(ticket: Ticket, tail: Tail, now: float) -> Refusal | None:
        """Refuse a batch with too old records: the broker ages a producer by record timestamps and would forget the
        fence."""
        if tail.log_append_time or not ticket.kind.stamped:
            return None
        oldest_ms = int((now + tail.wall_minus_monotonic_seconds - tail.expiration_seconds / 2) * 1000)
        if ticket.append.max_timestamp_ms > oldest_ms:
            return None
        return POLICY.check(ticket.append, Facts(check_expected_offsets=ticket.check, oldest_timestamp_ms=oldest_ms))

    def _log_start(self) -> int:
        return -1 if self._tail is None else self._tail.log_start_offset

    def _note_landed(self, ticket: Ticket, log_append_time_ms: int, now: float) -> Landed:
        assert ticket.at is not None
        landed = self.memory.add(ticket, log_append_time_ms)
        if self._tail is not None and self.phase in (Phase.OPEN, Phase.SETTLING):
            self._log_end = max(self._log_end, ticket.at + ticket.append.record_count)
            # The log ended before it when it was appended: at this send, if Kafka reports so. If it was found in the
            # log, the append may be much older.
            self._end_as_of = float("-inf") if ticket in self._doubts or ticket.sent_at is None else ticket.sent_at
            # Records may be half of the setting old when sent. The remaining quarter covers requests in a queue.
            tail = self._tail
            self._warm_until = min(now + tail.expiration_seconds / 4, tail.expiration_known_until)
            self._warm_since, self._warm_epoch = now, ticket.leader_epoch
            if self._check is Check.REQUIRED and self._is_last_epoch(self._epoch):
                self._go_cold()
        if ticket.at + ticket.append.record_count >= self._stamped_queued_to:
            self._stamped_queued_until = float("-inf")  # its sequence is used now
        return landed

    # ---- answers

    def _landed_at(self, ticket: Ticket, log_append_time_ms: int, log_start_offset: int, now: float) -> None:
        self._accept(ticket, self._note_landed(ticket, log_append_time_ms, now), log_start_offset)

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

    def _may_not_wait(self, ticket: Ticket, tail: Tail, now: float) -> bool:
        """Another transaction owns what this one needs. A transaction that owns a partition must give up, since the
        other may need that one, unless the other is ending. What this transaction owns through other instances is not
        known here, so then it waits for `transaction_wait_seconds`.
        """
        if not ticket.append.transactional:
            return False
        ending = {self._producers[each] for each in self._producers.keys() & tail.ending_transactions}
        if tail.open_transactions <= ending | {ticket.append.producer_id}:
            return False
        if ticket.owns_partitions:
            return True
        producer_id = ticket.append.producer_id
        since, last = self._told_to_wait.pop(producer_id, (now, now))
        if now - last > self._limits.transaction_wait_seconds:
            since = now  # an earlier, separate wait
        waited = now - since > self._limits.transaction_wait_seconds
        if waited and not ticket.alone:
            return True
        self._told_to_wait[producer_id] = since, now
        if len(self._told_to_wait) > self._limits.remembered_producers_max:
            self._told_to_wait.popitem(last=False)
        return False

    def _refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        result = PartitionResult(
            partition=ticket.partition.partition,
            error_code=refusal.error_code,
            base_offset=refusal.base_offset,
            log_start_offset=refusal.log_start_offset if refusal.log_start_offset >= 0 else self._log_start(),
            error_message=refusal.message,
        )
        self._answer(ticket, result, refusal.reason)

    def _answer_later(self, ticket: Ticket, why: str) -> None:
        """Error 6: not appended, try again. Every client retries on it and refreshes its metadata."""
        self._answer_error(ticket, Error.NOT_LEADER_OR_FOLLOWER, f"TRY_AGAIN {why}", "try_again")

    def _answer_unknown(self, ticket: Ticket, why: str, now: float, *, queued: bool = True) -> None:
        """Error 7: it may be in the log. If it may be `queued` in a broker, it may also be appended later."""
        self.memory.add_unresolved(ticket)
        self._holes.add(chain_of(ticket))
        if not queued or not ticket.attempts:
            pass
        elif ticket.kind.stamped:
            assert ticket.at is not None
            self._stamped_queued_until = now + self._limits.queued_seconds
            self._stamped_queued_to = max(self._stamped_queued_to, ticket.at + ticket.append.record_count)
        else:
            self._own_queued_until = now + self._limits.queued_seconds
            self._note_own_queued(ticket)
        self._answer_error(ticket, Error.REQUEST_TIMED_OUT, f"OUTCOME_UNKNOWN {why}", "outcome_unknown")

    def _note_own_queued(self, ticket: Ticket) -> None:
        """So that its own retry need not wait for it: Kafka decides which of the two comes first."""
        named = ticket.stamp is None and ticket.append.producer_id >= 0
        name = (ticket.producer, ticket.append.base_sequence) if named else (None, -1)
        self._own_queued[name] = self._own_queued_until
        self._own_queued.move_to_end(name)
        if len(self._own_queued) > self._limits.remembered_batches_max:
            until = self._own_queued.popitem(last=False)[1]
            self._own_queued[None, -1] = max(until, self._own_queued.get((None, -1), until))

    def _only_itself_is_queued(self, ticket: Ticket, now: float) -> bool:
        mine = (ticket.producer, ticket.append.base_sequence)
        return not any(until > now and name != mine for name, until in self._own_queued.items())

    def _is_queued(self, ticket: Ticket, now: float) -> bool:
        return self._own_queued.get((ticket.producer, ticket.append.base_sequence), now) > now

    def _is_not_queued(self, ticket: Ticket) -> None:
        """The log has it. If an earlier attempt still reaches a broker, Kafka takes it for a duplicate."""
        if self._own_queued.pop((ticket.producer, ticket.append.base_sequence), None) is not None:
            self._own_queued_until = max(self._own_queued.values(), default=float("-inf"))

    def _answer_error(self, ticket: Ticket, error: Error, message: str, reason: str) -> None:
        result = PartitionResult(
            partition=ticket.partition.partition,
            error_code=error,
            error_message=f"{message} topic={self.partition.topic} partition={self.partition.partition}",
        )
        self._answer(ticket, result, reason)

    def _answer(self, ticket: Ticket, result: PartitionResult, reason: str | None = None) -> None:
        self._effects.append(Answer(ticket, result, reason))
        if result.error_code == Error.NONE:
            self.memory.resolved(ticket)  # an error covers this attempt only: an earlier one may still be queued
        for follower in ticket.followers:
            self._effects.append(Answer(follower, result, reason))
        ticket.followers.clear()
        if result.error_code != Error.NONE and ticket.attempts:
            for other in self._sent_behind(ticket):
                other.behind = sent_behind(other, result)

    def _sent_behind(self, ticket: Ticket) -> Iterator[Ticket]:
        """The rest of a pipeline: same producer, same connection, sent before the failure was known. Batches without a
        producer id are pipelined only if one of the two has an expected offset.

        1. A and B (the next sequence) are sent. 2. Kafka refuses A. 3. B fails at the gap (45).
        B must not be sent again alone: it would be appended after a gap.
        """
        granted = () if self._granted is None else (self._granted,)
        for other in (*self._in_flight, *granted, *self._doubts, *self._queue):
            if (
                (not other.sent_as or other.sent_as > ticket.sent_as)
                and other is not ticket
                and other.connection == ticket.connection
                and ticket.pipeline in other.follows
            ):
                yield other

    def _again(self, ticket: Ticket) -> None:
        """Put it back to the head of the queue, after the appends that were sent before it."""
        if ticket.attempts >= self._limits.attempts_max:
            self._answer_later(ticket, f"Kafka refused the fence {ticket.attempts} times")
            return
        position = sum(1 for t in self._queue if 0 < t.sent_as < ticket.sent_as)
        self._queue.insert(position, ticket)


def sent_behind(ticket: Ticket, failed: PartitionResult) -> PartitionResult:
    """Answer of a batch that was sent after a failed one: same code and message.

    Kafka's errors about sequences do not apply to a conditional append: it gets POLICY_VIOLATION instead.
    """
    said = failed.error_message or f"error {failed.error_code}"
    code = failed.error_code
    if ticket.append.expected_base_offset is not None and code in ABOUT_THE_STAMP:
        code = Error.POLICY_VIOLATION
    return replace(
        failed,
        error_code=code,
        record_errors=(),  # those are records of the failed batch
        error_message=said if said.startswith(_SENT_BEHIND) else f"{_SENT_BEHIND} {said}",
    )


def chain_of(ticket: Ticket) -> tuple[int, int]:
    return ticket.connection, ticket.append.producer_id
