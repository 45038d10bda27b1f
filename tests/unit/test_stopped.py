"""`tests/stopped.py` stops descendants of its pytest, and leaves none stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import stopped
from tests.kit.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
_SEES_A_STOP = """
import subprocess, sys
WATCH = "from time import *; at = monotonic()\\nwhile (now := monotonic()) - at < 0.25: at = now; sleep(0.01)"
def test_a_child_is_stopped_and_resumed():
    subprocess.run([sys.executable, "-c", WATCH], check=True, timeout=60)
"""
_STOPS_ITS_OWN = """
import os, pathlib, signal, subprocess, time
def test_its_own_stop_lasts():
    for _ in range(10):
        with subprocess.Popen(["sleep", "60"]) as child:
            for _ in range(5):
                os.kill(child.pid, signal.SIGSTOP)
                time.sleep(0.05)
                assert pathlib.Path(f"/proc/{child.pid}/stat").read_text().split()[2] == "T"
                os.kill(child.pid, signal.SIGCONT)
                time.sleep(0.01)
            child.kill()
"""
_LEAVES_A_CHILD = """
import pathlib, subprocess
def test_interrupted():
    child = subprocess.Popen(["sleep", "60"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    child.wait()
"""


def _options(directory: Path, test: str) -> list[str]:
    file = directory / "test_inner.py"
    file.write_text(test)
    return ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]


@pytest.mark.parametrize(("test", "length"), [(_SEES_A_STOP, 0.3), (_STOPS_ITS_OWN, 0.03)])
def test_stops_come_on_top_of_those_of_tests(
    test: str, length: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = stopped.run(_options(tmp_path, test), seed=1, seconds=(length, length), gap_seconds=0.02, minutes=10)
    output = capfd.readouterr().out
    assert status == 0, output
    assert "seed 1: 0 stops" not in output


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_process_is_resumed_at_the_end(end: signal.Signals, tmp_path: Path) -> None:
    options = [*_options(tmp_path, _LEAVES_A_CHILD)]
    command = [sys.executable, "-m", "tests.stopped", "--shortest=20", "--longest=20", "--gap=0.1", "--", *options]
    with subprocess.Popen(command, cwd=stopped.ROOT, start_new_session=True, stdout=subprocess.PIPE) as tool:
        child = int(until((tmp_path / "child").read_text, "the child to start"))
        try:
            until(lambda: _state(child) == "T", "the child to be stopped")
            os.killpg(tool.pid, end)
            output = tool.communicate(timeout=60)[0]
            assert re.search(rb"[1-9]\d* stops \(other", output)
            assert _state(child) != "T"
        finally:
            if _state(child) is not None:
                os.kill(child, signal.SIGKILL)


def _state(pid: int) -> str | None:
    process = stopped._process(pid)
    return process.state if process is not None and process.state != "Z" else None
