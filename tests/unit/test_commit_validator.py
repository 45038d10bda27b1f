"""The decision on a commit: each source of facts, and each way in which it can mislead."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest

from fencepost_policies.append import Append
from fencepost_proxy.errors import Error
from fencepost_proxy.topics.abort_only import AbortOnly
from fencepost_proxy.transactions.commit_validator import (
    CheckedTopic,
    CommitQuery,
    CommitValidator,
    Decision,
    Logged,
    LogIs,
    Marker,
    Outcome,
    ProducerAt,
    ProducersAre,
    QueryProducers,
    QueryTransaction,
    ReadBack,
    ReadState,
    StateRead,
    TimedOut,
    TransactionIs,
)
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition

TXN, ID, EPOCH = "transfer", 7, 3
A, B, FREE = TopicPartition("checked", 0), TopicPartition("checked", 1), TopicPartition("free", 0)
BASE = TopicPartition("base", 0)
ON_A = TransactionIs(True, ID, EPOCH, "Ongoing", frozenset({A}))


def append(partition: TopicPartition, sequence: int, expected: int | None, *, count: int = 1) -> Append:
    return Append(
        topic=partition.topic,
        partition=partition.partition,
        record_count=count,
        expected_base_offset=expected,
        producer_id=ID,
        producer_epoch=EPOCH,
        base_sequence=sequence,
        transactional=True,
    )


@dataclass
class World:
    """All facts. By default the transaction is on A, and this process knows nothing of it."""

    table: Table = field(default_factory=Table)
    abort_only_records: tuple[AbortOnly, ...] | None = ()
    transaction: TransactionIs = field(default_factory=lambda: ON_A)
    transaction_then: TransactionIs | None = None  # when its coordinator is queried again
    producers: dict[TopicPartition, ProducerAt | None] = field(default_factory=dict)
    logs: dict[TopicPartition, tuple[Logged, ...] | None] = field(default_factory=dict)
    out_of_range: bool = False
    v2: bool = True
    may_be_committed: bool = False
    queried: list[CommitQuery] = field(default_factory=list)

    def appends(
        self, partition: TopicPartition, sequence: int, expected: int | None, at: int, *, count: int = 1
    ) -> None:
        """An append through this process."""
        one = append(partition, sequence, expected, count=count)
        self.table.submitted(TXN, one)
        self.table.sent(TXN, one)
        self.table.appended_batch(TXN, one, at)

    def validate(self) -> CommitValidator:
        is_checked = {"checked": CheckedTopic(), "base": CheckedTopic(source_is_base=True)}
        return CommitValidator(
            self.table, TXN, ID, EPOCH, v2=self.v2, is_checked=is_checked.get, may_be_committed=self.may_be_committed
        )

    def decision(self) -> Decision:
        validate = self.validate()
        stated = validate.begin()
        while not isinstance(stated, Decision):
            assert stated, "no query and no decision"
            queries_to_send, stated = stated, ()
            for query in queries_to_send:
                self.queried.append(query)
                more = validate.handle(self._answer(query))
                if isinstance(more, Decision):
                    return more
                stated = (*stated, *more)
        return stated

    def _answer(self, query: CommitQuery) -> StateRead | TransactionIs | ProducersAre | LogIs:
        match query:
            case ReadState():
                return StateRead(self.abort_only_records)
            case QueryTransaction():
                again = sum(isinstance(each, QueryTransaction) for each in self.queried) > 1
                return self.transaction_then if again and self.transaction_then is not None else self.transaction
            case QueryProducers(_, partitions):
                return ProducersAre({each: self.producers[each] for each in partitions if each in self.producers})
            case ReadBack(_, partition, from_offset):
                batches = self.logs[partition]
                if batches is not None:
                    batches = tuple(each for each in batches if each.base_offset >= from_offset)
                return LogIs(partition, batches, out_of_range=self.out_of_range)


def logged(at: int, sequence: int, expected: int | None = None, *, count: int = 1, epoch: int = EPOCH) -> Logged:
    return Logged(at, count, epoch, sequence, conditional=expected is not None, expected=expected)


def marker(at: int, kind: Marker) -> Logged:
    return Logged(at, 1, EPOCH, -1, marker=kind)


def abort_only(*pending: tuple[TopicPartition, int], name: int = 1, transactional_id: str = TXN) -> AbortOnly:
    return AbortOnly(UUID(int=name), transactional_id, ID, EPOCH, "OFFSET_MISMATCH …", frozenset(pending) or None, 0)


# ---- what this process saw


def test_commit_passes_when_every_append_passed_here() -> None:
    world = World(producers={A: ProducerAt(EPOCH, 2, 10)})
    world.appends(A, 0, 10, 10, count=2)
    world.appends(A, 2, None, 12)
    assert world.decision().outcome is Outcome.PASS
    assert not any(isinstance(query, ReadBack) for query in world.queried)


def test_empty_transaction_after_possible_commit_is_deferred() -> None:
    """1. T1 was committed by another process, which died before the answer.
    2. A late request of T1 began T2 under the same epoch.
    3. A refusal would say that T1 was not committed."""
    world = World(v2=False, abort_only_records=(abort_only((A, 0)),), producers={A: ProducerAt(EPOCH, 1, None)})
    assert world.decision().outcome is Outcome.LATER
    for producer in (None, ProducerAt(EPOCH, -1, None), ProducerAt(EPOCH - 1, 1, None)):
        world.producers = {A: producer}
        assert world.decision().outcome is Outcome.REFUSE, "it was never appended"


def test_nonempty_transaction_is_not_taken_for_its_predecessor() -> None:
    nothing, something = ProducerAt(EPOCH, 1, None), ProducerAt(EPOCH, 3, 10)
    stated = (abort_only((A, 0)),)
    on_both = replace(ON_A, partitions=frozenset({A, B}))
    world = World(v2=False, abort_only_records=stated, transaction=on_both, producers={A: nothing, B: something})
    assert world.decision().outcome is Outcome.REFUSE
    world = World(
        v2=False,
        abort_only_records=stated,
        transaction=replace(ON_A, partitions=frozenset({A, FREE})),
        producers={A: nothing},
    )
    assert world.decision().outcome is Outcome.REFUSE


def test_unrecorded_refusal_is_reported_immediately() -> None:
    world = World()
    world.table.failed(TXN, append(A, 0, 5), 44, "OFFSET_MISMATCH", was_sent=False)
    assert world.decision() == Decision(Outcome.REFUSE, "append_refused", "OFFSET_MISMATCH")
    assert not world.queried


def test_what_was_refused_may_be_another_transactions() -> None:
    """v1: refused here and aborted through another process; the producer's next transaction has the same epoch."""
    world = World(v2=False, producers={A: ProducerAt(EPOCH, 0, 10)}, logs={A: (logged(10, 0, 10),)})
    transaction = world.table.failed(TXN, append(A, 0, 5), 44, "OFFSET_MISMATCH", was_sent=False)
    recorded = world.table.record_to_store(transaction)
    assert recorded is not None
    validate = world.validate()
    assert not isinstance(validate.begin(), Decision)
    world.table.cleared(recorded.name)  # read on the way to the end of the state topic
    assert validate.handle(StateRead(())) == ()
    assert world.decision().outcome is Outcome.PASS


