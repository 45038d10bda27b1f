"""Transactions in a session: paused commits, local answers, and records that are stored before the answer."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse

from fencepost_policies.append import Append
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.frames.services import RELAYED_VERSIONS, but_for
from fencepost_proxy.topics.abort_only import AbortOnly, AbortOnlyView, cleared, encode_abort_only_record
from fencepost_proxy.transactions.commit_validator import Decision, Outcome
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.wire.apis import END_TXN
from fencepost_proxy.wire.produce import PartitionResult
from tests.support.raw import Producer, batch
from tests.support.sequencer_calls import Call
from tests.unit.test_session import HEARTBEAT, Talk, produce, produced, read, request, response

TXN, ID, EPOCH = "transfer", 77, 3
OK, NOT_LEADER, REQUEST_TIMED_OUT, POLICY_VIOLATION = 0, 6, 7, 44
NOT_COORDINATOR, CONCURRENT, UNKNOWN_PRODUCER_ID, ABORTABLE = 16, 51, 59, 120
LOADING, WRONG_COORDINATOR, INVALID_PRODUCER_ID_MAPPING, DENIED = 14, 16, 49, 53
#: Of Produce requests.
TRANSACTIONAL: Any = {"version": 11, "acks": -1, "transactional_id": TXN}
APPEND = Append("checked-a", 0, 1, expected_base_offset=5, producer_id=ID, producer_epoch=EPOCH, base_sequence=0)
PASS = Decision(Outcome.PASS, "passed")
REFUSE = Decision(Outcome.REFUSE, "append_refused", "OFFSET_MISMATCH …")
LATER = Decision(Outcome.LATER, "unknown")
ELSEWHERE = Decision(Outcome.LATER, "unknown", later=Error.NOT_COORDINATOR)


each_end = pytest.mark.parametrize("end", [m.ClientLost(), m.UpstreamLost("it broke")])


def proved_talk(**services: Any) -> Talk:
    """Kafka has let this client use its transactional id."""
    talk = unproved_talk(**services)
    talk.session._core.proofs.may_use = TXN
    return talk


def unproved_talk(**services: Any) -> Talk:
    return Talk(relayed_versions=but_for(RELAYED_VERSIONS, END_TXN), **services)


def end_txn(*, commit: bool = True, version: int = 3, correlation: int = 1, epoch: int = EPOCH) -> bytes:
    message = EndTxnRequest[version](transactional_id=TXN, producer_id=ID, producer_epoch=epoch, committed=commit)
    message.with_header(correlation_id=correlation, client_id="test")
    return bytes(message.encode(header=True, framed=True))


def ended(error: int, *, version: int = 3, correlation: int = 1) -> bytes:
    message = EndTxnResponse[version](throttle_time_ms=0, error_code=error, producer_id=ID, producer_epoch=EPOCH + 1)
    message.with_header(correlation_id=correlation)
    return bytes(message.encode(header=True, framed=True))


def code(answer: bytes, version: int = 3) -> int:
    return int(EndTxnResponse.decode(answer, version=version, header=True, framed=True).error_code)


def append(
    *partitions: int, expected: int | None = 5, correlation: int = 1, sequence: int = 0, corrupt: bool = False
) -> bytes:
    records = bytearray(batch(b"x", expected=expected, producer=Producer(ID, EPOCH, sequence), transactional=True))
    if corrupt:
        records[-1] ^= 1
    batches = [("checked-a", partition, memoryview(bytes(records))) for partition in partitions or (0,)]
    return produce(*batches, **TRANSACTIONAL, correlation=correlation)


def commits(talk: Talk, decision: Decision = PASS, **how: int) -> m.ValidateCommit:
    """The client commits, and the commit is decided."""
    talk.client(end_txn(**how))
    queried = talk.next(m.ValidateCommit)
    talk.report(m.CommitDecided(queried.token, decision))
    return queried


@pytest.fixture
def talk() -> Talk:
    return proved_talk()


# ---- commits


def test_commit_waits_for_its_decision(talk: Talk) -> None:
    talk.client(end_txn() + request(HEARTBEAT, 4, 2))
    assert talk.next(m.ValidateCommit) == m.ValidateCommit(1, TXN, ID, EPOCH, 3)
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    talk.silent()
    talk.report(m.CommitDecided(1, PASS))
    assert talk.next(m.ReadClient) == m.ReadClient(True)
    assert talk.upstream() == end_txn() + request(HEARTBEAT, 4, 2)
    talk.kafka(ended(OK) + response(2))
    assert talk.answer() == ended(OK) + response(2)
    talk.silent()
    assert talk.session.drained


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(("decision", "error"), [(REFUSE, None), (LATER, CONCURRENT), (ELSEWHERE, NOT_COORDINATOR)])
def test_undecided_or_refused_commit_is_answered_locally(
    decision: Decision, error: int | None, version: int, talk: Talk
) -> None:
    commits(talk, decision, version=version)
    refused = ABORTABLE if version >= 4 else UNKNOWN_PRODUCER_ID
    if decision is REFUSE:
        assert talk.next(m.Count).label == "commit_refused"
    answer = talk.answer()
    assert code(answer, version) == (error or refused)
    if version >= 5:
        reported = EndTxnResponse.decode(answer, version=version, header=True, framed=True)
        assert (reported.producer_id, reported.producer_epoch) == (-1, -1)
    talk.silent()


def test_its_answer_waits_for_those_before_it(talk: Talk) -> None:
    talk.client(request(HEARTBEAT, 4, 1))
    talk.upstream()
    commits(talk, REFUSE, correlation=2)
    talk.metric()
    talk.silent()
    talk.kafka(response(1))
    answer = talk.answer()
    assert answer.startswith(response(1))
    assert code(answer[len(response(1)) :]) == UNKNOWN_PRODUCER_ID


def test_an_abort_goes_to_kafka_at_once(talk: Talk) -> None:
    talk.client(end_txn(commit=False))
    assert talk.upstream() == end_txn(commit=False)


def test_v1_abort_is_answered_after_abort_only_cleared(talk: Talk) -> None:
    """The next transaction has the same epoch."""
    talk.client(end_txn(commit=False))
    talk.upstream()
    talk.kafka(ended(OK))
    assert talk.next(m.ClearAbortOnly) == m.ClearAbortOnly(1, ID, EPOCH)
    talk.silent()
    talk.report(m.AbortOnlyRecorded(1, False))  # it must be able to go on
    assert talk.answer() == ended(OK)


@pytest.mark.parametrize("commit", [False, True])
def test_v2_need_not_wait_for_that(commit: bool, talk: Talk) -> None:
    talk.client(end_txn(commit=commit, version=5))
    if commit:
        talk.next(m.ValidateCommit)
        talk.report(m.CommitDecided(1, Decision(Outcome.PASS, "passed", abort_only_transactions=True)))
    talk.upstream()
    talk.kafka(ended(OK, version=5))
    assert talk.next(m.ClearAbortOnly) == m.ClearAbortOnly(0, ID, EPOCH)
    assert talk.answer() == ended(OK, version=5)


def test_end_refused_by_kafka_changes_nothing(talk: Talk) -> None:
    land(talk)
    for correlation, commit in ((2, False), (3, True)):
        talk.client(end_txn(commit=commit, correlation=correlation))
        if commit:
            talk.next(m.ValidateCommit)
            talk.report(m.CommitDecided(1, PASS))
            assert may_be_committed(talk)
        talk.upstream()
        talk.kafka(ended(CONCURRENT, correlation=correlation))
        assert code(talk.answer()) == CONCURRENT
        assert not may_be_committed(talk)
    talk.silent()


@each_end
def test_commit_on_broken_connection_counts_as_queued_temporarily(end: m.Event, talk: Talk) -> None:
    """The commit may take effect and may be repeated elsewhere. Under v1 the next transaction has the same epoch."""
    talk.services.transactions = Table(queued_seconds=35.0)
    land(talk)
    assert not commits(talk, correlation=2).may_be_committed
    talk.upstream()
    talk.report(end)
    later = proved_talk()
    later.services.transactions, later.now = talk.services.transactions, talk.now + 34.9
    assert commits(later, LATER).may_be_committed
    later.answer()
    later.now += 0.2
    assert not commits(later, LATER).may_be_committed
    later.answer()
    later.client(append(sequence=1))
    assert later.submitted().append.base_sequence == 1


@pytest.mark.parametrize("end", [None, m.ClientLost(), m.UpstreamLost("it broke")])
def test_commit_validated_elsewhere_also_counts_as_queued(end: m.Event | None, talk: Talk) -> None:
    """This process has no state of the transaction; its commit is on its way to Kafka."""
    talk.services.transactions = Table(queued_seconds=35.0)
    assert not commits(talk).may_be_committed
    talk.upstream()
    if end is not None:
        talk.report(end)
    # Then: it is never refused for certain, and nothing is appended after it.
    later = proved_talk()
    later.services.transactions, later.now = talk.services.transactions, talk.now
    assert commits(later, LATER).may_be_committed
    later.answer()
    later.client(append())
    later.metric()
    assert later.next(m.RecordAbortOnly).abort_only.pending is not None


@pytest.mark.parametrize(("appended", "error"), [(False, CONCURRENT), (True, OK)])
def test_answered_commit_leaves_no_state(appended: bool, error: int, talk: Talk) -> None:
    """If it was refused, state of what this process has appended stays: `test_end_refused_by_kafka_changes_nothing`."""
    if appended:
        land(talk)
    commits(talk, correlation=2)
    talk.upstream()
    talk.kafka(ended(error, correlation=2))
    talk.answer()
    assert not len(talk.services.transactions)


@each_end
def test_late_commit_decision_changes_nothing(end: m.Event, talk: Talk) -> None:
    talk.client(end_txn())
    talk.next(m.ValidateCommit)
    talk.report(end)
    talk.commands.clear()
    talk.report(m.CommitDecided(1, PASS))
    assert not any(isinstance(command, m.ToUpstream | m.ToClient) for command in talk.commands)


def test_a_client_that_left_commits_nothing_more(talk: Talk) -> None:
    """The client may have committed elsewhere and begun its next transaction."""
    talk.client(append() + end_txn(correlation=2))
    pending = talk.submitted()
    talk.commands.clear()
    talk.admit_again(pending)
    talk.sent(pending)
    token = next(command.token for command in talk.commands if isinstance(command, m.ValidateCommit))
    talk.report(m.ClientLost())
    talk.commands.clear()
    talk.report(m.CommitDecided(token, PASS))
    talk.silent()
    assert not talk.session.state.upstream_closed  # it waits for what became of the append


# ---- appends


def transaction(talk: Talk) -> Any:
    found = talk.services.transactions.of(TXN, ID, EPOCH)
    assert found is not None
    return found


def send(talk: Talk, sequence: int = 0) -> g.PendingAppend:
    talk.client(append(sequence=sequence))
    assert transaction(talk).under_way
    pending = talk.admitted(fenced=False)
    talk.upstream()
    return pending


def may_be_committed(talk: Talk) -> bool:
    return talk.services.transactions.may_be_committed(TXN, ID, EPOCH, talk.now)


def land(talk: Talk, sequence: int = 0) -> None:
    """An append at 5."""
    pending = send(talk, sequence)
    assert transaction(talk).has_partitions
    talk.completed(pending, produced(("checked-a", 0, OK, 5), version=11), PartitionResult(0, OK, 5))
    assert read(talk.answer(), 11)["checked-a", 0][:2] == (OK, 5)


def refuse(talk: Talk, error: int = POLICY_VIOLATION, **settings: Any) -> AbortOnly:
    """The sequencer refuses an append; returns the record to store. Nothing is answered yet."""
    talk.client(append(**settings))
    result = PartitionResult(0, error, 57, error_message="OFFSET_MISMATCH …")
    talk.complete(talk.submitted(), result, "offset_mismatch")
    talk.metric()
    prove(talk)
    return talk.next(m.RecordAbortOnly).abort_only


def recorded(talk: Talk, token: int = 1, *, stored: bool = True) -> tuple[int, int, str | None]:
    """The record is stored, or could not be; returns the answer of partition 0: error, base offset, message."""
    talk.report(m.AbortOnlyRecorded(token, stored))
    return read(talk.answer(), 11)["checked-a", 0]


def codes(talk: Talk) -> list[int]:
    """The errors of partitions 0 and 1."""
    reported = read(talk.answer(), 11)
    return [reported["checked-a", partition][0] for partition in (0, 1)]


def prove(talk: Talk) -> None:
    """WRITE, where it is not yet proved."""
    if talk.commands and isinstance(talk.commands[0], m.ToUpstream):
        talk.upstream()
        talk.kafka(produced(("checked-a", 0, 87, -1), version=9))


def test_appended_batch_is_recorded_in_its_transaction(talk: Talk) -> None:
    land(talk)
    assert [(w.first_offset, w.last_sequence) for w in transaction(talk).written.values()] == [(5, 0)]
    talk.silent()


def test_refusal_is_recorded_before_it_is_answered(talk: Talk) -> None:
    abort_only = refuse(talk)
    assert (abort_only.transactional_id, abort_only.producer_id, abort_only.producer_epoch) == (TXN, ID, EPOCH)
    assert abort_only.pending is None
    talk.silent()
    assert recorded(talk) == (POLICY_VIOLATION, 57, "OFFSET_MISMATCH …")


def test_unstorable_refusal_becomes_a_retriable_error(talk: Talk) -> None:
    refuse(talk)
    error, base_offset, message = recorded(talk, stored=False)
    assert (error, base_offset) == (NOT_LEADER, -1)
    assert (message or "").startswith("TRY_AGAIN")
    # The next refusal is recorded under another name.
    refuse(talk)
    assert recorded(talk, 2)[0] == POLICY_VIOLATION


def test_repeated_refusal_is_recorded_once() -> None:
    """The client neither aborts nor stops; the state in every process stays bounded."""
    talk, view = proved_talk(), AbortOnlyView()
    for number in range(1, 50):
        talk.client(append())
        result = PartitionResult(0, POLICY_VIOLATION, 57, error_message="…")
        talk.complete(talk.submitted(), result, "mismatch")
        talk.metric()
        prove(talk)
        recording = talk.next(m.RecordAbortOnly)
        for record in encode_abort_only_record(recording.abort_only, recording.instead_of):
            view.apply(record.key.decode(), record.value)
            if (name := cleared(record)) is not None:
                talk.services.transactions.cleared(name)
        assert recorded(talk, recording.token)[0] == POLICY_VIOLATION
        assert [each.name for each in view.of(ID, EPOCH)] == [recording.abort_only.name], f"refused {number} times"
        assert transaction(talk).refused
        assert len(transaction(talk).names) == 1


def test_retriable_refusal_replaces_no_other_record(talk: Talk) -> None:
    """It says nothing about the outcome of the others."""
    refuse(talk, NOT_LEADER)
    talk.report(m.AbortOnlyRecorded(1, True))
    talk.answer()
    talk.client(append(1))
    talk.complete(talk.submitted(), PartitionResult(1, NOT_LEADER), "try_again")
    talk.metric()
    assert not talk.next(m.RecordAbortOnly).instead_of


def test_late_abort_only_record_gives_retriable_error(talk: Talk) -> None:
    refuse(talk)
    talk.tick(3)
    talk.fails(NOT_LEADER, version=11)
    talk.report(m.AbortOnlyRecorded(1, True))
    talk.silent()
    assert talk.session.drained


def test_retriable_error_is_answered_even_if_unrecorded(talk: Talk) -> None:
    abort_only = refuse(talk, NOT_LEADER)
    assert abort_only.pending is not None
    assert recorded(talk, stored=False) == (NOT_LEADER, 57, "OFFSET_MISMATCH …")


def test_failed_unconditional_append_is_not_a_refusal(talk: Talk) -> None:
    talk.client(append(expected=None))
    pending = talk.admitted(fenced=False)
    talk.upstream()
    talk.completed(pending, produced(("checked-a", 0, 10, -1), version=11), PartitionResult(0, 10))
    assert read(talk.answer(), 11)["checked-a", 0][0] == 10
    assert transaction(talk).refused is None


def test_unreadable_batch_is_handled_as_conditional(talk: Talk) -> None:
    talk.client(append(corrupt=True))
    talk.metric()
    abort_only = talk.next(m.RecordAbortOnly).abort_only
    assert abort_only.pending is not None  # CORRUPT_MESSAGE: clients send it again
    assert recorded(talk)[0] == 2


def test_unanswered_append_is_pending_until_outcome_is_known(talk: Talk) -> None:
    pending = send(talk)
    talk.tick(3)
    talk.lost(pending)
    talk.metric()
    recording = talk.next(m.RecordAbortOnly)
    assert recording.abort_only.pending is not None
    assert read(talk.answer(), 11)["checked-a", 0][0] == 7
    assert transaction(talk).pending
    talk.complete(pending, PartitionResult(0, OK, 5))
    assert not transaction(talk).pending
    talk.report(m.AbortOnlyRecorded(recording.token, True))
    talk.silent()


def test_a_client_that_left_is_not_waited_for(talk: Talk) -> None:
    pending = send(talk)
    talk.report(m.ClientLost())
    violation = PartitionResult(0, POLICY_VIOLATION, 6, error_message="OFFSET_VIOLATION")
    talk.completed(pending, produced(("checked-a", 0, OK, 6), version=11), violation)
    assert talk.next(m.RecordAbortOnly).abort_only.reason == "OFFSET_VIOLATION"
    talk.next(m.CloseUpstream)


def test_a_broken_connection_leaves_it_to_the_log(talk: Talk) -> None:
    talk.client(append())
    pending = talk.submitted()
    talk.admit_again(pending)
    talk.report(m.UpstreamLost("it broke"))
    assert transaction(talk).under_way is None
    assert transaction(talk).pending


@each_end
def test_unsent_refusal_does_not_delay_the_commit(end: m.Event, talk: Talk) -> None:
    """The first partition refuses, the append to the second waits, and the connection breaks."""
    talk.client(append(0, 1))
    talk.refused(talk.submitted())
    talk.submitted()
    assert transaction(talk).under_way
    talk.report(end)
    assert transaction(talk).under_way is None
    assert len(transaction(talk).pending) == 2


def test_refusal_with_a_lost_append_delays_no_commit(talk: Talk) -> None:
    """The first partition refuses, the append to the second was sent, and the upstream connection breaks."""
    send_beside_a_refusal(talk)
    talk.report(m.UpstreamLost("it broke"))
    assert transaction(talk).under_way is None
    assert len(transaction(talk).pending) == 2


def test_unstored_refusal_with_unanswered_append_becomes_retriable(talk: Talk) -> None:
    pending = send_beside_a_refusal(talk)
    talk.tick(3)
    talk.lost(pending)
    talk.metric()
    recording = talk.next(m.RecordAbortOnly)
    assert recording.abort_only.pending is not None
    assert {partition.partition for partition, _ in recording.abort_only.pending} == {0, 1}
    assert codes(talk) == [NOT_LEADER, REQUEST_TIMED_OUT]
    assert transaction(talk).under_way is None
    # The sequencer resolves the second.
    talk.complete(pending, PartitionResult(1, OK, 5))
    assert {partition.partition for partition, _ in transaction(talk).pending} == {0}


def send_beside_a_refusal(talk: Talk) -> g.PendingAppend:
    """The first partition refuses; returns the append that was sent to the second."""
    land(talk)  # it has proved that it may write there
    talk.client(append(0, 1, sequence=1))
    talk.refused(talk.submitted())
    pending = talk.admitted(fenced=False)
    talk.upstream()
    assert transaction(talk).under_way
    return pending


def test_append_during_its_commit_gets_retriable_error(talk: Talk) -> None:
    """The commit was validated without it."""
    land(talk)
    talk.services.transactions.commit_sent(TXN, ID, EPOCH)
    talk.client(append(sequence=1, correlation=1))
    talk.metric()
    talk.next(m.RecordAbortOnly)
    error, _, message = recorded(talk)
    assert error == NOT_LEADER
    assert "a commit of its transaction is being sent" in (message or "")


def test_several_partitions_are_answered_together(talk: Talk) -> None:
    talk.client(append(0, 1))
    talk.complete(talk.submitted(), PartitionResult(0, POLICY_VIOLATION, 57, error_message="OFFSET_MISMATCH"), "x")
    talk.metric()
    second = talk.admitted(fenced=False)
    talk.upstream()
    talk.completed(second, produced(("checked-a", 1, OK, 5), version=11), PartitionResult(1, OK, 5))
    talk.next(m.RecordAbortOnly)
    talk.silent()
    talk.report(m.AbortOnlyRecorded(1, False))
    assert codes(talk) == [NOT_LEADER, OK]


# ---- permissions


def proof(talk: Talk) -> Any:
    """The permission query: an abort of a producer that does not exist."""
    queried = EndTxnRequest.decode(talk.upstream(), version=1, header=True, framed=True)
    assert (queried.transactional_id, queried.committed) == (TXN, False)
    assert (queried.producer_id, queried.producer_epoch) == (-1, -1)
    return queried


def stated(talk: Talk, error: int, correlation: int = 1) -> None:
    """Kafka's answer to the query whether this client may use its transactional id."""
    proof(talk)
    talk.silent()
    talk.kafka(ended(error, version=1, correlation=correlation))


