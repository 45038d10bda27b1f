"""`python -m tests.rolling_restart`: does a client lose anything while two proxies are restarted in turn?

Prints, for every client, its writers' outcomes, the comparison with Kafka's log, and what its consumer group read. Exit
status 1: a send failed; a record is missing, duplicated or out of order; or a group missed a record.
"""

from __future__ import annotations

from typing import get_args

from tests.kit.campaigns import Campaign, campaign, leave
from tests.rolling_restart.run import QUERY_THE_OTHER, READERS, run
from tests.rolling_restart.stage import Know, two_proxies
from tests.support.kafka import running_kafka
from tests.support.proxy import CHECKED_BY_NAME

_KNOW = "the clients' bootstrap addresses: of both proxies, of the first only, or of a load balancer"
_STAY_AWAY = "restart a proxy after clients made progress through the other one"
ARGUMENTS = {
    "--rolls": {"type": int, "default": 3, "help": "how often both proxies are restarted"},
    "--brokers": {"type": int, "default": 3},
    "--know": {"choices": get_args(Know), "default": "both", "help": _KNOW},
    "--stay-away": {"action": "store_true", "help": _STAY_AWAY},
}


def prove(this: Campaign) -> bool:
    options = this.options
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
    return result.holds


if __name__ == "__main__":
    leave(campaign("rolling_restart", prove, ARGUMENTS, keep=True))
