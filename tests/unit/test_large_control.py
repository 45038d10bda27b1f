"""Large control messages are processed in a thread: what waits meanwhile, and in which order it continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ClientProtocolError, LimitError, UpstreamProtocolError
from fencepost_proxy.server import Proxy
from fencepost_proxy.session.control.control_messages import HERE_BYTES_MAX, SPLICED_HERE_BYTES_MAX
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.response_reader import PRODUCED_HERE_BYTES_MAX
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.rewriting import plan_request
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.apis import (
    ADD_PARTITIONS_TO_TXN,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    FETCH,
    METADATA,
    WRITE_TXN_MARKERS,
)
from fencepost_proxy.wire.control import decode_request, decode_response, encode_request_frame, encode_response_frame
from fencepost_proxy.wire.produce import (
    NodeEndpoint,
    PartitionResult,
    ProduceResponse,
    TopicResult,
    encode_produce_response,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message
from tests.support.batches import batch
from tests.unit.test_session import HEARTBEAT, Talk, produce, request, response, to_client

MANY = 400
#: Of a Metadata response that is so long.
MANY_TOPICS = 1_200


def _known(**configs: str) -> Known:
    return Known(StateView("cluster-1"), lambda topic: configs, lambda topic: None, "__state")


def _talk(in_loop: Callable[[Callable[[], Any]], Any] = lambda call: call()) -> Talk:
    book = AddressBook(19092)

    def open_listeners(node_ids: Any) -> None:
        for node_id in node_ids:
            book.listens_on(NodeId(node_id), book.listener_port(node_id))

    rewriters = RequestRewriters(book, _known, frozenset[int], open_listeners, in_loop=in_loop)
    talk = Talk(rewriters)
    talk.session._holds.quota = 1 << 40  # tests/unit/test_session.py has the quota's tests
    return talk


def _create_topics(count: int, correlation: int = 1) -> bytes:
    configs = [Message(name="fencepost.check.expected.offsets", value="true")]
    topics = [Message(name=f"t{each}", configs=configs) for each in range(count)]
    return encode_request_frame(CREATE_TOPICS, 7, correlation, "app", Message(topics=topics))


def _topics_created(count: int, correlation: int = 1) -> bytes:
    topics = [Message(name=f"t{each}", topic_id=UUID(int=each + 1)) for each in range(count)]
    return encode_response_frame(CREATE_TOPICS, 7, correlation, Message(topics=topics))


def _metadata(count: int, correlation: int = 1) -> bytes:
    topics = [Message(name=f"t{each}", topic_id=UUID(int=each + 1)) for each in range(count)]
    brokers = [Message(node_id=1, host="kafka", port=9092)]
    return encode_response_frame(METADATA, 12, correlation, Message(brokers=brokers, topics=topics))


def _metadata_request(correlation: int = 1) -> bytes:
    return encode_request_frame(METADATA, 12, correlation, "app", Message(topics=None))


def _queried_metadata(talk: Talk) -> None:
    """A large response is there, and is not read yet."""
    talk.client(_metadata_request())
    talk.upstream()
    talk.kafka(_metadata(MANY_TOPICS))


def _creating(talk: Talk) -> m.ReadBatches:
    """A large request was sent, and its response is to be read in a thread."""
    talk.client(_create_topics(MANY))
    talk.read_elsewhere()
    talk.upstream()
    talk.kafka(_topics_created(MANY))
    return talk.next(m.ReadBatches)


def _finish(talk: Talk, requested: m.ReadBatches) -> None:
    """The thread is done."""
    requested.read()
    talk.report(m.BatchesRead(requested.token))


@pytest.fixture
def talk() -> Talk:
    return _talk()


def test_nothing_is_read_while_large_request_is_planned(talk: Talk) -> None:
    queried = _create_topics(MANY)
    assert len(queried) > HERE_BYTES_MAX
    talk.client(queried + request(HEARTBEAT, 4, 2))
    requested = talk.next(m.ReadBatches)
    assert not talk.next(m.ReadClient).on
    talk.silent()
    assert talk.session.waits_for == "a thread that reads it"
    _finish(talk, requested)
    assert talk.next(m.ReadClient).on
    sent = talk.upstream()
    assert sent.endswith(request(HEARTBEAT, 4, 2))
    planned = decode_request(CREATE_TOPICS, 7, sent[4 + 8 + 2 + 3 + 1 : -len(request(HEARTBEAT, 4, 2))])
    assert len(planned.topics) == MANY
    assert not planned.topics[0].configs
    talk.kafka(_topics_created(MANY))
    talk.read_elsewhere()
    assert len(talk.next(m.Store).changes) == MANY


def test_short_answer_to_large_request_uses_thread(talk: Talk) -> None:
    """What is added to it is as long as the request."""
    talk.client(_create_topics(MANY))
    talk.read_elsewhere()
    talk.upstream()
    talk.kafka(_topics_created(1))
    talk.next(m.ReadBatches)
    talk.silent()


def test_small_messages_need_no_thread(talk: Talk) -> None:
    talk.client(_create_topics(3))
    talk.upstream()
    talk.kafka(_topics_created(3))
    talk.next(m.Store)


def test_responses_keep_their_order_around_threaded_one(talk: Talk) -> None:
    talk.client(_metadata_request(1) + request(HEARTBEAT, 4, 2) + _metadata_request(3))
    talk.commands.clear()
    talk.kafka(_metadata(MANY_TOPICS, 1) + response(2) + _metadata(MANY_TOPICS, 3))
    requested = talk.next(m.ReadBatches)
    assert not talk.next(m.ReadUpstream).on
    # One at a time, because each may take as much memory as the largest response. The others stay with the broker.
    talk.report(m.Tick())
    talk.silent()
    _finish(talk, requested)
    assert m.ReadUpstream(True) in talk.commands
    second = next(each for each in talk.commands if isinstance(each, m.ReadBatches))
    answers = to_client(talk)
    talk.commands.clear()
    _finish(talk, second)
    answers += to_client(talk)
    assert [int.from_bytes(answer[4:8], "big") for answer in answers] == [1, 2, 3]


def test_listeners_for_large_metadata_open_in_event_loop() -> None:
    called: list[Any] = []
    talk = _talk(lambda call: called.append(call()))
    _queried_metadata(talk)
    assert not called
    talk.read_elsewhere()
    assert len(called) == 1
    answer = decode_response(METADATA, 12, talk.answer()[4 + 5 :])
    assert (answer.brokers[0].host, answer.brokers[0].port) == ("proxy.local", 19094)
    assert len(answer.topics) == MANY_TOPICS


@pytest.mark.parametrize("both_sides", [False, True])
def test_configs_are_stored_though_client_left_meanwhile(both_sides: bool, talk: Talk) -> None:
    requested = _creating(talk)
    if both_sides:
        talk.report(m.UpstreamLost("closed"))
        talk.next(m.CloseClient)
    talk.report(m.ClientLost())
    assert not talk.session.finished
    _finish(talk, requested)
    assert len(talk.next(m.Store).changes) == MANY
    if both_sides:
        assert talk.session.finished
    else:
        talk.next(m.CloseUpstream)


def test_request_of_departed_client_is_not_sent(talk: Talk) -> None:
    free = talk.services.free_bytes
    talk.client(_create_topics(2_000))
    assert talk.services.free_bytes < free
    requested = talk.next(m.ReadBatches)
    talk.report(m.ClientLost())
    talk.next(m.CloseUpstream)
    assert talk.services.free_bytes == free
    _finish(talk, requested)
    talk.silent()


def test_session_does_not_drain_before_answer_is_made(talk: Talk) -> None:
    _queried_metadata(talk)
    requested = talk.next(m.ReadBatches)
    talk.report(m.Drain(talk.now + 10))
    assert not talk.next(m.ReadClient).on
    talk.silent()
    assert not talk.session.drained
    _finish(talk, requested)
    assert len(talk.answer()) > SPLICED_HERE_BYTES_MAX
    assert talk.session.drained


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("from_client", [False, True])
def test_unreadable_large_message_closes_its_connection(*, from_client: bool, crashes: bool, talk: Talk) -> None:
    """`crashes` – the thread has raised what is no protocol error: there is no result."""
    if from_client:
        talk.client(_create_topics(MANY)[:-1] + b"\7")
    else:
        talk.client(_metadata_request())
        talk.upstream()
        talk.kafka(_metadata(MANY_TOPICS)[:-1] + b"\7")
    requested = talk.next(m.ReadBatches)
    if not crashes:
        requested.read()
    talk.report(m.BatchesRead(requested.token))
    fault = ClientProtocolError if crashes or from_client else UpstreamProtocolError
    assert talk.next(m.CloseClient).fault is fault


def test_large_searched_only_request_needs_no_thread(talk: Talk) -> None:
    body = bytes(20_000)
    talk.client(request(FETCH, 12, 1, body)[:-1])
    talk.client(b"\0")
    assert talk.upstream() == request(FETCH, 12, 1, body)


def test_large_request_naming_state_topic_uses_thread(talk: Talk) -> None:
    talk.services.state_topic_marks = (b"__state",)
    talk.client(request(FETCH, 12, 1, bytes(20_000) + b"__state"))
    talk.next(m.ReadBatches)


def test_large_produce_response_is_rewritten_in_thread() -> None:
    talk = Talk(newest_produce=12)
    talk.client(produce(("unchecked", 0, batch(b"x")), version=12))
    talk.upstream()
    results = tuple(PartitionResult(each, 6, -1) for each in range(3_000))
    endpoints = (NodeEndpoint(3, "kafka", 9092, None),)
    data = encode_produce_response(ProduceResponse(1, (TopicResult("unchecked", None, results),), 0, endpoints), 12)
    assert len(data) > PRODUCED_HERE_BYTES_MAX
    talk.kafka(data)
    talk.read_elsewhere()
    answer = parse_produce_response(memoryview(talk.answer())[4:], 12)
    assert [each.host for each in answer.node_endpoints] == ["proxy.local"]
    assert len(answer.topics[0].partitions) == 3_000


# --- bounds -----------------------------------------------------------------------------------------------------------


def _joining(api_key: int, count: int) -> Message:
    if api_key == WRITE_TXN_MARKERS:
        topics = [Message(name="t", partition_indexes=list(range(count)))]
        return Message(markers=[Message(producer_id=5, topics=topics)])
    topics = [Message(name="t", partitions=list(range(count)))]
    return Message(v3_and_below_transactional_id="x", v3_and_below_topics=topics)


@pytest.mark.parametrize("api_key", [ADD_PARTITIONS_TO_TXN, WRITE_TXN_MARKERS])
def test_transaction_adds_no_more_checked_partitions_than_limit(api_key: int) -> None:
    checked = _known(**{"fencepost.check.expected.offsets": "true"})
    plan = plan_request(api_key, 1, _joining(api_key, 2_048), checked)
    assert plan is not None
    assert plan.joins is not None
    assert len(plan.joins.partitions) == 2_048
    with pytest.raises(LimitError, match="2049 partitions"):
        plan_request(api_key, 1, _joining(api_key, 2_049), checked)
    plan = plan_request(api_key, 1, _joining(api_key, 30_000), _known())
    assert plan is not None
    assert plan.joins is None


def test_many_state_topic_entries_are_removed_quickly() -> None:
    """Compared one by one, each with each, these would take a minute."""
    count = 30_000
    resources = [
        Message(resource_type=2, resource_name=name, configuration_keys=None)
        for name in ["__state"] * count + ["t"] * count
    ]
    plan = plan_request(DESCRIBE_CONFIGS, 4, Message(resources=resources), _known())
    assert plan is not None
    assert len(plan.forward.resources) == count


# --- threads ----------------------------------------------------------------------------------------------------------


async def test_what_thread_changes_is_changed_in_event_loop() -> None:
    requests = Proxy(ProxyConfig((Address("kafka", 9092),)))._requests

    def fails() -> None:
        raise LookupError("as in the loop")

    requests._loop = asyncio.get_running_loop()
    here = threading.get_ident()
    assert requests.in_loop(threading.get_ident) == here
    assert await asyncio.to_thread(requests.in_loop, threading.get_ident) == here
    with pytest.raises(LookupError, match="as in the loop"):
        await asyncio.to_thread(requests.in_loop, fails)


def test_lost_client_reserves_no_memory_during_work() -> None:
    talk = _talk().may_write("checked")
    free = talk.services.free_bytes
    talk.client(_metadata_request(1) + request(HEARTBEAT, 4, 2))
    talk.commands.clear()
    talk.kafka(_metadata(MANY_TOPICS, 1))
    requested = talk.next(m.ReadBatches)
    talk.report(m.ClientLost())
    talk.kafka(response(2))  # no client to wait for, and nothing that would release its memory
    assert talk.services.free_bytes == free
    _finish(talk, requested)
    assert talk.services.free_bytes == free
