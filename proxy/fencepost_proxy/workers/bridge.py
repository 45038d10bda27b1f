"""A TLS connection that another worker serves: TLS stays in this process, and the plaintext goes to that worker.

Unlike a socket, the state of a TLS session cannot move to another process. So the process that accepted the connection
keeps the TLS socket, and sends the worker one end of a socket pair instead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from time import monotonic

from fencepost_proxy.transport.proxied_socket import Buffers, ProxiedSocket, Socket


class _End(ProxiedSocket):
    """One of the two sockets: forwards received bytes to the other, with backpressure."""

    def __init__(self, sock: Socket, buffers: Buffers, loop: asyncio.AbstractEventLoop, lost: Callable[[], None]):
        super().__init__(sock, buffers, loop)
        self._report_lost = lost

    def _received(self, data: memoryview) -> None:
        self.received_at = monotonic()
        assert self.other is not None
        self.other.send(data)

    def _lost(self, error: OSError | None) -> None:
        self._report_lost()


class Bridge:
    """`far` – the socket for the other worker. `on_end` is called once both ends are closed."""

    def __init__(self, secured: Socket, buffers: Buffers, on_end: Callable[[Bridge], None]) -> None:
        near, self.far = socket.socketpair()
        loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._left = 2
        self._ends = one, two = _End(secured, buffers, loop, self._lost), _End(near, buffers, loop, self._lost)
        one.other, two.other = two, one
        one.received_at = two.received_at = monotonic()
        one.resume()
        two.resume()

    def _lost(self) -> None:
        """The other end closes after sending its buffered bytes."""
        self._left -= 1
        if not self._left:
            self._on_end(self)
            return
        for each in self._ends:
            each.close(monotonic())

    def close_stuck(self, now: float, *, drain_seconds: float, idle_seconds: float) -> None:
        """Closes ends whose peer stopped reading, which would otherwise stay open indefinitely.

        While one end is blocked, the other is not read, so its close goes unnoticed. The other worker closes idle
        connections; this process does the same a little later.
        """
        for each in self._ends:
            if each.closing_since is not None and now - each.closing_since > drain_seconds:
                each.abort()
        if now - max(each.received_at for each in self._ends) > idle_seconds + drain_seconds:
            self.abort()

    def abort(self) -> None:
        for each in self._ends:
            each.abort()
