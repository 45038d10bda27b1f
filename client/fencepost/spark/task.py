"""One attempt of one task of a write. Appends each of its rows to the log once, even with concurrent attempts.

Attempts may run concurrently: a speculative copy, an attempt that Spark considers dead, or one of a killed driver. None
of them can be relied on to stop. Safety follows from three rules:

    1. A batch is appended only at the log end that its sender expects (the proxy's check). The sender knows every
       relevant append of this batch below that offset: those of its task in its run, and those of all tasks of other
       runs. It read them, appended them, or the driver's snapshot proves that there were none.
    2. The sender appends a copy of a row only while it has more copies than it knows in the log. So L, the rows of the
       batch in the log, is a sub-multiset of R, the rows of all tasks, however other runs split them.
    3. An attempt succeeds only if each of its rows was found or appended. Another task may also have found a row that
       was found under another task number; the driver compares these before it commits (`comparing.py`). Then L = R,
       and by rule 2 it stays so.

Therefore only one append is in flight per partition. Two could break rule 1: (1) the sender pipelines appends of n and
m records; (2) another sender appends n records at the first one's offset; (3) the second append is accepted after rows
that its sender has not read. Other partitions' appends and the encoding of the next rows run in parallel.

A row is identified by its bytes in the log. Its partition follows from the row and the partition count. A row with
neither key nor partition gets its partition from its task. Such rows are searched only under the task's own number,
because two tasks with equal rows do not use the same partition. A repeated task may order its rows differently, and a
repeated batch may split them differently.

The snapshot and the log determine the case:

    fresh    the log had nothing of this batch at the driver's snapshot
    resume   the log had some of it: search each row first, and append only missing ones
    complete the log has a later batch: no row of this batch may be missing, and nothing is appended

Nothing in this file does I/O: `Log` and `Clock` do.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost._partitioning import murmur2
from fencepost.spark.commit_tags import TASK_APPENDS_MAX, CommitTag
from fencepost.spark.encoding import split
from fencepost.spark.errors import CannotReach, SinkError, Unknown

if TYPE_CHECKING:
    from fencepost.spark.driver_probe import DriverProbe

T = TypeVar("T")

TopicPartition = tuple[str, int]
"""Topic and partition."""

AUTO, REFUSE, COMPARE, KEEP = "auto", "refuse", "compare", "keep"

CHECK = "fencepost.check.expected.offsets"
COUNT_CHECK = "fencepost.check.partition.count"

_POLICY_VIOLATION = 44
INVALID_PARTITIONS = 37
#: Temporary errors. After each of them the log shows whether the batch was appended.
_RETRIABLE = frozenset({2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 16, 19, 20, 56, 74, 75, 76, 89})
_MEANINGS = {
    10: "a row exceeds the topic's max.message.bytes",
    29: "the user of the sink needs WRITE, READ and DESCRIBE on the topic",
    31: "the user of the sink may not write to this cluster",
    32: "the record timestamps are too old or in the future (compare the clocks of executors and brokers)",
    87: "the proxy or Kafka rejects the records as invalid",
}
_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 3.0
_CONTENTION_SECONDS = 0.02
_CONTENTION_SECONDS_MAX = 1.0
DIGEST_BYTES = 16
#: How many earlier batches are read to learn the task numbers.
_BATCHES_BACK = 8
_CONTENDED = 10
#: Size of a record without key, value and headers: length, attributes, deltas.
_ROW_BYTES = 12


class Answer(Protocol):
    """Response to one append. With error 44, `base_offset` is the log end offset, or -1."""

    @property
    def code(self) -> int: ...
    @property
    def base_offset(self) -> int: ...
    @property
    def message(self) -> str | None: ...


class Logged(Protocol):
    """A batch in the log. `bodies`: its records without the sink's headers; empty for a control batch. `is_whole`:
    compaction removed none of them."""

    @property
    def base_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def bodies(self) -> Sequence[bytes]: ...
    @property
    def commit_tag(self) -> bytes | None: ...
    @property
    def is_whole(self) -> bool: ...


class Log(Protocol):
    """Kafka through the proxy. All methods raise SinkError; all but `append` raise CannotReach for temporary errors."""

    def partition_count(self, topic: str) -> int: ...

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Log start and high watermark."""

    def append(self, topic: str, partition: int, batch: bytes) -> Future[Any]:
        """Send one request without retries. The future returns an Answer, or raises Unknown or SinkError."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Any]:
        """The batches (Logged) from the one that contains `start` up to `end`, perhaps more."""

    def last_batch(self, topic: str, partition: int, end: int) -> Any:
        """The batch that ends at `end`, or None."""


class Clock(Protocol):
    def now(self) -> float: ...
    def time_ms(self) -> int: ...
    def random(self) -> float: ...
    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Wait until one future is done or `seconds` passed."""


class Framing(Protocol):
    """Bytes of Kafka's record format."""

    def build(
        self, bodies: pa.Array, *, commit_tag: bytes, expected: int, now_ms: int, partition_count: int | None
    ) -> bytes: ...

    def key(self, body: bytes) -> bytes | None: ...


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


@dataclass(frozen=True, slots=True)
class SinkAppend:
    """An append of the sink, as read from the log, with its rows by digest."""

    commit_tag: CommitTag
    next_offset: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ScanRange:
    """A scan range of one partition, as read. `is_whole`: compaction removed nothing."""

    appends: tuple[SinkAppend, ...]
    is_whole: bool


#: Origin of an append: this task and run; the same task number in another run; another number in another run.
_OWN, _SAME_NUMBER, _FOREIGN = range(3)


@dataclass(slots=True)
class _Group:
    """The appends of one task number of one run. `size`: their rows; `matched`: how many of them are this task's;
    `has_unmatched`: their task also lacked rows under its own number."""

    run: str
    task: int
    origin: int
    size: int = 0
    matched: int = 0
    has_unmatched: bool = False


