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
        foreign=dice.choice((0, 0, 0.1)),
    )
    load = chance(0.3)
    expands, count_checked = chance(0.3), chance(0.7)
    # Without partition-count checks, no task with the old count may run.
    alone = expands and not count_checked
    return Story(
        f"mix {seed}",
        faults,
        partitions=dice.choice((1, 2, 3, 5)),
        batches=1 if load else dice.choice((1, 2, 3, 4)),
        rows=dice.choice((10, 30, 60)),
        is_sorted=chance(0.4),
        shuffled=chance(0.5),
        speculation=dice.choice((0.0, 0.2, 0.6)),
        restarts=dice.choice((0, 1, 2, 4)),
        zombies=0.0 if alone else dice.choice((0.0, 0.5, 1.0)),
        quiet=alone,
        split_brain=chance(0.15) and not alone,
        restored=chance(0.3) and not load,
        expands=expands,
        factor=dice.choice((2, 2, 3, 1.5)),
        count_checked=count_checked,
        equal_rows=chance(0.3),
        keyless=chance(0.2),
        explicit=chance(0.2),
        load=load,
    )
