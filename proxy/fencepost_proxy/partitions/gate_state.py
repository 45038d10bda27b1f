"""What a gate knows and what waits there, and how an append is answered: what all parts of a gate stand on.

A gate is written in parts, base classes one upon the other, as a session is:

    GateState     what is known of the partition, for how long it may be relied on, and how answers leave
    Publishing    a new base for the stamp is being agreed on
    Settling      what only the log can tell: doubts, and what lies where an append should be
    Gate          the state machine: who gets the next turn, and what events mean (its docstring is the theory of all)
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
#: Of these, those that Kafka gives before it appends, or where something unexpected happens at any moment: given again
#: for the same batch, while log end and sequence do not move, it is not appended and will not be.
MAY_BE_FINAL = frozenset({Error.UNKNOWN_SERVER_ERROR, Error.KAFKA_STORAGE_ERROR})
#: Answers to a stamped batch that speak of the stamp, not of the client's batch: read the log and decide anew.
ABOUT_THE_STAMP = frozenset(
    {
        Error.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Error.INVALID_PRODUCER_EPOCH,
        Error.UNKNOWN_PRODUCER_ID,
        90,  # PRODUCER_FENCED
    }
)
#: A batch that went under its producer's own id: that and the epoch, its sequence. (None, -1) for those without names.
BatchName = tuple[tuple[int, int] | None, int]
_SENT_BEHIND = "SENT_BEHIND_A_FAILED_BATCH"
POLICY = ConditionalPublish()
DEFAULT_NAMES = HeaderNames()


class GateState:
    """`names` – the record headers that say what an append expects."""

    def __init__(self, partition: TopicPartition, limits: GateLimits, names: HeaderNames = DEFAULT_NAMES) -> None:
        self.partition = partition
        self.phase = Phase.COLD
        self._limits = limits
        self._names = names
        self._queue: deque[Ticket] = deque()
        self._granted: Ticket | None = None  # granted, not yet sent
        self._in_flight: deque[Ticket] = deque()
        self._doubts: deque[Ticket] = deque()
        self._offered_count = 0
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
        self._producers: dict[str, int] = {}  # the producer ids of those of them that have sent something here
        self._joining: dict[tuple[str, int], None] = {}  # transactional ids, and connections, that wait to join
        self._told_to_wait: OrderedDict[int, tuple[float, float]] = OrderedDict()  # producer ids: first when, and last
        self._stamped_queued_until = float("-inf")
        self._stamped_queued_to = -1  # the log end that the last of them would make
        self._own_queued_until = float("-inf")
        self._own_queued: OrderedDict[BatchName, float] = OrderedDict()  # which these are, as far as they have names
        self._check = Check.ON
        self._clean = True  # every doubt being settled was acknowledged and only had to be confirmed
        self._read_is_stale = False
        self._settle_again = False  # the first doubt is to be looked at again at `_retry_at`
        self._reads_to_resend = False  # SETTLING, and the tail was asked for
        self._markers = 0  # that connections are about to have written, or wait for the answer to
        self._written_by = float("-inf")  # one without an answer, at the latest
        self._foreign: Tail | None = None  # PUBLISHING, since the partition knows an epoch that this process does not
        self._holes: set[tuple[int, int]] = set()  # chains of which a batch was not found where it should be
        self._accounted = False  # every append up to `_log_end` passed a gate, as far as this one knows
        self._bases_due = float("-inf")  # by when its bases would have been published at one per `base_seconds`

    # ---- what others may look at

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is on its way: no ticks needed, and dropping the gate costs only a cold start."""
        return not (self._queue or self._granted or self._in_flight or self._doubts or self._looking)

    @property
    def in_transaction(self) -> bool:
        """It knows of a transaction here that may not be over, which nobody else could tell it again."""
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

    # ---- what is known, and for how long

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

    def _is_last_epoch(self, epoch: int) -> bool:
        """Of its producer id. On `required` topics it is good for one append, whose sequence is 0; see `Publishing`."""
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
        """One that is known to have joined counts until its coordinator says that it is over, whatever the partition's
        leader says: it may not have written yet, and after an admin's abort its own marker still comes.

        Two transactions that have only joined each other's partitions must not both wait: so one that has joined
        counts for another only once the leader knows a record of it, or when it is ending and waits for nobody. Where
        its marker comes in between all the same, that is seen by where the other's append lands.
        """
        if ticket.append.expected_base_offset is None:
            return False
        if tail.open_transactions - {ticket.append.producer_id}:
            return True
        joined = self._transactions.keys() - {ticket.transactional_id}
        if not ticket.append.transactional:
            return bool(joined)
        # Its own may be ending, too: its producer's last one.
        return ticket.transactional_id in tail.ending_transactions or not joined.isdisjoint(tail.ending_transactions)

    @staticmethod
    def _knows_transaction(ticket: Ticket, tail: Tail) -> bool:
        """What its coordinator says of it was asked for since it came."""
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
        """A batch whose records are too old would make the broker forget the stamp (it goes by record timestamps)."""
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
            # The log ended behind it when it was appended: by this send, if Kafka says so. If it was found in the log,
            # that may have been long ago.
            self._end_as_of = float("-inf") if ticket in self._doubts or ticket.sent_at is None else ticket.sent_at
            # Records may be half of the setting old when they are sent; what is left over is for requests in a queue.
            tail = self._tail
            self._warm_until = min(now + tail.expiration_seconds / 4, tail.expiration_known_until)
            self._warm_since, self._warm_epoch = now, ticket.leader_epoch
            if self._check is Check.REQUIRED and self._is_last_epoch(self._epoch):
                self._go_cold()
        if ticket.at + ticket.append.record_count >= self._stamped_queued_to:
            self._stamped_queued_until = float("-inf")  # its sequence is taken now
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
        """Another transaction has what this one wants. Whoever owns something itself must let go of it: that other one
        may be about to want just that, unless it is ending. What the waiting one owns by other processes is not known
        here: there it waits for so long.
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
            since = now  # that was another time
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
        """6: nothing was appended, try again. It is retriable for every client, and refreshes its metadata."""
        self._answer_error(ticket, Error.NOT_LEADER_OR_FOLLOWER, f"TRY_AGAIN {why}", "try_again")

    def _answer_unknown(self, ticket: Ticket, why: str, now: float, *, queued: bool = True) -> None:
        """7: it may be in the log or not, or, if it may still be `queued` in a broker, come to be there."""
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
        """So that its own retry need not wait for it: which of the two comes first is for Kafka to say."""
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
        """The log has it. If an earlier try of it still comes to a broker, that one is a duplicate."""
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
            self.memory.resolved(ticket)  # an error speaks of this try alone: one before it may still be queued
        for follower in ticket.followers:
            self._effects.append(Answer(follower, result, reason))
        ticket.followers.clear()
        if result.error_code != Error.NONE and ticket.attempts:
            for other in self._sent_behind(ticket):
                other.behind = sent_behind(other, result)

    def _sent_behind(self, ticket: Ticket) -> Iterator[Ticket]:
        """The rest of a chain: from the same producer on the same connection, before it could know of a failure.
        Batches without a producer id are no chain where neither of the two expects anything.

        A -> Kafka, B -> Kafka (next sequence), A is refused, B meets the gap (45). B must not be tried again by itself:
        it would land behind a hole.
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
        """Back to the head of the queue; those that were sent before it stay before it."""
        if ticket.attempts >= self._limits.attempts_max:
            self._answer_later(ticket, f"Kafka refused its stamp {ticket.attempts} times")
            return
        position = sum(1 for t in self._queue if 0 < t.sent_as < ticket.sent_as)
        self._queue.insert(position, ticket)


def sent_behind(ticket: Ticket, failed: PartitionResult) -> PartitionResult:
    """What a batch is told that was sent behind a failed one: the same code, the same words.

    Except that an error about sequences (Kafka's word on an unconditional batch) is none of a conditional one's.
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
