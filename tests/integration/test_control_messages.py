"""Control messages against a real Kafka: every response can be decoded, and its authorizer behaves as we assume."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fencepost_dev.jars import DEFAULT_VERSION, classpath, release, say
from fencepost_proxy.addresses import AddressBook, learn_brokers, rewrite_response
from fencepost_proxy.types import Address
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.api_versions import restrict_api_versions
from fencepost_proxy.wire.apis import APIS
from fencepost_proxy.wire.control import (
    codec_versions,
    decode_response,
    encode_request_frame,
    encode_response,
    parse_response_header,
)
from fencepost_proxy.wire.schema import Message
from tests.support.sasl_ssl import Secured, plain

pytestmark = pytest.mark.kafka

TOPIC = 2
SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36


class Connection:
    """Sends one request at a time to a broker with the proxy's codec."""

    def __init__(self, address: Address) -> None:
        self._socket = socket.create_connection(address, 30)
        self._next = 0

    def close(self) -> None:
        self._socket.close()

    def query_raw(self, api_key: int, version: int, request: Message) -> bytes:
        """The body of the response."""
        self._next += 1
        self._socket.sendall(encode_request_frame(api_key, version, self._next, "test", request))
        (length,) = struct.unpack(">i", self._read(4))
        frame = self._read(length)
        header = parse_response_header(frame, api_key, version)
        assert header.correlation_id == self._next
        return frame[header.body_offset :]

    def query(self, api_key: int, version: int, request: Message) -> Message:
        return decode_response(api_key, version, self.query_raw(api_key, version, request))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more
        return data


@pytest.fixture
def admin(secured: Secured) -> Iterator[Connection]:
    connection = Connection(secured.kafka.address(1))
    yield connection
    connection.close()


@pytest.fixture
def reader(secured: Secured) -> Iterator[Connection]:
    """A user without any rights."""
    connection = Connection(secured.kafka.address(1, "LOOPBACK"))
    connection.query(SASL_HANDSHAKE, 1, Message(mechanism="PLAIN"))
    assert connection.query(SASL_AUTHENTICATE, 2, Message(auth_bytes=plain("reader"))).error_code == 0
    yield connection
    connection.close()


@pytest.fixture
def topic(admin: Connection) -> str:
    requested = Message(name="orders", num_partitions=1, replication_factor=1)
    created = admin.query(apis.CREATE_TOPICS, 7, Message(topics=[requested]))
    assert created.topics[0].error_code in (0, 36)
    deadline = time.monotonic() + 60
    while admin.query(apis.METADATA, 12, Message(topics=[Message(name="orders")])).topics[0].error_code:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return "orders"


def empty(topic: str) -> Message:
    return Message(resource_type=TOPIC, resource_name=topic, configs=[])


@pytest.mark.brokers
@pytest.mark.parametrize("api_key", [apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS])
@pytest.mark.parametrize("validate_only", [False, True])
def test_empty_config_list_is_authorised_like_any_other(
    admin: Connection, reader: Connection, topic: str, api_key: int, validate_only: bool
) -> None:
    request = Message(resources=[empty(topic), empty("no-such-topic")], validate_only=validate_only)

    by_admin = {each.resource_name: each.error_code for each in admin.query(api_key, 1, request).responses}
    by_reader = {each.resource_name: each.error_code for each in reader.query(api_key, 1, request).responses}

    assert by_admin == {topic: 0, "no-such-topic": 3}
    assert by_reader == {topic: 29, "no-such-topic": 29}


def config_of(admin: Connection, topic: str, name: str) -> str:
    requested = Message(resource_type=TOPIC, resource_name=topic, configuration_keys=[name])
    value: str = admin.query(apis.DESCRIBE_CONFIGS, 4, Message(resources=[requested])).results[0].configs[0].value
    return value


def set_config(admin: Connection, topic: str, name: str, value: str) -> None:
    """Return once the broker shows the value: brokers apply changes in order, shortly after the controller."""
    configs = [Message(name=name, value=value, config_operation=0)]
    change = Message(resources=[Message(resource_type=TOPIC, resource_name=topic, configs=configs)])
    assert admin.query(apis.INCREMENTAL_ALTER_CONFIGS, 1, change).responses[0].error_code == 0
    deadline = time.monotonic() + 60
    while config_of(admin, topic, name) != value:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.brokers
