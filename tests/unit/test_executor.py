"""Which code executes the hot path: each reason for pure Python, in a separate process as `fencepost --version`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fencepost_proxy import executor
from fencepost_proxy.config.reading import read
from fencepost_proxy.executor import INTERFACE, load
from tests.support.docs import ROOT

USABLE = f'INTERFACE = {INTERFACE}\n__version__ = "9.8.7"\n'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a module that the test writes replaces the native module."""
    monkeypatch.delenv("FENCEPOST_NATIVE", raising=False)
    monkeypatch.setitem(sys.modules, "fencepost_native", sys)  # so that the written module is removed at the end
    monkeypatch.delitem(sys.modules, "fencepost_native")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "fencepost_native.py"


def test_usable_module_executes(module: Path) -> None:
    module.write_text(USABLE)
    found = load()
    assert found.module is not None
    assert str(found) == "native 9.8.7"


def test_environment_turns_module_off(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("raise SystemExit")  # not even imported
    monkeypatch.setenv("FENCEPOST_NATIVE", "off")
    found = load()
    assert (found.module, found.expected) == (None, True)
    assert str(found) == "pure Python: FENCEPOST_NATIVE=off"


def test_missing_module_is_no_fault(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(module.parent)])
    found = load()
    assert (found.module, found.expected) == (None, True)
    assert str(found) == "pure Python: fencepost_native is not installed"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('/lib/libc.so.6: version `GLIBC_2.34\\' not found')", "GLIBC_2.34' not found"),
        ("raise SystemError('made for another Python')", "made for another Python"),
        ("import absent_dependency", "No module named 'absent_dependency'"),
    ],
)
def test_failed_import_is_a_fault_with_reason(module: Path, source: str, why: str) -> None:
    module.write_text(source)
    found = load()
    assert (found.module, found.expected) == (None, False)
    assert str(found).startswith("pure Python: fencepost_native cannot be imported: ")
    assert why in found.why_python


def test_unloadable_library_is_a_fault(module: Path) -> None:
    module.with_name("fencepost_native.abi3.so").write_bytes(b"for another platform")
    found = load()
    assert (found.module, found.expected) == (None, False)
    assert "cannot be imported" in found.why_python


@pytest.mark.parametrize("source", ["", "INTERFACE = 0", f"INTERFACE = {INTERFACE + 1}"])
def test_module_with_another_interface_is_refused(module: Path, source: str) -> None:
    module.write_text(source)
    found = load()
    assert (found.module, found.expected) == (None, False)
    assert f"interface {INTERFACE} is needed" in found.why_python


def test_sources_agree_on_interface_and_version() -> None:
    library = (ROOT / "native" / "src" / "lib.rs").read_text("utf-8")
    assert re.findall(r"const INTERFACE: u32 = (\d+);", library) == [str(INTERFACE)]
    crate = tomllib.loads((ROOT / "native" / "Cargo.toml").read_text("utf-8"))["package"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert crate["version"] == project["version"]


def test_built_module_is_usable() -> None:
    built = pytest.importorskip("fencepost_native")
    assert built.INTERFACE == INTERFACE
    assert executor.EXECUTOR.module is built or os.environ.get("FENCEPOST_NATIVE") == "off"


@pytest.mark.parametrize(
    ("source", "environment", "shown"),
    [
        (USABLE, {}, "(native 9.8.7)"),
        (USABLE, {"FENCEPOST_NATIVE": "off"}, "(pure Python: FENCEPOST_NATIVE=off)"),
        ("1/0", {}, "(pure Python: fencepost_native cannot be imported: division by zero)"),
    ],
)
def test_version_names_executor(module: Path, source: str, environment: dict[str, str], shown: str) -> None:
    module.write_text(source)
    path = os.pathsep.join([str(module.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "fencepost_proxy.cli.main", "--version"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"fencepost \S+ " + re.escape(shown) + "\n", done.stdout)


def test_setting_is_not_taken_for_a_misspelt_key() -> None:
    environment = {"FENCEPOST_NATIVE": "off", "FENCEPOST_UPSTREAM": "kafka:9092"}
    assert read(environment=environment).origins.keys() == {"upstream"}
