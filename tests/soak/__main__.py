"""`python -m tests.soak --minutes 20 --seed 7`: real Kafka, real clients, faults; every response compared with the log.

`--check DIRECTORY` checks the history of an earlier run again. Exit status 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.kit import checker
from tests.kit.history import load
from tests.soak.run import HISTORY, Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, help="seed of the fault schedule (default: random)")
    parser.add_argument("--pace", type=float, default=0.15, help="approximate pause of each writer, in seconds")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--no-fencing", action="store_true", help="run defective proxies, to test the checker")
    parser.add_argument("--directory", type=Path, help="directory for the history")
    parser.add_argument("--keep", action="store_true", help="keep it after success, too")
    parser.add_argument("--check", type=Path, metavar="DIRECTORY", help="check an earlier run again")
    options = parser.parse_args()
    if options.check is not None:
        return _validate(options.check)
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    plan = Plan(
        options.minutes * 60,
        seed,
        directory,
        options.pace,
        faults=not options.no_faults,
        fencing=not options.no_fencing,
    )
    _quieten(directory)
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    print(f"soak: {options.minutes:g} minutes, seed {seed}, history in {directory}", flush=True)
    started = time.monotonic()
    result = run(plan, _write, interrupted=interrupted)
    print(f"\nseed {seed}, {time.monotonic() - started:.0f} s")
    for line in result.summary():
        print(line)
    if result.holds and options.directory is None and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"the history is in {directory}; check it again: python -m tests.soak --check {directory}")
    return 0 if result.holds else 1


def _validate(directory: Path) -> int:
    decision = checker.check(load(directory / HISTORY))
    for line in checker.report(decision):
        print(line)
    return 1 if decision.findings else 0


def _quieten(directory: Path) -> None:
    """Redirect reports of lost connections: client libraries log each one, librdkafka to the file descriptor."""
    directory.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=directory / "clients.log", level=logging.ERROR)
    sys.stderr = os.fdopen(os.dup(2), "w")
    with (directory / "librdkafka.log").open("ab") as file:
        os.dup2(file.fileno(), 2)


def _write(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Skip the libraries' shutdown, which would wait for stopped brokers.
    os._exit(status)
