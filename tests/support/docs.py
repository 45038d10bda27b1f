"""The code blocks of README.md and docs/, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy" / "docker" / "README.md",
    ROOT / "spark_jobs" / "README.md",
)
SHELL: Final = "sh"
_FENCE: Final = re.compile(r"^ *(`{3,})(.*)$")
_INDENTED: Final = re.compile(
    r"^ {2,}((?:[A-Z_]+=\S+ )?(?:\.venv/bin/|fencepost |kafka-[a-z]+(?:\.sh)? |source |curl ).*)$"
)
_COMMENT: Final = re.compile(r"(^|\s+)#\s.*$")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """`text` – without comments, on one line, with single spaces."""

    where: str
    text: str


def blocks(*pages: Path) -> Iterator[Block]:
    """Raises AssertionError for a block that does not end."""
    for page in pages or PAGES:
        fence, language, begun, lines = "", "", 0, list[str]()
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            found = _FENCE.match(line)
            if not fence and found:
                fence, language, begun, lines = found[1], found[2].strip(), number, []
            elif found and found[1] == fence and not found[2].strip():
                yield Block(page, begun, language, "\n".join(lines))
                fence = ""
            elif fence:
                lines.append(line)
        assert not fence, f"{page.relative_to(ROOT)}:{begun}: this block does not end"


def commands(*pages: Path) -> Iterator[Command]:
    for block in blocks(*pages):
        if block.language == SHELL:
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                if text := " ".join(_COMMENT.sub("", line).split()):
                    yield Command(block.where, text)


def printed_commands(text: str) -> Iterator[str]:
    """The commands of a help text or docstring: indented lines that begin with a program, without explanations."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if found := _INDENTED.match(line):
            yield re.split(r"\s{2,}", _COMMENT.sub("", found[1]))[0]
