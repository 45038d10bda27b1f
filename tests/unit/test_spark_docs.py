"""docs/spark.md has the sink's options, error messages and measurements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.results import Report
from benchmarks.spark import published
from fencepost.spark.options import IGNORED, KAFKA_OPTIONS, OPTIONS, Option

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text("utf-8")
SINK = ROOT / "client" / "fencepost" / "spark"


def options_section() -> str:
    """The text between the page's comments."""
    return f"{lines(OPTIONS)}\n\n{lines(KAFKA_OPTIONS)}\n\n{ignored()}"


def lines(options: tuple[Option, ...]) -> str:
    def default(option: Option) -> str:
        return "required" if option.default is None else f"`{option.default}`" if option.default else "–"

    rows = [f"| `{each.name}` | {default(each)} | {each.meaning.replace('|', chr(92) + '|')} |" for each in options]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows])


def ignored() -> str:
    return "Accepted and ignored: " + ", ".join(f"`kafka.{name}`" for name in sorted(IGNORED)) + "."


def test_the_page_has_all_options_and_no_other() -> None:
    between = PAGE.partition("<!-- options:")[2].partition("\n")[2].partition("<!-- … to here -->")[0]
    assert between.strip() == options_section(), f"put this between the comments of docs/spark.md:\n{options_section()}"


def texts() -> Iterator[str]:
    """What stands between the placeholders of the sink's messages."""
    for file in SINK.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Errors")[2].partition("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("quoted", QUOTED)
def test_quoted_messages_match_the_code(quoted: str) -> None:
    known = list(texts())
    for part in quoted.split("…"):
        words = part.strip()
        assert any(words in text for text in known), words


def test_refusals_are_quoted_at_all() -> None:
    assert len(QUOTED) >= 5


def test_published_goals_match_the_last_kept_run() -> None:
    last = max((ROOT / "benchmarks" / "results").glob("spark-*.json"))
    assert published(PAGE, Report.from_json(last.read_text("utf-8"))) == PAGE
