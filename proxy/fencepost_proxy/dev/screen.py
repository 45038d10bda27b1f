"""Progress that a person can follow: a line that moves on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

PLAIN_INTERVAL_SECONDS = 2.0
#: Narrow, so that what follows fits a terminal of 80 columns.
_BAR_WIDTH = 10


class Screen:
    """Lines that stay (`say`), and one below them that is drawn over (`live`)."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._started = time.monotonic()
        self._live = ""
        self._plain_at = 0.0

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, who: str, text: str) -> None:
        """A line that stays, with the time and who it is about."""
        self.line(f"{self.elapsed_seconds():6.1f} s  {who:<6} {text}")

    def line(self, text: str = "") -> None:
        self._wipe()
        self._out.write(text + "\n")
        self._out.flush()

    def live(self, who: str, text: str) -> None:
        """What is going on right now; call it as often as you like."""
        line = f"{self.elapsed_seconds():6.1f} s  {who:<6} {text}"
        if self._terminal:
            line = line[: shutil.get_terminal_size().columns - 1]
            self._out.write("\r" + line.ljust(len(self._live)))
            self._out.flush()
            self._live = line
        elif time.monotonic() - self._plain_at >= PLAIN_INTERVAL_SECONDS:
            self._plain_at = time.monotonic()
            self.line(line)

    def end(self) -> None:
        """Nothing is live any more."""
        self._wipe()

    def _wipe(self) -> None:
        if self._live:
            self._out.write("\r" + " " * len(self._live) + "\r")
            self._live = ""


def bar(share: float) -> str:
    """`share` 0 to 1, drawn."""
    full = round(min(1.0, max(0.0, share)) * _BAR_WIDTH)
    return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {share:4.0%}"
