"""The driver's snapshot before a micro-batch: the log end of each partition, and the sink's last commit tag.

Spark sends it to the tasks with the writer, so that an uncontended task reads nothing. It is independent of the batch:
Spark gives the batch number to the tasks only, which decide (`task.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fencepost.spark.commit_tags import CommitTag, own_commit_tag
from fencepost.spark.interfaces import Log, TopicIdentity, TopicPartition

#: Offsets in the first backward scan range, if the last batch of a partition is not the sink's.
_STRETCH = 10_000


@dataclass(frozen=True, slots=True)
class Observation:
    """One partition: log start, log end, and the sink's last commit tag (None if there is none), whose batch ends at
    `last_end`. `unread`: records were deleted before this driver read them, and no commit tag is left: they may have
    been rows of the sink. `compacted`: compaction removed records after the last commit tag: they may have had a later
    one."""

    start: int
    end: int
    last: CommitTag | None
    last_end: int = 0
    unread: bool = False
    compacted: bool = False
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class DriverProbe:
    """The snapshot. `run`: random id; `at`: ms; `count_checked`: topics with partition-count checks; `topic_ids`: by
    name."""

    run: str
    at: int
    counts: dict[str, int]
    count_checked: frozenset[str]
    observations: dict[TopicPartition, Observation]
    retention_ms: dict[str, int] = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """A finished load."""
        return any(o.last.done for o in self.observations.values() if o.last)

    def is_partly_written(self, batch: int) -> bool:
        """Some rows of the batch are in the topic, and its tasks may append others."""
        ends = {(each.last.batch, each.last.last) if each.last else (-1, False) for each in self.observations.values()}
        is_whole = self.done or ends == {(batch, True)}
        return max(ends, default=(-1, False))[0] == batch and not is_whole


def probe(
    log: Log,
    sink: str,
    topics: Mapping[str, TopicIdentity],
    *,
    at: int,
    count_checked: frozenset[str] = frozenset(),
    known: dict[TopicPartition, Observation] | None = None,
    retention_ms: dict[str, int] | None = None,
) -> DriverProbe:
    """Take the snapshot. `topics`: by name, identified just before: rows partitioned for an older count are then below
    the log ends read here. `known`: from the driver's last snapshot of the topics with these ids, which this one
    replaces. Raises CannotReach, SinkError."""
    known = {} if known is None else known
    observations = {}
    for topic, identity in topics.items():
        offsets = log.offsets(topic, range(identity.partitions))
        last_batches = log.last_batches(topic, _unread_ends(topic, offsets, known, identity.leader_epochs))
        for partition, (start, end) in offsets.items():
            at_partition = (topic, partition)
            now = Observation(start, end, None, leader_epoch=identity.leader_epochs[partition])
            found = _observed(log, at_partition, now, sink, known.get(at_partition), last_batches.get(partition))
            observations[at_partition] = known[at_partition] = found
    counts = {topic: identity.partitions for topic, identity in topics.items()}
    ids = {topic: identity.id for topic, identity in topics.items()}
    return DriverProbe(secrets.token_hex(8), at, counts, count_checked, observations, retention_ms or {}, ids)


def _unread_ends(
    topic: str,
    offsets: dict[int, tuple[int, int]],
    known: dict[TopicPartition, Observation],
    leader_epochs: dict[int, int],
) -> dict[int, int]:
    """The log ends of the partitions that are neither empty nor known up to their ends from the same leader."""
    ends = {partition: end for partition, (start, end) in offsets.items() if start < end}
    read = {at: (each.end, each.leader_epoch) for (of, at), each in known.items() if of == topic}
    return {at: end for at, end in ends.items() if read.get(at) != (end, leader_epochs[at])}


def _observed(  # noqa: PLR0917 - called once
    log: Log,
    topic_partition: TopicPartition,
    now: Observation,
    sink: str,
    before: Observation | None,
    last_batch: Any,
) -> Observation:
    """`now` with the last commit tag. Reads other clients' records only above the end of `before`."""
    if before is not None and before.end < now.start:
        # Unread records were deleted. An older commit tag is dropped: later rows may be deleted too.
        before = Observation(now.start, now.start, None, unread=True)
    if before is not None and before.end > now.end:
        before = None  # the log became shorter
    is_empty = now.start == now.end
    if before is not None and before.end == now.end and (is_empty or before.leader_epoch == now.leader_epoch):
        return replace(before, start=now.start, leader_epoch=now.leader_epoch)
    if is_empty:
        return now
    commit_tag = own_commit_tag(last_batch, sink)
    if commit_tag is not None:
        return replace(now, last=commit_tag, last_end=now.end)
    is_readable = before is not None and before.last is not None and before.last_end > now.start
    # The log may have become shorter, and then longer.
    if (
        before
        and is_readable
        and own_commit_tag(log.last_batch(*topic_partition, before.last_end), sink) != before.last
    ):
        before = None
    return _search(log, topic_partition, now, sink, before or replace(now, end=now.start))


def _search(log: Log, topic_partition: TopicPartition, now: Observation, sink: str, before: Observation) -> Observation:
    """Search other clients' records backwards for the last commit tag."""
    floor, high, stretch, compacted = max(now.start, before.end), now.end, _STRETCH, False
    while high > floor:
        low = max(floor, high - stretch)
        found, at, gap = now, low, False
        for logged in log.read(*topic_partition, low, high):
            gap |= logged.base_offset > at or not logged.is_whole
            at = logged.next_offset
            commit_tag = own_commit_tag(logged, sink)
            if commit_tag is not None:
                found, gap = replace(now, last=commit_tag, last_end=at), False
        compacted |= gap or at < high
        if found.last is not None:
            return replace(found, compacted=compacted)
        high, stretch = low, stretch * 8
    return replace(
        before,
        start=now.start,
        end=now.end,
        leader_epoch=now.leader_epoch,
        compacted=before.compacted or compacted,
    )
