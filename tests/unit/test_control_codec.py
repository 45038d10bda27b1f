"""The codec of control messages: against messages built by another codec (kio), and against bytes built by hand."""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable

import pytest
from kio.index import UnknownAPIKey, UnknownEntity, load_request_schema, load_response_schema
from kio.schema.index import api_key_map

from fencepost_proxy.errors import ClientProtocolError, UpstreamProtocolError
from fencepost_proxy.types import NO_TOPIC_ID
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.apis import APIS
from fencepost_proxy.wire.control import (
    codec_versions,
    decode_request,
    decode_response,
    encode_request,
    encode_request_frame,
    encode_response,
    encode_response_frame,
    parse_request_header,
    parse_response_header,
    replace_body,
    response_header_is_flexible,
)
from fencepost_proxy.wire.schema import Message
from tests.support.kio_messages import NOT_IN_KIO, by_kio

# --- every message, against kio ---------------------------------------------------------------------------------------

READABLE = [
    (key, version)
    for key in api_key_map
    if (versions := codec_versions(key)) is not None
    for version in range(versions[0], versions[1] + 1)
    if (key, version) not in NOT_IN_KIO
]


@pytest.mark.parametrize(("api_key", "version"), READABLE, ids=str)
def test_kio_messages_round_trip_byte_for_byte(api_key: int, version: int) -> None:
    """Whole; cut off anywhere, they are the fault of their sender."""
    rng = random.Random(api_key * 100 + version)
    for _ in range(5):
        for schema, decode, encode, fault in (
            (load_request_schema, decode_request, encode_request, ClientProtocolError),
            (load_response_schema, decode_response, encode_response, UpstreamProtocolError),
        ):
            body = by_kio(schema(api_key, version), rng)
            if schema is load_response_schema and api_key == apis.API_VERSIONS and body[:2] == b"\x00\x23":
                continue  # error 35 is always of v0, which kio does not know
            assert encode(api_key, version, decode(api_key, version, memoryview(body))) == body
            for length in {rng.randrange(len(body)), len(body) - 1} if body else ():
                with pytest.raises(fault):
                    decode(api_key, version, body[:length])


def test_every_known_message_was_compared() -> None:
    assert len(READABLE) > 230
    for key, version in NOT_IN_KIO:
        with pytest.raises((UnknownAPIKey, UnknownEntity)):
            load_request_schema(key, version)


# --- by hand ----------------------------------------------------------------------------------------------------------


def uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def text(value: str) -> bytes:
    return uvarint(len(value) + 1) + value.encode()


def array(*items: bytes) -> bytes:
    return uvarint(len(items) + 1) + b"".join(items)


def tags(**fields: bytes) -> bytes:
    """`tags(t5=b"...")`: a section with tagged field 5."""
    out = uvarint(len(fields))
    for name, value in fields.items():
        out += uvarint(int(name[1:])) + uvarint(len(value)) + value
    return out


LARGE = bytes(range(256)) * 2

METADATA_V12 = b"".join(
    (
        struct.pack(">i", 5),
        array(struct.pack(">i", 1) + text("kafka-1") + struct.pack(">i", 9092) + text("rack") + tags(t3=b"of broker")),
        text("cluster"),
        struct.pack(">i", 1),
        array(
            b"".join(
                (
                    struct.pack(">h", 0),
                    text("orders"),
                    uuid.UUID(int=7).bytes,
                    b"\x00",
                    array(
                        struct.pack(">hiii", 0, 0, 1, 4)
                        + array(struct.pack(">i", 1))
                        + array(struct.pack(">i", 1))
                        + array()
                        + tags(t0=b"of partition", t200=LARGE)
                    ),
                    struct.pack(">i", -(2**31)),
                    tags(t1=b"of topic"),
                )
            )
        ),
        tags(t16=b""),
    )
)


def test_unknown_tagged_fields_survive_at_every_level() -> None:
    message = decode_response(apis.METADATA, 12, METADATA_V12)
    assert message.topics[0].partitions[0].unknown_tags == ((0, b"of partition"), (200, LARGE))
    assert message.brokers[0].unknown_tags == ((3, b"of broker"),)
    assert encode_response(apis.METADATA, 12, message) == METADATA_V12
    message.brokers[0].host = "proxy"
    changed = METADATA_V12.replace(text("kafka-1"), text("proxy"))
    assert encode_response(apis.METADATA, 12, message) == changed


