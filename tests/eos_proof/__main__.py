"""`python -m tests.eos_proof`: exactly-once processing while applications, proxies and brokers are killed.

Prints the counts. Two controls follow. Without transactions (`--no-transactions`: only these), the output must contain
numbers twice. Without a proxy (`--direct`: only this), the run shows whether the proxy causes a standstill.

Exit status 1: with transactions, an input was not in the output exactly once; or without them, each input was.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tests.eos_proof import run as proof
from tests.kit.campaigns import Campaign, campaign, leave

PROOF, PLAIN, DIRECT = "through the proxy", "without transactions", "without the proxy"
ARGUMENTS = {
    "--kills": {"type": int, "default": 50},
    "--minutes": {"type": float, "default": inf, "help": "no kill after this time"},
    "--controls": {"type": int, "default": 8, "metavar": "KILLS", "help": "in each of the controls; 0: none"},
    "--clients": {"default": ",".join(proof.CLIENTS), "help": "by commas"},
    "--victims": {"default": ",".join(proof.VICTIMS), "help": "what is killed in turn, by commas"},
}
ONLY = {
    flag: {"action": "store_const", "dest": "only", "const": run, "help": f"only {run}"}
    for flag, run in (("--no-transactions", PLAIN), ("--direct", DIRECT))
}


def prove(this: Campaign) -> bool:
    options = this.options
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
    return holds


if __name__ == "__main__":
    leave(campaign("eos_proof", prove, ARGUMENTS, only_one=ONLY))
