"""Appends a task's rows: one append in flight per partition, under an append lock (`locks.py`). Reads the log after
each refusal or lost response."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from fencepost._partitioning import INVALID_PARTITIONS, murmur2
from fencepost._refusals import POLICY_VIOLATION
from fencepost.records import CHECK_CONFIG
from fencepost.spark.commit_tags import TASK_APPENDS_MAX, CommitTag, own_commit_tag
from fencepost.spark.errors import CannotReach, SinkError, Unknown
from fencepost.spark.interfaces import Answer, LastAppend, TopicPartition
from fencepost.spark.refusals import Refusals, error_name, name_of, refuse_final
from fencepost.spark.resumer import Resumer
from fencepost.spark.rows import Rows, by_partition, fitting, joined
from fencepost.spark.write import Flight, PartitionWrite, Patience, Write

#: For each partition with rows: one append in flight, and the next one.
_APPENDS_WAITING = 2
#: Of one task. With more, a slow broker answers the last ones too late, and the locks of all of them keep other tasks
#: from appending.
_IN_FLIGHT_MAX = 32
#: The fractional parts of its multiples are spread evenly.
_GOLDEN_RATIO = 0.618034


class Appender:
    """`appended`: rows; `appends`: batches; `refused`: appends that lost to another writer; `deferred`: the partition
    whose last row stays in its queue."""

    def __init__(self, write: Write, resumer: Resumer, refusals: Refusals, patience: Patience) -> None:
        self._write = write
        self._resumer = resumer
        self._refusals = refusals
        self._patience = patience
        self._expanding: set[str] = set()
        self.deferred: TopicPartition | None = None
        self.appended = self.appends = self.refused = 0

    def is_busy(self) -> bool:
        """Whether the rows that wait keep all partitions with rows busy, or need more memory than the plan has."""
        plan, active = self._write.plan, sum(1 for p in self._write.partitions.values() if p.queue or p.flight)
        return self._waiting_bytes() > min(plan.buffer_bytes, _APPENDS_WAITING * plan.append_bytes_max * active)

    def _waiting_bytes(self) -> int:
        return sum(p.queued_bytes + (p.flight.rows.bytes() if p.flight else 0) for p in self._write.partitions.values())

    def pending(self) -> bool:
        """Whether rows wait for an append or for its response."""
        return any(p.flight or self._sendable(at, p) for at, p in self._write.partitions.items())

    def _sendable(self, topic_partition: TopicPartition, partition: PartitionWrite) -> int:
        return max(0, partition.queued_rows - (topic_partition == self.deferred))

    def pump(self, *, flush: bool) -> None:
        """Process responses and send appends."""
        for topic_partition, partition in self._write.partitions.items():
            if partition.flight is not None and partition.flight.answer.done():
                self._answered(topic_partition, partition)
        for topic in list(self._expanding):
            if not any(
                p.flight for topic_partition, p in self._write.partitions.items() if topic_partition[0] == topic
            ):
                self._repartition(topic)
        now = self._write.clock.now()
        full = self._waiting_bytes() > self._write.plan.buffer_bytes
        partitions = list(self._write.partitions)
        in_flight = sum(1 for p in self._write.partitions.values() if p.flight)
        # Tasks that end together start at different partitions.
        first = int(self._write.task * _GOLDEN_RATIO % 1 * len(partitions))
        for topic_partition in partitions[first:] + partitions[:first]:
            if in_flight >= _IN_FLIGHT_MAX:
                break
            partition = self._write.partitions[topic_partition]
            if partition.flight is not None or partition.not_before > now:
                continue
            if not self._sendable(topic_partition, partition):
                continue
            enough = (
                partition.queued_bytes >= self._write.plan.append_bytes_max
                or partition.queued_rows >= self._write.plan.append_rows_max
            )
            if (enough or flush or full) and topic_partition[0] not in self._expanding:
                self._send(topic_partition, partition)
                in_flight += partition.flight is not None

    def _send(self, topic_partition: TopicPartition, partition: PartitionWrite) -> None:
        if not self._has_lock(topic_partition, partition):
            return
        if partition.rivals:
            self._patience.patiently(lambda: self._probe(topic_partition, -1))
        if not self._sendable(topic_partition, partition):
            self._write.locks.release(topic_partition)
            return
        if self._write.done is not None:
            raise self._refusals.finished_meanwhile(topic_partition)
        rows = self._cut(topic_partition, partition)
        topic = topic_partition[0]
        task_appends = partition.task_appends
        commit_tag = CommitTag(
            self._write.plan.sink,
            self._write.query,
            self._write.probed.run,
            self._write.batch,
            self._write.task,
            self._write.attempt,
            partition.appends,
            partition.began,
            partition.before,
            self._write.over[topic],
            self._write.created_counts[topic],
            self._write.plan.arranged,
            self._write.probed.at,
            dict(task_appends) if task_appends is not None and len(task_appends) <= TASK_APPENDS_MAX else None,
            self._write.has_unmatched,
            self._write.completion,
        )
        partition.appends += 1
        encoded = commit_tag.encode()
        batch = self._write.framing.build(
            rows.bodies,
            commit_tag=encoded,
            expected=partition.end,
            now_ms=self._write.clock.time_ms(),
            partition=topic_partition,
            partition_count=self._write.over[topic] if topic in self._write.count_checked else None,
        )
        sent = self._write.log.append(*topic_partition, batch)
        if not partition.unlocked:
            sent = self._unlocking(sent, topic_partition, LastAppend(partition.end + len(rows), encoded))
        partition.flight = Flight(rows, partition.end, sent)

    def _has_lock(self, topic_partition: TopicPartition, partition: PartitionWrite) -> bool:
        """Take the append lock, and the log end that its last holder left. False: another task has it."""
        if partition.unlocked:
            return True
        taken, last = self._write.locks.take(topic_partition)
        if taken:
            partition.lock_end = -2
        elif self._patience.waits_for_lock(partition, last.end):
            return False
        if last.end > partition.end:
            hint = self._of_this_run(last)
            end = -1 if hint is None else last.end
            self._patience.patiently(lambda: self._probe(topic_partition, end, hint))
        return True

    def _of_this_run(self, last: LastAppend) -> CommitTag | None:
        """The commit tag of an append that this run knows to be in the log. An older one may have been lost since, and
        waiting for it would never end."""
        try:
            commit_tag = CommitTag.decode(last.commit_tag)
        except SinkError:
            return None
        return commit_tag if commit_tag.run == self._write.probed.run else None

    def _unlocking(self, sent: Future[Any], topic_partition: TopicPartition, last: LastAppend) -> Future[Any]:
        """The same response, which first releases the lock: meanwhile this task may be busy with computing rows. It is
        done only after that, so that this task does not send its next append under a lock that is then released."""
        answer: Future[Any] = Future()

        def release(_: Future[Any]) -> None:
            error = sent.exception()
            try:
                if error is None and sent.result().code == 0:
                    self._write.locks.store(topic_partition, last)
                self._write.locks.release(topic_partition)
            finally:
                answer.set_result(sent.result()) if error is None else answer.set_exception(error)

        sent.add_done_callback(release)
        return answer

    def _cut(self, topic_partition: TopicPartition, partition: PartitionWrite) -> Rows:
        pieces: list[Rows] = []
        bytes_left = self._write.plan.append_bytes_max
        rows_left = min(self._write.plan.append_rows_max, self._sendable(topic_partition, partition))
        while partition.queue and rows_left > 0:
            piece = partition.queue.popleft()
            count = min(rows_left, fitting(piece.bodies, bytes_left))
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
        rows = pieces[0] if len(pieces) == 1 else joined(pieces)
        partition.queued_bytes -= rows.bytes()
        partition.queued_rows -= len(rows)
        return rows

    def _answered(self, topic_partition: TopicPartition, partition: PartitionWrite) -> None:
        assert partition.flight is not None
        flight, partition.flight = partition.flight, None
        actual = -1
        try:
            answer = flight.answer.result()
        except Unknown as error:
            self._patience.later(partition, str(error) or "no response to the append")
        else:
            if answer.code == 0:
                self._acknowledged(topic_partition, partition, flight, answer)
                return
            refuse_final(topic_partition, answer)
            if answer.code == INVALID_PARTITIONS:
                self._expanding.add(topic_partition[0])
            if answer.code == POLICY_VIOLATION:
                actual = answer.base_offset
                self.refused += 1
                partition.rivals = True
                self._patience.later(partition, answer.message or "other clients append to it", contended=True)
            else:
                self._patience.later(partition, f"{error_name(answer.code)} {answer.message or ''}".rstrip())
        # Not appended, appended without a response, or still in flight: compare the log row by row.
        partition.put(flight.rows, front=True)
        self._patience.patiently(lambda: self._probe(topic_partition, actual))

    def _acknowledged(
        self, topic_partition: TopicPartition, partition: PartitionWrite, flight: Flight, answer: Answer
    ) -> None:
        if answer.base_offset != flight.expected:
            raise SinkError(
                f"{name_of(topic_partition)}: rows expected at offset {flight.expected} were appended "
                f"at {answer.base_offset}: nothing checked the append, so later rows may be in the "
                f"topic twice (switch {CHECK_CONFIG} on, and set kafka.bootstrap.servers to the proxy)"
            )
        partition.end = flight.expected + len(flight.rows)
        partition.tries = 0
        if partition.task_appends is not None:
            partition.task_appends[self._write.task] = partition.task_appends.get(self._write.task, 0) + 1
        self.appended += len(flight.rows)
        partition.appended += len(flight.rows)
        if partition.first < 0:
            partition.first = flight.expected
        self.appends += 1
        self._patience.appended()

    def _probe(self, topic_partition: TopicPartition, actual: int, commit_tag: CommitTag | None = None) -> None:
        """Read from the known end to the log end, and remove the rows found there from the queue. `commit_tag`: of the
        batch that ends at `actual`, if known."""
        partition = self._write.partitions[topic_partition]
        end = actual
        if end < 0:
            [(_, end)] = self._write.log.offsets(topic_partition[0], [topic_partition[1]]).values()
        if end < partition.end:
            # A new leader (temporary), or lost data.
            raise CannotReach(f"the log ends at {end}, before acknowledged records up to {partition.end}")
        if end == partition.end:
            partition.rivals = False
            return
        if not self._nothing_new(topic_partition, partition, end, commit_tag):
            for append in list(self._resumer.read(topic_partition, partition.end, end)):
                self._resumer.absorb(topic_partition, append)
                partition.end = max(partition.end, append.next_offset)
        partition.end = max(partition.end, end)
        self._patience.progressed()
        self._dedupe(topic_partition)

    def _nothing_new(
        self, topic_partition: TopicPartition, partition: PartitionWrite, end: int, commit_tag: CommitTag | None
    ) -> bool:
        """Whether `task_appends` of the last batch rules out unread appends that count for this task."""
        if partition.task_appends is None or self._write.plan.arranged:
            return False
        if commit_tag is None:
            logged = self._write.log.last_batch(*topic_partition, end)
            commit_tag = own_commit_tag(logged, self._write.plan.sink)
            if commit_tag is not None:
                self._write.locks.store(topic_partition, LastAppend(end, logged.commit_tag))
        if (
            commit_tag is None
            or commit_tag.run != self._write.probed.run
            or commit_tag.batch != self._write.batch
            or commit_tag.task_appends is None
            or commit_tag.done is not None
        ):
            return False
        if commit_tag.over != self._write.over[topic_partition[0]]:
            return False
        counts = dict(commit_tag.task_appends)
        counts[commit_tag.task] = counts.get(commit_tag.task, 0) + 1
        if counts.get(self._write.task, 0) != partition.task_appends.get(self._write.task, 0):
            return False
        partition.task_appends = counts
        return True

    def _dedupe(self, topic_partition: TopicPartition) -> None:
        """Remove rows from the queue that were just read."""
        partition = self._write.partitions[topic_partition]
        for rows in partition.take_all():
            partition.put(self._resumer.missing(topic_partition, rows))

    def _repartition(self, topic: str) -> None:
        """Adopt the new partition count. Appends for the old count are in the log or will be refused: read all
        partitions, then partition the remaining rows again."""
        count = self._patience.patiently(lambda: self._write.log.partition_count(topic))
        if count <= self._write.over[topic]:
            self._patience.wait()
            return
        if self._write.at_commit:
            raise self._refusals.expanded_at_commit(topic)
        if self._write.plan.arranged:
            raise SinkError(
                f"topic {topic} was expanded from {self._write.over[topic]} to {count} partitions since "
                "the rows were arranged (start the query again: rows already written are found, "
                "and the others are placed by the new count)"
            )
        self.deferred = None  # it may move to another partition
        self._write.count_checked.add(topic)
        self._write.over[topic] = count
        self._write.mixed.add(topic)
        for partition, (start, _) in self._patience.patiently(
            lambda: self._write.log.offsets(topic, range(count))
        ).items():
            self._write.partitions.setdefault((topic, partition), PartitionWrite(start, start, -1))
        waiting: list[tuple[TopicPartition, Rows]] = []
        for partition in range(count):
            topic_partition = (topic, partition)
            self._patience.patiently(lambda topic_partition=topic_partition: self._probe(topic_partition, -1))  # type: ignore[misc]
            waiting += [(topic_partition, rows) for rows in self._write.partitions[topic_partition].take_all()]
        self._expanding.discard(topic)
        for old, rows in waiting:
            for partition, some in by_partition(rows.bodies, self._replaced(old, rows), rows.explicit):
                topic_partition = (topic, partition)
                self._write.partitions[topic_partition].put(self._resumer.missing(topic_partition, some))

    def _replaced(self, old: TopicPartition, rows: Rows) -> npt.NDArray[Any]:
        topic, partition = old
        found = []
        for index, body in enumerate(rows.bodies.to_pylist()):
            key = self._write.framing.key(body)
            if rows.explicit is not None and rows.explicit[index]:
                found.append(partition)
            else:
                found.append(
                    self._write.default_partition(topic) if key is None else murmur2(key, self._write.over[topic])
                )
        return np.array(found, dtype=np.int32)
