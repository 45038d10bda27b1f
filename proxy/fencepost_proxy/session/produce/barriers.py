"""A connection at append barriers: waiting, entering, and disconnecting clients with an outdated partition count.

`CountCheckedProduce` (`partition_counts.py`) decides. A request that waits for a barrier is the connection's
`waiting_produce`: reading is paused, as for a partition sequencer.

A client with an outdated partition count must refresh its metadata. Error 37 makes no client do so; the end of the
connection makes all of them. So the proxy reads no further request, answers those in progress and disconnects. Requests
that the client sent meanwhile are not appended, and the client knows.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fencepost_proxy.session.batches.partition_counts import Admitted, CountCheckedProduce, count_checked_produce
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.draining import Draining
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import TopicStale
from fencepost_proxy.session.frames.services import Services, Topics
from fencepost_proxy.topics.virtual_configs import TopicPolicy


@dataclass(slots=True, eq=False)
class Barriers:
    _state: ConnectionState
    _holds: ReadHolds
    _draining: Draining
    _services: Services
    entered: dict[CountCheckedProduce, None] = field(default_factory=dict)  # requests that entered append barriers

    def waits(self, produce: ProduceExchange, now: float) -> bool:
        """False: it entered, or no barrier concerns it."""
        services = self._services
        if produce.checks.count_checked is None:
            produce.request, produce.checks.count_checked = count_checked_produce(
                produce.request,
                policies_but_for(produce.received.denied, services),
                self._state.connection,
                now,
                now + produce.received.wait_seconds,
                readings=produce.received.readings,
            )
            if produce.checks.count_checked is None:
                return False
        came = produce.checks.count_checked.enter_barriers(services, now)
        if not isinstance(came, Admitted):
            self._state.commands += [TopicStale(topic) for topic in came.query]
            return True
        self.entered[produce.checks.count_checked] = None
        services.barrier_waited(now - produce.received.at)
        produce.sequencer_seconds = now - produce.received.at
        for key, refusal in came.refused.items():
            if key in produce.results:
                continue  # refused for its idempotence level
            self._state.refuse(produce, key, refusal)
        produce.checks.refused_by_policy |= came.refused.keys()
        for topic in came.guesses:
            services.record_guess(self._state.connection, self._state.client_id, topic, now)
        if came.stale:
            self._draining.begin(
                now + services.request_timeout_seconds,
                "the client's partition count is outdated; disconnected to refresh its metadata",
            )
            self._holds.pause_client()
        return False

    def leave(self, produce: ProduceExchange, *, unsent: bool = False) -> None:
        """Once Kafka has answered all of it, or nothing of it will be sent."""
        count_checked = produce.checks.count_checked
        if count_checked is not None and (unsent or (produce.complete and not count_checked.unanswered)):
            count_checked.leave(self._state.now)
            self.entered.pop(count_checked, None)

    def leave_all(self) -> None:
        """Kafka will not answer the requests that entered."""
        for count_checked in self.entered:
            count_checked.leave(self._state.now)
        self.entered.clear()


def policies_but_for(denied: Container[str], topics: Topics) -> Callable[[str], TopicPolicy | None]:
    """Topics that the client may not write have no policy here: Kafka's refusal is the answer."""
    return (lambda topic: None if topic in denied else topics.policy(topic)) if denied else topics.policy
