"""`net/metrics.py` in Prometheus's text format. Imported when somebody scrapes for the first time.

`TABLE` is all that a scrape can have: what each metric is called and means, and how it is read. `docs/metrics.md` is
made of it (`python -m tests.pages`).
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

from fencepost_proxy.net.metrics import Distribution, Metrics, WorkerNumbers, fencepost_version
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.wire.apis import APIS

#: Values of a metric by those of its labels.
Labelled = Iterable[tuple[tuple[str, ...], float]]


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Scrape:
    """What one scrape shows is of one moment."""

    def __init__(self, metrics: Metrics) -> None:
        metrics.look()
        self.metrics = metrics
        self.traffic = metrics.traffic
        self.moment = metrics.moment
        self.transactions = None if metrics.transactions is None else metrics.transactions()


@dataclass(frozen=True, slots=True)
class Shown:
    """One metric. `read` gives None where this process does not show it now."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Scrape], float | Distribution | Labelled | Mapping[str, str] | None]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    shown: tuple[Shown, ...]


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
    family = (CounterMetricFamily if shown.kind is Kind.COUNTER else GaugeMetricFamily)(
        name, documentation, labels=shown.labels
    )
    for labels, number in [((), value)] if isinstance(value, int | float) else value:
        family.add_metric(labels, number)
    return family


