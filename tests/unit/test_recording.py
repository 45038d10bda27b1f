"""docs/demo.svg is what `python -m tests.pages.recording` makes: without progress, and without a link to fetch."""

from __future__ import annotations

import re

from tests.pages.recording import picture
from tests.support.docs import ROOT

_PRINTED = """   5.4 s  A      appends 150 at offset 1
  26.4 s  load   [##........]  20% 67,000 rows in the log
  26.5 s  load   KILLED with -9
  27.0 s  read   40,000 records
"""


def test_progress_is_left_out() -> None:
    text = picture(_PRINTED).replace("&#160;", " ")
    assert "appends 150 at offset 1" in text
    assert "KILLED" in text
    assert "67,000" not in text
    assert "40,000" not in text


def test_recording_fetches_nothing() -> None:
    recorded = (ROOT / "docs" / "demo.svg").read_text("utf-8")
    assert "REFUSED" in recorded
    assert not re.search(r"(?:url|href|src)\W+https?:", recorded)
