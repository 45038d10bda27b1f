"""The documented table of APIs is the one that the proxy works by."""

from __future__ import annotations

from pathlib import Path

from fencepost_proxy.dev.api_table import api_table

FILE = Path(__file__).parents[2] / "docs" / "api-table.md"


def test_the_documented_table_is_up_to_date() -> None:
    assert FILE.read_text("utf-8") == api_table(), "run: python -m fencepost_proxy.dev.api_table > docs/api-table.md"
