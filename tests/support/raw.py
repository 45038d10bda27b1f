"""A raw Kafka client: blocking sockets, one request per frame, no retries (except `produce`).

It checks the proxy, so it shares no code with it: messages are kafka-python's, record batches aiokafka's.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import crc32c
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.protocol.admin import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    AlterConfigsRequest,
    AlterConfigsResponse,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from tests.kit.closing import Closing
from tests.kit.waiting import until

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
CODECS = {"none": 0, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}

_RESPONSES: Mapping[Any, Any] = {
    AlterClientQuotasRequest: AlterClientQuotasResponse,
    AddPartitionsToTxnRequest: AddPartitionsToTxnResponse,
    AlterConfigsRequest: AlterConfigsResponse,
    ApiVersionsRequest: ApiVersionsResponse,
    CreatePartitionsRequest: CreatePartitionsResponse,
    CreateTopicsRequest: CreateTopicsResponse,
    DeleteRecordsRequest: DeleteRecordsResponse,
    DeleteTopicsRequest: DeleteTopicsResponse,
    DescribeConfigsRequest: DescribeConfigsResponse,
    EndTxnRequest: EndTxnResponse,
    FetchRequest: FetchResponse,
    FindCoordinatorRequest: FindCoordinatorResponse,
    IncrementalAlterConfigsRequest: IncrementalAlterConfigsResponse,
    InitProducerIdRequest: InitProducerIdResponse,
    MetadataRequest: MetadataResponse,
    OffsetForLeaderEpochRequest: OffsetForLeaderEpochResponse,
    ProduceRequest: ProduceResponse,
    SaslAuthenticateRequest: SaslAuthenticateResponse,
    SaslHandshakeRequest: SaslHandshakeResponse,
}
_HEADER = struct.Struct(">qiibIhiqqqhii")
#: Errors of a new partition: unknown, without a leader, or its leader does not know yet that it leads, or its epoch.
_NOT_YET = frozenset({3, 5, 6, 74, 75})
_LEADERS_SECONDS = 30.0
_CONFIGS_SECONDS = 60.0
_OK, _NOT_LEADER = 0, 6
_Headers = Sequence[tuple[str, bytes | None]]


# --- batches ----------------------------------------------------------------------------------------------------------


class Producer(NamedTuple):
    """The producer fields of a batch."""

    id: int
    epoch: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class Record:
    value: bytes
    expected: int | bytes | None = None  # an int is written as ASCII decimal
    headers: _Headers = ()
    key: bytes | None = None
    timestamp_ms: int | None = None  # None: now

    @property
    def all_headers(self) -> list[tuple[str, bytes | None]]:
        if self.expected is None:
            return list(self.headers)
        stated = b"%d" % self.expected if isinstance(self.expected, int) else self.expected
        return [("fencepost-expected-offset", stated), *self.headers]


def batch(
    *records: Record | bytes,
    expected: int | None = None,
    producer: Producer | None = None,
    base_offset: int = 0,
    codec: int = 0,
    transactional: bool = False,
    attributes: int = 0,
    write_id: bytes | None = None,
) -> bytes:
    """One v2 record batch. `expected` and `write_id` become headers of the first record; `attributes` are or-ed in."""
    identity = producer or Producer(-1, -1, -1)
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=transactional,
        producer_id=identity.id,
        producer_epoch=identity.epoch,
        base_sequence=identity.sequence,
        batch_size=1 << 30,
    )
    now_ms = int(time.time() * 1000)
    for index, each in enumerate(records):
        record = each if isinstance(each, Record) else Record(each)
        headers = record.all_headers
        if index == 0 and expected is not None:
            headers.insert(0, ("fencepost-expected-offset", b"%d" % expected))
        if index == 0 and write_id is not None:
            headers.append(("fencepost-write-id", write_id))
        timestamp_ms = now_ms if record.timestamp_ms is None else record.timestamp_ms
        builder.append(index, timestamp=timestamp_ms, key=record.key, value=record.value, headers=headers)
    out = bytearray(builder.build())
    struct.pack_into(">q", out, 0, base_offset)
    if attributes:
        struct.pack_into(">h", out, 21, struct.unpack_from(">h", out, 21)[0] | attributes)
        sign(out)
    return bytes(out)


def sign(records: bytearray) -> None:
    """Set the right CRC in a changed batch."""
    struct.pack_into(">I", records, 17, crc32c.crc32c(bytes(records[21:])))


class Logged(NamedTuple):
    """One batch in Kafka's log."""

    base_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_control: bool
    is_transactional: bool
    codec: int
    last_offset_delta: int
    values: tuple[bytes | None, ...]
    leader_epoch: int
    attributes: int

    @property
    def next_offset(self) -> int:
        """From the header: compaction removes records from a batch, and may leave it empty."""
        return self.base_offset + self.last_offset_delta + 1


