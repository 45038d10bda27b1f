"""Decides when a consumer may read a partition that an expansion added, without I/O.

A key may have records on a prior partition from before an expansion, and on an added partition from after it. To read
them in order, the consumer reads the added partition only after all *prior partitions* up to their thresholds (their
log end offsets at the expansion). An added partition that is itself a prior partition of a later expansion waits in
the same way, so repeated expansions need no extra rule.

A partition counts as read up to its *position*: the records that earlier calls returned. So a partition is opened only
at the start of a call, never in the call that returns the last records of its prior partitions.

A partition is *opened* once: when the thresholds are reached, or at the start if it was read before (its position is
after its log start; KIP-253 orders new starts only). It stays open, even if the application seeks back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fencepost._checks import check_is_off

#: Topic configs that exist only through the proxy.
ORDERED_CONFIG = "fencepost.ordered.partition.expansion"
EXPANSIONS_CONFIG = "fencepost.ordered.partition.expansions"

_log = logging.getLogger("fencepost")
_UNEXPLAINED_SECONDS = 30.0
#: Rare, because ListOffsets may queue after a fetch on the same connection, and matters only after a loss of records.
_ENDS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PartitionExpansion:
    """One expansion of a topic from `from_count` to `to_count` partitions.

    `thresholds[q]`: log end offset of prior partition `q` at the expansion, for `q` < `from_count`. No record at or
    after it was partitioned for fewer than `to_count` partitions. None if the expansion bypassed the proxy
    (`unordered`) or is in progress (`pending`). `at_ms`: completion time, Unix milliseconds.
    """

    from_count: int
    to_count: int
    thresholds: tuple[int, ...] | None
    at_ms: int | None = None
    unordered: bool = False

    @property
    def pending(self) -> bool:
        return self.thresholds is None and not self.unordered


def expansions_of(topic: str, configs: Mapping[str, str | None]) -> tuple[PartitionExpansion, ...]:
    """Parse a topic's configs, oldest expansion first. Raises CheckIsOffError if ordered expansion is off."""
    reported = configs.get(EXPANSIONS_CONFIG)
    if configs.get(ORDERED_CONFIG) not in ("true", "any") or reported is None:
        raise check_is_off(topic, configs, ORDERED_CONFIG)
    return parse_expansions(reported)


def parse_expansions(text: str) -> tuple[PartitionExpansion, ...]:
    """Parse the value of `fencepost.ordered.partition.expansions`. Raises ValueError."""
    try:
        return tuple(_expansion(each) for each in json.loads(text))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{EXPANSIONS_CONFIG} is malformed: {text!r}") from error


