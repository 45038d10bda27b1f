"""The two sockets of a client connection, and nothing else: bytes to the switch, commands from it to the transports.

One receive buffer serves every connection of the process: what was read is handled before the next read, so nothing
of it outlives `buffer_updated`. An idle connection costs its two transports and no buffer.

Backpressure: a transport whose peer does not read fills up to the high-water mark and then stops the reading of the
other side. A session may stop a side too; reading goes on when nobody has a reason left to stop it.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import termios
from collections.abc import Callable
from enum import Flag
from typing import Protocol, cast

from fencepost_proxy.session import messages
from fencepost_proxy.types import Address, NodeId

RECEIVE_BUFFER_BYTES = 256 * 1024
#: Written and not yet taken by the peer's socket, per direction; above it the other side is not read.
WRITE_BUFFER_BYTES_MAX = 1024 * 1024


class Paused(Flag):
    NOT = 0
    #: The other side's transport is full.
    FULL = 1
    #: The session asked for it.
    SESSION = 2
    #: There is no upstream connection yet.
    CONNECTING = 4
    #: The process is draining: no further request is read.
    DRAINING = 8
    #: It does not read its answers: those made here would pile up without it, whatever upstream does.
    UNREAD = 16


class Driver(Protocol):
    """What a link tells the process."""

    def session_event(self, connection: int, event: messages.Event) -> None: ...
    def link_opened(self, link: Link) -> None: ...
    def link_closed(self, link: Link) -> None: ...
    def now(self) -> float: ...


class Side(asyncio.BufferedProtocol):
    """One socket of a link."""

    def __init__(self, buffer: bytearray) -> None:
        self._view = memoryview(buffer)
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self.paused = Paused.NOT
        self.link: Link | None = None
        self.received_at = 0.0
        self.closing_since: float | None = None

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        raise NotImplementedError

    def eof_received(self) -> bool:
        return False  # close: a Kafka peer that stops sending is gone

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause(Paused.FULL)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume(Paused.FULL)

    # ---- ours

    def pause(self, reason: Paused) -> None:
        if not self.paused and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        self.paused |= reason

    def resume(self, reason: Paused) -> None:
        self.paused &= ~reason
        transport = self.transport
        if not self.paused and transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    def write(self, chunks: list[bytes | memoryview]) -> None:
        if self.transport is not None and not self.transport.is_closing():
            if len(chunks) == 1:
                self.transport.write(chunks[0])
            else:
                self.transport.writelines(chunks)

    def close(self) -> None:
        """Once what was written has gone out; if the peer never takes it, `closing_since` tells when to `abort`."""
        if self.transport is not None:
            if self.closing_since is None and self.link is not None:
                self.closing_since = self.link.driver.now()
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class UpstreamSide(Side):
    def buffer_updated(self, nbytes: int) -> None:
        link = self.link
        if link is not None:
            self.received_at = link.driver.now()
            link.driver.session_event(link.connection, messages.UpstreamBytes(self._view[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.link is not None:
            reason = "the broker closed the connection" if exc is None else f"the connection to the broker broke: {exc}"
            self.link.upstream_lost(reason)


class ClientSide(Side):
    """Created for each accepted connection; `accepted` makes a link of it."""

    def __init__(self, buffer: bytearray, accepted: Callable[[ClientSide], Link | None]) -> None:
        super().__init__(buffer)
        self._accepted = accepted
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.paused = Paused.CONNECTING
        self.link = self._accepted(self)
        if self.link is None:
            self.abort()

    def buffer_updated(self, nbytes: int) -> None:
        link = self.link
        if link is None:
            return
        self.received_at = link.driver.now()
        if Paused.CONNECTING in self.paused:
            # A transport cannot be paused before it has begun to read: keep what came, then pause it.
            self._early += self._view[:nbytes]
            if self.transport is not None:
                self.transport.pause_reading()
        else:
            link.driver.session_event(link.connection, messages.ClientBytes(self._view[:nbytes]))

    def unread_bytes(self) -> int:
        """What lies in the socket's buffer."""
        if self.transport is None or self.transport.is_closing():
            return 0
        waiting = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, waiting)
        return waiting[0]

    def connected(self) -> None:
        """The session exists: what came early is for it."""
        early, self._early = self._early, b""
        self.resume(Paused.CONNECTING)
        if early and self.link is not None:
            self.link.driver.session_event(self.link.connection, messages.ClientBytes(memoryview(early)))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.pause(Paused.UNREAD)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume(Paused.UNREAD)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.link is not None:
            self.link.client_lost()


class Link:
    """A client connection and its own upstream connection.

    `peer` is the client's address, for the log; `node_id` is the broker whose listener it came to, None for bootstrap.
    """

    def __init__(
        self,
        connection: int,
        client: ClientSide,
        driver: Driver,
        *,
        peer: Address,
        local_host: str,
        node_id: NodeId | None,
    ) -> None:
        self.connection = connection
        self.client = client
        self.upstream: UpstreamSide | None = None
        self.peer = peer
        self.local_host = local_host
        self.node_id = node_id
        self.driver = driver
        self.opened_at = driver.now()
        self.close_reason: str | None = None
        self._client_gone = False
        self._upstream_gone = False

    def connected(self, upstream: UpstreamSide) -> None:
        """The upstream connection is there: from now on both sides are read."""
        self.upstream = upstream
        upstream.link = self
        upstream.other, self.client.other = self.client, upstream
        if self._client_gone:
            # It left before this; nobody would ever end a session that began now.
            upstream.close()
            return
        self.driver.link_opened(self)
        self.client.connected()

    def perform(self, command: messages.Command) -> None:
        match command:
            case messages.ToClient(chunks):
                self.client.write(chunks)
            case messages.ToUpstream(chunks):
                if self.upstream is not None:
                    self.upstream.write(chunks)
            case messages.ReadClient(on):
                (self.client.resume if on else self.client.pause)(Paused.SESSION)
            case messages.ReadUpstream(on):
                if self.upstream is not None:
                    (self.upstream.resume if on else self.upstream.pause)(Paused.SESSION)
            case messages.CloseClient(reason):
                self.close_reason = self.close_reason or reason
                self.client.close()
            case messages.CloseUpstream():
                if self.upstream is not None:
                    self.upstream.close()
            case _:
                raise TypeError(f"{command} is not for a connection")

    def client_lost(self) -> None:
        if self._client_gone:
            return
        self._client_gone = True
        if self.upstream is None:
            self._upstream_gone = True
        else:
            # Nothing is written to the client any more, so its full buffer must not hold back what is still to come.
            self.upstream.resume(Paused.FULL)
            self.driver.session_event(self.connection, messages.ClientLost())
        self._closed_if_both()

    def upstream_lost(self, reason: str) -> None:
        if self._upstream_gone:
            return
        self._upstream_gone = True
        self.close_reason = self.close_reason or reason
        self.driver.session_event(self.connection, messages.UpstreamLost(reason))
        self._closed_if_both()

    def _closed_if_both(self) -> None:
        if self._client_gone and self._upstream_gone:
            self.driver.link_closed(self)
