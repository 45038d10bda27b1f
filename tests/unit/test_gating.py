"""The decision whether a group may have a new partition, as a table."""

from __future__ import annotations

from uuid import UUID

import pytest

from fencepost_proxy.expansion.gating import RELEASED, Progress, RemainingRecords, Search, Why, brought_by, decide
from fencepost_proxy.expansion.history import Expansion, ExpansionHistory
from fencepost_proxy.types import LogEndOffset

_ID = UUID(int=1)


def _expansion(
    from_count: int, to_count: int, *thresholds: int, done: bool = True, unordered: bool = False
) -> Expansion:
    return Expansion(
        topic="orders",
        topic_id=_ID,
        from_count=from_count,
        to_count=to_count,
        proposal=UUID(int=from_count),
        at_ms=0,
        thresholds=tuple(map(LogEndOffset, thresholds)),
        unordered=unordered,
        ended_at_ms=0 if done else None,
    )


_FIRST = _expansion(2, 3, 10, 20)


def _all_records(expansion: Expansion = _FIRST) -> dict[int, RemainingRecords]:
    """Logs in which the last record before each threshold can be consumed."""
    remaining_by_partition = {}
    for prior_partition, threshold in enumerate(expansion.thresholds):
        remaining = RemainingRecords.of(threshold)
        remaining.found(max(0, threshold - 1), threshold - 1 if threshold else None)
        remaining_by_partition[prior_partition] = remaining
    return remaining_by_partition


# ---- which partitions it is about


@pytest.mark.parametrize(
    ("history", "partition", "brought"),
    [
        (ExpansionHistory(), 7, None),  # never counted
        (ExpansionHistory(2), 1, None),
        (ExpansionHistory(2), 2, Why.PENDING),  # another process may know more
        (ExpansionHistory(3, (_FIRST,)), 1, None),
        (ExpansionHistory(3, (_FIRST,)), 2, _FIRST),
        (ExpansionHistory(3, (_FIRST,)), 3, Why.PENDING),
        (ExpansionHistory(2, (), _expansion(2, 4, done=False)), 1, None),
        (ExpansionHistory(2, (), _expansion(2, 4, done=False)), 2, Why.PENDING),
        (ExpansionHistory(2, (), _expansion(2, 4, done=False)), 4, Why.PENDING),
        (
            ExpansionHistory(3, (_expansion(2, 3, unordered=True),)),
            2,
            None,
        ),  # the ends of the prior partitions are unknown
    ],
)
def test_only_partitions_from_ordered_expansions_are_evaluated(
    history: ExpansionHistory, partition: int, brought: Expansion | Why | None
) -> None:
    assert brought_by(history, partition) == brought


# ---- whether it is gated


@pytest.mark.parametrize(
    ("commits", "starts", "gated"),
    [
        ({0: 10, 1: 20}, {}, False),
        ({0: 9, 1: 20}, {0: 0}, True),
        ({0: 10, 1: 0}, {1: 0}, True),
        ({0: 10}, {1: 0}, True),  # no commit: it begins at the log start
        ({0: 10}, {1: 20}, False),  # retention took all that was before
        ({0: 3, 1: 20}, {0: 10}, False),
        ({0: 3, 1: 20}, {0: 9}, True),
        ({0: 0, 1: 0, 2: 1}, {}, False),  # KIP-253: only where it begins the new one from the start
        ({0: 0, 1: 0, 2: 0}, {}, True),
        ({0: 0, 1: 0, 2: 5}, {2: 5}, True),  # its first five records have expired: that is its beginning
        ({0: 0, 1: 0, 2: 6}, {2: 5}, False),
        ({0: 100, 1: 200}, {}, False),
    ],
)
def test_partition_waits_for_each_prior_partitions_last_record(
    commits: dict[int, int], starts: dict[int, int], gated: bool
) -> None:
    decision = decide(_FIRST, 2, Progress(commits, starts), _all_records())
    assert (decision.why is Why.PRIOR_PARTITIONS) is gated
    assert (decision == RELEASED) is not gated


def test_decision_lists_remaining_records_per_prior_partition() -> None:
    decision = decide(_FIRST, 2, Progress({0: 4}, {0: 0, 1: 5}), _all_records())
    assert [(w.prior_partition, w.position, w.threshold, w.records_max, w.committed) for w in decision.waits] == [
        (0, 4, 10, 6, True),
        (1, 5, 20, 15, False),
    ]


def test_empty_prior_partitions_are_not_awaited() -> None:
    assert decide(_expansion(2, 3, 0, 0), 2, Progress({}, {}), {}) == RELEASED


def test_only_uncommitted_prior_partitions_may_be_passed() -> None:
    passed = frozenset({0, 1})
    assert decide(_FIRST, 2, Progress({}, {}, passed), _all_records()) == RELEASED
    assert decide(_FIRST, 2, Progress({0: 4}, {}, passed), _all_records()).why is Why.PRIOR_PARTITIONS


def test_unsearched_prior_partition_delays_and_is_searched() -> None:
    decision = decide(_FIRST, 2, Progress({0: 4, 1: 20}, {}), {})
    assert decision.why is Why.UNKNOWN
    assert decision.searches == (Search(0, 4, 10),)


# ---- what is known of the log below a threshold


@pytest.mark.parametrize(
    ("searched_from", "highest", "position", "awaits"),
    [
        (10, None, 10, False),
        (10, None, 9, None),
        (8, None, 8, False),  # two markers, say
        (8, None, 7, None),
        (4, 6, 3, True),  # a record is above, wherever else
        (4, 6, 6, True),
        (4, 6, 7, False),
        (4, 6, 0, True),
    ],
)
def test_remaining_records_answer_only_for_searched_range(
    searched_from: int, highest: int | None, position: int, awaits: bool | None
) -> None:
    remaining = RemainingRecords.of(10)
    if searched_from < 10:
        remaining.found(searched_from, highest)
    assert remaining.awaits(position) is awaits


def test_searching_further_back_keeps_later_findings() -> None:
    remaining = RemainingRecords.of(10)
    remaining.found(8, None)
    remaining.found(4, 5)
    remaining.found(0, 3)
    assert remaining.awaits(5) is True
    assert remaining.awaits(6) is False
