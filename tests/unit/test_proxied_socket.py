"""One side of a link: what it is given to write arrives, in how many pieces ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from fencepost_proxy.transport import proxied_socket as side_module
from fencepost_proxy.transport.proxied_socket import Buffers, ProxiedSocket


class _Writer(ProxiedSocket):
    error: OSError | None = None

    def _lost(self, error: OSError | None) -> None:
        self.error = error


@contextlib.contextmanager
def _connected(
    near_host: str = "127.0.0.1", far_host: str = "127.0.0.1"
) -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server((far_host, 0)) as server,
        socket.create_connection(server.getsockname(), source_address=(near_host, 0)) as near,
        server.accept()[0] as far,
    ):
        yield near, far


async def _received(far: socket.socket) -> bytes:
    """Until the connection ends."""
    far.setblocking(False)
    got = b""
    while data := await asyncio.get_running_loop().sock_recv(far, 65536):
        got += data
    return got


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 5000])
async def test_more_chunks_than_a_system_call_takes(count: int) -> None:
    chunks: list[bytes | memoryview] = [b"%04d" % each for each in range(count)]
    with _connected() as (near, far):
        side = _Writer(near, Buffers(), asyncio.get_running_loop())
        side.write(chunks)
        side.close(0.0)
        assert await _received(far) == b"".join(chunks)
    assert side.error is None


class _Hanging(ProxiedSocket):
    """Of a client that goes on sending: the proxy no longer parses its bytes."""

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


@pytest.mark.parametrize("answer_bytes", [10, 8_000_000])
async def test_hung_up_client_gets_answer_without_a_reset(answer_bytes: int) -> None:
    """The client reads only after it has sent everything."""
    loop = asyncio.get_running_loop()
    with _connected() as (near, far):
        far.setblocking(False)
        side = _Hanging(near, Buffers(), loop)
        side.resume()
        side.write([bytes(answer_bytes)])
        side.hang_up(0.0)
        await loop.sock_sendall(far, bytes(3_000_000))
        assert len(await _received(far)) == answer_bytes
        await loop.sock_sendall(far, bytes(3_000_000))  # raises if the connection was reset
        assert not side.lost
        far.close()
        await side.ended_at_last.wait()

    assert side.received == b""
    assert side.lost == [None]
    assert side.closing_since == 0.0


async def test_client_that_ignores_the_close_is_cut_off() -> None:
    with _connected() as (near, _):
        side = _Hanging(near, Buffers(), asyncio.get_running_loop())
        side.resume()
        side.hang_up(0.0)
        side.hang_up(1.0)
        assert side.closing_since == 0.0
        side.abort()
        await asyncio.sleep(0)
        assert side.lost == [None]


# --- pacing: of use on a path that can be full, a timer for nothing within a host -------------------------------------


def _congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def _is_there(name: bytes) -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        return True
    return False


async def _made(sock: socket.socket) -> None:
    _Writer(sock, Buffers(), asyncio.get_running_loop())


@pytest.mark.skipif(sys.platform != "linux", reason="congestion control can be chosen on Linux only")
class TestPacing:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
    def test_what_stays_on_this_host_is_not_paced(self, host: str) -> None:
        if not _is_there(b"bbr"):
            pytest.skip("this host has no BBR, or does not let this account choose it")
        with _connected(host, host) as (near, far):
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
                asyncio.run(_made(sock))
                assert _congestion_control(sock) == b"reno"

    def test_between_two_addresses_the_administrators_choice_stays(self) -> None:
        if not _is_there(b"bbr"):
            pytest.skip("this host has no BBR, or does not let this account choose it")
        with _connected("127.0.0.1", "127.0.0.2") as (near, _):
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            asyncio.run(_made(near))
            assert _congestion_control(near) == b"bbr"

    def test_non_pacing_congestion_control_stays_unchanged(self) -> None:
        if not _is_there(b"cubic"):
            pytest.skip("this host has no CUBIC, or does not let this account choose it")
        with _connected() as (near, _):
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            asyncio.run(_made(near))
            assert _congestion_control(near) == b"cubic"

    def test_peer_already_disconnected_raises_nothing_at_start(self) -> None:
        with _connected() as (near, far):
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            far.close()  # by a reset: the connection has no peer any more
            asyncio.run(_made(near))


class _Counting(ProxiedSocket):
    """Notes how much each read brought, and takes `seconds` for it."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, clock: list[float]) -> None:
        super().__init__(sock, Buffers(), loop)
        self.clock, self.seconds = clock, 0.0
        self.reads: list[int] = []

    def _received(self, data: memoryview) -> None:
        self.reads.append(len(data))
        self.received_at = self.clock[0]
        self.clock[0] += self.seconds

    def _lost(self, error: OSError | None) -> None: ...


async def test_slow_bytes_are_read_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other connections must not wait for all requests that one socket has."""
    clock = [100.0]
    monkeypatch.setattr(side_module, "monotonic", lambda: clock[0])

    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.sendall(bytes(60_000))
        side = _Counting(near, asyncio.get_running_loop(), clock)
        side.seconds = 0.06
        side.read_bytes_max = 30_000
        side._readable()
        side._readable()
        side.seconds = 0.0
        for _ in range(3):
            side._readable()

    assert side.reads == [30_000, 1024, 1024, 2048, 4096]
