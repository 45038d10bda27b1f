"""The two sockets of a client connection: passes bytes to the session, and the session's commands to the sockets.

The common case is one call, `FastPath.take_up` for complete requests or `take_down` for complete responses. It
returns what to write, from the receive buffer if the frame is relayed. Everything else is an event for the dispatcher.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from fencepost_proxy import logs
from fencepost_proxy.metrics import Traffic
from fencepost_proxy.session.connection.state import Full
from fencepost_proxy.session.frames import messages
from fencepost_proxy.session.frames.cutter import LENGTH_BYTES, REQUEST_BYTES_MIN
from fencepost_proxy.session.relay.fast_path import FastPath
from fencepost_proxy.session.session import Session
from fencepost_proxy.transport.proxied_socket import (
    Buffers,
    Paused,
    ProxiedSocket,
    Socket,
    encrypts_in_python,
    error_of,
    native_tls,
    next_limit,
)
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.apis import API_VERSIONS, METADATA, SASL_HANDSHAKE

if TYPE_CHECKING:
    from fencepost_native import Pumped

_limited_log = logs.RateLimitedLog(logs.get("transport.proxied_connection"))

#: Of the shortest request header, with the frame's length. Until it is there, a client costs Kafka no connection.
_HEADER_BYTES: Final = LENGTH_BYTES + REQUEST_BYTES_MIN
#: Brokers answer these, or refuse the connection.
_FIRST_REQUESTS: Final = frozenset({API_VERSIONS, SASL_HANDSHAKE, METADATA})
_CLOSED_BY_PEER: Final[int] = getattr(select, "POLLRDHUP", 0)  # Linux


def _peer_closed(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, _CLOSED_BY_PEER)
    return bool(poll.poll(0))


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

    def _finish(self, error: OSError | None) -> None:
        super()._finish(error)
        self.reader = None
        del self._proxied

    def _changed(self) -> None:
        session = self._proxied.session
        if session is not None:
            session.fast_path.native.stop_reading()

    def _set_full(self, bit: int, *, full: bool) -> None:
        """So the session starts no request that would stand still."""
        session = self._proxied.session
        if session is None:
            return
        if full:
            session.state.full |= bit
        elif session.state.full & bit:
            session.state.full &= ~bit
            if session.fast_path.client_is_paused:
                self._proxied.driver.session_event(self._proxied.connection, messages.Tick())

    def _may_pump(self, other: ProxiedSocket) -> bool:
        """Whether bytes may go from this socket to the other one in native code."""
        if self.passing_bytes or encrypts_in_python(self) or encrypts_in_python(other):
            return False
        return other.unsent is None and not (self.closing or other.closing)

    def _waits_for(self, other: ProxiedSocket, session: Session) -> bool:
        """Whether to read nothing before the other socket has taken its bytes.

        Otherwise Python would get the frame that native code relays, and decrypt and encrypt the rest of it.
        """
        return (native_tls(self) or native_tls(other)) is not None and not (self.passing_bytes or self.closing)

    def _report(self, peer: str, error: OSError | None) -> None:
        """Peers close connections all the time; an error of TLS is a defect, or an attack."""
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            reason = f"TLS with the {peer} failed: {error}"
            _limited_log.warning(f"tls {peer}", "connection closed", peer=self._proxied.peer, reason=reason)

    def _unread(self, data: memoryview) -> None:
        """Received bytes that native code is not done with."""
        self._received(data)

    def _pump(self, fast_path: FastPath, fd: int, now: float) -> Pumped | None:
        """Read in native code, and write to the other socket's `fd`. None: not possible now."""
        raise NotImplementedError

    def _count(self, byte_count: int, seconds: float, count: int) -> None:
        """What native code has relayed, for the metrics."""
        raise NotImplementedError

    def read(self) -> None:
        """In place of native code, which has left this to Python: it may still do a part."""
        proxied, other = self._proxied, self.other
        session = proxied.session
        if session is None or other is None:
            self._readable()
            return
        if other.unsent is not None and self._waits_for(other, session):
            self.pause(Paused.FULL)
            return
        pumped = None
        if self._may_pump(other):
            now = monotonic()
            waiting = session.unanswered_count
            pumped = self._pump(session.fast_path, other._fd, now)
        if pumped is None:
            self._readable()
        else:
            if pumped[1]:
                self._count(pumped[1], monotonic() - now, abs(session.unanswered_count - waiting))
            self._left(pumped)
        proxied.start_native_reading()

    def _left(self, pumped: Pumped) -> None:
        """What native code has read and is not done with."""
        received, _, rest, unsent, failed, ended = pumped
        other = self.other
        assert other is not None
        if received:
            self.received_at = monotonic()
        if ended == 0:
            self.close(monotonic())  # Kafka peers do not half-close
        elif ended is not None:
            self.abort(error_of(self, ended))
        if failed is not None:
            other.abort(error_of(other, failed))
        elif unsent is not None:
            other.keep(unsent)
        if rest is not None:
            self._unread(memoryview(rest))
            seconds = monotonic() - self.received_at
            self.read_bytes_max = next_limit(self.read_bytes_max, len(rest), seconds, secured=self.secured)
        elif received:
            self.read_bytes_max = 0  # native code is never slow


