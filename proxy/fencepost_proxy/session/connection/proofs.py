"""Checks with Kafka what a client may do, on the client's own connection, by requests without effect.

The proxy checks before it answers for Kafka or acts for a client: always for the use of a transactional id; for WRITE
before it reports a refusal (`refusals.py`) and, if clients log in, before their appends reach a barrier or a
sequencer.

The check comes first because an append that Kafka rejects blocks its sequencer:

- Without a login, the append ends the connection, and the sequencer must read the log before it continues.
- Without permission, the append blocks the partition until Kafka has refused it.

Any client that reaches a listener could block a checked partition in this way.

A SaslAuthenticate response without an error proves nothing: with SCRAM and OAUTHBEARER the first one precedes Kafka's
check of the password or token. The proof is Kafka's answer to a request that it serves only after a login. The proxy
sends it once for each connection and topic, and again after a refusal and after each login.

If clients do not log in, nothing is checked: to Kafka, each client has the proxy's permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import UUID

from fencepost_proxy.errors import Error, UpstreamProtocolError
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.pending_responses import inner_response
from fencepost_proxy.session.frames.request_template import NO_TEMPLATE
from fencepost_proxy.session.frames.services import Settings
from fencepost_proxy.session.frames.steps import Resume, Steps, Wait
from fencepost_proxy.transactions.watched import abort_marker, marker_probe
from fencepost_proxy.wire.apis import END_TXN, METADATA, PRODUCE, WRITE_TXN_MARKERS
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    encode_produce_request,
)
from fencepost_proxy.wire.schema import Message

#: Permissions may be revoked: after this time, a client that only the proxy answers must prove WRITE again.
_PROOF_SECONDS = 30.0
#: Any other error shows that the client may write the topic. Kafka checks the transactional id first, and older brokers
#: the permission to be idempotent. During a login it answers every request with an error of another kind, then closes.
PROVES_NOTHING = frozenset(
    {
        Error.TOPIC_AUTHORIZATION_FAILED,
        Error.CLUSTER_AUTHORIZATION_FAILED,
        Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Error.ILLEGAL_SASL_STATE,
        Error.SASL_AUTHENTICATION_FAILED,
        Error.UNSUPPORTED_SASL_MECHANISM,
        Error.UNSUPPORTED_VERSION,
        Error.UNKNOWN_SERVER_ERROR,
    }
)
#: Understood by every broker that has transactions.
_USE_VERSION = 1
#: The newest version that is equal for all topics: later ones may mean transactions v2, or identify topics by id.
_WRITE_VERSION_MAX = 9
#: The first one that accepts topic ids instead of names; older than Produce v13.
_METADATA_VERSION = 12
_NO_PRODUCER_ID, _NO_PRODUCER_EPOCH = -1, -1


@dataclass(slots=True, eq=False)
class Proofs:
    _state: ConnectionState
    _queue: ResponseQueue
    _settings: Settings
    may_write: dict[str, float] = field(default_factory=dict)  # by topic: when Kafka last confirmed WRITE
    may_use: str | None = None  # the last transactional id that Kafka let this client use

    def has_proved(self, topic: str) -> bool:
        """Whether Kafka recently confirmed on this connection that this client may write the topic."""
        reported_at = self.may_write.get(topic)
        return reported_at is not None and self._state.now < reported_at + _PROOF_SECONDS

    def record(self, topic: str, error_code: int) -> None:
        """Record what an append's result shows about WRITE: permissions may also be revoked."""
        if error_code not in PROVES_NOTHING:
            self.may_write[topic] = self._state.now
        elif error_code == Error.TOPIC_AUTHORIZATION_FAILED and self.may_write.pop(topic, None) is not None:
            self._state.template = NO_TEMPLATE

    def forget(self) -> None:
        """The client logs in, perhaps again: its permissions are unknown until that is done."""
        if self.may_write:
            self.may_write.clear()
            self._state.template = NO_TEMPLATE
        self.may_use = None

    def prove_use(self, transactional_id: str, correlation_id: int, client_id: str | None) -> Steps[bool]:
        """Whether it may use the transactional id (WRITE).

        The probe is an abort for a producer that does not exist. Every broker checks the transactional id first;
        then it is not the coordinator, or finds another producer under the transactional id. No transaction ends.
        """
        message = Message(
            transactional_id=transactional_id,
            producer_id=_NO_PRODUCER_ID,
            producer_epoch=_NO_PRODUCER_EPOCH,
            committed=False,
        )
        frame = encode_request_frame(END_TXN, _USE_VERSION, correlation_id, client_id, message)
        response = yield from self._query("use its transactional id", (END_TXN, _USE_VERSION, correlation_id), frame)
        if response.error_code in PROVES_NOTHING:
            return False
        self.may_use = transactional_id
        return True

    def prove_markers(self, topic: str, version: int, correlation_id: int, client_id: str | None) -> Steps[bool]:
        """Whether it may write transaction markers (CLUSTER_ACTION or ALTER)."""
        message = abort_marker(*marker_probe(topic))
        frame = encode_request_frame(WRITE_TXN_MARKERS, version, correlation_id, client_id, message)
        request = WRITE_TXN_MARKERS, version, correlation_id
        response = yield from self._query("write transaction markers", request, frame)
        errors = [
            each.error_code for marker in response.markers for topic in marker.topics for each in topic.partitions
        ]
        return bool(errors) and errors[0] not in PROVES_NOTHING

    def look_up(self, topic_ids: Sequence[UUID], correlation_id: int, client_id: str | None) -> Steps[Message]:
        """Kafka's Metadata response about these topics, as far as the client may describe them."""
        topics = [Message(topic_id=each, name=None) for each in topic_ids]
        message = Message(topics=topics, allow_auto_topic_creation=False, include_topic_authorized_operations=False)
        frame = encode_request_frame(METADATA, _METADATA_VERSION, correlation_id, client_id, message)
        return (yield from self._query("write a topic", (METADATA, _METADATA_VERSION, correlation_id), frame))

    def _query(self, what: str, request: tuple[int, int, int], frame: bytes) -> Steps[Message]:
        """Kafka's response to a request of the proxy. `request` – its API key, version and correlation id."""
        api_key, version, correlation_id = request
        until = self._state.now + self._settings.request_timeout_seconds
        response: memoryview = yield _proof(what, self._queue.query(api_key, version, correlation_id, frame), until)
        offset = parse_response_header(response, api_key, version).body_offset
        return decode_response(api_key, version, response[offset:])

    def query_write(
        self,
        request: ProduceRequest,
        partitions: Mapping[str, int],
        done: Callable[[dict[str, PartitionResult]], None],
    ) -> None:
        """Whether it may write these topics, tested with one partition of each; `done` gets Kafka's result for each.

        The probe is a Produce request without record batches: Kafka checks authorization first (29), then finds nothing
        to append (87). It cannot write anything.
        """
        version = min(_WRITE_VERSION_MAX, request.api_version)
        probe = replace(
            request,
            api_version=version,
            transactional_id=None,
            acks=1,
            topics=tuple(
                TopicData(name, None, (PartitionData(partition, memoryview(b""), b""),), b"")
                for name, partition in partitions.items()
            ),
        )

        def on_response(response: ProduceResponse) -> None:
            answers: dict[str, PartitionResult] = {}
            for topic in response.topics:
                for result in topic.partitions:
                    self.record(topic.name, result.error_code)
                    answers[topic.name] = result
            if answers.keys() != partitions.keys():
                queried = sorted(partitions)
                raise UpstreamProtocolError(f"the broker answered for {sorted(answers)} instead of {queried}")
            done(answers)

        upstream = inner_response(PRODUCE, version, probe.correlation_id, on_response)
        self._queue.send_between_frames(upstream, encode_produce_request(probe))

    def unproved(self, partitions: Mapping[str, int]) -> dict[str, int]:
        """The topics to check with Kafka first. A proof does not expire here: a client whose WRITE was revoked gets one
        append through to Kafka, whose refusal removes the proof."""
        if not self._settings.clients_log_in:
            return {}
        return {name: each for name, each in partitions.items() if name not in self.may_write}

    def prove_write(
        self, request: ProduceRequest, partitions: Mapping[str, int], until: float
    ) -> Steps[dict[str, int]]:
        """The topics that the client may not write, with Kafka's errors."""
        start = partial(self.query_write, request, partitions)
        answers: dict[str, PartitionResult] = yield _proof("write a topic", start, until)
        return {name: each.error_code for name, each in answers.items() if each.error_code in PROVES_NOTHING}


def _proof(what: str, start: Callable[[Resume], object], until: float) -> Wait:
    """Until Kafka's answer, the proxy can neither refuse an append nor decide a commit."""
    late = f"Kafka did not confirm in time that the client may {what}"
    return Wait(start, before_sending="Kafka's answer about permissions", until=until, late=late)
