"""Kafka's authorizer decides for group members also through the proxy: gated assignments extend no user's rights.

Clients log in as Kafka users, and the proxy as another one: see `tests/support/secured.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.messages import Fields, RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Record, batch
from tests.support.secured import User, proxy_of

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(200)]

CREATE_TOPICS, CREATE_ACLS, CREATE_PARTITIONS = 19, 30, 37
JOIN, SYNC, HEARTBEAT, LEAVE, OFFSET_COMMIT, OFFSET_FETCH, CONSUMER_HEARTBEAT = 11, 14, 12, 13, 8, 9, 68
TOPIC, GROUP = 2, 3
DENY, ALLOW = 2, 3
READ, DESCRIBE = 3, 8
REBALANCE_IN_PROGRESS, TOPIC_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED = 27, 29, 30
CONFIG = '[topics."shared-*"]\n"fencepost.ordered.partition.expansion" = "true"\n'


@pytest.fixture(scope="module")
def kafka(secured: KafkaCluster) -> KafkaCluster:
    return secured


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with proxy_of(kafka, tmp_path_factory.mktemp("rights"), CONFIG) as proxy:
        yield proxy


class Scene:
    """A topic and a group with one member, which has read and committed two of five records."""

    def __init__(self, kafka: KafkaCluster, proxy: ProxyProcess) -> None:
        self.kafka, self.proxy = kafka, proxy
        self.topic, self.group = unique_topic("shared"), unique_topic("group")
        self.direct, self.through = kafka.address(1, "SASL"), Address.parse(proxy.bootstrap)
        self.may("member", GROUP, self.group, READ)
        for user in ("member", "stranger"):
            self.may(user, TOPIC, self.topic, READ)
        self.may("halfway", GROUP, self.group, READ)
        with User(self.through, "admin") as admin:
            requested = {
                "Name": self.topic,
                "NumPartitions": 1,
                "ReplicationFactor": 1,
                "Assignments": [],
                "Configs": [],
            }
            created = admin.query(CREATE_TOPICS, 5, {"Topics": [requested], "timeoutMs": 30_000})
            assert created["Topics"][0]["ErrorCode"] == 0
        with Connection(str(kafka.address(1))) as writer:
            until(lambda: writer.append(self.topic, batch(*map(_record, range(5)))).error_code == 0, "a leader")

    def may(self, user: str, kind: int, name: str, operation: int, permission: int = ALLOW) -> None:
        acl = {
            "ResourceType": kind,
            "ResourceName": name,
            "ResourcePatternType": 3,
            "Principal": f"User:{user}",
            "Host": "*",
            "Operation": operation,
            "PermissionType": permission,
        }
        with RawConnection(self.kafka.address(1)) as admin:
            assert admin.query(CREATE_ACLS, 2, {"Creations": [acl]})["Results"][0]["ErrorCode"] == 0

    def expand(self) -> None:
        with User(self.through, "admin") as admin:
            requested = {"Name": self.topic, "Count": 2, "Assignments": None}
            response = admin.query(
                CREATE_PARTITIONS, 1, {"Topics": [requested], "TimeoutMs": 30_000, "ValidateOnly": False}
            )
            assert response["Results"][0]["ErrorCode"] == 0, response

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


def _record(number: int) -> Record:
    return Record(b"v%d" % number)


@pytest.fixture
def scene(kafka: KafkaCluster, proxy: ProxyProcess) -> Scene:
    return Scene(kafka, proxy)


def _codes(answer: Any) -> set[int]:
    if isinstance(answer, dict):
        codes = {value for name, value in answer.items() if name == "ErrorCode"}
        return codes.union(*map(_codes, answer.values())) if answer else codes
    return set().union(*map(_codes, answer)) if isinstance(answer, list) else set()


def test_unauthorized_group_reader_gets_the_refusals_of_kafka(scene: Scene) -> None:
    """Given a group with a gated partition, when an unauthorized client uses the group's and the member's ids, then
    each response is Kafka's refusal, unchanged."""
    scene.expand()
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
                assert GROUP_AUTHORIZATION_FAILED in _codes(reported), (api_key, version, reported)
        assert member.query(HEARTBEAT, 4, identity)["ErrorCode"] == 0, "the requests disturbed the member"


def test_start_offset_requires_permission_to_describe_the_topic(scene: Scene) -> None:
    """Given a user that may read the group but not the topic. The member gets the new partition's start offset."""
    scene.expand()
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


def test_revoked_member_gets_refusal_instead_of_rebalance(scene: Scene) -> None:
    """Given a partition that is no longer gated, when the revoked member sends a heartbeat, then it gets a refusal."""
    scene.expand()
    with User(scene.through, "member") as member:
        identity, _ = scene.join(member)
        scene.commit(member, identity, 2)
        scene.commit(member, identity, 5)
        until(lambda: f"gated partition assigned group={scene.group}" in scene.proxy.log, "assignment of the partition")
        scene.may("member", GROUP, scene.group, READ, DENY)
        with User(scene.direct, "member") as direct:
            refused = {"ThrottleTimeMs": 0, "ErrorCode": GROUP_AUTHORIZATION_FAILED}
            until(lambda: direct.query(HEARTBEAT, 4, identity) == refused, "the ACL to take effect")
        assert member.query(HEARTBEAT, 4, identity) == refused
        synced = member.query(SYNC, 2, identity | {"Assignments": []})
        assert (synced["ErrorCode"], synced["Assignment"]) == (GROUP_AUTHORIZATION_FAILED, b"")


def test_permitted_member_gets_rebalance_for_the_new_partition(scene: Scene) -> None:
    """The counterpart of the previous test: with permission, the member gets the rebalance."""
    scene.expand()
    with User(scene.through, "member") as member:
        identity, _ = scene.join(member)
        scene.commit(member, identity, 5)
        until(lambda: f"gated partition assigned group={scene.group}" in scene.proxy.log, "assignment of the partition")
        assert member.query(HEARTBEAT, 4, identity)["ErrorCode"] == REBALANCE_IN_PROGRESS
