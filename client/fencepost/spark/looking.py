"""What the driver finds out before the first row of a micro-batch: where each partition ends, and the sink's last mark.

It travels to the tasks with the writer, so that a task that nobody disturbs looks nothing up. It knows no batch: Spark
tells its number to the tasks alone, and they judge (`task.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fencepost.spark.marks import Mark
from fencepost.spark.task import Log, Place, own_mark

#: How far back the first stretch goes that is read where the last batch of a partition is not the sink's.
_STRETCH = 10_000


@dataclass(frozen=True, slots=True)
class Sight:
    """One partition: log start, log end, and the last mark of this sink; None where it has none. `unread` – records
    were deleted before this driver read them, and nothing of the sink is left: some of them may have been its rows."""

    start: int
    end: int
    last: Mark | None
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """`counted` – topics that refuse what was placed over another partition count than theirs."""

    run: str
    at: int
    counts: dict[str, int]
    counted: frozenset[str]
    sights: dict[Place, Sight]
    retention_ms: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """Of a partition, all of whose records below `below` were looked at: the last mark, and where its batch ends.
    `unread` – but for some that were deleted before."""

    below: int
    mark: Mark | None
    mark_end: int
    unread: bool = False


@dataclass(slots=True)
class Remembered:
    """What the driver's process keeps between micro-batches."""

    places: dict[Place, Known] = field(default_factory=dict)


def look(
    log: Log,
    sink: str,
    topics: Iterable[str],
    *,
    at: int,
    counted: frozenset[str] = frozenset(),
    never_ran: bool = False,
    nothing_deleted: bool = False,
    remembered: Remembered | None = None,
    retention_ms: dict[str, int] | None = None,
) -> Look:
    """`never_ran` – as the user says: others' records are not searched. `nothing_deleted` – as the user says: no row of
    the sink was among deleted records. Raises CannotReach, SinkError."""
    counts: dict[str, int] = {}
    bounds: dict[Place, tuple[int, int]] = {}
    known = (remembered or Remembered()).places
    half_known: dict[Place, Known | None] = {}
    for topic in topics:
        # The count first: what was placed over an older one is in the log, below the ends that are read afterwards.
        counts[topic] = log.partition_count(topic)
        for partition, (start, end) in log.offsets(topic, range(counts[topic])).items():
            place = (topic, partition)
            bounds[place] = (start, end)
            before = known.get(place)
            if before is not None and before.below < start:
                before = _cut_off(before, start)
            if before is not None and nothing_deleted:
                before = replace(before, unread=False)
            all_, lower = _glance(log, place, (start, end), sink, before)
            if all_ is not None:
                known[place] = all_
            else:
                half_known[place] = lower
    # Of which something is seen at once, that has run, whatever its user says.
    seen = [half_known[place] if place in half_known else known[place] for place in bounds]
    never_ran &= all(each is None or each.mark is None for each in seen)
    for place, lower in half_known.items():
        start, end = bounds[place]
        if lower is None and never_ran:
            known[place] = Known(end, None, 0)
        else:
            known[place] = _search(log, place, (start, end), sink, lower or Known(start, None, 0))
    sights = {place: Sight(*bounds[place], known[place].mark, known[place].unread) for place in bounds}
    return Look(secrets.token_hex(8), at, counts, counted, sights, retention_ms or {})


def _cut_off(known: Known, start: int) -> Known:
    """What is known once records that were never read are deleted. An older mark does not count: the sink may have
    appended rows after it, which are gone too."""
    return Known(start, None, 0, unread=True)


def _glance(
    log: Log, place: Place, bounds: tuple[int, int], sink: str, known: Known | None
) -> tuple[Known | None, Known | None]:
    """What is known without reading others' records; if that is not all, what is known of what lies further down."""
    start, end = bounds
    if known is not None and known.below > end:
        known = None  # truncated, or another topic of this name
    if known is not None and end == known.below:
        return known, None
    if end == start:
        return Known(end, None, 0), None
    mark = own_mark(log.tail(*place, end), sink)
    if mark is not None:
        return Known(end, mark, end), None
    # A topic that was deleted and made again may be longer than the one that was looked at.
    readable = known is not None and known.mark is not None and known.mark_end > start
    if known and readable and own_mark(log.tail(*place, known.mark_end), sink) != known.mark:
        known = None
    return None, known


def _search(log: Log, place: Place, bounds: tuple[int, int], sink: str, lower: Known) -> Known:
    """The last mark among others' records, from the end backwards."""
    start, end = bounds
    floor, high, stretch = max(start, lower.below), end, _STRETCH
    while high > floor:
        low = max(floor, high - stretch)
        found = Known(end, None, 0)
        for logged in log.read(*place, low, high):
            mark = own_mark(logged, sink)
            if mark is not None:
                found = Known(end, mark, logged.next_offset)
        if found.mark is not None:
            return found
        high, stretch = low, stretch * 8
    return replace(lower, below=end)
