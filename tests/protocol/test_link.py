"""A link's two sides when they come, go and stall out of step."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fencepost_proxy.net.link import WRITE_BUFFER_BYTES_MAX, ClientSide, Link, UpstreamSide
from fencepost_proxy.session import messages
from fencepost_proxy.types import Address

#: More than the kernel takes off a sender's hands on loopback.
SIZE = 48 * WRITE_BUFFER_BYTES_MAX


class Driver:
    def __init__(self) -> None:
        self.opened: list[Link] = []
        self.closed: list[Link] = []
        self.events: list[messages.Event] = []

    def session_event(self, connection: int, event: messages.Event) -> None:
        self.events.append(event)

    def link_opened(self, link: Link) -> None:
        self.opened.append(link)

    def link_closed(self, link: Link) -> None:
        self.closed.append(link)

    def now(self) -> float:
        return 1.0


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return far, server.accept()[0]


class Pair:
    """A link on two real connections: `client` and `broker` are the far ends."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.client, self._near_client = _tcp_pair()
        self.broker, self._near_broker = _tcp_pair()
        self.ends = (self.client, self._near_client, self.broker, self._near_broker)
        self.links: list[Link] = []

    async def accept(self) -> Link:
        def accepted(side: ClientSide) -> Link:
            link = Link(1, side, self.driver, peer=Address("client", 1), local_host="127.0.0.1", node_id=None)
            self.links.append(link)
            return link

        side = ClientSide(bytearray(65536), accepted)
        await asyncio.get_running_loop().create_connection(lambda: side, sock=self._near_client)
        return self.links[0]

    async def connect(self, link: Link) -> UpstreamSide:
        side = UpstreamSide(bytearray(65536))
        await asyncio.get_running_loop().create_connection(lambda: side, sock=self._near_broker)
        link.connected(side)
        return side


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    sockets = Pair()
    try:
        yield sockets
    finally:
        for link in sockets.links:
            for side in (link.client, link.upstream):
                if side is not None:
                    side.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for each in sockets.ends:
            each.close()


def test_a_client_that_left_before_its_upstream_connection_leaves_nothing_behind() -> None:
    async def story() -> None:
        async with pair() as sockets:
            link = await sockets.accept()
            sockets.client.close()
            await asyncio.sleep(0.05)
            assert sockets.driver.closed == [link]

            upstream = await sockets.connect(link)
            await asyncio.sleep(0.05)

            assert sockets.driver.opened == [], "a session that nobody would ever end"
            assert upstream.transport is not None
            assert upstream.transport.is_closing()

    asyncio.run(story())


def test_a_client_that_does_not_read_is_not_read_either() -> None:
    """Some answers are made here: without this they would pile up however still upstream is."""

    async def story() -> None:
        async with pair() as sockets:
            link = await sockets.accept()
            await sockets.connect(link)
            link.perform(messages.ToClient([b"x" * (SIZE)]))
            sockets.client.send(b"another request")
            await asyncio.sleep(0.05)
            assert not any(isinstance(event, messages.ClientBytes) for event in sockets.driver.events)

            sockets.client.setblocking(False)
            left = SIZE
            while left:
                left -= len(await asyncio.get_running_loop().sock_recv(sockets.client, 1 << 20))
            await asyncio.sleep(0.05)
            assert any(isinstance(event, messages.ClientBytes) for event in sockets.driver.events)

    asyncio.run(story())
