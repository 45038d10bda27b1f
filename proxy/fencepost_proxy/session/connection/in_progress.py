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
    _waits: dict[Steps[None], Wait] = field(default_factory=dict)

    def begin(self, steps: Steps[None]) -> None:
        self._proceed(steps, partial(next, steps))

    def end_late(self, now: float) -> None:
        late = [steps for steps, wait in self._waits.items() if wait.until <= now]
        for steps in late if not self._state.client_closed else ():
            wait = self._take(steps)
            self._proceed(steps, partial(steps.throw, TooLate(wait.late)))

    def end(self) -> None:
        """The connection to Kafka ends."""
        for steps in [steps for steps, wait in self._waits.items() if not wait.outlives]:
            self._take(steps)
            self._proceed(steps, partial(steps.throw, ConnectionEnded()))

    def _proceed(self, steps: Steps[None], proceed: Callable[[], Wait]) -> None:
        try:
            wait = proceed()
        except (StopIteration, ConnectionEnded):
            return
        except TooLate as late:
            self._queue.close(f"{late}")
            return
        self._waits[steps] = wait
        if wait.before_sending:
            self._holds.waits_for = wait.before_sending
        wait.start(partial(self._resume, steps, wait))

    def _resume(self, steps: Steps[None], wait: Wait, result: object = None) -> None:
        if self._waits.get(steps) is not wait:
            return  # it was too late, or its connection has ended
        state = self._state
        client_closed = state.client_closed and not self._holds.is_silent
        if wait.before_sending and (client_closed or state.upstream_closed or state.closing):
            return  # nothing more is sent; `end` comes
        self._take(steps)
        self._proceed(steps, partial(steps.send, result))

    def _take(self, steps: Steps[None]) -> Wait:
        wait = self._waits.pop(steps)
        if wait.before_sending:
            self._holds.waits_for = ""
        return wait
