"""Produce (API key 0), versions 3 to 13: a hand-written codec for the hot path.

    v3–v8   header v1; strings and arrays with fixed-size lengths
    v5+     responses have log_start_offset
    v8+     responses have record_errors and error_message
    v9+     flexible: header v2, compact lengths, tagged fields at the end of every structure
    v10+    responses have current_leader and node_endpoints, as tagged fields (KIP-951)
    v13     topics are named by id only (KIP-516)

Source: ProduceRequest.json and ProduceResponse.json of Kafka 4.3. Parsed frames exclude their 4-byte length, encoded
frames include it. `tags` is always a raw section of tagged fields including its count, or b"" (see `primitives`).

Values of these classes are never modified. They are not frozen because creating a frozen value takes twice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from struct import Struct
from uuid import UUID

from fencepost_policies.values import value
from fencepost_proxy.errors import ClientProtocolError, LimitError, UpstreamProtocolError
from fencepost_proxy.wire.primitives import (
    INT32,
    INT64,
    MALFORMED,
    NO_TAGS,
    CutOff,
    Malformed,
    join_tags,
    read_array_count,
    read_compact_array_count,
    read_compact_nullable_bytes,
    read_compact_nullable_string,
    read_compact_string,
    read_nullable_bytes,
    read_nullable_string,
    read_string,
    read_tags,
    read_uuid,
    reason_of,
    split_tags,
    write_compact_nullable_string,
    write_nullable_string,
    write_uvarint,
)

API_KEY = 0
VERSION_MIN = 3
VERSION_MAX = 13
FLEXIBLE = 9
BY_TOPIC_ID = 13
#: Response versions from which a field exists.
_LOG_START_OFFSET = 5
_RECORD_ERRORS = 8
_NODE_ENDPOINTS = 10

_HEADER = Struct(">hhi")  # api key, api version, correlation id
_ACKS_TIMEOUT = Struct(">hi")
_RESULT = Struct(">ihqq")  # partition, error code, base offset, log append time
#: Fields after the client id from v9 on: tag count, length of the transactional id, acks, timeout, topic count, length
#: of the first name. In the common case each count and length is one byte.
_USUAL_START = Struct(">BBhiBB")
#: A result with log start offset, then the counts of record errors, message and tags.
_RESULT_FLEXIBLE = Struct(">ihqqqBBB")
_NOTHING_MORE = [1, 0, 0]
_FRAME_BYTES_MAX = 0x7FFFFFFF
_TOPIC_ID_BYTES = 16

#: Header tag, v9+: the request's idempotence level, int8 (KAFKA-5794). The proposal defines a request field. The header
#: precedes the records, so the proxy can read it before it streams them.
LEVEL_TAG = 254
#: Replaces the topic count of a request that must always be parsed.
TO_BE_READ = -1

_CURRENT_LEADER_TAG = 0
#: The same in every response.
NODE_ENDPOINTS_TAG = 0


@value
class ProducePeek:
    """The start of a request, before its first record: enough to decide whether it must be parsed.

    `first_topic` is "" without a topic, and from v13 on: then `first_id` is its id. `end` is the end of its name or id
    in the frame. `topic_count` is `TO_BE_READ` if a tagged field is for the proxy.
    """

    acks: int
    transactional_id: str | None
    topic_count: int
    first_topic: str
    end: int = field(default=0, compare=False)
    first_id: UUID | None = None


@value
class PartitionData:
    """`records` is a view into the frame, valid while the frame's buffer is unchanged."""

    partition: int
    records: memoryview | None
    tags: bytes = b""


@value
class TopicData:
    """`name` is "" from v13 on, `topic_id` None before."""

    name: str
    topic_id: UUID | None
    partitions: tuple[PartitionData, ...]
    tags: bytes = b""


@value
class ProduceRequest:
    """`acks` is -1, 0 or 1 (not checked here). `timeout_ms` limits the broker's wait for replicas."""

    api_version: int
    correlation_id: int
    client_id: str | None
    header_tags: bytes
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: tuple[TopicData, ...]
    tags: bytes = b""

    def part(self, api_version: int, acks: int, topics: Sequence[TopicData]) -> ProduceRequest:
        """The same for these topics. (`dataclasses.replace` takes ten times as long.)"""
        names = self.client_id, self.header_tags, self.transactional_id
        return ProduceRequest(api_version, self.correlation_id, *names, acks, self.timeout_ms, tuple(topics), self.tags)


