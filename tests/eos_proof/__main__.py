"""`python -m tests.eos_proof`: exactly-once processing while applications, proxies and brokers are killed.

Prints the counts. Two controls follow. Without transactions (`--no-transactions`: only these), the output must contain
numbers twice. Without a proxy (`--direct`: only this), the run shows whether the proxy causes a standstill.

Exit status 1: with transactions, an input was not in the output exactly once; or without them, each input was.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from math import inf

from tests.eos_proof import run as proof
from tests.kit.proofs import Proof

PROOF, PLAIN, DIRECT = "through the proxy", "without transactions", "without the proxy"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.eos_proof")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=inf, help="no kill after this time")
    parser.add_argument("--controls", type=int, default=8, metavar="KILLS", help="in each of the controls; 0: none")
    parser.add_argument("--clients", default=",".join(proof.CLIENTS), help="by commas")
    parser.add_argument("--victims", default=",".join(proof.VICTIMS), help="what is killed in turn, by commas")
    only = parser.add_mutually_exclusive_group()
    without = "only without transactions"
    only.add_argument("--no-transactions", action="store_const", dest="only", const=PLAIN, help=without)
    only.add_argument("--direct", action="store_const", dest="only", const=DIRECT, help="only without the proxy")
    parser.add_argument("--keep", action="store_true", help="keep the logs of proxies and applications in any case")
    options = parser.parse_args()
    this = Proof("eos")
    plan = proof.Plan(
        options.kills,
        clients=tuple(options.clients.split(",")),
        victims=tuple(options.victims.split(",")),
        seconds_max=options.minutes * 60,
    )
    plans = {PROOF: plan}
    if options.only:
        plans = {options.only: plan}
    elif options.controls:
        plans |= {PLAIN: replace(plan, kills=options.controls), DIRECT: replace(plan, kills=options.controls)}
    results: dict[str, proof.Result] = {}
    with proof.stage(this.directory) as stage:
        for name, each in plans.items():
            print(f"\n{name}:", flush=True)
            result = results[name] = proof.run(
                stage.without_proxies() if name == DIRECT else stage,
                replace(each, plain=name == PLAIN),
                say=this.say,
            )
            print(f"{result.seconds:.0f} s; kills: {dict(result.kills)}", flush=True)
    holds = True
    for name, result in results.items():
        as_it_should = result.at_least_once if name == PLAIN else result.holds
        holds &= as_it_should
        print("\n".join(["", f"{name}{'' if as_it_should else ': NOT AS IT SHOULD BE'}:", *proof.table(result)]))
    print("\n".join(["", "longest pause in seconds:", *proof.pauses_table(results), ""]))
    for name, result in results.items():
        for client, counts in result.counts.items():
            for what, times in {**counts.stood_still, **counts.gave_up}.items():
                print(f"{name}, {client}: {what}, {times} times")
    return this.end(holds, keep=options.keep)


if __name__ == "__main__":
    sys.exit(main())
