"""Native code encodes rows as numpy does, refuses columns that are damaged, and is used where it can be."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost._partitioning import murmur2
from fencepost.spark import encoding, native
from fencepost.spark.columns import Headers
from fencepost.spark.encoding import Encoder, build
from fencepost.spark.native import INTERFACE, NUMPY, Executor, load, verified
from tests.support.properties import some

fencepost_native: Any = pytest.importorskip("fencepost_native")
if getattr(fencepost_native, "ENCODING_INTERFACE", None) != INTERFACE:
    pytest.skip("the native module is of other sources: make native", allow_module_level=True)

NATIVE = native.native(fencepost_native)
BOTH = verified(NATIVE, NUMPY)
BYTES = [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()]
#: Where a length takes another byte, and where it leaves numpy's table.
SIZES = [0, 1, 3, 4, 63, 64, 8191, 8192, 65_534, 65_535, 65_536, 1 << 20]

texts = st.one_of(st.none(), st.text(max_size=30))
times = st.one_of(st.none(), st.integers(-(10**12), 10**13))
names = st.text(max_size=8).filter(lambda name: name not in encoding.RESERVED_HEADERS)
header_lists = st.one_of(st.none(), st.lists(st.fixed_dictionaries({"key": names, "value": texts}), max_size=4))


@st.composite
def tables(draw: st.DrawFn) -> pa.RecordBatch:
    """Any columns and types that the sink takes, as a slice."""
    rows = draw(st.integers(0, 25))
    columns = {"value": pa.array(draw(st.lists(texts, min_size=rows, max_size=rows)), draw(st.sampled_from(BYTES)))}
    if draw(st.booleans()):
        columns["key"] = pa.array(draw(st.lists(texts, min_size=rows, max_size=rows)), draw(st.sampled_from(BYTES)))
    if draw(st.booleans()):
        header = pa.struct([("key", draw(st.sampled_from(BYTES))), ("value", draw(st.sampled_from(BYTES)))])
        lists = draw(st.sampled_from([pa.list_, pa.large_list]))(header)
        columns["headers"] = pa.array(draw(st.lists(header_lists, min_size=rows, max_size=rows)), lists)
    if draw(st.booleans()):
        unit = draw(st.sampled_from(["s", "ms", "us", "ns"]))
        columns["timestamp"] = pa.array(draw(st.lists(times, min_size=rows, max_size=rows)), pa.timestamp(unit))
    start = draw(st.integers(0, rows))
    return pa.RecordBatch.from_pydict(columns).slice(start, draw(st.integers(0, rows - start)))


def encoded(batch: pa.RecordBatch, executor: Executor) -> tuple[Any, ...]:
    """Bodies, and batches of them, whole and of a slice."""
    before, encoding.EXECUTOR = encoding.EXECUTOR, executor  # type: ignore[misc]
    try:
        encoder = Encoder(batch.schema, record_bytes_max=1 << 22)
        bodies = encoder.bodies(batch)
        slices = [some for some in (bodies, bodies.slice(1), bodies.slice(0, 2)) if len(some)]
        built = [
            build(some, commit_tag=tag, expected=expected, now_ms=17, compression=codec)
            for some in slices
            for tag, expected in ((None, 7), (b"tag", 0))
            for codec in (None, "lz4")
        ]
        return bodies.to_pylist(), built
    finally:
        encoding.EXECUTOR = before  # type: ignore[misc]


@some
@given(tables(), st.sampled_from([1, 40, 1 << 19]))
def test_any_rows_are_encoded_as_by_numpy(batch: pa.RecordBatch, part_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_PART_BYTES", part_bytes)
        assert encoded(batch, NATIVE) == encoded(batch, NUMPY)


@pytest.mark.parametrize("part_bytes", [1 << 10, 1 << 19])
def test_long_rows_are_encoded_as_by_numpy(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_PART_BYTES", part_bytes)
    rows = [None, *(os.urandom(size) for size in SIZES), None]
    headers = [[{"key": "k" * size, "value": b"v" * size}] for size in SIZES]
    columns = {
        "key": pa.array(rows[::-1], pa.binary()),
        "value": pa.array(rows, pa.binary()),
        "headers": pa.array([None, *headers, []], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    assert encoded(batch, NATIVE) == encoded(batch, NUMPY)


def test_fullest_batches_are_encoded_as_by_numpy() -> None:
    bodies = pa.array([b"%d" % row for row in range(encoding.BATCH_RECORDS_MAX)], pa.large_binary())
    assert BOTH.batch(None, b"", bodies, 0, b"").endswith(b"65535")
    assert BOTH.batch(bytes(61), b"first", bodies[1:], 1, b"last").endswith(b"65535last")


@some
@given(st.lists(st.binary(max_size=40), min_size=1), st.integers(1, 2**31 - 1))
def test_java_partitions_are_those_of_the_client(keys: list[bytes], count: int) -> None:
    found = BOTH.java_partitions(pa.array(keys, pa.large_binary()), count)
    assert found.tolist() == [murmur2(key, count) for key in keys]


@some
@given(st.lists(st.binary(max_size=40)), st.lists(st.sampled_from([2040, 2047, 2048, 2049, 5000])), st.randoms())
def test_hashes_are_those_of_numpy(short: list[bytes], sizes: list[int], random: Random) -> None:
    rows = [*short, *(random.randbytes(size) for size in sizes), b""]
    random.shuffle(rows)
    bodies = pa.array(rows, pa.large_binary()).slice(random.randint(0, len(rows) - 1))
    assert BOTH.hash_sum(bodies, np.frombuffer(random.randbytes(8 * len(bodies)), np.uint64)) >= 0


# --- damaged columns --------------------------------------------------------------------------------------------------


def offsets(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


GOOD = (None, offsets(5, 6, 8), b"abc")


@pytest.mark.parametrize(
    "damaged",
    [
        (None, offsets(5, 6, 9), b"abc"),  # beyond the bytes
        (None, offsets(5, 9, 8), b"abc"),  # decreasing
        (None, offsets(5, 4, 8), b"abc"),  # before the first
        (None, offsets(-1, 0, 1), b"abc"),
        (None, offsets(0, 1, 1 << 62), b"abc"),
        (None, offsets(5, 6), b"abc"),  # a row less than other columns
        (None, b"", b"abc"),
        (None, bytes(7), b""),
        (b"\1", offsets(5, 6, 8), b"abc"),  # unknown whether null
    ],
)
def test_damaged_columns_are_errors(damaged: Any) -> None:
    counts = offsets(1, 1)
    uses: list[Callable[[], object]] = [
        lambda: fencepost_native.bodies(0, damaged, GOOD, None, None),
        lambda: fencepost_native.bodies(0, None, GOOD, (counts, damaged, GOOD), None),
        lambda: fencepost_native.bodies(0, None, GOOD, (counts, GOOD, damaged), None),
    ]
    if len(damaged[1]) != len(offsets(5, 6)):  # other columns say how many rows there are
        uses.append(lambda: fencepost_native.bodies(0, GOOD, damaged, None, None))
        if damaged[0] is None:  # of bodies and of hashed keys, nulls count as any other value
            uses.append(lambda: fencepost_native.batch(None, b"", damaged, 0, b""))
            uses.append(lambda: fencepost_native.java_partitions(damaged, 3))
            uses.append(lambda: fencepost_native.hash_sum(damaged, bytes(16), 9))
    for use in uses:
        with pytest.raises(ValueError, match="do not fit"):
            use()
    fencepost_native.bodies(0, GOOD, GOOD, (counts, GOOD, GOOD), (b"n", b"\1\1", offsets(1, 2)))


@pytest.mark.parametrize(
    ("headers", "time"),
    [
        ((offsets(1), GOOD, GOOD), None),
        ((offsets(2, 1), GOOD, GOOD), None),  # more than there are
        ((offsets(1, -1), GOOD, GOOD), None),
        ((offsets(1, (1 << 63) - 1), GOOD, GOOD), None),
        (None, (b"n", b"\1", offsets(1, 2))),
        (None, (b"n", b"\1\1", offsets(1))),
    ],
)
def test_damaged_headers_are_errors(headers: Any, time: Any) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        fencepost_native.bodies(0, None, GOOD, headers, time)


def test_numbers_that_overflow_are_errors() -> None:
    for refused in (
        lambda: fencepost_native.batch(bytes(11), b"", (None, bytes(8), b""), 0, b""),  # too short for a CRC
        lambda: fencepost_native.batch(None, b"", GOOD, (1 << 64) - 1, b""),
        lambda: fencepost_native.bodies((1 << 63) - 1, None, GOOD, None, None),
        lambda: fencepost_native.java_partitions(GOOD, 0),
        lambda: fencepost_native.hash_sum(GOOD, bytes(15), 9),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            refused()


# --- which code encodes -----------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a module that the test writes replaces the native module."""
    monkeypatch.delenv("FENCEPOST_NATIVE", raising=False)
    monkeypatch.delitem(sys.modules, "fencepost_native")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "fencepost_native.py"


