"""Fast path for Produce requests with one record batch for one partition, the most common form for checked topics.

It reads the client's request (after a prefix that is known from the previous request), encodes the request to Kafka by
topic id, and reads and encodes the responses. `produce.py` handles all other forms.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final

_INT32: Final = Struct(">i")
_ACKS_TIMEOUT: Final = Struct(">hi")
_REQUEST_HEAD: Final = Struct(">ihhi")
#: One topic by id and one partition, without the length of the record batch.
_ONE_BY_ID: Final = Struct(">B16sBi")
#: End of a request: tags of partition, topic and request.
_NO_TAGS: Final = b"\0\0\0"
#: Correlation id, tags and topics, id, partitions; index, error, base offset, append time, log start; record errors,
#: message, tags of partition and topic; throttle time, tags.
_ANSWER_BY_ID: Final = Struct(">i2s16sBihqqq4siB")
_ONE_TOPIC: Final = b"\0\2"
#: No record errors, no message, no tags of partition and topic.
_NO_MORE: Final = b"\1\0\0\0"
#: A response by topic name: the parts before and after the name.
_ANSWER_HEAD: Final = Struct(">iiBB")
_ANSWER_REST: Final = Struct(">BihqqqBBBBiB")
_BY_ID_VERSION: Final = 13
#: Fewer bytes are faster to copy than to write as a separate chunk.
_JOINED_BYTES_MAX: Final = 8192
ACKS_ALL: Final = -1


def read_single(frame: memoryview, at: int) -> tuple[int, int, int] | None:
    """Partition, start and end of the record batch in a flexible Produce request with one batch; else None.

    `frame` excludes its length. `at` is the end of the topic's name.
    """
    try:
        if frame[at] != 2:  # one partition
            return None
        (partition,) = _INT32.unpack_from(frame, at + 1)
        at += 5
        sequence_offset = length = 0
        while True:
            byte = frame[at]
            at += 1
            length |= (byte & 0x7F) << sequence_offset
            if byte < 0x80:
                break
            sequence_offset += 7
            if sequence_offset > 28:
                return None
    except (IndexError, StructError):
        return None
    end = at + length - 1
    if length < 2 or len(frame) != end + len(_NO_TAGS) or frame[end] or frame[end + 1] or frame[end + 2]:
        return None
    return partition, at, end


def encode_single(
    *,
    correlation_id: int,
    before_acks: bytes,
    timeout_ms: int,
    topic_id: bytes,
    partition: int,
    header: bytes,
    rest: memoryview,
) -> list[bytes | memoryview]:
    """Chunks of a Produce v13 request with acks=all for one batch (`header` and `rest`).

    `before_acks`: encoded client id, tags and transactional id of a flexible request.
    """
    length = len(header) + len(rest) + 1
    varint = bytearray()
    left = length
    while left >= 0x80:
        varint.append(left & 0x7F | 0x80)
        left >>= 7
    varint.append(left)
    body = b"".join(
        (
            before_acks,
            _ACKS_TIMEOUT.pack(ACKS_ALL, timeout_ms),
            _ONE_BY_ID.pack(2, topic_id, 2, partition),
            varint,
            header,
        )
    )
    head = _REQUEST_HEAD.pack(8 + len(body) + len(rest) + len(_NO_TAGS), 0, _BY_ID_VERSION, correlation_id)
    if len(rest) < _JOINED_BYTES_MAX:
        return [b"".join((head, body, rest, _NO_TAGS))]
    return [head + body, rest, _NO_TAGS]


def read_single_answer(frame: memoryview, topic_id: bytes) -> tuple[int, int, int, int, int, int] | None:
    """Partition, error code, base offset, append time, log start and throttle time of a v13 response.

    None if the response has another form, further fields or another topic.
    """
    if len(frame) != _ANSWER_BY_ID.size:
        return None
    _, topics, about, count, partition, error, base, time, start, more, throttle, tags = _ANSWER_BY_ID.unpack(frame)
    if topics != _ONE_TOPIC or about != topic_id or count != 2 or more != _NO_MORE or tags:
        return None
    return partition, error, base, time, start, throttle


def encode_single_answer(
    *, correlation_id: int, topic: bytes, partition: int, base_offset: int, append_time: int, start: int, throttle: int
) -> bytes:
    """A success response of Produce v9 to v12. `topic` is the name as encoded in the request, with its length."""
    rest = _ANSWER_REST.pack(2, partition, 0, base_offset, append_time, start, 1, 0, 0, 0, throttle, 0)
    head = _ANSWER_HEAD.pack(6 + len(topic) + len(rest), correlation_id, 0, 2)
    return head + topic + rest
