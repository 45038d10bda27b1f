"""Produce requests and responses: against kafka-python's codec, for all versions, and against bad input."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kafka.protocol.producer import ProduceRequest as KafkaPythonRequest
from kafka.protocol.producer import ProduceResponse as KafkaPythonResponse

from fencepost_proxy.errors import ClientProtocolError, LimitError, UpstreamProtocolError
from fencepost_proxy.wire import produce as product
from fencepost_proxy.wire.produce import (
    NodeEndpoint,
    PartitionData,
    PartitionResult,
    ProducePeek,
    ProduceRequest,
    ProduceResponse,
    RecordError,
    TopicData,
    TopicResult,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
    peek_produce,
)
from tests.support.bytewise import altered
from tests.support.properties import some

VERSIONS = range(3, 14)
TOPIC_ID = UUID("01234567-89ab-cdef-0123-456789abcdef")
#: A section of two unknown tagged fields: 9 with 3 bytes, 300 with none.
TAGS = b"\x02\x09\x03abc\xac\x02\x00"
each_version = pytest.mark.parametrize("version", VERSIONS)


def _request(version: int) -> ProduceRequest:
    """Two topics, three partitions, one of them without records; unknown tagged fields wherever there may be some."""
    tags = TAGS if version >= 9 else b""

    def topic(name: str, *partitions: PartitionData) -> TopicData:
        return TopicData(*(("", TOPIC_ID) if version >= 13 else (name, None)), partitions, tags)

    return ProduceRequest(
        version,
        77,
        "a-client",
        tags,
        "a-transaction",
        -1,
        30_000,
        (
            topic("flights", PartitionData(3, memoryview(b"r" * 150), tags), PartitionData(0, memoryview(b""), tags)),
            topic("Größe", PartitionData(2_000_000_000, None, tags)),
        ),
        tags,
    )


def _frame(request: ProduceRequest) -> memoryview:
    written = b"".join(encode_produce_request(request))
    assert int.from_bytes(written[:4], "big") == len(written) - 4
    return memoryview(written)[4:]


def _response(version: int) -> ProduceResponse:
    """What parsing a response of this version can give, with as much in it as there is room for."""
    tags = TAGS if version >= 9 else b""
    leader = b"\x03\x00\x09\0\0\0\x05\0\0\0\x07\0" + TAGS[1:] if version >= 10 else tags
    refused = PartitionResult(
        3,
        44,
        57,
        -1,
        12 if version >= 5 else -1,
        (RecordError(1, "bad", tags), RecordError(2, None, tags)) if version >= 8 else (),
        "OFFSET_MISMATCH topic=flights" if version >= 8 else None,
        leader,
    )
    name, topic_id = ("", TOPIC_ID) if version >= 13 else ("flights", None)
    return ProduceResponse(
        77,
        (TopicResult(name, topic_id, (refused, PartitionResult(0, 0, 1 << 40, 1_700_000_000_000, tags=tags)), tags),),
        150,
        (NodeEndpoint(5, "broker-5.internal", 9092, "rack-a", TAGS), NodeEndpoint(6, "b6", 9093, None))
        if version >= 10
        else (),
        tags,
        tags,
    )


# --- round trips ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=40)
int16s = st.integers(-(2**15), 2**15 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)


@st.composite
def tag_sections(draw: st.DrawFn, version: int) -> bytes:
    fields = draw(st.dictionaries(st.integers(0, 127), st.binary(max_size=100), max_size=3))
    if version < 9 or not fields:
        return b""
    return bytes([len(fields)]) + b"".join(
        bytes([instance_id, len(fields[instance_id])]) + fields[instance_id] for instance_id in sorted(fields)
    )


@st.composite
def requests(draw: st.DrawFn) -> ProduceRequest:
    version = draw(st.sampled_from(VERSIONS))
    tags = tag_sections(version)
    records = st.none() | st.binary(max_size=300).map(memoryview)
    partitions = st.lists(st.builds(PartitionData, int32s, records, tags), max_size=3).map(tuple)
    topics = (
        st.builds(TopicData, st.just(""), st.uuids(), partitions, tags)
        if version >= 13
        else st.builds(TopicData, texts, st.none(), partitions, tags)
    )
    return ProduceRequest(
        version,
        draw(int32s),
        draw(st.none() | texts),
        draw(tags),
        draw(st.none() | texts),
        draw(int16s),
        draw(int32s),
        tuple(draw(st.lists(topics, max_size=3))),
        draw(tags),
    )


@given(requests())
def test_a_request_survives_encoding_and_parsing(request: ProduceRequest) -> None:
    frame = _frame(request)
    parsed = parse_produce_request(frame)
    assert parsed == request
    assert _frame(parsed) == frame
    topics = request.topics
    peek = peek_produce(frame, len(frame))
    first = topics[0] if topics else TopicData("", None, ())
    assert peek == ProducePeek(request.acks, request.transactional_id, len(topics), first.name, first_id=first.topic_id)
    assert bytes(frame[: peek.end]).endswith(first.topic_id.bytes if first.topic_id else first.name.encode())


# --- against other codecs ---------------------------------------------------------------------------------------------


def _without_tags(request: ProduceRequest) -> ProduceRequest:
    topics = tuple(
        replace(topic, tags=b"", partitions=tuple(replace(data, tags=b"") for data in topic.partitions))
        for topic in request.topics
    )
    return replace(request, header_tags=b"", tags=b"", topics=topics)


@each_version
def test_kafka_python_writes_the_same_request(version: int) -> None:
    request = _without_tags(_request(version))
    topic_class = KafkaPythonRequest.TopicProduceData
    theirs = KafkaPythonRequest(
        version=version,
        transactional_id=request.transactional_id,
        acks=request.acks,
        timeout_ms=request.timeout_ms,
        topic_data=[
            topic_class(
                **({"topic_id": topic.topic_id} if version >= 13 else {"name": topic.name}),
                partition_data=[
                    topic_class.PartitionProduceData(
                        index=data.partition, records=None if data.records is None else bytes(data.records)
                    )
                    for data in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )
    theirs.with_header(correlation_id=request.correlation_id, client_id=request.client_id)
    frame = memoryview(bytes(theirs.encode(version=version, header=True, framed=True)))[4:]
    assert frame == _frame(request)
    assert parse_produce_request(frame) == request


@each_version
def test_kafka_python_reads_our_response(version: int) -> None:
    ours = _response(version)
    # It fails on unknown fields inside of a tagged field (but skips them elsewhere).
    ours = replace(ours, node_endpoints=tuple(replace(node, tags=b"") for node in ours.node_endpoints))
    written = encode_produce_response(ours, version)
    theirs = KafkaPythonResponse.decode(written, version=version, header=True, framed=True)
    assert theirs.header.correlation_id == ours.correlation_id
    assert theirs.throttle_time_ms == ours.throttle_time_ms
    (topic,) = theirs.responses
    assert (topic.topic_id if version >= 13 else topic.name) == (TOPIC_ID if version >= 13 else "flights")
    for their, our in zip(topic.partition_responses, ours.topics[0].partitions, strict=True):
        assert (their.index, their.error_code, their.base_offset) == (our.partition, our.error_code, our.base_offset)
        assert their.log_append_time_ms == our.log_append_time_ms
        if version >= 5:
            assert their.log_start_offset == our.log_start_offset
        if version >= 8:
            assert their.error_message == our.error_message
            assert [(error.batch_index, error.batch_index_error_message) for error in their.record_errors] == [
                (error.batch_index, error.message) for error in our.record_errors
            ]
    if version >= 10:
        leader = topic.partition_responses[0].current_leader
        assert (leader.leader_id, leader.leader_epoch) == (5, 7)
        assert [(node.node_id, node.host, node.port, node.rack) for node in theirs.node_endpoints] == [
            (5, "broker-5.internal", 9092, "rack-a"),
            (6, "b6", 9093, None),
        ]


# --- records are not copied -------------------------------------------------------------------------------------------


def test_records_pass_through_as_views_of_the_frame() -> None:
    frame = memoryview(bytearray(_frame(_request(9))))
    request = parse_produce_request(frame)
    records = request.topics[0].partitions[0].records
    assert records is not None
    assert records.obj is frame.obj
    assert any(chunk is records for chunk in encode_produce_request(request))


# --- a request or a response in another version -----------------------------------------------------------------------


@some
@given(requests(), st.sampled_from(VERSIONS))
def test_request_in_another_version_loses_only_tagged_fields(request: ProduceRequest, version: int) -> None:
    """Topics have their ids instead of their names from v13 on."""
    assume(request.api_version < 13)
    named = tuple(replace(topic, topic_id=TOPIC_ID) for topic in request.topics)
    again = parse_produce_request(_frame(replace(request, api_version=version, topics=named)))
    kept = request if version >= 9 else _without_tags(request)
    if version >= 13:
        kept = replace(kept, topics=tuple(replace(topic, name="", topic_id=TOPIC_ID) for topic in kept.topics))
    assert again == replace(kept, api_version=version)


def test_v13_without_a_topic_id_is_internal_error() -> None:
    with pytest.raises(ValueError, match="'flights' has no id"):
        encode_produce_request(replace(_request(9), api_version=13))
    with pytest.raises(ValueError, match="'flights' has no id"):
        encode_produce_response(_response(9), 13)


@each_version
def test_v12_response_is_encoded_for_the_requested_version(version: int) -> None:
    newest = replace(_response(13), topics=_response(12).topics)
    newest = replace(newest, topics=tuple(replace(topic, topic_id=TOPIC_ID) for topic in newest.topics))
    parsed = parse_produce_response(memoryview(encode_produce_response(newest, version))[4:], version)
    assert parsed == _response(version)


# --- bad input --------------------------------------------------------------------------------------------------------


@each_version
def test_truncated_request_is_a_client_error(version: int) -> None:
    frame = _frame(_request(version))
    for length in range(len(frame)):
        with pytest.raises(ClientProtocolError, match="malformed Produce request"):
            parse_produce_request(frame[:length])


@each_version
def test_a_byte_too_much_is_the_clients_fault(version: int) -> None:
    with pytest.raises(ClientProtocolError, match="1 extra bytes"):
        parse_produce_request(memoryview(bytes(_frame(_request(version))) + b"\0"))


@each_version
def test_altered_request_parses_or_is_a_client_error(version: int) -> None:
    refused = 0
    for frame in altered(_frame(_request(version))):
        try:
            parse_produce_request(frame)
            peek_produce(frame, len(frame))
        except ClientProtocolError:
            refused += 1
    assert refused > 100


@each_version
def test_altered_or_truncated_response_is_a_broker_error(version: int) -> None:
    frame = memoryview(encode_produce_response(_response(version), version))[4:]
    for length in range(len(frame)):
        with pytest.raises(UpstreamProtocolError, match=f"malformed Produce v{version} response"):
            parse_produce_response(frame[:length], version)
    refused = 0
    for changed in altered(frame):
        try:
            parse_produce_response(changed, version)
        except UpstreamProtocolError:
            refused += 1
    assert refused > 100


def test_bytes_after_the_node_endpoints_are_broker_error() -> None:
    written = encode_produce_response(ProduceResponse(1, (), 0, tags=b"\x01\x00\x02\x01\x00"), 10)
    with pytest.raises(UpstreamProtocolError, match="1 extra bytes after the node endpoints"):
        parse_produce_response(memoryview(written)[4:], 10)


_V7_START = b"\0\0\0\7\0\0\0\1\xff\xff\xff\xff\xff\xff\0\0\0\0"
_V9_START = b"\0\0\0\x09\0\0\0\1\xff\xff\0\0\xff\xff\0\0\0\0"


@pytest.mark.parametrize(
    ("start", "count"),
    [
        pytest.param(_V7_START, b"\x7f\xff\xff\xff", id="topics"),
        pytest.param(_V7_START, b"\0\0\0\1\0\1t\x7f\xff\xff\xff", id="partitions"),
        pytest.param(_V7_START, b"\xff\xff\xff\xff", id="null-topics"),
        pytest.param(_V7_START, b"\0\0\0\1\0\1t\0\0\0\1\0\0\0\0\x7f\xff\xff\xff", id="records"),
        pytest.param(_V9_START, b"\xff\xff\xff\xff\x0f", id="flexible-topics"),
        pytest.param(_V9_START, b"\x02\x02t\xff\xff\xff\xff\x0f", id="flexible-partitions"),
        pytest.param(_V9_START, b"\0", id="flexible-null-topics"),
        pytest.param(_V9_START, b"\x02\x02t\x02\0\0\0\0\xff\xff\xff\xff\x0f", id="flexible-records"),
        pytest.param(_V9_START, b"\x01\xff\xff\xff\xff\x0f", id="tagged-fields"),
        pytest.param(_V9_START, b"\x01\x01\0\xff\xff\xff\xff\x0f", id="tagged-field-size"),
        pytest.param(_V9_START, b"\x80\x80\x80\x80\x80\x01", id="endless-varint"),
    ],
)
def test_absurd_counts_are_refused_before_anything_is_allocated(start: bytes, count: bytes) -> None:
    frame = memoryview(start + count + b"\0" * 30)
    tracemalloc.start()
    try:
        with pytest.raises(ClientProtocolError, match="malformed"):
            parse_produce_request(frame)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # others may allocate meanwhile
    finally:
        tracemalloc.stop()


def test_more_partitions_than_the_limit_are_refused() -> None:
    empty = PartitionData(0, None)
    topics = (TopicData("a", None, (empty,) * 2), TopicData("b", None, (empty,)))
    request = replace(_without_tags(_request(9)), topics=topics)
    frame = _frame(request)
    assert parse_produce_request(frame, partitions_max=3) == request
    with pytest.raises(LimitError, match="3 topics or partitions, above the limit of 2"):
        parse_produce_request(frame, partitions_max=2)
    # Topics without partitions count: each takes three bytes of a frame and a hundred of memory.
    with pytest.raises(LimitError):
        parse_produce_request(_frame(replace(request, topics=(TopicData("a", None, ()),) * 3)), partitions_max=2)


@pytest.mark.parametrize(
    ("header", "reason"),
    [(b"\0\1\0\7", "API key is 1"), (b"\0\0\0\2", "v2 is not supported"), (b"\0\0\0\x0e", "v14 is not supported")],
)
def test_unknown_produce_version_or_other_api_is_refused(header: bytes, reason: str) -> None:
    frame = memoryview(header + b"\0" * 40)
    for parse in (lambda: parse_produce_request(frame), lambda: peek_produce(frame, 44)):
        with pytest.raises(ClientProtocolError, match=reason):
            parse()


def test_invalid_utf8_name_is_refused_with_that_reason() -> None:
    frame = bytes(_frame(_request(9))).replace("Größe".encode(), b"Gr\xff\xffe12")
    with pytest.raises(ClientProtocolError, match="not UTF-8"):
        parse_produce_request(memoryview(frame))


# --- peeking ----------------------------------------------------------------------------------------------------------


@each_version
def test_peek_needs_few_bytes_and_never_changes_afterwards(version: int) -> None:
    frame = _frame(_request(version))
    first, first_id = ("", TOPIC_ID) if version >= 13 else ("flights", None)
    expected = ProducePeek(-1, "a-transaction", 2, first, first_id=first_id)
    peeks = [peek_produce(frame[:length], len(frame)) for length in range(len(frame) + 1)]
    known_at = next(length for length, peek in enumerate(peeks) if peek is not None)
    assert peeks[known_at:] == [expected] * (len(frame) + 1 - known_at)
    assert known_at < len(frame) - 150, "the records were not needed"


def test_peek_ignores_bytes_of_the_next_frame() -> None:
    """The frame says that it ends in the middle of a topic name; what the next one starts with could complete it."""
    stream = memoryview(_V7_START + b"\0\0\0\1\0\x07fligh" + b"ts")
    with pytest.raises(ClientProtocolError, match="of 29 bytes"):
        peek_produce(stream, 29)
    assert peek_produce(stream, 100) == ProducePeek(-1, None, 1, "flights")


def _usual(version: int) -> ProduceRequest:
    request = _without_tags(_request(version))
    return replace(request, transactional_id=None, topics=request.topics[:1])


@some
@given(requests().map(_without_tags), st.integers(0, 10))
@example(_usual(9), 5)
@example(_usual(13), 5)
def test_fast_peek_equals_peek_field_by_field(request: ProduceRequest, more: int) -> None:
    frame = _frame(request)

    def peeked(length: int, frame_bytes: int) -> object:
        try:
            peek = peek_produce(frame[:length], frame_bytes)
            return peek and (peek, peek.end)
        except ClientProtocolError as error:
            return str(error)

    # The frame may say that it is shorter than what came, or longer.
    sizes = [(length, size) for length in range(len(frame) + 1) for size in {length, len(frame), len(frame) + more}]
    with pytest.MonkeyPatch.context() as patch:
        in_one_step = [peeked(*each) for each in sizes]
        patch.setattr(product, "_peek_usual", lambda *_, **__: None)
        assert [peeked(*each) for each in sizes] == in_one_step


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(b"\0\0\0\7\0\0\0\1\x7f\xff", id="client-id"),
        pytest.param(b"\0\0\0\7\0\0\0\1\xff\xff\x7f\xff", id="transactional-id"),
        pytest.param(_V7_START + b"\x7f\xff\xff\xff", id="topics"),
        pytest.param(_V7_START + b"\0\0\0\1\x7f\xff", id="topic-name"),
        pytest.param(b"\0\0\0\x09\0\0\0\1\xff\xff\x01\x00\xff\xff\x7f", id="tagged-fields"),
        pytest.param(b"\0\0\0\x09\0\0\0\1\xff\xff\xff\x03", id="tagged-field-count"),
        pytest.param(_V9_START + b"\xff\xff\xff\x07", id="flexible-topics"),
    ],
)
def test_peek_refuses_at_once_what_exceeds_the_frame(prefix: bytes) -> None:
    """Waiting would buffer bytes although the result is known."""
    with pytest.raises(ClientProtocolError, match="malformed Produce request of 500 bytes"):
        peek_produce(memoryview(prefix), 500)
