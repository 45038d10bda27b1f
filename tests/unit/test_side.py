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


class _Hanging(Side):
    """Of a client that goes on sending: nothing of it is looked at any more."""

    lost: list[OSError | None]

    def __init__(self, sock: socket.socket, buffers: Buffers, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(sock, buffers, loop)
        self.lost = []
        self.ended_at_last = asyncio.Event()
        self.received = b""

    def _received(self, data: memoryview) -> None:
        self.received += data

    def _lost(self, error: OSError | None) -> None:
        self.lost.append(error)
        self.ended_at_last.set()


async def _hung_up(answer: bytes, sent_behind: bytes) -> tuple[bytes, _Hanging]:
    """What arrives at a client that reads nothing before it has sent all, and then only its answer and the end."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near, (far, _) = socket.create_connection(server.getsockname()), server.accept()
    far.setblocking(False)
    with far:
        side = _Hanging(near, Buffers(), loop)
        side.start()
        side.write([answer])
        side.hang_up(0.0)
        await loop.sock_sendall(far, sent_behind)
        got = b""
        while data := await loop.sock_recv(far, 65536):
            got += data
        await loop.sock_sendall(far, sent_behind)  # a connection that was reset would say so here
        assert not side.lost
    await side.ended_at_last.wait()
    return got, side


@pytest.mark.parametrize("answer_bytes", [10, 8_000_000])
def test_a_client_that_goes_on_sending_gets_its_answer_and_the_end_and_no_reset(answer_bytes: int) -> None:
    got, side = asyncio.run(_hung_up(bytes(answer_bytes), bytes(3_000_000)))

    assert len(got) == answer_bytes
    assert side.received == b""
    assert side.lost == [None]
    assert side.closing_since == 0.0


def test_a_client_that_never_sees_the_end_is_cut_off() -> None:
    async def cut() -> list[OSError | None]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near, (far, _) = socket.create_connection(server.getsockname()), server.accept()
        with far:
            side = _Hanging(near, Buffers(), asyncio.get_running_loop())
            side.start()
            side.hang_up(0.0)
            side.hang_up(1.0)
            assert side.closing_since == 0.0
            side.abort()
            await asyncio.sleep(0)
        return side.lost

    assert asyncio.run(cut()) == [None]
