"""A bridge relays bytes in both directions at the reader's pace, until one end closes."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from pathlib import Path

import pytest

from fencepost_proxy.config import ListenTls
from fencepost_proxy.transport.certificates import listener_context
from fencepost_proxy.transport.proxied_socket import UNSENT_BYTES_MAX, Buffers
from fencepost_proxy.transport.tls import TlsSocket, secure
from fencepost_proxy.workers.bridge import Bridge
from tests.kit.event_loop import in_event_loop
from tests.kit.waiting import until_async
from tests.protocol.test_proxied_connection import unsent_bytes
from tests.support.certificates import Authority

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of the proxy, of its client."""
    directory: Path = tmp_path_factory.mktemp("authority")
    authority = Authority(directory)
    server = authority.sign("server")
    return (
        listener_context(ListenTls(server.certificate, server.key)),
        ssl.create_default_context(cafile=str(authority.file)),
    )


class Scene:
    """A client with TLS, and the end of the bridge that another process has."""

    def __init__(self) -> None:
        self.ended: list[Bridge] = []

    async def begin(self, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
        buffers = Buffers()
        near = TlsSocket(accepted, contexts[0], buffers.tls)
        wrapping = asyncio.to_thread(contexts[1].wrap_socket, client, server_hostname="localhost")
        self.client, _ = await asyncio.gather(wrapping, secure(near))
        self.client.settimeout(WAIT_SECONDS)
        self.bridge = Bridge(near, buffers, self.ended.append)
        self.far = self.bridge.far
        self.far.settimeout(WAIT_SECONDS)


def receive(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size and (data := sock.recv(100_000)):
        received += data
    return bytes(received)


@in_event_loop
async def test_bytes_pass_both_ways_and_ends_too(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    up, down = (random.Random(seed).randbytes(2_000_000) for seed in (1, 2))
    scene = Scene()
    await scene.begin(contexts)
    _, at_far = await asyncio.gather(
        asyncio.to_thread(scene.client.sendall, up), asyncio.to_thread(receive, scene.far, len(up))
    )
    _, at_client = await asyncio.gather(
        asyncio.to_thread(scene.far.sendall, down), asyncio.to_thread(receive, scene.client, len(down))
    )
    assert (at_far, at_client) == (up, down)
    # When the other process sends its last bytes and closes, the client receives both.
    scene.far.sendall(b"last words")
    scene.far.close()
    assert await asyncio.to_thread(receive, scene.client, 1_000) == b"last words"
    await until_async(lambda: scene.ended, "the bridge to end")
    scene.client.close()


@in_event_loop
async def test_a_client_that_ends(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    scene = Scene()
    await scene.begin(contexts)
    scene.client.sendall(b"last words")
    scene.client.close()
    assert await asyncio.to_thread(receive, scene.far, 1_000) == b"last words"
    await until_async(lambda: scene.ended, "the bridge to end")
    scene.far.close()


@in_event_loop
async def test_unread_peer_blocks_the_sender(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    scene = Scene()
    await scene.begin(contexts)
    scene.client.setblocking(False)
    sent, silent_since = 0, time.monotonic()
    # Until nothing more is taken for a second: the kernel's buffers are full, and the bridge buffers little more.
    while time.monotonic() - silent_since < 1.0:
        await asyncio.sleep(0.005)
        try:
            sent += scene.client.send(bytes(65_536))
            silent_since = time.monotonic()
        except (ssl.SSLWantWriteError, BlockingIOError):
            continue
    assert sent > UNSENT_BYTES_MAX
    assert 0 < max(unsent_bytes(end) for end in scene.bridge._ends) <= UNSENT_BYTES_MAX + 256 * 1024
    # A bridge that stays blocked is closed.
    now = time.monotonic()
    scene.bridge.close_stuck(now, drain_seconds=60.0, idle_seconds=60.0)
    await asyncio.sleep(0.01)
    assert not scene.ended
    scene.bridge.close_stuck(now + 121.0, drain_seconds=60.0, idle_seconds=60.0)
    await until_async(lambda: scene.ended, "the bridge to end")
    scene.client.close()
    scene.far.close()
