"""A broker's end of a connection: Produce, acks=0, and opaque other APIs.

An opaque request contains a token. Its response repeats the token up to a length that the token determines. So a client
detects swapped, truncated and misdirected responses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, END_TXN, INCREMENTAL_ALTER_CONFIGS, PRODUCE
from fencepost_proxy.wire.control import decode_request, encode_response_frame, parse_request_header
from fencepost_proxy.wire.produce import (
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicResult,
    parse_produce_request,
)
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.throttle import HEAD_BYTES
from tests.simulation.broker import (
    DENIED_TRANSACTIONAL_ID,
    INVALID_PRODUCER_ID_MAPPING,
    BrokerSide,
)

_HEAD = struct.Struct(">hhi")
_LONGEST_ANSWER_BYTES = 3000


def query_message(api_key: int, version: int, correlation_id: int, text: bytes = b"") -> bytes:
    """A request frame with its length."""
    body = _HEAD.pack(api_key, version, correlation_id) + text
    return struct.pack(">i", len(body)) + body


def answer_body(api_key: int, correlation_id: int, text: bytes) -> bytes:
    """A broker's response after the correlation id. Wherever it has a throttle time, that is 0."""
    if api_key == INCREMENTAL_ALTER_CONFIGS:
        return text
    token = b"%d/%d " % (api_key, correlation_id)
    return bytes(HEAD_BYTES) + (token * (1 + correlation_id * 7919 % _LONGEST_ANSWER_BYTES // len(token)))[:-1]


_END_TXN_V2, _NOT_HANDLED = 5, 16
ADDED, NOT_ADDED, ADD_LATER = b"yes", b"no", b"later"


def adds(transactional_id: str, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]) -> bytes:
    """The content of AddPartitionsToTxn."""
    names = ",".join(f"{name.topic}:{name.partition}" for name in partitions)
    return f"{transactional_id}|{producer_id}|{epoch}|{names}".encode()


def read_adds(text: bytes) -> tuple[str, int, int, list[TopicPartition]]:
    transactional_id, producer_id, epoch, names = text.decode().split("|")
    partitions = [
        TopicPartition(topic, int(number)) for topic, _, number in (n.partition(":") for n in names.split(","))
    ]
    return transactional_id, int(producer_id), int(epoch), partitions


def denied(request: ProduceRequest) -> ProduceResponse:
    """Refuse the whole request (KafkaApis.handleProduceRequest)."""
    topics = tuple(
        TopicResult(
            topic.name,
            topic.topic_id,
            tuple(PartitionResult(each.partition, DENIED_TRANSACTIONAL_ID) for each in topic.partitions),
            b"",
        )
        for topic in request.topics
    )
    return ProduceResponse(request.correlation_id, topics, 0)


class Listener(BrokerSide):
    """Answers every request, except acks=0: an error closes the connection (KafkaApis.handleProduceRequest)."""

    _ended_before = 0  # ended transactions of the producer when the current EndTxn arrived

    def _handle(self, frame: bytes) -> None:
        api_key, _, correlation_id = _HEAD.unpack_from(frame)
        if api_key == ADD_PARTITIONS_TO_TXN:
            _, producer_id, epoch, partitions = read_adds(frame[_HEAD.size :])
            added = [self.cluster.add_partition(producer_id, epoch, name) for name in partitions]
            self._write(struct.pack(">i", correlation_id) + (ADDED if all(added) else NOT_ADDED))
            self._continue()
            return
        if api_key == END_TXN:
            self._write(self._end_txn(frame))
            self._continue()
            return
        if api_key != PRODUCE:
            self._write(struct.pack(">i", correlation_id) + answer_body(api_key, correlation_id, frame[_HEAD.size :]))
            self._continue()
            return
        request = parse_produce_request(memoryview(frame))
        if request.transactional_id is not None and not self.cluster.may_use(
            request.client_id, request.transactional_id
        ):
            self._answer(request, denied(request))
        elif request.acks == 0:
            self.cluster.produce(self.node, request, self._sent_without_response)
        else:
            self.cluster.produce(self.node, request, lambda response: self._answer(request, response))

    def _next(self) -> None:
        if not self._busy and self._frames:
            self._ended_before = self._ends_of(self._frames[0])
        super()._next()

    def _ends_of(self, frame: bytes) -> int:
        """Number of ended transactions of an EndTxn's producer; 0 for other requests."""
        if int.from_bytes(frame[:2]) != END_TXN:
            return 0
        header = parse_request_header(memoryview(frame))
        queried = decode_request(END_TXN, header.api_version, memoryview(frame)[header.body_offset :])
        transaction = self.cluster.transactions.get(queried.producer_id)
        return 0 if transaction is None else transaction.ends

    def _end_txn(self, frame: bytes) -> bytes:
        header = parse_request_header(memoryview(frame))
        queried = decode_request(END_TXN, header.api_version, memoryview(frame)[header.body_offset :])
        v2 = header.api_version >= _END_TXN_V2
        named = self.cluster.transactional_ids.get(queried.transactional_id)
        if not self.cluster.may_use(header.client_id, queried.transactional_id):
            error, producer_id, epoch = DENIED_TRANSACTIONAL_ID, -1, -1
        elif named is not None and named != queried.producer_id:
            error, producer_id, epoch = INVALID_PRODUCER_ID_MAPPING, -1, -1
        elif not v2 and (self._closed or self._ends_of(frame) > self._ended_before):
            # The client has repeated it elsewhere, and all transactions of a v1 producer have one epoch: this would end
            # a later one. Transactions v2 solve this (KIP-890); without them only the coordinator could.
            error, producer_id, epoch = _NOT_HANDLED, -1, -1
        else:
            error, producer_id, epoch = self.cluster.end_txn(
                queried.producer_id, queried.producer_epoch, commit=queried.committed
            )
        answer = Message(throttle_time_ms=0, error_code=error, producer_id=producer_id, producer_epoch=epoch)
        return encode_response_frame(END_TXN, header.api_version, header.correlation_id, answer)[4:]

    def _answer(self, request: ProduceRequest, response: ProduceResponse) -> None:
        self._respond(request, response)

    def _sent_without_response(self, response: ProduceResponse) -> None:
        failed = any(result.error_code for topic in response.topics for result in topic.partitions)
        if failed and not self._closed and self.connection is not None:
            self._closed = True
            self._frames.clear()
            self.connection.close("b")
        self._continue()

    def _write(self, body: bytes) -> None:
        if not self._closed and self.connection is not None and self.cluster.live(self.node, self.incarnation):
            self.connection.to_a.write(struct.pack(">i", len(body)) + body)

    def _continue(self) -> None:
        self._busy = False
        self._next()