class UpstreamSocket(_ConnectionSocket):
    __slots__ = ()

    def _pump(self, fast_path: FastPath, fd: int, now: float) -> Pumped | None:
        return fast_path.pump_down(self._fd, fd, self.read_bytes_max, now)

    def _waits_for(self, other: ProxiedSocket, session: Session) -> bool:
        """Others may wait for the response to an append."""
        return super()._waits_for(other, session) and not session.fast_path.awaits_append

    def _count(self, byte_count: int, seconds: float, responses: int) -> None:
        traffic = self._proxied.driver.traffic
        traffic.bytes_to_clients += byte_count
        traffic.response_seconds.observe(seconds, responses)

    def _received(self, data: memoryview) -> None:
        proxied = self._proxied
        self.received_at = now = monotonic()
        session = proxied.session
        assert session is not None
        waiting = session.unanswered_count
        taken, out = session.fast_path.take_down(data, now)
        if taken:
            proxied.client.write(out)
            traffic = proxied.driver.traffic
            traffic.bytes_to_clients += taken
            traffic.response_seconds.observe(monotonic() - now, waiting - session.unanswered_count)
            if taken == len(data):
                return
            data = data[taken:]
        self._unread(data)

    def _unread(self, data: memoryview) -> None:
        proxied = self._proxied
        assert proxied.session is not None
        proxied.driver.session_event(proxied.connection, messages.UpstreamBytes(data))
        self._relay_next(proxied.session.state.upstream.unseen_bytes)

    def _passed(self, byte_count: int) -> None:
        proxied = self._proxied
        self.received_at = monotonic()
        proxied.driver.traffic.bytes_to_clients += byte_count
        proxied.driver.session_event(proxied.connection, messages.UpstreamPassed(byte_count))

    def _hold_back(self, *, full: bool) -> None:
        super()._hold_back(full=full)
        self._set_full(Full.UPSTREAM, full=full)

    def _lost(self, error: OSError | None) -> None:
        reason = (
            "the broker closed the connection" if error is None else f"the connection to the broker failed: {error}"
        )
        self._report("broker", error)
        self._proxied.upstream_lost(reason)


class ClientSocket(_ConnectionSocket):
    """Of an accepted connection. Not read before the upstream connection is open."""

    __slots__ = ()

    def await_request(self) -> None:
        """Calls `ProxiedConnection.requested` once the header of a request is there. It stays in the socket."""
        self.paused = Paused.CONNECTING
        self.wake_at(_HEADER_BYTES)
        self._reading = True
        self._loop.add_reader(self._fd, self._first_bytes)

    def _first_bytes(self) -> None:
        try:
            closed = not self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.abort(error)
            return
        if closed or (self.unread_bytes() < _HEADER_BYTES and _peer_closed(self._fd)):
            self.close(monotonic())
            return
        self.pause(0)
        self.wake_at(1)
        self.received_at = monotonic()
        self._proxied.requested()

    def _pump(self, fast_path: FastPath, fd: int, now: float) -> Pumped | None:
        return fast_path.pump_up(self._fd, fd, self.read_bytes_max, now)

    def _count(self, byte_count: int, seconds: float, requests: int) -> None:
        proxied = self._proxied
        traffic, session = proxied.driver.traffic, proxied.session
        traffic.bytes_to_kafka += byte_count
        traffic.request_seconds.observe(seconds, requests)
        if session is not None and session.answers_are_due:
            proxied.driver.keep_time(session)

    def _received(self, data: memoryview) -> None:
        proxied = self._proxied
        self.received_at = now = monotonic()
        session, upstream = proxied.session, proxied.upstream
        assert session is not None
        assert upstream is not None
        session.fast_path.native.stop_reading()
        waiting, received = session.unanswered_count, session.state.received_bytes
        taken, out = session.fast_path.take_up(data, now)
        if taken:
            upstream.write(out)
            traffic = proxied.driver.traffic
            # Of a frame that native code collects, all bytes count when it is complete.
            traffic.bytes_to_kafka += session.state.received_bytes - received
            traffic.request_seconds.observe(monotonic() - now, session.unanswered_count - waiting)
            if session.answers_are_due:
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
        """The client is not read while it does not read. Kafka is, as long as others may wait for its response."""
        session = self._proxied.session
        if not (full and session is not None and session.fast_path.awaits_append):
            super()._hold_back(full=full)
        (self.pause if full else self.resume)(Paused.UNREAD)
        self._set_full(Full.CLIENT, full=full)

    def _lost(self, error: OSError | None) -> None:
        self._report("client", error)
        self._proxied.client_lost()


