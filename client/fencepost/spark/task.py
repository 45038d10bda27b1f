"""One attempt of one task of a write. Appends each of its rows to the log once, even with concurrent attempts.

Attempts may run concurrently: a speculative copy, an attempt that Spark considers dead, or one of a killed driver. None
of them can be relied on to stop. Safety follows from three rules:

    1. All copies of a row are in one task of a run: rows are arranged by their partition (`arranging.py`).
    2. A batch is appended only at the log end that its sender expects (the proxy's check). The sender knows all rows of
       this batch in the partition below that offset: it read them, appended them, or a commit tag counts them.
    3. The sender appends a copy of a row only while it has more copies than the log.

Therefore only one append is in flight per partition. Two could break rule 2: (1) the sender pipelines appends of n and
m records; (2) another sender appends n records at the first one's offset; (3) the second append is accepted after rows
that its sender does not know. Other partitions' appends and the encoding of the next rows run in parallel.

The snapshot and the log determine the case:

    fresh    the log had nothing of this batch at the driver's snapshot
    resume   the log had some of it: skip these rows (`resumer.py`), and append the others
    complete the log has a later batch: no row of this batch may be missing, and nothing is appended

Nothing in this file does I/O: `Log` and `Clock` do.
"""

from __future__ import annotations

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
from fencepost.spark.resumer import Resumer
from fencepost.spark.rows import by_partition, partitions_under
from fencepost.spark.write import Deferred, Outcome, PartitionWrite, Patience, Write, Written

ARRANGE = (
    "all rows of a Kafka partition must be in one task (write them with fencepost.spark.append(df, …), and a stream "
    "with fencepost.spark.stream(df, …))"
)


class Task:
    """Call `begin`, `feed` for all rows, then `finish`. Unusable after a SinkError."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._patience = Patience(write)
        self._refusals = Refusals(write)
        self._resumer = Resumer(write, self._refusals, self._patience)
        self._appender = Appender(write, self._resumer, self._refusals, self._patience)

    def begin(self) -> None:
        """Decide from the driver's snapshot."""
        _decide(self._write, self._refusals)
        if self._write.is_complete:
            for topic_partition in self._write.partitions:  # each may say how the batch was placed
                self._resumer.open(topic_partition)
            for topic, counts in self._resumer.counts.items():
                self._write.counts[topic] = tuple(sorted(counts))

    def feed(self, topic: str, bodies: pa.Array, placements: npt.NDArray[np.int64], arranged: int) -> None:
        """Take rows, in order. `placements`: a hash, or -1 - the partition that the row names; `arranged`: the
        partition count by which the rows were arranged."""
        write = self._write
        write.rows += len(bodies)
        write.arranged[topic] = arranged
        if (np.where(placements < 0, -1 - placements, placements) % arranged != write.task).any():
            raise SinkError(f"task {write.task} has rows of other tasks: {ARRANGE}")
        self._patience.appended()  # computing the rows may take long
        if len(write.counts[topic]) > 1:
            lacking = self._resumer.searched(topic, bodies, placements)
            bodies, placements = bodies.filter(pa.array(lacking)), placements[lacking]
        for partition, rows, _ in by_partition(bodies, partitions_under(placements, write.counts[topic][-1])):
            self._take((topic, partition), rows)
        if write.only_compares:
            return
        self._appender.pump(flush=False)
        while self._appender.is_busy() and self._appender.pending():
            self._patience.wait()
            self._appender.pump(flush=False)

    def finish(self) -> Outcome:
        """Append the rest. On return, each row is in the log once, except a deferred one."""
        self._patience.appended()
        self._resumer.check_all_found()
        self._appender.ends = True
        if self._write.only_compares:
            return self._outcome()
        if self._write.is_load and _defers(self._write.task):
            self._appender.defer()
        while self._appender.pending():
            self._appender.pump(flush=True)
            if self._appender.pending():
                self._patience.wait()
        self._resumer.check_all_found()
        return self._outcome()

    def _outcome(self) -> Outcome:
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
            frozenset(at for at, partition in self._write.partitions.items() if partition.has_batch),
            self._deferred(),
            self._patience.waited,
        )

    def _take(self, topic_partition: TopicPartition, rows: pa.Array) -> None:
        if topic_partition not in self._write.partitions:
            topic, number = topic_partition
            raise SinkError(
                f"topic {topic} has {self._write.counts[topic][-1]} partitions, so a row cannot go to partition "
                f"{number}"
            )
        partition = self._resumer.open(topic_partition)
        missing = self._resumer.missing(topic_partition, rows)
        if self._write.only_compares:  # one is enough to know that there are some
            missing = missing.slice(0, 0 if partition.queue else 1)
        partition.put(missing)

    def _deferred(self) -> Deferred | None:
        write, at = self._write, self._appender.deferred
        if at is None or not write.partitions[at].queue:
            return None
        partition = write.partitions[at]
        return Deferred(
            at,
            pa.concat_arrays(list(partition.queue)),
            replace(partition, queue=type(partition.queue)(), queued_bytes=0, queued_rows=0),
            replace(write.probed, observations={}),
            dict(write.counts),
        )


