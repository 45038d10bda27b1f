"""Commit validator: may this transaction commit? One `CommitValidator` per validated EndTxn(commit). Sans-IO: replies
in, queries out.

What it must prove
------------------
Every conditional append of the transaction, whichever process handled it, is in the log at its expected offset. Kafka
does not compare, since such batches keep their own producer id. So a client that bypasses the proxy, or a marker in
between, may have moved one to another offset, and a refused one may be missing. The commit is the last chance: before
it, no read-committed consumer sees the records.

How it decides
--------------
1. What this process knows (`table.py`): an append was refused -> REFUSE, has no answer yet -> LATER.
2. At the same time: the state topic, read to its current end (`topics/abort_only.py`: refusals of all processes), and
   the transaction at the broker that the commit goes to, if that is its coordinator: a former coordinator that is cut
   off answers with old state, and cannot commit. If it is not ongoing, or not this producer's any more, Kafka itself
   answers.
3. For each checked partition of the transaction: the producer's state at a leader that other replicas confirm
   (docs/decisions/0014). If it equals what this process saw appended, no append is missing or at another offset, since
   sequences have no gaps.
4. Otherwise the log, from the transaction's first offset: the headers of each batch state its expected offset. Batches
   that this process saw appended without a gap are not decompressed again.
5. If leaders or log contradict the commit: the coordinator again. Otherwise a committed transaction could be refused:
   a. The commit reached Kafka through another process and waited in a broker's queue.
   b. The first query of the coordinator found the transaction ongoing.
   c. The commit is executed. Its marker on a partition looks like an early one.

What cannot be proved in time is LATER, a retriable error, never PASS.

    begin() -> [ReadState, QueryTransaction] | REFUSE | LATER
    StateRead + TransactionIs -> QueryProducers | PASS | REFUSE | LATER
    ProducersAre -> ReadBack for each partition that differs | PASS | QueryTransaction | LATER
    LogIs (each) -> PASS | QueryTransaction | LATER
    TransactionIs, the second time -> REFUSE | LATER
    TimedOut -> LATER
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto

from fencepost_policies.values import value
from fencepost_proxy.errors import Error
from fencepost_proxy.topics.abort_only import AbortOnly
from fencepost_proxy.transactions.table import Table, Transaction, Written
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition

ONGOING = "Ongoing"
#: From this version of EndTxn on, each end bumps the producer's epoch: transactions v2.
V2_FROM = 5


class Outcome(Enum):
    PASS = auto()
    REFUSE = auto()
    LATER = auto()


@value
class Decision:
    """`reason`: for the metrics; `message`: for users; `abort_only_transactions`: the state topic has records of the
    transaction; `later`: Kafka's error code for LATER."""

    outcome: Outcome
    reason: str
    message: str = ""
    abort_only_transactions: bool = False
    later: Error = Error.CONCURRENT_TRANSACTIONS


# ------------------------------------------------------------------------------------------------------------- queries


@value
class ReadState:
    """Read the state topic to its current end; the reply is `StateRead`."""

    producer_id: int
    producer_epoch: int


@value
class QueryTransaction:
    """DescribeTransactions, by the broker that the commit goes to; the reply is `TransactionIs`."""

    transactional_id: str


@value
class QueryProducers:
    """The producer's state at the leaders of these partitions; the reply is `ProducersAre`."""

    producer_id: int
    partitions: tuple[TopicPartition, ...]


@value
class ReadBack:
    """Read a producer's batches from `from_offset` to the current log end; the reply is `LogIs`.

    `checked`: (first, end) offsets. All batches between passed this process and are at their expected offsets, so their
    batch headers suffice.
    """

    producer_id: int
    partition: TopicPartition
    from_offset: int
    checked: tuple[int, int] = (0, 0)


CommitQuery = ReadState | QueryTransaction | QueryProducers | ReadBack

# ------------------------------------------------------------------------------------------------------------- replies


@value
class StateRead:
    """`abort_only_records`: of the producer and epoch; None: the state topic could not be read to its end."""

    abort_only_records: tuple[AbortOnly, ...] | None


@value
class TransactionIs:
    """`state`: Kafka's name; "" if the coordinator does not know the transactional id.

    `known`: False if the broker could not be queried. `elsewhere`: it is not the coordinator.
    """

    known: bool
    producer_id: int = -1
    producer_epoch: int = -1
    state: str = ""
    partitions: frozenset[TopicPartition] = frozenset()
    elsewhere: bool = False


@value
class ProducerAt:
    """`last_sequence`: -1 before the first one; `first_offset`: of its open transaction, None if there is none."""

    producer_epoch: int
    last_sequence: int
    first_offset: int | None


