"""Gated assignment: a partition added by an ordered expansion, which a group may not have yet.

The decision and its inputs.

KIP-253 lets a consumer wait until its group's positions on all prior partitions have reached the thresholds, and only
if it would start the new partition from its beginning. A proxy does not see positions, so it uses the group's commits.
A commit may never reach a threshold although nothing is left to read. A group that commits "last record's offset plus
one" stays below a transaction marker, an aborted batch, or records removed by compaction or retention. So a partition
is gated while a *consumable* record lies between a commit and a threshold (`LogEndSnapshot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from fencepost_proxy.expansion.history import Expansion, ExpansionHistory


class Why(Enum):
    """Why a partition is gated."""

    PENDING = "the topic is being expanded"
    PRIOR_PARTITIONS = "records of prior partitions are not read yet"
    UNKNOWN = "the group's progress is not known yet"


@dataclass(slots=True)
class RemainingRecords:
    """A prior partition below its threshold: the highest record there that a consumer can get.

    `searched_from`: [searched_from, threshold) was searched; it has nothing consumable above `highest`.
    The search goes backwards from the threshold, so once a record is found, it serves all groups.
    """

    threshold: int
    searched_from: int
    highest: int | None = None

    @classmethod
    def of(cls, threshold: int) -> RemainingRecords:
        return cls(threshold, threshold)

    def found(self, searched_from: int, highest: int | None) -> None:
        """[searched_from, self.searched_from) was searched as well."""
        self.searched_from = searched_from
        if self.highest is None:
            self.highest = highest

    def awaits(self, position: int) -> bool | None:
        """Whether a consumer at `position` still gets a record below the threshold. None: search there first."""
        if position >= self.threshold:
            return False
        if self.highest is not None:
            return position <= self.highest
        return False if position >= self.searched_from else None


@dataclass(frozen=True, slots=True)
class Progress:
    """A group's progress on one topic.

    `commits`: per partition; a partition without a commit is missing. `log_starts`: of the prior partitions, and of new
    ones with a commit; 0 if irrelevant.
    `passed`: prior partitions that it has passed without a commit: it began at their ends, or timed out.
    """

    commits: Mapping[int, int]
    log_starts: Mapping[int, int]
    passed: frozenset[int] = frozenset()

    def position(self, partition: int) -> int:
        """Its next offset: nothing below the log start is left to read."""
        return max(self.commits.get(partition, 0), self.log_starts.get(partition, 0))


@dataclass(frozen=True, slots=True)
class Wait:
    """For one prior partition. `records_max`: number of offsets between; not all of them need be records."""

    prior_partition: int
    position: int
    threshold: int
    committed: bool

    @property
    def records_max(self) -> int:
        return max(0, self.threshold - self.position)


@dataclass(frozen=True, slots=True)
class Search:
    """A search needed for the decision: the prior partition, from the position on."""

    prior_partition: int
    position: int
    threshold: int


@dataclass(frozen=True, slots=True)
class Decision:
    """For one partition and one group: gated if `why` is set. `searches`: those that may release it."""

    why: Why | None = None
    waits: tuple[Wait, ...] = ()
    searches: tuple[Search, ...] = ()

    @property
    def records_max(self) -> int:
        return sum(wait.records_max for wait in self.waits)


RELEASED: Final = Decision()


def brought_by(history: ExpansionHistory, partition: int) -> Expansion | Why | None:
    """The ordered expansion that added the partition; None if the partition is never gated.

    A partition beyond the known count is gated until its origin is known: this process may not have read yet of an
    expansion that another one drives.
    """
    expansion = history.created_by(partition)
    if expansion is not None:
        if expansion.ended_at_ms is None:
            return Why.PENDING
        return expansion if expansion.ordered else None
    return Why.PENDING if history.count is not None and partition >= history.count else None


def decide(
    expansion: Expansion, partition: int, progress: Progress, remaining_by_partition: Mapping[int, RemainingRecords]
) -> Decision:
    """For a partition for which `brought_by` returned an expansion. `remaining_by_partition`: by prior partition."""
    if progress.commits.get(partition, 0) > progress.log_starts.get(partition, 0):
        return RELEASED
    waits, searches = [], []
    for prior_partition, threshold in enumerate(expansion.thresholds):
        if prior_partition in progress.passed and prior_partition not in progress.commits:
            continue
        position = progress.position(prior_partition)
        awaits = (
            remaining_by_partition[prior_partition].awaits(position)
            if prior_partition in remaining_by_partition
            else None
        )
        if position >= threshold or awaits is False:
            continue
        if awaits is None:
            searches.append(Search(prior_partition, position, threshold))
        waits.append(Wait(prior_partition, position, threshold, prior_partition in progress.commits))
    if not waits:
        return RELEASED
    why = Why.UNKNOWN if len(searches) == len(waits) else Why.PRIOR_PARTITIONS
    return Decision(why, tuple(waits), tuple(searches))
