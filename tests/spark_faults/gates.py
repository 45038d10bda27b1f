"""Points in Spark's processes where a test makes one process wait, raise or die.

Tests, drivers, workers and (`GatedCheckpoints.java`) JVMs communicate by files in one directory, `$FENCEPOST_FAULTS`:

    NAME.armed   the action for the first process there; it renames the file, so that only one process gets it
    NAME.at      the id of that process
    NAME.open    a waiting process may continue

The name of a point contains the micro-batch, and the task if there are several.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

DIRECTORY = "FENCEPOST_FAULTS"
#: Actions: raise at once, wait, both, or none (the process acts itself).
RAISE, WAIT, WAIT_AND_RAISE, PASS = "raise", "wait", "wait and raise", "pass"
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.02


class Struck(Exception):
    """The fault that a test injects."""


def directory() -> Path:
    return Path(os.environ[DIRECTORY])


def point(name: str, batch: int | str, task: int | None = None) -> str:
    return f"{name}.{batch}" if task is None else f"{name}.{batch}.{task}"


def passing(name: str) -> None:
    """In a process under test: pass this point. Raises Struck if the test injected that fault."""
    armed, taken = directory() / f"{name}.armed", directory() / f"{name}.taken"
    try:
        armed.rename(taken)
    except FileNotFoundError:
        return
    action = taken.read_text()
    _write(directory() / f"{name}.at", str(os.getpid()))
    if action == RAISE:
        raise Struck(f"at {name}")
    if action == PASS:
        return
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (directory() / f"{name}.open").exists():
        if time.monotonic() > deadline or not directory().exists():
            raise Struck(f"no test opened {name}")
        time.sleep(_POLL_SECONDS)
    if action == WAIT_AND_RAISE:
        raise Struck(f"at {name}")


def armed(name: str) -> bool:
    return (directory() / f"{name}.armed").exists()


def note(name: str, text: str = "") -> None:
    """In a process under test: record an event."""
    _write(directory() / f"{name}.noted", text)


def arm(name: str, action: str = WAIT) -> None:
    _write(directory() / f"{name}.armed", action)


def reached(name: str) -> int | None:
    """The process that is or was at this point."""
    file = directory() / f"{name}.at"
    return int(file.read_text()) if file.exists() else None


def recorded(prefix: str) -> list[str]:
    """The events whose names have this prefix."""
    return [file.read_text() for file in directory().glob(f"{prefix}*.noted")]


def let_pass(name: str) -> None:
    _write(directory() / f"{name}.open", "")


def clear() -> None:
    for file in directory().iterdir():
        file.unlink(missing_ok=True)


def _write(file: Path, text: str) -> None:
    """Write atomically."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.rename(file)
