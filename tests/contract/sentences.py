"""The numbered sentences of docs/contract.md, and what tests each.

A numbered sentence is an item of a list or a row of a table that begins with `**A1**`. It ends with what tests it, in
parentheses: `table` or `table/pattern` for rows of this package, and `folder/test_file.py::test_name` for other tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "contract.md"
_BEGINS = re.compile(r"(?:- |\| )\*\*(?P<number>[A-Z]\d+)\*\* (?P<text>.*)")
_ENDS = re.compile(r"^(?P<text>.*) \((?P<tests>`[^`]+`(?:, `[^`]+`)*)\)(?: \|)?$")


class Sentence(NamedTuple):
    """`tests`: as they are written; none if there is no such list at its end."""

    number: str
    text: str
    tests: tuple[str, ...]

    def rows(self, ids: Iterable[str]) -> list[str]:
        return [each for each in ids for pattern in self.tests if _matches(each, pattern)]


def _matches(row: str, pattern: str) -> bool:
    return fnmatchcase(row, pattern if "/" in pattern else f"{pattern}/*")


def sentences(page: str) -> list[Sentence]:
    return list(_sentences(page))


def _sentences(page: str) -> Iterator[Sentence]:
    for item in re.split(r"\n(?=- |\||\n|#)", page):
        begins = _BEGINS.match(" ".join(item.split()))
        if begins is not None:
            ends = _ENDS.match(begins["text"])
            tests = () if ends is None else tuple(re.findall(r"`([^`]+)`", ends["tests"]))
            yield Sentence(begins["number"], begins["text"] if ends is None else ends["text"], tests)


def by_row(page: str, ids: Iterable[str]) -> Mapping[str, list[str]]:
    """The numbers of each row's sentences."""
    found = sentences(page)
    return {row: [each.number for each in found if each.rows([row])] for row in ids}


def problems(page: str, ids: Iterable[str]) -> list[str]:
    """Sentences that nothing tests, tests that do not exist, and rows that no sentence names."""
    ids, listed = list(ids), sentences(page)
    found = [
        f"{each.number}: {test!r} names no {'test' if '::' in test else 'row'}"
        for each in listed
        for test in each.tests
        if not (_exists(test) if "::" in test else any(_matches(row, test) for row in ids))
    ]
    found += [f"{each.number}: nothing tests it" for each in listed if not each.tests]
    found += [f"row {row}: no sentence names it" for row, numbers in by_row(page, ids).items() if not numbers]
    last = ""
    for each in listed:
        follows = last and each.number[0] == last[0]
        if int(each.number[1:]) != (int(last[1:]) + 1 if follows else 1) or any(
            other.number == each.number and other is not each for other in listed
        ):
            found.append(f"{each.number}: not the number after {last or 'none'}")
        last = each.number
    return found


def _exists(test: str) -> bool:
    file, name = test.split("::")
    return name in _tests_in(ROOT / "tests" / file)


@cache
def _tests_in(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
