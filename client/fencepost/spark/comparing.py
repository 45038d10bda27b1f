"""The driver's final comparison of a batch that earlier runs partly wrote: log contents against the tasks' rows.

Each task found its rows in the log or appended them. Rows found under the task's own number were found by no other
task. Rows under another number may have been found by several tasks, if the rows are now split differently. The log
may also hold rows that no task has. The driver reads the partitions where that is possible and compares row by row:

    too few    the tasks have more copies of a row than the log: the driver appends the missing ones
    too many   the data changed: the driver refuses before Spark records the batch as done

The driver appends at the offset up to which it has read. If that is refused, it reads and compares again. It knows all
appends of the batch, so the log stays a subset of the tasks' rows, as `task.py` proves for one task.

Nothing in this file does I/O: `Log` and `Clock` do.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fencepost._partitioning import INVALID_PARTITIONS
from fencepost.spark.commit_tags import CommitTag, own_commit_tag
from fencepost.spark.errors import SinkError, Unknown
from fencepost.spark.interfaces import Clock, Framing, Log, TopicPartition
from fencepost.spark.refusals import name_of, refuse_final
from fencepost.spark.rows import DIGEST_BYTES, chunked, digest_of
from fencepost.spark.write import KEEP, Deferred, Met, Outcome, Plan

#: The number under which the driver appends.
DRIVER = -1

_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 3.0

_Scope = tuple[str, int]
"""Scope of the comparison of equal rows: a partition, or -1 for the whole topic if the partition is irrelevant."""

_Missing = dict[_Scope, dict[bytes, int]]
"""Number of copies of a row, by digest, that the tasks have and the log lacks."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Row counts. `found`: rows of other runs that tasks found under another number; `unknown`: rows in the log that no
    task has; `appended`: rows appended by the driver."""

    found: int
    unknown: int
    appended: int


def compare(plan: Plan, outcomes: Collection[Outcome], *, log: Log, framing: Framing, clock: Clock) -> Compared | None:
    """Compare and complete the batch; None if there is nothing to compare. Raises SinkError, CannotReach."""
    if plan.unmatched != KEEP and (others := _without_task(outcomes)):
        raise _no_rows_for(plan, others)
    partitions = _partitions_to_compare(outcomes)
    if not partitions:
        return None
    met = {outcome.task: outcome.met for outcome in outcomes if outcome.met is not None}
    some = next(iter(met.values()))
    loose = frozenset[str]().union(*(each.loose for each in met.values()))
    partitions |= {
        topic_partition for each in met.values() for topic_partition in each.partitions if topic_partition[0] in loose
    }
    deferred = [outcome.deferred for outcome in outcomes if outcome.deferred is not None]
    return _Comparison(plan, met, some, loose, sorted(partitions), deferred, log, framing, clock).run()


def is_needed(outcomes: Collection[Outcome]) -> bool:
    return bool(_partitions_to_compare(outcomes) or _without_task(outcomes))


def _without_task(outcomes: Collection[Outcome]) -> set[TopicPartition]:
    """Partitions with rows of the batch in the log but no task. Only a task with arranged rows for a partition reads
    that partition."""
    begun = frozenset[TopicPartition]().union(*(outcome.begun for outcome in outcomes))
    return set(begun.difference(*(outcome.partitions for outcome in outcomes)))


def _no_rows_for(plan: Plan, partitions: Collection[TopicPartition]) -> SinkError:
    return SinkError(
        f"{', '.join(f'{topic}-{partition}' for topic, partition in sorted(partitions))}: the "
        f"topic has rows of this batch of sink {plan.sink!r} that the data as a whole does "
        "not have now: the source or the query changed since (for another load use another "
        "sink.id; to leave the rows there, set unmatched.rows=keep for one run)"
    )


def _partitions_to_compare(outcomes: Collection[Outcome]) -> set[TopicPartition]:
    """Partitions where rows may have been found twice, or where the log may hold rows that no task has."""
    tasks = {outcome.task for outcome in outcomes}
    return {
        topic_partition
        for outcome in outcomes
        if outcome.met is not None
        for topic_partition, at in outcome.met.partitions.items()
        if at.foreign or at.unmatched or at.numbers - tasks
    }


@dataclass(slots=True)
class _LoggedRows:
    """One partition: first offset of the batch, offset read up to, newest commit tag, and digests of rows that no task
    accounts for."""

    begin: int
    end: int
    commit_tag: CommitTag | None
    digests: list[bytes]


@dataclass
class _Comparison:
    """`met`: by task; `some`: any of them; `deferred`: rows that the driver appends later (`closing.py`). An attempt of
    another run may have appended one since."""

    plan: Plan
    met: dict[int, Met]
    some: Met
    loose: frozenset[str]
    partitions: list[TopicPartition]
    deferred: list[Deferred]
    log: Log
    framing: Framing
    clock: Clock

    def run(self) -> Compared:
        appended, tries = 0, 0
        began = self.clock.now()
        while True:
            logged_rows = {topic_partition: self._read(topic_partition) for topic_partition in self.partitions}
            missing, unknown = self._difference(logged_rows)
            if unknown and self.plan.unmatched != KEEP:
                raise self._other_rows(unknown)
            if missing:
                now = self._append(missing, logged_rows)
                appended += now
                if now:
                    began, tries = self.clock.now(), 0
                    continue
                if self.clock.now() - began > self.plan.patience_seconds:
                    raise SinkError(
                        f"batch {self.some.batch}: {_total(missing)} rows could not be appended for "
                        f"{self.plan.patience_seconds:g} s (option patience.seconds); the next try continues with them"
                    )
                tries += 1
                self.clock.wait((), min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2**tries) * self.clock.random())
                continue
            found = sum(len(at.foreign) for each in self.met.values() for at in each.partitions.values())
            return Compared(found // DIGEST_BYTES, unknown, appended)

    def _read(self, topic_partition: TopicPartition) -> _LoggedRows:
        known = [each.partitions[topic_partition] for each in self.met.values() if topic_partition in each.partitions]
        begin, end = min(at.begin for at in known), max(at.limit for at in known)
        if end < 0:
            [(_, end)] = self.log.offsets(topic_partition[0], [topic_partition[1]]).values()
            end = max(end, *(at.end for at in known))
        logged_rows = _LoggedRows(begin, end, None, [])
        for commit_tag, logged in self._appends(topic_partition, begin, end):
            if commit_tag.batch > self.some.batch and not self.some.complete:
                raise self._another_driver(topic_partition, commit_tag)
            if commit_tag.batch == self.some.batch:
                logged_rows.commit_tag, logged_rows.end = commit_tag, max(logged_rows.end, logged.next_offset)
                if not self._is_answered_for(topic_partition, commit_tag, logged):
                    logged_rows.digests += map(digest_of, logged.bodies)
        return logged_rows

    def _appends(self, topic_partition: TopicPartition, begin: int, end: int) -> Iterator[tuple[CommitTag, Any]]:
        for logged in self.log.read(*topic_partition, begin, end):
            commit_tag = own_commit_tag(logged, self.plan.sink)
            if commit_tag is not None and begin < logged.next_offset:
                yield commit_tag, logged

    def _is_answered_for(self, topic_partition: TopicPartition, commit_tag: CommitTag, logged: Any) -> bool:
        if commit_tag.run == self.some.run:
            return commit_tag.task != DRIVER  # its task, and no other, found or appended all of it
        its = self.met.get(commit_tag.task)
        # Its task found all of it, except the rows that it reports.
        return (
            its is not None
            and topic_partition in its.partitions
            and logged.base_offset < its.partitions[topic_partition].end
        )

    def _difference(self, logged_rows: dict[TopicPartition, _LoggedRows]) -> tuple[_Missing, int]:
        """Rows that the tasks have and the log lacks, and the number of rows that the log has and the tasks lack."""
        expected_digests: dict[_Scope, list[bytes]] = {}
        actual_digests: dict[_Scope, list[bytes]] = {}
        for topic_partition, at in logged_rows.items():
            expected, actual = (
                expected_digests.setdefault(self._scope_of(topic_partition), []),
                actual_digests.setdefault(self._scope_of(topic_partition), []),
            )
            actual += at.digests
            for each in self.met.values():
                if topic_partition in each.partitions:
                    expected.append(each.partitions[topic_partition].foreign)
                    actual.append(each.partitions[topic_partition].unmatched)
        deferred = [
            (self._scope_of(each.topic_partition), digest_of(body))
            for each in self.deferred
            if each.topic_partition in logged_rows
            for body in each.rows.bodies.to_pylist()
        ]
        for scope, digest in deferred:
            expected_digests[scope].append(digest)
        missing, unknown = {}, 0
        for scope, expected in expected_digests.items():
            more, fewer = _compare_rows(b"".join(expected), b"".join(actual_digests[scope]))
            unknown += fewer
            later = Counter(digest for at, digest in deferred if at == scope)
            if now := {digest: count - later[digest] for digest, count in more.items() if count > later[digest]}:
                missing[scope] = now
        return missing, unknown

    def _scope_of(self, topic_partition: TopicPartition) -> _Scope:
        return (topic_partition[0], -1) if topic_partition[0] in self.loose else topic_partition

    def _append(self, missing: _Missing, logged_rows: dict[TopicPartition, _LoggedRows]) -> int:
        """Append the missing copies next to existing ones. Returns how many were appended."""
        if self.loose & {topic for topic, _ in missing}:
            raise self._cannot_append(_total(missing))
        total = 0
        for topic_partition, rows in missing.items():
            at, requested = logged_rows[topic_partition], dict(rows)
            bodies: list[bytes] = []
            for commit_tag, logged in self._appends(topic_partition, at.begin, at.end):
                if commit_tag.batch == self.some.batch:
                    for body in logged.bodies:
                        bodies += [body] * requested.pop(digest_of(body), 0)
            if requested or at.commit_tag is None:
                raise self._cannot_append(_total(missing))
            total += self._append_at(topic_partition, at.end, at.commit_tag, bodies)
        return total

    def _append_at(self, topic_partition: TopicPartition, end: int, like: CommitTag, bodies: list[bytes]) -> int:
        """Append at `end`. If another writer was first, the comparison is repeated. An expanded topic refuses: tasks of
        another run may know the new count and expect these rows in other partitions."""
        attempt, done = secrets.token_hex(8), 0
        over = self.some.over[topic_partition[0]]
        appends = chunked(pa.array(bodies, pa.large_binary()), self.plan.append_bytes_max, self.plan.append_rows_max)
        for number, some in enumerate(appends):
            commit_tag = replace(
                like, run=self.some.run, task=DRIVER, attempt=attempt, append=number, over=over, arranged=False,
                task_appends=None, has_unmatched=False,
            )  # fmt: skip
            batch = self.framing.build(
                some,
                commit_tag=commit_tag.encode(),
                expected=end,
                now_ms=self.clock.time_ms(),
                partition=topic_partition,
                partition_count=over if topic_partition[0] in self.some.count_checked else None,
            )
            sent = self.log.append(*topic_partition, batch)
            while not sent.done():
                self.clock.wait((sent,), 1.0)
            try:
                answer = sent.result()
            except Unknown:
                return done
            if answer.code:
                refuse_final(topic_partition, answer)
                if answer.code == INVALID_PARTITIONS:
                    raise self._cannot_append(len(bodies) - done)
                return done
            if answer.base_offset != end:
                raise SinkError(
                    f"{name_of(topic_partition)}: rows expected at offset {end} were appended at {answer.base_offset}"
                )
            end += len(some)
            done += len(some)
        return done

    # --- refusals -------------------------------------------------------------------------------------------------

    def _other_rows(self, count: int) -> SinkError:
        what = f"batch {self.some.batch}" if self.some.query else "this write"
        way = (
            "the checkpoint was restored from before later batches: restore the newest one"
            if self.some.complete
            else "all current rows are in the topic too"
        )
        return SinkError(
            f"the topic has {count} rows of {what} of sink {self.plan.sink!r} that the data "
            f"as a whole does not have now: the source or the query changed since ({way}; to "
            "leave the rows there, set unmatched.rows=keep for one run)"
        )

    def _another_driver(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> SinkError:
        return SinkError(
            f"{name_of(topic_partition)}: batch {commit_tag.batch} of sink {self.plan.sink!r} began "
            f"before batch {self.some.batch} was compared: another driver is ahead on the same checkpoint "
            "(stop all but one)"
        )

    def _cannot_append(self, count: int) -> SinkError:
        if self.some.complete:
            why = "the topic has later batches: the checkpoint was restored from before later batches"
        else:
            why = (
                "the topic was expanded after the batch began (start the query again; if that fails, "
                "a new sink.id with the same checkpoint appends this batch again)"
            )
        return SinkError(
            f"batch {self.some.batch} began with its rows in other tasks, and {count} of several "
            f"equal rows are missing: {why}"
        )


def _total(missing: _Missing) -> int:
    return sum(sum(rows.values()) for rows in missing.values())


def _compare_rows(expected: bytes, actual: bytes) -> tuple[dict[bytes, int], int]:
    """Compare concatenated digests: {digest: surplus in `expected`}, and the total surplus in `actual`."""
    count = len(expected) // DIGEST_BYTES
    rows, which = np.unique(np.frombuffer(expected + actual, dtype=f"S{DIGEST_BYTES}"), return_inverse=True)
    more = np.bincount(which[:count], minlength=len(rows)) - np.bincount(which[count:], minlength=len(rows))
    missing = {bytes(rows[index]).ljust(DIGEST_BYTES, b"\0"): int(more[index]) for index in np.nonzero(more > 0)[0]}
    return missing, -int(more[more < 0].sum())
