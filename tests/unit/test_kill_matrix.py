"""Generated defects of the kill matrix, and its page."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from fencepost_proxy.sequencer.in_doubt import Lookups
from fencepost_proxy.session.relay.fast_path import FastPath
from tests import kill_matrix

_FUNCTION = """
def f(a, b):
    if a < b and a:
        b = 1
    return a
"""
_EXCLUDED_IN = ((FastPath, "take_up"), (FastPath, "take_down"), (Lookups, "_refusal"))
_HERE = "tests/unit/test_kill_matrix.py"


def _with_defect(number: int) -> str:
    tree = ast.parse(_FUNCTION)
    list(kill_matrix.changes(tree))[number][1]()
    return ast.unparse(ast.fix_missing_locations(tree))


def test_each_defect_changes_one_place() -> None:
    count = len(list(kill_matrix.changes(ast.parse(_FUNCTION))))
    defective = [_with_defect(number) for number in range(count)]
    assert len({*defective}) == count == 4
    for change in ("if not (a < b and a):", "if a <= b and a:", "if a < b or a:", "pass"):
        assert sum(change in each for each in defective) == 1, change


def test_excluded_defects_are_generated_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that matches nothing would hide a later defect."""
    excluded = kill_matrix.EQUIVALENT
    monkeypatch.setattr(kill_matrix, "EQUIVALENT", {})
    functions = [getattr(holder, name) for holder, name in _EXCLUDED_IN]
    monkeypatch.setattr(kill_matrix, "_functions", lambda: iter(functions))
    made = kill_matrix.generated({kill_matrix.place(function.__code__) for function in functions})
    names = [re.sub(r" \+\d+: ", ": ", defect.name) for defect in made]
    for each in excluded:
        assert any(each.startswith(name) for name in names), each


def test_page_counts_what_is_detected_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, removed = (f"{_HERE}::test_{name}" for name in ("one", "other", "removed"))
    killed = {"first": [one], "second": [one, other], "third": [other, removed], "fourth": []}
    results = tmp_path / "results.jsonl"
    results.write_text(
        "\n".join(
            json.dumps({"defect": name, "kind": "seeded", "modelled": False, "killed": each})
            for name, each in killed.items()
        )
    )
    monkeypatch.setattr(kill_matrix, "RESULTS", results)
    lines = kill_matrix.page([one, f"{other}[1]", removed], {one, other}).splitlines()
    assert "- seeded defects: 4, detected by fast tests: 3" in lines
    (row,) = [line for line in lines if line.startswith(f"| `{_HERE}`")]
    assert row.endswith("| 2 | 2 | 2 | 3 |")
    assert "- `fourth`: only the simulation or the fuzzer" in lines