class ProxiedConnection:
    """A client connection and its upstream connection.

    `peer` is the client's address, for the log; `node_id` is the broker of its listener, None for bootstrap.
    `awaits_request` – no request header was there yet.
    """

    __slots__ = (
        "_buffers",
        "_client_closed",
        "_loop",
        "_on_refused",
        "_on_request",
        "_upstream_closed",
        "awaits_request",
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
        "upstream_address",
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
        self.upstream_address: Address | None = None
        self.session: Session | None = None
        self.peer = peer
        self.local_host = local_host
        self.node_id = node_id
        self.driver = driver
        self.opened_at = monotonic()
        self.close_reason: str | None = None
        self._client_closed = False
        self._upstream_closed = False
        self._on_request: Callable[[ProxiedConnection], None] | None = None
        self._on_refused: Callable[[Address], None] | None = None
        self.awaits_request = False

    def await_request(self, on_request: Callable[[ProxiedConnection], None]) -> None:
        """`on_request` is called once the client's first request header is there, to connect upstream."""
        self._on_request, self.awaits_request = on_request, True
        self.client.await_request()

    def requested(self) -> None:
        on_request, self._on_request, self.awaits_request = self._on_request, None, False
        if on_request is not None:
            on_request(self)

    def connected(
        self, sock: Socket, address: Address | None = None, on_refused: Callable[[Address], None] | None = None
    ) -> None:
        """The upstream connection to `address` is open: starts reading both sockets.

        `on_refused` – called if the broker closes it before its first response.
        """
        self.upstream_address, self._on_refused = address, on_refused
        if self._client_closed:
            # The client has disconnected: a session opened now would never be closed.
            sock.close()
            return
        self.session = session = self.driver.proxied_opened(self)
        self.upstream = upstream = UpstreamSocket(sock, self._buffers, self._loop, self)
        upstream.other, self.client.other = self.client, upstream
        # Python's TLS has to know how many bytes of a frame are left.
        in_pieces = not (encrypts_in_python(self.client) or encrypts_in_python(upstream))
        tls = native_tls(self.client), native_tls(upstream)
        self.client.reader, upstream.reader = session.fast_path.native.connect(self, in_pieces=in_pieces, tls=tls)
        upstream.resume()
        self.client.resume(Paused.CONNECTING)

    # ---- calls of native code

    def read_client(self) -> None:
        self._or_abort(self.client.read)

    def read_upstream(self) -> None:
        assert self.upstream is not None
        self._or_abort(self.upstream.read)

    def read_from_client(self, pumped: Pumped) -> None:
        self._or_abort(self.client._left, pumped)

    def read_from_upstream(self, pumped: Pumped) -> None:
        assert self.upstream is not None
        self._or_abort(self.upstream._left, pumped)

    def _or_abort(self, read: Callable[..., None], *arguments: object) -> None:
        try:
            read(*arguments)
        except Exception:
            self.abort()
            raise

    def abort(self) -> None:
        """After an error of the proxy itself, which the event loop logs: it would occur again at once."""
        self.close_reason = self.close_reason or "the proxy failed to handle its bytes"
        self.client.abort()
        if self.upstream is not None:
            self.upstream.abort()

    def keep_time(self) -> None:
        assert self.session is not None
        self.driver.keep_time(self.session)

    def start_native_reading(self) -> None:
        """From now on native code reads, if nothing here needs Python."""
        session, client, upstream = self.session, self.client, self.upstream
        if session is None or upstream is None:
            return
        if client.read_bytes_max or upstream.read_bytes_max or client.paused or upstream.paused:
            return
        if client._may_pump(upstream) and upstream._may_pump(client) and session.fast_path.may_start_reading:
            session.fast_path.start_reading(client._fd, upstream._fd)

    def update_received_at(self) -> None:
        if self.session is not None and self.upstream is not None:
            of_client, of_upstream = self.session.fast_path.native.received_at
            self.client.received_at = max(self.client.received_at, of_client)
            self.upstream.received_at = max(self.upstream.received_at, of_upstream)

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
        if self._was_refused and self._on_refused is not None and self.upstream_address is not None:
            self._on_refused(self.upstream_address)
        self.close_reason = self.close_reason or reason
        self.driver.session_event(self.connection, messages.UpstreamLost(reason))
        self._closed_if_both()

    @property
    def _was_refused(self) -> bool:
        """The broker has closed the connection without a response, and the client's requests are not the reason."""
        self.update_received_at()
        if self.upstream is None or self.upstream.received_at or self.client.closing or self.session is None:
            return False
        return not _FIRST_REQUESTS.isdisjoint(self.session.unanswered)

    def _closed_if_both(self) -> None:
        if self._client_closed and self._upstream_closed:
            if self.session is not None:
                self.session.fast_path.native.disconnect()
            self.driver.proxied_closed(self)
