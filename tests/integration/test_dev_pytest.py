"""`fencepost_dev.pytest` from the user's view: a separate test session with the fixture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.docs import ROOT, blocks

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "application-developers.md"
_USED = """
import json
import os
from pathlib import Path


def test_addresses_for_the_outer_test(fencepost):
    Path("used.json").write_text(json.dumps([fencepost.bootstrap_servers, fencepost.kafka_bootstrap_servers]))


def test_topics_are_new_and_have_partitions(fencepost):
    names = {fencepost.create_topic(partitions=3) for _ in range(2)}
    assert len(names) == 2
"""


def processes_of(directory: Path) -> list[str]:
    """Command lines that name a file of the embedded Kafka, whose temporary data is in the directory."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it ended during the search
            found.append((process / "cmdline").read_text() if process.name.isdigit() else "")
    return [command for command in found if f"{directory}/fencepost-" in command]


def session(directory: Path, tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text('pytest_plugins = ["fencepost_dev.pytest"]\n')
    (directory / "test_application.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(directory), str(directory)],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_session_has_kafka_and_proxy_and_leaves_nothing(tmp_path: Path) -> None:
    """With the tests that the page shows."""
    (shown,) = [each.text for each in blocks(PAGE) if each.language == "python" and "def test_" in each.text]

    done = session(tmp_path, shown + _USED)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b3 passed", done.stdout)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("fencepost-*")) == []


def test_failure_to_start_is_one_error_with_its_reason(tmp_path: Path) -> None:
    done = session(tmp_path, "def test_it(fencepost): ...\n", JAVA_HOME="/nonexistent")

    assert done.returncode == 1
    assert "ClusterError: fencepost dev did not start: fencepost: JAVA_HOME=/nonexistent contains no bin/java" in (
        done.stdout
    )
