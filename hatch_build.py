"""Builds the native module (`native/`): as hatchling's hook for the wheel, and for a clone as `python hatch_build.py`.

Without cargo, or if the build fails, the wheel and the clone are pure Python, unless FENCEPOST_NATIVE=on requires the
module. FENCEPOST_NATIVE=off leaves it out. On Linux, FENCEPOST_MACHINE=aarch64 (or x86_64) builds it for that machine,
linked by zig.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).resolve().parent / "native"
TARGET = NATIVE / "target"
LIBRARIES = {"linux": "libfencepost_native.so", "darwin": "libfencepost_native.dylib"}
#: Where an editable installation finds it (`dev-mode-dirs`).
MODULE = NATIVE / "fencepost_native.abi3.so"
NEEDED = "install Rust 1.85 or newer (https://rustup.rs) and a linker (gcc, clang, or the Python package ziglang)"
#: What Rust's own library needs. zig links for it on every machine.
GLIBC_OLDEST = (2, 17)
MACOS_OLDEST = "11.0"


class NoCargo(Exception):
    """The module cannot be built here, which is no error."""


class BuildFailed(Exception):
    """With cargo's output."""


class NativeModule(BuildHookInterface[Any]):
    """Adds the module to the wheel, and names the wheel for any CPython from 3.11 on, and this platform."""

    def dependencies(self) -> list[str]:
        """For pip: a linker that is a wheel, if there is cargo but no linker."""
        if self._mode == "off" or shutil.which("cargo") is None or shutil.which("cc") or sys.platform != "linux":
            return []
        return ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or self._mode == "off":
            return
        try:
            library = build(zig_first=True)
        except (NoCargo, BuildFailed) as error:
            if self._mode == "on":
                self.app.abort(f"{error}\nthe native module could not be built (FENCEPOST_NATIVE=on); {NEEDED}")
            if isinstance(error, NoCargo):
                self.app.display_info(f"{error}: the wheel is pure Python")
            else:
                self.app.display_warning(f"the native module could not be built: the wheel is pure Python\n{error}")
            return
        build_data["tag"] = f"cp311-abi3-{platform_tag(library)}"
        build_data["pure_python"] = False
        build_data["force_include"][str(library)] = MODULE.name

    @property
    def _mode(self) -> str | None:
        return os.environ.get("FENCEPOST_NATIVE")


def platform_tag(library: Path) -> str:
    """Where it can be imported. On Linux by the newest version of a glibc symbol that it names (PEP 600)."""
    machine = _machine()
    if sys.platform == "darwin":
        return f"macosx_{_macos_oldest().replace('.', '_')}_{machine}"
    named = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    if not named:  # another C library
        return f"linux_{machine}"
    major, minor = max(GLIBC_OLDEST, *((int(major), int(minor)) for major, minor in named))
    return f"manylinux_{major}_{minor}_{machine}"


def build(*, zig_first: bool = False) -> Path:
    """The library that cargo has built from the sources, in its target directory.

    `zig_first`: link with zig, if it is installed, even if there is another linker: the library then runs on older
    systems than this one.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise NoCargo("there is no cargo")
    if sys.platform not in LIBRARIES:
        raise NoCargo(f"it is built only on Linux and macOS, not on {sys.platform}")
    for_another = sys.platform == "linux" and _machine() != platform.machine()
    zig = sys.platform == "linux" and find_spec("ziglang") is not None
    if for_another and not zig:
        raise BuildFailed(f"only zig links for {_machine()} on {platform.machine()} (the Python package ziglang)")
    zig = zig and (zig_first or for_another or shutil.which("cc") is None)
    # What one linker has linked is not up to date for the other.
    target = TARGET / "zig" if zig else TARGET
    environment = {
        "CARGO_PROFILE_RELEASE_STRIP": "symbols",
        # Without a network, give up soon.
        "CARGO_HTTP_TIMEOUT": "10",
        "CARGO_NET_RETRY": "1",
        "MACOSX_DEPLOYMENT_TARGET": MACOS_OLDEST,
        **os.environ,
        **(_zig_linker(target) if zig else {}),
    }
    command = [cargo, "build", "--release", "--locked", "--target-dir", str(target)]
    if for_another:
        command += ["--target", triple(_machine())]
    done = subprocess.run(command, cwd=NATIVE, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BuildFailed(done.stderr.strip())
    return (target / triple(_machine()) if for_another else target) / "release" / LIBRARIES[sys.platform]


def triple(machine: str) -> str:
    """Rust's name of Linux on that machine."""
    return f"{machine}-unknown-linux-gnu"


