"""Every API and version that a broker advertises, sent directly and through the proxy.

The proxy relays, rewrites or hides each of them as `wire/apis.py` states. Its responses equal the broker's and contain
no broker address. `-s` prints the table.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from fencepost_proxy.types import Address
from fencepost_proxy.wire.apis import APIS, decides
from tests.kit.waiting import until
from tests.pages.apis import handling_of
from tests.support.batches import batch
from tests.support.messages import Closed, Fields, RawConnection, decode_response, definitions
from tests.support.proxy import ProxyProcess
from tests.support.walk import BODIES, ProxiedSocket

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

PRODUCE, FETCH, METADATA, FIND_COORDINATOR, API_VERSIONS = 0, 1, 3, 10, 18
DESCRIBE_CONFIGS, ELECT_LEADERS, REASSIGN, SHARE_FETCH = 32, 43, 45, 78
PRODUCE_VERSION_MIN = 3
FENCED_LEADER_EPOCH = 74
UNSUPPORTED_VERSION = 35
#: Time for a coordinator to finish earlier requests, or for replicas to catch up.
PATIENCE_SECONDS = 60.0
#: Coordinator loading, transaction still completing.
BUSY = {14, 51}
#: A broker may have applied the change of only one route.
CATCH_UP_SECONDS = 60.0

#: Fields that differ between any two responses of Kafka.
VOLATILE = {"ThrottleTimeMs", "ControllerId", "ProducerId", "MemberId", "ClientInstanceId", "SubscriptionId"}
VOLATILE_OF = {
    "JoinGroup": {"Leader"},
    "DescribeQuorum": {"LogEndOffset", "HighWatermark", "LastFetchTimestamp", "LastCaughtUpTimestamp"},
    "DescribeLogDirs": {"UsableBytes", "TotalBytes"},
    "DescribeProducers": {"LastTimestamp"},
    # The group's partition of the offsets topic depends on its name.
    "DescribeTransactions": {"TransactionStartTimeMs", "Partitions"},
    "ConsumerGroupHeartbeat": {"HeartbeatIntervalMs"},
    # A heartbeat that is repeated while the coordinator loads may already have created a member.
    "ConsumerGroupDescribe": {"Members", "GroupEpoch", "AssignmentEpoch"},
}
LISTS_EVERYTHING = {"ListGroups": "GroupId", "ListTransactions": "TransactionalId"}


class Addresses:
    def __init__(self, kafka: KafkaCluster, proxy: ProxyProcess) -> None:
        self.direct = {node_id: kafka.address(node_id) for node_id in kafka.node_ids}
        with RawConnection(Address.parse(proxy.bootstrap)) as connection:
            brokers = connection.query(METADATA, 9, {"Topics": []})["Brokers"]
        self.proxied = {each["NodeId"]: Address(each["Host"], each["Port"]) for each in brokers}
        assert self.proxied.keys() == self.direct.keys()
        assert not set(self.proxied.values()) & set(self.direct.values())
        # Kafka returns the controllers' listeners. The proxy has one listener for each broker.
        controllers = {node_id: kafka.address(node_id, "CONTROLLER") for node_id in kafka.node_ids}
        self.names = {
            address: f"broker {node_id}"
            for each in (self.direct, self.proxied, controllers)
            for node_id, address in each.items()
        }
        self._forbidden = [
            pattern
            for host, port in (*self.direct.values(), *controllers.values())
            for pattern in (
                host.encode() + struct.pack(">i", port),
                host.encode() + struct.pack(">H", port),
                f"{host}:{port}".encode(),
            )
        ]

    def leaks(self, frame: bytes) -> list[bytes]:
        return [pattern for pattern in self._forbidden if pattern in frame]


@pytest.fixture(scope="module")
def addresses(kafka3: KafkaCluster, proxied3: ProxyProcess) -> Addresses:
    return Addresses(kafka3, proxied3)


@pytest.fixture(scope="module")
def advertised(kafka3: KafkaCluster) -> dict[int, tuple[int, int]]:
    return _versions(kafka3.address(1))


@pytest.fixture(scope="module")
def sides(kafka3: KafkaCluster) -> dict[str, ProxiedSocket]:
    """Broker 1 is leader and coordinator on both routes."""
    both = {name: ProxiedSocket(name, 1, kafka3.address(1)) for name in ("d", "p")}
    for side in both.values():
        side.set_up([1, 2, 3])
    return both


def _versions(address: Address) -> dict[int, tuple[int, int]]:
    with RawConnection(address) as connection:
        answer = connection.query(API_VERSIONS, 3, {"ClientSoftwareName": "walk", "ClientSoftwareVersion": "1"})
    assert answer["ErrorCode"] == 0
    return {each["ApiKey"]: (each["MinVersion"], each["MaxVersion"]) for each in answer["ApiKeys"]}


def test_client_gets_versions_common_to_table_and_broker(
    addresses: Addresses, advertised: dict[int, tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    common = {}
    for key, (low, high) in advertised.items():
        api = APIS.get(key)
        if api is not None and not api.gated and max(low, api.min_version) <= min(high, api.max_version):
            common[key] = (max(low, api.min_version), min(high, api.max_version))

    undecided = [
        (definitions()[key].name if key in definitions() else key, version)
        for key, (low, high) in advertised.items()
        for version in range(low, high + 1)
        if not decides(key, version)
    ]
    assert undecided == [], "this Kafka has versions that wire/apis.py does not decide about"
    for address in addresses.proxied.values():
        assert _versions(address) == common

    print(f"\n{'key':>3} {'API':38} {'broker':>7} {'proxy':>7}  handling and reason")
    for key, (low, high) in sorted(advertised.items()):
        api = APIS.get(key)
        reported = "{}-{}".format(*common[key]) if key in common else "-"
        what = "not in the table" if api is None else f"{handling_of(api)}{'; ' * bool(api.reason)}{api.reason}"
        print(f"{key:>3} {definitions()[key].name:38} {f'{low}-{high}':>7} {reported:>7}  {what}")
    assert len(common) > 50


Query = Callable[[str, int, int, int, Fields], "bytes | str"]


@pytest.fixture(scope="module")
def query(addresses: Addresses) -> Iterator[Query]:
    """Send a body to a broker directly (`d`) or through its listener (`p`). Return the response frame or "closed"."""
    connections: dict[tuple[str, int], RawConnection] = {}

    def send(side: str, broker: int, key: int, version: int, body: Fields) -> bytes | str:
        where = (addresses.direct if side == "d" else addresses.proxied)[broker]
        connection = connections.get((side, broker)) or RawConnection(where)
        connections[side, broker] = connection
        try:
            return connection.query_raw(key, version, body)
        except (Closed, ConnectionError):
            connections.pop((side, broker)).socket.close()
            return "closed"

    yield send
    for connection in connections.values():
        connection.socket.close()


def _normal(value: Any, api: str, addresses: Addresses) -> Any:
    """Replace names, ids and addresses that differ between the routes, and sort lists."""
    if isinstance(value, dict):
        kept = {
            key: _normal(each, api, addresses)
            for key, each in value.items()
            if key not in VOLATILE and key not in VOLATILE_OF.get(api, ())
        }
        if "Host" in value and "Port" in value:
            del kept["Host"], kept["Port"]
            where = Address(value["Host"], value["Port"])
            kept["at"] = addresses.names.get(where, str(where))
        return kept
    if isinstance(value, list):
        return sorted((_normal(each, api, addresses) for each in value if _is_compared(each, api)), key=repr)
    if isinstance(value, str):
        return re.sub(r"walk-[dp]-([a-z]+)(-\d+)*", r"walk-\1", value)
    if isinstance(value, UUID):
        return "an id" if value.int else None
    return value


def _is_compared(item: Any, api: str) -> bool:
    if not isinstance(item, dict):
        return True
    name = LISTS_EVERYTHING.get(api)
    return item.get("Name") not in VIRTUAL_CONFIGS and (name is None or "walk-" in item[name])


def _difference(direct: Any, proxied: Any, where: str = "") -> str:
    if isinstance(direct, dict) and isinstance(proxied, dict) and direct.keys() == proxied.keys():
        pairs = [(f"{where}.{key}", direct[key], proxied[key]) for key in direct]
    elif isinstance(direct, list) and isinstance(proxied, list) and len(direct) == len(proxied):
        pairs = [(f"{where}[{index}]", *both) for index, both in enumerate(zip(direct, proxied, strict=True))]
    else:
        return f"{where} direct {direct!r:.1500} proxied {proxied!r:.1500}"
    return next(_difference(one, other, path) for path, one, other in pairs if one != other)


def _errors(value: Any) -> set[int]:
    if isinstance(value, dict):
        codes = {each for key, each in value.items() if key == "ErrorCode"}
        return codes.union(*map(_errors, value.values()))
    return set().union(*map(_errors, value)) if isinstance(value, list) else set()


def _answer(query: Query, addresses: Addresses, side: str, where: tuple[int, int, int], body: Fields) -> Any:
    """The broker's response, after it finished earlier requests."""
    broker, key, version = where
    name = definitions()[key].name
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        frame = query(side, broker, key, version, body)
        if isinstance(frame, str):
            return frame
        if side == "p":
            assert not addresses.leaks(frame), f"{name} v{version} contains broker addresses: {addresses.leaks(frame)}"
        answer = decode_response(key, version, frame)
        if not _errors(answer) & BUSY or time.monotonic() > deadline:
            return _normal(answer, name, addresses)
        time.sleep(0.05)


