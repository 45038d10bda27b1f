"""The metrics that `/metrics` exposes, read from `metrics.py`.

Each metric is a function: its name, its help (the docstring) and its value. `SECTIONS` lists them all;
`tests/pages/metrics.py` generates `docs/metrics.md` from it. `docs/decisions/0016` says why no library does this.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from fencepost_policies.registry import REASONS
from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.metrics import (
    Distribution,
    Metrics,
    PartitionNumbers,
    ProcessNumbers,
    fencepost_version,
)
from fencepost_proxy.observability import prometheus
from fencepost_proxy.observability.process import cpu_wait_seconds, process_numbers
from fencepost_proxy.observability.prometheus import Labelled, Section, Value
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.wire.apis import APIS

_V = TypeVar("_V", bound=Value)


class Scrape:
    """Values of one scrape, all taken at the same moment."""

    def __init__(self, metrics: Metrics) -> None:
        metrics.probe()
        self.metrics = metrics
        self.traffic = metrics.traffic
        self.moment = metrics.moment
        self.transactions = None if metrics.transactions is None else metrics.transactions()
        self.process = process_numbers()


def exposition(metrics: Metrics) -> bytes:
    """The text of one scrape."""
    return "\n".join((*prometheus.lines(SECTIONS, Scrape(metrics)), "")).encode()


# ---- how values are read


def _by(counts: Mapping[str, int], *always: str) -> Labelled:
    """`always`: labels exposed from the start, because Prometheus sees no increase in a series that begins with 1."""
    return [((name,), count) for name, count in (dict.fromkeys(always, 0) | dict(counts)).items()]


def _per_partition(read: Callable[[PartitionNumbers], float]) -> Callable[[Scrape], Labelled]:
    @functools.wraps(read)
    def labelled(s: Scrape) -> Labelled:
        return [((of.topic, str(of.partition)), read(numbers)) for of, numbers in s.moment.partitions.items()]

    return labelled


def _of_cluster(read: Callable[[TransactionsReport], _V]) -> Callable[[Scrape], _V | None]:
    @functools.wraps(read)
    def value(s: Scrape) -> _V | None:
        return None if s.transactions is None else read(s.transactions)

    return value


def _of_process(read: Callable[[ProcessNumbers], float]) -> Callable[[Scrape], float | None]:
    @functools.wraps(read)
    def value(s: Scrape) -> float | None:
        return None if s.process is None else read(s.process)

    return value


# ---- traffic

_TRAFFIC = Section("Traffic", "Client traffic only. The proxy's own requests to Kafka are not included.")


@_TRAFFIC.counter("direction")
def fencepost_relayed_bytes_total(s: Scrape) -> Labelled:
    """Bytes relayed, by direction: to_kafka, to_clients."""
    return [(("to_kafka",), s.traffic.bytes_to_kafka), (("to_clients",), s.traffic.bytes_to_clients)]


@_TRAFFIC.counter("api", "version")
def fencepost_requests_total(s: Scrape) -> Labelled:
    """Client requests, by Kafka API and version; unknown: an ApiVersions version newer than Kafka 4.4."""
    for api_key, versions in s.traffic.requests.items():
        *known, unknown = versions
        for version, count in enumerate(known):
            if count:
                yield (APIS[api_key].name, str(version)), count
        if unknown:
            yield (APIS[api_key].name, "unknown"), unknown


@_TRAFFIC.gauge()
def fencepost_requests_in_flight(s: Scrape) -> float:
    """Client requests in progress."""
    return s.traffic.requests_in_flight


@_TRAFFIC.gauge()
def fencepost_client_connections(s: Scrape) -> float:
    """Open client connections."""
    return s.metrics.connections.value


@_TRAFFIC.gauge()
def fencepost_client_connections_max(s: Scrape) -> float:
    """Limit of open client connections (limits.connections_max)."""
    return s.moment.connections_max


@_TRAFFIC.gauge()
def fencepost_address_connections(s: Scrape) -> float:
    """Client connections of the address with the most connections in one process."""
    return s.moment.address.connections


@_TRAFFIC.gauge()
def fencepost_address_connections_max(s: Scrape) -> float:
    """Limit of client connections per address (limits.address_connections_max, for each process)."""
    return s.moment.address.connections_max


@_TRAFFIC.counter()
def fencepost_client_connections_accepted_total(s: Scrape) -> float:
    """Client connections that have sent something."""
    return s.metrics.connections_accepted.value


@_TRAFFIC.counter("reason")
def fencepost_client_connections_dropped_total(s: Scrape) -> Labelled:
    """Client connections closed by the proxy, by reason; connections_max, address_connections_max: closed on accept."""
    return _by(s.metrics.connections_closed, "connections_max", "address_connections_max")


@_TRAFFIC.counter()
def fencepost_throttled_responses_total(s: Scrape) -> float:
    """Responses with which Kafka throttled a client over its quota. The log names the clients."""
    return s.metrics.throttled_responses.value


@_TRAFFIC.counter()
def fencepost_throttled_seconds_total(s: Scrape) -> float:
    """Throttle times in those responses: so long neither Kafka nor the proxy reads from the client."""
    return s.metrics.throttled_seconds


@_TRAFFIC.gauge()
def fencepost_buffered_bytes(s: Scrape) -> float:
    """Bytes of requests and responses buffered in memory."""
    return s.moment.buffered_bytes


@_TRAFFIC.gauge()
def fencepost_buffered_bytes_max(s: Scrape) -> float:
    """Limit of buffered bytes (limits.buffered_bytes_max). At the limit the proxy pauses reading from all clients."""
    return s.moment.buffered_bytes_max


@_TRAFFIC.histogram()
def fencepost_added_request_seconds(s: Scrape) -> Distribution:
    """Time that the proxy adds to a request: from reading its last byte to writing it to the broker. Waiting for a
    partition sequencer is not counted.
    """
    return s.traffic.request_seconds


@_TRAFFIC.histogram()
def fencepost_added_response_seconds(s: Scrape) -> Distribution:
    """Time that the proxy adds to a response: from reading its last byte to writing it to the client."""
    return s.traffic.response_seconds


@_TRAFFIC.counter("of", "reason")
def fencepost_upstream_errors_total(s: Scrape) -> Labelled:
    """Broker connections that failed to open or were lost with requests in progress, for clients or for the proxy
    itself, by reason (unreachable, timeout, tls, login, protocol, unknown_broker, lost).
    """
    always = {
        "clients": ("unreachable", "timeout", "tls", "unknown_broker", "lost"),
        "proxy": ("unreachable", "timeout", "tls", "login", "protocol", "lost"),
    }
    for of, reasons in s.metrics.upstream_errors.items():
        for (reason,), count in _by(reasons, *always[of]):
            yield (of, reason), count


@_TRAFFIC.counter("of")
def fencepost_upstream_refused_total(s: Scrape) -> Labelled:
    """Broker connections, of clients or of the proxy itself, that the broker closed before its first response: usually
    a limit of connections (max.connections.per.ip).
    """
    return _by(s.metrics.upstream_refused, "clients", "proxy")


# ---- conditional publish

_CONDITIONAL = Section("Conditional publish", "For topics that check expected offsets.")


@_CONDITIONAL.counter("reason")
def fencepost_refusals_total(s: Scrape) -> Labelled:
    """Batches refused by the proxy, by reason: those of append checks (docs/configuration.md), transactions, unreadable
    batches. not_ready, try_again, transaction_open, unknown_config and outcome_unknown are
    retriable.
    """
    retriable = ("not_ready", "try_again", "transaction_open", "unknown_config", "outcome_unknown")
    return _by(s.metrics.refusals, *REASONS, *retriable)


@_CONDITIONAL.counter()
def fencepost_appends_without_answer_total(s: Scrape) -> float:
    """Appends that Kafka did not answer within a second while other clients waited for them: resolved from the log."""
    return s.metrics.appends_without_answer.value


@_CONDITIONAL.counter("error")
def fencepost_append_errors_total(s: Scrape) -> Labelled:
    """Errors that Kafka returned for appends to checked topics, by name. OUT_OF_ORDER_SEQUENCE_NUMBER includes lost
    races.
    """
    return _by(s.metrics.kafka_errors)


@_CONDITIONAL.counter()
def fencepost_offset_violations_total(s: Scrape) -> float:
    """Conditional batches appended at another offset than expected: a writer bypasses the proxy, or Kafka did not
    compare sequences.
    """
    return s.metrics.violations.value


@_CONDITIONAL.counter()
def fencepost_copied_headers_total(s: Scrape) -> float:
    """Batches with a Fencepost header that was made for another topic, partition or cluster, and does not count: a
    client copies record headers.
    """
    return s.metrics.copied_headers.value


@_CONDITIONAL.counter()
def fencepost_shortened_logs_total(s: Scrape) -> float:
    """Partitions whose log was found without records that this process had acknowledged: Kafka lost them."""
    return s.metrics.shortened_logs.value


@_CONDITIONAL.counter()
def fencepost_ignored_offsets_total(s: Scrape) -> float:
    """Batches with an expected offset for a topic that does not check it. Only the first requests of a connection are
    read: this says that there are such clients, not how many batches.
    """
    return s.metrics.ignored_offsets.value


@_CONDITIONAL.histogram()
def fencepost_sequencer_wait_seconds(s: Scrape) -> Distribution:
    """Time that appends waited for their partition sequencer."""
    return s.metrics.sequencer_wait_seconds


@_CONDITIONAL.gauge("phase")
def fencepost_sequencers(s: Scrape) -> Labelled:
    """Partition sequencers with recent appends, by phase: open, unconfirmed (fence), reading, publishing, resolving (an
    in-doubt append).
    """
    return _by(s.moment.sequencers)


@_CONDITIONAL.gauge()
def fencepost_sequencer_waiting_appends(s: Scrape) -> float:
    """Pending appends of all partition sequencers."""
    return s.moment.appends_waiting


@_CONDITIONAL.gauge("topic", "partition")
@_per_partition
def fencepost_partition_log_end_offset(numbers: PartitionNumbers) -> float:
    """Log end offset of a partition as this process last appended or read it. With several proxies, take the
    highest.
    """
    return numbers[0]


@_CONDITIONAL.gauge("topic", "partition")
@_per_partition
def fencepost_partition_sequence_offset(numbers: PartitionNumbers) -> float:
    """Offsets of a partition that fenced appends did not use. It is constant if all producers use proxies and the topic
    has fencepost.check.expected.offsets=required.
    """
    return numbers[1]


@_CONDITIONAL.gauge()
def fencepost_partitions_omitted(s: Scrape) -> float:
    """Partitions above limits.metric_partitions_shown_max, omitted from these two metrics."""
    return s.moment.partitions_left_out


@_CONDITIONAL.gauge()
def fencepost_state_lease_seconds(s: Scrape) -> float | None:
    """How long the proxy may still use its copy of the virtual configs. At 0 or below, appends to checked topics
    wait.
    """
    fresh_until = s.metrics.state_fresh_until
    # -1 instead of minus infinity before the first read.
    return None if fresh_until is None else max(-1.0, fresh_until() - time.monotonic())


@_CONDITIONAL.gauge()
def fencepost_replaced_topics(s: Scrape) -> float:
    """Topics deleted and created again without the proxy, which keep their old checks until an operator decides. The
    status page names them.
    """
    return s.metrics.topics_replaced.value


@_CONDITIONAL.counter("reason")
def fencepost_idempotence_downgraded_batches_total(s: Scrape) -> Labelled:
    """Batches for topics with fencepost.idempotence.level=safe sent without their producer ids, by reason."""
    return _by(s.metrics.downgrades)


@_CONDITIONAL.counter("result")
def fencepost_claims_total(s: Scrape) -> Labelled:
    """Claims of partitions with fencepost.claims=true: the marker was written, refused, of unknown outcome, or denied
    because the proxy may not write markers. Many claims of few partitions: processes compete for them.
    """
    return _by(s.metrics.claims)


# ---- partition expansion

_EXPANSION = Section("Partition expansion", "For topics with partition-count checks or ordered partition expansion.")


@_EXPANSION.counter("result")
def fencepost_expansions_total(s: Scrape) -> Labelled:
    """Finished expansions of topics with partition-count checks, by result."""
    return _by(s.metrics.expansions, "done", "failed", "unordered")


@_EXPANSION.gauge()
def fencepost_expansions_pending(s: Scrape) -> float:
    """Expansions in progress; appends to their topics are blocked. The status page names them."""
    return s.metrics.expansions_pending.value


@_EXPANSION.histogram()
def fencepost_expansion_blocked_seconds(s: Scrape) -> Distribution:
    """Time that an expansion blocked appends to its topic."""
    return s.metrics.expansion_blocked_seconds


@_EXPANSION.histogram()
def fencepost_append_barrier_wait_seconds(s: Scrape) -> Distribution:
    """Time that Produce requests waited at append barriers of topics with partition-count checks."""
    return s.metrics.barrier_wait_seconds


@_EXPANSION.gauge()
def fencepost_gated_partitions(s: Scrape) -> float:
    """New partitions gated for consumer groups: one per group, partition and proxy process that serves it."""
    return s.metrics.partitions_gated.value


@_EXPANSION.counter()
def fencepost_gated_partitions_released_total(s: Scrape) -> float:
    """Gated partitions that were assigned to their groups."""
    return s.metrics.partitions_released.value


@_EXPANSION.counter()
def fencepost_gated_partitions_timed_out_total(s: Scrape) -> float:
    """Gated partitions assigned because the group committed no progress on prior partitions within
    limits.gated_without_commit_seconds and ..._without_progress_seconds. Order is not guaranteed.
    """
    return s.metrics.partitions_timed_out.value


# ---- transactions

_TRANSACTIONS = Section(
    "Transactions",
    "Metrics that begin with `fencepost_kafka_` or `fencepost_watch` describe the cluster: every proxy reports"
    " the same values. `watch_transactions = false` omits them. Per-partition metrics show the worst "
    "`limits.watched_shown_max` partitions ([stuck transactions](stuck-transactions.md)).",
)


@_TRANSACTIONS.counter("outcome")
def fencepost_commits_total(s: Scrape) -> Labelled:
    """Transaction commits that the proxy validated: pass, unknown (the client must retry), or the reason for the
    refusal.
    """
    return _by(s.metrics.commits)


@_TRANSACTIONS.histogram()
def fencepost_commit_wait_seconds(s: Scrape) -> Distribution:
    """Time that transaction commits waited for their validation."""
    return s.metrics.commit_wait_seconds


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_producer_ids(t: TransactionsReport) -> float:
    """Producer ids in the state of partition leaders, summed over partitions."""
    return t.producer_ids


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_last_stable_offset_lag_partitions(t: TransactionsReport) -> float:
    """Partitions whose last stable offset is below the high watermark."""
    return t.lagging_partitions


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_last_stable_offset_lag_max(t: TransactionsReport) -> float:
    """Offsets that read_committed consumers cannot read yet, highest of all partitions."""
    return t.lag_max


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_last_stable_offset_lag_all_partitions(t: TransactionsReport) -> float:
    """Offsets that read_committed consumers cannot read yet, sum of all partitions."""
    return t.lag_total


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_last_stable_offset_stuck_seconds_max(t: TransactionsReport) -> float:
    """Longest time that a last stable offset below the high watermark has not advanced."""
    return t.lag_seconds_max


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_open_transactions(t: TransactionsReport) -> float:
    """Open transactions."""
    return t.open_transactions


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_kafka_open_transaction_age_seconds_max(t: TransactionsReport) -> float:
    """Age of the oldest open transaction."""
    return t.oldest_seconds


@_TRANSACTIONS.gauge("reason")
@_of_cluster
def fencepost_kafka_hanging_transactions(t: TransactionsReport) -> Labelled:
    """Hanging transactions, by reason. The status page names them."""
    return _by(t.hanging_by_reason)


@_TRANSACTIONS.gauge("state")
@_of_cluster
def fencepost_kafka_transactional_ids(t: TransactionsReport) -> Labelled:
    """Transactional ids known to coordinators, by state."""
    return _by(t.transactional_ids)


@_TRANSACTIONS.gauge("topic", "partition")
@_of_cluster
def fencepost_kafka_last_stable_offset(t: TransactionsReport) -> Labelled:
    """Last stable offset of the partitions where it lags most."""
    return [((b.topic, str(b.partition)), b.last_stable_offset) for b in t.lagging]


@_TRANSACTIONS.gauge("topic", "partition")
@_of_cluster
def fencepost_kafka_last_stable_offset_lag(t: TransactionsReport) -> Labelled:
    """High watermark minus last stable offset, of the partitions where it lags most; 0 for all others."""
    return [((b.topic, str(b.partition)), b.lag) for b in t.lagging]


@_TRANSACTIONS.gauge("topic", "partition")
@_of_cluster
def fencepost_kafka_partition_producer_ids(t: TransactionsReport) -> Labelled:
    """Producer ids of the partitions with the most."""
    return [((m.topic, str(m.partition)), m.producer_ids) for m in t.most_producers]


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_watched_partitions(t: TransactionsReport) -> float:
    """Partitions watched."""
    return t.partitions


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_watched_partitions_unreadable(t: TransactionsReport) -> float:
    """Partitions not read in the last sweep: no leader, or not authorized."""
    return t.partitions_unreadable


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_watched_partitions_omitted(t: TransactionsReport) -> float:
    """Partitions not watched because of the limit on watched partitions."""
    return t.partitions_left_out


@_TRANSACTIONS.gauge()
@_of_cluster
def fencepost_watch_sweep_seconds(t: TransactionsReport) -> float:
    """Duration of the last sweep over all partitions; 0 before the first."""
    return t.sweep_seconds or 0.0


@_TRANSACTIONS.counter()
@_of_cluster
def fencepost_watch_requests_total(t: TransactionsReport) -> float:
    """Requests sent to watch transactions and partitions."""
    return t.requests


# ---- security

_SECURITY = Section("Security", "[Security](security.md) explains the first words of reasons.")


@_SECURITY.counter("result")
def fencepost_tls_handshakes_total(s: Scrape) -> Labelled:
    """TLS handshakes of clients: ok, or the reason for the failure."""
    return _by(s.metrics.tls_handshakes, "ok")


@_SECURITY.counter("reason")
def fencepost_upstream_tls_failures_total(s: Scrape) -> Labelled:
    """Failed TLS handshakes with brokers, by reason."""
    return _by(s.metrics.upstream_tls_failures)


@_SECURITY.counter()
def fencepost_client_login_failures_total(s: Scrape) -> float:
    """Client logins refused by Kafka."""
    return s.metrics.client_logins_failed.value


@_SECURITY.counter("result")
def fencepost_control_logins_total(s: Scrape) -> Labelled:
    """Logins of the proxy itself to brokers."""
    return _by(s.metrics.logins, "ok", "failed")


@_SECURITY.counter("result")
def fencepost_certificate_reloads_total(s: Scrape) -> Labelled:
    """Reloads of changed certificate or key files: ok, or failed (the old files stay in use)."""
    return _by(s.metrics.certificate_reloads, "ok", "failed")


@_SECURITY.gauge("of")
def fencepost_certificate_not_after_timestamp_seconds(s: Scrape) -> Labelled:
    """When the proxy's own certificates expire, seconds since 1970."""
    return [((of,), seconds) for of, seconds in s.metrics.certificate_ends]