def _machine() -> str:
    """For which the module is built."""
    return os.environ.get("FENCEPOST_MACHINE") or platform.machine()


def _macos_oldest() -> str:
    return os.environ.get("MACOSX_DEPLOYMENT_TARGET", MACOS_OLDEST)


def _zig_linker(target: Path) -> dict[str, str]:
    """Rust runs `cc`; zig links as well, and for an older glibc."""
    machine, oldest = _machine(), ".".join(map(str, GLIBC_OLDEST))
    is_glibc = machine != platform.machine() or platform.libc_ver()[0] == "glibc"
    is_known = is_glibc and machine in ("x86_64", "aarch64")
    target.mkdir(parents=True, exist_ok=True)
    script = _zig_script(target / "zig-cc", f"cc -target {machine}-linux-gnu.{oldest}" if is_known else "cc")
    # By its name alone: rustc's options are part of symbols' hashes, and a wheel from another directory is the same.
    variables = {
        "RUSTFLAGS": f"{os.environ.get('RUSTFLAGS', '')} -C linker={script.name}".strip(),
        "PATH": f"{target}{os.pathsep}{os.environ['PATH']}",
        # What ring compiles: C and assembly.
        f"CC_{_variable(machine)}": script.name,
        f"AR_{_variable(machine)}": _zig_script(target / "zig-ar", "ar").name,
    }
    if machine != platform.machine() and shutil.which("cc") is None:
        # RUSTFLAGS are for the other machine alone; build scripts run on this one.
        host = _variable(platform.machine()).upper()
        variables[f"CARGO_TARGET_{host}_LINKER"] = _zig_script(target / "zig-cc-host", "cc").name
    return variables


def _variable(machine: str) -> str:
    """As a part of variables' names."""
    return triple(machine).replace("-", "_")


#: Without the target as Rust names it, which zig does not know.
_ZIG_SCRIPT = """#!/bin/sh
for each; do
    shift
    case $each in --target=*) ;; *) set -- "$@" "$each" ;; esac
done
exec {python} -m ziglang {command} "$@"
"""


def _zig_script(script: Path, command: str) -> Path:
    script.write_text(_ZIG_SCRIPT.format(python=sys.executable, command=command), "utf-8")
    script.chmod(0o755)
    return script


def _install(module: Path, library: Path) -> None:
    if module.exists() and module.read_bytes() == library.read_bytes():
        return
    # A running process has mapped the old file.
    new = module.with_suffix(".new")
    shutil.copyfile(library, new)
    new.replace(module)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the native module for this clone.")
    parser.add_argument("--required", action="store_true", help="fail if it cannot be built")
    parser.add_argument("--to", type=Path, metavar="FILE", help="build it for other systems too, by zig if installed")
    arguments = parser.parse_args()
    required, module = arguments.required, arguments.to or MODULE
    if shutil.which("cargo"):
        print("building the native module")
    try:
        _install(module, build(zig_first=arguments.to is not None))
    except (NoCargo, BuildFailed) as error:
        # One of older sources.
        module.unlink(missing_ok=True)
        if required:
            print(f"{error}\nthe native module could not be built; {NEEDED}", file=sys.stderr)
            return 1
        print(f"the native module is not built, Fencepost runs in pure Python: {error}")
    else:
        if required:
            print(f"{os.path.relpath(module)} is built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
