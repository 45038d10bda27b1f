"""One attempt of one task: its options, its state, how long it waits, and its report to the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from fencepost.spark.driver_probe import DriverProbe
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.interfaces import NO_APPEND, Clock, Framing, LastAppend, Locks, Log, TopicPartition
from fencepost.spark.rows import Pool, Rows
from fencepost.spark.totals import NO_ROWS, Total

T = TypeVar("T")

_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 3.0
_CONTENTION_SECONDS = 0.02
_CONTENTION_SECONDS_MAX = 1.0
_CONTENDED = 10
_LOCK_SECONDS = 0.005
_LOCK_SECONDS_MAX = 0.1
#: A lock is waited for while something is appended at least this often, in any partition.
_LOCK_HOLDER_SECONDS = 5.0

AUTO, REFUSE, COMPARE, KEEP = "auto", "refuse", "compare", "keep"


@dataclass(frozen=True, slots=True)
class Plan:
    """User options. `arranged`: all rows of a partition are in one task, and the partition identifies the write.
    `unmatched`: what to do if the log has rows under the task's number that the task lacks, AUTO to KEEP."""

    sink: str
    arranged: bool = False
    same_split: bool = False
    unmatched: str = "auto"
    first_run: bool = False
    patience_seconds: float = 120.0
    append_bytes_max: int = 900_000
    append_rows_max: int = 65_536
    buffer_bytes: int = 32_000_000
    hold_bytes: int = 64_000_000


@dataclass(slots=True)
class Flight:
    rows: Rows
    expected: int
    answer: Future[Any]


@dataclass(slots=True)
class PartitionWrite:
    """`end`: the last known log end offset; all appends of this write below it are known."""

    end: int
    began: int
    before: int
    queue: deque[Rows] = field(default_factory=deque)
    queued_bytes: int = 0
    queued_rows: int = 0
    flight: Flight | None = None
    there: Pool = field(default_factory=Pool)
    #: End of this batch's rows if the partition has later batches.
    limit: int = -1
    #: Appends of other runs: their task numbers, and digests of this task's rows under another number.
    numbers: set[int] = field(default_factory=set)
    foreign: bytearray = field(default_factory=bytearray)
    #: Appends per task between the driver's snapshot and `end`; None: not known for all tasks.
    task_appends: dict[int, int] | None = field(default_factory=dict)
    read: bool = True
    #: The driver's snapshot had rows of this batch.
    begun: bool = False
    fed: bool = False
    #: Other writers append here: reading the log end first is cheaper than a refused large batch.
    rivals: bool = False
    #: The wait for the append lock: where its last append ended, and pauses since then. `unlocked`: append without it,
    #: because its holder does not go on.
    lock_end: int = -2
    waits: int = 0
    unlocked: bool = False
    tries: int = 0
    not_before: float = 0.0
    appends: int = 0
    found: int = 0
    appended: int = 0
    first: int = -1

    def put(self, rows: Rows, *, front: bool = False) -> None:
        if len(rows):
            (self.queue.appendleft if front else self.queue.append)(rows)
            self.queued_bytes += rows.bytes()
            self.queued_rows += len(rows)

    def take_all(self) -> list[Rows]:
        taken = list(self.queue)
        self.queue.clear()
        self.queued_bytes = self.queued_rows = 0
        return taken


class NoLocks:
    """Every append goes without a lock."""

    def take(self, topic_partition: TopicPartition) -> tuple[bool, LastAppend]:
        return True, NO_APPEND

    def store(self, topic_partition: TopicPartition, last: LastAppend) -> None: ...

    def release(self, topic_partition: TopicPartition) -> None: ...


@dataclass(slots=True)
class Write:
    """`query`, `batch`, `task`: Spark's; `attempt`: a random id."""

    plan: Plan
    probed: DriverProbe
    query: str
    batch: int
    task: int
    attempt: str
    log: Log
    framing: Framing
    clock: Clock
    locks: Locks = field(default_factory=NoLocks)
    #: Partition counts for the rows, and when this batch began.
    over: dict[str, int] = field(init=False)
    created_counts: dict[str, int] = field(init=False)
    count_checked: set[str] = field(init=False)
    #: Topics with rows of this batch partitioned for several counts: a row may be in any partition.
    mixed: set[str] = field(default_factory=set)
    rearranged: bool = False
    complete: bool = False
    #: Compaction may have removed rows of this batch.
    compacted: set[TopicPartition] = field(default_factory=set)
    partitions: dict[TopicPartition, PartitionWrite] = field(default_factory=dict)
    #: Some rows get their partition from their task.
    spread: bool = False
    #: The log has rows under this task's number that the task lacks, and it continues.
    has_unmatched: bool = False
    #: Rows that are not appended before all rows in the log are matched; None: rows are appended at once.
    buffered: list[tuple[TopicPartition, Rows]] | None = None
    buffered_bytes: int = 0
    rows: int = 0
    #: The total of a load's rows; streams do not compute it.
    total: Total = NO_ROWS
    #: The total of the finished load, and whether the driver's snapshot had it: then nothing is compared or appended.
    done: tuple[int, int] | None = None
    was_done: bool = False
    #: At the commit, on the driver (`closing.py`): the total to state.
    at_commit: bool = False
    completion: Total | None = None

    def __post_init__(self) -> None:
        self.over = dict(self.probed.counts)
        self.created_counts = dict(self.probed.counts)
        self.count_checked = set(self.probed.count_checked)

    def default_partition(self, topic: str) -> int:
        """The partition of this task's rows without key and partition."""
        return (self.task + self.batch) % self.over[topic]


