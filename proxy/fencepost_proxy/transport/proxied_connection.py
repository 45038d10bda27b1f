"""The two sockets of a client connection: passes bytes to the session, and the session's commands to the sockets.

The common case is one call, `FastPath.take_up` for complete requests or `take_down` for complete responses. It
returns what to write, from the receive buffer if the frame is relayed. Everything else is an event for the dispatcher.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol

from fencepost_proxy.metrics import Traffic
from fencepost_proxy.session import messages
from fencepost_proxy.session.session import Session
from fencepost_proxy.transport.proxied_socket import Buffers, Paused, ProxiedSocket, Socket
from fencepost_proxy.types import Address, NodeId


class Driver(Protocol):
    """Callbacks of a proxied connection."""

    @property
    def traffic(self) -> Traffic: ...

    def session_event(self, connection: int, event: messages.Event) -> None: ...
    def keep_time(self, session: Session) -> None: ...
    def proxied_opened(self, proxied: ProxiedConnection) -> Session: ...
    def proxied_closed(self, proxied: ProxiedConnection) -> None: ...


class _ConnectionSocket(ProxiedSocket):
    """One of the two sockets of a proxied connection."""

    __slots__ = ("_proxied",)

    def __init__(
        self, sock: Socket, buffers: Buffers, loop: asyncio.AbstractEventLoop, proxied: ProxiedConnection
    ) -> None:
        super().__init__(sock, buffers, loop)
        self._proxied = proxied

    def _forget(self) -> None:
        super()._forget()
        del self._proxied


class UpstreamSocket(_ConnectionSocket):
    __slots__ = ()

    def _received(self, data: memoryview) -> None:
        proxied = self._proxied
        self.received_at = now = monotonic()
        session = proxied.session
        assert session is not None
        requests = session.requests
        waiting = len(requests)
        taken, out = session.fast_path.take_down(data, now)
        if taken:
            proxied.client.write(out)
            traffic = proxied.driver.traffic
            traffic.bytes_to_clients += taken
            traffic.response_seconds.observe(monotonic() - now, waiting - len(requests))
            if taken == len(data):
                return
            data = data[taken:]
        proxied.driver.session_event(proxied.connection, messages.UpstreamBytes(data))
        self._relay_next(session.state.upstream.passing_bytes)

    def _passed(self, byte_count: int) -> None:
        proxied = self._proxied
        self.received_at = monotonic()
        proxied.driver.traffic.bytes_to_clients += byte_count
        proxied.driver.session_event(proxied.connection, messages.UpstreamPassed(byte_count))

    def _lost(self, error: OSError | None) -> None:
        reason = (
            "the broker closed the connection" if error is None else f"the connection to the broker failed: {error}"
        )
        self._proxied.upstream_lost(reason)


class ClientSocket(_ConnectionSocket):
    """Of an accepted connection. Not read before the upstream connection is open."""

    __slots__ = ()

    def _received(self, data: memoryview) -> None:
        proxied = self._proxied
        self.received_at = now = monotonic()
        session, upstream = proxied.session, proxied.upstream
        assert session is not None
        assert upstream is not None
        requests = session.requests
        waiting = len(requests)
        taken, out = session.fast_path.take_up(data, now)
        if taken:
            upstream.write(out)
            traffic = proxied.driver.traffic
            traffic.bytes_to_kafka += taken
            traffic.request_seconds.observe(monotonic() - now, len(requests) - waiting)
            if session.answer_by:
                proxied.driver.keep_time(session)
            if taken == len(data):
                return
            data = data[taken:]
        proxied.driver.session_event(proxied.connection, messages.ClientBytes(data))
        self._relay_next(session.state.client.unseen_bytes)

    def _passed(self, byte_count: int) -> None:
        proxied = self._proxied
        self.received_at = monotonic()
        proxied.driver.traffic.bytes_to_kafka += byte_count
        proxied.driver.session_event(proxied.connection, messages.ClientPassed(byte_count))

    def _hold_back(self, *, full: bool) -> None:
        super()._hold_back(full=full)
        (self.pause if full else self.resume)(Paused.UNREAD)

    def _lost(self, error: OSError | None) -> None:
        self._proxied.client_lost()


class ProxiedConnection:
    """A client connection and its upstream connection.

    `peer` is the client's address, for the log; `node_id` is the broker of its listener, None for bootstrap.
    """

    __slots__ = (
        "_buffers",
        "_client_closed",
        "_loop",
        "_upstream_closed",
        "client",
        "close_reason",
        "connection",
        "driver",
        "local_host",
        "node_id",
        "opened_at",
        "peer",
        "session",
        "upstream",
    )

    def __init__(
        self,
        connection: int,
        client: Socket,
        driver: Driver,
        buffers: Buffers,
        *,
        peer: Address,
        local_host: str,
        node_id: NodeId | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffers = buffers
        self.connection = connection
        self.client = ClientSocket(client, buffers, self._loop, self)
        self.client.paused = Paused.CONNECTING
        self.upstream: UpstreamSocket | None = None
        self.session: Session | None = None
        self.peer = peer
        self.local_host = local_host
        self.node_id = node_id
        self.driver = driver
        self.opened_at = monotonic()
        self.close_reason: str | None = None
        self._client_closed = False
        self._upstream_closed = False

    def connected(self, sock: Socket) -> None:
        """The upstream connection is open: starts reading both sockets."""
        if self._client_closed:
            # The client has disconnected: a session opened now would never be closed.
            sock.close()
            return
        self.session = self.driver.proxied_opened(self)
        self.upstream = upstream = UpstreamSocket(sock, self._buffers, self._loop, self)
        upstream.other, self.client.other = self.client, upstream
        upstream.resume()
        self.client.resume(Paused.CONNECTING)

    def perform(self, command: messages.Command) -> None:
        match command:
            case messages.ToClient():
                self.client.write(command.chunks)
            case messages.ToUpstream():
                if self.upstream is not None:
                    self.upstream.write(command.chunks)
            case messages.ReadClient():
                (self.client.resume if command.on else self.client.pause)(Paused.SESSION)
            case messages.ReadUpstream():
                if self.upstream is not None:
                    (self.upstream.resume if command.on else self.upstream.pause)(Paused.SESSION)
            case messages.CloseClient():
                self.close_reason = self.close_reason or command.reason
                (self.client.hang_up if command.hang_up else self.client.close)(monotonic())
            case messages.CloseUpstream():
                if self.upstream is not None:
                    self.upstream.close(monotonic())
            case _:
                raise TypeError(f"{command} is not for a connection")

    def client_lost(self) -> None:
        if self._client_closed:
            return
        self._client_closed = True
        if self.upstream is None:
            self._upstream_closed = True
        else:
            # Nothing more is written to the client, so its full buffer must not stop reading from upstream.
            self.upstream.passing_bytes = 0
            self.upstream.resume(Paused.FULL)
            self.driver.session_event(self.connection, messages.ClientLost())
            if self.upstream.ended and not self._upstream_closed:
                self.upstream_lost("no request in progress")  # closes the connection
                return
        self._closed_if_both()

    def upstream_lost(self, reason: str) -> None:
        if self._upstream_closed:
            return
        self._upstream_closed = True
        self.close_reason = self.close_reason or reason
        self.driver.session_event(self.connection, messages.UpstreamLost(reason))
        self._closed_if_both()

    def _closed_if_both(self) -> None:
        if self._client_closed and self._upstream_closed:
            self.driver.proxied_closed(self)
