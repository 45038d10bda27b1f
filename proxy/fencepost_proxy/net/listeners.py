"""Where clients connect: the bootstrap listener and one listener per broker.

A listener's socket is bound and listening before anybody is told of it; a client that connects a moment before its
connections are accepted waits in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address

BACKLOG = 1024


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


async def accept(sock: socket.socket, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(factory, sock=sock, backlog=BACKLOG)
