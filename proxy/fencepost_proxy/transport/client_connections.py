"""The connections of a process and their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fencepost_proxy import logs
from fencepost_proxy.config import Limits
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Address

_limited_log = logs.RateLimitedLog(logs.get("transport.client_connections"))


class ClientConnections:
    """`draining` – no more are admitted.

    A connection is removed before its socket closes: a client that sees the end reconnects at once, and
    `connections_max` must not refuse it.
    """

    draining = False

    def __init__(self, limits: Callable[[], Limits], metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._from: Counter[str] = Counter()  # by address
        self.by_number: dict[int, ProxiedConnection] = {}

    def admits(self, peer: Address) -> bool:
        """Whether the limits permit one more; if not, that is logged and counted."""
        limits = self._limits()
        if self.draining or len(self.by_number) >= limits.connections_max:
            self._metrics.connections_closed.inc("connections_max")
            _limited_log.warning("connections", "connection refused: connections_max is reached", peer=peer)
            return False
        if self._from[peer.host] >= limits.address_connections_max:
            self._metrics.connections_closed.inc("address_connections_max")
            kind = "connections from one", peer.host
            _limited_log.warning(kind, "connection refused: address_connections_max is reached", peer=peer)
            return False
        return True

    def add(self, proxied: ProxiedConnection) -> None:
        self.by_number[proxied.connection] = proxied
        self._from[proxied.peer.host] += 1
        self._metrics.connections.inc()

    def remove(self, proxied: ProxiedConnection) -> None:
        if self.by_number.pop(proxied.connection, None) is not None:
            host = proxied.peer.host
            self._from[host] -= 1
            if not self._from[host]:
                del self._from[host]
            self._metrics.connections.dec()

    def host(self, number: int) -> str | None:
        """The client's; None once the connection has ended."""
        proxied = self.by_number.get(number)
        return None if proxied is None else proxied.peer.host

    def unread_bytes(self, connection: int) -> int:
        """What the client has sent and the proxy has not read from the socket."""
        proxied = self.by_number.get(connection)
        return 0 if proxied is None else proxied.client.unread_bytes()

    @property
    def most_from(self) -> tuple[str, int] | None:
        """The address with most connections."""
        return next(iter(self._from.most_common(1)), None)

    def abort(self) -> None:
        """All of them."""
        for proxied in list(self.by_number.values()):
            proxied.client.abort()
            if proxied.upstream is not None:
                proxied.upstream.abort()
