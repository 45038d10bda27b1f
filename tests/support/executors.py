"""Which executor the proxy under test uses for usual requests: native code (`native/`), or Python alone.

Runs that follow a seed choose by it: even seeds use native code, if the module is built. `executing` overrides that.
`FENCEPOST_NATIVE=off` leaves Python alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from fencepost_proxy.session.relay.native import MODULE, settings_for

PYTHON, NATIVE = "python", "native"
NOT_BUILT = "the native module is not importable: build native/ (docs/decisions/0017-native-module.md)"
needs_native = pytest.mark.skipif(MODULE is None, reason=NOT_BUILT)
each_executor = pytest.mark.parametrize("executor", [PYTHON, pytest.param(NATIVE, marks=needs_native)])
AVAILABLE = (PYTHON,) if MODULE is None else (PYTHON, NATIVE)
_DEFAULT = PYTHON if MODULE is None else NATIVE
_chosen: list[str] = []


def current() -> str:
    return _chosen[-1] if _chosen else _DEFAULT


def of_seed(seed: int) -> str:
    return PYTHON if seed % 2 and not _chosen else current()


@contextmanager
def executing(executor: str) -> Iterator[None]:
    """Services made meanwhile use this executor."""
    if executor == NATIVE and MODULE is None:
        raise RuntimeError(NOT_BUILT)
    _chosen.append(executor)
    try:
        yield
    finally:
        _chosen.pop()


def native_of(services: object) -> tuple[ModuleType, object] | None:
    return settings_for(services) if current() == NATIVE else None  # type: ignore[arg-type]
