"""The table of APIs, compared with Kafka's message definitions as another project (kio) generated them."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import errors
from kio.index import load_response_schema
from kio.schema.index import api_key_map, schema_name_map

from fencepost.spark import refusals
from fencepost_proxy.errors import Error, UpstreamProtocolError, error_name
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.api_versions import restrict_api_versions, restricted_api_versions, unsupported_api_versions
from fencepost_proxy.wire.apis import APIS, Handling
from fencepost_proxy.wire.control import codec_versions, decode_response, encode_response
from fencepost_proxy.wire.node_endpoints import ENDPOINTS_FROM
from fencepost_proxy.wire.schema import Message

ROOT = Path(__file__).parents[2]
#: Fields that sound like an address and are none of a broker's: the reason stands in `wire/apis.py`.
NOT_A_BROKER = {
    ("DescribeGroups", "client_host"),
    ("ConsumerGroupDescribe", "client_host"),
    ("ShareGroupDescribe", "client_host"),
    ("StreamsGroupDescribe", "client_host"),
    ("StreamsGroupDescribe", "user_endpoint"),
    ("StreamsGroupHeartbeat", "user_endpoint"),
    ("DescribeAcls", "host"),
    ("DeleteAcls", "host"),
}
#: Treated here, and every address in it replaced by `addresses.py`, `node_endpoints.py` or the Produce path.
ADDRESSES_REPLACED = {
    "Metadata",
    "FindCoordinator",
    "DescribeCluster",
    "DescribeQuorum",
    "Produce",
    "Fetch",
    "ShareFetch",
    "ShareAcknowledge",
}


#: What Kafka 4.4 added, and kio does not have: compared with Kafka's own definitions in the integration tests.
NEWER_THAN_KIO = {18: 5, 28: 6, 42: 3, 88: 1, 89: 1, 93: 0, 94: 0}


def kafka_versions(api_key: int) -> list[int]:
    return sorted(schema_name_map[api_key_map[api_key]])


def address_fields(entity: type, of: str = "") -> Iterator[str]:
    """Names of the fields of a message that sound like a host or a port, at any depth."""
    hints = typing.get_type_hints(entity)
    for field in dataclasses.fields(entity):
        inner = [t for t in _types_in(hints[field.name]) if dataclasses.is_dataclass(t)]
        if re.search(r"(^|_)(host|port|address)$", field.name):
            yield of or field.name
        for each in inner:
            yield from address_fields(each, of or (field.name if field.name == "user_endpoint" else ""))


def _types_in(hint: object) -> Iterator[type]:
    for each in typing.get_args(hint):
        yield from _types_in(each)
    if isinstance(hint, type):
        yield hint


def test_every_api_of_kafka_has_its_row() -> None:
    removed_in_4 = {4: "LeaderAndIsr", 5: "StopReplica", 6: "UpdateMetadata", 7: "ControlledShutdown"}
    of_kafka = (
        dict(api_key_map) | removed_in_4 | {93: "StreamsGroupTopologyDescriptionUpdate", 94: "UnregisterController"}
    )

    assert sorted(APIS) == list(range(95)) == sorted(of_kafka)
    for key, api in APIS.items():
        assert api.key == key
        assert (
            re.sub(r"(?<!^)(?=[A-Z])", "_", api.name).lower().replace("_", "") == of_kafka[key].replace("_", "").lower()
        )


@pytest.mark.parametrize("api_key", sorted(api_key_map))
def test_headers_are_flexible_from_kafkas_version(api_key: int) -> None:
    api = APIS[api_key]
    for version in kafka_versions(api_key):
        flexible = load_response_schema(api_key, version).__flexible__
        assert flexible is (api.flexible_from is not None and version >= api.flexible_from), version


@pytest.mark.parametrize("api_key", sorted(api_key_map))
def test_a_row_caps_versions_only_for_a_reason(api_key: int) -> None:
    api = APIS[api_key]
    newest = NEWER_THAN_KIO.get(api_key, kafka_versions(api_key)[-1])
    if not api.gated:
        assert api.max_version <= newest, "a version that Kafka does not have is not ours to advertise"
        cap = apis.CAPS.get(api_key)
        assert (cap is None) is (api.max_version == newest), (
            f"{api.name} stops at {api.max_version} of {newest}: say why"
        )
        assert cap is None or (cap.newest == newest and cap.reason and cap.cost and cap.needs)
    else:
        assert api.reason


@pytest.mark.parametrize("api_key", [key for key in sorted(api_key_map) if not APIS[key].gated])
def test_no_served_version_can_name_a_brokers_address(api_key: int) -> None:
    api = APIS[api_key]
    for version in kafka_versions(api_key):
        if not api.serves(version):
            continue
        named = set(address_fields(load_response_schema(api_key, version)))
        named -= {field for name, field in NOT_A_BROKER if name == api.name}
        if named:
            assert api.name in ADDRESSES_REPLACED, f"{api.name} v{version} answers with {named}"
            assert api.handling & (Handling.REWRITE_RESPONSE | Handling.PRODUCE | Handling.REWRITE_ENDPOINTS)


def test_addresses_after_records_are_known_where_the_table_says_so() -> None:
    assert {key for key, api in APIS.items() if Handling.REWRITE_ENDPOINTS in api.handling} == set(ENDPOINTS_FROM)


def test_schema_walk_finds_known_address_fields() -> None:
    observed = {
        (APIS[key].name, version)
        for key in api_key_map
        for version in kafka_versions(key)
        if set(address_fields(load_response_schema(key, version)))
    }
    assert {
        ("Fetch", 16),
        ("Produce", 10),
        ("ShareFetch", 1),
        ("ShareAcknowledge", 1),
        ("DescribeQuorum", 2),
    } <= observed
    assert {("Metadata", 0), ("FindCoordinator", 3), ("FindCoordinator", 4), ("DescribeCluster", 0)} <= observed
    assert {("Fetch", 15), ("Produce", 9), ("DescribeQuorum", 1)}.isdisjoint(observed)


@pytest.mark.parametrize("api", [api for api in APIS.values() if api.handling and not api.gated])
def test_every_served_version_can_be_decoded(api: apis.Api) -> None:
    if api.handling is Handling.PRODUCE:
        return
    versions = codec_versions(api.key)
    assert versions is not None
    if api.handling is not Handling.INSPECT_REQUEST:  # else only where it names the state topic, and is closed then
        assert versions[0] <= api.min_version
    assert api.max_version <= versions[1]


def test_unlisted_apis_and_versions_are_not_served() -> None:
    assert apis.serves(apis.METADATA, 13)
    assert not apis.serves(apis.METADATA, 14)
    assert apis.serves(apis.FETCH, 18)
    assert not apis.serves(apis.FETCH, 19)
    assert apis.serves(apis.PRODUCE, 13)
    assert not apis.serves(apis.PRODUCE, 14)
    assert not apis.serves(95, 0)
    assert not apis.serves(-1, 0)
    assert not apis.serves(62, 0), "BrokerRegistration is not for clients"


def test_table_decides_about_no_version_that_it_does_not_know() -> None:
    assert apis.decides(apis.PRODUCE, 13)
    assert not apis.decides(apis.PRODUCE, 14)
    assert apis.decides(apis.FETCH, 18)
    assert not apis.decides(apis.FETCH, 19)
    assert apis.decides(62, 9), "whatever it is, it is not for clients"
    assert not apis.decides(95, 0)


# --- ApiVersions ------------------------------------------------------------------------------------------------------


def api(key: int, low: int, high: int) -> Message:
    return Message(api_key=key, min_version=low, max_version=high)


def test_versions_that_only_kafka_3_9_has_are_advertised() -> None:
    """Its clients use them: old librdkafka, sarama and kafka-python."""
    of_kafka = [api(1, 0, 17), api(19, 0, 7), api(20, 0, 6), api(32, 0, 4)]
    response = Message(api_keys=of_kafka, supported_features=[], finalized_features=[])
    restrict_api_versions(response)
    assert [(each.api_key, each.min_version) for each in response.api_keys] == [(1, 0), (19, 0), (20, 0), (32, 0)]


def test_api_versions_reports_overlap_of_broker_and_table() -> None:
    feature = Message(name="transaction.version", min_version=0, max_version=2)
    final = Message(name="transaction.version", max_version_level=2, min_version_level=2)
    submitted = [api(0, 0, 14), api(1, 4, 18), api(3, 2, 7), api(62, 0, 4), api(95, 0, 0), api(55, 0, 2), api(76, 0, 0)]
    body = encode_response(
        apis.API_VERSIONS,
        4,
        Message(
            api_keys=submitted,
            throttle_time_ms=3,
            supported_features=[feature],
            finalized_features_epoch=77,
            finalized_features=[final],
            unknown_tags=((9, b"later"),),
        ),
    )

    reported = decode_response(apis.API_VERSIONS, 4, memoryview(restricted_api_versions(4, body)))

    assert [(each.api_key, each.min_version, each.max_version) for each in reported.api_keys] == [
        (0, 0, 13),
        (1, 4, 18),
        (3, 2, 7),
        (55, 0, 2),
    ]
    assert reported.throttle_time_ms == 3
    assert [each.name for each in reported.supported_features] == ["transaction.version"]
    assert reported.finalized_features_epoch == 77
    assert reported.finalized_features[0].max_version_level == 2
    assert reported.unknown_tags == ((9, b"later"),)


@pytest.mark.parametrize("version", [0, 4])
def test_each_response_is_restricted_for_itself(version: int) -> None:
    for newest in (3, 4, 3):
        response = Message(
            api_keys=[api(1, 0, newest)], throttle_time_ms=0, supported_features=[], finalized_features=[]
        )
        body = encode_response(apis.API_VERSIONS, version, response)
        answer = decode_response(apis.API_VERSIONS, version, memoryview(restricted_api_versions(version, body)))
        assert [each.max_version for each in answer.api_keys] == [newest]
    with pytest.raises(UpstreamProtocolError):
        restricted_api_versions(version, b"")


def test_too_new_api_versions_request_gets_oldest_format() -> None:
    body = encode_response(apis.API_VERSIONS, 6, unsupported_api_versions())

    assert body == bytes.fromhex("0023 00000001 0012 0000 0005")
    assert decode_response(apis.API_VERSIONS, 4, body).error_code == Error.UNSUPPORTED_VERSION


def test_error_codes_have_kafka_names() -> None:
    renamed = {-1, 0, 6, 10, 17, 39}  # kafka-python uses older names
    known = {
        each.errno: each.message for each in vars(errors).values() if isinstance(getattr(each, "errno", None), int)
    }
    assert len(known) > 100
    assert {code: Error(code).name for code in known.keys() - renamed} == {
        code: name for code, name in known.items() if code not in renamed
    }
    assert error_name(999) == "error 999"
    assert {Error[name]: name for name in refusals._NAMES.values()} == refusals._NAMES


def test_messages_name_error_codes() -> None:
    """An operator searches for FENCED_LEADER_EPOCH, not for 74."""
    numbers = re.compile(r"\berror \{[^}]*(code|error)\b")
    found = [
        f"{file.name}: {line.strip()}"
        for package in ("proxy", "client")
        for file in (ROOT / package).rglob("*.py")
        for line in file.read_text().splitlines()
        if numbers.search(line) and "error {code}" not in line  # `error_name` of unknown codes
    ]
    assert found == []
