"""Dialogues of consumer groups: the coordinator's answers, and what the members get."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from fencepost_proxy.expansion.assignment import decode_assignment
from fencepost_proxy.expansion.assignment_filter import AssignmentFilter, GroupPlan
from fencepost_proxy.expansion.queries import (
    Beginnings,
    GatedPartitions,
    HasTasks,
    IsAssigned,
    LookedUp,
    MayHave,
    SharesTopics,
    WhatIsAssigned,
    WhereToBegin,
)
from fencepost_proxy.expansion.watch import Watch
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.control import decode_request, decode_response, encode_request, encode_response
from fencepost_proxy.wire.schema import Message

ID, OTHER_ID = UUID(int=7), UUID(int=8)
P0, P2, P3 = (TopicPartition("orders", each) for each in (0, 2, 3))


@dataclass
class Expanded:
    """`orders` was expanded from 2 to 4 partitions."""

    first_new: int = 2
    names: dict[UUID, str] = field(default_factory=lambda: {ID: "orders"})

    def new(self, partition: TopicPartition) -> bool:
        return self.expands(partition.topic) and partition.partition >= self.first_new

    def expands(self, topic: str) -> bool:
        return topic == "orders"

    def topic(self, topic_id: UUID) -> str | None:
        return self.names.get(topic_id)

    def topic_ids(self) -> Mapping[str, UUID]:
        return {name: topic_id for topic_id, name in self.names.items()}


class Played:
    """An assignment filter; messages are encoded and decoded."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.assignment_filter = AssignmentFilter(self.watch, Expanded(), lambda: 100.0)

    def queries_to_send(self, api_key: int, version: int, request: Message) -> GroupPlan:
        decoded = decode_request(api_key, version, encode_request(api_key, version, request))
        plan = self.assignment_filter.begin(api_key, version, "app", decoded)
        if plan.forward is not None:
            encode_request(api_key, version, plan.forward)
        return plan

    def released(self) -> None:
        """The state topic alone showed a gated partition, which is gated no longer."""
        self.watch.record("g", frozenset({P2}))
        self.watch.update("g", frozenset())

    def heartbeat(self, member: str = "m", generation: int = 3) -> int:
        request = Message(group_id="g", generation_id=generation, member_id=member)
        answer = _over_the_wire(apis.HEARTBEAT, 4, Message())
        self.queries_to_send(apis.HEARTBEAT, 4, request).finish(answer)
        return int(answer.error_code)


def _over_the_wire(api_key: int, version: int, answer: Message) -> Message:
    return decode_response(api_key, version, encode_response(api_key, version, answer))


def _bytes(*partitions: int, topic: bytes = b"orders", tasks: bytes = b"") -> bytes:
    numbers = struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
    return struct.pack(">hih", 3, 1, len(topic)) + topic + numbers + struct.pack(">i", len(tasks) or -1) + tasks


def _sync(version: int) -> Message:
    return Message(group_id="g", generation_id=3, member_id="m", protocol_type="consumer", assignments=[])


def _synced(version: int, assignment: bytes, **more: object) -> Message:
    kind = {"protocol_type": "consumer", "protocol_name": "range"} if version >= 5 else {}
    return _over_the_wire(apis.SYNC_GROUP, version, Message(assignment=assignment, **(kind | more)))


@pytest.fixture
def played() -> Played:
    return Played()


# ---- the classic protocol


@pytest.mark.parametrize("version", range(6))
def test_gated_partition_is_removed_from_assignment(version: int, played: Played) -> None:
    answer = _synced(version, _bytes(0, 2, 3))
    outcome = played.queries_to_send(apis.SYNC_GROUP, version, _sync(version)).finish(answer)
    assert outcome.query_message == MayHave("g", "app", (P2, P3))
    played.watch.track_gated("g", {P2}, (P2, P3))
    outcome.complete(GatedPartitions(frozenset({P2})))
    assert decode_assignment(answer.assignment).topics == (("orders", (0, 3)),)
    encode_response(apis.SYNC_GROUP, version, answer)

    # And the member joins again once it may have the rest.
    assert played.heartbeat() == 0
    played.watch.update("g", frozenset())
    assert played.heartbeat() == 27


