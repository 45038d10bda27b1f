"""Client listeners: the bootstrap listener and one listener per broker.

A socket listens before its address is advertised; connections that arrive before `accept` wait in the kernel's queue.
With `reuse_port` it listens from `accept` on, since the kernel would give it connections that other proxies can serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Mapping, Sequence

from fencepost_proxy import logs
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster import hints
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError, Reason
from fencepost_proxy.transport.loop_share import Share
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.produce import NodeEndpoint

Listening = socket.socket
#: Gets an accepted connection, its peer, and the broker of its listener.
Accepted = Callable[[socket.socket, Address, NodeId | None], None]

BACKLOG = 1024
_log = logs.get("transport.listeners")
_limited_log = logs.RateLimitedLog(_log)
#: A resource of this process or machine is exhausted.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 1.0
#: Pause before a port that is in use is tried again; later ones double.
_RETRY_SECONDS = 0.5
_RETRY_SECONDS_MAX = 10.0
#: Several hundred connections that are opened at once, as after a restart, do not wait.
_SHARE = 0.25
_CREDIT_SECONDS = 0.25


def bind(address: Address, what: str, *, reuse_port: bool = False, listens: bool = True) -> socket.socket:
    """A bound socket, which `listens`. Raises `ConfigError` with the remedy."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with contextlib.ExitStack() as chosen:
        if not address.port:
            # A port that the kernel chooses for a socket is lost when that socket stops listening (`Listeners.refuse`).
            chosen_by = chosen.enter_context(_socket(family, reuse_port))
            with contextlib.suppress(OSError):  # which the next `bind` raises too
                chosen_by.bind((address.host, 0))
                address = Address(address.host, chosen_by.getsockname()[1])
        return _bound(_socket(family, reuse_port), address, what, listens=listens)


