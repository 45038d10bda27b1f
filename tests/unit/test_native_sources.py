"""The files of `native/src`: none over 700 lines, and no two of them need each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.unit.test_sizes import MODULE_LINES_MAX, ROOT

SOURCES = ROOT / "native" / "src"
#: It declares the modules, and exports from them.
_ROOT_MODULE = "lib"
_METHODS = re.compile(r"^impl(?:<.*?>)? (\w+)(?:<.*?>)? \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)


def _needs(sources: dict[str, str]) -> dict[str, set[str]]:
    """By module: those that it imports, and those that extend a type that it imports with methods that it calls."""
    return {
        name: {other for other in sources if other != name and _is_needed(sources[other], other, source)}
        for name, source in sources.items()
    }


def _is_needed(other_source: str, other: str, source: str) -> bool:
    if re.search(rf"\bcrate::{other}\b", source):
        return True
    return any(re.search(rf"\b(?:self|it)\.{method}\(", source) for method in _methods_of_imports(other_source, source))


def _methods_of_imports(other_source: str, source: str) -> Iterator[str]:
    for type_name, body in _METHODS.findall(other_source):
        if re.search(rf"^use crate::.*\b{type_name}\b", source, re.MULTILINE):
            yield from set(re.findall(r"^    pub fn (\w+)", body, re.MULTILINE)) - _own_methods(source)


def _own_methods(source: str) -> set[str]:
    return set(re.findall(r"^    (?:pub )?fn (\w+)", source, re.MULTILINE))


def _circle(sources: dict[str, str]) -> list[str] | None:
    try:
        TopologicalSorter(_needs(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def _read() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted(SOURCES.glob("*.rs")) if path.stem != _ROOT_MODULE}


def test_no_file_is_larger_than_a_python_module_may_be() -> None:
    larger = {name: count for name, source in _read().items() if (count := source.count("\n")) > MODULE_LINES_MAX}
    assert not larger, "split it along its seams"


def test_modules_form_layers() -> None:
    assert _circle(_read()) is None, "move what both need into a module below both"


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"a": "use crate::b::B;\n", "b": "struct B;\n"}, None),
        ({"a": "use crate::b::B;\n", "b": "fn f() { crate::a::g() }\n"}, ["a", "b", "a"]),
        (
            {
                "a": "use crate::b::B;\nimpl B {\n    pub fn more(&self) {}\n}\n",
                "b": "use crate::c::C;\nimpl B {\n    fn f(&self) {}\n}\n",
                "c": "use crate::b::B;\nimpl C {\n    fn g(&self) { self.more(); }\n}\n",
            },
            ["a", "b", "c", "a"],
        ),
    ],
)
def test_circle_is_noticed(sources: dict[str, str], circle: list[str] | None) -> None:
    found = _circle(sources)
    assert (found is None) == (circle is None)
    if found is not None and circle is not None:
        assert set(found) == set(circle)


def test_every_module_is_built() -> None:
    library = (SOURCES / f"{_ROOT_MODULE}.rs").read_text("utf-8")
    assert set(re.findall(r"^mod (\w+);", library, re.MULTILINE)) == _read().keys()
