"""`net/metrics.py` in Prometheus's text format. Imported when somebody scrapes for the first time."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fencepost_compiled import what_runs
from fencepost_proxy.net.metrics import Distribution, Metrics, fencepost_version
from fencepost_proxy.wire.apis import APIS


def exposition(metrics: Metrics) -> bytes:
    """A registry for each scrape: two proxies in one process (a test) do not meet."""
    registry = CollectorRegistry()
    registry.register(_Everything(metrics))
    # Linux only; elsewhere it has nothing to say.
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Everything(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()  # else registering collects once

    def collect(self) -> Iterable[Metric]:
        metrics, traffic = self._metrics, self._metrics.traffic
        relayed = CounterMetricFamily("fencepost_relayed_bytes", "Bytes relayed, by direction.", labels=["direction"])
        relayed.add_metric(["to_kafka"], traffic.bytes_to_kafka)
        relayed.add_metric(["to_clients"], traffic.bytes_to_clients)
        yield relayed
        requests = CounterMetricFamily("fencepost_requests", "Requests of clients, by Kafka API.", labels=["api"])
        for api_key, count in traffic.requests.items():
            if count:
                requests.add_metric([APIS[api_key].name if api_key in APIS else "unknown"], count)
        yield requests
        yield GaugeMetricFamily(
            "fencepost_client_connections", "Client connections that are open.", metrics.connections.value
        )
        yield CounterMetricFamily(
            "fencepost_client_connections_accepted",
            "Client connections accepted.",
            metrics.connections_accepted.value,
        )
        yield GaugeMetricFamily(
            "fencepost_requests_in_flight", "Requests of clients without an answer yet.", traffic.requests_in_flight
        )
        yield _by_reason(
            "fencepost_client_connections_closed_by_us",
            "Client connections that the proxy ended, by reason.",
            metrics.connections_closed,
        )
        yield _by_reason("fencepost_refusals", "Batches that the proxy refused itself, by reason.", metrics.refusals)
        yield CounterMetricFamily(
            "fencepost_offset_violations",
            "Conditional batches that landed elsewhere than expected: somebody writes around the proxy.",
            metrics.violations.value,
        )
        yield _histogram(
            "fencepost_added_request_seconds",
            "What the proxy adds to a request: from its last byte read to the broker's socket, gates not counted.",
            traffic.request_seconds,
        )
        yield _histogram(
            "fencepost_added_response_seconds",
            "What the proxy adds to an answer: from its last byte read to the client's socket.",
            traffic.response_seconds,
        )
        yield _histogram(
            "fencepost_gate_wait_seconds",
            "How long appends waited for their turn at a guarded partition.",
            metrics.gate_wait_seconds,
        )
        expansions = CounterMetricFamily(
            "fencepost_expansions", "Expansions of counted topics that ended, by result.", labels=["result"]
        )
        for result, count in metrics.expansions.items():
            expansions.add_metric([result], count)
        yield expansions
        yield GaugeMetricFamily(
            "fencepost_expansions_pending",
            "Counted topics that are growing: appends to them are held. The status page names them.",
            metrics.expansions_pending.value,
        )
        yield _histogram(
            "fencepost_expansion_held_seconds",
            "How long appends to a topic were held while it grew.",
            metrics.expansion_held_seconds,
        )
        yield GaugeMetricFamily(
            "fencepost_withheld_partitions",
            "New partitions that groups wait for, each group and partition once (each process that it goes through).",
            metrics.partitions_withheld.value,
        )
        yield CounterMetricFamily(
            "fencepost_withheld_partitions_handed_over",
            "New partitions that groups got after they had waited for them.",
            metrics.partitions_handed_over.value,
        )
        yield CounterMetricFamily(
            "fencepost_withheld_partitions_waited_out",
            "Of those: to groups that have committed nothing before; order is not promised to them.",
            metrics.partitions_waited_out.value,
        )
        yield _histogram(
            "fencepost_door_wait_seconds",
            "How long Produce requests were held at the doors of topics that count their partitions.",
            metrics.door_wait_seconds,
        )
        if metrics.state_fresh_until is not None:
            yield GaugeMetricFamily(
                "fencepost_state_lease_seconds",
                "How long the view of the virtual configs may still be acted on; not above 0: guarded appends wait.",
                # -1 rather than minus infinity before the first reading.
                max(-1.0, metrics.state_fresh_until() - time.monotonic()),
            )
        yield from _of_workers(metrics)
        build = {"version": fencepost_version(), "python": platform.python_version(), "code": what_runs()}
        yield InfoMetricFamily("fencepost_build", "What is running.", build)


def _of_workers(metrics: Metrics) -> Iterable[Metric]:
    """What a sum would hide: how the work is spread."""
    if not metrics.workers:
        return
    yield CounterMetricFamily(
        "fencepost_handovers", "Connections that went to the owner process.", metrics.handed_over.value
    )
    connections = GaugeMetricFamily(
        "fencepost_worker_client_connections", "Client connections that are open.", labels=["worker"]
    )
    accepted = CounterMetricFamily(
        "fencepost_worker_client_connections_accepted", "Client connections accepted.", labels=["worker"]
    )
    requests = CounterMetricFamily("fencepost_worker_requests", "Requests of clients.", labels=["worker"])
    starts = CounterMetricFamily("fencepost_worker_starts", "Starts of a worker process.", labels=["worker"])
    cpu = CounterMetricFamily("fencepost_worker_cpu_seconds", "CPU time, user and system.", labels=["worker"])
    memory = GaugeMetricFamily("fencepost_worker_resident_memory_bytes", "Resident memory.", labels=["worker"])
    for each in metrics.workers:
        label = [str(each.number)]
        connections.add_metric(label, each.connections)
        accepted.add_metric(label, each.accepted)
        requests.add_metric(label, each.requests)
        starts.add_metric(label, each.starts)
        cpu.add_metric(label, each.cpu_seconds)
        memory.add_metric(label, each.resident_bytes)
    yield from (connections, accepted, requests, starts, cpu, memory)


def _by_reason(name: str, documentation: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=["reason"])
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family


def _histogram(name: str, documentation: str, seen: Distribution) -> Metric:
    buckets = []
    below = 0
    for bound, count in zip((*seen.bounds, float("inf")), seen.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=seen.total)
