"""What all parts of a session know about its connection, and the commands that they emit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import ClientProtocolError, UpstreamProtocolError
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange, refused
from fencepost_proxy.session.frames.cutter import REQUEST_BYTES_MIN, RESPONSE_BYTES_MIN, CutterState, FrameCutter
from fencepost_proxy.session.frames.messages import Command, Count
from fencepost_proxy.session.frames.request_template import NO_TEMPLATE, RequestTemplate
from fencepost_proxy.session.frames.services import Sequencers, Services
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.api_versions import Software


class Full:
    """Which sockets have more unsent bytes than a limit, as bits: their peers do not read.

    While one is full, the client's appends wait:

    1. A client sends a Fetch and an append, and stops reading.
    2. The Fetch response fills its socket, so Kafka's socket is not read either.
    3. The append's partition would wait for an answer that is not read.
    """

    CLIENT: Final = 1
    UPSTREAM: Final = 2


@dataclass(slots=True, eq=False)
class ConnectionState:
    """`opened_at` – when its upstream connection opened, monotonic seconds. `local_host` – the address by which this
    client reached the proxy.

    - `client_id`, `software` – as the client reported them, None before.
    - `principal` – user of the last complete login with PLAIN or SCRAM.
    - `client`, `upstream` – cut what each peer sends into frames.
    - `now` – time of the current event. `received_bytes` – from the client, in total.
    - `collecting_bytes` – reserved for the client's frame that is being collected; `collecting_started` – when.
    - `silent_to` – end of the client's last streamed Produce with acks=0.
    - `template` – the start of the client's last Produce request.
    - `login_ends` – from about then, Kafka closes at the next request.
    - `full` – see `Full`; the transport keeps it current, and sends a `Tick` then to a session that waits.
    """

    connection: int
    local_host: str
    services: Services
    opened_at: float
    sequencers: Sequencers = field(init=False)
    client: FrameCutter = field(init=False)
    upstream: FrameCutter = field(init=False)
    client_id: str | None = None
    software: Software | None = None
    principal: str | None = None
    commands: list[Command] = field(default_factory=list)
    now: float = 0.0
    received_bytes: int = 0
    collecting_bytes: int = 0
    collecting_started: float = 0.0
    template: RequestTemplate = field(init=False)
    login_ends: float = float("inf")
    silent_to: int = -1
    full: int = 0
    closing: bool = False
    client_closed: bool = False
    upstream_closed: bool = False
    _last_token: int = 0
    _continuations: dict[int, Callable[[Any], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sequencers, self.template = self.services.sequencers, NO_TEMPLATE
        self.client = FrameCutter(REQUEST_BYTES_MIN, self.services.frame_bytes_max, ClientProtocolError)
        self.upstream = FrameCutter(RESPONSE_BYTES_MIN, 2**31 - 1, UpstreamProtocolError)

    @property
    def read_bytes(self) -> int:
        """How many of the client's bytes belong to frames that were begun."""
        return self.received_bytes - self.client.unread_bytes

    @property
    def streams_up(self) -> bool:
        """A frame of the client is half upstream: nothing else may be sent there before its end."""
        return self.client.state is CutterState.PASSING

    @property
    def mid_header(self) -> bool:
        """The client has sent only part of a frame's header."""
        return self.client.at_start and self.client.unread_bytes > 0

    @property
    def collecting_since(self) -> float | None:
        """When the frame started that is being buffered, None while there is none."""
        return self.collecting_started if self.client.state is CutterState.COLLECTING else None

    def release_collected(self) -> None:
        """The frame that was being collected will not be processed here."""
        self.services.release(self.collecting_bytes)
        self.collecting_bytes = 0

    def refuse(self, produce: ProduceExchange, key: TopicPartition, refusal: Refusal) -> None:
        produce.results.refuse(key, refused(key, refusal))
        self.commands.append(Count("refusal", refusal.reason, key))

    # ---- commands whose result comes back by an event

    def token(self, continuation: Callable[[Any], None]) -> int:
        """For a command whose result `continuation` gets."""
        self._last_token += 1
        self._continuations[self._last_token] = continuation
        return self._last_token

    def resume(self, token: int, result: object) -> None:
        """The event with this token has arrived. `ClearAbortOnly` may have none."""
        continuation = self._continuations.pop(token, None)
        if continuation is not None:
            continuation(result)
