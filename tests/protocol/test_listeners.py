"""Listening sockets: the errors, and ports that several proxies share."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from fencepost_proxy.errors import ConfigError
from fencepost_proxy.transport.listeners import bind
from fencepost_proxy.types import Address


def test_proxies_with_reuse_port_share_connections() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(bind(Address("127.0.0.1", 0), "a test", reuse_port=True)))
        address = Address(*first.getsockname())
        second = stack.enter_context(closing(bind(address, "a test", reuse_port=True)))
        for _ in range(64):
            stack.enter_context(socket.create_connection(address))
        for each in (first, second):
            stack.enter_context(each.accept()[0])  # it has at least one


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_port_is_shared_only_if_both_set_reuse_port(first: bool, second: bool) -> None:
    with (
        closing(bind(Address("127.0.0.1", 0), "a test", reuse_port=first)) as taken,
        pytest.raises(ConfigError, match="another process listens there"),
    ):
        bind(Address(*taken.getsockname()), "a test", reuse_port=second)
