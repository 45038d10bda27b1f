"""Produce v13: topics by id. Names are looked up; batches meant for another topic get UNKNOWN_TOPIC_ID."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.produce.topic_ids import IDS_AT_ONCE, UNKNOWN_SECONDS
from fencepost_proxy.wire.apis import METADATA
from fencepost_proxy.wire.control import decode_request, encode_response_frame, parse_request_header
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    TopicResult,
    encode_produce_request,
    encode_produce_response,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message
from tests.support.batches import batch, expecting
from tests.unit.test_session import HEARTBEAT, T_ID, Call, Talk, request

OTHER = UUID(int=78)
UNKNOWN_TOPIC_ID, DENIED, NOT_LEADER = 100, 29, 6


class Ids(Talk):
    """Requests and responses name topics by their ids."""

    def __init__(self, **services: Any) -> None:
        super().__init__(newest_produce=13, **services)

    def reported(self) -> dict[tuple[UUID | None, int], tuple[int, int]]:
        return {
            (topic.topic_id, each.partition): (each.error_code, each.base_offset)
            for topic in parse_produce_response(memoryview(self.answer())[4:], 13).topics
            for each in topic.partitions
        }


def produce(*parts: tuple[UUID, int, memoryview], correlation: int = 1, acks: int = -1) -> bytes:
    topics: dict[UUID, list[PartitionData]] = {}
    for topic_id, partition, records in parts:
        topics.setdefault(topic_id, []).append(PartitionData(partition, records))
    data = tuple(TopicData("", topic_id, tuple(each)) for topic_id, each in topics.items())
    return b"".join(encode_produce_request(ProduceRequest(13, correlation, "test", b"", None, acks, 3000, data)))


def produced(*parts: tuple[UUID, int, int, int], correlation: int = 1) -> bytes:
    """Kafka's answer: (topic id, partition, error, base offset)."""
    topics = tuple(TopicResult("", each[0], (PartitionResult(each[1], each[2], each[3], -1, 0),)) for each in parts)
    return encode_produce_response(ProduceResponse(correlation, topics, 0), 13)


def is_looked_up(session: Ids, names: Mapping[UUID, str | int], correlation: int = 1) -> None:
    """The session queries Metadata for these ids, and gets their names, or Kafka's errors."""
    frame = memoryview(session.upstream())[4:]
    header = parse_request_header(frame)
    assert (header.api_key, header.client_id) == (METADATA, "test")
    queried = decode_request(METADATA, header.api_version, frame[header.body_offset :])
    assert [(each.topic_id, each.name) for each in queried.topics] == [(each, None) for each in names]
    assert not queried.allow_auto_topic_creation
    topics = [
        Message(topic_id=topic_id, name=found, error_code=0)
        if isinstance(found, str)
        else Message(topic_id=topic_id, name=None, error_code=found)
        for topic_id, found in names.items()
    ]
    answer = Message(topics=topics)
    session.kafka(encode_response_frame(METADATA, header.api_version, correlation, answer))


@pytest.fixture
def session() -> Ids:
    return Ids()


def test_unchecked_topic_is_looked_up_once_and_relayed_unchanged(session: Ids) -> None:
    sent = produce((OTHER, 0, batch(b"x")))
    session.client(sent)
    is_looked_up(session, {OTHER: "plain"})
    assert session.upstream() == sent
    answer = produced((OTHER, 0, 0, 4))
    session.kafka(answer)
    assert session.answer() == answer

    again = produce((OTHER, 1, batch(b"y")), correlation=2)
    session.client(again[:-1])
    assert session.upstream() == again[:-1]  # streamed
    session.client(again[-1:])
    assert session.upstream() == again[-1:]


def test_checked_append_keeps_the_clients_topic_id(session: Ids) -> None:
    session.client(produce((T_ID, 0, expecting(5, b"x"))))
    is_looked_up(session, {T_ID: "checked-a"})
    pending = session.admitted()
    assert pending.sending.topic_id == T_ID
    sent = session.sent_up()
    assert (sent.api_version, sent.topics[0].topic_id) == (13, T_ID)
    session.completed(pending, produced((T_ID, 0, 0, 5)), PartitionResult(0, 0, 5, -1, 0))
    assert session.reported() == {(T_ID, 0): (0, 5)}
    assert session.services.free_bytes == 1 << 20