class Patience:
    """Pauses of one task, and the limit for the time without progress."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._clock = write.clock
        self._patience_seconds = write.plan.patience_seconds
        self._progress_at = self._appended_at = write.clock.now()
        self._last_error = ""

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

    def waits_for_lock(self, partition: PartitionWrite, end: int) -> bool:
        """Whether to wait for an append lock. `end`: of the last append under it."""
        now = self._clock.now()
        if partition.lock_end != end:
            partition.lock_end, partition.waits = end, 0
            self.progressed()
        if now - self._progress_at > _LOCK_HOLDER_SECONDS:
            partition.unlocked = True
            return False
        pause = min(_LOCK_SECONDS_MAX, _LOCK_SECONDS * 2**partition.waits)
        partition.waits += 1
        partition.not_before = now + pause * (0.5 + self._clock.random())
        return True

    def patiently(self, probe: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return probe()
            except CannotReach as error:
                self._last_error = str(error)
                tries += 1
                self._give_up_if_late()
                self._clock.wait((), min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2**tries) * (0.5 + self._clock.random()))

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
        self._clock.wait(flights, max(0.001, min(pause, 1.0)))

    def _give_up_if_late(self) -> None:
        # Appends by other writers count as progress, but not indefinitely.
        now, patience = self._clock.now(), self._patience_seconds
        if now - self._progress_at > patience or now - self._appended_at > _CONTENDED * patience:
            raise SinkError(
                f"nothing could be appended for {self._patience_seconds:g} s (option patience.seconds): "
                f"{self._last_error} (fix the cause and start the write again: it continues where it "
                "stopped)"
            )


class ObservedPartition(NamedTuple):
    """Appends by other runs of the batch in one partition. They start at `begin` and are below `limit` (-1: no limit);
    the task knows all below `end`. `numbers`: their task numbers. Digests of rows: `foreign`: the task's rows found
    under another number; `unmatched`: rows under its number that the task lacks."""

    begin: int
    limit: int
    end: int
    numbers: frozenset[int]
    foreign: bytes
    unmatched: bytes


@dataclass(frozen=True, slots=True)
class Met:
    """A task's findings about other runs of its batch. `complete`: the batch was complete; `loose`: topics whose rows
    may be in another partition than they would get now; `over`: {topic: partition count used for its rows};
    `count_checked`: topics with partition-count checks."""

    query: str
    run: str
    batch: int
    complete: bool
    loose: frozenset[str]
    over: dict[str, int]
    count_checked: frozenset[str]
    partitions: dict[TopicPartition, ObservedPartition]


class Written(NamedTuple):
    """A task's result in one partition. `first`: offset of the first row that it appended, -1 if none; `end`: the last
    log end offset that it knew."""

    found: int
    appended: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """The last row of a task of a load, with all that its attempt knows about the partition: the driver continues the
    attempt at the commit. `begin`: the log end in the driver's snapshot."""

    topic_partition: TopicPartition
    rows: Rows
    partition: PartitionWrite
    begin: int
    probed: DriverProbe
    task: int
    attempt: str
    over: dict[str, int]
    created_counts: dict[str, int]
    has_unmatched: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a successful task. `rows` = `appended` + `found` + the deferred one; `refused`: appends that lost to
    another writer; `begun`: with `arranged`, the partitions that already had rows of this batch; `total`, `done`: as
    in `Write`."""

    task: int
    rows: int
    appended: int
    found: int
    appends: int
    refused: int
    partitions: dict[TopicPartition, Written]
    met: Met | None = None
    begun: frozenset[TopicPartition] = frozenset()
    total: Total = NO_ROWS
    done: tuple[int, int] | None = None
    was_done: bool = False
    deferred: Deferred | None = None
