"""`python -m tests.order_proof`: do keys stay in order during an expansion, for every client and group protocol?

Prints a table: clients × protocols, and what each group read with ordered expansion on and off. Exit status 1: with
ordered expansion, a group read a key out of order or missed a record. Or a group missed a record where no order is
promised. Or no group read out of order with the feature off, so that the proof shows nothing.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.kit.proofs import Proof
from tests.order_proof import run as proof
from tests.order_proof.members import kinds_named
from tests.order_proof.observed import Decision
from tests.support.members import Kind


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.order_proof")
    parser.add_argument("--kinds", default="", help="beginnings of 'client protocol', by commas (default: all)")
    parser.add_argument("--short", action="store_true", help="one expansion instead of four")
    parser.add_argument("--only", choices=["on", "off"], help="with the feature, or without")
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--proxies", type=int, default=1, choices=[1, 2], help="members and writers use them in turn")
    parser.add_argument("--kills", action="store_true", help="all kinds of writers; proxies and brokers are killed")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="groups that read a topic together")
    parser.add_argument("--rounds", type=int, default=1, help="how often all of it")
    parser.add_argument("--keep", action="store_true", help="keep the logs of proxy and members although all holds")
    options = parser.parse_args()
    holds = True
    if options.kills and (options.short or options.proxies < 2):
        parser.error("--kills is the long form, and needs --proxies 2")
    this = Proof("order")
    plan = proof.KILLS if options.kills else proof.SHORT if options.short else proof.LONG
    with proof.stage(this.directory, options.brokers, options.proxies) as stage:
        for number in range(1, options.rounds + 1):
            on: dict[Kind, Decision] = {}
            off: dict[Kind, Decision] = {}
            results: list[proof.Result] = []
            for kinds in _batched(kinds_named(options.kinds), options.at_once):
                print(", ".join(kind.name for kind in kinds), flush=True)
                if options.only != "off":
                    result = proof.run(stage, kinds, plan, ordered=True, say=this.say)
                    results.append(result)
                    on.update(result.decisions)
                    holds &= result.holds
                if options.only != "on":
                    off.update(proof.run(stage, kinds, proof.OFF, ordered=False, say=this.say).decisions)
            if plan is proof.LONG and options.only != "off":
                kinds = kinds_named(options.kinds)[-options.at_once :]
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
    return this.end(holds, keep=options.keep)


def _batched(kinds: tuple[Kind, ...], size: int) -> list[tuple[Kind, ...]]:
    return [kinds[i : i + size] for i in range(0, len(kinds), size)]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
