"""Reads what the broker sends: streams answers to the client, or collects them for what made the request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fencepost_proxy.errors import UpstreamProtocolError
from fencepost_proxy.session.connection.in_progress import InProgress
from fencepost_proxy.session.connection.read_holds import MESSAGE_WORK_BYTES, ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.connection.threads import ThreadWork
from fencepost_proxy.session.frames.cutter import INT32, CutterState
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.session.frames.steps import Steps
from fencepost_proxy.session.produce.checked_appends import CheckedAppends
from fencepost_proxy.session.relay.native_path import NativePath
from fencepost_proxy.wire.apis import PRODUCE, api_name
from fencepost_proxy.wire.node_endpoints import EndpointWalk, names_no_node, rewritten
from fencepost_proxy.wire.produce import NodeEndpoint, encode_produce_response, parse_produce_response
from fencepost_proxy.wire.throttle import HEAD_BYTES, is_at_end, throttle_ms

PRODUCED_HERE_BYTES_MAX = 1 << 16


@dataclass(slots=True, eq=False)
class ResponseReader:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _in_progress: InProgress
    _threads: ThreadWork
    _services: Services
    _appends: CheckedAppends
    _native: NativePath

    def is_blocked(self) -> bool:
        """The next answer must wait: for an earlier one, for one that a thread works on, or for the quota."""
        if self._threads.answers:
            return True
        if not self._queue.from_upstream:
            return False
        pending_response = self._queue.from_upstream[0]
        if pending_response.answer is Answer.MADE_FROM_RESPONSE:
            return self._holds.quota <= 0 and not pending_response.inner
        return (
            _is_streamed(pending_response)
            and bool(self._queue.to_client)
            and self._queue.to_client[0] is not pending_response
        )

    def _overtaken(self, pending_response: PendingResponse, length: int) -> bool:
        """Whether to buffer in memory, not in the socket, an answer that must wait for the front one.

        Needed if a partition sequencer waits for a later answer. Example: a checked append was refused because of its
        fence and resent, so the front request's answer comes later. False also if memory is short: then the front
        request ends by its time limit.

        Not while a thread works: the client may be lost, and then nothing would release the reserved memory.
        """
        a_sequencer_waits = self._native.awaits_appends or any(each.inner for each in self._queue.from_upstream)
        if self._threads.answers or not a_sequencer_waits or not self._services.reserve(length):
            return False
        pending_response.reserved_bytes += length
        return True

    def pump(self, now: float) -> None:
        cutter = self._state.upstream
        while True:
            state = cutter.state
            if state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._queue.client_out.append(view)
                if cutter.state is CutterState.START:
                    self.frame_relayed()
            elif state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                self._collected(frame, now)
            elif not self._queue.from_upstream and self._native.waiting and cutter.unread_bytes:
                self._read_natively(now)
            else:
                head = cutter.head()
                if head is None:
                    break
                length, view = head
                pending_response = self._expected_response(view)
                relayed = _is_streamed(pending_response)
                if relayed and len(view) < min(length, HEAD_BYTES):
                    break
                if self.is_blocked():
                    if not (relayed and self._overtaken(pending_response, length)):
                        self._holds.pause_upstream()
                        break
                    cutter.collect_frame(length)
                elif relayed:
                    self._relay(pending_response, length, view)
                elif length > self._services.frame_bytes_max:
                    raise UpstreamProtocolError(
                        f"an answer of {length} bytes to {api_name(pending_response.api_key)}, which is buffered: "
                        f"limits.frame_bytes_max is {self._services.frame_bytes_max}"
                    )
                else:
                    cutter.collect_frame(length)
        cutter.save()

    def _read_natively(self, now: float) -> None:
        """The next response is to a request that native code has sent."""
        state, made = self._state, None
        if not (self._queue.to_client or state.closing or state.client_closed):
            made = self._native.read_responses(state.upstream, now)
        if made is None:
            self._queue.take_over()
        elif made:
            self._queue.client_out.append(made)

    def _relay(self, pending_response: PendingResponse, length: int, view: memoryview) -> None:
        cutter, api_key, version = self._state.upstream, pending_response.api_key, pending_response.version
        if is_at_end(api_key, version) and length <= PRODUCED_HERE_BYTES_MAX:
            cutter.collect_frame(length)
            return
        if pending_response.answer is Answer.RELAYED:
            cutter.pass_frame(length)
        elif len(view) < length:
            cutter.pass_frame(length, EndpointWalk(api_key, version, length, self._readdress))
        elif names_no_node(view, api_key, version):
            cutter.pass_frame(length)
        else:
            cutter.collect_frame(length)
            return
        self._holds.throttling.throttled(throttle_ms(view, api_key, version))

    def _readdress(self, endpoint: NodeEndpoint) -> NodeEndpoint:
        return self._services.endpoint(endpoint, self._state.local_host)

    def frame_relayed(self) -> None:
        self._services.answered(0.0)
        self._queue.end(self._queue.from_upstream.pop(0), [])

    def _expected_response(self, head: memoryview) -> PendingResponse:
        (correlation_id,) = INT32.unpack_from(head)
        if not self._queue.from_upstream:
            raise UpstreamProtocolError(f"an answer with correlation id {correlation_id}, but no request is open")
        pending_response = self._queue.from_upstream[0]
        if pending_response.correlation_id != correlation_id:
            raise UpstreamProtocolError(
                f"an answer with correlation id {correlation_id} where {pending_response.correlation_id} "
                f"({api_name(pending_response.api_key)}) comes next"
            )
        return pending_response

    def _collected(self, frame: memoryview, now: float) -> None:
        pending_response = self._queue.from_upstream.pop(0)
        on_response, pending_response.on_response = pending_response.on_response, None  # break the reference cycle
        if on_response is not None and pending_response.api_key == PRODUCE:
            response = parse_produce_response(frame, pending_response.version)
            self._holds.throttling.throttled(response.throttle_time_ms)
            on_response(response)
            self._appends.arrival.earlier_answered()
            return
        self._holds.throttling.throttled(throttle_ms(frame, pending_response.api_key, pending_response.version))
        if not pending_response.inner:
            pending_response.answered_at = now
        if pending_response.answer is Answer.MADE_FROM_RESPONSE:
            if not pending_response.inner:
                self._holds.quota -= MESSAGE_WORK_BYTES + len(frame)
            assert on_response is not None
            on_response(frame)
        elif pending_response.answer in (Answer.RELAYED_UNLESS_BROKERS, Answer.RELAYED_UNTIL_BROKERS):
            self._in_progress.begin(self._end_with_own_addresses(pending_response, frame))
        else:
            self._queue.end(pending_response, [INT32.pack(len(frame)), frame])

    def _end_with_own_addresses(self, pending_response: PendingResponse, frame: memoryview) -> Steps[None]:
        large = len(frame) > PRODUCED_HERE_BYTES_MAX
        chunks = yield from self._threads.answer(large, lambda: self._with_own_addresses(pending_response, frame))
        self._queue.end(pending_response, chunks)

    def _with_own_addresses(self, pending_response: PendingResponse, frame: memoryview) -> list[bytes | memoryview]:
        """A response with broker addresses rewritten for clients."""
        if pending_response.api_key != PRODUCE:
            parts = rewritten(frame, pending_response.api_key, pending_response.version, self._readdress)
            return [INT32.pack(sum(map(len, parts))), *parts]
        response = parse_produce_response(frame, pending_response.version)
        if not response.node_endpoints:
            return [INT32.pack(len(frame)), frame]
        endpoints = tuple(self._readdress(each) for each in response.node_endpoints)
        return [encode_produce_response(replace(response, node_endpoints=endpoints), pending_response.version)]


def _is_streamed(pending_response: PendingResponse) -> bool:
    return pending_response.answer is Answer.RELAYED or pending_response.answer is Answer.RELAYED_UNTIL_BROKERS
