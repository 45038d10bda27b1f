"""Cuts one direction of a connection into Kafka frames, without buffering those that are only relayed.

A frame is four bytes of length and that many bytes. At its start the session reads its first bytes and decides:
`pass_frame` streams the rest as it arrives, `collect_frame` buffers the whole. The input is a view into the
connection's receive buffer, valid for one call of `feed`: `save` copies what is left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from struct import Struct
from typing import Protocol

from fencepost_proxy.errors import LimitError, ProtocolError

LENGTH_BYTES = 4
INT32 = Struct(">i")
#: What every request begins with: API key, version, correlation id. The shortest response is its correlation id.
REQUEST_PREFIX = Struct(">hhi")
REQUEST_BYTES_MIN = REQUEST_PREFIX.size
RESPONSE_BYTES_MIN = 4
#: The start of a TLS handshake record, version 3.x, read as a length.
_TLS_HANDSHAKE = 0x1603
_EMPTY = memoryview(b"")


class CutterState(Enum):
    START = auto()
    #: At the start of a bare frame, one without a Kafka header: the token of a login.
    TOKEN = auto()
    PASSING = auto()
    COLLECTING = auto()


class Watch(Protocol):
    """Probes some bytes of a frame that is being streamed.

    `first_at` – where its first `probe` is, from the frame's start. `head_bytes` – what a probe needs, unless the frame
    ends before.
    """

    @property
    def first_at(self) -> int: ...
    @property
    def head_bytes(self) -> int: ...
    @property
    def at_trailer(self) -> bool:
        """Whether `in_place` replaces the rest of the frame, which is collected first."""

    def probe(self, head: memoryview) -> int:
        """How many bytes to stream before the next one. 0 is `at_trailer`."""

    def in_place(self, trailer: memoryview) -> memoryview: ...


@dataclass(slots=True, eq=False)
class FrameCutter:
    """`frame_bytes_max` bounds a frame, `frame_bytes_min` is the shortest header it can have.

    `fault` is raised for a length outside those bounds; lengths are read as signed, as Kafka does.
    """

    _frame_bytes_min: int
    _frame_bytes_max: int
    _fault: type[ProtocolError]
    state: CutterState = CutterState.START
    _data: memoryview = _EMPTY
    _pos: int = 0
    _left: int = 0
    _stash: bytes = b""
    _collected: bytearray | None = None
    _watch: Watch | None = None
    _until_probe: int = 0

    @property
    def buffered_bytes(self) -> int:
        return len(self._stash) + len(self._collected or b"")

    @property
    def unread_bytes(self) -> int:
        """Of the bytes fed, those after the frames begun."""
        return len(self._stash) + len(self._data) - self._pos

    @property
    def passing_bytes(self) -> int:
        """How many of the next bytes belong to the frame being streamed."""
        return self._left if self.state is CutterState.PASSING else 0

    @property
    def unseen_bytes(self) -> int:
        """How many of them need not be read."""
        passing = self._left if self.state is CutterState.PASSING else 0
        return passing if self._watch is None else min(passing, self._until_probe)

    @property
    def at_start(self) -> bool:
        """At the start of a frame; its first bytes may be there."""
        return self.state is CutterState.START or self.state is CutterState.TOKEN

    @property
    def between_frames(self) -> bool:
        return self.state is CutterState.START and not self._stash

    def feed(self, data: memoryview) -> None:
        self._data = memoryview(self._stash + bytes(data)) if self._stash else data
        self._stash = b""
        self._pos = 0

    def save(self) -> None:
        """Copies what is not consumed before the receive buffer is reused."""
        if self._pos < len(self._data):
            self._stash = bytes(self._data[self._pos :])
        self._data = _EMPTY
        self._pos = 0

    def head(self) -> tuple[int, memoryview] | None:
        """At a frame's start: its length and the bytes present, None if its shortest header is incomplete.

        Raises `fault` for an impossible length, `LimitError` for one above the limit.
        """
        start = self._pos + LENGTH_BYTES
        data = self._data
        if len(data) < start:
            return None
        length = int.from_bytes(data[self._pos : start], "big", signed=True)
        if length < self._frame_bytes_min:
            raise self._fault(f"a frame of {length} bytes: no Kafka frame is shorter than {self._frame_bytes_min}")
        if length > self._frame_bytes_max:
            if length >> 16 == _TLS_HANDSHAKE:
                raise self._fault("the client uses TLS, this listener does not: security.protocol there, or listen_tls")
            raise LimitError(f"a frame of {length} bytes is above frame_bytes_max={self._frame_bytes_max}")
        if len(data) < start + self._frame_bytes_min:
            return None
        return length, data[start : start + length]

    def token_length(self, bytes_max: int) -> int | None:
        """At the start of a bare frame: its length, None if that is not there yet. Raises `fault` out of bounds."""
        prefix = self._data[self._pos : self._pos + LENGTH_BYTES]
        if len(prefix) < LENGTH_BYTES:
            return None
        length = int.from_bytes(prefix, "big", signed=True)
        if not 0 <= length <= bytes_max:
            raise self._fault(f"a login token of {length} bytes: 0 to {bytes_max} are accepted")
        return length

    @property
    def unread(self) -> memoryview:
        """At the start of a frame: the bytes that are there."""
        return self._data[self._pos :]

    def skip(self, byte_count: int) -> None:
        """So many of `unread` were handled elsewhere."""
        self._pos += byte_count

    def pass_frame(self, length: int, watch: Watch | None = None) -> None:
        self.state = CutterState.PASSING
        self._left = length + LENGTH_BYTES
        self._watch = watch
        if watch is not None:
            self._until_probe = LENGTH_BYTES + watch.first_at

    def pass_rest(self, byte_count: int, watch: Watch | None, until_probe: int) -> None:
        """In the midst of a frame, whose beginning native code has streamed."""
        self.state = CutterState.PASSING
        self._left = byte_count
        self._watch = watch
        self._until_probe = until_probe

    def collect_frame(self, length: int) -> None:
        self.state = CutterState.COLLECTING
        self._pos += LENGTH_BYTES
        self._left = length

    def take(self) -> memoryview:
        """The next bytes of a streamed frame, its length prefix included; empty if none are there.

        Raises the error of its watch.
        """
        if self._watch is not None:
            return self._take_watched(self._watch)
        view = self._data[self._pos : self._pos + self._left]
        self._pos += len(view)
        self._left -= len(view)
        if not self._left:
            self.state = CutterState.START
        return view

    def _take_watched(self, watch: Watch) -> memoryview:
        begin, end = self._pos, len(self._data)
        while self._left:
            if not self._until_probe:
                head = self._data[self._pos : self._pos + min(watch.head_bytes, self._left)]
                if len(head) < min(watch.head_bytes, self._left):
                    break
                self._until_probe = watch.probe(head)
                if watch.at_trailer:
                    return self._data[begin : self._pos] if begin < self._pos else self._take_trailer(watch)
            step = min(self._until_probe, self._left, end - self._pos)
            if not step:
                break
            self._pos += step
            self._left -= step
            self._until_probe -= step
        if not self._left:
            self.state = CutterState.START
            self._watch = None
        return self._data[begin : self._pos]

    def _take_trailer(self, watch: Watch) -> memoryview:
        trailer = self._data[self._pos : self._pos + self._left]
        if len(trailer) < self._left:
            return _EMPTY
        self._pos += self._left
        self._left = 0
        self.state = CutterState.START
        self._watch = None
        return watch.in_place(trailer)

    def passed(self, byte_count: int) -> None:
        """So many of `unseen_bytes` were relayed without being fed."""
        assert byte_count <= self.unseen_bytes
        self._left -= byte_count
        self._until_probe -= byte_count
        if not self._left:
            self.state = CutterState.START

    def collected(self) -> memoryview | None:
        """The frame being collected, without its length prefix, once it is whole."""
        here = self._data[self._pos : self._pos + self._left]
        self._pos += len(here)
        self._left -= len(here)
        if not self._collected and not self._left:
            frame = memoryview(bytes(here))  # the usual case: it arrived in one piece
        else:
            # Its size follows the bytes received, not the announced length: a length alone uses no memory.
            if self._collected is None:
                self._collected = bytearray()
            self._collected += here
            if self._left:
                return None
            frame = memoryview(self._collected)
            self._collected = None
        self.state = CutterState.START
        return frame