class _Pool:
    """Rows of this batch in one partition of the log that the input did not have yet, with the group of each."""

    __slots__ = ("_more", "_once")

    def __init__(self) -> None:
        self._once: dict[bytes, int] = {}
        #: Copies per group, for rows with several copies.
        self._more: dict[bytes, dict[int, int]] = {}

    def add(self, digests: Sequence[bytes], group: int) -> None:
        fresh = dict.fromkeys(digests, group)
        if len(fresh) == len(digests) and not self._more and self._once.keys().isdisjoint(fresh):
            self._once.update(fresh)
            return
        for digest in digests:
            if digest in self._more:
                among = self._more[digest]
            elif digest in self._once:
                among = self._more[digest] = {self._once.pop(digest): 1}
            else:
                self._once[digest] = group
                continue
            among[group] = among.get(group, 0) + 1

    def take(self, digest: bytes, groups: Sequence[_Group], most: int) -> int | None:
        """Remove one copy and return its group: the task's own first, none with an origin above `most`."""
        group = self._once.get(digest)
        if group is not None:
            if groups[group].origin > most:
                return None
            del self._once[digest]
            return group
        among = self._more.get(digest)
        if among is None:
            return None
        group = min(among, key=lambda each: groups[each].origin)
        if groups[group].origin > most:
            return None
        if among[group] > 1:
            among[group] -= 1
        elif len(among) > 1:
            del among[group]
        else:
            del self._more[digest]
        return group

    def left(self) -> Iterator[tuple[bytes, int, int]]:
        """Digest, group, count."""
        for digest, group in self._once.items():
            yield digest, group, 1
        for digest, among in self._more.items():
            for group, count in among.items():
                yield digest, group, count

    def count(self, groups: Sequence[_Group], origin: int) -> int:
        return sum(count for _, group, count in self.left() if groups[group].origin == origin)


@dataclass(slots=True)
class _Rows:
    """Rows of one partition, in order. `explicit`: which of them name their partition; None: none."""

    bodies: pa.Array
    explicit: npt.NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.bodies)

    def bytes(self) -> int:
        return _size(self.bodies)

    def sliced(self, start: int, count: int) -> _Rows:
        chosen = None if self.explicit is None else self.explicit[start : start + count]
        return _Rows(self.bodies.slice(start, count), chosen)

    def kept(self, keep: list[bool]) -> _Rows:
        mask = np.array(keep, dtype=bool)
        return _Rows(self.bodies.filter(pa.array(mask)), None if self.explicit is None else self.explicit[mask])


@dataclass(slots=True)
class _Flight:
    rows: _Rows
    expected: int
    answer: Future[Any]


@dataclass(slots=True)
class _Partition:
    """`end`: the last known log end offset; all appends of this write below it are known."""

    end: int
    began: int
    before: int
    queue: deque[_Rows] = field(default_factory=deque)
    queued_bytes: int = 0
    queued_rows: int = 0
    flight: _Flight | None = None
    there: _Pool = field(default_factory=_Pool)
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

    def put(self, rows: _Rows, *, front: bool = False) -> None:
        if len(rows):
            (self.queue.appendleft if front else self.queue.append)(rows)
            self.queued_bytes += rows.bytes()
            self.queued_rows += len(rows)

    def take_all(self) -> list[_Rows]:
        taken = list(self.queue)
        self.queue.clear()
        self.queued_bytes = self.queued_rows = 0
        return taken


