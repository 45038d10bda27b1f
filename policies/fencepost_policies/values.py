"""`value`: a frozen dataclass for readers and type checkers, without its cost per object.

A frozen dataclass sets each field with `object.__setattr__`: 60 ns instead of 10, and a request makes dozens of
objects. The type checker still rejects assignments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[_T]) -> type[_T]:
    return dataclass(slots=True)(cls)
