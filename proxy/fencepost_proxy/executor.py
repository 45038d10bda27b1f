"""Which code executes the hot path: the native module `fencepost_native` (`native/`), or Python.

Python does if FENCEPOST_NATIVE is `off`, and if the module is missing, cannot be imported or has another interface.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple

#: The interface of the native module that this code uses: `INTERFACE` in `native/src/lib.rs`. A change of either side
#: that the other must follow raises both.
INTERFACE: Final = 14
_NAME: Final = "fencepost_native"


class Executor(NamedTuple):
    """`module` – None: pure Python. `why_python` – the reason. `expected` – the reason is no fault."""

    module: ModuleType | None
    why_python: str = ""
    expected: bool = True

    def __str__(self) -> str:
        return f"pure Python: {self.why_python}" if self.module is None else f"native {self.module.__version__}"


def load() -> Executor:
    if os.environ.get("FENCEPOST_NATIVE") == "off":
        return Executor(None, "FENCEPOST_NATIVE=off")
    try:
        module = import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name == _NAME:
            return Executor(None, f"{_NAME} is not installed")
        return _unusable(f"cannot be imported: {error}")
    except Exception as error:  # built for another C library, processor or Python
        return _unusable(f"cannot be imported: {error}")
    found = getattr(module, "INTERFACE", None)
    if found != INTERFACE:
        return _unusable(f"has interface {found}, but interface {INTERFACE} is needed (in a clone: make native)")
    return Executor(module)


def _unusable(why: str) -> Executor:
    return Executor(None, f"{_NAME} {why}", expected=False)


EXECUTOR: Final = load()
VERIFY: Final = os.environ.get("FENCEPOST_NATIVE") == "verify"
