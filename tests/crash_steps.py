"""`make crash-steps`: the proxy is killed before and after every step by which a topic grows, and the broker at some.

Runs those tests of `tests/integration/test_growing_topics.py` and prints what came of each as a table: in how many
seconds the whole story was told, or that it failed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "integration" / "test_growing_topics.py"
_PROXY = re.compile(r"killed_at_any_step\S*\[(\w+)-(\S+)\]")
_BROKER = re.compile(r"broker_is_killed_at_a_step\[(\w+)\]")


class _Table:
    """By step (a row) and what happens there (a column)."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = {}
        self.columns: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        if found := _PROXY.search(report.nodeid):
            step, column = found.groups()
        elif found := _BROKER.search(report.nodeid):
            step, column = found.group(1), "broker-killed"
        else:
            return
        self.columns[column] = None
        row = self.cells.setdefault(step, {})
        if row.get(column) != "FAILED":
            row[column] = f"{report.duration:.1f} s" if report.passed else "FAILED"

    def __str__(self) -> str:
        rows = [["step", *self.columns]]
        rows += [[step, *(row.get(column, "-") for column in self.columns)] for step, row in self.cells.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    table = _Table()
    status = pytest.main(["-q", "-m", "", "-k", "killed", str(TESTS)], plugins=[table])
    print(f"\n{table}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
