"""The steps of an ordered consumer, over a topic in memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from fencepost import CheckIsOffError, Waiting
from fencepost._ordered_consumer import OrderedReads
from fencepost._steps import run


@dataclass
class Topic:
    """Partitions 0 and 1, then 2 after an expansion with thresholds 3 and 0."""

    expanded: bool = False
    ordered: bool = True
    committed_offsets: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    assigned: list[int] = field(default_factory=list)
    started_at: dict[int, int | None] = field(default_factory=dict)

    def describe(self, topic: str) -> tuple[int, dict[str, str | None]]:
        expansion = {"from": 2, "to": 3, "thresholds": [3, 0], "at_ms": 1}
        return 3 if self.expanded else 2, {
            "fencepost.ordered.partition.expansion": str(self.ordered).lower(),
            "fencepost.ordered.partition.expansions": json.dumps([expansion] if self.expanded else []),
        }

    def committed(self, topic: str, partitions: Collection[int]) -> dict[int, int | None]:
        return {p: self.committed_offsets.get(p) for p in partitions}

    def log_starts(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, 0)

    earliest = log_starts

    def log_ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, 3)

    def position(self, topic: str, partition: int) -> int | None:
        return self.positions.get(partition)

    def assign(self, topic: str, starts: Mapping[int, int | None], opened: Collection[tuple[str, int]]) -> None:
        self.started_at |= starts
        self.assigned = [partition for _, partition in opened]


def reads(topic: Topic, **options: Any) -> OrderedReads:
    defaults = {"partition_filter": None, "given": None, "grouped": True, "latest": False, "refresh_seconds": 0.0}
    return OrderedReads(["t"], topic, **(defaults | options))


def test_added_partition_is_opened_after_its_prior_partitions() -> None:
    topic = Topic()
    ordered = reads(topic)
    run(ordered.start())
    assert topic.assigned == [0, 1]
    topic.expanded = True
    topic.positions = {0: 2, 1: 0}
    run(ordered.fetch(0, lambda _: []))
    assert topic.assigned == [0, 1]
    assert ordered.waiting() == {("t", 2): Waiting(2, {0: (2, 3)})}
    topic.positions[0] = 3
    run(ordered.fetch(0, lambda _: []))
    assert topic.assigned == [0, 1, 2]
    assert topic.started_at[2] == 0, "from its first record, whatever the reset policy"


def test_prior_partition_of_another_consumer_counts_by_its_commits() -> None:
    topic = Topic(expanded=True)
    ordered = reads(topic, partition_filter=lambda partition: partition != 0)
    run(ordered.start())
    assert topic.assigned == [1]
    topic.committed_offsets = {0: 3}
    run(ordered.fetch(0, lambda _: []))
    assert topic.assigned == [1, 2]


def test_partition_read_before_the_start_is_not_gated() -> None:
    topic = Topic(expanded=True, committed_offsets={2: 4})
    run(reads(topic).start())
    assert topic.assigned == [0, 1, 2]
    assert topic.started_at == {0: None, 1: None, 2: 4}


def test_position_of_the_application_comes_before_its_commit() -> None:
    topic = Topic(committed_offsets={0: 1, 1: 1})
    run(reads(topic, given={("t", 0): 5}).start())
    assert topic.started_at == {0: 5, 1: 1}


def test_fetch_returns_records_or_ends_in_time() -> None:
    topic = Topic()
    ordered = reads(topic)
    run(ordered.start())
    found = [[], [], ["record"]]
    assert run(ordered.fetch(None, lambda _: found.pop(0))) == ["record"]
    assert run(ordered.fetch(0, lambda _: [])) == []


def test_unordered_topic_is_refused() -> None:
    with pytest.raises(CheckIsOffError):
        run(reads(Topic(ordered=False)).start())
