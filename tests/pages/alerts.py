"""The alert rules as a PrometheusRule of the Prometheus operator."""

from __future__ import annotations

from textwrap import indent

from tests.support.docs import ROOT

RULES = ROOT / "deploy" / "prometheus" / "alerts.rules.yml"
_HEAD = """\
# From deploy/prometheus/alerts.rules.yml: python -m tests.pages
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: fencepost
  labels: { app.kubernetes.io/name: fencepost }
spec:
"""


def page() -> str:
    _, groups, rules = RULES.read_text("utf-8").partition("groups:\n")
    return _HEAD + indent(groups + rules, "  ")
