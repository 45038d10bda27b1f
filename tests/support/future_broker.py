"""A later Kafka: a real broker with a proxy that adds unknown APIs and versions to ApiVersions responses."""

from __future__ import annotations

import math
import struct

from tests.kit.fault_proxy import Change, FaultProxy

#: API keys that Kafka does not have, and their versions.
NEW_APIS = {95: (0, 0), 96: (0, 3), 1200: (7, 9)}
#: Added to the highest version of each API.
NEWER_BY = 3
_API_VERSIONS = 18
_FLEXIBLE_FROM = 3
_UNSUPPORTED_VERSION = 35
_ENTRY = struct.Struct(">hhh")


class FutureBroker(FaultProxy):
    def __init__(self) -> None:
        super().__init__()
        self.add(Change("response", api_key=_API_VERSIONS, times=math.inf, change=of_the_future))

    @property
    def queried(self) -> set[tuple[int, int]]:
        """API key and version of each request that the broker got."""
        return {struct.unpack_from(">hh", frame, 4) for _, frame in list(self.requests)}


def of_the_future(request: bytes, frame: bytes) -> bytes:
    """The ApiVersions response of a later Kafka."""
    (version,) = struct.unpack_from(">h", request, 6)
    (error_code,) = struct.unpack_from(">h", frame, 8)
    flexible = version >= _FLEXIBLE_FROM and error_code != _UNSUPPORTED_VERSION
    at = 10
    if flexible:
        count, at = _uvarint(frame, at)
        count -= 1
    else:
        (count,) = struct.unpack_from(">i", frame, at)
        at += 4
    reported: dict[int, tuple[int, int]] = {}
    for _ in range(count):
        key, low, high = _ENTRY.unpack_from(frame, at)
        at += _ENTRY.size
        reported[key] = (low, high + NEWER_BY)
        if flexible:
            assert frame[at] == 0, "Kafka's response has unknown fields of an API: add them here"
            at += 1
    reported |= NEW_APIS
    end = b"\0" if flexible else b""
    entries = b"".join(_ENTRY.pack(key, *versions) + end for key, versions in reported.items())
    size = _of_uvarint(len(reported) + 1) if flexible else struct.pack(">i", len(reported))
    rest = frame[4:10] + size + entries + frame[at:]
    return struct.pack(">i", len(rest)) + rest


def _uvarint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and the offset after it."""
    value = sequence_offset = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << sequence_offset
        sequence_offset += 7
        if byte < 0x80:
            return value, at


def _of_uvarint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
