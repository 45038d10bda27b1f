"""What the clients of a run sent and received."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fencepost_policies.append import Check
from fencepost_proxy.sequencer.events import LostRecords, Violation
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult
from tests.simulation.broker import LogBatch, Partition
from tests.simulation.clock import Connection

_HEADER_BYTES = 61


@dataclass(eq=False)
class Write:
    """A write that a client appends once. `kind`: conditional, unconditional, idempotent, transactional.

    `honest`: its producer fields are its own and used once; other writes are owed safety only. `forbidden`: it must be
    refused, whatever the log contains.
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
        """Identifies it in the log."""
        return bytes(self.records[_HEADER_BYTES:])

    @property
    def name(self) -> tuple[TopicPartition, bytes]:
        """Its producer id, epoch and sequence."""
        return self.partition, bytes(self.records[43:57])

    def __str__(self) -> str:
        expected = "" if self.expected is None else f" expecting {self.expected}"
        return f"write {self.number} of {self.client} ({self.kind}, {self.count} records{expected})"


@dataclass(eq=False)
class Try:
    """One attempt. `starts_at` – position of its request in the connection's bytes. `silent` – sent with acks=0."""

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
class CheckChange:
    """A requested check. `reported_at` – when it was acknowledged."""

    topic: str
    check: Check
    queried_at: float
    reported_at: float = float("inf")


@dataclass(eq=False)
class Ended:
    """One EndTxn and the error codes of its attempts. None: connection lost."""

    commits: bool
    queried_at: float
    codes: list[int | None] = field(default_factory=list)
    answered_at: float | None = None


@dataclass(eq=False)
class Transaction:
    """A transaction that is appended as a whole or not at all."""

    client: str
    producer_id: int
    producer_epoch: int
    began_at: float
    writes: list[Write] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)

    def __str__(self) -> str:
        return f"transaction of {self.client} ({self.producer_id}/{self.producer_epoch}, from {self.began_at:.3f} on)"


class History:
    """`compacted` – batches that compaction removed. `broken` – violations found during the run."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.tries: list[Try] = []
        self.violations: list[Violation] = []
        self.lost: list[LostRecords] = []
        self.closings: list[tuple[str, type[Exception] | None]] = []
        self.broken: list[str] = []
        self.check_changes: list[CheckChange] = []
        self.transactions: list[Transaction] = []
        #: By connection: bytes that the client had sent when each response left (`ProxiedConnection.answered`).
        self.proxied_connections: dict[Connection, dict[int, int]] = {}
        self.compacted: list[tuple[Partition, LogBatch]] = []
        self.refusals: Counter[str] = Counter()  # by reason

    def tried(self, write: Write, now: float, proxy: int | None) -> Try:
        attempt = Try(write, now, proxy)
        write.tries.append(attempt)
        self.tries.append(attempt)
        return attempt

    def reported(self, finding: Violation | LostRecords) -> None:
        if isinstance(finding, Violation):
            self.violations.append(finding)
        else:
            self.lost.append(finding)

    def closed(self, reason: str, fault: type[Exception] | None) -> None:
        self.closings.append((reason, fault))
