"""A seed determines the schedule of faults."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from tests.kit.history import History
from tests.soak.faults import Faults
from tests.soak.stage import PROXIES


class Kafka:
    """Accepts every command and does nothing."""

    def kill(self, node_id: int) -> None: ...
    def pause(self, node_id: int) -> None: ...
    def resume(self, node_id: int) -> None: ...
    def restart(self, node_id: int) -> None: ...


class Stage:
    def __init__(self) -> None:
        self.kafka = Kafka()
        self.armed: list[Any] = []
        self.fault_proxies = SimpleNamespace(
            add=lambda pipe, kind, **fault: self.armed.append((pipe, kind, fault)),
            refuse=lambda pipe, seconds: self.armed.append((pipe, seconds)),
        )
        self.to_proxies = {name: [f"clients to {name} {number}" for number in range(4)] for name in PROXIES}
        self.to_brokers = {name: [f"{name} to broker {number}" for number in range(3)] for name in PROXIES}

    def leader(self, topic: str) -> int:
        return 1

    def controller(self) -> int:
        return 2

    def isr(self, topic: str) -> set[int]:
        return {1, 2, 3}

    def request_reassignment(self, topic: str, replicas: list[int]) -> None: ...
    def request_election(self, topic: str) -> None: ...


def schedule(seed: int) -> list[tuple[str, str]]:
    """The first hundred faults of brokers and of connections."""
    history = History()
    faults = Faults(Stage(), ["one", "another"], seed, history)  # type: ignore[arg-type]
    faults.stop()  # skip all waits
    for purpose in (faults.break_brokers, faults.break_connections):
        randomness = random.Random(f"{seed}/{purpose.__name__}")
        for _ in range(100):
            purpose(randomness)
    return [(kind, what) for _, kind, what in history.events]


def test_seed_determines_the_fault_schedule() -> None:
    first = schedule(1)
    assert len(first) == 200
    assert schedule(1) == first
    assert schedule(2) != first


def test_every_kind_of_fault_comes() -> None:
    kinds = {kind for kind, _ in schedule(3)}
    hops = {f"{hop} {kind}" for hop in ("clients-proxy", "proxy-broker") for kind in ("cut", "hold", "drop", "refuse")}
    expected = {
        f"broker {what} ({target})" for what in ("killed", "paused") for target in ("leader", "controller", "any")
    }
    assert kinds == hops | expected | {"leader moved"}
