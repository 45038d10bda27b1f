"""The pool of rows that the log has and the input did not have yet."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

from fencepost.spark.rows import FOREIGN, SAME_NUMBER, THIS_RUN, Group, Pool, digest_of

GROUPS = [Group("r", number, origin) for number, origin in enumerate((SAME_NUMBER, FOREIGN, THIS_RUN, FOREIGN))]


def test_pool_is_a_multiset_of_rows_by_group() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    pool, there = Pool(), Counter[tuple[bytes, int]]()
    rows = [digest_of(b"%d" % number) for number in range(300)]
    for _ in range(400):
        if dice.random() < 0.1:
            some, group = dice.choices(rows, k=dice.randrange(100)), dice.randrange(len(GROUPS))
            pool.add(b"".join(some), group)
            there.update((row, group) for row in some)
        for row in dice.choices(rows, k=10):
            most = dice.choice((THIS_RUN, SAME_NUMBER, FOREIGN))
            fitting = [GROUPS[g].origin for r, g in there if r == row and GROUPS[g].origin <= most]
            taken = pool.take(row, GROUPS, most)
            assert (taken is None) == (not fitting)
            if taken is not None:
                assert GROUPS[taken].origin == min(fitting)
                there -= Counter([(row, taken)])
    assert Counter(pool.left()) == there
    assert pool.count(GROUPS, FOREIGN) == sum(count for (_, group), count in there.items() if group in (1, 3))


def test_pool_needs_about_twenty_bytes_for_a_row() -> None:
    appends = [b"".join(digest_of(b"%d" % number) for number in range(at, at + 1000)) for at in range(0, 100_000, 1000)]
    pool = Pool()
    tracemalloc.start()
    try:
        for append in appends:
            pool.add(append, 0)
        assert tracemalloc.get_traced_memory()[0] < 25 * 100_000
    finally:
        tracemalloc.stop()
    assert pool.take(appends[50][-16:], GROUPS, SAME_NUMBER) == 0
