"""The table of Kafka APIs: relayed versions and handling.

The list is that of Kafka 4.4 (`common/message/*.json` in kafka-clients 4.4.0). APIs and versions outside the table are
not served: a version added to Kafka later may carry a broker's address. docs/kafka-releases.md describes the steps for
a new Kafka release.

A client's ApiVersions response is the intersection of this table and the broker's response (`wire/api_versions.py`).
`CAPS` has the reason of each cap. `tests/unit/test_apis.py` and `tests/integration/test_control_messages.py` walk the
response schemas, and fail if a served version could contain an address that is not rewritten.

Not rewritten, because they are no broker addresses: `ClientHost` of group members (the proxy's host),
`Host` of ACLs (data), `UserEndpoint` of Kafka Streams (the application).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag
from types import MappingProxyType
from typing import Final


class Handling(Flag):
    """Handling of an API. `RELAY` alone: bytes pass both ways without decoding."""

    RELAY = 0
    #: The request's bytes are searched for the state topic; the request is decoded only if it names it.
    INSPECT_REQUEST = 1
    #: Decoded and planned by `topics/rewriting.py`; the plan also completes the decoded response.
    REWRITE_REQUEST = 2
    #: Decoded, changed and encoded again.
    REWRITE_RESPONSE = 4
    #: Relayed, but for broker addresses after the records (`wire/node_endpoints.py`).
    REWRITE_ENDPOINTS = 64
    #: Passed to the partition sequencers; read by `wire/produce.py`.
    PRODUCE = 8
    #: Sent only after all earlier requests are answered: Kafka accepts no other request until SASL completes.
    ALONE = 32
    #: Not advertised. The connection of a client that sends it is closed, as Kafka does.
    HIDDEN = 16


@dataclass(frozen=True, slots=True)
class Api:
    """One row. Versions are inclusive. `flexible_from` is the first version with header v2 and tagged fields, or None.

    `reason` explains why the API is not served, inspected, rewritten or capped; empty for a relayed API.
    """

    key: int
    name: str
    handling: Handling
    min_version: int
    max_version: int
    flexible_from: int | None
    reason: str = ""

    @property
    def gated(self) -> bool:
        return self.handling is Handling.HIDDEN

    def serves(self, version: int) -> bool:
        """Whether a client may send this version."""
        return not self.gated and self.min_version <= version <= self.max_version


@dataclass(frozen=True, slots=True)
class Cap:
    """Why clients do not get the newest version (Kafka 4.4's), what that costs them, and what it would take."""

    newest: int
    reason: str
    cost: str
    needs: str


_RELAY = Handling.RELAY
_INSPECT = Handling.INSPECT_REQUEST
_PLAN = Handling.REWRITE_REQUEST | Handling.REWRITE_RESPONSE
_ADDRESSES = Handling.REWRITE_RESPONSE
_LISTS_TOPICS = Handling.INSPECT_REQUEST | Handling.REWRITE_RESPONSE
_RECORDS = Handling.INSPECT_REQUEST | Handling.REWRITE_ENDPOINTS
_HIDDEN = Handling.HIDDEN

_REMOVED = "removed in Kafka 4.0; was used between brokers"
_INTERNAL = "between brokers and controllers"
_SHARE_EARLY = "v0 was the early access of Kafka 4.0, which later releases removed"
_SHARE_STATE = "between brokers: state of share groups"
_LEADERS = "responses may contain leaders' addresses after the records; "
_TOPIC_CONFIGS = "virtual topic configs"
_STATE_TOPIC = "clients cannot access the state topic"

_TABLE: Final = (
    Api(0, "Produce", Handling.PRODUCE, 0, 13, 9, (
        "Kafka advertises 0–2 for old librdkafka (KAFKA-18659), but closes a connection that uses them")),
    Api(1, "Fetch", _RECORDS, 0, 18, 12, _LEADERS + _STATE_TOPIC),
    Api(2, "ListOffsets", _INSPECT, 0, 11, 6, _STATE_TOPIC),
    Api(3, "Metadata", _LISTS_TOPICS, 0, 13, 9, "contains broker addresses; " + _STATE_TOPIC),
    Api(4, "LeaderAndIsr", _HIDDEN, 0, 0, 4, _REMOVED),
    Api(5, "StopReplica", _HIDDEN, 0, 0, 2, _REMOVED),
    Api(6, "UpdateMetadata", _HIDDEN, 0, 0, 6, _REMOVED),
    Api(7, "ControlledShutdown", _HIDDEN, 0, 0, 3, _REMOVED),
    Api(8, "OffsetCommit", _RELAY, 0, 10, 8),
    Api(9, "OffsetFetch", _RELAY, 0, 10, 6),
    Api(10, "FindCoordinator", _ADDRESSES, 0, 6, 3, "contains broker addresses"),
    Api(11, "JoinGroup", _RELAY, 0, 9, 6),
    Api(12, "Heartbeat", _RELAY, 0, 4, 4),
    Api(13, "LeaveGroup", _RELAY, 0, 5, 4),
    Api(14, "SyncGroup", _RELAY, 0, 5, 4),
    Api(15, "DescribeGroups", _RELAY, 0, 6, 5),
    Api(16, "ListGroups", _RELAY, 0, 5, 3),
    Api(17, "SaslHandshake", Handling.ALONE, 0, 1, None, (
        "sent to Kafka as v1: the tokens that follow v0 without a Kafka header become SaslAuthenticate requests. Until "
        "authentication completes, Kafka accepts no other request, not even from the proxy")),
    Api(18, "ApiVersions", Handling.REWRITE_RESPONSE, 0, 5, 3, "only versions of this table"),
    Api(19, "CreateTopics", _PLAN, 0, 7, 5, _TOPIC_CONFIGS),
    Api(20, "DeleteTopics", _PLAN, 0, 6, 4, "deletes the topic's virtual configs"),
    Api(21, "DeleteRecords", _INSPECT, 0, 2, 2, _STATE_TOPIC),
    Api(22, "InitProducerId", _ADDRESSES, 0, 6, 2, (
        "no client may receive the shared producer id; refused if the client may not be idempotent while a topic is "
        "`safe`")),
    Api(23, "OffsetForLeaderEpoch", _INSPECT, 0, 4, 4, _STATE_TOPIC),
    Api(24, "AddPartitionsToTxn", _PLAN, 0, 3, 3, (
        "a transaction marker takes an offset without an append check; " + _STATE_TOPIC)),
    Api(25, "AddOffsetsToTxn", _RELAY, 0, 4, 3),
    Api(26, "EndTxn", _RELAY, 0, 5, 3, "a commit is delayed and validated while any topic checks expected offsets"),
    Api(27, "WriteTxnMarkers", _PLAN, 1, 2, 1, (
        "no markers of the shared producer id; a marker takes an offset of a checked topic; " + _STATE_TOPIC)),
    Api(28, "TxnOffsetCommit", _RELAY, 0, 6, 3),
    Api(29, "DescribeAcls", _RELAY, 0, 3, 2),
    Api(30, "CreateAcls", _RELAY, 0, 3, 2),
    Api(31, "DeleteAcls", _RELAY, 0, 3, 2),
    Api(32, "DescribeConfigs", _PLAN, 0, 4, 4, _TOPIC_CONFIGS),
    Api(33, "AlterConfigs", _PLAN, 0, 2, 2, _TOPIC_CONFIGS),
    Api(34, "AlterReplicaLogDirs", _RELAY, 0, 2, 2),
    Api(35, "DescribeLogDirs", _RELAY, 0, 5, 2),
    Api(36, "SaslAuthenticate", Handling.ALONE, 0, 2, 2, (
        "the response has the session lifetime: Kafka closes the connection at the first request after its end, so the "
        "proxy sends no append then")),
    Api(37, "CreatePartitions", _PLAN, 0, 3, 2, "ordered partition expansion; " + _STATE_TOPIC),
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
    Api(52, "Vote", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(53, "BeginQuorumEpoch", _HIDDEN, 0, 0, 1, _INTERNAL),
    Api(54, "EndQuorumEpoch", _HIDDEN, 0, 0, 1, _INTERNAL),
    Api(55, "DescribeQuorum", _ADDRESSES, 0, 2, 0, (
        "v2 contains controllers' addresses: a controller that is also a broker gets its listener's address, others "
        "none")),
    Api(56, "AlterPartition", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(57, "UpdateFeatures", _RELAY, 0, 2, 0),
    Api(58, "Envelope", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(59, "FetchSnapshot", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(60, "DescribeCluster", _ADDRESSES, 0, 2, 0, "contains broker addresses"),
    Api(61, "DescribeProducers", _INSPECT, 0, 0, 0, _STATE_TOPIC),
    Api(62, "BrokerRegistration", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(63, "BrokerHeartbeat", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(64, "UnregisterBroker", _RELAY, 0, 0, 0),
    Api(65, "DescribeTransactions", _RELAY, 0, 0, 0),
    Api(66, "ListTransactions", _RELAY, 0, 2, 0),
    Api(67, "AllocateProducerIds", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(68, "ConsumerGroupHeartbeat", _LISTS_TOPICS, 0, 1, 0, "removes the state topic from assignments"),
    Api(69, "ConsumerGroupDescribe", _RELAY, 0, 1, 0),
    Api(70, "ControllerRegistration", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(71, "GetTelemetrySubscriptions", _RELAY, 0, 0, 0),
    Api(72, "PushTelemetry", _RELAY, 0, 0, 0),
    Api(73, "AssignReplicasToDirs", _HIDDEN, 0, 0, 0, _INTERNAL),
    Api(74, "ListConfigResources", _RELAY, 0, 1, 0),
    Api(75, "DescribeTopicPartitions", _LISTS_TOPICS, 0, 0, 0, _STATE_TOPIC),
    Api(76, "ShareGroupHeartbeat", _INSPECT, 1, 1, 0, "removes the state topic from subscriptions; " + _SHARE_EARLY),
    Api(77, "ShareGroupDescribe", _RELAY, 0, 1, 0),
    Api(78, "ShareFetch", _RECORDS, 1, 2, 0, _LEADERS + _STATE_TOPIC + "; " + _SHARE_EARLY),
    Api(79, "ShareAcknowledge", _RECORDS, 1, 2, 0, _LEADERS + _STATE_TOPIC + "; " + _SHARE_EARLY),
    Api(80, "AddRaftVoter", _RELAY, 0, 1, 0),
    Api(81, "RemoveRaftVoter", _RELAY, 0, 0, 0),
    Api(82, "UpdateRaftVoter", _HIDDEN, 0, 0, 0, _INTERNAL + "; contains the leader's address"),
    Api(83, "InitializeShareGroupState", _HIDDEN, 0, 0, 0, _SHARE_STATE),
    Api(84, "ReadShareGroupState", _HIDDEN, 0, 0, 0, _SHARE_STATE),
    Api(85, "WriteShareGroupState", _HIDDEN, 0, 0, 0, _SHARE_STATE),
    Api(86, "DeleteShareGroupState", _HIDDEN, 0, 0, 0, _SHARE_STATE),
    Api(87, "ReadShareGroupStateSummary", _HIDDEN, 0, 0, 0, _SHARE_STATE),
    Api(88, "StreamsGroupHeartbeat", _RELAY, 0, 1, 0),
    Api(89, "StreamsGroupDescribe", _RELAY, 0, 1, 0),
    Api(90, "DescribeShareGroupOffsets", _RELAY, 0, 1, 0),
    Api(91, "AlterShareGroupOffsets", _RELAY, 0, 0, 0),
    Api(92, "DeleteShareGroupOffsets", _RELAY, 0, 0, 0),
    Api(93, "StreamsGroupTopologyDescriptionUpdate", _RELAY, 0, 0, 0),
    Api(94, "UnregisterController", _RELAY, 0, 0, 0),
)  # fmt: skip

APIS: Final[Mapping[int, Api]] = MappingProxyType({api.key: api for api in _TABLE})

#: The only APIs for clients of which Kafka 4.4 has newer versions.
CAPS: Final[Mapping[int, Cap]] = MappingProxyType(
    {
        24: Cap(
            5,
            "v4 and v5 add partitions of several transactions, and need CLUSTER_ACTION: Kafka's brokers use them",
            "nothing: no client uses them",
            "a client that does",
        ),
    }
)

#: Counted for versions outside the table.
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
SHARE_GROUP_HEARTBEAT: Final = 76
SHARE_FETCH: Final = 78
STREAMS_GROUP_HEARTBEAT: Final = 88
SHARE_ACKNOWLEDGE: Final = 79


def serves(api_key: int, version: int) -> bool:
    """Whether a client may send this API and version; False for an unknown API."""
    api = APIS.get(api_key)
    return api is not None and api.serves(version)


def decides(api_key: int, version: int) -> bool:
    """Whether the table decides about that version: it is served, or there is a reason why not."""
    api = APIS.get(api_key)
    if api is None:
        return False
    cap = CAPS.get(api_key)
    return api.gated or version <= (api.max_version if cap is None else cap.newest)


def api_name(api_key: int) -> str:
    """Kafka's name of the API, or `api key N` for an unknown one."""
    api = APIS.get(api_key)
    return api.name if api is not None else f"api key {api_key}"