def test_append_in_progress_defers_the_commit() -> None:
    """It may be a late attempt of a batch appended through another process, which sent the commit and died."""
    world = World()
    world.table.submitted(TXN, append(A, 0, 5))
    assert world.decision().outcome is Outcome.LATER
    world.table.sent(TXN, append(A, 0, 5))
    assert world.decision().outcome is Outcome.LATER


def test_append_submitted_during_validation_defers_the_commit() -> None:
    world = World(producers={A: ProducerAt(EPOCH, 0, 10)})
    world.appends(A, 0, 10, 10)
    validate = world.validate()
    validate.begin()
    validate.handle(StateRead(()))
    validate.handle(world.transaction)
    world.table.submitted(TXN, append(B, 0, 9))
    stated = validate.handle(ProducersAre(world.producers))
    assert isinstance(stated, Decision)
    assert stated.outcome is Outcome.LATER


def test_append_at_another_offset_refuses_the_commit() -> None:
    world = World(producers={A: ProducerAt(EPOCH, 0, 11)})
    world.appends(A, 0, 10, 11)
    decision = world.decision()
    assert decision.outcome is Outcome.REFUSE
    assert "expected=10 appended_at=11" in decision.message


def test_commit_sent_to_kafka_before_is_never_refused() -> None:
    """Its answer was lost, so a refusal could be wrong."""
    world = World(producers={A: ProducerAt(EPOCH, 0, 10)})
    world.appends(A, 0, 10, 10)
    world.may_be_committed = True
    world.table.failed(TXN, append(A, 1, 5), 44, "OFFSET_MISMATCH", was_sent=False)
    assert world.decision().outcome is Outcome.LATER
    for state in ("PrepareCommit", "CompleteCommit"):
        world.transaction = replace(world.transaction, state=state)
        assert world.decision().outcome is Outcome.PASS


