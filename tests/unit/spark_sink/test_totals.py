"""The total by which a finished load recognizes its rows."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from fencepost.spark.totals import NO_ROWS, Total, total_of

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
