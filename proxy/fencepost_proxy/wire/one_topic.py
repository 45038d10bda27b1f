"""Fast path for Produce requests about one topic, with one record batch for each partition: the usual form.

It reads the client's request (after a prefix that is known from the previous request), encodes the request to Kafka by
topic id, and reads and encodes the responses. `produce.py` handles all other forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Final

_INT32: Final = Struct(">i")
_ACKS_TIMEOUT: Final = Struct(">hi")
_REQUEST_HEAD: Final = Struct(">ihhi")
#: One topic by id; number of partitions.
_ONE_BY_ID: Final = Struct(">B16sB")
#: Array lengths are one byte: 1 is empty.
_COUNTS: Final = range(2, 0x80)
#: Correlation id; tags and topics; topic id; number of partitions.
_ANSWER_BY_ID: Final = Struct(">i2s16sB")
#: Index, error, base offset, append time, log start; record errors, message and tags.
_PARTITION: Final = Struct(">ihqqq3s")
#: Tags of the topic; throttle time, tags.
_ANSWER_END: Final = Struct(">BiB")
_ONE_TOPIC: Final = b"\0\2"
#: No record errors, no message, no tags.
_NO_MORE: Final = b"\1\0\0"
#: A response by topic name: the part before the name.
_ANSWER_HEAD: Final = Struct(">iiBB")
_BY_ID_VERSION: Final = 13
#: Fewer bytes are faster to copy than to write as a separate chunk.
_JOINED_BYTES_MAX: Final = 8192
ACKS_ALL: Final = -1
#: Of an encoded request: where the rest of the first batch is, and how many pieces there are for each batch.
_FIRST_REST: Final = 7
_PIECES: Final = 5


def read_one_topic(frame: memoryview, at: int) -> list[tuple[int, int, int]] | None:
    """Each partition, with start and end of its record batch, in a flexible Produce request about one topic.

    None if the request has another form, or names a partition twice. `frame` excludes its length. `at` is the end of
    the topic's name.
    """
    batches = []
    try:
        length = frame[at]
        if length not in _COUNTS:
            return None
        at += 1
        for _ in range(length - 1):
            (partition,) = _INT32.unpack_from(frame, at)
            at += 4
            bit_offset = size = 0
            while True:
                byte = frame[at]
                at += 1
                size |= (byte & 0x7F) << bit_offset
                if byte < 0x80:
                    break
                bit_offset += 7
                if bit_offset > 28:
                    return None
            end = at + size - 1
            if size < 2 or frame[end]:
                return None
            batches.append((partition, at, end))
            at = end + 1
        if len(frame) != at + 2 or frame[at] or frame[at + 1]:
            return None
    except (IndexError, StructError):
        return None
    if len(batches) > 1 and len({partition for partition, _, _ in batches}) < len(batches):
        return None
    return batches


def encode_one_topic(
    *,
    correlation_id: int,
    before_acks: bytes,
    timeout_ms: int,
    topic_id: bytes,
    batches: Sequence[tuple[int, bytes, memoryview]],
) -> list[bytes | memoryview]:
    """Chunks of a Produce v13 request with acks=all. `batches`: partition, header and rest of the record batch.

    `before_acks`: encoded client id, tags and transactional id of a flexible request.
    """
    pieces: list[bytes | memoryview] = [
        before_acks,
        _ACKS_TIMEOUT.pack(ACKS_ALL, timeout_ms),
        _ONE_BY_ID.pack(2, topic_id, len(batches) + 1),
    ]
    for partition, header, rest in batches:
        left = len(header) + len(rest) + 1
        varint = bytearray()
        while left >= 0x80:
            varint.append(left & 0x7F | 0x80)
            left >>= 7
        varint.append(left)
        pieces += [_INT32.pack(partition), bytes(varint), header, rest, b"\0"]
    pieces.append(b"\0\0")
    length = sum(map(len, pieces))
    pieces.insert(0, _REQUEST_HEAD.pack(8 + length, 0, _BY_ID_VERSION, correlation_id))
    if length < _JOINED_BYTES_MAX:
        return [b"".join(pieces)]
    chunks: list[bytes | memoryview] = []
    start = 0
    for index in range(_FIRST_REST, len(pieces), _PIECES):
        if len(pieces[index]) >= _JOINED_BYTES_MAX:
            chunks += (b"".join(pieces[start:index]), pieces[index])
            start = index + 1
    return [*chunks, b"".join(pieces[start:])]


def read_one_topic_answer(
    frame: memoryview, topic_id: bytes, count: int
) -> tuple[int, list[tuple[int, int, int, int, int, bytes]]] | None:
    """Throttle time of a v13 response; partition, error code, base offset, append time and log start of each partition.

    None if the response has another form, further fields, another topic or another number of partitions.
    """
    end = len(frame) - _ANSWER_END.size
    if end != _ANSWER_BY_ID.size + count * _PARTITION.size:
        return None
    _, topics, about, length = _ANSWER_BY_ID.unpack_from(frame)
    topic_tags, throttle, tags = _ANSWER_END.unpack_from(frame, end)
    if topics != _ONE_TOPIC or about != topic_id or length != count + 1 or topic_tags or tags:
        return None
    partitions = list(_PARTITION.iter_unpack(frame[_ANSWER_BY_ID.size : end]))
    for each in partitions:
        if each[5] != _NO_MORE:
            return None
    return throttle, partitions


def encode_one_topic_answer(
    *, correlation_id: int, topic: bytes, partitions: Sequence[tuple[int, int, int, int]], throttle: int
) -> bytes:
    """A success response of Produce v9 to v13. `topic` is the name or id as encoded in the request.

    `partitions`: partition, base offset, append time and log start of each.
    """
    results = b"".join(
        [_PARTITION.pack(partition, 0, base, time, start, _NO_MORE) for partition, base, time, start in partitions]
    )
    rest = _ANSWER_END.pack(0, throttle, 0)
    head = _ANSWER_HEAD.pack(7 + len(topic) + len(results) + len(rest), correlation_id, 0, 2)
    return b"".join((head, topic, bytes((len(partitions) + 1,)), results, rest))
