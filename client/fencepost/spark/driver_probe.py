"""The driver's snapshot before a micro-batch: the log end of each partition, and the sink's last commit tag.

Spark sends it to the tasks with the writer, so that an uncontended task reads nothing. It is independent of the batch:
Spark gives the batch number to the tasks only, which decide (`task.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from fencepost.spark.commit_tags import CommitTag, own_commit_tag
from fencepost.spark.interfaces import Log, TopicPartition

#: Offsets in the first backward scan range, if the last batch of a partition is not the sink's.
_STRETCH = 10_000


@dataclass(frozen=True, slots=True)
class Observation:
    """One partition: log start, log end, and the sink's last commit tag (None if there is none). `unread`: records were
    deleted before this driver read them, and no commit tag is left: they may have been rows of the sink."""

    start: int
    end: int
    last: CommitTag | None
    unread: bool = False


@dataclass(frozen=True, slots=True)
class DriverProbe:
    """The snapshot. `run`: random id; `at`: ms; `count_checked`: topics with partition-count checks."""

    run: str
    at: int
    counts: dict[str, int]
    count_checked: frozenset[str]
    observations: dict[TopicPartition, Observation]
    retention_ms: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> tuple[int, int] | None:
        """The total of the rows of a finished load; None if it is not finished."""
        return next((o.last.done for o in self.observations.values() if o.last and o.last.done), None)


@dataclass(frozen=True, slots=True)
class Known:
    """The last commit tag of a partition below offset `below`, and the end of its batch. `unread`: some records below
    were deleted before they were read."""

    below: int
    commit_tag: CommitTag | None
    commit_tag_end: int
    unread: bool = False


def probe(
    log: Log,
    sink: str,
    topics: Iterable[str],
    *,
    at: int,
    count_checked: frozenset[str] = frozenset(),
    never_ran: bool = False,
    nothing_deleted: bool = False,
    known: dict[TopicPartition, Known] | None = None,
    retention_ms: dict[str, int] | None = None,
) -> DriverProbe:
    """Take the snapshot. `never_ran`: the user states that the sink never ran, so other clients' records are not
    searched. `nothing_deleted`: the user states that no row of the sink was deleted. `known`: from the driver's last
    snapshot. Raises CannotReach, SinkError."""
    counts: dict[str, int] = {}
    bounds: dict[TopicPartition, tuple[int, int]] = {}
    known = {} if known is None else known
    half_known: dict[TopicPartition, Known | None] = {}
    for topic in topics:
        # Read the count first: then rows partitioned for an older count are below the log ends read afterwards.
        counts[topic] = log.partition_count(topic)
        offsets = log.offsets(topic, range(counts[topic]))
        last_batches = log.last_batches(topic, _unread_ends(topic, offsets, known))
        for partition, (start, end) in offsets.items():
            topic_partition = (topic, partition)
            bounds[topic_partition] = (start, end)
            before = known.get(topic_partition)
            if before is not None and before.below < start:
                # Unread records were deleted. An older commit tag is dropped: later rows may be deleted too.
                before = Known(start, None, 0, unread=True)
            if before is not None and nothing_deleted:
                before = replace(before, unread=False)
            all_, lower = _glance(
                log, topic_partition, (start, end), sink, before, last_batch=last_batches.get(partition)
            )
            if all_ is not None:
                known[topic_partition] = all_
            else:
                half_known[topic_partition] = lower
    # A commit tag overrides the user's statement that the sink never ran.
    all_known = {topic_partition: known.get(topic_partition) for topic_partition in bounds} | half_known
    never_ran &= all(each is None or each.commit_tag is None for each in all_known.values())
    for topic_partition, lower in half_known.items():
        start, end = bounds[topic_partition]
        if lower is None and never_ran:
            known[topic_partition] = Known(end, None, 0)
        else:
            known[topic_partition] = _search(log, topic_partition, (start, end), sink, lower or Known(start, None, 0))
    observations = {
        topic_partition: Observation(
            *bounds[topic_partition], known[topic_partition].commit_tag, known[topic_partition].unread
        )
        for topic_partition in bounds
    }
    return DriverProbe(secrets.token_hex(8), at, counts, count_checked, observations, retention_ms or {})


def _unread_ends(topic: str, offsets: dict[int, tuple[int, int]], known: dict[TopicPartition, Known]) -> dict[int, int]:
    """The log ends of the partitions that are neither empty nor known up to their ends."""
    ends = {partition: end for partition, (start, end) in offsets.items() if start < end}
    return {at: end for at, end in ends.items() if (topic, at) not in known or known[topic, at].below != end}


def _glance(
    log: Log,
    topic_partition: TopicPartition,
    bounds: tuple[int, int],
    sink: str,
    known: Known | None,
    *,
    last_batch: Any,
) -> tuple[Known | None, Known | None]:
    """(complete knowledge, None) without reading other clients' records, or (None, knowledge of lower offsets)."""
    start, end = bounds
    if known is not None and known.below > end:
        known = None  # truncated, or another topic of this name
    if known is not None and end == known.below:
        return known, None
    if end == start:
        return Known(end, None, 0), None
    commit_tag = own_commit_tag(last_batch, sink)
    if commit_tag is not None:
        return Known(end, commit_tag, end), None
    # A recreated topic may be longer than the one read before.
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
    floor, high, stretch = max(start, lower.below), end, _STRETCH
    while high > floor:
        low = max(floor, high - stretch)
        found = Known(end, None, 0)
        for logged in log.read(*topic_partition, low, high):
            commit_tag = own_commit_tag(logged, sink)
            if commit_tag is not None:
                found = Known(end, commit_tag, logged.next_offset)
        if found.commit_tag is not None:
            return found
        high, stretch = low, stretch * 8
    return replace(lower, below=end)
