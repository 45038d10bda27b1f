"""Builds the native module (`native/`): as hatchling's hook for the wheel, and for a clone as `python hatch_build.py`.

Without cargo, or if the build fails, the wheel and the clone are pure Python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).resolve().parent / "native"
TARGET = NATIVE / "target"
#: Where an editable installation finds it (`dev-mode-dirs`).
MODULE = NATIVE / "fencepost_native.abi3.so"
NEEDED = "install Rust 1.85 or newer (https://rustup.rs) and a linker (gcc, clang, or the Python package ziglang)"


class NoCargo(Exception):
    """The module cannot be built here, which is no error."""


class BuildFailed(Exception):
    """With cargo's output."""


class NativeModule(BuildHookInterface[Any]):
    """Adds the module to the wheel, and names the wheel for any CPython from 3.11 on, and this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("FENCEPOST_NATIVE") == "off":
            return
        try:
            library = build()
        except NoCargo:
            self.app.display_info("no cargo: the wheel is pure Python")
            return
        except BuildFailed as error:
            self.app.display_warning(f"the native module could not be built: the wheel is pure Python\n{error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["pure_python"] = False
        build_data["force_include"][str(library)] = MODULE.name


def build() -> Path:
    """The library that cargo has built from the sources, in its target directory."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise NoCargo("there is no cargo")
    if not sys.platform.startswith("linux"):
        raise NoCargo(f"it is built only on Linux, not on {sys.platform}")
    environment = {
        "CARGO_PROFILE_RELEASE_STRIP": "symbols",
        # Without a network, give up soon.
        "CARGO_HTTP_TIMEOUT": "10",
        "CARGO_NET_RETRY": "1",
        **os.environ,
        **_linker(),
    }
    command = [cargo, "build", "--release", "--locked", "--target-dir", str(TARGET)]
    done = subprocess.run(command, cwd=NATIVE, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    library = TARGET / "release" / "libfencepost_native.so"
    if done.returncode:
        raise BuildFailed(done.stderr.strip())
    return library


def _linker() -> dict[str, str]:
    """Rust runs `cc`. Without one, zig from a wheel links as well."""
    if shutil.which("cc") or find_spec("ziglang") is None:
        return {}
    TARGET.mkdir(exist_ok=True)
    script = TARGET / "zig-cc"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang cc "$@"\n', "utf-8")
    script.chmod(0o755)
    return {"RUSTFLAGS": f"{os.environ.get('RUSTFLAGS', '')} -C linker={script}".strip()}


def _install() -> None:
    library = build()
    if MODULE.exists() and MODULE.read_bytes() == library.read_bytes():
        return
    # A running process has mapped the old file.
    new = MODULE.with_suffix(".new")
    shutil.copyfile(library, new)
    new.replace(MODULE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the native module for this clone.")
    parser.add_argument("--required", action="store_true", help="fail if it cannot be built")
    required = parser.parse_args().required
    if shutil.which("cargo"):
        print("building the native module")
    try:
        _install()
    except (NoCargo, BuildFailed) as error:
        # One of older sources.
        MODULE.unlink(missing_ok=True)
        if required:
            print(f"{error}\nthe native module could not be built; {NEEDED}", file=sys.stderr)
            return 1
        print(f"the native module is not built, Fencepost runs in pure Python: {error}")
    else:
        if required:
            print(f"{MODULE.relative_to(NATIVE.parent)} is built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
