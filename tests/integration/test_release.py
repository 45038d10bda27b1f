"""`make release` from HEAD: each file is built, installed into an empty environment, and runs the quickstart."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def release(to: Path, *without: str) -> tuple[str, Path]:
    """What it printed, and where the files are."""
    options = [word for each in without for word in ("--without", each)]
    done = subprocess.run(
        [sys.executable, "-m", "release", "--to", to, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = to.iterdir()
    return done.stdout, directory


@pytest.mark.timeout(300)
def test_second_run_makes_the_same_bytes(tmp_path: Path) -> None:
    parts = ("x86_64", "aarch64", "images", "quickstart")
    release(tmp_path, *parts)
    printed, directory = release(tmp_path, *parts)
    assert "the same bytes as in the run before: 4 files" in printed
    bill = json.loads(next((directory / "dist").glob("*.cdx.json")).read_bytes())
    assert bill["bomFormat"] == "CycloneDX"
    bare = {re.sub(r"@[^@]+$", "", each["purl"]) for each in bill["components"]}
    assert {"pkg:pypi/kafka-python", "pkg:pypi/pyspark", "pkg:cargo/pyo3"} <= bare
    assert not {"pkg:pypi/pytest", "pkg:pypi/mypy"} & bare


@pytest.mark.kafka
@pytest.mark.timeout(1200)
def test_each_file_runs_the_quickstart_in_an_empty_environment(tmp_path: Path) -> None:
    native = () if shutil.which("cargo") and sys.platform == "linux" else ("x86_64",)
    printed, directory = release(tmp_path, "aarch64", "images", *native)
    assert "complete: " in printed
    transcripts = {each.name: each.read_text("utf-8") for each in (directory / "transcripts").iterdir()}
    assert len(transcripts) == 3 - len(native)
    for name, text in transcripts.items():
        assert "expected 1, but the log ends at 2\n" in text
        assert "0\t1\tNone\tsecond" in text or "\tsecond\n" in text
        assert ("(pure Python: fencepost_native is not installed)" in text) is name.endswith("-none-any.whl.txt"), text