@pytest.mark.parametrize(
    "answer",
    [
        _synced(5, _bytes(0, 1)),  # nothing new
        _synced(5, _bytes(2, 3, topic=b"others")),
        _synced(5, b""),
        _synced(5, b"not an assignment"),
        _synced(5, b"", error_code=27),
        _synced(5, _bytes(2), protocol_type="connect", protocol_name="sessioned"),
    ],
)
def test_response_without_new_partitions_stays_unchanged(answer: Message, played: Played) -> None:
    outcome = played.queries_to_send(apis.SYNC_GROUP, 5, _sync(5)).finish(answer)
    assert not outcome.changed
    assert outcome.query_message is None
    assert outcome.notice is None


@pytest.mark.parametrize("assignment", [b"", b"not an assignment", _bytes(0, 1), _bytes(0, 2, tasks=bytes(range(88)))])
def test_rejoined_member_need_not_rejoin_again(assignment: bytes, played: Played) -> None:
    """Leaders may assign nothing to such members."""
    played.released()
    assert played.heartbeat() == 27
    played.queries_to_send(apis.SYNC_GROUP, 5, _sync(5)).finish(_synced(5, assignment))
    assert played.heartbeat() == 0


def test_task_assignment_stays_unchanged_and_is_reported() -> None:
    answer = _synced(5, _bytes(0, 2, tasks=bytes(range(88))))
    outcome = Played().queries_to_send(apis.SYNC_GROUP, 5, _sync(5)).finish(answer)
    assert outcome.notice == HasTasks("g")
    assert not outcome.changed
    assert answer.assignment == _bytes(0, 2, tasks=bytes(range(88)))


def test_heartbeat_error_stays_unchanged(played: Played) -> None:
    played.watch.track_gated("g", {P2}, (P2,))
    played.watch.synced("g", "m", 3, frozenset({P2}))
    played.watch.update("g", frozenset())
    answer = _over_the_wire(apis.HEARTBEAT, 4, Message(error_code=25))
    request = Message(group_id="g", generation_id=3, member_id="m")
    assert not played.queries_to_send(apis.HEARTBEAT, 4, request).finish(answer).changed
    assert answer.error_code == 25


# ---- KIP-848


def _beat(*owned: int, epoch: int = 4, silent: bool = False) -> Message:
    topics = None if silent else [Message(topic_id=ID, partitions=list(owned))]
    return Message(group_id="g", member_id="m", member_epoch=epoch, topic_partitions=topics)


def _beaten(*assigned: int, silent: bool = False, **more: int) -> Message:
    topics = [Message(topic_id=ID, partitions=list(assigned))]
    assignment = None if silent else Message(topic_partitions=topics)
    return _over_the_wire(
        apis.CONSUMER_GROUP_HEARTBEAT, 1, Message(member_id="m", member_epoch=4, assignment=assignment, **more)
    )


def _partitions(answer: Message) -> list[int] | None:
    return None if answer.assignment is None else [p for t in answer.assignment.topic_partitions for p in t.partitions]


def test_consumer_receives_gated_partition_after_its_release(played: Played) -> None:
    key = apis.CONSUMER_GROUP_HEARTBEAT
    answer = _beaten(0, 2, 3)
    outcome = played.queries_to_send(key, 1, _beat(epoch=0)).finish(answer)
    assert outcome.query_message == MayHave("g", "app", (P2, P3))
    played.watch.track_gated("g", {P2, P3}, (P2, P3))
    outcome.complete(GatedPartitions(frozenset({P2, P3})))
    assert _partitions(answer) == [0]

    nothing = _beaten(silent=True)
    assert not played.queries_to_send(key, 1, _beat(0)).finish(nothing).changed
    assert _partitions(nothing) is None

    played.watch.update("g", frozenset({P3}))
    later = _beaten(silent=True)
    assert played.queries_to_send(key, 1, _beat(silent=True)).finish(later).changed
    assert _partitions(later) == [0, 2]


def test_revoked_gated_partition_is_acknowledged_for_consumer(played: Played) -> None:
    key = apis.CONSUMER_GROUP_HEARTBEAT
    outcome = played.queries_to_send(key, 1, _beat(epoch=0)).finish(_beaten(0, 2))
    played.watch.track_gated("g", {P2}, (P2,))
    outcome.complete(GatedPartitions(frozenset({P2})))
    played.queries_to_send(key, 1, _beat(0)).finish(_beaten(silent=True))
    # The coordinator takes 2 away; what the client holds does not change.
    played.queries_to_send(key, 1, _beat(silent=True)).finish(_beaten(0))
    plan = played.queries_to_send(key, 1, _beat(silent=True))
    assert plan.forward is not None
    assert [list(each.partitions) for each in plan.forward.topic_partitions] == [[0]]
    assert played.queries_to_send(key, 1, _beat(silent=True)).forward is None


