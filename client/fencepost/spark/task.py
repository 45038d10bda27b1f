"""One attempt of one task of a write. Appends each of its rows to the log once, even with concurrent attempts.

Attempts may run concurrently: a speculative copy, an attempt that Spark considers dead, or one of a killed driver. None
of them can be relied on to stop. Safety follows from three rules:

    1. A batch is appended only at the log end that its sender expects (the proxy's check). The sender knows every
       relevant append of this batch below that offset: those of its task in its run, and those of all tasks of other
       runs. It read them, appended them, or the driver's snapshot or a commit tag proves that there were none.
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
    done     a load that is finished (`closing.py`): nothing is read or appended

Nothing in this file does I/O: `Log` and `Clock` do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.records import COUNT_CHECK_CONFIG
from fencepost.spark.appender import Appender
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import TopicPartition
from fencepost.spark.refusals import Refusals
from fencepost.spark.resumer import Resumer, ScanRange, UnmatchedRows
from fencepost.spark.rows import SAME_NUMBER, Pool, Rows, by_partition, joined
from fencepost.spark.totals import total_of
from fencepost.spark.write import Deferred, Met, ObservedPartition, Outcome, PartitionWrite, Patience, Write, Written


class Task:
    """Call `begin`, `feed` for all rows, then `finish`. Unusable after a SinkError."""

    def __init__(self, write: Write, scan_ranges: dict[tuple[str, int, int, int], ScanRange] | None = None) -> None:
        self._write = write
        self._patience = Patience(write)
        self._refusals = Refusals(write)
        self._resumer = Resumer(write, self._refusals, self._patience, {} if scan_ranges is None else scan_ranges)
        self._unmatched = UnmatchedRows(write, self._resumer, self._refusals, self._patience)
        self._appender = Appender(write, self._resumer, self._refusals, self._patience)

    def begin(self) -> None:
        """Check the driver's snapshot, and read the rows of this batch in the log."""
        if not _may_have_rows(self._write, self._refusals):
            return
        for topic_partition in self._write.partitions:
            if not self._write.plan.arranged or self._write.complete or topic_partition[0] in self._write.mixed:
                self._resumer.read_scan_range(topic_partition)

    def feed(
        self, topic: str, bodies: pa.Array, partitions: npt.ArrayLike, explicit: npt.ArrayLike | None = None
    ) -> None:
        """Take rows, in order, with the partition of each out of `Write.over[topic]`."""
        write, placed = self._write, np.asarray(partitions)
        write.rows += len(bodies)
        if not write.query:
            named = None if explicit is None or write.plan.arranged else np.asarray(explicit, dtype=bool)
            write.total = write.total.plus(total_of(topic, bodies, placed, named))
        self._patience.appended()  # computing the rows may take long
        for partition, rows in by_partition(bodies, placed, explicit):
            self._take((topic, partition), rows)
        self._appender.pump(flush=False)
        while self._appender.is_busy() and self._appender.pending():
            self._patience.wait()
            self._appender.pump(flush=False)

    def finish(self) -> Outcome:
        """Append the rest. On return, each row is in the log once, except a deferred one."""
        self._patience.appended()
        if self._write.buffered is not None:
            self._write.buffered = [
                (topic_partition, self._resumer.missing(topic_partition, rows))
                for topic_partition, rows in self._write.buffered
            ]
            self._resumer.read_rest()
            self._unmatched.check(early=True)
            self._release()
        while self._appender.pending():
            self._appender.pump(flush=True)
            if self._appender.pending():
                self._patience.wait()
        self._unmatched.check(early=False)
        deferred = self._deferred()
        return Outcome(
            self._write.task,
            self._write.rows,
            self._appender.appended,
            self._resumer.found,
            self._appender.appends,
            self._appender.refused,
            {
                topic_partition: Written(partition.found, partition.appended, partition.first, partition.end)
                for topic_partition, partition in self._write.partitions.items()
                if partition.found or partition.appended or partition.queue
            },
            self._met(),
            self._begun() if self._write.plan.arranged and not self._write.was_done else frozenset(),
            self._write.total,
            self._write.done,
            self._write.was_done,
            deferred,
        )

    def _take(self, topic_partition: TopicPartition, rows: Rows) -> None:
        if topic_partition not in self._write.partitions:
            topic, number = topic_partition
            raise SinkError(
                f"topic {topic} has {self._write.over[topic]} partitions, so a row cannot go to partition {number}"
            )
        if self._write.was_done:
            self._write.partitions[topic_partition].found += len(rows)
            self._resumer.found += len(rows)
            return
        self._resumer.read_scan_range(topic_partition)
        self._write.partitions[topic_partition].fed = True
        rows = self._resumer.missing(topic_partition, rows)
        if self._write.buffered is None:
            self._put(topic_partition, rows)
            return
        # Buffer until all rows in the log are matched, so that other data under the same sink.id is detected before an
        # append. If other tasks wrote rows, any row may be one of theirs.
        if len(rows):
            self._write.buffered.append((topic_partition, rows))
            self._write.buffered_bytes += rows.bytes()
        if not self._resumer.may_match() or self._write.buffered_bytes > self._write.plan.hold_bytes:
            self._resumer.read_rest()
            self._write.has_unmatched |= self._resumer.left > 0
            self._release()

    def _release(self) -> None:
        buffered, self._write.buffered = self._write.buffered or [], None
        for topic_partition, rows in buffered:
            self._put(topic_partition, self._resumer.missing(topic_partition, rows))

    def _put(self, topic_partition: TopicPartition, rows: Rows) -> None:
        write = self._write
        write.partitions[topic_partition].put(rows)
        if len(rows) and not write.query and _defers(write.task) and not write.mixed:
            self._appender.deferred = topic_partition

    def _deferred(self) -> Deferred | None:
        write, at = self._write, self._appender.deferred
        if at is None or not write.partitions[at].queue:
            return None
        partition = write.partitions[at]
        known = replace(partition, queue=deque(), queued_bytes=0, queued_rows=0, there=Pool(), foreign=bytearray())
        return Deferred(
            at,
            joined(list(partition.queue)),
            known,
            write.probed.observations[at].end,
            replace(write.probed, observations={}),
            write.task,
            write.attempt,
            write.over,
            write.created_counts,
            write.has_unmatched,
        )

    def _begun(self) -> frozenset[TopicPartition]:
        observations = self._write.probed.observations.items()
        last = {at: observation.last.batch for at, observation in observations if observation.last is not None}
        return frozenset(
            topic_partition
            for topic_partition, partition in self._write.partitions.items()
            if partition.begun or last.get(topic_partition) == self._write.batch
        )

    def _met(self) -> Met | None:
        write, groups, partitions = self._write, self._resumer.groups, {}
        for topic_partition, partition in write.partitions.items():
            if partition.numbers:
                left = [digest for digest, group in partition.there.left() if groups[group].origin == SAME_NUMBER]
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
        return Met(
            write.query,
            write.probed.run,
            write.batch,
            write.complete,
            frozenset(write.over if write.complete else write.mixed),
            dict(write.over),
            frozenset(write.count_checked),
            partitions,
        )


