"""Background tasks that `Tasks.close` cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
#: Starts a task of that name; a failure is logged.
Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Runs a task that `close` cancels. A failure is the caller's to await; otherwise it is ignored."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
