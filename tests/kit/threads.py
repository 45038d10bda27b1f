"""Threads that work until they are stopped, and whose errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


class Worker:
    """Runs `work` in a thread, which returns when `over` is set. `error` – what ended it before."""

    def __init__(self, name: str, over: threading.Event | None = None) -> None:
        self.name = name
        self.over = over or threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def work(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.over.set()

    def join(self, seconds: float) -> None:
        """Raises AssertionError if it does not end, or has failed."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.name} does not end"
        self.raise_error()

    def raise_error(self) -> None:
        if self.error is not None:
            raise AssertionError(f"{self.name} has ended: {self.error!r}") from self.error

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error


@contextmanager
def working(*works: Callable[[threading.Event], None], seconds: float = 60.0) -> Iterator[None]:
    """Run each in a thread. They get an event, which is set at the end. Raises the first error."""
    over = threading.Event()
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work, over) for work in works]
        try:
            yield
        finally:
            over.set()
        for future in futures:
            future.result(seconds)
