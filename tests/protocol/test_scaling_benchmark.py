"""The scaling benchmark runs and reports each measure; its figures are not tested."""

from __future__ import annotations

import pytest

from benchmarks import scaling
from benchmarks.scaling import COST, KB_EACH, OF_SMALLEST, UPKEEP
from tests.support.fake_cluster import FakeClusterProcess


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_UPKEEP_SECONDS", 0.05)
    monkeypatch.setattr(scaling, "_ROUNDS", 2)
    monkeypatch.setattr(scaling, "_ROUND_REQUESTS", 10)


@pytest.mark.parametrize("only", ["connections", "partitions"])
def test_each_dimension_reports_cost_upkeep_and_memory(only: str) -> None:
    found = scaling.rows(quick=True, only=only, scale=0.01)
    assert {COST, OF_SMALLEST, UPKEEP, KB_EACH} <= {row.measure for row in found}
    costs = [row for row in found if row.measure == COST and len(row.values) == 2]
    assert len(costs) >= 2
    assert all(value > 0 for row in costs for value in row.values)


def test_a_refused_append_ends_the_measurement() -> None:
    with FakeClusterProcess(topics={"open": 1}) as kafka:
        client = scaling.Client(kafka.bootstrap)
        try:
            answer = client.query(scaling.produce_frame("no-such-topic", 0))
            with pytest.raises(AssertionError, match="Produce failed with 3"):
                scaling.check(answer, "append 1")
        finally:
            client.close()
