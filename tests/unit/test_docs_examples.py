"""examples/README.md names every example, and how the example itself says that it is run."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.support.docs import ROOT

EXAMPLES: Final = ROOT / "examples"
README: Final = (EXAMPLES / "README.md").read_text("utf-8")
ROWS: Final = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.*) \|$", README, re.MULTILINE)
_PROGRAMS: Final = (".py", ".java", ".go", ".js", ".rs")


def test_every_program_is_named() -> None:
    there = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*")
        if path.suffix in _PROGRAMS and not {"target", "node_modules"}.intersection(path.parts)
    }
    assert {link for link, _ in ROWS} == {each for each in there if not each.endswith("_test.go")}


@pytest.mark.parametrize(("link", "row"), ROWS)
def test_command_is_that_of_the_program(link: str, row: str) -> None:
    text = " ".join((EXAMPLES / link).read_text("utf-8").split())
    for command in re.findall(r"`([^`]* [^`]*)`", row):
        assert command in text


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert (EXAMPLES / link).exists(), link
