"""A Kafka of the future: what a real broker tells of its APIs is passed on with APIs and versions that nobody knows.

Stands between the proxy and the broker. Whatever is asked of the broker goes by, and is remembered.
"""

from __future__ import annotations

import socket
import struct

from tests.support import pipe
from tests.support.pipe import Pipe

#: API keys that no Kafka has, and the versions told of them.
NEW_APIS = {95: (0, 0), 96: (0, 3), 1200: (7, 9)}
#: By so much each version that the broker tells is raised.
NEWER_BY = 3
_API_VERSIONS = 18
_FLEXIBLE_FROM = 3
_UNSUPPORTED_VERSION = 35
_ENTRY = struct.Struct(">hhh")


class FutureBroker(Pipe):
    """`asked` – API key and version of each request that the broker got."""

    def __init__(self) -> None:
        super().__init__()
        self.queried: set[tuple[int, int]] = set()

    def _wire(self, near: socket.socket, far: socket.socket) -> _FutureWire:
        return _FutureWire(near, far, self)


class _FutureWire(pipe._FrameWire):
    def __init__(self, near: socket.socket, far: socket.socket, future: FutureBroker) -> None:
        self._future = future
        self._versions: dict[bytes, int] = {}  # correlation id -> of the ApiVersions that is asked
        super().__init__(near, far, future)

    def _request(self, frame: bytes) -> bytes:
        key, version = struct.unpack_from(">hh", frame, 4)
        self._future.queried.add((key, version))
        if key == _API_VERSIONS:
            self._versions[frame[8:12]] = version
        return super()._request(frame)

    def _response(self, frame: bytes) -> bytes:
        version = self._versions.pop(frame[4:8], None)
        return super()._response(frame if version is None else of_the_future(frame, version))


def of_the_future(frame: bytes, version: int) -> bytes:
    """An answer to ApiVersions, told by a later Kafka."""
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
            assert frame[at] == 0, "Kafka tells more of an API than its versions: this has to learn of it"
            at += 1
    reported |= NEW_APIS
    end = b"\0" if flexible else b""
    entries = b"".join(_ENTRY.pack(key, *versions) + end for key, versions in reported.items())
    size = _of_uvarint(len(reported) + 1) if flexible else struct.pack(">i", len(reported))
    rest = frame[4:10] + size + entries + frame[at:]
    return struct.pack(">i", len(rest)) + rest


def _uvarint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
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
