"""A process that is controlled by lines of text on its standard input and output."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fencepost_dev.process import supervised
from tests.kit.closing import Closing

_ROOT = Path(__file__).parents[2]
_END_SECONDS = 15.0


class LineProcess(Closing):
    """Start it in a thread that lives as long: the process ends with it.

    `on_line` – called in another thread with each complete line, without its end, and with None at the end. `log` has
    the process's stderr. `environment` – additional variables.
    """

    def __init__(
        self,
        command: list[str],
        on_line: Callable[[str | None], None],
        *,
        log: Path | None = None,
        cwd: Path = _ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._on_line = on_line
        with contextlib.ExitStack() as stack:
            errors = None if log is None else stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(
                supervised(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=cwd,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, line: str) -> None:
        """Raises OSError after the end of the process."""
        stdin = self.process.stdin
        assert stdin is not None
        with self._lock:
            if stdin.closed:
                raise BrokenPipeError(f"{self.process.args} gets no more lines")
            stdin.write(f"{line}\n")
            stdin.flush()

    def end_input(self) -> None:
        """The process then ends."""
        stdin = self.process.stdin
        assert stdin is not None
        with self._lock, contextlib.suppress(OSError):  # it has ended
            stdin.close()

    def kill(self) -> None:
        self.process.kill()
        LineProcess.close(self)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Kill it if it does not end in this time."""
        self.end_input()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(seconds)
        self._reader.join(seconds)

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                if line.endswith("\n"):  # it was not killed meanwhile
                    self._on_line(line.rstrip("\n"))
        self._on_line(None)
