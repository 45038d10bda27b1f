"""Connections to a name with several addresses, some of which are silent or refuse."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from fencepost_proxy.cluster import hints
from fencepost_proxy.cluster.broker import Access, BrokerConnection, PooledConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.connecting import Connector, NoResponse, Unreachable
from fencepost_proxy.config import Limits
from fencepost_proxy.types import Address
from tests.support.ports import free_port

PORT = free_port()
KAFKA = Address("kafka-two", PORT)
SILENT, OPEN, CLOSED = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """At `SILENT`, the queue of connections is full: attempts get no answer."""
    with ExitStack() as stack:
        for host, backlog in ((SILENT, 0), (OPEN, 100)):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, PORT))
            sock.listen(backlog)
        for _ in range(8):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex((SILENT, PORT))
        yield


@contextmanager
def addresses(*hosts: str, seconds: float = 0.0) -> Iterator[list[str]]:
    """The name server's answers. Yields the names of lookups."""
    looked_up: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> Sequence[Any]:
        looked_up.append(host)
        await asyncio.sleep(seconds)
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in hosts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        yield looked_up


async def connected(connector: Connector, seconds: float = 60.0) -> tuple[str, float]:
    """The address, and how long it took."""
    began = time.monotonic()
    with await connector.connect(KAFKA, seconds) as sock:
        return sock.getpeername()[0], time.monotonic() - began


async def test_second_address_is_tried_while_the_first_is_silent() -> None:
    connector = Connector()
    with addresses(SILENT, OPEN):
        host, seconds = await connected(connector)
        assert host == OPEN
        assert seconds > 0.2
        # It is the first one from now on.
        for _ in range(3):
            host, seconds = await connected(connector)
            assert host == OPEN
            assert seconds < 0.2


async def test_next_address_follows_a_refusal_at_once() -> None:
    with addresses(CLOSED, OPEN):
        host, seconds = await connected(Connector())
        assert host == OPEN
        assert seconds < 0.2


async def test_failure_names_every_address() -> None:
    with addresses(CLOSED, "127.0.0.4"):
        with pytest.raises(Unreachable) as refused:
            await connected(Connector())
        assert str(refused.value) == "127.0.0.3 (Connection refused), 127.0.0.4 (Connection refused)"
        assert refused.value.errno == errno.ECONNREFUSED
    with addresses(SILENT, CLOSED), pytest.raises(NoResponse) as silent:
        await connected(Connector(), 1.0)
    assert str(silent.value) == "no response from 127.0.0.1 (no response), 127.0.0.3 (Connection refused)"


async def test_concurrent_connections_share_a_lookup() -> None:
    connector = Connector()
    with addresses(OPEN, seconds=0.1) as looked_up:
        assert {host for host, _ in await asyncio.gather(*(connected(connector) for _ in range(20)))} == {OPEN}
        assert looked_up == ["kafka-two"]


async def test_failed_lookup_is_not_remembered() -> None:
    connector = Connector()
    with addresses(), pytest.raises(socket.gaierror):
        await connected(connector)
    with addresses(OPEN):
        assert (await connected(connector))[0] == OPEN


async def test_silent_broker_gets_advice_about_its_address() -> None:
    limits = Limits(connect_timeout_seconds=0.5)
    with addresses(SILENT):
        with pytest.raises(UpstreamUnavailable, match=r"no response from 127\.0\.0\.1") as own:
            await BrokerConnection.open(KAFKA, limits=limits, client_id="test", access=Access())
        pooled = PooledConnection(KAFKA, limits=limits, client_id="test", access=Access())
        with pytest.raises(UpstreamUnavailable, match="not connected in time") as early:
            await pooled.connected(deadline_in(0.1))
        await pooled.close()
    assert own.value.hint == early.value.hint == hints.NO_RESPONSE
