"""Which partitions of a growing topic a consumer may read yet, without I/O.

A key may have records on an old partition from before a growth, and on a new one from after it. They are read in order
if nothing is read from the new partition until all of the *prior* ones – those that were there before – have been read
up to their thresholds, where they ended when the topic grew. Priors that are new themselves wait for theirs, so chains
of growths need nothing more.

What counts is the *position*: the records that the application was given by earlier calls. So a partition is opened at
the beginning of a call only, never beside records of its priors from before the growth.

A partition is *opened* once: by reaching its thresholds, or because it was read before (its first position lies behind
its log start: KIP-253 looks at new starts alone). Opened, it stays so, also if an application seeks back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fencepost.expansions import PartitionExpansion

_log = logging.getLogger("fencepost")
_UNEXPLAINED_SECONDS = 30.0
#: Asking where a log ends may wait behind a fetch on the same connection, and matters only where records were lost.
_ENDS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a partition is not read yet: per prior partition (`position`, `threshold`); the position is None while it is
    not known. Without any, the growth that brought the partition has not been described yet."""

    partition: int
    priors: Mapping[int, tuple[int | None, int]]


@dataclass(slots=True)
class TopicOrder:
    """One topic, as one consumer reads it. `mine` – which of its partitions, those to come included."""

    topic: str
    mine: Callable[[int], bool]
    count: int = 0
    expansions: tuple[PartitionExpansion, ...] = ()
    opened: set[int] = field(default_factory=set)
    #: Where a leader lost what lay below a threshold (an unclean election), the log's end then.
    _ends_below: dict[int, int] = field(default_factory=dict)
    _ends_due: float = 0.0
    _first_count: int | None = None
    _unexplained_since: dict[int, float] = field(default_factory=dict)

    def learn(self, count: int, expansions: tuple[PartitionExpansion, ...]) -> None:
        """`count` – of the partitions, read *before* `expansions`: a growth that is under way is described before its
        partitions are there, so all that were seen are explained."""
        if self._first_count is None:
            self._first_count = expansions[0].from_count if expansions else count
        described = max((each.to_count for each in expansions if not each.pending), default=0)
        self.count = max(self.count, count, described)
        self.expansions = expansions

    @property
    def shares(self) -> bool:
        """Somebody else reads partitions that ours wait for."""
        return any(not self.mine(partition) for partition in range(self.count))

    @property
    def unopened(self) -> list[int]:
        return [p for p in range(self.count) if p not in self.opened and self.mine(p)]

    def is_born(self, partition: int) -> bool:
        """By a growth; else it was there from the start, as far as anybody knows."""
        assert self._first_count is not None
        return partition >= self._first_count

    def priors(self, partition: int) -> range:
        expansion = self._expansion(partition)
        return range(expansion.from_count) if expansion else range(0)

    def waiting(self, partition: int, positions: Mapping[int, int | None]) -> Waiting | None:
        """None: it may be read."""
        if partition in self.opened or not self.is_born(partition):
            return None
        expansion = self._expansion(partition)
        if expansion is None or expansion.pending:
            return Waiting(partition, {})
        if expansion.thresholds is None:
            return None  # unordered: nobody knows what to wait for
        behind: dict[int, tuple[int | None, int]] = {}
        for prior, threshold in enumerate(expansion.thresholds):
            wanted = min(threshold, self._ends_below.get(prior, threshold))
            position = positions.get(prior)
            if wanted > 0 and (position is None or position < wanted):
                behind[prior] = (position, wanted)
        return Waiting(partition, behind) if behind else None

    def ready(self, positions: Mapping[int, int | None]) -> list[int]:
        """The partitions that are to be opened now."""
        return [each for each in self.unopened if self.waiting(each, positions) is None]

    def behind(self, positions: Mapping[int, int | None], now: float) -> set[int]:
        """The prior partitions that unopened ones wait for. Says so where nobody can tell what one waits for."""
        waiting = [waits for each in self.unopened if (waits := self.waiting(each, positions))]
        self.unexplained(waiting, now)
        return {prior for waits in waiting for prior in waits.priors}

    def ends_are_due(self, now: float) -> bool:
        if now < self._ends_due:
            return False
        self._ends_due = now + _ENDS_SECONDS
        return True

    def ended_at(self, prior: int, log_end: int) -> None:
        """The end of a prior's log. Kafka's high watermark had reached every threshold when it was stored: an end below
        one means that records were lost, and nothing is left there to wait for."""
        highest = max(
            (e.thresholds[prior] for e in self.expansions if e.thresholds and prior < e.from_count), default=0
        )
        if log_end < min(highest, self._ends_below.get(prior, highest)):
            _log.warning(
                "%s-%d ends at %d, below its threshold %d: records were lost there; no new partition waits for them",
                self.topic,
                prior,
                log_end,
                highest,
            )
            self._ends_below[prior] = log_end

    def unexplained(self, waiting: Collection[Waiting], now: float) -> None:
        """Says so where a partition has been there for long, and no growth that brought it is described."""
        blank = {each.partition for each in waiting if not each.priors}
        self._unexplained_since = {p: self._unexplained_since.get(p, now) for p in blank}
        for partition, since in self._unexplained_since.items():
            if now - since >= _UNEXPLAINED_SECONDS:
                self._unexplained_since[partition] = now
                _log.warning(
                    "%s-%d is not read: the growth that brought it is not described by ordered.partition.expansions "
                    "yet; is it still under way (see the proxy's log)?",
                    self.topic,
                    partition,
                )

    def _expansion(self, partition: int) -> PartitionExpansion | None:
        return next((each for each in self.expansions if each.from_count <= partition < each.to_count), None)


def every(_: int) -> bool:
    return True


def was_read(position: int | None, log_start: int) -> bool:
    """By this application, before it started now."""
    return position is not None and position > log_start


def refuse_alone(topic: str, shares: bool, group_id: str | None) -> None:
    """Raises ValueError where nobody could tell this consumer how far the others are."""
    if shares and group_id is None:
        raise ValueError(
            f"topic {topic!r}: this consumer reads some of its partitions only (mine=…), and a new one may be read "
            "only when all prior ones were read up to where they ended; give all processes one group id, so that each "
            "sees what the others have committed (nothing is joined), and commit in each"
        )