def test_empty_list_resets_configs_only_in_legacy_call(admin: Connection, topic: str) -> None:
    set_config(admin, topic, "retention.ms", "123456")

    admin.query(apis.INCREMENTAL_ALTER_CONFIGS, 1, Message(resources=[empty(topic)]))
    set_config(admin, topic, "flush.messages", "1000")
    assert config_of(admin, topic, "retention.ms") == "123456"

    admin.query(apis.ALTER_CONFIGS, 1, Message(resources=[empty(topic)]))
    set_config(admin, topic, "flush.messages", "2000")
    assert config_of(admin, topic, "retention.ms") == "604800000"


@pytest.mark.brokers
def test_unknown_config_keys_describe_no_configs(admin: Connection, topic: str) -> None:
    def shown(keys: list[str]) -> list[str]:
        requested = Message(resource_type=TOPIC, resource_name=topic, configuration_keys=keys)
        result = admin.query(apis.DESCRIBE_CONFIGS, 4, Message(resources=[requested])).results[0]
        assert result.error_code == 0
        return [each.name for each in result.configs]

    assert shown(["fencepost.check.expected.offsets"]) == []
    assert shown(["fencepost.check.expected.offsets", "retention.ms"]) == ["retention.ms"]
    assert len(shown([])) > 20


#: Requests for APIs whose empty request gets no response: brokers close the connection over an empty filter of ACLs
#: (these are "any"), and older ones (3.9, 4.0) never respond to an OffsetFetch without groups.
REQUESTS = {
    29: Message(resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1),
    9: Message(group_id="g", groups=[Message(group_id="g", topics=[])]),
}


@pytest.mark.brokers
def test_every_real_broker_response_is_reencoded_unchanged(admin: Connection) -> None:
    submitted = admin.query(apis.API_VERSIONS, 3, Message(client_software_name="test", client_software_version="1"))
    restrict_api_versions(submitted)
    read = []
    for entry in submitted.api_keys:
        readable = codec_versions(entry.api_key)
        if readable is None or entry.api_key == apis.PRODUCE:
            continue
        request = REQUESTS.get(entry.api_key, Message())
        for version in range(max(entry.min_version, readable[0]), min(entry.max_version, readable[1]) + 1):
            body = admin.query_raw(entry.api_key, version, request)
            message = decode_response(entry.api_key, version, body)
            assert encode_response(entry.api_key, version, message) == body, (APIS[entry.api_key].name, version)
            read.append((entry.api_key, version))

    assert len(read) > 180


@pytest.mark.brokers
def test_rewritten_response_never_names_the_broker(secured: Secured, admin: Connection, topic: str) -> None:
    book = AddressBook(19092, advertised_host="proxy.example.com")
    queried = [
        *((apis.METADATA, v, Message(topics=None if v else [])) for v in range(14)),
        *((apis.FIND_COORDINATOR, v, Message(key="g")) for v in range(4)),
        *((apis.FIND_COORDINATOR, v, Message(coordinator_keys=["g", "h"])) for v in range(4, 7)),
        *((apis.DESCRIBE_CLUSTER, v, Message()) for v in range(3)),
        (apis.DESCRIBE_QUORUM, 2, Message(topics=[Message(topic_name="__cluster_metadata", partitions=[Message()])])),
    ]
    submitted = versions_in(
        admin.query(apis.API_VERSIONS, 3, Message(client_software_name="test", client_software_version="1"))
    )
    for api_key, version, request in queried:
        if (api_key, version) not in submitted:
            continue
        response = admin.query(api_key, version, request)
        assert secured.kafka.address(1).host in repr(response), "the response contains no address: nothing is tested"
        learn_brokers(api_key, response, book)
        rewrite_response(api_key, response, book, "127.0.0.2")

        reported = encode_response(api_key, version, response)

        assert secured.kafka.address(1).host.encode() not in reported
        assert b"proxy.example.com" in reported
    assert book.nodes == {1: secured.kafka.address(1)}