def _defers(task: int) -> bool:
    """Whether this task of a load leaves its last row to the driver: few tasks, in all parts of their order, since
    tasks without rows have nothing to leave."""
    return task & (task - 1) == 0


def _may_have_rows(write: Write, refusals: Refusals) -> bool:
    """Decide from the driver's snapshot: fresh, partly written or complete. Returns whether the log may have rows of
    this batch."""
    observations = write.probed.observations
    last = {at: observation.last for at, observation in observations.items() if observation.last is not None}
    for topic_partition, known in last.items():
        refusals.refuse_other_query(topic_partition, known)
    if write.probed.done is not None:
        write.done, write.was_done = write.probed.done, True
        write.partitions = {at: PartitionWrite(each.end, each.end, -1) for at, each in observations.items()}
        return False
    latest = max((commit_tag.batch for commit_tag in last.values()), default=-1)
    if not write.plan.first_run:
        # Other deleted records are no loss: rows of earlier batches, or of other writers.
        for topic_partition, observation in observations.items():
            if observation.unread:
                raise refusals.deleted(
                    topic_partition, observation.start, f"nothing of sink {write.plan.sink!r} is left there"
                )
    write.complete = latest > write.batch
    if latest == write.batch:
        _choose_counts(write, refusals, last)
    for topic_partition, observation in observations.items():
        commit_tag, end = observation.last, observation.end
        if commit_tag is None or commit_tag.batch < write.batch or write.complete:
            partition = PartitionWrite(end, end, -1 if commit_tag is None else commit_tag.began)
        else:
            partition = PartitionWrite(end, commit_tag.began, commit_tag.before)
        partition.read = latest < write.batch
        write.partitions[topic_partition] = partition
    return latest >= write.batch


def _choose_counts(write: Write, refusals: Refusals, last: dict[TopicPartition, CommitTag]) -> None:
    """Choose the partition counts of a batch that began earlier, perhaps before an expansion."""
    for topic, count in write.probed.counts.items():
        commit_tags = [m for (t, _), m in last.items() if t == topic and m.batch == write.batch]
        overs = {over for commit_tag in commit_tags for over in (commit_tag.over, commit_tag.created_partitions)}
        overs -= {count}
        write.created_counts[topic] = min([count, *overs])
        if overs and topic in write.count_checked:
            write.mixed.add(topic)
        elif overs and not write.plan.arranged:
            # Tasks with the old count may still append unchecked, so the batch keeps the old count.
            write.over[topic] = refusals.only_count(topic, overs)
        elif overs:
            raise SinkError(
                f"topic {topic} was expanded from {min(overs)} to {count} partitions after batch "
                f"{write.batch} began (finish the batch with arrange(…, partitions={min(overs)}); "
                f"set {COUNT_CHECK_CONFIG}=true before the next expansion to avoid this)"
            )
    limit = min((m.at for m in last.values() if m.batch == write.batch), default=0)
    for (topic, partition), observation in write.probed.observations.items():
        kept = write.probed.retention_ms.get(topic, -1)
        deleted = observation.last is None and observation.start > 0 and 0 < kept < 2 * (write.probed.at - limit)
        if deleted and not write.plan.first_run:
            raise refusals.deleted((topic, partition), observation.start, f"batch {write.batch} began long before")
