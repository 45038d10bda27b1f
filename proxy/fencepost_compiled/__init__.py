"""The compiled build of the hot rooms: used in place of their Python sources where it was made of just these sources.

`make compiled`, or `FENCEPOST_COMPILE=1 pip install …`, puts extension modules into a directory of this package, one
for each Python (`build.py`). Without them nothing is different: the sources run as they are. Both packages call `use`
before anything of theirs is imported, since compiled modules know each other's layout and cannot be mixed with the
sources of the same names: it is all of them or none.

A build says of which sources it was made. Sources that have changed since are what runs, and `why` says so.

`FENCEPOST_COMPILED=0` runs the sources whatever there is; `=1` refuses to start without a build that fits them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, source_hash, spec_from_file_location
from types import ModuleType
from typing import Final

#: `0`, `1`, or not set: whatever there is.
VARIABLE: Final = "FENCEPOST_COMPILED"
#: What lies in the directory of a build: a line `HASH MODULE` for each source that it depends on, and the names of what
#: was compiled, `+ MODULE`.
MANIFEST: Final = "manifest"
PACKAGES: Final = ("fencepost_policies", "fencepost_proxy")
#: In this package, for the interpreter that runs: of `.cpython-311-x86_64-linux-gnu.so` all but dots and the end.
DIRECTORY: Final = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), EXTENSION_SUFFIXES[0].strip(".").partition(".")[0]
)


class _Finder:
    """Finds compiled modules, and nothing else."""

    def __init__(self, directory: str, modules: Sequence[str]) -> None:
        self._files = {name: os.path.join(directory, name + EXTENSION_SUFFIXES[0]) for name in modules}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return None if file is None else spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


_decided = False
_compiled = False
_why = ""


def use() -> None:
    """Decides, once for the process. Raises ImportError where a build is demanded and there is none that fits."""
    global _decided, _compiled, _why  # noqa: PLW0603 - it is the process's
    if _decided:
        return
    _decided = True
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ImportError(f"{VARIABLE}={wanted}: it is 1 (only compiled), 0 (never), or not set")
    if wanted == "0":
        _why = f"{VARIABLE}=0"
        return
    modules, _why = fitting(DIRECTORY)
    if not _why:
        loaded = [name for name in modules if name in sys.modules]
        _why = f"{loaded[0]} was imported before" if loaded else ""
    if not _why:
        sys.meta_path.insert(0, _Finder(DIRECTORY, modules))
        _compiled = True
    elif wanted == "1":
        raise ImportError(f"{VARIABLE}=1, but {_why}. `make compiled` makes a build of these sources")


def compiled() -> bool:
    """Whether the compiled build is what runs."""
    return _compiled


def what_runs() -> str:
    """For people: beside the version."""
    return "compiled" if _compiled else "pure Python"


def why() -> str:
    """Why it is not; empty if it is."""
    return _why


def stale() -> bool:
    """Whether there is a build, which was left aside since the sources are not those that it was made of."""
    return not _compiled and os.environ.get(VARIABLE, "") != "0" and os.path.exists(os.path.join(DIRECTORY, MANIFEST))


def fitting(directory: str) -> tuple[list[str], str]:
    """The modules of the build there; and why it must not be used, empty if it may be."""
    try:
        with open(os.path.join(directory, MANIFEST), encoding="ascii") as manifest:
            lines = [line.split() for line in manifest]
    except OSError:
        return [], "there is no compiled build for this Python"
    modules = []
    for first, name in lines:
        if first == "+":
            modules.append(name)
            continue
        path = source_of(name)
        if path is None or hash_of(path) != first:
            return modules, f"the compiled build is not of these sources: {name} is another"
    return modules, ""


def source_of(name: str) -> str | None:
    """The path of a module's source, without importing anything."""
    package, *rest = name.split(".")
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    path = os.path.join(found.submodule_search_locations[0], *rest)
    return os.path.join(path, "__init__.py") if os.path.isdir(path) else path + ".py"


def hash_of(path: str) -> str | None:
    """Of a source as it is now; None where there is none."""
    try:
        with open(path, "rb") as source:
            return source_hash(source.read()).hex()
    except OSError:
        return None