@pytest.mark.brokers
def test_only_what_the_table_serves_is_advertised(admin: Connection) -> None:
    submitted = admin.query(apis.API_VERSIONS, 3, Message(client_software_name="test", client_software_version="1"))
    of_broker = versions_in(submitted)
    restrict_api_versions(submitted)

    assert versions_in(submitted) == {each for each in of_broker if apis.serves(*each)}
    assert of_broker - versions_in(submitted) >= {(apis.ADD_PARTITIONS_TO_TXN, 4)}


def versions_in(submitted: Message) -> set[tuple[int, int]]:
    return {(each.api_key, v) for each in submitted.api_keys for v in range(each.min_version, each.max_version + 1)}


# --- Kafka's message definitions, from the locked jar -----------------------------------------------------------------

ADDRESSES_REPLACED = {
    *(apis.PRODUCE, apis.FETCH, apis.METADATA, apis.SHARE_FETCH, apis.SHARE_ACKNOWLEDGE),
    *(apis.FIND_COORDINATOR, apis.DESCRIBE_CLUSTER, apis.DESCRIBE_QUORUM),
}
#: Not a broker's address: see `wire/apis.py`.
OTHER_HOSTS = {"client_host", "user_endpoint.host", "user_endpoint.port", "acls.host", "matching_acls.host"}


def response_definitions() -> dict[int, dict[str, Any]]:
    paths = classpath(release(DEFAULT_VERSION).broker_lock, say).split(os.pathsep)
    jar = next(path for path in paths if Path(path).name.startswith("kafka-clients-"))
    with zipfile.ZipFile(jar) as opened:
        texts = [opened.read(name).decode() for name in opened.namelist() if name.endswith("Response.json")]
    parsed = [json.loads(re.sub(r"(?m)^\s*//.*$", "", text)) for text in texts]
    return {each["apiKey"]: each for each in parsed}


def hosts_and_ports(
    fields: list[dict[str, Any]], structs: dict[str, Any], version: int, path: str = ""
) -> Iterator[str]:
    for field in fields:
        if not within(version, field["versions"]):
            continue
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", field["name"]).lower()
        if name.split("_")[-1] in ("host", "port"):
            yield (f"{path}.{name}" if name in ("host", "port") else name).removeprefix(".")
        inner = field.get("fields") or structs.get(field["type"].removeprefix("[]"), [])
        yield from hosts_and_ports(inner, structs, version, name)


def within(version: int, versions: str) -> bool:
    first, _, last = versions.replace("+", "-999").partition("-")
    return versions != "none" and int(first) <= version <= int(last or first)


def test_no_served_version_names_an_unreplaced_broker_address() -> None:
    definitions = response_definitions()
    assert set(definitions) == set(APIS), "this Kafka has other APIs: review each and add its row to the table"
    observed = set()
    for api_key, definition in definitions.items():
        structs = {each["name"]: each["fields"] for each in definition.get("commonStructs", [])}
        for version in range(100):
            if not within(version, definition["validVersions"]):
                continue
            fields = set(hosts_and_ports(definition["fields"], structs, version)) - OTHER_HOSTS
            if fields:
                observed.add((api_key, version))
            if apis.serves(api_key, version) and fields:
                assert api_key in ADDRESSES_REPLACED, f"{APIS[api_key].name} v{version} returns {fields}"
    assert {(apis.FETCH, 16), (apis.PRODUCE, 10), (55, 2), (78, 1), (79, 1), (apis.METADATA, 0)} <= observed


def test_table_serves_newest_versions_except_for_stated_reasons() -> None:
    for api_key, definition in response_definitions().items():
        api = APIS[api_key]
        assert definition["name"] == f"{api.name}Response"
        newest = max((v for v in range(100) if within(v, definition["validVersions"])), default=0)
        assert apis.decides(api_key, newest), f"{api.name} stops at {api.max_version} of {newest}: no reason"
        assert api.gated or api.max_version <= newest


def test_a_broker_does_not_name_controllers(admin: Connection) -> None:
    answer = admin.query(apis.DESCRIBE_CLUSTER, 1, Message(endpoint_type=2))

    assert (answer.error_code, answer.brokers) == (114, [])


def test_topics_are_known_by_id(admin: Connection, topic: str) -> None:
    answer = admin.query(apis.METADATA, 12, Message(topics=[Message(name=topic)]))

    assert isinstance(answer.topics[0].topic_id, UUID)
    assert answer.topics[0].topic_id.int != 0
