"""The older version for tests of upgrades: built from git, once per commit, in build/older."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: While there is no release: a version without `fencepost.claims`.
FIRST = "e91061a71a84b11c383f2684c313e70a598d1153"
_PACKAGES = ("policies", "proxy", "client", "native")


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)


def commit() -> str:
    """Of the last git tag before HEAD, if there is one."""
    described = _git("describe", "--tags", "--abbrev=0", "HEAD^").stdout.decode().strip()
    found = _git("rev-parse", "--verify", "--quiet", f"{described or FIRST}^{{commit}}")
    if found.returncode:
        pytest.skip(f"git has no commit {described or FIRST}: fetch the whole history")
    return found.stdout.decode().strip()


def environment() -> dict[str, str]:
    """Variables with which `python -m fencepost_proxy` runs the older version; with native code if there is cargo."""
    sha = commit()
    tree = ROOT / "build" / "older" / sha
    if not tree.exists():
        part = tree.with_name(f".{sha}-{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(_git("archive", sha).stdout)) as archive:
            archive.extractall(part, filter="data")
        subprocess.run([sys.executable, "hatch_build.py"], cwd=part, check=True, capture_output=True)
        shutil.rmtree(part / "native" / "target", ignore_errors=True)
        try:
            part.rename(tree)
        except OSError:
            shutil.rmtree(part)  # another test process was first
    variables = {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in _PACKAGES)}
    imported = [sys.executable, "-c", "import fencepost_proxy; print(fencepost_proxy.__file__)"]
    printed = subprocess.check_output(imported, env={**os.environ, **variables}, text=True)
    assert Path(printed).is_relative_to(tree), printed
    return variables
