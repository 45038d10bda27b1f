"""Every API of Kafka, and what this proxy does with it: the one table.

The list is that of Kafka 4.4 (`common/message/*.json` in kafka-clients 4.4.0). An API or a version that is not in
it is withheld: a version added to Kafka later may carry a broker's address, and nobody has looked yet. What to do here
when a new Kafka comes: docs/kafka-releases.md, step by step.

What a client is told by ApiVersions is the intersection of this table with what its broker told
(`wire/api_versions.py`). The reasons for each cap stand in the table itself; `tests/unit/test_apis.py` and
`tests/integration/test_control_messages.py` walk the response schemas, and fail if a served version could name an
address and is not rewritten.

Left alone on purpose, since it is not a broker's address: `ClientHost` of group members (the proxy's own address, as
the broker sees it), `Host` of ACLs (data), `UserEndpoint` of Kafka Streams (the application's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag
from types import MappingProxyType
from typing import Final


class Treatment(Flag):
    """What is done with an API. `RELAY` alone: cut through both ways, never decoded."""

    RELAY = 0
    #: The state topic is looked for in the request's bytes; the request is decoded only where it is named.
    INSPECT_REQUEST = 1
    #: Decoded and planned by `topics/rewriting.py`; the response is decoded too, to be finished by the plan.
    REWRITE_REQUEST = 2
    #: Decoded, changed and encoded anew.
    REWRITE_RESPONSE = 4
    #: Goes to the gates; `wire/produce.py` reads it.
    PRODUCE = 8
    #: Passes, but not before all before it was answered: Kafka takes nothing else until its client has logged in.
    ALONE = 32
    #: Not advertised. A client that sends it all the same is disconnected, as Kafka does.
    WITHHELD = 16


@dataclass(frozen=True, slots=True)
class Api:
    """One row. Versions are inclusive; `flexible_from` is the first with header v2 and tagged fields, None for none.

    `reason` says why the API is withheld, looked into or capped below what Kafka 4.4 has; empty where it just passes.
    """

    key: int
    name: str
    treatment: Treatment
    min_version: int
    max_version: int
    flexible_from: int | None
    reason: str = ""

    @property
    def withheld(self) -> bool:
        return Treatment.WITHHELD in self.treatment

    def serves(self, version: int) -> bool:
        """Whether a request of this version may pass."""
        return not self.withheld and self.min_version <= version <= self.max_version


_RELAY = Treatment.RELAY
_INSPECT = Treatment.INSPECT_REQUEST
_PLAN = Treatment.REWRITE_REQUEST | Treatment.REWRITE_RESPONSE
_ADDRESSES = Treatment.REWRITE_RESPONSE
_LISTS_TOPICS = Treatment.INSPECT_REQUEST | Treatment.REWRITE_RESPONSE
_WITHHELD = Treatment.WITHHELD

_GONE = "removed from Kafka 4.0; was between brokers"
_INTERNAL = "between brokers and controllers"
_SHARE = (
    "the responses of ShareFetch and ShareAcknowledge name leaders' addresses behind record data; not rewritten yet"
)
_SHARE_STATE = "between brokers: state of share groups"
_TOPIC_CONFIGS = "virtual topic configs"
_STATE_TOPIC = "the state topic is closed to clients"

_TABLE: Final = (
    Api(0, "Produce", Treatment.PRODUCE, 0, 12, 9, (
        "v13 names topics by id alone; v12 stays, since transactions v2 need it. Kafka itself advertises 0–2 for the "
        "sake of old librdkafka (KAFKA-18659) and closes the connection that uses them")),
    Api(1, "Fetch", _INSPECT, 4, 15, 12, "v16+ answers with leaders' addresses (node_endpoints); " + _STATE_TOPIC),
    Api(2, "ListOffsets", _INSPECT, 0, 11, 6, _STATE_TOPIC),
    Api(3, "Metadata", _LISTS_TOPICS, 0, 13, 9, "names brokers' addresses; " + _STATE_TOPIC),
    Api(4, "LeaderAndIsr", _WITHHELD, 0, 0, 4, _GONE),
    Api(5, "StopReplica", _WITHHELD, 0, 0, 2, _GONE),
    Api(6, "UpdateMetadata", _WITHHELD, 0, 0, 6, _GONE),
    Api(7, "ControlledShutdown", _WITHHELD, 0, 0, 3, _GONE),
    Api(8, "OffsetCommit", _RELAY, 0, 10, 8),
    Api(9, "OffsetFetch", _RELAY, 0, 10, 6),
    Api(10, "FindCoordinator", _ADDRESSES, 0, 6, 3, "names brokers' addresses"),
    Api(11, "JoinGroup", _RELAY, 0, 9, 6),
    Api(12, "Heartbeat", _RELAY, 0, 4, 4),
    Api(13, "LeaveGroup", _RELAY, 0, 5, 4),
    Api(14, "SyncGroup", _RELAY, 0, 5, 4),
    Api(15, "DescribeGroups", _RELAY, 0, 6, 5),
    Api(16, "ListGroups", _RELAY, 0, 5, 3),
    Api(17, "SaslHandshake", Treatment.ALONE, 0, 1, None, (
        "goes up as v1: the tokens that follow v0 without a Kafka header become SaslAuthenticate requests. Until a "
        "login is complete Kafka takes nothing else, nor anything of the proxy's own")),
    Api(18, "ApiVersions", Treatment.REWRITE_RESPONSE, 0, 4, 3, "no schema of v5 yet"),
    Api(19, "CreateTopics", _PLAN, 2, 7, 5, _TOPIC_CONFIGS),
    Api(20, "DeleteTopics", _PLAN, 1, 6, 4, "a topic's virtual configs go with it"),
    Api(21, "DeleteRecords", _INSPECT, 0, 2, 2, _STATE_TOPIC),
    Api(22, "InitProducerId", _ADDRESSES, 0, 6, 2, (
        "the shared producer id must never be given to a client; who may not be idempotent, while a topic is `safe`")),
    Api(23, "OffsetForLeaderEpoch", _INSPECT, 0, 4, 4, _STATE_TOPIC),
    Api(24, "AddPartitionsToTxn", _PLAN, 0, 3, 3, (
        "v4+ is between brokers; a marker takes an offset and passes no gate; " + _STATE_TOPIC)),
    Api(25, "AddOffsetsToTxn", _RELAY, 0, 4, 3),
    Api(26, "EndTxn", _RELAY, 0, 5, 3, "a commit is held and judged while a topic of the cluster checks expectations"),
    Api(27, "WriteTxnMarkers", _PLAN, 1, 2, 1, (
        "none under the shared producer id; a marker takes an offset of a checked topic; " + _STATE_TOPIC)),
    Api(28, "TxnOffsetCommit", _RELAY, 0, 6, 3),
    Api(29, "DescribeAcls", _RELAY, 0, 3, 2),
    Api(30, "CreateAcls", _RELAY, 0, 3, 2),
    Api(31, "DeleteAcls", _RELAY, 0, 3, 2),
    Api(32, "DescribeConfigs", _PLAN, 1, 4, 4, _TOPIC_CONFIGS),
    Api(33, "AlterConfigs", _PLAN, 0, 2, 2, _TOPIC_CONFIGS),
    Api(34, "AlterReplicaLogDirs", _RELAY, 0, 2, 2),
    Api(35, "DescribeLogDirs", _RELAY, 0, 5, 2),
    Api(36, "SaslAuthenticate", Treatment.ALONE, 0, 2, 2, (
        "says when the login ends: Kafka closes at the first request after it, and an append of then is not sent")),
    Api(37, "CreatePartitions", _PLAN, 0, 3, 2, "counted topics grow without losing order; " + _STATE_TOPIC),
    Api(38, "CreateDelegationToken", _RELAY, 0, 3, 2),
    Api(39, "RenewDelegationToken", _RELAY, 0, 2, 2),
    Api(40, "ExpireDelegationToken", _RELAY, 0, 2, 2),
    Api(41, "DescribeDelegationToken", _RELAY, 0, 3, 2),
    Api(42, "DeleteGroups", _RELAY, 0, 3, 2),
    Api(43, "ElectLeaders", _RELAY, 0, 2, 2),
    Api(44, "IncrementalAlterConfigs", _PLAN, 0, 1, 1, _TOPIC_CONFIGS),
    Api(45, "AlterPartitionReassignments", _RELAY, 0, 1, 0),
    Api(46, "ListPartitionReassignments", _RELAY, 0, 0, 0),
    Api(47, "OffsetDelete", _RELAY, 0, 0, None),
    Api(48, "DescribeClientQuotas", _RELAY, 0, 1, 1),
    Api(49, "AlterClientQuotas", _RELAY, 0, 1, 1),
    Api(50, "DescribeUserScramCredentials", _RELAY, 0, 0, 0),
    Api(51, "AlterUserScramCredentials", _RELAY, 0, 0, 0),
    Api(52, "Vote", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(53, "BeginQuorumEpoch", _WITHHELD, 0, 0, 1, _INTERNAL),
    Api(54, "EndQuorumEpoch", _WITHHELD, 0, 0, 1, _INTERNAL),
    Api(55, "DescribeQuorum", _ADDRESSES, 0, 2, 0, (
        "v2 names controllers' addresses: a controller that is a broker too gets its listener here, another none")),
    Api(56, "AlterPartition", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(57, "UpdateFeatures", _RELAY, 0, 2, 0),
    Api(58, "Envelope", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(59, "FetchSnapshot", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(60, "DescribeCluster", _ADDRESSES, 0, 2, 0, "names brokers' addresses"),
    Api(61, "DescribeProducers", _INSPECT, 0, 0, 0, _STATE_TOPIC),
    Api(62, "BrokerRegistration", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(63, "BrokerHeartbeat", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(64, "UnregisterBroker", _RELAY, 0, 0, 0),
    Api(65, "DescribeTransactions", _RELAY, 0, 0, 0),
    Api(66, "ListTransactions", _RELAY, 0, 2, 0),
    Api(67, "AllocateProducerIds", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(68, "ConsumerGroupHeartbeat", _LISTS_TOPICS, 0, 1, 0, "a group is not assigned the state topic"),
    Api(69, "ConsumerGroupDescribe", _RELAY, 0, 1, 0),
    Api(70, "ControllerRegistration", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(71, "GetTelemetrySubscriptions", _RELAY, 0, 0, 0),
    Api(72, "PushTelemetry", _RELAY, 0, 0, 0),
    Api(73, "AssignReplicasToDirs", _WITHHELD, 0, 0, 0, _INTERNAL),
    Api(74, "ListConfigResources", _RELAY, 0, 1, 0),
    Api(75, "DescribeTopicPartitions", _LISTS_TOPICS, 0, 0, 0, _STATE_TOPIC),
    Api(76, "ShareGroupHeartbeat", _WITHHELD, 0, 0, 0, "tells a share consumer at once that it cannot work: " + _SHARE),
    Api(77, "ShareGroupDescribe", _RELAY, 0, 1, 0),
    Api(78, "ShareFetch", _WITHHELD, 0, 0, 0, _SHARE),
    Api(79, "ShareAcknowledge", _WITHHELD, 0, 0, 0, _SHARE),
    Api(80, "AddRaftVoter", _RELAY, 0, 1, 0),
    Api(81, "RemoveRaftVoter", _RELAY, 0, 0, 0),
    Api(82, "UpdateRaftVoter", _WITHHELD, 0, 0, 0, _INTERNAL + "; names the leader's address"),
    Api(83, "InitializeShareGroupState", _WITHHELD, 0, 0, 0, _SHARE_STATE),
    Api(84, "ReadShareGroupState", _WITHHELD, 0, 0, 0, _SHARE_STATE),
    Api(85, "WriteShareGroupState", _WITHHELD, 0, 0, 0, _SHARE_STATE),
    Api(86, "DeleteShareGroupState", _WITHHELD, 0, 0, 0, _SHARE_STATE),
    Api(87, "ReadShareGroupStateSummary", _WITHHELD, 0, 0, 0, _SHARE_STATE),
    Api(88, "StreamsGroupHeartbeat", _RELAY, 0, 1, 0),
    Api(89, "StreamsGroupDescribe", _RELAY, 0, 1, 0),
    Api(90, "DescribeShareGroupOffsets", _RELAY, 0, 1, 0),
    Api(91, "AlterShareGroupOffsets", _RELAY, 0, 0, 0),
    Api(92, "DeleteShareGroupOffsets", _RELAY, 0, 0, 0),
    Api(93, "StreamsGroupTopologyDescriptionUpdate", _RELAY, 0, 0, 0),
    Api(94, "UnregisterController", _RELAY, 0, 0, 0),
)  # fmt: skip

APIS: Final[Mapping[int, Api]] = MappingProxyType({api.key: api for api in _TABLE})

#: For counting: a version that the table does not have.
UNKNOWN_VERSION: Final = -1

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
HEARTBEAT: Final = 12
SYNC_GROUP: Final = 14
SASL_HANDSHAKE: Final = 17
API_VERSIONS: Final = 18
CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20
DELETE_RECORDS: Final = 21
INIT_PRODUCER_ID: Final = 22
OFFSET_FOR_LEADER_EPOCH: Final = 23
ADD_PARTITIONS_TO_TXN: Final = 24
END_TXN: Final = 26
WRITE_TXN_MARKERS: Final = 27
DESCRIBE_CONFIGS: Final = 32
ALTER_CONFIGS: Final = 33
SASL_AUTHENTICATE: Final = 36
CREATE_PARTITIONS: Final = 37
INCREMENTAL_ALTER_CONFIGS: Final = 44
DESCRIBE_QUORUM: Final = 55
DESCRIBE_CLUSTER: Final = 60
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69
DESCRIBE_TOPIC_PARTITIONS: Final = 75


def serves(api_key: int, version: int) -> bool:
    """Whether a client's request may pass; False for what the table does not know."""
    api = APIS.get(api_key)
    return api is not None and api.serves(version)


def api_name(api_key: int) -> str:
    """Kafka's name, or `api key N` for one the table does not know: for logs and messages."""
    api = APIS.get(api_key)
    return api.name if api is not None else f"api key {api_key}"
