"""Work of a connection that takes too long for the event loop, in a thread (`ReadBatches`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fencepost_proxy.session.batches.reading import Work
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import ReadBatches
from fencepost_proxy.session.frames.pending_responses import PendingResponse
from fencepost_proxy.session.frames.steps import Steps, Wait

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class ThreadWork:
    """`answers` – how many answers a thread works on."""

    _state: ConnectionState
    _queue: ResponseQueue
    answers: int = 0

    def end_with(self, pending_response: PendingResponse, make: Callable[[], bytes], *, large: bool) -> Steps[None]:
        answer = yield from self.answer(large, make)
        self._queue.end(pending_response, [answer])

    def answer(self, large: bool, make: Callable[[], _T]) -> Steps[_T]:
        """The result of `make`: now, or for `large` work from a thread.

        Meanwhile no other response of this connection is processed.
        """
        if not large:
            return make()
        work = Work(make)
        self.answers += 1
        # Also after the client disconnected: what Kafka has done may have to be stored.
        yield self._wait(work.run, outlives=True)
        self.answers -= 1
        return work.result()

    def request(self, large: bool, make: Callable[[], _T]) -> Steps[_T]:
        """The same for a request: no later one is read meanwhile."""
        if not large:
            return make()
        work = Work(make)
        yield from self.read(work.run)
        return work.result()

    def read(self, read: Callable[[], None]) -> Steps[None]:
        """Run `read` in a thread; no later request is read meanwhile."""
        yield self._wait(read, before_sending="a thread that reads it")

    def _wait(self, run: Callable[[], None], *, before_sending: str = "", outlives: bool = False) -> Wait:
        return Wait(
            lambda resume: self._state.commands.append(ReadBatches(self._state.token(resume), run)),
            before_sending=before_sending,
            outlives=outlives,
        )
