"""Whether a group may have a partition that an ordered expansion brought: the decision, and what it goes by.

KIP-253 has the consumer wait until its group's positions on all prior partitions have reached the thresholds, and only
where it would start the new partition from its beginning. A proxy sees no positions: it goes by what the group has
committed. And a commit may never reach a threshold although there is nothing left to read: whoever commits "the last
record's offset plus one" stays below a transaction marker, an aborted batch, records that compaction or retention took.
So what counts is whether a *consumable* record lies between commit and threshold (`Tail`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from fencepost_proxy.topics.expansions import Expansion, Growth
from fencepost_proxy.types import TopicPartition


class Why(Enum):
    """Why a partition is withheld."""

    PENDING = "the topic is being expanded"
    PRIORS = "records of prior partitions are not read yet"
    UNKNOWN = "it is not known yet how far the group is"


@dataclass(slots=True)
class Tail:
    """What is known of one prior partition below its threshold: the highest record that a consumer can get there.

    `searched_from` – [searched_from, threshold) was looked through; nothing consumable lies above `highest` there.
    Looking goes backwards from the threshold, so once something is found, no more has to be read for any group.
    """

    threshold: int
    searched_from: int
    highest: int | None = None

    @classmethod
    def of(cls, threshold: int) -> Tail:
        return cls(threshold, threshold)

    def found(self, searched_from: int, highest: int | None) -> None:
        """[searched_from, self.searched_from) was looked through as well."""
        self.searched_from = searched_from
        if self.highest is None:
            self.highest = highest

    def awaits(self, position: int) -> bool | None:
        """Whether a consumer at `position` still gets something below the threshold. None: look there first."""
        if position >= self.threshold:
            return False
        if self.highest is not None:
            return position <= self.highest
        return False if position >= self.searched_from else None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is on one topic.

    `commits` – per partition; one without a commit is missing. `log_starts` – of the prior partitions, and of new ones
    that have a commit; 0 where it does not matter.
    `passed` – prior partitions that it has passed without a commit: it began at their ends, or was waited for long
    enough.
    """

    commits: Mapping[int, int]
    log_starts: Mapping[int, int]
    passed: frozenset[int] = frozenset()

    def position(self, partition: int) -> int:
        """Where it reads on: nothing below the log start is left to read."""
        return max(self.commits.get(partition, 0), self.log_starts.get(partition, 0))


@dataclass(frozen=True, slots=True)
class Wait:
    """For one prior partition. `records_max` – how many offsets lie between; not all of them need be records."""

    prior: int
    position: int
    threshold: int
    committed: bool

    @property
    def records_max(self) -> int:
        return max(0, self.threshold - self.position)


@dataclass(frozen=True, slots=True)
class Search:
    """What has to be looked at before it can be said: the prior partition, from the position on."""

    prior: int
    position: int
    threshold: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one partition and one group: withheld where `why` says so. `searches` – what may let it go."""

    why: Why | None = None
    waits: tuple[Wait, ...] = ()
    searches: tuple[Search, ...] = ()


HANDED_OVER: Final = Verdict()


def brought_by(growth: Growth, partition: int) -> Expansion | Why | None:
    """The ordered expansion for which the partition is a new one; None where it may be had without a question.

    Beyond the known count it waits until it is known what brought it: this process may not have read of an expansion
    yet that another one carries out.
    """
    expansion = growth.born_by(partition)
    if expansion is not None:
        if expansion.ended_at_ms is None:
            return Why.PENDING
        return expansion if expansion.ordered else None
    return Why.PENDING if growth.count is not None and partition >= growth.count else None


def decide(expansion: Expansion, partition: int, progress: Progress, tails: Mapping[int, Tail]) -> Verdict:
    """Of a partition that `brought_by` gave an expansion for. `tails` – by prior partition."""
    if progress.commits.get(partition, 0) > progress.log_starts.get(partition, 0):
        return HANDED_OVER
    waits, searches = [], []
    for prior, threshold in enumerate(expansion.thresholds):
        if prior in progress.passed and prior not in progress.commits:
            continue
        position = progress.position(prior)
        awaits = tails[prior].awaits(position) if prior in tails else None
        if position >= threshold or awaits is False:
            continue
        if awaits is None:
            searches.append(Search(prior, position, threshold))
        waits.append(Wait(prior, position, threshold, prior in progress.commits))
    if not waits:
        return HANDED_OVER
    why = Why.UNKNOWN if len(searches) == len(waits) else Why.PRIORS
    return Verdict(why, tuple(waits), tuple(searches))


@dataclass(frozen=True, slots=True)
class GroupVerdicts:
    """Of one group, of all the partitions that were asked about."""

    withheld: Mapping[TopicPartition, Verdict] = field(default_factory=dict)

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(self.withheld)
