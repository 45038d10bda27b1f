"""What `fencepost check` finds: one row of its list each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """`UNKNOWN` – it cannot be found out from here; `said` says why."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """`group` – the heading it belongs to. `todo` – what to do about it; empty where all is well."""

    group: str
    what: str
    state: State
    said: str
    todo: str = ""


def ok(group: str, what: str, said: str) -> Finding:
    return Finding(group, what, State.OK, said)


def unknown(group: str, what: str, said: str, todo: str = "") -> Finding:
    return Finding(group, what, State.UNKNOWN, said, todo)


def warning(group: str, what: str, said: str, todo: str) -> Finding:
    return Finding(group, what, State.WARNING, said, todo)


def failed(group: str, what: str, said: str, todo: str) -> Finding:
    return Finding(group, what, State.FAILED, said, todo)
