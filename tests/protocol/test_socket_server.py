"""Accepted connections, from their first byte to their upstream connection, on real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster.refused import RefusedConnections
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.session.frames import messages
from fencepost_proxy.transport import socket_server
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.listeners import Listeners
from fencepost_proxy.transport.loop_share import OnePerIteration, Share
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.transport.proxied_socket import Buffers
from fencepost_proxy.transport.socket_server import SocketServer
from fencepost_proxy.transport.stalled import StalledConnections
from fencepost_proxy.transport.tls import TlsSocket
from fencepost_proxy.transport.upstreams import NotConnected
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.apis import API_VERSIONS
from tests.kit.waiting import until_async
from tests.protocol.test_proxied_connection import Driver, request, response
from tests.protocol.test_tls_socket import authority, executor, listen, server, trusting
from tests.support.certificates import Authority, Certificate
from tests.support.executors import each_executor, executing

__all__ = ["authority", "executor", "server"]  # fixtures


class Upstreams:
    """Connects to a listening socket of the test, or refuses."""

    def __init__(self) -> None:
        self.broker = socket.create_server(("127.0.0.1", 0))
        self.broker.setblocking(False)
        self.refuses = ""
        self.attempts = 0
        self.probe = self.connect

    async def connect(self, node_id: NodeId | None) -> tuple[socket.socket, Address]:
        self.attempts += 1
        if self.refuses:
            raise NotConnected("no", [self.refuses])
        address = Address(*self.broker.getsockname())
        return socket.create_connection(address), address


class ManyDriver(Driver):
    """Of several connections."""

    def __init__(self, connections: ClientConnections) -> None:
        super().__init__()
        self.connections = connections

    def session_event(self, connection: int, event: messages.Event) -> None:
        self.opened = [self.connections.by_number[connection]]
        super().session_event(connection, event)

    def proxied_closed(self, proxied: ProxiedConnection) -> None:
        self.connections.remove(proxied)


class Served:
    def __init__(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", **limits: Any) -> None:
        self.metrics, self.upstreams = Metrics(), Upstreams()
        self.accepted = 0  # with connections that never send a request, which the metrics leave out
        self.connections = ClientConnections(lambda: Limits(**limits), self.metrics)
        self.refused = RefusedConnections(self.metrics)
        self.driver = ManyDriver(self.connections)
        config = ProxyConfig(upstream=(Address("127.0.0.1", 1),), listen=Address(host, 0))
        self.listeners = Listeners(config, AddressBook(0))
        self.server = SocketServer(
            self.connections,
            SimpleNamespace(sessions={}),  # type: ignore[arg-type]
            self.driver,
            upstreams=self.upstreams,  # type: ignore[arg-type]
            certificates=SimpleNamespace(listener=tls),  # type: ignore[arg-type]
            buffers=Buffers(),
            metrics=self.metrics,
            limits=lambda: Limits(**limits),
            listeners=self.listeners,
            refused=self.refused,
        )

    def client(self) -> socket.socket:
        return socket.create_connection(self.listeners.bootstrap)


@asynccontextmanager
async def served(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", **limits: Any) -> AsyncIterator[Served]:
    stage = Served(tls, host, **limits)
    stage.listeners.open_bootstrap()

    def accepted(sock: socket.socket, peer: Address, node_id: NodeId | None) -> None:
        stage.accepted += 1
        stage.server.accepted(sock, peer, node_id)

    stage.listeners.accept(accepted)
    try:
        yield stage
    finally:
        stage.listeners.close()
        stage.upstreams.broker.close()
        await stage.server.close()
        stage.connections.abort()
        await asyncio.sleep(0)


async def reply(stage: Served, sock: socket.socket, correlation_id: int = 1) -> bytes:
    """Of the broker, as the client receives it."""
    loop = asyncio.get_running_loop()
    broker, _ = await loop.sock_accept(stage.upstreams.broker)
    with broker:
        received = await loop.sock_recv(broker, 1000)
        await loop.sock_sendall(broker, response(correlation_id))
        sock.setblocking(False)
        assert await loop.sock_recv(sock, 1000) == response(correlation_id)
    return received


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_ipv4_client_of_dual_stack_listener_gets_ipv4_broker_addresses() -> None:
    async with served(host="::") as stage:
        with socket.create_connection(("127.0.0.1", stage.listeners.bootstrap.port)):
            await until_async(lambda: stage.connections.by_number, "an accepted client")
            (proxied,) = stage.connections.by_number.values()
            assert (proxied.local_host, proxied.peer.host) == ("127.0.0.1", "127.0.0.1")


async def test_client_is_connected_upstream_at_its_first_request_header() -> None:
    async with served() as stage:
        frame = request(1, b"payload")
        with stage.client() as client:
            for byte in range(11):
                client.sendall(frame[byte : byte + 1])
                await asyncio.sleep(0.01)
            assert len(stage.connections.by_number) == 1
            assert not stage.upstreams.attempts
            client.sendall(frame[11:])
            assert await reply(stage, client) == frame
            assert stage.upstreams.attempts == 1


@pytest.mark.parametrize("sent", [b"", b"\0\0"])
async def test_client_that_closes_without_request_costs_no_upstream_connection(sent: bytes) -> None:
    async with served() as stage:
        for _ in range(20):
            with stage.client() as client:
                client.sendall(sent)
        await until_async(lambda: stage.accepted == 20, "all accepted")
        await until_async(lambda: not stage.connections.by_number, "all closed")
        assert not stage.upstreams.attempts


async def test_tls_client_is_connected_upstream_at_its_first_request(authority: Authority, server: Certificate) -> None:
    async with served(listen(server)) as stage:
        frame = request(1, b"payload")
        reader, writer = await asyncio.open_connection(
            *stage.listeners.bootstrap, ssl=trusting(authority), server_hostname="localhost"
        )
        await asyncio.sleep(0.1)
        assert not stage.upstreams.attempts
        writer.write(frame)
        loop = asyncio.get_running_loop()
        broker, _ = await loop.sock_accept(stage.upstreams.broker)
        with broker:
            assert await loop.sock_recv(broker, 1000) == frame
            await loop.sock_sendall(broker, response(1))
            assert await reader.readexactly(len(response(1))) == response(1)
        writer.close()
        idle = await asyncio.open_connection(
            *stage.listeners.bootstrap, ssl=trusting(authority), server_hostname="localhost"
        )
        idle[1].close()
        await until_async(lambda: not stage.connections.by_number, "both closed")
        assert stage.upstreams.attempts == 1


async def test_event_loop_iteration_accepts_one_connection() -> None:
    async with served() as stage:
        with ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(stage.client())
            while stage.accepted < 30:
                before = stage.accepted
                await asyncio.sleep(0)
                assert stage.accepted - before <= 1


async def test_event_loop_iteration_begins_one_upstream_connection() -> None:
    async with served() as stage:
        with ExitStack() as stack:
            clients = [stack.enter_context(stage.client()) for _ in range(20)]
            await until_async(lambda: len(stage.connections.by_number) == 20, "all accepted")
            for client in clients:
                client.sendall(request(1))
            while stage.upstreams.attempts < 20:
                before = stage.upstreams.attempts
                await asyncio.sleep(0)
                assert stage.upstreams.attempts - before <= 1


async def test_each_step_of_a_tls_handshake_waits_for_its_iteration(
    authority: Authority, server: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, admitted, make = [0], [0], socket_server.tls_socket

    def made(*arguments: Any) -> TlsSocket:
        sock = make(*arguments)

        class Counted(type(sock)):  # type: ignore[misc]
            __slots__ = ()

            def handshake(self) -> bool:
                steps[0] += 1
                return bool(super().handshake())

        sock.__class__ = Counted
        return sock

    monkeypatch.setattr(socket_server, "tls_socket", made)
    async with served(listen(server)) as stage:
        admit = stage.server._handshakes.next

        async def next_iteration() -> None:
            await admit()
            admitted[0] += 1

        monkeypatch.setattr(stage.server._handshakes, "next", next_iteration)
        _, writer = await asyncio.open_connection(
            *stage.listeners.bootstrap, ssl=trusting(authority), server_hostname="localhost"
        )
        await until_async(lambda: stage.metrics.tls_handshakes.get("ok"), "the handshake")
        writer.close()
    assert steps == admitted
    assert steps[0] > 1


async def test_new_connection_and_its_upstream_connection_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[float] = []
    async with served() as stage:
        monkeypatch.setattr(stage.listeners.share, "charge", charged.append)
        with stage.client() as client:
            await until_async(lambda: len(charged) == 1, "the accepted connection")
            client.sendall(request(1))
            await until_async(lambda: len(charged) == 2, "the upstream connection")
    assert min(charged) > 0


@pytest.mark.parametrize(
    ("sent", "seconds", "reason"),
    [
        (b"", 11.0, None),
        (b"", 21.0, "sent nothing for 20 s"),
        (b"\0\0", 9.0, None),
        (b"\0\0", 11.0, "stopped within a frame's header for 10 s"),
    ],
)
async def test_client_that_stalls_before_its_first_request_is_closed(
    sent: bytes, seconds: float, reason: str | None
) -> None:
    limits = Limits(handshake_seconds=20.0, header_seconds=10.0)
    dispatcher: Any = SimpleNamespace(sessions={}, past_barriers=SimpleNamespace(find=lambda _: False))
    async with served() as stage:
        stalled = StalledConnections(lambda: limits, dispatcher, stage.metrics)
        with stage.client() as client:
            client.sendall(sent)
            await until_async(lambda: stage.connections.by_number, "an accepted client")
            (proxied,) = stage.connections.by_number.values()
            await until_async(lambda: proxied.client.unread_bytes() == len(sent), "its bytes")
            found = stalled._stalled(proxied, proxied.opened_at + seconds)
            assert (found or "").startswith(f"the client {reason}" if reason else "")
            stalled.close([proxied], proxied.opened_at + seconds)
            assert (proxied.client.closing_since is None) is (reason is None)


async def test_turns_admit_one_waiter_each_in_order() -> None:
    iterations, admitted = OnePerIteration(), list[int]()

    async def wait(number: int) -> None:
        await iterations.next()
        admitted.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(10)]
    await asyncio.sleep(0)
    waiting[5].cancel()
    while len(admitted) < 9:
        before = len(admitted)
        await asyncio.sleep(0)
        assert len(admitted) - before <= 1
    assert admitted == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    await asyncio.wait_for(iterations.next(), 60)


def test_share_permits_a_burst_and_then_its_part_of_the_time() -> None:
    share = Share(0.25, credit_seconds=0.5)
    share.charge(0.5)
    assert share.wait_seconds == 0.0
    share.charge(0.25)
    assert 0.9 < share.wait_seconds <= 1.0


async def test_flood_of_connections_gets_its_share_of_the_event_loop() -> None:
    async with served() as stage:
        with ExitStack() as stack:
            stage.listeners.share.charge(0.25 + 0.05)  # as if earlier connections had taken it
            for _ in range(30):
                stack.enter_context(stage.client())
            await asyncio.sleep(0.1)
            assert stage.accepted == 1
            await until_async(lambda: stage.accepted == 30, "all accepted")


def refused(address: Address) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(address):
        return False
    return True


async def test_listener_refuses_clients_until_its_broker_accepts_connections() -> None:
    async with served() as stage:
        address, stage.upstreams.refuses = stage.listeners.bootstrap, "unreachable"
        with stage.client() as client:
            client.sendall(request(1))
            client.setblocking(False)
            with suppress(ConnectionResetError):  # its request was not read
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        for _ in range(3):
            assert refused(address)
            await asyncio.sleep(0.1)
        assert stage.accepted == 1
        stage.upstreams.refuses = ""
        await until_async(lambda: not refused(address), "the listener to accept clients again")
        with stage.client() as client:
            client.sendall(request(1))
            await until_async(lambda: stage.connections.by_number, "an accepted client")
            await until_async(lambda: all(each.upstream for each in stage.connections.by_number.values()), "upstream")


async def test_client_of_silent_broker_is_accepted() -> None:
    """The attempt took as long as the client would have waited at Kafka."""
    async with served() as stage:
        stage.upstreams.refuses = "timeout"
        with stage.client() as client:
            client.sendall(request(1))
            client.setblocking(False)
            with suppress(ConnectionResetError):  # its request was not read
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        assert not refused(stage.listeners.bootstrap)


API_VERSIONS_REQUEST = struct.pack(">ihhih", 10, API_VERSIONS, 0, 1, -1)


async def _closed_by_broker(stage: Served, sent: bytes, respond: bytes = b"") -> None:
    loop = asyncio.get_running_loop()
    with stage.client() as client:
        client.sendall(sent)
        broker, _ = await loop.sock_accept(stage.upstreams.broker)
        with broker:
            await loop.sock_recv(broker, 1000)
            if respond:
                await loop.sock_sendall(broker, respond)
        await until_async(lambda: not stage.connections.by_number, "the close of the connection")


@each_executor
async def test_connection_that_the_broker_closes_before_a_response_is_counted(executor: str) -> None:
    with executing(executor):
        async with served() as stage:
            address = Address(*stage.upstreams.broker.getsockname())
            for _ in range(3):
                assert not list(stage.refused.recent())
                await _closed_by_broker(stage, API_VERSIONS_REQUEST)
            assert list(stage.refused.recent()) == [(address, 3)]
            assert stage.metrics.upstream_refused == {"clients": 3}
            # A response came, or the request may be the reason.
            await _closed_by_broker(stage, API_VERSIONS_REQUEST, struct.pack(">iihi", 10, 1, 0, 0))
            await _closed_by_broker(stage, request(1))
            assert stage.metrics.upstream_refused == {"clients": 3}
