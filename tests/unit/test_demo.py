"""The demonstration's output without a terminal, and when it gives up on a load."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost_dev import demo, screen
from fencepost_dev.errors import DevError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the time of both modules."""
    now = [1_000.0]
    fake = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(screen, "time", fake)
    monkeypatch.setattr(demo, "time", fake)

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_without_terminal_equal_lines_are_rare(clock: Callable[[float], None]) -> None:
    out = io.StringIO()
    shown = screen.Screen(out)
    for _ in range(2 * 240):  # two minutes, four times a second
        shown.live("load", "Spark is starting")
        clock(0.25)
    assert len(out.getvalue().splitlines()) == 2
    for row in range(4 * 60):
        shown.live("load", f"rows {row}")
        clock(0.25)
    assert len(out.getvalue().splitlines()) == 2 + 6


def test_slow_load_goes_on_and_standing_one_ends(
    clock: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_seconds = 0.0
    monkeypatch.setattr(demo, "session_cpu_seconds", lambda _: cpu_seconds)
    (output := tmp_path / "load.log").write_text("Spark\n")
    process: Any = SimpleNamespace(pid=7)
    progress = demo.Progress(process, output)
    # Slow by CPU time, by output, and by rows: each longer than any limit on the whole.
    for _ in range(100):
        cpu_seconds += demo.BUSY_SECONDS
        clock(demo.STALL_SECONDS - 1)
        progress.check(0)
    for line in range(10):
        with output.open("a") as log:
            log.write(f"stage {line}\n")
        clock(demo.STALL_SECONDS - 1)
        progress.check(0)
    for rows in range(1, 10):
        clock(demo.STALL_SECONDS - 1)
        progress.check(rows)
    clock(demo.STALL_SECONDS + 1)
    with pytest.raises(DevError, match=r"the load stands still: no new row, .* \(9 rows are in the log\)") as failed:
        progress.check(9)
    assert "stage 9" in str(failed.value)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_cpu_time_of_a_session_is_read() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = demo.session_cpu_seconds(process.pid)
        process.kill()
    assert 0.4 <= found < 30


@pytest.mark.parametrize(("jars", "said"), [(45, "90 jars are downloaded first"), (0, "Nothing is downloaded.")])
def test_duration_and_downloads_are_said_first(
    jars: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "missing", lambda _: jars)
    monkeypatch.setattr(demo, "JOB", tmp_path / "absent")  # ends it before anything is started
    out = io.StringIO()
    with demo.Demo(screen.Screen(out), tmp_path / "logs") as running, pytest.raises(DevError, match="is missing"):
        running.run()
    assert "This takes about two minutes" in out.getvalue()
    assert said in out.getvalue()
