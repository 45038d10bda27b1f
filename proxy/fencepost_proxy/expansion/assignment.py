"""A member's assignment by its group's leader, from SyncGroup: the bytes of a ConsumerProtocolAssignment.

Versions 0 to 3 are alike: version, topics with partitions, user data, and fields of later versions. Unknown bytes are
kept unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from fencepost_proxy.wire.primitives import INT32, MALFORMED, CutOff, Malformed, reason_of

_HEAD: Final = struct.Struct(">hi")
_INT16: Final = struct.Struct(">h")
_ITEMS_MAX: Final = 50_000


class MalformedAssignment(Exception):
    """Not the assignment of ordinary consumers."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`rest`: the bytes after the topics: user data with its length, and fields of newer versions."""

    version: int
    topics: tuple[tuple[str, tuple[int, ...]], ...]
    rest: bytes

    @property
    def has_task_data(self) -> bool:
        """User data other than partitions, such as Kafka Streams' tasks. The consumers' own assignors put none there.

        [Observed: null from Java's range, sticky and cooperative-sticky, empty from kafka-python and aiokafka.
        librdkafka copies its sticky assignor's subscription data: the member's previous partitions, not a task.]
        """
        if len(self.rest) < INT32.size:
            return False
        (length,) = INT32.unpack_from(self.rest)
        return length > 0 and not _is_sticky(self.rest[INT32.size : INT32.size + length])

    def keeping(self, keep: Callable[[str, int], bool]) -> Assignment:
        """Only the partitions that `keep` accepts; topics without partitions are removed."""
        left = ((topic, tuple(p for p in partitions if keep(topic, p))) for topic, partitions in self.topics)
        return replace(self, topics=tuple((topic, partitions) for topic, partitions in left if partitions))

    def encode(self) -> bytes:
        out = bytearray(_HEAD.pack(self.version, len(self.topics)))
        for topic, partitions in self.topics:
            name = topic.encode()
            out += _INT16.pack(len(name)) + name + struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
        return bytes(out) + self.rest


def decode_assignment(data: bytes) -> Assignment:
    """Raises MalformedAssignment, also for empty bytes, which a member without partitions may have."""
    try:
        (version,) = _INT16.unpack_from(data)
        topics, at = _topics(data, _INT16.size)
    except MALFORMED as error:
        raise MalformedAssignment(reason_of(error)) from error
    return Assignment(version, topics, data[at:])


def _topics(data: bytes, at: int) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], int]:
    (count,) = INT32.unpack_from(data, at)
    at += INT32.size
    _bounded(count)
    topics = []
    for _ in range(count):
        (length,) = _INT16.unpack_from(data, at)
        at += _INT16.size
        if length < 0 or at + length > len(data):
            raise CutOff(at + length)
        name = data[at : at + length].decode()
        at += length
        (partitions,) = INT32.unpack_from(data, at)
        at += INT32.size
        _bounded(partitions)
        topics.append((name, struct.unpack_from(f">{partitions}i", data, at)))
        at += partitions * INT32.size
    return tuple(topics), at


def _is_sticky(user_data: bytes) -> bool:
    """Whether it is a StickyAssignorUserData: topics with partitions, and a generation from v1 on."""
    try:
        topics, at = _topics(user_data, 0)
    except MALFORMED:
        return False
    return all(name for name, _ in topics) and len(user_data) - at in (0, INT32.size)


def _bounded(count: int) -> None:
    if not 0 <= count <= _ITEMS_MAX:
        raise Malformed(f"an array of {count}")
