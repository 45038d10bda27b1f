"""Listening sockets: the errors, and ports that several proxies share."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.transport.listeners import Listeners, bind
from fencepost_proxy.types import Address, NodeId


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
