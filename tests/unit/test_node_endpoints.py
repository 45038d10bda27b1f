"""Brokers' addresses after the records: rewritten or left out, however the response is split; all else is unchanged."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_proxy.errors import ConfigError, UpstreamProtocolError
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.frames.cutter import CutterState, FrameCutter
from fencepost_proxy.wire.apis import FETCH, SHARE_ACKNOWLEDGE, SHARE_FETCH
from fencepost_proxy.wire.control import decode_response, encode_response
from fencepost_proxy.wire.node_endpoints import TRAILER_BYTES_MAX, EndpointWalk, names_no_node, rewritten
from fencepost_proxy.wire.produce import NodeEndpoint
from fencepost_proxy.wire.schema import Message
from tests.unit.test_session import Talk, frame, request

TOPIC = UUID(int=5)
VERSIONS = [(FETCH, v) for v in (16, 17, 18)] + [(api, v) for api in (SHARE_FETCH, SHARE_ACKNOWLEDGE) for v in (1, 2)]
HOST = "broker.internal"
versions = st.sampled_from(VERSIONS)
tags = st.sampled_from([(), (), ((9, b"later"),)])
errors = st.sampled_from([0, 0, 6, 74])
texts = st.none() | st.text(max_size=200)


@st.composite
def partitions(draw: st.DrawFn, api_key: int) -> Message:
    made = Message(partition_index=draw(st.integers(0, 9)), error_code=draw(errors), unknown_tags=draw(tags))
    made.current_leader = Message(leader_id=draw(st.integers(-1, 3)), leader_epoch=draw(st.integers(-1, 9)))
    if api_key == FETCH:
        aborted = Message(producer_id=1, first_offset=2)
        made.aborted_transactions = draw(st.none() | st.lists(st.just(aborted), max_size=130))
        made.high_watermark = draw(st.integers(-1, 2**60))
    else:
        made.error_message = draw(texts)
    if api_key == SHARE_FETCH:
        acquired = Message(first_offset=1, last_offset=2, delivery_count=3, unknown_tags=draw(tags))
        made.acquired_records = draw(st.lists(st.just(acquired), max_size=3))
        made.acknowledge_error_message = draw(texts)
    if api_key != SHARE_ACKNOWLEDGE:
        made.records = draw(st.binary(max_size=300) | st.just(bytes(20_000)))
    return made


@st.composite
def responses(draw: st.DrawFn, api_key: int) -> Message:
    topics = [
        Message(topic_id=TOPIC, partitions=draw(st.lists(partitions(api_key), max_size=3)), unknown_tags=draw(tags))
        for _ in range(draw(st.integers(0, 3)))
    ]
    names = st.text("abc.é", min_size=1, max_size=60)
    racks = st.none() | st.text(max_size=30)
    endpoint = st.builds(
        Message, node_id=st.integers(0, 9), host=names.map(HOST.__add__), port=st.just(9092), rack=racks
    )
    nodes = draw(st.just([]) | st.lists(endpoint, max_size=5))
    made = Message(throttle_time_ms=3, responses=topics, node_endpoints=nodes, unknown_tags=draw(tags))
    if api_key == FETCH:
        made.session_id = 7
    else:
        made.error_message = draw(texts)
    return made


def encoded(api_key: int, version: int, message: Message) -> bytes:
    """Without its length."""
    return b"\0\0\0\1\0" + encode_response(api_key, version, message)


def decoded(api_key: int, version: int, data: bytes) -> Message:
    return decode_response(api_key, version, data[5:])


def renamed(host: str) -> Any:
    return lambda endpoint: replace(endpoint, host=host, port=19000 + endpoint.node_id)


def streamed(api_key: int, version: int, data: bytes, cuts: list[int], host: str) -> bytes:
    cutter = FrameCutter(4, 1 << 30, UpstreamProtocolError)
    stream, got, buffer = frame(data), b"", bytearray(1 << 17)
    started = False
    for cut in [*cuts, 1 << 16, 1 << 16, 1 << 16, 1 << 16]:
        piece, stream = stream[:cut], stream[cut:]
        buffer[: len(piece)] = piece
        cutter.feed(memoryview(buffer)[: len(piece)])
        if not started and cutter.head() is not None:
            cutter.pass_frame(len(data), EndpointWalk(api_key, version, len(data), renamed(host)))
            started = True
        while cutter.state is CutterState.PASSING and (view := cutter.take()):
            got += view
        cutter.save()
    assert cutter.between_frames
    return got


@given(st.data())
def test_whole_responses_name_only_the_proxy(data: st.DataObject) -> None:
    api_key, version = data.draw(versions)
    message = data.draw(responses(api_key))
    sent = memoryview(encoded(api_key, version, message))
    assert names_no_node(sent, api_key, version) is not (
        bool(message.node_endpoints) or (api_key == FETCH and bool(message.unknown_tags))
    )

    got = b"".join(rewritten(sent, api_key, version, renamed("proxy.example.com")))

    for endpoint in message.node_endpoints:
        endpoint.host, endpoint.port = "proxy.example.com", 19000 + endpoint.node_id
    assert got == encoded(api_key, version, message)


@given(st.data())
def test_streamed_responses_keep_their_length(data: st.DataObject) -> None:
    api_key, version = data.draw(versions)
    message = data.draw(responses(api_key))
    sent = encoded(api_key, version, message)
    cuts = data.draw(st.lists(st.integers(1, 60) | st.integers(1, 30_000), max_size=20))
    host = data.draw(st.sampled_from([HOST, "proxy", "a-much-longer-name.of-the-proxy.example.com"]))

    got = streamed(api_key, version, sent, cuts, host)

    assert got[:4] == frame(sent)[:4]
    assert len(got) == len(frame(sent))
    assert host == HOST or HOST.encode() not in got
    reported = decoded(api_key, version, got[4:])
    if len(rewritten(memoryview(sent), api_key, version, renamed(host))[1]) == len(sent) - _before(
        sent, api_key, version
    ):
        expected = [
            Message(**{**vars(each), "host": host, "port": 19000 + each.node_id}) for each in message.node_endpoints
        ]
        assert [vars(each) for each in reported.node_endpoints] == [vars(each) for each in expected]
    else:
        assert reported.node_endpoints == []
        reported.unknown_tags = tuple(each for each in reported.unknown_tags if each[0] == 9)
    reported.node_endpoints = message.node_endpoints
    assert encoded(api_key, version, reported) == sent


def _before(sent: bytes, api_key: int, version: int) -> int:
    return len(rewritten(memoryview(sent), api_key, version, renamed("x"))[0])


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
@pytest.mark.parametrize("host_bytes", [*range(100, 140), *range(230, 260)])
def test_any_number_of_bytes_is_filled(api_key: int, version: int, host_bytes: int) -> None:
    nodes = [Message(node_id=1, host="h" * host_bytes, port=1, rack=None)]
    for count in (1, 70):
        sent = encoded(api_key, version, Message(node_endpoints=nodes * count, responses=[]))
        got = streamed(api_key, version, sent, [20], "proxy")
        assert b"hhh" not in got
        assert len(got) == 4 + len(sent)
        assert decoded(api_key, version, got[4:]).node_endpoints == []


def test_broker_without_listener_is_left_out() -> None:
    def none_for_2(endpoint: NodeEndpoint) -> NodeEndpoint:
        if endpoint.node_id == 2:
            raise ConfigError("no port")
        return replace(endpoint, host="proxy")

    nodes = [Message(node_id=each, host=HOST, port=1, rack=None) for each in (1, 2)]
    sent = memoryview(encoded(FETCH, 17, Message(responses=[], node_endpoints=nodes)))
    got = b"".join(rewritten(sent, FETCH, 17, none_for_2))
    assert [(each.node_id, each.host) for each in decoded(FETCH, 17, got).node_endpoints] == [(1, "proxy")]


# --- hostile input ----------------------------------------------------------------------------------------------------


def one_partition(api_key: int, records: bytes = b"r" * 50, **more: Any) -> Message:
    partition = Message(partition_index=0, current_leader=Message(leader_id=2, leader_epoch=1))
    if api_key != SHARE_ACKNOWLEDGE:
        partition.records = records
    return Message(responses=[Message(topic_id=TOPIC, partitions=[partition])], **more)


NODES = [Message(node_id=2, host=HOST, port=9092, rack=None)]


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
def test_truncated_responses_are_refused(api_key: int, version: int) -> None:
    sent = encoded(api_key, version, one_partition(api_key, node_endpoints=NODES))
    for length in range(5, len(sent)):
        with pytest.raises(UpstreamProtocolError, match="malformed"):
            rewritten(memoryview(sent[:length]), api_key, version, renamed("proxy"))
        with pytest.raises(UpstreamProtocolError, match="malformed"):
            streamed(api_key, version, sent[:length], [9], "proxy")


@pytest.mark.parametrize("number", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x7f"])
def test_absurd_lengths_are_refused(number: bytes) -> None:
    sent = encoded(FETCH, 17, one_partition(FETCH, node_endpoints=NODES))
    at = sent.index(b"\x33" + b"r" * 50)
    count_at = sent.rindex(b"\x01\x00")  # one tagged field, number 0
    for position in (at, count_at, count_at + 2, count_at + 3):
        bad = sent[:position] + number + sent[position + 1 :]
        with pytest.raises(UpstreamProtocolError, match="malformed"):
            streamed(FETCH, 17, bad, [9], "proxy")


def test_long_trailer_is_refused_before_it_is_buffered() -> None:
    sent = encoded(FETCH, 17, one_partition(FETCH, unknown_tags=((9, bytes(TRAILER_BYTES_MAX)),)))
    walk = EndpointWalk(FETCH, 17, len(sent), renamed("proxy"))
    cutter = FrameCutter(4, 1 << 30, UpstreamProtocolError)
    cutter.feed(memoryview(frame(sent))[:200])
    cutter.pass_frame(len(sent), walk)
    with pytest.raises(UpstreamProtocolError, match="follow the records"):
        list(iter(cutter.take, memoryview(b"")))


def test_records_are_not_buffered() -> None:
    sent = encoded(FETCH, 17, one_partition(FETCH, bytes(1 << 20), node_endpoints=NODES))
    cutter = FrameCutter(4, 1 << 30, UpstreamProtocolError)
    stream, probed = frame(sent), 0
    cutter.feed(memoryview(stream)[:100])
    cutter.pass_frame(len(sent), EndpointWalk(FETCH, 17, len(sent), renamed("proxy")))
    passed = 0
    for start in range(100, len(stream) + 1000, 1000):
        while cutter.state is CutterState.PASSING and (view := cutter.take()):
            passed += len(view)
        cutter.save()
        probed = max(probed, cutter.buffered_bytes)
        cutter.feed(memoryview(stream)[start : start + 1000])
    assert passed == len(stream)
    assert probed < 100
    assert cutter.between_frames


# --- in a session -----------------------------------------------------------------------------------------------------


def fetching(version: int = 17) -> Talk:
    talk = Talk()
    talk.client(request(FETCH, version, 1, b"\0..."))
    talk.upstream()
    return talk


def test_fetch_response_in_one_piece_is_rewritten() -> None:
    talk = fetching()
    sent = frame(encoded(FETCH, 17, one_partition(FETCH, node_endpoints=NODES)))
    talk.kafka(sent)
    answer = talk.answer()
    (got,) = decoded(FETCH, 17, answer[4:]).node_endpoints
    assert (got.node_id, got.host, got.port) == (2, "proxy.local", 19002)
    assert len(answer) == 4 + int.from_bytes(answer[:4], "big")


def test_fetch_before_v16_is_not_read() -> None:
    talk = fetching(15)
    sent = frame(b"\0\0\0\1\0\0\0\0\0 anything")
    talk.kafka(sent)
    assert talk.answer() == sent


@pytest.mark.parametrize("cut", [10, 1000])
def test_malformed_fetch_response_closes_with_a_reason(cut: int) -> None:
    talk = fetching()
    bad = bytearray(frame(encoded(FETCH, 17, one_partition(FETCH))))
    struct.pack_into(">B", bad, bad.index(b"\x33" + b"r" * 50), 0x7F)
    talk.kafka(bytes(bad[:cut]))
    talk.kafka(bytes(bad[cut:]))
    closed = [each for each in talk.commands if isinstance(each, m.CloseClient)]
    assert "malformed Fetch v17 response" in closed[0].reason
