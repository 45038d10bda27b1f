"""`python -m tests.stopped`: run pytest, and meanwhile stop processes of that run at random (SIGSTOP, then SIGCONT).

A busy machine may suspend a process for seconds. A test that fails here waits for time instead of a condition, or the
product mistakes its own pause for a failure of another process. `--seed` repeats gaps, lengths and choices. A process
that a test stops itself stays stopped until that test resumes it. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
_BY_TESTS = "FENCEPOST_STOPPED_BY_TESTS"
_END_SECONDS = 60.0
#: The first that the command line contains names the kind.
_KINDS = {
    "kafka.Kafka": "Kafka broker",
    "org.apache.spark": "Spark",
    "pyspark": "Spark",
    "bin/java": "Java program",
    "sys.stdin.readline": "test worker",
    "fencepost_proxy": "proxy",
    " proxy ": "proxy",
    "python": "Python program",
}


class Process(NamedTuple):
    pid: int
    parent: int
    state: str
    started: int

    @property
    def kind(self) -> str:
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            command = ""
        return next((kind for part, kind in _KINDS.items() if part in command), "other")


def _process(pid: int) -> Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    return Process(pid, int(fields[1]), fields[0], int(fields[19]))


def running_descendants(pid: int) -> list[Process]:
    """Oldest first, without stopped processes and zombies."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        process = _process(int(entry.name)) if entry.name.isdigit() else None
        if process is not None:
            children[process.parent].append(process)
    found, parents = [], [pid]
    while parents:
        new = children[parents.pop()]
        found += new
        parents += [each.pid for each in new]
    return sorted((each for each in found if each.state not in "TtZX"), key=lambda each: (each.started, each.pid))


class Stopper:
    """Stops one process at a time until `run` ends. `stops` counts by kind of process."""

    def __init__(self, run: subprocess.Popen[bytes], rng: random.Random, by_tests: Path) -> None:
        self._run, self._rng, self._by_tests = run, rng, by_tests
        self.stops: Counter[str] = Counter()

    def work(self, seconds: tuple[float, float], gap_seconds: float, ends_at: float) -> None:
        while time.monotonic() < ends_at and not self._ended_after(self._rng.uniform(0, gap_seconds)):
            length, choice = self._rng.uniform(*seconds), self._rng.random()
            processes = running_descendants(self._run.pid)
            if processes:
                self._stop(processes[int(choice * len(processes))], length)

    def _ended_after(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._run.wait(seconds)
        return self._run.poll() is not None

    def _stop(self, process: Process, seconds: float) -> None:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(process.pid)  # the kernel may reuse the number
            try:
                now = _process(process.pid)
                if now is None or now.started != process.started or self._by_test(process):
                    return
                self.stops[process.kind] += 1
                try:
                    signal.pidfd_send_signal(fd, signal.SIGSTOP)
                    self._ended_after(seconds)
                finally:
                    self._resume(fd, process)
            finally:
                os.close(fd)

    def _resume(self, fd: int, process: Process) -> None:
        if self._by_test(process):
            return
        signal.pidfd_send_signal(fd, signal.SIGCONT)
        if self._by_test(process):  # the test stopped it concurrently
            signal.pidfd_send_signal(fd, signal.SIGSTOP)

    def _by_test(self, process: Process) -> bool:
        return (self._by_tests / str(process.pid)).exists()


def pytest_configure(config: pytest.Config) -> None:
    """In each process of pytest (`-p tests.stopped`): record which processes tests themselves stop."""
    directory, kill = Path(os.environ[_BY_TESTS]), os.kill

    def recorded(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:
            (directory / str(pid)).touch()
        else:
            (directory / str(pid)).unlink(missing_ok=True)
        kill(pid, number)

    os.kill = recorded


def run(options: Sequence[str], *, seed: int, seconds: tuple[float, float], gap_seconds: float, minutes: float) -> int:
    with tempfile.TemporaryDirectory(prefix="stopped-") as by_tests:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "tests.stopped", *options],
            cwd=ROOT,
            env={**os.environ, _BY_TESTS: by_tests},
        )
        stopper = Stopper(process, random.Random(seed), Path(by_tests))
        try:
            stopper.work(seconds, gap_seconds, time.monotonic() + 60 * minutes)
            if process.poll() is None:
                print(f"ending pytest: {minutes:g} minutes have passed", file=sys.stderr)
                process.send_signal(signal.SIGINT)
        except KeyboardInterrupt:  # pytest received it too
            pass
        except SystemExit:
            process.send_signal(signal.SIGINT)
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
    kinds = ", ".join(f"{kind} {count}" for kind, count in stopper.stops.most_common())
    print(f"seed {seed}: {stopper.stops.total()} stops ({kinds})", flush=True)
    return process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stopped", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--shortest", type=float, default=0.05, metavar="SECONDS", help="shortest stop (%(default)s)")
    parser.add_argument("--longest", type=float, default=3.0, metavar="SECONDS", help="longest stop (%(default)s)")
    parser.add_argument("--gap", type=float, default=1.0, metavar="SECONDS", help="longest gap (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="end pytest after so many minutes (%(default)s)")
    parser.add_argument("options", nargs="*", help="files and options of pytest, after -- (@tests/quick.txt)")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would pytest
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(
        given.options or ["-m", "not soak", "@tests/quick.txt"],
        seed=given.seed,
        seconds=(given.shortest, given.longest),
        gap_seconds=given.gap,
        minutes=given.minutes,
    )


if __name__ == "__main__":
    sys.exit(main())
