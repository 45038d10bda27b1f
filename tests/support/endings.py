"""A pipe in front of a transaction coordinator that decides what becomes of the next EndTxn(commit)."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

from tests.support.framepipe import _frames

_END_TXN = 26
_HEADER = struct.Struct(">ihhih")  # length, API key, version, correlation id, length of the client id
_FLEXIBLE_FROM, _ABORTABLE_FROM, _WITH_PRODUCER_FROM = 3, 4, 5
UNKNOWN_PRODUCER_ID, TRANSACTION_ABORTABLE = 59, 120


class EndTxnPipe:
    """Listens from the start on; `target` may be set later. Faults are for one commit each, of whichever client."""

    def __init__(self) -> None:
        self.target = ("127.0.0.1", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.refused: list[int] = []
        self._refuses = False
        self._fault: bool | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_open = True
        self.struck = threading.Event()
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

    def refuse_next_commit(self) -> None:
        """As the proxy does, so that every client that can be goes on. It goes no further. `refused`: its versions."""
        self._refuses = True

    def break_at_next_commit(self, *, after: bool) -> None:
        """Every connection ends, new ones too until `open`: once the commit was answered (but its answer does not
        arrive), or before it goes any further."""
        self.struck.clear()
        self._fault = after

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

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
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            with self._lock:
                if self._is_open:
                    self._sockets += [near, far]
                else:
                    near.close()
                    far.close()
                    continue
            lost: set[int] = set()
            threading.Thread(target=self._requests, args=(near, far, lost), daemon=True).start()
            threading.Thread(target=self._answers, args=(near, far, lost), daemon=True).start()

    def _requests(self, near: socket.socket, far: socket.socket, lost: set[int]) -> None:
        with contextlib.suppress(OSError):
            for frame in _frames(near):
                _, api_key, version, correlation_id, _ = _HEADER.unpack_from(frame)
                if api_key == _END_TXN and _commits(frame, version):
                    refuses, self._refuses = self._refuses, False
                    if refuses:
                        self.refused.append(version)
                        code = TRANSACTION_ABORTABLE if version >= _ABORTABLE_FROM else UNKNOWN_PRODUCER_ID
                        near.sendall(_answer(version, correlation_id, code))
                        continue
                    fault, self._fault = self._fault, None
                    if fault is False:
                        self.close()
                        self.struck.set()
                        return
                    if fault:
                        lost.add(correlation_id)
                far.sendall(frame)
        _end(near, far)

    def _answers(self, near: socket.socket, far: socket.socket, lost: set[int]) -> None:
        with contextlib.suppress(OSError):
            for frame in _frames(far):
                if struct.unpack_from(">i", frame, 4)[0] in lost:
                    self.close()
                    self.struck.set()
                    return
                near.sendall(frame)
        _end(near, far)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def _commits(frame: bytes, version: int) -> bool:
    """`committed` is the last field but for the tagged ones, of which no client sends any."""
    return frame[-2 if version >= _FLEXIBLE_FROM else -1] == 1


def _answer(version: int, correlation_id: int, code: int) -> bytes:
    flexible = version >= _FLEXIBLE_FROM
    body = struct.pack(">i", correlation_id) + (b"\0" if flexible else b"") + struct.pack(">ih", 0, code)
    if version >= _WITH_PRODUCER_FROM:
        body += struct.pack(">qh", -1, -1)
    body += b"\0" if flexible else b""
    return struct.pack(">i", len(body)) + body