def _socket(family: int, reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.setblocking(False)
    return sock


def _bound(sock: socket.socket, address: Address, what: str, *, listens: bool) -> socket.socket:
    try:
        sock.bind((address.host, address.port))
        if listens:
            sock.listen(BACKLOG)
    except OSError as error:
        sock_reuses_port = sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
        sock.close()
        if error.errno == errno.EADDRINUSE:
            why = "another process listens there; stop it or choose another port"
            if sock_reuses_port:
                why += " (with reuse_port, the proxies must be of one user and all set it)"
        elif error.errno in (errno.EACCES, errno.EPERM):
            why = "permission denied; ports below 1024 need root"
        else:
            why = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {address} for {what}: {why}") from error
    return sock


async def listen(address: Address) -> list[socket.socket]:
    """A listening socket for each address of a host name. Raises `OSError`."""
    loop, sockets = asyncio.get_running_loop(), list[socket.socket]()
    infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, kind, protocol, _, where in dict.fromkeys(infos):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


class Acceptor:
    """Accept connections of one socket; `accepted` gets each with its peer address.

    One in each iteration of the event loop: each costs more than a request of an open connection, which must not wait.
    `share` – limits them further; `accepted` charges what they cost.
    """

    def __init__(
        self,
        sock: socket.socket,
        accepted: Callable[[socket.socket, Address], None],
        share: Share,
    ) -> None:
        self._sock = sock
        self._accepted = accepted
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """Stop accepting. The caller closes the socket."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        try:
            sock, peer = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            # Connections wait in the kernel's queue. Without a pause the loop would call this again immediately.
            _limited_log.error("accept", "cannot accept connections", reason=error.strerror)
            self._wait(_PAUSE_SECONDS)
            return
        self._accepted(sock, Address.of_socket(peer))
        if seconds := self._share.wait_seconds:
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._readable)


class Listeners:
    """The bootstrap listener and, unless this is a sidecar, one listener per broker.

    A port that is in use is tried again. `problems` – why a broker has no listener now.
    """

    def __init__(self, config: ProxyConfig, book: AddressBook) -> None:
        self._config = config
        self._book = book
        self._sockets: dict[NodeId | None, socket.socket] = {}
        self._acceptors: dict[NodeId | None, Acceptor] = {}
        self._refusing: set[NodeId | None] = set()
        self._retries: dict[NodeId | None, asyncio.TimerHandle] = {}
        self._accepted: Accepted | None = None
        self.problems: dict[NodeId, Reason] = {}
        #: Of the event loop, for what new connections cost up to their first request.
        self.share = Share(_SHARE, _CREDIT_SECONDS)

    def __contains__(self, node_id: NodeId) -> bool:
        return node_id in self._sockets

    @property
    def bootstrap(self) -> Address:
        """Where the bootstrap listener listens, once it does."""
        return Address.of_socket(self._sockets[None].getsockname())

    def open_bootstrap(self) -> None:
        """Raises `ConfigError`."""
        self._sockets[None] = self._bind(self._config.listen, "clients")

    def _bind(self, address: Address, what: str) -> socket.socket:
        shared = self._config.reuse_port
        return bind(address, what, reuse_port=shared, listens=not shared or self._accepted is not None)

    def accept(self, accepted: Accepted) -> None:
        """From now on, on these listeners and on later ones."""
        self._accepted = accepted
        for node_id, sock in self._sockets.items():
            sock.listen(BACKLOG)
            self._accept_on(node_id, accepted)

    def _accept_on(self, node_id: NodeId | None, accepted: Accepted) -> None:
        self._acceptors[node_id] = Acceptor(
            self._sockets[node_id], lambda sock, peer: accepted(sock, peer, node_id), self.share
        )

    def brokers_changed(self, brokers: Mapping[NodeId, Address]) -> None:
        self.open([node_id for node_id, address in brokers.items() if self._book.learn(node_id, address)])

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        """The same broker with the address by which clients reach it."""
        if self._config.mode == "sidecar":
            return endpoint
        node_id = NodeId(endpoint.node_id)
        self.brokers_changed({node_id: Address(endpoint.host, endpoint.port)})
        return NodeEndpoint(node_id, *self._book.advertised(node_id, local_host), endpoint.rack)

    def open(self, node_ids: Sequence[NodeId]) -> None:
        """Listens before it returns, so that clients that learn the port can connect."""
        if self._config.mode == "sidecar":
            return
        for node_id in node_ids:
            # The listener of a broker that has moved gets the address from the book.
            if node_id not in self._sockets and node_id not in self._retries:
                self._open(node_id)

    def _open(self, node_id: NodeId, pause_seconds: float = _RETRY_SECONDS) -> None:
        self._retries.pop(node_id, None)
        try:
            port = self._book.listener_port(node_id)
            sock = self._bind(Address(self._config.listen.host, port), f"broker {node_id}")
        except ConfigError as error:
            _limited_log.error(("listener", node_id), "no listener for a broker", broker=node_id, reason=error)
            self.problems[node_id] = Reason(str(error), hints.LISTENER)
            self._retry(node_id, pause_seconds, lambda longer: self._open(node_id, longer))
            return
        self.problems.pop(node_id, None)
        self._sockets[node_id] = sock
        self._book.listens_on(node_id, sock.getsockname()[1])
        _log.info("listening for broker", broker=node_id, port=sock.getsockname()[1])
        if self._accepted is not None:
            self._accept_on(node_id, self._accepted)

    def _retry(self, node_id: NodeId | None, pause_seconds: float, again: Callable[[float], None]) -> None:
        longer = min(2 * pause_seconds, _RETRY_SECONDS_MAX)
        self._retries[node_id] = asyncio.get_running_loop().call_later(pause_seconds, again, longer)

    # ---- while a broker is down

    def refuse(self, node_id: NodeId | None) -> bool:
        """Clients of this listener get what the broker's own port would give them: no connection. Clients that are
        accepted and then disconnected come back at once. Returns False if it was so before.

        The socket stays bound, so that the port stays this listener's.
        """
        if self._accepted is None or node_id in self._refusing or node_id not in self._acceptors:
            return False
        self._acceptors.pop(node_id).close()
        with contextlib.suppress(OSError):  # not on every platform: then clients wait in the kernel's queue
            self._sockets[node_id].shutdown(socket.SHUT_RDWR)
        self._refusing.add(node_id)
        return True

    def resume(self, node_id: NodeId | None, pause_seconds: float = _RETRY_SECONDS) -> None:
        """Ends `refuse`."""
        self._retries.pop(node_id, None)
        if self._accepted is None or node_id not in self._refusing:
            return
        try:
            self._sockets[node_id].listen(BACKLOG)
        except OSError as error:
            # A process with SO_REUSEADDR has taken the port meanwhile.
            of = "the bootstrap listener" if node_id is None else f"broker {node_id}"
            _limited_log.error(("listener", node_id), "listener cannot be opened again", of=of, reason=error.strerror)
            if node_id is not None:
                self.problems[node_id] = Reason(f"cannot listen again: {error.strerror}", hints.LISTENER)
            self._retry(node_id, pause_seconds, lambda longer: self.resume(node_id, longer))
            return
        self._refusing.discard(node_id)
        if node_id is not None:
            self.problems.pop(node_id, None)
        self._accept_on(node_id, self._accepted)

    def close(self) -> None:
        """New connections are refused at once, so that clients try another proxy."""
        self._accepted = None
        for acceptor in self._acceptors.values():
            acceptor.close()
        self._acceptors.clear()
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        for sock in self._sockets.values():
            sock.close()
