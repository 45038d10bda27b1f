"""A wire that knows Kafka's frames: one request, or its answer, can be cut at a byte, held back or changed.

Stands where the proxy connects to a broker, so the requests it sees are the proxy's: a client's own keep its client id.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Self, TypeVar

from tests.support import forwarder
from tests.support.forwarder import Forwarder

_LONGEST_HOLD_SECONDS = 60.0
_PRODUCE = struct.pack(">h", 0)


class Cut(Exception):
    """Sends this much of what it was about to send, then closes both sides."""

    def __init__(self, first: bytes) -> None:
        self.first = first


class Fault:
    """What happens to the next Produce request that has these words in it. Once.

    `seen` – the request has come to the pipe. `happened` – what was to happen to it has.
    """

    def __init__(self, words: bytes) -> None:
        self.words = words
        self.observed = threading.Event()
        self.happened = threading.Event()

    def request(self, frame: bytes) -> bytes:
        return frame

    def response(self, frame: bytes) -> bytes:
        return frame

    def wait_seen(self) -> None:
        assert self.observed.wait(30), f"no request with {self.words!r} came by"

    def wait_happened(self) -> None:
        assert self.happened.wait(30), f"nothing happened to a request with {self.words!r}"


class CutRequest(Fault):
    """The broker gets only a part of the request; 0.5 is half of its bytes. 1.0: all of them, and nobody an answer."""

    def __init__(self, words: bytes, part: float) -> None:
        super().__init__(words)
        self._part = part

    def request(self, frame: bytes) -> bytes:
        self.happened.set()
        raise Cut(frame[: int(len(frame) * self._part)])


class CutResponse(Fault):
    """The broker has answered; the proxy gets only a part of that."""

    def __init__(self, words: bytes, part: float) -> None:
        super().__init__(words)
        self._part = part

    def response(self, frame: bytes) -> bytes:
        self.happened.set()
        raise Cut(frame[: int(len(frame) * self._part)])


class HoldRequest(Fault):
    """The proxy has sent it, the broker gets it at `release` (and with it what follows on the connection)."""

    def __init__(self, words: bytes) -> None:
        super().__init__(words)
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def request(self, frame: bytes) -> bytes:
        self.happened.set()
        self._released.wait(_LONGEST_HOLD_SECONDS)
        return frame

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class HoldResponse(HoldRequest):
    """The broker has answered, the proxy hears of it at `release`."""

    def request(self, frame: bytes) -> bytes:
        return frame

    def response(self, frame: bytes) -> bytes:
        return super().request(frame)


class AnswerError(Fault):
    """The broker has appended the one batch of the request, and the proxy is told an error: as after a timeout, or when
    replicas got lost meanwhile. With the base offset that the batch got, or without."""

    def __init__(self, words: bytes, error_code: int, *, tells_offset: bool) -> None:
        super().__init__(words)
        self._error_code = error_code
        self._tells_offset = tells_offset
        self._version = -1

    def request(self, frame: bytes) -> bytes:
        (self._version,) = struct.unpack_from(">h", frame, 6)
        return frame

    def response(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        at = 4 + 4  # length, correlation id
        if self._version >= 13:
            at += 1 + 1 + 16  # tagged fields, one topic, its id
        elif self._version >= 9:
            at += 1 + 1 + frame[at + 2]  # the length of its name, and one, is in one byte
        else:
            at += 4 + 2 + struct.unpack_from(">h", frame, at + 4)[0]
        at += (1 if self._version >= 9 else 4) + 4  # one partition, its index
        if struct.unpack_from(">h", frame, at) == (0,):
            struct.pack_into(">h", changed, at, self._error_code)
            if not self._tells_offset:
                struct.pack_into(">q", changed, at + 2, -1)
            self.happened.set()
        return bytes(changed)


_AnyFault = TypeVar("_AnyFault", bound=Fault)


class Pipe(Forwarder):
    def __init__(self) -> None:
        super().__init__()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def expect(self, fault: _AnyFault) -> _AnyFault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def forget_faults(self) -> None:
        with self._lock:
            self._faults.clear()

    def cut_all(self) -> None:
        """Every connection that is open now, on both sides."""
        for wire in list(self._wires):
            wire.cut()
            self._wires.remove(wire)

    def fault_for(self, frame: bytes) -> Fault | None:
        if frame[4:6] != _PRODUCE:
            return None
        with self._lock:
            for fault in self._faults:
                if fault.words in frame:
                    self._faults.remove(fault)
                    return fault
        return None

    def _wire(self, near: socket.socket, far: socket.socket) -> forwarder._Wire:
        return _FrameWire(near, far, self)


class _FrameWire(forwarder._Wire):
    def __init__(self, near: socket.socket, far: socket.socket, pipe: Pipe) -> None:
        self._pipe = pipe
        self._faulty: dict[bytes, Fault] = {}  # correlation id -> what happens to its answer
        super().__init__(near, far)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        to_broker = source is self.near
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= (size := 4 + int.from_bytes(buffer[:4])):
                    frame = bytes(buffer[:size])
                    del buffer[:size]
                    try:
                        sink.sendall(self._request(frame) if to_broker else self._response(frame))
                    except Cut as cut:
                        sink.sendall(cut.first)
                        self.cut()
                        return
                    if to_broker:
                        self.sent = (self.sent + frame)[-4096:]
        self.cut()

    def _request(self, frame: bytes) -> bytes:
        fault = self._pipe.fault_for(frame)
        if fault is None:
            return frame
        self._faulty[frame[8:12]] = fault
        fault.observed.set()
        return fault.request(frame)

    def _response(self, frame: bytes) -> bytes:
        fault = self._faulty.pop(frame[4:8], None)
        return frame if fault is None else fault.response(frame)
