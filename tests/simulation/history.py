"""What the clients of a run did and were told."""

from __future__ import annotations

from dataclasses import dataclass, field

from fencepost_policies.append import Check
from fencepost_proxy.sequencer.events import Violation
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult
from tests.simulation.broker import LogBatch, Partition
from tests.simulation.clock import Connection

_HEADER_BYTES = 61


@dataclass(eq=False)
class Write:
    """One thing that a client wants in the log once. `kind`: conditional, plain, idempotent, transactional.

    `honest`: its producer fields are its own and used once; else nothing but safety is owed to it. `forbidden`: it
    breaks the rules in a way that must be refused, whatever the log is like.
    """

    number: int
    client: str
    partition: TopicPartition
    kind: str
    records: memoryview
    count: int
    expected: int | None
    write_id: bytes | None
    honest: bool = True
    bypass: bool = False
    forbidden: bool = False
    tries: list[Try] = field(default_factory=list)

    @property
    def payload(self) -> bytes:
        """What identifies it in the log."""
        return bytes(self.records[_HEADER_BYTES:])

    @property
    def name(self) -> tuple[TopicPartition, bytes]:
        """By which its producer names it: id, epoch and sequence."""
        return self.partition, bytes(self.records[43:57])

    def __str__(self) -> str:
        expected = "" if self.expected is None else f" expecting {self.expected}"
        return f"write {self.number} of {self.client} ({self.kind}, {self.count} records{expected})"


@dataclass(eq=False)
class Try:
    """`connection` – where it was sent; `starts_at` – the byte there that its request starts at, `correlation_id` – of
    that request. `silent` – sent with acks=0."""

    write: Write
    sent_at: float
    proxy: int | None
    connection: Connection | None = None
    starts_at: int = 0
    correlation_id: int = 0
    silent: bool = False
    result: PartitionResult | None = None
    answered_at: float | None = None

    @property
    def message(self) -> str:
        return "" if self.result is None or self.result.error_message is None else self.result.error_message


@dataclass(eq=False)
class Dispatcher:
    """What an admin asked a topic to be checked for; `reported_at` – when it was told that this now holds."""

    topic: str
    check: Check
    queried_at: float
    reported_at: float = float("inf")


@dataclass(eq=False)
class Ended:
    """One EndTxn, and what was answered to its tries; None: the connection was lost."""

    commits: bool
    queried_at: float
    codes: list[int | None] = field(default_factory=list)
    answered_at: float | None = None


@dataclass(eq=False)
class Transaction:
    """One of a client that wants all of it or nothing."""

    client: str
    producer_id: int
    producer_epoch: int
    began_at: float
    writes: list[Write] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)

    def __str__(self) -> str:
        return f"transaction of {self.client} ({self.producer_id}/{self.producer_epoch}, from {self.began_at:.3f} on)"


class History:
    """`compacted` – what the log had and Kafka's cleaner took. `broken` – what is wrong whatever the log says."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.tries: list[Try] = []
        self.violations: list[Violation] = []
        self.closings: list[tuple[str, type[Exception] | None]] = []
        self.broken: list[str] = []
        self.switches: list[Dispatcher] = []
        self.transactions: list[Transaction] = []
        #: By connection: what each answer on it could be sent in knowledge of (`ProxiedConnection.answered`).
        self.proxied_connections: dict[Connection, dict[int, int]] = {}
        self.compacted: list[tuple[Partition, LogBatch]] = []

    def tried(self, write: Write, now: float, proxy: int | None) -> Try:
        attempt = Try(write, now, proxy)
        write.tries.append(attempt)
        self.tries.append(attempt)
        return attempt

    def reported(self, violation: Violation) -> None:
        self.violations.append(violation)

    def closed(self, reason: str, fault: type[Exception] | None) -> None:
        self.closings.append((reason, fault))
