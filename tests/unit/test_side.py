"""One side of a link: what it is given to write arrives, in how many pieces ever."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fencepost_proxy.net.side import Buffers, Side


class _Writer(Side):
    error: OSError | None = None

    def _lost(self, error: OSError | None) -> None:
        self.error = error


async def _written(chunks: list[bytes | memoryview]) -> tuple[bytes, OSError | None]:
    """What arrives of them, and what went wrong."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near, (far, _) = socket.create_connection(server.getsockname()), server.accept()
    with far:
        side = _Writer(near, Buffers(), loop)
        side.write(chunks)
        side.close(0.0)
        far.setblocking(False)
        got = b""
        while data := await loop.sock_recv(far, 65536):
            got += data
    return got, side.error


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 5000])
def test_more_chunks_than_a_system_call_takes(count: int) -> None:
    chunks: list[bytes | memoryview] = [b"%04d" % each for each in range(count)]
    assert asyncio.run(_written(chunks)) == (b"".join(chunks), None)