@pytest.mark.parametrize(("error", "reported"), [(100, UNKNOWN_TOPIC_ID), (3, UNKNOWN_TOPIC_ID), (29, DENIED)])
def test_topic_without_a_name_is_refused_as_kafka_does(error: int, reported: int, session: Ids) -> None:
    session.client(produce((OTHER, 0, batch(b"x")), (OTHER, 1, batch(b"x"))))
    is_looked_up(session, {OTHER: error})
    session.metric()
    assert session.reported() == {(OTHER, 0): (reported, -1), (OTHER, 1): (reported, -1)}
    session.silent()  # nothing is sent: the id may be that of a checked topic, which is being created
    assert session.services.free_bytes == 1 << 20
    assert session.services.topic_names == {}


def test_many_unknown_ids_are_looked_up_in_parts() -> None:
    """Kafka's time for unknown ids rises with the square of their number."""
    session, ids = Ids(), [UUID(int=each) for each in range(1, 2 * IDS_AT_ONCE + 2)]
    session.client(produce(*((each, 0, batch(b"x")) for each in ids)))
    for begin in range(0, len(ids), IDS_AT_ONCE):
        is_looked_up(session, dict.fromkeys(ids[begin : begin + IDS_AT_ONCE], 100))
    for _ in ids:
        session.metric()
    assert session.reported() == {(each, 0): (UNKNOWN_TOPIC_ID, -1) for each in ids}


def test_unknown_id_is_not_looked_up_again_for_a_moment() -> None:
    session, other_client = Ids(), Ids()
    other_client.services.unknown_topic_ids = session.services.unknown_topic_ids
    session.client(produce((OTHER, 0, batch(b"x"))))
    is_looked_up(session, {OTHER: 100})
    for talk in (session, other_client):
        talk.commands.clear()
        talk.client(produce((OTHER, 0, batch(b"x")), correlation=2))
        talk.metric()
        assert talk.reported() == {(OTHER, 0): (UNKNOWN_TOPIC_ID, -1)}
    other_client.now += UNKNOWN_SECONDS
    other_client.client(produce((OTHER, 0, batch(b"x")), correlation=3))
    is_looked_up(other_client, {OTHER: "plain"}, 3)
    other_client.upstream()


def test_denied_id_is_looked_up_each_time(session: Ids) -> None:
    for correlation in (1, 2):
        session.client(produce((OTHER, 0, batch(b"x")), correlation=correlation))
        is_looked_up(session, {OTHER: 29}, correlation)
        session.commands.clear()


def test_other_topics_of_the_request_are_sent() -> None:
    plain = UUID(int=79)  # not the id known here: of a topic that is not checked, Kafka decides
    session = Ids(topic_names={T_ID: "checked-a", plain: "plain"})
    session.client(produce((OTHER, 0, batch(b"x")), (plain, 0, batch(b"x")), (T_ID, 0, expecting(5, b"x"))))
    is_looked_up(session, {OTHER: 100})
    session.metric()
    pending = session.admitted()
    assert [topic.topic_id for topic in session.sent_up().topics] == [plain, T_ID]
    session.completed(pending, produced((plain, 0, 0, 9), (T_ID, 0, 0, 5)), PartitionResult(0, 0, 5, -1, 0))
    assert session.reported() == {(plain, 0): (0, 9), (T_ID, 0): (0, 5), (OTHER, 0): (UNKNOWN_TOPIC_ID, -1)}

    session.client(produce((OTHER, 0, batch(b"x")), (plain, 0, batch(b"x")), correlation=2))  # without a checked one
    session.metric()
    assert [topic.topic_id for topic in session.sent_up().topics] == [plain]
    session.kafka(produced((plain, 0, 0, 10), correlation=2))
    assert session.reported() == {(plain, 0): (0, 10), (OTHER, 0): (UNKNOWN_TOPIC_ID, -1)}


def test_append_to_a_replaced_checked_topic_is_refused() -> None:
    session = Ids(topic_names={OTHER: "checked-a"})
    session.client(produce((OTHER, 0, expecting(5, b"x"))))
    assert session.next(m.TopicStale).topic == "checked-a"  # perhaps metadata here is older
    session.metric()
    assert session.reported() == {(OTHER, 0): (UNKNOWN_TOPIC_ID, -1)}


