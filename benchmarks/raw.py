"""A cheap client with equal cost on every route: builds Produce requests once, then patches them and their CRC.

Uses blocking sockets: with one request in flight, an event loop would only add cost to the measurement.
"""

from __future__ import annotations

import socket
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
from kafka.protocol.admin import CreateTopicsRequest, CreateTopicsResponse, DeleteTopicsRequest, DeleteTopicsResponse
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

#: The newest version with topic names instead of topic ids.
PRODUCE_VERSION = 9
METADATA_VERSION = 12
NO_PRODUCER = (-1, -1, -1)
_TIMEOUT_SECONDS = 30.0
#: Positions in a v2 batch: CRC, start of the bytes that it covers, first and newest timestamp, sequence.
_CRC_AT, _SIGNED_FROM, _TIMESTAMPS_AT, _SEQUENCE_AT = 17, 21, 27, 53
_CORRELATION_AT = 8
_LENGTH = struct.Struct(">i")
_OFFSET = struct.Struct(">q")
_TIMES = struct.Struct(">qq")
_PLACEHOLDER = b"7" * 18


class RefusedError(Exception):
    """Kafka or the proxy returned an error."""


class Connection:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), _TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._paused = b""

    def close(self) -> None:
        self.socket.close()

    def send(self, frame: bytes | bytearray) -> None:
        self.socket.sendall(frame)

    def receive(self) -> bytes:
        """The next response, including its length."""
        data = self._paused
        while len(data) < 4 or len(data) < 4 + _LENGTH.unpack_from(data)[0]:
            more = self.socket.recv(65536)
            if not more:
                raise RefusedError("the connection was closed")
            data += more
        end = 4 + _LENGTH.unpack_from(data)[0]
        self._paused = data[end:]
        return data[:end]

    def query(self, request: Any, response_class: Any, version: int) -> Any:
        self.send(_frame(request, version))
        return response_class.decode(self.receive()[4:], version=version, header=True)

    # --- requests of a new client -------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Send ApiVersions and Metadata without topics, as an idle client does."""
        self.send(_frame(ApiVersionsRequest(client_software_name="bench", client_software_version="1"), 3))
        self.receive()
        self.metadata()

    def metadata(self, *topics: str) -> Any:
        named = [MetadataRequest.MetadataRequestTopic(topic_id=uuid.UUID(int=0), name=name) for name in topics]
        request = MetadataRequest(
            topics=named,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        return self.query(request, MetadataResponse, METADATA_VERSION)

    def broker(self) -> str:
        """The broker address that this route returns to clients."""
        brokers = self.metadata().brokers
        if not brokers:
            raise RefusedError("Metadata has no brokers")
        return f"{brokers[0].host}:{brokers[0].port}"

    def create_topic(self, name: str, partitions: int, configs: dict[str, str]) -> None:
        topic = CreateTopicsRequest.CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=1,
            assignments=[],
            configs=[
                CreateTopicsRequest.CreatableTopic.CreatableTopicConfig(name=key, value=value)
                for key, value in configs.items()
            ],
        )
        request = CreateTopicsRequest(topics=[topic], timeout_ms=20_000, validate_only=False)
        answer = self.query(request, CreateTopicsResponse, 5).topics[0]
        if answer.error_code:
            raise RefusedError(f"cannot create topic {name}: {answer.error_code} {answer.error_message}")

    def delete_topic(self, name: str) -> None:
        self.query(DeleteTopicsRequest(topic_names=[name], timeout_ms=20_000), DeleteTopicsResponse, 4)

    def producer(self) -> tuple[int, int, int]:
        """Producer id, epoch and first sequence of an idempotent producer. Retries while the coordinator starts."""
        request = InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
        )
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            answer = self.query(request, InitProducerIdResponse, 4)
            if not answer.error_code:
                return answer.producer_id, answer.producer_epoch, 0
            if time.monotonic() > deadline:
                raise RefusedError(f"InitProducerId failed with {answer.error_code}")
            time.sleep(0.1)


