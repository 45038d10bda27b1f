"""The process in numbers, for Prometheus. No label takes a value from a peer: the number of series is bounded.

What is counted for every request or every read of a socket is a plain integer (`Traffic`) that is looked at when
somebody scrapes: a `prometheus_client` counter takes a lock each time.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fencepost_proxy.types import Monotonic
from fencepost_proxy.wire.apis import APIS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Reasons are words of our own; should one ever be made from a peer's text, it ends as `other`.
_REASONS_MAX: Final = 64
_OTHER: Final = "other"
_WAIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def fencepost_version() -> str:
    try:
        return version("fencepost")
    except PackageNotFoundError:
        return "unknown"


class Traffic:
    """Counters of the hot path: `traffic.bytes_to_kafka += n`, `traffic.requests[api_key] += 1`.

    `requests` has a key for every API of the table; for another API key use `UNKNOWN_API`.
    """

    UNKNOWN_API: Final = -1

    __slots__ = ("bytes_to_clients", "bytes_to_kafka", "requests", "requests_in_flight")

    def __init__(self) -> None:
        self.bytes_to_kafka = 0
        self.bytes_to_clients = 0
        self.requests: dict[int, int] = dict.fromkeys((*APIS, self.UNKNOWN_API), 0)
        self.requests_in_flight = 0


class Metrics:
    """All of it, in a registry of its own: two proxies in one process (a test) do not meet.

    `state_fresh_until` gives until when the view of the state topic may be acted on.
    """

    def __init__(self, state_fresh_until: Callable[[], Monotonic] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.traffic = Traffic()
        self.registry.register(_TrafficCollector(self.traffic))
        # Linux only; elsewhere it has nothing to say.
        ProcessCollector(registry=self.registry)
        self.connections = Gauge(
            "fencepost_client_connections", "Client connections that are open.", registry=self.registry
        )
        self.connections_accepted = Counter(
            "fencepost_client_connections_accepted", "Client connections accepted.", registry=self.registry
        )
        in_flight = Gauge(
            "fencepost_requests_in_flight", "Requests of clients without an answer yet.", registry=self.registry
        )
        in_flight.set_function(lambda: self.traffic.requests_in_flight)
        self._closed = Counter(
            "fencepost_client_connections_closed_by_us",
            "Client connections that the proxy ended, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._refusals = Counter(
            "fencepost_refusals",
            "Batches that the proxy refused itself, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.violations = Counter(
            "fencepost_offset_violations",
            "Conditional batches that landed elsewhere than expected: somebody writes around the proxy.",
            registry=self.registry,
        )
        self.gate_wait_seconds = Histogram(
            "fencepost_gate_wait_seconds",
            "How long appends waited for their turn at a guarded partition.",
            buckets=_WAIT_SECONDS,
            registry=self.registry,
        )
        if state_fresh_until is not None:
            lease = Gauge(
                "fencepost_state_lease_seconds",
                "How long the view of the virtual configs may still be acted on; not above 0: guarded appends wait.",
                registry=self.registry,
            )
            # -1 rather than minus infinity before the first reading.
            lease.set_function(lambda: max(-1.0, state_fresh_until() - time.monotonic()))
        build = Info("fencepost_build", "What is running.", registry=self.registry)
        build.info({"version": fencepost_version(), "python": platform.python_version()})
        self._reasons: set[tuple[Counter, str]] = set()
        self._refusal_counts: dict[str, int] = {}

    @property
    def refusals(self) -> Mapping[str, int]:
        """Batches refused so far, by reason."""
        return self._refusal_counts

    def refused(self, reason: str) -> None:
        """Counts a batch that the proxy answered itself with an error."""
        reason = self._bounded(self._refusals, reason)
        self._refusals.labels(reason).inc()
        self._refusal_counts[reason] = self._refusal_counts.get(reason, 0) + 1

    def closed(self, reason: str) -> None:
        """Counts a client connection that the proxy ended: a limit's name, `protocol`, `drain`, …"""
        self._closed.labels(self._bounded(self._closed, reason)).inc()

    def exposition(self) -> bytes:
        """What a scrape gets; see `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _bounded(self, counter: Counter, reason: str) -> str:
        if (counter, reason) not in self._reasons:
            if sum(1 for each, _ in self._reasons if each is counter) >= _REASONS_MAX:
                return _OTHER
            self._reasons.add((counter, reason))
        return reason


class _TrafficCollector(Collector):
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        relayed = CounterMetricFamily("fencepost_relayed_bytes", "Bytes relayed, by direction.", labels=["direction"])
        relayed.add_metric(["to_kafka"], self._traffic.bytes_to_kafka)
        relayed.add_metric(["to_clients"], self._traffic.bytes_to_clients)
        yield relayed
        requests = CounterMetricFamily("fencepost_requests", "Requests of clients, by Kafka API.", labels=["api"])
        for api_key, count in self._traffic.requests.items():
            if count:
                requests.add_metric([APIS[api_key].name if api_key in APIS else "unknown"], count)
        yield requests
