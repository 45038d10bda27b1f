"""Clients' transactions as this process knows them: the outcome of their appends to checked partitions.

Keyed by (transactional id, producer id, producer epoch). A client that combines another client's producer id with its
own transactional id refers to a different entry. The table gets all transactional appends that sessions submit to
sequencers, with or without an expected offset. `commit_validator.py` queries it before a commit.

While an append is in progress here, its transaction does not commit. `submitted` and `sent` begin that;
`appended_batch` or `failed` end it before the client is answered. `over` is the last call for each append, whether or
not it was answered.

A transaction ends here when its EndTxn is answered with 0, or when the producer's next epoch appears. One that ended
through another process stays until then. Under transactions v1 the next transaction has the same epoch, so the
validator takes the old entry for a part of it, finds a difference, and reads the log.

Bounded: the least recently used entry is dropped, and is unknown then. Refused and pending appends are in the state
topic, too (`topics/abort_only.py`), and the others are in the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import UUID, uuid4

from fencepost_policies.append import Append
from fencepost_proxy.errors import Error
from fencepost_proxy.topics.abort_only import PENDING_MAX, AbortOnly, BatchName
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition

TRANSACTIONS_MAX = 10_000
_WHY_CHARACTERS_MAX = 500

#: Errors after which a client sends the same batch again: the outcome is open.
PENDING_CODES = frozenset({2, 3, 5, 6, 7, 13, 14, 15, 16, 19, 20, 51, 56, 89})
#: Kafka's errors for a batch that belongs to no transaction of this producer, or comes from an unauthorized client:
#: INVALID_PRODUCER_ID_MAPPING, TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
UNAUTHORIZED_CODES = frozenset({49, 53})


class Open(Enum):
    """Status of a batch without a final answer."""

    WAITING = auto()  # at a sequencer
    SENT = auto()
    LATER = auto()  # answered "try again": not appended
    UNKNOWN = auto()  # answered "outcome unknown"


@dataclass(slots=True)
class Written:
    """Records appended to one partition. `whole`: the sequences of its batches have no gap.

    `conditional`: at least one batch had an expected offset.
    """

    first_offset: int
    first_sequence: int
    next_sequence: int
    end_offset: int
    whole: bool = True
    conditional: bool = False

    @property
    def last_sequence(self) -> int:
        return (self.next_sequence - 1) % SEQUENCE_MODULUS


@dataclass(slots=True, eq=False)
class Transaction:
    """`open`: conditional appends without a successful answer. `sent_others`: it has sent unconditional ones.

    `refused`: why it must not commit. `recorded`: this process's last record of it in the state topic; `names`: of all
    its records there. `commits_sent`: commits at Kafka on open connections, unanswered. `commit_queued_until`: until
    then a commit whose connection was lost may be queued in a broker.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    written: dict[TopicPartition, Written] = field(default_factory=dict)
    open: dict[BatchName, Open] = field(default_factory=dict)
    sent_others: bool = False
    refused: str | None = None
    recorded: AbortOnly | None = None
    names: set[UUID] = field(default_factory=set)
    commits_sent: int = 0
    commit_queued_until: float = float("-inf")

    @property
    def has_partitions(self) -> bool:
        """It has, or may have, appended to a checked partition."""
        return self.sent_others or bool(self.written) or any(o in _MAY_LAND for o in self.open.values())

    @property
    def under_way(self) -> BatchName | None:
        """A conditional append at a sequencer or at Kafka."""
        return next((name for name, each in self.open.items() if each in _UNDER_WAY), None)

    @property
    def is_blank(self) -> bool:
        """Nothing is known of it."""
        commits = self.commits_sent > 0 or self.commit_queued_until > float("-inf")
        appends = self.sent_others or self.written or self.open
        return not (commits or appends or self.names or self.refused is not None)

    @property
    def pending(self) -> frozenset[BatchName]:
        """Conditional appends that are not known to be appended, and no longer in progress."""
        return frozenset(name for name, each in self.open.items() if each not in _UNDER_WAY)


_MAY_LAND = (Open.SENT, Open.UNKNOWN)
_UNDER_WAY = (Open.WAITING, Open.SENT)


