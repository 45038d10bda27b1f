"""Requests in progress, in two queues (`pending_responses.py`), and how their answers leave in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import CloseClient, ToClient, ToUpstream
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse, inner_response
from fencepost_proxy.session.frames.services import Memory, Observation
from fencepost_proxy.session.frames.steps import Resume, Wait
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.node_endpoints import ENDPOINTS_FROM

#: APIs whose responses may name brokers' addresses, from a version on. The end of every Produce response is read.
_NAME_BROKERS = {
    PRODUCE: (0, Answer.RELAYED_UNLESS_BROKERS),
    **{api_key: (version, Answer.RELAYED_UNTIL_BROKERS) for api_key, version in ENDPOINTS_FROM.items()},
}


@dataclass(slots=True, eq=False)
class ResponseQueue:
    """- `to_client`, `from_upstream` – the queues.
    - `in_flight` – Produce requests with checked appends that are sent and not completely answered, but for those in
      native code. `answer_by` – when the client must have an answer.
    - `client_out`, `upstream_out` – bytes to write at the end of the event.
    - `take_over` – adds the requests that native code has sent. They come after those here, and before any other.
    """

    _state: ConnectionState
    _pipelines: FailedPipelines
    _observation: Observation
    _memory: Memory
    to_client: list[PendingResponse] = field(default_factory=list)  # lists: short ones; an empty deque takes 760 bytes
    from_upstream: list[PendingResponse] = field(default_factory=list)
    in_flight: dict[ProduceExchange, None] = field(default_factory=dict)
    answer_by: dict[ProduceExchange, float] = field(default_factory=dict)
    client_out: list[bytes | memoryview] = field(default_factory=list)
    upstream_out: list[bytes | memoryview] = field(default_factory=list)
    _probes: list[tuple[PendingResponse, list[bytes | memoryview]]] = field(default_factory=list)
    take_over: Callable[[], None] = lambda: None  # without native code

    @property
    def empty(self) -> bool:
        return not (self.to_client or self.from_upstream or self.in_flight or self._probes)

    @property
    def others_are_open(self) -> bool:
        """A request other than Produce is not answered. Kafka handles the client's next append after it, and the client
        may choose its time (Fetch, JoinGroup): until then that append would block its partition."""
        return bool(self.to_client) and any(each.api_key != PRODUCE for each in self.to_client)

    # ---- requests

    def expect(self, pending_response: PendingResponse, *, silent: bool = False) -> None:
        """The client waits for this answer, if its request is not `silent`. The memory reserved for its request is
        released with it."""
        pending_response.reserved_bytes, self._state.collecting_bytes = self._state.collecting_bytes, 0
        if not silent:
            self.take_over()
            self.to_client.append(pending_response)

    def relay(self, pending_response: PendingResponse) -> None:
        """The client waits for Kafka's response to its request, which is sent unchanged."""
        self.take_over()
        self.to_client.append(pending_response)
        self.from_upstream.append(pending_response)

    def send(self, pending_response: PendingResponse, *request: bytes | memoryview) -> None:
        self.take_over()
        self.from_upstream.append(pending_response)
        self.upstream_out += request

    def forward(self, pending_response: PendingResponse, request: bytes | memoryview) -> None:
        """The same, for a request of the client that did not wait."""
        self.send(pending_response, request)
        self._observation.forwarded(0.0)

    def request(self, pending_response: PendingResponse, request: bytes | memoryview) -> Wait:
        """Forward it, and wait for Kafka's response: the frame without its length."""

        def start(resume: Resume) -> None:
            pending_response.on_response = resume
            self.forward(pending_response, request)

        return Wait(start)

    def query(self, api_key: int, version: int, correlation_id: int, frame: bytes) -> Callable[[Resume], None]:
        """For `Wait.start`: send a request of the proxy. The result is Kafka's response, without its length."""
        return lambda resume: self.send(inner_response(api_key, version, correlation_id, resume), frame)

    def send_between_frames(self, pending_response: PendingResponse, chunks: list[bytes | memoryview]) -> None:
        """A request of the proxy. It waits while a client's frame is being streamed."""
        self._probes.append((pending_response, chunks))
        self.send_waiting()

    def send_waiting(self) -> None:
        if self._probes:
            self.take_over()
        while self._probes and not self._state.streams_up:
            upstream, chunks = self._probes.pop(0)
            self.send(upstream, *chunks)

    # ---- answers

    def end(self, pending_response: PendingResponse, chunks: list[bytes | memoryview]) -> None:
        pending_response.chunks = chunks
        pending_response.done = True
        self.answer_front()

    def answer_front(self) -> None:
        while self.to_client and self.to_client[0].done:
            pending_response = self.to_client.pop(0)
            self.release(pending_response)
            if pending_response.answered_at is not None:
                self._observation.answered(self._state.now - pending_response.answered_at)
            self.client_out += pending_response.chunks
            self._pipelines.may_know(pending_response.pipeline_keys)

    def release(self, pending_response: PendingResponse) -> None:
        self._memory.release(pending_response.reserved_bytes)
        pending_response.reserved_bytes = 0

    # ---- ends

    def client_lost(self) -> None:
        """No client needs the order any more."""
        self._state.release_collected()
        for pending_response in self.to_client:
            self.release(pending_response)
        self.to_client.clear()

    def upstream_lost(self) -> None:
        for pending_response in (*self.to_client, *(produce.pending_response for produce in self.in_flight)):
            self.release(pending_response)
        self.in_flight.clear()
        self.answer_by.clear()
        self.from_upstream.clear()
        self._probes.clear()

    def close(self, reason: str, fault: type[Exception] | None = None, *, hang_up: bool = False) -> None:
        """The client's connection ends, once what is written is sent."""
        if not self._state.closing:
            self._state.closing = True
            if self.client_out:
                self._flush_client()
            self._state.commands.append(CloseClient(reason, fault, hang_up))

    def flush(self) -> None:
        if self.upstream_out:
            if not self._state.upstream_closed:
                self._state.commands.append(ToUpstream(self.upstream_out))
            self.upstream_out = []
        if self.client_out:
            self._flush_client()

    def _flush_client(self) -> None:
        if not self._state.client_closed:
            self._state.commands.append(ToClient(self.client_out))
        self.client_out = []


def relayed_answer(api_key: int, version: int) -> Answer:
    """For a request relayed unchanged: the proxy rewrites only the addresses in its answer."""
    names_brokers = _NAME_BROKERS.get(api_key)
    return Answer.RELAYED if names_brokers is None or version < names_brokers[0] else names_brokers[1]


def relayed(api_key: int, version: int, correlation_id: int) -> PendingResponse:
    """Relayed: passed between client and broker without being decoded; at most brokers' addresses are replaced."""
    if api_key not in _NAME_BROKERS:
        return PendingResponse(api_key, version, correlation_id, Answer.RELAYED)
    return PendingResponse(api_key, version, correlation_id, relayed_answer(api_key, version))
