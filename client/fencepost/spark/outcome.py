"""The options of a task, and its report to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fencepost.spark.interfaces import TopicPartition

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
class Outcome:
    """Result of a successful task. `rows` = `appended` + `found`; `refused`: appends that lost to another writer;
    `begun`: with `arranged`, the partitions that already had rows of this batch."""

    task: int
    rows: int
    appended: int
    found: int
    appends: int
    refused: int
    partitions: dict[TopicPartition, Written]
    met: Met | None = None
    begun: frozenset[TopicPartition] = frozenset()
