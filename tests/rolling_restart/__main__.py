"""`python -m tests.rolling_restart`: does a client lose anything while two proxies are restarted in turn?

Prints, for every client, its writers' outcomes, the comparison with Kafka's log, and what its consumer group read. Exit
status 1: a send failed; a record is missing, duplicated or out of order; or a group missed a record.
"""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from tests.kit.proofs import Proof
from tests.rolling_restart.run import QUERY_THE_OTHER, READERS, run
from tests.rolling_restart.stage import Know, two_proxies
from tests.support.kafka import running_kafka
from tests.support.proxy import CHECKED_BY_NAME


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rolling_restart")
    parser.add_argument("--rolls", type=int, default=3, help="how often both proxies are restarted")
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument(
        "--know",
        choices=get_args(Know),
        default="both",
        help="the clients' bootstrap addresses: of both proxies, of the first only, or of a load balancer",
    )
    parser.add_argument(
        "--stay-away", action="store_true", help="restart a proxy after clients made progress through the other one"
    )
    options = parser.parse_args()
    this = Proof("rolling")
    with (
        running_kafka(options.brokers) as kafka,
        two_proxies(kafka, this.directory, CHECKED_BY_NAME, know=options.know) as stage,
    ):
        result = run(
            stage,
            continue_meanwhile=QUERY_THE_OTHER if options.stay_away else stage.continue_meanwhile,
            rolls=options.rolls,
            readers=(*READERS, "java-consumer"),
            say=this.say,
        )
    print(f"\nclients were given the address of {options.know}\n\n{result.table()}", flush=True)
    print("\nnothing failed, nothing is there twice, nothing is lost" if result.holds else "\nIT DOES NOT HOLD")
    return this.end(result.holds, keep=True)


if __name__ == "__main__":
    sys.exit(main())
