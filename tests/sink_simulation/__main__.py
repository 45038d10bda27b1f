"""`python -m tests.sink_simulation --seeds 1000 [--story NAME] [--seed N]`."""

from __future__ import annotations

import argparse
import time

from .stories import STORIES, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--story")
    args = parser.parse_args()
    seeds = range(args.seeds) if args.seed is None else [args.seed]
    for story in STORIES.values():
        if args.story in (None, story.name):
            began = time.perf_counter()
            appends = refusals = found = refused = compared = filled = 0
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
                compared += run.compared
                filled += run.filled
            print(
                f"{story.name:32} {len(seeds)} seeds, {appends} appends, {refusals} refused, {found} rows found again, "
                f"{refused} clear errors, {compared} compared, {filled} filled in, {time.perf_counter() - began:.1f} s",
                flush=True,
            )


main()