@pytest.mark.parametrize("error", [WRONG_COORDINATOR, INVALID_PRODUCER_ID_MAPPING, LOADING])
def test_transactional_id_permission_is_queried_once(error: int) -> None:
    """Any other error than DENIED proves it: Kafka checks the right first."""
    talk = unproved_talk()
    talk.client(end_txn(correlation=2) + request(HEARTBEAT, 4, 3))
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    stated(talk, error, 2)
    assert talk.next(m.ValidateCommit) == m.ValidateCommit(1, TXN, ID, EPOCH, 3)
    talk.silent()
    talk.report(m.CommitDecided(1, REFUSE))
    talk.metric()
    assert talk.next(m.ReadClient) == m.ReadClient(True)
    assert talk.upstream() == request(HEARTBEAT, 4, 3)
    assert code(talk.answer()) == UNKNOWN_PRODUCER_ID
    talk.kafka(response(3))
    talk.answer()
    talk.client(end_txn(correlation=4))
    talk.next(m.ValidateCommit)
    talk.silent()
    talk.report(m.CommitDecided(2, LATER))
    assert code(talk.answer()) == CONCURRENT
    talk.client(append(correlation=5))
    talk.submitted()


@pytest.mark.parametrize("version", [0, 3, 4, 5])
def test_unauthorized_commit_is_answered_like_kafka(version: int) -> None:
    talk = unproved_talk()
    talk.services.transactions.appended_batch(TXN, APPEND, 5)
    for correlation in (1, 2):  # every time
        talk.client(end_txn(version=version, correlation=correlation))
        stated(talk, DENIED, correlation)
        answer = talk.answer()
        assert code(answer, version) == DENIED
        if version >= 5:
            reported = EndTxnResponse.decode(answer, version=version, header=True, framed=True)
            assert (reported.producer_id, reported.producer_epoch) == (-1, -1)
    talk.silent()
    assert not may_be_committed(talk)
    assert talk.session.drained


