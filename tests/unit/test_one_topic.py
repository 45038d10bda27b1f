"""The usual Produce request and its answer, read and written without a detour: as the general codec, or not at all."""

from __future__ import annotations

import struct
from dataclasses import replace
from uuid import UUID, uuid5

from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.wire.one_topic import (
    encode_one_topic,
    encode_one_topic_answer,
    read_one_topic,
    read_one_topic_answer,
)
from fencepost_proxy.wire.peeks import names_no_broker
from fencepost_proxy.wire.produce import (
    NodeEndpoint,
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    TopicResult,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
    peek_produce,
)

TOPIC_ID = UUID(int=0x1234_5678_9ABC_DEF0_1234_5678_9ABC_DEF0)
OTHER_ID = NAMESPACE = UUID(int=5)

int16s = st.integers(-(2**15), 2**15 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
tags = st.sampled_from([b"", b"", b"", b"\x01\x07\x02ab"])
records = st.one_of(st.none(), st.binary(max_size=40), st.sampled_from([b"x" * 126, b"x" * 127, b"x" * 20_000]))


@st.composite
def requests(draw: st.DrawFn) -> ProduceRequest:
    """By name and flexible; nearly always about one topic."""
    data = st.builds(PartitionData, int32s, records.map(lambda each: each and memoryview(each)), tags)
    count, partitions = st.sampled_from([1, 1, 1, 1, 0, 2]), st.sampled_from([1, 1, 2, 3, 0, 7])
    topics = tuple(
        TopicData(draw(names), None, tuple(draw(data) for _ in range(draw(partitions))), draw(tags))
        for _ in range(max(1, draw(count)))
    )
    return ProduceRequest(
        draw(st.integers(9, 12)),
        draw(int32s),
        draw(st.one_of(st.none(), names)),
        draw(tags),
        draw(st.one_of(st.none(), names)),
        draw(int16s),
        draw(int32s),
        topics,
        draw(tags),
    )


def request_frame(request: ProduceRequest) -> bytearray:
    return bytearray(b"".join(encode_produce_request(request)))[4:]


Batches = list[tuple[int, bytes]]


def batches(frame: bytearray | bytes, name_end: int) -> Batches | None:
    """Partitions and batches as the fast path reads them."""
    read = read_one_topic(memoryview(frame), name_end)
    return None if read is None else [(partition, bytes(frame[start:end])) for partition, start, end in read]


def batches_by_the_parser(frame: bytearray | bytes) -> Batches | None:
    """The same by the general parser: None if it cannot be read, or has another form."""
    try:
        request = parse_produce_request(memoryview(frame))
    except ProtocolError:
        return None
    if len(request.topics) != 1 or request.topics[0].tags or request.tags:
        return None
    found = [(data.partition, bytes(data.records or b"")) for data in request.topics[0].partitions]
    if any(data.tags or not data.records for data in request.topics[0].partitions):
        return None
    return found if found and len(dict(found)) == len(found) else None


class TestRequests:
    @settings(max_examples=400)
    @given(requests())
    def test_request_is_read_like_the_parser(self, request: ProduceRequest) -> None:
        frame = request_frame(request)
        peek = peek_produce(memoryview(frame), len(frame))
        assert peek is not None
        if peek.topic_count == 1:
            assert batches(frame, peek.end) == batches_by_the_parser(frame)

    @settings(max_examples=40, deadline=None)
    @given(requests(), st.integers(1, 255))
    def test_damaged_request_is_read_like_parser_or_rejected(self, request: ProduceRequest, change: int) -> None:
        request = replace(request, topics=request.topics[:1])
        frame = request_frame(request)
        peek = peek_produce(memoryview(frame), len(frame))
        assert peek is not None
        end = peek.end
        for length in range(len(frame)):
            assert batches(frame[:length], end) is None
        assert batches(frame + b"\0", end) is None
        # The middle of a long batch says nothing to either.
        for at in (*range(end, min(len(frame), end + 60)), *range(max(end, len(frame) - 8), len(frame))):
            frame[at] ^= change
            read = batches(frame, end)
            assert read is None or read == batches_by_the_parser(frame)
            frame[at] ^= change

    @settings(max_examples=300)
    @given(
        requests(),
        st.lists(st.sampled_from([1, 61, 126, 127, 200, 8_131, 8_132, 16_383, 20_000]), min_size=1, max_size=4),
        st.integers(0, 61),
    )
    def test_request_is_written_like_the_encoder(
        self, request: ProduceRequest, sizes: list[int], header_bytes: int
    ) -> None:
        """The bytes before acks are the client's; topic id, partitions and batches follow."""
        contents = [(7 + at, (bytes(range(256)) * 80)[:size]) for at, size in enumerate(sizes)]
        data = tuple(PartitionData(partition, memoryview(batch), b"") for partition, batch in contents)
        topic = TopicData("", TOPIC_ID, data, b"")
        request = replace(request, api_version=13, acks=-1, topics=(topic,), tags=b"")
        requested = b"".join(encode_produce_request(request))
        before_acks = requested[
            12 : requested.index(struct.pack(">hi", -1, request.timeout_ms) + b"\x02" + TOPIC_ID.bytes)
        ]
        chunks = encode_one_topic(
            correlation_id=request.correlation_id,
            before_acks=before_acks,
            timeout_ms=request.timeout_ms,
            topic_id=TOPIC_ID.bytes,
            batches=[
                (partition, batch[:header_bytes], memoryview(batch)[header_bytes:]) for partition, batch in contents
            ],
        )
        assert b"".join(chunks) == requested
        assert len(chunks) <= 1 + 2 * sum(size > 8_000 for size in sizes)


@st.composite
def responses(draw: st.DrawFn, *, by_id: bool) -> ProduceResponse:
    count = st.sampled_from([1, 1, 1, 0, 2, 5])
    result = st.builds(
        PartitionResult,
        partition=int32s,
        error_code=st.one_of(st.just(0), int16s),
        base_offset=int64s,
        log_append_time_ms=int64s,
        log_start_offset=int64s,
        error_message=st.one_of(st.none(), names),
    )
    topics = tuple(
        TopicResult(
            "" if by_id else draw(names),
            draw(st.sampled_from([TOPIC_ID, TOPIC_ID, OTHER_ID])) if by_id else None,
            tuple(draw(result) for _ in range(draw(count))),
            draw(tags),
        )
        for _ in range(draw(count))
    )
    endpoints = draw(st.sampled_from([(), (), (NodeEndpoint(1, "b1", 9092, None),)]))
    return ProduceResponse(draw(int32s), topics, draw(int32s), endpoints, b"", draw(tags))


def response_frame(response: ProduceResponse, version: int) -> bytearray:
    return bytearray(encode_produce_response(response, version))


Answers = tuple[int, list[tuple[int, int, int, int, int]]]


def answers_by_the_parser(frame: bytes | bytearray) -> Answers | None:
    try:
        response = parse_produce_response(memoryview(frame), 13)
    except ProtocolError:
        return None
    if response.header_tags or response.tags or response.node_endpoints or len(response.topics) != 1:
        return None
    (topic,) = response.topics
    if topic.topic_id != TOPIC_ID or topic.tags:
        return None
    if any(each.record_errors or each.error_message is not None or each.tags for each in topic.partitions):
        return None
    return response.throttle_time_ms, [
        (each.partition, each.error_code, each.base_offset, each.log_append_time_ms, each.log_start_offset)
        for each in topic.partitions
    ]


def answers(frame: bytes | bytearray | memoryview) -> Answers | None:
    """As the fast path reads them, whatever their number."""
    for count in range(10):
        read = read_one_topic_answer(memoryview(frame), TOPIC_ID.bytes, count)
        if read is not None:
            return read[0], [each[:5] for each in read[1]]
    return None


class TestAnswers:
    @settings(max_examples=400)
    @given(responses(by_id=True))
    def test_response_is_read_like_the_parser(self, response: ProduceResponse) -> None:
        frame = response_frame(response, 13)[4:]
        assert answers(frame) == answers_by_the_parser(frame)

    @settings(max_examples=40, deadline=None)
    @given(responses(by_id=True), st.integers(1, 255))
    def test_damaged_response_is_read_like_parser_or_rejected(self, response: ProduceResponse, change: int) -> None:
        frame = response_frame(response, 13)[4:]
        for length in range(len(frame)):
            assert answers(memoryview(frame)[:length]) is None
        for at in range(len(frame)):
            frame[at] ^= change
            read = answers(frame)
            assert read is None or read == answers_by_the_parser(frame)
            frame[at] ^= change

    @given(
        st.integers(9, 12),
        names,
        st.tuples(int32s, int32s),
        st.lists(st.tuples(int32s, int64s, int64s, int64s), min_size=1, max_size=9),
    )
    def test_response_is_written_like_the_encoder(
        self, version: int, name: str, numbers: tuple[int, int], reported: list[tuple[int, int, int, int]]
    ) -> None:
        correlation_id, throttle = numbers
        results = tuple(PartitionResult(partition, 0, *more) for partition, *more in reported)
        response = ProduceResponse(correlation_id, (TopicResult(name, None, results),), throttle)
        encoded = name.encode()
        made = encode_one_topic_answer(
            correlation_id=correlation_id,
            topic=bytes((len(encoded) + 1,)) + encoded,
            partitions=reported,
            throttle=throttle,
        )
        assert made == response_frame(response, version)


def names_no_brokers(frame: bytearray, version: int) -> bool:
    """By the parser. The client gets an unreadable response unchanged; it probably names no broker."""
    return not parse_produce_response(memoryview(frame)[4:], version).node_endpoints


class TestAnswersThatPass:
    @settings(max_examples=400)
    @given(st.data(), st.integers(3, 13))
    def test_answer_naming_a_broker_is_never_misclassified(self, data: st.DataObject, version: int) -> None:
        response = data.draw(responses(by_id=version >= 13))
        frame = response_frame(response, version)
        if names_no_broker(memoryview(frame), version):
            assert names_no_brokers(frame, version)

    @given(st.lists(st.tuples(names, st.lists(int32s, max_size=5)), min_size=1, max_size=4), st.integers(9, 13), int32s)
    def test_the_usual_answer_is_known(self, topics: list[tuple[str, list[int]]], version: int, throttle: int) -> None:
        results = tuple(
            TopicResult(name, uuid5(NAMESPACE, name), tuple(PartitionResult(each, 0, 5, -1, 0) for each in partitions))
            for name, partitions in topics
        )
        assert names_no_broker(memoryview(response_frame(ProduceResponse(1, results, throttle), version)), version)

    @settings(max_examples=40, deadline=None)
    @given(st.data(), st.integers(10, 13), st.integers(1, 255))
    def test_damaged_answer_is_never_misclassified(self, data: st.DataObject, version: int, change: int) -> None:
        response = data.draw(responses(by_id=version >= 13))
        frame = response_frame(response, version)
        for length in range(9, len(frame)):
            self._is_safe(frame[:length], version)
        for at in range(8, len(frame)):
            frame[at] ^= change
            self._is_safe(frame, version)
            frame[at] ^= change

    @staticmethod
    def _is_safe(frame: bytearray, version: int) -> None:
        if not names_no_broker(memoryview(frame), version):
            return
        try:
            assert names_no_brokers(frame, version)
        except ProtocolError:
            return  # names that are no text, say: nothing reads an address out of it
