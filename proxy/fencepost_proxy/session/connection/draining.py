"""The end of a connection that starts no further request: those in progress are answered first.

It ends between two requests. If it stopped reading within a frame, Kafka would have half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState

#: Between the last answer and the end. Some clients that receive both at once lose the answer (kafka-python treats it
#: as a broken connection and sends the batch again).
READ_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class Draining:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue

    def nothing_under_way(self) -> bool:
        return self._holds.waiting_produce is None and not self._holds.waits_for and self._queue.empty

    def begin(self, until: float, because: str, fault: type[Exception] | None = None) -> None:
        """Start no further request. A partly received one is read to its end, see `may_close`."""
        if self._holds.draining_until is None or until < self._holds.draining_until:
            self._holds.draining_until = until
        if not self._holds.draining_because:
            self._holds.draining_because, self._holds.draining_fault = because, fault

    def may_close(self, now: float) -> bool:
        """Whether a client that is being drained has its answers, and has had the time to read them."""
        assert self._holds.draining_until is not None
        if self._state.client_closed:
            return False
        if self._state.client.at_start:
            self._holds.pause_client()
            if self.nothing_under_way():
                self._holds.draining_until = min(self._holds.draining_until, now + READ_SECONDS)
        return now >= self._holds.draining_until

    def closes_soon(self, now: float) -> bool:
        """Outcomes still open are reported now, so that the client has time to read the answer."""
        return self._holds.draining_until is not None and now >= self._holds.draining_until - READ_SECONDS