COMMITTED = TransactionIs(True, ID, EPOCH, "CompleteCommit")
COMMITTED_V2 = replace(COMMITTED, producer_epoch=EPOCH + 1)
PREPARED_V2 = replace(COMMITTED_V2, state="PrepareCommit")


@pytest.mark.parametrize("then", [COMMITTED_V2, PREPARED_V2, TransactionIs(known=False)])
@pytest.mark.parametrize("passed_here", [True, False])
def test_commit_completed_during_validation_is_deferred(then: TransactionIs, passed_here: bool) -> None:
    """The commit was queued in a broker and takes effect between the coordinator's answer and the leaders': its
    marker looks
    like an early end."""
    world = World(producers={A: ProducerAt(EPOCH + 1, -1, None)}, transaction_then=then)
    if passed_here:
        world.appends(A, 0, 10, 10)
    else:
        world.abort_only_records = (abort_only((A, 0)),)  # refused retriably, then appended
    assert world.decision().outcome is Outcome.LATER
    world.transaction, world.transaction_then = COMMITTED_V2, None
    assert world.decision().outcome is Outcome.PASS, "Kafka itself answers"


def test_v1_commit_completed_during_validation_is_deferred() -> None:
    log = (logged(10, 0, 10), marker(11, Marker.COMMIT))
    world = World(
        v2=False, abort_only_records=(abort_only((A, 0)),), producers={A: ProducerAt(EPOCH, 0, None)}, logs={A: log}
    )
    world.appends(A, 0, 10, 10)
    assert world.decision().outcome is Outcome.REFUSE
    world.queried.clear()
    world.transaction_then = COMMITTED
    assert world.decision().outcome is Outcome.LATER


def test_later_findings_do_not_undo_a_refusal() -> None:
    """One partition refuses; the log of another one arrives while the coordinator is queried again."""
    both = replace(ON_A, partitions=frozenset({A, B}))
    world = World(transaction=both, producers=dict.fromkeys((A, B), ProducerAt(EPOCH, 0, 10)))
    validate = world.validate()
    validate.begin()
    validate.handle(StateRead(()))
    validate.handle(both)
    validate.handle(ProducersAre(world.producers))
    assert validate.handle(LogIs(A, (logged(10, 0, 9),))) == (QueryTransaction(TXN),)
    assert validate.handle(LogIs(B, (logged(10, 0, 10),))) == ()
    assert validate.handle(LogIs(B, None)) == ()
    stated = validate.handle(both)
    assert isinstance(stated, Decision)
    assert stated.reason == "violation"


def test_another_transactional_id_with_this_producer_id() -> None:
    """Kafka refuses it; it must not learn of the producer's state."""
    world = World(transaction=TransactionIs(True), abort_only_records=(abort_only(transactional_id="transfer"),))
    world.table.failed("another", append(A, 0, 5), 44, "OFFSET_MISMATCH", was_sent=False)
    world.abort_only_records = (abort_only(transactional_id="another"),)
    assert world.decision().outcome is Outcome.PASS


# ---- what other processes have recorded


@pytest.mark.parametrize("state", ["Ongoing", "Empty", "CompleteCommit", "CompleteAbort", ""])
def test_refused_elsewhere(state: str) -> None:
    """A coordinator that does not know of the transaction would call the commit of nothing a success."""
    partitions = frozenset({A} if state == "Ongoing" else ())
    world = World(abort_only_records=(abort_only(),), transaction=TransactionIs(True, ID, EPOCH, state, partitions))
    assert world.decision().outcome is Outcome.REFUSE
    assert world.decision().abort_only_transactions


def test_append_refused_retriably_elsewhere_then_appended_passes() -> None:
    log = (logged(10, 0, 10),)
    world = World(abort_only_records=(abort_only((A, 0)),), producers={A: ProducerAt(EPOCH, 0, 10)}, logs={A: log})
    decision = world.decision()
    assert (decision.outcome, decision.abort_only_transactions) == (Outcome.PASS, True)


