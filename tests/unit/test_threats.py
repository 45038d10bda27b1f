"""What docs/threats.md says is tested is tested: each test that it names is there, and each row names one or says that
there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.hostile import WAYS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "threats.md").read_text("utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def _tests_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def test_each_test_that_is_named_exists() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 40
    assert [(path, name) for path, name in named if not (ROOT / path).exists() or name not in _tests_in(path)] == []


def test_each_threat_has_test_or_stated_gap() -> None:
    rows = [row for row in TEXT.splitlines() if row.startswith("| ") and not row.startswith("| threat")]
    rows = [row for row in rows if row.count(" | ") == 2]
    assert len(rows) > 25
    for row in rows:
        _, stops, tests = row.strip("| ").split(" | ")
        assert NAMED.search(tests) or ("**" in stops and tests == "–"), row
        assert not re.sub(NAMED, "", tests).strip(", –"), f"not the name of a test: {row}"


def test_each_hostile_client_behaviour_has_published_rates() -> None:
    rates = [
        row.strip("| ").split(" | ") for row in TEXT.splitlines() if row.startswith("| ") and row.count(" | ") == 4
    ]
    assert [row[0] for row in rates[1:]] == list(WAYS)
    kept = {row[0]: int(row[4].split("%")[0]) for row in rates[1:]}
    assert all(percent >= 50 or "**not kept**" in row[4] for row, percent in zip(rates[1:], kept.values(), strict=True))
