"""A client over its Kafka quota: for a time Kafka does not read its next requests, and the proxy holds them back."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.slow_clients import SlowClients
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.connection.read_holds import MUTED_SECONDS_MAX, WATCHED_SECONDS
from fencepost_proxy.session.connection.state import Full
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import APIS, FETCH, PRODUCE
from fencepost_proxy.wire.control import codec_versions, encode_response, response_header_is_flexible
from fencepost_proxy.wire.produce import (
    NodeEndpoint,
    PartitionResult,
    ProduceResponse,
    TopicResult,
    encode_produce_response,
)
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.throttle import NOT_THROTTLED, THROTTLED_AT, throttle_ms
from tests.support.batches import batch, expecting
from tests.support.sequencer_calls import Call
from tests.unit.test_sequencer import confirmed
from tests.unit.test_session import HEARTBEAT, T_ID, Talk, produced, request, response

#: SaslHandshake, WriteTxnMarkers, SaslAuthenticate, DescribeQuorum: their responses have none in any version.
WITHOUT = {17, 27, 36, 55}
#: By API: the first version whose response has one.
SINCE = (
    dict.fromkeys((0, 1, 10, 12, 13, 14, 15, 16, 18, 20), 1)
    | dict.fromkeys((2, 11, 19, 23), 2)
    | dict.fromkeys((3, 8, 9), 3)
)
#: Produce, ApiVersions, CreateDelegationToken, DescribeDelegationToken.
AT_END = {0, 18, 38, 41}
THROTTLED = b"\0" + struct.pack(">i", 2_000)


def versions() -> Iterator[tuple[int, int]]:
    for api in APIS.values():
        if not api.gated:
            known = (3, api.max_version) if api.key == PRODUCE else codec_versions(api.key)
            for version in range(max(api.min_version, known[0]), min(api.max_version, known[1]) + 1) if known else ():
                yield api.key, version


def a_response(api_key: int, version: int, throttle: int) -> bytes:
    if api_key == PRODUCE:
        result = PartitionResult(0, 0, 5, -1, 3, error_message="why" if version >= 8 else None)
        endpoints = (NodeEndpoint(1, "b1", 9092, None),) if version >= 10 else ()
        whole = ProduceResponse(1, (TopicResult("t", T_ID, (result,)),), throttle, endpoints)
        return encode_produce_response(whole, version)[4:]
    body = encode_response(api_key, version, Message(throttle_time_ms=throttle) if throttle else Message())
    return struct.pack(">i", 1) + (b"\0" if response_header_is_flexible(api_key, version) else b"") + body


@pytest.fixture
def talk() -> Talk:
    return Talk()


@pytest.mark.parametrize(("api_key", "version"), list(versions()))
def test_throttle_time_is_read_from_every_response(api_key: int, version: int) -> None:
    stated = 0 if api_key in WITHOUT or version < SINCE.get(api_key, 0) else 12_345
    frame = a_response(api_key, version, 12_345 if stated else 0)
    assert throttle_ms(memoryview(frame), api_key, version) == stated
    assert throttle_ms(memoryview(a_response(api_key, version, 0)), api_key, version) == 0
    at = THROTTLED_AT[api_key][version]
    if stated and api_key != PRODUCE:
        assert memoryview(struct.pack(">i", len(frame)) + frame)[at : at + 4] != NOT_THROTTLED
    for length in () if api_key in AT_END else range(len(frame)):
        assert throttle_ms(memoryview(frame)[:length], api_key, version) in (0, stated)


def throttled(talk: Talk, pending: g.PendingAppend, throttle: int = 2_000) -> None:
    """Kafka answers the append with a throttle time."""
    answer = bytearray(produced(("checked-a", 0, 0, 5)))
    answer[-5:-1] = struct.pack(">i", throttle)
    talk.kafka(bytes(answer))
    assert talk.next(m.Throttled) == m.Throttled(throttle)
    assert talk.next(Call).name == "answered"
    talk.complete(pending, PartitionResult(0, 0, 5))
    talk.answer()


def throttled_once(talk: Talk) -> None:
    throttled(talk, talk.sends())
    talk.silent()


def test_append_of_throttled_client_waits_before_its_partition(talk: Talk) -> None:
    throttled_once(talk)
    talk.produces(("checked-a", 0, expecting(6, b"y")), correlation=2)
    assert not talk.next(m.ReadClient).on
    talk.tick(1.9)
    talk.silent()
    talk.tick(0.2)
    talk.submitted()


@pytest.mark.parametrize("cut", [4, 9, 12, 13, 200])
def test_throttle_time_of_a_relayed_response_counts(cut: int, talk: Talk) -> None:
    talk.client(request(HEARTBEAT, 4, 1))
    talk.upstream()
    reply = response(1, THROTTLED + bytes(30))
    for piece in (reply[:cut], reply[cut:]):
        if piece:
            talk.kafka(piece)
    assert [each for each in talk.commands if isinstance(each, m.Throttled)] == [m.Throttled(2_000)]
    talk.commands.clear()
    talk.produces(("checked-a", 0, expecting(5, b"x")), correlation=2)
    assert not talk.next(m.ReadClient).on
    talk.silent()
    talk.tick(2.1)
    talk.submitted()


def test_fast_path_leaves_throttled_responses_and_clients(talk: Talk) -> None:
    talk.client(request(HEARTBEAT, 4, 1))
    talk.upstream()
    fast_path = talk.session.fast_path
    throttling, free = response(1, THROTTLED), response(1, bytes(5))
    assert fast_path.take_down(memoryview(throttling), talk.now) == (0, [])
    talk.kafka(throttling)
    assert fast_path.take_up(memoryview(request(HEARTBEAT, 4, 2)), talk.now + 1) == (0, [])
    assert fast_path.take_up(memoryview(request(HEARTBEAT, 4, 2)), talk.now + WATCHED_SECONDS) == (0, [])
    assert fast_path.take_up(memoryview(request(HEARTBEAT, 4, 1)), talk.now + WATCHED_SECONDS + 2)[0]
    assert fast_path.take_down(memoryview(free), talk.now)[0]


def test_client_is_muted_for_a_bounded_time(talk: Talk) -> None:
    """Any four bytes may be a throttle time, of up to 24 days."""
    throttled(talk, talk.sends(), 2**31 - 1)
    talk.produces(("checked-a", 0, expecting(6, b"y")), correlation=2)
    assert not talk.next(m.ReadClient).on
    talk.tick(MUTED_SECONDS_MAX - 1)
    talk.silent()
    talk.tick(1.1)
    talk.submitted()


def test_throttled_client_has_one_request_at_a_time_for_a_while(talk: Talk) -> None:
    """Any answer may mute what was sent after its request."""
    throttled_once(talk)
    talk.now += 2.1
    second = talk.sends(at=6, correlation=2)
    talk.produces(("checked-a", 0, expecting(7, b"z")), correlation=3)
    assert not talk.next(m.ReadClient).on
    talk.tick(1.0)
    talk.silent()
    talk.completed(second, produced(("checked-a", 0, 0, 6), correlation=2), PartitionResult(0, 0, 6))
    talk.submitted()
    assert talk.next(m.ReadClient).on
    talk.answer()


def test_pipelines_again_after_a_time_without_throttling(talk: Talk) -> None:
    throttled_once(talk)
    talk.now += 2.1 + WATCHED_SECONDS
    talk.sends(at=6, correlation=2)
    talk.submits(at=7, correlation=3)


def test_append_that_waits_for_its_partition_leaves_it_when_client_is_throttled(talk: Talk) -> None:
    first = talk.sends()
    talk.produces(("checked-b", 0, expecting(5, b"y")), correlation=2)
    second = talk.submitted()
    throttled(talk, first)  # and the second waits at its sequencer
    talk.admit(second)
    talk.canceled(second)
    talk.tick(1.9)
    talk.silent()
    talk.tick(0.2)
    assert talk.submitted() is second
    talk.admit(second)
    talk.sent(second)
    talk.upstream()


def test_partitions_admitted_before_throttling_are_free_again(talk: Talk) -> None:
    first = talk.sends()
    talk.produces(("checked-b", 0, expecting(5, b"y")), ("checked-c", 0, expecting(5, b"y")), correlation=2)
    admitted = talk.submitted()
    talk.admit(admitted)
    waiting = talk.submitted()
    throttled(talk, first)
    talk.tick(0.1)  # it would be sent without the other one
    talk.canceled(admitted)
    talk.admit(waiting)
    talk.canceled(waiting)
    talk.tick(2.0)
    assert talk.submitted() is admitted


def test_muted_append_is_answered_in_time() -> None:
    talk = Talk().may_write("checked-b")
    first = talk.sends()
    talk.produces(("checked-b", 0, expecting(5, b"y")), correlation=2, timeout_ms=1_000)
    second = talk.submitted()
    throttled(talk, first, 60_000)
    talk.admit(second)
    talk.canceled(second)
    talk.tick(0.95)
    assert "over a quota" in talk.fails(6, ("checked-b", 0))


@pytest.mark.parametrize("api_key", [FETCH, HEARTBEAT, 11])
def test_append_waits_for_requests_whose_time_the_client_chooses(api_key: int, talk: Talk) -> None:
    """1. The client sends Fetch with a long max_wait_ms, then an append. 2. Kafka handles them in order."""
    talk.client(request(api_key, 4, 1, bytes(30)))
    talk.upstream()
    talk.produces(("checked-a", 0, expecting(5, b"x")), correlation=2)
    assert not talk.next(m.ReadClient).on
    talk.tick(3.0)
    assert not [each for each in talk.commands if isinstance(each, Call)]
    talk.commands.clear()
    talk.kafka(response(1, bytes(30)))
    talk.submitted()


def late(talk: Talk) -> g.PendingAppend:
    """An append of a client whose WRITE is proved, which Kafka does not answer."""
    pending = talk.may_write("checked-a").sends()
    talk.now += 1.2
    talk.report(m.AppendsLate((pending,)))
    reported = talk.next(m.LateAppends)
    assert reported.partition == pending.partition
    talk.lost(pending)
    assert pending.sending.may_write
    return pending


def test_late_append_is_resolved_from_the_log_and_holds_its_client_back(talk: Talk) -> None:
    pending = late(talk)
    talk.complete(pending, PartitionResult(0, 0, 5))  # found, or sent again
    assert talk.outcomes() == {("checked-a", 0): (0, 5)}
    talk.produces(("checked-a", 0, expecting(6, b"y")), correlation=2)
    assert not talk.next(m.ReadClient).on
    talk.tick(40.0)
    talk.silent()  # Kafka does not read this connection
    talk.says(("checked-a", 0, 45, -1))
    assert talk.next(Call).name == "answered"  # to which its sequencer does not listen
    talk.submitted()


def test_late_append_without_proved_permission_is_waited_for() -> None:
    talk = Talk(clients_log_in=True)
    pending = talk.may_write("checked-a").sends()
    talk.now += 31.0
    talk.report(m.AppendsLate((pending,)))
    talk.silent()


def test_late_first_append_is_resolved_where_clients_do_not_log_in(talk: Talk) -> None:
    pending = talk.sends()
    talk.report(m.AppendsLate((pending,)))
    talk.next(m.LateAppends)
    talk.lost(pending)
    assert pending.sending.may_write


@pytest.mark.parametrize("bit", [Full.CLIENT, Full.UPSTREAM])
def test_append_waits_while_a_socket_is_full(bit: int, talk: Talk) -> None:
    """1. The client reads nothing, or Kafka does not. 2. An append sent now would stand still, with its partition."""
    talk.session.state.full |= bit
    talk.produces(("checked-a", 0, expecting(5, b"x")))
    assert not talk.next(m.ReadClient).on
    talk.silent()
    assert not talk.session.needs_ticks
    talk.session.state.full = 0
    talk.tick(0.1)
    talk.submitted()
    assert talk.next(m.ReadClient).on


def test_append_that_waits_for_its_partition_leaves_it_when_a_socket_is_full(talk: Talk) -> None:
    pending = talk.submits()
    talk.session.state.full |= Full.CLIENT
    talk.admit(pending)
    talk.canceled(pending)
    talk.session.state.full = 0
    talk.tick(0.1)
    assert talk.submitted() is pending


def test_append_is_not_sent_again_while_a_socket_is_full() -> None:
    talk = Talk().may_write("checked-a")
    pending = talk.sends()
    talk.session.state.full |= Full.CLIENT
    talk.admit(pending)  # Kafka refused its fence
    assert not [each for each in talk.commands if isinstance(each, m.ToUpstream)]
    assert "the client does not read its responses" in str(talk.commands[-1])


def test_fast_path_takes_no_request_while_a_socket_is_full(talk: Talk) -> None:
    heartbeat = memoryview(request(HEARTBEAT, 4, 1))
    talk.session.state.full |= Full.UPSTREAM
    assert talk.session.fast_path.take_up(heartbeat, talk.now) == (0, [])
    talk.session.state.full = 0
    assert talk.session.fast_path.take_up(heartbeat, talk.now)[0]


def test_kafka_is_read_for_answers_to_appends_only(talk: Talk) -> None:
    assert not talk.session.fast_path.awaits_append
    talk.client(request(FETCH, 4, 1, bytes(30)))
    talk.upstream()
    assert not talk.session.fast_path.awaits_append
    talk.kafka(response(1, bytes(30)))
    talk.answer()
    talk.sends(correlation=2)
    assert talk.session.fast_path.awaits_append


def test_late_append_is_not_sent_again_on_its_connection(talk: Talk) -> None:
    """The first attempt's answer would be taken for the second one's."""
    pending = late(talk)
    talk.admit(pending)
    assert "over a quota" in str(talk.commands) or [each for each in talk.commands if isinstance(each, m.Count)]
    assert not [each for each in talk.commands if each == Call("sent", (pending,))]


def test_append_that_others_wait_for_is_reported_late_once() -> None:
    talk = confirmed(may_write=True)
    first = talk.sends(expecting(10, b"first"), connection=1)
    second = talk.sends(expecting(11, b"second"), connection=1)
    talk.tick(1.5)
    talk.silent()  # no other client waits
    other = talk.submit(expecting(12, b"good"), connection=2)
    talk.tick(0.1)
    assert talk.next(g.Late).pending_appends == (first, second)
    talk.tick(0.5)
    talk.silent()
    talk.lost(first, second)
    assert talk.next(g.ReadBatch) == g.ReadBatch(first, 10)
    assert other.placement.at is None
    talk.report(g.BatchRead(first, g.Unreadable("not replicated")))
    talk.tick(0.0)
    talk.silent()
    talk.call("answered", first, PartitionResult(3, 0, 10))  # so the log shows it now
    talk.tick(0.0)
    assert talk.next(g.ReadBatch) == g.ReadBatch(first, 10)


def test_append_that_cannot_be_sent_again_is_waited_for() -> None:
    talk = confirmed(Check.ON, may_write=True)
    talk.sends(batch(b"old", transactional=True, producer=(5, 0, 0)), within="t", connection=1)
    talk.submit(expecting(10, b"good"), connection=2)
    talk.tick(1.5)
    assert not [each for each in talk.effects if isinstance(each, g.Late)]


def test_operator_sees_the_throttled_client(caplog: pytest.LogCaptureFixture) -> None:
    now, metrics = [100.0], Metrics()
    clients = SlowClients(metrics, lambda: now[0])
    clients.throttled(None, 900)
    assert list(clients.problems()) == []  # a quota at work
    now[0] += 10
    clients.throttled(None, 4_100)
    (problem,) = clients.problems()
    assert "2 responses in 10 s had throttle times, 5.0 s in total" in problem.what
    assert metrics.throttled_responses.value == 2
    assert metrics.throttled_seconds == 5.0
    clients.late(None, TopicPartition("t", 3), 1.2)
    assert "t-3" in list(clients.problems())[1].what
    now[0] += 61
    assert list(clients.problems()) == []
