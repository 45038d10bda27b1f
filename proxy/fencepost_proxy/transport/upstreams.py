"""Upstream connections of clients."""

from __future__ import annotations

import asyncio
import itertools
import time

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.tls_failures import of_broker
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.listeners import connect
from fencepost_proxy.transport.proxied_socket import Buffers, Socket
from fencepost_proxy.transport.tls import TlsSocket, secure
from fencepost_proxy.types import Address, NodeId

#: How long the status page shows a failed connection to a broker. Clients retry all the time.
_UNREACHABLE_SECONDS = 30.0


class Upstreams:
    """Connects to the broker of a listener; for the bootstrap listener, to any configured bootstrap server."""

    def __init__(
        self,
        config: ProxyConfig,
        book: AddressBook,
        certificates: Certificates,
        buffers: Buffers,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._book = book
        self._certificates = certificates
        self._buffers = buffers
        self._metrics = metrics
        self._bootstrap_cycle = itertools.cycle(range(len(config.upstream)))
        self._failures: dict[NodeId, tuple[float, str]] = {}  # the last one by broker: when, and why

    async def connect(self, node_id: NodeId | None) -> Socket:
        """Raises UpstreamUnavailable with the reason of the last attempt."""
        reason: object = "the broker is not known"
        kind = "unknown_broker"
        for address in self._addresses(node_id):
            try:
                async with asyncio.timeout(self._config.limits.connect_timeout_seconds):
                    sock = await self._open(address)
            except UpstreamUnavailable as error:
                reason, kind = error, "tls"
            except TimeoutError as error:
                reason, kind = f"{address}: {error or 'no response in time'}", "timeout"
            except OSError as error:
                reason, kind = f"{address}: {error}", "unreachable"
            else:
                if node_id is not None:
                    self._failures.pop(node_id, None)
                return sock
            self._metrics.upstream_errors["clients"].inc(kind)
        if kind == "unknown_broker":
            self._metrics.upstream_errors["clients"].inc(kind)
        if node_id is not None:
            self._failures[node_id] = time.monotonic(), str(reason)
        raise UpstreamUnavailable(str(reason))

    def failure(self, node_id: NodeId) -> str | None:
        """Why the last client connection to this broker failed, if that was recently."""
        at, reason = self._failures.get(node_id, (float("-inf"), ""))
        return reason if time.monotonic() - at < _UNREACHABLE_SECONDS else None

    def _addresses(self, node_id: NodeId | None) -> list[Address]:
        config = self._config
        if config.mode == "sidecar":
            return [] if config.broker is None else [config.broker]
        if node_id is not None:
            address = self._book.upstream_of(node_id)
            return [] if address is None else [address]
        first = next(self._bootstrap_cycle)
        return [*config.upstream[first:], *config.upstream[:first]]

    async def _open(self, address: Address) -> Socket:
        sock = await connect(address)
        context, config = self._certificates.upstream, self._config
        if context is None or (config.mode == "sidecar" and not config.broker_tls):
            return sock
        try:
            secured = TlsSocket(sock, context, self._buffers.tls, server_hostname=address.host)
            await secure(secured)
        except ValueError as error:  # a host that no certificate can be for
            sock.close()
            raise UpstreamUnavailable(f"{address}: {error}") from error
        except OSError as error:
            sock.close()
            failed = of_broker(error)
            self._metrics.upstream_tls_failures.inc(failed.kind)
            raise UpstreamUnavailable(f"{address}: {failed.words}") from error
        except BaseException:
            sock.close()
            raise
        return secured
