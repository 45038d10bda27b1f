"""`python -m tests.sink_simulation --seeds 1000 [--story NAME] [--seed N]`.

`--mixes 1000 [--seed N]`: random combinations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

from .mixes import mixed
from .stories import STORIES, play


def _mix(seeds: Iterable[int]) -> None:
    began, played = time.perf_counter(), 0
    for seed in seeds:
        try:
            play(mixed(seed), seed)
        except BaseException:
            print(f"mix: seed {seed}: {mixed(seed)}")
            raise
        played += 1
    print(f"{played} mixed stories, {time.perf_counter() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--story")
    parser.add_argument("--mixes", type=int, metavar="N", help="run N random combinations, or the one of --seed")
    args = parser.parse_args()
    if args.mixes is not None:
        _mix(range(args.mixes) if args.seed is None else [args.seed])
        return
    seeds = range(args.seeds) if args.seed is None else [args.seed]
    for story in STORIES.values():
        if args.story in (None, story.name):
            began = time.perf_counter()
            appends = refusals = found = refused = 0
            for seed in seeds:
                try:
                    run = play(story, seed)
                except BaseException:
                    print(f"{story.name}: seed {seed}")
                    raise
                appends += run.world.appends
                refusals += run.world.refusals
                found += run.found
                refused += len(run.errors)
            print(
                f"{story.name:32} {len(seeds)} seeds, {appends} appends, {refusals} refused, {found} rows found again, "
                f"{refused} clear errors, {time.perf_counter() - began:.1f} s",
                flush=True,
            )


main()
