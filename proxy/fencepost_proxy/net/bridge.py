"""A connection with TLS whose other end another worker process serves: the TLS stays here, the bytes go there.

What a TLS session knows cannot be handed from process to process, as its socket can. So the process that a connection
came to keeps that end, and hands over one end of a socket pair in its place.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from time import monotonic

from fencepost_proxy.net.proxied_socket import Buffers, ProxiedSocket, Socket


class _End(ProxiedSocket):
    """One of the two: what comes goes to the other, at the other's pace."""

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
    """`far` – for whoever goes on with the connection. `on_end` is called once both ends are gone."""

    def __init__(self, secured: Socket, buffers: Buffers, on_end: Callable[[Bridge], None]) -> None:
        near, self.far = socket.socketpair()
        loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._left = 2
        self._ends = one, two = _End(secured, buffers, loop, self._lost), _End(near, buffers, loop, self._lost)
        one.other, two.other = two, one
        one.received_at = two.received_at = monotonic()
        one.start()
        two.start()

    def _lost(self) -> None:
        """What the other end still has to get, it gets."""
        self._left -= 1
        if not self._left:
            self._on_end(self)
            return
        for each in self._ends:
            each.close(monotonic())

    def close_stuck(self, now: float, *, drain_seconds: float, idle_seconds: float) -> None:
        """A peer that does not take what was written would keep its end for ever.

        Neither would be noticed that the other has ended: while one end takes nothing, the other is not read. The
        process beyond closes what is idle; so does this, should it not hear of it.
        """
        for each in self._ends:
            if each.closing_since is not None and now - each.closing_since > drain_seconds:
                each.abort()
        if now - max(each.received_at for each in self._ends) > idle_seconds + drain_seconds:
            self.abort()

    def abort(self) -> None:
        for each in self._ends:
            each.abort()
