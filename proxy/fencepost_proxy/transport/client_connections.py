"""The connections of a process and their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from fencepost_proxy import logs
from fencepost_proxy.config import Limits
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Address

_limited_log = logs.RateLimitedLog(logs.get("transport.client_connections"))


class MovedTls(Protocol):
    """The TLS socket of a connection that another process serves (`workers/bridge.py`)."""

    def close_stuck(self, now: float, *, drain_seconds: float, idle_seconds: float) -> None: ...
    def abort(self) -> None: ...


class ClientConnections:
    """`changed` – called with the number of connections. `draining` – no more are admitted."""

    draining = False

    def __init__(self, limits: Callable[[], Limits], metrics: Metrics, changed: Callable[[int], None]) -> None:
        self._limits = limits
        self._metrics = metrics
        self._changed = changed
        self._from: Counter[str] = Counter()  # by address
        self._moved: set[MovedTls] = set()
        self.by_number: dict[int, ProxiedConnection] = {}

    def __len__(self) -> int:
        """Moved ones included."""
        return len(self.by_number) + len(self._moved)

    def admits(self, peer: Address) -> bool:
        """Whether the limits permit one more; if not, that is logged and counted."""
        limits = self._limits()
        if self.draining or len(self) >= limits.connections_max:
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
        self.report()

    def remove(self, proxied: ProxiedConnection) -> None:
        if self.by_number.pop(proxied.connection, None) is not None:
            host = proxied.peer.host
            self._from[host] -= 1
            if not self._from[host]:
                del self._from[host]
            self._metrics.connections.dec()
            self.report()

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

    def report(self) -> None:
        self._changed(len(self))

    # ---- TLS of connections that another process serves

    def add_moved(self, tls: MovedTls) -> None:
        self._moved.add(tls)
        self.report()

    def remove_moved(self, tls: MovedTls) -> None:
        self._moved.discard(tls)
        self.report()

    def close_stuck(self, now: float) -> None:
        limits = self._limits()
        for tls in list(self._moved):
            tls.close_stuck(now, drain_seconds=limits.drain_seconds, idle_seconds=limits.client_idle_seconds)

    def abort(self) -> None:
        """All of them."""
        for proxied in list(self.by_number.values()):
            proxied.client.abort()
            if proxied.upstream is not None:
                proxied.upstream.abort()
        for tls in list(self._moved):
            tls.abort()
