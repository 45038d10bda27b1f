"""What Kafka lets a client do, found out on the client's own connection by requests that do nothing.

Whoever answers or does something here in a client's place asks first. For the right to a transactional id always; for
WRITE before a refusal is told (`CheckedProduce`), and, where clients log in, before anything of theirs comes to a door
or a gate.

Why before: an append that Kafka does not take holds its gate up. Without a login it ends the connection, and its gate
has to look into the log before it goes on; without the right it has its turn until Kafka has refused it. Whoever
reaches a listener could keep the others from a guarded partition in this way. That SaslAuthenticate was answered
without an error proves nothing: with SCRAM and OAUTHBEARER a first answer comes before Kafka has looked at the password
or token. What proves it is Kafka's answer to what it answers only after a login. It is asked for once a connection and
topic, and again after a refusal and after each login.

Where nobody logs in nobody is asked: to Kafka each client is who the proxy is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fencepost_proxy.errors import Error, UpstreamProtocolError
from fencepost_proxy.session.control import ControlMessages
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.rewriters import RequestRewriters
from fencepost_proxy.session.services import Services
from fencepost_proxy.wire.apis import END_TXN, PRODUCE, WRITE_TXN_MARKERS
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    TopicData,
    encode_produce_request,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message

#: Of all other errors, whoever is told so has the right to write the topic. Kafka asks for the right to a transactional
#: id first, and older brokers for that to idempotence. In the middle of a login it answers whatever comes with an error
#: of another kind before it ends the connection.
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
#: The newest version that is alike for all topics: later ones may mean transactions v2, or name topics by id.
_WRITE_VERSION_MAX = 9
_NO_PRODUCER_ID, _NO_PRODUCER_EPOCH = -1, -1
#: No topic has it: a marker for it is written nowhere.
_NO_PARTITION = 0x7FFFFFFF


@dataclass(slots=True, eq=False)
class Proof:
    """Kafka was asked whether the client may do `what`; nothing more is read before it has said so, by `until`."""

    what: str
    until: float


class Proofs(ControlMessages):
    """Its state is `_proof` that is waited for; what Kafka said is the connection's `_may_write`, `_may_use`."""

    __slots__ = ("_proof",)

    def __init__(
        self,
        connection: int,
        local_host: str,
        services: Services,
        rewriters: RequestRewriters,
        opened_at: float,
        *,
        primary: bool,
    ) -> None:
        super().__init__(connection, local_host, services, rewriters, opened_at, primary=primary)
        self._proof: Proof | None = None

    def _wait_for_proof(self, what: str, until: float) -> Proof:
        self._paused = True
        proof = self._proof = Proof(what, until)
        return proof

    def _is_waited_for(self, proof: Proof) -> bool:
        """Not any more, from here on. Nor if its client is gone."""
        if self._proof is not proof or self.client_closed:
            return False
        self._proof, self._paused = None, False
        return True

    def _late_proof(self, now: float) -> str | None:
        """Of what. A gate could not tell its client before that that it is refused, nor a commit be kept back."""
        proof = self._proof
        return proof.what if proof is not None and proof.until <= now else None

    def _record_proof(self, topic: str, error_code: int) -> None:
        """What Kafka's answer to an append says of the right to write: a right may be taken away, too."""
        if error_code not in PROVES_NOTHING:
            self._may_write[topic] = self._now
        elif error_code == Error.TOPIC_AUTHORIZATION_FAILED and self._may_write.pop(topic, None) is not None:
            self._has_no_fast_path()

    def _forget_proofs(self) -> None:
        """Its client logs in, anew perhaps: whatever it may do, it may do nothing until that is over."""
        if self._may_write:
            self._may_write.clear()
            self._has_no_fast_path()
        self._may_use = None

    def _has_no_fast_path(self) -> None:
        """What it may append is to be asked for again."""
        raise NotImplementedError

    # ---- the requests

    def _prove_use(
        self, transactional_id: str, correlation_id: int, client_id: str | None, done: Callable[[bool], None]
    ) -> None:
        """Whether it may use the transactional id (WRITE).

        By the abort of a producer that there is not. Every broker looks at the right to the transactional id first;
        then it is not the coordinator, or finds that the transactional id is of another producer. Nothing ends by it.
        """
        message = Message(
            transactional_id=transactional_id,
            producer_id=_NO_PRODUCER_ID,
            producer_epoch=_NO_PRODUCER_EPOCH,
            committed=False,
        )
        frame = encode_request_frame(END_TXN, _USE_VERSION, correlation_id, client_id, message)
        response_slot = PendingResponse(END_TXN, _USE_VERSION, correlation_id, Answer.MADE_FROM_RESPONSE)

        def answered(allowed: bool) -> None:
            if allowed:
                self._may_use = transactional_id
            done(allowed)

        self._prove(
            "use its transactional id", response_slot, frame, lambda response: int(response.error_code), answered
        )

    def _prove_markers(
        self, topic: str, version: int, correlation_id: int, client_id: str | None, done: Callable[[bool], None]
    ) -> None:
        """Whether it may write transaction markers (CLUSTER_ACTION or ALTER), by one for a partition that there is not.

        Kafka looks at the right first (KafkaApis.handleWriteTxnMarkersRequest).
        """
        partitions = [Message(name=topic, partition_indexes=[_NO_PARTITION])]
        marker = Message(producer_id=0, producer_epoch=0, transaction_result=False, topics=partitions)
        message = Message(markers=[marker])
        frame = encode_request_frame(WRITE_TXN_MARKERS, version, correlation_id, client_id, message)
        response_slot = PendingResponse(WRITE_TXN_MARKERS, version, correlation_id, Answer.MADE_FROM_RESPONSE)

        def error_of(response: Message) -> int:
            errors = [
                each.error_code for marker in response.markers for topic in marker.topics for each in topic.partitions
            ]
            return int(errors[0]) if errors else Error.UNKNOWN_SERVER_ERROR

        self._prove("write transaction markers", response_slot, frame, error_of, done)

    def _prove(
        self,
        what: str,
        upstream: PendingResponse,
        frame: bytes,
        error_of: Callable[[Message], int],
        done: Callable[[bool], None],
    ) -> None:
        proof = self._wait_for_proof(what, self._now + self._services.request_timeout_seconds)
        upstream.inner = True

        def on_response(response: memoryview) -> None:
            offset = parse_response_header(response, upstream.api_key, upstream.version).body_offset
            error = error_of(decode_response(upstream.api_key, upstream.version, response[offset:]))
            if self._is_waited_for(proof):
                done(error not in PROVES_NOTHING)

        upstream.on_response = on_response
        self._from_upstream.append(upstream)
        self._upstream_out.append(frame)

    def _query_write(
        self,
        request: ProduceRequest,
        partitions: Mapping[str, int],
        done: Callable[[dict[str, PartitionResult]], None],
    ) -> None:
        """Whether it may write these topics, with one partition of each; `done` is told what Kafka says of each.

        A Produce request without a record batch: authorisation comes first (29), then Kafka finds nothing to append
        (87). Nothing can be written by it.
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
        upstream = PendingResponse(PRODUCE, version, probe.correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            answers: dict[str, PartitionResult] = {}
            for topic in parse_produce_response(frame, version).topics:
                for result in topic.partitions:
                    self._record_proof(topic.name, result.error_code)
                    answers[topic.name] = result
            if answers.keys() != partitions.keys():
                queried = sorted(partitions)
                raise UpstreamProtocolError(f"the broker answered for {sorted(answers)}, asked were {queried}")
            done(answers)

        upstream.on_response = on_response
        self._probes.append((upstream, encode_produce_request(probe)))
        self._send_probes()

    def _send_probes(self) -> None:
        """Not into the middle of a frame of the client's that is being streamed."""
        if self._client.state is CutterState.PASSING:
            return
        while self._probes:
            upstream, chunks = self._probes.pop(0)
            self._from_upstream.append(upstream)
            self._upstream_out += chunks

    # ---- before anything of it comes to a door or a gate

    def _unproved(self, partitions: Mapping[str, int]) -> dict[str, int]:
        """The topics of which Kafka is to be asked first. No proof is too old: who may not write any more gets a turn,
        and with it the refusal that takes the proof away."""
        if not self._services.clients_log_in:
            return {}
        return {name: each for name, each in partitions.items() if name not in self._may_write}

    def _prove_write_first(
        self,
        request: ProduceRequest,
        partitions: Mapping[str, int],
        until: float,
        done: Callable[[dict[str, int]], None],
    ) -> None:
        """`done` is told which topics its client may not write, and Kafka's words."""
        proof = self._wait_for_proof("write a topic", until)

        def answered(answers: dict[str, PartitionResult]) -> None:
            if self._is_waited_for(proof):
                done({name: each.error_code for name, each in answers.items() if each.error_code in PROVES_NOTHING})

        self._query_write(request, partitions, answered)