@pytest.mark.parametrize("passed_here", [False, True])
@pytest.mark.parametrize(
    "log", [(logged(10, 0, 10),), (logged(10, 0, 10), logged(11, 1))], ids=["missing", "another in its place"]
)
def test_append_refused_retriably_elsewhere_and_missing_is_unresolved(
    log: tuple[Logged, ...], passed_here: bool
) -> None:
    producers = {A: ProducerAt(EPOCH, log[-1].base_sequence, 10)}
    world = World(abort_only_records=(abort_only((A, 1)),), producers=producers, logs={A: log})
    if passed_here:
        world.appends(A, 0, 10, 10)
    assert world.decision().reason == "append_unresolved"


def test_own_abort_only_record_is_resolved_from_memory() -> None:
    world = World(producers={A: ProducerAt(EPOCH, 0, 10)})
    one = append(A, 0, 10)
    recorded = world.table.record_to_store(world.table.failed(TXN, one, 6, "TRY_AGAIN", was_sent=False))
    assert recorded is not None
    world.appends(A, 0, 10, 10)
    world.abort_only_records = (recorded,)
    assert world.decision().outcome is Outcome.PASS
    assert not any(isinstance(query, ReadBack) for query in world.queried)


# ---- what only the log shows


def test_batches_that_passed_here_are_not_unpacked_again() -> None:
    log = (logged(10, 0), logged(11, 1, count=2), logged(13, 3, 13))
    world = World(producers={A: ProducerAt(EPOCH, 3, 10)}, logs={A: log})
    world.appends(A, 0, 10, 10)
    world.appends(A, 1, 11, 11, count=2)
    assert world.decision().outcome is Outcome.PASS
    assert [each for each in world.queried if isinstance(each, ReadBack)] == [ReadBack(ID, A, 10, (10, 13))]


@pytest.mark.parametrize("why", ["a gap", "an append with a retriable refusal"])
def test_possible_gaps_cause_unpacking_of_passed_batches(why: str) -> None:
    log = (logged(10, 0, 10), logged(11, 1), logged(12, 2, 12), logged(13, 3))
    world = World(producers={A: ProducerAt(EPOCH, 3, 10)}, logs={A: log})
    world.appends(A, 0, 10, 10)
    if why == "a gap":
        world.appends(A, 2, 12, 12)
    else:
        world.abort_only_records = (abort_only((A, 1)),)
    world.decision()
    assert [each for each in world.queried if isinstance(each, ReadBack)] == [ReadBack(ID, A, 10)]


def test_violation_on_another_partition_is_found() -> None:
    world = World(
        transaction=TransactionIs(True, ID, EPOCH, "Ongoing", frozenset({A, B, FREE})),
        producers={A: ProducerAt(EPOCH, 0, 10), B: ProducerAt(EPOCH, 0, 4)},
        logs={B: (logged(4, 0, 3),)},
    )
    world.appends(A, 0, 10, 10)
    assert world.decision().reason == "violation"
    assert QueryProducers(ID, (A, B)) in world.queried  # the other topic is not checked


def test_expected_offset_missing_from_log_cannot_be_proved() -> None:
    world = World(
        transaction=TransactionIs(True, ID, EPOCH, "Ongoing", frozenset({BASE})),
        producers={BASE: ProducerAt(EPOCH, 0, 10)},
    )
    assert world.decision().reason == "cannot_be_proved"
    world.appends(BASE, 0, 10, 10)
    assert world.decision().outcome is Outcome.PASS


def on_a(
    sequence: int, first: int | None, *log: Logged, here: tuple[tuple[int, int | None, int], ...] = (), v2: bool = True
) -> World:
    """The leader of A has this last sequence, and knows where the transaction begins. `here`: sequence, expected offset
    and offset of appends through this process."""
    world = World(v2=v2, producers={A: ProducerAt(EPOCH, sequence, first)}, logs={A: log})
    for each in here:
        world.appends(A, *each)
    return world


AT_10, COMMIT, ABORT = logged(10, 0, 10), marker(11, Marker.COMMIT), marker(11, Marker.ABORT)
MARKED = ((0, 10, 10), (1, 12, 12))


