"""The tables of this package: their rows by their names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import tests.contract
from tests.contract.rows import Row

#: Modules without a table; importing the levels takes seconds.
_OTHERS: Final = frozenset({"cases", "modelled", "real", "rows", "sentences", "sequencer", "tables", "wire"})


def _rows(table: str) -> list[Row]:
    module = importlib.import_module(f"tests.contract.{table}")
    return [replace(each, without={**getattr(module, "WITHOUT", {}), **each.without}) for each in module.ROWS]


TABLES: Final[Mapping[str, list[Row]]] = {
    each.name: _rows(each.name)
    for each in pkgutil.iter_modules(tests.contract.__path__)
    if each.name not in _OTHERS and not each.name.startswith("test_")
}
