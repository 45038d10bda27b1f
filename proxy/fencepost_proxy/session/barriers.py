"""A connection at append barriers: waiting, entering, and disconnecting clients with an outdated partition count.

`CountCheckedProduce` (`partition_counts.py`) decides. A request that waits for a barrier is the connection's
`_waiting_produce`: reading is paused, as for a partition sequencer.

A client with an outdated partition count must refresh its metadata. Error 37 makes no client do so; the end of the
connection makes all of them. So the proxy reads no further request, answers those in progress and disconnects. Requests
that the client sent meanwhile are not appended, and the client knows. `Drain` closes all connections in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.session.appends import refused
from fencepost_proxy.session.messages import Count, TopicStale
from fencepost_proxy.session.partition_counts import Admitted, count_checked_produce
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.transactions import AtTransactions
from fencepost_proxy.topics.virtual_configs import TopicPolicy

#: Between the last answer and the end. Some clients that receive both at once lose the answer (kafka-python treats it
#: as a broken connection and sends the batch again).
READ_SECONDS = 0.1


class AtBarriers(AtTransactions):
    """Its state is the connection's: `_entered`, `_draining_until`."""

    __slots__ = ()

    def _wait_seconds(self, timeout_ms: int) -> float:
        """How long an append may wait before it is sent."""
        return min(self._services.sequencer_wait_max_seconds, max(timeout_ms, 0) / 3000)

    def _waits_at_barrier(self, produce: ProduceExchange, now: float) -> bool:
        """False: it entered, or no barrier concerns it."""
        services = self._services
        if produce.count_checked is None:
            deadline = now + self._wait_seconds(produce.request.timeout_ms)
            policy = self._policy_for(produce)
            produce.request, produce.count_checked = count_checked_produce(
                produce.request, policy, self.connection, now, deadline, readings=produce.readings
            )
            if produce.count_checked is None:
                return False
        came = produce.count_checked.enter_barriers(services, now)
        if not isinstance(came, Admitted):
            produce.at_barrier = True
            self._commands += [TopicStale(topic) for topic in came.query]
            return True
        produce.at_barrier = False
        self._entered[produce.count_checked] = None
        services.barrier_waited(now - produce.received_at)
        produce.sequencer_seconds = now - produce.received_at
        for key, refusal in came.refused.items():
            if key in produce.results:
                continue  # refused for its idempotence level
            produce.results[key] = refused(key, refusal)
            self._commands.append(Count("refusal", refusal.reason, key))
        produce.refused_by_policy |= came.refused.keys()
        for topic in came.guesses:
            services.record_guess(self.connection, self.client_id, topic, now)
        if came.stale:
            self._draining_because = "the client's partition count is outdated; disconnected to refresh its metadata"
            self._drain(now + services.request_timeout_seconds)
            self._pause_client()
        return False

    def _policy_for(self, produce: ProduceExchange) -> Callable[[str], TopicPolicy | None]:
        """Topics that the client may not write have no policy here: Kafka's refusal is the answer."""
        services, denied = self._services, produce.denied
        return (lambda topic: None if topic in denied else services.policy(topic)) if denied else services.policy

    def _drain(self, until: float) -> None:
        """Start no further request. A partly received one is read to its end, see `_may_close`."""
        if self._draining_until is None or until < self._draining_until:
            self._draining_until = until
        self._draining_because = self._draining_because or "this process is shutting down; its requests are answered"

    def _may_close(self, now: float) -> bool:
        """Whether a drained client has its answers, and has had the time to read them."""
        if self._draining_until is None or self.client_closed:
            return False
        if self._client.at_start:
            self._pause_client()
            if self._nothing_under_way():
                self._draining_until = min(self._draining_until, now + READ_SECONDS)
        return now >= self._draining_until

    def _closes_soon(self, now: float) -> bool:
        """Outcomes still open are reported now, so that the client has time to read the answer."""
        return self._draining_until is not None and now >= self._draining_until - READ_SECONDS

    def _leave_barrier(self, produce: ProduceExchange, *, unsent: bool = False) -> None:
        """Once Kafka has answered all of it, or nothing of it will be sent."""
        count_checked = produce.count_checked
        if count_checked is not None and (unsent or (produce.complete and not count_checked.unanswered)):
            count_checked.leave(self._now)
            self._entered.pop(count_checked, None)

    def _leave_all_barriers(self) -> None:
        """Kafka will not answer the requests that entered."""
        for count_checked in self._entered:
            count_checked.leave(self._now)
        self._entered.clear()
