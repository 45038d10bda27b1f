"""The requests of one connection that wait (`steps.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.steps import ConnectionEnded, Steps, TooLate, Wait


@dataclass(slots=True, eq=False)
class InProgress:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _waits: list[Wait] = field(default_factory=list)

    def begin(self, steps: Steps[None]) -> None:
        self._proceed(steps, partial(next, steps))

    def end_late(self, now: float) -> None:
        late = [wait for wait in self._waits if wait.until <= now]
        for wait in late if not self._state.client_closed else ():
            self._proceed(wait.steps, partial(self._take(wait).throw, TooLate(wait.late)))

    def end(self) -> None:
        """The connection to Kafka ends."""
        for wait in [wait for wait in self._waits if not wait.outlives]:
            self._proceed(wait.steps, partial(self._take(wait).throw, ConnectionEnded()))

    def _proceed(self, steps: Steps[None], proceed: Callable[[], Wait]) -> None:
        try:
            wait = proceed()
        except (StopIteration, ConnectionEnded):
            return
        except TooLate as late:
            self._queue.close(f"{late}")
            return
        wait.steps = steps
        self._waits.append(wait)
        if wait.before_sending:
            self._holds.waits_for = wait.before_sending
        wait.start(partial(self._resume, wait))

    def _resume(self, wait: Wait, result: object = None) -> None:
        if wait not in self._waits:
            return  # it was too late, or its connection has ended
        state = self._state
        client_closed = state.client_closed and not self._holds.silent_waits
        if wait.before_sending and (client_closed or state.upstream_closed or state.closing):
            return  # nothing more is sent; `end` comes
        self._proceed(wait.steps, partial(self._take(wait).send, result))

    def _take(self, wait: Wait) -> Steps[None]:
        self._waits.remove(wait)
        if wait.before_sending:
            self._holds.waits_for = ""
        return wait.steps
