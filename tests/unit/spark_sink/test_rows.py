"""Rows in log and task: the pool of rows that the input did not have yet, digests of a sequence, and commit tags."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from fencepost.spark.commit_tags import CommitTag, Prefix
from fencepost.spark.errors import SinkError
from fencepost.spark.rows import Pool, by_partition, digest_of, extended, partitions_under


def test_pool_is_a_multiset_of_rows() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    pool, there = Pool(), Counter[bytes]()
    rows = [b"%d" % number for number in range(300)]
    for _ in range(400):
        if dice.random() < 0.1:
            some = [digest_of(row) for row in dice.choices(rows, k=dice.randrange(100))]
            pool.add(b"".join(some))
            there.update(some)
        found = pool.take(pa.array(some := dice.choices(rows, k=10), pa.large_binary()))
        for row, was_there in zip(some, found, strict=True):
            assert was_there == (there[digest_of(row)] > 0)
            there -= Counter([digest_of(row)])
        assert len(pool) == there.total()


def test_pool_needs_about_twenty_bytes_for_a_row() -> None:
    appends = [b"".join(digest_of(b"%d" % number) for number in range(at, at + 1000)) for at in range(0, 100_000, 1000)]
    pool = Pool()
    tracemalloc.start()
    try:
        for append in appends:
            pool.add(append)
        assert tracemalloc.get_traced_memory()[0] < 25 * 100_000
    finally:
        tracemalloc.stop()
    assert pool.take(pa.array([b"50999", b"100000"], pa.large_binary())).tolist() == [True, False]


ROWS = [random.Random(length).randbytes(length) for length in (0, 1, 7, 8, 9, 16, 100, 2047, 2048, 2049, 5000)]


def prefix(rows: list[bytes], before: Prefix | None = None) -> Prefix:
    return extended(before or Prefix(), pa.array(rows, pa.large_binary()))


@pytest.mark.parametrize("cut", range(len(ROWS)))
def test_digest_does_not_depend_on_the_cut(cut: int) -> None:
    assert prefix(ROWS[cut:], prefix(ROWS[:cut])) == prefix(ROWS)


def test_digest_depends_on_the_order() -> None:
    assert prefix(ROWS[::-1]) != prefix(ROWS)
    assert len({prefix([b"x"] * count) for count in range(9)}) == 9


def test_slices_do_not_depend_on_their_buffers() -> None:
    column = pa.array([b"before", *ROWS, b"after"], pa.large_binary()).slice(1, len(ROWS))
    assert extended(Prefix(), column) == prefix(ROWS)


@pytest.mark.parametrize("index", range(1, len(ROWS)))
@pytest.mark.parametrize("at", [0, -1])
def test_each_byte_changes_the_digest(index: int, at: int) -> None:
    changed = bytearray(ROWS[index])
    changed[at] ^= 0x80
    assert prefix([*ROWS[:index], bytes(changed), *ROWS[index + 1 :]]) != prefix(ROWS)


def test_exchanged_and_negated_words_change_the_digest() -> None:
    one, other = b"a" * 8, b"b" * 8
    assert prefix([one + other, other + one]) != prefix([one + one, other + other])
    assert prefix([bytes(24)]) != prefix([b"\0\0\0\0\0\0\0\x80" * 2 + bytes(8)])
    assert prefix([b"x" + bytes(3)]) != prefix([b"x" + bytes(4)])


def test_place_is_a_hash_or_a_partition() -> None:
    placements = np.array([7, -1, 4, -4, 7])
    assert partitions_under(placements, 3).tolist() == [1, 0, 1, 3, 1]
    bodies = pa.array([b"%d" % number for number in range(5)], pa.large_binary())
    parts = {
        at: (part.to_pylist(), which.tolist())
        for at, part, which in by_partition(bodies, partitions_under(placements, 3))
    }
    assert parts == {0: ([b"1"], [1]), 1: ([b"0", b"2", b"4"], [0, 2, 4]), 3: ([b"3"], [3])}
    assert list(by_partition(bodies.slice(0, 0), placements[:0])) == []


MARK = CommitTag("s", "q", "r", 7, 100, 40, (3, 6), 1_700_000_000_000, Prefix(10**9, (1 << 64) - 1))


@pytest.mark.parametrize(
    "commit_tag",
    [MARK, replace(MARK, prefix=None, query="", batch=0, began=0, before=0), replace(MARK, last=True, done=True)],
)
def test_commit_tag_decodes_to_what_was_encoded(commit_tag: CommitTag) -> None:
    assert CommitTag.decode(commit_tag.encode()) == commit_tag
    assert len(commit_tag.encode()) < 300


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b"\xff", MARK.encode().replace(b'"run":"r",', b"")])
def test_unreadable_commit_tag_raises(header: bytes) -> None:
    with pytest.raises(SinkError, match="cannot read"):
        CommitTag.decode(header)


def test_newer_commit_tag_version_requires_newer_sink() -> None:
    with pytest.raises(SinkError, match=r"sink version 3, and this is version 2 \(write with a newer fencepost"):
        CommitTag.decode(MARK.encode().replace(b'"v":2', b'"v":3'))


def test_commit_tag_of_another_sink_may_have_any_version() -> None:
    assert CommitTag.decode(MARK.encode(), "other") is None
    assert CommitTag.decode(MARK.encode().replace(b'"v":2', b'"v":3'), "other") is None
