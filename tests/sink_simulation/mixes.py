"""Random combinations of what the stories test separately. Nothing may be refused."""

from __future__ import annotations

import random

from .model import Faults
from .stories import Story


def mixed(seed: int) -> Story:
    """A story within the conditions of decision 13."""
    dice = random.Random(seed)

    def chance(of: float) -> bool:
        return dice.random() < of

    faults = Faults(
        lost=dice.choice((0, 0.05, 0.15)),
        answer_lost=dice.choice((0, 0.08, 0.2)),
        late=dice.choice((0, 0.05, 0.15)),
        retriable=dice.choice((0, 0.05)),
        unreadable=dice.choice((0, 0.03)),
        kill=dice.choice((0, 0, 0.3)),
        suspended=dice.choice((0, 0, 0.3)),
    )
    load = chance(0.25)
    arranged, restored, restarts = chance(0.2), chance(0.3) and not load, dice.choice((0, 1, 2, 4))
    expands, count_checked = chance(0.25), chance(0.7)
    # Without partition-count checks, no task with the old count may run; arranged rows must be arranged again.
    alone = expands and not count_checked
    restarts = 0 if alone and arranged else restarts
    keyless = chance(0.15) and not arranged
    # During an expansion the partition of a copy is unknown. Rows without a key are identified by their task.
    equal_rows = chance(0.3) and not expands and not keyless
    dealt = chance(0.2) and not expands and not keyless
    return Story(
        f"mix {seed}",
        faults,
        partitions=dice.choice((1, 2, 3)),
        tasks=dice.choice((1, 2, 3, 5)),
        batches=1 if load else dice.choice((1, 2, 3, 4)),
        rows=dice.choice((10, 30, 60)),
        arranged=arranged,
        shuffled=chance(0.5),
        changed_split=chance(0.2) and not keyless,
        permuted=chance(0.2) and not keyless,
        dealt=dealt,
        unmatched="compare",
        speculation=dice.choice((0.0, 0.2, 0.6)),
        restarts=restarts,
        zombies=0.0 if alone else dice.choice((0.0, 0.5, 1.0)),
        quiet=alone,
        split_brain=chance(0.15) and not alone and not keyless,
        restored=restored,
        expands=expands,
        count_checked=count_checked,
        equal_rows=equal_rows,
        keyless=keyless,
        explicit=chance(0.2) and not keyless,
        load=load,
        machines=dice.choice((1, 2)),
    )
