"""Rows of a batch that are in the log already: which of the task's rows the log has.

numbered  The rows are a sequence. The last commit tag says how many of its first rows the log has, and their
          digest: they are skipped and compared, without reading them.
pooled    The rows may have another order now, or other partitions. Their digests are read from the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark.commit_tags import CommitTag, own_commit_tag
from fencepost.spark.interfaces import TopicPartition
from fencepost.spark.refusals import Refusals
from fencepost.spark.rows import by_partition, digest_of, extended, partitions_under
from fencepost.spark.write import PartitionWrite, Patience, Write


class Resumer:
    """`found`: rows of this task that the log had; `counts`: by topic, those by which a complete batch was placed."""

    def __init__(self, write: Write, refusals: Refusals, patience: Patience) -> None:
        self._write = write
        self._refusals = refusals
        self._patience = patience
        self.found = 0
        self.counts: dict[str, set[int]] = {}

    def open(self, topic_partition: TopicPartition) -> PartitionWrite:
        """The partition, with the rows of this batch that are below the driver's snapshot."""
        write, partition = self._write, self._write.partitions[topic_partition]
        if partition.is_open:
            return partition
        partition.is_open = True
        commit_tag = partition.commit_tag
        partition.is_numbered = (
            write.is_sorted
            and write.owns(topic_partition)
            and not write.is_complete
            and not (partition.has_batch and commit_tag is not None and commit_tag.prefix is None)
        )
        if partition.is_numbered and partition.has_batch and commit_tag is not None:
            self._follow(topic_partition, commit_tag)
        elif commit_tag is not None and (partition.has_batch or write.is_complete):
            begin, end = partition.began, partition.end
            if write.is_complete:
                begin, end = self._walk_back(topic_partition, commit_tag, end)
            self._patience.patiently(lambda: self._read_pool(topic_partition, begin, end))
        return partition

    def searched(self, topic: str, bodies: pa.Array, placements: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows the log lacks in the partitions that they had under earlier partition counts of the batch."""
        lacking = np.ones(len(bodies), bool)
        for count in self._write.counts[topic][:-1]:
            rest = np.flatnonzero(lacking)
            placed = partitions_under(placements[rest], count)
            for number, rows, which in by_partition(bodies.take(pa.array(rest)), placed):
                partition = self.open((topic, number))
                found = partition.pool.take(rows)
                lacking[rest[which[found]]] = False
                partition.found += int(found.sum())
                self.found += int(found.sum())
        return lacking

    def missing(self, topic_partition: TopicPartition, rows: pa.Array) -> pa.Array:
        """The rows that the log lacks. The others count as found."""
        partition = self._write.partitions[topic_partition]
        rest = (
            self._unnumbered(topic_partition, partition, rows) if partition.is_numbered else _unpooled(partition, rows)
        )
        partition.found += len(rows) - len(rest)
        self.found += len(rows) - len(rest)
        if len(rest):
            self._refusals.refuse_missing(topic_partition, partition)
        return rest

    def _unnumbered(self, topic_partition: TopicPartition, partition: PartitionWrite, rows: pa.Array) -> pa.Array:
        count = min(len(rows), partition.logged.rows - partition.prefix.rows)
        if count > 0:
            partition.prefix = extended(partition.prefix, rows.slice(0, count))
            self._compare(topic_partition, partition)
            rows = rows.slice(count)
        if len(rows) and partition.is_last:
            raise self._refusals.other_rows(topic_partition, "more rows")
        return rows

    def _compare(self, topic_partition: TopicPartition, partition: PartitionWrite) -> None:
        if partition.prefix.rows == partition.logged.rows and partition.prefix != partition.logged:
            raise self._refusals.other_rows(topic_partition, "other rows, or in another order")

    def _follow(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> None:
        """Take account of the last commit tag of a partition with numbered rows."""
        partition = self._write.partitions[topic_partition]
        if commit_tag.prefix is None:
            raise self._refusals.not_numbered(topic_partition)
        partition.logged, partition.is_last = commit_tag.prefix, commit_tag.last
        if commit_tag.prefix.rows < partition.prefix.rows:
            raise self._refusals.other_rows(topic_partition, "other rows, or in another order")
        self._compare(topic_partition, partition)

    def catch_up(self, topic_partition: TopicPartition, end: int) -> None:
        """Take account of what was appended from the known end to `end`, and remove these rows from the queue."""
        partition, log = self._write.partitions[topic_partition], self._write.log
        if partition.is_numbered:
            commit_tag = own_commit_tag(log.last_batch(*topic_partition, end), self._write.plan.sink)
            if commit_tag is None:
                for each, _ in self._appends(topic_partition, partition.end, end):
                    commit_tag = each
            if commit_tag is not None:
                self._refusals.refuse_other_batch(topic_partition, commit_tag)
                self._follow(topic_partition, commit_tag)
        else:
            for commit_tag, logged in self._appends(topic_partition, partition.end, end):
                self._refusals.refuse_other_batch(topic_partition, commit_tag)
                partition.pool.add(b"".join(map(digest_of, logged.bodies)))
                partition.end = max(partition.end, logged.next_offset)
        partition.end = max(partition.end, end)
        for rows in partition.take_all():
            partition.put(self.missing(topic_partition, rows))

    def check_all_found(self) -> None:
        """Refuse if the log has rows that this task lacks."""
        for topic_partition, partition in self._write.partitions.items():
            if partition.is_numbered:
                rows = (
                    partition.prefix.rows
                    + partition.queued_rows
                    + (len(partition.flight.rows) if partition.flight else 0)
                )
                # Each task keeps its last row until it has no more, and flags it.
                if rows < partition.logged.rows or (rows == partition.logged.rows > 0 and not partition.is_last):
                    raise self._refusals.other_rows(topic_partition, "fewer rows")
            elif len(partition.pool) and self._write.owns(topic_partition):
                raise self._refusals.other_rows(topic_partition, "other rows")

    def _appends(self, topic_partition: TopicPartition, begin: int, end: int) -> Iterator[tuple[CommitTag, Any]]:
        """The appends of this sink, with their commit tags."""
        for logged in self._write.log.read(*topic_partition, begin, end) if begin < end else ():
            commit_tag = own_commit_tag(logged, self._write.plan.sink)
            if commit_tag is not None and begin < logged.next_offset and logged.base_offset < end:
                yield commit_tag, logged

    def _read_pool(self, topic_partition: TopicPartition, begin: int, end: int) -> None:
        partition = self._write.partitions[topic_partition]
        self._refusals.refuse_deleted(topic_partition, begin)
        digests, at, is_whole = bytearray(), begin, True
        for logged in self._write.log.read(*topic_partition, begin, end) if begin < end else ():
            is_whole &= logged.is_whole and logged.base_offset <= at
            at = logged.next_offset
            commit_tag = own_commit_tag(logged, self._write.plan.sink)
            if commit_tag is None or at <= begin or logged.base_offset >= end:
                continue
            if commit_tag.batch == self._write.batch:
                digests += b"".join(map(digest_of, logged.bodies))
            elif not self._write.is_complete:
                self._refusals.refuse_other_batch(topic_partition, commit_tag)
        partition.is_compacted |= not is_whole or at < end
        partition.pool.add(bytes(digests))

    def _walk_back(self, topic_partition: TopicPartition, commit_tag: CommitTag, end: int) -> tuple[int, int]:
        """[begin, end) of this batch in a partition with later batches; empty if it has no row of this batch."""
        while commit_tag.batch > self._write.batch:
            if commit_tag.before < 0:
                return end, end
            begin, end = commit_tag.before, commit_tag.began
            self._refusals.refuse_deleted(topic_partition, begin)
            earlier = self._patience.patiently(lambda: self._last_commit_tag(topic_partition, begin, end))  # noqa: B023
            if earlier is None:
                raise self._refusals.deleted(topic_partition, "commit tags of earlier batches are missing")
            commit_tag = earlier
        if commit_tag.batch < self._write.batch:
            return end, end
        self._refusals.refuse_old(topic_partition, commit_tag)
        self.counts.setdefault(topic_partition[0], set()).update(commit_tag.counts)
        self._write.partitions[topic_partition].has_batch = True
        return commit_tag.began, end

    def _last_commit_tag(self, topic_partition: TopicPartition, begin: int, end: int) -> CommitTag | None:
        commit_tag = None
        for commit_tag, _ in self._appends(topic_partition, begin, end):  # noqa: B007 - the last one is sought
            pass
        return commit_tag


def _unpooled(partition: PartitionWrite, rows: pa.Array) -> pa.Array:
    return rows.filter(pa.array(~partition.pool.take(rows))) if len(partition.pool) else rows
