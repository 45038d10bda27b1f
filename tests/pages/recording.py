"""Records the demonstration as docs/demo.svg: `python -m tests.pages.recording`. It takes a minute or two."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Final

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.support.docs import ROOT

_WIDTH: Final = 112
#: Lines of progress, which a terminal would replace.
_PROGRESS: Final = re.compile(r" s  (load   \[|read )")
_STYLES: Final = ((r"REFUSED|which is right", "bold green"), (r"LOST|KILLED|[1-9][\d,]* too often", "bold red"))
#: No font is fetched from elsewhere.
_FORMAT: Final = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def picture(printed: str) -> str:
    """The output of `fencepost demo` as SVG."""
    text = Text("\n".join(line for line in printed.splitlines() if not _PROGRESS.search(line)))
    for pattern, style in _STYLES:
        text.highlight_regex(pattern, style)
    text.highlight_regex(r"(?m)^(\d\. .*|.*:)$", "bold")
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    console.print(text)
    return console.export_svg(title="make demo", theme=MONOKAI, code_format=_FORMAT, unique_id="demo")


def main() -> None:
    command = [sys.executable, "-m", "fencepost_proxy", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (ROOT / "docs" / "demo.svg").write_text(picture(done.stdout), "utf-8")


if __name__ == "__main__":
    main()
