"""The files of `native/src`: sizes, layers, what they call of Python, and what Python calls of them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FunctionType

import pytest

from fencepost_proxy.sequencer.permits import IssuedPermit
from fencepost_proxy.session.frames import cutter
from fencepost_proxy.session.relay import native_calls
from tests.support.executors import needs_native
from tests.unit.test_sizes import MODULE_LINES_MAX, ROOT

SOURCES, PROXY = ROOT / "native" / "src", ROOT / "proxy" / "fencepost_proxy"
STUB = ROOT / "native" / "fencepost_native.pyi"
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


# ---- calls of Python

_UPWARD = "upward"
_MEMBER = re.compile(r"^    pub fn (\w+)\(([^)]*)\)", re.MULTILINE)
_NAME = re.compile(r'intern!\([^"]*"(\w+)"\)')


def _called(source: str) -> dict[str, dict[str, list[str]]]:
    """By struct: the names that its methods call, with the parameters of the method."""
    called: dict[str, dict[str, list[str]]] = {}
    for struct, body in _METHODS.findall(source):
        members = [(found.start(), found.group(1), found.group(2)) for found in _MEMBER.finditer(body)]
        ends = [start for start, _, _ in members[1:]] + [len(body)]
        for (start, name, parameters), end in zip(members, ends, strict=True):
            assert _NAME.findall(body[start:end]) == [name], f"{struct}.{name} calls what it is named after, once"
            called.setdefault(struct, {})[name] = re.findall(r"(\w+): ", parameters)
    return called


def _typed() -> dict[str, dict[str, list[str]]]:
    """By Protocol: its members, with their parameters."""
    own = {name: each for name, each in vars(native_calls).items() if isinstance(each, type)}
    return {name: _members(each) for name, each in own.items() if each.__module__ == native_calls.__name__}


def _members(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(each).parameters)[1:] if isinstance(each, FunctionType) else []
        for name, each in vars(kind).items()
        if isinstance(each, FunctionType | property) and not name.startswith("_")
    }


def test_native_code_calls_what_the_protocols_list() -> None:
    called = _called(_read()[_UPWARD])
    assert called == _typed(), "change native/src/upward.rs and session/relay/native_calls.py together"
    assert sum(map(len, called.values())) > 25


def test_one_native_file_names_what_python_has() -> None:
    by_name = re.compile(r"\bintern!|\.call_method|\.getattr\(|\.setattr\(")
    elsewhere = [name for name, source in _read().items() if name != _UPWARD and by_name.search(source)]
    assert not elsewhere, "call it through native/src/upward.rs"


@pytest.mark.parametrize(
    ("protocol", "kind"), [(native_calls.Issuer, IssuedPermit), (native_calls.Watch, cutter.Watch)]
)
def test_what_native_code_gets_of_python_has_the_members(protocol: type, kind: type) -> None:
    """mypy requires it of the others, by `fencepost_native.pyi`."""
    required, members = _members(protocol), _members(kind)
    assert {name: members.get(name) for name in required} == required


def _branches(source: str) -> list[str]:
    """Conditions that mention native code."""
    conditions = [
        node.test
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert)
    ]
    return [text for text in map(ast.unparse, conditions) if re.search(r"native|\breader\b", text)]


def test_transport_does_not_depend_on_native_code() -> None:
    # Of TLS, `native_tls.py` decides.
    paths = [path for path in (PROXY / "transport").glob("*.py") if path.name != "native_tls.py"]
    branches = {path.name: _branches(path.read_text("utf-8")) for path in paths}
    assert not {name: found for name, found in branches.items() if found}, "decide it in session/relay/native_path.py"


def test_branch_on_native_code_is_noticed() -> None:
    assert _branches("native = self.reader is not None\nx = 1 if native else 2\n") == ["native"]
    assert _branches("if session.fast_path.native.connection is None: pass") == [
        "session.fast_path.native.connection is None"
    ]


# ---- calls of native code


def _only_types(stub: str) -> list[str]:
    """What a stub names for type checkers: aliases and Protocols."""
    body = ast.parse(stub).body
    aliases = [ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets]
    protocols = [
        node.name for node in body if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    ]
    return [*aliases, *protocols, "__all__"]


@needs_native
def test_stub_describes_the_built_module(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text("".join(rf"fencepost_native\.{name}" + "\n" for name in _only_types(STUB.read_text("utf-8"))))
    path = os.pathsep.join(str(ROOT / each) for each in ("native", "proxy", "policies", "client"))
    command = [sys.executable, "-m", "mypy.stubtest", "fencepost_native", "--concise", "--allowlist", str(allowed)]
    done = subprocess.run(
        command, env={**os.environ, "MYPYPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
