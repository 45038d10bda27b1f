"""Upstream connections of clients."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import Sequence

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster.broker import UpstreamUnavailable, deadline_in, remaining
from fencepost_proxy.cluster.connecting import Connector
from fencepost_proxy.cluster.tls_failures import of_broker
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.native_tls import Context, tls_socket
from fencepost_proxy.transport.proxied_socket import Buffers, Socket
from fencepost_proxy.transport.tls import TlsSocket, secure
from fencepost_proxy.types import Address, Monotonic, NodeId

#: How long the status page shows a failed connection to a broker. Clients retry all the time.
_UNREACHABLE_SECONDS = 30.0


class NotConnected(UpstreamUnavailable):
    """`kinds`: a word for each failed attempt, for the metrics."""

    def __init__(self, reason: str, kinds: Sequence[str]) -> None:
        super().__init__(reason)
        self.kinds = kinds

    @property
    def silent(self) -> bool:
        """The last attempt got no response, for seconds."""
        return self.kinds[-1] == "timeout"


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
        self.connector = Connector()
        #: Brokers that OpenSSL accepts and native code does not, with the context for which that holds.
        self._needs_openssl: dict[Address, Context] = {}
        self._failures: dict[NodeId | None, tuple[float, str]] = {}  # the last one by broker: when, and why

    async def connect(self, node_id: NodeId | None) -> tuple[Socket, Address]:
        """A socket, and the broker's address. Raises NotConnected with the reason of the last attempt."""
        try:
            return await self.probe(node_id)
        except NotConnected as error:
            for kind in error.kinds:
                self._metrics.upstream_errors["clients"].inc(kind)
            raise

    async def probe(self, node_id: NodeId | None) -> tuple[Socket, Address]:
        """`connect`, not counted as an attempt of a client."""
        reason: object = "the broker is not known"
        kinds: list[str] = []
        for address in self._addresses(node_id):
            try:
                sock = await self._open(address)
            except UpstreamUnavailable as error:
                reason = error
                kinds.append("tls")
            except TimeoutError as error:
                reason = f"{address}: {error or 'no response in time'}"
                kinds.append("timeout")
            except OSError as error:
                reason = f"{address}: {error.strerror or error}"
                kinds.append("unreachable")
            else:
                self._failures.pop(node_id, None)
                return sock, address
        self._failures[node_id] = time.monotonic(), str(reason)
        raise NotConnected(str(reason), kinds or ["unknown_broker"])

    def failure(self, node_id: NodeId | None) -> str | None:
        """Why the last connection for a client to this broker failed, if that was recently. None: the bootstrap
        servers."""
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
        deadline = deadline_in(self._config.limits.connect_timeout_seconds)
        sock = await self.connector.connect(address, remaining(deadline))
        context, config = self._certificates.upstream, self._config
        if context is None or (config.mode == "sidecar" and not config.broker_tls):
            return sock
        try:
            secured = await self._secured(sock, address, context, deadline)
        except TimeoutError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            failed = of_broker(error)
            self._metrics.upstream_tls_failures.inc(failed.kind)
            raise UpstreamUnavailable(f"{address}: {failed.words}") from error
        except ValueError as error:  # a host that no certificate can be for; untrusted ones are OSErrors, too
            sock.close()
            raise UpstreamUnavailable(f"{address}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return secured

    async def _secured(self, sock: socket.socket, address: Address, context: Context, deadline: Monotonic) -> TlsSocket:
        """If native code refuses the broker, OpenSSL decides with a second connection."""
        make = TlsSocket if self._needs_openssl.get(address) is context else tls_socket
        secured = make(sock, context, self._buffers.tls, address.host)
        try:
            async with asyncio.timeout(remaining(deadline)):
                await secure(secured)
        except ssl.SSLError:
            if secured.is_openssl:
                raise
        else:
            return secured
        secured.close()
        again = await self.connector.connect(address, remaining(deadline))
        try:
            secured = TlsSocket(again, context, self._buffers.tls, address.host)
            async with asyncio.timeout(remaining(deadline)):
                await secure(secured)
        except BaseException:
            again.close()
            raise
        self._needs_openssl[address] = context
        return secured