def test_unknown_tagged_fields_survive_inside_known_tagged_fields() -> None:
    feature = text("kraft.version") + struct.pack(">hh", 0, 1) + tags(t4=b"of feature")
    current_leader = struct.pack(">ii", 2, 9) + tags(t7=b"of leader")
    api_versions = b"".join(
        (
            struct.pack(">h", 0),
            array(struct.pack(">hhh", 3, 0, 13) + tags(t1=b"of key")),
            struct.pack(">i", 0),
            tags(t0=array(feature), t1=struct.pack(">q", 12), t9=b"of response"),
        )
    )
    partition = (
        struct.pack(">ihqqq", 0, 6, -1, -1, -1)
        + array()
        + struct.pack(">i", -1)
        + uvarint(0)
        + tags(t1=current_leader, t3=b"?")
    )
    fetch = struct.pack(">ihi", 0, 0, 0) + array(uuid.UUID(int=3).bytes + array(partition) + tags()) + tags()

    assert encode_response(apis.API_VERSIONS, 3, decode_response(apis.API_VERSIONS, 3, api_versions)) == api_versions
    answer = decode_response(apis.FETCH, 15, fetch)
    assert answer.responses[0].partitions[0].current_leader.leader_id == 2
    assert answer.responses[0].partitions[0].current_leader.unknown_tags == ((7, b"of leader"),)
    assert encode_response(apis.FETCH, 15, answer) == fetch


def test_unknown_tagged_fields_survive_in_single_field_struct() -> None:
    request = array(text("orders") + tags(t2=b"of topic")) + struct.pack(">i", 2000) + b"\xff" + tags(t1=b"top")
    message = decode_request(apis.DESCRIBE_TOPIC_PARTITIONS, 0, request)
    assert message.cursor is None
    assert encode_request(apis.DESCRIBE_TOPIC_PARTITIONS, 0, message) == request


def test_tagged_fields_are_ascending_and_defaults_are_omitted() -> None:
    message = Message(supported_features=[], finalized_features_epoch=-1, unknown_tags=((9, b"n"), (4, b"f")))
    assert encode_response(apis.API_VERSIONS, 3, message) == struct.pack(">h", 0) + array() + struct.pack(
        ">i", 0
    ) + tags(t4=b"f", t9=b"n")


def test_fields_that_a_version_lacks_have_kafkas_default() -> None:
    old = decode_request(apis.METADATA, 1, struct.pack(">i", -1))
    topic = decode_request(apis.DELETE_TOPICS, 1, struct.pack(">i", 0) + struct.pack(">i", 30))
    assert old.topics is None
    assert old.allow_auto_topic_creation is True
    assert topic.topics == []
    assert encode_request(apis.CREATE_TOPICS, 7, Message()) == b"\x01" + struct.pack(">i", 60000) + b"\x00\x00"


def test_default_lists_are_not_shared() -> None:
    first = decode_request(apis.DELETE_TOPICS, 1, struct.pack(">ii", 0, 30))
    first.topics.append("x")
    assert decode_request(apis.DELETE_TOPICS, 1, struct.pack(">ii", 0, 30)).topics == []


# --- bad bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api_key", "version", "body", "reason"),
    [
        pytest.param(3, 1, struct.pack(">i", 2**31 - 1), "truncated field", id="two billion topics"),
        pytest.param(3, 9, b"\xff\xff\xff\xff\x0f" + b"\0" * 9, "truncated field", id="four billion topics"),
        pytest.param(3, 9, b"\xff\xff\xff\xff\xff\x01", "longer than 5", id="endless varint"),
        pytest.param(3, 1, struct.pack(">i", -2), "length -2", id="negative count"),
        pytest.param(19, 2, struct.pack(">i", -1) + b"\0" * 5, "length -1", id="null where none is allowed"),
        pytest.param(3, 1, struct.pack(">ih", 1, -1), "-1", id="null name"),
        pytest.param(3, 1, struct.pack(">ih", 1, 2) + b"\xc3\x28", "UTF-8", id="not UTF-8"),
        pytest.param(3, 1, struct.pack(">i", 0) + b"!", "1 extra bytes", id="bytes left over"),
        pytest.param(3, 14, b"", "no schema", id="unknown version"),
        pytest.param(4, 0, b"", "no schema", id="no schema"),
        pytest.param(999, 0, b"", "api key 999", id="unknown API"),
    ],
)
def test_bad_requests_are_the_clients_fault(api_key: int, version: int, body: bytes, reason: str) -> None:
    with pytest.raises(ClientProtocolError, match=reason):
        decode_request(api_key, version, body)


def test_tagged_field_length_must_match_its_schema() -> None:
    body = struct.pack(">h", 0) + array() + struct.pack(">i", 0) + tags(t1=struct.pack(">q", 1) + b"!")
    with pytest.raises(UpstreamProtocolError, match="finalized_features_epoch"):
        decode_response(apis.API_VERSIONS, 3, body)


# --- our own mistakes -------------------------------------------------------------------------------------------------


