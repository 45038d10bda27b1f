"""The fast path: whole frames of the usual kind while nothing else is in progress.

Almost every request is only relayed, or appends a batch to each of some partitions of one checked topic, whose
sequencers can admit them at once. Such frames are processed directly from the received bytes, and the bytes to write
are returned: no events, no commands, no `ProduceExchange`. The same applies to their answers. Everything else is left
to `Session.handle`, byte for byte; both paths have the same results (`tests/unit/test_fast_path.py`).

The start of the last Produce request shows how to read the next one without a parser: same start, same topic
(`Known`). Checked appends sent in this way are kept as `Direct` in their pending response. If their answer is the
expected success, nothing else is needed. Otherwise, and before any event that concerns appends in flight,
`Completion.convert_direct` converts them to the `ProduceExchange`s that the general path would have made.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import LimitError
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session.appends import make_pending_append, sent_batch
from fencepost_proxy.session.checked_appends import CheckedAppends
from fencepost_proxy.session.core import Core
from fencepost_proxy.session.cutter import LENGTH_BYTES, REQUEST_BYTES_MIN, REQUEST_PREFIX, RESPONSE_BYTES_MIN
from fencepost_proxy.session.drafts import due_by
from fencepost_proxy.session.forwarding import PRODUCE_BY_ID
from fencepost_proxy.session.known import Known
from fencepost_proxy.session.native_path import NativePath
from fencepost_proxy.session.pending_responses import Answer, Direct, PendingResponse
from fencepost_proxy.session.reading import HERE_STEPS_MAX, read_batch
from fencepost_proxy.session.response_queue import relayed
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.node_endpoints import names_no_node
from fencepost_proxy.wire.one_topic import (
    encode_one_topic,
    encode_one_topic_answer,
    read_one_topic,
    read_one_topic_answer,
)
from fencepost_proxy.wire.peeks import is_free_of, names_no_broker
from fencepost_proxy.wire.produce import FLEXIBLE, PartitionData, PartitionResult
from fencepost_proxy.wire.records import Effort
from fencepost_proxy.wire.throttle import NOT_THROTTLED, THROTTLED_AT, produce_throttle

if TYPE_CHECKING:
    from fencepost_native import Pumped

_FRAME_PREFIX = struct.Struct(">ihhi")
_RESPONSE_PREFIX = struct.Struct(">ii")


class FastPath:
    __slots__ = (
        "_appends",
        "_from_upstream",
        "_holds",
        "_pipelines",
        "_proofs",
        "_queue",
        "_sequencers",
        "_services",
        "_state",
        "_to_client",
        "native",
    )

    def __init__(self, core: Core, appends: CheckedAppends) -> None:
        self._services = core.state.services
        self._sequencers = core.state.sequencers
        self._state = core.state
        self._holds = core.holds
        self._pipelines = core.pipelines
        self._queue = core.queue
        self._to_client = core.queue.to_client
        self._from_upstream = core.queue.from_upstream
        self._proofs = core.proofs
        self._appends = appends
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
    def may_arm(self) -> bool:
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
        return self._from_upstream[0].inner or self._from_upstream[0].direct is not None

    @property
    def collecting_since(self) -> float | None:
        """Since when a frame that is collected is incomplete."""
        return self.native.collecting_since or self._state.collecting_since

    @property
    def client_is_paused(self) -> bool:
        """By the session."""
        return self._holds.client_paused

    def arm(self, client_fd: int, upstream_fd: int) -> None:
        native = self.native
        assert native.connection is not None
        native.prepare()
        native.connection.arm(client_fd, upstream_fd, self._state.login_ends, self._state.received_bytes)

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
            self._holds.made_here = 0
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

        They are whole requests that need no decoding, and checked appends that their sequencers admit at once. The rest
        is for `handle(ClientBytes(rest))`. The bytes returned may be views into `data`.
        """
        out: list[bytes | memoryview] = []
        if not self._may_take_up(now):
            return 0, out
        state, services, size, known = self._state, self._services, len(data), self._state.known
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
            elif api_key != PRODUCE or not _is_known(known, data[at:end], version) or not services.fresh(now):
                break
            elif not known.is_checked:
                topic_end = at + LENGTH_BYTES + REQUEST_BYTES_MIN + len(known.prefix)
                if not is_free_of(data, topic_end, version, services.shared_producer_ids):
                    break
                if services.policy(known.topic_name) is not None:
                    break
                pending_response = relayed(PRODUCE, version, correlation_id)
            else:
                frame = memoryview(bytes(data[at + LENGTH_BYTES : end]))
                chunks = self._take_direct(frame, correlation_id, received + at + LENGTH_BYTES, now)
                if chunks is None:
                    break
                if passing_from < at:
                    out.append(data[passing_from:at])
                out += chunks
                passing_from = at = end
                services.count_request(api_key, version)
                continue
            to_client.append(pending_response)
            from_upstream.append(pending_response)
            services.count_request(api_key, version)
            at = end
        if passing_from < at:
            out.append(data[passing_from:at])
        if at:
            self._holds.made_here = 0
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
            if pending_response.answer is Answer.DIRECT:
                answer = self.end_direct(pending_response, data[at + LENGTH_BYTES : end], now)
                if answer is None:
                    break
                if passing_from < at:
                    out.append(data[passing_from:at])
                out.append(answer)
                passing_from = end
            else:
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

    def _concerns_state_topic(self, frame: memoryview) -> bool:
        data = bytes(frame)
        return any(mark in data for mark in self._services.state_topic_marks)

    def _take_direct(
        self, frame: memoryview, correlation_id: int, starts_at: int, now: float
    ) -> list[bytes | memoryview] | None:
        """Submit the checked appends of a request; returns what to send if all their sequencers admit them at once.

        None: nothing has happened. `frame` is the request without its length, in memory that is not reused.
        """
        services, known = self._services, self._state.known
        if self._queue.others_are_open or known.version < FLEXIBLE:
            return None
        batches = read_one_topic(frame, REQUEST_BYTES_MIN + len(known.prefix))
        if batches is None or self._pipelines.failed or now >= self._state.login_ends:
            return None
        policy, topic_id = services.policy(known.topic_name), services.topic_id(known.topic_name)
        if policy is None or policy.checks_count or policy.idempotence:
            return None  # the fast path has no barriers and no idempotence levels
        if topic_id is None or services.produce_version_max() < PRODUCE_BY_ID or not known.is_about(topic_id):
            return None
        if not services.reserve(len(frame)):
            return None
        taken = self._fitting(frame, batches, policy, now)
        if taken is None:
            services.release(len(frame))
            return None
        pending_appends, sent = [], []
        for sequencer, pending in taken:
            sequencer.take(pending, now)
            pending.topic_id = topic_id
            services.sequencer_waited(0.0)
            pending_appends.append(pending)
            sent.append((pending.partition.partition, *sent_batch(pending)))
        pending_response = PendingResponse(PRODUCE, known.version, correlation_id, Answer.DIRECT)
        pending_response.reserved_bytes = len(frame)
        answer_by = self._queue.answer_by[pending_response] = due_by(now, known.timeout_ms)
        topic_id_bytes = topic_id.bytes
        pending_response.direct = Direct(pending_appends, frame, starts_at, answer_by, known.topic, topic_id_bytes)
        self._to_client.append(pending_response)
        self._from_upstream.append(pending_response)
        return encode_one_topic(
            correlation_id=correlation_id,
            before_acks=known.before_acks,
            timeout_ms=known.timeout_ms,
            topic_id=topic_id_bytes,
            batches=sent,
        )

    def _fitting(
        self, frame: memoryview, batches: list[tuple[int, int, int]], policy: TopicPolicy, now: float
    ) -> list[tuple[PartitionSequencer, PendingAppend]] | None:
        """The appends with their sequencers; None if not all of them fit at once."""
        services, topic = self._services, self._state.known.topic_name
        draft = self._appends.drafts.draft(
            policy, None, now, now + self._appends.barriers.wait_seconds(self._state.known.timeout_ms)
        )
        effort = Effort(services.read_here_bytes_max, HERE_STEPS_MAX)
        fitting = []
        for partition, start, end in batches:
            key = TopicPartition(topic, partition)
            sequencer = self._sequencers.sequencer(key)
            if sequencer is None:
                return None
            records = frame[start:end]
            try:
                scan = read_batch(
                    key,
                    records,
                    services.header_names,
                    source_is_base=policy.source_is_base,
                    fields=policy.fields,
                    bytes_max=services.decompressed_bytes_max,
                    effort=effort,
                )
            except LimitError:
                return None
            pending = make_pending_append(draft, key, PartitionData(partition, records, b""), scan)
            if isinstance(pending, Refusal) or pending.append.copied_from is not None:
                return None
            pending.leader_epoch = services.leader_epoch(key)
            if policy.policies and self._appends.drafts.refused_on_arrival(policy, pending.append, now) is not None:
                return None
            if not sequencer.may_take(pending, now):
                return None
            fitting.append((sequencer, pending))
        return fitting

    def end_direct(self, pending_response: PendingResponse, frame: memoryview, now: float) -> bytes | None:
        """The answer to such appends, if all of it is the expected success. None: nothing has happened.

        The caller removes the pending response from the queues.
        """
        direct = pending_response.direct
        assert direct is not None
        if pending_response.version < FLEXIBLE:
            return None  # native code sent it
        fields = read_one_topic_answer(frame, direct.topic_id, len(direct.pending_appends))
        if fields is None:
            return None
        throttle, partitions = fields
        if throttle:
            return None
        results = {
            partition: PartitionResult(partition, error, base_offset, append_time, log_start)
            for partition, error, base_offset, append_time, log_start, _ in partitions
        }
        completed = []
        for pending in direct.pending_appends:
            sequencer, result = self._sequencers.sequencer(pending.partition), results.get(pending.partition.partition)
            if sequencer is None or result is None or not sequencer.may_complete(pending, result):
                return None
            completed.append((sequencer, pending, result))
        for sequencer, pending, result in completed:
            sequencer.complete(pending, result, now)
            if pending.fence is None:
                self._appends.levels.record_acknowledged(pending, result.base_offset)
        self._proofs.may_write[direct.pending_appends[0].partition.topic] = now
        del self._queue.answer_by[pending_response]
        self._services.release(pending_response.reserved_bytes)
        pending_response.reserved_bytes = 0
        return encode_one_topic_answer(
            correlation_id=pending_response.correlation_id,
            topic=direct.topic,
            partitions=[
                (each.partition, each.base_offset, each.log_append_time_ms, each.log_start_offset)
                for _, _, each in completed
            ],
            throttle=0,
        )

    def direct(self, frame: memoryview, now: float) -> bool:
        """The fast path for a request that did not arrive in one piece."""
        _, version, correlation_id = REQUEST_PREFIX.unpack_from(frame)
        known = self._state.known
        end = REQUEST_BYTES_MIN + len(known.prefix)
        if not known.is_checked or version != known.version or frame[REQUEST_BYTES_MIN:end] != known.prefix:
            return False
        if self._holds.client_is_blocked(len(self._to_client)) or not self._services.fresh(now):
            return False
        starts_at = self._state.read_bytes - len(frame)
        reserved, self._state.collecting_bytes = self._state.collecting_bytes, 0
        self._services.release(reserved)
        chunks = self._take_direct(frame, correlation_id, starts_at, now)
        if chunks is not None:
            self._services.forwarded(0.0)
        else:
            taken_back = self._services.reserve(reserved)
            assert taken_back, "it was released a moment ago"
            self._state.collecting_bytes = reserved
            return False
        self._queue.upstream_out += chunks
        return True


def _is_relayed(pending_response: PendingResponse, frame: memoryview) -> bool:
    """Whether a response, with its length, names no broker, nor a throttle time at its end."""
    answer = pending_response.answer
    if answer is Answer.RELAYED_UNLESS_BROKERS:
        version = pending_response.version
        return produce_throttle(frame, version) == NOT_THROTTLED and names_no_broker(frame, version)
    if answer is Answer.RELAYED_UNTIL_BROKERS:
        return names_no_node(frame[LENGTH_BYTES:], pending_response.api_key, pending_response.version)
    return False


def _is_known(known: Known, frame: memoryview, version: int) -> bool:
    """Whether a Produce request, with its length, starts as the last one that was read."""
    start = LENGTH_BYTES + REQUEST_BYTES_MIN
    return version == known.version and frame[start : start + len(known.prefix)] == known.prefix
