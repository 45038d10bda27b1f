"""Why a session reads nothing more from its client, or from upstream, at the moment."""

from __future__ import annotations

from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.connection.throttling import Throttling
from fencepost_proxy.session.frames.messages import ReadClient, ReadUpstream
from fencepost_proxy.session.frames.services import Settings

#: Bytes of control messages decoded for one connection before others are served: 3 ms, measured with Metadata.
WORK_QUOTA_BYTES = 8 * 1024
#: Added for each of these messages.
MESSAGE_WORK_BYTES = 512
#: Appends refused without Kafka per read: only Kafka's pace keeps one client from using all the time of the others.
_MADE_HERE_MAX = 16


class ReadHolds:
    """- `waiting_produce` – the request that waits for a sequencer, a barrier or metadata.
    - `waits_for` – what another request waits for before it is sent; empty if none does.
    - `draining_until` – no further request is started; then the connection closes.
    - `made_here` – answers without Kafka since the last read outside the fast path.
    - `quota` – what is left of it until `QuotaRenewed`.
    - `throttling` – what Kafka does not read either.
    - `client_paused`, `upstream_paused` – reading has stopped.
    """

    __slots__ = (
        "_settings",
        "_state",
        "client_paused",
        "draining_because",
        "draining_until",
        "made_here",
        "quota",
        "throttling",
        "upstream_paused",
        "waiting_produce",
        "waits_for",
    )

    def __init__(self, state: ConnectionState) -> None:
        self._settings: Settings = state.services
        self._state = state
        self.waiting_produce: ProduceExchange | None = None
        self.waits_for = ""
        self.draining_until: float | None = None
        self.draining_because = ""
        self.client_paused = False
        self.upstream_paused = False
        self.made_here = 0
        self.quota = WORK_QUOTA_BYTES
        self.throttling = Throttling(state)

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
