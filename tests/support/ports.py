"""Ports for processes that tests start. No other process takes a port, even while its user restarts.

They are below every ephemeral range, so no outgoing connection takes one, and each test process has a separate range
(`own_ports`).
"""

from __future__ import annotations

import os
import random

from fencepost_dev import ports
from fencepost_dev.errors import PortTakenError

_ATTEMPTS = 1000


def own_ports() -> range:
    """This pytest-xdist worker's part of `ports.FREE_PORTS`; all of them without workers."""
    everything = ports.FREE_PORTS
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw"):
        return everything
    share = len(everything) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    number = int(worker.removeprefix("gw"))
    return everything[number * share : (number + 1) * share]


def free_port() -> int:
    return free_ports_in_a_row(1)


def free_ports_in_a_row(count: int) -> int:
    """The first of these ports. Each port is returned only once."""
    for _ in range(_ATTEMPTS):
        first = random.choice(ports.FREE_PORTS[:-count])
        row = range(first, first + count)
        with ports.port_lock:
            if ports.ports_given_out.isdisjoint(row) and all(map(ports.is_free, row)):
                ports.ports_given_out.update(row)
                return first
    raise PortTakenError(f"no {count} free ports in a row within {ports.FREE_PORTS}")