class Task:
    """Call `begin`, `feed` for all rows, then `finish`. Unusable after a SinkError."""

    def __init__(
        self,
        plan: Plan,
        probe: DriverProbe,
        *,
        query: str,
        batch: int,
        task: int,
        attempt: str,
        log: Log,
        framing: Framing,
        clock: Clock,
        scan_ranges: dict[tuple[str, int, int, int], ScanRange] | None = None,
    ) -> None:
        self._plan = plan
        self._probed = probe
        self._query = query
        self._batch = batch
        self._task = task
        self._attempt = attempt
        self._log = log
        self._framing = framing
        self._clock = clock
        #: Scan ranges read before the first row, shared by the tasks of one process.
        self._scan_ranges = {} if scan_ranges is None else scan_ranges
        self._over = dict(probe.counts)
        #: Partition counts when this batch began.
        self._created_counts = dict(probe.counts)
        self._count_checked = set(probe.count_checked)
        #: Topics with rows of this batch partitioned for several counts: a row may be in any partition.
        self._mixed: set[str] = set()
        self._expanding: set[str] = set()
        self._rearranged = False
        self._complete = False
        #: Compaction may have removed rows of this batch.
        self._compacted: set[TopicPartition] = set()
        self._partitions: dict[TopicPartition, _Partition] = {}
        #: Origins of the relevant appends (rule 1).
        self._groups: list[_Group] = []
        self._numbered: dict[tuple[str, int], int] = {}
        #: Rows in the pools: under this task's number, and under others.
        self._left = self._left_foreign = 0
        self._found_foreign = 0
        #: Digests of all rows read under other numbers; built on first use.
        self._others: set[bytes] | None = None
        #: Some rows get their partition from their task.
        self._spread = False
        #: The log has rows under this task's number that the task lacks, and it continues.
        self._has_unmatched = False
        self._buffered: list[tuple[TopicPartition, _Rows]] | None = None
        self._buffered_bytes = 0
        self._progress_at = self._appended_at = clock.now()
        self._last_error = ""
        self._rows = self._appended = self._found = self._appends = self._refused = 0

    # --- rows already in the log ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check the driver's snapshot, and read the rows of this batch in the log."""
        last = {
            topic_partition: observation.last
            for topic_partition, observation in self._probed.observations.items()
            if observation.last is not None
        }
        for topic_partition, known in last.items():
            self._refuse_other_query(topic_partition, known)
        latest = max((commit_tag.batch for commit_tag in last.values()), default=-1)
        if not self._plan.first_run:
            for topic_partition, observation in self._probed.observations.items():
                if observation.unread or (not last and self._batch > 0 and observation.start > 0):
                    raise self._deleted(
                        topic_partition, observation.start, f"nothing of sink {self._plan.sink!r} is left there"
                    )
        self._complete = latest > self._batch
        if latest == self._batch:
            self._choose_counts(last)
        for topic_partition, observation in self._probed.observations.items():
            commit_tag = observation.last
            if commit_tag is None or commit_tag.batch < self._batch or self._complete:
                self._partitions[topic_partition] = _Partition(
                    observation.end, observation.end, -1 if commit_tag is None else commit_tag.began
                )
            else:
                self._partitions[topic_partition] = _Partition(observation.end, commit_tag.began, commit_tag.before)
            self._partitions[topic_partition].read = latest < self._batch
        if latest >= self._batch:
            for topic_partition in self._partitions:
                if not self._plan.arranged or self._complete or topic_partition[0] in self._mixed:
                    self._read_scan_range(topic_partition)

    def _choose_counts(self, last: dict[TopicPartition, CommitTag]) -> None:
        """Choose the partition counts of a batch that began earlier, perhaps before an expansion."""
        for topic, count in self._probed.counts.items():
            commit_tags = [m for (t, _), m in last.items() if t == topic and m.batch == self._batch]
            overs = {
                over for commit_tag in commit_tags for over in (commit_tag.over, commit_tag.created_partitions)
            } - {count}
            self._created_counts[topic] = min([count, *overs])
            if overs and topic in self._count_checked:
                self._mixed.add(topic)
            elif overs and not self._plan.arranged:
                # Tasks with the old count may still append unchecked, so the batch keeps the old count.
                self._over[topic] = self._only(topic, overs)
            elif overs:
                raise SinkError(
                    f"topic {topic} was expanded from {min(overs)} to {count} partitions after batch "
                    f"{self._batch} began (finish the batch with arrange(…, partitions={min(overs)}); "
                    f"set {COUNT_CHECK}=true before the next expansion to avoid this)"
                )
        limit = min((m.at for m in last.values() if m.batch == self._batch), default=0)
        for (topic, partition), observation in self._probed.observations.items():
            kept = self._probed.retention_ms.get(topic, -1)
            deleted = observation.last is None and observation.start > 0 and 0 < kept < 2 * (self._probed.at - limit)
            if deleted and not self._plan.first_run:
                raise self._deleted((topic, partition), observation.start, f"batch {self._batch} began long before")

    def _only(self, topic: str, overs: set[int]) -> int:
        if len(overs) > 1:
            raise SinkError(
                f"topic {topic} was expanded several times during batch {self._batch} and {COUNT_CHECK} "
                "is off: cannot determine where its rows are (count them manually, and continue "
                "under a new sink.id)"
            )
        return next(iter(overs))

    def _read_scan_range(self, topic_partition: TopicPartition) -> None:
        """Read all appends of this batch below the driver's snapshot."""
        partition = self._partitions[topic_partition]
        if partition.read:
            return
        partition.read = True
        observation = self._probed.observations[topic_partition]
        if observation.last is None:
            return
        if self._complete:
            begin, end = self._walk_back(topic_partition, observation.last, observation.end)
            partition.began, partition.limit = begin, end
        elif observation.last.batch == self._batch:
            begin, end = partition.began, observation.end
        else:
            return
        if self._plan.first_run and not self._complete:
            begin = partition.began = max(begin, observation.start)
        self._refuse_deleted(topic_partition, begin, observation.start)
        scan_range = self._scan_range(topic_partition, begin, end)
        if not scan_range.is_whole:
            self._compacted.add(topic_partition)
        for append in scan_range.appends:
            if not (self._complete and append.commit_tag.batch != self._batch):
                self._absorb(topic_partition, append, before_the_read=True)
        if (self._left or self._left_foreign) and self._buffered is None and not (self._plan.arranged and self._mixed):
            self._buffered = []

    def _walk_back(self, topic_partition: TopicPartition, commit_tag: CommitTag, end: int) -> tuple[int, int]:
        """[begin, end) of this batch in a partition with later batches; empty if it has no row of this batch."""
        while commit_tag.batch > self._batch:
            if commit_tag.before < 0:
                return end, end
            self._refuse_deleted(topic_partition, commit_tag.before, self._probed.observations[topic_partition].start)
            end = commit_tag.began
            appends = self._scan_range(topic_partition, commit_tag.before, end).appends
            if not appends:
                raise self._deleted(topic_partition, commit_tag.before, "commit tags of earlier batches are missing")
            commit_tag = appends[-1].commit_tag
        return (commit_tag.began, end) if commit_tag.batch == self._batch else (end, end)

    def _scan_range(self, topic_partition: TopicPartition, begin: int, end: int) -> ScanRange:
        key = (*topic_partition, begin, end)
        if key not in self._scan_ranges:
            self._scan_ranges[key] = self._patiently(lambda: self._read_whole(topic_partition, begin, end))
        return self._scan_ranges[key]

    def _read_whole(self, topic_partition: TopicPartition, begin: int, end: int) -> ScanRange:
        appends: list[SinkAppend] = []
        at, is_whole = begin, True
        for logged in self._log.read(*topic_partition, begin, end) if begin < end else ():
            is_whole &= logged.is_whole and logged.base_offset <= at
            at = logged.next_offset
            appends += self._own_appends((logged,), begin, end)
        return ScanRange(tuple(appends), is_whole and at >= end)

    def _read(self, topic_partition: TopicPartition, begin: int, end: int) -> Iterator[SinkAppend]:
        if begin < end:
            yield from self._own_appends(self._log.read(*topic_partition, begin, end), begin, end)

    def _own_appends(self, batches: Iterable[Any], begin: int, end: int) -> Iterator[SinkAppend]:
        for logged in batches:
            commit_tag = own_commit_tag(logged, self._plan.sink)
            if commit_tag is not None and logged.next_offset > begin and logged.base_offset < end:
                yield SinkAppend(commit_tag, logged.next_offset, tuple(map(digest_of, logged.bodies)))

    def _absorb(self, topic_partition: TopicPartition, append: SinkAppend, *, before_the_read: bool = False) -> None:
        """Account for an append of this sink that was just read."""
        commit_tag, partition = append.commit_tag, self._partitions[topic_partition]
        self._refuse_other_query(topic_partition, commit_tag)
        if commit_tag.batch != self._batch:
            raise self._other_batch(topic_partition, commit_tag)
        if commit_tag.over != self._over[topic_partition[0]]:
            if topic_partition[0] not in self._count_checked and not self._complete:
                self._only(topic_partition[0], {commit_tag.over, self._over[topic_partition[0]]})
            self._mixed.add(topic_partition[0])
        self._rearranged |= commit_tag.arranged != self._plan.arranged
        same_run = commit_tag.run == self._probed.run
        if before_the_read:
            partition.begun = True
        elif not same_run:
            partition.task_appends = None
        elif partition.task_appends is not None:
            partition.task_appends[commit_tag.task] = partition.task_appends.get(commit_tag.task, 0) + 1
        if self._plan.arranged:
            if same_run and commit_tag.task != self._task:
                raise self._not_arranged(topic_partition, commit_tag.task)
            origin = _OWN
        elif same_run:
            if commit_tag.task != self._task:
                return
            origin = _OWN
        else:
            origin = _SAME_NUMBER if commit_tag.task == self._task else _FOREIGN
            partition.numbers.add(commit_tag.task)
        self._pool(partition, append, origin)

    def _pool(self, partition: _Partition, append: SinkAppend, origin: int) -> None:
        """Add an append to the pool."""
        commit_tag = append.commit_tag
        number = self._numbered.setdefault((commit_tag.run, commit_tag.task), len(self._groups))
        if number == len(self._groups):
            self._groups.append(_Group(commit_tag.run, commit_tag.task, origin))
        group = self._groups[number]
        group.size += len(append.digests)
        group.has_unmatched |= commit_tag.has_unmatched
        partition.there.add(append.digests, number)
        if origin == _FOREIGN:
            self._left_foreign += len(append.digests)
            if self._others is not None:
                self._others.update(append.digests)
        else:
            self._left += len(append.digests)

    def _commit_tag_at(self, topic_partition: TopicPartition, end: int) -> CommitTag | None:
        return own_commit_tag(self._patiently(lambda: self._log.last_batch(*topic_partition, end)), self._plan.sink)

    # --- rows -----------------------------------------------------------------------------------------------------

    def over(self, topic: str) -> int:
        """The partition count for partitioning rows."""
        return self._over[topic]

    def default_partition(self, topic: str) -> int:
        """The partition of this task's rows without key and partition."""
        return (self._task + self._batch) % self._over[topic]

    def feed(
        self, topic: str, bodies: pa.Array, partitions: npt.ArrayLike, explicit: npt.ArrayLike | None = None
    ) -> None:
        """Take rows, in order, with the partition of each out of `over(topic)`."""
        self._rows += len(bodies)
        self._progress_at = self._appended_at = self._clock.now()  # computing the rows may take long
        for partition, rows in _by_partition(bodies, np.asarray(partitions), explicit):
            self._take((topic, partition), rows)
        self._pump(flush=False)
        while self._waiting_bytes() > self._plan.buffer_bytes:
            self._wait()
            self._pump(flush=False)

    def finish(self) -> Outcome:
        """Append the rest. On return, each row is in the log once."""
        self._progress_at = self._appended_at = self._clock.now()
        if self._buffered is not None:
            self._buffered = [
                (topic_partition, self._missing(topic_partition, rows)) for topic_partition, rows in self._buffered
            ]
            self._check_unmatched(early=True)
            self._release()
        while any(p.flight or p.queue for p in self._partitions.values()):
            self._pump(flush=True)
            if any(p.flight or p.queue for p in self._partitions.values()):
                self._wait()
        self._check_unmatched(early=False)
        return Outcome(
            self._task,
            self._rows,
            self._appended,
            self._found,
            self._appends,
            self._refused,
            {
                topic_partition: Written(partition.found, partition.appended, partition.first, partition.end)
                for topic_partition, partition in self._partitions.items()
                if partition.found or partition.appended
            },
            self._met(),
            self._begun() if self._plan.arranged else frozenset(),
        )

    def _begun(self) -> frozenset[TopicPartition]:
        return frozenset(
            topic_partition
            for topic_partition, partition in self._partitions.items()
            if partition.begun or self._last_batch_number(topic_partition) == self._batch
        )

    def _last_batch_number(self, topic_partition: TopicPartition) -> int:
        observation = self._probed.observations.get(topic_partition)
        return -1 if observation is None or observation.last is None else observation.last.batch

    def _met(self) -> Met | None:
        partitions = {}
        for topic_partition, partition in self._partitions.items():
            if partition.numbers:
                left = [d * n for d, group, n in partition.there.left() if self._groups[group].origin == _SAME_NUMBER]
                partitions[topic_partition] = ObservedPartition(
                    partition.began,
                    partition.limit,
                    partition.end,
                    frozenset(partition.numbers),
                    bytes(partition.foreign),
                    b"".join(left),
                )
        if not partitions:
            return None
        loose = frozenset(self._over) if self._complete else frozenset(self._mixed)
        count_checked = frozenset(self._count_checked)
        over = dict(self._over)
        return Met(self._query, self._probed.run, self._batch, self._complete, loose, over, count_checked, partitions)

    # --- rows in the log that the input lacks ----------------------------------------------------------------------

    def _check_unmatched(self, *, early: bool) -> None:
        """Decide about rows in the log under this task's number that the task lacks. `early`: this attempt appended
        nothing.

        Either another task has them now, or the data changed; the driver knows when all tasks have ended. Refusing here
        keeps rows of changed data out of the log."""
        if not self._left or (self._plan.arranged and self._mixed):
            return  # with `_mixed`, rows of other tasks were read too
        for topic_partition, partition in self._partitions.items():
            ours = partition.there.count(self._groups, _OWN)
            if ours and (partition.fed or not self._plan.arranged):
                raise self._other_rows(topic_partition, ours)
        if not self._plan.arranged and not self._complete:
            if self._refuses(early=early):
                for topic_partition, partition in self._partitions.items():
                    if left := partition.there.count(self._groups, _SAME_NUMBER):
                        raise self._other_rows(topic_partition, left)
            self._has_unmatched = True

    def _refuses(self, *, early: bool) -> bool:
        stated = self._plan.unmatched
        if stated == AUTO and not self._query:
            stated = REFUSE
        if stated in (REFUSE, KEEP):
            return stated == REFUSE
        if self._spread:
            return True  # no task searches other partitions for them
        if stated == COMPARE or not early:
            return False
        if self._found == self._rows or self._found_foreign:
            return False  # nothing to append, or the batch is split differently
        groups = [group for group in self._groups if group.origin == _SAME_NUMBER]
        if any(group.size > group.matched > group.size / 2 for group in groups):
            return True  # most of the group matches, and the rest is other data
        if self._found:
            return False
        # No match: when the batch began, this task may have had another number and written nothing.
        return any(group.has_unmatched for group in groups) or (self._all_have_written() and self._keys_are_the_same())

    def _all_have_written(self) -> bool:
        """A run has appends of every task number of the earlier batches, so one of them is this task's."""
        before: set[int] = set()
        for topic_partition, partition in self._partitions.items():
            began = partition.began
            for _ in range(_BATCHES_BACK):
                commit_tag = self._commit_tag_at(topic_partition, began)
                if commit_tag is None or commit_tag.batch >= self._batch or commit_tag.arranged:
                    break
                if commit_tag.task_appends is None:
                    return False  # unknown
                before |= {commit_tag.task, *commit_tag.task_appends}
                began = commit_tag.began
        runs: dict[str, set[int]] = {}
        for group in self._groups:
            runs.setdefault(group.run, set()).add(group.task)
        return bool(before) and any(numbers >= before for numbers in runs.values())

    def _keys_are_the_same(self) -> bool:
        """The task has at least as many rows of each key as the log under its number. A changed query mostly changes
        values; another source partition has other keys."""
        keys = Counter(self._framing.key(body) for _, rows in self._buffered or () for body in rows.bodies.to_pylist())
        for topic_partition, partition in self._partitions.items():
            keys.subtract(self._patiently(lambda at=topic_partition, part=partition: self._keys_at(at, part)))  # type: ignore[misc]
        return min(keys.values(), default=0) >= 0

    def _keys_at(self, topic_partition: TopicPartition, partition: _Partition) -> Counter[bytes | None]:
        """Keys of the rows that other runs appended under this task's number."""
        found: Counter[bytes | None] = Counter()
        if self._task in partition.numbers:
            for logged in self._log.read(*topic_partition, partition.began, partition.end):
                commit_tag = own_commit_tag(logged, self._plan.sink)
                if commit_tag is not None and (commit_tag.batch, commit_tag.task) == (self._batch, self._task):
                    found.update(map(self._framing.key, logged.bodies))
        return found

    def _take(self, topic_partition: TopicPartition, rows: _Rows) -> None:
        if topic_partition not in self._partitions:
            raise SinkError(
                f"topic {topic_partition[0]} has {self._over[topic_partition[0]]} partitions, so a row cannot go to "
                f"partition {topic_partition[1]}"
            )
        self._read_scan_range(topic_partition)
        self._partitions[topic_partition].fed = True
        rows = self._missing(topic_partition, rows)
        if self._buffered is None:
            self._partitions[topic_partition].put(rows)
            return
        # Buffer until all rows in the log are matched, so that other data under the same sink.id is detected before an
        # append. If other tasks wrote rows, any row may be one of theirs.
        if len(rows):
            self._buffered.append((topic_partition, rows))
            self._buffered_bytes += rows.bytes()
        if not (self._left or self._left_foreign) or self._buffered_bytes > self._plan.hold_bytes:
            self._has_unmatched |= self._left > 0
            self._release()

    def _release(self) -> None:
        buffered, self._buffered = self._buffered or [], None
        for topic_partition, rows in buffered:
            self._partitions[topic_partition].put(self._missing(topic_partition, rows))

    def _missing(self, topic_partition: TopicPartition, rows: _Rows) -> _Rows:
        """The rows that the log lacks. The others count as found."""
        if not (self._left or self._left_foreign or self._complete or self._rearranged or self._compacted):
            return rows
        keep = [
            self._is_missing(topic_partition, body, rows, index) for index, body in enumerate(rows.bodies.to_pylist())
        ]
        return rows if all(keep) else rows.kept(keep)

    def _is_missing(self, topic_partition: TopicPartition, body: bytes, rows: _Rows, index: int) -> bool:
        digest = digest_of(body)
        explicit = rows.explicit is not None and bool(rows.explicit[index])
        if self._rearranged and self._framing.key(body) is None:
            raise SinkError(
                f"batch {self._batch} is partly written, and the option arranged changed since: rows "
                "without a key would go to other partitions (restore the option until the batch "
                "is done)"
            )
        by_value = explicit or self._plan.arranged or self._framing.key(body) is not None
        # A complete batch gets no appends, so the origin of a row is irrelevant.
        most = _FOREIGN if by_value or self._complete else _SAME_NUMBER
        if self._claim(topic_partition, digest, most):
            return False
        if (topic_partition[0] in self._mixed and (self._plan.arranged or not explicit)) or (
            self._complete and not by_value
        ):
            for other in self._partitions:
                if other[0] == topic_partition[0] and self._claim(other, digest, most):
                    return False
        if not by_value and not self._complete:
            self._spread = True
            if not self._plan.same_split and self._left_foreign and digest in self._of_others():
                raise self._other_split(topic_partition)
        if topic_partition in self._compacted or (topic_partition[0] in self._mixed and self._compacted):
            raise self._compacted_away(topic_partition)
        if self._complete:
            raise SinkError(
                f"{topic_partition[0]}-{topic_partition[1]}: a row of batch {self._batch} is missing although the "
                "topic has later batches: the checkpoint was restored from before later batches, and the "
                "source now gives other rows; nothing was appended (restore the newest checkpoint, "
                "or write only the missing rows under a new sink.id)"
            )
        return True

    def _claim(self, topic_partition: TopicPartition, digest: bytes, most: int) -> bool:
        partition = self._partitions[topic_partition]
        number = partition.there.take(digest, self._groups, most)
        if number is None:
            return False
        group = self._groups[number]
        group.matched += 1
        if group.origin == _FOREIGN:
            self._left_foreign -= 1
            self._found_foreign += 1
            partition.foreign += digest
        else:
            self._left -= 1
        self._found += 1
        partition.found += 1
        return True

    def _of_others(self) -> set[bytes]:
        if self._others is None:
            self._others = {
                digest
                for partition in self._partitions.values()
                for digest, group, _ in partition.there.left()
                if self._groups[group].origin == _FOREIGN
            }
        return self._others

    # --- appends --------------------------------------------------------------------------------------------------

    def _waiting_bytes(self) -> int:
        return sum(p.queued_bytes + (p.flight.rows.bytes() if p.flight else 0) for p in self._partitions.values())

    def _pump(self, *, flush: bool) -> None:
        """Process responses and send appends."""
        for topic_partition, partition in self._partitions.items():
            if partition.flight is not None and partition.flight.answer.done():
                self._answered(topic_partition, partition)
        for topic in list(self._expanding):
            if not any(p.flight for topic_partition, p in self._partitions.items() if topic_partition[0] == topic):
                self._repartition(topic)
        now = self._clock.now()
        full = self._waiting_bytes() > self._plan.buffer_bytes
        partitions = list(self._partitions)
        first = self._task % len(partitions)  # tasks that end together start at different partitions
        for topic_partition in partitions[first:] + partitions[:first]:
            partition = self._partitions[topic_partition]
            if partition.flight is not None or not partition.queue or partition.not_before > now:
                continue
            enough = (
                partition.queued_bytes >= self._plan.append_bytes_max
                or partition.queued_rows >= self._plan.append_rows_max
            )
            if (enough or flush or full) and topic_partition[0] not in self._expanding:
                self._send(topic_partition, partition)

    def _send(self, topic_partition: TopicPartition, partition: _Partition) -> None:
        if partition.rivals:
            self._patiently(lambda: self._probe(topic_partition, -1))
            if not partition.queue:
                return
        rows = self._cut(partition)
        topic = topic_partition[0]
        task_appends = partition.task_appends
        commit_tag = CommitTag(
            self._plan.sink,
            self._query,
            self._probed.run,
            self._batch,
            self._task,
            self._attempt,
            partition.appends,
            partition.began,
            partition.before,
            self._over[topic],
            self._created_counts[topic],
            self._plan.arranged,
            self._probed.at,
            dict(task_appends) if task_appends is not None and len(task_appends) <= TASK_APPENDS_MAX else None,
            self._has_unmatched,
        )
        partition.appends += 1
        batch = self._framing.build(
            rows.bodies,
            commit_tag=commit_tag.encode(),
            expected=partition.end,
            now_ms=self._clock.time_ms(),
            partition_count=self._over[topic] if topic in self._count_checked else None,
        )
        partition.flight = _Flight(rows, partition.end, self._log.append(*topic_partition, batch))

    def _cut(self, partition: _Partition) -> _Rows:
        pieces: list[_Rows] = []
        bytes_left, rows_left = self._plan.append_bytes_max, self._plan.append_rows_max
        while partition.queue and rows_left > 0:
            piece = partition.queue.popleft()
            count = min(rows_left, _fitting(piece.bodies, bytes_left))
            if count == 0 and pieces:
                partition.queue.appendleft(piece)
                break
            count = max(count, 1)
            if count < len(piece):
                partition.queue.appendleft(piece.sliced(count, len(piece) - count))
                piece = piece.sliced(0, count)
                rows_left = 0
            pieces.append(piece)
            bytes_left -= piece.bytes()
            rows_left -= len(piece)
        rows = pieces[0] if len(pieces) == 1 else _joined(pieces)
        partition.queued_bytes -= rows.bytes()
        partition.queued_rows -= len(rows)
        return rows

    def _answered(self, topic_partition: TopicPartition, partition: _Partition) -> None:
        assert partition.flight is not None
        flight, partition.flight = partition.flight, None
        actual = -1
        try:
            answer = flight.answer.result()
        except Unknown as error:
            self._later(partition, str(error) or "no response to the append")
        else:
            if answer.code == 0:
                self._acknowledged(topic_partition, partition, flight, answer)
                return
            refuse_final(topic_partition, answer)
            if answer.code == INVALID_PARTITIONS:
                self._expanding.add(topic_partition[0])
            if answer.code == _POLICY_VIOLATION:
                actual = answer.base_offset
                self._refused += 1
                partition.rivals = True
                self._later(partition, answer.message or "other clients append to it", contended=True)
            else:
                self._later(partition, f"error {answer.code} {answer.message or ''}")
        # Not appended, appended without a response, or still in flight: compare the log row by row.
        partition.put(flight.rows, front=True)
        self._patiently(lambda: self._probe(topic_partition, actual))

    def _acknowledged(
        self, topic_partition: TopicPartition, partition: _Partition, flight: _Flight, answer: Answer
    ) -> None:
        if answer.base_offset != flight.expected:
            raise SinkError(
                f"{topic_partition[0]}-{topic_partition[1]}: rows expected at offset {flight.expected} were appended "
                f"at {answer.base_offset}: nothing checked the append, so later rows may be in the "
                f"topic twice (switch {CHECK} on, and set kafka.bootstrap.servers to the proxy)"
            )
        partition.end = flight.expected + len(flight.rows)
        partition.tries = 0
        if partition.task_appends is not None:
            partition.task_appends[self._task] = partition.task_appends.get(self._task, 0) + 1
        self._appended += len(flight.rows)
        partition.appended += len(flight.rows)
        if partition.first < 0:
            partition.first = flight.expected
        self._appends += 1
        self._progress_at = self._appended_at = self._clock.now()

    def _probe(self, topic_partition: TopicPartition, actual: int) -> None:
        """Read from the known end to the log end, and remove the rows found there from the queue."""
        partition = self._partitions[topic_partition]
        end = actual
        if end < 0:
            [(_, end)] = self._log.offsets(topic_partition[0], [topic_partition[1]]).values()
        if end < partition.end:
            # A new leader (temporary), or lost data.
            raise CannotReach(f"the log ends at {end}, before acknowledged records up to {partition.end}")
        if end == partition.end:
            partition.rivals = False
            return
        if not self._nothing_new(topic_partition, partition, end):
            for append in list(self._read(topic_partition, partition.end, end)):
                self._absorb(topic_partition, append)
                partition.end = max(partition.end, append.next_offset)
        partition.end = max(partition.end, end)
        self._progress_at = self._clock.now()
        self._dedupe(topic_partition)

    def _nothing_new(self, topic_partition: TopicPartition, partition: _Partition, end: int) -> bool:
        """Whether `task_appends` of the last batch rules out unread appends that count for this task."""
        if partition.task_appends is None or self._plan.arranged:
            return False
        commit_tag = own_commit_tag(self._log.last_batch(*topic_partition, end), self._plan.sink)
        if (
            commit_tag is None
            or commit_tag.run != self._probed.run
            or commit_tag.batch != self._batch
            or commit_tag.task_appends is None
        ):
            return False
        if commit_tag.over != self._over[topic_partition[0]]:
            return False
        counts = dict(commit_tag.task_appends)
        counts[commit_tag.task] = counts.get(commit_tag.task, 0) + 1
        if counts.get(self._task, 0) != partition.task_appends.get(self._task, 0):
            return False
        partition.task_appends = counts
        return True

    def _dedupe(self, topic_partition: TopicPartition) -> None:
        """Remove rows from the queue that were just read."""
        partition = self._partitions[topic_partition]
        for rows in partition.take_all():
            partition.put(self._missing(topic_partition, rows))

    def _repartition(self, topic: str) -> None:
        """Adopt the new partition count. Appends for the old count are in the log or will be refused: read all
        partitions, then partition the remaining rows again."""
        count = self._patiently(lambda: self._log.partition_count(topic))
        if count <= self._over[topic]:
            self._wait()
            return
        if self._plan.arranged:
            raise SinkError(
                f"topic {topic} was expanded from {self._over[topic]} to {count} partitions since "
                "the rows were arranged (start the query again: rows already written are found, "
                "and the others are placed by the new count)"
            )
        self._count_checked.add(topic)
        self._over[topic] = count
        self._mixed.add(topic)
        for partition, (start, _) in self._patiently(lambda: self._log.offsets(topic, range(count))).items():
            self._partitions.setdefault((topic, partition), _Partition(start, start, -1))
        waiting: list[tuple[TopicPartition, _Rows]] = []
        for partition in range(count):
            topic_partition = (topic, partition)
            self._patiently(lambda topic_partition=topic_partition: self._probe(topic_partition, -1))  # type: ignore[misc]
            waiting += [(topic_partition, rows) for rows in self._partitions[topic_partition].take_all()]
        self._expanding.discard(topic)
        for old, rows in waiting:
            for partition, some in _by_partition(rows.bodies, self._replaced(old, rows), rows.explicit):
                topic_partition = (topic, partition)
                self._partitions[topic_partition].put(self._missing(topic_partition, some))

    def _replaced(self, old: TopicPartition, rows: _Rows) -> npt.NDArray[Any]:
        topic, partition = old
        found = []
        for index, body in enumerate(rows.bodies.to_pylist()):
            key = self._framing.key(body)
            if rows.explicit is not None and rows.explicit[index]:
                found.append(partition)
            else:
                found.append(self.default_partition(topic) if key is None else murmur2(key, self._over[topic]))
        return np.array(found, dtype=np.int32)

    # --- patience -------------------------------------------------------------------------------------------------

    def _later(self, partition: _Partition, problem: str, *, contended: bool = False) -> None:
        partition.tries += 1
        self._last_error = problem
        pause, most = (
            (_CONTENTION_SECONDS, _CONTENTION_SECONDS_MAX) if contended else (_PAUSE_SECONDS, _PAUSE_SECONDS_MAX)
        )
        if contended and partition.tries == 1:
            return  # the first refusal reports the log end; a second one shows a competing writer
        pause = min(most, pause * 2 ** min(partition.tries, 10))
        partition.not_before = self._clock.now() + pause * (0.5 + self._clock.random())

    def _patiently(self, probe: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return probe()
            except CannotReach as error:
                self._last_error = str(error)
                tries += 1
                self._give_up_if_late()
                self._clock.wait((), min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2**tries) * (0.5 + self._clock.random()))

    def _wait(self) -> None:
        """Wait until a response or a retry is due."""
        self._give_up_if_late()
        now = self._clock.now()
        flights = [p.flight.answer for p in self._partitions.values() if p.flight]
        due = [p.not_before - now for p in self._partitions.values() if p.queue and not p.flight and p.not_before > now]
        pause = min(due, default=1.0 if flights else _PAUSE_SECONDS)
        self._clock.wait(flights, max(0.001, min(pause, 1.0)))

    def _give_up_if_late(self) -> None:
        # Appends by other writers count as progress, but not indefinitely.
        now, patience = self._clock.now(), self._plan.patience_seconds
        if now - self._progress_at > patience or now - self._appended_at > _CONTENDED * patience:
            raise SinkError(
                f"nothing could be appended for {self._plan.patience_seconds:g} s (option patience.seconds): "
                f"{self._last_error} (fix the cause and start the write again: it continues where it "
                "stopped)"
            )

    # --- refusals -------------------------------------------------------------------------------------------------

    def _refuse_other_query(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> None:
        if commit_tag.query == self._query:
            return
        writer = f"streaming query {commit_tag.query}" if commit_tag.query else "a df.write"
        me = f"streaming query {self._query}" if self._query else "a df.write"
        raise SinkError(
            f"{topic_partition[0]}-{topic_partition[1]} has rows of sink.id {self._plan.sink!r} by {writer}, and this "
            f"is {me}: the checkpoint was deleted or replaced, or two queries share the sink.id "
            "(restore its checkpoint, or use a new sink.id to append these rows after the existing "
            "ones)"
        )

    def _other_batch(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> SinkError:
        at = f"{topic_partition[0]}-{topic_partition[1]}"
        if commit_tag.batch > self._batch:
            return SinkError(
                f"{at}: batch {commit_tag.batch} of sink {self._plan.sink!r} appeared while batch {self._batch} "
                "was being written: another driver is ahead on the same checkpoint (stop all but "
                "one)"
            )
        return SinkError(
            f"{at}: rows of batch {commit_tag.batch} of sink {self._plan.sink!r} follow the beginning "
            f"of batch {self._batch}: two queries write under one sink.id (give each its own)"
        )

    def _not_arranged(self, topic_partition: TopicPartition, task: int) -> SinkError:
        return SinkError(
            f"{topic_partition[0]}-{topic_partition[1]} is written by tasks {task} and {self._task} of one write, "
            "although arranged=true: all rows of a partition must be in one task (use fencepost.spark.arrange "
            "as the last step before the write)"
        )

    def _other_split(self, topic_partition: TopicPartition) -> SinkError:
        return SinkError(
            f"batch {self._batch} is partly written, and its rows without key and partition are "
            "split into tasks differently than before: another task wrote a row for "
            f"{topic_partition[0]}-{topic_partition[1]} "
            "(restore spark.sql.shuffle.partitions, the file split or the number of cores until "
            "this batch is done, then give rows a key or a partition, or use fencepost.spark.arrange "
            "with arranged=true; if only equal rows are in several tasks, set same.split=true; "
            f"{self._last_way_out()})"
        )

    def _other_rows(self, topic_partition: TopicPartition, count: int) -> SinkError:
        buffered = "; this task appended nothing" if self._buffered is not None else ""
        what = f"batch {self._batch}" if self._query else "this write"
        same = "" if self._spread else "if the same rows are in other tasks, set unmatched.rows=compare; "
        way = (
            f"go back to the query and source that began the batch; {same}{self._last_way_out()}"
            if self._query
            else f"for another load use another sink.id; {same}see fencepost.spark.arrange"
        )
        return SinkError(
            f"{topic_partition[0]}-{topic_partition[1]} has {count} rows of {what} of sink {self._plan.sink!r} (task "
            f"{self._task}) that the data does not have now: the data changed, or its rows are "
            f"in other tasks{buffered} ({way})"
        )

    def _last_way_out(self) -> str:
        if not self._query:
            return "as a last resort, another sink.id appends all rows again"
        return "as a last resort, a new sink.id with the same checkpoint appends this batch again"

    def _refuse_deleted(self, topic_partition: TopicPartition, begin: int, start: int) -> None:
        if begin < start:
            raise self._deleted(topic_partition, start, f"rows of batch {self._batch} may have been there")

    def _deleted(self, topic_partition: TopicPartition, start: int, why: str) -> SinkError:
        if self._complete:
            way = "the checkpoint was restored from before later batches: restore the newest one"
        elif self._query:
            way = (
                "if nothing of the batch was deleted, or if it may be written again, set first.run=true "
                "for one run: existing rows are found and the rest is appended"
            )
        else:
            way = "a finished load needs nothing; to write all rows again, use another sink.id"
        return SinkError(
            f"{topic_partition[0]}-{topic_partition[1]} has lost its records below offset {start}, and {why}: cannot "
            f"determine which rows of batch {self._batch} were written ({way})"
        )

    def _compacted_away(self, topic_partition: TopicPartition) -> SinkError:
        what = f"batch {self._batch}" if self._query else "this write"
        return SinkError(
            f"{topic_partition[0]}-{topic_partition[1]} was compacted since {what} of sink {self._plan.sink!r} began, "
            "and a row is missing: if compaction removed it, appending it again would undo newer "
            f"values of its key (retry within min.compaction.lag.ms next time; "
            f"{'' if self._query else 'a finished load needs nothing; '}{self._last_way_out()})"
        )


def refuse_final(topic_partition: TopicPartition, answer: Answer) -> None:
    """Raises SinkError for a permanent error."""
    stated = answer.message or ""
    at = f"{topic_partition[0]}-{topic_partition[1]}"
    if answer.code == _POLICY_VIOLATION:
        if "OFFSET_VIOLATION" in stated:
            raise SinkError(
                f"{at}: {stated}: another client bypasses the proxy, or the check was switched "
                "off meanwhile, so later rows may be in the topic twice"
            )
        if stated and "OFFSET_MISMATCH" not in stated and "PREDECESSOR_FAILED" not in stated:
            raise SinkError(f"{at}: {stated}")
    elif answer.code not in _RETRIABLE and answer.code != INVALID_PARTITIONS:
        raise SinkError(f"{at}: Kafka error {answer.code}: {_MEANINGS.get(answer.code, 'refused')} {stated}".rstrip())


def own_commit_tag(logged: Any, sink: str) -> CommitTag | None:
    """The commit tag of a batch of this sink; None for other batches."""
    if logged is None or logged.commit_tag is None:
        return None
    commit_tag = CommitTag.decode(logged.commit_tag)
    return commit_tag if commit_tag.sink == sink else None


def digest_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _offsets(bodies: pa.Array) -> npt.NDArray[Any]:
    found = np.frombuffer(bodies.buffers()[1], dtype=np.int64, count=bodies.offset + len(bodies) + 1)
    return found[bodies.offset :]


def _size(bodies: pa.Array) -> int:
    if not len(bodies):
        return 0
    offsets = _offsets(bodies)
    return int(offsets[-1] - offsets[0]) + _ROW_BYTES * len(bodies)


def _fitting(bodies: pa.Array, limit: int) -> int:
    """How many rows fit into `limit` bytes."""
    ends = _offsets(bodies) + _ROW_BYTES * np.arange(len(bodies) + 1)
    return int(np.searchsorted(ends, ends[0] + limit, side="right")) - 1


def _joined(pieces: list[_Rows]) -> _Rows:
    bodies = pa.concat_arrays([piece.bodies for piece in pieces])
    if all(piece.explicit is None for piece in pieces):
        return _Rows(bodies, None)
    parts = [np.zeros(len(piece), dtype=bool) if piece.explicit is None else piece.explicit for piece in pieces]
    return _Rows(bodies, np.concatenate(parts))


def _by_partition(
    bodies: pa.Array, partitions: npt.NDArray[Any], explicit: npt.ArrayLike | None
) -> Iterator[tuple[int, _Rows]]:
    """Rows of each partition, in order."""
    marked = None if explicit is None else np.asarray(explicit, dtype=bool)
    for partition, chosen, which in split(bodies, partitions):
        yield partition, _Rows(chosen, None if marked is None else marked[which])