def test_field_unknown_to_the_schema_is_an_error() -> None:
    with pytest.raises(TypeError, match="nmae"):
        encode_request(apis.CREATE_TOPICS, 7, Message(topics=[Message(nmae="t")]))


def test_null_disallowed_by_the_version_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"\[\]CreatableTopic|CreatableTopic.name|topics"):
        encode_request(apis.CREATE_TOPICS, 7, Message(topics=[Message(name=None)]))


# --- headers and frames -----------------------------------------------------------------------------------------------

BODY = b"body"
V1 = struct.pack(">hhih", 3, 8, 77, 4) + b"kcat"
V2 = struct.pack(">hhih", 3, 9, 77, 4) + b"kcat" + tags(t3=b"x")


@pytest.mark.parametrize(
    ("header", "client_id", "section"),
    [
        (V1, "kcat", b""),
        (V2, "kcat", tags(t3=b"x")),
        (struct.pack(">hhih", 3, 9, 77, -1) + b"\0", None, b""),
        (struct.pack(">hhih", 3, 8, 77, 2) + b"\xff\xfe", "\\xff\\xfe", b""),
        (struct.pack(">hhih", 18, 3, 77, 0) + b"\0", "", b""),
        (struct.pack(">hhih", 18, 99, 77, 0) + b"\0", "", b""),
    ],
)
def test_request_headers(header: bytes, client_id: str | None, section: bytes) -> None:
    parsed = parse_request_header(memoryview(header + BODY))
    assert (parsed.correlation_id, parsed.client_id, parsed.tags) == (77, client_id, section)
    assert (header + BODY)[parsed.body_offset :] == BODY


def test_fixed_header_part_of_unknown_api_is_read() -> None:
    parsed = parse_request_header(struct.pack(">hhih", 999, 0, 5, 1) + b"x\0")
    assert (parsed.api_key, parsed.correlation_id, parsed.client_id) == (999, 5, "x")


@pytest.mark.parametrize("header", [V1, V2])
def test_truncated_header_is_the_clients_fault(header: bytes) -> None:
    for length in range(len(header)):
        with pytest.raises(ClientProtocolError, match="request header"):
            parse_request_header(header[:length])


def test_a_negative_client_id_is_the_clients_fault() -> None:
    with pytest.raises(ClientProtocolError, match="-2"):
        parse_request_header(struct.pack(">hhih", 3, 8, 77, -2))


def test_response_headers() -> None:
    assert parse_response_header(struct.pack(">i", 7) + BODY, 3, 8).body_offset == 4
    assert parse_response_header(struct.pack(">i", 7) + tags(t1=b"abc") + BODY, 3, 9).body_offset == 4 + 6
    assert parse_response_header(struct.pack(">i", 7) + BODY, 18, 4) == (7, b"", 4)
    with pytest.raises(UpstreamProtocolError, match="Metadata v9"):
        parse_response_header(struct.pack(">i", 7), 3, 9)


def test_api_versions_alone_answers_with_the_old_header() -> None:
    exceptions = [
        key for key, api in APIS.items() if api.flexible_from is not None and not response_header_is_flexible(key, 99)
    ]
    assert exceptions == [apis.API_VERSIONS]


@pytest.mark.parametrize(("api_key", "version"), [(3, 8), (3, 9), (18, 2), (18, 3)])
def test_frames_are_read_back(api_key: int, version: int) -> None:
    request = Message(topics=[]) if api_key == 3 else Message()
    framed = encode_request_frame(api_key, version, 12, "fencepost", request)
    header = parse_request_header(framed[4:])
    assert struct.unpack(">i", framed[:4]) == (len(framed) - 4,)
    assert (header.api_key, header.api_version, header.correlation_id) == (api_key, version, 12)
    assert header.client_id == "fencepost"
    assert (
        encode_request(api_key, version, decode_request(api_key, version, framed[4 + header.body_offset :]))
        == (framed[4 + header.body_offset :])
    )

    framed = encode_response_frame(api_key, version, 12, Message())
    answer = parse_response_header(framed[4:], api_key, version)
    assert answer.correlation_id == 12
    decode_response(api_key, version, framed[4 + answer.body_offset :])


def test_a_rewritten_request_keeps_its_clients_header() -> None:
    frame = V2 + BODY
    assert replace_body(memoryview(frame), len(V2), b"another") == struct.pack(">i", len(V2) + 7) + V2 + b"another"


def test_missing_topic_id_is_the_zero_id() -> None:
    builder: Callable[..., bytes] = encode_request
    body = builder(apis.METADATA, 12, Message(topics=[Message(name="t")]))
    assert decode_request(apis.METADATA, 12, body).topics[0].topic_id == NO_TOPIC_ID