def _frame(request: Any, version: int) -> bytes:
    request.API_VERSION = version
    request.with_header(correlation_id=1, client_id="bench")
    return bytes(request.encode(version=version, header=True, framed=True))


@dataclass(frozen=True, slots=True)
class Shape:
    """Contents of one batch."""

    topic: str
    records: int
    record_bytes: int
    #: None: no expected offset.
    offset_source: str | None = None
    #: (producer id, epoch, next sequence)
    producer: tuple[int, int, int] = NO_PRODUCER


class Appends:
    """Builds consecutive Produce requests of one shape, and checks their responses.

    `frame` returns the next request with a new timestamp. Its cost does not depend on the expected offset.
    """

    def __init__(self, shape: Shape, *, next_offset: int = 0) -> None:
        self.shape = shape
        self.next_offset = next_offset
        self._sequence = shape.producer[2]
        self._correlation = 0
        self._header_bytes = -1
        self._frame = bytearray()
        self._batch_at = self._header_at = 0
        #: Position of the error code in a response with one topic and one partition.
        self._error_at = 16 + len(shape.topic)

    def frame(self) -> bytearray:
        """Valid until the next call."""
        shape = self.shape
        stated = b""
        if shape.offset_source == "header":
            stated = b"%d" % self.next_offset
        if len(stated) != self._header_bytes:
            self._make(stated)
        frame, at = self._frame, self._batch_at
        if stated:
            frame[self._header_at : self._header_at + len(stated)] = stated
        elif shape.offset_source == "base":
            _OFFSET.pack_into(frame, at, self.next_offset)
        if shape.producer != NO_PRODUCER:
            _LENGTH.pack_into(frame, at + _SEQUENCE_AT, self._sequence)
            self._sequence += shape.records
        now_ms = time.time_ns() // 1_000_000
        _TIMES.pack_into(frame, at + _TIMESTAMPS_AT, now_ms, now_ms)
        with memoryview(frame) as view:
            signed = crc32c.crc32c(view[at + _SIGNED_FROM : at + self._batch_bytes])
        struct.pack_into(">I", frame, at + _CRC_AT, signed)
        self._correlation += 1
        _LENGTH.pack_into(frame, _CORRELATION_AT, self._correlation)
        self.next_offset += shape.records
        return frame

    def check(self, answer: bytes) -> None:
        """Raises RefusedError."""
        error = int.from_bytes(answer[self._error_at : self._error_at + 2], "big", signed=True)
        if error:
            raise RefusedError(f"{self.shape.topic}: append failed with {error}: {answer[4:]!r}")

    def _make(self, stated: bytes) -> None:
        shape = self.shape
        placeholder = _PLACEHOLDER[: len(stated)]
        batch = _batch(shape, placeholder)
        if stated:
            name_at = batch.index(b"fencepost-expected-offset")
            self._header_at = name_at + len("fencepost-expected-offset") + 1
        data = ProduceRequest.TopicProduceData
        partition = data.PartitionProduceData(index=0, records=batch)
        request = ProduceRequest(
            transactional_id=None,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[data(name=shape.topic, partition_data=[partition])],
        )
        self._frame = bytearray(_frame(request, PRODUCE_VERSION))
        self._batch_at = self._frame.index(batch)
        self._batch_bytes = len(batch)
        self._header_at += self._batch_at
        self._header_bytes = len(stated)


def _batch(shape: Shape, stated: bytes) -> bytes:
    producer_id, epoch, sequence = shape.producer
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        batch_size=1 << 24,
    )
    for index in range(shape.records):
        headers = [("fencepost-expected-offset", stated)] if stated and index == 0 else []
        builder.append(index, 0, None, b"x" * shape.record_bytes, headers)
    return bytes(builder.build())


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by at least this share of the values."""
    if not sorted_values:
        raise ValueError("no values")
    return sorted_values[max(0, -(-len(sorted_values) * round(share * 1000) // 1000) - 1)]
