"""Kafka's authorizer decides for group members also through the proxy: gated assignments extend no user's rights.

Clients log in as Kafka users, and the proxy as another one: see `tests/support/secured.py`.
"""

from __future__ import annotations

import struct

import pytest

from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.messages import Fields
from tests.support.raw import batch
from tests.support.secured import CREATE_PARTITIONS, GROUP, READ, TOPIC, Sides, User, allow, codes, deny, expand

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(200)]

JOIN, SYNC, HEARTBEAT, LEAVE, OFFSET_COMMIT, OFFSET_FETCH, CONSUMER_HEARTBEAT = 11, 14, 12, 13, 8, 9, 68
REBALANCE_IN_PROGRESS, TOPIC_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED = 27, 29, 30


class Scene(Sides):
    """A topic with five records that was expanded to two partitions, and a group."""

    def __init__(self, sides: Sides) -> None:
        super().__init__(sides.kafka, sides.proxy)
        self.topic, self.group = unique_topic("shared"), unique_topic("group")
        for user in ("member", "halfway"):
            allow(self.kafka, user, GROUP, self.group, READ)
        for user in ("member", "stranger"):
            allow(self.kafka, user, TOPIC, self.topic, READ)
        self.create(self.topic)
        records = batch(*(b"v%d" % number for number in range(5)))
        assert self.produce("admin", self.topic, records)["ErrorCode"] == 0
        self.change("admin", CREATE_PARTITIONS, 1, expand(self.topic, 2))

    def join(self, member: User) -> Fields:
        """Join with an assignment of all partitions. Return the member's identity and the response."""
        protocols = [{"Name": "range", "Metadata": struct.pack(">hih", 0, 1, len(self.topic)) + self.topic.encode()}]
        requested = {
            "GroupId": self.group,
            "SessionTimeoutMs": 30_000,
            "RebalanceTimeoutMs": 30_000,
            "MemberId": "",
            "ProtocolType": "consumer",
            "Protocols": protocols,
        }
        joined: Fields = {}

        def in_it() -> bool:
            joined.update(member.query(JOIN, 3, requested))
            return bool(joined["ErrorCode"] == 0)

        until(in_it, "a coordinator")
        identity = {"GroupId": self.group, "GenerationId": joined["GenerationId"], "MemberId": joined["MemberId"]}
        assigned = {"MemberId": joined["MemberId"], "Assignment": self.assignment(0, 1)}
        return identity, member.query(SYNC, 2, identity | {"Assignments": [assigned]})  # type: ignore[return-value]

    def assignment(self, *partitions: int) -> bytes:
        name = self.topic.encode()
        numbers = struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
        return struct.pack(">hih", 0, 1, len(name)) + name + numbers + struct.pack(">i", -1)

    def commit(self, member: User, identity: Fields, offset: int) -> None:
        partition = {"PartitionIndex": 0, "CommittedOffset": offset, "CommittedMetadata": ""}
        queried = {
            "GroupId": identity["GroupId"],
            "GenerationIdOrMemberEpoch": identity["GenerationId"],
            "MemberId": identity["MemberId"],
            "RetentionTimeMs": -1,
            "Topics": [{"Name": self.topic, "Partitions": [partition]}],
        }
        answer = member.query(OFFSET_COMMIT, 4, queried)
        assert answer["Topics"][0]["Partitions"][0]["ErrorCode"] == 0, answer

    def fetch(self, version: int) -> Fields:
        topic = {"Name": self.topic, "PartitionIndexes": [0, 1]}
        if version < 8:
            return {"GroupId": self.group, "Topics": [topic]}
        return {"Groups": [{"GroupId": self.group, "Topics": [topic]}]}


@pytest.fixture
def scene(sides: Sides) -> Scene:
    return Scene(sides)


