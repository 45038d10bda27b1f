"""A connection at the doors of counted topics: what waits there, who is inside, and how a client is sent to look.

`CountedTurn` (`counted.py`) decides. While a request waits at a door it is the connection's `_turn`: nothing behind it
is read, as at a gate.

A client whose partition count is out of date has to ask for metadata, and the 37 that tells it so makes no client do
that. What makes all of them is the end of the connection. So nothing more is read, what is under way is answered, and
then the proxy hangs up: whatever the client sent behind that request is not appended, and it knows. The same way all
connections go when the process ends (`Leave`).
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.session.counted import Admitted, counted_turn
from fencepost_proxy.session.messages import Count, TopicStale
from fencepost_proxy.session.transactions import AtTransactions
from fencepost_proxy.session.turn import Turn, refused
from fencepost_proxy.topics.virtual_configs import TopicPolicy

#: Between the last answer and the end. Some clients that find both at once forget the answer (kafka-python: it takes it
#: for a broken connection and sends the batch again).
READ_SECONDS = 0.1


class AtDoors(AtTransactions):
    """Its state is the connection's: `_inside`, `_leaving_until`."""

    __slots__ = ()

    def _wait_seconds(self, timeout_ms: int) -> float:
        """For how long an append may wait before it is sent."""
        return min(self._around.gate_wait_max_seconds, max(timeout_ms, 0) / 3000)

    def _waits_at_door(self, turn: Turn, now: float) -> bool:
        """False: it is in, or has no business there."""
        around = self._around
        if turn.counted is None:
            deadline = now + self._wait_seconds(turn.request.timeout_ms)
            policy = self._policy_for(turn)
            turn.request, turn.counted = counted_turn(
                turn.request, policy, self.connection, now, deadline, readings=turn.readings
            )
            if turn.counted is None:
                return False
        came = turn.counted.go_in(around, now)
        if not isinstance(came, Admitted):
            turn.at_door = True
            self._commands += [TopicStale(topic) for topic in came.ask]
            return True
        turn.at_door = False
        self._inside[turn.counted] = None
        around.door_waited(now - turn.received_at)
        turn.gate_seconds = now - turn.received_at
        for key, refusal in came.refused.items():
            if key in turn.results:
                continue  # for its level of idempotence
            turn.results[key] = refused(key, refusal)
            self._commands.append(Count("refusal", refusal.reason, key))
        turn.miscounted = frozenset(came.refused)
        for topic in came.guesses:
            around.note_guess(self.connection, self.client_id, topic, now)
        if came.stale:
            self._leaving_because = "its partition count is out of date; it has its answers and should look"
            self._leave(now + around.request_timeout_seconds)
            self._pause_client()
        return False

    def _policy_for(self, turn: Turn) -> Callable[[str], TopicPolicy | None]:
        """Who may not write a topic has nothing to do with what holds there."""
        around, denied = self._around, turn.denied
        return (lambda topic: None if topic in denied else around.policy(topic)) if denied else around.policy

    def _leave(self, until: float) -> None:
        """No further request is begun. Of one that has begun the rest is read: `_is_to_go` sees when that is over."""
        if self._leaving_until is None or until < self._leaving_until:
            self._leaving_until = until
        self._leaving_because = self._leaving_because or "this process is shutting down; it has its answers"

    def _is_to_go(self, now: float) -> bool:
        """Whether a client that is to go has its answers, and has had the time to read them."""
        if self._leaving_until is None or self.client_gone:
            return False
        if self._client.at_start:
            self._pause_client()
            if self._nothing_under_way():
                self._leaving_until = min(self._leaving_until, now + READ_SECONDS)
        return now >= self._leaving_until

    def _in_a_hurry(self, now: float) -> bool:
        """What it still waits for will not come in time: it is told so now, to have the time to read it."""
        return self._leaving_until is not None and now >= self._leaving_until - READ_SECONDS

    def _leave_door(self, turn: Turn, *, unsent: bool = False) -> None:
        """Once all of it is answered by Kafka, or nothing of it will be sent."""
        counted = turn.counted
        if counted is not None and (unsent or (turn.complete and not counted.unanswered)):
            counted.leave(self._now)
            self._inside.pop(counted, None)

    def _leave_all_doors(self) -> None:
        """Kafka's answers to what is inside will never come."""
        for counted in self._inside:
            counted.leave(self._now)
        self._inside.clear()
