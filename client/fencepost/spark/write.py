"""One attempt of one task: its options, its state, how long it waits, and its report to the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from fencepost.spark.commit_tags import CommitTag, Prefix
from fencepost.spark.driver_probe import DriverProbe
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.interfaces import Clock, Framing, Log, TopicPartition
from fencepost.spark.rows import Pool, size

T = TypeVar("T")

_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 3.0
_CONTENTION_SECONDS = 0.02
_CONTENTION_SECONDS_MAX = 1.0
_CONTENDED = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """User options, and limits of a task."""

    sink: str
    patience_seconds: float = 120.0
    append_bytes_max: int = 900_000
    append_rows_max: int = 65_536
    buffer_bytes: int = 32_000_000
    hold_bytes: int = 64_000_000


@dataclass(slots=True)
class Flight:
    """`prefix`, `last`: of the partition when the append is in the log."""

    rows: pa.Array
    expected: int
    answer: Future[Any]
    prefix: Prefix
    last: bool


@dataclass(slots=True)
class PartitionWrite:
    """`end`: the last known log end offset; all appends of this batch below it are known.

    `is_numbered`: the rows of the batch are a sequence here, and the log has its first rows. `prefix`: those that this
    task found or appended; `logged`: those in the log, `is_last`: all of them.

    Else `pool` has the rows that the log has and the task did not have yet."""

    end: int
    began: int
    before: int
    #: The last commit tag in the driver's snapshot, and whether it is of this batch.
    commit_tag: CommitTag | None = None
    has_batch: bool = False
    queue: deque[pa.Array] = field(default_factory=deque)
    queued_bytes: int = 0
    queued_rows: int = 0
    flight: Flight | None = None
    is_open: bool = False
    is_numbered: bool = False
    prefix: Prefix = field(default_factory=Prefix)
    logged: Prefix = field(default_factory=Prefix)
    is_last: bool = False
    pool: Pool = field(default_factory=Pool)
    #: Compaction may have removed rows of this batch.
    is_compacted: bool = False
    #: New rows may be appended although not all rows in the log are matched.
    is_released: bool = False
    #: Other writers append here: reading the log end first is cheaper than a refused large batch.
    is_contended: bool = False
    tries: int = 0
    not_before: float = 0.0
    found: int = 0
    appended: int = 0
    first: int = -1

    def put(self, rows: pa.Array, *, front: bool = False) -> None:
        if len(rows):
            (self.queue.appendleft if front else self.queue.append)(rows)
            self.queued_bytes += size(rows)
            self.queued_rows += len(rows)

    def take_all(self) -> list[pa.Array]:
        taken = list(self.queue)
        self.queue.clear()
        self.queued_bytes = self.queued_rows = 0
        return taken


@dataclass(slots=True)
class Write:
    """`query`, `batch`, `task`: Spark's. `is_sorted`: the rows of a partition are a sequence that depends on the data
    only; else a retry may have them in another order."""

    plan: Plan
    probed: DriverProbe
    query: str
    batch: int
    task: int
    log: Log
    framing: Framing
    clock: Clock
    is_sorted: bool = False
    #: By topic: the partition counts by which rows of this batch were placed. The last one is used for new rows.
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: By topic: the count by which the rows were arranged.
    arranged: dict[str, int] = field(default_factory=dict)
    #: The topic has a later batch: nothing is appended.
    is_complete: bool = False
    partitions: dict[TopicPartition, PartitionWrite] = field(default_factory=dict)
    rows: int = 0
    #: At the commit, on the driver (`closing.py`): this append ends the load.
    ends_load: bool = False
    #: The rows are compared with those in the log, and none is appended.
    only_compares: bool = False

    @property
    def is_load(self) -> bool:
        return not self.query

    def owns(self, topic_partition: TopicPartition) -> bool:
        """All rows of the partition are in this task, also those that another run appended."""
        topic, partition = topic_partition
        return self.counts[topic] == (self.arranged.get(topic),) and partition == self.task


class Patience:
    """Pauses of one task, and the limit for the time without progress."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._clock = write.clock
        self._patience_seconds = write.plan.patience_seconds
        self._progress_at = self._appended_at = write.clock.now()
        self._last_error = ""
        #: Seconds in which this task could do nothing.
        self.waited = 0.0

    def progressed(self) -> None:
        """Appends of other writers were read."""
        self._progress_at = self._clock.now()

    def appended(self) -> None:
        """Rows of this task were appended, or computed, which may take long."""
        self._progress_at = self._appended_at = self._clock.now()

    def later(self, partition: PartitionWrite, problem: str, *, contended: bool = False) -> None:
        partition.tries += 1
        self._last_error = problem
        pause, most = (
            (_CONTENTION_SECONDS, _CONTENTION_SECONDS_MAX) if contended else (_PAUSE_SECONDS, _PAUSE_SECONDS_MAX)
        )
        if contended and partition.tries == 1:
            return  # the first refusal reports the log end; a second one shows a competing writer
        pause = min(most, pause * 2 ** min(partition.tries, 10))
        partition.not_before = self._clock.now() + pause * (0.5 + self._clock.random())

    def patiently(self, probe: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return probe()
            except CannotReach as error:
                self._last_error = str(error)
                tries += 1
                self._give_up_if_late()
                self._wait((), min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2**tries) * (0.5 + self._clock.random()))

    def wait(self) -> None:
        """Wait until a response or a retry is due."""
        self._give_up_if_late()
        now = self._clock.now()
        flights = [p.flight.answer for p in self._write.partitions.values() if p.flight]
        due = [
            p.not_before - now
            for p in self._write.partitions.values()
            if p.queue and not p.flight and p.not_before > now
        ]
        pause = min(due, default=1.0 if flights else _PAUSE_SECONDS)
        self._wait(flights, max(0.001, min(pause, 1.0)))

    def _wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        began = self._clock.now()
        self._clock.wait(futures, seconds)
        self.waited += self._clock.now() - began

    def _give_up_if_late(self) -> None:
        # Appends by other writers count as progress, but not indefinitely.
        now, patience = self._clock.now(), self._patience_seconds
        if now - self._progress_at > patience or now - self._appended_at > _CONTENDED * patience:
            raise SinkError(
                f"nothing could be appended for {self._patience_seconds:g} s (option patience.seconds): "
                f"{self._last_error} (fix the cause and start the write again: it continues where it "
                "stopped)"
            )


class Written(NamedTuple):
    """A task's result in one partition. `first`: offset of the first row that it appended, -1 if none; `end`: the last
    log end offset that it knew."""

    found: int
    appended: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """The last row of a load in a partition, with all that its task knows there: the driver appends it at the commit.
    `counts`: as in `Write`."""

    topic_partition: TopicPartition
    rows: pa.Array
    partition: PartitionWrite
    probed: DriverProbe
    counts: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a successful task. `rows` = `appended` + `found` + the deferred one; `refused`: appends that lost to
    another writer; `begun`: the partitions that already had rows of this batch; `waited`: seconds, for Kafka and before
    retries."""

    task: int
    rows: int
    appended: int
    found: int
    appends: int
    refused: int
    partitions: dict[TopicPartition, Written]
    begun: frozenset[TopicPartition]
    deferred: Deferred | None = None
    waited: float = 0.0