@value
class ProducersAre:
    """`producers`: None for partitions whose leader does not know the producer. A missing partition could not be
    queried."""

    producers: Mapping[TopicPartition, ProducerAt | None]


class Marker(Enum):
    COMMIT = auto()
    ABORT = auto()


@value
class Logged:
    """One batch of the producer in the log. `marker`: for a control batch.

    `conditional`: it has an expected offset, `expected`; None if no offset fits (contradiction, unreadable).
    """

    base_offset: int
    record_count: int
    producer_epoch: int
    base_sequence: int
    conditional: bool = False
    expected: int | None = None
    marker: Marker | None = None


@value
class LogIs:
    """`batches`: in log order. None: they could not all be read in time.

    `out_of_range`: the log starts after the requested offset.
    """

    partition: TopicPartition
    batches: tuple[Logged, ...] | None
    out_of_range: bool = False


@value
class TimedOut:
    pass


Answer = StateRead | TransactionIs | ProducersAre | LogIs | TimedOut

PASS = Decision(Outcome.PASS, "passed")
#: States of a transaction that has ended or not begun, with no commit in progress.
_AT_REST = frozenset({"", "Empty", "CompleteCommit", "CompleteAbort"})


def _refuse(reason: str, message: str) -> Decision:
    return Decision(Outcome.REFUSE, reason, message)


def _later(message: str) -> Decision:
    return Decision(Outcome.LATER, "unknown", message)


@value
class CheckedTopic:
    """`source_is_base`: the source of expected offsets may be one that the log does not keep."""

    source_is_base: bool = False


