"""Checks on a few bytes of a frame that avoid parsing it. False means unknown: the caller then parses the frame."""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final

from fencepost_proxy.wire.primitives import Malformed, read_uvarint
from fencepost_proxy.wire.produce import BY_TOPIC_ID, FLEXIBLE

_ONE_BYTE_VARINT_MAX: Final = 0x7F
_TOPIC_ID_BYTES: Final = 16
#: Index, error code, base offset, log append time, log start offset.
_PARTITION_BYTES: Final = 30
_THROTTLE_AND_TAGS_BYTES: Final = 5
_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")
_PARTITION_AND_LENGTH: Final = Struct(">ii")
_BATCH_HEADER_BYTES: Final = 61
_PRODUCER_ID_AT: Final = 43
_FEW_PARTITIONS: Final = 100
#: Tags of the previous partition, index, length of the records, and the batch up to and including its producer id.
PARTITION_HEAD_BYTES: Final = 1 + 4 + 5 + _PRODUCER_ID_AT + 8
#: Errors for malformed bytes, which Kafka refuses too.
UNREADABLE: Final = (IndexError, StructError, Malformed)


def partitions_of(data: memoryview, at: int, *, flexible: bool) -> tuple[int, int]:
    """Partition count and start of the first partition, for a topic of a Produce request whose name ends at `at`.

    Raises `UNREADABLE`.
    """
    if flexible:
        count, at = read_uvarint(data, at)
        return count - 1, at
    return _INT32.unpack_from(data, at)[0], at + 4


def producer_id_of(data: memoryview, at: int, *, flexible: bool) -> tuple[int, int]:
    """Producer id of the batch (-1 for none) and end of the records, for the partition that starts at `at`.

    Raises `UNREADABLE`.
    """
    if flexible:
        length, at = read_uvarint(data, at + 4)
        length -= 1
    else:
        (length,) = _INT32.unpack_from(data, at + 4)
        at += 8
    if length < _BATCH_HEADER_BYTES:
        return -1, at + max(length, 0)
    return _INT64.unpack_from(data, at + _PRODUCER_ID_AT)[0], at + length


def records_of(data: memoryview, at: int, *, flexible: bool) -> tuple[int, int, int]:
    """Partition, and start and end of its records, for the partition that starts at `at`.

    Raises `UNREADABLE`.
    """
    partition, length = _PARTITION_AND_LENGTH.unpack_from(data, at)
    start = at + _PARTITION_AND_LENGTH.size
    if flexible:
        length, start = read_uvarint(data, at + _INT32.size)
        length -= 1
    return partition, start, start + max(length, 0)


def names_producer(records: memoryview | None, producer_ids: frozenset[int]) -> bool:
    """Whether the first batch has one of these producer ids."""
    if records is None or len(records) < _BATCH_HEADER_BYTES:
        return False
    return _INT64.unpack_from(records, _PRODUCER_ID_AT)[0] in producer_ids


def is_free_of(frame: memoryview, at: int, api_version: int, producer_ids: frozenset[int]) -> bool:
    """Whether a Produce request with one topic and few partitions has none of these producer ids.

    `at` is the end of the topic's name. Lengths in the request may lead beyond its end in `frame`; Kafka refuses such a
    request.
    """
    flexible = api_version >= FLEXIBLE
    try:
        if flexible and frame[at] == 2:  # one partition
            at += 5
            while frame[at] > _ONE_BYTE_VARINT_MAX:
                at += 1
            return _INT64.unpack_from(frame, at + 1 + _PRODUCER_ID_AT)[0] not in producer_ids
        count, at = partitions_of(frame, at, flexible=flexible)
        if not 0 < count <= _FEW_PARTITIONS:
            return False
        while True:
            producer_id, at = producer_id_of(frame, at, flexible=flexible)
            if producer_id in producer_ids:
                return False
            count -= 1
            if not count:
                return True
            if flexible:
                if frame[at]:
                    return False
                at += 1
    except UNREADABLE:
        return False


def names_no_broker(frame: memoryview, api_version: int) -> bool:
    """Whether a Produce response certainly has no tagged field, such as `node_endpoints`.

    `frame` is a whole response with its length. Only the common form is recognized.
    """
    if api_version < FLEXIBLE:
        return True
    end = len(frame) - _THROTTLE_AND_TAGS_BYTES
    try:
        if frame[8] or frame[-1]:
            return False
        topic_count = frame[9] - 1
        if not 0 < topic_count < _ONE_BYTE_VARINT_MAX:
            return False
        at = 10
        for _ in range(topic_count):
            name_bytes = _TOPIC_ID_BYTES if api_version >= BY_TOPIC_ID else frame[at]
            if name_bytes > _ONE_BYTE_VARINT_MAX:
                return False
            at += name_bytes
            partition_count = frame[at] - 1
            if partition_count >= _ONE_BYTE_VARINT_MAX:
                return False
            at += 1
            for _ in range(partition_count):
                at += _PARTITION_BYTES
                # Record errors (an empty array, or null), message, tagged fields.
                if frame[at] > 1 or frame[at + 1] or frame[at + 2]:
                    return False
                at += 3
            if frame[at]:
                return False
            at += 1
    except IndexError:
        return False
    return at == end
