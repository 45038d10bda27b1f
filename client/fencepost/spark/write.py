"""The state of one attempt of one task, shared by its parts."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fencepost.spark.driver_probe import DriverProbe
from fencepost.spark.interfaces import Clock, Framing, Log, TopicPartition
from fencepost.spark.outcome import Plan
from fencepost.spark.pool import Pool
from fencepost.spark.rows import Rows


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

    def __post_init__(self) -> None:
        self.over = dict(self.probed.counts)
        self.created_counts = dict(self.probed.counts)
        self.count_checked = set(self.probed.count_checked)

    def default_partition(self, topic: str) -> int:
        """The partition of this task's rows without key and partition."""
        return (self.task + self.batch) % self.over[topic]