class CommitValidator:
    """See the module. `is_checked`: how a topic is checked now, None if it is not. `may_be_committed`: a commit of the
    transaction is in progress at Kafka or unanswered, so a refusal would not be final."""

    def __init__(
        self,
        table: Table,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        v2: bool,
        is_checked: Callable[[str], CheckedTopic | None],
        may_be_committed: bool = False,
    ) -> None:
        self._table = table
        self._transactional_id = transactional_id
        self._producer_id = producer_id
        self._epoch = producer_epoch
        self._v2 = v2
        self._checked = is_checked
        self._abort_only_records: tuple[AbortOnly, ...] | None = None
        self._transaction: TransactionIs | None = None
        self._pending: dict[TopicPartition, set[int]] = {}
        self._producers: Mapping[TopicPartition, ProducerAt | None] = {}
        self._reading: set[TopicPartition] = set()
        self._against: Decision | None = None  # refusal by leaders or log, while the coordinator is queried again
        self._may_be_committed = may_be_committed

    def _known(self) -> Transaction | None:
        return self._table.of(self._transactional_id, self._producer_id, self._epoch)

    def begin(self) -> tuple[CommitQuery, ...] | Decision:
        # With names, the refused transaction may have ended at another process: the state topic decides.
        known = self._known()
        if known is not None and not known.names and not self._may_be_committed:
            decision = self._as_known_here()
            if decision is not None:
                return decision
        return ReadState(self._producer_id, self._epoch), QueryTransaction(self._transactional_id)

    def handle(self, answer: Answer) -> tuple[CommitQuery, ...] | Decision:
        """A decision is final. The list of queries may be empty while others are unanswered."""
        stated: tuple[CommitQuery, ...] | Decision
        match answer:
            case StateRead(abort_only_records):
                stated = self._as_known_here() or _later("failed to read the state topic to its end")
                if abort_only_records is not None:
                    self._abort_only_records = tuple(
                        each for each in abort_only_records if each.transactional_id == self._transactional_id
                    )
                    stated = (None if self._may_be_committed else self._as_known_here()) or self._both_known()
            case TransactionIs():
                if answer.elsewhere:
                    message = "the broker of this connection is not its coordinator"
                    return Decision(Outcome.LATER, "unknown", message, later=Error.NOT_COORDINATOR)
                if not answer.known:
                    return _later("failed to query its coordinator")
                self._transaction = answer
                stated = self._both_known() if self._against is None else self._against_it(self._against)
            case ProducersAre(producers):
                stated = self._queried_again(self._producers_known(producers))
            case LogIs():
                stated = () if self._against is not None else self._queried_again(self._log_known(answer))
            case TimedOut():
                stated = _later("validation timed out")
        if isinstance(stated, Decision) and stated.outcome is not Outcome.LATER:
            return self._still(stated)
        return stated

    def _queried_again(self, stated: tuple[CommitQuery, ...] | Decision) -> tuple[CommitQuery, ...] | Decision:
        if not isinstance(stated, Decision) or stated.outcome is not Outcome.REFUSE:
            return stated
        self._against = stated
        return (QueryTransaction(self._transactional_id),)

    def _against_it(self, decision: Decision) -> Decision:
        """For the coordinator a commit ends before its markers are written, so no observed marker was the commit's."""
        return decision if self._is_ongoing() else _later("it ended during validation")

    # ---- knowledge of this process

    def _as_known_here(self) -> Decision | None:
        known = self._known()
        if known is None:
            return None
        if known.refused is not None:
            return _refuse("append_refused", known.refused)
        if known.under_way is not None:
            # The outcome will be known soon. It may be an earlier attempt of an append that another process completed,
            # which sent the commit to Kafka and died.
            partition, sequence = known.under_way
            return _later(f"a conditional append to {partition} (sequence {sequence}) is still in progress")
        return None

    def _still(self, decision: Decision) -> Decision:
        """Apply what changed during validation. If a commit may be in progress, no refusal is certain."""
        if decision.outcome is Outcome.PASS and self._is_ongoing():
            decision = self._as_known_here() or decision
            known = self._known()
            if known is not None and any(s not in self._pending.get(p, ()) for p, s in known.pending):
                return _later("one of its appends has just been answered with a retriable error")
        if decision.outcome is Outcome.REFUSE and self._may_be_committed:
            return _later("an earlier commit of it may be in progress")
        return replace(decision, abort_only_transactions=True) if self._abort_only_records else decision

    # ---- state topic and coordinator

    def _is_ongoing(self) -> bool:
        found = self._transaction
        return (
            found is not None
            and found.state == ONGOING
            and (found.producer_id, found.producer_epoch) == (self._producer_id, self._epoch)
        )

    def _both_known(self) -> tuple[CommitQuery, ...] | Decision:
        found = self._transaction
        if found is None or self._abort_only_records is None:
            return ()
        if found.producer_id == self._producer_id and found.producer_epoch < self._epoch:
            # The coordinator's state is older than the client's.
            return _later("its coordinator does not know this epoch yet")
        known = self._known()
        ours = (found.producer_id, found.producer_epoch) == (self._producer_id, self._epoch)
        pending = set() if known is None else set(known.pending)
        for abort_only in self._abort_only_records:
            if known is None or abort_only.name not in known.names:  # this process knows more about its own records
                pending |= abort_only.pending or set()
        if ours and (self._is_ongoing() or (found.state in _AT_REST and not self._may_be_committed)):
            for abort_only in self._abort_only_records:
                if abort_only.pending is None:
                    return _refuse("append_refused", abort_only.reason)
        if ours and self._v2 and found.state in _AT_REST and pending:
            # None of its appends succeeded, so its coordinator does not know of it. (Under v1 it does, by
            # AddPartitionsToTxn: `found` is the previous transaction, of the same epoch, whose commit was not
            # answered.)
            partition, sequence = min(pending)
            return _refuse("append_unresolved", f"a conditional append to {partition} (sequence {sequence}) is missing")
        if not self._is_ongoing():
            return PASS  # Kafka itself answers
        for partition, sequence in pending:
            self._pending.setdefault(partition, set()).add(sequence)
        written = {} if known is None else known.written
        # The table has checked partitions only, including those of topics whose checks were switched off since.
        listed = {each for each in found.partitions if self._checked(each.topic) is not None}
        partitions = sorted(listed | written.keys() | self._pending.keys())
        if not partitions:
            return PASS
        return (QueryProducers(self._producer_id, tuple(partitions)),)

    # ---- leaders

    def _producers_known(
        self, producers: Mapping[TopicPartition, ProducerAt | None]
    ) -> tuple[CommitQuery, ...] | Decision:
        self._producers = producers
        known = self._known()
        written = {} if known is None else known.written
        found = self._transaction
        assert found is not None
        if not written and self._may_have_ended(found, producers):
            return _later("its pending appends are in the log, possibly in a transaction that is committed already")
        listed = {each for each in found.partitions if self._checked(each.topic) is not None}
        queries_to_send: list[CommitQuery] = []
        for partition in sorted(listed | written.keys() | self._pending.keys()):
            if partition not in producers:
                return _later(f"failed to query the leader of {partition}")
            stated = self._partition(partition, producers[partition], written.get(partition))
            if isinstance(stated, Decision):
                return stated
            if stated is not None:
                queries_to_send.append(stated)
        if not queries_to_send:
            return PASS
        self._reading = {each.partition for each in queries_to_send if isinstance(each, ReadBack)}
        return tuple(queries_to_send)

    def _may_have_ended(self, found: TransactionIs, producers: Mapping[TopicPartition, ProducerAt | None]) -> bool:
        """Whether the transaction is empty, and all its pending appends were appended before it.

        Under transactions v1 the following may happen:
        1. Another process commits T1, then dies before it answers its client or tombstones T1's records.
        2. An AddPartitionsToTxn of T1 that waited in a broker's queue begins T2, with the same epoch.
        3. The client repeats its commit. A refusal would report that T1 was not committed.
        """
        if self._v2 or not self._pending or any(self._checked(each.topic) is None for each in found.partitions):
            return False
        for partition, at in producers.items():
            ours = at is not None and at.producer_epoch == self._epoch
            if at is not None and ours and at.first_offset is not None:
                return False
            for sequence in self._pending.get(partition, ()):
                if at is None or not ours or (at.last_sequence - sequence) % SEQUENCE_MODULUS >= SEQUENCE_MODULUS // 2:
                    return False
        return True

    def _partition(
        self, partition: TopicPartition, at: ProducerAt | None, written: Written | None
    ) -> ReadBack | Decision | None:
        """None: the partition is proved."""
        ours = at is not None and at.producer_epoch == self._epoch
        first = at.first_offset if at is not None and ours else None
        pending = self._pending.get(partition)
        if written is None and first is None:
            if pending:
                return _refuse("append_unresolved", f"a conditional append to {partition} is not in the log")
            if self._v2 and at is not None and ours and at.last_sequence >= 0:
                return _refuse("aborted", f"a marker ended it on {partition} early")
            return None  # added to the transaction, but without records
        assert self._transaction is not None
        if written is not None and first is not None and partition not in self._transaction.partitions:
            return _refuse("cannot_be_proved", f"its coordinator does not list its partition {partition}")
        if (
            written is not None
            and at is not None
            and written.whole
            and first == written.first_offset
            and at.last_sequence == written.last_sequence
            and not pending
            and not (self._v2 and written.first_sequence)
        ):
            return None
        if written is not None and first is None and self._v2:
            return _refuse("aborted", f"its records on {partition} are no longer part of it")
        policy = self._checked(partition.topic)
        if policy is not None and policy.source_is_base:
            return _refuse(
                "cannot_be_proved",
                f"not all of its appends to {partition} passed this process, and with "
                "fencepost.expected.offsets.source=base the log does not keep their expected offsets",
            )
        starts = [each for each in (first, None if written is None else written.first_offset) if each is not None]
        checked = (0, 0)
        if written is not None and written.whole and not pending:
            checked = (
                written.first_offset,
                written.end_offset,
            )  # sequences have no gap there, so no other batch lies between
        return ReadBack(self._producer_id, partition, min(starts), checked)

    # ---- log

    def _log_known(self, log: LogIs) -> tuple[CommitQuery, ...] | Decision:
        if log.partition not in self._reading:
            return ()
        if log.out_of_range:
            return _refuse("cannot_be_proved", f"the log of {log.partition} starts after its first append")
        if log.batches is None:
            return _later(f"failed to read the log of {log.partition}")
        decision = self._batches(log.partition, log.batches)
        if decision is not None:
            return decision
        self._reading.discard(log.partition)
        return () if self._reading else PASS

    def _batches(self, partition: TopicPartition, batches: tuple[Logged, ...]) -> Decision | None:
        known = self._known()
        written = None if known is None else known.written.get(partition)
        of_it: list[Logged] = []
        for each in batches:
            if each.marker is Marker.ABORT and written is not None and written.conditional and of_it:
                # By its client through another process, or by an administrator: the log does not show which.
                return _refuse("aborted", f"a marker at {each.base_offset} aborted its records on {partition}")
            if each.marker is not None:
                of_it.clear()  # that was the previous transaction
            elif each.producer_epoch == self._epoch:
                of_it.append(each)
        for each in of_it:
            if each.conditional and each.expected != each.base_offset:
                requested = "an offset that it cannot have" if each.expected is None else each.expected
                return _refuse(
                    "violation", f"OFFSET_VIOLATION {partition} expected={requested} appended_at={each.base_offset}"
                )
        at = self._producers[partition]
        is_open = at is not None and at.producer_epoch == self._epoch and at.first_offset is not None
        if is_open != bool(of_it) or (of_it and at is not None and self._last_sequence(of_it) != at.last_sequence):
            return _later(f"state and log of {partition} were read at different moments")
        if of_it and self._v2 and of_it[0].base_sequence != 0:
            return _refuse("aborted", f"its first records on {partition} are no longer part of it")
        missing = self._pending.get(partition, set()) - {each.base_sequence for each in of_it if each.conditional}
        if missing:
            return _refuse(
                "append_unresolved", f"a conditional append to {partition} (sequence {min(missing)}) is not in the log"
            )
        return None

    @staticmethod
    def _last_sequence(batches: list[Logged]) -> int:
        last = batches[-1]
        return (last.base_sequence + last.record_count - 1) % SEQUENCE_MODULUS
