"""May this transaction commit? One `Judge` for each EndTxn(commit) that is looked into. Sans-IO: answers in, asks out.

What it has to be sure of
-------------------------
Every conditional append of the transaction, whichever process handled it, lies in the log where it was expected. Kafka
does not compare there (such batches keep their own producer id), so a writer that bypasses the proxy, or a marker that
came between, may have moved one; and one that was refused may be missing. The commit is the guard: until it nothing
is visible to who reads committed.

By what it finds out
--------------------
1. What this process knows (`table.py`): refused, or without an answer -> REFUSE.
2. At the same time: the state topic, read to its end as of now (`topics/poisoned.py`: what any process refused), and
   the transaction as its coordinator knows it. Where it is not ongoing, or not this producer's any more, there is
   nothing to judge: Kafka itself answers.
3. Of each guarded partition that it is on: the producer's state at the partition's leader. If that is just what this
   process saw land, nothing is missing and nothing is elsewhere, since sequences have no gaps.
4. Else the log, from the transaction's first offset there: each of its batches says by its headers where it should lie.
   What this process saw land without a gap is not unpacked again.
5. Where leaders or the log speak against it: its coordinator once more. Its commit may have gone to Kafka through
   another process, and come out of a broker's queue after the first question. Its marker on a partition then looks like
   one before its time, and "refused" would be told of what is committed.

What cannot be found out in time is LATER, a retriable error: never a pass.

    begin() -> [ReadState, AskTransaction] | REFUSE
    StateRead + TransactionIs -> AskProducers | PASS | REFUSE | LATER
    ProducersAre -> ReadBack for each partition that is not as known | PASS | AskTransaction | LATER
    LogIs (each) -> PASS | AskTransaction | LATER
    TransactionIs, once more -> REFUSE | LATER
    TimeIsUp -> LATER
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto

from fencepost_policies.values import value
from fencepost_proxy.topics.poisoned import Poison
from fencepost_proxy.transactions.table import Table, Transaction, Written
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition

ONGOING = "Ongoing"
#: From this EndTxn on a producer's epoch is bumped by each end: transactions v2.
V2_FROM = 5


class Outcome(Enum):
    PASS = auto()
    REFUSE = auto()
    LATER = auto()


@value
class Verdict:
    """`reason` – for the metrics; `message` – for people. `poisoned` – the state topic says something of it."""

    outcome: Outcome
    reason: str
    message: str = ""
    poisoned: bool = False


# ---------------------------------------------------------------------------------------------------------------- asks


@value
class ReadState:
    """Read the state topic to its end as of now; answer with `StateRead`."""

    producer_id: int
    producer_epoch: int


@value
class AskTransaction:
    """DescribeTransactions; answer with `TransactionIs`."""

    transactional_id: str


@value
class AskProducers:
    """What the leaders of these partitions know of a producer; answer with `ProducersAre`."""

    producer_id: int
    partitions: tuple[TopicPartition, ...]


@value
class ReadBack:
    """Read the batches of a producer from there to the log end as of now; answer with `LogIs`.

    `checked` – (first, end) offsets whose batches all passed this process and are where they were expected: their
    headers suffice.
    """

    producer_id: int
    partition: TopicPartition
    from_offset: int
    checked: tuple[int, int] = (0, 0)


Ask = ReadState | AskTransaction | AskProducers | ReadBack

# -------------------------------------------------------------------------------------------------------------- answers


@value
class StateRead:
    """`poisons` – of the producer and epoch; None: the state topic could not be read to its end."""

    poisons: tuple[Poison, ...] | None


@value
class TransactionIs:
    """`state` – as Kafka names it, "" for a transactional id that its coordinator does not know.

    `known` – False: it could not be asked.
    """

    known: bool
    producer_id: int = -1
    producer_epoch: int = -1
    state: str = ""
    partitions: frozenset[TopicPartition] = frozenset()


@value
class ProducerAt:
    """`last_sequence` – -1 before the first one; `first_offset` – of its open transaction, None for none."""

    producer_epoch: int
    last_sequence: int
    first_offset: int | None


@value
class ProducersAre:
    """`producers` – of those asked for; None where the leader knows no such producer. A missing partition could not be
    asked."""

    producers: Mapping[TopicPartition, ProducerAt | None]


class Marker(Enum):
    COMMIT = auto()
    ABORT = auto()


@value
class Logged:
    """One batch of the producer in the log. `marker` – a control batch.

    `conditional` – it says where it should lie: at `expected`, None if that can be nowhere (contradiction, unreadable).
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
    """`batches` – in the order of the log. None: they could not be read, not (all) of them in time.

    `gone` – the log does not reach back to there any more.
    """

    partition: TopicPartition
    batches: tuple[Logged, ...] | None
    gone: bool = False


