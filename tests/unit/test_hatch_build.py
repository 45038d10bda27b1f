"""hatch_build.py: which linker builds the native module, for which systems, and the message if it cannot be built.

`tests/integration/test_distribution.py` builds wheels.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hatch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def linux(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """On an x86-64 Linux with cargo, cc and ziglang, whatever this machine is."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(hatch_build, "TARGET", tmp_path)
    monkeypatch.setattr(hatch_build, "find_spec", lambda _: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("RUSTFLAGS", raising=False)
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    return hatch_build


@pytest.fixture
def cargo(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The environments of its runs, which all succeed; `COMMAND` is what was run."""
    runs = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        runs.append({**env, "COMMAND": " ".join(command)})
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return runs


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda each: None if each == name else f"/usr/bin/{each}")


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0", "manylinux_2_34_x86_64"),
        # Rust's own library needs 2.17.
        (b"\0GLIBC_2.2.5\0GLIBC_2.14\0", "manylinux_2_17_x86_64"),
        (b"\0GLIBC_2.40\0GLIBC_3.0\0", "manylinux_3_0_x86_64"),
        (b"\0not GLIBC_2.34\0", "linux_x86_64"),
    ],
)
def test_tag_names_the_newest_glibc_symbol(linux: ModuleType, tmp_path: Path, symbols: bytes, tag: str) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(symbols)
    assert linux.platform_tag(library) == tag


def test_tag_of_macos_is_the_deployment_target(linux: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert linux.platform_tag(Path("library.dylib")) == "macosx_11_0_arm64"
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "12.3")
    assert linux.platform_tag(Path("library.dylib")) == "macosx_12_3_arm64"


def test_wheel_is_linked_by_zig_for_an_old_glibc(
    linux: ModuleType, cargo: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert linux.build(zig_first=True) == tmp_path / "zig" / "release" / "libfencepost_native.so"
    script = tmp_path / "zig" / "zig-cc"
    # Without its directory: a wheel of the sdist is the same.
    assert cargo[0]["RUSTFLAGS"] == "-C linker=zig-cc"
    assert cargo[0]["PATH"].startswith(f"{script.parent}:")
    assert "-m ziglang cc -target x86_64-linux-gnu.2.17 " in script.read_text()
    # It compiles the C code of crates, too, which call it with Rust's name of the target.
    assert cargo[0]["CC_x86_64_unknown_linux_gnu"] == "zig-cc"
    assert cargo[0]["AR_x86_64_unknown_linux_gnu"] == "zig-ar"
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script.write_text(script.read_text().replace(sys.executable, str(tmp_path / "python")))
    command = [script, "-O3", "--target=x86_64-unknown-linux-gnu", "a b.c"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as called:
        assert called.communicate()[0] == "-m ziglang cc -target x86_64-linux-gnu.2.17 -O3 a b.c\n"


def test_library_for_another_machine_is_linked_by_zig(
    linux: ModuleType, cargo: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FENCEPOST_MACHINE", "aarch64")
    library = linux.build()
    assert library == tmp_path / "zig" / "aarch64-unknown-linux-gnu" / "release" / "libfencepost_native.so"
    assert cargo[0]["COMMAND"].endswith(" --target aarch64-unknown-linux-gnu")
    assert "-target aarch64-linux-gnu.2.17 " in (tmp_path / "zig" / "zig-cc").read_text()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0GLIBC_2.17\0")
    assert linux.platform_tag(library) == "manylinux_2_17_aarch64"
    # cc links what runs while it is built.
    host = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER"
    assert host not in cargo[0]
    without("cc", monkeypatch)
    linux.build()
    assert cargo[1][host] == "zig-cc-host"
    assert "-target " not in (tmp_path / "zig" / "zig-cc-host").read_text()
    monkeypatch.setattr(linux, "find_spec", lambda _: None)
    with pytest.raises(linux.BuildFailed, match="only zig links for aarch64 on x86_64"):
        linux.build()


def test_clone_is_linked_by_zig_only_without_cc(
    linux: ModuleType, cargo: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert linux.build() == tmp_path / "release" / "libfencepost_native.so"
    assert "RUSTFLAGS" not in cargo[0]
    without("cc", monkeypatch)
    assert linux.build() == tmp_path / "zig" / "release" / "libfencepost_native.so"


def test_macos_library_is_built_for_its_deployment_target(
    linux: ModuleType, cargo: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert linux.build(zig_first=True) == tmp_path / "release" / "libfencepost_native.dylib"
    assert cargo[0]["MACOSX_DEPLOYMENT_TARGET"] == linux.MACOS_OLDEST
    # Without these, the linker would look for Python's symbols.
    config = tomllib.loads((ROOT / "native" / ".cargo" / "config.toml").read_text("utf-8"))
    flags = config["target"]['cfg(target_os = "macos")']["rustflags"]
    assert flags == ["-C", "link-arg=-undefined", "-C", "link-arg=dynamic_lookup"]


def test_pip_installs_a_linker_only_where_it_is_needed(linux: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_NATIVE", raising=False)
    hook = object.__new__(linux.NativeModule)
    assert hook.dependencies() == []
    without("cargo", monkeypatch)
    assert hook.dependencies() == []
    without("cc", monkeypatch)
    assert hook.dependencies() == ["ziglang"]
    monkeypatch.setenv("FENCEPOST_NATIVE", "off")
    assert hook.dependencies() == []


def test_native_module_that_is_not_built_is_reported(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A failed or impossible build leaves the slower pure Python: no reader of the output should have to guess."""
    monkeypatch.setattr(hatch_build, "MODULE", tmp_path / "module.so")
    monkeypatch.setattr("sys.argv", ["hatch_build.py"])
    for failure in (hatch_build.NoCargo("there is no cargo"), hatch_build.BuildFailed("error: linker not found")):

        def build(*, zig_first: bool, failure: Exception = failure) -> Path:
            raise failure

        monkeypatch.setattr(hatch_build, "build", build)
        assert hatch_build.main() == 0
        stated = f"the native module is not built, Fencepost runs in pure Python: {failure}"
        assert stated in capsys.readouterr().out
