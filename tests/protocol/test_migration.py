"""A connection migrates between processes: two proxied connections on real sockets, packets over a socket pair."""

from __future__ import annotations

import asyncio
import socket
from types import MappingProxyType

import pytest

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.session import messages
from fencepost_proxy.session.session import Session
from fencepost_proxy.transport.proxied_connection import MigratedSockets, ProxiedConnection
from fencepost_proxy.transport.proxied_socket import Buffers
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.workers import channel as channel_module
from fencepost_proxy.workers.channel import Channel, Packet, pair, receive_packet, send_packet
from tests.kit.event_loop import in_event_loop
from tests.kit.waiting import until_async
from tests.protocol.test_proxied_connection import SIZE, Driver, Pair, receive, request, response, send
from tests.support.batches import expecting
from tests.unit.test_session import Unchanged, produce

CHECKED = produce(("checked", 0, expecting(5, b"a")), correlation=7)


class Other(Driver):
    """Not the primary worker: the connections that its session migrates are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: list[Packet] = []

    def proxied_opened(self, proxied: ProxiedConnection) -> Session:
        self.opened.append(proxied)
        services, rewriters = self.services, Unchanged()
        return Session(proxied.connection, proxied.local_host, services, rewriters, 0.0, primary=False)  # type: ignore[arg-type]

    def session_event(self, connection: int, event: messages.Event) -> None:
        proxied = self.opened[0]
        assert proxied.session is not None
        for command in proxied.session.handle(event, 1.0):
            if isinstance(command, messages.Migrate):
                given = proxied.detach()
                assert given is not None
                migrated = MigratedSockets(
                    command.migrated, proxied.peer, proxied.node_id, given.to_client, given.to_upstream
                )
                self.packets.append(Packet.of("hand-over", migrated, [given.client, given.upstream]))
            elif not isinstance(command, messages.Count):
                proxied.perform(command)


class TakesOver(Driver):
    """The primary worker."""

    def take_over(self, packet: Packet) -> None:
        migrated: MigratedSockets = packet.message()
        client, upstream = packet.sockets()
        proxied = ProxiedConnection(
            9, client, self, Buffers(), peer=migrated.peer, local_host="127.0.0.1", node_id=migrated.node_id
        )
        self.opened.append(proxied)
        session = Session.of(migrated.session, 9, self.services, Unchanged())  # type: ignore[arg-type]
        proxied.take_over(
            upstream,
            session,
            unread=migrated.session.unread,
            to_client=migrated.to_client,
            to_upstream=migrated.to_upstream,
        )

    def session_event(self, connection: int, event: messages.Event) -> None:
        self.events.append(event)
        proxied = self.opened[0]
        assert proxied.session is not None
        for command in proxied.session.handle(event, 1.0):
            if not isinstance(command, messages.Count):
                proxied.perform(command)

    @property
    def observed_bytes(self) -> bytes:
        return b"".join(bytes(event.data) for event in self.events if isinstance(event, messages.ClientBytes))


def through_a_socket_pair(packet: Packet) -> Packet:
    one, other = pair()
    with one, other:
        send_packet(one, packet)
        found = receive_packet(other)
    assert found is not None
    return found


@in_event_loop
async def test_buffered_bytes_and_partial_frame_migrate_with_connection() -> None:
    sockets = Pair()
    sockets.driver = other = Other()
    sockets.accept()
    sockets.connect()
    primary = TakesOver()

    await send(sockets.client, request(1) + CHECKED[:60])
    assert await receive(sockets.broker, len(request(1))) == request(1)
    await send(sockets.broker, response(1))
    assert await receive(sockets.client, len(response(1))) == response(1)
    await until_async(lambda: bool(other.packets), "a packet")
    assert other.closed == [sockets.proxied]
    await send(sockets.client, CHECKED[60:])  # while it is on its way
    kept: list[bytes] = []
    original = primary.session_event

    def keep(connection: int, event: messages.Event) -> None:
        if isinstance(event, messages.ClientBytes):
            kept.append(bytes(event.data))
        original(connection, event)

    primary.session_event = keep  # type: ignore[method-assign]
    primary.take_over(through_a_socket_pair(other.packets[0]))
    await until_async(lambda: len(b"".join(kept)) >= len(CHECKED), "all bytes")

    assert b"".join(kept) == CHECKED
    proxied = primary.opened[0]
    assert proxied.peer == Address("client", 1)
    proxied.client.abort()
    assert proxied.upstream is not None
    proxied.upstream.abort()
    await asyncio.sleep(0)
    assert await asyncio.get_running_loop().sock_recv(sockets.client, 1) == b"", "no other process has the socket"
    sockets.client.close()
    sockets.broker.close()


@in_event_loop
async def test_unsent_response_bytes_migrate_with_connection() -> None:
    """The response is larger than the kernel's buffers: the primary worker writes the rest, in order."""
    sockets = Pair()
    sockets.driver = other = Other()
    sockets.accept()
    sockets.connect()
    big = response(1, bytes(SIZE))

    await send(sockets.client, request(1) + CHECKED)
    await receive(sockets.broker, len(request(1)))
    sending = asyncio.create_task(send(sockets.broker, big))
    reading = asyncio.create_task(receive(sockets.client, len(big) // 2))
    assert await reading == big[: len(reading.result())]
    already = len(reading.result())
    primary = TakesOver()
    reading = asyncio.create_task(receive(sockets.client, len(big) - already))
    await until_async(lambda: bool(other.packets), "a packet")
    migrated = through_a_socket_pair(other.packets[0])
    primary.take_over(migrated)
    rest = await reading
    await sending
    assert rest == big[already:]
    assert primary.opened
    primary.opened[0].client.abort()
    assert primary.opened[0].upstream is not None
    primary.opened[0].upstream.abort()
    await asyncio.sleep(0)
    sockets.client.close()
    sockets.broker.close()


@in_event_loop
async def test_connection_with_closing_upstream_is_not_migrated() -> None:
    sockets = Pair()
    sockets.accept()
    sockets.connect()
    assert sockets.proxied.upstream is not None
    sockets.proxied.upstream.close(1.0)
    assert sockets.proxied.detach() is None
    async with asyncio.timeout(60):
        assert await asyncio.get_running_loop().sock_recv(sockets.client, 1) == b""
    sockets.close()
    await asyncio.sleep(0)


# --- packets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1_000, 40_000, 5_000_000], ids=str)
def test_packet_of_any_size_carries_sockets(size: int) -> None:
    one, other = socket.socketpair()
    packet = Packet.of("kind", b"x" * size, [one])
    assert one.fileno() == -1, "its socket is the packet's"

    found = through_a_socket_pair(through_a_socket_pair(packet))

    assert found.kind == "kind"
    assert found.message() == b"x" * size
    (sock,) = found.sockets()
    with sock, other:
        sock.sendall(b"still the same connection")
        assert other.recv(100) == b"still the same connection"


def test_unreceived_packet_closes_its_sockets() -> None:
    one, other = socket.socketpair()
    Packet.of("kind", b"x" * 40_000, [one]).close()
    with other:
        assert other.recv(1) == b""


def test_a_configuration_goes_from_process_to_process() -> None:
    config = ProxyConfig((Address("kafka", 9092),), broker_ports=MappingProxyType({NodeId(1): 20001}), workers=2)
    assert through_a_socket_pair(Packet.of("start", config)).message() == config


@in_event_loop
async def test_channel_buffers_in_order_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "_WAITING_MAX", 200)
    near, far = pair()
    channel = Channel(near, lambda packet: None)
    sent = 0
    while channel.send(Packet.of("n", (sent, b"x" * 10_000))):
        sent += 1
    assert sent >= 200
    got: list[int] = []
    reader = Channel(far, lambda packet: got.append(packet.message()[0]))
    await until_async(lambda: len(got) >= sent, "all requests")
    assert got == list(range(sent))
    assert channel.send(Packet.of("n", (sent, b"")))
    channel.close()
    reader.close()


@in_event_loop
async def test_closed_channel_is_reported_once_and_sends_nothing() -> None:
    near, far = pair()
    ends: list[None] = []
    channel = Channel(near, lambda packet: None, lambda: ends.append(None))
    far.close()
    await until_async(lambda: bool(ends), "the end")
    one, other = socket.socketpair()
    assert not channel.send(Packet.of("kind", None, [one]))
    with other:
        assert other.recv(1) == b""
    channel.close()
    assert len(ends) == 1


@in_event_loop
async def test_unreceivable_sockets_are_closed_and_channel_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process without file descriptors left receives them."""
    monkeypatch.setattr(channel_module, "_SOCKETS_MAX", 1)
    near, far = pair()
    got: list[str] = []
    channel = Channel(near, lambda packet: got.append(packet.kind))
    one, other = socket.socketpair()
    another, its_other = socket.socketpair()
    send_packet(far, Packet.of("two sockets", None, [one, another]))
    send_packet(far, Packet.of("none"))
    await until_async(lambda: bool(got), "a connection")
    assert got == ["none"]
    assert other.recv(1) == b""
    assert its_other.recv(1) == b""
    for each in (far, other, its_other):
        each.close()
    channel.close()
