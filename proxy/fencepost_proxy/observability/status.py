"""Values of the status page. `/status.json` serializes them unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fencepost_proxy.cluster.heartbeats import Instance
from fencepost_proxy.errors import Reason
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.types import Address, NodeId

#: Abort-only transactions that are listed.
ABORT_ONLY_SHOWN: Final = 50


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem for an operator.

    `bad`: action is needed now. `what`: the problem. `do`: the action. `page`: page with details, empty if none.
    """

    bad: bool
    what: str
    do: str
    page: str = ""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """`listener`: where clients reach this broker through the proxy; None without a listener.

    `problem`: why the broker is unreachable now; None if it is not known to be.
    """

    node_id: NodeId
    kafka: Address
    listener: Address | None
    connections: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RefusalStatus:
    """The last refusal at a partition. `expected`, `log_end_offset`: set for offset checks only.

    `client`: peer address. `client_id`: as the client sent it. `principal`: of its login with PLAIN or SCRAM.
    """

    topic: str
    partition: int
    reason: str
    at_ms: int
    expected: int | None = None
    log_end_offset: int | None = None
    client_id: str | None = None
    client: Address | None = None
    principal: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedTopicStatus:
    """A topic with append checks, or with ordered partition expansion.

    `configs`: values of virtual configs that are not the default. `waiting`: pending appends. `log_end_offsets`: sum
    over the `ends_known` partitions whose log end the proxy knows. `refusals`: since the process started, as far as
    retained.
    """

    topic: str
    configs: Mapping[str, str]
    partitions: int
    waiting: int = 0
    log_end_offsets: int = 0
    ends_known: int = 0
    refusals: int = 0
    last_refusal: RefusalStatus | None = None


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A partition of a checked topic. `leader`: broker id, None without a leader.

    `state`: phase of its sequencer, None before the first append. `sequence_offset`: set in phase `open` only, see
    `docs/order-proof.md`. `log_end_offset`: None if unknown.
    """

    topic: str
    partition: int
    leader: NodeId | None
    state: str | None = None
    log_end_offset: int | None = None
    sequence_offset: int | None = None
    waiting: int = 0
    refusals: int = 0
    last_refusal: RefusalStatus | None = None


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client connection. `software`, `version`: from ApiVersions (v3 and later), otherwise None.

    `node_id`: the broker of its listener, None for bootstrap. `idle_seconds`: since the client last sent data.
    `waits_for`: why its current request is not sent yet. `principal`: user of its last login with PLAIN or SCRAM.
    """

    client_id: str | None
    address: Address
    software: str | None
    version: str | None
    node_id: NodeId | None
    connected_seconds: float
    idle_seconds: float
    in_flight: int = 0
    waits_for: str | None = None
    principal: str | None = None


@dataclass(frozen=True, slots=True)
class SoftwareStatus:
    software: str | None
    version: str | None
    connections: int


@dataclass(frozen=True, slots=True)
class ViolationStatus:
    """The last detected write that bypassed the proxy. `offset`: its position, as far as known."""

    topic: str
    partition: int
    offset: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class ShortenedLogStatus:
    """The last partition that lost acknowledged records: those from `offset` to `acknowledged_end`."""

    topic: str
    partition: int
    acknowledged_end: int
    offset: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class ExpansionStatus:
    """One partition expansion. `state`: pending, done, or unordered (partitions were added without the proxy).

    `at_ms`: start if pending, otherwise end. `step`, `waits_for`: None if another process runs it.
    """

    topic: str
    from_count: int
    to_count: int
    state: str
    at_ms: int
    step: str | None = None
    waits_for: str | None = None
    blocked_ms: int | None = None
    thresholds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GatedStatus:
    """A group for which a new partition is gated. `records_max`: upper bound of the records it must read first.

    `waits`: prior partitions and the group's progress in them. `seconds`: waiting time known to this process.
    """

    group: str
    topic: str
    partition: int
    why: str
    records_max: int
    waits: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class AbortOnlyStatus:
    """A transaction whose commit will be refused, unless its in-doubt appends turn out to be appended.

    `seconds`: time in this state.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """State of the proxy at one moment.

    `not_ready`: why clients should not be sent here; ready if empty.
    `warnings`: what an operator should check while the proxy serves.
    `connections_max`, `buffered_bytes_max`: their limits.
    `certificate_days`: days until each own certificate expires.
    `instances`: proxy processes of the cluster, this one first.
    `history`: rates of the last fifteen minutes, by name (`observability/history.py`).
    `added_seconds`: upper bounds of the time added to requests and responses (median, p99); None before the first.
    `state_lease_seconds`: remaining validity of the virtual configs, None if unknown.
    `transactions`: of the cluster; None if not watched.
    `problems`: found by this process.
    `executor`: what executes the hot path; with the reason, if it is Python.
    """

    version: str
    uptime_seconds: float
    cluster_id: str | None
    bootstrap: Address | None
    not_ready: tuple[Reason, ...] = ()
    warnings: tuple[Reason, ...] = ()
    connections: int = 0
    requests_in_flight: int = 0
    buffered_bytes: int = 0
    bytes_to_kafka: int = 0
    bytes_to_clients: int = 0
    violations: int = 0
    added_seconds: tuple[float, float] | None = None
    state_lease_seconds: float | None = None
    refusals: Mapping[str, int] = field(default_factory=dict)
    brokers: tuple[BrokerStatus, ...] = ()
    problems: tuple[Problem, ...] = ()
    last_violation: ViolationStatus | None = None
    shortened_logs: int = 0
    last_shortened_log: ShortenedLogStatus | None = None
    abort_only_transactions: tuple[AbortOnlyStatus, ...] = ()
    transactions: TransactionsReport | None = None
    executor: str = "pure Python"
    connections_max: int = 0
    buffered_bytes_max: int = 0
    certificate_days: Mapping[str, float] = field(default_factory=dict)
    instances: tuple[Instance, ...] = ()
    history: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return not self.not_ready


# --- lists ------------------------------------------------------------------------------------------------------------

What = Literal["topics", "partitions", "refusals", "software", "clients", "expansions", "groups"]
#: Rows of one response.
ROWS_MAX: Final = 500
#: Highest first row; users search instead of paging further.
OFFSET_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Rows `offset` to `offset + limit` whose names contain `search`, ignoring case.

    `topic`: rows of this topic only. Order: by name; refusals: newest first; software: most connections first;
    expansions: pending first.
    """

    what: What
    search: str = ""
    topic: str | None = None
    offset: int = 0
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Listed:
    """`rows`: one page of the `matching` rows."""

    matching: int = 0
    rows: tuple[Any, ...] = ()
