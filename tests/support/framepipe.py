"""A pipe between a Kafka client and a server that knows where a request and its answer begin and end.

So that a test can say: the answer to this very append is lost, from this byte on. What was asked has reached the server
and was answered before the pipe breaks; nothing is left to timing. (`forwarder.py` knows bytes only.)
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

PRODUCE = 0
_REQUEST = struct.Struct(">ihhi")  # length, API key, version, correlation id
_ANSWER = struct.Struct(">ii")  # length, correlation id

#: Where an answer ends: before its first byte, somewhere inside, or behind its last one.
Position = Literal["before", "inside", "after"]
POSITIONS: tuple[Position, ...] = ("before", "inside", "after")


@dataclass
class Cut:
    """One Produce whose answer is not to arrive: the next one that has `words` in it."""

    words: bytes
    at: Callable[[int], int]  # length of the answer, with its prefix -> how many bytes of it are passed on
    hang: bool = False  # the connection stays, but nothing comes back on it any more
    happened: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float = 60.0) -> None:
        assert self.happened.wait(seconds), f"no answer to {self.words!r} came"


@dataclass
class _Hold:
    words: bytes
    count: int
    observed: int = 0
    released: threading.Event = field(default_factory=threading.Event)


class FramePipe:
    """Listens from the start on `host`:`port`; `target` is where it leads, and may be set later."""

    def __init__(self, target: tuple[str, int] = ("127.0.0.1", 0), *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"{host}:{self.port}"
        self._lock = threading.Lock()
        self._wires: list[_Wire] = []
        self._cuts: list[Cut] = []
        self._hold: _Hold | None = None
        self._is_open = True
        self.produced: list[bytes] = []  # every Produce request that came, whole
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close()

    # ---- what tests do

    def cut_answer(self, words: bytes, at: Callable[[int], int], *, hang: bool = False) -> Cut:
        cut = Cut(words, at, hang)
        with self._lock:
            self._cuts.append(cut)
        return cut

    @contextlib.contextmanager
    def together(self, words: bytes, count: int) -> Iterator[None]:
        """Produce requests with these words are kept until `count` of them are here; then they go on as one piece."""
        hold = _Hold(words, count)
        with self._lock:
            self._hold = hold
        try:
            yield
        finally:
            with self._lock:
                self._hold = None
                wires = list(self._wires)
            for wire in wires:
                wire.release()

    def close(self) -> None:
        """Every connection ends, and new ones end at once, until `open`."""
        with self._lock:
            self._is_open = False
            wires, self._wires = self._wires, []
        for wire in wires:
            wire.cut()

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    # ---- inside

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._is_open:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            wire = self._wire(near, far)
            with self._lock:
                if self._is_open:
                    self._wires.append(wire)
            if not self._is_open:
                wire.cut()
            wire.start()

    def _wire(self, near: socket.socket, far: socket.socket) -> _Wire:
        return _Wire(self, near, far)

    def _cut_for(self, frame: bytes) -> Cut | None:
        with self._lock:
            for cut in self._cuts:
                if cut.words in frame:
                    self._cuts.remove(cut)
                    return cut
        return None

    def _holds(self, frame: bytes) -> tuple[bool, bool]:
        """(keep this frame, and what comes behind it; all are here now)"""
        with self._lock:
            if self._hold is None or self._hold.words not in frame:
                return False, False
            self._hold.observed += 1
            return True, self._hold.observed >= self._hold.count

    def _gone(self, wire: _Wire) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._wires.remove(wire)


class _Wire:
    def __init__(self, pipe: FramePipe, near: socket.socket, far: socket.socket) -> None:
        self._pipe = pipe
        self._near, self._far = near, far
        self._cuts: dict[int, Cut] = {}  # by correlation id
        self._paused: bytearray = bytearray()
        self._holding = False
        self._hangs = False
        self._lock = threading.Lock()
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        threading.Thread(target=self._requests, daemon=True).start()
        threading.Thread(target=self._answers, daemon=True).start()

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            for frame in _frames(self._near):
                _, api_key, _, correlation_id = _REQUEST.unpack_from(frame)
                keep = complete = False
                if api_key == PRODUCE:
                    self._pipe.produced.append(frame)
                    cut = self._pipe._cut_for(frame)
                    if cut is not None:
                        self._cuts[correlation_id] = cut
                    keep, complete = self._pipe._holds(frame)
                with self._lock:
                    self._holding = self._holding or keep
                    if not self._holding:
                        self._far.sendall(frame)
                        continue
                    self._paused += frame
                if complete:
                    self.release()
        self.cut()

    def _answers(self) -> None:
        with contextlib.suppress(OSError):
            for frame in _frames(self._far):
                _, correlation_id = _ANSWER.unpack_from(frame)
                cut = self._cuts.pop(correlation_id, None)
                if self._hangs:
                    continue
                if cut is None:
                    self._near.sendall(frame)
                    continue
                self._near.sendall(frame[: cut.at(len(frame))])
                if cut.hang:
                    self._hangs = True
                else:
                    self.cut()
                cut.happened.set()
        self.cut()

    def release(self) -> None:
        with self._lock:
            self._holding = False
            with contextlib.suppress(OSError):
                self._far.sendall(self._paused)
            self._paused.clear()

    def cut(self) -> None:
        for each in (self._near, self._far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._pipe._gone(self)


def _frames(source: socket.socket) -> Iterator[bytes]:
    """Whole frames with their length, until the other side closes."""
    buffer = bytearray()
    while data := source.recv(1 << 18):
        buffer += data
        while len(buffer) >= 4:
            end = 4 + struct.unpack_from(">i", buffer)[0]
            if len(buffer) < end:
                break
            yield bytes(buffer[:end])
            del buffer[:end]
