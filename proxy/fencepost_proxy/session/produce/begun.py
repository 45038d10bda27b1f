"""Appends begun before their topic had partition-count checks: they bypass its barrier."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.pending_responses import PendingResponse
from fencepost_proxy.wire.apis import PRODUCE


@dataclass(slots=True, eq=False)
class Begun:
    """Appends of a connection that were in progress at some moment, to unknown topics.

    `reads_to` – the client's byte at which the frame in transit then ends. `produce` – what waited for a barrier or a
    sequencer. `pending_responses` – the unanswered Produce requests; known only once both are sent.
    """

    at: float
    reads_to: int
    produce: ProduceExchange | None
    pending_responses: frozenset[PendingResponse] | None = None


@dataclass(slots=True, eq=False)
class BegunAppends:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue

    @property
    def appends_unknown(self) -> bool:
        """Appends may be in progress, to unknown topics."""
        if self._state.streams_up or self._holds.waiting_produce is not None:
            return True
        return any(pending_response.api_key == PRODUCE for pending_response in self._queue.from_upstream)

    def now(self, now: float) -> Begun | None:
        """The Produce requests in progress, to any topic; None if there are none."""
        if not self.appends_unknown:
            return None
        return Begun(now, self._state.read_bytes + self._state.client.passing_bytes, self._holds.waiting_produce)

    def is_streaming(self, begun: Begun) -> bool:
        """The frame in transit at that time still is."""
        return self._state.read_bytes < begun.reads_to

    def is_over(self, begun: Begun) -> bool:
        """All of it is answered, or has no answer and is sent (`is_silent`)."""
        if begun.pending_responses is None:
            if self.is_streaming(begun) or (begun.produce is not None and begun.produce is self._holds.waiting_produce):
                return False
            begun.pending_responses = frozenset(
                pending_response
                for pending_response in self._queue.from_upstream
                if pending_response.api_key == PRODUCE
            )
        return begun.pending_responses.isdisjoint(self._queue.from_upstream)

    def is_silent(self, begun: Begun) -> bool:
        """Its last frame was acks=0: the outcome stays unknown."""
        return self._state.silent_to == begun.reads_to
