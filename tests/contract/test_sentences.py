"""Each numbered sentence of docs/contract.md names what tests it, and each row of the tables is named."""

from __future__ import annotations

import re

import pytest

from tests.contract.sentences import PAGE, problems, sentences
from tests.contract.tables import TABLES

_TEXT = PAGE.read_text("utf-8")
_ROWS = [f"{table}/{row.name}" for table, rows in TABLES.items() for row in rows]


def test_each_sentence_has_tests_and_each_row_a_sentence() -> None:
    assert len(sentences(_TEXT)) > 60
    assert problems(_TEXT, _ROWS) == []


def test_each_rule_in_the_text_is_numbered_and_binding() -> None:
    rules = {each.number: each.text for each in sentences(_TEXT)}
    # The rows of answers stand under A1.
    assert [number for number, text in rules.items() if number[0] != "A" and not re.search("MUST|MAY", text)] == []
    rest = " ".join(_TEXT.split())
    for text in rules.values():
        rest = rest.replace(text, "")
    assert [each.split("MUST")[0][-12:] for each in rest.split(". ") if "MUST" in each] == ["hat a proxy "]


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        ("- **X5** It MUST be blue.", "X5: nothing tests it"),
        ("- **X5** It MUST be blue. (`colours`)", "X5: 'colours' names no row"),
        ("- **X5** It MUST be blue. (`acks_0/blue-*`)", "X5: 'acks_0/blue-*' names no row"),
        (
            "- **X5** It MUST be blue. (`unit/test_state.py::test_blue`)",
            "X5: 'unit/test_state.py::test_blue' names no test",
        ),
        (
            "- **X5** It MUST be blue. (`unit/test_blue.py::test_blue`)",
            "X5: 'unit/test_blue.py::test_blue' names no test",
        ),
        ("- **X7** It MUST be blue. (`order`)", "X7: not the number after X4"),
        ("| **X5** | It MUST\n  be blue (`order`, `colours`) |", "X5: 'colours' names no row"),
    ],
)
def test_planted_sentence_is_found(planted: str, problem: str) -> None:
    end = _TEXT.index("## Guarantees")
    assert problems(f"{_TEXT[:end]}{planted}\n\n{_TEXT[end:]}", _ROWS) == [problem]


def test_planted_row_is_found() -> None:
    assert problems(_TEXT, [*_ROWS, "retries/blue"]) == ["row retries/blue: no sentence names it"]


def test_sentence_that_loses_its_rows_is_found() -> None:
    assert "row acks_0/a-refusal-closes-the-connection: no sentence names it" in problems(
        _TEXT.replace("(`acks_0`, ", "("), _ROWS
    )
