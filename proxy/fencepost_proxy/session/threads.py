"""Work of a connection that takes too long for the event loop, in a thread (`ReadBatches`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fencepost_proxy.session.messages import ReadBatches
from fencepost_proxy.session.pending_responses import PendingResponse
from fencepost_proxy.session.read_holds import ReadHolds
from fencepost_proxy.session.reading import Work
from fencepost_proxy.session.response_queue import ResponseQueue
from fencepost_proxy.session.state import ConnectionState

_T = TypeVar("_T")


class ThreadWork:
    """`answers` – how many answers a thread works on. `reads` – whether a thread works on a request."""

    __slots__ = ("_holds", "_queue", "_state", "answers", "reads")

    def __init__(self, state: ConnectionState, holds: ReadHolds, queue: ResponseQueue) -> None:
        self._state = state
        self._holds = holds
        self._queue = queue
        self.answers = 0
        self.reads = False

    def end_with(self, pending_response: PendingResponse, make: Callable[[], bytes], *, large: bool) -> None:
        self.answer(large, make, lambda answer: self._queue.end(pending_response, [answer]))

    def answer(self, large: bool, make: Callable[[], _T], done: Callable[[_T], None]) -> None:
        """Passes the result of `make` to `done`: now, or for `large` work from a thread.

        Meanwhile no other response of this connection is processed.
        """
        if not large:
            done(make())
            return
        work = Work(make)

        def finished(_: None) -> None:
            # Also after the client disconnected: what Kafka has done may have to be stored.
            self.answers -= 1
            done(work.result())
            self._queue.answer_front()

        self.answers += 1
        self._state.commands.append(ReadBatches(self._state.token(finished), work.run))

    def begin(self, large: bool, make: Callable[[], _T], done: Callable[[_T], None]) -> None:
        """The same for a request: no later one is read meanwhile."""
        if not large:
            done(make())
            return
        work = Work(make)
        self.read(work.run, lambda: done(work.result()))

    def read(self, read: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `read` in a thread; no later request is read meanwhile."""

        def finished(_: None) -> None:
            self.reads = self._holds.paused = False
            if not (self._state.client_closed or self._state.upstream_closed or self._state.closing):
                done()

        self.reads = self._holds.paused = True
        self._state.commands.append(ReadBatches(self._state.token(finished), read))