def _only_reads(name: str) -> bool:
    return name.startswith(("Describe", "List", "Fetch", "Metadata", "Find", "OffsetF", "ConsumerGroupDescribe"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("broker", [1, 2], ids=["leader", "follower"])
def test_every_answer_is_the_brokers_own(
    broker: int,
    sides: dict[str, ProxiedSocket],
    addresses: Addresses,
    advertised: dict[int, tuple[int, int]],
    query: Query,
) -> None:
    """Broker 1 is leader and coordinator. Broker 2 mostly responds with errors, some of which name the leader."""
    queried, different = 0, []
    for key, (low, high) in sorted(advertised.items()):
        api = APIS.get(key)
        if api is None or api.gated or key == API_VERSIONS:
            continue
        bodies = BODIES.get(api.name, lambda side, version: [{}])
        # Kafka 3.9 accepts Produce 0–2 (before record batches). The proxy only advertises them, like Kafka 4.x.
        lowest = PRODUCE_VERSION_MIN if key == PRODUCE else api.min_version
        for version in range(max(low, lowest), min(high, api.max_version) + 1):
            pairs = zip(bodies(sides["d"], version), bodies(sides["p"], version), strict=True)
            for direct_body, proxied_body in pairs:
                queried += 1
                deadline = time.monotonic() + CATCH_UP_SECONDS
                while True:
                    direct = _answer(query, addresses, "d", (broker, key, version), direct_body)
                    proxied = _answer(query, addresses, "p", (broker, key, version), proxied_body)
                    if direct == proxied or not _only_reads(api.name) or time.monotonic() > deadline:
                        break
                    time.sleep(0.1)
                if direct != proxied:
                    different.append(f"{api.name} v{version} {proxied_body}: {_difference(direct, proxied)}")
    assert different == []
    assert queried > 250


def test_what_is_not_advertised_costs_the_connection(
    addresses: Addresses, advertised: dict[int, tuple[int, int]]
) -> None:
    gated = [
        (key, version)
        for key, (low, high) in advertised.items()
        for version in range(low, high + 1)
        if not (key in APIS and APIS[key].serves(version))
    ]
    beyond = [(key, api.max_version + 1) for key, api in APIS.items() if not api.gated and key in definitions()]
    for key, version in {*gated, *beyond}:
        if key == API_VERSIONS or not _is_defined(key, version):
            continue
        with RawConnection(addresses.proxied[1]) as connection, pytest.raises(Closed):
            connection.query_raw(key, version, {"Acks": 1} if key == PRODUCE else {})
    assert {(PRODUCE, 14), (FETCH, 19)} <= set(beyond)


def _is_defined(key: int, version: int) -> bool:
    low, high = definitions()[key].versions
    return low <= version <= high


def test_too_new_api_versions_request_answered_like_kafka(addresses: Addresses) -> None:
    def query(address: Address) -> Fields:
        with RawConnection(address) as connection:
            header = struct.pack(">hhih", API_VERSIONS, 99, 5, -1) + b"\0"
            connection.socket.sendall(struct.pack(">i", len(header)) + header)
            return decode_response(API_VERSIONS, 0, connection.receive())

    direct, proxied = query(addresses.direct[1]), query(addresses.proxied[1])

    assert direct["ErrorCode"] == proxied["ErrorCode"] == 35
    (reported,) = [each for each in proxied["ApiKeys"] if each["ApiKey"] == API_VERSIONS]
    assert reported["MaxVersion"] == APIS[API_VERSIONS].max_version


def test_topic_listing_lacks_only_the_state_topic(
    addresses: Addresses, advertised: dict[int, tuple[int, int]], query: Query
) -> None:
    def listed(side: str, version: int) -> dict[str, Any]:
        frame = query(side, 1, METADATA, version, {"Topics": None})
        assert isinstance(frame, bytes)
        assert side == "d" or not addresses.leaks(frame)
        answer = _normal(decode_response(METADATA, version, frame), "", addresses)
        return {each["Name"]: each for each in answer["Topics"]}

    for version in range(1, min(13, advertised[METADATA][1]) + 1):
        direct, proxied = listed("d", version), listed("p", version)
        assert direct.keys() - proxied.keys() == {"__fencepost_state"}
        assert proxied == {name: direct[name] for name in proxied}


def test_address_config_values_are_not_rewritten(addresses: Addresses, query: Query) -> None:
    """The exception: a broker's configs keep the broker's real addresses, for operators."""
    body = {"Resources": [{"ResourceType": 4, "ResourceName": "1", "ConfigurationKeys": None}]}
    answers = []
    for side in ("d", "p"):
        frame = query(side, 1, DESCRIBE_CONFIGS, 4, body)
        assert isinstance(frame, bytes)
        answers.append(decode_response(DESCRIBE_CONFIGS, 4, frame)["Results"][0])

    direct, proxied = answers
    values = {each["Name"]: each["Value"] for each in proxied["Configs"]}
    assert str(addresses.direct[1]) in values["advertised.listeners"]
    assert values == {each["Name"]: each["Value"] for each in direct["Configs"]}


#: The leaders of a moved topic.
OLD, NEW = 1, 2
#: Its name and id.
MovedTopic = tuple[str, str]


@pytest.fixture
def moved_topic(kafka3: KafkaCluster, proxied3: ProxyProcess, unique_topic: Callable[..., str]) -> MovedTopic:
    """A topic whose leader was moved from `OLD` to `NEW` by preferred election."""
    topic = unique_topic("moved")
    assignment = {"Name": topic, "NumPartitions": -1, "ReplicationFactor": -1}
    with RawConnection(kafka3.address(1)) as connection:
        replicas = [{"PartitionIndex": 0, "BrokerIds": [1, 2, 3]}]
        made = connection.query(19, 7, {"Topics": [{**assignment, "Assignments": replicas}]})
        assert made["Topics"][0]["ErrorCode"] == 0
        until(lambda: _leader(connection, topic) == OLD, "broker 1 to lead")
        again = {"Name": topic, "Partitions": [{"PartitionIndex": 0, "Replicas": [2, 1, 3]}]}
        assert connection.query(REASSIGN, 0, {"Topics": [again]})["ErrorCode"] == 0
        elected = {"TopicPartitions": [{"Topic": topic, "Partitions": [0]}], "TimeoutMs": 10_000}
        until(
            lambda: connection.query(ELECT_LEADERS, 2, elected) is not None and _leader(connection, topic) == NEW,
            "broker 2 to lead",
        )
        return topic, connection.query(METADATA, 12, {"Topics": [{"Name": topic}]})["Topics"][0]["TopicId"]


def _leader(connection: RawConnection, topic: str) -> int:
    answer = connection.query(METADATA, 9, {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False})
    partitions = answer["Topics"][0]["Partitions"]
    return partitions[0]["LeaderId"] if partitions else -1


@dataclass
class OldLeader:
    """Its response without the proxy, and decoded through it."""

    addresses: Addresses
    direct: bytes
    proxied: Fields

    def names_new_one(self) -> None:
        """With the proxy's listener."""
        assert self.addresses.leaks(self.direct), "Kafka's response contains no address: the test proves nothing"
        (endpoint,) = self.proxied["NodeEndpoints"]
        assert endpoint["NodeId"] == NEW
        assert Address(endpoint["Host"], endpoint["Port"]) == self.addresses.proxied[NEW]


QueryOldLeader = Callable[[int, int, Callable[[], Fields]], OldLeader]


@pytest.fixture
def query_old_leader(addresses: Addresses, query: Query) -> QueryOldLeader:
    def queried(key: int, version: int, body: Callable[[], Fields]) -> OldLeader:
        direct, proxied = (query(side, OLD, key, version, body()) for side in "dp")
        assert isinstance(direct, bytes)
        assert isinstance(proxied, bytes)
        assert not addresses.leaks(proxied)
        return OldLeader(addresses, direct, decode_response(key, version, proxied))

    return queried


def test_moved_leader_is_named_with_proxy_listener(
    moved_topic: MovedTopic, advertised: dict[int, tuple[int, int]], query_old_leader: QueryOldLeader
) -> None:
    """KIP-951: Produce v10+ names the new leader in `node_endpoints`, a tagged field at the end."""
    topic, topic_id = moved_topic
    for version in range(3, min(13, advertised[PRODUCE][1]) + 1):
        named = {"TopicId": topic_id} if version >= 13 else {"Name": topic}
        data = [{**named, "PartitionData": [{"Index": 0, "Records": bytes(batch(b"late"))}]}]
        body = {"Acks": 1, "TimeoutMs": 5_000, "TopicData": data}
        answer = query_old_leader(PRODUCE, version, lambda body=body: body)
        (partition,) = answer.proxied["Responses"][0]["PartitionResponses"]
        assert partition["ErrorCode"] == 6
        if version >= 10:
            answer.names_new_one()
            assert partition["CurrentLeader"]["LeaderId"] == NEW


def test_moved_leader_is_named_after_the_records(
    moved_topic: MovedTopic, advertised: dict[int, tuple[int, int]], query_old_leader: QueryOldLeader
) -> None:
    """KIP-951: Fetch v16+ with the epoch of the old leader."""
    partition = {"Partition": 0, "FetchOffset": 0, "PartitionMaxBytes": 1 << 20, "CurrentLeaderEpoch": 0}
    body = {
        **{"ReplicaId": -1, "MaxWaitMs": 0, "MinBytes": 0, "MaxBytes": 1 << 20, "SessionEpoch": -1},
        "Topics": [{"TopicId": moved_topic[1], "Partitions": [partition]}],
    }
    for version in range(13, min(18, advertised[FETCH][1]) + 1):
        answer = query_old_leader(FETCH, version, lambda: body)
        (found,) = answer.proxied["Responses"][0]["Partitions"]
        if version >= 16:
            answer.names_new_one()
            assert (found["ErrorCode"], found["CurrentLeader"]["LeaderId"]) == (FENCED_LEADER_EPOCH, NEW)


def test_moved_leader_is_named_to_share_consumers(
    moved_topic: MovedTopic, advertised: dict[int, tuple[int, int]], query_old_leader: QueryOldLeader
) -> None:
    if SHARE_FETCH not in advertised or advertised[SHARE_FETCH][1] < 1:
        pytest.skip("this Kafka has no share groups")
    topic, topic_id = moved_topic
    partition = {"PartitionIndex": 0, "AcknowledgementBatches": []}

    def body() -> Fields:
        return {
            **{"GroupId": topic, "MemberId": str(uuid4()), "ShareSessionEpoch": 0, "MaxWaitMs": 100},
            **{"MinBytes": 0, "MaxBytes": 1 << 20, "MaxRecords": 10, "BatchSize": 10},
            "Topics": [{"TopicId": topic_id, "Partitions": [partition]}],
        }

    for version in range(1, min(2, advertised[SHARE_FETCH][1]) + 1):
        answer = query_old_leader(SHARE_FETCH, version, body)
        codes = {answer.proxied["ErrorCode"], decode_response(SHARE_FETCH, version, answer.direct)["ErrorCode"]}
        if codes == {UNSUPPORTED_VERSION}:
            pytest.skip("share groups are off in this Kafka")
        answer.names_new_one()


def test_client_that_expects_another_broker_is_answered_like_kafka(
    addresses: Addresses, advertised: dict[int, tuple[int, int]], query: Query
) -> None:
    """ApiVersions v5 (KIP-1242) names the cluster and the node that the client expects."""
    if advertised[API_VERSIONS][1] < 5:
        pytest.skip("this Kafka has no ApiVersions v5")
    with RawConnection(addresses.direct[1]) as connection:
        cluster_id = connection.query(60, 0, {})["ClusterId"]

    def errors(expected: str | None, node_id: int) -> list[int]:
        body = {"ClientSoftwareName": "walk", "ClientSoftwareVersion": "1", "ClusterId": expected, "NodeId": node_id}
        frames = [query(side, 2, API_VERSIONS, 5, body) for side in ("d", "p")]
        assert all(isinstance(frame, bytes) for frame in frames)
        return [decode_response(API_VERSIONS, 5, frame)["ErrorCode"] for frame in frames]  # type: ignore[arg-type]

    assert errors(None, -1) == [0, 0]
    assert errors(cluster_id, 2) == [0, 0]
    for expected, node_id in ((cluster_id, 3), ("another", 2)):
        direct, proxied = errors(expected, node_id)
        assert direct == proxied != 0