@value
class RecordError:
    """`batch_index` is the index of a record in its batch (the name is Kafka's)."""

    batch_index: int
    message: str | None
    tags: bytes = b""


@value
class PartitionResult:
    """`tags` contains `current_leader` (tag 0, v10+) unchanged, and unknown fields."""

    partition: int
    error_code: int
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    record_errors: tuple[RecordError, ...] = ()
    error_message: str | None = None
    tags: bytes = b""


@value
class TopicResult:
    """`name` is "" from v13 on, `topic_id` None before."""

    name: str
    topic_id: UUID | None
    partitions: tuple[PartitionResult, ...]
    tags: bytes = b""


@value
class NodeEndpoint:
    """A broker's address, to be rewritten for clients."""

    node_id: int
    host: str
    port: int
    rack: str | None
    tags: bytes = b""


@value
class ProduceResponse:
    """`tags` contains the tagged fields except `node_endpoints` (v10+), which is a separate field."""

    correlation_id: int
    topics: tuple[TopicResult, ...]
    throttle_time_ms: int
    node_endpoints: tuple[NodeEndpoint, ...] = ()
    tags: bytes = b""
    header_tags: bytes = b""


# --- requests ---------------------------------------------------------------------------------------------------------


def _check_header(api_key: int, api_version: int) -> None:
    if api_key != API_KEY:
        raise ClientProtocolError(f"not a Produce request: its API key is {api_key}")
    if not VERSION_MIN <= api_version <= VERSION_MAX:
        raise ClientProtocolError(f"Produce v{api_version} is not supported (v{VERSION_MIN} to v{VERSION_MAX} are)")


def peek_produce(prefix: memoryview, frame_bytes: int) -> ProducePeek | None:
    """Reads the start of a Produce request of `frame_bytes` bytes; `prefix` contains the bytes received so far.

    Returns None if more bytes are needed, but never for the whole frame. A caller that buffers less must set its own
    bound: tagged fields of any length may precede the first topic. Raises `ClientProtocolError` if the frame is
    malformed.
    """
    if len(prefix) > frame_bytes:
        prefix = prefix[:frame_bytes]
    first_id = None
    try:
        api_key, api_version, _ = _HEADER.unpack_from(prefix)
        if api_key != API_KEY or not VERSION_MIN <= api_version <= VERSION_MAX:
            _check_header(api_key, api_version)
        _, at = read_nullable_string(prefix, 8)
        if api_version >= FLEXIBLE:
            by_id = api_version >= BY_TOPIC_ID
            usual = _peek_usual(prefix, at, frame_bytes, by_id=by_id)
            if usual is not None:
                return usual
            tags, at = read_tags(prefix, at)
            transactional_id, at = read_compact_nullable_string(prefix, at)
            acks, _ = _ACKS_TIMEOUT.unpack_from(prefix, at)
            count, at = read_compact_array_count(prefix, at + 6, _TOPIC_BYTES_MIN[by_id], bytes_total=frame_bytes)
            first = ""
            if count and by_id:
                first_id, at = read_uuid(prefix, at)
            elif count:
                first, at = read_compact_string(prefix, at)
            if tags and any(tag == LEVEL_TAG for tag, _ in split_tags(tags)):
                count = TO_BE_READ
        else:
            transactional_id, at = read_nullable_string(prefix, at)
            acks, _ = _ACKS_TIMEOUT.unpack_from(prefix, at)
            count, at = read_array_count(prefix, at + 6, 6, bytes_total=frame_bytes)
            first, at = read_string(prefix, at) if count else ("", at)
    except CutOff as cut:
        if cut.needed > frame_bytes:
            raise ClientProtocolError(f"malformed Produce request of {frame_bytes} bytes: {cut}") from cut
        return None
    except MALFORMED as error:
        if isinstance(error, ValueError) or len(prefix) == frame_bytes:
            reason = reason_of(error)
            raise ClientProtocolError(f"malformed Produce request of {frame_bytes} bytes: {reason}") from error
        return None
    return ProducePeek(acks, transactional_id, count, first, at, first_id)


