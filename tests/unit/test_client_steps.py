"""A driver runs alike over a blocking client library and over aiokafka."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import RetryPolicy
from fencepost._steps import CannotRead, Pause, Steps, Uninterrupted, once, run, run_async
from fencepost.retries import patiently


def _blocking(steps: Steps[Any]) -> Any:
    return run(steps)


def _async(steps: Steps[Any]) -> Any:
    return asyncio.run(run_async(steps))


RUNNERS = pytest.mark.parametrize("runner", [_blocking, _async])
POLICY = RetryPolicy(attempt_seconds=0.01, total_seconds=0.05, pause_seconds=0.001)


@RUNNERS
def test_call_result_is_returned_at_its_yield(runner: Callable[[Steps[Any]], Any]) -> None:
    def steps() -> Steps[list[int]]:
        return [(yield 1), (yield from once(int, "2"))]

    assert runner(steps()) == [1, 2]


def test_coroutine_is_awaited() -> None:
    async def call() -> int:
        await asyncio.sleep(0)
        return 3

    assert _async(once(call)) == 3


@RUNNERS
def test_call_error_is_raised_at_its_yield(runner: Callable[[Steps[Any]], Any]) -> None:
    def steps() -> Steps[str]:
        try:
            yield Uninterrupted(once(int, "x"))
        except ValueError as error:
            return str(error)
        return "no error"

    assert "invalid literal" in runner(steps())


@RUNNERS
def test_pause_takes_its_time(runner: Callable[[Steps[Any]], Any]) -> None:
    def steps() -> Steps[None]:
        yield Pause(0.02)

    began = time.monotonic()
    runner(steps())
    assert time.monotonic() - began >= 0.02


@RUNNERS
def test_library_error_is_raised_after_the_timeout(runner: Callable[[Steps[Any]], Any]) -> None:
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        raise CannotRead from ConnectionError("no broker")

    with pytest.raises(ConnectionError, match="no broker"):
        runner(patiently(lambda: once(call), POLICY))
    assert len(calls) > 2


def test_cancelled_caller_leaves_uninterrupted_steps_running() -> None:
    async def cancelled_twice() -> None:
        began, aborting, may_end, ended = (asyncio.Event() for _ in range(4))

        def abort() -> Steps[None]:
            aborting.set()
            yield may_end.wait()
            ended.set()

        def steps() -> Steps[None]:
            began.set()
            try:
                yield asyncio.sleep(60)
            except asyncio.CancelledError:
                yield Uninterrupted(abort())
                raise

        task = asyncio.create_task(run_async(steps()))
        for reached in (began, aborting):
            await reached.wait()
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not ended.is_set()
        may_end.set()
        await ended.wait()

    asyncio.run(asyncio.wait_for(cancelled_twice(), 20))
