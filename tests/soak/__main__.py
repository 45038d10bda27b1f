"""`python -m tests.soak --minutes 20 --seed 7`: real Kafka, real clients, faults; every response compared with the log.

`--check DIRECTORY` checks the history of an earlier run again. Exit status 1: a promise was broken.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from tests.kit import checker
from tests.kit.campaigns import Campaign, campaign, leave
from tests.kit.history import load
from tests.soak.run import HISTORY, Plan, run

ARGUMENTS = {
    "--minutes": {"type": float, "default": 20.0},
    "--seed": {"type": int, "help": "seed of the fault schedule (default: random)"},
    "--pace": {"type": float, "default": 0.15, "help": "approximate pause of each writer, in seconds"},
    "--no-faults": {"action": "store_true"},
    "--no-fencing": {"action": "store_true", "help": "run defective proxies, to test the checker"},
    "--check": {"type": Path, "metavar": "DIRECTORY", "help": "check an earlier run again"},
}


def prove(this: Campaign) -> bool:
    options, directory = this.options, this.directory
    if options.check is not None:
        decision = checker.check(load(options.check / HISTORY))
        print("\n".join(checker.report(decision)))
        return not decision.findings
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
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
    result = run(plan, partial(print, flush=True), interrupted=interrupted)
    print(f"\nseed {seed}, {time.monotonic() - started:.0f} s")
    print("\n".join(result.summary()))
    print(f"check the history again: python -m tests.soak --check {directory}")
    return result.holds


def _quieten(directory: Path) -> None:
    """Redirect reports of lost connections: client libraries log each one, librdkafka to the file descriptor."""
    logging.basicConfig(filename=directory / "clients.log", level=logging.ERROR, force=True)
    sys.stderr = os.fdopen(os.dup(2), "w")
    with (directory / "librdkafka.log").open("ab") as file:
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    leave(campaign("soak", prove, ARGUMENTS))