@pytest.mark.parametrize(("assigned", "gets"), [(((ID, (0, 2)),), [0, 2]), (None, None)], ids=["found", "failed query"])
def test_consumer_from_before_restart_is_queried(
    assigned: tuple[tuple[UUID, tuple[int, ...]], ...] | None, gets: list[int] | None, played: Played
) -> None:
    played.released()
    answer = _beaten(silent=True)
    outcome = played.queries_to_send(apis.CONSUMER_GROUP_HEARTBEAT, 1, _beat(silent=True)).finish(answer)
    assert outcome.query_message == WhatIsAssigned("g", "m")
    outcome.complete(IsAssigned(assigned))
    assert _partitions(answer) == gets


@pytest.mark.parametrize("answer", [_beaten(silent=True, error_code=110), _beaten(1), _beaten(silent=True)])
def test_a_consumer_of_no_concern_is_left_alone(answer: Message, played: Played) -> None:
    before = encode_response(apis.CONSUMER_GROUP_HEARTBEAT, 1, answer)
    plan = played.queries_to_send(apis.CONSUMER_GROUP_HEARTBEAT, 1, _beat(0))
    assert plan.forward is None
    assert not plan.finish(answer).changed
    assert encode_response(apis.CONSUMER_GROUP_HEARTBEAT, 1, answer) == before


# ---- offsets


def _fetched(version: int, *offsets: tuple[int, int], topic: str = "orders", topic_id: UUID = ID) -> Message:
    entries = [Message(partition_index=number, committed_offset=offset) for number, offset in offsets]
    if version < 8:
        return _over_the_wire(apis.OFFSET_FETCH, version, Message(topics=[Message(name=topic, partitions=entries)]))
    topics = [Message(name=topic, topic_id=topic_id, partitions=entries)]
    return _over_the_wire(apis.OFFSET_FETCH, version, Message(groups=[Message(group_id="g", topics=topics)]))


def _fetch(version: int) -> Message:
    if version < 8:
        return Message(group_id="g", topics=[Message(name="orders", partition_indexes=[0, 2, 3])])
    topics = [Message(name="orders", topic_id=ID, partition_indexes=[0, 2, 3])]
    return Message(groups=[Message(group_id="g", topics=topics)])


def _reported(version: int, answer: Message) -> tuple[int, list[int]]:
    holder = answer if version < 8 else answer.groups[0]
    entries = [entry for topic in holder.topics for entry in topic.partitions]
    error = holder.error_code if version >= 2 else max(entry.error_code for entry in entries)
    return error, [entry.committed_offset for entry in entries]


@pytest.mark.parametrize(
    ("beginnings", "reported"),
    [({P2: 11}, (0, [-1, 11, 5])), (None, (14, [-1, -1, 5])), ({}, (0, [-1, -1, 5]))],
    ids=["known", "unknown: it retries", "a new group: by its policy"],
)
@pytest.mark.parametrize("version", range(1, 11))
def test_missing_commit_on_new_partition_becomes_its_beginning(
    version: int, beginnings: dict[TopicPartition, int] | None, reported: tuple[int, list[int]]
) -> None:
    answer = _fetched(version, (0, -1), (2, -1), (3, 5))
    outcome = Played().queries_to_send(apis.OFFSET_FETCH, version, _fetch(version)).finish(answer)
    assert outcome.query_message == WhereToBegin("g", (P2,))
    outcome.complete(Beginnings(beginnings))
    assert _reported(version, answer) == reported
    encode_response(apis.OFFSET_FETCH, version, answer)


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        (9, _fetched(9, (0, -1), (1, -1), (2, 4))),
        (9, _fetched(9, (2, -1), topic="others")),
        (10, _fetched(10, (2, -1), topic_id=OTHER_ID)),
        (9, Message(groups=[Message(group_id="g", error_code=16, topics=[])])),
        (9, Message(groups=[])),
        (7, Message(error_code=16, topics=[])),
    ],
)
def test_offsets_of_no_concern_are_left_alone(version: int, answer: Message) -> None:
    answer = _over_the_wire(apis.OFFSET_FETCH, version, answer)
    outcome = Played().queries_to_send(apis.OFFSET_FETCH, version, _fetch(version)).finish(answer)
    assert not outcome.changed
    assert outcome.query_message is None


