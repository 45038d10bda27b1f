"""Which partitions of an expanded topic a query may read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fencepost._ordering import EXPANSIONS_CONFIG, ORDERED_CONFIG
from fencepost.errors import CheckIsOffError
from fencepost.spark import ordered

#: From 2 to 4 partitions, then to 8.
FIRST = {"from": 2, "to": 4, "thresholds": [5, 0]}
SECOND = {"from": 4, "to": 8, "thresholds": [9, 3, 2, 0]}
PENDING = {"from": 4, "to": 8, "pending": True}
UNORDERED = {"from": 4, "to": 8, "unordered": True}


@pytest.mark.parametrize(
    ("count", "expansions", "positions", "latest", "readable"),
    [
        (2, [], {}, False, [0, 1]),
        (4, [FIRST], {}, False, [0, 1]),
        (4, [FIRST], {0: 4, 1: 7}, False, [0, 1]),
        (4, [FIRST], {0: 5}, False, [0, 1, 2, 3]),
        (8, [FIRST, SECOND], {0: 9, 1: 3, 2: 1, 3: 1}, False, [0, 1, 2, 3]),
        (8, [FIRST, SECOND], {0: 9, 1: 3, 2: 2}, False, list(range(8))),
        (8, [FIRST, SECOND], {0: 9, 1: 3, 7: 0}, False, [0, 1, 2, 3, 7]),  # a partition of the checkpoint stays
        (4, [FIRST], {}, True, [0, 1, 2, 3]),
        (8, [FIRST, PENDING], {}, True, [0, 1, 2, 3]),  # thresholds may be after the start
        (8, [FIRST, PENDING], {0: 9, 1: 9, 2: 9, 3: 9}, False, [0, 1, 2, 3]),
        (8, [FIRST], {0: 9}, False, [0, 1, 2, 3]),  # not described yet
        (8, [FIRST, UNORDERED], {0: 4}, False, [0, 1, 4, 5, 6, 7]),
    ],
)
def test_partition_is_readable_after_its_prior_partitions(  # noqa: PLR0917 - a table
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    expansions: list[Any],
    positions: dict[int, int],
    latest: bool,
    readable: list[int],
) -> None:
    configs = {ORDERED_CONFIG: "true", EXPANSIONS_CONFIG: json.dumps(expansions)}
    monkeypatch.setattr(ordered, "described", lambda *_: (count, configs))
    spark: Any = None
    assert ordered._readable(spark, "t", {}, positions, skips=latest) == readable


def test_topic_without_ordered_expansion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "described", lambda *_: (2, {}))
    spark: Any = None
    with pytest.raises(CheckIsOffError):
        ordered._readable(spark, "t", {}, {}, skips=False)
