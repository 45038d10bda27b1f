"""What those who watch a process are told, as values: `/status.json` has them as they are, the page in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.types import Address, NodeId

#: Of transactions that will not commit.
POISONED_SHOWN: Final = 50


@dataclass(frozen=True, slots=True)
class Problem:
    """What is not as it should be. `bad` – somebody has to do something now. `what` happened, `do` says what helps.

    `page` – where on this server more of it is shown, empty for nowhere.
    """

    bad: bool
    what: str
    do: str
    page: str = ""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """`listener` is where clients reach this broker through the proxy, None while there is no listener.

    `problem` – why it cannot be reached at the moment, None as far as is known.
    """

    node_id: NodeId
    kafka: Address
    listener: Address | None
    connections: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RefusalStatus:
    """What the proxy refused last at a partition. `expected`, `log_end_offset` – where it was about offsets.

    `client` – address of the connection; `client_id` – what it calls itself.
    """

    topic: str
    partition: int
    reason: str
    at_ms: int
    expected: int | None = None
    log_end_offset: int | None = None
    client_id: str | None = None
    client: Address | None = None


@dataclass(frozen=True, slots=True)
class GuardedTopicStatus:
    """A topic with a virtual config that is not the default. `check` is the value of `check.expected.offsets`.

    `ordered` – of `ordered.partition.expansion`; `count_check` – of `check.partition.count`; `idempotence` – of
    `idempotence.level`. `waiting` counts appends at its gates. `log_end_offsets` – the sum over those `ends_known`
    partitions whose log end the proxy knows at the moment. `refusals` – since the process began, as far as remembered.
    """

    topic: str
    check: str
    partitions: int
    waiting: int = 0
    count_check: str = "false"
    ordered: bool = False
    idempotence: str = "off"
    log_end_offsets: int = 0
    ends_known: int = 0
    refusals: int = 0
    last_refusal: RefusalStatus | None = None


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A guarded partition. `leader` – broker id, None while there is none.

    `state` – of its gate: `open`, or what it waits for; None before the first append. `log_end_offset`, `shift` – while
    it is open: see `docs/order-proof.md` for the shift.
    """

    topic: str
    partition: int
    leader: NodeId | None
    state: str | None = None
    log_end_offset: int | None = None
    shift: int | None = None
    waiting: int = 0
    refusals: int = 0
    last_refusal: RefusalStatus | None = None


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client connection. `software`, `version` – what it said in ApiVersions (v3 and later), None where it did not.

    `node_id` – the broker whose listener it came to, None for bootstrap. `idle_seconds` – since it sent something.
    `waits` – for its turn at a gate, or at the door of a topic that grows.
    """

    client_id: str | None
    address: Address
    software: str | None
    version: str | None
    node_id: NodeId | None
    connected_seconds: float
    idle_seconds: float
    in_flight: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class SoftwareStatus:
    software: str | None
    version: str | None
    connections: int


@dataclass(frozen=True, slots=True)
class ViolationStatus:
    """The last time that somebody was found to write around the proxy. `offset` – where that lies, as far as known."""

    topic: str
    partition: int
    offset: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class ExpansionStatus:
    """One growth of a counted topic. `state` – pending, done or unordered (around the proxy).

    `at_ms` – when it began if pending, else when it ended. `step`, `waits_for` – None where another process drives it.
    """

    topic: str
    from_count: int
    to_count: int
    state: str
    at_ms: int
    step: str | None = None
    waits_for: str | None = None
    held_ms: int | None = None
    thresholds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WithheldStatus:
    """A group that waits for a new partition. `records_max` – at most so many are left for it to read before.

    `waits` – for which prior partitions, and how far it is there; `seconds` – since when, as far as this process knows.
    """

    group: str
    topic: str
    partition: int
    why: str
    records_max: int
    waits: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PoisonedStatus:
    """A transaction whose commit will be refused, unless what it waits for has landed. `seconds` – since when."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """What the proxy is doing at this moment.

    `not_ready` – why clients should not be sent here yet, or any more; ready when empty.
    `warnings` – what an operator should look at although the proxy serves.
    `added_seconds` – below what the time added to requests and answers lies: (half of them, 99 of 100), None before the
    first.
    `state_lease_seconds` – how long the view of the virtual configs may still be acted on, None where unknown.
    `transactions` – the cluster's, as far as they were looked at; None where nobody looks.
    `problems` – what an operator should know of, found by this process.
    `build` – whether the hot rooms are compiled.
    """

    version: str
    uptime_seconds: float
    cluster_id: str | None
    bootstrap: Address | None
    not_ready: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
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
    poisoned: tuple[PoisonedStatus, ...] = ()
    transactions: TransactionsReport | None = None

    @property
    def ready(self) -> bool:
        return not self.not_ready


# --- lists: what there may be many of ---------------------------------------------------------------------------------

What = Literal["topics", "partitions", "refusals", "software", "clients", "expansions", "groups"]
#: Of one answer: so much is to be bounded however many there are.
ROWS_MAX: Final = 500
#: Of where it begins: beyond, a search is what helps.
OFFSET_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows `offset` to `offset + limit` of those that have `search` in what names them, whatever the case.

    `topic` – only of this one. Rows are in the order of their names; refusals: the newest first; software: what most
    connections have; expansions: pending ones first.
    """

    what: What
    search: str = ""
    topic: str | None = None
    offset: int = 0
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Listed:
    """`matching` – how many there are, of which `rows` are some."""

    matching: int = 0
    rows: tuple[Any, ...] = ()
