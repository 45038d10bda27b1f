"""Listening sockets: the errors, and ports that several proxies share."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.transport import listeners as transport_listeners
from fencepost_proxy.transport.listeners import Listeners, bind
from fencepost_proxy.types import Address, NodeId
from tests.kit.waiting import until_async
from tests.support.ports import free_port


def test_proxies_with_reuse_port_share_connections() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(bind(Address("127.0.0.1", 0), "a test", reuse_port=True)))
        address = Address(*first.getsockname())
        second = stack.enter_context(closing(bind(address, "a test", reuse_port=True)))
        for _ in range(64):
            stack.enter_context(socket.create_connection(address))
        for each in (first, second):
            stack.enter_context(each.accept()[0])  # it has at least one


def test_starting_proxy_with_reuse_port_takes_no_connections() -> None:
    asyncio.run(_one_serves_while_another_starts())


async def _one_serves_while_another_starts() -> None:
    with closing(bind(Address("127.0.0.1", 0), "a test", reuse_port=True)) as serving:
        address = Address(*serving.getsockname())
        starting = Listeners(ProxyConfig(upstream=(address,), listen=address, reuse_port=True), AddressBook(0))
        starting.open_bootstrap()
        accepted: list[socket.socket] = []
        with ExitStack() as stack:
            for _ in range(64):
                stack.enter_context(socket.create_connection(address))
            for _ in range(64):
                stack.enter_context(serving.accept()[0])  # all of them
            starting.accept(lambda sock, peer, node_id: accepted.append(stack.enter_context(sock)))
            for _ in range(64):
                stack.enter_context(socket.create_connection(address))
            await asyncio.sleep(0.1)
            starting.close()
            assert accepted


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_port_is_shared_only_if_both_set_reuse_port(first: bool, second: bool) -> None:
    with (
        closing(bind(Address("127.0.0.1", 0), "a test", reuse_port=first)) as taken,
        pytest.raises(ConfigError, match="another process listens there"),
    ):
        bind(Address(*taken.getsockname()), "a test", reuse_port=second)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_dual_stack_listener_writes_addresses_of_ipv4_clients_as_ipv4(host: str) -> None:
    async def accepted_from() -> tuple[Address, Address]:
        listening = Listeners(ProxyConfig(upstream=(Address("k", 1),), listen=Address("::", 0)), AddressBook(0))
        listening.open_bootstrap()
        accepted: asyncio.Future[tuple[Address, Address]] = asyncio.get_running_loop().create_future()

        def accept(sock: socket.socket, peer: Address, node_id: NodeId | None) -> None:
            with sock:
                accepted.set_result((peer, Address.of_socket(sock.getsockname())))

        listening.accept(accept)
        try:
            with socket.create_connection((host, listening.bootstrap.port)):
                return await asyncio.wait_for(accepted, 60)
        finally:
            listening.close()

    peer, here = asyncio.run(accepted_from())

    assert (peer.host, here.host) == (host, host)


def _listening(free: Address, *, reuse_port: bool = False) -> Listeners:
    """Its bootstrap port is the one before `free`: broker 0 gets `free`."""
    config = ProxyConfig(upstream=(free,), listen=Address("127.0.0.1", 0), reuse_port=reuse_port)
    listeners = Listeners(config, AddressBook(0, ports={NodeId(0): free.port}))
    listeners.open_bootstrap()
    return listeners


async def test_port_in_use_at_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_listeners, "_RETRY_SECONDS_MAX", 0.1)
    with closing(bind(Address("127.0.0.1", 0), "a test")) as taken:
        address = Address(*taken.getsockname())
        listeners = _listening(address)
        accepted: list[socket.socket] = []
        listeners.accept(lambda sock, peer, node_id: accepted.append(sock))
        listeners.brokers_changed({NodeId(0): Address("kafka", 9092)})
        assert "another process listens there" in str(listeners.problems[NodeId(0)])
        assert NodeId(0) not in listeners
    with closing(listeners), ExitStack() as stack:
        await until_async(lambda: NodeId(0) in listeners, "the listener")
        assert not listeners.problems
        stack.enter_context(socket.create_connection(address))
        await until_async(lambda: accepted, "an accepted connection")
        stack.enter_context(accepted[0])


@pytest.mark.parametrize("reuse_port", [False, True])
async def test_refusing_listener_keeps_its_port_and_accepts_again(reuse_port: bool) -> None:
    listeners = _listening(Address("127.0.0.1", free_port()), reuse_port=reuse_port)
    accepted: list[socket.socket] = []
    listeners.brokers_changed({NodeId(0): Address("kafka", 9092)})
    listeners.accept(lambda sock, peer, node_id: accepted.append(sock))
    address = listeners.bootstrap
    with closing(listeners), ExitStack() as stack:
        assert listeners.refuse(None)
        assert not listeners.refuse(None)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        assert NodeId(0) in listeners
        listeners.resume(None)
        stack.enter_context(socket.create_connection(address))
        await until_async(lambda: accepted, "an accepted connection")
        stack.enter_context(accepted[0])
    assert not listeners.refuse(None)


async def test_port_taken_from_a_refusing_listener_is_tried_again() -> None:
    listeners = _listening(Address("127.0.0.1", free_port()))
    listeners.brokers_changed({NodeId(0): Address("kafka", 9092)})
    listeners.accept(lambda sock, peer, node_id: sock.close())
    address = Address("127.0.0.1", listeners._book.listener_port(NodeId(0)))
    with closing(listeners):
        listeners.refuse(NodeId(0))
        with closing(bind(address, "another process")):
            listeners.resume(NodeId(0))
            assert "cannot listen again" in str(listeners.problems[NodeId(0)])
        await until_async(lambda: not listeners.problems, "the listener")
        socket.create_connection(address).close()