@pytest.mark.parametrize("records", ["conditional", "unconditional", "corrupt"])
def test_unauthorized_append_does_not_reach_the_sequencer(records: str) -> None:
    talk = unproved_talk()
    talk.services.transactions.appended_batch(TXN, APPEND, 5)
    expected = None if records == "unconditional" else 77
    talk.client(append(0, 1, expected=expected, sequence=1, corrupt=records == "corrupt") + request(HEARTBEAT, 4, 2))
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    stated(talk, DENIED)
    assert talk.next(m.ReadClient) == m.ReadClient(True)
    assert talk.upstream() == request(HEARTBEAT, 4, 2)
    reported = read(talk.answer(), 11)
    assert [reported["checked-a", each][:2] for each in (0, 1)] == [(DENIED, -1), (DENIED, -1)]
    talk.silent()
    known = transaction(talk)
    assert (known.refused, dict(known.open), known.sent_others) == (None, {}, False)


def test_authorized_append_reaches_the_sequencer_after_proof() -> None:
    talk = unproved_talk()
    talk.client(append(correlation=7))
    stated(talk, WRONG_COORDINATOR, 7)
    pending = talk.submitted()
    assert pending.append.expected_base_offset == 5
    talk.silent()


def test_unchecked_transactions_need_no_permission_query() -> None:
    talk = unproved_talk()
    transactional = produce(("unchecked", 0, _transactional()), **TRANSACTIONAL)
    talk.client(transactional)
    assert talk.upstream() == transactional
    talk.produces(("checked-a", 0, memoryview(batch(b"x", expected=5))), **TRANSACTIONAL)
    talk.submitted()