def test_log_end_query_is_noticed() -> None:
    entries = [Message(partition_index=0, timestamp=-1), Message(partition_index=1, timestamp=-2)]
    others = Message(name="others", partitions=[Message(partition_index=0, timestamp=-1)])
    request = Message(replica_id=-1, topics=[Message(name="orders", partitions=entries), others])
    reported = Message(name="orders", partitions=[Message(partition_index=0), Message(partition_index=1)])
    answer = _over_the_wire(apis.LIST_OFFSETS, 7, Message(topics=[reported]))
    outcome = Played().queries_to_send(apis.LIST_OFFSETS, 7, request).finish(answer)
    assert outcome.notice == LookedUp("app", (P0,), (TopicPartition("orders", 1),))
    assert not outcome.changed


def test_denied_log_end_query_is_not_noticed() -> None:
    """A client without rights could otherwise release a group's partitions by using its client id."""
    topic = Message(name="orders", partitions=[Message(partition_index=0, timestamp=-1)])
    denied = Message(name="orders", partitions=[Message(partition_index=0, error_code=29)])
    answer = _over_the_wire(apis.LIST_OFFSETS, 7, Message(topics=[denied]))
    outcome = Played().queries_to_send(apis.LIST_OFFSETS, 7, Message(replica_id=-1, topics=[topic])).finish(answer)
    assert outcome.notice is None
    assert not outcome.changed


def test_requests_naming_too_many_partitions_are_ignored() -> None:
    many = range(10, 20_010)
    answer = _fetched(9, (2, -1), *((each, 5) for each in many))
    outcome = Played().queries_to_send(apis.OFFSET_FETCH, 9, _fetch(9)).finish(answer)
    assert outcome.query_message is None
    answer.groups[0].topics[0].partitions.pop()
    assert Played().queries_to_send(apis.OFFSET_FETCH, 9, _fetch(9)).finish(answer).query_message == WhereToBegin(
        "g", (P2,)
    )

    entries = [Message(partition_index=each, timestamp=-1) for each in (0, *many)]
    request = Message(replica_id=-1, topics=[Message(name="orders", partitions=entries)])
    reported = Message(topics=[Message(name="orders", partitions=[Message(partition_index=0, error_code=0)])])
    assert Played().queries_to_send(apis.LIST_OFFSETS, 7, request).finish(reported).notice is None
    entries.pop()
    assert Played().queries_to_send(apis.LIST_OFFSETS, 7, request).finish(reported).notice == LookedUp("app", (P0,), ())


# ---- Streams groups


@pytest.mark.parametrize(
    ("topics", "patterns", "is_reported"),
    [(["other", "orders"], [], True), (["other"], [], False), ([], ["o.*"], True), (None, None, False)],
)
def test_streams_group_of_expanded_topic_is_reported_and_not_gated(
    topics: list[str] | None, patterns: list[str] | None, is_reported: bool
) -> None:
    subtopologies = [
        Message(source_topics=[], source_topic_regex=[]),
        Message(source_topics=topics, source_topic_regex=patterns),
    ]
    request = Message(group_id="g", topology=None if topics is None else Message(subtopologies=subtopologies))
    plan = Played().queries_to_send(apis.STREAMS_GROUP_HEARTBEAT, 0, request)
    outcome = plan.finish(Message(active_tasks=[]))
    assert plan.forward is None
    assert not outcome.changed
    assert outcome.notice == (HasTasks("g") if is_reported else None)


# ---- share groups


@pytest.mark.parametrize(("names", "reported"), [(["other", "orders"], ("orders",)), (["other"], ()), (None, ())])
def test_share_group_of_expanded_topic_is_reported_and_not_gated(
    names: list[str] | None, reported: tuple[str, ...]
) -> None:
    request = Message(group_id="g", member_id="m", subscribed_topic_names=names)
    plan = Played().queries_to_send(apis.SHARE_GROUP_HEARTBEAT, 1, request)
    answer = Message(assignment=Message(topic_partitions=[Message(topic_id=ID, partitions=[0, 2, 3])]))
    outcome = plan.finish(answer)
    assert plan.forward is None
    assert not outcome.changed
    assert outcome.notice == (SharesTopics("g", reported) if reported else None)
    assert _partitions(answer) == [0, 2, 3]
