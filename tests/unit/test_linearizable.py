"""The checker of histories finds each kind of wrong result, and accepts right ones."""

from __future__ import annotations

import pytest

from tests.support.linearizable import ABSENT, Call, violations


def _put(version: int, begin: float, end: float, value: bytes | None = b"v", expected: int | None = None) -> Call:
    call = Call("k", begin, expected, value)
    call.put(version, end)
    return call


def _get(version: int, begin: float, end: float, value: bytes | None = None) -> Call:
    call = Call("k", begin)
    call.observe(version, value, end)
    return call


UNKNOWN = Call("k", 1.0, None, b"v")


@pytest.mark.parametrize(
    "history",
    [
        [_put(0, 0, 1), _get(0, 2, 3, b"v")],
        [_get(ABSENT, 0, 1), _put(0, 0, 1)],
        [_put(0, 0, 9), _get(0, 1, 2, b"v"), _get(0, 3, 4)],
        [_put(0, 0, 1), _put(1, 2, 3, None), _get(ABSENT, 4, 5), _put(2, 6, 7, expected=ABSENT)],
        [_put(0, 0, 1), _put(4, 2, 3, expected=0)],
        [UNKNOWN, _get(5, 2, 3)],
        [_put(0, 0, 1), Call("k", 0.5, None, None), _get(ABSENT, 2, 3)],
    ],
)
def test_right_history_is_accepted(history: list[Call]) -> None:
    assert violations(history) == []


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ([_put(0, 0, 1), _put(1, 2, 3), _get(0, 4, 5)], "stale, version 1 was there before"),
        ([_put(0, 0, 9), _get(0, 1, 2), _get(ABSENT, 3, 4)], "absent, but version 0 was put before"),
        ([_put(0, 0, 1), _put(1, 2, 9), _get(1, 3, 4), _get(0, 5, 6)], "stale, version 1 was there before"),
        ([_put(0, 0, 1), _get(ABSENT, 2, 3)], "absent, but version 0 was put before"),
        ([_put(0, 0, 1), _get(0, 2, 3, b"other")], "not what version 0 put"),
        ([_get(0, 0, 1), _put(0, 2, 3)], "not what version 0 put"),
        ([_get(7, 0, 1)], "no change has version 7"),
        ([_put(0, 0, 1), _put(1, 2, 3), _put(2, 4, 5, expected=0)], "it replaced version 1"),
        ([_put(0, 0, 1), _put(1, 2, 3, expected=ABSENT)], "it replaced version 0"),
        ([_put(5, 0, 1), _put(3, 2, 3)], "a later change has a smaller version than 5"),
        ([_put(0, 0, 1), _put(0, 2, 3)], "two changes have one version"),
    ],
)
def test_wrong_history_is_found(history: list[Call], problem: str) -> None:
    assert any(problem in each for each in violations(history)), violations(history)
