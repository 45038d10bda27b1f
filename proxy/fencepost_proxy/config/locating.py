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
        is_header = pending.lstrip().startswith("[")
        for parts in _paths(statement, () if is_header else table):
            found.setdefault(parts, began)
            if is_header:
                table = parts
        pending = ""
    return found


def _paths(document: Mapping[str, Any], above: Parts = ()) -> Iterator[Parts]:
    for name, value in document.items():
        parts = (*above, name)
        yield parts
        # [[name]] is a list of one table.
        inner = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(inner, dict):
            yield from _paths(inner, parts)
