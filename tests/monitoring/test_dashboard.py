"""The dashboard: its metrics exist, its rows are those that an operator expects, and each panel has a description."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.monitoring.prometheus import DASHBOARD, PROMTOOL, panels, promtool, queries, selectors, unknown_in

ROWS = ["Overview", "Traffic", "Conditional publish", "Partition expansion", "Transactions", "Security and errors"]


def test_dashboard_has_its_rows_and_panel_descriptions() -> None:
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ROWS
    for panel in panels():
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["targets"], panel["title"]
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers)


def test_no_panel_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        position = panel["gridPos"]
        cells = {(position["x"] + dx, position["y"] + dy) for dx in range(position["w"]) for dy in range(position["h"])}
        assert position["x"] + position["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_dashboard_queries_filter_by_job_and_instance() -> None:
    for title, query in queries():
        assert "$" not in query, (title, query)
        assert not unknown_in(query), (title, query)
        # Each query selects one job and the chosen instances.
        for each in selectors(query):
            assert {'job="fencepost"', 'instance=~".*"'} <= {str(label) for label in each.matchers.matchers}, (
                title,
                query,
            )
    assert '"uid": "${datasource}"' in DASHBOARD.read_text("utf-8")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_takes_its_queries(tmp_path: Path) -> None:
    rules = [{"record": f"query:number_{number}", "expr": query} for number, (_, query) in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    checked = promtool("check", "rules", file)

    assert checked.returncode == 0, checked.stdout.decode()
