"""Reads what the client sends: streams requests to the broker, or collects them for the part that processes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fencepost_proxy.errors import ClientProtocolError
from fencepost_proxy.session.connection.draining import Draining
from fencepost_proxy.session.connection.in_progress import InProgress
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue, relayed
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.connection.unchecked import UncheckedSamples
from fencepost_proxy.session.control.control_messages import ControlMessages
from fencepost_proxy.session.control.logins import LOGIN_BYTES_MAX, Logins
from fencepost_proxy.session.frames.cutter import REQUEST_PREFIX, CutterState
from fencepost_proxy.session.frames.pending_responses import PendingResponse
from fencepost_proxy.session.frames.producer_ids import STREAMED_PARTITIONS_MAX, ProducerIdWatch
from fencepost_proxy.session.frames.request_template import template_of
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.session.produce.checked_appends import CheckedAppends
from fencepost_proxy.wire.apis import API_VERSIONS, APIS, END_TXN, PRODUCE, UNKNOWN_VERSION, Handling, api_name
from fencepost_proxy.wire.peeks import UNREADABLE, partitions_of
from fencepost_proxy.wire.produce import FLEXIBLE, ProducePeek, peek_produce

#: Produce requests below it carry no v2 record batches, and brokers since 4.0 refuse them.
_PRODUCE_VERSION_MIN = 3
#: If the Produce header is longer, the request is collected whole.
_PEEK_BYTES_MAX = 4096
#: Control messages up to this size are not charged to the memory budget.
_SMALL_FRAME_BYTES = 16 * 1024


@dataclass(slots=True, eq=False)
class RequestReader:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _in_progress: InProgress
    _draining: Draining
    _proofs: Proofs
    _samples: UncheckedSamples
    _services: Services
    _control: ControlMessages
    _logins: Logins
    _appends: CheckedAppends
    is_reading: bool = False

    def drains(self, failure: ClientProtocolError, now: float) -> bool:
        """Whether the connection ends later: a broker, too, answers earlier requests before it closes one."""
        was_reading, self.is_reading = self.is_reading, False
        if self._state.streams_up:
            return False  # Kafka has a part of that request, and answers nothing more
        self._queue.take_over()
        self._state.client.save()
        if not was_reading:
            self._appends.admission.drop_waiting()  # it has failed itself
        if self._draining.nothing_under_way():
            return False
        self._draining.begin(now + self._services.request_timeout_seconds, f"{failure}", type(failure))
        self._holds.pause_client()
        return True

    def pump(self, now: float) -> None:
        self.is_reading = True
        cutter = self._state.client
        while not self._state.closing:
            state = cutter.state
            if state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._queue.upstream_out.append(view)
                if cutter.state is CutterState.START:
                    self.frame_relayed()
            elif state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                self._request(frame, now)
            elif state is CutterState.TOKEN:
                token_bytes = cutter.token_length(LOGIN_BYTES_MAX)
                if token_bytes is None:
                    break
                if self._holds.client_is_blocked(len(self._queue.to_client)):
                    self._holds.pause_client()
                    break
                if not self._collect(token_bytes, now, charged=token_bytes > _SMALL_FRAME_BYTES):
                    break
            else:
                head = cutter.head()
                if head is None:
                    break
                if self._holds.client_is_blocked(len(self._queue.to_client)):
                    # Pause only with a next request at hand: most clients wait for their answer anyway.
                    self._holds.pause_client()
                    break
                if not self._start_request(head[0], head[1], now):
                    break
                api_key, version, _ = REQUEST_PREFIX.unpack_from(head[1])
                # Only ApiVersions is answered for unknown versions.
                known = api_key != API_VERSIONS or APIS[API_VERSIONS].serves(version)
                self._services.count_request(api_key, version if known else UNKNOWN_VERSION)
        cutter.save()
        self.is_reading = False

    def frame_relayed(self) -> None:
        self._services.forwarded(0.0)
        self._queue.send_waiting()

    def _start_request(self, length: int, head: memoryview, now: float) -> bool:
        """Decide about the frame that begins here; False if that needs more bytes, or memory that is not free."""
        api_key, version, correlation_id = REQUEST_PREFIX.unpack_from(head)
        relayed_versions = self._services.relayed_versions.get(api_key)
        if (
            relayed_versions is not None
            and not relayed_versions[2]
            and relayed_versions[0] <= version <= relayed_versions[1]
        ):
            self._relay(relayed(api_key, version, correlation_id), length)
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
            if now >= self._state.login_ends:
                return self._end_with_its_login()
            return self._start_produce(length, head, version, correlation_id, now)
        # Small frames are freed by this call or the next, and must pass while other connections use up the budget.
        return self._collect(length, now, charged=length > _SMALL_FRAME_BYTES)

    def _relay(self, pending_response: PendingResponse, length: int, watch: ProducerIdWatch | None = None) -> None:
        self._state.client.pass_frame(length, watch)
        self._queue.relay(pending_response)

    def _start_login(self, length: int, now: float) -> bool:
        """Wait until nothing is in progress: Kafka closes a connection that sends anything else during a login.

        That includes the proxy's resends. While the client sends only login frames, the proxy sends nothing else.
        """
        if length > LOGIN_BYTES_MAX:
            raise ClientProtocolError(f"a login of {length} bytes: at most {LOGIN_BYTES_MAX} are accepted")
        if not self._draining.nothing_under_way():
            self._holds.pause_client()
            return False
        return self._collect(length, now, charged=length > _SMALL_FRAME_BYTES)

    def _end_with_its_login(self) -> bool:
        """As Kafka does, once all earlier requests are answered: a later append would have an unknown outcome."""
        if self._draining.nothing_under_way():
            self._queue.close("the client's login expired and was not renewed", hang_up=True)
        else:
            self._holds.pause_client()
        return False

    def _collect(self, length: int, now: float, *, charged: bool = True) -> bool:
        if charged:
            if not self._services.reserve(length):
                self._holds.pause_client()
                return False
            self._state.collecting_bytes = length
        self._state.collecting_started = now
        self._state.client.collect_frame(length)
        return True

    def _start_produce(self, length: int, head: memoryview, version: int, correlation_id: int, now: float) -> bool:
        """Stream a Produce request without checked topics; its first bytes show its topics."""
        if version < _PRODUCE_VERSION_MIN:
            raise ClientProtocolError(f"Produce v{version} is older than record batches; use v3 or newer")
        known = self._state.template
        is_known = known.starts(version, head)
        peek = known.peek if is_known else peek_produce(head, length)
        if peek is None:
            if len(head) < min(_PEEK_BYTES_MAX, length):
                return False
            return self._collect(length, now)
        services = self._services
        if peek.first_id is not None and not is_known:
            peek = replace(peek, first_topic=services.topic_names.get(peek.first_id, ""))
        is_named = peek.first_id is None or peek.first_topic != ""
        if peek.acks == 0 and not services.fresh(now):
            # acks=0: the client cannot receive a retriable error. It waits, as for a broker that does not read.
            self._holds.pause_client()
            return False
        streamed = (
            services.fresh(now)
            and peek.topic_count == 1
            and is_named
            and peek.first_topic != services.state_topic
            and services.policy(peek.first_topic) is None
        )
        if not streamed:
            if self._queue.others_are_open:
                self._holds.pause_client()
                return False
            if (
                peek.topic_count == 1
                and is_named
                and peek.acks != 0
                and peek.transactional_id is None
                and peek.first_topic != services.state_topic
                and (peek.first_topic in self._proofs.may_write or not services.clients_log_in)
            ):
                self._record_known(version, head, peek, is_checked=True)
            return self._collect(length, now)
        flexible = version >= FLEXIBLE
        try:
            count, first_at = partitions_of(head, peek.end, flexible=flexible)
        except UNREADABLE:
            if len(head) < min(peek.end + 5, length):
                return False
            count, first_at = 0, length
        if count > STREAMED_PARTITIONS_MAX:
            return self._collect(length, now)
        self._samples.read_start(peek.first_topic, head, first_at, flexible=flexible)
        watch = ProducerIdWatch(first_at, count, services.shared_producer_ids, flexible=flexible)
        if peek.acks == 0:
            services.record_unanswered(now)
            self._state.client.pass_frame(length, watch)
            self._state.silent_to = self._state.read_bytes + self._state.client.passing_bytes
        else:
            self._relay(relayed(PRODUCE, version, correlation_id), length, watch)
            self._record_known(version, head, peek, is_checked=False)
        return True

    def _record_known(self, version: int, head: memoryview, peek: ProducePeek, *, is_checked: bool) -> None:
        known = self._state.template
        if peek is not known.peek or is_checked is not known.is_checked:
            template = template_of(version, bytes(head[:_PEEK_BYTES_MAX]), peek, is_checked=is_checked)
            self._state.template = template or known

    def _request(self, frame: memoryview, now: float) -> None:
        """A whole request, or a login token."""
        self._holds.silent = False
        if self._logins.tokens is not None:
            self._logins.token(self._logins.tokens, frame)
            return
        api_key, version, correlation_id = REQUEST_PREFIX.unpack_from(frame)
        if api_key == PRODUCE:
            self._in_progress.begin(self._appends.arrival.produce(frame))
        elif APIS[api_key].handling is Handling.ALONE:
            self._logins.request(api_key, version, correlation_id, frame)
        elif api_key == END_TXN:
            self._in_progress.begin(self._appends.commits.end(version, correlation_id, frame))
        else:
            self._in_progress.begin(self._control.serve(api_key, version, correlation_id, frame))