class Table:
    """See the module. All appends are transactional, to checked partitions. `queued_seconds`: how long a request may be
    queued in a broker after its connection was lost."""

    def __init__(self, transactions_max: int = TRANSACTIONS_MAX, *, queued_seconds: float = float("inf")) -> None:
        self._transactions_max = transactions_max
        self._queued_seconds = queued_seconds
        self._transactions: OrderedDict[tuple[str, int, int], Transaction] = OrderedDict()
        self._named: dict[UUID, Transaction] = {}  # by names of its state-topic records

    def __iter__(self) -> Iterator[Transaction]:
        return iter(self._transactions.values())

    def __len__(self) -> int:
        return len(self._transactions)

    def of(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction | None:
        return self._transactions.get((transactional_id, producer_id, producer_epoch))

    def owns(self, transactional_id: str, producer_id: int, producer_epoch: int) -> bool:
        """Whether it has, or may have, appended to a checked partition through this process."""
        found = self._transactions.get((transactional_id, producer_id, producer_epoch))
        return found is not None and found.has_partitions

    # ---- appends

    def submitted(self, transactional_id: str, append: Append) -> None:
        if append.expected_base_offset is not None:
            self._of(transactional_id, append).open[_name(append)] = Open.WAITING

    def sent(self, transactional_id: str, append: Append) -> None:
        transaction = self._of(transactional_id, append)
        if append.expected_base_offset is not None:
            transaction.open[_name(append)] = Open.SENT
        else:
            transaction.sent_others = True

    def appended_batch(self, transactional_id: str, append: Append, base_offset: int) -> None:
        """The sequencer reports success, whether or not the client is still connected."""
        transaction = self._of(transactional_id, append)
        partition, expected = TopicPartition(append.topic, append.partition), append.expected_base_offset
        if expected is not None:
            transaction.open.pop(_name(append), None)
            if expected != base_offset:
                refuse(transaction, f"OFFSET_VIOLATION {partition} expected={expected} appended_at={base_offset}")
        next_sequence = (append.base_sequence + append.record_count) % SEQUENCE_MODULUS
        end_offset = base_offset + append.record_count
        known = transaction.written.get(partition)
        if known is None:
            transaction.written[partition] = Written(
                base_offset, append.base_sequence, next_sequence, end_offset, conditional=expected is not None
            )
            return
        known.conditional = known.conditional or expected is not None
        if end_offset <= known.end_offset:
            return  # a retry of a known batch
        if append.base_sequence != known.next_sequence:
            known.whole = False
        known.next_sequence, known.end_offset = next_sequence, end_offset

    def failed(
        self, transactional_id: str, append: Append, error_code: int, why: str, *, was_sent: bool
    ) -> Transaction:
        """A conditional append is about to be answered with an error. `why`: for users."""
        transaction = self._of(transactional_id, append)
        if was_sent and error_code in UNAUTHORIZED_CODES:
            transaction.open.pop(_name(append), None)
        elif error_code in PENDING_CODES and len(transaction.open) <= PENDING_MAX:
            nothing_appended = error_code == Error.NOT_LEADER_OR_FOLLOWER or not was_sent
            transaction.open[_name(append)] = Open.LATER if nothing_appended else Open.UNKNOWN
        else:
            transaction.open.pop(_name(append), None)
            refuse(transaction, why)
        return transaction

    def over(self, transactional_id: str, append: Append) -> None:
        """The request has ended. A batch without an answer will not get one: the log shows whether it was appended.

        1. Of three partitions, the first was refused, the second waits at its sequencer. 2. The connection is lost.
        The refusal of the first is dropped, too: its client will retry, perhaps through another process.
        """
        transaction = self.of(transactional_id, append.producer_id, append.producer_epoch)
        if transaction is None:
            return
        name = _name(append)
        stands = transaction.open.get(name)
        if stands not in _UNDER_WAY:
            return
        if len(transaction.open) <= PENDING_MAX:
            transaction.open[name] = Open.LATER if stands is Open.WAITING else Open.UNKNOWN
        else:
            del transaction.open[name]
            refuse(transaction, f"more than {PENDING_MAX} conditional appends without a successful answer")

    # ---- state topic

    def record_to_store(self, transaction: Transaction) -> AbortOnly | None:
        """The record to store in the state topic; None if it is stored already, or not needed.

        Each record has a new name: this may be the next transaction, and the process that saw the previous one end may
        be about to tombstone that one's records. So a refusal is always stored again. The caller sets the time.
        """
        pending = None if transaction.refused is not None else frozenset(transaction.open)
        recorded = transaction.recorded
        if pending is not None and (
            not transaction.pending
            or (recorded is not None and recorded.pending is not None and pending <= recorded.pending)
        ):
            return None
        why = transaction.refused or "appends with a retriable error"
        producer = transaction.producer_id, transaction.producer_epoch
        transaction.recorded = AbortOnly(
            uuid4(), transaction.transactional_id, *producer, why[:_WHY_CHARACTERS_MAX], pending, 0
        )
        transaction.names.add(transaction.recorded.name)
        if self.of(transaction.transactional_id, *producer) is transaction:
            self._named[transaction.recorded.name] = transaction
        return transaction.recorded

    @staticmethod
    def recorded_before(transaction: Transaction, abort_only: AbortOnly) -> frozenset[UUID]:
        """The names of the records that `abort_only` replaces. Only a refusal does: it is unconditional."""
        return frozenset(transaction.names - {abort_only.name}) if abort_only.pending is None else frozenset()

    @staticmethod
    def not_recorded(transaction: Transaction, abort_only: AbortOnly) -> None:
        """The record was not stored, or may not have been."""
        if transaction.recorded is abort_only:
            transaction.recorded = None

    def cleared(self, name: UUID) -> None:
        """A process saw the transaction end, and cleared this record."""
        transaction = self._named.pop(name, None)
        if transaction is not None:
            transaction.names.discard(name)
            if not transaction.names:
                self._forget(transaction)

    # ---- end of a transaction

    def may_be_committed(self, transactional_id: str, producer_id: int, producer_epoch: int, now: float) -> bool:
        """A commit of it is, or may be, at Kafka: it may have been committed, or may be at any time."""
        found = self.of(transactional_id, producer_id, producer_epoch)
        return found is not None and (found.commits_sent > 0 or now < found.commit_queued_until)

    def commit_sent(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
        """The transaction to commit. It has an entry from now on, even if another process handled its appends."""
        transaction = self._entry(transactional_id, producer_id, producer_epoch)
        transaction.commits_sent += 1
        return transaction

    def commit_failed(self, transaction: Transaction) -> None:
        """Kafka answered with an error."""
        transaction.commits_sent -= 1
        key = transaction.transactional_id, transaction.producer_id, transaction.producer_epoch
        if transaction.is_blank and self.of(*key) is transaction:
            self._forget(transaction)

    def commit_unacknowledged(self, transaction: Transaction, now: float) -> None:
        """The connection was lost. Under transactions v1 the next transaction may have begun through another process,
        with the same epoch: it must not wait for an answer that never comes."""
        transaction.commits_sent -= 1
        transaction.commit_queued_until = now + self._queued_seconds

    def ended(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        """Its EndTxn was answered with 0."""
        self._forget(self.of(transactional_id, producer_id, producer_epoch))

    # ---- internals

    def _of(self, transactional_id: str, append: Append) -> Transaction:
        return self._entry(transactional_id, append.producer_id, append.producer_epoch)

    def _entry(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
        key = transactional_id, producer_id, producer_epoch
        found = self._transactions.get(key)
        if found is None:
            found = self._transactions[key] = Transaction(*key)
            self._forget(self.of(transactional_id, producer_id, producer_epoch - 1))
            while len(self._transactions) > self._transactions_max:
                self._forget(next(iter(self._transactions.values())))
        self._transactions.move_to_end(key)
        return found

    def _forget(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            key = transaction.transactional_id, transaction.producer_id, transaction.producer_epoch
            self._transactions.pop(key, None)
            for name in transaction.names:
                self._named.pop(name, None)


def refuse(transaction: Transaction, why: str) -> None:
    if transaction.refused is None:
        transaction.refused = why


def _name(append: Append) -> BatchName:
    return TopicPartition(append.topic, append.partition), append.base_sequence
