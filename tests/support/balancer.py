"""One address for several proxies, as a load balancer in TCP mode gives it: who cannot be connected to is passed over.

The proxies listen on the same ports of other addresses of this machine, and advertise the balancer's.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16


class Balancer:
    """In front of `hosts`, on `count` ports in a row from `port` on."""

    def __init__(self, hosts: Sequence[str], port: int, count: int) -> None:
        self._rotation = itertools.cycle(range(len(hosts)))
        self._hosts = list(hosts)
        self._open: set[asyncio.StreamWriter] = set()
        self._ports = range(port, port + count)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        servers = [await asyncio.start_server(self._accepted, HOST, port) for port in self._ports]
        self._started.set()
        await self._end.wait()
        for server in servers:
            server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0.1)  # until they are closed

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        first = next(self._rotation)
        for host in self._hosts[first:] + self._hosts[:first]:
            with suppress(OSError):
                to_reader, to_writer = await asyncio.open_connection(host, port)
                break
        else:
            writer.close()
            return
        self._open |= {writer, to_writer}
        await asyncio.gather(_pass_on(reader, to_writer), _pass_on(to_reader, writer))
        self._open -= {writer, to_writer}


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one end closes; then the other does."""
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
