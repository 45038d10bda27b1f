"""Old releases of client libraries, each in a separate virtual environment (`tests/old_clients`).

The first test that needs an environment creates it. It stays in the cache, named by its requirements and Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fencepost_dev.jars import cache_directory

_HERE = Path(__file__).parents[1] / "old_clients"
RELEASES = tuple(sorted(each.stem for each in _HERE.glob("*.txt")))
_SECONDS = 200.0


def run_old_client(release: str, reported: Mapping[str, Any]) -> Any:
    """The output of `tests/old_clients/append.py` for `reported`. Skips the test if the release cannot be installed."""
    library = release.rpartition("-")[0]
    done = subprocess.run(
        [_python_with(release), "-I", _HERE / "append.py"],
        input=json.dumps({**reported, "library": library}),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _python_with(release: str) -> Path:
    pinned = _HERE / f"{release}.txt"
    name = hashlib.sha256(pinned.read_bytes() + sys.version.encode()).hexdigest()[:16]
    environment = cache_directory() / "old_clients" / name
    environment.mkdir(parents=True, exist_ok=True)
    python, complete = environment / "bin" / "python", environment / "complete"
    with (environment / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=_SECONDS)
            _install(release, pinned, python)
            complete.touch()
    return python


def _install(release: str, pinned: Path, python: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q"]
    command += ["--retries", "1", "--only-binary", ":all:", "--require-hashes", "-r", pinned]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
    if done.returncode:
        pytest.skip(f"{release} cannot be installed (is a package index within reach?): {done.stderr.strip()[-300:]}")