@pytest.mark.parametrize(
    ("world", "stated"),
    [
        (on_a(2, 10, AT_10, logged(13, 1), logged(20, 2, 20)), Outcome.PASS),
        (on_a(1, 10, here=((SEQUENCE_MODULUS - 1, 10, 10), (0, 11, 11), (1, None, 12)), v2=False), Outcome.PASS),
        # The first and the last are known here, but are not adjacent.
        (on_a(2, 10, AT_10, logged(12, 1, 11), logged(13, 2, 13), here=((0, 10, 10), (2, 13, 13))), "violation"),
        # An expectation that can hold nowhere.
        (on_a(0, 10, Logged(10, 2, EPOCH, 0, conditional=True)), "violation"),
        # Log and leader disagree.
        (on_a(1, 10), Outcome.LATER),
        (on_a(1, 10, AT_10), Outcome.LATER),
        # Each v2 transaction has a different epoch, so what ended in this epoch was part of this one.
        (on_a(0, None), "aborted"),
        (on_a(0, None, here=((0, 10, 10),)), "aborted"),
        # Its first sequence is 0; the open part of the log begins with another.
        (on_a(1, 12, logged(12, 1, 12)), "aborted"),
        # Under v1 both transactions have the same epoch; only the marker separates them.
        (on_a(1, 12, AT_10, COMMIT, logged(12, 1, 12), here=MARKED, v2=False), Outcome.PASS),
        (on_a(0, None, AT_10, COMMIT, here=((0, 10, 10),), v2=False), Outcome.PASS),
        (on_a(1, 12, AT_10, ABORT, logged(12, 1, 12), here=MARKED, v2=False), "aborted"),
        # It was added and not written, or by an earlier transaction of that epoch.
        (World(v2=False, producers={A: None}), Outcome.PASS),
        (on_a(4, None, v2=False), Outcome.PASS),
        # The log does not reach back.
        (World(producers={A: ProducerAt(EPOCH, 0, 10)}, logs={A: None}, out_of_range=True), "cannot_be_proved"),
        (World(abort_only_records=(abort_only((B, 0)),), producers={A: None, B: None}), "append_unresolved"),
        (World(transaction=TransactionIs(True, ID, EPOCH - 1, "CompleteCommit")), Outcome.LATER),
    ],
)
def test_decision_follows_from_log_and_leader(world: World, stated: Outcome | str) -> None:
    decision = world.decision()
    assert stated in (decision.outcome, decision.reason)


def test_partition_unknown_to_coordinator_cannot_be_proved() -> None:
    """B gets no marker, so its append would not be committed with the rest."""
    world = World(producers={A: None, B: ProducerAt(EPOCH, 0, 10)})
    world.appends(B, 0, 10, 10)
    assert world.decision().reason == "cannot_be_proved"


# ---- nothing to decide, or unknown facts


@pytest.mark.parametrize(
    "found",
    [
        TransactionIs(True),
        TransactionIs(True, ID, EPOCH, "Empty"),
        TransactionIs(True, ID, EPOCH, "PrepareCommit", frozenset({A})),
        TransactionIs(True, ID, EPOCH, "PrepareAbort", frozenset({A})),
        TransactionIs(True, ID, EPOCH + 1, "Ongoing", frozenset({A})),
        TransactionIs(True, ID + 1, 0, "Ongoing", frozenset({A})),
        TransactionIs(True, ID, EPOCH, "Ongoing", frozenset({FREE})),
    ],
)
def test_kafka_itself_answers(found: TransactionIs) -> None:
    assert World(transaction=found).decision().outcome is Outcome.PASS


def test_unknown_facts_always_defer_the_commit() -> None:
    assert World(abort_only_records=None).decision().outcome is Outcome.LATER
    assert World(transaction=TransactionIs(known=False)).decision().outcome is Outcome.LATER
    elsewhere = World(transaction=TransactionIs(known=False, elsewhere=True)).decision()
    assert (elsewhere.outcome, elsewhere.later) == (Outcome.LATER, Error.NOT_COORDINATOR)
    assert World(producers={}).decision().outcome is Outcome.LATER
    assert World(producers={A: ProducerAt(EPOCH, 0, 1)}, logs={A: None}).decision().outcome is Outcome.LATER
    validate = World().validate()
    validate.begin()
    stated = validate.handle(TimedOut())
    assert isinstance(stated, Decision)
    assert stated.outcome is Outcome.LATER


@pytest.mark.parametrize("state_first", [True, False])
def test_validation_waits_for_both_responses(state_first: bool) -> None:
    world = World(transaction=TransactionIs(True, ID, EPOCH, "Ongoing", frozenset()))
    validate = world.validate()
    validate.begin()
    first, second = StateRead(()), world.transaction
    assert validate.handle(first if state_first else second) == ()
    stated = validate.handle(second if state_first else first)
    assert isinstance(stated, Decision)
    assert stated.outcome is Outcome.PASS
