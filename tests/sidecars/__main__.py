"""`python -m tests.sidecars`: three brokers with a sidecar each, and leaders that move under competing writers.

Prints the writers' outcomes and Kafka's log. Exit status 1: an append was accepted at another offset than expected, an
accepted record is missing, or a refused one is in the log.
"""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from tests.kit.proofs import Proof
from tests.sidecars.run import Check, run
from tests.sidecars.stage import sidecars


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sidecars")
    parser.add_argument("--rounds", type=int, default=3, help="six moved leaders and three restarted brokers each")
    parser.add_argument("--check", choices=get_args(Check), default="required", help="of the topic")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--secured", dest="way", action="store_const", const="secured", help="SASL_SSL at sidecars and brokers"
    )
    ways.add_argument(
        "--loopback", dest="way", action="store_const", const="loopback",
        help="the same, but sidecars connect to brokers by SASL_PLAINTEXT on the loopback",
    )  # fmt: skip
    options = parser.parse_args()
    this = Proof("sidecars")
    with sidecars(this.directory, options.way or "plain") as stage:
        run(stage, rounds=options.rounds, check=options.check, say=this.say)
    print("\nit holds")
    return this.end(True, keep=True)


if __name__ == "__main__":
    sys.exit(main())