def read_batches(data: bytes) -> Iterator[Logged]:
    """The complete batches of a Fetch response. A control batch counts as one record without a value."""
    at = 0
    while len(data) - at >= _HEADER.size:
        header = _HEADER.unpack_from(data, at)
        base, length, leader_epoch, _, _, attributes, last_delta, _, _, producer_id, epoch, sequence, count = header
        end = at + 12 + length
        if end > len(data):
            return
        is_control = bool(attributes & 0x20)
        values: tuple[bytes | None, ...] = (None,) * count
        if not is_control:
            values = tuple(record.value for record in DefaultRecordBatch(bytes(data[at:end])))
        transactional, codec = bool(attributes & 0x10), attributes & 7
        identity = base, producer_id, epoch, sequence
        yield Logged(*identity, is_control, transactional, codec, last_delta, values, leader_epoch, attributes)
        at = end


# --- one connection ---------------------------------------------------------------------------------------------------


class Closed(ConnectionError):
    """The peer closed the connection."""


class Answer(NamedTuple):
    """The part of a Produce response for one partition. Fields that its version lacks are None."""

    error_code: int
    base_offset: int
    log_append_time_ms: int
    log_start_offset: int | None
    message: str | None
    record_errors: tuple[object, ...]

    @property
    def lacks_configs(self) -> bool:
        """A proxy whose lease expired during a pause, as on a busy machine, responds so. Nothing was appended."""
        return (self.message or "").startswith("TRY_AGAIN the proxy has not (re)read its topic configs")


#: topic -> partition -> batch
Batches = Mapping[str, Mapping[int, bytes]]


#: Prepares a new socket, such as TLS and login. Closes it if it raises.
Enter = Callable[[socket.socket], socket.socket]


def as_it_is(new: socket.socket) -> socket.socket:
    return new


