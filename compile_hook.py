"""Hatch's build hook: `FENCEPOST_COMPILE=1 pip install .` compiles the hot rooms (proxy/fencepost_compiled)."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    _made: tempfile.TemporaryDirectory[str] | None = None

    def _wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("FENCEPOST_COMPILE") == "1"

    def dependencies(self) -> list[str]:
        return ["mypy>=1.14", "setuptools"] if self._wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted():
            return
        root = Path(self.root)
        sys.path.insert(0, str(root / "proxy"))
        from fencepost_compiled import DIRECTORY  # noqa: PLC0415
        from fencepost_compiled.build import BuildError, build  # noqa: PLC0415

        if version == "editable":
            sys.exit("FENCEPOST_COMPILE=1 is for an installation that is not editable; in a clone: make compiled")
        self._made = tempfile.TemporaryDirectory(prefix="fencepost-wheel-")
        made = Path(self._made.name) / Path(DIRECTORY).name
        try:
            build(made, [root / "policies", root / "proxy"])
        except BuildError as error:
            sys.exit(f"FENCEPOST_COMPILE=1: {error}")
        build_data["force_include"][str(made)] = f"fencepost_compiled/{made.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            self._made.cleanup()
