"""Client connections of a process, from the accepted socket to the end of the process."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import BACKOFF_SECONDS
from fencepost_proxy.cluster.refused import RefusedConnections
from fencepost_proxy.cluster.tasks import Tasks
from fencepost_proxy.config import Limits
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.session.connection.draining import READ_SECONDS
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.frames import messages
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.listeners import Listeners
from fencepost_proxy.transport.loop_share import OnePerIteration
from fencepost_proxy.transport.native_tls import tls_socket
from fencepost_proxy.transport.proxied_connection import Driver, ProxiedConnection
from fencepost_proxy.transport.proxied_socket import Buffers, Socket
from fencepost_proxy.transport.tls import TlsSocket, Unused, of_client, secure
from fencepost_proxy.transport.upstreams import NotConnected, Upstreams
from fencepost_proxy.types import Address, NodeId

_DRAIN_POLL_SECONDS = 0.02
#: How long a client may take to notice that its connection was closed. Until then its data is discarded: a reset could
#: cost it a response that it has not read.
_LINGER_SECONDS = 1.0

_log = logs.get("transport.socket_server")
_limited_log = logs.RateLimitedLog(_log)


@dataclass(eq=False)
class SocketServer:
    """Accepts client connections, connects each to its broker at the first request, and ends them with the process.

    `listeners` – refuse clients while their broker does. Their share of the event loop is charged here.
    """

    connections: ClientConnections
    dispatcher: Dispatcher
    driver: Driver
    upstreams: Upstreams
    certificates: Certificates
    buffers: Buffers
    metrics: Metrics
    limits: Callable[[], Limits]
    listeners: Listeners
    refused: RefusedConnections
    #: One object for all connections.
    _record_refused: Callable[[Address], None] = field(init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _tasks: Tasks = field(default_factory=Tasks, init=False)
    _connects: OnePerIteration = field(default_factory=OnePerIteration, init=False)
    _handshakes: OnePerIteration = field(default_factory=OnePerIteration, init=False)

    def __post_init__(self) -> None:
        self._record_refused = partial(self.refused.record, of="clients")

    def accepted(self, sock: socket.socket, peer: Address, node_id: NodeId | None) -> None:
        began = time.monotonic()
        self._accept(sock, peer, node_id)
        self.listeners.share.charge(2 * (time.monotonic() - began))  # closing it takes as long

    def _accept(self, sock: socket.socket, peer: Address, node_id: NodeId | None) -> None:
        if not self.connections.admits(peer):
            sock.close()
            return
        local_host = Address.of_socket(sock.getsockname()).host
        context = self.certificates.listener
        near: Socket = sock if context is None else tls_socket(sock, context, self.buffers.tls)
        proxied = ProxiedConnection(
            next(self._numbers), near, self.driver, self.buffers, peer=peer, local_host=local_host, node_id=node_id
        )
        self.connections.add(proxied)
        if isinstance(near, TlsSocket):
            self._tasks.spawn(self._secure(proxied, near), f"TLS handshake {proxied.connection}")
        else:
            proxied.await_request(self._requested)

    def _requested(self, proxied: ProxiedConnection) -> None:
        self.metrics.connections_accepted.inc()
        self._tasks.spawn(self._connect(proxied), f"connect {proxied.connection}")

    async def _connect(self, proxied: ProxiedConnection) -> None:
        """A client costs Kafka no connection before its first request."""
        await self._connects.next()
        try:
            far, address = await self.upstreams.connect(proxied.node_id)
        except NotConnected as error:
            _limited_log.warning("upstream", "no upstream connection for a client", peer=proxied.peer, reason=error)
            proxied.close_reason = "no upstream connection"
            if not error.silent and self.listeners.refuse(proxied.node_id):
                self._tasks.spawn(self._resume(proxied.node_id), f"probe for {proxied.node_id}")
            proxied.client.close(time.monotonic())
        else:
            began = time.monotonic()
            proxied.connected(far, address, self._record_refused)
            self.listeners.share.charge(2 * (time.monotonic() - began))

    async def _resume(self, node_id: NodeId | None) -> None:
        """Opens a listener again once its broker can be reached."""
        of, pause = "bootstrap" if node_id is None else f"broker {node_id}", BACKOFF_SECONDS
        _limited_log.info(("refuses", node_id), "listener refuses clients: nothing accepts their connections", of=of)
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            try:
                sock, _ = await self.upstreams.probe(node_id)
            except NotConnected:
                pause = min(2 * pause, self.limits().reconnect_backoff_max_seconds)
            else:
                break
        sock.close()
        self.listeners.resume(node_id)
        _limited_log.info(("accepts", node_id), "listener accepts clients again", of=of)

    async def _secure(self, proxied: ProxiedConnection, near: TlsSocket) -> None:
        seconds = self.limits().handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                await secure(near, self._handshakes.next)
        except TimeoutError:
            kind, why = "timeout", f"no TLS handshake within {seconds:g} s (limits.handshake_seconds)"
        except Unused:
            _log.debug("connection closed before its TLS handshake", peer=proxied.peer)
            proxied.client.abort()
            return
        except OSError as error:
            kind, why = of_client(error)
        else:
            self.metrics.tls_handshakes.inc("ok")
            proxied.opened_at = time.monotonic()
            proxied.await_request(self._requested)
            return
        self.metrics.connections_accepted.inc()
        self.metrics.tls_handshakes.inc(kind)
        self.metrics.connections_closed.inc("tls")
        _limited_log.warning(f"tls {kind}", "connection closed", peer=proxied.peer, reason=why)
        proxied.close_reason = why
        proxied.client.abort()

    # ---- the end

    async def close(self) -> None:
        """Refuses new connections, and gives up those without an upstream connection."""
        self.connections.draining = True
        await self._tasks.close()

    async def drain(self, until: float, force: asyncio.Event) -> Counter[int]:
        """Closes each connection when it is idle. Returns, by API, how many requests were not answered in time."""
        await self.close()
        left: Counter[int] | None = None
        while self.connections.by_number:
            now = time.monotonic()
            if force.is_set():
                until = min(until, now)
            # Count before sessions give up the requests that they wait for.
            if left is None and now >= until - READ_SECONDS - 5 * _DRAIN_POLL_SECONDS:
                left = Counter(key for session in self.dispatcher.sessions.values() for key in session.unanswered)
            for proxied in list(self.connections.by_number.values()):
                since = proxied.client.closing_since
                if proxied.session is None:
                    proxied.client.abort()  # nothing was read from it
                elif since is None:
                    self.driver.session_event(proxied.connection, messages.Drain(until))
                elif now >= since + _LINGER_SECONDS and (now >= until or proxied.client.unsent is None):
                    proxied.client.abort()
            if now >= until + _LINGER_SECONDS:
                break
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        return left or Counter()
