"""Why a session reads nothing more from its client, or from upstream, at the moment.

One reason is a client that Kafka does not serve at the moment.

Kafka answers a client over its quota at once, with a throttle time, and reads nothing more from that connection for so
long (KIP-219). An append sent meanwhile would stay in the socket and block its partition:

1. The client's append is answered with a throttle time of 10 s. The client sends its next one, as librdkafka does.
2. The proxy sends it to Kafka. Its partition waits for the answer.
3. All other clients' appends to that partition wait for 10 s, although Kafka could append them.

So the proxy reads nothing more from such a client for that time, as Kafka does. Afterwards it is *watched*: one request
at a time, since any answer may have a throttle time that concerns what was sent after its request.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import ReadClient, ReadUpstream, Throttled
from fencepost_proxy.session.frames.services import Settings

#: Bytes of control messages decoded for one connection before others are served: 3 ms, measured with Metadata.
WORK_QUOTA_BYTES = 8 * 1024
#: Added for each of these messages.
MESSAGE_WORK_BYTES = 512
#: Appends refused without Kafka per read: only Kafka's pace keeps one client from using all the time of the others.
_MADE_HERE_MAX = 16

#: Longer than the quota window of Kafka's default configuration, 11 s: after it the client is below its quota.
WATCHED_SECONDS = 30.0
#: A bound on what one response can do. A client that Kafka still does not serve then is watched.
MUTED_SECONDS_MAX = 600.0


@dataclass(slots=True, eq=False)
class Throttling:
    """`muted_until` – Kafka reads nothing before. `watched_until` – 0.0: the client is served without restriction.

    `late` – sent, resolved from the log, and not answered by Kafka yet: it does not seem to read this connection.
    """

    _state: ConnectionState
    muted_until: float = 0.0
    watched_until: float = 0.0
    late: tuple[PendingAppend, ...] = ()  # an empty set takes 216 bytes, a frozenset too

    def throttled(self, throttle_ms: int) -> None:
        """A response of Kafka has this throttle time."""
        if throttle_ms <= 0:
            return
        state = self._state
        self.muted_until = max(self.muted_until, state.now + min(throttle_ms / 1000, MUTED_SECONDS_MAX))
        self.watched_until = self.muted_until + WATCHED_SECONDS
        state.commands.append(Throttled(throttle_ms))

    def is_late(self, pending: PendingAppend) -> None:
        self.late = (*self._others_late(pending), pending)
        self.watched_until = self._state.now + WATCHED_SECONDS

    def is_answered(self, pending: PendingAppend) -> None:
        if self.late:
            self.late = self._others_late(pending)

    def _others_late(self, pending: PendingAppend) -> tuple[PendingAppend, ...]:
        return tuple(each for each in self.late if each is not pending)

    def blocks(self, open_requests: int) -> bool:
        """Whether to start no further request."""
        if not self.watched_until or not self.is_watched(self._state.now):
            return False
        return open_requests > 0 or bool(self.late) or self._state.now < self.muted_until

    def is_watched(self, now: float) -> bool:
        if not self.watched_until:
            return False
        if self.late or now < self.watched_until:
            return True
        self.watched_until = 0.0
        return False


@dataclass(slots=True, eq=False)
class ReadHolds:
    """- `waiting_produce` – the request that waits for a sequencer, a barrier or metadata.
    - `waits_for` – what another request waits for before it is sent; empty if none does.
    - `silent` – the last request that was not relayed has acks=0.
    - `draining_until` – no further request is started; then the connection closes. `draining_fault` – of its client.
    - `made_here` – answers without Kafka since the last read outside the fast path.
    - `quota` – what is left of it until `QuotaRenewed`.
    - `throttling` – what Kafka does not read either.
    - `client_paused`, `upstream_paused` – reading has stopped.
    """

    _state: ConnectionState
    _settings: Settings
    throttling: Throttling
    waiting_produce: ProduceExchange | None = None
    waits_for: str = ""
    silent: bool = False
    draining_until: float | None = None
    draining_because: str = ""
    draining_fault: type[Exception] | None = None
    client_paused: bool = False
    upstream_paused: bool = False
    made_here: int = 0
    quota: int = WORK_QUOTA_BYTES

    def client_is_blocked(self, open_requests: int) -> bool:
        return (
            self.waiting_produce is not None
            or bool(self.waits_for)
            or self._state.full != 0  # a broker handles no further request before the client takes the response
            or self.draining_until is not None
            or open_requests >= self._settings.in_flight_requests_max
            or self.quota_is_used_up
            or self.throttling.blocks(open_requests)
        )

    @property
    def silent_waits(self) -> bool:
        """The request that waits has acks=0: it is sent although its client may have disconnected."""
        return self.silent and (self.waiting_produce is not None or bool(self.waits_for))

    @property
    def quota_is_used_up(self) -> bool:
        return self.quota <= 0 or self.made_here >= _MADE_HERE_MAX

    def renew_quota(self) -> None:
        self.quota, self.made_here = WORK_QUOTA_BYTES, 0

    def pause_client(self) -> None:
        if not self.client_paused:
            self.client_paused = True
            self._state.commands.append(ReadClient(False))

    def pause_upstream(self) -> None:
        if not self.upstream_paused:
            self.upstream_paused = True
            self._state.commands.append(ReadUpstream(False))
