"""Which code encodes rows: the native module `fencepost_native` (`native/`), or numpy (`columns.py`).

Both give the same bytes. numpy does if FENCEPOST_NATIVE is `off`, and if the module is missing, cannot be imported or
has another interface. With FENCEPOST_NATIVE=verify, for tests, both do, and a difference is an error.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fencepost.spark import columns
from fencepost.spark.columns import Bodies, Decimals, Headers

#: `ENCODING_INTERFACE` in `native/src/lib.rs`. A change of either side that the other must follow raises both.
INTERFACE: Final = 2

#: Of the values that the module encodes in one call, so that copies stay in the processor's cache.
_PART_BYTES: Final = 1 << 19
#: Largest size of a length or count, and of a decimal number.
_LENGTH_BYTES_MAX: Final = 5
_DECIMAL_BYTES_MAX: Final = 20
_logger = logging.getLogger(__name__)


class Executor(NamedTuple):
    """The functions of these names in `columns.py`, or what replaces them."""

    bodies: Callable[[Any, Any, Headers | None, Decimals | None], Bodies]
    batch: Callable[[bytes | None, bytes, Bodies, int, bytes], bytes]
    java_partitions: Callable[[Any, int], npt.NDArray[np.int32]]
    hash_sum: Callable[[Bodies, npt.NDArray[np.uint64]], int]


NUMPY: Final = Executor(columns.bodies, columns.batch, columns.java_partitions, columns.hash_sum)


def native(module: ModuleType) -> Executor:
    def bodies(key: Any, value: Any, headers: Headers | None, time: Decimals | None) -> Bodies:
        rows = len(value)
        step = max(1, rows * _PART_BYTES // max(1, value.nbytes))
        header_ends = np.zeros(rows + 1, np.int64)
        if headers is not None:
            np.cumsum(headers.counts, out=header_ends[1:])
        offsets = np.zeros(rows + 1, np.int64)
        data = pa.allocate_buffer(_bodies_bytes_max(key, value, headers, time))
        to = memoryview(data).cast("B")
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            of_some = slice(header_ends[some.start], header_ends[some.stop])
            begin = int(offsets[start])
            ends, part = module.bodies(
                begin,
                None if key is None else _column(key[some]),
                _column(value[some]),
                headers
                and (headers.counts[some].tobytes(), *map(_column, (headers.names[of_some], headers.values[of_some]))),
                time and (_prefixed(time.name), time.known[some].tobytes(), time.values[some].tobytes()),
            )
            to[begin : begin + len(part)] = part
            offsets[some.start + 1 : some.stop + 1] = np.frombuffer(ends, np.int64)
        return pa.Array.from_buffers(pa.large_binary(), rows, [None, pa.py_buffer(offsets), data])

    def batch(header: bytes | None, first: bytes, bodies: Bodies, delta: int, last: bytes) -> bytes:
        return bytes(module.batch(header, first, _column(bodies), delta, last))

    def java_partitions(keys: Any, partition_count: int) -> npt.NDArray[np.int32]:
        return np.frombuffer(module.java_partitions(_column(keys), partition_count), np.int32)

    def hash_sum(bodies: Bodies, seeds: npt.NDArray[np.uint64]) -> int:
        found = int(module.hash_sum(_column(bodies), seeds.tobytes(), columns.LONG_BYTES))
        long = np.flatnonzero(columns.sizes(bodies) > columns.LONG_BYTES)
        if len(long):
            found += columns.hash_sum(bodies.take(pa.array(long)), seeds[long])
        return found % (1 << 64)

    return Executor(bodies, batch, java_partitions, hash_sum)


def _bodies_bytes_max(key: Any, value: Any, headers: Headers | None, time: Decimals | None) -> int:
    given = [each for each in (key, value, headers and headers.names, headers and headers.values) if each is not None]
    row_bytes = 3 * _LENGTH_BYTES_MAX
    if time is not None:
        row_bytes += 2 * _LENGTH_BYTES_MAX + len(time.name) + _DECIMAL_BYTES_MAX
    # `nbytes` has the offsets too: more than the lengths of headers.
    return row_bytes * len(value) + sum(int(each.nbytes) for each in given)


def _prefixed(name: bytes) -> bytes:
    return columns.varint(len(name)) + name


def _column(column: Any) -> tuple[bytes | None, bytes, bytes]:
    """A large binary array: for each value whether it is valid (None: all are), offsets, and the bytes between them."""
    if not len(column):
        return None, bytes(8), b""
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    data = b"" if data_buffer is None else bytes(memoryview(data_buffer)[offsets[0] : offsets[-1]])
    return columns.valid(column).tobytes() if column.null_count else None, offsets.tobytes(), data


def verified(executor: Executor, reference: Executor) -> Executor:
    """Runs both, and fails if they differ."""

    def both(name: str, equal: Callable[[Any, Any], bool]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            found = getattr(executor, name)(*arguments)
            if not equal(found, getattr(reference, name)(*arguments)):
                raise AssertionError(f"native code and numpy differ: {name}")
            return found

        return run

    equals = (pa.Array.equals, operator.eq, np.array_equal, operator.eq)
    return Executor(*map(both, Executor._fields, equals))


def load() -> Executor:
    choice = os.environ.get("FENCEPOST_NATIVE")
    if choice == "off":
        return NUMPY
    try:
        module = import_module("fencepost_native")
    except ModuleNotFoundError:
        return NUMPY
    except Exception as error:  # built for another C library, processor or Python
        _logger.warning("numpy encodes rows: fencepost_native cannot be imported: %s", error)
        return NUMPY
    found = getattr(module, "ENCODING_INTERFACE", None)
    if found != INTERFACE:
        _logger.warning("numpy encodes rows: fencepost_native has interface %s, not %s", found, INTERFACE)
        return NUMPY
    return verified(native(module), NUMPY) if choice == "verify" else native(module)


EXECUTOR: Final = load()
