"""The pages of metrics and of log events are the ones that the code would write."""

from __future__ import annotations

import re

from fencepost_proxy.dev import log_page
from fencepost_proxy.net import metrics_page
from tests.monitoring.prometheus import ROOT

DOCS = ROOT / "docs"


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")

    assert page == metrics_page.page(), "run: python -m fencepost_proxy.net.metrics_page > docs/metrics.md"


def test_the_page_of_log_events_is_up_to_date() -> None:
    page = (DOCS / "logs.md").read_text("utf-8")

    assert page == log_page.page(), "run: python -m fencepost_proxy.dev.log_page > docs/logs.md"


def test_events_are_texts_of_our_own() -> None:
    """What comes from somebody else is in a field: there it is quoted, and cannot pass itself off as another one."""
    rows = re.findall(r"^\| [\w ,]+ \| `[\w.]+` \| (.*) \| (?:`|–)", log_page.page(), re.MULTILINE)

    assert len(rows) > 80
    assert [row for row in rows if "…" in row] == [
        # Which side, and how: two words each.
        "what is encrypted on one side goes on in the clear …, passwords of clients too",
        "certificate …",
    ]
