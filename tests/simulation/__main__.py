"""`python -m tests.simulation --seeds 20000`: run many seeds, spread over the scenarios.

`--scenario NAME --seed N --trace` replays one and prints its events.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.scenarios import SCENARIOS, Outcome, run


def one(name: str, seed: int) -> Outcome:
    try:
        return run(SCENARIOS[name], seed)
    except Exception as error:
        return Outcome(name, seed, (f"CRASH: {type(error).__name__}: {error}",), 0, 0, 0, 0, 0, "")


def _some(work: list[tuple[str, int]]) -> list[Outcome]:
    return [one(name, seed) for name, seed in work]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=2000, help="how many runs, spread over the scenarios")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, of --scenario")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--trace", action="store_true", help="print what happens (with --seed)")
    parser.add_argument(
        "--digests", action="store_true", help="print each run's digest, by which checkouts are compared"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    names = options.scenario or list(SCENARIOS)
    if options.seed is not None:
        return _replay(names, options.seed, trace=options.trace)
    work = [(names[i % len(names)], options.first + i // len(names)) for i in range(options.seeds)]
    return _many(work, options.jobs, digests=options.digests)


def _replay(names: list[str], seed: int, *, trace: bool) -> int:
    failed = 0
    for name in names:
        outcome = run(SCENARIOS[name], seed, tracing=trace)
        for line in outcome.trace:
            print(line)
        print(
            f"{name} seed {seed}: {outcome.tries} tries, {outcome.accepted} accepted, "
            f"executor {outcome.executor}, digest {outcome.digest}"
        )
        for line in outcome.found:
            print(f"  {line}")
        failed += bool(outcome.found)
    return min(failed, 1)


def _many(work: list[tuple[str, int]], jobs: int, *, digests: bool) -> int:
    started = time.monotonic()
    chunks = [work[i : i + 32] for i in range(0, len(work), 32)]
    runs: Counter[str] = Counter()
    executed: Counter[str] = Counter()
    failures: dict[str, list[Outcome]] = {}
    totals: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs) as pool:
        for number, outcomes in enumerate(pool.map(_some, chunks), 1):
            for outcome in outcomes:
                runs[outcome.scenario] += 1
                executed[outcome.executor] += 1
                if digests:
                    print(f"digest {outcome.scenario} {outcome.seed} {outcome.digest}")
                totals.update(
                    tries=outcome.tries, accepted=outcome.accepted, refused=outcome.refused, unknown=outcome.unknown
                )
                if outcome.found:
                    failures.setdefault(outcome.scenario, []).append(outcome)
                    if len(failures[outcome.scenario]) <= 5:
                        print(
                            f"FAILED {outcome.scenario} seed {outcome.seed} ({outcome.executor}): {outcome.found[0]}",
                            flush=True,
                        )
            if sys.stderr.isatty() or number % 50 == 0:
                print(
                    f"{sum(runs.values())} of {len(work)} runs, {sum(map(len, failures.values()))} failed",
                    file=sys.stderr,
                )
    print(f"\n{'scenario':<18}{'runs':>8}{'failed':>8}")
    for name in SCENARIOS:
        if runs[name]:
            print(f"{name:<18}{runs[name]:>8}{len(failures.get(name, [])):>8}")
    seconds = time.monotonic() - started
    print(
        f"\n{sum(runs.values())} runs in {seconds:.0f} s: {totals['tries']} appends tried, "
        f"{totals['accepted']} accepted, {totals['refused']} refused, {totals['unknown']} of unknown outcome"
    )
    print("executors: " + ", ".join(f"{name or 'crashed'} {count}" for name, count in sorted(executed.items())))
    for name, failed in failures.items():
        print(f"replay: python -m tests.simulation --scenario {name} --seed {failed[0].seed} --trace")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
