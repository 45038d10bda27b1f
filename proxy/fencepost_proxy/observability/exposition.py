"""Prometheus text format of `metrics.py`. The first scrape imports this module.

`TABLE` defines every metric: name, type, help, labels and how to read its value. `tests/pages/metrics.py` generates
`docs/metrics.md` from it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fencepost_proxy.metrics import Distribution, Metrics, WorkerNumbers, fencepost_version
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.wire.apis import APIS

#: Values of a metric by those of its labels.
Labelled = Iterable[tuple[tuple[str, ...], float]]


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Scrape:
    """Values of one scrape, all taken at the same moment."""

    def __init__(self, metrics: Metrics) -> None:
        metrics.probe()
        self.metrics = metrics
        self.traffic = metrics.traffic
        self.moment = metrics.moment
        self.transactions = None if metrics.transactions is None else metrics.transactions()


@dataclass(frozen=True, slots=True)
class Shown:
    """One metric. `read` returns None if this process does not expose it now."""

    name: str
    kind: MetricType
    help: str
    read: Callable[[Scrape], float | Distribution | Labelled | Mapping[str, str] | None]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    shown: tuple[Shown, ...]


def exposition(metrics: Metrics) -> bytes:
    """One registry per scrape, so that two proxies in one process (a test) stay separate."""
    registry = CollectorRegistry()
    registry.register(_Everything(metrics))
    # Linux only; empty on other systems.
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Everything(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise registering collects once

    def collect(self) -> Iterable[Metric]:
        scrape = Scrape(self._metrics)
        for section in TABLE:
            for shown in section.shown:
                family = _family(shown, scrape)
                if family is not None:
                    yield family


def _family(shown: Shown, scrape: Scrape) -> Metric | None:
    value = shown.read(scrape)
    if value is None:
        return None
    name, documentation = shown.name, shown.help
    if isinstance(value, Distribution):
        return HistogramMetricFamily(name, documentation, buckets=_cumulated(value), sum_value=value.total)
    if isinstance(value, Mapping):
        return InfoMetricFamily(name.removesuffix("_info"), documentation, dict(value))
    family = (CounterMetricFamily if shown.kind is MetricType.COUNTER else GaugeMetricFamily)(
        name, documentation, labels=shown.labels
    )
    for labels, number in [((), value)] if isinstance(value, int | float) else value:
        family.add_metric(labels, number)
    return family


def _cumulated(observed: Distribution) -> list[tuple[str, float]]:
    buckets = []
    below = 0
    for bound, count in zip((*observed.bounds, float("inf")), observed.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
    return buckets


# ---- how values are read


def _by(counts: Mapping[str, int], *always: str) -> Labelled:
    """`always`: labels exposed from the start, because Prometheus sees no increase in a series that begins with 1."""
    return [((name,), count) for name, count in (dict.fromkeys(always, 0) | dict(counts)).items()]


def _requests(scrape: Scrape) -> Labelled:
    for api_key, versions in scrape.traffic.requests.items():
        *known, unknown = versions
        for version, count in enumerate(known):
            if count:
                yield (APIS[api_key].name, str(version)), count
        if unknown:
            yield (APIS[api_key].name, "unknown"), unknown


def _upstream_errors(scrape: Scrape) -> Labelled:
    for of, reasons in scrape.metrics.upstream_errors.items():
        for (reason,), count in _by(reasons, *_UPSTREAM_ERRORS[of]):
            yield (of, reason), count


_UPSTREAM_ERRORS: Final = {
    "clients": ("unreachable", "timeout", "tls", "unknown_broker", "lost"),
    "proxy": ("unreachable", "timeout", "tls", "login", "protocol", "lost"),
}


def _partitions(read: Callable[[tuple[int, int]], int]) -> Callable[[Scrape], Labelled]:
    def labelled(scrape: Scrape) -> Labelled:
        for where, numbers in scrape.moment.partitions.items():
            yield (where.topic, str(where.partition)), read(numbers)

    return labelled


def _lease_seconds(scrape: Scrape) -> float | None:
    fresh_until = scrape.metrics.state_fresh_until
    # -1 instead of minus infinity before the first read.
    return None if fresh_until is None else max(-1.0, fresh_until() - time.monotonic())


def _workers(read: Callable[[WorkerNumbers], float]) -> Callable[[Scrape], Labelled | None]:
    def labelled(scrape: Scrape) -> Labelled | None:
        workers = scrape.metrics.workers
        return [((str(each.number),), read(each)) for each in workers] if workers else None

    return labelled


def _transactions(
    read: Callable[[TransactionsReport], float | Labelled],
) -> Callable[[Scrape], float | Labelled | None]:
    def value(scrape: Scrape) -> float | Labelled | None:
        return None if scrape.transactions is None else read(scrape.transactions)

    return value


def _build(_: Scrape) -> Mapping[str, str]:
    return {"version": fencepost_version(), "python": platform.python_version()}


# ---- the table

_COUNTER, _GAUGE, _HISTOGRAM = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM
_PARTITION: Final = ("topic", "partition")

TABLE: Final[tuple[Section, ...]] = (
    Section(
        "Traffic",
        "Client traffic only. The proxy's own requests to Kafka are not included.",
        (
            Shown(
                "fencepost_relayed_bytes_total",
                _COUNTER,
                "Bytes relayed, by direction: to_kafka, to_clients.",
                lambda s: [(("to_kafka",), s.traffic.bytes_to_kafka), (("to_clients",), s.traffic.bytes_to_clients)],
                ("direction",),
            ),
            Shown(
                "fencepost_requests_total",
                _COUNTER,
                "Client requests, by Kafka API and version; unknown: an ApiVersions version newer than Kafka 4.4.",
                _requests,
                ("api", "version"),
            ),
            Shown(
                "fencepost_requests_in_flight",
                _GAUGE,
                "Client requests in progress.",
                lambda s: s.traffic.requests_in_flight,
            ),
            Shown(
                "fencepost_client_connections",
                _GAUGE,
                "Open client connections.",
                lambda s: s.metrics.connections.value,
            ),
            Shown(
                "fencepost_client_connections_max",
                _GAUGE,
                "Limit of open client connections (limits.connections_max, for all processes of a proxy together).",
                lambda s: s.moment.connections_max,
            ),
            Shown(
                "fencepost_address_connections",
                _GAUGE,
                "Client connections of the address with the most connections in one process.",
                lambda s: s.moment.address.connections,
            ),
            Shown(
                "fencepost_address_connections_max",
                _GAUGE,
                "Limit of client connections per address (limits.address_connections_max, for each process).",
                lambda s: s.moment.address.connections_max,
            ),
            Shown(
                "fencepost_client_connections_accepted_total",
                _COUNTER,
                "Client connections accepted.",
                lambda s: s.metrics.connections_accepted.value,
            ),
            Shown(
                "fencepost_client_connections_dropped_total",
                _COUNTER,
                "Client connections closed by the proxy, by reason; connections_max, address_connections_max: closed "
                "on accept.",
                lambda s: _by(s.metrics.connections_closed, "connections_max", "address_connections_max"),
                ("reason",),
            ),
            Shown(
                "fencepost_buffered_bytes",
                _GAUGE,
                "Bytes of requests and responses buffered in memory.",
                lambda s: s.moment.buffered_bytes,
            ),
            Shown(
                "fencepost_buffered_bytes_max",
                _GAUGE,
                "Limit of buffered bytes (limits.buffered_bytes_max, for all processes of a proxy together). "
                "At the limit the proxy pauses reading from all clients.",
                lambda s: s.moment.buffered_bytes_max,
            ),
            Shown(
                "fencepost_added_request_seconds",
                _HISTOGRAM,
                "Time that the proxy adds to a request: from reading its last byte to writing it to the broker. "
                "Waiting for a partition sequencer is not counted.",
                lambda s: s.traffic.request_seconds,
            ),
            Shown(
                "fencepost_added_response_seconds",
                _HISTOGRAM,
                "Time that the proxy adds to a response: from reading its last byte to writing it to the client.",
                lambda s: s.traffic.response_seconds,
            ),
            Shown(
                "fencepost_upstream_errors_total",
                _COUNTER,
                "Broker connections that failed to open or were lost with requests in progress, for clients or for the "
                "proxy itself, by reason (unreachable, timeout, tls, login, protocol, unknown_broker, lost).",
                _upstream_errors,
                ("of", "reason"),
            ),
        ),
    ),
    Section(
        "Conditional publish",
        "For topics that check expected offsets.",
        (
            Shown(
                "fencepost_refusals_total",
                _COUNTER,
                "Batches refused by the proxy, by reason: conditional publish, partition counts, transactions and "
                "idempotence levels. not_ready, try_again and outcome_unknown are retriable.",
                lambda s: _by(s.metrics.refusals, "offset_mismatch", "not_ready", "try_again", "outcome_unknown"),
                ("reason",),
            ),
            Shown(
                "fencepost_append_errors_total",
                _COUNTER,
                "Errors that Kafka returned for appends to checked topics, by name. OUT_OF_ORDER_SEQUENCE_NUMBER "
                "includes lost races.",
                lambda s: _by(s.metrics.kafka_errors),
                ("error",),
            ),
            Shown(
                "fencepost_offset_violations_total",
                _COUNTER,
                "Conditional batches appended at another offset than expected: a writer bypasses the proxy, or Kafka "
                "did not compare sequences.",
                lambda s: s.metrics.violations.value,
            ),
            Shown(
                "fencepost_sequencer_wait_seconds",
                _HISTOGRAM,
                "Time that appends waited for their partition sequencer.",
                lambda s: s.metrics.sequencer_wait_seconds,
            ),
            Shown(
                "fencepost_sequencers",
                _GAUGE,
                "Partition sequencers with recent appends, by phase: open, unconfirmed (fence), reading, publishing, "
                "resolving (an in-doubt append).",
                lambda s: _by(s.moment.sequencers),
                ("phase",),
            ),
            Shown(
                "fencepost_sequencer_waiting_appends",
                _GAUGE,
                "Pending appends of all partition sequencers.",
                lambda s: s.moment.appends_waiting,
            ),
            Shown(
                "fencepost_partition_log_end_offset",
                _GAUGE,
                "Log end offset of a partition as this process last appended or read it. With several proxies, take "
                "the highest.",
                _partitions(lambda numbers: numbers[0]),
                _PARTITION,
            ),
            Shown(
                "fencepost_partition_sequence_offset",
                _GAUGE,
                "Offsets of a partition that fenced appends did not use. It is constant if all producers use proxies "
                "and the topic has fencepost.check.expected.offsets=required.",
                _partitions(lambda numbers: numbers[1]),
                _PARTITION,
            ),
            Shown(
                "fencepost_partitions_omitted",
                _GAUGE,
                "Partitions above limits.metric_partitions_shown_max, omitted from these two metrics.",
                lambda s: s.moment.partitions_left_out,
            ),
            Shown(
                "fencepost_state_lease_seconds",
                _GAUGE,
                "How long the proxy may still use its copy of the virtual configs. At 0 or below, appends to checked "
                "topics wait.",
                _lease_seconds,
            ),
            Shown(
                "fencepost_replaced_topics",
                _GAUGE,
                "Topics deleted and created again without the proxy, which keep their old checks until an operator "
                "decides. The status page names them.",
                lambda s: s.metrics.topics_replaced.value,
            ),
            Shown(
                "fencepost_idempotence_downgraded_batches_total",
                _COUNTER,
                "Batches for topics with fencepost.idempotence.level=safe sent without their producer ids, by reason.",
                lambda s: _by(s.metrics.downgrades),
                ("reason",),
            ),
        ),
    ),
    Section(
        "Partition expansion",
        "For topics with partition-count checks or ordered partition expansion.",
        (
            Shown(
                "fencepost_expansions_total",
                _COUNTER,
                "Finished expansions of topics with partition-count checks, by result.",
                lambda s: _by(s.metrics.expansions, "done", "failed", "unordered"),
                ("result",),
            ),
            Shown(
                "fencepost_expansions_pending",
                _GAUGE,
                "Expansions in progress; appends to their topics are blocked. The status page names them.",
                lambda s: s.metrics.expansions_pending.value,
            ),
            Shown(
                "fencepost_expansion_blocked_seconds",
                _HISTOGRAM,
                "Time that an expansion blocked appends to its topic.",
                lambda s: s.metrics.expansion_blocked_seconds,
            ),
            Shown(
                "fencepost_append_barrier_wait_seconds",
                _HISTOGRAM,
                "Time that Produce requests waited at append barriers of topics with partition-count checks.",
                lambda s: s.metrics.barrier_wait_seconds,
            ),
            Shown(
                "fencepost_gated_partitions",
                _GAUGE,
                "New partitions gated for consumer groups: one per group, partition and proxy process that serves it.",
                lambda s: s.metrics.partitions_gated.value,
            ),
            Shown(
                "fencepost_gated_partitions_released_total",
                _COUNTER,
                "Gated partitions that were assigned to their groups.",
                lambda s: s.metrics.partitions_released.value,
            ),
            Shown(
                "fencepost_gated_partitions_timed_out_total",
                _COUNTER,
                "Gated partitions assigned because the group committed no progress on prior partitions within "
                "limits.gated_without_commit_seconds and ..._without_progress_seconds. Order is not guaranteed.",
                lambda s: s.metrics.partitions_timed_out.value,
            ),
        ),
    ),
    Section(
        "Transactions",
        "Metrics that begin with `fencepost_kafka_` or `fencepost_watch` describe the cluster: every proxy reports the "
        "same values. `watch_transactions = false` omits them. Per-partition metrics show the worst "
        "`limits.watched_shown_max` partitions ([stuck transactions](stuck-transactions.md)).",
        (
            Shown(
                "fencepost_commits_total",
                _COUNTER,
                "Transaction commits that the proxy validated: pass, unknown (the client must retry), or the reason "
                "for the refusal.",
                lambda s: _by(s.metrics.commits),
                ("outcome",),
            ),
            Shown(
                "fencepost_commit_wait_seconds",
                _HISTOGRAM,
                "Time that transaction commits waited for their validation.",
                lambda s: s.metrics.commit_wait_seconds,
            ),
            Shown(
                "fencepost_kafka_producer_ids",
                _GAUGE,
                "Producer ids in the state of partition leaders, summed over partitions.",
                _transactions(lambda t: t.producer_ids),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag_partitions",
                _GAUGE,
                "Partitions whose last stable offset is below the high watermark.",
                _transactions(lambda t: t.lagging_partitions),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag_max",
                _GAUGE,
                "Offsets that read_committed consumers cannot read yet, highest of all partitions.",
                _transactions(lambda t: t.lag_max),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag_all_partitions",
                _GAUGE,
                "Offsets that read_committed consumers cannot read yet, sum of all partitions.",
                _transactions(lambda t: t.lag_total),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_stuck_seconds_max",
                _GAUGE,
                "Longest time that a last stable offset below the high watermark has not advanced.",
                _transactions(lambda t: t.lag_seconds_max),
            ),
            Shown(
                "fencepost_kafka_open_transactions",
                _GAUGE,
                "Open transactions.",
                _transactions(lambda t: t.open_transactions),
            ),
            Shown(
                "fencepost_kafka_open_transaction_age_seconds_max",
                _GAUGE,
                "Age of the oldest open transaction.",
                _transactions(lambda t: t.oldest_seconds),
            ),
            Shown(
                "fencepost_kafka_hanging_transactions",
                _GAUGE,
                "Hanging transactions, by reason. The status page names them.",
                _transactions(lambda t: _by(t.hanging_by_reason)),
                ("reason",),
            ),
            Shown(
                "fencepost_kafka_transactional_ids",
                _GAUGE,
                "Transactional ids known to coordinators, by state.",
                _transactions(lambda t: _by(t.transactional_ids)),
                ("state",),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset",
                _GAUGE,
                "Last stable offset of the partitions where it lags most.",
                _transactions(lambda t: [((b.topic, str(b.partition)), b.last_stable_offset) for b in t.lagging]),
                _PARTITION,
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag",
                _GAUGE,
                "High watermark minus last stable offset, of the partitions where it lags most; 0 for all others.",
                _transactions(lambda t: [((b.topic, str(b.partition)), b.lag) for b in t.lagging]),
                _PARTITION,
            ),
            Shown(
                "fencepost_kafka_partition_producer_ids",
                _GAUGE,
                "Producer ids of the partitions with the most.",
                _transactions(lambda t: [((m.topic, str(m.partition)), m.producer_ids) for m in t.most_producers]),
                _PARTITION,
            ),
            Shown(
                "fencepost_watched_partitions",
                _GAUGE,
                "Partitions watched.",
                _transactions(lambda t: t.partitions),
            ),
            Shown(
                "fencepost_watched_partitions_unreadable",
                _GAUGE,
                "Partitions not read in the last sweep: no leader, or not authorized.",
                _transactions(lambda t: t.partitions_unreadable),
            ),
            Shown(
                "fencepost_watched_partitions_omitted",
                _GAUGE,
                "Partitions not watched because of the limit on watched partitions.",
                _transactions(lambda t: t.partitions_left_out),
            ),
            Shown(
                "fencepost_watch_sweep_seconds",
                _GAUGE,
                "Duration of the last sweep over all partitions; 0 before the first.",
                _transactions(lambda t: t.sweep_seconds or 0.0),
            ),
            Shown(
                "fencepost_watch_requests_total",
                _COUNTER,
                "Requests sent to watch transactions and partitions.",
                _transactions(lambda t: t.requests),
            ),
        ),
    ),
    Section(
        "Security",
        "[Security](security.md) explains the first words of reasons.",
        (
            Shown(
                "fencepost_tls_handshakes_total",
                _COUNTER,
                "TLS handshakes of clients: ok, or the reason for the failure.",
                lambda s: _by(s.metrics.tls_handshakes, "ok"),
                ("result",),
            ),
            Shown(
                "fencepost_upstream_tls_failures_total",
                _COUNTER,
                "Failed TLS handshakes with brokers, by reason.",
                lambda s: _by(s.metrics.upstream_tls_failures),
                ("reason",),
            ),
            Shown(
                "fencepost_client_login_failures_total",
                _COUNTER,
                "Client logins refused by Kafka.",
                lambda s: s.metrics.client_logins_failed.value,
            ),
            Shown(
                "fencepost_control_logins_total",
                _COUNTER,
                "Logins of the proxy itself to brokers.",
                lambda s: _by(s.metrics.logins, "ok", "failed"),
                ("result",),
            ),
            Shown(
                "fencepost_certificate_reloads_total",
                _COUNTER,
                "Reloads of changed certificate or key files: ok, or failed (the old files stay in use).",
                lambda s: _by(s.metrics.certificate_reloads, "ok", "failed"),
                ("result",),
            ),
            Shown(
                "fencepost_certificate_not_after_timestamp_seconds",
                _GAUGE,
                "When the proxy's own certificates expire, seconds since 1970.",
                lambda s: [((of,), seconds) for of, seconds in s.metrics.certificate_ends],
                ("of",),
            ),
        ),
    ),
    Section(
        "The process",
        "The usual `process_*` metrics are exposed too. With worker processes they describe the supervisor, and "
        "`fencepost_worker_*` describe the workers.",
        (
            Shown(
                "fencepost_ready",
                _GAUGE,
                "1: ready for clients. 0: not ready, /readyz gives the reason.",
                lambda s: None if s.metrics.ready is None else float(s.metrics.ready),
            ),
            Shown(
                "fencepost_event_loop_late_seconds",
                _HISTOGRAM,
                "Event loop delay, measured four times a second. Above 0.05 s the log names the code that ran.",
                lambda s: s.metrics.loop_late_seconds,
            ),
            Shown(
                "fencepost_log_lines_total",
                _COUNTER,
                "Log lines, by level; left_out: not written because of the rate limit for their kind.",
                lambda s: _by(s.metrics.log_lines),
                ("level",),
            ),
            Shown(
                "fencepost_connection_migrations_total",
                _COUNTER,
                "Connections migrated to the primary worker.",
                lambda s: s.metrics.released_total.value if s.metrics.workers else None,
            ),
            Shown(
                "fencepost_worker_client_connections",
                _GAUGE,
                "Open client connections.",
                _workers(lambda w: w.connections),
                ("worker",),
            ),
            Shown(
                "fencepost_worker_client_connections_accepted_total",
                _COUNTER,
                "Client connections accepted.",
                _workers(lambda w: w.accepted),
                ("worker",),
            ),
            Shown(
                "fencepost_worker_requests_total",
                _COUNTER,
                "Client requests.",
                _workers(lambda w: w.requests),
                ("worker",),
            ),
            Shown(
                "fencepost_worker_starts_total",
                _COUNTER,
                "Starts of a worker process.",
                _workers(lambda w: w.starts),
                ("worker",),
            ),
            Shown(
                "fencepost_worker_cpu_seconds_total",
                _COUNTER,
                "CPU time, user and system.",
                _workers(lambda w: w.cpu_seconds),
                ("worker",),
            ),
            Shown(
                "fencepost_worker_resident_memory_bytes",
                _GAUGE,
                "Resident memory.",
                _workers(lambda w: w.resident_bytes),
                ("worker",),
            ),
            Shown(
                "fencepost_worker_open_fds",
                _GAUGE,
                "Open files and sockets; process_max_fds is the limit of each worker.",
                _workers(lambda w: w.open_files),
                ("worker",),
            ),
            Shown(
                "fencepost_build_info",
                MetricType.INFO,
                "Version of Fencepost and Python.",
                _build,
                ("version", "python"),
            ),
        ),
    ),
)
