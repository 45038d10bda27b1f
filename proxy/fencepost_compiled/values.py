"""For compiled modules, at run time: what a dataclass is, put onto a native class that `native.py` made of one."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

_T = TypeVar("_T")


def as_value(cls: type, names: tuple[str, ...]) -> None:
    """What readers of dataclasses look for. The class has its own `__init__`, `__eq__` and `__match_args__`."""
    like = dataclasses.make_dataclass(cls.__name__, [(name, object) for name in names], eq=False)
    for each in ("__repr__", "__dataclass_fields__", "__dataclass_params__"):
        setattr(cls, each, getattr(like, each))

    def reduced(self: object) -> tuple[Any, ...]:
        return cls, tuple(getattr(self, name) for name in names)

    setattr(cls, "__reduce__", reduced)  # noqa: B010 - for copies and pickles


def replace(one: _T, **changes: Any) -> _T:
    """`dataclasses.replace`, for what the type checker does not take for a dataclass."""
    changed: _T = dataclasses.replace(one, **changes)  # type: ignore[type-var]
    return changed
