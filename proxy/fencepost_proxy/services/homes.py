"""Homes: with `homes = true`, clients reach each broker through one process of the fleet.

Every process announces in its heartbeats where clients reach it, and names in Metadata, FindCoordinator and
DescribeCluster responses for each broker the address of its home. So the appends to a partition, and what a process
remembers of it, are in one process. Homes decide about speed only: a client that uses another process, because two
processes know different fleets for a moment, is served as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster.connecting import accepts
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Address, NodeId

_log = logs.get("services.homes")
_limited_log = logs.RateLimitedLog(_log)

_PROBE_SECONDS: Final = 1.0
#: Of probes in a row, after which a process is no home. Its heartbeats would show it only after 90 seconds.
_FAILURES_MAX: Final = 2
#: A client gets the new address when it refreshes its metadata, which most do after a lost connection. One that returns
#: to the former home is disconnected again after this time.
_STAY_SECONDS: Final = 30.0
#: Connections to former homes that are ended in a second.
_MOVED_AT_ONCE: Final = 10


def assign(brokers: Iterable[NodeId], processes: Iterable[Address]) -> dict[NodeId, Address]:
    """The home of each broker: of the processes that do not have their share, the one with the highest hash.

    Rendezvous hashing with bounded loads: shares differ by one at most, and few homes move if a process comes or goes.
    """
    nodes, known = sorted(brokers), sorted(set(processes))
    if not known:
        return {}
    (share, left), load, homes = divmod(len(nodes), len(known)), Counter[Address](), dict[NodeId, Address]()
    for node in nodes:
        free = [each for each in known if load[each] < share or (left and load[each] == share)]
        homes[node] = home = max(free, key=lambda each: blake2b(f"{node} {each}".encode(), digest_size=8).digest())
        left -= load[home] == share
        load[home] += 1
    return homes


class Homes:
    """`here`: where clients reach this process. `brokers`: of the cluster, by id. `others`: what the other live
    processes announce."""

    def __init__(
        self, here: Address, brokers: Callable[[], Iterable[NodeId]], others: Callable[[], Iterable[Address]]
    ) -> None:
        self.here = here
        self._brokers, self._others = brokers, others
        self._failures: dict[Address, int] = {}
        self._probes: dict[Address, asyncio.Task[bool]] = {}  # in progress, one for each process at most
        self._homes: Mapping[NodeId, Address] = {}
        #: This process stops: the others are the homes, if there are any.
        self.retiring = False

    def of(self, node_id: NodeId) -> Address | None:
        """Where clients reach the broker's home; None: here. May be called in a thread."""
        home = self._homes.get(node_id, self.here)
        return None if home == self.here else home

    async def run(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(_PROBE_SECONDS)

    async def update(self) -> None:
        """Connect to the other processes, and assign the brokers to those that accept."""
        others = {each for each in self._others() if each != self.here}
        probes = {each: self._probes.get(each) or asyncio.create_task(accepts(each, _PROBE_SECONDS)) for each in others}
        if probes:
            await asyncio.wait(probes.values(), timeout=_PROBE_SECONDS)
        failures = {}
        for each, probe in probes.items():
            # A process that is new here becomes a home once it accepts.
            before = self._failures.get(each, _FAILURES_MAX)
            failures[each] = 0 if probe.done() and probe.result() else before + 1
            if failures[each] in (_FAILURES_MAX, _FAILURES_MAX + 1):
                _limited_log.warning(each, "no connection to another proxy: clients are not sent there", address=each)
        self._failures, self._probes = failures, {each: probe for each, probe in probes.items() if not probe.done()}
        accepting = [each for each in others if failures[each] < _FAILURES_MAX]
        homes = assign(self._brokers(), accepting if self.retiring and accepting else [self.here, *accepting])
        if homes != self._homes:
            of_this = sum(each == self.here for each in homes.values())
            _log.info("homes changed", processes=len(set(homes.values())), brokers=len(homes), here=of_this)
        self._homes = homes

    def moved(self, connections: Iterable[ProxiedConnection], now: float) -> list[ProxiedConnection]:
        """Some connections to brokers whose home is another process: they end between two requests."""
        found = (
            each
            for each in connections
            if each.node_id is not None
            and self.of(each.node_id) is not None
            and now - each.opened_at > _STAY_SECONDS
            and each.client.closing_since is None
        )
        return list(islice(found, _MOVED_AT_ONCE))
