"""Operations and responses of writers, and the final log, as JSON lines.

`history.jsonl` has a line per event, with monotonic time:

    {"e": "topic",  "topic", "mode": "required" | "true", "one_proxy": bool}
    {"e": "call",   "op", "t", "writer", "topic", "partition", "ids", "expected", "named", "resends", "sees_messages",
                    "idempotent", "reads_end", "pipeline_key", "transaction"}
    {"e": "return", "op", "t", "outcome", "offset", "actual", "possibly_yours", "code", "detail"}
    {"e": "transaction", "t", "transaction", "outcome": "committed" | "aborted" | "unknown"}
    {"e": "fault",  "t", "kind", "what"}
    {"e": "anew",   "t", "writer", "error"}

A call without a return has an unknown outcome. `log.jsonl` has a line per offset of every partition:

    {"topic", "partition", "offset", "id", "leader_epoch", "visible"}

`id` is None for a transaction marker. `visible`: a read_committed consumer receives it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Recorder:
    """Writes the history during the run. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1 << 16)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, str] = {}
        #: (kind of writer, outcome) → operations
        self.counts: Counter[tuple[str, str]] = Counter()
        self.codes: Counter[tuple[str, str]] = Counter()
        self.transactions: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.renewed: Counter[str] = Counter()

    def _write(self, **event: Any) -> None:
        line = json.dumps(event, separators=(",", ":")) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def topic(self, topic: str, mode: str, *, one_proxy: bool) -> None:
        self._write(e="topic", topic=topic, mode=mode, one_proxy=one_proxy)

    def call(
        self,
        writer: str,
        topic: str,
        partition: int,
        ids: Sequence[str],
        *,
        expected: int | None,
        manner: Manner,
        pipeline_key: str | None = None,
        transaction: str | None = None,
    ) -> int:
        """Call before sending. Returns the operation's number."""
        operation = next(self._numbers)
        with self._lock:
            self._open[operation] = writer
        self._write(
            e="call",
            op=operation,
            t=time.monotonic(),
            writer=writer,
            topic=topic,
            partition=partition,
            ids=list(ids),
            expected=expected,
            named=manner.named,
            resends=manner.resends,
            sees_messages=manner.sees_messages,
            idempotent=manner.idempotent,
            reads_end=manner.reads_end,
            pipeline_key=pipeline_key,
            transaction=transaction,
        )
        return operation

    def reported(self, operation: int, reported: Reported) -> None:
        """Call with the response. Only the first call for an operation counts."""
        at = time.monotonic()
        with self._lock:
            writer = self._open.pop(operation, None)
            if writer is None:
                return
            kind = _kind(writer)
            self.counts[kind, reported.outcome] += 1
            if reported.code is not None:
                self.codes[kind, f"{reported.code}"] += 1
        event: dict[str, Any] = {"e": "return", "op": operation, "t": at, "outcome": reported.outcome}
        for name in ("offset", "actual", "possibly_yours", "code", "detail"):
            if (value := getattr(reported, name)) is not None:
                event[name] = value
        self._write(**event)

    def transaction(self, transaction: str, outcome: str) -> None:
        with self._lock:
            self.transactions[outcome] += 1
        self._write(e="transaction", t=time.monotonic(), transaction=transaction, outcome=outcome)

    def fault(self, kind: str, what: str) -> None:
        with self._lock:
            self.faults[kind] += 1
        self._write(e="fault", t=time.monotonic(), kind=kind, what=what)

    def anew(self, writer: str, error: BaseException) -> None:
        """The writer closes its client after this error and opens another."""
        with self._lock:
            self.renewed[f"{_kind(writer)} {type(error).__name__}"] += 1
        self._write(e="anew", t=time.monotonic(), writer=writer, error=repr(error)[:300])

    @property
    def operations(self) -> int:
        with self._lock:
            return self.counts.total() + len(self._open)

    def close(self) -> None:
        """Open operations have no return: unknown outcome."""
        with self._lock:
            for writer in self._open.values():
                self.counts[_kind(writer), UNKNOWN] += 1
            self._open.clear()
            self._file.close()


def _kind(writer: str) -> str:
    """A writer's name without proxy and number."""
    return writer.rpartition("-")[0] or writer


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Skip an incomplete last line."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
