"""The connection pool: up to four connections per broker, each opened when first needed.

One is for queries; one for appends, because an append that waits for replicas blocks its connection; one for
continuous polling; and one for leader checks, on which leases depend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from fencepost_proxy.cluster.broker import Access, PooledConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.config import Limits
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.types import Address, NodeId

_CLIENT_ID: Final = "fencepost"


class Purpose(Enum):
    QUERIES = auto()
    APPENDS = auto()
    WATCHING = auto()
    LEADERS = auto()


class ConnectionPool(NativeView, remembered=("_version_max",)):
    """`upstream` – bootstrap addresses. The brokers' own addresses come from `use`."""

    def __init__(self, upstream: Sequence[Address], limits: Limits, access: Access) -> None:
        self._limits = limits
        self._access = access
        self.bootstrap = [
            PooledConnection(each, limits=limits, client_id=_CLIENT_ID, access=access) for each in upstream
        ]
        self._brokers: Mapping[NodeId, Address] = MappingProxyType({})
        self._connections: dict[tuple[NodeId, Purpose], PooledConnection] = {}
        self._version_max: dict[int, int] = {}  # until a connection is opened or the brokers change
        self._closed = False

    def use(self, brokers: Mapping[NodeId, Address]) -> list[PooledConnection]:
        """Adopts the brokers' addresses. Returns connections to former addresses, for the caller to close."""
        self._brokers = brokers
        self._versions_changed()
        moved = [key for key, pooled in self._connections.items() if brokers.get(key[0]) != pooled.address]
        return [self._connections.pop(key) for key in moved]

    def to(self, node_id: NodeId, purpose: Purpose) -> PooledConnection:
        """Raises UpstreamUnavailable for a broker that is not in the cluster."""
        pooled = self._connections.get((node_id, purpose))
        if pooled is None:
            if node_id not in self._brokers:
                raise UpstreamUnavailable(f"broker {node_id} is not in the cluster now")
            if self._closed:
                raise UpstreamUnavailable("the Kafka client is closed")
            pooled = PooledConnection(
                self._brokers[node_id],
                limits=self._limits,
                client_id=_CLIENT_ID,
                on_opened=self._versions_changed,
                access=self._access,
            )
            self._connections[node_id, purpose] = pooled
        return pooled

    def to_any(self) -> list[PooledConnection]:
        """Connections for a query that any broker can answer, open ones first."""
        pooled = [self.to(node_id, Purpose.QUERIES) for node_id in self._brokers] + self.bootstrap
        return sorted(pooled, key=lambda each: each.connection is None)

    def api_versions(self, node_id: NodeId) -> Mapping[int, tuple[int, int]] | None:
        """API key -> (min, max) version, from the last connection to the broker; None before the first."""
        pooled = self._connections.get((node_id, Purpose.QUERIES))
        return None if pooled is None else pooled.api_versions

    def version_max(self, api_key: int) -> int:
        """The newest version of an API that every broker supports, 0 if one broker's versions are unknown."""
        known = self._version_max.get(api_key)
        if known is None:
            reported = [self.api_versions(node_id) for node_id in self._brokers]
            newest = [0 if versions is None else versions.get(api_key, (0, 0))[1] for versions in reported]
            known = self._version_max[api_key] = min(newest, default=0)
        return known

    def _versions_changed(self) -> None:
        self._version_max = {}

    async def learn_versions(self) -> None:
        """Connects to every reachable broker, to learn its API versions."""
        deadline = deadline_in(self._limits.connect_timeout_seconds)
        pooled = [self.to(node_id, Purpose.QUERIES) for node_id in self._brokers]
        # The pooled connection logs a failure, and the next round retries.
        await asyncio.gather(*(each.connected(deadline) for each in pooled), return_exceptions=True)

    async def close(self) -> None:
        """Requests in flight fail."""
        self._closed = True
        for pooled in [*self.bootstrap, *self._connections.values()]:
            await pooled.close()
