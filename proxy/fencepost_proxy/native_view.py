"""What native code remembers of Python's state. It changes only in ways that are reported.

Native code queries `session.native_calls.Services` once, and again after a change. The answers are made of attributes
that are declared by `NativeView`, and of `RememberedMap`s: assigning and changing these reports the change. With
FENCEPOST_NATIVE=verify, for tests, native code queries nevertheless and fails if a change was not reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from fencepost_proxy.executor import EXECUTOR

K = TypeVar("K")
V = TypeVar("V")


def changed() -> None:
    """Something changed of what native code remembers."""
    if EXECUTOR.module is not None:
        EXECUTOR.module.changed()


class NativeView:
    """Base of the classes with values that native code remembers. They hold immutable values, or a `RememberedMap`.

    `remembered` – attributes whose every assignment is reported. `until` – times until when an answer holds, which
    native code has, too: only an earlier one is a change.
    """

    __slots__ = ()
    _remembered: ClassVar[frozenset[str]] = frozenset()
    _until: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, *, remembered: tuple[str, ...] = (), until: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        cls._remembered = cls._remembered.union(remembered)
        cls._until = cls._until.union(until)

    if not TYPE_CHECKING:  # else mypy would accept the assignment of any name

        def __setattr__(self, name: str, value: object) -> None:
            is_change = name in self._remembered or (name in self._until and value < getattr(self, name, value))
            super().__setattr__(name, value)
            if is_change:
                changed()


class RememberedMap(Generic[K, V]):
    """`view` – read only, and as fast as a dict."""

    __slots__ = ("_items", "view")

    def __init__(self) -> None:
        self._items: dict[K, V] = {}
        self.view: Mapping[K, V] = MappingProxyType(self._items)

    def add(self, key: K, value: V) -> None:
        """An answer that was not given before: nothing is remembered of it, so this is not reported."""
        if key in self._items:
            raise ValueError(f"{key!r} is remembered already")
        self._items[key] = value

    def set(self, key: K, value: V) -> None:
        self._items[key] = value
        changed()

    def discard(self, key: K) -> None:
        self._items.pop(key, None)
        changed()

    def clear(self) -> None:
        self._items.clear()
        changed()
