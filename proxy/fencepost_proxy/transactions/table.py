"""What this process knows of the clients' transactions: what became of their appends to guarded partitions.

By (transactional id, producer id, producer epoch): who names another's producer id beside a transactional id of its own
speaks of another transaction. Everything passes here that the sessions offer to gates for a transaction, with an
expectation or without; `judge.py` asks when the transaction is to commit.

While an append is under way here, its transaction does not commit: `offered` and `sent` begin that, and `landed` or
`failed` end it where its client is told. `over` comes last of each, told or not: its request is no more.

A transaction is over here when its EndTxn was answered with 0, or when the next epoch of its producer shows. What ended
elsewhere stays until then: the judge takes it for part of the next transaction of that producer and epoch (transactions
v1 have the same one), finds that it is not as known here, and looks into the log.

Bounded: what was not heard of for longest is dropped, and then is "not known here". What was refused or told to come
again is in the state topic too (`topics/poisoned.py`), and what landed is in the log.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import UUID, uuid4

from fencepost_policies.append import Append
from fencepost_proxy.errors import Error
from fencepost_proxy.topics.poisoned import PENDING_MAX, BatchName, Poison
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition

TRANSACTIONS_MAX = 10_000
_WHY_CHARACTERS_MAX = 500

#: Kafka's (and our) answers to an append after which a client sends the same batch again, and nothing is decided yet.
PENDING_CODES = frozenset({2, 3, 5, 6, 7, 13, 14, 15, 16, 19, 20, 51, 56, 89})
#: Kafka's answers that say that the batch is of no transaction of this producer, or of nobody who may speak for it:
#: INVALID_PRODUCER_ID_MAPPING, TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
STRANGERS_CODES = frozenset({49, 53})


class Open(Enum):
    """Where a batch stands that has no final answer."""

    WAITING = auto()  # at a gate
    SENT = auto()
    LATER = auto()  # told to come again: nothing was appended
    UNKNOWN = auto()  # told that its outcome is not known


@dataclass(slots=True)
class Written:
    """What landed on one partition. `whole` – each batch followed the one before it by its sequence, none is missing.

    `conditional` – one of them had an expectation.
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
    """`open` – conditional appends without a good answer. `sent_others` – it has sent some without an expectation.

    `refused` – why it must not commit. `noted` – what this process had the state topic say of it last, by the names
    `names`. `commits_sent` – to Kafka, on connections that live and without an answer yet. `commit_queued_until` – so
    long one whose connection is gone may sit in a broker's queue.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    written: dict[TopicPartition, Written] = field(default_factory=dict)
    open: dict[BatchName, Open] = field(default_factory=dict)
    sent_others: bool = False
    refused: str | None = None
    noted: Poison | None = None
    names: set[UUID] = field(default_factory=set)
    commits_sent: int = 0
    commit_queued_until: float = float("-inf")

    @property
    def owns_partitions(self) -> bool:
        """It has appended to a guarded partition, or may have."""
        return self.sent_others or bool(self.written) or any(o in _MAY_LAND for o in self.open.values())

    @property
    def under_way(self) -> BatchName | None:
        """A conditional append that is at a gate or at Kafka right now."""
        return next((name for name, each in self.open.items() if each in _UNDER_WAY), None)

    @property
    def is_blank(self) -> bool:
        """Nothing of it is known here."""
        commits = self.commits_sent > 0 or self.commit_queued_until > float("-inf")
        appends = self.sent_others or self.written or self.open
        return not (commits or appends or self.names or self.refused is not None)

    @property
    def pending(self) -> frozenset[BatchName]:
        """Conditional appends that did not land as far as is known here, and are under way no more."""
        return frozenset(name for name, each in self.open.items() if each not in _UNDER_WAY)


_MAY_LAND = (Open.SENT, Open.UNKNOWN)
_UNDER_WAY = (Open.WAITING, Open.SENT)


class Table:
    """See the module. Appends are transactional ones to guarded partitions. `queued_seconds` – how long a request whose
    connection is gone may be expected to sit in a broker's queue."""

    def __init__(self, transactions_max: int = TRANSACTIONS_MAX, *, queued_seconds: float = float("inf")) -> None:
        self._transactions_max = transactions_max
        self._queued_seconds = queued_seconds
        self._transactions: OrderedDict[tuple[str, int, int], Transaction] = OrderedDict()
        self._named: dict[UUID, Transaction] = {}  # by what was said of it in the state topic

    def __len__(self) -> int:
        return len(self._transactions)

    def of(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction | None:
        return self._transactions.get((transactional_id, producer_id, producer_epoch))

    def owns(self, transactional_id: str, producer_id: int, producer_epoch: int) -> bool:
        """Whether it has appended to a guarded partition through this process, or may have."""
        found = self._transactions.get((transactional_id, producer_id, producer_epoch))
        return found is not None and found.owns_partitions

    # ---- appends

    def offered(self, transactional_id: str, append: Append) -> None:
        """It goes to its gate."""
        if append.expected_base_offset is not None:
            self._of(transactional_id, append).open[_name(append)] = Open.WAITING

    def sent(self, transactional_id: str, append: Append) -> None:
        """It goes to Kafka."""
        transaction = self._of(transactional_id, append)
        if append.expected_base_offset is not None:
            transaction.open[_name(append)] = Open.SENT
        else:
            transaction.sent_others = True

    def landed(self, transactional_id: str, append: Append, base_offset: int) -> None:
        """Its gate's last word is a success, whether or not its client is still there to hear it."""
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
            return  # a retry of what is known
        if append.base_sequence != known.next_sequence:
            known.whole = False
        known.next_sequence, known.end_offset = next_sequence, end_offset

    def failed(
        self, transactional_id: str, append: Append, error_code: int, why: str, *, was_sent: bool
    ) -> Transaction:
        """A conditional one is about to be told an error. `why` – for people."""
        transaction = self._of(transactional_id, append)
        if was_sent and error_code in STRANGERS_CODES:
            transaction.open.pop(_name(append), None)
        elif error_code in PENDING_CODES and len(transaction.open) <= PENDING_MAX:
            nothing_appended = error_code == Error.NOT_LEADER_OR_FOLLOWER or not was_sent
            transaction.open[_name(append)] = Open.LATER if nothing_appended else Open.UNKNOWN
        else:
            transaction.open.pop(_name(append), None)
            refuse(transaction, why)
        return transaction

    def over(self, transactional_id: str, append: Append) -> None:
        """Its request is no more. What nobody was told of it, nobody will be: the log shows whether it is there.

        One of three partitions has been refused, the second lies at its gate, and the connection breaks. What is known
        of the first goes with it: its client will try again, elsewhere perhaps.
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
            refuse(transaction, f"more than {PENDING_MAX} conditional appends without an answer")

    # ---- what others have to know

    def note(self, transaction: Transaction) -> Poison | None:
        """What the state topic has to say of it from now on; None where it says so, or there is nothing to say.

        Each by a name of its own: this may be the next transaction already, and what was said of the one before it
        about to be taken back by the process that saw it end. A refusal is therefore always said anew. Without a time:
        whoever stores it has a clock.
        """
        pending = None if transaction.refused is not None else frozenset(transaction.open)
        noted = transaction.noted
        if pending is not None and (
            not transaction.pending or (noted is not None and noted.pending is not None and pending <= noted.pending)
        ):
            return None
        why = transaction.refused or "appends that were told to come again"
        producer = transaction.producer_id, transaction.producer_epoch
        transaction.noted = Poison(
            uuid4(), transaction.transactional_id, *producer, why[:_WHY_CHARACTERS_MAX], pending, 0
        )
        transaction.names.add(transaction.noted.name)
        if self.of(transaction.transactional_id, *producer) is transaction:
            self._named[transaction.noted.name] = transaction
        return transaction.noted

    @staticmethod
    def noted_before(transaction: Transaction, poison: Poison) -> frozenset[UUID]:
        """The names of what `poison` takes the place of. Only a refusal does: it counts whatever comes."""
        return frozenset(transaction.names - {poison.name}) if poison.pending is None else frozenset()

    @staticmethod
    def not_noted(transaction: Transaction, poison: Poison) -> None:
        """It could not be stored, or may not have been."""
        if transaction.noted is poison:
            transaction.noted = None

    def lifted(self, name: UUID) -> None:
        """Somebody saw it end: another process, or this one."""
        transaction = self._named.pop(name, None)
        if transaction is not None:
            transaction.names.discard(name)
            if not transaction.names:
                self._forget(transaction)

    # ---- its end

    def may_be_committed(self, transactional_id: str, producer_id: int, producer_epoch: int, now: float) -> bool:
        """A commit of it is at Kafka, or may be: it may be committed any time, or have been."""
        found = self.of(transactional_id, producer_id, producer_epoch)
        return found is not None and (found.commits_sent > 0 or now < found.commit_queued_until)

    def commit_sent(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
        """The transaction that it is to end. Known here from now on, whoever took its appends."""
        transaction = self._entry(transactional_id, producer_id, producer_epoch)
        transaction.commits_sent += 1
        return transaction

    def commit_failed(self, transaction: Transaction) -> None:
        """Kafka's answer says so."""
        transaction.commits_sent -= 1
        key = transaction.transactional_id, transaction.producer_id, transaction.producer_epoch
        if transaction.is_blank and self.of(*key) is transaction:
            self._forget(transaction)

    def commit_unheard(self, transaction: Transaction, now: float) -> None:
        """Its connection is gone. Under transactions v1 the next transaction may have begun elsewhere, under the same
        epoch: it must not wait for an answer that never comes."""
        transaction.commits_sent -= 1
        transaction.commit_queued_until = now + self._queued_seconds

    def ended(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        """Its EndTxn was answered with 0."""
        self._forget(self.of(transactional_id, producer_id, producer_epoch))

    # ---- inside

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
