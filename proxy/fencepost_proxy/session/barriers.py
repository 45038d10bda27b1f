"""A connection at the doors of counted topics: what waits there, who is inside, and how a client is sent to look.

`CountCheckedProduce` (`partition_counts.py`) decides. While a request waits at a door it is the connection's
`_waiting_exchange`: nothing behind it is read, as at a gate.

A client whose partition count is out of date has to ask for metadata, and the 37 that tells it so makes no client do
that. What makes all of them is the end of the connection. So nothing more is read, what is under way is answered, and
then the proxy hangs up: whatever the client sent behind that request is not appended, and it knows. The same way all
connections go when the process ends (`Drain`).
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.session.messages import Count, TopicStale
from fencepost_proxy.session.partition_counts import Admitted, count_checked_produce
from fencepost_proxy.session.produce_exchange import ProduceExchange, refused
from fencepost_proxy.session.transactions import AtTransactions
from fencepost_proxy.topics.virtual_configs import TopicPolicy

#: Between the last answer and the end. Some clients that find both at once forget the answer (kafka-python: it takes it
#: for a broken connection and sends the batch again).
READ_SECONDS = 0.1


class AtBarriers(AtTransactions):
    """Its state is the connection's: `_entered`, `_draining_until`."""

    __slots__ = ()

    def _wait_seconds(self, timeout_ms: int) -> float:
        """For how long an append may wait before it is sent."""
        return min(self._services.sequencer_wait_max_seconds, max(timeout_ms, 0) / 3000)

    def _waits_at_barrier(self, exchange: ProduceExchange, now: float) -> bool:
        """False: it is in, or has no business there."""
        services = self._services
        if exchange.counted is None:
            deadline = now + self._wait_seconds(exchange.request.timeout_ms)
            policy = self._policy_for(exchange)
            exchange.request, exchange.counted = count_checked_produce(
                exchange.request, policy, self.connection, now, deadline, readings=exchange.readings
            )
            if exchange.counted is None:
                return False
        came = exchange.counted.enter_barriers(services, now)
        if not isinstance(came, Admitted):
            exchange.at_barrier = True
            self._commands += [TopicStale(topic) for topic in came.query]
            return True
        exchange.at_barrier = False
        self._entered[exchange.counted] = None
        services.barrier_waited(now - exchange.received_at)
        exchange.sequencer_seconds = now - exchange.received_at
        for key, refusal in came.refused.items():
            if key in exchange.results:
                continue  # for its level of idempotence
            exchange.results[key] = refused(key, refusal)
            self._commands.append(Count("refusal", refusal.reason, key))
        exchange.count_refused = frozenset(came.refused)
        for topic in came.guesses:
            services.record_guess(self.connection, self.client_id, topic, now)
        if came.stale:
            self._draining_because = "its partition count is out of date; it has its answers and should look"
            self._drain(now + services.request_timeout_seconds)
            self._pause_client()
        return False

    def _policy_for(self, exchange: ProduceExchange) -> Callable[[str], TopicPolicy | None]:
        """Who may not write a topic has nothing to do with what holds there."""
        services, denied = self._services, exchange.denied
        return (lambda topic: None if topic in denied else services.policy(topic)) if denied else services.policy

    def _drain(self, until: float) -> None:
        """No further request is begun. Of one that has begun the rest is read: `_is_to_go` sees when that is over."""
        if self._draining_until is None or until < self._draining_until:
            self._draining_until = until
        self._draining_because = self._draining_because or "this process is shutting down; it has its answers"

    def _is_to_go(self, now: float) -> bool:
        """Whether a client that is to go has its answers, and has had the time to read them."""
        if self._draining_until is None or self.client_closed:
            return False
        if self._client.at_start:
            self._pause_client()
            if self._nothing_under_way():
                self._draining_until = min(self._draining_until, now + READ_SECONDS)
        return now >= self._draining_until

    def _in_a_hurry(self, now: float) -> bool:
        """What it still waits for will not come in time: it is told so now, to have the time to read it."""
        return self._draining_until is not None and now >= self._draining_until - READ_SECONDS

    def _leave_barrier(self, exchange: ProduceExchange, *, unsent: bool = False) -> None:
        """Once all of it is answered by Kafka, or nothing of it will be sent."""
        counted = exchange.counted
        if counted is not None and (unsent or (exchange.complete and not counted.unanswered)):
            counted.leave(self._now)
            self._entered.pop(counted, None)

    def _leave_all_barriers(self) -> None:
        """Kafka's answers to what is inside will never come."""
        for counted in self._entered:
            counted.leave(self._now)
        self._entered.clear()