# ---- the process

_PROCESS = Section("The process", "The proxy's own process.")


@_PROCESS.gauge()
def fencepost_ready(s: Scrape) -> float | None:
    """1: ready for clients. 0: not ready, /readyz gives the reason."""
    return None if s.metrics.ready is None else float(s.metrics.ready)


@_PROCESS.histogram()
def fencepost_event_loop_late_seconds(s: Scrape) -> Distribution:
    """Event loop delay, measured four times a second. Above 0.05 s the log names the code that ran."""
    return s.metrics.loop_late_seconds


@_PROCESS.counter()
def fencepost_event_loop_cpu_wait_seconds_total(s: Scrape) -> float | None:
    """Time that the event loop was ready to run and got no CPU (Linux): the machine is busy, or a CPU limit applies."""
    return cpu_wait_seconds()


@_PROCESS.counter("level")
def fencepost_log_lines_total(s: Scrape) -> Labelled:
    """Log lines, by level; left_out: not written because of the rate limit for their kind."""
    return _by(s.metrics.log_lines)


@_PROCESS.gauge("version", "python", "executor")
def fencepost_build_info(s: Scrape) -> Labelled:
    """Versions of Fencepost and Python. executor: the hot path runs in native or python code."""
    executor = "python" if EXECUTOR.module is None else "native"
    return [((fencepost_version(), platform.python_version(), executor), 1)]


@_PROCESS.counter()
@_of_process
def process_cpu_seconds_total(p: ProcessNumbers) -> float:
    """CPU time, user and system."""
    return p.cpu_seconds


@_PROCESS.gauge()
@_of_process
def process_virtual_memory_bytes(p: ProcessNumbers) -> float:
    """Virtual memory."""
    return p.virtual_bytes


@_PROCESS.gauge()
@_of_process
def process_resident_memory_bytes(p: ProcessNumbers) -> float:
    """Resident memory."""
    return p.resident_bytes


@_PROCESS.gauge()
@_of_process
def process_start_time_seconds(p: ProcessNumbers) -> float:
    """When the process started, seconds since 1970."""
    return p.started_at


@_PROCESS.gauge()
@_of_process
def process_open_fds(p: ProcessNumbers) -> float:
    """Open files and sockets."""
    return p.open_files


@_PROCESS.gauge()
@_of_process
def process_max_fds(p: ProcessNumbers) -> float:
    """Limit of open files and sockets."""
    return p.open_files_max


#: In the order of the reference.
SECTIONS: Final = (_TRAFFIC, _CONDITIONAL, _EXPANSION, _TRANSACTIONS, _SECURITY, _PROCESS)
