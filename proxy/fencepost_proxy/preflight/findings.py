"""Results of `fencepost check`, one per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_NAMED_MAX: Final = 5


class State(StrEnum):
    """`UNKNOWN`: cannot be checked from here; `reported` gives the reason."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """`group`: its heading. `todo`: suggested action, empty if there is no problem."""

    group: str
    what: str
    state: State
    reported: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Makes the findings of one group."""

    name: str

    def ok(self, what: str, reported: str) -> Finding:
        return Finding(self.name, what, State.OK, reported)

    def unknown(self, what: str, reported: str, todo: str = "") -> Finding:
        return Finding(self.name, what, State.UNKNOWN, reported, todo)

    def warning(self, what: str, reported: str, todo: str) -> Finding:
        return Finding(self.name, what, State.WARNING, reported, todo)

    def failed(self, what: str, reported: str, todo: str = "") -> Finding:
        return Finding(self.name, what, State.FAILED, reported, todo)


def some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")