def test_usable_module_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_NATIVE", raising=False)
    assert load().batch.__qualname__ == NATIVE.batch.__qualname__


def test_environment_turns_module_off(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("raise SystemExit")  # not even imported
    monkeypatch.setenv("FENCEPOST_NATIVE", "off")
    assert load() is NUMPY


def test_missing_module_is_no_fault(
    module: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "path", [str(module.parent)])
    assert load() is NUMPY
    assert caplog.records == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('version `GLIBC_2.34\\' not found')", "cannot be imported: version `GLIBC_2.34' not found"),
        ("INTERFACE = 3", f"has interface None, not {INTERFACE}"),
        (f"ENCODING_INTERFACE = {INTERFACE + 1}", f"has interface {INTERFACE + 1}, not {INTERFACE}"),
    ],
)
def test_unusable_module_is_a_warning(module: Path, caplog: pytest.LogCaptureFixture, source: str, why: str) -> None:
    module.write_text(source)
    assert load() is NUMPY
    assert caplog.record_tuples == [
        ("fencepost.spark.native", logging.WARNING, f"numpy encodes rows: fencepost_native {why}")
    ]


def test_differences_are_errors_where_both_run() -> None:
    wrong = Executor(
        lambda *_: pa.array([b""], pa.large_binary()),
        lambda *_: b"\0",
        lambda *_: np.array([0, 0], np.int32),
        lambda *_: 0,
    )
    bodies = pa.array([b"k"], pa.large_binary())
    headers = Headers(np.zeros(1, np.int64), bodies[:0], bodies[:0])
    for run in (
        lambda both: both.bodies(bodies, bodies, headers, None),
        lambda both: both.batch(None, b"", bodies, 0, b""),
        lambda both: both.java_partitions(bodies, 7),
        lambda both: both.hash_sum(bodies, np.zeros(1, np.uint64)),
    ):
        run(BOTH)
        with pytest.raises(AssertionError, match="native code and numpy differ"):
            run(verified(wrong, NUMPY))