def _cumulated(seen: Distribution) -> list[tuple[str, float]]:
    buckets = []
    below = 0
    for bound, count in zip((*seen.bounds, float("inf")), seen.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
    return buckets


# ---- how they are read


def _by(counts: Mapping[str, int], *always: str) -> Labelled:
    """`always` – what is there from the start: Prometheus sees no increase in a series that begins with 1."""
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
    # -1 rather than minus infinity before the first reading.
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


# ---- THE table

_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_PARTITION: Final = ("topic", "partition")

TABLE: Final[tuple[Section, ...]] = (
    Section(
        "Traffic",
        "Of clients. What the proxy asks of Kafka on its own behalf is not in it.",
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
                "Requests of clients, by Kafka API and version; unknown: an ApiVersions newer than Kafka 4.4.",
                _requests,
                ("api", "version"),
            ),
            Shown(
                "fencepost_requests_in_flight",
                _GAUGE,
                "Requests of clients without an answer yet.",
                lambda s: s.traffic.requests_in_flight,
            ),
            Shown(
                "fencepost_client_connections",
                _GAUGE,
                "Client connections that are open.",
                lambda s: s.metrics.connections.value,
            ),
            Shown(
                "fencepost_client_connections_max",
                _GAUGE,
                "How many there may be (limits.connections_max, of all its processes together).",
                lambda s: s.moment.connections_max,
            ),
            Shown(
                "fencepost_address_connections",
                _GAUGE,
                "Client connections in one process from the address that has the most of them there.",
                lambda s: s.moment.address.connections,
            ),
            Shown(
                "fencepost_address_connections_max",
                _GAUGE,
                "How many there may be from one address (limits.address_connections_max, of each process).",
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
                "Client connections that the proxy ended, by reason; connections_max, address_connections_max: closed "
                "on arrival.",
                lambda s: _by(s.metrics.connections_closed, "connections_max", "address_connections_max"),
                ("reason",),
            ),
            Shown(
                "fencepost_buffered_bytes",
                _GAUGE,
                "Bytes of requests and answers that are held in memory.",
                lambda s: s.moment.buffered_bytes,
            ),
            Shown(
                "fencepost_buffered_bytes_max",
                _GAUGE,
                "How many there may be (limits.buffered_bytes_max, of all its processes together); "
                "then nobody is read.",
                lambda s: s.moment.buffered_bytes_max,
            ),
            Shown(
                "fencepost_added_request_seconds",
                _HISTOGRAM,
                "What the proxy adds to a request: from its last byte read to the broker's socket, gates not counted.",
                lambda s: s.traffic.request_seconds,
            ),
            Shown(
                "fencepost_added_response_seconds",
                _HISTOGRAM,
                "What the proxy adds to an answer: from its last byte read to the client's socket.",
                lambda s: s.traffic.response_seconds,
            ),
            Shown(
                "fencepost_upstream_errors_total",
                _COUNTER,
                "Connections to brokers that could not be had, or were lost with requests unanswered: of clients or of "
                "the proxy itself, by reason (unreachable, timeout, tls, login, protocol, unknown_broker, lost).",
                _upstream_errors,
                ("of", "reason"),
            ),
        ),
    ),
    Section(
        "Conditional publish",
        "Of guarded topics: those that check expected offsets.",
        (
            Shown(
                "fencepost_refusals_total",
                _COUNTER,
                "Batches that the proxy refused itself, by reason: those of conditional publish, of partition counts, "
                "of transactions and of idempotence levels; not_ready, try_again and outcome_unknown are retriable.",
                lambda s: _by(s.metrics.refusals, "offset_mismatch", "not_ready", "try_again", "outcome_unknown"),
                ("reason",),
            ),
            Shown(
                "fencepost_append_errors_total",
                _COUNTER,
                "Errors with which Kafka answered appends to guarded partitions, by name; races that were lost, "
                "too: OUT_OF_ORDER_SEQUENCE_NUMBER.",
                lambda s: _by(s.metrics.kafka_errors),
                ("error",),
            ),
            Shown(
                "fencepost_offset_violations_total",
                _COUNTER,
                "Conditional batches appended elsewhere: a writer bypasses the proxy, or Kafka did not compare.",
                lambda s: s.metrics.violations.value,
            ),
            Shown(
                "fencepost_gate_wait_seconds",
                _HISTOGRAM,
                "How long appends waited for their turn at a guarded partition.",
                lambda s: s.metrics.gate_wait_seconds,
            ),
            Shown(
                "fencepost_gates",
                _GAUGE,
                "Guarded partitions that were appended to lately, by what their gate is doing: open, cold (nothing is "
                "known of the log), reading, publishing, settling (an append is in doubt).",
                lambda s: _by(s.moment.gates),
                ("phase",),
            ),
            Shown(
                "fencepost_gate_waiting_appends",
                _GAUGE,
                "Appends that wait for their turn now, all partitions.",
                lambda s: s.moment.appends_waiting,
            ),
            Shown(
                "fencepost_partition_log_end_offset",
                _GAUGE,
                "A guarded partition's log end, where this process knows it: what it appended itself, and what it has "
                "read. Of several proxies take the highest.",
                _partitions(lambda numbers: numbers[0]),
                _PARTITION,
            ),
            Shown(
                "fencepost_partition_stamp_shift",
                _GAUGE,
                "How many of its offsets were not taken by stamped appends. Where all go through proxies to a topic "
                "with check.expected.offsets=required, it does not move.",
                _partitions(lambda numbers: numbers[1]),
                _PARTITION,
            ),
            Shown(
                "fencepost_partitions_left_out",
                _GAUGE,
                "Guarded partitions above limits.metric_partitions_shown_max, of which these two are not shown.",
                lambda s: s.moment.partitions_left_out,
            ),
            Shown(
                "fencepost_state_lease_seconds",
                _GAUGE,
                "How long the view of the virtual configs may still be acted on; not above 0: guarded appends wait.",
                _lease_seconds,
            ),
            Shown(
                "fencepost_replaced_topics",
                _GAUGE,
                "Topics that were deleted and created again at Kafka and keep the checks of their predecessors until "
                "an operator decides. The status page names them.",
                lambda s: s.metrics.topics_replaced.value,
            ),
            Shown(
                "fencepost_idempotence_downgraded_batches_total",
                _COUNTER,
                "Batches of topics with idempotence.level=safe that went to Kafka without their producer ids, "
                "by reason.",
                lambda s: _by(s.metrics.downgrades),
                ("reason",),
            ),
        ),
    ),
    Section(
        "Growing topics",
        "Of topics that count their partitions, or grow in order.",
        (
            Shown(
                "fencepost_expansions_total",
                _COUNTER,
                "Expansions of counted topics that ended, by result.",
                lambda s: _by(s.metrics.expansions, "done", "failed", "unordered"),
                ("result",),
            ),
            Shown(
                "fencepost_expansions_pending",
                _GAUGE,
                "Counted topics that are growing: appends to them are held. The status page names them.",
                lambda s: s.metrics.expansions_pending.value,
            ),
            Shown(
                "fencepost_expansion_held_seconds",
                _HISTOGRAM,
                "How long appends to a topic were held while it grew.",
                lambda s: s.metrics.expansion_held_seconds,
            ),
            Shown(
                "fencepost_door_wait_seconds",
                _HISTOGRAM,
                "How long Produce requests were held at the doors of topics that count their partitions.",
                lambda s: s.metrics.door_wait_seconds,
            ),
            Shown(
                "fencepost_withheld_partitions",
                _GAUGE,
                "New partitions that groups wait for, each group and partition once (each process that it goes "
                "through).",
                lambda s: s.metrics.partitions_withheld.value,
            ),
            Shown(
                "fencepost_withheld_partitions_handed_over_total",
                _COUNTER,
                "New partitions that groups got after they had waited for them.",
                lambda s: s.metrics.partitions_handed_over.value,
            ),
            Shown(
                "fencepost_withheld_partitions_waited_out_total",
                _COUNTER,
                "Of those: to groups that committed nothing further on prior partitions for as long as "
                "limits.withheld_without_commit_seconds and ..._without_progress_seconds say; order is not promised.",
                lambda s: s.metrics.partitions_waited_out.value,
            ),
        ),
    ),
    Section(
        "Transactions",
        "What begins with `fencepost_kafka_` or `fencepost_watch` is the cluster's, not this process's: every proxy "
        "that looks says the same. It is left out with `watch_transactions = false`. The partitions that are named are "
        "the worst `limits.watched_shown_max` of each kind ([stuck transactions](stuck-transactions.md)).",
        (
            Shown(
                "fencepost_commits_total",
                _COUNTER,
                "Commits of transactions that were looked into: pass, unknown (told to ask again), or why refused.",
                lambda s: _by(s.metrics.commits),
                ("outcome",),
            ),
            Shown(
                "fencepost_commit_wait_seconds",
                _HISTOGRAM,
                "How long commits of transactions were held until it was known whether they may pass.",
                lambda s: s.metrics.commit_wait_seconds,
            ),
            Shown(
                "fencepost_kafka_producer_ids",
                _GAUGE,
                "Producer ids that partition leaders remember, each partition's counted.",
                _transactions(lambda t: t.producer_ids),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag_partitions",
                _GAUGE,
                "Partitions whose last stable offset is behind the high watermark.",
                _transactions(lambda t: t.partitions_behind),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag_max",
                _GAUGE,
                "Offsets that committed readers cannot get yet, at the partition that has most.",
                _transactions(lambda t: t.lag_max),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag_all_partitions",
                _GAUGE,
                "Offsets that committed readers cannot get yet, all partitions.",
                _transactions(lambda t: t.lag_total),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_stuck_seconds_max",
                _GAUGE,
                "How long a last stable offset behind the high watermark has stood still, the longest.",
                _transactions(lambda t: t.behind_seconds_max),
            ),
            Shown(
                "fencepost_kafka_open_transactions",
                _GAUGE,
                "Transactions that are open.",
                _transactions(lambda t: t.open_transactions),
            ),
            Shown(
                "fencepost_kafka_open_transaction_age_seconds_max",
                _GAUGE,
                "Age of the oldest transaction that is open.",
                _transactions(lambda t: t.oldest_seconds),
            ),
            Shown(
                "fencepost_kafka_hanging_transactions",
                _GAUGE,
                "Transactions that will not end as they should, by reason; the status page names them.",
                _transactions(lambda t: _by(t.hanging_by_reason)),
                ("reason",),
            ),
            Shown(
                "fencepost_kafka_transactional_ids",
                _GAUGE,
                "Transactional ids that coordinators remember, by state.",
                _transactions(lambda t: _by(t.transactional_ids)),
                ("state",),
            ),
            Shown(
                "fencepost_kafka_last_stable_offset",
                _GAUGE,
                "Of the partitions where it is furthest behind.",
                _transactions(lambda t: [((b.topic, str(b.partition)), b.last_stable_offset) for b in t.behind]),
                _PARTITION,
            ),
            Shown(
                "fencepost_kafka_last_stable_offset_lag",
                _GAUGE,
                "High watermark minus last stable offset, where it is largest; 0 where a partition is not named.",
                _transactions(lambda t: [((b.topic, str(b.partition)), b.lag) for b in t.behind]),
                _PARTITION,
            ),
            Shown(
                "fencepost_kafka_partition_producer_ids",
                _GAUGE,
                "Of the partitions that have most.",
                _transactions(lambda t: [((m.topic, str(m.partition)), m.producer_ids) for m in t.most_producers]),
                _PARTITION,
            ),
            Shown(
                "fencepost_watched_partitions",
                _GAUGE,
                "Partitions that were looked at.",
                _transactions(lambda t: t.partitions),
            ),
            Shown(
                "fencepost_watched_partitions_unreadable",
                _GAUGE,
                "Partitions that could not be looked at the last time, for lack of a leader or of rights.",
                _transactions(lambda t: t.partitions_unreadable),
            ),
            Shown(
                "fencepost_watched_partitions_left_out",
                _GAUGE,
                "Partitions above the number that is looked at.",
                _transactions(lambda t: t.partitions_left_out),
            ),
            Shown(
                "fencepost_watch_sweep_seconds",
                _GAUGE,
                "How long it took to look at all partitions, the last time; 0 before.",
                _transactions(lambda t: t.sweep_seconds or 0.0),
            ),
            Shown(
                "fencepost_watch_requests_total",
                _COUNTER,
                "Requests sent to look at transactions and partitions.",
                _transactions(lambda t: t.requests),
            ),
        ),
    ),
    Section(
        "Security",
        "Words that begin a reason stand in [security](security.md).",
        (
            Shown(
                "fencepost_tls_handshakes_total",
                _COUNTER,
                "TLS handshakes of clients: ok, or why they failed.",
                lambda s: _by(s.metrics.tls_handshakes, "ok"),
                ("result",),
            ),
            Shown(
                "fencepost_upstream_tls_failures_total",
                _COUNTER,
                "Connections to brokers that did not come to TLS, by reason.",
                lambda s: _by(s.metrics.upstream_tls_failures),
                ("reason",),
            ),
            Shown(
                "fencepost_client_login_failures_total",
                _COUNTER,
                "Logins of clients that Kafka refused.",
                lambda s: s.metrics.client_logins_failed.value,
            ),
            Shown(
                "fencepost_control_logins_total",
                _COUNTER,
                "Logins of the proxy itself at brokers.",
                lambda s: _by(s.metrics.logins, "ok", "failed"),
                ("result",),
            ),
            Shown(
                "fencepost_certificate_reloads_total",
                _COUNTER,
                "Changed files with certificates or keys: read, or the old ones stay in force.",
                lambda s: _by(s.metrics.certificate_reloads, "ok", "failed"),
                ("result",),
            ),
            Shown(
                "fencepost_certificate_not_after_timestamp_seconds",
                _GAUGE,
                "When the proxy's own certificates end, seconds since 1970.",
                lambda s: [((of,), seconds) for of, seconds in s.metrics.certificate_ends],
                ("of",),
            ),
        ),
    ),
    Section(
        "The process",
        "Beside these there are the usual `process_*` metrics; with worker processes they are the supervisor's, and "
        "`fencepost_worker_*` are there.",
        (
            Shown(
                "fencepost_ready",
                _GAUGE,
                "1: clients should be sent here. 0: /readyz says why not.",
                lambda s: None if s.metrics.ready is None else float(s.metrics.ready),
            ),
            Shown(
                "fencepost_event_loop_late_seconds",
                _HISTOGRAM,
                "How late the event loop was, looked at four times a second. Above 0.05 the log names what it ran.",
                lambda s: s.metrics.loop_late_seconds,
            ),
            Shown(
                "fencepost_log_lines_total",
                _COUNTER,
                "Lines of the log, by level; left_out: not written, since there were too many of their kind.",
                lambda s: _by(s.metrics.log_lines),
                ("level",),
            ),
            Shown(
                "fencepost_handovers_total",
                _COUNTER,
                "Connections that went to the owner process.",
                lambda s: s.metrics.handed_over.value if s.metrics.workers else None,
            ),
            Shown(
                "fencepost_worker_client_connections",
                _GAUGE,
                "Client connections that are open.",
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
                "Requests of clients.",
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
                "Open files and sockets; process_max_fds is each one's limit.",
                _workers(lambda w: w.open_files),
                ("worker",),
            ),
            Shown("fencepost_build_info", Kind.INFO, "What is running.", _build, ("version", "python")),
        ),
    ),
)