def test_unauthorized_acks_0_append_closes_the_connection() -> None:
    """As Kafka does."""
    talk = unproved_talk()
    talk.produces(("checked-a", 0, _transactional()), **TRANSACTIONAL | {"acks": 0})
    stated(talk, DENIED)
    assert "acks=0" in talk.next(m.CloseClient).reason


@pytest.mark.parametrize("what", [append(), end_txn()], ids=["append", "commit"])
def test_unanswered_permission_query_closes_the_connection(what: bytes) -> None:
    """A refusal would have to be recorded if this client owns the transaction."""
    talk = unproved_talk()
    talk.client(what)
    proof(talk)
    assert talk.session.needs_ticks
    talk.tick(talk.services.request_timeout_seconds - 1)
    talk.silent()
    talk.tick(2)
    closed = talk.next(m.CloseClient)
    assert "transactional id" in closed.reason
    assert closed.fault is None
    assert len(talk.services.transactions) == 0


@pytest.mark.parametrize("what", [append(), end_txn()], ids=["append", "commit"])
@each_end
def test_lost_connection_ends_the_permission_query(what: bytes, end: m.Event) -> None:
    talk = unproved_talk()
    free_bytes = talk.services.free_bytes
    talk.client(what)
    proof(talk)
    talk.report(end)
    talk.commands.clear()
    if isinstance(end, m.ClientLost):
        talk.kafka(ended(INVALID_PRODUCER_ID_MAPPING, version=1))
    talk.silent()
    assert len(talk.services.transactions) == 0
    talk.report(m.ClientLost())
    assert talk.services.free_bytes == free_bytes


def test_append_waiting_for_permission_fails_with_its_predecessor() -> None:
    """B was sent before A's failure was read; A fails while B waits for the permission."""
    talk = unproved_talk()
    first = memoryview(batch(b"x", expected=5, producer=Producer(ID, EPOCH, 0)))
    talk.produces(("checked-a", 0, first), version=11)
    pending = talk.admitted()
    talk.upstream()
    talk.client(append(expected=6, correlation=2))
    proof(talk)
    talk.kafka(produced(("checked-a", 0, NOT_LEADER, -1), version=11))
    talk.next(m.TopicStale)
    assert talk.next(Call).name == "answered"
    talk.complete(pending, PartitionResult(0, NOT_LEADER, error_message="TRY_AGAIN …"), "try_again")
    talk.fails(NOT_LEADER, version=11)
    talk.kafka(ended(INVALID_PRODUCER_ID_MAPPING, version=1, correlation=2))
    assert not any(isinstance(each, Call) for each in talk.commands), "it would be appended without its predecessor"


def _transactional() -> memoryview:
    return memoryview(batch(b"x", producer=Producer(ID, EPOCH, 0), transactional=True))
