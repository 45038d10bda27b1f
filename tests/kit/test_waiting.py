"""`until` and `until_async` return the first accepted result, and fail with what did not happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.waiting import until, until_async


def _sync(condition: Callable[[], Any], what: str, **options: Any) -> Any:
    return asyncio.run(until_async(condition, what, **options))


each = pytest.mark.parametrize("wait", [until, _sync], ids=["until", "until_async"])


@each
def test_first_truthy_result_is_returned(wait: Callable[..., Any]) -> None:
    results = iter([0, None, "yes", "later"])
    assert wait(lambda: next(results), "it", pause_seconds=0) == "yes"
    assert next(results) == "later"


@each
def test_unreachable_peer_is_tried_again(wait: Callable[..., Any]) -> None:
    results = iter([ConnectionRefusedError("no listener"), True])

    def condition() -> object:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    assert wait(condition, "it", pause_seconds=0) is True


@each
def test_timeout_names_what_did_not_happen(wait: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.02 s for the topic; last result: \[\]"):
        wait(list, "the topic", seconds=0.02, pause_seconds=0.001)


@each
def test_other_errors_are_raised_at_once(wait: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        wait(lambda: 1 / 0, "it", seconds=60)


@each
def test_accept_replaces_the_test_for_truth(wait: Callable[..., Any]) -> None:
    assert wait(lambda: 0, "offset 0", accept=lambda offset: offset == 0) == 0


def test_coroutine_functions_are_awaited() -> None:
    async def condition() -> str:
        await asyncio.sleep(0)
        return "yes"

    assert asyncio.run(until_async(condition, "it")) == "yes"
    with pytest.raises(AssertionError, match="the answer"):
        asyncio.run(until_async(lambda: asyncio.sleep(60), "the answer", seconds=0.02))


def test_message_describes_the_state_at_the_end() -> None:
    states = iter(["first", "second"])
    with pytest.raises(AssertionError, match="for second"):
        until(lambda: next(states) == "never", lambda: next(states), seconds=0)
