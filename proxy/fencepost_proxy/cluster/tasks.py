"""Background tasks that `Tasks.close` cancels, and calls that several callers share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from fencepost_proxy import logs

_T = TypeVar("_T")
_log = logs.get("cluster.tasks")
#: Starts a task of that name; a failure is logged.
Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def run(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Runs a task that `close` cancels. A failure is the caller's to await; otherwise it is ignored."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a task that nothing awaits: a failure is logged. After `close` it starts nothing."""
        if self._closed:
            work.close()
        else:
            self.run(work, name).add_done_callback(_log_crash)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.crash("a task crashed", error, task=task.get_name())


class SharedCall(Generic[_T]):
    """One call at a time. Callers during a call share the next one: the result of a call that was sent before may lack
    what they know of."""

    def __init__(self, tasks: Tasks, name: str, call: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._tasks = tasks
        self._name = name
        self._call = call
        self._next: asyncio.Task[_T] | None = None
        self._calling = asyncio.Lock()

    async def result(self, seconds: float) -> _T:
        """Raises TimeoutError, also if the call was cancelled, and the call's errors."""
        task = self._next
        if task is None:
            task = self._next = self._tasks.run(self._begin(), self._name)
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done or task.cancelled():
            raise TimeoutError
        return task.result()

    async def _begin(self) -> _T:
        async with self._calling:
            self._next = None
            return await self._call()
