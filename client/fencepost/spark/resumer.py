"""Rows of a batch that are in the log already: reads them, matches the task's rows with them, and decides about those
that the task lacks: changed data, or rows of another task now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fencepost.spark.commit_tags import CommitTag, own_commit_tag
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.interfaces import TopicPartition
from fencepost.spark.refusals import Refusals, name_of
from fencepost.spark.rows import DIGEST_BYTES, FOREIGN, SAME_NUMBER, THIS_RUN, Group, Rows, digest_of
from fencepost.spark.write import AUTO, COMPARE, KEEP, REFUSE, PartitionWrite, Patience, Write

#: How many earlier batches are read to learn the task numbers.
_BATCHES_BACK = 8


@dataclass(frozen=True, slots=True)
class SinkAppend:
    """An append of the sink, as read from the log, with the digests of its rows, one after another."""

    commit_tag: CommitTag
    next_offset: int
    digests: bytes

    @property
    def rows(self) -> int:
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class ScanRange:
    """A scan range of one partition, as read. `is_whole`: compaction removed nothing."""

    appends: tuple[SinkAppend, ...]
    is_whole: bool


@dataclass(slots=True)
class _Cursor:
    """A scan range that is read as far as rows need it."""

    begin: int
    end: int
    at: int
    batches: Iterator[Any] | None = None
    is_whole: bool = True


class Resumer:
    """`scan_ranges`: read before the first row, shared by the tasks of one process.

    Only one task reads a partition of arranged rows, mostly in the order in which the log has them. It reads as far as
    the next row needs, so its memory does not depend on the number of rows in the log. A row is missing only when the
    whole scan range was read."""

    def __init__(
        self,
        write: Write,
        refusals: Refusals,
        patience: Patience,
        scan_ranges: dict[tuple[str, int, int, int], ScanRange],
    ) -> None:
        self._write = write
        self._refusals = refusals
        self._patience = patience
        self._scan_ranges = scan_ranges
        #: Origins of the relevant appends (rule 1 in `task.py`).
        self.groups: list[Group] = []
        self._numbered: dict[tuple[str, int], int] = {}
        self._unread: dict[TopicPartition, _Cursor] = {}
        #: Rows in the pools: under this task's number, and under others.
        self.left = self.left_foreign = 0
        self.found = self.found_foreign = 0
        #: Digests of all rows read under other numbers; built on first use.
        self._others: set[bytes] | None = None

    def read_scan_range(self, topic_partition: TopicPartition) -> None:
        """Read all appends of this batch below the driver's snapshot."""
        partition = self._write.partitions[topic_partition]
        if partition.read:
            return
        partition.read = True
        observation = self._write.probed.observations[topic_partition]
        if observation.last is None:
            return
        if self._write.complete:
            begin, end = self._walk_back(topic_partition, observation.last, observation.end)
            partition.began, partition.limit = begin, end
        elif observation.last.batch == self._write.batch:
            begin, end = partition.began, observation.end
        else:
            return
        if self._write.plan.first_run and not self._write.complete:
            begin = partition.began = max(begin, observation.start)
        self._refusals.refuse_deleted(topic_partition, begin, observation.start)
        if self._write.plan.arranged and not self._write.complete and topic_partition[0] not in self._write.mixed:
            partition.begun = True
            self._unread[topic_partition] = _Cursor(begin, end, begin)
            self._buffer()
            return
        scan_range = self._scan_range(topic_partition, begin, end)
        if not scan_range.is_whole:
            self._write.compacted.add(topic_partition)
        for append in scan_range.appends:
            if not (self._write.complete and append.commit_tag.batch != self._write.batch):
                self.absorb(topic_partition, append, before_the_read=True)
        if self.left or self.left_foreign:
            self._buffer()

    def _buffer(self) -> None:
        if self._write.buffered is None and not (self._write.plan.arranged and self._write.mixed):
            self._write.buffered = []

    def may_match(self) -> bool:
        """Whether the log may have rows that no row matched yet."""
        return bool(self.left or self.left_foreign or self._unread)

    def read_rest(self) -> None:
        """Read the scan ranges to their ends."""
        for topic_partition in list(self._unread):
            while self._read_more(topic_partition):
                pass

    def _read_more(self, topic_partition: TopicPartition) -> bool:
        """Read one append of the scan range; False at its end."""
        cursor = self._unread.get(topic_partition)
        if cursor is None:
            return False
        append = self._patience.patiently(lambda: self._next(topic_partition, cursor))
        if append is not None:
            self.absorb(topic_partition, append, before_the_read=True)
            return True
        del self._unread[topic_partition]
        if not cursor.is_whole:
            self._write.compacted.add(topic_partition)
        return False

    def _next(self, topic_partition: TopicPartition, cursor: _Cursor) -> SinkAppend | None:
        while cursor.at < cursor.end:
            if cursor.batches is None:
                cursor.batches = iter(self._write.log.read(*topic_partition, cursor.at, cursor.end))
            try:
                logged = next(cursor.batches, None)
            except CannotReach:
                cursor.batches = None
                raise
            if logged is None:  # compaction removed the rest
                cursor.is_whole, cursor.at = False, cursor.end
                break
            cursor.is_whole &= logged.is_whole and logged.base_offset <= cursor.at
            cursor.at = logged.next_offset
            for append in self._own_appends((logged,), cursor.begin, cursor.end):
                return append
        return None

    def _walk_back(self, topic_partition: TopicPartition, commit_tag: CommitTag, end: int) -> tuple[int, int]:
        """[begin, end) of this batch in a partition with later batches; empty if it has no row of this batch."""
        while commit_tag.batch > self._write.batch:
            if commit_tag.before < 0:
                return end, end
            self._refusals.refuse_deleted(
                topic_partition, commit_tag.before, self._write.probed.observations[topic_partition].start
            )
            end = commit_tag.began
            appends = self._scan_range(topic_partition, commit_tag.before, end).appends
            if not appends:
                raise self._refusals.deleted(
                    topic_partition, commit_tag.before, "commit tags of earlier batches are missing"
                )
            commit_tag = appends[-1].commit_tag
        return (commit_tag.began, end) if commit_tag.batch == self._write.batch else (end, end)

    def _scan_range(self, topic_partition: TopicPartition, begin: int, end: int) -> ScanRange:
        key = (*topic_partition, begin, end)
        if key not in self._scan_ranges:
            self._scan_ranges[key] = self._patience.patiently(lambda: self._read_whole(topic_partition, begin, end))
        return self._scan_ranges[key]

    def _read_whole(self, topic_partition: TopicPartition, begin: int, end: int) -> ScanRange:
        appends: list[SinkAppend] = []
        at, is_whole = begin, True
        for logged in self._write.log.read(*topic_partition, begin, end) if begin < end else ():
            is_whole &= logged.is_whole and logged.base_offset <= at
            at = logged.next_offset
            appends += self._own_appends((logged,), begin, end)
        return ScanRange(tuple(appends), is_whole and at >= end)

    def read(self, topic_partition: TopicPartition, begin: int, end: int) -> Iterator[SinkAppend]:
        if begin < end:
            yield from self._own_appends(self._write.log.read(*topic_partition, begin, end), begin, end)

    def _own_appends(self, batches: Iterable[Any], begin: int, end: int) -> Iterator[SinkAppend]:
        for logged in batches:
            commit_tag = own_commit_tag(logged, self._write.plan.sink)
            if commit_tag is not None and logged.next_offset > begin and logged.base_offset < end:
                yield SinkAppend(commit_tag, logged.next_offset, b"".join(map(digest_of, logged.bodies)))

    def absorb(self, topic_partition: TopicPartition, append: SinkAppend, *, before_the_read: bool = False) -> None:
        """Account for an append of this sink that was just read."""
        commit_tag, partition = append.commit_tag, self._write.partitions[topic_partition]
        self._refusals.refuse_other_query(topic_partition, commit_tag)
        self._write.done = commit_tag.done or self._write.done
        if commit_tag.batch != self._write.batch:
            raise self._refusals.other_batch(topic_partition, commit_tag)
        if commit_tag.over != self._write.over[topic_partition[0]]:
            if topic_partition[0] not in self._write.count_checked and not self._write.complete:
                self._refusals.only_count(topic_partition[0], {commit_tag.over, self._write.over[topic_partition[0]]})
            self._write.mixed.add(topic_partition[0])
        self._write.rearranged |= commit_tag.arranged != self._write.plan.arranged
        same_run = commit_tag.run == self._write.probed.run
        if before_the_read:
            partition.begun = True
        elif not same_run:
            partition.task_appends = None
        elif partition.task_appends is not None:
            partition.task_appends[commit_tag.task] = partition.task_appends.get(commit_tag.task, 0) + 1
        if self._write.plan.arranged:
            if same_run and commit_tag.task != self._write.task:
                raise self._refusals.not_arranged(topic_partition, commit_tag.task)
            origin = THIS_RUN
        elif same_run:
            if commit_tag.task != self._write.task:
                return
            origin = THIS_RUN
        else:
            origin = SAME_NUMBER if commit_tag.task == self._write.task else FOREIGN
            partition.numbers.add(commit_tag.task)
        self._pool(partition, append, origin)

    def _pool(self, partition: PartitionWrite, append: SinkAppend, origin: int) -> None:
        """Add an append to the pool."""
        commit_tag = append.commit_tag
        number = self._numbered.setdefault((commit_tag.run, commit_tag.task), len(self.groups))
        if number == len(self.groups):
            self.groups.append(Group(commit_tag.run, commit_tag.task, origin))
        group = self.groups[number]
        group.size += append.rows
        group.has_unmatched |= commit_tag.has_unmatched
        partition.there.add(append.digests, number)
        if origin == FOREIGN:
            self.left_foreign += append.rows
            if self._others is not None:
                self._others.update(
                    append.digests[at : at + DIGEST_BYTES] for at in range(0, len(append.digests), DIGEST_BYTES)
                )
        else:
            self.left += append.rows

    def missing(self, topic_partition: TopicPartition, rows: Rows) -> Rows:
        """The rows that the log lacks. The others count as found."""
        if not (self.may_match() or self._write.complete or self._write.rearranged or self._write.compacted):
            return rows
        keep = [
            self._is_missing(topic_partition, body, rows, index) for index, body in enumerate(rows.bodies.to_pylist())
        ]
        return rows if all(keep) else rows.kept(keep)

    def _is_missing(self, topic_partition: TopicPartition, body: bytes, rows: Rows, index: int) -> bool:
        digest = digest_of(body)
        explicit = rows.explicit is not None and bool(rows.explicit[index])
        if self._write.rearranged and self._write.framing.key(body) is None:
            raise SinkError(
                f"batch {self._write.batch} is partly written, and the option arranged changed since: rows "
                "without a key would go to other partitions (restore the option until the batch "
                "is done)"
            )
        by_value = explicit or self._write.plan.arranged or self._write.framing.key(body) is not None
        # A complete batch gets no appends, so the origin of a row is irrelevant.
        most = FOREIGN if by_value or self._write.complete else SAME_NUMBER
        if self._claim(topic_partition, digest, most):
            return False
        if (topic_partition[0] in self._write.mixed and (self._write.plan.arranged or not explicit)) or (
            self._write.complete and not by_value
        ):
            for other in self._write.partitions:
                if other[0] == topic_partition[0] and self._claim(other, digest, most):
                    return False
        if not by_value and not self._write.complete:
            if self.left_foreign and digest in self._of_others():
                if not self._write.plan.same_split:
                    raise self._refusals.other_split(topic_partition)
                # An equal row of another task, or this one, which moved: the driver compares, and appends missing rows.
                if any(
                    self._claim(other, digest, FOREIGN)
                    for other in self._write.partitions
                    if other[0] == topic_partition[0]
                ):
                    return False
            self._write.spread = True
        if topic_partition in self._write.compacted or (
            topic_partition[0] in self._write.mixed and self._write.compacted
        ):
            raise self._refusals.compacted_away(topic_partition)
        if self._write.complete:
            raise SinkError(
                f"{name_of(topic_partition)}: a row of batch {self._write.batch} is missing although the "
                "topic has later batches: the checkpoint was restored from before later batches, and the "
                "source now gives other rows; nothing was appended (restore the newest checkpoint, "
                "or write only the missing rows under a new sink.id)"
            )
        return True

    def _claim(self, topic_partition: TopicPartition, digest: bytes, most: int) -> bool:
        partition = self._write.partitions[topic_partition]
        number = partition.there.take(digest, self.groups, most)
        while number is None and self._read_more(topic_partition):
            number = partition.there.take(digest, self.groups, most)
        if number is None:
            return False
        group = self.groups[number]
        group.matched += 1
        if group.origin == FOREIGN:
            self.left_foreign -= 1
            self.found_foreign += 1
            partition.foreign += digest
        else:
            self.left -= 1
        self.found += 1
        partition.found += 1
        return True

    def _of_others(self) -> set[bytes]:
        if self._others is None:
            self._others = {
                digest
                for partition in self._write.partitions.values()
                for digest, group in partition.there.left()
                if self.groups[group].origin == FOREIGN
            }
        return self._others


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
            return  # with `mixed`, rows of other tasks were read too
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
        if self._write.spread and not self._write.plan.same_split:
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
