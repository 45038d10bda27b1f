"""A broker's end of a connection that also knows what is not Produce, and Produce that nobody hears an answer to.

What is asked besides Produce is opaque here: a request names a token, its answer repeats it and is as long as the token
says. So an answer that is swapped, cut short or given to somebody else is noticed by whoever asked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, INCREMENTAL_ALTER_CONFIGS, PRODUCE
from fencepost_proxy.wire.produce import ProduceRequest, ProduceResponse, parse_produce_request
from tests.simulation.broker import BrokerSide

_HEAD = struct.Struct(">hhi")
_LONGEST_ANSWER_BYTES = 3000


def question(api_key: int, version: int, correlation_id: int, text: bytes = b"") -> bytes:
    """A request frame, length included."""
    body = _HEAD.pack(api_key, version, correlation_id) + text
    return struct.pack(">i", len(body)) + body


def answer_body(api_key: int, correlation_id: int, text: bytes) -> bytes:
    """What a broker answers to it, behind the correlation id."""
    if api_key == INCREMENTAL_ALTER_CONFIGS:
        return text
    token = b"%d/%d " % (api_key, correlation_id)
    return (token * (1 + correlation_id * 7919 % _LONGEST_ANSWER_BYTES // len(token)))[:-1]


ADDED, NOT_ADDED = b"yes", b"no"


def adds(transactional_id: str, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]) -> bytes:
    """What AddPartitionsToTxn says."""
    names = ",".join(f"{name.topic}:{name.partition}" for name in partitions)
    return f"{transactional_id}|{producer_id}|{epoch}|{names}".encode()


def read_adds(text: bytes) -> tuple[str, int, int, list[TopicPartition]]:
    transactional_id, producer_id, epoch, names = text.decode().split("|")
    partitions = [
        TopicPartition(topic, int(number)) for topic, _, number in (n.partition(":") for n in names.split(","))
    ]
    return transactional_id, int(producer_id), int(epoch), partitions


class Listener(BrokerSide):
    """Answers everything; acks=0 has no answer, and its errors cost the connection (KafkaApis.handleProduceRequest)."""

    def _handle(self, frame: bytes) -> None:
        api_key, _, correlation_id = _HEAD.unpack_from(frame)
        if api_key == ADD_PARTITIONS_TO_TXN:
            _, producer_id, epoch, partitions = read_adds(frame[_HEAD.size :])
            added = [self.cluster.add_partition(producer_id, epoch, name) for name in partitions]
            self._write(struct.pack(">i", correlation_id) + (ADDED if all(added) else NOT_ADDED))
            self._go_on()
            return
        if api_key != PRODUCE:
            self._write(struct.pack(">i", correlation_id) + answer_body(api_key, correlation_id, frame[_HEAD.size :]))
            self._go_on()
            return
        request = parse_produce_request(memoryview(frame))
        if request.acks == 0:
            self.cluster.produce(self.node, request, self._unheard)
        else:
            self.cluster.produce(self.node, request, lambda response: self._answer(request, response))

    def _answer(self, request: ProduceRequest, response: ProduceResponse) -> None:
        self._respond(request, response)

    def _unheard(self, response: ProduceResponse) -> None:
        failed = any(result.error_code for topic in response.topics for result in topic.partitions)
        if failed and not self._gone and self.connection is not None:
            self._gone = True
            self._frames.clear()
            self.connection.close("b")
        self._go_on()

    def _write(self, body: bytes) -> None:
        if not self._gone and self.connection is not None and self.cluster.alive(self.node, self.incarnation):
            self.connection.to_a.write(struct.pack(">i", len(body)) + body)

    def _go_on(self) -> None:
        self._busy = False
        self._next()