def _peek_usual(prefix: memoryview, at: int, frame_bytes: int, *, by_id: bool) -> ProducePeek | None:
    """Reads the fields after the client id in one step; None if they have an uncommon form."""
    topics_at = at + _USUAL_START.size - 1
    if len(prefix) <= topics_at:
        return None
    tag_count, id_length, acks, _, topic_count, name_length = _USUAL_START.unpack_from(prefix, at)
    if tag_count or id_length or topic_count != 2 or frame_bytes - topics_at < _TOPIC_BYTES_MIN[by_id]:
        return None
    if by_id:
        if topics_at + _TOPIC_ID_BYTES > len(prefix):
            return None
        topic_id, end = read_uuid(prefix, topics_at)
        return ProducePeek(acks, None, 1, "", end, topic_id)
    end = topics_at + name_length
    if name_length < 2 or name_length > 0x7F or end > len(prefix):
        return None
    return ProducePeek(acks, None, 1, str(prefix[topics_at + 1 : end], "utf-8"), end)


#: Minimum bytes of a topic in a flexible request (name, partition count, tags): by name, by topic id.
_TOPIC_BYTES_MIN = (3, 18)


def parse_produce_request(frame: memoryview, *, partitions_max: int = 100_000) -> ProduceRequest:
    """Parses a whole request, header included. Records are views into `frame`.

    Raises `LimitError` above `partitions_max` topics or partitions, `ClientProtocolError` for a malformed request or
    extra bytes.
    """
    try:
        api_key, api_version, correlation_id = _HEADER.unpack_from(frame)
        _check_header(api_key, api_version)
        client_id, at = read_nullable_string(frame, 8)
        if api_version >= FLEXIBLE:
            header_tags, at = read_tags(frame, at)
            transactional_id, at = read_compact_nullable_string(frame, at)
            acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, at)
            topics, at = _read_topics_flexible(frame, at + 6, api_version >= BY_TOPIC_ID, partitions_max)
            tags, at = read_tags(frame, at)
        else:
            header_tags = tags = b""
            transactional_id, at = read_nullable_string(frame, at)
            acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, at)
            topics, at = _read_topics(frame, at + 6, partitions_max)
    except MALFORMED as error:
        reason = reason_of(error)
        raise ClientProtocolError(f"malformed Produce request of {len(frame)} bytes: {reason}") from error
    if at != len(frame):
        raise ClientProtocolError(f"malformed Produce request: {len(frame) - at} extra bytes at the end")
    return ProduceRequest(
        api_version, correlation_id, client_id, header_tags, transactional_id, acks, timeout_ms, topics, tags
    )


def _too_many(count: int, partitions_max: int) -> LimitError:
    return LimitError(f"Produce request has {count} topics or partitions, above the limit of {partitions_max}")


def _read_topics(frame: memoryview, at: int, partitions_max: int) -> tuple[tuple[TopicData, ...], int]:
    topic_count, at = read_array_count(frame, at, 6)
    if topic_count > partitions_max:
        raise _too_many(topic_count, partitions_max)
    total = 0
    topics = []
    for _ in range(topic_count):
        name, at = read_string(frame, at)
        count, at = read_array_count(frame, at, 8)
        total += count
        if total > partitions_max:
            raise _too_many(total, partitions_max)
        partitions = []
        for _ in range(count):
            (partition,) = INT32.unpack_from(frame, at)
            records, at = read_nullable_bytes(frame, at + 4)
            partitions.append(PartitionData(partition, records, b""))
        topics.append(TopicData(name, None, tuple(partitions), b""))
    return tuple(topics), at


