"""State of a proxied connection, and how answers leave it in order: the base of all parts of a session.

Each part of a session is a class in its own module, and a base class of the next. (Inheritance, not delegation: almost
every request uses all of them.)

    Connection         requests in progress, and answers in their order
    Migration          moves a connection to the primary worker
    ControlMessages    requests and responses that the proxy rewrites
    Proofs             permissions of the client, checked with Kafka beforehand
    Logins             the client's login
    AtTransactions     validation of commits, and the appends of a transaction
    AtBarriers         topics with partition-count checks
    CheckedProduce     appends that pass partition sequencers
    FastPath           whole frames of the usual kind while nothing else is in progress
    Session            dispatches frames to these parts, and pauses reading
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from fencepost_proxy.errors import ClientProtocolError, UpstreamProtocolError
from fencepost_proxy.session.cutter import CutterState, FrameCutter
from fencepost_proxy.session.messages import Command, ReadClient
from fencepost_proxy.session.partition_counts import CountCheckedProduce
from fencepost_proxy.session.pending_responses import Answer, Failed, PendingResponse, PipelineKey
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.services import Services
from fencepost_proxy.wire.api_versions import Software
from fencepost_proxy.wire.apis import PRODUCE

#: What every request begins with: API key, version, correlation id. The shortest response is its correlation id.
REQUEST_PREFIX = struct.Struct(">hhi")
REQUEST_BYTES_MIN = REQUEST_PREFIX.size
RESPONSE_BYTES_MIN = 4
INT32 = struct.Struct(">i")
#: The first version whose response can name a broker's address.
_PRODUCE_ENDPOINTS_FROM = 10
#: Bytes of control messages decoded for one connection before others are served: 3 ms, measured with Metadata.
WORK_QUOTA_BYTES = 8 * 1024
#: Added for each of these messages.
MESSAGE_WORK_BYTES = 512
#: Appends refused without Kafka per read: only Kafka's pace keeps one client from using all the time of the others.
_MADE_HERE_MAX = 16
#: Permissions may be revoked: after this time, a client that only the proxy answers must prove WRITE again.
_PROOF_SECONDS = 30.0


class Connection:
    """`opened_at` – when its upstream connection opened, monotonic seconds.

    `client_id`, `software` – as the client reported them, None before.
    """

    __slots__ = (
        "_answer_by",
        "_client",
        "_client_out",
        "_client_paused",
        "_closing",
        "_collecting_bytes",
        "_collecting_since",
        "_commands",
        "_draining_because",
        "_draining_until",
        "_entered",
        "_failed_pipelines",
        "_finishing",
        "_from_upstream",
        "_login_ends",
        "_made_here",
        "_may_use",
        "_may_write",
        "_needs_migration",
        "_next_token",
        "_now",
        "_opened_at",
        "_paused",
        "_probes",
        "_produce_in_flight",
        "_quota",
        "_reading",
        "_received_bytes",
        "_sequencers",
        "_services",
        "_silent_to",
        "_to_client",
        "_upstream",
        "_upstream_out",
        "_upstream_paused",
        "_waiting_produce",
        "_waiting_response",
        "client_closed",
        "client_id",
        "connection",
        "local_host",
        "software",
        "upstream_closed",
    )

    def __init__(self, connection: int, local_host: str, services: Services, opened_at: float) -> None:
        self.connection = connection
        self._opened_at = opened_at
        self.local_host = local_host
        self.client_id: str | None = None
        self.software: Software | None = None
        self._services = services
        self._sequencers = services.sequencers
        self._client = FrameCutter(REQUEST_BYTES_MIN, services.frame_bytes_max, ClientProtocolError)
        self._upstream = FrameCutter(RESPONSE_BYTES_MIN, 2**31 - 1, UpstreamProtocolError)
        self._to_client: list[PendingResponse] = []  # lists: short ones, and an empty deque takes 760 bytes
        self._from_upstream: list[PendingResponse] = []
        self._waiting_produce: ProduceExchange | None = None  # waits for a sequencer or barrier; pauses reading
        self._waiting_response: PendingResponse | None = None
        self._paused = False  # a request waits before it is sent; reading is paused
        self._produce_in_flight: dict[PendingResponse, ProduceExchange] = {}  # sent, not completely answered
        self._answer_by: dict[PendingResponse, float] = {}
        self._may_write: dict[str, float] = {}  # by topic: when Kafka last confirmed WRITE
        self._may_use: str | None = None  # the last transactional id that Kafka let this client use
        self._failed_pipelines: dict[PipelineKey, Failed] = {}
        self._entered: dict[CountCheckedProduce, None] = {}  # requests that entered append barriers
        self._login_ends = float("inf")  # from about then, Kafka closes at the next request
        self._draining_until: float | None = None  # no further request is started; then the connection closes
        self._draining_because = ""
        self._received_bytes = 0  # from the client, in total
        self._silent_to = -1  # end of its last streamed Produce with acks=0
        self._reading: tuple[int, Callable[[], None]] | None = None  # token, and how to continue the request
        self._finishing: dict[int, Callable[[], None]] = {}  # answers that a thread works on, by token
        self._next_token = 0
        self._probes: list[tuple[PendingResponse, list[bytes | memoryview]]] = []
        self._needs_migration = False  # to be migrated; reading is paused
        self._collecting_bytes = 0
        self._collecting_since = 0.0
        self._made_here = 0  # answers without Kafka since the last read
        self._quota = WORK_QUOTA_BYTES  # what is left of it until `QuotaRenewed`
        self._now = 0.0  # time of the current event
        self._client_paused = False
        self._upstream_paused = False
        self.client_closed = False
        self.upstream_closed = False
        self._closing = False
        self._commands: list[Command] = []
        self._client_out: list[bytes | memoryview] = []
        self._upstream_out: list[bytes | memoryview] = []

    # ---- for other modules

    @property
    def finished(self) -> bool:
        return self.client_closed and self.upstream_closed and not self._finishing

    @property
    def in_flight(self) -> int:
        return len(self._to_client)

    @property
    def needs_ticks(self) -> bool:
        produce = self._waiting_produce
        if self._answer_by or self.client_closed or self._paused:
            return True
        return self._client_paused if produce is None else produce.at_barrier or bool(produce.admitted)

    @property
    def over_quota(self) -> bool:
        """It stopped reading because its quota is used up; `QuotaRenewed` resumes it."""
        used_up = self._quota <= 0 or self._made_here >= _MADE_HERE_MAX
        return used_up and (self._client_paused or self._upstream_paused)

    @property
    def waits(self) -> bool:
        """For a sequencer, a barrier or the commit validator; reading is paused."""
        return self._waiting_produce is not None or self._paused

    @property
    def at_barrier(self) -> bool:
        """A request of it waits for an append barrier or for metadata."""
        return self._waiting_produce is not None and self._waiting_produce.at_barrier

    @property
    def appends_unknown(self) -> bool:
        """Appends may be in progress, to unknown topics."""
        if self._client.state is CutterState.PASSING or self._waiting_produce is not None:
            return True
        return any(pending_response.api_key == PRODUCE for pending_response in self._from_upstream)

    @property
    def mid_header(self) -> bool:
        """The client has sent only part of a frame's header."""
        return self._client.at_start and self._client.unread_bytes > 0

    @property
    def collecting_since(self) -> float | None:
        """When the frame started that is being buffered, None while there is none."""
        return self._collecting_since if self._client.state is CutterState.COLLECTING else None

    @property
    def drained(self) -> bool:
        """Nothing is in progress: the connection can be closed without loss."""
        return not self._to_client and not self._from_upstream and self._client.between_frames

    @property
    def unanswered(self) -> list[int]:
        """The API keys of the requests whose client waits for an answer."""
        return [pending_response.api_key for pending_response in self._to_client]

    @property
    def buffered_bytes(self) -> int:
        """Bytes received from the client that are kept: the beginning of a frame."""
        return self._client.buffered_bytes

    @property
    def produce_requests(self) -> list[ProduceExchange]:
        """Produce requests with checked appends that wait, or are sent and not completely answered."""
        waiting = () if self._waiting_produce is None else (self._waiting_produce,)
        return [*waiting, *self._produce_in_flight.values()]

    @property
    def entered_barriers(self) -> int:
        """Requests that have entered append barriers and not left them."""
        return len(self._entered)

    @property
    def passing_up_bytes(self) -> int:
        """How many of the client's next bytes are streamed to the broker; see `ClientPassed`."""
        return self._client.unseen_bytes

    @property
    def passing_down_bytes(self) -> int:
        """How many of the broker's next bytes are streamed to the client; see `UpstreamPassed`."""
        return self._upstream.passing_bytes

    # ---- blocking

    def _client_is_blocked(self) -> bool:
        return (
            self._waiting_produce is not None
            or self._paused
            or self._needs_migration
            or self._draining_until is not None
            or len(self._to_client) >= self._services.in_flight_requests_max
            or self._made_here >= _MADE_HERE_MAX
            or self._quota <= 0
        )

    def _pause_client(self) -> None:
        if not self._client_paused:
            self._client_paused = True
            self._commands.append(ReadClient(False))

    def _nothing_under_way(self) -> bool:
        if self._waiting_produce is not None or self._reading is not None:
            return False
        return not (self._to_client or self._from_upstream or self._produce_in_flight or self._probes)

    def _has_proved(self, topic: str) -> bool:
        """Whether Kafka recently confirmed on this connection that this client may write the topic."""
        reported_at = self._may_write.get(topic)
        return reported_at is not None and self._now < reported_at + _PROOF_SECONDS

    # ---- answers

    def _produce_response(self, version: int, correlation_id: int) -> PendingResponse:
        """For a request relayed unchanged: the proxy rewrites only the addresses in its answer."""
        if version < _PRODUCE_ENDPOINTS_FROM:
            return PendingResponse(PRODUCE, version, correlation_id, Answer.RELAYED)
        return PendingResponse(PRODUCE, version, correlation_id, Answer.RELAYED_UNLESS_BROKERS)

    def _end(self, pending_response: PendingResponse, chunks: list[bytes | memoryview]) -> None:
        pending_response.chunks = chunks
        pending_response.done = True
        self._answer_front()

    def _answer_front(self) -> None:
        while self._to_client and self._to_client[0].done:
            pending_response = self._to_client.pop(0)
            self._services.release(pending_response.reserved_bytes)
            pending_response.reserved_bytes = 0
            if pending_response.answered_at is not None:
                self._services.answered(self._now - pending_response.answered_at)
            self._client_out += pending_response.chunks
            self._may_know(pending_response.pipeline_keys)

    def _may_know(self, pipeline_keys: Sequence[PipelineKey]) -> None:
        """Their failure is reported now. Bytes that arrive later count as sent with knowledge of it."""
        if not pipeline_keys:
            return
        sent_bytes = self._received_bytes + self._services.unread_bytes(self.connection)
        for pipeline_key in pipeline_keys:
            if pipeline_key in self._failed_pipelines:
                self._failed_pipelines[pipeline_key].after_bytes = float(sent_bytes)
        if self._paused:
            return  # the paused request may be an append that was read before this
        read_bytes = self._received_bytes - self._client.unread_bytes
        if self._waiting_produce is not None:
            read_bytes = self._waiting_produce.starts_at  # it still has batches to submit
        self._failed_pipelines = {c: f for c, f in self._failed_pipelines.items() if f.after_bytes > read_bytes}