def test_unauthorized_group_reader_gets_the_refusals_of_kafka(scene: Scene) -> None:
    """Given a group with a gated partition, when an unauthorized client uses the group's and the member's ids, then
    each response is Kafka's refusal, unchanged."""
    with User(scene.through, "member") as member:
        identity, synced = scene.join(member)
        scene.commit(member, identity, 2)
        assert synced["Assignment"] == scene.assignment(0), f"no partition is gated: {scene.proxy.log}"
        queried = [
            (SYNC, 2, identity | {"Assignments": []}),
            (SYNC, 5, identity | {"ProtocolType": "consumer", "ProtocolName": "range", "Assignments": []}),
            (HEARTBEAT, 4, identity),
            *((OFFSET_FETCH, version, scene.fetch(version)) for version in (1, 5, 7, 8, 9)),
            (LEAVE, 2, {"GroupId": scene.group, "MemberId": identity["MemberId"]}),
            (
                CONSUMER_HEARTBEAT,
                0,
                {
                    "GroupId": scene.group,
                    "MemberId": "",
                    "MemberEpoch": 0,
                    "RebalanceTimeoutMs": 30_000,
                    "SubscribedTopicNames": [scene.topic],
                    "TopicPartitions": [],
                },
            ),
        ]
        for api_key, version, body in queried:
            with User(scene.direct, "stranger") as one, User(scene.through, "stranger") as other:
                reported = one.query(api_key, version, body)
                assert other.query(api_key, version, body) == reported, (api_key, version)
                assert GROUP_AUTHORIZATION_FAILED in codes(reported), (api_key, version, reported)
        assert member.query(HEARTBEAT, 4, identity)["ErrorCode"] == 0, "the requests disturbed the member"


def test_start_offset_requires_permission_to_describe_the_topic(scene: Scene) -> None:
    """Given a user that may read the group but not the topic. The member gets the new partition's start offset."""
    with User(scene.through, "member") as member:
        identity, _ = scene.join(member)
        scene.commit(member, identity, 2)
        for version in (5, 8):
            offsets = _offsets(member.query(OFFSET_FETCH, version, scene.fetch(version)))
            assert offsets == {0: (2, 0), 1: (0, 0)}, "the proxy does not change the member's offsets"
            with User(scene.direct, "member") as direct:
                assert _offsets(direct.query(OFFSET_FETCH, version, scene.fetch(version)))[1] == (-1, 0)
            with User(scene.direct, "halfway") as one, User(scene.through, "halfway") as other:
                reported = one.query(OFFSET_FETCH, version, scene.fetch(version))
                assert other.query(OFFSET_FETCH, version, scene.fetch(version)) == reported
                assert _offsets(reported) == dict.fromkeys((0, 1), (-1, TOPIC_AUTHORIZATION_FAILED))


def _offsets(answer: Fields) -> dict[int, tuple[int, int]]:
    topics = answer["Topics"] if "Topics" in answer else answer["Groups"][0]["Topics"]
    return {
        each["PartitionIndex"]: (each["CommittedOffset"], each["ErrorCode"])
        for topic in topics
        for each in topic["Partitions"]
    }


def test_only_permitted_member_gets_rebalance_for_the_new_partition(scene: Scene) -> None:
    """When the member has read the first partition, then it gets a rebalance, or a refusal if it was revoked."""
    with User(scene.through, "member") as member:
        identity, _ = scene.join(member)
        scene.commit(member, identity, 2)
        scene.commit(member, identity, 5)
        until(lambda: f"gated partition assigned group={scene.group}" in scene.proxy.log, "assignment of the partition")
        for _ in range(2):
            assert member.query(HEARTBEAT, 4, identity)["ErrorCode"] == REBALANCE_IN_PROGRESS
        deny(scene.kafka, "member", GROUP, scene.group, READ)
        with User(scene.direct, "member") as direct:
            refused = {"ThrottleTimeMs": 0, "ErrorCode": GROUP_AUTHORIZATION_FAILED}
            until(lambda: direct.query(HEARTBEAT, 4, identity) == refused, "the ACL to take effect")
        assert member.query(HEARTBEAT, 4, identity) == refused
        synced = member.query(SYNC, 2, identity | {"Assignments": []})
        assert (synced["ErrorCode"], synced["Assignment"]) == (GROUP_AUTHORIZATION_FAILED, b"")
