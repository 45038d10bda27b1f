"""Progress output: a live line on a terminal, otherwise a plain line if its text has changed, at intervals."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

LINE_INTERVAL_SECONDS = 10.0
#: An unchanged line is repeated after this time, so that a log shows that the program still runs.
SAME_LINE_SECONDS = 60.0
#: Narrow, so that the line fits 80 columns.
_BAR_WIDTH = 10


class Screen:
    """Permanent lines (`say`), and one live line below them (`live`)."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._started = time.monotonic()
        self._live = ""
        self._line_at = float("-inf")
        self._line_text = ""

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, source: str, text: str) -> None:
        """Prints a permanent line with time and subject."""
        self.line(f"{self.elapsed_seconds():6.1f} s  {source:<6} {text}")

    def line(self, text: str = "") -> None:
        self._wipe()
        self._out.write(text + "\n")
        self._out.flush()

    def live(self, source: str, text: str) -> None:
        """Replaces the live line; may be called at any rate."""
        line = f"{self.elapsed_seconds():6.1f} s  {source:<6} {text}"
        if self._terminal:
            line = line[: shutil.get_terminal_size().columns - 1]
            self._out.write("\r" + line.ljust(len(self._live)))
            self._out.flush()
            self._live = line
            return
        pause = SAME_LINE_SECONDS if text == self._line_text else LINE_INTERVAL_SECONDS
        if time.monotonic() - self._line_at >= pause:
            self._line_at, self._line_text = time.monotonic(), text
            self.line(line)

    def end(self) -> None:
        """Clears the live line."""
        self._wipe()

    def _wipe(self) -> None:
        if self._live:
            self._out.write("\r" + " " * len(self._live) + "\r")
            self._live = ""


def bar(share: float) -> str:
    """A progress bar; `share` is 0 to 1."""
    full = round(min(1.0, max(0.0, share)) * _BAR_WIDTH)
    return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {share:4.0%}"
