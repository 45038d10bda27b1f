"""One client connection and its upstream connection: which bytes just pass, which are read, who answers what, when.

Sans-IO: events in, commands out (`messages.py`), no clock of its own. `Session` orders; what is done with a request
once it is known what it is, is in the parts that it stands on (`connection.py` lists them).

Order
-----
A broker answers the requests of a connection in their order, and so do we, though some answers are made here and some
requests have none (acks=0). Every request that will be answered has one `PendingResponse`, in two queues
(`pending_responses.py`).

An answer that belongs to the front slot and needs no reading is streamed through. One that comes while the front
slot is still undecided (a refusal that waits for a read of the log, say) stays in the socket: reading from upstream
stops, and with it, by TCP, the broker. The same holds the other way: while a guarded Produce waits for its turn at a
gate, nothing behind it is read.

A client that vanishes does not take its appends with it: what is on its way upstream is waited for, up to a bound, so
that the gates learn the outcome; only then is the upstream connection closed.
"""

from __future__ import annotations

from dataclasses import replace

from fencepost_proxy.errors import ClientProtocolError, ProtocolError, UpstreamProtocolError
from fencepost_proxy.session.connection import INT32, MESSAGE_WORK_BYTES, REQUEST_PREFIX, WORK_QUOTA_BYTES
from fencepost_proxy.session.control import PRODUCED_HERE_BYTES_MAX
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.fast_path import FastPath
from fencepost_proxy.session.logins import LOGIN_BYTES_MAX
from fencepost_proxy.session.messages import (
    AbortOnlyRecorded,
    AppendAdmitted,
    AppendCompleted,
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
    MayJoin,
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
from fencepost_proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    PRODUCE,
    UNKNOWN_VERSION,
    Handling,
    api_name,
)
from fencepost_proxy.wire.produce import FLEXIBLE, encode_produce_response, parse_produce_response, peek_produce
from fencepost_proxy.wire.shortcuts import UNREADABLE, partitions_of

#: Produce requests below it carry no v2 record batches, and brokers since 4.0 refuse them.
_PRODUCE_VERSION_MIN = 3
#: A Produce header is read from as much of the frame's start as this; longer ones are collected whole.
_PEEK_BYTES_MAX = 4096
#: Control messages up to this size do not count as held in memory.
_SMALL_FRAME_BYTES = 16 * 1024
#: A Produce request with more partitions is collected: looking at each takes time in one go.
_STREAMED_PARTITIONS_MAX = 1000