class Connection(Closing):
    """One connection. `send…` and `receive…` may be mixed freely: responses have the order of requests."""

    def __init__(self, address: str, *, timeout_seconds: float = 60.0, enter: Enter = as_it_is) -> None:
        host, _, port = address.rpartition(":")
        new = socket.create_connection((host, int(port)), timeout_seconds)
        new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = enter(new)
        self.client_id = "raw"
        self._correlation_ids = itertools.count(1)
        self._buffer = b""

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Send RST: the peer may lose data that it has not read yet, as when a client dies."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def frame(self, request: Any, version: int) -> tuple[int, bytes]:
        correlation_id = next(self._correlation_ids)
        request.API_VERSION = version
        request.with_header(correlation_id=correlation_id, client_id=self.client_id)
        return correlation_id, bytes(request.encode(version=version, header=True, framed=True))

    def send(self, request: Any, version: int) -> int:
        """Return the correlation id."""
        correlation_id, data = self.frame(request, version)
        self.socket.sendall(data)
        return correlation_id

    def receive_frame(self) -> bytes:
        """Without its length. Raises Closed, or TimeoutError."""
        (length,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionError as error:
                raise Closed(str(error)) from error
            if not data:
                raise Closed(f"closed by {self.socket.getpeername()}" if not self._buffer else "closed within a frame")
            self._buffer += data
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def receive(self, request_class: Any, version: int) -> tuple[int, Any]:
        """The next response, and its correlation id."""
        frame = self.receive_frame()
        (correlation_id,) = struct.unpack_from(">i", frame)
        # ApiVersions responses have the oldest header in every version.
        return correlation_id, _RESPONSES[request_class].decode(frame, version=version, header=True)

    def query(self, request: Any, version: int) -> Any:
        sent = self.send(request, version)
        correlation_id, response = self.receive(type(request), version)
        assert correlation_id == sent, f"response {correlation_id} to request {sent}"
        return response

    def is_closed(self, within_seconds: float = 60.0) -> bool:
        """Whether the peer closes the connection in that time without sending anything."""
        self.socket.settimeout(within_seconds)
        try:
            return not self._buffer and self.socket.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    # ---- Produce

    def send_produce(
        self,
        batches: Batches,
        *,
        acks: int = -1,
        version: int = 9,
        timeout_ms: int = 10_000,
        transactional_id: str | None = None,
        topic_ids: Mapping[str, uuid.UUID] | None = None,
    ) -> int:
        return self.send(produce_request(batches, acks, timeout_ms, transactional_id, topic_ids), version)

    def receive_produce(self, version: int = 9) -> tuple[int, dict[tuple[str, int], Answer]]:
        correlation_id, response = self.receive(ProduceRequest, version)
        return correlation_id, {
            (topic.name or str(topic.topic_id), result.index): Answer(
                result.error_code,
                result.base_offset,
                result.log_append_time_ms,
                result.log_start_offset if version >= 5 else None,
                result.error_message if version >= 8 else None,
                tuple(result.record_errors or ()) if version >= 8 else (),
            )
            for topic in response.responses
            for result in topic.partition_responses
        }

    def produce(self, batches: Batches, *, version: int = 9, **settings: Any) -> dict[tuple[str, int], Answer]:
        """Repeat the request while the proxy has not read its topic configs: nothing was appended."""
        deadline = time.monotonic() + _CONFIGS_SECONDS
        while True:
            sent = self.send_produce(batches, version=version, **settings)
            correlation_id, answers = self.receive_produce(version)
            assert correlation_id == sent, f"response {correlation_id} to request {sent}"
            lacks_configs = any(each.lacks_configs for each in answers.values())
            if (
                not lacks_configs
                or not all(each.error_code for each in answers.values())
                or time.monotonic() > deadline
            ):
                return answers
            time.sleep(0.05)

    def append(self, topic: str, records: bytes, *, partition: int = 0, **settings: Any) -> Answer:
        """Produce one batch to one partition."""
        return self.produce({topic: {partition: records}}, **settings)[topic, partition]

    def pipeline(
        self, topic: str, batches: Sequence[bytes], *, partition: int = 0, timeout_ms: int = 10_000
    ) -> Iterator[Answer]:
        """Send each batch in one request, all in one write: otherwise the first response may precede the last request.
        The responses are received one by one."""
        requests = [produce_request({topic: {partition: each}}, -1, timeout_ms) for each in batches]
        self.socket.sendall(b"".join(self.frame(each, 9)[1] for each in requests))
        return (self.receive_produce()[1][topic, partition] for _ in requests)

    # ---- other requests

    def api_versions(self, version: int = 3) -> dict[int, tuple[int, int]]:
        request = ApiVersionsRequest(client_software_name="raw", client_software_version="1")
        return {each.api_key: (each.min_version, each.max_version) for each in self.query(request, version).api_keys}

    def metadata(self, *topics: str) -> Any:
        """Of all topics if none is named."""
        named = [MetadataRequest.MetadataRequestTopic(topic_id=uuid.UUID(int=0), name=name) for name in topics]
        request = MetadataRequest(
            topics=named if topics else None,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        return self.query(request, 12)

    def init_producer_id(self, transactional_id: str | None = None, timeout_ms: int = 60_000) -> Producer:
        request = InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout_ms=timeout_ms, producer_id=-1, producer_epoch=-1
        )
        answer = self.query(request, 4)
        assert answer.error_code == 0, f"InitProducerId returned {answer.error_code}"
        return Producer(answer.producer_id, answer.producer_epoch, 0)

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        replicas: int = 1,
        on: Sequence[int] | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> tuple[int, str | None]:
        """(error code, message). `on`: the brokers of every partition, the leader first.

        Returns once the leaders know that they lead. Kafka reports the topic before that, and responds to the first
        appends with 3 or 6, which every client retries.
        """
        assignment = CreateTopicsRequest.CreatableTopic.CreatableReplicaAssignment
        topic = CreateTopicsRequest.CreatableTopic(
            name=name,
            num_partitions=partitions if on is None else -1,
            replication_factor=replicas if on is None else -1,
            assignments=[
                assignment(partition_index=partition, broker_ids=list(on or ()))
                for partition in range(partitions if on is not None else 0)
            ],
            configs=[
                CreateTopicsRequest.CreatableTopic.CreatableTopicConfig(name=key, value=value)
                for key, value in (configs or {}).items()
            ],
        )
        answer = self.query(CreateTopicsRequest(topics=[topic], timeout_ms=10_000, validate_only=False), 5)
        if not answer.topics[0].error_code:
            self._await_leaders(name)
        return answer.topics[0].error_code, answer.topics[0].error_message

    def _await_leaders(self, topic: str) -> None:
        """Return at once if the user lacks permission or the leaders cannot be queried.

        Uses a separate connection, because an old broker closes it at an unknown version.
        """
        deadline = time.monotonic() + _LEADERS_SECONDS
        host, port = self.socket.getpeername()[:2]
        with contextlib.suppress(OSError, Closed, KeyError), Connection(f"{host}:{port}") as querying:
            while time.monotonic() < deadline and not querying._led(topic):
                time.sleep(0.02)

    def _led(self, topic: str) -> bool:
        metadata = self.metadata(topic)
        if metadata.topics[0].error_code in _NOT_YET or not metadata.topics[0].partitions:
            return metadata.topics[0].error_code not in _NOT_YET
        addresses = {each.node_id: f"{each.host}:{each.port}" for each in metadata.brokers}
        led: dict[int, list[Any]] = {}
        for each in metadata.topics[0].partitions:
            if each.error_code in _NOT_YET or each.leader_id < 0:
                return False
            led.setdefault(each.leader_id, []).append(each)
        for node_id, partitions in led.items():
            with Connection(addresses[node_id], timeout_seconds=_LEADERS_SECONDS) as leader:
                answers = leader.epoch_ends(topic, {each.partition_index: each.leader_epoch for each in partitions})
            if any(each.error_code in _NOT_YET for each in answers):
                return False
        return True

    def epoch_ends(self, topic: str, epochs: Mapping[int, int]) -> list[Any]:
        """OffsetForLeaderEpoch of these partitions, with their leaders' current epochs."""
        request_topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
        queried = [
            request_topic.OffsetForLeaderPartition(partition=partition, current_leader_epoch=epoch, leader_epoch=epoch)
            for partition, epoch in epochs.items()
        ]
        request = OffsetForLeaderEpochRequest(replica_id=-1, topics=[request_topic(topic=topic, partitions=queried)])
        return list(self.query(request, 4).topics[0].partitions)

    def delete_topic(self, name: str) -> int:
        return int(self.query(DeleteTopicsRequest(topic_names=[name], timeout_ms=10_000), 4).responses[0].error_code)

    def alter_topic(
        self,
        name: str,
        configs: Mapping[str, str | None],
        *,
        incremental: bool = True,
        validate_only: bool = False,
    ) -> tuple[int, str | None]:
        """(error code, message). A value of None deletes the config (incremental only)."""
        if incremental:
            resource = IncrementalAlterConfigsRequest.AlterConfigsResource
            entries = [
                resource.AlterableConfig(name=key, config_operation=int(value is None), value=value)
                for key, value in configs.items()
            ]
            topic = resource(resource_type=2, resource_name=name, configs=entries)
            request = IncrementalAlterConfigsRequest(resources=[topic], validate_only=validate_only)
            answer = self.query(request, 1).responses[0]
        else:
            legacy = AlterConfigsRequest.AlterConfigsResource
            entries = [legacy.AlterableConfig(name=key, value=value) for key, value in configs.items()]
            topic = legacy(resource_type=2, resource_name=name, configs=entries)
            answer = self.query(AlterConfigsRequest(resources=[topic], validate_only=validate_only), 2).responses[0]
        return answer.error_code, answer.error_message

    def describe_topic(self, name: str, *, keys: Sequence[str] | None = None) -> dict[str, str]:
        resource = DescribeConfigsRequest.DescribeConfigsResource
        request = DescribeConfigsRequest(
            resources=[
                resource(resource_type=2, resource_name=name, configuration_keys=None if keys is None else list(keys))
            ],
            include_synonyms=False,
            include_documentation=False,
        )
        result = self.query(request, 4).results[0]
        assert result.error_code == 0, f"DescribeConfigs of {name}: {result.error_code} {result.error_message}"
        return {config.name: config.value for config in result.configs}


def produce_request(
    batches: Batches,
    acks: int = -1,
    timeout_ms: int = 10_000,
    transactional_id: str | None = None,
    topic_ids: Mapping[str, uuid.UUID] | None = None,
) -> Any:
    """`topic_ids` are needed from v13 on, which names topics only by them."""
    topic_data = ProduceRequest.TopicProduceData
    topics = [
        topic_data(
            name=topic,
            topic_id=(topic_ids or {}).get(topic, uuid.UUID(int=0)),
            partition_data=[
                topic_data.PartitionProduceData(index=partition, records=records)
                for partition, records in partitions.items()
            ],
        )
        for topic, partitions in batches.items()
    ]
    return ProduceRequest(transactional_id=transactional_id, acks=acks, timeout_ms=timeout_ms, topic_data=topics)


# --- Kafka's log, read without a proxy --------------------------------------------------------------------------------


class Log:
    """Reads partitions directly from the brokers. `bootstrap` is Kafka's address."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap.split(",")

    def leader(self, topic: str, partition: int = 0) -> str:
        """The leader's address. Waits for one."""
        return until(lambda: self.known_leader(topic, partition), f"{topic}-{partition} to have a leader")

    def known_leader(self, topic: str, partition: int) -> str | None:
        for address in self._bootstrap:
            try:
                with Connection(address) as connection:
                    metadata = connection.metadata(topic)
            except (OSError, Closed):
                continue
            brokers = {each.node_id: f"{each.host}:{each.port}" for each in metadata.brokers}
            for each in metadata.topics[0].partitions:
                if each.partition_index == partition and not each.error_code:
                    return brokers.get(each.leader_id)
        return None

    def connect(self, topic: str, partition: int = 0) -> Connection:
        return Connection(self.leader(topic, partition))

    def end(self, topic: str, partition: int = 0) -> int:
        """The log end offset (not the high watermark)."""
        return until(lambda: self._end(topic, partition), f"the log end of {topic}-{partition}", accept=_not_none)

    def _end(self, topic: str, partition: int) -> int | None:
        with self.connect(topic, partition) as connection:
            metadata = connection.metadata(topic).topics[0]
            epochs = {each.partition_index: each.leader_epoch for each in metadata.partitions}
            epoch = epochs.get(partition, -1)  # -1: this broker does not know of the topic yet
            [answer] = connection.epoch_ends(topic, {partition: epoch})
        return int(answer.end_offset) if not answer.error_code and answer.leader_epoch == epoch else None

    def batches(self, topic: str, partition: int = 0, start: int = 0) -> list[Logged]:
        """All batches from `start` to the current log end, read uncommitted."""
        end = self.end(topic, partition)
        found: list[Logged] = []
        at = start
        deadline = time.monotonic() + 60
        with self.connect(topic, partition) as connection:
            while at < end and time.monotonic() < deadline:
                answer = connection.query(fetch(topic, partition, at, wait_ms=200), 12).responses[0].partitions[0]
                assert answer.error_code == 0, f"Fetch of {topic}-{partition} at {at}: {answer.error_code}"
                news = list(read_batches(bytes(answer.records or b"")))
                found += [each for each in news if each.next_offset > at]
                if news:
                    at = news[-1].next_offset
        assert at >= end, f"{topic}-{partition} was read up to {at} only, but its end is {end}"
        return found

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        """The value of every record, by offset, without markers."""
        return [value for each in self.batches(topic, partition) if not each.is_control for value in each.values]


def fetch(
    topic: str,
    partition: int = 0,
    offset: int = 0,
    *,
    wait_ms: int = 0,
    bytes_min: int = 1,
    bytes_max: int = 1 << 24,
) -> FetchRequest:
    """Of one partition, uncommitted records too; for versions that name topics."""
    fetch_topic = FetchRequest.FetchTopic
    queried = fetch_topic.FetchPartition(
        partition=partition,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=bytes_max,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=wait_ms,
        min_bytes=bytes_min,
        max_bytes=bytes_max,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[fetch_topic(topic=topic, partitions=[queried])],
        forgotten_topics_data=[],
        rack_id="",
    )


def _not_none(value: object) -> bool:
    return value is not None


def final_answer(client: Connection, topic: str, records: bytes, **settings: Any) -> Answer:
    """The final response of an append: error 6 means that nothing was appended and a retry is permitted."""

    def answer() -> Answer | None:
        last = client.append(topic, records, **settings)
        return None if last.error_code == _NOT_LEADER else last

    found: Answer = until(answer, "an answer that is not retriable")
    return found


def filled_topic(client: Connection, log: Log, name: str, length: int) -> str:
    """Create the topic and append so many records through the proxy."""
    assert client.create_topic(name) == (_OK, None)
    assert log.end(name) == 0
    for at in range(length):
        assert final_answer(client, name, batch(b"old", expected=at))[:2] == (_OK, at)
    return name
