"""The alert rules: promtool, if installed, accepts them and runs their unit tests; each alert has a page.

Without promtool, these tests check that the rules are PromQL, that their metrics and labels exist, and that each rule
has a unit test (`alerts.test.yml`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.prometheus import PROMTOOL, ROOT, RULES, metrics_in, promtool, selectors, unknown_in

STORIES = Path(__file__).parent / "alerts.test.yml"


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_uses_existing_metrics_and_labels() -> None:
    for alert in alerts():
        assert metrics_in(alert["expr"]), alert["alert"]
        assert not unknown_in(alert["expr"]), alert["alert"]


@pytest.mark.parametrize("job", ["fencepost", "kafka/fencepost", "fencepost-gateway"])
def test_no_alert_depends_on_how_prometheus_names_the_job(job: str) -> None:
    """The Prometheus operator names it NAMESPACE/NAME. Our metrics' names are enough; `up` needs the job."""
    for alert in alerts():
        for each in selectors(alert["expr"]):
            for label in each.matchers.matchers:
                if label.name == "job":
                    assert not each.name.startswith("fencepost_"), alert["alert"]
                    assert "=~" in str(label), alert["alert"]
                    assert re.fullmatch(label.value, job), alert["alert"]
                    assert not re.fullmatch(label.value, "kafka"), alert["alert"]


def test_a_slip_in_an_expression_is_found() -> None:
    assert unknown_in('rate(fencepost_refusals_total{reson="x"}[5m]) > up{job="a"}') == [
        "fencepost_refusals_total{reson}"
    ]
    assert unknown_in("fencepost_redy == 0") == ["fencepost_redy"]
    for slip in ("sum(fencepost_ready", "rate(fencepost_requests_total)", "fencepost_ready > > 1", "avrg(up)"):
        with pytest.raises(ValueError, match=r"."):
            selectors(slip)


def test_every_alert_has_severity_and_runbook() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{alert['alert'].lower()}"


def test_every_alert_has_a_documentation_section() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text("utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))

    assert sections.keys() == {alert["alert"] for alert in alerts()}
    for name, text in sections.items():
        assert "**Meaning.**" in text, name
        assert "**What to do.**" in text, name


def test_every_alert_has_raised_and_quiet_stories() -> None:
    reported: dict[str, set[bool]] = {}
    for story in yaml.safe_load(STORIES.read_text("utf-8"))["tests"]:
        for each in story["alert_rule_test"]:
            reported.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))

    assert reported == {alert["alert"]: {True, False} for alert in alerts()}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_rules_and_stories() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout.decode()
    assert f"{len(alerts())} rules found" in checked.stdout.decode()

    played = promtool("test", "rules", STORIES)
    assert played.returncode == 0, played.stdout.decode()