def _read_topics_flexible(
    frame: memoryview, at: int, by_id: bool, partitions_max: int
) -> tuple[tuple[TopicData, ...], int]:
    topic_count, at = read_compact_array_count(frame, at, _TOPIC_BYTES_MIN[by_id])
    if topic_count > partitions_max:
        raise _too_many(topic_count, partitions_max)
    total = 0
    topics = []
    name, topic_id = "", None
    for _ in range(topic_count):
        if by_id:
            topic_id, at = read_uuid(frame, at)
        else:
            name, at = read_compact_string(frame, at)
        count, at = read_compact_array_count(frame, at, 6)
        total += count
        if total > partitions_max:
            raise _too_many(total, partitions_max)
        partitions = []
        for _ in range(count):
            (partition,) = INT32.unpack_from(frame, at)
            records, at = read_compact_nullable_bytes(frame, at + 4)
            if frame[at] == 0:
                at += 1
                partitions.append(PartitionData(partition, records))
            else:
                tags, at = read_tags(frame, at)
                partitions.append(PartitionData(partition, records, tags))
        tags, at = read_tags(frame, at)
        topics.append(TopicData(name, topic_id, tuple(partitions), tags))
    return tuple(topics), at


def _topic_id(topic: TopicData | TopicResult) -> bytes:
    if topic.topic_id is None:
        raise ValueError(f"topic {topic.name!r} has no id, which Produce v{BY_TOPIC_ID} needs")
    return topic.topic_id.bytes


def encode_produce_request(request: ProduceRequest) -> list[bytes | memoryview]:
    """Chunks to write; the first starts with the frame's length. Records are not copied.

    Fields that `api_version` lacks are omitted: all tags below v9, topic names from v13 on. Raises `ValueError` for v13
    if a topic has no id.
    """
    flexible = request.api_version >= FLEXIBLE
    by_id = request.api_version >= BY_TOPIC_ID
    chunks: list[bytes | memoryview] = []
    out = bytearray(4)
    out += _HEADER.pack(API_KEY, request.api_version, request.correlation_id)
    write_nullable_string(out, request.client_id)
    frame_bytes = 0
    if flexible:
        out += request.header_tags or NO_TAGS
        write_compact_nullable_string(out, request.transactional_id)
        out += _ACKS_TIMEOUT.pack(request.acks, request.timeout_ms)
        write_uvarint(out, len(request.topics) + 1)
    else:
        write_nullable_string(out, request.transactional_id)
        out += _ACKS_TIMEOUT.pack(request.acks, request.timeout_ms)
        out += INT32.pack(len(request.topics))
    for topic in request.topics:
        if by_id:
            out += _topic_id(topic)
        elif flexible:
            write_compact_nullable_string(out, topic.name)
        else:
            write_nullable_string(out, topic.name)
        if flexible:
            write_uvarint(out, len(topic.partitions) + 1)
        else:
            out += INT32.pack(len(topic.partitions))
        for data in topic.partitions:
            records = data.records
            out += INT32.pack(data.partition)
            if flexible:
                write_uvarint(out, 0 if records is None else len(records) + 1)
            else:
                out += INT32.pack(-1 if records is None else len(records))
            if records:
                chunks.append(bytes(out))
                chunks.append(records)
                frame_bytes += len(out) + len(records)
                out = bytearray()
            if flexible:
                out += data.tags or NO_TAGS
        if flexible:
            out += topic.tags or NO_TAGS
    if flexible:
        out += request.tags or NO_TAGS
    if out:
        chunks.append(bytes(out))
        frame_bytes += len(out)
    frame_bytes -= 4
    if frame_bytes > _FRAME_BYTES_MAX:
        raise ValueError(f"Produce request of {frame_bytes} bytes does not fit a frame")
    first = chunks[0]
    chunks[0] = INT32.pack(frame_bytes) + first[4:]
    return chunks


# --- responses --------------------------------------------------------------------------------------------------------


def parse_produce_response(frame: memoryview, api_version: int) -> ProduceResponse:
    """Parses a whole response, header included. Raises `UpstreamProtocolError` if malformed or for extra bytes."""
    try:
        response, at = (
            _read_response_flexible(frame, api_version)
            if api_version >= FLEXIBLE
            else _read_response(frame, api_version)
        )
    except MALFORMED as error:
        reason = reason_of(error)
        raise UpstreamProtocolError(
            f"malformed Produce v{api_version} response of {len(frame)} bytes: {reason}"
        ) from error
    if at != len(frame):
        raise UpstreamProtocolError(
            f"malformed Produce v{api_version} response: {len(frame) - at} extra bytes at the end"
        )
    return response


