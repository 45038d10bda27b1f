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
_ITEMS_MAX: Final = 1_000_000


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

        [Seen: null from Java's range, sticky and cooperative-sticky, empty from librdkafka, kafka-python and aiokafka.]
        """
        return len(self.rest) >= INT32.size and INT32.unpack_from(self.rest)[0] > 0

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
        version, count = _HEAD.unpack_from(data)
        at = _HEAD.size
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
    except (*MALFORMED, UnicodeDecodeError) as error:
        raise MalformedAssignment(reason_of(error)) from error
    return Assignment(version, tuple(topics), data[at:])


def _bounded(count: int) -> None:
    if not 0 <= count <= _ITEMS_MAX:
        raise Malformed(f"an array of {count}")
