"""Rows in the log under a task's number that the task lacks: changed data, or rows of another task now."""

from __future__ import annotations

from collections import Counter

from fencepost.spark.commit_tags import CommitTag, own_commit_tag
from fencepost.spark.interfaces import TopicPartition
from fencepost.spark.outcome import AUTO, COMPARE, KEEP, REFUSE
from fencepost.spark.patience import Patience
from fencepost.spark.pool import SAME_NUMBER, THIS_RUN
from fencepost.spark.refusals import Refusals
from fencepost.spark.resumer import Resumer
from fencepost.spark.write import PartitionWrite, Write

#: How many earlier batches are read to learn the task numbers.
_BATCHES_BACK = 8


class UnmatchedRows:
    """Decides whether a task with unmatched rows may continue."""

    def __init__(self, write: Write, resumer: Resumer, refusals: Refusals, patience: Patience) -> None:
        self._write = write
        self._resumer = resumer
        self._refusals = refusals
        self._patience = patience

    def check(self, *, early: bool) -> None:
        """Decide about rows in the log under this task's number that the task lacks. `early`: this attempt appended
        nothing.

        Either another task has them now, or the data changed; the driver knows when all tasks have ended. Refusing here
        keeps rows of changed data out of the log."""
        if not self._resumer.left or (self._write.plan.arranged and self._write.mixed):
            return  # with `_mixed`, rows of other tasks were read too
        for topic_partition, partition in self._write.partitions.items():
            ours = partition.there.count(self._resumer.groups, THIS_RUN)
            if ours and (partition.fed or not self._write.plan.arranged):
                raise self._refusals.other_rows(topic_partition, ours)
        if not self._write.plan.arranged and not self._write.complete:
            if self._refuses(early=early):
                for topic_partition, partition in self._write.partitions.items():
                    if left := partition.there.count(self._resumer.groups, SAME_NUMBER):
                        raise self._refusals.other_rows(topic_partition, left)
            self._write.has_unmatched = True

    def _refuses(self, *, early: bool) -> bool:
        stated = self._write.plan.unmatched
        if stated == AUTO and not self._write.query:
            stated = REFUSE
        if stated in (REFUSE, KEEP):
            return stated == REFUSE
        if self._write.spread:
            return True  # no task searches other partitions for them
        if stated == COMPARE or not early:
            return False
        if self._resumer.found == self._write.rows or self._resumer.found_foreign:
            return False  # nothing to append, or the batch is split differently
        groups = [group for group in self._resumer.groups if group.origin == SAME_NUMBER]
        if any(group.size > group.matched > group.size / 2 for group in groups):
            return True  # most of the group matches, and the rest is other data
        if self._resumer.found:
            return False
        # No match: when the batch began, this task may have had another number and written nothing.
        return any(group.has_unmatched for group in groups) or (self._all_have_written() and self._keys_are_the_same())

    def _all_have_written(self) -> bool:
        """A run has appends of every task number of the earlier batches, so one of them is this task's."""
        before: set[int] = set()
        for topic_partition, partition in self._write.partitions.items():
            began = partition.began
            for _ in range(_BATCHES_BACK):
                commit_tag = self._commit_tag_at(topic_partition, began)
                if commit_tag is None or commit_tag.batch >= self._write.batch or commit_tag.arranged:
                    break
                if commit_tag.task_appends is None:
                    return False  # unknown
                before |= {commit_tag.task, *commit_tag.task_appends}
                began = commit_tag.began
        runs: dict[str, set[int]] = {}
        for group in self._resumer.groups:
            runs.setdefault(group.run, set()).add(group.task)
        return bool(before) and any(numbers >= before for numbers in runs.values())

    def _commit_tag_at(self, topic_partition: TopicPartition, end: int) -> CommitTag | None:
        return own_commit_tag(
            self._patience.patiently(lambda: self._write.log.last_batch(*topic_partition, end)), self._write.plan.sink
        )

    def _keys_are_the_same(self) -> bool:
        """The task has at least as many rows of each key as the log under its number. A changed query mostly changes
        values; another source partition has other keys."""
        keys = Counter(
            self._write.framing.key(body) for _, rows in self._write.buffered or () for body in rows.bodies.to_pylist()
        )
        for topic_partition, partition in self._write.partitions.items():
            keys.subtract(self._patience.patiently(lambda at=topic_partition, part=partition: self._keys_at(at, part)))  # type: ignore[misc]
        return min(keys.values(), default=0) >= 0

    def _keys_at(self, topic_partition: TopicPartition, partition: PartitionWrite) -> Counter[bytes | None]:
        """Keys of the rows that other runs appended under this task's number."""
        found: Counter[bytes | None] = Counter()
        if self._write.task in partition.numbers:
            for logged in self._write.log.read(*topic_partition, partition.began, partition.end):
                commit_tag = own_commit_tag(logged, self._write.plan.sink)
                if commit_tag is not None and (commit_tag.batch, commit_tag.task) == (
                    self._write.batch,
                    self._write.task,
                ):
                    found.update(map(self._write.framing.key, logged.bodies))
        return found