class Session(FastPath):
    """See the module's docstring. `handle` is the only way in, beside `take_up` and `take_down` (`fast_path.py`).

    `local_host` is the address by which this client reached us, which is what it is told for the brokers' listeners
    where none is configured. `opened_at` – since when its upstream connection is open, monotonic seconds. `owner` –
    whether this process owns what only one may; a session that goes on in another process begins with `migrated`.
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
        """The session of another process, here. It is to be told of `migrated.unread` as of any bytes of its client."""
        session = cls(connection, migrated.local_host, services, rewriters, migrated.opened_at)
        session._take_over(migrated)
        return session

    def handle(self, event: Event, now: float) -> list[Command]:
        """Raises nothing: a peer that breaks the protocol costs this connection, by a command."""
        self._now = now
        try:
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
                    self._frame_passes_up()
                case UpstreamPassed(byte_count):
                    self._upstream.passed(byte_count)
                    self._frame_passes_down()
                case AppendAdmitted(pending):
                    self._append_admitted(pending, now)
                case AppendCompleted(pending, result, reason):
                    self._append_completed(pending, result, reason, now)
                case MayJoin(partition):
                    self._may_join(partition)
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
            self._go_on(now)
        except ProtocolError as error:
            self._close(f"{error}", type(error))
        self._flush()
        if self._primary_wanted:
            self._migrate()
        # Given away: what was relayed last must not stay in memory until the next event, which may be hours away.
        commands, self._commands = self._commands, []
        return commands

    def _go_on(self, now: float) -> None:
        """What an answer may have set free: the next answers, then the next requests."""
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
        if self._is_to_go(now):
            self._close(self._draining_because, None, hang_up=True)
        if self.client_closed and not (
            self.upstream_closed or self._exchanges_in_flight or self._waiting_exchange or self._finishing
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

    # ---- what went past the door of a topic that was not counted yet

    def begun(self, now: float) -> Begun | None:
        """What may be under way here to any topic; None if nothing is."""
        if not self.appends_unknown:
            return None
        return Begun(
            now, self._received_bytes - self._client.unread_bytes + self._client.passing_bytes, self._waiting_exchange
        )

    def is_streaming(self, begun: Begun) -> bool:
        """The frame that was on its way then still is."""
        return self._received_bytes - self._client.unread_bytes < begun.reads_to

    def is_over(self, begun: Begun) -> bool:
        """Everything of it was answered; or it has no answer, and has been sent (`is_silent`)."""
        if begun.response_slots is None:
            if self.is_streaming(begun) or (begun.exchange is not None and begun.exchange is self._waiting_exchange):
                return False
            self._disable_fast_path()  # or their slots would be exchanged for others
            begun.response_slots = frozenset(
                response_slot for response_slot in self._from_upstream if response_slot.api_key == PRODUCE
            )
        return begun.response_slots.isdisjoint(self._from_upstream)

    def is_silent(self, begun: Begun) -> bool:
        """Nobody will hear what became of its last frame."""
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
                self._frame_passes_up()
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
                if not self._collect(token_bytes, now, counted=token_bytes > _SMALL_FRAME_BYTES):
                    break
            else:
                head = cutter.head()
                if head is None:
                    break
                if self._client_is_blocked():
                    # Only now, that there is something to keep it from: most clients wait for their answer anyway.
                    self._pause_client()
                    break
                if not self._start_request(head[0], head[1], now):
                    break
                api_key, version, _ = REQUEST_PREFIX.unpack_from(head[1])
                # Of ApiVersions alone is a version answered that nobody knows.
                known = api_key != API_VERSIONS or APIS[API_VERSIONS].serves(version)
                self._services.count_request(api_key, version if known else UNKNOWN_VERSION)
        cutter.save()

    def _frame_passes_up(self) -> None:
        if not self._client.passing_bytes:
            self._services.forwarded(0.0)
            self._send_probes()

    def _start_request(self, length: int, head: memoryview, now: float) -> bool:
        """Decides about the frame that begins here; False if that needs more of it, or memory that is not there."""
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
            raise ClientProtocolError(f"{api_name(api_key)} v{version} is not an API that this proxy lets pass")
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
        # Small ones are gone again with this call or the next, and must pass while others hold all the memory.
        return self._collect(length, now, counted=length > _SMALL_FRAME_BYTES)

    def _relay(self, response_slot: PendingResponse, length: int, watch: ProducerIdWatch | None = None) -> None:
        self._client.pass_frame(length, watch)
        self._to_client.append(response_slot)
        self._from_upstream.append(response_slot)

    def _start_login(self, length: int, now: float) -> bool:
        """Kafka closes on whatever comes in between, and what is under way may have to be sent once more.

        Nothing of ours begins while its client sends nothing else, and that waits until it has logged in.
        """
        if length > LOGIN_BYTES_MAX:
            raise ClientProtocolError(f"a login of {length} bytes: at most {LOGIN_BYTES_MAX} are accepted")
        if not self._nothing_under_way():
            self._pause_client()
            return False
        return self._collect(length, now, counted=length > _SMALL_FRAME_BYTES)

    def _end_with_its_login(self) -> bool:
        """As Kafka does, once all before it is answered: sent there, an append would be lost or not, nobody knew."""
        if self._nothing_under_way():
            self._close("its login has ended, and it did not log in anew", None, hang_up=True)
        else:
            self._pause_client()
        return False

    def _collect(self, length: int, now: float, *, counted: bool = True) -> bool:
        if counted:
            if not self._services.reserve(length):
                self._pause_client()
                return False
            self._collecting_bytes = length
        self._collecting_since = now
        self._client.collect_frame(length)
        return True

    def _start_produce(self, length: int, head: memoryview, version: int, correlation_id: int, now: float) -> bool:
        """A Produce request that concerns no guarded topic is streamed through; its first bytes tell."""
        if version < _PRODUCE_VERSION_MIN:
            raise ClientProtocolError(f"Produce v{version} is older than record batches; use v3 or newer")
        peek = peek_produce(head, length)
        if peek is None:
            if len(head) < min(_PEEK_BYTES_MAX, length):
                return False
            return self._collect(length, now)
        services = self._services
        if peek.acks == 0 and not services.fresh(now):
            # Its client cannot be told to try again. It waits, as it would for a broker that does not read.
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
        """A request that was collected whole, or a token of a login."""
        if self._tokens is not None:
            self._token(self._tokens, frame)
            return
        api_key, version, correlation_id = REQUEST_PREFIX.unpack_from(frame)
        if api_key == PRODUCE:
            if not self._single(frame, now):
                self._produce(frame, now)
        elif APIS[api_key].handling is Handling.ALONE:
            self._login_request(api_key, version, correlation_id, frame)
        else:
            self._control_message(api_key, version, correlation_id, frame)

    # ---- from upstream

    def _upstream_is_blocked(self) -> bool:
        """The next answer follows another one, one before it is still worked on, or the quota is used up."""
        if self._finishing:
            return True
        if not self._from_upstream:
            return False
        response_slot = self._from_upstream[0]
        if response_slot.answer is Answer.MADE_FROM_RESPONSE:
            return self._quota <= 0 and not response_slot.inner
        return (
            response_slot.answer is Answer.RELAYED and bool(self._to_client) and self._to_client[0] is not response_slot
        )

    def _overtaken(self, response_slot: PendingResponse, length: int) -> bool:
        """Whether an answer that has to wait for the front one is held here, in memory, instead of in the socket.

        It must be where the front one's answer comes behind it: a guarded append that was refused by its stamp and sent
        once more, say. Or where a gate waits for an answer behind it. False also if there is no memory for it now: then
        the front one ends by its time limit.
        """
        a_sequencer_waits = any(each.inner or each.single is not None for each in self._from_upstream)
        if not a_sequencer_waits or not self._services.reserve(length):
            return False
        response_slot.reserved_bytes += length
        return True

    def _pump_upstream(self, now: float) -> None:
        cutter = self._upstream
        while True:
            if cutter.state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._client_out.append(view)
                self._frame_passes_down()
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
                response_slot = self._expected_response(view)
                blocked = self._upstream_is_blocked()
                if self._finishing:
                    self._pause_upstream()
                    break
                if response_slot.answer is not Answer.RELAYED and not blocked:
                    if length > self._services.frame_bytes_max:
                        raise UpstreamProtocolError(
                            f"an answer of {length} bytes to {api_name(response_slot.api_key)}, which is buffered: "
                            f"limits.frame_bytes_max is {self._services.frame_bytes_max}"
                        )
                    cutter.collect_frame(length)
                elif not blocked:
                    cutter.pass_frame(length)
                elif response_slot.answer is Answer.RELAYED and self._overtaken(response_slot, length):
                    cutter.collect_frame(length)
                else:
                    self._pause_upstream()
                    break
        cutter.save()

    def _pause_upstream(self) -> None:
        if not self._upstream_paused:
            self._upstream_paused = True
            self._commands.append(ReadUpstream(False))

    def _frame_passes_down(self) -> None:
        if not self._upstream.passing_bytes:
            self._services.answered(0.0)
            self._end(self._from_upstream.pop(0), [])

    def _expected_response(self, head: memoryview) -> PendingResponse:
        (correlation_id,) = INT32.unpack_from(head)
        if not self._from_upstream:
            raise UpstreamProtocolError(f"an answer with correlation id {correlation_id}, and nothing was asked")
        response_slot = self._from_upstream[0]
        if response_slot.correlation_id != correlation_id:
            raise UpstreamProtocolError(
                f"an answer with correlation id {correlation_id} where {response_slot.correlation_id} "
                f"({api_name(response_slot.api_key)}) comes next"
            )
        return response_slot

    def _collected(self, frame: memoryview, now: float) -> None:
        if self._from_upstream[0].answer is Answer.SINGLE:
            self._collected_single(frame, now)
            return
        response_slot = self._from_upstream.pop(0)
        if not response_slot.inner:
            response_slot.answered_at = now
        if response_slot.answer is Answer.MADE_FROM_RESPONSE:
            if not response_slot.inner:
                self._quota -= MESSAGE_WORK_BYTES + len(frame)
            on_response, response_slot.on_response = response_slot.on_response, None  # it refers back to the slot
            assert on_response is not None
            on_response(frame)
            self._answer_front()
        elif response_slot.answer is Answer.RELAYED_UNLESS_BROKERS:
            self._work(
                len(frame) > PRODUCED_HERE_BYTES_MAX,
                lambda: self._with_own_addresses(response_slot, frame),
                lambda chunks: self._end(response_slot, chunks),
            )
        else:
            self._end(response_slot, [INT32.pack(len(frame)), frame])

    def _collected_single(self, frame: memoryview, now: float) -> None:
        response_slot = self._from_upstream[0]
        answer = self._end_single(response_slot, frame, now)
        if answer is None:
            self._disable_fast_path()
            self._collected(frame, now)
        else:
            del self._from_upstream[0]
            response_slot.answered_at = now
            self._end(response_slot, [answer])

    def _with_own_addresses(self, response_slot: PendingResponse, frame: memoryview) -> list[bytes | memoryview]:
        """A Produce response, and no broker's own address in it."""
        response = parse_produce_response(frame, response_slot.version)
        if not response.node_endpoints:
            return [INT32.pack(len(frame)), frame]
        endpoints = tuple(self._services.endpoint(each, self.local_host) for each in response.node_endpoints)
        return [encode_produce_response(replace(response, node_endpoints=endpoints), response_slot.version)]

    # ---- ends

    def _tick(self, now: float) -> None:
        if now >= self._drain_until and not self.upstream_closed:
            self._commands.append(CloseUpstream())
            self._upstream_lost("the client is gone, and Kafka does not answer its last requests")
        if self._draining_until is not None:
            self._hurry(now)
        self._answer_unknown_outcomes(now)
        self._join_later(now)
        late = self._late_proof(now)
        if late is not None:
            self._close(f"Kafka did not say in time whether it may {late}", None)

    def _close(self, reason: str, fault: type[Exception] | None, *, hang_up: bool = False) -> None:
        if not self._closing:
            self._closing = True
            self._flush_client()
            self._commands.append(CloseClient(reason, fault, hang_up))
        if fault is not None and issubclass(fault, UpstreamProtocolError) and not self.upstream_closed:
            # Also where its client is being closed already: what was sent would wait for an answer for ever.
            self._upstream_lost(reason)
            self._commands.append(CloseUpstream())

    def _client_lost(self, now: float) -> None:
        self._disable_fast_path()
        self.client_closed = True
        self._drain_until = now + self._services.request_timeout_seconds
        self._return_exchanges()
        self._services.release(self._collecting_bytes)
        self._collecting_bytes = 0
        # Nobody is left to keep order for; what is under way is read on, to learn how the appends ended.
        for response_slot in self._to_client:
            self._services.release(response_slot.reserved_bytes)
            response_slot.reserved_bytes = 0
        self._to_client.clear()

    def _upstream_lost(self, reason: str) -> None:
        """Everything that was sent and not answered is in doubt from here on; the gates look into the log."""
        if self.upstream_closed:
            return
        if self._from_upstream:
            self._services.upstream_lost()
        self._disable_fast_path()
        self.upstream_closed = True
        # Its client's connection may take long to close. A grant that comes before would be taken for sent, and its
        # gate wait for ever.
        self._return_exchanges()
        for exchange in self._exchanges_in_flight.values():
            self._stop_waiting(exchange)
            self._let_go(exchange)
        self._leave_all_barriers()
        self._leave_commits()
        if self.appends_unknown:
            self._services.record_unanswered(self._now)
        for response_slot in (*self._to_client, *self._exchanges_in_flight):
            self._services.release(response_slot.reserved_bytes)
            response_slot.reserved_bytes = 0
        self._exchanges_in_flight.clear()
        self._answer_by.clear()
        self._leave_joins()
        self._from_upstream.clear()
        self._probes.clear()
        if not self._closing and not self.client_closed:
            self._close(reason, None)
