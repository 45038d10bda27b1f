"""Requests that were in progress when their topics got partition-count checks, so they never came to its barrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.session.produce.begun import Begun
from fencepost_proxy.session.session import Session


class PastBarriers:
    """`sessions`: all of the process. `barrier`: that of a topic."""

    def __init__(self, sessions: Mapping[int, Session], barrier: Callable[[str], AppendBarrier]) -> None:
        self._sessions = sessions
        self._barrier = barrier
        self._begun: dict[str, dict[Session, Begun]] = {}  # by topic

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

    def streamed_by(self, session: Session, since: float) -> str | None:
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

    def has_ended(self, session: Session, now: float) -> None:
        """Requests that it had begun may be queued in a broker."""
        for topic, found in self._begun.items():
            if found.pop(session, None) is not None:
                self._barrier(topic).mark_in_doubt(now)
