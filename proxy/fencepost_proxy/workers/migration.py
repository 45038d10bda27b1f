"""Moves connections of this worker to the primary worker."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from fencepost_proxy import logs
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.session.messages import MigratedConnection
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.proxied_connection import MigratedSockets, ProxiedConnection
from fencepost_proxy.transport.proxied_socket import Buffers, Socket
from fencepost_proxy.transport.tls import TlsSocket
from fencepost_proxy.workers.worker import Worker

_limited_log = logs.RateLimitedLog(logs.get("workers.migration"))


@dataclass(eq=False)
class Migration:
    worker: Worker
    connections: ClientConnections
    buffers: Buffers
    metrics: Metrics

    def migrate(self, proxied: ProxiedConnection, migrated: MigratedConnection) -> None:
        """If that fails, the connection is closed, never served here."""
        if self.connections.draining:
            proxied.client.close(time.monotonic())
            assert proxied.upstream is not None
            proxied.upstream.close(time.monotonic())
            return
        given = proxied.detach()
        if given is None:
            return
        self.metrics.released_total.inc()
        on_its_way = MigratedSockets(migrated, proxied.peer, proxied.node_id, given.to_client, given.to_upstream)
        if not self.worker.migrate(on_its_way, self._movable(given.client), self._movable(given.upstream)):
            _limited_log.warning(
                "migrate", "connection closed", peer=proxied.peer, reason="the primary worker cannot be reached"
            )
            self.metrics.connections_closed.inc("primary_unreachable")

    def _movable(self, sock: Socket) -> socket.socket:
        """TLS cannot move to another process: its socket stays here, and a bridge to it moves instead."""
        if not isinstance(sock, TlsSocket):
            assert isinstance(sock, socket.socket)
            return sock
        from fencepost_proxy.workers.bridge import Bridge  # noqa: PLC0415 - for several workers with TLS only

        bridge = Bridge(sock, self.buffers, self.connections.remove_moved)
        self.connections.add_moved(bridge)
        return bridge.far
