"""Metrics of the process. Label values are fixed words or a limited number of partitions, which bounds the series.

The table in `observability/exposition.py` defines names and meanings and produces the Prometheus text on a scrape.

Values are plain integers: counting is part of relaying each request (`docs/decisions/0016`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final, NamedTuple

from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.types import Monotonic, TopicPartition
from fencepost_proxy.wire.apis import APIS

#: Words of one kind; above this limit a new one is counted as `other`.
_REASONS_MAX: Final = 64
_OTHER: Final = "other"
#: A relay takes tens of microseconds; a thousand times more means waiting.
ADDED_SECONDS: Final = (
    *(each * 1e-6 for each in (5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 250, 500, 750)),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1),
)
_WAIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LATE_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
#: An expansion takes some hundred milliseconds, or waits for open transactions.
_BLOCKED_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@cache
def fencepost_version() -> str:
    if EXECUTOR.module is not None:
        return str(EXECUTOR.module.__version__)  # released together
    # It reads a file and brings the email package with it.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("fencepost")
    except PackageNotFoundError:
        return "unknown"


class Count:
    """A number that goes up, or up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int = 1) -> None:
        self.value += by

    def dec(self) -> None:
        self.value -= 1


class Counts(dict[str, int]):
    """Counts by a fixed word: a reason or a result. Their number is bounded, should a word come from a peer's text."""

    __slots__ = ()

    def inc(self, reason: str, by: int = 1) -> None:
        if reason not in self and len(self) >= _REASONS_MAX:
            reason = _OTHER
        self[reason] = self.get(reason, 0) + by


class Distribution:
    """A Prometheus histogram with counts per bucket, not cumulated."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last for what is above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, counts: Sequence[int], total: float) -> None:
        """What was observed elsewhere, with the same bounds."""
        self.counts = [one + another for one, another in zip(self.counts, counts, strict=True)]
        self.total += total

    def plus(self, other: Distribution) -> Distribution:
        """The sum of both; `other` has the same bounds."""
        whole = Distribution(self.bounds)
        whole.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        whole.total = self.total + other.total
        return whole

    def quantile_bound(self, quantile: float) -> float | None:
        """Upper bound of that quantile; None without observations, infinite above the last bound."""
        requested = quantile * sum(self.counts)
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            if count and below >= requested:
                return bound
        return None


def _requests() -> dict[int, list[int]]:
    return {key: [0] * (api.max_version + 2) for key, api in APIS.items()}


@dataclass(slots=True)
class Traffic:
    """Counters of the hot path: `traffic.bytes_to_kafka += n`, `traffic.requests[api_key][version] += 1`.

    `requests`: per API, one counter per version, then one for `UNKNOWN_VERSION`. `request_seconds`,
    `response_seconds`: time that the proxy adds to a request and to its response, from reading its last byte to writing
    it to the other socket, without waiting for partition sequencers (`Metrics.sequencer_wait_seconds`).
    """

    bytes_to_kafka: int = 0
    bytes_to_clients: int = 0
    requests: dict[int, list[int]] = field(default_factory=_requests)
    requests_in_flight: int = 0
    request_seconds: Distribution = field(default_factory=partial(Distribution, ADDED_SECONDS))
    response_seconds: Distribution = field(default_factory=partial(Distribution, ADDED_SECONDS))


class PartitionNumbers(NamedTuple):
    """One partition sequencer. `sequence_offset`: log end offset minus fence sequence."""

    log_end_offset: int
    sequence_offset: int


class AddressNumbers(NamedTuple):
    """Client connections of the address with the most in one process, and their limit."""

    connections: int = 0
    connections_max: int = 0


@dataclass(slots=True)
class Moment:
    """Values read on a scrape, not counted continuously.

    `connections_max`, `buffered_bytes_max`: limits of the process. `address`: the address with the most connections.
    `sequencers`: partition sequencers by phase. `partitions`: values of some of them; `partitions_left_out`: number of
    the others.
    """

    connections_max: int = 0
    address: AddressNumbers = field(default_factory=AddressNumbers)
    buffered_bytes: int = 0
    buffered_bytes_max: int = 0
    appends_waiting: int = 0
    sequencers: dict[str, int] = field(default_factory=dict)
    partitions: dict[TopicPartition, PartitionNumbers] = field(default_factory=dict)
    partitions_left_out: int = 0


class ProcessNumbers(NamedTuple):
    """`started_at`: seconds since 1970."""

    cpu_seconds: float = 0.0
    virtual_bytes: int = 0
    resident_bytes: int = 0
    started_at: float = 0.0
    open_files: int = 0
    open_files_max: int = 0


class Metrics:
    """All metrics; `observability/exposition.py` says what each means.

    `state_fresh_until` returns until when the view of the state topic is valid.
    """

    def __init__(self, state_fresh_until: Callable[[], Monotonic] | None = None) -> None:
        self.traffic = Traffic()
        self.connections = Count()
        self.connections_accepted = Count()
        self.violations = Count()
        self.copied_headers = Count()
        self.shortened_logs = Count()
        self.ignored_offsets = Count()
        self.client_logins_failed = Count()
        self.sequencer_wait_seconds = Distribution(_WAIT_SECONDS)
        self.barrier_wait_seconds = Distribution(_WAIT_SECONDS)
        self.commit_wait_seconds = Distribution(_WAIT_SECONDS)
        self.loop_late_seconds = Distribution(_LATE_SECONDS)
        self.expansion_blocked_seconds = Distribution(_BLOCKED_SECONDS)
        self.expansions_pending = Count()
        self.partitions_gated = Count()
        self.topics_replaced = Count()
        self.partitions_released = Count()
        self.partitions_timed_out = Count()
        self.state_fresh_until = state_fresh_until
        #: Whether the process is ready for clients; None if unknown.
        self.ready: bool | None = None
        self.moment = Moment()
        #: Updates `ready`, `moment` and `log_lines`; call it before they are shown.
        self.probe: Callable[[], None] = lambda: None
        #: By level, and `left_out`.
        self.log_lines: dict[str, int] = {}
        #: Transactions of the cluster; None if not watched.
        self.transactions: Callable[[], TransactionsReport] | None = None
        self.refusals = Counts()
        self.throttled_responses = Count()
        self.throttled_seconds = 0.0
        self.appends_without_answer = Count()
        self.connections_closed = Counts()
        self.expansions = Counts()
        self.commits = Counts()
        self.downgrades = Counts()
        self.claims = Counts()
        self.tls_handshakes = Counts()
        self.upstream_tls_failures = Counts()
        self.logins = Counts()
        self.upstream_refused = Counts()
        self.upstream_errors = {"clients": Counts(), "proxy": Counts()}
        self.kafka_errors = Counts()
        self.certificate_reloads = Counts()
        #: Expiry of each own certificate, seconds since 1970.
        self.certificate_ends: tuple[tuple[str, float], ...] = ()

    def logged_in(self, succeeded: bool) -> None:
        self.logins.inc("ok" if succeeded else "failed")

    def certificates_loaded(self, succeeded: bool) -> None:
        self.certificate_reloads.inc("ok" if succeeded else "failed")

    def certificates_end(self, ends: Mapping[str, float]) -> None:
        self.certificate_ends = tuple(ends.items())

    def added_seconds(self) -> tuple[float, float] | None:
        """Upper bounds of the time added to requests and responses (median, p99), without sequencer waits."""
        both = self.traffic.request_seconds.plus(self.traffic.response_seconds)
        half, nearly_all = both.quantile_bound(0.5), both.quantile_bound(0.99)
        return None if half is None or nearly_all is None else (half, nearly_all)
