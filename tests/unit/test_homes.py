"""Which process of a fleet is the home of which broker."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.services.homes import Homes, assign
from fencepost_proxy.types import Address, NodeId

BROKERS = [NodeId(each) for each in range(100)]


def fleet(count: int) -> list[Address]:
    return [Address(f"proxy-{number}", 19092) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 40])
def test_shares_differ_by_one_at_most(count: int) -> None:
    loads = Counter(assign(BROKERS, fleet(count)).values())
    assert len(loads) == count
    assert max(loads.values()) <= -(-len(BROKERS) // count)


def test_order_does_not_matter() -> None:
    assert assign(BROKERS, fleet(5)) == assign(reversed(BROKERS), reversed(fleet(5)))


def test_few_homes_move_if_a_process_ends() -> None:
    """Its own share of 25, and some for the new balance."""
    before, after = assign(BROKERS, fleet(4)), assign(BROKERS, fleet(3))
    assert sum(before[each] != after[each] for each in BROKERS) < 50


def test_without_processes_there_are_no_homes() -> None:
    assert assign(BROKERS, []) == {}


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def test_process_that_does_not_accept_is_no_home() -> None:

    here = Address("127.0.0.1", 1)
    with listening() as other:
        address = Address(*other.getsockname())
        homes = Homes(here, lambda: BROKERS, lambda: [address])
        assert homes.of(BROKERS[0]) is None, "here until it is known"
        await homes.update()
        assert Counter(map(homes.of, BROKERS)) == {None: 50, address: 50}
    await homes.update()
    assert set(map(homes.of, BROKERS)) == {None, address}, "one failure may be by chance"
    await homes.update()
    assert set(map(homes.of, BROKERS)) == {None}


async def test_failed_probe_of_a_home_is_repeated_soon() -> None:

    with listening() as other:
        address = Address(*other.getsockname())
        homes = Homes(Address("127.0.0.1", 1), lambda: BROKERS, lambda: [address])
        await homes.update()
    running = asyncio.create_task(homes.run())
    await asyncio.sleep(0.7)
    assert set(map(homes.of, BROKERS)) == {None}
    running.cancel()


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b", "x" * 70, "no\0name"])
def test_process_that_never_accepted_is_no_home(host: str) -> None:
    homes = Homes(Address("127.0.0.1", 1), lambda: BROKERS, lambda: [Address(host, 2)])
    asyncio.run(homes.update())
    assert set(map(homes.of, BROKERS)) == {None}


async def test_retiring_process_names_the_others() -> None:

    with listening() as other:
        address = Address(*other.getsockname())
        homes = Homes(Address("127.0.0.1", 1), lambda: BROKERS, lambda: [address])
        homes.retiring = True
        await homes.update()
        assert set(map(homes.of, BROKERS)) == {address}
    await homes.update()
    await homes.update()
    assert set(map(homes.of, BROKERS)) == {None}, "it is the last one"


def test_address_of_a_broker_is_that_of_its_home() -> None:
    book = AddressBook(19092)
    book.learn(NodeId(1), Address("kafka", 9092))
    assert book.advertised(NodeId(1), "here") == Address("here", 19094)
    book.home_of = lambda node_id: Address("there", 20000)
    assert book.advertised(NodeId(1), "here") == Address("there", 20002)


def test_connections_to_former_homes_end_gradually() -> None:
    numbers = itertools.count()

    def connection(node_id: int | None, opened_at: float, closing_since: float | None = None) -> Any:
        client = SimpleNamespace(closing_since=closing_since)
        return SimpleNamespace(connection=next(numbers), node_id=node_id, opened_at=opened_at, client=client)

    homes = Homes(Address("a", 1), lambda: (), lambda: ())
    homes._homes = {NodeId(1): Address("b", 1), NodeId(2): homes.here}
    elsewhere = [connection(1, 0.0) for _ in range(25)]
    stay = [connection(2, 0.0), connection(None, 0.0), connection(1, 90.0), connection(1, 0.0, closing_since=99.0)]
    for second in range(3):
        moving = homes.moved([*stay, *elsewhere], 100.0 + second)
        assert [each for each, _ in moving] == elsewhere[: 10 * (second + 1)]
        assert [until for _, until in moving][::10] == [700.0 + each for each in range(second + 1)]
    homes._homes = {}
    assert len(homes.moved(elsewhere[5:], 103.0)) == 20, "what has begun goes on"
    assert homes.moved(stay, 104.0) == []


class Names:
    """A name server. `dead`: names for which it gives no response."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real, self.dead, self.over = socket.getaddrinfo, set[str](), threading.Event()
        self.looked_up = Counter[str]()
        monkeypatch.setattr("fencepost_proxy.cluster.connecting.socket.getaddrinfo", self.look_up)

    def look_up(self, host: str, port: int, *, flags: int = 0, **options: Any) -> Any:
        if flags:
            return self._real(host, port, flags=flags, **options)
        self.looked_up[host] += 1
        if host in self.dead:
            self.over.wait(30)
            raise socket.gaierror
        return self._real("127.0.0.1", port, **options)


async def test_slow_lookups_of_dead_names_delay_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.dead = {f"dead-{number}" for number in range(20)}

    monkeypatch.setattr("fencepost_proxy.services.homes._PROBE_SECONDS", 0.1)
    with listening() as other:
        port = other.getsockname()[1]
        here, live, late = (Address(each, port) for each in ("here", "live", "late"))
        others = [live]
        homes = Homes(here, lambda: BROKERS, lambda: others)
        await homes.update()
        assert set(map(homes.of, BROKERS)) == {None, live}
        others += [Address(each, port) for each in sorted(names.dead)[:4]]
        await homes.update()
        others += [Address(each, port) for each in sorted(names.dead)[4:]]
        await homes.update()
        began = time.monotonic()
        await homes.update()
        assert time.monotonic() - began < 0.09, "no home waits for a process that did not accept"
        assert len([each for each in names.looked_up if each in names.dead]) <= 16
        names.dead.add("live")
        monkeypatch.setattr("fencepost_proxy.cluster.connecting._LOOKUP_SECONDS", 0.0)
        for _ in range(4):
            await homes.update()
        assert set(map(homes.of, BROKERS)) == {None, live}, "its last address is used"
        assert names.looked_up["dead-0"] == 1, "a slow lookup is not repeated"
        others.append(late)
        names.over.set()
        for _ in range(4):
            await homes.update()
        assert late in set(map(homes.of, BROKERS))