@value
class TimeIsUp:
    pass


Answer = StateRead | TransactionIs | ProducersAre | LogIs | TimeIsUp

PASS = Verdict(Outcome.PASS, "passed")
#: States in which a transaction has ended or not begun, and no commit is on its way.
_AT_REST = frozenset({"", "Empty", "CompleteCommit", "CompleteAbort"})


def _refuse(reason: str, message: str) -> Verdict:
    return Verdict(Outcome.REFUSE, reason, message)


def _later(message: str) -> Verdict:
    return Verdict(Outcome.LATER, "unknown", message)


@value
class Guarded:
    """`carrier_base` – expectations may be said where the log does not keep them."""

    carrier_base: bool = False


class Judge:
    """See the module. `guarded` – of a topic: how it is guarded now, None if it is not. `may_be_committed` – a commit
    of it is under way to Kafka, or was not heard of again: a refusal would not be the last word."""

    def __init__(
        self,
        table: Table,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        v2: bool,
        guarded: Callable[[str], Guarded | None],
        may_be_committed: bool = False,
    ) -> None:
        self._table = table
        self._transactional_id = transactional_id
        self._producer_id = producer_id
        self._epoch = producer_epoch
        self._v2 = v2
        self._guarded = guarded
        self._poisons: tuple[Poison, ...] | None = None
        self._transaction: TransactionIs | None = None
        self._pending: dict[TopicPartition, set[int]] = {}
        self._producers: Mapping[TopicPartition, ProducerAt | None] = {}
        self._reading: set[TopicPartition] = set()
        self._against: Verdict | None = None  # what leaders or the log say, while the coordinator is asked once more
        self._may_be_committed = may_be_committed

    def _known(self) -> Transaction | None:
        return self._table.of(self._transactional_id, self._producer_id, self._epoch)

    def begin(self) -> tuple[Ask, ...] | Verdict:
        # What was refused may have been another transaction's, which ended at another process: the state topic tells.
        known = self._known()
        if known is not None and not known.names and not self._may_be_committed:
            verdict = self._as_known_here()
            if verdict is not None:
                return verdict
        return ReadState(self._producer_id, self._epoch), AskTransaction(self._transactional_id)

    def handle(self, answer: Answer) -> tuple[Ask, ...] | Verdict:
        """A verdict is the last word; asks may be none, while others are not answered yet."""
        said: tuple[Ask, ...] | Verdict
        match answer:
            case StateRead(poisons):
                said = self._as_known_here() or _later("the state topic could not be read to its end")
                if poisons is not None:
                    self._poisons = tuple(each for each in poisons if each.transactional_id == self._transactional_id)
                    said = (None if self._may_be_committed else self._as_known_here()) or self._both_known()
            case TransactionIs():
                if not answer.known:
                    return _later("its coordinator could not be asked")
                self._transaction = answer
                said = self._both_known() if self._against is None else self._against_it(self._against)
            case ProducersAre(producers):
                said = self._asked_once_more(self._producers_known(producers))
            case LogIs():
                said = () if self._against is not None else self._asked_once_more(self._log_known(answer))
            case TimeIsUp():
                said = _later("it could not be found out in time")
        if isinstance(said, Verdict) and said.outcome is not Outcome.LATER:
            return self._still(said)
        return said

    def _asked_once_more(self, said: tuple[Ask, ...] | Verdict) -> tuple[Ask, ...] | Verdict:
        if not isinstance(said, Verdict) or said.outcome is not Outcome.REFUSE:
            return said
        self._against = said
        return (AskTransaction(self._transactional_id),)

    def _against_it(self, verdict: Verdict) -> Verdict:
        """A commit has ended for the coordinator before its markers are written: nothing that was seen was one's."""
        return verdict if self._is_ongoing() else _later("it has ended while it was looked into")

    # ---- what this process knows

    def _as_known_here(self) -> Verdict | None:
        known = self._known()
        if known is None:
            return None
        if known.refused is not None:
            return _refuse("append_refused", known.refused)
        if known.under_way is not None:
            # How it ends will be known soon. It may be an earlier try of what landed through another process, which has
            # sent the commit to Kafka and died.
            partition, sequence = known.under_way
            return _later(f"a conditional append to {partition} (sequence {sequence}) is still under way")
        return None

    def _still(self, verdict: Verdict) -> Verdict:
        """What has come meanwhile counts; and where a commit may be under way, no refusal is certain."""
        if verdict.outcome is Outcome.PASS and self._is_ongoing():
            verdict = self._as_known_here() or verdict
            known = self._known()
            if known is not None and any(s not in self._pending.get(p, ()) for p, s in known.pending):
                return _later("an append of it was told to come again a moment ago")
        if verdict.outcome is Outcome.REFUSE and self._may_be_committed:
            return _later("an earlier commit of it may be under way")
        return replace(verdict, poisoned=True) if self._poisons else verdict

    # ---- the state topic and the coordinator

    def _is_ongoing(self) -> bool:
        found = self._transaction
        return (
            found is not None
            and found.state == ONGOING
            and (found.producer_id, found.producer_epoch) == (self._producer_id, self._epoch)
        )

    def _both_known(self) -> tuple[Ask, ...] | Verdict:
        found = self._transaction
        if found is None or self._poisons is None:
            return ()
        if found.producer_id == self._producer_id and found.producer_epoch < self._epoch:
            # What the coordinator says of it is older than what its client knows.
            return _later("its coordinator does not know this epoch yet")
        known = self._known()
        ours = (found.producer_id, found.producer_epoch) == (self._producer_id, self._epoch)
        pending = set() if known is None else set(known.pending)
        for poison in self._poisons:
            if known is None or poison.name not in known.names:  # of its own this process knows more
                pending |= poison.pending or set()
        if ours and (self._is_ongoing() or (found.state in _AT_REST and not self._may_be_committed)):
            for poison in self._poisons:
                if poison.pending is None:
                    return _refuse("append_refused", poison.why)
        if ours and self._v2 and found.state in _AT_REST and pending:
            # Of all that it wanted nothing was appended, so its coordinator has not heard of it. (Under v1 it has, by
            # AddPartitionsToTxn: there it is the one before, of the same epoch, and its commit was not answered.)
            partition, sequence = min(pending)
            return _refuse("append_unresolved", f"a conditional append to {partition} (sequence {sequence}) is missing")
        if not self._is_ongoing():
            return PASS  # Kafka itself answers
        for partition, sequence in pending:
            self._pending.setdefault(partition, set()).add(sequence)
        written = {} if known is None else known.written
        # In the table are guarded ones alone; those of a topic that was switched off meanwhile are among them.
        listed = {each for each in found.partitions if self._guarded(each.topic) is not None}
        partitions = sorted(listed | written.keys() | self._pending.keys())
        if not partitions:
            return PASS
        return (AskProducers(self._producer_id, tuple(partitions)),)

    # ---- the leaders

    def _producers_known(self, producers: Mapping[TopicPartition, ProducerAt | None]) -> tuple[Ask, ...] | Verdict:
        self._producers = producers
        known = self._known()
        written = {} if known is None else known.written
        found = self._transaction
        assert found is not None
        if not written and self._may_have_ended(found, producers):
            return _later("what was to come again has been appended, perhaps in a transaction that is committed by now")
        listed = {each for each in found.partitions if self._guarded(each.topic) is not None}
        asks: list[Ask] = []
        for partition in sorted(listed | written.keys() | self._pending.keys()):
            if partition not in producers:
                return _later(f"the leader of {partition} could not be asked")
            said = self._partition(partition, producers[partition], written.get(partition))
            if isinstance(said, Verdict):
                return said
            if said is not None:
                asks.append(said)
        if not asks:
            return PASS
        self._reading = {each.partition for each in asks if isinstance(each, ReadBack)}
        return tuple(asks)

    def _may_have_ended(self, found: TransactionIs, producers: Mapping[TopicPartition, ProducerAt | None]) -> bool:
        """Whether nothing is in it, and all that was told to come again was appended before it.

        Under transactions v1. T1 is committed by another process, which dies before it has told its client, or taken
        back what is said of T1's appends. An AddPartitionsToTxn of T1 that sat in a broker's queue begins T2, of the
        same epoch. The client asks for its commit again, and a refusal would say that T1 was not committed.
        """
        if self._v2 or not self._pending or any(self._guarded(each.topic) is None for each in found.partitions):
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
    ) -> ReadBack | Verdict | None:
        """None: all of it is as it should be."""
        ours = at is not None and at.producer_epoch == self._epoch
        first = at.first_offset if at is not None and ours else None
        pending = self._pending.get(partition)
        if written is None and first is None:
            if pending:
                return _refuse("append_unresolved", f"a conditional append to {partition} was never appended")
            if self._v2 and at is not None and ours and at.last_sequence >= 0:
                return _refuse("aborted", f"a marker ended its part on {partition} before its time")
            return None  # it was added, and never written to
        assert self._transaction is not None
        if written is not None and first is not None and partition not in self._transaction.partitions:
            return _refuse("cannot_be_proved", f"its coordinator does not know that it has appended to {partition}")
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
            return _refuse("aborted", f"what it appended to {partition} is not part of it any more")
        policy = self._guarded(partition.topic)
        if policy is not None and policy.carrier_base:
            return _refuse(
                "cannot_be_proved",
                f"not all of its appends to {partition} passed this process, and with "
                "expected.offsets.carrier=base the log does not say where they should lie",
            )
        starts = [each for each in (first, None if written is None else written.first_offset) if each is not None]
        checked = (0, 0)
        if written is not None and written.whole and not pending:
            checked = written.first_offset, written.end_offset  # sequences have no gap there: nothing else is between
        return ReadBack(self._producer_id, partition, min(starts), checked)

    # ---- the log

    def _log_known(self, log: LogIs) -> tuple[Ask, ...] | Verdict:
        if log.partition not in self._reading:
            return ()
        if log.gone:
            return _refuse("cannot_be_proved", f"the log of {log.partition} does not reach back to its first append")
        if log.batches is None:
            return _later(f"the log of {log.partition} could not be read")
        verdict = self._batches(log.partition, log.batches)
        if verdict is not None:
            return verdict
        self._reading.discard(log.partition)
        return () if self._reading else PASS

    def _batches(self, partition: TopicPartition, batches: tuple[Logged, ...]) -> Verdict | None:
        known = self._known()
        written = None if known is None else known.written.get(partition)
        of_it: list[Logged] = []
        for each in batches:
            if each.marker is Marker.ABORT and written is not None and written.conditional and of_it:
                # By its client, at another process, or by an administrator in the middle of it: nothing tells which.
                return _refuse("aborted", f"a marker at {each.base_offset} aborted what it appended to {partition}")
            if each.marker is not None:
                of_it.clear()  # that was the transaction before it
            elif each.producer_epoch == self._epoch:
                of_it.append(each)
        for each in of_it:
            if each.conditional and each.expected != each.base_offset:
                wanted = "an offset that it cannot have" if each.expected is None else each.expected
                return _refuse(
                    "violation", f"OFFSET_VIOLATION {partition} expected={wanted} appended_at={each.base_offset}"
                )
        at = self._producers[partition]
        is_open = at is not None and at.producer_epoch == self._epoch and at.first_offset is not None
        if is_open != bool(of_it) or (of_it and at is not None and self._last_sequence(of_it) != at.last_sequence):
            return _later(f"what the leader of {partition} knows and what its log shows are of different moments")
        if of_it and self._v2 and of_it[0].base_sequence != 0:
            return _refuse("aborted", f"what it appended to {partition} first is not part of it any more")
        missing = self._pending.get(partition, set()) - {each.base_sequence for each in of_it if each.conditional}
        if missing:
            return _refuse(
                "append_unresolved", f"a conditional append to {partition} (sequence {min(missing)}) is not in its log"
            )
        return None

    @staticmethod
    def _last_sequence(batches: list[Logged]) -> int:
        last = batches[-1]
        return (last.base_sequence + last.record_count - 1) % SEQUENCE_MODULUS
