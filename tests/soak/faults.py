"""The schedule of faults, from a seed: what fails, when, and for how long.

Brokers, proxies and connections fail independently, each with one fault at a time. So at most one broker is down,
and two of three replicas remain. The seed determines kinds, order and durations; what they hit depends on the machine.
"""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tests.kit.history import History
from tests.kit.stage import NODES
from tests.soak.stage import PROXIES, Stage

_IN_SYNC_SECONDS = 20.0
#: A fault that hits no connection for this long is discarded.
_ARMED_SECONDS = 5.0


class Faults:
    """`start` and `stop` the faults. `Stage.mend` repairs what is still broken."""

    def __init__(self, stage: Stage, topics: Sequence[str], seed: int, history: History) -> None:
        self._stage = stage
        self._topics = list(topics)
        self._history = history
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._inject, args=(purpose, random.Random(f"{seed}/{purpose.__name__}"), pause))
            for purpose, pause in (
                (self.break_brokers, (4.0, 14.0)),
                (self._proxy, (5.0, 15.0)),
                (self.break_connections, (0.2, 1.5)),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(180.0)

    def _inject(
        self, purpose: Callable[[random.Random], None], randomness: random.Random, pause: tuple[float, float]
    ) -> None:
        while not self._over.wait(randomness.uniform(*pause)):
            try:
                purpose(randomness)
            except Exception:
                self._history.event("failed", traceback.format_exc(limit=3))

    # ---- brokers

    def break_brokers(self, randomness: random.Random) -> None:
        topic = randomness.choice(self._topics)
        anybody = randomness.choice(NODES)
        seconds = randomness.uniform(1.0, 12.0)
        kind = randomness.choices(
            ["kill leader", "kill controller", "kill any", "pause leader", "pause controller", "pause any", "move"],
            weights=[3, 1, 1, 2, 1, 1, 5],
        )[0]
        verb, _, whom = kind.partition(" ")
        if verb == "move":
            self._move(topic, anybody)
            return
        with contextlib.suppress(AssertionError):
            self._await_in_sync(topic)
        node_id = {"leader": self._stage.leader(topic), "controller": self._stage.controller(), "any": anybody}[whom]
        if node_id not in NODES:
            node_id = anybody
        if verb == "pause":
            self._history.event(f"broker paused ({whom})", f"{node_id} for {seconds:.1f} s")
            self._stage.kafka.pause(node_id)
            try:
                self._over.wait(seconds)
            finally:
                self._stage.kafka.resume(node_id)
        else:
            self._history.event(f"broker killed ({whom})", f"{node_id} for {seconds / 2:.1f} s")
            self._stage.kafka.kill(node_id)
            self._over.wait(seconds / 2)
            self._stage.kafka.restart(node_id)

    def _await_in_sync(self, topic: str) -> None:
        """Otherwise the next broker's failure makes the partition unavailable."""
        for _ in range(int(_IN_SYNC_SECONDS)):
            if self._stage.isr(topic) == set(NODES) or self._over.wait(1.0):
                return

    def _move(self, topic: str, to: int) -> None:
        self._history.event("leader moved", f"{topic} to {to}")
        self._stage.request_reassignment(topic, [to, *(node_id for node_id in NODES if node_id != to)])
        for _ in range(10):
            self._stage.request_election(topic)
            if self._stage.leader(topic) == to or self._over.wait(0.2):
                return

    # ---- proxies

    def _proxy(self, randomness: random.Random) -> None:
        name = randomness.choice(PROXIES)
        kind = randomness.choices(["paused", "killed", "stopped"], weights=[2, 2, 1])[0]
        seconds = randomness.uniform(0.5, 10.0)
        proxy = self._stage.named[name]
        with self._stage.proxy_locks[name]:
            if kind == "paused":
                self._history.event("proxy paused", f"{name} for {seconds:.1f} s")
                proxy.pause()
                try:
                    self._over.wait(seconds)
                finally:
                    proxy.resume()
                return
            self._history.event(f"proxy {kind}", f"{name} for {seconds / 5:.1f} s")
            if kind == "stopped":
                proxy.stop()
            else:
                proxy.kill()
            self._over.wait(seconds / 5)
            self._stage.restart_proxy(name)

    # ---- connections

    def break_connections(self, randomness: random.Random) -> None:
        name = randomness.choice(PROXIES)
        hop = randomness.choice(["clients-proxy", "proxy-broker"])
        pipe = randomness.choice((self._stage.to_proxies if hop == "clients-proxy" else self._stage.to_brokers)[name])
        kind = randomness.choices(["Cut", "Hold", "Drop", "refuse"], weights=[6, 4, 3, 1])[0]
        seconds = randomness.choice([0.05, 0.3, 1.0, 3.0, 9.0])
        fault: dict[str, Any] = {
            "direction": randomness.choice(["request", "response"]),
            "after": randomness.choice(
                [0, 1, 4, randomness.randrange(64), randomness.randrange(600), randomness.randrange(5000)]
            ),
            "within_seconds": _ARMED_SECONDS,
        }
        reset = randomness.random() < 0.5
        if kind == "refuse":
            fault = {"seconds": min(seconds, 3.0)}
            self._stage.fault_proxies.refuse(pipe, **fault)
        else:
            if kind != "Cut":
                fault["seconds"] = seconds
            if kind != "Hold":
                fault["reset"] = reset
            if kind == "Drop":
                fault["everything"] = True
            self._stage.fault_proxies.add(pipe, kind, **fault)
        self._history.event(f"{hop} {kind.lower()}", f"{pipe}: {fault}")
