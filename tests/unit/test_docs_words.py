"""The hand-written documentation stays short enough to be read: at most `WORDS_MAX` words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests import pages
from tests.support.docs import ROOT

WORDS_MAX: Final = 42_000
#: Written by programs: `python -m tests.pages`, `python -m tests.conformance`.
_GENERATED: Final = {(ROOT / "docs" / name).resolve() for name in (*pages.PAGES, "conformance.md")}
#: What a program writes into a page: from one comment to another, or to the end.
_MADE: Final = re.compile(
    r"<!-- (?:made by|options:|published:|the tables of).*?(?:<!-- (?:…|end of)[^>]*-->|\Z)", re.DOTALL
)
#: Commands and programs, which tests run.
_BLOCK: Final = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE)


def words(text: str) -> int:
    """Without code blocks, and without what a program wrote. A word has a letter or a digit."""
    return sum(re.search(r"\w", each) is not None for each in _BLOCK.sub("", _MADE.sub("", text)).split())


def written() -> dict[Path, int]:
    found = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"))
    return {each.relative_to(ROOT): words(each.read_text("utf-8")) for each in found if each not in _GENERATED}


def test_hand_written_documentation_is_short() -> None:
    count = written()
    longest = ", ".join(f"{page} {count[page]:,}" for page in sorted(count, key=lambda each: -count[each])[:8])
    assert len(count) > 50
    assert sum(count.values()) <= WORDS_MAX, f"say each fact once, and link to it. The longest pages: {longest}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One two – three.", 3),
        ("| a | b |\n|---|---|\n| one | two words |", 5),
        ("Run it:\n\n```sh\nmake test\n```\n\nDone.", 3),
        ("A\n<!-- published: x -->\nb c\n<!-- … to here -->\nB", 2),
        ("A\n<!-- the tables of a run -->\nb c\n", 1),
    ],
)
def test_words_are_counted_without_code_and_generated_parts(text: str, count: int) -> None:
    assert words(text) == count