def _read_response(frame: memoryview, api_version: int) -> tuple[ProduceResponse, int]:
    (correlation_id,) = INT32.unpack_from(frame)
    topic_count, at = read_array_count(frame, 4, 6)
    topics = []
    for _ in range(topic_count):
        name, at = read_string(frame, at)
        count, at = read_array_count(frame, at, 22)
        partitions = []
        for _ in range(count):
            partition, error_code, base_offset, log_append_time_ms = _RESULT.unpack_from(frame, at)
            at += 22
            log_start_offset = -1
            errors: tuple[RecordError, ...] = ()
            message = None
            if api_version >= _LOG_START_OFFSET:
                (log_start_offset,) = INT64.unpack_from(frame, at)
                at += 8
            if api_version >= _RECORD_ERRORS:
                error_count, at = read_array_count(frame, at, 6)
                if error_count:
                    errors, at = _read_record_errors(frame, at, error_count, read_nullable_string, flexible=False)
                message, at = read_nullable_string(frame, at)
            partitions.append(
                PartitionResult(
                    partition, error_code, base_offset, log_append_time_ms, log_start_offset, errors, message
                )
            )
        topics.append(TopicResult(name, None, tuple(partitions)))
    (throttle_time_ms,) = INT32.unpack_from(frame, at)
    return ProduceResponse(correlation_id, tuple(topics), throttle_time_ms), at + 4


def _read_response_flexible(frame: memoryview, api_version: int) -> tuple[ProduceResponse, int]:
    (correlation_id,) = INT32.unpack_from(frame)
    header_tags, at = read_tags(frame, 4)
    by_id = api_version >= BY_TOPIC_ID
    topic_count, at = read_compact_array_count(frame, at, _TOPIC_BYTES_MIN[by_id])
    topics = []
    name, topic_id = "", None
    for _ in range(topic_count):
        if by_id:
            topic_id, at = read_uuid(frame, at)
        else:
            name, at = read_compact_string(frame, at)
        count, at = read_compact_array_count(frame, at, 33)
        partitions = []
        for _ in range(count):
            (
                partition,
                error_code,
                base_offset,
                log_append_time_ms,
                log_start_offset,
                *rest,
            ) = _RESULT_FLEXIBLE.unpack_from(frame, at)
            if rest == _NOTHING_MORE:
                at += 33
                partitions.append(
                    PartitionResult(partition, error_code, base_offset, log_append_time_ms, log_start_offset)
                )
                continue
            error_count, at = read_compact_array_count(frame, at + 30, 6)
            errors: tuple[RecordError, ...] = ()
            if error_count:
                errors, at = _read_record_errors(frame, at, error_count, read_compact_nullable_string, flexible=True)
            message, at = read_compact_nullable_string(frame, at)
            tags, at = read_tags(frame, at)
            partitions.append(
                PartitionResult(
                    partition, error_code, base_offset, log_append_time_ms, log_start_offset, errors, message, tags
                )
            )
        tags, at = read_tags(frame, at)
        topics.append(TopicResult(name, topic_id, tuple(partitions), tags))
    (throttle_time_ms,) = INT32.unpack_from(frame, at)
    tags, at = read_tags(frame, at + 4)
    endpoints: tuple[NodeEndpoint, ...] = ()
    if tags and api_version >= _NODE_ENDPOINTS:
        endpoints, tags = _take_node_endpoints(tags)
    return ProduceResponse(correlation_id, tuple(topics), throttle_time_ms, endpoints, tags, header_tags), at


def _read_record_errors(
    frame: memoryview,
    at: int,
    count: int,
    read_message: Callable[[memoryview, int], tuple[str | None, int]],
    *,
    flexible: bool,
) -> tuple[tuple[RecordError, ...], int]:
    errors = []
    tags = b""
    for _ in range(count):
        (index,) = INT32.unpack_from(frame, at)
        message, at = read_message(frame, at + 4)
        if flexible:
            tags, at = read_tags(frame, at)
        errors.append(RecordError(index, message, tags))
    return tuple(errors), at


