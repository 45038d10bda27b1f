"""`python -m tests.order_proof`: do keys stay in order during an expansion, for every client and group protocol?

Prints a table: clients × protocols, and what each group read with ordered expansion on and off. Exit status 1: with
ordered expansion, a group read a key out of order or missed a record. Or a group missed a record where no order is
promised. Or no group read out of order with the feature off, so that the proof shows nothing.
"""

from __future__ import annotations

from tests.kit.campaigns import Campaign, campaign, leave
from tests.order_proof import run as proof
from tests.order_proof.members import kinds_named
from tests.order_proof.observed import Decision
from tests.support.members import Kind

ARGUMENTS = {
    "--kinds": {"default": "", "help": "beginnings of 'client protocol', by commas (default: all)"},
    "--only": {"choices": ["on", "off"], "help": "with the feature, or without"},
    "--brokers": {"type": int, "default": 1},
    "--proxies": {"type": int, "default": 1, "choices": [1, 2], "help": "members and writers use them in turn"},
    "--at-once": {"type": int, "default": 3, "metavar": "N", "help": "groups that read a topic together"},
    "--rounds": {"type": int, "default": 1, "help": "how often all of it"},
}
_KILLS = "all kinds of writers; proxies and brokers are killed (needs --proxies 2)"
FORMS = {
    "--short": {"action": "store_true", "help": "one expansion instead of four"},
    "--kills": {"action": "store_true", "help": _KILLS},
}


def prove(this: Campaign) -> bool:
    options, holds = this.options, True
    if options.kills and options.proxies < 2:
        raise SystemExit("--kills needs --proxies 2")
    plan = proof.KILLS if options.kills else proof.SHORT if options.short else proof.LONG
    with proof.stage(this.directory, options.brokers, options.proxies) as stage:
        for number in range(1, options.rounds + 1):
            on: dict[Kind, Decision] = {}
            off: dict[Kind, Decision] = {}
            results: list[proof.Result] = []
            chosen, size = kinds_named(options.kinds), options.at_once
            for kinds in (chosen[first : first + size] for first in range(0, len(chosen), size)):
                print(", ".join(kind.name for kind in kinds), flush=True)
                if options.only != "off":
                    result = proof.run(stage, kinds, plan, ordered=True, say=this.say)
                    results.append(result)
                    on.update(result.decisions)
                    holds &= result.holds
                if options.only != "on":
                    off.update(proof.run(stage, kinds, proof.OFF, ordered=False, say=this.say).decisions)
            if plan is proof.LONG and options.only != "off":
                kinds = chosen[-size:]
                print(
                    "any expansion, keys placed by jump hash; then 2 to 3 by murmur2, where order is not kept",
                    flush=True,
                )
                jumping = proof.run(stage, kinds, proof.JUMPING, ordered=True, say=this.say)
                between = proof.run(stage, kinds, proof.BETWEEN_OLD, ordered=True, say=this.say)
                holds &= jumping.holds and between.complete
                print("\n".join(["", "jump hash, 1→2→3→8:", *proof.table(jumping.decisions, {})]))
                between_title = "murmur2, 2→3 (order for information; none may be missing):"
                print("\n".join(["", between_title, *proof.table(between.decisions, {})]))
            this.say(f"round {number}\n")
            print("\n".join(proof.table(on, off)), flush=True)
            if options.kills and results:
                print("\n".join(["", *proof.writers_table(results)]), flush=True)
            holds &= all(each.early for each in off.values())
            for kind, decision in on.items():
                for what, records in (("before its predecessor", decision.early), ("again", decision.late)):
                    for record in records[:5]:
                        print(f"{kind.name}, of {len(records)} {what}: {record}")
    return holds


if __name__ == "__main__":
    leave(campaign("order_proof", prove, ARGUMENTS, only_one=FORMS))
