"""Which partitions of an expanded topic a consumer of the library may read: the decisions, without a client."""

from __future__ import annotations

import json
import logging

import pytest

from fencepost import CheckIsOffError, PartitionExpansion, Waiting
from fencepost._ordering import TopicOrder, every, expansions_of, parse_expansions, refuse_without_group, was_read

TO_THREE = PartitionExpansion(2, 3, (57, 80), 1)
TO_FOUR = PartitionExpansion(3, 4, (60, 90, 5), 2)


def order(count: int, *expansions: PartitionExpansion) -> TopicOrder:
    made = TopicOrder("t", every)
    made.learn(count, expansions)
    return made


PENDING = PartitionExpansion(3, 4, None)


@pytest.mark.parametrize(
    ("expanded", "partition", "positions", "waits"),
    [
        pytest.param(order(3, TO_THREE), 0, {}, None, id="original partition"),
        pytest.param(order(3, TO_THREE), 1, {}, None, id="other original partition"),
        pytest.param(order(3), 2, {}, None, id="no expansion"),
        pytest.param(order(3, TO_THREE), 2, {}, {0: (None, 57), 1: (None, 80)}, id="no position"),
        pytest.param(order(3, TO_THREE), 2, {0: 57, 1: None}, {1: (None, 80)}, id="one position"),
        pytest.param(order(3, TO_THREE), 2, {0: 57, 1: 79}, {1: (79, 80)}, id="one position below its threshold"),
        pytest.param(order(3, TO_THREE), 2, {0: 57, 1: 80}, None, id="positions at their thresholds"),
        pytest.param(order(3, TO_THREE), 2, {0: 1000, 1: 1000}, None, id="positions above their thresholds"),
        pytest.param(order(2, PartitionExpansion(1, 2, (0,), 1)), 1, {}, None, id="empty prior partition"),
        pytest.param(order(4, TO_THREE, TO_FOUR), 3, {0: 60, 1: 90, 2: 4}, {2: (4, 5)}, id="second expansion"),
        pytest.param(order(4, TO_THREE, TO_FOUR), 2, {0: 60, 1: 90, 2: 4}, None, id="first of two expansions"),
        pytest.param(order(4, TO_THREE, PENDING), 3, dict.fromkeys(range(3), 999), {}, id="pending expansion"),
        pytest.param(order(3, PartitionExpansion(2, 3, None, 1, unordered=True)), 2, {}, None, id="unordered"),
    ],
)
def test_partition_waits_for_the_positions_of_its_expansion(
    expanded: TopicOrder,
    partition: int,
    positions: dict[int, int | None],
    waits: dict[int, tuple[int | None, int]] | None,
) -> None:
    assert expanded.waiting(partition, positions) == (None if waits is None else Waiting(partition, waits))


def test_undescribed_partition_waits_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    expanded = order(3, TO_THREE)
    expanded.learn(4, (TO_THREE,))
    waits = expanded.waiting(3, {})
    assert waits == Waiting(3, {})
    with caplog.at_level(logging.WARNING, "fencepost"):
        expanded.unexplained([waits], 100.0)
        assert not caplog.messages
        expanded.unexplained([waits], 131.0)
    assert "t-3 is not read" in caplog.text


def test_described_expansion_is_known_before_metadata() -> None:
    assert order(2, TO_THREE).unopened == [0, 1, 2]


def test_an_opened_partition_stays_open() -> None:
    expanded = order(3, TO_THREE)
    expanded.opened.add(2)
    assert expanded.waiting(2, {0: 0, 1: 0}) is None


def test_threshold_above_log_end_is_not_awaited(caplog: pytest.LogCaptureFixture) -> None:
    expanded = order(3, TO_THREE)
    with caplog.at_level(logging.WARNING, "fencepost"):
        expanded.ended_at(0, 50)
        expanded.ended_at(1, 200)
        expanded.ended_at(0, 70)  # later records there do not bring it back
    assert len(caplog.messages) == 1
    assert expanded.waiting(2, {0: 50, 1: 79}) == Waiting(2, {1: (79, 80)})
    assert expanded.waiting(2, {0: 50, 1: 80}) is None


def test_only_assigned_partitions_open_and_sharing_needs_group() -> None:
    mine = TopicOrder("t", lambda partition: partition % 2 == 0)
    mine.learn(3, (TO_THREE,))
    assert mine.unopened == [0, 2]
    assert mine.shares
    with pytest.raises(ValueError, match="without a group id"):
        refuse_without_group("t", mine.shares, grouped=False)
    refuse_without_group("t", mine.shares, grouped=True)
    refuse_without_group("t", order(3).shares, grouped=False)


def test_what_was_read_before() -> None:
    assert was_read(5, 0)
    assert not was_read(0, 0)
    assert not was_read(None, 0)
    assert not was_read(5, 5)  # its records were deleted unread


def test_expansions_are_parsed_from_proxy_json() -> None:
    reported = [
        {"from": 2, "to": 3, "thresholds": [57, 80], "at_ms": 1, "unordered": False},
        {"from": 3, "to": 5, "thresholds": [], "at_ms": 2, "unordered": True},
        {"from": 5, "to": 6, "thresholds": None, "at_ms": None, "unordered": False, "pending": True},
    ]
    first, second, third = parse_expansions(json.dumps(reported))
    assert first == TO_THREE
    assert (second.unordered, second.thresholds, second.pending) == (True, None, False)
    assert third.pending
    assert PENDING.pending


@pytest.mark.parametrize("text", ["[", "[{}]", '[{"from":"a"}]', "3"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind
        parse_expansions(text)


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ({}, "not visible"),
        ({"retention.ms": "1"}, "not a Fencepost proxy"),
        ({"fencepost.ordered.partition.expansion": "false"}, "fencepost.ordered.partition.expansion=false"),
    ],
)
def test_topic_without_ordered_expansion_is_refused(configs: dict[str, str | None], found: str) -> None:
    with pytest.raises(CheckIsOffError, match=found):
        expansions_of("t", configs)
