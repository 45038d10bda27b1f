"""What the driver finds out before the first row of a micro-batch: where each partition ends, and the sink's last mark.

It travels to the tasks with the writer, so that a task that nobody disturbs looks nothing up. It knows no batch: Spark
tells its number to the tasks alone, and they judge (`task.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from fencepost.spark.marks import Mark
from fencepost.spark.task import Log, Place, own_mark

#: How far back the first stretch goes that is read where the last batch of a partition is not the sink's.
_STRETCH = 10_000


@dataclass(frozen=True, slots=True)
class Sight:
    """One partition: log start, log end, and the last mark of this sink; None where it has none."""

    start: int
    end: int
    last: Mark | None


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
    """Of a partition, all of whose records below `below` were looked at: the last mark, and where its batch ends."""

    below: int
    mark: Mark | None
    mark_end: int


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
    first_run: bool = False,
    remembered: Remembered | None = None,
    retention_ms: dict[str, int] | None = None,
) -> Look:
    """Raises CannotReach, SinkError."""
    counts: dict[str, int] = {}
    sights: dict[Place, Sight] = {}
    known = (remembered or Remembered()).places
    for topic in topics:
        # The count first: what was placed over an older one is in the log, below the ends that are read afterwards.
        counts[topic] = log.partition_count(topic)
        for partition, (start, end) in log.offsets(topic, range(counts[topic])).items():
            place = (topic, partition)
            known[place] = _known(log, place, (start, end), sink, first_run, known.get(place))
            sights[place] = Sight(start, end, known[place].mark)
    return Look(secrets.token_hex(8), at, counts, counted, sights, retention_ms or {})


def _known(  # noqa: PLR0917 - called once
    log: Log, place: Place, bounds: tuple[int, int], sink: str, first_run: bool, known: Known | None
) -> Known:
    topic, partition = place
    start, end = bounds
    if known is not None and known.below > end:
        known = None  # truncated, or another topic of this name
    if known is not None and end in (known.below, start):
        return Known(end, known.mark, known.mark_end)
    if end == start:
        return Known(end, None, 0)
    mark = own_mark(log.tail(topic, partition, end), sink)
    if mark is not None:
        return Known(end, mark, end)
    # A topic that was deleted and made again may be longer than the one that was looked at.
    readable = known is not None and known.mark is not None and known.mark_end > start
    if known and readable and own_mark(log.tail(topic, partition, known.mark_end), sink) != known.mark:
        known = None
    if known is None and first_run:
        return Known(end, None, 0)
    floor = max(start, known.below if known is not None else start)
    high, stretch = end, _STRETCH
    while high > floor:
        low = max(floor, high - stretch)
        found = Known(end, None, 0)
        for logged in log.read(topic, partition, low, high):
            mark = own_mark(logged, sink)
            if mark is not None:
                found = Known(end, mark, logged.next_offset)
        if found.mark is not None:
            return found
        high, stretch = low, stretch * 8
    return Known(end, known.mark, known.mark_end) if known is not None else Known(end, None, 0)
