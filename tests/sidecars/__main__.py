"""`python -m tests.sidecars`: three brokers with a sidecar each, and leaders that move under competing writers.

Prints the writers' outcomes and Kafka's log. Exit status 1: an append was accepted at another offset than expected, an
accepted record is missing, or a refused one is in the log.
"""

from __future__ import annotations

from typing import get_args

from tests.kit.campaigns import Campaign, campaign, leave
from tests.sidecars.run import Check, run
from tests.sidecars.stage import sidecars

ARGUMENTS = {
    "--rounds": {"type": int, "default": 3, "help": "six moved leaders and three restarted brokers each"},
    "--check": {"choices": get_args(Check), "default": "required", "help": "of the topic"},
}
_LOOPBACK = "the same, but sidecars connect to brokers by SASL_PLAINTEXT on the loopback"
WAYS = {
    f"--{way}": {"dest": "way", "action": "store_const", "const": way, "help": what}
    for way, what in (("secured", "SASL_SSL at sidecars and brokers"), ("loopback", _LOOPBACK))
}


def prove(this: Campaign) -> bool:
    """Raises AssertionError if a promise is broken."""
    with sidecars(this.directory, this.options.way or "plain") as stage:
        run(stage, rounds=this.options.rounds, check=this.options.check, say=this.say)
    print("\nit holds")
    return True


if __name__ == "__main__":
    leave(campaign("sidecars", prove, ARGUMENTS, only_one=WAYS, keep=True))
