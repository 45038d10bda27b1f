"""Text tables and value formats for terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

#: Title → the row's field, or a function of the row.
Columns = Mapping[str, str | Callable[[Mapping[str, Any]], object]]

_GAP: Final = "  "


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Table without a trailing line break. Columns of integers are right-aligned."""
    cells = [list(columns), *([printable(str(each)) for each in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    right = [bool(rows) and all(isinstance(row[index], int) for row in rows) for index in range(len(columns))]
    return "\n".join(
        _GAP.join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


def table_of(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of `rows`. None is shown as `-`."""
    cells = [[each.get(it) if isinstance(it, str) else it(each) for it in columns.values()] for each in rows]
    return table(tuple(columns), [["-" if each is None else each for each in row] for row in cells])


def printable(text: str) -> str:
    """Escapes control characters, because names come from peers."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def utc(at_ms: float) -> str:
    """Unix time as date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))


def duration(seconds: float) -> str:
    """`7 s`, `3 min 12 s`, `5 h 7 min`, `3 d 4 h`."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.0f} s"
