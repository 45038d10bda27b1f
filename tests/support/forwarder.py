"""A wire that can be cut: connections to one address are passed on to another until a test ends one of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

from tests.kit.waiting import until


class Forwarder:
    """Listens on `address` from the start on; set `target` before anybody sends."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self.target = ("127.0.0.1", 0)
        self._wires: list[_Wire] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wire in self._wires:
            wire.cut()

    def wait_for(self, words: bytes) -> list[_Wire]:
        """Until bytes with these words have gone to the target, and what was sent with them."""
        found: list[_Wire] = until(
            lambda: [wire for wire in self._wires if words in wire.sent],
            f"{words!r} to be sent on",
            pause_seconds=0.002,
        )
        time.sleep(0.01)
        return found

    def cut_behind(self, words: bytes) -> None:
        """Closes the connection by which these words went, on both sides, once they have.

        What was sent stays sent: the target may read it whenever it likes.
        """
        for wire in self.wait_for(words):
            wire.cut()
            self._wires.remove(wire)

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
            self._wires.append(self._wire(near, far))

    def _wire(self, near: socket.socket, far: socket.socket) -> _Wire:
        return _Wire(near, far)


class _Wire:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.sent = b""  # the last of what went to the target
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                if sink is self.far:
                    self.sent = (self.sent + data)[-4096:]
        self.cut()

    def cut(self) -> None:
        for each in (self.near, self.far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
