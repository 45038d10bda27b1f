"""Connections that a broker accepts and closes before its first response, as it does above a limit of connections."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from fencepost_proxy import logs
from fencepost_proxy.cluster import hints
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.types import Address

_limited_log = logs.RateLimitedLog(logs.get("cluster.refused"))
#: How long the status page counts them, how many it takes to be shown, and how many are counted.
_SECONDS = 60.0
_SHOWN_FROM = 3
_TIMES_MAX = 1_000


class RefusedConnections:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._times: dict[Address, deque[float]] = {}  # by broker, and so as few as the cluster has

    def record(self, address: Address, of: str) -> None:
        """`of`: clients, or proxy for its own connections."""
        self._metrics.upstream_refused.inc(of)
        self._times.setdefault(address, deque(maxlen=_TIMES_MAX)).append(time.monotonic())
        _limited_log.warning(
            address,
            "broker closed a new connection before its first response",
            broker=address,
            of=of,
            hint=hints.LIMITED,
        )

    def recent(self) -> Iterator[tuple[Address, int]]:
        """Brokers that do it, and how often in the last minute."""
        since = time.monotonic() - _SECONDS
        for address, times in self._times.items():
            while times and times[0] < since:
                times.popleft()
            if len(times) >= _SHOWN_FROM:
                yield address, len(times)
