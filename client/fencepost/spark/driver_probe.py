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
    """One partition: log start, log end, and the sink's last commit tag (None if there is none). `unread`: records were
    deleted before this driver read them, and no commit tag is left: they may have been rows of the sink. `compacted`:
    compaction removed records after the last commit tag: they may have had a later one."""

    start: int
    end: int
    last: CommitTag | None
    unread: bool = False
    compacted: bool = False


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
        last = [observation.last for observation in self.observations.values()]
        batches = {commit_tag.batch for commit_tag in last if commit_tag}
        is_whole = self.done or all(commit_tag and commit_tag.last for commit_tag in last)
        return batch in batches and batch == max(batches) and not is_whole


@dataclass(frozen=True, slots=True)
class Known:
    """The last commit tag of a partition below offset `below`, and the end of its batch. `unread`: some records below
    were deleted before they were read; `compacted`: as in `Observation`; `leader_epoch`: when it was read."""

    below: int
    commit_tag: CommitTag | None
    commit_tag_end: int
    unread: bool = False
    compacted: bool = False
    leader_epoch: int = -1


def probe(
    log: Log,
    sink: str,
    topics: Mapping[str, TopicIdentity],
    *,
    at: int,
    count_checked: frozenset[str] = frozenset(),
    known: dict[TopicPartition, Known] | None = None,
    retention_ms: dict[str, int] | None = None,
) -> DriverProbe:
    """Take the snapshot. `topics`: by name, identified just before: rows partitioned for an older count are then below
    the log ends read here. `known`: from the driver's last snapshot of the topics with these ids. Raises CannotReach,
    SinkError."""
    counts = {topic: identity.partitions for topic, identity in topics.items()}
    bounds: dict[TopicPartition, tuple[int, int]] = {}
    known = {} if known is None else known
    half_known: dict[TopicPartition, Known | None] = {}
    for topic, (_, epochs) in topics.items():
        offsets = log.offsets(topic, range(counts[topic]))
        last_batches = log.last_batches(topic, _unread_ends(topic, offsets, known, epochs))
        for partition, (start, end) in offsets.items():
            topic_partition = (topic, partition)
            bounds[topic_partition] = (start, end)
            before = _from(start, known.get(topic_partition))
            all_, lower = _glance(
                log,
                topic_partition,
                (start, end),
                sink,
                before,
                last_batch=last_batches.get(partition),
                is_same_leader=before is not None and before.leader_epoch == epochs[partition],
            )
            if all_ is not None:
                known[topic_partition] = all_
            else:
                half_known[topic_partition] = lower
    for topic_partition, lower in half_known.items():
        start = bounds[topic_partition][0]
        known[topic_partition] = _search(
            log, topic_partition, bounds[topic_partition], sink, lower or Known(start, None, 0)
        )
    for topic, partition in bounds:
        epoch = topics[topic].leader_epochs[partition]
        known[topic, partition] = replace(known[topic, partition], leader_epoch=epoch)
    observations = {
        topic_partition: Observation(
            *bounds[topic_partition],
            known[topic_partition].commit_tag,
            known[topic_partition].unread,
            known[topic_partition].compacted,
        )
        for topic_partition in bounds
    }
    ids = {topic: identity.id for topic, identity in topics.items()}
    return DriverProbe(secrets.token_hex(8), at, counts, count_checked, observations, retention_ms or {}, ids)


def _from(start: int, known: Known | None) -> Known | None:
    """What is known at log start `start`."""
    if known is not None and known.below < start:
        # Unread records were deleted. An older commit tag is dropped: later rows may be deleted too.
        return Known(start, None, 0, unread=True)
    return known


def _unread_ends(
    topic: str,
    offsets: dict[int, tuple[int, int]],
    known: dict[TopicPartition, Known],
    leader_epochs: dict[int, int],
) -> dict[int, int]:
    """The log ends of the partitions that are neither empty nor known up to their ends from the same leader."""
    ends = {partition: end for partition, (start, end) in offsets.items() if start < end}
    read = {at: (each.below, each.leader_epoch) for (of, at), each in known.items() if of == topic}
    return {at: end for at, end in ends.items() if read.get(at) != (end, leader_epochs[at])}


def _glance(
    log: Log,
    topic_partition: TopicPartition,
    bounds: tuple[int, int],
    sink: str,
    known: Known | None,
    *,
    last_batch: Any,
    is_same_leader: bool,
) -> tuple[Known | None, Known | None]:
    """(complete knowledge, None) without reading other clients' records, or (None, knowledge of lower offsets)."""
    start, end = bounds
    if known is not None and known.below > end:
        known = None  # the log became shorter
    if known is not None and end == known.below and (is_same_leader or end == start):
        return known, None
    if end == start:
        return Known(end, None, 0), None
    commit_tag = own_commit_tag(last_batch, sink)
    if commit_tag is not None:
        return Known(end, commit_tag, end), None
    # The log may have become shorter, and then longer.
    readable = known is not None and known.commit_tag is not None and known.commit_tag_end > start
    if (
        known
        and readable
        and own_commit_tag(log.last_batch(*topic_partition, known.commit_tag_end), sink) != known.commit_tag
    ):
        known = None
    return None, known


def _search(log: Log, topic_partition: TopicPartition, bounds: tuple[int, int], sink: str, lower: Known) -> Known:
    """Search other clients' records backwards for the last commit tag."""
    start, end = bounds
    floor, high, stretch, compacted = max(start, lower.below), end, _STRETCH, False
    while high > floor:
        low = max(floor, high - stretch)
        found, at = Known(end, None, 0), low
        gap = False
        for logged in log.read(*topic_partition, low, high):
            gap |= logged.base_offset > at or not logged.is_whole
            at = logged.next_offset
            commit_tag = own_commit_tag(logged, sink)
            if commit_tag is not None:
                found, gap = Known(end, commit_tag, at), False
        compacted |= gap or at < high
        if found.commit_tag is not None:
            return replace(found, compacted=compacted)
        high, stretch = low, stretch * 8
    return replace(lower, below=end, compacted=lower.compacted or compacted)