def _defers(task: int) -> bool:
    """Whether this task of a load leaves its last row to the driver: few tasks, in all parts of their order, since
    tasks without rows have nothing to leave."""
    return task & (task - 1) == 0


def _decide(write: Write, refusals: Refusals) -> None:
    """Decide from the driver's snapshot: fresh, partly written or complete."""
    observations, batch = write.probed.observations, write.batch
    last = {at: observation.last for at, observation in observations.items() if observation.last is not None}
    for topic_partition, commit_tag in last.items():
        refusals.refuse_other_query(topic_partition, commit_tag)
        refusals.refuse_old(topic_partition, commit_tag)
    write.is_complete = any(commit_tag.batch > batch for commit_tag in last.values())
    for topic_partition, observation in observations.items():
        at, end = observation.last, observation.end
        if at is not None and at.batch == batch:
            partition = PartitionWrite(end, at.began, at.before, at, has_batch=True)
            partition.is_compacted = observation.compacted
        else:
            partition = PartitionWrite(end, end, -1 if at is None else at.began, at)
        write.partitions[topic_partition] = partition
        if observation.unread:
            raise refusals.deleted(topic_partition, f"nothing of sink {write.plan.sink!r} is left there")
    began = {at: commit_tag for at, commit_tag in last.items() if commit_tag.batch == batch}
    for topic, count in write.probed.counts.items():
        write.counts[topic] = _counts(
            write, topic, count, [commit_tag for (of, _), commit_tag in began.items() if of == topic]
        )
    if began and not write.is_complete:
        _refuse_deleted(write, refusals, min(commit_tag.at for commit_tag in began.values()))


def _counts(write: Write, topic: str, count: int, tags: list[CommitTag]) -> tuple[int, ...]:
    """The partition counts of a batch, of which some rows may have been written before an expansion."""
    known = {each for commit_tag in tags for each in commit_tag.counts}
    if topic in write.probed.count_checked:
        return tuple(sorted(known | {count}))
    # Tasks with the old count may still append unchecked, so the batch keeps the old count.
    if len(known) > 1:
        raise SinkError(
            f"topic {topic} was expanded during batch {write.batch}, and its partition count is not checked any more "
            f"(set {COUNT_CHECK_CONFIG}=true until the batch is written)"
        )
    return tuple(known) or (count,)


def _refuse_deleted(write: Write, refusals: Refusals, began_at: int) -> None:
    """Refuse a batch that began so long ago that retention may have deleted all its rows in one of the partitions."""
    for topic_partition, observation in write.probed.observations.items():
        kept_ms = write.probed.retention_ms.get(topic_partition[0], -1)
        if observation.last is None and observation.start > 0 and 0 < kept_ms < 2 * (write.probed.at - began_at):
            raise refusals.deleted(topic_partition, f"batch {write.batch} began long before")
