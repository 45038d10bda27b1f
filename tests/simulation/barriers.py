"""The part of an expansion that concerns appends. Every process closes its append barrier. Once all are empty,
nothing is appended until they open. Thresholds depend on this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.types import TopicPartition

if TYPE_CHECKING:
    from tests.simulation.world import Proxy, World

_PROBE_SECONDS = 0.02
_CLOSED_SECONDS = 25.0


class Barriers:
    """Closes the barriers of one topic several times in a run. `found` – appends while they were closed and empty.
    `emptied` – how often all were empty.
    """

    def __init__(self, world: World, topic: str, times: int) -> None:
        self._world = world
        self._topic = topic
        self._times = times
        self.closed = False
        self.emptied = 0
        self.found: list[str] = []
        self._empty: dict[tuple[int, int], bool] = {}  # by process and incarnation
        self._give_up_at = 0.0
        self._later()

    def _later(self) -> None:
        if self._times:
            self._times -= 1
            self._world.sim.after(self._world.sim.between(0.3, 3.0), self._close)

    def new_barrier(self, topic: str, in_doubt_seconds: float, clear_at: float, now: float) -> AppendBarrier:
        """The barrier of a new process, which reads the state topic before it serves."""
        barrier = AppendBarrier(topic, in_doubt_seconds=in_doubt_seconds, clear_at=clear_at)
        if self.closed and topic == self._topic:
            barrier.close(now)
        return barrier

    def _close(self) -> None:
        sim = self._world.sim
        sim.log("barriers close")
        self.closed = True
        self._empty = {}
        self._give_up_at = sim.now + _CLOSED_SECONDS
        self._probe()

    def _probe(self) -> None:
        """Close every process's barrier, repeatedly, until all are empty. A paused process does not respond."""
        sim = self._world.sim
        for proxy in self._world.proxies:
            if proxy.live:
                proxy.here(self._reported, proxy, proxy.incarnation)
        if all(self._is_empty(proxy) for proxy in self._world.proxies):
            self.emptied += 1
            ends = self._ends()
            sim.log(f"barriers are empty: {ends}")
            sim.after(sim.between(0.2, 4.0), self._open, ends)
        elif sim.now > self._give_up_at or self._world.quiet:
            sim.log("barriers do not become empty")
            self._open(None)
        else:
            sim.after(_PROBE_SECONDS, self._probe)

    def _reported(self, proxy: Proxy, incarnation: int) -> None:
        if not self.closed or not proxy.live or proxy.incarnation != incarnation:
            return
        now = self._world.sim.now
        proxy.perform(proxy.dispatcher.close_barrier(self._topic, now))
        if proxy.dispatcher.barrier_empty(self._topic, now):
            self._empty[proxy.number, incarnation] = True

    def _is_empty(self, proxy: Proxy) -> bool:
        """Requests of a dead process may be appended until its takeover."""
        if not proxy.live:
            return self._world.sim.now - proxy.died_at > proxy.in_doubt_seconds
        return self._empty.get((proxy.number, proxy.incarnation), False)

    def _ends(self) -> dict[TopicPartition, int]:
        partitions = self._world.cluster.partitions
        return {
            name: max(replica.log_end for replica in partition.replicas.values())
            for name, partition in partitions.items()
            if name.topic == self._topic
        }

    def _open(self, ends: dict[TopicPartition, int] | None) -> None:
        sim = self._world.sim
        for name, end in self._ends().items():
            if ends is not None and end > ends[name]:
                self.found.append(
                    f"BARRIER: {name} ended at {ends[name]} when all barriers were closed and empty; now at {end}"
                )
        sim.log("barriers open")
        self.closed = False
        for proxy in self._world.proxies:
            if proxy.live:
                proxy.here(self._opens, proxy, proxy.incarnation)
        self._later()

    def _opens(self, proxy: Proxy, incarnation: int) -> None:
        if proxy.live and proxy.incarnation == incarnation and not self.closed:
            proxy.perform(proxy.dispatcher.open_barrier(self._topic, 1, self._world.sim.now))

    def rest(self) -> list[str]:
        """After all clients have disconnected, the barriers are open and empty."""
        entered = [
            f"BARRIER: {barrier.in_flight} requests are in the barrier of {topic} at proxy {proxy.number}"
            for proxy in self._world.proxies
            for topic, barrier in proxy.dispatcher.barriers.items()
            if barrier.in_flight
        ]
        shut = [
            f"BARRIER: proxy {p.number} is closed"
            for p in self._world.proxies
            if any(d.closed for d in p.dispatcher.barriers.values())
        ]
        return [*self.found, *entered, *shut]
