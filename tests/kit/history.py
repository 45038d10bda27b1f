"""The operations of writers and their responses, and the final log. `tests/kit/checker.py` compares them.

    history = History()
    history.topic("t", "required")
    operation = history.call("writer-1", "t", ["an id"], expected=7)      # before sending
    history.reported(operation, Reported(OK, offset=7))                   # with the response
    history.read_log(log, "t")                                            # at the end

An operation that is not reported has an unknown outcome. The id of a record is its value.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from tests.support.raw import Log

#: Outcomes of an operation.
OK = "ok"
#: Refused: nothing was appended.
REFUSED = "refused"
#: Retriable: nothing was appended.
TRY_AGAIN = "try again"
#: Appended at another offset than expected.
VIOLATION = "violation"
#: It may be in the log, or may still be appended.
UNKNOWN = "unknown"
OUTCOMES = (OK, REFUSED, TRY_AGAIN, VIOLATION, UNKNOWN)
FOREVER = float("inf")
_READ_SECONDS = 150.0

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Manner:
    """Properties of a writer that determine what its responses mean.

    named: its records have a write-id.
    resends: it, or its library, may send records again before it reports an outcome.
    sees_messages: it gets the text of an error.
    idempotent: it uses its own producer id.
    reads_end: it reads the log end after a refusal, instead of taking it from the response.
    """

    named: bool = False
    resends: bool = False
    sees_messages: bool = True
    idempotent: bool = False
    reads_end: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """The outcome of an operation. `offset` – of its first record. `actual` – the log end."""

    outcome: str
    offset: int | None = None
    actual: int | None = None
    possibly_yours: bool | None = None
    code: int | str | None = None
    detail: str | None = None


@dataclass(slots=True)
class Operation:
    """`start` and `end` are monotonic times. `pipeline_key` – operations with the same key were sent in order, without
    waiting. The fields of `Manner` and `Reported` are its own."""

    number: int
    writer: str
    place: Place
    ids: tuple[str, ...]
    expected: int | None
    start: float
    named: bool = False
    resends: bool = False
    sees_messages: bool = True
    idempotent: bool = False
    reads_end: bool = False
    pipeline_key: str | None = None
    transaction: str | None = None
    end: float = FOREVER
    outcome: str = UNKNOWN
    offset: int | None = None
    actual: int | None = None
    possibly_yours: bool | None = None
    code: int | str | None = None
    detail: str | None = None

    @property
    def kind(self) -> str:
        """The writer's name up to a slash."""
        return self.writer.partition("/")[0]

    def __str__(self) -> str:
        topic, partition = self.place
        reported = [
            f"{name} {value}" for name in ("offset", "actual", "code") if (value := getattr(self, name)) is not None
        ]
        end = "open" if self.end == FOREVER else f"{self.end:.6f}"
        return (
            f"op {self.number} of {self.writer} ({self.ids[0]}{f' +{len(self.ids) - 1}' * (len(self.ids) > 1)}) on "
            f"{topic}-{partition}, expected {self.expected}, {self.start:.6f}..{end}: "
            f"{', '.join([self.outcome, *reported])}{f' ({self.detail})' if self.detail else ''}"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """The log at one offset. `id` is None for a transaction marker. `visible`: a read_committed consumer gets it."""

    offset: int
    id: str | None
    leader_epoch: int = 0
    visible: bool = True


@dataclass(frozen=True, slots=True)
class Topic:
    """`mode` – of the check: required, true or false. `one_proxy` – one proxy process at a time serves it. `may_lose` –
    Kafka may lose the end of the log (an unclean election)."""

    mode: str
    one_proxy: bool = False
    may_lose: bool = False


@dataclass(slots=True)
class History:
    """Thread-safe: each operation belongs to one thread."""

    topics: dict[str, Topic] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)
    #: Reported outcomes: committed, aborted or unknown. Missing: unknown.
    transactions: dict[str, str] = field(default_factory=dict)
    logs: dict[Place, list[Entry]] = field(default_factory=dict)
    #: (monotonic time, kind, text) of faults and other things that explain what happened.
    events: list[tuple[float, str, str]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def topic(self, topic: str, mode: str, *, one_proxy: bool = False, may_lose: bool = False) -> None:
        self.topics[topic] = Topic(mode, one_proxy, may_lose)

    def call(
        self,
        writer: str,
        topic: str,
        ids: Iterable[str],
        *,
        expected: int | None,
        manner: Manner = Manner(),
        partition: int = 0,
        pipeline_key: str | None = None,
        transaction: str | None = None,
    ) -> Operation:
        number = next(self._numbers)
        operation = self.operations[number] = Operation(
            number,
            writer,
            (topic, partition),
            tuple(ids),
            expected,
            time.monotonic(),
            **asdict(manner),
            pipeline_key=pipeline_key,
            transaction=transaction,
        )
        return operation

    def reported(self, operation: Operation, reported: Reported) -> None:
        """Only an unknown outcome can be replaced by a later one."""
        if operation.outcome == UNKNOWN:
            operation.end = time.monotonic()
            for each in fields(Reported):
                setattr(operation, each.name, getattr(reported, each.name))

    def event(self, kind: str, text: str = "") -> None:
        self.events.append((time.monotonic(), kind, text))

    # ---- summaries

    def counts(self) -> Counter[tuple[str, str]]:
        """(kind of writer, outcome) → operations."""
        return Counter((each.kind, each.outcome) for each in list(self.operations.values()))

    def outcomes(self) -> Counter[str]:
        return Counter(each.outcome for each in list(self.operations.values()))

    def codes(self) -> Counter[str]:
        return Counter(f"{each.code}" for each in list(self.operations.values()) if each.code is not None)

    def table(self) -> Iterable[str]:
        """Outcomes and the longest duration of an operation, by kind of writer; then all together."""
        counts = self.counts()
        longest: dict[str, float] = {}
        for each in list(self.operations.values()):
            if each.end != FOREVER:
                longest[each.kind] = max(longest.get(each.kind, 0.0), each.end - each.start)
        yield f"{'writers':<40}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES) + f"{'longest':>12}"
        for kind in sorted({kind for kind, _ in counts}):
            cells = "".join(f"{counts[kind, outcome]:>12}" for outcome in OUTCOMES)
            yield f"{kind:<40}{cells}{longest.get(kind, 0.0):>10.1f} s"
        outcomes = self.outcomes()
        yield f"{f'all {outcomes.total()}':<40}" + "".join(f"{outcomes[outcome]:>12}" for outcome in OUTCOMES)
        yield "errors: " + listed(self.codes())
        if self.transactions:
            yield "transactions: " + listed(Counter(self.transactions.values()))
        yield f"log: {sum(map(len, self.logs.values()))} records and markers"

    # ---- log

    def read_log(self, log: Log, topic: str, partitions: Sequence[int] = (0,), *, committed_at: str = "") -> None:
        """Add the final log. `committed_at` – Kafka's bootstrap address; then read what is visible there, too."""
        for partition in partitions:
            visible = read_committed(committed_at, topic, partition) if committed_at else None
            self.logs[topic, partition] = [
                Entry(
                    each.base_offset + delta,
                    None if each.is_control else (value or b"").decode(errors="replace"),
                    each.leader_epoch,
                    visible is None or each.base_offset + delta in visible,
                )
                for each in log.batches(topic, partition)
                for delta, value in enumerate(each.values)
            ]

    # ---- file

    def save(self, path: Path) -> None:
        saved = {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}
        saved["operations"], saved["logs"] = list(self.operations.values()), list(self.logs.items())
        path.write_text(json.dumps(saved, default=asdict))


def load(path: Path) -> History:
    saved: dict[str, Any] = json.loads(path.read_text())
    history = History({name: Topic(**each) for name, each in saved["topics"].items()})
    history.transactions = saved["transactions"]
    history.events = [tuple(each) for each in saved["events"]]
    for each in saved["operations"]:
        operation = Operation(**each)
        history.operations[operation.number] = replace(operation, place=tuple(operation.place), ids=tuple(each["ids"]))
    for (topic, partition), entries in saved["logs"]:
        history.logs[topic, partition] = [Entry(**each) for each in entries]
    return history


def read_committed(bootstrap: str, topic: str, partition: int = 0) -> dict[int, str]:
    """Offset → value of the records that a read_committed consumer gets. Waits for open transactions."""
    at = TopicPartition(topic, partition)
    found: dict[int, str] = {}
    end = Log(bootstrap).end(topic, partition)
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        enable_auto_commit=False,
        fetch_max_bytes=1 << 24,
        max_partition_fetch_bytes=1 << 22,
    )
    try:
        consumer.assign([at])
        consumer.seek_to_beginning(at)
        give_up = time.monotonic() + _READ_SECONDS
        while consumer.position(at) < end:
            assert time.monotonic() < give_up, f"{topic}-{partition} cannot be read to its end: a transaction is open"
            for record in consumer.poll(500, max_records=5000).get(at, []):
                found[record.offset] = record.value.decode(errors="replace")
        return found
    finally:
        consumer.close()


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"
