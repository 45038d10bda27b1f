"""One client connection and its upstream connection: which frames are streamed, which are read, and what answers them.

Sans-IO: events in, commands out (`messages.py`), no clock. A session owns its parts and calls them; none of them knows
the session, and each knows only those above it in this list:

    ConnectionState, ReadHolds       what all parts know; why nothing more is read
    ResponseQueue, FailedPipelines   requests in progress, answers in order; what fails because an earlier append did
    ThreadWork, Draining             work off the event loop; the end of a connection
    Proofs, Logins                   permissions of the client, checked with Kafka beforehand; its login
    CheckedAppends                   Produce requests with checked appends, and what a transaction adds and ends
    ControlMessages                  requests and responses that the proxy rewrites
    FastPath                         whole frames of the usual kind while nothing else is in progress
    RequestReader, ResponseReader    read the frames of each peer and pass them to these parts

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

from fencepost_proxy.errors import ClientProtocolError, ProtocolError, UpstreamProtocolError
from fencepost_proxy.sequencer.events import Answer, PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.core import Core
from fencepost_proxy.session.control.control_messages import ControlMessages
from fencepost_proxy.session.control.logins import Logins
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.frames.messages import (
    AbortOnlyRecorded,
    AppendsLate,
    BatchesRead,
    ClientBytes,
    ClientLost,
    ClientPassed,
    CloseUpstream,
    Command,
    CommitDecided,
    Drain,
    Event,
    Expanded,
    QuotaRenewed,
    ReadClient,
    ReadUpstream,
    Replied,
    Stored,
    Tick,
    TopicNews,
    UpstreamBytes,
    UpstreamLost,
    UpstreamPassed,
)
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.session.produce.begun import BegunAppends
from fencepost_proxy.session.produce.checked_appends import CheckedAppends
from fencepost_proxy.session.relay.fast_path import FastPath
from fencepost_proxy.session.request_reader import RequestReader
from fencepost_proxy.session.response_reader import ResponseReader
from fencepost_proxy.types import TopicPartition


class Session:
    """Bytes and events enter by `handle`, and by `take_up` and `take_down` of its `fast_path`.

    `local_host` – the address by which this client reached the proxy; the client gets it for broker listeners without
    a configured address. `opened_at` – when its upstream connection opened, monotonic seconds.
    """

    __slots__ = (
        "_appends",
        "_core",
        "_holds",
        "_lost_until",
        "_native",
        "_queue",
        "_requests",
        "_responses",
        "answer_by",
        "connection",
        "fast_path",
        "sent",
        "state",
    )

    def __init__(
        self,
        connection: int,
        local_host: str,
        services: Services,
        rewriters: RequestRewriters,
        opened_at: float,
    ) -> None:
        core = Core(connection, local_host, services, opened_at)
        self._core = core
        self.connection = connection
        self.state = core.state
        self._holds = core.holds
        self._queue = core.queue
        self._appends = CheckedAppends(core)
        self.fast_path = FastPath(core, self._appends)
        self._native = self.fast_path.native
        state, holds, queue, in_progress, threads = core.state, core.holds, core.queue, core.in_progress, core.threads
        self._requests = RequestReader(
            state,
            holds,
            queue,
            in_progress,
            core.draining,
            core.proofs,
            core.samples,
            services,
            ControlMessages(state, holds, queue, in_progress, threads, services, services, self._appends, rewriters),
            Logins(state, holds, queue, core.proofs),
            self._appends,
        )
        self._responses = ResponseReader(
            state, holds, queue, in_progress, threads, services, self._appends, self._native
        )
        # Only to read, and without what native code has sent: what Kafka will answer; when answers are due.
        self.sent = core.queue.from_upstream
        self.answer_by = core.queue.answer_by
        self._lost_until = float("inf")  # how long a lost client's appends are waited for

    # ---- for other modules

    @property
    def finished(self) -> bool:
        return self.state.client_closed and self.state.upstream_closed and not self._core.threads.answers

    @property
    def unanswered(self) -> list[int]:
        """The API keys of the requests whose client waits for an answer."""
        self._queue.take_over()
        return [pending_response.api_key for pending_response in self._queue.to_client]

    @property
    def unanswered_count(self) -> int:
        native = self._native.connection
        return len(self._queue.to_client) + (0 if native is None else len(native))

    @property
    def answers_are_due(self) -> bool:
        """At some time: a client waits for appends."""
        return bool(self.answer_by) or self._native.awaits_appends

    @property
    def needs_ticks(self) -> bool:
        produce = self._holds.waiting_produce
        if self.answers_are_due or self.state.client_closed or self._holds.waits_for:
            return True
        if produce is None:
            return self._holds.client_paused and not self.state.full
        return self.at_barrier or produce.is_muted or bool(produce.submission.admitted)

    @property
    def begun(self) -> BegunAppends:
        self._queue.take_over()
        return BegunAppends(self.state, self._holds, self._queue)

    @property
    def over_quota(self) -> bool:
        """It stopped reading because its quota is used up; `QuotaRenewed` resumes it."""
        holds = self._holds
        return (holds.client_paused or holds.upstream_paused) and holds.quota_is_used_up

    @property
    def waits_for(self) -> str | None:
        """What the client's current request waits for before it is sent; meanwhile no later one is read."""
        if self._holds.waiting_produce is None:
            return self._holds.waits_for or None
        return "an append barrier, or metadata" if self.at_barrier else "the sequencers of its partitions"

    @property
    def at_barrier(self) -> bool:
        """A request of it waits for an append barrier or for metadata."""
        return self._holds.waiting_produce is not None and self._appends.arrival.awaits_news

    @property
    def produce_requests(self) -> list[ProduceExchange]:
        """Produce requests with checked appends that wait, or are sent and not completely answered."""
        produce = self._holds.waiting_produce
        return [*(() if produce is None else (produce,)), *self._queue.in_flight]

    @property
    def entered_barriers(self) -> int:
        """Requests that have entered append barriers and not left them."""
        return len(self._appends.barriers.entered) if self._appends.made else 0

    @property
    def drained(self) -> bool:
        """Nothing is in progress: the connection can be closed without loss."""
        return (
            self._native.empty
            and not (self._queue.to_client or self._queue.from_upstream)
            and (self.state.client.between_frames)
        )

    # ---- events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Raises nothing: a peer that violates the protocol loses this connection, by a command."""
        return self._process(now, self._event, event, now)

    def append_admitted(self, pending: PendingAppend, now: float) -> list[Command]:
        """The sequencer admits the append."""
        self._queue.take_over()
        return self._process(now, self._appends.admission.admitted, pending, now)

    def append_completed(self, decision: Answer, now: float) -> list[Command]:
        """The sequencer's final result for an append, sent or not."""
        return self._process(now, self._appends.admission.completed, decision)

    def may_join(self, partition: TopicPartition, now: float) -> list[Command]:
        """The partition's sequencer permits what `Sequencers.join` requested."""
        return self._process(now, self._appends.joins.may_join, partition)

    def _process(self, now: float, process: Callable[..., None], *arguments: object) -> list[Command]:
        state = self.state
        state.now = now
        try:
            self._native.stop_reading()
            process(*arguments)
            self._resume(now)
        except ProtocolError as error:
            # Otherwise an answer may be processed in part only.
            of_request = self._requests.is_reading or isinstance(arguments[0], TopicNews | Tick)
            if not (isinstance(error, ClientProtocolError) and of_request and self._requests.drains(error, now)):
                self._queue.close(f"{error}", type(error))
            if isinstance(error, UpstreamProtocolError) and not state.upstream_closed:
                # Also while the client connection closes: what was sent would never be answered.
                self._upstream_lost(f"{error}")
                state.commands.append(CloseUpstream())
        if self._queue.upstream_out or self._queue.client_out:
            self._queue.flush()
        # Drop our reference: the relayed bytes must not stay in memory until the next event, maybe hours later.
        commands, state.commands = state.commands, []
        return commands

    def _event(self, event: Event, now: float) -> None:
        state = self.state
        native = self._native
        # What Kafka answers to Python's requests, and most ticks, leave those in native code where they are.
        if native.connection is not None and not (
            isinstance(event, UpstreamBytes | UpstreamPassed) or native.is_early_tick(event, now)
        ):
            collected = native.return_all()
            if collected:
                self._event(ClientBytes(memoryview(collected)), now)
        match event:
            case ClientBytes(data):
                self._holds.made_here = 0
                if not state.client_closed and not state.closing:
                    state.received_bytes += len(data)
                    state.client.feed(data)
                    self._requests.pump(now)
            case UpstreamBytes(data):
                state.upstream.feed(data)
                self._responses.pump(now)
            case ClientPassed(byte_count):
                state.received_bytes += byte_count
                state.client.passed(byte_count)
                if not state.client.passing_bytes:
                    self._requests.frame_relayed()
            case UpstreamPassed(byte_count):
                state.upstream.passed(byte_count)
                if not state.upstream.passing_bytes:
                    self._responses.frame_relayed()
            case BatchesRead(token):
                state.resume(token, None)
            case (
                Expanded(token, result)
                | Stored(token, result)
                | Replied(token, result)
                | CommitDecided(token, result)
                | AbortOnlyRecorded(token, result)
            ):
                state.resume(token, result)
            case ClientLost():
                self._client_lost(now)
            case UpstreamLost(reason):
                self._upstream_lost(reason)
            case AppendsLate(pending_appends):
                self._appends.completion.resolve_late(pending_appends)
            case TopicNews():
                self._appends.arrival.news()
            case Drain(until, because):
                self._core.draining.begin(until, because)
                self._tick(now)
            case QuotaRenewed():
                self._holds.renew_quota()
            case Tick():
                if self._holds.waiting_produce is not None:
                    self._appends.arrival.news()
                    self._appends.admission.send_ahead(now)
                    self._appends.admission.submit_muted()
                self._tick(now)

    def _resume(self, now: float) -> None:
        """Continue what an answer may have unblocked: the next answers, then the next requests."""
        state, holds = self.state, self._holds
        if holds.upstream_paused and not self._responses.is_blocked():
            holds.upstream_paused = False
            state.upstream.feed(memoryview(b""))
            self._responses.pump(now)
            if not holds.upstream_paused:
                state.commands.append(ReadUpstream(True))
        if holds.client_paused and not (
            state.closing or state.client_closed or holds.client_is_blocked(len(self._queue.to_client))
        ):
            holds.client_paused = False
            state.client.feed(memoryview(b""))
            self._requests.pump(now)
            if not holds.client_paused:
                state.commands.append(ReadClient(True))
        if holds.draining_until is not None:
            self._queue.take_over()
            if self._core.draining.may_close(now):
                self._queue.close(holds.draining_because, holds.draining_fault, hang_up=True)
        if state.client_closed and not (
            state.upstream_closed
            or self._queue.in_flight
            or holds.waiting_produce
            or holds.silent_waits
            or self._core.threads.answers
        ):
            self._leave_all()
            state.commands.append(CloseUpstream())
            state.upstream_closed = True

    def _tick(self, now: float) -> None:
        if now >= self._lost_until and not self.state.upstream_closed:
            self.state.commands.append(CloseUpstream())
            self._upstream_lost("the client disconnected, and Kafka did not answer its last requests in time")
        if self._appends.made:
            self._appends.admission.answer_before_close(now)
            self._appends.completion.answer_unknown_outcomes(now)
        self._core.in_progress.end_late(now)

    # ---- ends

    def _client_lost(self, now: float) -> None:
        """Keep reading from upstream to learn the outcomes of the appends in flight. A waiting request with acks=0 is
        still sent, as a broker handles what it received before a connection ended."""
        self.state.client_closed = True
        self._lost_until = now + self.state.services.request_timeout_seconds
        if self._appends.made and not self._holds.silent_waits:
            self._appends.admission.cancel_waiting()
        self._queue.client_lost()

    def _upstream_lost(self, reason: str) -> None:
        """Everything sent and unanswered is in doubt from here on; the sequencers read the log."""
        state = self.state
        if state.upstream_closed:
            return
        self._queue.take_over()
        if self._queue.from_upstream:
            self.state.services.upstream_lost()
        state.upstream_closed = True
        if self._appends.made:
            # The client's connection may take long to close. An append admitted meanwhile would count as sent, and its
            # sequencer would wait indefinitely.
            self._appends.admission.cancel_waiting()
            for produce in self._queue.in_flight:
                self._appends.completion.stop_waiting(produce)
                self._appends.transactions.end_appends(produce)
        self._leave_all()
        self._queue.upstream_lost()
        if not state.client_closed:
            self._queue.close(reason)

    def _leave_all(self) -> None:
        """Kafka will answer nothing more of what it got."""
        self._holds.waits_for = ""
        if self._appends.made:
            self._appends.barriers.leave_all()
        self._core.in_progress.end()
        if self.begun.appends_unknown:
            self.state.services.record_unanswered(self.state.now)
