"""What the command lines of long proofs share: a directory for logs, progress, and the exit status."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from pathlib import Path


class Proof:
    """Client libraries log every lost connection: their logs are off."""

    def __init__(self, name: str) -> None:
        logging.basicConfig(level=logging.CRITICAL)
        self.directory = Path(tempfile.mkdtemp(prefix=f"fencepost-{name}-"))
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def end(self, holds: bool, *, keep: bool = False) -> int:
        """The exit status. The logs of a failed proof are kept."""
        if holds and not keep:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            print(f"the logs are in {self.directory}")
        return 0 if holds else 1
