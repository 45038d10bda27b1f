"""Where clients connect: the bootstrap listener and one listener per broker.

A listener's socket is bound and listening before anybody is told of it; a client that connects a moment before its
connections are accepted waits in the kernel's queue.
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
_log = logs.get("net.listeners")
_limited_log = logs.RateLimitedLog(_log)
_ACCEPTED_AT_ONCE_MAX = 64
#: This process or the whole machine has used something up.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 1.0
#: How long a process leaves a connection to those that have fewer.
_TURN_SECONDS = 0.002


def bind(address: Address, what: str) -> socket.socket:
    """A listening socket. Raises ConfigError saying what to change where the address cannot be had."""
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
            why = "this user may not listen there; ports below 1024 belong to root"
        else:
            why = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {address} for {what}: {why}") from error
    return sock


class Acceptor:
    """Takes the connections of one listening socket; `accepted` gets each, with its peer's address.

    `others_turn` – where processes share the socket: whether another one should have the next connection. It is left
    to them for a moment, once; whoever is still needed then takes it.
    """

    def __init__(
        self,
        sock: socket.socket,
        accepted: Callable[[socket.socket, Address], None],
        others_turn: Callable[[], bool] | None = None,
    ) -> None:
        self._others_turn = others_turn
        self._at_once_max = _ACCEPTED_AT_ONCE_MAX if others_turn is None else 1
        self._left_to_others = False
        self._sock = sock
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """Accepts nobody any more; the socket is its owner's to close."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        if self._others_turn is not None:
            self._left_to_others = not self._left_to_others and self._others_turn()
            if self._left_to_others:
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(_TURN_SECONDS, self._go_on)
                return
        for _ in range(self._at_once_max):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                # They wait in the kernel's queue. Without a pause this would be called again at once, for ever.
                _limited_log.error("accept", "no connection can be accepted now", reason=error.strerror)
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._go_on)
                return
            self._accepted(sock, Address(*peer[:2]))

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._readable)


async def connect(address: Address) -> socket.socket:
    """A connection to the first of a name's addresses that takes one. Raises OSError."""
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