def _take_node_endpoints(section: bytes) -> tuple[tuple[NodeEndpoint, ...], bytes]:
    """Splits a response's tagged fields into node endpoints and the section of other fields."""
    endpoints: tuple[NodeEndpoint, ...] = ()
    others = []
    for tag, contents in split_tags(section):
        if tag != NODE_ENDPOINTS_TAG:
            others.append((tag, contents))
            continue
        endpoints, at = read_node_endpoints(contents, 0)
        if at != len(contents):
            raise Malformed(f"{len(contents) - at} extra bytes after the node endpoints")
    return endpoints, join_tags(others)


def read_node_endpoints(data: bytes, at: int) -> tuple[tuple[NodeEndpoint, ...], int]:
    endpoints = []
    count, at = read_compact_array_count(data, at, 11)
    for _ in range(count):
        (node_id,) = INT32.unpack_from(data, at)
        host, at = read_compact_string(data, at + 4)
        (port,) = INT32.unpack_from(data, at)
        rack, at = read_compact_nullable_string(data, at + 4)
        tags, at = read_tags(data, at)
        endpoints.append(NodeEndpoint(node_id, host, port, rack, tags))
    return tuple(endpoints), at


def encode_produce_response(response: ProduceResponse, api_version: int) -> bytes:
    """Encodes a frame with its length, for any version: fields that `api_version` lacks are omitted.

    Raises `ValueError` from v13 on if a topic has no id.
    """
    flexible = api_version >= FLEXIBLE
    by_id = api_version >= BY_TOPIC_ID
    write_text = write_compact_nullable_string if flexible else write_nullable_string
    out = bytearray(4)
    out += INT32.pack(response.correlation_id)
    if flexible:
        out += response.header_tags or NO_TAGS
    _write_count(out, len(response.topics), flexible)
    for topic in response.topics:
        if by_id:
            out += _topic_id(topic)
        else:
            write_text(out, topic.name)
        _write_count(out, len(topic.partitions), flexible)
        for result in topic.partitions:
            out += _RESULT.pack(result.partition, result.error_code, result.base_offset, result.log_append_time_ms)
            if api_version >= _LOG_START_OFFSET:
                out += INT64.pack(result.log_start_offset)
            if api_version >= _RECORD_ERRORS:
                _write_count(out, len(result.record_errors), flexible)
                for error in result.record_errors:
                    out += INT32.pack(error.batch_index)
                    write_text(out, error.message)
                    if flexible:
                        out += error.tags or NO_TAGS
                write_text(out, result.error_message)
            if flexible:
                tags = result.tags
                if tags and api_version < _NODE_ENDPOINTS:
                    tags = join_tags([field for field in split_tags(tags) if field[0] != _CURRENT_LEADER_TAG])
                out += tags or NO_TAGS
        if flexible:
            out += topic.tags or NO_TAGS
    out += INT32.pack(response.throttle_time_ms)
    if flexible:
        tags = response.tags
        if response.node_endpoints and api_version >= _NODE_ENDPOINTS:
            tags = join_tags([(NODE_ENDPOINTS_TAG, encode_node_endpoints(response.node_endpoints)), *split_tags(tags)])
        out += tags or NO_TAGS
    INT32.pack_into(out, 0, len(out) - 4)
    return bytes(out)


def _write_count(out: bytearray, count: int, flexible: bool) -> None:
    if flexible:
        write_uvarint(out, count + 1)
    else:
        out += INT32.pack(count)


def encode_node_endpoints(endpoints: tuple[NodeEndpoint, ...]) -> bytes:
    out = bytearray()
    write_uvarint(out, len(endpoints) + 1)
    for endpoint in endpoints:
        out += INT32.pack(endpoint.node_id)
        write_compact_nullable_string(out, endpoint.host)
        out += INT32.pack(endpoint.port)
        write_compact_nullable_string(out, endpoint.rack)
        out += endpoint.tags or NO_TAGS
    return bytes(out)
