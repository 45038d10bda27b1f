"""Prometheus tools for tests: promtool if it is installed, and a PromQL parser.

`promtool` comes with Prometheus; Debian has both in the package `prometheus`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from fencepost_proxy.observability.exposition import SECTIONS

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy" / "prometheus" / "alerts.rules.yml"
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "fencepost.json"
PROMTOOL: Final = shutil.which("promtool")

#: Grafana's variables, with values that a panel's query could have.
_VARIABLES: Final = {"$__rate_interval": "1m", "$__range": "1h", "$job": "fencepost", "$instance": ".*"}
#: Labels of every series, which identify its target.
_WHOSE: Final = frozenset({"job", "instance"})
#: Metric → its labels when scraped.
LABELS: Final[Mapping[str, frozenset[str]]] = {
    name: _WHOSE | labels
    for section in SECTIONS
    for shown in section.shown
    for name, labels in (
        (
            (f"{shown.name}_bucket", frozenset({*shown.labels, "le"})),
            (f"{shown.name}_count", frozenset(shown.labels)),
            (f"{shown.name}_sum", frozenset(shown.labels)),
        )
        if shown.kind == "histogram"
        else ((shown.name, frozenset(shown.labels)),)
    )
}
#: Prometheus's own metric about the target.
OTHERS: Final[Mapping[str, frozenset[str]]] = {"up": _WHOSE}


def promtool(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Output and errors are both in stdout."""
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *map(str, arguments)],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=120,
    )


def selectors(expression: str) -> list[Any]:
    """The selectors of an expression. Raises ValueError for invalid PromQL: syntax, functions and argument types."""
    promql = pytest.importorskip("promql_parser", reason="it has no wheel for this machine")
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node)

    promql.walk(promql.parse(expression), visit)
    return found


def metrics_in(expression: str) -> set[str]:
    return {each.name for each in selectors(expression) if each.name is not None}


def unknown_in(expression: str) -> list[str]:
    """The proxy's metrics and labels in an expression that do not exist."""
    unknown = []
    for each in selectors(expression):
        name = each.name or ""
        labels = LABELS.get(name, OTHERS.get(name))
        if labels is None:
            unknown.append(name)
            continue
        unknown += [f"{name}{{{label.name}}}" for label in each.matchers.matchers if label.name not in labels]
    return unknown


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def queries() -> list[tuple[str, str]]:
    """(panel, query), with the query as Grafana would send it."""
    return [(panel["title"], _filled(target["expr"])) for panel in panels() for target in panel.get("targets", ())]


def _filled(expression: str) -> str:
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression
