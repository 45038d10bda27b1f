"""Where encoded values end, without decoding them.

A response with ten thousand partitions takes a second to decode and encode. If only some of its elements matter, the
others are skipped, and copied as bytes. The layout of a value comes with its codec (`schema.py`): steps with an
argument each. Native code follows the same steps (`native/src/layouts.rs`).

| step | what it skips |
|---|---|
| `FIXED` n | n bytes |
| `COMPACT` n, `SHORT` n, `LONG` n | a count (varint, int16 or int32), and so many times n bytes |
| `COMPACT_STRUCTS` n, `LONG_STRUCTS` n | a count, and so many structs, each described by the next n steps |
| `NULLABLE` n | a byte, and unless it is negative a struct, described by the next n steps |
| `TAGS` | the tagged fields at the end of a struct |
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from struct import Struct
from typing import Final, NamedTuple

from fencepost_proxy.executor import EXECUTOR, VERIFY
from fencepost_proxy.wire.primitives import INT16, INT32, MALFORMED, CutOff, Malformed, read_tags, read_uvarint

FIXED: Final = 0
COMPACT: Final = 1
SHORT: Final = 2
LONG: Final = 3
COMPACT_STRUCTS: Final = 4
LONG_STRUCTS: Final = 5
NULLABLE: Final = 6
TAGS: Final = 7

Layout = tuple[tuple[int, int], ...]

_WITH_BODY: Final = frozenset({COMPACT_STRUCTS, LONG_STRUCTS, NULLABLE})
#: Structs of equal lengths that are skipped at once.
_AT_ONCE: Final = 64
#: Bytes of a count. A varint may have more: then the value is so long that structs are better skipped one by one.
_COUNT_BYTES: Final = {SHORT: 2, LONG: 4}


def joined(layouts: Iterable[Layout]) -> Layout:
    """The layout of values in a row."""
    steps: list[tuple[int, int]] = []
    after_fixed = False
    for layout in layouts:
        is_fixed = len(layout) == 1 and layout[0][0] == FIXED
        if is_fixed and after_fixed:
            steps[-1] = FIXED, steps[-1][1] + layout[0][1]
        else:
            steps += layout
        after_fixed = is_fixed
    return tuple(steps)


def element_ends(data: bytes, at: int, count: int, layout: Layout) -> list[int]:
    """Where each of `count` values of this layout ends, from `at` on. Raises an exception of `MALFORMED`."""
    if EXECUTOR.module is not None:
        ends: list[int] | None = EXECUTOR.module.element_ends(data, at, count, layout)
        if VERIFY:
            assert ends == _ends_or_none(data, at, count, layout), (layout, count, data[at : at + 1000])
        if ends is not None:
            return ends
    return _ends(data, at, count, layout)


def _ends(data: bytes, at: int, count: int, layout: Layout) -> list[int]:
    steps = _nested(layout)
    ends = []
    for _ in range(count):
        at = _skip(data, at, steps)
        if at > len(data):
            raise CutOff(at)
        ends.append(at)
    return ends


def _ends_or_none(data: bytes, at: int, count: int, layout: Layout) -> list[int] | None:
    try:
        return _ends(data, at, count, layout)
    except MALFORMED:
        return None


# --- one value --------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """`body`: the steps of a struct. `is_flat`: there is no struct in it."""

    step: int
    argument: int
    body: tuple[_Step, ...] = ()
    is_flat: bool = False


@cache
def _nested(layout: Layout) -> tuple[_Step, ...]:
    steps, at = [], 0
    while at < len(layout):
        step, argument = layout[at]
        at += 1
        if step not in _WITH_BODY:
            steps.append(_Step(step, argument))
            continue
        body = _nested(layout[at : at + argument])
        steps.append(_Step(step, argument, body, all(each.step not in _WITH_BODY for each in body)))
        at += argument
    return tuple(steps)


def _skip(data: bytes, at: int, steps: tuple[_Step, ...]) -> int:
    for step, argument, body, is_flat in steps:
        if step == FIXED:
            at += argument
        elif step == COMPACT:
            count, at = read_uvarint(data, at)
            if count:
                at += (count - 1) * argument
        elif step == TAGS:
            _, at = read_tags(data, at)
        elif step == COMPACT_STRUCTS:
            count, at = read_uvarint(data, at)
            at = _skip_structs(data, at, count - 1, body, is_flat)
        elif step == LONG_STRUCTS:
            count, at = _read_count(data, at, INT32)
            at = _skip_structs(data, at, count, body, is_flat)
        elif step == NULLABLE:
            at = at + 1 if data[at] >= 0x80 else _skip(data, at + 1, body)
        else:
            count, at = _read_count(data, at, INT16 if step == SHORT else INT32)
            at += max(count, 0) * argument
    return at


def _read_count(data: bytes, at: int, number: Struct) -> tuple[int, int]:
    count: int = number.unpack_from(data, at)[0]
    if count < -1:
        raise Malformed(f"a count of {count}")
    return count, at + number.size


def _skip_structs(data: bytes, at: int, count: int, body: tuple[_Step, ...], is_flat: bool) -> int:
    """Partitions usually have equally many replicas. If the bytes that determine the length of a struct are the same in
    the following ones, these have its length."""
    while count > 0:
        start = at
        at = _skip(data, at, body)
        count -= 1
        if count and is_flat:
            alike = _count_alike(data, start, at - start, min(count, _AT_ONCE), body)
            at += alike * (at - start)
            count -= alike
    return at


def _count_alike(data: bytes, start: int, size: int, count: int, body: tuple[_Step, ...]) -> int:
    """How many of the `count` structs after the one at `start` have its length, `size`. None with long fields."""
    at = start
    for step in body:
        end = _skip(data, at, (step,))
        if step.step != FIXED:
            if data[at] >= (1 if step.step == TAGS else 0x80):
                return 0
            for deciding in range(at, at + _COUNT_BYTES.get(step.step, 1)):
                following = data[deciding + size : deciding + size * (count + 1) : size]
                count = len(following) - len(following.lstrip(data[deciding : deciding + 1]))
        at = end
    return count
