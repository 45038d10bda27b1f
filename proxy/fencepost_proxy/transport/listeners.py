"""Client listeners: the bootstrap listener and one listener per broker.

A socket listens before its address is advertised; connections that arrive before `accept` wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from fencepost_proxy import logs
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address

BACKLOG = 1024
_log = logs.get("transport.listeners")
_limited_log = logs.RateLimitedLog(_log)
_ACCEPTED_AT_ONCE_MAX = 64
#: A resource of this process or machine is exhausted.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 1.0
#: How long a process leaves a connection to workers with fewer connections.
_YIELD_SECONDS = 0.002


def bind(address: Address, what: str) -> socket.socket:
    """A listening socket. Raises `ConfigError` with the remedy."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            why = "another process listens there; stop it or choose another port"
        elif error.errno in (errno.EACCES, errno.EPERM):
            why = "permission denied; ports below 1024 need root"
        else:
            why = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {address} for {what}: {why}") from error
    return sock


class Acceptor:
    """Accept connections of one socket; `accepted` gets each with its peer address.

    `others_first`: for a shared socket, whether another process should accept the next connection. This process then
    defers once, for a moment.
    """

    def __init__(
        self,
        sock: socket.socket,
        accepted: Callable[[socket.socket, Address], None],
        others_first: Callable[[], bool] | None = None,
    ) -> None:
        self._others_first = others_first
        self._at_once_max = _ACCEPTED_AT_ONCE_MAX if others_first is None else 1
        self._left_to_others = False
        self._sock = sock
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """Stop accepting. The caller closes the socket."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        if self._others_first is not None:
            self._left_to_others = not self._left_to_others and self._others_first()
            if self._left_to_others:
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(_YIELD_SECONDS, self._resume)
                return
        for _ in range(self._at_once_max):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                # Connections wait in the kernel's queue. Without a pause the loop would call this again immediately.
                _limited_log.error("accept", "cannot accept connections", reason=error.strerror)
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            self._accepted(sock, Address(*peer[:2]))

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._readable)


async def connect(address: Address) -> socket.socket:
    """Connect to the first reachable address of a host. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{address.host} has no address")
    for family, kind, protocol, _, where in infos:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, where)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
