"""The fast path: whole frames that are relayed, while nothing else is in progress.

Such frames are processed directly from the received bytes, and the bytes to write are returned: no events, no commands.
The same applies to their answers. Native code, if it is there, does the same, and sends the appends that permits allow
(`native_path.py`). Everything else is left to `Session.handle`, byte for byte; both paths have the same results
(`tests/unit/test_fast_path.py`).

The start of the last Produce request shows how to read the next one without a parser: same start, same topic
(`RequestTemplate`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from fencepost_proxy.session.connection.core import Core
from fencepost_proxy.session.connection.response_queue import relayed
from fencepost_proxy.session.frames.cutter import LENGTH_BYTES, REQUEST_BYTES_MIN, RESPONSE_BYTES_MIN
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.produce.checked_appends import CheckedAppends
from fencepost_proxy.session.relay.native_path import NativePath
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.node_endpoints import names_no_node
from fencepost_proxy.wire.peeks import is_free_of, names_no_broker
from fencepost_proxy.wire.throttle import NOT_THROTTLED, THROTTLED_AT, produce_throttle

if TYPE_CHECKING:
    from fencepost_native import Pumped

_FRAME_PREFIX = struct.Struct(">ihhi")
_RESPONSE_PREFIX = struct.Struct(">ii")


class FastPath:
    __slots__ = ("_from_upstream", "_holds", "_pipelines", "_services", "_state", "_to_client", "native")

    def __init__(self, core: Core, appends: CheckedAppends) -> None:
        self._holds = core.holds
        self._pipelines = core.pipelines
        self._state = core.state
        self._services = core.state.services
        self._to_client = core.queue.to_client
        self._from_upstream = core.queue.from_upstream
        self.native = NativePath(core, appends)

    def _may_take_up(self, now: float) -> bool:
        state, holds = self._state, self._holds
        if holds.throttling.watched_until and holds.throttling.is_watched(now):
            return False
        if holds.waiting_produce is not None or holds.client_paused or holds.waits_for or holds.quota <= 0:
            return False
        if state.closing or state.client_closed or state.upstream_closed or state.full:
            return False
        return state.client.between_frames

    def _may_take_down(self) -> bool:
        state, holds = self._state, self._holds
        if holds.client_paused or holds.upstream_paused or state.closing or state.client_closed:
            return False
        return state.upstream.between_frames

    @property
    def may_start_reading(self) -> bool:
        """Whether both directions need nothing of Python until something unusual arrives."""
        if self._to_client or self._from_upstream or self._pipelines.failed or self._holds.throttling.watched_until:
            return False
        return self.native.connection is not None and self._may_take_up(0.0) and self._may_take_down()

    @property
    def awaits_append(self) -> bool:
        """Kafka's next response concerns checked appends, which those of others may wait for.

        No long response precedes the ones in native code: they are sent when nothing but Produce is unanswered.
        """
        if not self._from_upstream:
            return self.native.awaits_appends
        return self._from_upstream[0].inner

    @property
    def collecting_since(self) -> float | None:
        """Since when a frame that is collected is incomplete."""
        return self.native.collecting_since or self._state.collecting_since

    @property
    def client_is_paused(self) -> bool:
        """By the session."""
        return self._holds.client_paused

    def start_reading(self, client_fd: int, upstream_fd: int) -> None:
        native = self.native
        assert native.connection is not None
        native.prepare()
        native.connection.start_reading(client_fd, upstream_fd, self._state.login_ends, self._state.received_bytes)

    def pump_up(self, client_fd: int, upstream_fd: int, limit: int, now: float) -> Pumped | None:
        """Receive from the client, and send to the broker what needs no decision. None: not possible now."""
        native = self.native
        if native.connection is None or self._pipelines.failed or now >= self._state.login_ends:
            return None
        if not self._may_take_up(now):
            return None
        native.prepare()
        pumped = native.connection.pump_up(
            client_fd, upstream_fd, limit, (now, len(self._to_client), self._state.received_bytes)
        )
        if pumped[1]:
            self._state.received_bytes += pumped[1]
        return pumped

    def pump_down(self, upstream_fd: int, client_fd: int, limit: int, now: float) -> Pumped | None:
        """The same for responses."""
        connection = self.native.connection
        if connection is None or self._to_client or self._from_upstream or not self._may_take_down():
            return None
        return connection.pump_down(upstream_fd, client_fd, limit, now)

    def _take_up_natively(self, data: memoryview, now: float, out: list[bytes | memoryview]) -> tuple[int, int]:
        """How many bytes are done with, and where the part for `take_up` ends."""
        native = self.native
        if self._pipelines.failed or now >= self._state.login_ends:
            return 0, len(data) if native.empty else 0
        native.prepare()
        taken, made = native.take_up(bytes(data), now)
        if made:
            out.append(made)
        return taken, len(data) if native.empty else taken

    def take_up(self, data: memoryview, now: float) -> tuple[int, list[bytes | memoryview]]:
        """How many of the client's bytes are done with this call, and the bytes to write to the broker for them now.

        They are whole requests that need no decoding. The rest is for `handle(ClientBytes(rest))`. The bytes returned
        may be views into `data`.
        """
        out: list[bytes | memoryview] = []
        if not self._may_take_up(now):
            return 0, out
        state, services, size = self._state, self._services, len(data)
        to_client, from_upstream = self._to_client, self._from_upstream
        at = passing_from = 0
        if self.native.connection is not None:
            at, size = self._take_up_natively(data, now, out)
            passing_from = at
        received = state.received_bytes - at
        while size - at >= LENGTH_BYTES + REQUEST_BYTES_MIN:
            length, api_key, version, correlation_id = _FRAME_PREFIX.unpack_from(data, at)
            end = at + LENGTH_BYTES + length
            if length < REQUEST_BYTES_MIN or end > size or length > services.frame_bytes_max:
                break
            if len(to_client) >= services.in_flight_requests_max:
                break
            relayed_versions = services.relayed_versions.get(api_key)
            if relayed_versions is not None:
                if not relayed_versions[0] <= version <= relayed_versions[1]:
                    break
                if relayed_versions[2] and self._concerns_state_topic(data[at:end]):
                    break
                pending_response = relayed(api_key, version, correlation_id)
            elif api_key == PRODUCE and services.fresh(now) and self._may_relay_appends(data[at:end], version):
                pending_response = relayed(PRODUCE, version, correlation_id)
            else:
                break
            to_client.append(pending_response)
            from_upstream.append(pending_response)
            services.count_request(api_key, version)
            at = end
        if passing_from < at:
            out.append(data[passing_from:at])
        if at:
            state.received_bytes = received + at
        return at, out

    def take_down(self, data: memoryview, now: float) -> tuple[int, list[bytes | memoryview]]:
        """How many of the broker's bytes are done with this call, and the bytes to write to the client for them now.

        The rest is for `handle(UpstreamBytes(rest))`. The bytes returned may be views into `data`.
        """
        out: list[bytes | memoryview] = []
        if not self._may_take_down():
            return 0, out
        size, to_client, from_upstream = len(data), self._to_client, self._from_upstream
        at = passing_from = 0
        while size - at >= LENGTH_BYTES + RESPONSE_BYTES_MIN and to_client and from_upstream:
            pending_response = from_upstream[0]
            length, correlation_id = _RESPONSE_PREFIX.unpack_from(data, at)
            end = at + LENGTH_BYTES + length
            if end > size or length < RESPONSE_BYTES_MIN or correlation_id != pending_response.correlation_id:
                break
            if pending_response is not to_client[0] or (len(to_client) > 1 and to_client[1].done):
                break
            throttled_at = THROTTLED_AT[pending_response.api_key][pending_response.version]
            if throttled_at and data[at + throttled_at : at + throttled_at + 4] != NOT_THROTTLED:
                break
            if pending_response.reserved_bytes or (
                pending_response.answer is not Answer.RELAYED and not _is_relayed(pending_response, data[at:end])
            ):
                break
            del to_client[0], from_upstream[0]
            at = end
        if passing_from < at:
            out.append(data[passing_from:at])
        native = self.native.connection
        if native is not None and at < size and not to_client and not from_upstream:
            taken, made = native.take_down(bytes(data[at:]), now)
            at += taken
            if made:
                out.append(made)
        return at, out

    def _may_relay_appends(self, frame: memoryview, version: int) -> bool:
        """Of a Produce request, with its length: it starts as the last one that was read, to a topic without checks."""
        template = self._state.template
        start = LENGTH_BYTES + REQUEST_BYTES_MIN
        topic_end = start + len(template.prefix)
        if template.is_checked or version != template.version or frame[start:topic_end] != template.prefix:
            return False
        if not is_free_of(frame, topic_end, version, self._services.shared_producer_ids):
            return False
        return self._services.policy(template.topic_name) is None

    def _concerns_state_topic(self, frame: memoryview) -> bool:
        data = bytes(frame)
        return any(mark in data for mark in self._services.state_topic_marks)


def _is_relayed(pending_response: PendingResponse, frame: memoryview) -> bool:
    """Whether a response, with its length, names no broker, nor a throttle time at its end."""
    answer = pending_response.answer
    if answer is Answer.RELAYED_UNLESS_BROKERS:
        version = pending_response.version
        return produce_throttle(frame, version) == NOT_THROTTLED and names_no_broker(frame, version)
    if answer is Answer.RELAYED_UNTIL_BROKERS:
        return names_no_node(frame[LENGTH_BYTES:], pending_response.api_key, pending_response.version)
    return False
