"""Appends begun before their topic had partition-count checks: they bypass its barrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fencepost_proxy.expansion.barrier import AppendBarrier
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


class HasBegun(Protocol):
    """A session."""

    @property
    def begun(self) -> BegunAppends: ...


class PastBarriers:
    """Those of all connections. `sessions`: all of the process. `barrier`: that of a topic."""

    def __init__(self, sessions: Mapping[int, HasBegun], barrier: Callable[[str], AppendBarrier]) -> None:
        self._sessions = sessions
        self._barrier = barrier
        self._begun: dict[str, dict[HasBegun, Begun]] = {}  # by topic

    def __bool__(self) -> bool:
        return bool(self._begun)

    def remember(self, topic: str, now: float) -> None:
        """From here on its appends come to its barrier. Requests in progress are remembered until they are answered.

        1. The topic has no count check, so a frame of 90 MB for it is streamed without entering a barrier.
        2. While the frame arrives slowly, an operator enables the count check and expands the topic.
        3. Only this connection knows of an append that was partitioned for the old count, and the client decides how
           long it takes.
        """
        found = {each: begun for each in self._sessions.values() if (begun := each.begun.now(now)) is not None}
        if found:
            self._begun[topic] = {**found, **self._begun.get(topic, {})}

    def find(self, now: float) -> bool:
        """Call it regularly: forgets requests that are done. Returns whether any are left."""
        for topic in list(self._begun):
            self.has_any(topic, now)
        return bool(self)

    def streamed_by(self, session: HasBegun, since: float) -> str | None:
        """The topic whose barrier waits for a frame of this connection that began before `since` and still arrives."""
        for topic, found in self._begun.items():
            begun = found.get(session)
            if begun is not None and begun.at <= since and session.begun.is_streaming(begun):
                return topic
        return None

    def has_any(self, topic: str, now: float) -> bool:
        """Whether a request begun before the topic had count checks may still be in progress."""
        found = self._begun.get(topic)
        if found is None:
            return False
        for session, begun in list(found.items()):
            if session.begun.is_over(begun):
                del found[session]
                if session.begun.is_silent(begun):
                    self._barrier(topic).mark_in_doubt(now)
        if not found:
            del self._begun[topic]
        return bool(found)

    def has_ended(self, session: HasBegun, now: float) -> None:
        """Requests that it had begun may be queued in a broker."""
        for topic, found in self._begun.items():
            if found.pop(session, None) is not None:
                self._barrier(topic).mark_in_doubt(now)