def _expansion(reported: Mapping[str, Any]) -> PartitionExpansion:
    unordered = bool(reported.get("unordered", False))
    known = reported.get("thresholds") is not None and not unordered and not reported.get("pending", False)
    return PartitionExpansion(
        int(reported["from"]),
        int(reported["to"]),
        tuple(map(int, reported["thresholds"])) if known else None,
        reported.get("at_ms"),
        unordered,
    )


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a partition is gated. `prior_partitions`: {prior partition: (position, threshold)}, position None while
    unknown. Empty `prior_partitions`: the expansion that added the partition is not described yet."""

    partition: int
    prior_partitions: Mapping[int, tuple[int | None, int]]


@dataclass(slots=True)
class TopicOrder:
    """One topic of one consumer. `reads(partition)`: whether this consumer reads a partition, also a future one."""

    topic: str
    reads: Callable[[int], bool]
    count: int = 0
    expansions: tuple[PartitionExpansion, ...] = ()
    opened: set[int] = field(default_factory=set)
    #: Log end offsets of partitions that lost records below a threshold (unclean leader election).
    _ends_below: dict[int, int] = field(default_factory=dict)
    _ends_due: float = 0.0
    _first_count: int | None = None
    _unexplained_since: dict[int, float] = field(default_factory=dict)

    def learn(self, count: int, expansions: tuple[PartitionExpansion, ...]) -> None:
        """`count`: partition count, read *before* `expansions`. An expansion is described before its partitions exist,
        so this order ensures that every observed partition has a description."""
        if self._first_count is None:
            self._first_count = expansions[0].from_count if expansions else count
        described = max((each.to_count for each in expansions if not each.pending), default=0)
        self.count = max(self.count, count, described)
        self.expansions = expansions

    @property
    def shares(self) -> bool:
        """Whether other consumers read some of the partitions."""
        return any(not self.reads(partition) for partition in range(self.count))

    @property
    def unopened(self) -> list[int]:
        return [p for p in range(self.count) if p not in self.opened and self.reads(p)]

    def is_created(self, partition: int) -> bool:
        """Whether a known expansion added the partition; otherwise it counts as original."""
        assert self._first_count is not None
        return partition >= self._first_count

    def prior_partitions(self, partition: int) -> range:
        expansion = self._expansion(partition)
        return range(expansion.from_count) if expansion else range(0)

    def waiting(self, partition: int, positions: Mapping[int, int | None]) -> Waiting | None:
        """What the partition waits for; None if it may be read."""
        if partition in self.opened or not self.is_created(partition):
            return None
        expansion = self._expansion(partition)
        if expansion is None or expansion.pending:
            return Waiting(partition, {})
        if expansion.thresholds is None:
            return None  # unordered: there are no thresholds
        unread: dict[int, tuple[int | None, int]] = {}
        for prior_partition, threshold in enumerate(expansion.thresholds):
            requested = min(threshold, self._ends_below.get(prior_partition, threshold))
            position = positions.get(prior_partition)
            if requested > 0 and (position is None or position < requested):
                unread[prior_partition] = (position, requested)
        return Waiting(partition, unread) if unread else None

    def ready(self, positions: Mapping[int, int | None]) -> list[int]:
        """The partitions to open now."""
        return [each for each in self.unopened if self.waiting(each, positions) is None]

    def unread_prior_partitions(self, positions: Mapping[int, int | None], now: float) -> set[int]:
        """The prior partitions that unopened ones wait for. Logs partitions whose expansion is not described."""
        waiting = [waits for each in self.unopened if (waits := self.waiting(each, positions))]
        self.unexplained(waiting, now)
        return {prior_partition for waits in waiting for prior_partition in waits.prior_partitions}

    def ends_are_due(self, now: float) -> bool:
        if now < self._ends_due:
            return False
        self._ends_due = now + _ENDS_SECONDS
        return True

    def ended_at(self, prior_partition: int, log_end: int) -> None:
        """Take a prior partition's log end offset. The high watermark had reached each threshold when it was stored, so
        an end below a threshold means lost records: then the partition counts as read at its log end."""
        highest = max(
            (e.thresholds[prior_partition] for e in self.expansions if e.thresholds and prior_partition < e.from_count),
            default=0,
        )
        if log_end < min(highest, self._ends_below.get(prior_partition, highest)):
            _log.warning(
                "%s-%d lost records: log end offset %d is below threshold %d (added partitions do not wait for them)",
                self.topic,
                prior_partition,
                log_end,
                highest,
            )
            self._ends_below[prior_partition] = log_end

    def unexplained(self, waiting: Collection[Waiting], now: float) -> None:
        """Log partitions that have lacked a description of their expansion for `_UNEXPLAINED_SECONDS`."""
        blank = {each.partition for each in waiting if not each.prior_partitions}
        self._unexplained_since = {p: self._unexplained_since.get(p, now) for p in blank}
        for partition, since in self._unexplained_since.items():
            if now - since >= _UNEXPLAINED_SECONDS:
                self._unexplained_since[partition] = now
                _log.warning(
                    "%s-%d is not read: fencepost.ordered.partition.expansions does not describe its expansion yet "
                    "(check the proxy's log for an expansion in progress)",
                    self.topic,
                    partition,
                )

    def _expansion(self, partition: int) -> PartitionExpansion | None:
        return next((each for each in self.expansions if each.from_count <= partition < each.to_count), None)


def every(_: int) -> bool:
    return True


def was_read(position: int | None, log_start: int) -> bool:
    """Whether the application had read the partition before this start."""
    return position is not None and position > log_start


def refuse_without_group(topic: str, shares: bool, *, grouped: bool) -> None:
    """Raises ValueError if a consumer of some partitions has no group id to read the others' positions with."""
    if shares and not grouped:
        raise ValueError(
            f"topic {topic!r}: partition_filter= without a group id: this consumer cannot see when other processes "
            "have read the prior partitions up to their thresholds (set one group id in all processes and commit "
            "offsets in each; no group is joined)"
        )
