"""Appends a task's rows: one append in flight per partition. Reads the log after each refusal or lost response."""

from __future__ import annotations

import pyarrow as pa

from fencepost._partitioning import INVALID_PARTITIONS
from fencepost._refusals import POLICY_VIOLATION
from fencepost.records import CHECK_CONFIG
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import CannotReach, SinkError, Unknown
from fencepost.spark.interfaces import Answer, TopicPartition
from fencepost.spark.refusals import Refusals, error_name, name_of, refuse_final
from fencepost.spark.resumer import Resumer
from fencepost.spark.rows import extended, fitting, size
from fencepost.spark.write import Flight, PartitionWrite, Patience, Write

#: For each partition with rows: one append in flight, and the next one.
_APPENDS_WAITING = 2
#: Of one task. With more, a slow broker answers the last ones too late.
_IN_FLIGHT_MAX = 32


class Appender:
    """`appended`: rows; `appends`: batches; `refused`: appends that lost to another writer; `ends`: the task has no
    more rows; `deferred`: the partition whose last row stays in its queue."""

    def __init__(self, write: Write, resumer: Resumer, refusals: Refusals, patience: Patience) -> None:
        self._write = write
        self._resumer = resumer
        self._refusals = refusals
        self._patience = patience
        self.ends = False
        self.deferred: TopicPartition | None = None
        self.appended = self.appends = self.refused = 0

    def defer(self) -> None:
        """Leave the last row of a partition in its queue."""
        partitions = self._write.partitions.items()
        self.deferred = next((at for at, each in partitions if each.is_numbered and each.queued_rows), None)

    def is_busy(self) -> bool:
        """Whether the rows that wait keep all partitions with rows busy, or need more memory than the plan has."""
        plan, active = self._write.plan, sum(1 for p in self._write.partitions.values() if p.queue or p.flight)
        return self._waiting_bytes() > min(plan.buffer_bytes, _APPENDS_WAITING * plan.append_bytes_max * active)

    def _waiting_bytes(self) -> int:
        return sum(p.queued_bytes + (size(p.flight.rows) if p.flight else 0) for p in self._write.partitions.values())

    def pending(self) -> bool:
        """Whether rows wait for an append or for its response."""
        return any(p.flight or self._sendable(at, p) for at, p in self._write.partitions.items())

    def _sendable(self, topic_partition: TopicPartition, partition: PartitionWrite) -> int:
        if partition.is_numbered:
            keeps = topic_partition == self.deferred if self.ends else True
            return max(0, partition.queued_rows - keeps)
        if len(partition.pool) and self._write.owns(topic_partition) and not self.ends:
            # Other data under the same sink.id is detected before an append, if memory suffices.
            partition.is_released |= partition.queued_bytes > self._write.plan.hold_bytes
            return partition.queued_rows if partition.is_released else 0
        return partition.queued_rows

    def pump(self, *, flush: bool) -> None:
        """Process responses and send appends."""
        partitions = self._write.partitions
        for topic_partition, partition in partitions.items():
            if partition.flight is not None and partition.flight.answer.done():
                self._answered(topic_partition, partition)
        now, plan = self._write.clock.now(), self._write.plan
        full = self._waiting_bytes() > plan.buffer_bytes
        in_flight = sum(1 for p in partitions.values() if p.flight)
        for topic_partition, partition in partitions.items():
            if in_flight >= _IN_FLIGHT_MAX:
                break
            if partition.flight is not None or partition.not_before > now:
                continue
            if not self._sendable(topic_partition, partition):
                continue
            enough = partition.queued_bytes >= plan.append_bytes_max or partition.queued_rows >= plan.append_rows_max
            if enough or flush or full:
                self._send(topic_partition, partition)
                in_flight += partition.flight is not None

    def _send(self, topic_partition: TopicPartition, partition: PartitionWrite) -> None:
        if partition.is_contended:
            self._patience.patiently(lambda: self._probe(topic_partition, -1))
        if not self._sendable(topic_partition, partition):
            return
        write, topic = self._write, topic_partition[0]
        rows = self._cut(topic_partition, partition)
        prefix = extended(partition.prefix, rows) if partition.is_numbered else partition.prefix
        last = partition.is_numbered and self.ends and not partition.queue
        commit_tag = CommitTag(
            write.plan.sink,
            write.query,
            write.probed.run,
            write.batch,
            partition.began,
            partition.before,
            write.counts[topic],
            write.probed.at,
            prefix if partition.is_numbered else None,
            last,
            last and write.ends_load,
        )
        batch = write.framing.build(
            rows,
            commit_tag=commit_tag.encode(),
            expected=partition.end,
            now_ms=write.clock.time_ms(),
            partition=topic_partition,
            partition_count=write.counts[topic][-1] if topic in write.probed.count_checked else None,
        )
        partition.flight = Flight(rows, partition.end, write.log.append(*topic_partition, batch), prefix, last)

    def _cut(self, topic_partition: TopicPartition, partition: PartitionWrite) -> pa.Array:
        """Take the rows of the next append from the queue."""
        pieces: list[pa.Array] = []
        bytes_left = self._write.plan.append_bytes_max
        rows_left = min(self._write.plan.append_rows_max, self._sendable(topic_partition, partition))
        while partition.queue and rows_left > 0:
            piece = partition.queue.popleft()
            count = min(rows_left, fitting(piece, bytes_left))
            if count == 0 and pieces:
                partition.queue.appendleft(piece)
                break
            count = max(count, 1)
            if count < len(piece):
                partition.queue.appendleft(piece.slice(count))
                piece = piece.slice(0, count)
                rows_left = 0
            pieces.append(piece)
            bytes_left -= size(piece)
            rows_left -= len(piece)
        rows = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        partition.queued_bytes -= size(rows)
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
                raise self._refusals.expanded(topic_partition[0])
            if answer.code == POLICY_VIOLATION:
                actual = answer.base_offset
                self.refused += 1
                partition.is_contended = True
                self._patience.later(partition, answer.message or "other clients append to it", contended=True)
            else:
                self._patience.later(partition, f"{error_name(answer.code)} {answer.message or ''}".rstrip())
        # Not appended, appended without a response, or still in flight: the log says what it has.
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
        if partition.is_numbered:
            partition.prefix = partition.logged = flight.prefix
            partition.is_last = flight.last
        self.appended += len(flight.rows)
        partition.appended += len(flight.rows)
        if partition.first < 0:
            partition.first = flight.expected
        self.appends += 1
        self._patience.appended()

    def _probe(self, topic_partition: TopicPartition, actual: int) -> None:
        """Take account of what was appended from the known end to the log end."""
        partition, end = self._write.partitions[topic_partition], actual
        if end < 0:
            [(_, end)] = self._write.log.offsets(topic_partition[0], [topic_partition[1]]).values()
        if end < partition.end:
            # A new leader (temporary), or lost data.
            raise CannotReach(f"the log ends at {end}, before acknowledged records up to {partition.end}")
        if end == partition.end:
            partition.is_contended = False
            return
        self._resumer.catch_up(topic_partition, end)
        self._patience.progressed()
