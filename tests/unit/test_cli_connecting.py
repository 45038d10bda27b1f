"""Commands that connect to Kafka say why they cannot, before they send anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fencepost_proxy.cli import connecting
from fencepost_proxy.cli.main import main
from fencepost_proxy.cli.status_client import CannotQuery
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.types import Address
from tests.support.fake_cluster import FakeCluster
from tests.support.ports import free_port

SECONDS = 20.0


@contextmanager
def fake_cluster() -> Iterator[FakeCluster]:
    """One broker, topic `orders` with two partitions."""
    kafka, ready, over = FakeCluster(1, {"orders": 2}), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        await kafka.start()
        loops.append(asyncio.get_running_loop())
        ready.set()
        await over.wait()
        kafka.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield kafka
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join()


def config(address: object) -> ProxyConfig:
    return ProxyConfig((Address.parse(str(address)),))


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        (("append", "orders", "first"), "fencepost: nothing was sent: cannot connect to "),
        (("read", "orders"), "fencepost: cannot connect to "),
        (("expansions",), "fencepost: cannot connect to "),
        (("transactions",), "fencepost: cannot connect to "),
    ],
)
def test_refused_connection_is_reported_at_once(
    command: tuple[str, ...], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()

    assert main([*command, "--bootstrap-server", address]) == 2

    assert time.monotonic() - begun < SECONDS
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{begins}{address}: Connection refused (nothing listens there: "), line


def test_all_servers_are_named_and_one_that_responds_suffices() -> None:
    absent = Address("127.0.0.1", free_port()), Address("a..b", 9092)
    with pytest.raises(CannotQuery) as failed:
        connecting.require_connection(ProxyConfig(absent), SECONDS)
    assert str(failed.value).count("; ") == 1
    with fake_cluster() as kafka:
        connecting.require_connection(ProxyConfig((*absent, Address.parse(kafka.bootstrap))), SECONDS)


def test_topic_and_its_leaders_are_checked() -> None:
    with fake_cluster() as kafka:
        there = config(kafka.bootstrap)
        assert connecting.partitions_of(there, "orders", None, SECONDS) == [0, 1]
        assert connecting.partitions_of(there, "payments", None, SECONDS) == []
        with pytest.raises(CannotQuery, match="topic orders has no partition 2, only 0 to 1"):
            connecting.partitions_of(there, "orders", 2, SECONDS)
        kafka.hidden = {"orders"}
        kafka.changed()
        with pytest.raises(CannotQuery, match="topic orders: this user may not DESCRIBE it"):
            connecting.partitions_of(there, "orders", None, SECONDS)


def test_unreachable_leader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual cause: a proxy that advertises an address that this machine cannot reach."""
    with fake_cluster() as kafka:
        there, elsewhere = config(kafka.bootstrap), free_port()
        monkeypatch.setattr(kafka, "_ports", {1: elsewhere})
        with pytest.raises(CannotQuery) as failed:
            connecting.partitions_of(there, "orders", 1, SECONDS)
    expected = f"cannot connect to broker 1, the leader of orders-1, at 127.0.0.1:{elsewhere}: Connection refused ("
    assert str(failed.value).startswith(expected)


async def test_unrelated_service_is_not_waited_for() -> None:

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        with pytest.raises(CannotQuery, match=f"cannot connect to 127.0.0.1:{port}: "):
            await asyncio.to_thread(connecting.require_connection, config(f"127.0.0.1:{port}"), SECONDS)
