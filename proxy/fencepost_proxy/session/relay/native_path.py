"""The fast path in native code (`fencepost_native`): whole frames that are relayed, and appends that permits allow.

Its requests in progress follow those in the session's queues. While Kafka answers those, they stay here. Before another
request is added, and before any other event, they become ordinary ones (`return_requests`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fencepost_policies.append import Check, Refusal
from fencepost_proxy.sequencer.events import AppendContext, PendingAppend, Placement
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange, Received
from fencepost_proxy.session.batches.reading import append_of, read_batch
from fencepost_proxy.session.connection.core import Core
from fencepost_proxy.session.connection.response_queue import relayed
from fencepost_proxy.session.frames.cutter import FrameCutter
from fencepost_proxy.session.frames.messages import Tick
from fencepost_proxy.session.frames.producer_ids import STREAMED_PARTITIONS_MAX, ProducerIdWatch
from fencepost_proxy.session.frames.request_template import NO_TEMPLATE
from fencepost_proxy.session.produce.checked_appends import CheckedAppends
from fencepost_proxy.session.produce.drafts import longest_wait
from fencepost_proxy.session.produce.forwarding import PRODUCE_BY_ID
from fencepost_proxy.session.relay.native_calls import Proxied
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.node_endpoints import EndpointWalk
from fencepost_proxy.wire.peeks import UNREADABLE, partitions_of
from fencepost_proxy.wire.produce import FLEXIBLE, ProduceRequest, parse_produce_request

if TYPE_CHECKING:
    import fencepost_native as native

Reader = Callable[[], None]
#: First the settings of a topic, then the permits of its partitions.
_TRIES = 3


class NativePath:
    """`connection`: None without the native module."""

    __slots__ = ("_appends", "_native", "_queue", "_sequencers", "_services", "_state", "_template", "connection")

    def __init__(self, core: Core, appends: CheckedAppends) -> None:
        self._queue = core.queue
        self._state = core.state
        self._services = services = core.state.services
        self._sequencers = core.state.sequencers
        self._appends = appends
        self._template = NO_TEMPLATE
        self.connection: native.Connection | None = None
        if services.native is not None:
            module, settings = services.native
            self._native = module
            self.connection = module.Connection(
                settings, core.state.connection, core.state.opened_at, core.proofs.may_write
            )
            self.connection.watches = self
            core.queue.take_over = self.return_requests

    @property
    def waiting(self) -> int:
        """Requests sent and not answered."""
        return 0 if self.connection is None else len(self.connection)

    @property
    def collecting_since(self) -> float | None:
        """Since when a request is incomplete."""
        return None if self.connection is None else self.connection.collecting_since

    @property
    def empty(self) -> bool:
        return self.connection is None or (not self.connection and self.connection.collecting_since is None)

    @property
    def awaits_appends(self) -> bool:
        """Their answers are due at some time."""
        return self.connection is not None and self.connection.awaits_appends

    def take_up(self, data: bytes, now: float) -> tuple[int, bytes]:
        """As `FastPath.take_up`. It stops at the first frame that is not for it."""
        connection, state, taken, out = self.connection, self._state, 0, b""
        assert connection is not None
        for _ in range(_TRIES):
            count, frame_bytes, made = connection.take_up(
                data[taken:], (now, len(self._queue.to_client), state.received_bytes)
            )
            taken, out = taken + count, out + (made or b"")
            state.received_bytes += frame_bytes
            if not self.permit(now):
                break
        return taken, out

    def read_responses(self, cutter: FrameCutter, now: float) -> bytes | None:
        """The next responses are to requests sent here: returns the answers. None: Python reads them."""
        assert self.connection is not None
        waiting = len(self.connection)
        taken, made = self.connection.take_down(bytes(cutter.unread), now)
        for _ in range(waiting - len(self.connection)):
            self._services.answered(0.0)
        cutter.skip(taken)
        return made or b"" if taken else None

    def prepare(self) -> None:
        """Before `take_up` of the connection: pass on the template."""
        template = self._state.template
        assert self.connection is not None
        self.connection.others_are_open = self._queue.others_are_open
        if template is not self._template:
            self._template = template
            self.connection.template = self._native.RequestTemplate(template, self)

    def permit(self, now: float) -> bool:
        """After it stopped: whether what it lacked is there now."""
        assert self.connection is not None
        missing, template = self.connection.missing, self.connection.template
        if missing is None or template is None:
            return False
        if not missing:
            template.topic_settings = self._topic_settings(template.topic_name)
            return template.topic_settings is not None
        for partition in missing:
            sequencer = self._sequencers.sequencer(TopicPartition(template.topic_name, partition))
            permit = None if sequencer is None else sequencer.issued.issue(self._native.Permit, now)
            if permit is None:
                return False
            template.permit(partition, permit)
        return True

    def _topic_settings(self, topic: str) -> native.TopicSettings | None:
        """None for a topic whose appends need more than its sequencer."""
        policy, topic_id = self._services.policy(topic), self._services.topic_id(topic)
        if policy is None or policy.check is Check.OFF or policy.checks_count or policy.idempotence:
            return None
        if policy.policies:
            return None
        if topic_id is None or self._services.produce_version_max() < PRODUCE_BY_ID:
            return None
        if not self._template.is_about(topic_id):
            return None
        required = policy.check is Check.REQUIRED
        topic_settings: native.TopicSettings = self._native.TopicSettings(
            policy,
            topic_id,
            topic_id.bytes,
            required,
            policy.source_is_base,
            topic.encode(),
            self._services.header_names.cluster_id,
        )
        return topic_settings

    # ---- the sockets

    def connect(
        self, proxied: Proxied, *, in_pieces: bool, tls: tuple[native.Tls | None, native.Tls | None]
    ) -> tuple[Reader | None, Reader | None]:
        """What to call when the client's socket is readable, and the broker's; None where Python reads.

        `in_pieces` – frames may be relayed as they arrive. `tls` – what encrypts each socket in native code.
        """
        connection = self.connection
        if connection is None:
            return None, None
        connection.connect(proxied, *tls)
        if not in_pieces:
            connection.watches = None
        return connection.client_readable, connection.upstream_readable

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.disconnect()

    @property
    def received_at(self) -> tuple[float, float]:
        """When native code last received bytes of the client and of the broker, monotonic seconds."""
        if self.connection is None:
            return 0.0, 0.0
        return self.connection.client_received_at, self.connection.upstream_received_at

    # ---- back to the session

    def is_early_tick(self, event: object, now: float) -> bool:
        """The session has nothing to do here before the first answer is due."""
        if not isinstance(event, Tick) or self.connection is None:
            return False
        self.connection.ticking = False
        due = self.connection.due
        return due is None or now < due

    def stop_reading(self) -> None:
        """Python handles what comes next."""
        received = None if self.connection is None else self.connection.stop_reading()
        if received is not None:
            self._state.received_bytes = received

    def return_all(self) -> bytes | None:
        """Returns the beginning of an incomplete request: the next bytes of the client."""
        if self.connection is None:
            return None
        self.return_requests()
        return self.connection.take_collected()

    def return_requests(self) -> None:
        if self.connection is None:
            return
        self.stop_reading()
        queue = self._queue
        for api_key, version, correlation_id, checked in self.connection.return_requests():
            if checked is None:
                pending_response = relayed(api_key, version, correlation_id)
                queue.to_client.append(pending_response)
                queue.from_upstream.append(pending_response)
                continue
            frame, starts_at, answer_by, appends = checked
            pending_appends = [_taken_back(permit, number) for permit, number in appends]
            request = _with_name(parse_produce_request(memoryview(frame)), pending_appends[0].partition.topic)
            produce = ProduceExchange(request, Received(starts_at), answer_by)
            produce.pending_appends = {pending.partition: pending for pending in pending_appends}
            produce.sent.update(produce.pending_appends)
            produce.pending_response.reserved_bytes = len(frame)
            self._appends.completion.take_over(produce)
        self._take_over_streams()

    # ---- frames that are relayed as they arrive

    def request_watch(self, head: bytes, topic_end: int, version: int) -> ProducerIdWatch | None:
        """For native code: of a Produce request to a topic without checks. None: for Python."""
        flexible = version >= FLEXIBLE
        try:
            count, first_at = partitions_of(memoryview(head), topic_end, flexible=flexible)
        except UNREADABLE:
            return None
        if not 0 < count <= STREAMED_PARTITIONS_MAX:
            return None
        return ProducerIdWatch(first_at, count, self._services.shared_producer_ids, flexible=flexible)

    def response_watch(self, api_key: int, version: int, frame_bytes: int) -> EndpointWalk:
        """For native code: of a response that may name brokers after its records."""
        state, endpoint = self._state, self._services.endpoint
        return EndpointWalk(api_key, version, frame_bytes, lambda each: endpoint(each, state.local_host))

    def _take_over_streams(self) -> None:
        """The frames that native code has relayed in part."""
        assert self.connection is not None
        state = self._state
        for cutter, passing in zip((state.client, state.upstream), self.connection.take_passing(), strict=True):
            if passing is not None:
                left, watch, until_probe, error = passing
                cutter.pass_rest(left, watch if error is None else _Failed(error), until_probe)

    def permitted_append(self, source: native.Source, sent: native.SentAs, fence: native.Fence | None) -> PendingAppend:
        """The sequencer's object for an append that was sent by permission."""
        template, topic_settings, frame, partition, start, end = source
        _, _, sent_at, leader_epoch, alone, taken_over = sent
        instance_id = self._services.instance_id if fence is None else fence[-1]
        context = AppendContext(instance_id, self._state.opened_at, alone, taken_over)
        deadline = sent_at + longest_wait(self._services, template.timeout_ms)
        policy, key = topic_settings.policy, TopicPartition(template.topic_name, partition)
        records = memoryview(frame)[start:end]
        scan = read_batch(
            key,
            records,
            self._services.header_names,
            source_is_base=policy.source_is_base,
            fields=policy.fields,
            bytes_max=self._services.decompressed_bytes_max,
        )
        assert not isinstance(scan, Refusal)
        pending = PendingAppend(
            connection=self._state.connection,
            partition=key,
            append=append_of(key, scan),
            records=records,
            digest=scan.digest,
            check=policy.check,
            submitted_at=sent_at,
            transactional_id=None,
            context=context,
            placement=Placement(deadline),
        )
        pending.sending.leader_epoch, pending.sending.topic_id = leader_epoch, topic_settings.topic_id
        return pending


class _Failed:
    """In place of the watch of a frame whose last probe raised this."""

    first_at = 0
    head_bytes = 0
    at_trailer = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def probe(self, head: memoryview) -> int:
        raise self._error

    def in_place(self, trailer: memoryview) -> memoryview:
        raise NotImplementedError


def _with_name(request: ProduceRequest, topic_name: str) -> ProduceRequest:
    """Of its only topic, which the client may have identified by id."""
    (topic,) = request.topics
    return replace(request, topics=(replace(topic, name=topic_name),))


def _taken_back(permit: native.Permit, number: int) -> PendingAppend:
    permit.issuer.take_back()
    pending = permit.kept(number)
    assert pending is not None, "the permit was taken back"
    return pending