def test_topic_replaced_before_sending_gets_no_append() -> None:
    session = Ids(topic_names={T_ID: "checked-a"}).may_write("checked-a")
    session.client(produce((T_ID, 0, expecting(5, b"x"))))
    pending = session.submitted()
    session.services.topic_id = lambda topic: OTHER
    session.admit(pending)
    assert session.next(m.TopicStale).topic == "checked-a"
    session.metric()
    session.canceled(pending)
    assert session.reported()[T_ID, 0][0] == NOT_LEADER


def test_unknown_topic_id_of_kafka_is_reported_as_it_is() -> None:
    session = Ids(topic_names={T_ID: "checked-a"})
    session.client(produce((T_ID, 0, expecting(5, b"x"))))
    pending = session.admitted()
    session.upstream()
    session.kafka(produced((T_ID, 0, 100, -1)))
    assert session.next(m.TopicStale).topic == "checked-a"
    name, (_, answered) = session.next(Call)
    assert (name, answered.error_code) == ("answered", UNKNOWN_TOPIC_ID)
    session.complete(pending, answered)
    assert session.reported()[T_ID, 0][0] == UNKNOWN_TOPIC_ID


def test_append_sent_after_an_unknown_topic_id_fails_too(session: Ids) -> None:
    second = produce((T_ID, 0, expecting(6, b"y")), correlation=2)
    session.client(produce((T_ID, 0, expecting(5, b"x"))))
    session.services.unread = len(second)
    is_looked_up(session, {T_ID: 100})
    session.metric()
    session.answer()
    session.services.topic_names[T_ID] = "checked-a"  # it is there now, with another writer's record at 5
    session.services.unread = 0
    session.client(second)
    session.metric()
    assert session.reported() == {(T_ID, 0): (UNKNOWN_TOPIC_ID, -1)}
    session.client(produce((T_ID, 0, expecting(6, b"z")), correlation=3))  # with knowledge of the failure
    session.submitted()


def test_next_request_waits_for_the_lookup(session: Ids) -> None:
    sent = produce((OTHER, 0, batch(b"x")))
    session.client(sent + request(HEARTBEAT, 4, 2))
    assert not session.next(m.ReadClient).on
    is_looked_up(session, {OTHER: "plain"})
    assert session.next(m.ReadClient).on
    assert session.upstream() == sent + request(HEARTBEAT, 4, 2)


def test_state_topic_is_closed_by_its_id() -> None:
    session = Ids(topic_names={OTHER: "__state"}).may_write("__state")
    session.client(produce((OTHER, 0, batch(b"x"))))
    session.metric()
    assert session.reported()[OTHER, 0][0] == DENIED


def test_unknown_topic_id_without_acks_closes_the_connection(session: Ids) -> None:
    session.client(produce((OTHER, 0, batch(b"x")), acks=0))
    is_looked_up(session, {OTHER: 100})
    assert "acks=0" in session.next(m.CloseClient).reason


def huge(monkeypatch: pytest.MonkeyPatch) -> tuple[Ids, list[UUID], bytes]:
    """More partitions than a request may have that the proxy reads."""
    for module in ("produce.arrival", "batches.reading"):
        monkeypatch.setattr(f"fencepost_proxy.session.{module}.PARTITIONS_MAX", 2)
    monkeypatch.setattr("fencepost_proxy.session.produce.arrival.TOPICS_AT_ONCE", 2)
    session, ids = Ids(), [UUID(int=each) for each in range(1, 4)]
    sent = produce(*((each, 0, batch(b"x")) for each in ids))
    session.client(sent)
    session.read_elsewhere()
    return session, ids, sent


def test_topic_ids_of_a_huge_request_are_looked_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ids, sent = huge(monkeypatch)
    is_looked_up(session, {ids[0]: "a", ids[1]: "b"})
    session.read_elsewhere()
    is_looked_up(session, {ids[2]: "c"})
    assert session.upstream() == sent


@pytest.mark.parametrize(("found", "why"), [(100, "does not know"), ("checked-a", "one that this proxy checks")])
def test_huge_request_with_an_odd_topic_closes_the_connection(
    found: str | int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, ids, _ = huge(monkeypatch)
    is_looked_up(session, {ids[0]: "a", ids[1]: found})
    assert why in session.next(m.CloseClient).reason
