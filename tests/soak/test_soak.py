"""A short soak with the clients, faults and checks of `make soak`: 15 seconds, or 30 with the marker `soak`."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost_dev.process import supervised

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(2400), pytest.mark.no_cover]

_LONGEST_SECONDS = 600.0
_GOODBYE_SECONDS = 120.0
_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("minutes", [0.25, pytest.param(0.5, marks=pytest.mark.soak)])
def test_a_moment_of_faults_breaks_no_promise(minutes: float, tmp_path: Path) -> None:
    """Repeat with a longer run if the machine is too busy for enough operations."""
    shown: dict[str, int] = {}
    for longer in (1, 4, 12):
        shown = soaked(longer * minutes, tmp_path / f"{longer}")
        if all(count > _ENOUGH[name] for name, count in shown.items()):
            return
    raise AssertionError(f"so little was done that nothing is shown: {shown}")


#: Minimum numbers of accepted appends, refused appends and faults.
_ENOUGH = {"accepted": 100, "refused": 100, "faults": 5}


def soaked(minutes: float, directory: Path) -> dict[str, int]:
    """Run the soak in a separate process, because client libraries that lost brokers leave threads and sockets."""
    directory.mkdir()
    seed = random.randrange(1 << 31)
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(minutes), "--seed", str(seed)]
    output = directory / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            supervised([*command, "--directory", str(directory / "soak")]),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=_ROOT,
        )
    try:
        status = process.wait(60 * minutes + _LONGEST_SECONDS)
    finally:
        if process.poll() is None:
            # it then stops its brokers and proxies
            process.send_signal(signal.SIGINT)
            process.wait(_GOODBYE_SECONDS)
    text = output.read_text()
    print(text)  # its first line has the seed

    assert status == 0, f"seed {seed}"
    assert "result: passed" in text
    totals = re.search(r"^all (\d+) +(\d+) +(\d+)", text, re.MULTILINE)
    faults = re.search(r"^faults: (\d+)", text, re.MULTILINE)
    assert totals is not None
    assert faults is not None
    return {"accepted": int(totals[2]), "refused": int(totals[3]), "faults": int(faults[1])}
