"""Where clients log in, no append reaches a barrier or a sequencer before Kafka has confirmed WRITE."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from fencepost_proxy.errors import ClientProtocolError, UpstreamProtocolError
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, PRODUCE, WRITE_TXN_MARKERS
from fencepost_proxy.wire.control import decode_request, encode_response_frame, parse_request_header
from fencepost_proxy.wire.produce import PartitionResult, parse_produce_request
from fencepost_proxy.wire.schema import Message
from tests.support.batches import batch, expecting
from tests.support.sequencer_calls import Call, call
from tests.unit import test_partition_counts as barriers
from tests.unit import test_session_transactions as transactions
from tests.unit.test_logins import AUTHENTICATE, HANDSHAKE, logged_in, logs_in, relays
from tests.unit.test_session import (
    HEARTBEAT,
    INVALID_RECORD,
    NOT_AUTHORIZED,
    NOT_LEADER,
    WHERE,
    Joining,
    Talk,
    produce,
    produced,
    read,
    request,
    response,
)

TOPIC = "checked-a"
MAY, MAY_NOT, ILLEGAL_SASL_STATE, OUT_OF_ORDER = INVALID_RECORD, NOT_AUTHORIZED, 34, 45
AT_5 = PartitionResult(0, 0, 5)


class Proving(Talk):
    """A client with a login. Whether it is read does not matter here."""

    def __init__(self, **services: Any) -> None:
        super().__init__(clients_log_in=True, **services)

    def call(self, function: Callable[..., list[m.Command]], *arguments: Any) -> None:
        super().call(function, *arguments)
        self.commands = [each for each in self.commands if not isinstance(each, m.ReadClient)]

    def appends(self, at: int = 5, *, topic: str = TOPIC, correlation: int = 1, **options: Any) -> None:
        self.produces((topic, 0, expecting(at, b"x")), correlation=correlation, **options)

    def queries_first(self, at: int = 5, **options: Any) -> None:
        """An append for which Kafka is queried first."""
        self.appends(at, **options)
        assert self.queried() == [options.get("topic", TOPIC)]

    def queried(self) -> list[str]:
        """The topics of a query that appends nothing."""
        probe = self.sent_up()
        assert (probe.acks, probe.transactional_id) == (1, None)
        assert not any(data.records for topic in probe.topics for data in topic.partitions)
        return [topic.name for topic in probe.topics]

    def rules(self, code: int, topic: str = TOPIC, *, correlation: int = 1) -> None:
        """Kafka answers the query, or an append, about one topic."""
        self.says((topic, 0, code, -1), correlation=correlation)

    def reported(self) -> dict[tuple[str, int], tuple[int, int, str | None]]:
        return read(self.answer())


def allowed(**services: Any) -> Proving:
    """Of a client that has proved WRITE."""
    talk = Proving(**services)
    talk.session._core.proofs.may_write[TOPIC] = talk.now
    return talk


@pytest.fixture
def talk() -> Proving:
    return Proving()


# --- before a sequencer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_queued", [False, True])
def test_append_with_acks_0_is_sent_after_its_client_has_disconnected(is_queued: bool, talk: Proving) -> None:
    # Given: its client disconnects while Kafka is queried, or while it waits for its sequencer.
    talk.produces((TOPIC, 0, batch(b"x")), acks=0)
    assert talk.queried() == [TOPIC]
    if is_queued:
        talk.rules(MAY)
        pending = talk.submitted()
        talk.report(m.ClientLost())
    else:
        talk.report(m.ClientLost())
        talk.rules(MAY)
        pending = talk.submitted()
    talk.silent()

    # Then: it is sent, and again with another sequence if its sequencer decides so.
    talk.admit(pending)
    talk.sent(pending)
    talk.upstream()
    talk.rules(OUT_OF_ORDER)
    assert talk.next(Call).name == "answered"
    talk.admit(pending, sequence=6)
    talk.sent(pending)
    talk.upstream()

    # And: Kafka's answer ends the connection.
    talk.completed(pending, produced((TOPIC, 0, 0, 6)), PartitionResult(0, 0, 6))
    talk.next(m.CloseUpstream)
    talk.silent()
    assert talk.session.finished
    assert talk.services.free_bytes == 1 << 20


@pytest.mark.parametrize("acks", [-1, 1])
def test_waiting_append_of_lost_client_is_not_sent(acks: int, talk: Proving) -> None:
    talk.queries_first(acks=acks)
    talk.report(m.ClientLost())
    talk.next(m.CloseUpstream)
    assert talk.session.finished
    assert talk.services.free_bytes == 1 << 20


def test_kafka_authorizes_an_append_before_it_is_queued(talk: Proving) -> None:
    # Given: an append on a new connection, and a request after it.
    talk.appends()
    talk.client(request(HEARTBEAT, 4, 2))

    # Then: Kafka is queried, nothing is submitted, and the request after it is not read.
    assert talk.queried() == [TOPIC]
    talk.silent()

    # And: once Kafka has confirmed WRITE, the append is processed.
    talk.rules(MAY)
    pending = talk.admitted()
    sent = talk.upstream()
    assert sent.endswith(request(HEARTBEAT, 4, 2))
    assert parse_produce_request(memoryview(sent)[4 : -len(request(HEARTBEAT, 4, 2))]).acks == -1
    talk.rules(0)
    assert talk.next(Call).name == "answered"
    talk.complete(pending, AT_5)
    assert talk.reported() == {(TOPIC, 0): (0, 5, None)}
    talk.kafka(response(2))
    assert talk.answer() == response(2)
    assert talk.services.free_bytes == 1 << 20
    assert talk.session.drained


def test_kafka_authorizes_once_per_connection_and_topic(talk: Proving) -> None:
    talk.queries_first()
    talk.rules(MAY)
    talk.complete(talk.submitted(), AT_5)
    talk.answer()

    talk.now += 3600.0
    talk.client(produce((TOPIC, 1, expecting(5, b"x"))))
    assert talk.submitted().partition == TopicPartition(TOPIC, 1)

    talk = Proving()
    talk.client(produce((TOPIC, 0, expecting(5, b"x")), ("checked-b", 0, batch(b"y")), ("unchecked", 0, batch(b"z"))))
    assert talk.queried() == [TOPIC, "checked-b"]


def test_append_without_login_never_reaches_the_sequencer() -> None:
    """Kafka closes the connection."""
    for acks in (-1, 0, 1):
        talk = Proving()
        talk.queries_first(acks=acks)
        talk.report(m.UpstreamLost("Kafka closed the connection"))
        assert isinstance(talk.next(m.CloseClient), m.CloseClient)
        talk.silent()
        assert talk.services.free_bytes == 1 << 20 or not talk.session.finished


def test_half_a_login_is_none(talk: Proving) -> None:
    """The first SCRAM message of the server precedes the proof of the password."""
    relays(talk, HANDSHAKE, response(7, b"\0\0\0\0\0\0"))
    relays(talk, AUTHENTICATE, logged_in(0, 1))

    talk.queries_first()
    talk.silent()


@pytest.mark.parametrize("code", [-1, 33, ILLEGAL_SASL_STATE, 35, 58])
def test_answer_during_a_login_proves_no_permission(code: int, talk: Proving) -> None:
    """After a handshake Kafka answers 34 to any request, and closes the connection."""
    talk.queries_first()
    talk.rules(code)
    assert talk.reported() == {(TOPIC, 0): (code, -1, None)}
    talk.silent()

    # Nor before a refusal is answered, where clients do not log in.
    talk = Proving()
    talk.services.clients_log_in = False
    talk.appends()
    talk.refused(talk.submitted())
    assert talk.queried() == [TOPIC]
    talk.rules(code)
    assert talk.reported() == {(TOPIC, 0): (code, -1, None)}

    # Nor of a transactional id.
    unproved = transactions.unproved_talk()
    unproved.client(transactions.append())
    unproved.upstream()
    unproved.kafka(transactions.ended(code, version=1))
    assert read(unproved.answer(), 11) == {(TOPIC, 0): (transactions.DENIED, -1, None)}


@pytest.mark.parametrize("login", [HANDSHAKE, AUTHENTICATE], ids=["handshake", "authenticate"])
def test_append_during_reauthentication_is_not_queued(login: bytes) -> None:
    talk = allowed()
    talk.client(login)
    assert talk.upstream() == login

    talk.appends(5)
    talk.silent()


# --- without permission -----------------------------------------------------------------------------------------------


def test_unauthorized_append_is_refused_before_it_is_queued(talk: Proving) -> None:
    for _ in range(2):
        talk.queries_first()
        talk.rules(MAY_NOT)
        assert talk.reported() == {(TOPIC, 0): (MAY_NOT, -1, None)}
        talk.silent()
    assert talk.services.free_bytes == 1 << 20

    talk.queries_first(acks=0)
    talk.rules(MAY_NOT)
    assert talk.next(m.CloseClient).fault is ClientProtocolError
    talk.silent()


@pytest.mark.parametrize("whole", [False, True], ids=["partition", "request"])
def test_other_partitions_of_the_request_proceed_after_refusal(whole: bool) -> None:
    """`refusal_scope` is for refusals by the proxy."""
    talk = Proving(refuse_whole_requests=whole)
    more = ("checked-b", 0, expecting(7, b"y")), ("unchecked", 0, batch(b"z"))
    talk.client(produce((TOPIC, 0, expecting(5, b"x")), *more))
    talk.queried()
    talk.says((TOPIC, 0, MAY_NOT, -1), ("checked-b", 0, MAY, -1))

    pending = talk.admitted()
    assert pending.partition.topic == "checked-b"
    assert [topic.name for topic in talk.sent_up().topics] == ["checked-b", "unchecked"]
    talk.completed(pending, produced(("checked-b", 0, 0, 7), ("unchecked", 0, 0, 9)), PartitionResult(0, 0, 7))

    reported = {name: answer[:2] for (name, _), answer in talk.reported().items()}
    assert reported == {TOPIC: (MAY_NOT, -1), "checked-b": (0, 7), "unchecked": (0, 9)}


def test_append_sent_after_an_unauthorized_one_is_refused(talk: Proving) -> None:
    """By then another writer may be at its offset, and the client may have the right."""
    talk.services.unread = 1000
    talk.queries_first(5)
    talk.rules(MAY_NOT)
    talk.reported()

    talk.queries_first(6, correlation=2)
    talk.rules(MAY, correlation=2)

    talk.metric()
    assert talk.reported()[TOPIC, 0][0] == MAY_NOT
    talk.silent()


def test_a_refusal_takes_the_right_away() -> None:
    talk = allowed()
    talk.appends()
    pending = talk.admitted()
    talk.upstream()
    talk.rules(MAY_NOT)
    talk.next(Call)
    talk.complete(pending, PartitionResult(0, MAY_NOT))
    talk.reported()

    talk.queries_first(correlation=2)
    talk.silent()


def test_a_denied_append_spoils_no_transaction() -> None:
    """The transaction may belong to another client, which has the right."""
    talk = transactions.proved_talk(clients_log_in=True)
    talk.client(transactions.append())
    assert parse_produce_request(memoryview(talk.upstream())[4:]).transactional_id is None
    talk.kafka(produced((TOPIC, 0, MAY_NOT, -1)))
    assert read(talk.answer(), 11) == {(TOPIC, 0): (MAY_NOT, -1, None)}
    talk.silent()


@pytest.mark.parametrize("stated", [MAY, MAY_NOT])
def test_transaction_joins_no_partition_without_write_permission(stated: int) -> None:
    """Appends would wait for partitions that Kafka does not add."""
    talk = Proving(rewriters=Joining(b""))
    talk.session._core.proofs.may_use = "app"
    join = request(ADD_PARTITIONS_TO_TXN, 3, 1)
    talk.client(join)
    probe = talk.upstream()
    assert struct.unpack(">h", probe[4:6]) == (PRODUCE,)
    talk.silent()

    talk.kafka(produced((TOPIC, 0, stated, -1), version=3))

    if stated == MAY:
        assert talk.next(Call) == call("join", WHERE, "app", 1)
    else:
        assert talk.upstream() == join
    talk.silent()


@pytest.mark.parametrize("error", [3, 31])
def test_only_authorized_markers_make_appends_wait(error: int) -> None:
    """Kafka refuses the others."""
    talk = Proving(rewriters=Joining(b"", MARKER))
    queried = request(WRITE_TXN_MARKERS, 1, 1)
    talk.client(queried)
    probe = memoryview(talk.upstream())[4:]
    assert struct.unpack(">h", probe[:2]) == (WRITE_TXN_MARKERS,)
    marker = decode_request(WRITE_TXN_MARKERS, 1, probe[parse_request_header(probe).body_offset :]).markers[0]
    assert [(each.name, each.partition_indexes) for each in marker.topics] == [(TOPIC, [0x7FFFFFFF])]
    talk.silent()

    result = Message(name=TOPIC, partitions=[Message(partition_index=0x7FFFFFFF, error_code=error)])
    answer = Message(markers=[Message(producer_id=0, topics=[result])])
    talk.kafka(encode_response_frame(WRITE_TXN_MARKERS, 1, 1, answer))

    if error == 3:  # UNKNOWN_TOPIC_OR_PARTITION
        assert talk.next(Call) == call("join", WHERE, MARKER, 1)
    else:
        assert talk.upstream() == queried
    talk.silent()


def test_unauthorized_append_does_not_enter_the_barrier() -> None:
    """Nor is it refused for its outdated partition count."""
    talk = barriers.Barriers(may_write=False, clients_log_in=True)
    talk.client(barriers.query(("count-checked", 2, barriers.saying(3)), ("unchecked", 0, batch(b"z"))))
    assert [topic.name for topic in talk.sent_up().topics] == ["count-checked"]
    assert talk.barrier().empty

    talk.kafka(produced(("count-checked", 2, MAY_NOT, -1)))

    assert talk.barrier().empty
    assert [topic.name for topic in talk.sent_up().topics] == ["unchecked"]
    talk.kafka(produced(("unchecked", 0, 0, 4)))
    assert talk.reported() == {("count-checked", 2): (MAY_NOT, -1, None), ("unchecked", 0): (0, 4, None)}
    assert not [each for each in talk.commands if isinstance(each, m.CloseClient)]


# --- where Kafka does not answer --------------------------------------------------------------------------------------


def test_unanswered_permission_query_closes_the_connection(talk: Proving) -> None:
    talk.queries_first(timeout_ms=1000)
    assert talk.session.needs_ticks
    talk.tick(0.8)
    talk.silent()
    talk.tick(0.2)
    assert "may write a topic" in talk.next(m.CloseClient).reason
    talk.silent()


def test_client_lost_during_permission_query_is_not_queued(talk: Proving) -> None:
    talk.queries_first()
    talk.report(m.ClientLost())
    talk.rules(MAY)
    assert [each for each in talk.commands if not isinstance(each, m.CloseUpstream)] == []
    assert talk.services.free_bytes == 1 << 20


def test_permission_answer_without_the_topic_is_broker_error(talk: Proving) -> None:
    talk.queries_first()
    talk.rules(MAY, "checked-b")
    assert talk.next(m.CloseClient).fault is UpstreamProtocolError


def test_lost_upstream_leaves_nothing_to_wait_for(talk: Proving) -> None:
    talk.appends()
    assert talk.session.waits_for == "Kafka's answer about permissions"
    talk.report(m.UpstreamLost("the broker closed the connection"))
    assert talk.session.waits_for is None


# --- the fast path ----------------------------------------------------------------------------------------------------


def test_fast_path_requires_a_proven_permission() -> None:
    talk = Proving(newest_produce=13)
    talk.appends(correlation=1)
    assert talk.session.state.template.is_checked is False
    talk.rules(MAY)
    talk.commands.clear()
    talk.complete(talk.session._holds.waiting_produce.submission.waiting_for, AT_5, None)  # type: ignore[union-attr,arg-type]
    talk.commands.clear()

    talk.appends(correlation=2)
    assert talk.session.state.template.is_checked is True
    talk.session._core.proofs.record(TOPIC, MAY_NOT)
    assert talk.session.state.template.is_checked is False


# --- a login that ends while an append waits --------------------------------------------------------------------------


def waits_past_its_login() -> tuple[Proving, g.PendingAppend]:
    talk = Proving()
    logs_in(talk, logged_in(3000))
    talk.session._core.proofs.may_write[TOPIC] = talk.now
    talk.now += 2.0
    talk.client(produce((TOPIC, 0, expecting(5, b"x")), ("unchecked", 0, batch(b"y")), timeout_ms=30_000))
    return talk, talk.submitted()


@pytest.mark.parametrize("seconds", [0.9, 1.0, 100.0])
def test_append_waiting_past_its_login_is_not_sent(seconds: float) -> None:
    """Sent, it would be in doubt; unsent, the client may repeat it."""
    talk, pending = waits_past_its_login()
    talk.now += seconds
    talk.admit(pending)
    if seconds < 1:
        talk.sent(pending)
        assert len(talk.sent_up().topics) == 2
        return
    talk.canceled(pending)
    talk.metric()
    reported = talk.reported()
    assert {name: answer[0] for (name, _), answer in reported.items()} == {TOPIC: NOT_LEADER, "unchecked": NOT_LEADER}
    assert "login expired" in str(reported[TOPIC, 0][2])
    talk.silent()

    talk.appends(correlation=2)
    assert "login expired" in talk.next(m.CloseClient).reason


def test_append_is_not_resent_after_its_login_ends() -> None:
    talk, pending = waits_past_its_login()
    talk.admit(pending)
    talk.sent(pending)
    talk.upstream()
    talk.kafka(produced((TOPIC, 0, 45, -1), ("unchecked", 0, 0, 3)))
    talk.next(Call)
    talk.now += 1.0

    talk.admit(pending)

    assert talk.next(m.TopicStale).topic == TOPIC
    talk.metric()
    talk.canceled(pending)
    assert {name: answer[0] for (name, _), answer in talk.reported().items()} == {TOPIC: NOT_LEADER, "unchecked": 0}
    talk.silent()
