"""Responses that list topics: their bytes are those that decoding and encoding all of them would give."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema

from fencepost_proxy.addresses import AddressBook, rewrite_response
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import UpstreamProtocolError
from fencepost_proxy.executor import Executor
from fencepost_proxy.services.topic_policies import TopicPolicies
from fencepost_proxy.session.control.rewriters import Finished, RequestRewriters
from fencepost_proxy.topics.closed import hide
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.rewriting import plan_request
from fencepost_proxy.topics.state import StateView, encode_topic_config
from fencepost_proxy.types import Address, NodeId, Offset
from fencepost_proxy.wire import layouts, schema
from fencepost_proxy.wire.apis import APIS, DESCRIBE_CONFIGS, DESCRIBE_TOPIC_PARTITIONS, METADATA
from fencepost_proxy.wire.control import (
    codec_versions,
    decode_response,
    encode_request_frame,
    encode_response,
    encode_response_frame,
    parse_response_header,
    replace_body,
)
from fencepost_proxy.wire.layouts import element_ends
from fencepost_proxy.wire.primitives import MALFORMED
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.spliced import TopicList
from tests.support.executors import needs_native
from tests.support.kio_messages import NOT_IN_KIO, by_kio
from tests.support.properties import some

STATE_TOPIC, STATE_ID = "__fencepost_state", UUID(int=0xFE)
LISTS = [*((METADATA, version) for version in range(14)), (DESCRIBE_TOPIC_PARTITIONS, 0)]
PYTHON = Executor(None, "the reference")

seeds = st.integers(0, 2**32)


def _flexible(api_key: int, version: int) -> bool:
    flexible_from = APIS[api_key].flexible_from
    return flexible_from is not None and version >= flexible_from


def _unknown(rng: random.Random, flexible: bool) -> dict[str, Any]:
    """Sometimes tagged fields that no version of Kafka has."""
    if not flexible or rng.random() < 0.8:
        return {}
    return {"unknown_tags": tuple((90 + tag, rng.randbytes(rng.randrange(200))) for tag in range(rng.randrange(1, 3)))}


def _topic(rng: random.Random, api_key: int, version: int) -> Message:
    flexible = _flexible(api_key, version)
    partition_count = rng.choice((0, 1, 3, 3, 70))
    alike = rng.random() < 0.5

    def nodes() -> list[int]:
        return [rng.randrange(9)] * (3 if alike else rng.choice((0, 1, 2, 3, 130)))

    partitions = [
        Message(
            error_code=rng.choice((0, 0, 5)),
            partition_index=index,
            leader_id=rng.randrange(-1, 9),
            replica_nodes=nodes(),
            isr_nodes=nodes(),
            **({} if alike else _unknown(rng, flexible)),
            **({"leader_epoch": rng.randrange(1 << 31)} if api_key != METADATA or version >= 7 else {}),
            **({"offline_replicas": nodes()} if api_key != METADATA or version >= 5 else {}),
            **({"last_known_elr": rng.choice((None, nodes()))} if api_key != METADATA else {}),
        )
        for index in range(partition_count)
    ]
    has_ids = api_key != METADATA or version >= 10
    name = rng.choice((STATE_TOPIC, f"{STATE_TOPIC}-2", "orders", "t" * 200, "ü"))
    topic_id = rng.choice((STATE_ID, UUID(int=7)))
    if has_ids and (api_key != METADATA or version >= 12) and rng.random() < 0.2:
        name = None
    return Message(
        error_code=rng.choice((0, 0, 100)),
        name=name,
        partitions=partitions,
        **({"topic_id": topic_id} if has_ids else {}),
        **_unknown(rng, flexible),
    )


def _response(rng: random.Random, api_key: int, version: int) -> bytes:
    """A whole frame."""
    flexible = _flexible(api_key, version)
    fields: dict[str, Any] = {}
    if api_key == METADATA:
        fields["brokers"] = [
            Message(node_id=each, host="kafka", port=9092, **_unknown(rng, flexible))
            for each in range(rng.randrange(4))
        ]
    else:
        fields["next_cursor"] = rng.choice((None, Message(topic_name="orders", partition_index=3)))
    topics = [_topic(rng, api_key, version) for _ in range(rng.choice((0, 1, 5, 30)))]
    return encode_response_frame(api_key, version, 7, Message(topics=topics, **fields, **_unknown(rng, flexible)))


def _known(**others: Any) -> Known:
    configs = {"fencepost.check.partition.count": "true"}
    return Known(
        StateView("cluster"),
        lambda topic: configs if topic == "orders" else {},
        lambda topic: None,
        STATE_TOPIC,
        STATE_ID,
        **others,
    )


def _book() -> AddressBook:
    book = AddressBook(19092)
    for node_id in range(4):
        book.learn(NodeId(node_id), Address("kafka", 9092))
    return book


def _request(api_key: int, version: int, topic: Message | None) -> bytes:
    topics = None if topic is None and version >= 1 else [] if topic is None else [topic]
    if api_key == DESCRIBE_TOPIC_PARTITIONS:
        topics = [Message(name="orders" if topic is None else topic.name)]
    return encode_request_frame(api_key, version, 7, "app", Message(topics=topics))


def _finished(
    frame: bytes, api_key: int, version: int, known: Known, topic: Message | None = None, *, own_addresses: bool = True
) -> Finished:
    rewriters = RequestRewriters(_book(), lambda: known, frozenset[int], lambda new: None, own_addresses=own_addresses)
    request = memoryview(_request(api_key, version, topic))[4:]
    finish = rewriters.begin(api_key, version, request, "proxy.local").finish
    assert finish is not None
    return finish(memoryview(frame)[4:])


def _whole(frame: bytes, api_key: int, version: int, *, queried: bool, by_name: bool, own_addresses: bool) -> bytes:
    """What decoding and encoding the whole response gives."""
    view = memoryview(frame)[4:]
    offset = parse_response_header(view, api_key, version).body_offset
    response = decode_response(api_key, version, view[offset:])
    if own_addresses:
        rewrite_response(api_key, response, _book(), "proxy.local")
    hide(response, _known(), queried=queried, by_name=by_name)
    codec = schema.codec(f"{APIS[api_key].name}Response", version)
    assert codec is not None
    out = bytearray()
    codec.write(out, response)
    return replace_body(view, offset, bytes(out))


@pytest.mark.parametrize("executor", [layouts.EXECUTOR, PYTHON], ids=["executor", "python"])
@pytest.mark.parametrize(("api_key", "version"), LISTS, ids=str)
def test_spliced_response_equals_decoded_and_encoded_one(
    api_key: int, version: int, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "EXECUTOR", executor)
    rng = random.Random(version)
    for _ in range(12):
        frame = _response(rng, api_key, version)
        own_addresses = rng.random() < 0.7
        by_name = rng.random() < 0.5 or api_key != METADATA or version < 12
        query = rng.choice((None, Message(name=STATE_TOPIC) if by_name else Message(name=None, topic_id=STATE_ID)))
        expected = _whole(
            frame, api_key, version, queried=query is not None, by_name=by_name, own_addresses=own_addresses
        )
        assert _finished(frame, api_key, version, _known(), query, own_addresses=own_addresses).answer == expected


@pytest.mark.parametrize(("api_key", "version"), LISTS, ids=str)
def test_topics_other_than_the_state_topic_are_not_decoded(
    api_key: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    element = TopicList.element
    monkeypatch.setattr(TopicList, "element", lambda self, index: decoded.append(index) or element(self, index))
    monkeypatch.setattr("fencepost_proxy.session.control.rewriters.decode_response", None)
    topics = [Message(name=name) for name in ("orders", STATE_TOPIC, "other", f"{STATE_TOPIC}-2", "more")]
    frame = encode_response_frame(api_key, version, 7, Message(topics=topics))
    assert len(_finished(frame, api_key, version, _known()).answer) < len(frame)
    assert decoded == [1, 3]


@pytest.mark.parametrize("version", [0, 8, 12])
def test_partition_counts_are_those_of_checked_topics(version: int) -> None:
    topics = [
        Message(name="orders", partitions=[Message(partition_index=each) for each in range(150)]),
        Message(name="plain", partitions=[Message(partition_index=0)]),
    ]
    frame = encode_response_frame(METADATA, version, 7, Message(topics=topics))
    for may in (None, frozenset((b"orders", b"plain")), frozenset((b"orders",))):
        assert _finished(frame, METADATA, version, _known(may_check_counts=may)).partition_counts == (("orders", 150),)
    assert _finished(frame, METADATA, version, _known(may_check_counts=frozenset())).partition_counts == ()
    topics[0].error_code = 5
    frame = encode_response_frame(METADATA, version, 7, Message(topics=topics))
    assert _finished(frame, METADATA, version, _known()).partition_counts == ()


def test_topics_that_may_check_counts_are_known_after_each_change() -> None:
    class _Membership:
        view = StateView("cluster")

    policies = TopicPolicies(ProxyConfig((Address("kafka", 9092),)), _Membership(), lambda topic: None)  # type: ignore[arg-type]
    assert policies.may_check_counts() == frozenset()
    for offset, (topic, config) in enumerate(
        (
            ("counted", "fencepost.check.partition.count"),
            ("ordered", "fencepost.ordered.partition.expansion"),
            ("other", "fencepost.check.expected.offsets"),
        )
    ):
        record = encode_topic_config(topic, STATE_ID, {config: "true"})
        assert _Membership.view.apply(Offset(offset), record.key, record.value) is None
        policies.state_changed()
    assert policies.may_check_counts() == {b"counted", b"ordered"}
    given = ProxyConfig((Address("kafka", 9092),), topics={"o*": {"fencepost.check.partition.count": "true"}})
    assert TopicPolicies(given, _Membership(), lambda topic: None).may_check_counts() is None  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["cut off", "extra byte", "count", "header"])
def test_malformed_topic_list_is_the_brokers_fault(damage: str) -> None:
    frame = bytearray(_response(random.Random(1), METADATA, 12))
    at = {"cut off": len(frame) - 1, "extra byte": len(frame), "count": -1, "header": 8}[damage]
    if damage == "count":
        frame = bytearray(encode_response_frame(METADATA, 1, 7, Message(topics=[])))
        frame[-4:] = b"\xff\xff\xff\xff"
    elif damage == "header":
        frame[at] = 0x7F
    else:
        frame[at:] = b"\0" if damage == "extra byte" else b""
    with pytest.raises(UpstreamProtocolError, match=r"malformed .*Metadata"):
        _finished(bytes(frame), METADATA, 1 if damage == "count" else 12, _known())


# --- DescribeConfigs --------------------------------------------------------------------------------------------------


def _configs(rng: random.Random, version: int) -> bytes:
    flexible = _flexible(DESCRIBE_CONFIGS, version)
    configs = [
        Message(
            name=f"config.{index}",
            value=rng.choice((None, "v" * 200)),
            synonyms=[Message(name="log.config", value=None, source=5, **_unknown(rng, flexible))] * rng.randrange(3),
            **({"documentation": rng.choice((None, "text"))} if version >= 3 else {}),
            **_unknown(rng, flexible),
        )
        for index in range(rng.choice((0, 1, 40)))
    ]
    results = [
        Message(
            error_code=rng.choice((0, 0, 0, 29)),
            error_message=rng.choice((None, "text")),
            resource_type=rng.choice((2, 2, 4)),
            resource_name=rng.choice(("orders", "plain")),
            configs=configs,
            **_unknown(rng, flexible),
        )
        for _ in range(rng.choice((0, 1, 7)))
    ]
    return encode_response_frame(DESCRIBE_CONFIGS, version, 7, Message(results=results, **_unknown(rng, flexible)))


@pytest.mark.parametrize("version", range(1, 5))
def test_added_configs_are_the_only_change_of_described_ones(version: int) -> None:
    rng = random.Random(version)
    for _ in range(20):
        frame = _configs(rng, version)
        keys = rng.choice((None, ["fencepost.check.partition.count"]))
        resources = [
            Message(resource_type=2, resource_name=name, configuration_keys=keys)
            for name in ("orders", *rng.choice(((), (STATE_TOPIC,))))
        ]
        request = Message(resources=resources, include_synonyms=True, include_documentation=True)
        encoded = memoryview(encode_request_frame(DESCRIBE_CONFIGS, version, 7, "app", request))[4:]
        rewriters = RequestRewriters(_book(), _known, frozenset[int], lambda new: None)
        finish = rewriters.begin(DESCRIBE_CONFIGS, version, encoded, "proxy.local").finish
        assert finish is not None
        view = memoryview(frame)[4:]
        offset = parse_response_header(view, DESCRIBE_CONFIGS, version).body_offset
        whole = decode_response(DESCRIBE_CONFIGS, version, view[offset:])
        plan = plan_request(DESCRIBE_CONFIGS, version, request, _known())
        assert plan is not None
        plan.finish(whole)
        expected = replace_body(view, offset, encode_response(DESCRIBE_CONFIGS, version, whole))
        assert finish(view).answer == expected


# --- layouts ----------------------------------------------------------------------------------------------------------

MESSAGES = [
    (key, version, load)
    for key in sorted(APIS)
    if (versions := codec_versions(key)) is not None
    for version in range(versions[0], versions[1] + 1)
    if (key, version) not in NOT_IN_KIO
    for load in (load_request_schema, load_response_schema)
]


def _ends(data: bytes, layout: layouts.Layout) -> list[int] | None:
    try:
        return element_ends(data, 0, 1, layout)
    except MALFORMED:
        return None


def _codecs() -> Iterable[tuple[bytes, layouts.Layout, random.Random]]:
    for key, version, load in MESSAGES:
        rng = random.Random(key * 100 + version)
        kind = "Request" if load is load_request_schema else "Response"
        codec = schema.codec(f"{APIS[key].name}{kind}", version)
        assert codec is not None
        yield by_kio(load(key, version), rng), codec.layout, rng


def test_layout_of_every_message_leads_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "EXECUTOR", PYTHON)
    found = 0
    for body, layout, _ in _codecs():
        assert _ends(body, layout) == [len(body)]
        assert _ends(body[:-1], layout) is None or not body
        found += 1
    assert found > 460


@needs_native
def test_native_code_finds_the_same_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in damaged messages."""
    native = layouts.EXECUTOR
    for body, layout, rng in _codecs():
        damaged = bytearray(body)
        for _ in range(6):
            both = []
            for executor in (native, PYTHON):
                monkeypatch.setattr(layouts, "EXECUTOR", executor)
                both.append(_ends(bytes(damaged), layout))
            assert both[0] == both[1], (layout, bytes(damaged))
            if body:
                damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


@needs_native
@some
@given(seeds)
def test_native_code_finds_the_same_topics(seed: int) -> None:
    rng = random.Random(seed)
    api_key, version = rng.choice(LISTS)
    frame = _response(rng, api_key, version)
    parts = schema.parts(f"{APIS[api_key].name}Response", version, "Topics")
    offset = parse_response_header(memoryview(frame)[4:], api_key, version).body_offset
    data = bytearray(frame[4 + offset :])
    for _ in range(4):
        _, at = parts.before.read(bytes(data), 0)
        count, at = (
            layouts.read_uvarint(data, at) if parts.compact else (int.from_bytes(data[at : at + 4], "big"), at + 4)
        )
        count -= parts.compact
        both = [
            layouts._ends_or_none(bytes(data), at, count, parts.element.layout),
            layouts.EXECUTOR.module.element_ends(bytes(data), at, count, parts.element.layout),  # type: ignore[union-attr]
        ]
        assert both[0] == both[1]
        if at >= len(data):
            return
        data[rng.randrange(at, len(data))] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
