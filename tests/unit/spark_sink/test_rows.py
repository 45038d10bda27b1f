"""Rows in log and task: the pool of rows that the log has and the input did not have yet, totals, and commit tags."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import SinkError
from fencepost.spark.rows import FOREIGN, SAME_NUMBER, THIS_RUN, Group, Pool, digest_of
from fencepost.spark.totals import NO_ROWS, Total, total_of

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


ROWS = [random.Random(length).randbytes(length) for length in (0, 1, 7, 8, 9, 16, 100, 2047, 2048, 2049, 5000)]


def total(rows: list[bytes], topic: str = "t", explicit: list[int] | None = None) -> Total:
    """`explicit`: partitions that the rows name."""
    partitions = np.array(explicit or [0] * len(rows))
    named = None if explicit is None else np.ones(len(rows), dtype=bool)
    return total_of(topic, pa.array(rows, pa.large_binary()), partitions, named)


def test_total_is_that_of_any_order_and_split() -> None:
    parts = [total(ROWS[2:]), total([]), total(ROWS[:2])]
    added = NO_ROWS
    for part in parts:
        added = added.plus(part)
    assert added == total(ROWS[::-1]) == total(ROWS)
    explicit = list(range(len(ROWS)))
    assert total(ROWS, explicit=explicit) == total(ROWS[::-1], explicit=explicit[::-1])


def test_slices_do_not_depend_on_their_buffers() -> None:
    column = pa.array([b"before", *ROWS, b"after"], pa.large_binary()).slice(1, len(ROWS))
    assert total_of("t", column, np.zeros(len(ROWS)), None) == total(ROWS)


@pytest.mark.parametrize("index", range(1, len(ROWS)))
@pytest.mark.parametrize("at", [0, -1])
def test_each_byte_changes_the_total(index: int, at: int) -> None:
    changed = bytearray(ROWS[index])
    changed[at] ^= 0x80
    assert total([*ROWS[:index], bytes(changed), *ROWS[index + 1 :]]).hash != total(ROWS).hash


def test_exchanged_and_negated_words_change_the_total() -> None:
    one, other = b"a" * 8, b"b" * 8
    assert total([one + other, other + one]) != total([one + one, other + other])
    assert total([bytes(24)]) != total([b"\0\0\0\0\0\0\0\x80" * 2 + bytes(8)])
    assert total([b"x" + bytes(3)]) != total([b"x" + bytes(4)])


def test_topic_and_explicit_partition_are_a_part_of_the_row() -> None:
    totals = [total([b"x"]), total([b"x"], topic="u"), total([b"x"], explicit=[0]), total([b"x"], explicit=[1])]
    assert len(set(totals)) == 4


def test_equal_rows_count_separately() -> None:
    assert len({total([b"x"] * count) for count in range(9)}) == 9


MARK = CommitTag("s", "q", "r", 7, 3, "a", 0, 100, 40, 6, 3, False, 1_700_000_000_000, {0: 2, 11: 1})


@pytest.mark.parametrize(
    "commit_tag",
    [MARK, replace(MARK, task_appends=None, arranged=True, query=""), replace(MARK, done=(3, (1 << 64) - 1))],
)
def test_commit_tag_decodes_to_what_was_encoded(commit_tag: CommitTag) -> None:
    assert CommitTag.decode(commit_tag.encode()) == commit_tag
    assert len(commit_tag.encode()) < 300


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b"\xff", MARK.encode().replace(b'"batch":7,', b"")])
def test_unreadable_commit_tag_raises(header: bytes) -> None:
    with pytest.raises(SinkError, match="cannot read"):
        CommitTag.decode(header)


def test_newer_commit_tag_version_requires_newer_sink() -> None:
    with pytest.raises(SinkError, match="newer fencepost"):
        CommitTag.decode(MARK.encode().replace(b'"v":1', b'"v":2'))
