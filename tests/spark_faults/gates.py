"""Points that Spark's processes pass, where a test lets one of them wait, raise or die.

Tests, drivers, workers and (`GatedCheckpoints.java`) JVMs agree by files in one directory, `$FENCEPOST_FAULTS`:

    NAME.armed   what shall happen to who comes first; it is renamed, so that it happens to one alone
    NAME.at      the id of the process that it happened to
    NAME.open    who waits may go on

A point is named for the micro-batch, and for the task where there are several at once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

DIRECTORY = "FENCEPOST_FAULTS"
#: What may happen: raise at once, wait, both, or nothing (who passes knows what to do).
RAISE, WAIT, WAIT_AND_RAISE, PASS = "raise", "wait", "wait and raise", "pass"
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.02


class Struck(Exception):
    """What a test lets happen."""


def directory() -> Path:
    return Path(os.environ[DIRECTORY])


def point(name: str, batch: int | str, task: int | None = None) -> str:
    return f"{name}.{batch}" if task is None else f"{name}.{batch}.{task}"


def passing(name: str) -> None:
    """In a process under test: here it is. Raises Struck where it shall."""
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
            raise Struck(f"nobody opened {name}")
        time.sleep(_POLL_SECONDS)
    if action == WAIT_AND_RAISE:
        raise Struck(f"at {name}")


def armed(name: str) -> bool:
    return (directory() / f"{name}.armed").exists()


def note(name: str, text: str = "") -> None:
    """In a process under test: that this has happened."""
    _write(directory() / f"{name}.noted", text)


def arm(name: str, action: str = WAIT) -> None:
    _write(directory() / f"{name}.armed", action)


def reached(name: str) -> int | None:
    """The process that is, or was, at this point."""
    file = directory() / f"{name}.at"
    return int(file.read_text()) if file.exists() else None


def recorded(prefix: str) -> list[str]:
    """What was noted under names that begin so."""
    return [file.read_text() for file in directory().glob(f"{prefix}*.noted")]


def let_pass(name: str) -> None:
    _write(directory() / f"{name}.open", "")


def clear() -> None:
    for file in directory().iterdir():
        file.unlink(missing_ok=True)


def _write(file: Path, text: str) -> None:
    """Whole or not at all, as others see it."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.rename(file)
