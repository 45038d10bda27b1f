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
from fencepost_proxy.cluster.connecting import Probe
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Address, NodeId

_log = logs.get("services.homes")
_limited_log = logs.RateLimitedLog(_log)

_PROBE_SECONDS: Final = 1.0
#: After the first failure of a home.
_PROBE_AGAIN_SECONDS: Final = 0.2
#: Of probes in a row, after which a process is no home. Its heartbeats would show it only after 90 seconds.
_FAILURES_MAX: Final = 2
#: A client gets the new address when it refreshes its metadata, which most do after a lost connection. One that returns
#: to the former home is disconnected again after this time.
_STAY_SECONDS: Final = 30.0
#: Connections to former homes whose end begins in a second.
_MOVED_AT_ONCE: Final = 10
#: For their requests in progress: longer than consumers wait for records or for a rebalance.
_MOVE_SECONDS: Final = 600.0


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
        self._probe = Probe()
        self._probes: dict[Address, asyncio.Task[bool]] = {}  # in progress, one for each process at most
        self._moving: dict[int, float] = {}  # connections to former homes, and until when they end
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
            fails = any(0 < each < _FAILURES_MAX for each in self._failures.values())
            await asyncio.sleep(_PROBE_AGAIN_SECONDS if fails else _PROBE_SECONDS)

    async def update(self) -> None:
        """Connect to the other processes, and assign the brokers to those that accept. No home waits for a process that
        did not accept before."""
        others = {each for each in self._others() if each != self.here}
        self._probe.keep(others)
        probes = {
            each: self._probes.get(each) or asyncio.create_task(self._probe.accepts(each, _PROBE_SECONDS))
            for each in others
        }
        awaited = [probe for each, probe in probes.items() if self._failures.get(each, 0) < _FAILURES_MAX]
        if awaited:
            await asyncio.wait(awaited, timeout=_PROBE_SECONDS)
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

    def moved(self, connections: Iterable[ProxiedConnection], now: float) -> list[tuple[ProxiedConnection, float]]:
        """Connections to brokers whose home is another process, and until when they end: between two requests, or then.
        Each second some more."""
        found = [each for each in connections if each.client.closing_since is None]
        moving = {each.connection: self._moving[each.connection] for each in found if each.connection in self._moving}
        more = (
            each
            for each in found
            if each.connection not in moving
            and each.node_id is not None
            and self.of(each.node_id) is not None
            and now - each.opened_at > _STAY_SECONDS
        )
        moving.update({each.connection: now + _MOVE_SECONDS for each in islice(more, _MOVED_AT_ONCE)})
        self._moving = moving
        return [(each, moving[each.connection]) for each in found if each.connection in moving]
