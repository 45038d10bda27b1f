"""Line numbers of the keys of a TOML file, which the standard library's parser does not report.

The file is parsed again, statement by statement: a statement is the fewest lines that are valid TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

Parts = tuple[str, ...]
#: The last line of a multi-line statement contains one of these.
_CLOSING: Final = ("]", "}", '"""', "'''")


def lines_of(text: str) -> Mapping[Parts, int]:
    """Path of each table and key → its line, from 1. `text` must be valid TOML."""
    found: dict[Parts, int] = {}
    table: Parts = ()
    pending = ""
    began = 0
    # Not splitlines(): in TOML only these end a line.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not pending:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            began = number
        pending += line + "\n"
        if number > began and not any(each in line for each in _CLOSING):
            continue
        try:
            statement = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        if pending.lstrip().startswith("["):
            table = ()
            for parts, _ in _paths(statement):
                table = parts
                found.setdefault(parts, began)
        else:
            for parts, _ in _paths(statement):
                found.setdefault((*table, *parts), began)
        pending = ""
    return found


def _paths(document: Mapping[str, Any], above: Parts = ()) -> Iterator[tuple[Parts, Any]]:
    for name, value in document.items():
        parts = (*above, name)
        yield parts, value
        if isinstance(value, dict):
            yield from _paths(value, parts)
        elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            yield from _paths(value[0], parts)
