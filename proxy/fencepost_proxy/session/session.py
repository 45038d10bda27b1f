"""One client connection and its upstream connection: which frames are streamed, which are read, and what answers them.

Sans-IO: events in, commands out (`messages.py`), no clock. `Session` dispatches frames; the base classes that
`connection.py` lists process them.

Order
-----
1. A broker answers the requests of a connection in order, and so does the proxy, although it makes some answers itself
   and acks=0 requests have none. Every request with an answer has one `PendingResponse`, in two queues
   (`pending_responses.py`).
2. A broker response that belongs to the front request and needs no changes is streamed to the client.
3. A broker response whose predecessor is undecided (for example, a refusal that waits for a log read) stays in the
   socket: the proxy stops reading from upstream, and TCP backpressure stops the broker.
4. While a checked Produce waits for a partition sequencer, the proxy reads no later request of the client.
5. When the client disconnects, the proxy keeps the upstream connection open, up to a time limit, until the appends in
   flight are answered. So the sequencers learn their outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fencepost_proxy.errors import ClientProtocolError, ProtocolError, UpstreamProtocolError
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.connection import INT32, MESSAGE_WORK_BYTES, REQUEST_PREFIX, WORK_QUOTA_BYTES
from fencepost_proxy.session.control import PRODUCED_HERE_BYTES_MAX
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.fast_path import FastPath
from fencepost_proxy.session.logins import LOGIN_BYTES_MAX
from fencepost_proxy.session.messages import (
    AbortOnlyRecorded,
    BatchesRead,
    ClientBytes,
    ClientLost,
    ClientPassed,
    CloseClient,
    CloseUpstream,
    Command,
    CommitDecided,
    Drain,
    Event,
    Expanded,
    MigratedConnection,
    QuotaRenewed,
    ReadClient,
    ReadUpstream,
    Replied,
    Stored,
    Tick,
    ToClient,
    TopicNews,
    ToUpstream,
    UpstreamBytes,
    UpstreamLost,
    UpstreamPassed,
)
from fencepost_proxy.session.pending_responses import Answer, Begun, PendingResponse
from fencepost_proxy.session.producer_ids import ProducerIdWatch
from fencepost_proxy.session.rewriters import RequestRewriters
from fencepost_proxy.session.services import Services
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    PRODUCE,
    UNKNOWN_VERSION,
    Handling,
    api_name,
)
from fencepost_proxy.wire.peeks import UNREADABLE, partitions_of
from fencepost_proxy.wire.produce import (
    FLEXIBLE,
    PartitionResult,
    encode_produce_response,
    parse_produce_response,
    peek_produce,
)

#: Produce requests below it carry no v2 record batches, and brokers since 4.0 refuse them.
_PRODUCE_VERSION_MIN = 3
#: If the Produce header is longer, the request is collected whole.
_PEEK_BYTES_MAX = 4096
#: Control messages up to this size are not charged to the memory budget.
_SMALL_FRAME_BYTES = 16 * 1024
#: A Produce request with more partitions is collected: checking each one takes long.
_STREAMED_PARTITIONS_MAX = 1000


class Session(FastPath):
    """See the module's docstring. Bytes and events enter by `handle`, `take_up` and `take_down` (`fast_path.py`).

    `local_host` – the address by which this client reached the proxy; the client gets it for broker listeners without
    a configured address. `opened_at` – when its upstream connection opened, monotonic seconds. `primary` – whether this
    is the primary worker. A session that continues one of another process starts by `of`.
    """

    __slots__ = ("_drain_until",)

    def __init__(
        self,
        connection: int,
        local_host: str,
        services: Services,
        rewriters: RequestRewriters,
        opened_at: float,
        *,
        primary: bool = True,
    ) -> None:
        super().__init__(connection, local_host, services, rewriters, opened_at, primary=primary)
        self._drain_until = float("inf")

    @classmethod
    def of(
        cls, migrated: MigratedConnection, connection: int, services: Services, rewriters: RequestRewriters
    ) -> Session:
        """Continue another process's session. Feed it `migrated.unread` like any bytes of its client."""
        session = cls(connection, migrated.local_host, services, rewriters, migrated.opened_at)
        session._take_over(migrated)
        return session

    def handle(self, event: Event, now: float) -> list[Command]:
        """Raises nothing: a peer that violates the protocol loses this connection, by a command."""
        return self._process(now, self._event, event, now)

    # ---- what sequencers report

    def append_admitted(self, pending: PendingAppend, now: float) -> list[Command]:
        return self._process(now, self._append_admitted, pending, now)

    def append_completed(
        self, pending: PendingAppend, result: PartitionResult, reason: str | None, now: float
    ) -> list[Command]:
        """The sequencer's final result for an append, sent or not."""
        return self._process(now, self._append_completed, pending, result, reason, now)

    def may_join(self, partition: TopicPartition, now: float) -> list[Command]:
        """The partition's sequencer permits what `Sequencers.join` requested."""
        return self._process(now, self._may_join, partition)

    # ----

    def _process(self, now: float, process: Callable[..., None], *arguments: object) -> list[Command]:
        self._now = now
        try:
            process(*arguments)
            self._resume(now)
        except ProtocolError as error:
            self._close(f"{error}", type(error))
        self._flush()
        if self._needs_migration:
            self._migrate()
        # Drop our reference: the relayed bytes must not stay in memory until the next event, maybe hours later.
        commands, self._commands = self._commands, []
        return commands

    def _event(self, event: Event, now: float) -> None:
        match event:
            case ClientBytes(data):
                self._made_here = 0
                if not self.client_closed and not self._closing:
                    self._received_bytes += len(data)
                    self._client.feed(data)
                    self._pump_client(now)
            case UpstreamBytes(data):
                self._upstream.feed(data)
                self._pump_upstream(now)
            case ClientPassed(byte_count):
                self._received_bytes += byte_count
                self._client.passed(byte_count)
                self._frame_relayed_up()
            case UpstreamPassed(byte_count):
                self._upstream.passed(byte_count)
                self._frame_relayed_down()
            case Expanded(token, outcomes):
                self._expanded(token, outcomes)
            case Stored(token, failure):
                self._stored(token, failure)
            case Replied(token, reply):
                self._replied(token, reply)
            case CommitDecided(token, decision):
                self._validated(token, decision)
            case AbortOnlyRecorded(token, stored):
                self._abort_only_recorded(token, stored=stored)
            case BatchesRead(token):
                self._batches_read(token)
            case ClientLost():
                self._client_lost(now)
            case UpstreamLost(reason):
                self._upstream_lost(reason)
            case TopicNews():
                self._check_barrier(now)
            case Drain(until):
                self._drain(until)
                self._tick(now)
            case QuotaRenewed():
                self._quota, self._made_here = WORK_QUOTA_BYTES, 0
            case Tick():
                self._check_barrier(now)
                self._send_ahead(now)
                self._tick(now)

    def _resume(self, now: float) -> None:
        """Continue what an answer may have unblocked: the next answers, then the next requests."""
        if self._upstream_paused and not self._upstream_is_blocked():
            self._upstream_paused = False
            self._upstream.feed(memoryview(b""))
            self._pump_upstream(now)
            if not self._upstream_paused:
                self._commands.append(ReadUpstream(True))
        if self._client_paused and not (self._closing or self.client_closed or self._client_is_blocked()):
            self._client_paused = False
            self._client.feed(memoryview(b""))
            self._pump_client(now)
            if not self._client_paused:
                self._commands.append(ReadClient(True))
        if self._may_close(now):
            self._close(self._draining_because, None, hang_up=True)
        if self.client_closed and not (
            self.upstream_closed or self._produce_in_flight or self._waiting_produce or self._finishing
        ):
            self._leave_joins()
            self._leave_all_barriers()
            self._leave_commits()
            if self.appends_unknown:
                self._services.record_unanswered(now)
            self._commands.append(CloseUpstream())
            self.upstream_closed = True

    def _flush(self) -> None:
        if self._upstream_out:
            if not self.upstream_closed:
                self._commands.append(ToUpstream(self._upstream_out))
            self._upstream_out = []
        self._flush_client()

    def _flush_client(self) -> None:
        if self._client_out:
            if not self.client_closed:
                self._commands.append(ToClient(self._client_out))
            self._client_out = []

    # ---- appends begun before their topic had partition-count checks

    def begun(self, now: float) -> Begun | None:
        """The Produce requests in progress, to any topic; None if there are none."""
        if not self.appends_unknown:
            return None
        return Begun(
            now, self._received_bytes - self._client.unread_bytes + self._client.passing_bytes, self._waiting_produce
        )

    def is_streaming(self, begun: Begun) -> bool:
        """The frame in transit at that time still is."""
        return self._received_bytes - self._client.unread_bytes < begun.reads_to

    def is_over(self, begun: Begun) -> bool:
        """All of it is answered, or has no answer and is sent (`is_silent`)."""
        if begun.pending_responses is None:
            if self.is_streaming(begun) or (begun.produce is not None and begun.produce is self._waiting_produce):
                return False
            self._disable_fast_path()  # first, because it replaces pending responses
            begun.pending_responses = frozenset(
                pending_response for pending_response in self._from_upstream if pending_response.api_key == PRODUCE
            )
        return begun.pending_responses.isdisjoint(self._from_upstream)

    def is_silent(self, begun: Begun) -> bool:
        """Its last frame was acks=0: the outcome stays unknown."""
        return self._silent_to == begun.reads_to

    # ---- from the client

    def _pump_client(self, now: float) -> None:
        cutter = self._client
        while not self._closing:
            if cutter.state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._upstream_out.append(view)
                self._frame_relayed_up()
            elif cutter.state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                self._request(frame, now)
            elif cutter.state is CutterState.TOKEN:
                token_bytes = cutter.token_length(LOGIN_BYTES_MAX)
                if token_bytes is None:
                    break
                if self._client_is_blocked():
                    self._pause_client()
                    break
                if not self._collect(token_bytes, now, charged=token_bytes > _SMALL_FRAME_BYTES):
                    break
            else:
                head = cutter.head()
                if head is None:
                    break
                if self._client_is_blocked():
                    # Pause only with a next request at hand: most clients wait for their answer anyway.
                    self._pause_client()
                    break
                if not self._start_request(head[0], head[1], now):
                    break
                api_key, version, _ = REQUEST_PREFIX.unpack_from(head[1])
                # Only ApiVersions is answered for unknown versions.
                known = api_key != API_VERSIONS or APIS[API_VERSIONS].serves(version)
                self._services.count_request(api_key, version if known else UNKNOWN_VERSION)
        cutter.save()

    def _frame_relayed_up(self) -> None:
        if not self._client.passing_bytes:
            self._services.forwarded(0.0)
            self._send_probes()

    def _start_request(self, length: int, head: memoryview, now: float) -> bool:
        """Decide about the frame that begins here; False if that needs more bytes, or memory that is not free."""
        api_key, version, correlation_id = REQUEST_PREFIX.unpack_from(head)
        relayed_versions = self._services.relayed_versions.get(api_key)
        if (
            relayed_versions is not None
            and not relayed_versions[2]
            and relayed_versions[0] <= version <= relayed_versions[1]
        ):
            self._relay(PendingResponse(api_key, version, correlation_id, Answer.RELAYED), length)
            return True
        api = APIS.get(api_key)
        if api is None or api.gated:
            raise ClientProtocolError(f"{api_name(api_key)} v{version} is not an API that this proxy serves")
        handling = api.handling
        if not api.serves(version) and api_key != API_VERSIONS:
            raise ClientProtocolError(
                f"{api.name} v{version} is not served: this proxy advertises {api.min_version} to {api.max_version}"
            )
        if handling is Handling.ALONE:
            return self._start_login(length, now)
        if handling is Handling.PRODUCE:
            if now >= self._login_ends:
                return self._end_with_its_login()
            return self._start_produce(length, head, version, correlation_id, now)
        # Small frames are freed by this call or the next, and must pass while other connections use up the budget.
        return self._collect(length, now, charged=length > _SMALL_FRAME_BYTES)

    def _relay(self, pending_response: PendingResponse, length: int, watch: ProducerIdWatch | None = None) -> None:
        self._client.pass_frame(length, watch)
        self._to_client.append(pending_response)
        self._from_upstream.append(pending_response)

    def _start_login(self, length: int, now: float) -> bool:
        """Wait until nothing is in progress: Kafka closes a connection that sends anything else during a login.

        That includes the proxy's resends. While the client sends only login frames, the proxy sends nothing else.
        """
        if length > LOGIN_BYTES_MAX:
            raise ClientProtocolError(f"a login of {length} bytes: at most {LOGIN_BYTES_MAX} are accepted")
        if not self._nothing_under_way():
            self._pause_client()
            return False
        return self._collect(length, now, charged=length > _SMALL_FRAME_BYTES)

    def _end_with_its_login(self) -> bool:
        """As Kafka does, once all earlier requests are answered: a later append would have an unknown outcome."""
        if self._nothing_under_way():
            self._close("the client's login expired and was not renewed", None, hang_up=True)
        else:
            self._pause_client()
        return False

    def _collect(self, length: int, now: float, *, charged: bool = True) -> bool:
        if charged:
            if not self._services.reserve(length):
                self._pause_client()
                return False
            self._collecting_bytes = length
        self._collecting_since = now
        self._client.collect_frame(length)
        return True

    def _start_produce(self, length: int, head: memoryview, version: int, correlation_id: int, now: float) -> bool:
        """Stream a Produce request without checked topics; its first bytes show its topics."""
        if version < _PRODUCE_VERSION_MIN:
            raise ClientProtocolError(f"Produce v{version} is older than record batches; use v3 or newer")
        peek = peek_produce(head, length)
        if peek is None:
            if len(head) < min(_PEEK_BYTES_MAX, length):
                return False
            return self._collect(length, now)
        services = self._services
        if peek.acks == 0 and not services.fresh(now):
            # acks=0: the client cannot receive a retriable error. It waits, as for a broker that does not read.
            self._pause_client()
            return False
        if (
            not self._primary
            and peek.topic_count == 1
            and services.fresh(now)
            and self._needs_primary(services.policy(peek.first_topic))
        ):
            self._move_to_primary()
            return False
        streamed = (
            services.fresh(now)
            and peek.topic_count == 1
            and peek.first_topic != services.state_topic
            and services.policy(peek.first_topic) is None
        )
        if not streamed:
            if (
                peek.topic_count == 1
                and peek.acks != 0
                and peek.transactional_id is None
                and version >= FLEXIBLE
                and peek.first_topic != services.state_topic
                and (peek.first_topic in self._may_write or not services.clients_log_in)
            ):
                self._record_known(version, bytes(head[:_PEEK_BYTES_MAX]), peek, is_checked=True)
            return self._collect(length, now)
        flexible = version >= FLEXIBLE
        try:
            count, first_at = partitions_of(head, peek.end, flexible=flexible)
        except UNREADABLE:
            if len(head) < min(peek.end + 5, length):
                return False
            count, first_at = 0, length
        if count > _STREAMED_PARTITIONS_MAX:
            return self._collect(length, now)
        watch = ProducerIdWatch(first_at, count, services.shared_producer_ids, flexible=flexible)
        if peek.acks == 0:
            services.record_unanswered(now)
            self._client.pass_frame(length, watch)
            self._silent_to = self._received_bytes - self._client.unread_bytes + self._client.passing_bytes
        else:
            self._relay(self._produce_response(version, correlation_id), length, watch)
            self._record_known(version, bytes(head[:_PEEK_BYTES_MAX]), peek, is_checked=False)
        return True

    def _request(self, frame: memoryview, now: float) -> None:
        """A whole request, or a login token."""
        if self._tokens is not None:
            self._token(self._tokens, frame)
            return
        api_key, version, correlation_id = REQUEST_PREFIX.unpack_from(frame)
        if api_key == PRODUCE:
            if not self._direct(frame, now):
                self._produce(frame, now)
        elif APIS[api_key].handling is Handling.ALONE:
            self._login_request(api_key, version, correlation_id, frame)
        else:
            self._control_message(api_key, version, correlation_id, frame)

    # ---- from upstream

    def _upstream_is_blocked(self) -> bool:
        """The next answer must wait: for an earlier one, for one that a thread works on, or for the quota."""
        if self._finishing:
            return True
        if not self._from_upstream:
            return False
        pending_response = self._from_upstream[0]
        if pending_response.answer is Answer.MADE_FROM_RESPONSE:
            return self._quota <= 0 and not pending_response.inner
        return (
            pending_response.answer is Answer.RELAYED
            and bool(self._to_client)
            and self._to_client[0] is not pending_response
        )

    def _overtaken(self, pending_response: PendingResponse, length: int) -> bool:
        """Whether to buffer in memory, not in the socket, an answer that must wait for the front one.

        Needed if a partition sequencer waits for a later answer. Example: a checked append was refused because of its
        fence and resent, so the front request's answer comes later. False also if memory is short: then the front
        request ends by its time limit.

        Not while a thread works: the client may be lost, and then nothing would release the reserved memory.
        """
        a_sequencer_waits = any(each.inner or each.direct is not None for each in self._from_upstream)
        if self._finishing or not a_sequencer_waits or not self._services.reserve(length):
            return False
        pending_response.reserved_bytes += length
        return True

    def _pump_upstream(self, now: float) -> None:
        cutter = self._upstream
        while True:
            if cutter.state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._client_out.append(view)
                self._frame_relayed_down()
            elif cutter.state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                self._collected(frame, now)
            else:
                head = cutter.head()
                if head is None:
                    break
                length, view = head
                pending_response = self._expected_response(view)
                relayed = pending_response.answer is Answer.RELAYED
                if self._upstream_is_blocked():
                    if not (relayed and self._overtaken(pending_response, length)):
                        self._pause_upstream()
                        break
                    cutter.collect_frame(length)
                elif relayed:
                    cutter.pass_frame(length)
                elif length > self._services.frame_bytes_max:
                    raise UpstreamProtocolError(
                        f"an answer of {length} bytes to {api_name(pending_response.api_key)}, which is buffered: "
                        f"limits.frame_bytes_max is {self._services.frame_bytes_max}"
                    )
                else:
                    cutter.collect_frame(length)
        cutter.save()

    def _pause_upstream(self) -> None:
        if not self._upstream_paused:
            self._upstream_paused = True
            self._commands.append(ReadUpstream(False))

    def _frame_relayed_down(self) -> None:
        if not self._upstream.passing_bytes:
            self._services.answered(0.0)
            self._end(self._from_upstream.pop(0), [])

    def _expected_response(self, head: memoryview) -> PendingResponse:
        (correlation_id,) = INT32.unpack_from(head)
        if not self._from_upstream:
            raise UpstreamProtocolError(f"an answer with correlation id {correlation_id}, but no request is open")
        pending_response = self._from_upstream[0]
        if pending_response.correlation_id != correlation_id:
            raise UpstreamProtocolError(
                f"an answer with correlation id {correlation_id} where {pending_response.correlation_id} "
                f"({api_name(pending_response.api_key)}) comes next"
            )
        return pending_response

    def _collected(self, frame: memoryview, now: float) -> None:
        if self._from_upstream[0].answer is Answer.DIRECT:
            self._collected_direct(frame, now)
            return
        pending_response = self._from_upstream.pop(0)
        if not pending_response.inner:
            pending_response.answered_at = now
        if pending_response.answer is Answer.MADE_FROM_RESPONSE:
            if not pending_response.inner:
                self._quota -= MESSAGE_WORK_BYTES + len(frame)
            on_response, pending_response.on_response = pending_response.on_response, None  # break the reference cycle
            assert on_response is not None
            on_response(frame)
            self._answer_front()
        elif pending_response.answer is Answer.RELAYED_UNLESS_BROKERS:
            self._work(
                len(frame) > PRODUCED_HERE_BYTES_MAX,
                lambda: self._with_own_addresses(pending_response, frame),
                lambda chunks: self._end(pending_response, chunks),
            )
        else:
            self._end(pending_response, [INT32.pack(len(frame)), frame])

    def _collected_direct(self, frame: memoryview, now: float) -> None:
        pending_response = self._from_upstream[0]
        answer = self._end_direct(pending_response, frame, now)
        if answer is None:
            self._disable_fast_path()
            self._collected(frame, now)
        else:
            del self._from_upstream[0]
            pending_response.answered_at = now
            self._end(pending_response, [answer])

    def _with_own_addresses(self, pending_response: PendingResponse, frame: memoryview) -> list[bytes | memoryview]:
        """A Produce response with broker addresses rewritten for clients."""
        response = parse_produce_response(frame, pending_response.version)
        if not response.node_endpoints:
            return [INT32.pack(len(frame)), frame]
        endpoints = tuple(self._services.endpoint(each, self.local_host) for each in response.node_endpoints)
        return [encode_produce_response(replace(response, node_endpoints=endpoints), pending_response.version)]

    # ---- ends

    def _tick(self, now: float) -> None:
        if now >= self._drain_until and not self.upstream_closed:
            self._commands.append(CloseUpstream())
            self._upstream_lost("the client disconnected, and Kafka did not answer its last requests in time")
        if self._draining_until is not None:
            self._answer_before_close(now)
        self._answer_unknown_outcomes(now)
        self._join_later(now)
        late = self._late_proof(now)
        if late is not None:
            self._close(f"Kafka did not confirm in time that the client may {late}", None)

    def _close(self, reason: str, fault: type[Exception] | None, *, hang_up: bool = False) -> None:
        if not self._closing:
            self._closing = True
            self._flush_client()
            self._commands.append(CloseClient(reason, fault, hang_up))
        if fault is not None and issubclass(fault, UpstreamProtocolError) and not self.upstream_closed:
            # Also while the client connection closes: what was sent would never be answered.
            self._upstream_lost(reason)
            self._commands.append(CloseUpstream())

    def _client_lost(self, now: float) -> None:
        self._disable_fast_path()
        self.client_closed = True
        self._drain_until = now + self._services.request_timeout_seconds
        self._return_waiting_produce()
        self._services.release(self._collecting_bytes)
        self._collecting_bytes = 0
        # No client needs the order any more; keep reading to learn the outcomes of the appends in flight.
        for pending_response in self._to_client:
            self._services.release(pending_response.reserved_bytes)
            pending_response.reserved_bytes = 0
        self._to_client.clear()

    def _upstream_lost(self, reason: str) -> None:
        """Everything sent and unanswered is in doubt from here on; the sequencers read the log."""
        if self.upstream_closed:
            return
        if self._from_upstream:
            self._services.upstream_lost()
        self._disable_fast_path()
        self.upstream_closed = True
        # The client's connection may take long to close. An append admitted meanwhile would count as sent, and its
        # sequencer would wait indefinitely.
        self._return_waiting_produce()
        for produce in self._produce_in_flight.values():
            self._stop_waiting(produce)
            self._end_appends(produce)
        self._leave_all_barriers()
        self._leave_commits()
        if self.appends_unknown:
            self._services.record_unanswered(self._now)
        for pending_response in (*self._to_client, *self._produce_in_flight):
            self._services.release(pending_response.reserved_bytes)
            pending_response.reserved_bytes = 0
        self._produce_in_flight.clear()
        self._answer_by.clear()
        self._leave_joins()
        self._from_upstream.clear()
        self._probes.clear()
        if not self._closing and not self.client_closed:
            self._close(reason, None)
