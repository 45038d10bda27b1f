"""One valid request of every API that a client may send, for the walk over all of them.

`BODIES[api name](side, version)` returns the bodies to send. Each `ProxiedSocket` has separate objects in the cluster
(a topic, a group with a member, a transaction). The direct and the proxied one are set up alike, so that equal requests
have equal responses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.batches import batch, now_ms
from tests.support.messages import Fields, RawConnection

METADATA, FIND_COORDINATOR, JOIN_GROUP, SYNC_GROUP, CREATE_TOPICS, INIT_PRODUCER_ID = 3, 10, 11, 14, 19, 22
GROUP, TRANSACTION = 0, 1
RETRIABLE: Final = {3, 5, 6, 14, 15, 16, 41, 51}
_NO_BROKER = 999
#: The timestamp of all records: equal for both, and too recent for Kafka's retention, which would change one log start.
_AT_MS: Final = now_ms()


@dataclass
class ProxiedSocket:
    """`name` is one letter. `leader` leads the topic and coordinates the group and the transaction."""

    name: str
    leader: int
    leader_address: Address
    topic_id: UUID = field(default_factory=lambda: UUID(int=0))
    member_id: str = ""
    generation: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    _names: dict[tuple[str, int], str] = field(default_factory=dict)

    def of(self, what: str) -> str:
        return f"walk-{self.name}-{what}"

    @property
    def topic(self) -> str:
        return self.of("topic")

    @property
    def group(self) -> str:
        return self.coordinated("group", GROUP)

    @property
    def transactional_id(self) -> str:
        return self.coordinated("txn", TRANSACTION)

    def coordinated(self, what: str, key_type: int) -> str:
        """A name whose coordinator is the leader."""
        known = self._names.get((what, key_type))
        if known is None:
            names = [self.of(f"{what}-{number}") for number in range(60)]
            with RawConnection(self.leader_address) as connection:
                answer = connection.query(FIND_COORDINATOR, 4, {"KeyType": key_type, "CoordinatorKeys": names})
            known = next(each["Key"] for each in answer["Coordinators"] if each["NodeId"] == self.leader)
            self._names[(what, key_type)] = known
        return known

    def set_up(self, replicas: list[int]) -> None:
        with RawConnection(self.leader_address) as connection:
            assignments = [{"PartitionIndex": index, "BrokerIds": replicas} for index in range(2)]
            topic = {"Name": self.topic, "NumPartitions": -1, "ReplicationFactor": -1, "Assignments": assignments}
            made = connection.query(CREATE_TOPICS, 7, {"Topics": [topic]})["Topics"][0]
            assert made["ErrorCode"] == 0, made
            self.topic_id = made["TopicId"]
            joined = connection.query(JOIN_GROUP, 0, _join(self.group))
            self.member_id, self.generation = joined["MemberId"], joined["GenerationId"]
            assignment = {"MemberId": self.member_id, "Assignment": b"all"}
            synced = {"GroupId": self.group, "GenerationId": self.generation, "MemberId": self.member_id}
            assert connection.query(SYNC_GROUP, 0, {**synced, "Assignments": [assignment]})["ErrorCode"] == 0
            while True:
                requested = {"TransactionalId": self.transactional_id, "TransactionTimeoutMs": 60_000}
                begun = connection.query(INIT_PRODUCER_ID, 4, requested)
                if begun["ErrorCode"] not in RETRIABLE:
                    break
                time.sleep(0.1)
            assert begun["ErrorCode"] == 0
            self.producer_id, self.producer_epoch = begun["ProducerId"], begun["ProducerEpoch"]
            self._until_led(connection, len(replicas))

    def _until_led(self, connection: RawConnection, in_sync: int) -> None:
        """Metadata names leaders before they serve, and followers join one by one."""

        def led() -> bool:
            requested = {"Topics": [{"Name": self.topic}], "AllowAutoTopicCreation": False}
            partitions = connection.query(METADATA, 9, requested)["Topics"][0]["Partitions"]
            queried = {"Topics": [{"Name": self.topic, "Partitions": [_at(0, Timestamp=-1), _at(1, Timestamp=-1)]}]}
            offsets = connection.query(2, 4, {"ReplicaId": -1, **queried})["Topics"][0]["Partitions"]
            return all(len(p["IsrNodes"]) == in_sync for p in partitions) and not any(p["ErrorCode"] for p in offsets)

        until(led, f"{self.topic} to be led", seconds=20)


def _at(index: int, **more: object) -> Fields:
    return {"PartitionIndex": index, **more}


def _join(group: str, member_id: str = "") -> Fields:
    return {
        "GroupId": group,
        "SessionTimeoutMs": 60_000,
        "RebalanceTimeoutMs": 60_000,
        "MemberId": member_id,
        "ProtocolType": "walk",
        "Protocols": [{"Name": "range", "Metadata": b"what the member says"}],
    }


def _produce(side: ProxiedSocket, version: int) -> list[Fields]:
    def to(topic: str, index: int, acks: int) -> Fields:
        records = bytes(batch(b"one", b"two", timestamp_ms=_AT_MS))
        by_id = {"TopicId": side.topic_id if topic == side.topic else UUID(int=4711)}
        named = by_id if version >= 13 else {"Name": topic}
        data = {**named, "PartitionData": [{"Index": index, "Records": records}]}
        return {"Acks": acks, "TimeoutMs": 5_000, "TopicData": [data]}

    return [
        to(side.topic, 0, 1),
        to(side.topic, 1, -1),
        to(side.topic, 9, 1),
        to(side.of("nowhere"), 0, 1),
        {"Acks": 1, "TimeoutMs": 5_000, "TopicData": []},
    ]


def _fetch(side: ProxiedSocket, version: int) -> list[Fields]:
    def of(topic: str, index: int, offset: int, topic_id: UUID) -> Fields:
        partition = {"Partition": index, "FetchOffset": offset, "PartitionMaxBytes": 1 << 20}
        topics = [{"Topic": topic, "TopicId": topic_id, "Partitions": [partition]}]
        return {"MaxWaitMs": 0, "MinBytes": 0, "MaxBytes": 1 << 20, "Topics": topics}

    return [
        of(side.topic, 0, 0, side.topic_id),
        of(side.topic, 0, 1 << 40, side.topic_id),
        of(side.of("nowhere"), 0, 0, UUID(int=7)),
        {"MaxWaitMs": 0, "MinBytes": 0, "Topics": []},
    ]


def _metadata(side: ProxiedSocket, version: int) -> list[Fields]:
    known = {"Topics": [{"Name": side.topic}], "AllowAutoTopicCreation": False}
    # Before v4 a client cannot disable topic creation.
    nowhere = {"Topics": [{"Name": side.of("nowhere")}], "AllowAutoTopicCreation": False}
    return [known, *([nowhere, {"Topics": [{"Name": "not a name"}]}] if version >= 4 else [])]


def _find_coordinator(side: ProxiedSocket, version: int) -> list[Fields]:
    def of(key: str, key_type: int) -> Fields:
        return {"Key": key, "KeyType": key_type, "CoordinatorKeys": [key, f"{key}-0-1"]}

    # The same names for both, because the name determines the coordinator.
    bodies = [of("walk-0", GROUP)]
    if version:
        bodies += [of("walk-0", TRANSACTION), of("", GROUP), of("walk-0", 9), of("x:y:z", 2)]
    return bodies


def _txn(side: ProxiedSocket) -> Fields:
    return {
        "TransactionalId": side.transactional_id,
        "ProducerId": side.producer_id,
        "ProducerEpoch": side.producer_epoch,
    }


def _named(side: ProxiedSocket, by_id: bool) -> Fields:
    return {"TopicId": side.topic_id} if by_id else {"Name": side.topic}


def _offset_commit(side: ProxiedSocket, version: int) -> list[Fields]:
    partitions = [{"PartitionIndex": 0, "CommittedOffset": 1, "CommittedMetadata": "m"}]
    topics = [{**_named(side, version >= 10), "Partitions": partitions}]
    member = {"GenerationIdOrMemberEpoch": side.generation, "MemberId": side.member_id}
    return [{"GroupId": side.group, "Topics": topics, **member}, {"GroupId": side.group, "Topics": topics}]


def _offset_fetch(side: ProxiedSocket, version: int) -> list[Fields]:
    topics = [{**_named(side, version >= 10), "PartitionIndexes": [0, 1]}]
    if version < 8:
        return [{"GroupId": side.group, "Topics": topics}]
    return [{"Groups": [{"GroupId": group, "Topics": topics} for group in (side.group, side.of("nobody"))]}]


def _create_topics(side: ProxiedSocket, version: int) -> list[Fields]:
    def of(name: str, replication_factor: int = 1, **configs: str) -> Fields:
        return {
            "Name": name,
            "NumPartitions": 1,
            "ReplicationFactor": replication_factor,
            "Configs": [{"Name": key.replace("_", "."), "Value": value} for key, value in configs.items()],
        }

    return [
        {"Topics": [of(side.of(f"created-{version}"), retention_ms="1234567"), of(side.topic)]},
        {"Topics": [of(side.of("planned"), 77), of("not a name"), of(side.of("odd"), nonsense="1")]},
        {"Topics": [of(side.of("planned"))], "validateOnly": True},
    ]


def _delete_topics(side: ProxiedSocket, version: int) -> list[Fields]:
    names = [side.of(f"created-{version + 1}"), side.of("nowhere")]
    return [{"TopicNames": names, "Topics": [{"Name": name} for name in names], "TimeoutMs": 5_000}]


def _delete_records(side: ProxiedSocket, version: int) -> list[Fields]:
    def of(topic: str, offset: int) -> Fields:
        return {
            "Topics": [{"Name": topic, "Partitions": [{"PartitionIndex": 0, "Offset": offset}]}],
            "TimeoutMs": 5_000,
        }

    return [of(side.topic, 1), of(side.topic, 1 << 40), of(side.of("nowhere"), 0)]


def _configs(side: ProxiedSocket) -> list[Fields]:
    return [
        {"ResourceType": 2, "ResourceName": name, "Configs": [{"Name": "retention.ms", "Value": "7654321"}]}
        for name in (side.topic, side.of("nowhere"))
    ]


def _alter_configs(side: ProxiedSocket, version: int) -> list[Fields]:
    bad = {"ResourceType": 2, "ResourceName": side.topic, "Configs": [{"Name": "retention.ms", "Value": "soon"}]}
    return [
        {"Resources": _configs(side), "ValidateOnly": True},
        {"Resources": _configs(side), "ValidateOnly": False},
        {"Resources": [bad], "ValidateOnly": False},
    ]


def _describe_configs(side: ProxiedSocket, version: int) -> list[Fields]:
    def of(name: str, keys: list[str] | None) -> Fields:
        return {"ResourceType": 2, "ResourceName": name, "ConfigurationKeys": keys}

    requested = [of(side.topic, None), of(side.topic, ["retention.ms"]), of(side.of("nowhere"), ["retention.ms"])]
    return [{"Resources": [each], "IncludeSynonyms": True, "IncludeDocumentation": True} for each in requested]


def _acl(side: ProxiedSocket) -> Fields:
    return {
        "ResourceType": 2,
        "ResourceName": side.topic,
        "Principal": "User:a",
        "Host": "*",
        "Operation": 3,
        "PermissionType": 3,
    }


_ANY_ACL: Final = {
    "ResourceTypeFilter": 1,
    "ResourceNameFilter": None,
    "PatternTypeFilter": 1,
    "PrincipalFilter": None,
    "HostFilter": None,
    "Operation": 1,
    "PermissionType": 1,
}


def _group_heartbeat(side: ProxiedSocket, version: int) -> list[Fields]:
    member_id = "" if version == 0 else f"member-{version}"
    joining = {
        "GroupId": side.coordinated(f"next-{version}", GROUP),
        "MemberId": member_id,
        "RebalanceTimeoutMs": 60_000,
        "SubscribedTopicNames": [side.topic],
        "TopicPartitions": [],
    }
    return [joining, {"GroupId": side.coordinated(f"next-{version}", GROUP), "MemberId": "x", "MemberEpoch": 3}]


def _partitions(side: ProxiedSocket, key: str = "PartitionIndexes") -> list[Fields]:
    return [{"Name": side.topic, key: [0]}, {"Name": side.of("nowhere"), key: [0]}]


#: The request bodies per API. An API without a row gets a request with Kafka's defaults.
BODIES: Final[dict[str, Callable[[ProxiedSocket, int], list[Fields]]]] = {
    "Produce": _produce,
    "Fetch": _fetch,
    "ListOffsets": lambda s, v: [
        {
            "ReplicaId": -1,
            "Topics": [{"Name": name, "Partitions": [_at(0, Timestamp=at)]} for name in (s.topic, s.of("nowhere"))],
        }
        for at in (-2, -1, _AT_MS)
    ],
    "Metadata": _metadata,
    "OffsetCommit": _offset_commit,
    "OffsetFetch": _offset_fetch,
    "FindCoordinator": _find_coordinator,
    "JoinGroup": lambda s, v: [_join(s.coordinated(f"join-{v}", GROUP)), _join(s.group, "nobody")],
    "Heartbeat": lambda s, v: [
        {"GroupId": s.group, "GenerationId": s.generation, "MemberId": s.member_id},
        {"GroupId": s.group, "GenerationId": 99, "MemberId": s.member_id},
    ],
    "LeaveGroup": lambda s, v: [{"GroupId": s.group, "MemberId": "nobody", "Members": [{"MemberId": "nobody"}]}],
    "SyncGroup": lambda s, v: [{"GroupId": s.group, "GenerationId": s.generation, "MemberId": s.member_id}],
    "DescribeGroups": lambda s, v: [{"Groups": [s.group, s.of("nobody")]}],
    "SaslHandshake": lambda s, v: [{"Mechanism": "PLAIN"}],
    "CreateTopics": _create_topics,
    "DeleteTopics": _delete_topics,
    "DeleteRecords": _delete_records,
    "InitProducerId": lambda s, v: [
        {"TransactionalId": None, "TransactionTimeoutMs": 1_000},
        {"TransactionalId": s.coordinated(f"init-{v}", TRANSACTION), "TransactionTimeoutMs": 60_000},
        {"TransactionalId": s.coordinated(f"init-{v}", TRANSACTION), "TransactionTimeoutMs": 1 << 30},
    ],
    "OffsetForLeaderEpoch": lambda s, v: [
        {
            "ReplicaId": -1,
            "Topics": [
                {"Topic": name, "Partitions": [{"Partition": 0, "LeaderEpoch": 0}]}
                for name in (s.topic, s.of("nowhere"))
            ],
        }
    ],
    "AddPartitionsToTxn": lambda s, v: [
        {**{f"V3AndBelow{key}": value for key, value in _txn(s).items()},
         "V3AndBelowTopics": [{"Name": s.topic, "Partitions": [1]}]}
    ],
    "AddOffsetsToTxn": lambda s, v: [{**_txn(s), "GroupId": s.group}, {**_txn(s), "ProducerEpoch": 99}],
    "TxnOffsetCommit": lambda s, v: [
        {**_txn(s), "GroupId": s.group, "Topics": [
            {**_named(s, v >= 6), "Partitions": [_at(0, CommittedOffset=1, CommittedMetadata="")]}
        ]}
    ],
    "EndTxn": lambda s, v: [{**_txn(s), "Committed": True}],
    "WriteTxnMarkers": lambda s, v: [{"Markers": [{"ProducerId": 1 << 40, "TransactionResult": False, "Topics": [
        {"Name": s.of("nowhere"), "PartitionIndexes": [0]}]}]}],
    "DescribeAcls": lambda s, v: [_ANY_ACL],
    "CreateAcls": lambda s, v: [{"Creations": [_acl(s)]}],
    "DeleteAcls": lambda s, v: [{"Filters": [_ANY_ACL]}],
    "DescribeConfigs": _describe_configs,
    "AlterConfigs": _alter_configs,
    "IncrementalAlterConfigs": _alter_configs,
    "AlterReplicaLogDirs": lambda s, v: [{"Dirs": [{"Path": "/nowhere", "Topics": _partitions(s, "Partitions")}]}],
    "DescribeLogDirs": lambda s, v: [{"Topics": [{"Topic": s.topic, "Partitions": [0]}]}],
    "SaslAuthenticate": lambda s, v: [{"AuthBytes": b"\0user\0password"}],
    "CreatePartitions": lambda s, v: [
        {"Topics": [{"Name": s.topic, "Count": 5, "Assignments": None}], "TimeoutMs": 5_000, "ValidateOnly": True},
        {"Topics": [{"Name": name, "Count": 1, "Assignments": None} for name in (s.topic, s.of("nowhere"))],
         "TimeoutMs": 5_000},
    ],
    "DeleteGroups": lambda s, v: [{"GroupsNames": [s.group, s.of("nobody")]}],
    "ElectLeaders": lambda s, v: [{"TopicPartitions": [{"Topic": s.topic, "Partitions": [0, 9]}]}],
    "AlterPartitionReassignments": lambda s, v: [
        {"Topics": [{"Name": s.topic, "Partitions": [{"PartitionIndex": 0, "Replicas": [_NO_BROKER]}]}]}
    ],
    "ListPartitionReassignments": lambda s, v: [{"Topics": _partitions(s)}],
    "OffsetDelete": lambda s, v: [
        {"GroupId": s.group, "Topics": [{"Name": s.topic, "Partitions": [{"PartitionIndex": 0}]}]}
    ],
    "DescribeClientQuotas": lambda s, v: [{"Components": [{"EntityType": "user", "MatchType": 2, "Match": None}]}],
    "AlterClientQuotas": lambda s, v: [{"ValidateOnly": True, "Entries": [
        {"Entity": [{"EntityType": "user", "EntityName": "a"}], "Ops": [{"Key": "producer_byte_rate", "Value": 1e6}]}
    ]}],
    "DescribeUserScramCredentials": lambda s, v: [{"Users": [{"Name": "nobody"}]}],
    "AlterUserScramCredentials": lambda s, v: [{"Deletions": [{"Name": "nobody", "Mechanism": 1}]}],
    "DescribeQuorum": lambda s, v: [
        {"Topics": [{"TopicName": name, "Partitions": [_at(0)]}]} for name in ("__cluster_metadata", s.topic)
    ],
    "UpdateFeatures": lambda s, v: [{"ValidateOnly": True, "FeatureUpdates": [
        {"Feature": "nonsense", "MaxVersionLevel": 7}]}] if v else [],
    "DescribeCluster": lambda s, v: [{"EndpointType": each} for each in ((1, 2, 3) if v else (1,))],
    "DescribeProducers": lambda s, v: [{"Topics": _partitions(s)}],
    "UnregisterBroker": lambda s, v: [{"BrokerId": _NO_BROKER}],
    "UnregisterController": lambda s, v: [{"ControllerId": _NO_BROKER}],
    "DescribeTransactions": lambda s, v: [{"TransactionalIds": [s.transactional_id, s.of("nobody")]}],
    "ConsumerGroupHeartbeat": _group_heartbeat,
    "ConsumerGroupDescribe": lambda s, v: [{"GroupIds": [s.coordinated(f"next-{v}", GROUP), s.group]}],
    "DescribeTopicPartitions": lambda s, v: [{"Topics": [{"Name": s.topic}]}, {"Topics": [{"Name": s.of("nowhere")}]}],
    "ShareGroupDescribe": lambda s, v: [{"GroupIds": [s.of("nobody")]}],
    "AddRaftVoter": lambda s, v: [{"ClusterId": "x", "VoterId": _NO_BROKER, "TimeoutMs": 1_000, "Listeners": [
        {"Name": "CONTROLLER", "Host": "nowhere.invalid", "Port": 1}]}],
    "RemoveRaftVoter": lambda s, v: [{"ClusterId": "x", "VoterId": _NO_BROKER}],
    "StreamsGroupHeartbeat": lambda s, v: [{"GroupId": s.of("streams"), "MemberId": "x", "MemberEpoch": 3}],
    "StreamsGroupDescribe": lambda s, v: [{"GroupIds": [s.of("nobody")]}],
    "DescribeShareGroupOffsets": lambda s, v: [{"Groups": [{"GroupId": s.of("nobody"), "Topics": None}]}],
    "AlterShareGroupOffsets": lambda s, v: [{"GroupId": s.of("nobody")}],
    "DeleteShareGroupOffsets": lambda s, v: [{"GroupId": s.of("nobody")}],
}  # fmt: skip
