"""What a group's leader assigned to one member, as SyncGroup carries it: the bytes of a ConsumerProtocolAssignment.

Versions 0 to 3 look alike: version, topics with their partitions, then user data, and whatever a later version may put
behind that. What is not understood is kept as it is.
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
    """Not what consumers of the ordinary kind assign to each other."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`rest` – what follows the topics: user data with its length, and what newer versions have."""

    version: int
    topics: tuple[tuple[str, tuple[int, ...]], ...]
    rest: bytes

    @property
    def has_task_data(self) -> bool:
        """Something beside partitions: Kafka Streams' tasks, say. The consumers' own assignors put nothing there.

        [Seen: null from Java's range, sticky and cooperative-sticky, empty from kafka-python and aiokafka. librdkafka
        copies what its sticky assignor puts into a subscription: what the member had, which is no task.]
        """
        if len(self.rest) < INT32.size:
            return False
        (length,) = INT32.unpack_from(self.rest)
        return length > 0 and not _is_sticky(self.rest[INT32.size : INT32.size + length])

    def keeping(self, keep: Callable[[str, int], bool]) -> Assignment:
        """Only the partitions that `keep` says; a topic that has none left goes too."""
        left = ((topic, tuple(p for p in partitions if keep(topic, p))) for topic, partitions in self.topics)
        return replace(self, topics=tuple((topic, partitions) for topic, partitions in left if partitions))

    def encode(self) -> bytes:
        out = bytearray(_HEAD.pack(self.version, len(self.topics)))
        for topic, partitions in self.topics:
            name = topic.encode()
            out += _INT16.pack(len(name)) + name + struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
        return bytes(out) + self.rest


def decode_assignment(data: bytes) -> Assignment:
    """Raises MalformedAssignment. The bytes of a member that got nothing may be empty: that is malformed, too."""
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
    """Whether it is a StickyAssignorUserData: topics with partitions; from v1 on a generation behind them."""
    try:
        topics, at = _topics(user_data, 0)
    except MALFORMED:
        return False
    return all(name for name, _ in topics) and len(user_data) - at in (0, INT32.size)


def _bounded(count: int) -> None:
    if not 0 <= count <= _ITEMS_MAX:
        raise Malformed(f"an array of {count}")
