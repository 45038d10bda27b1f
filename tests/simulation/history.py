"""What the clients of a run did and were told."""

from __future__ import annotations

from dataclasses import dataclass, field

from fencepost_proxy.partitions.events import Violation
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

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

    def __str__(self) -> str:
        expected = "" if self.expected is None else f" expecting {self.expected}"
        return f"write {self.number} of {self.client} ({self.kind}, {self.count} records{expected})"


@dataclass(eq=False)
class Try:
    write: Write
    sent_at: float
    proxy: int | None
    connection: int = 0
    result: PartitionResult | None = None
    answered_at: float | None = None

    @property
    def message(self) -> str:
        return "" if self.result is None or self.result.error_message is None else self.result.error_message


class History:
    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.tries: list[Try] = []
        self.violations: list[Violation] = []
        self.closings: list[tuple[str, type[Exception] | None]] = []
        self.broken: list[str] = []

    def tried(self, write: Write, now: float, proxy: int | None, connection: int = 0) -> Try:
        attempt = Try(write, now, proxy, connection)
        write.tries.append(attempt)
        self.tries.append(attempt)
        return attempt

    def reported(self, violation: Violation) -> None:
        self.violations.append(violation)

    def closed(self, reason: str, fault: type[Exception] | None) -> None:
        self.closings.append((reason, fault))
