"""A simulated Kafka cluster: any number of brokers and partitions in one process.

For tests that real Kafka does not permit on one machine: a hundred brokers, ten thousand partitions, and frequent
starts. Logs are in memory, replication is only reported, and nothing fails. `tests/integration/test_fake_cluster.py`
compares the responses with real Kafka's, by one script of requests for both.

    with FakeClusterProcess(brokers=3, topics={"orders": 12}) as kafka:
        ... kafka.bootstrap ...

As in Kafka, a broker handles the requests of a connection sequentially. A Fetch waits for its bytes and delays the
requests after it on its connection.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from fencepost_proxy.types import NO_TOPIC_ID
from fencepost_proxy.wire import control
from fencepost_proxy.wire.batch import BatchHeader, require_single_batch, verify_crc
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceResponse,
    TopicResult,
    encode_produce_response,
    parse_produce_request,
)
from fencepost_proxy.wire.schema import Message
from tests.kit.closing import Closing

HOST: Final = "127.0.0.1"
_READY_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 30.0
_LENGTH: Final = struct.Struct(">i")
_BASE_OFFSET: Final = struct.Struct(">q")
_LEADER_EPOCH_AT: Final = 12
_REMEMBERED_BATCHES: Final = 5
#: Prefix of topics that drop their records, and the number of records after which they do.
FORGETFUL: Final = "forgetful-"
FORGETS_EVERY: Final = 5
_SEQUENCE_MAX: Final = 2**31 - 1
_LEADER_EPOCH: Final = 0

NONE, OFFSET_OUT_OF_RANGE, CORRUPT_MESSAGE, UNKNOWN_TOPIC, NOT_LEADER, NOT_AUTHORIZED = 0, 1, 2, 3, 6, 29
TOPIC_EXISTS, OUT_OF_ORDER, PRODUCER_FENCED, FENCED_EPOCH, UNKNOWN_EPOCH = 36, 45, 47, 74, 75
INVALID_RECORD, UNKNOWN_TOPIC_ID, NO_SUCH_TRANSACTION = 87, 100, 105

#: API key → versions: those of Kafka 4.x that this cluster implements.
VERSIONS: Final[Mapping[int, tuple[int, int]]] = {
    0: (3, 13),
    1: (4, 17),
    2: (1, 10),
    3: (0, 13),
    10: (0, 6),
    18: (0, 4),
    19: (2, 7),
    22: (0, 5),
    23: (2, 4),
    32: (1, 4),
    61: (0, 0),
    65: (0, 0),
}
_TOPIC_DEFAULTS: Final = {
    "message.timestamp.type": "CreateTime",
    "max.message.bytes": "1048588",
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
    "cleanup.policy": "delete",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.after.max.ms": "3600000",
}
_BROKER_DEFAULTS: Final = {
    "producer.id.expiration.ms": "86400000",
    "producer.id.expiration.check.interval.ms": "600000",
}
_TOPIC, _BROKER = 2, 4
_SET_ON_TOPIC, _DEFAULT = 1, 5


# --- logs -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Producer:
    """A leader's state for one producer: `batches` are (first sequence, last sequence, base offset, timestamp)."""

    epoch: int
    batches: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_BATCHES))


class Partition:
    """A log and its producers. `kept_max`: older batches are deleted, as by retention.

    `forgets_every` – number of records after which all are deleted, and their producers forgotten, as before Kafka 2.5.
    A producer that continues gets OUT_OF_ORDER_SEQUENCE_NUMBER, since an unknown producer must begin at 0 there.
    """

    __slots__ = ("_producers", "_waiting", "batches", "forgets_every", "kept_max", "leader", "log_end", "replicas")

    def __init__(
        self, leader: int, replicas: tuple[int, ...], kept_max: int | None = None, forgets_every: int = 0
    ) -> None:
        self.forgets_every = forgets_every
        self.leader = leader
        self.replicas = replicas
        self.kept_max = kept_max
        self.log_end = 0
        self.batches: deque[tuple[int, int, bytes]] = deque()  # (base offset, next offset, batch)
        self._producers: dict[int, _Producer] = {}
        self._waiting: list[Callable[[], None]] = []

    @property
    def log_start(self) -> int:
        return self.batches[0][0] if self.batches else self.log_end

    def append(self, partition: PartitionData, now_ms: int) -> PartitionResult:
        index = partition.partition
        try:
            records = partition.records
            assert records is not None
            header = require_single_batch(records)
            if not verify_crc(records):
                return PartitionResult(index, CORRUPT_MESSAGE)
        except MalformedBatch:
            return PartitionResult(index, INVALID_RECORD)
        if header.base_offset != 0:
            return PartitionResult(index, INVALID_RECORD, log_start_offset=self.log_start)
        base, error, duplicate_at = self._sequence(header)
        if error:
            return PartitionResult(index, error, log_start_offset=self.log_start)
        if duplicate_at is not None:
            return PartitionResult(index, NONE, base, duplicate_at, self.log_start)
        stored = bytearray(records)
        _BASE_OFFSET.pack_into(stored, 0, base)
        _LENGTH.pack_into(stored, _LEADER_EPOCH_AT, _LEADER_EPOCH)
        self.log_end += header.record_count
        self.batches.append((base, self.log_end, bytes(stored)))
        if self.kept_max is not None and len(self.batches) > self.kept_max:
            self.batches.popleft()
        if self.forgets_every and self.log_end % self.forgets_every == 0:
            self.batches.clear()
            self._producers.clear()
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
        return PartitionResult(index, NONE, base, -1, self.log_start)

    def _sequence(self, header: BatchHeader) -> tuple[int, int, int | None]:
        """Base offset, error code, and for a duplicate the timestamp of its first append."""
        base = self.log_end
        if header.producer_id < 0:
            return base, NONE, None
        first = header.base_sequence
        last = (first + header.last_offset_delta) & _SEQUENCE_MAX
        known = self._producers.get(header.producer_id)
        if known is not None and header.producer_epoch < known.epoch:
            return base, PRODUCER_FENCED, None
        if known is not None and header.producer_epoch > known.epoch:
            if first != 0:
                return base, OUT_OF_ORDER, None
            known = None
        if known is not None:
            for before in known.batches:
                if before[:2] == (first, last):
                    return before[2], NONE, before[3]
            if first != (known.batches[-1][1] + 1) & _SEQUENCE_MAX:
                return base, OUT_OF_ORDER, None
        elif self.forgets_every and first:
            return base, OUT_OF_ORDER, None
        else:
            known = self._producers[header.producer_id] = _Producer(header.producer_epoch)
        known.batches.append((first, last, base, header.max_timestamp_ms))
        return base, NONE, None

    def active_producers(self) -> list[Message]:
        return [
            Message(
                producer_id=producer_id,
                producer_epoch=known.epoch,
                last_sequence=known.batches[-1][1],
                last_timestamp=known.batches[-1][3],
                coordinator_epoch=-1,
                current_txn_start_offset=-1,
            )
            for producer_id, known in self._producers.items()
        ]

    def read(self, offset: int, bytes_max: int) -> bytes:
        """Whole batches, the first regardless of its size."""
        out: list[bytes] = []
        size = 0
        for _, end, data in self.batches:
            if end <= offset:
                continue
            if out and size + len(data) > bytes_max:
                break
            out.append(data)
            size += len(data)
        return b"".join(out)

    def when_appended(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once, at the next append. Returns a function that cancels it."""
        self._waiting.append(wake)

        def cancel() -> None:
            if wake in self._waiting:
                self._waiting.remove(wake)

        return cancel


@dataclass(slots=True)
class Topic:
    name: str
    topic_id: UUID
    partitions: list[Partition]
    configs: dict[str, str]


# --- the cluster ------------------------------------------------------------------------------------------------------


class FakeCluster:
    """All brokers, on one event loop. `topics`: name → number of partitions, with leaders distributed in turn.

    `kept_max`: batches kept per partition, None for all. Limits the memory of a long load.
    """

    def __init__(
        self, brokers: int = 1, topics: Mapping[str, int] | None = None, *, kept_max: int | None = None
    ) -> None:
        self.cluster_id = "fake-" + uuid4().hex[:17]
        self._node_ids = list(range(1, brokers + 1))
        self._kept_max = kept_max
        self._next_producer_id = 1000
        self._ports: dict[int, int] = {}
        self._servers: list[asyncio.Server] = []
        self.topics: dict[str, Topic] = {}
        self.hidden: set[str] = set()  #: topics that clients may not DESCRIBE
        self._by_id: dict[UUID, Topic] = {}
        #: Encoded Metadata responses by version and request: thousands of clients send the same request.
        self._reported: dict[tuple[int, bytes], bytes] = {}
        for name, partitions in (topics or {}).items():
            self.create(name, partitions)

    def create(self, name: str, partitions: int, replicas: int = 1, configs: Mapping[str, str] | None = None) -> Topic:
        count = len(self._node_ids)
        made = []
        for index in range(partitions):
            nodes = tuple(self._node_ids[(index + each) % count] for each in range(min(replicas, count)))
            kept_max = None if name.startswith("__") else self._kept_max
            forgets_every = FORGETS_EVERY if name.startswith(FORGETFUL) else 0
            made.append(Partition(nodes[0], nodes, kept_max, forgets_every))
        topic = self.topics[name] = Topic(name, uuid4(), made, dict(configs or {}))
        self._by_id[topic.topic_id] = topic
        self._reported.clear()
        return topic

    def changed(self) -> None:
        """Discard the encoded responses after a change of metadata."""
        self._reported.clear()

    def add_broker(self) -> None:
        """Add a broker without partitions; `start` opens its listener."""
        self._node_ids.append(len(self._node_ids) + 1)
        self._reported.clear()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for node_id in self._node_ids:
            if node_id in self._ports:
                continue
            server = await loop.create_server(lambda node=node_id: _Connection(self, node), HOST, 0, backlog=1024)  # type: ignore[misc]
            self._servers.append(server)
            self._ports[node_id] = server.sockets[0].getsockname()[1]

    def close(self) -> None:
        for server in self._servers:
            server.close()

    @property
    def bootstrap(self) -> str:
        """The addresses of up to three brokers."""
        return ",".join(f"{HOST}:{port}" for port in list(self._ports.values())[:3])

    # ---- answers: bytes with their length, or a coroutine-free promise of them (`_Waiting`)

    def answer(self, node_id: int, frame: bytes) -> bytes | _Waiting | None:
        """None: the request has no response (acks=0). Raises ValueError or KeyError for unknown requests."""
        key, version, correlation_id = struct.unpack_from(">hhi", frame)
        if key == 0:
            return self._produce(node_id, frame, version)
        header = control.parse_request_header(frame)
        first, last = VERSIONS[key]
        body = frame[header.body_offset :]
        if key == 18 and not first <= version <= last:
            # KIP-511: report the supported versions in v0, which every client can read.
            return control.encode_response_frame(18, 0, correlation_id, self._api_versions(error_code=35))
        if not first <= version <= last:
            raise ValueError(f"version {version} of API {key} is not served")
        if key == 3:
            reported = self._reported.get((version, body))
            if reported is None:
                request = control.decode_request(key, version, body)
                reported = self._reported[version, body] = control.encode_response_frame(
                    key, version, 0, self._metadata(version, request)
                )
            return reported[:4] + _LENGTH.pack(correlation_id) + reported[8:]
        request = control.decode_request(key, version, body)
        if key == 1:
            return _Waiting(self, node_id, version, correlation_id, request)
        made = _ANSWERS[key](self, node_id, version, request)
        return control.encode_response_frame(key, version, correlation_id, made)

    def _api_versions(self, error_code: int = NONE) -> Message:
        keys = [Message(api_key=key, min_version=low, max_version=high) for key, (low, high) in VERSIONS.items()]
        return Message(error_code=error_code, api_keys=keys)

    def _metadata(self, version: int, request: Message) -> Message:
        topics = []
        if request.topics is None or (version == 0 and not request.topics):
            topics = [self._described(topic) for topic in self.topics.values()]
        else:
            for requested in request.topics:
                found = (
                    self._by_id.get(requested.topic_id) if requested.name is None else self.topics.get(requested.name)
                )
                if requested.name in self.hidden:
                    topics.append(Message(error_code=NOT_AUTHORIZED, name=requested.name, partitions=[]))
                elif found is not None:
                    topics.append(self._described(found))
                else:
                    error = UNKNOWN_TOPIC if requested.name is not None else UNKNOWN_TOPIC_ID
                    topics.append(
                        Message(error_code=error, name=requested.name, topic_id=requested.topic_id, partitions=[])
                    )
        brokers = [Message(node_id=node_id, host=HOST, port=self._ports[node_id]) for node_id in self._node_ids]
        return Message(brokers=brokers, cluster_id=self.cluster_id, controller_id=self._node_ids[0], topics=topics)

    @staticmethod
    def _described(topic: Topic) -> Message:
        partitions = [
            Message(
                partition_index=index,
                leader_id=partition.leader,
                leader_epoch=_LEADER_EPOCH,
                replica_nodes=list(partition.replicas),
                isr_nodes=list(partition.replicas),
            )
            for index, partition in enumerate(topic.partitions)
        ]
        return Message(name=topic.name, topic_id=topic.topic_id, partitions=partitions)

    def find(self, name: str | None, topic_id: UUID, index: int, node_id: int) -> tuple[Partition | None, int]:
        topic = self.topics.get(name) if name else self._by_id.get(topic_id)
        if topic is None:
            return None, UNKNOWN_TOPIC if name else UNKNOWN_TOPIC_ID
        if not 0 <= index < len(topic.partitions):
            return None, UNKNOWN_TOPIC
        partition = topic.partitions[index]
        return (None, NOT_LEADER) if partition.leader != node_id else (partition, NONE)

    def _produce(self, node_id: int, frame: bytes, version: int) -> bytes | None:
        request = parse_produce_request(memoryview(frame))
        now_ms = int(time.time() * 1000)
        topics = []
        failed = False
        for topic in request.topics:
            results = []
            for each in topic.partitions:
                partition, error = self.find(topic.name, topic.topic_id or NO_TOPIC_ID, each.partition, node_id)
                result = PartitionResult(each.partition, error) if partition is None else partition.append(each, now_ms)
                failed = failed or bool(result.error_code)
                results.append(result)
            topics.append(TopicResult(topic.name, topic.topic_id, tuple(results)))
        if request.acks == 0:
            if failed:
                raise ValueError("an error that acks=0 leaves no answer for")
            return None
        return encode_produce_response(ProduceResponse(request.correlation_id, tuple(topics), 0), version)

    # ---- the rest, by API

    def answer_api_versions(self, node_id: int, version: int, request: Message) -> Message:
        return self._api_versions()

    def answer_list_offsets(self, node_id: int, version: int, request: Message) -> Message:
        def offset(topic: Message, requested: Message) -> Message:
            partition, error = self._led(topic.name, requested.partition_index, node_id, requested.current_leader_epoch)
            if partition is None:
                return Message(partition_index=requested.partition_index, error_code=error, timestamp=-1, offset=-1)
            at = {-1: partition.log_end, -2: partition.log_start}[requested.timestamp]
            return Message(
                partition_index=requested.partition_index, timestamp=-1, offset=at, leader_epoch=_LEADER_EPOCH
            )

        return Message(
            topics=[
                Message(name=topic.name, partitions=[offset(topic, each) for each in topic.partitions])
                for topic in request.topics
            ]
        )

    def answer_offset_for_leader_epoch(self, node_id: int, version: int, request: Message) -> Message:
        def end(topic: Message, requested: Message) -> Message:
            partition, error = self._led(topic.topic, requested.partition, node_id, requested.current_leader_epoch)
            if partition is None:
                return Message(partition=requested.partition, error_code=error, leader_epoch=-1, end_offset=-1)
            if requested.leader_epoch != _LEADER_EPOCH:
                return Message(partition=requested.partition, leader_epoch=-1, end_offset=-1)
            return Message(partition=requested.partition, leader_epoch=_LEADER_EPOCH, end_offset=partition.log_end)

        return Message(
            topics=[
                Message(topic=topic.topic, partitions=[end(topic, each) for each in topic.partitions])
                for topic in request.topics
            ]
        )

    def _led(self, name: str, index: int, node_id: int, epoch: int) -> tuple[Partition | None, int]:
        partition, error = self.find(name, NO_TOPIC_ID, index, node_id)
        if partition is not None and epoch not in (-1, _LEADER_EPOCH):
            return None, FENCED_EPOCH if epoch < _LEADER_EPOCH else UNKNOWN_EPOCH
        return partition, error

    def answer_describe_producers(self, node_id: int, version: int, request: Message) -> Message:
        def producers(topic: Message, index: int) -> Message:
            partition, error = self.find(topic.name, NO_TOPIC_ID, index, node_id)
            active = [] if partition is None else partition.active_producers()
            return Message(partition_index=index, error_code=error, active_producers=active)

        return Message(
            topics=[
                Message(name=topic.name, partitions=[producers(topic, index) for index in topic.partition_indexes])
                for topic in request.topics
            ]
        )

    def answer_find_coordinator(self, node_id: int, version: int, request: Message) -> Message:
        node = self._node_ids[0]
        there = {"node_id": node, "host": HOST, "port": self._ports[node]}
        return Message(
            **there, coordinators=[Message(key=key, **there) for key in getattr(request, "coordinator_keys", [])]
        )

    def answer_describe_transactions(self, node_id: int, version: int, request: Message) -> Message:
        return Message(
            transaction_states=[
                Message(transactional_id=each, error_code=NO_SUCH_TRANSACTION, topics=[])
                for each in request.transactional_ids
            ]
        )

    def answer_init_producer_id(self, node_id: int, version: int, request: Message) -> Message:
        self._next_producer_id += 1
        return Message(producer_id=self._next_producer_id, producer_epoch=0)

    def answer_create_topics(self, node_id: int, version: int, request: Message) -> Message:
        results = []
        for requested in request.topics:
            if requested.name in self.topics:
                results.append(
                    Message(name=requested.name, error_code=TOPIC_EXISTS, num_partitions=-1, replication_factor=-1)
                )
                continue
            configs = {each.name: each.value for each in requested.configs}
            made = self.create(
                requested.name, max(1, requested.num_partitions), max(1, requested.replication_factor), configs
            )
            results.append(
                Message(
                    name=made.name,
                    topic_id=made.topic_id,
                    num_partitions=len(made.partitions),
                    replication_factor=len(made.partitions[0].replicas),
                    configs=[],
                )
            )
        return Message(topics=results)

    def answer_describe_configs(self, node_id: int, version: int, request: Message) -> Message:
        results = []
        for resource in request.resources:
            topic = self.topics.get(resource.resource_name)
            reported = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
            if resource.resource_type == _TOPIC and topic is None:
                results.append(Message(error_code=UNKNOWN_TOPIC, configs=[], **reported))
                continue
            given = topic.configs if resource.resource_type == _TOPIC and topic is not None else {}
            defaults = _TOPIC_DEFAULTS if resource.resource_type == _TOPIC else _BROKER_DEFAULTS
            keys = resource.configuration_keys
            configs = [
                Message(name=name, value=value, config_source=_SET_ON_TOPIC if name in given else _DEFAULT)
                for name, value in {**defaults, **given}.items()
                if keys is None or name in keys
            ]
            results.append(Message(configs=configs, **reported))
        return Message(results=results)


_ANSWERS: Final[Mapping[int, Callable[[FakeCluster, int, int, Message], Message]]] = {
    2: FakeCluster.answer_list_offsets,
    10: FakeCluster.answer_find_coordinator,
    18: FakeCluster.answer_api_versions,
    19: FakeCluster.answer_create_topics,
    22: FakeCluster.answer_init_producer_id,
    23: FakeCluster.answer_offset_for_leader_epoch,
    32: FakeCluster.answer_describe_configs,
    61: FakeCluster.answer_describe_producers,
    65: FakeCluster.answer_describe_transactions,
}


class _Waiting:
    """A Fetch: answered immediately with enough bytes or an error, otherwise at an append or after `max_wait_ms`."""

    def __init__(self, cluster: FakeCluster, node_id: int, version: int, correlation_id: int, request: Message) -> None:
        self._cluster = cluster
        self._node_id = node_id
        self._version = version
        self._correlation_id = correlation_id
        self._request = request
        self._cancels: list[Callable[[], None]] = []

    def start(self, done: Callable[[bytes], None]) -> None:
        response, size, failed = self._probe()
        if failed or size >= self._request.min_bytes or self._request.max_wait_ms <= 0:
            done(self._encoded(response))
            return

        def again() -> None:
            _, size, failed = self._probe()
            if failed or size >= self._request.min_bytes:
                finish()

        def finish() -> None:
            timer.cancel()
            for cancel in self._cancels:
                cancel()
            done(self._encoded(self._probe()[0]))

        timer = asyncio.get_running_loop().call_later(self._request.max_wait_ms / 1000, finish)
        for _, partition, _, _ in self._partitions():
            if partition is not None:
                self._cancels.append(partition.when_appended(again))

    def _partitions(self) -> Iterator[tuple[Message, Partition | None, int, Message]]:
        for topic in self._request.topics:
            for requested in topic.partitions:
                name = topic.topic if self._version < 13 else None
                found, error = self._cluster.find(name, topic.topic_id, requested.partition, self._node_id)
                yield topic, found, error, requested

    def _probe(self) -> tuple[Message, int, bool]:
        topics: dict[int, Message] = {}
        size = 0
        failed = False
        for topic, partition, problem, requested in self._partitions():
            error = problem
            entry = topics.setdefault(id(topic), Message(topic=topic.topic, topic_id=topic.topic_id, partitions=[]))
            if partition is not None and not partition.log_start <= requested.fetch_offset <= partition.log_end:
                error = OFFSET_OUT_OF_RANGE
            if partition is None or error:
                failed = True
                reported = Message(
                    partition_index=requested.partition, error_code=error, high_watermark=-1, records=b""
                )
            else:
                bytes_max = (
                    min(requested.partition_max_bytes, self._request.max_bytes - size)
                    if size
                    else requested.partition_max_bytes
                )
                records = partition.read(requested.fetch_offset, bytes_max)
                size += len(records)
                reported = Message(
                    partition_index=requested.partition,
                    high_watermark=partition.log_end,
                    last_stable_offset=partition.log_end,
                    log_start_offset=partition.log_start,
                    aborted_transactions=None,
                    records=records,
                )
            entry.partitions.append(reported)
        return Message(responses=list(topics.values())), size, failed

    def _encoded(self, response: Message) -> bytes:
        return control.encode_response_frame(1, self._version, self._correlation_id, response)


class _Connection(asyncio.Protocol):
    """Handles one request at a time. An unknown request closes it, as in Kafka."""

    __slots__ = ("_buffer", "_busy", "_cluster", "_node_id", "_transport")

    def __init__(self, cluster: FakeCluster, node_id: int) -> None:
        self._cluster = cluster
        self._node_id = node_id
        self._buffer = b""
        self._busy = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._pump()

    def _pump(self) -> None:
        while not self._busy and len(self._buffer) >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < 4 + length:
                return
            frame, self._buffer = self._buffer[4 : 4 + length], self._buffer[4 + length :]
            try:
                answer = self._cluster.answer(self._node_id, frame)
            except Exception as error:
                print(f"broker {self._node_id}: closing a connection: {error!r}", file=sys.stderr, flush=True)
                self._transport.close()
                return
            if isinstance(answer, _Waiting):
                self._busy = True
                answer.start(self._fetched)
            elif answer is not None:
                self._transport.write(answer)

    def _fetched(self, answer: bytes) -> None:
        self._busy = False
        if self._transport.is_closing():
            return  # the client closed its connection meanwhile
        self._transport.write(answer)
        asyncio.get_running_loop().call_soon(self._pump)


# --- as a process -----------------------------------------------------------------------------------------------------


class FakeClusterProcess(Closing):
    """The cluster in a separate process, so that measurements exclude its costs. Ready on construction."""

    def __init__(
        self, *, brokers: int = 1, topics: Mapping[str, int] | None = None, kept_max: int | None = None
    ) -> None:
        arguments = [f"--brokers={brokers}", *(f"--topic={name}:{count}" for name, count in (topics or {}).items())]
        if kept_max is not None:
            arguments.append(f"--kept-max={kept_max}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_cluster", *arguments],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        stdout = self._process.stdout
        assert stdout is not None
        watchdog = threading.Timer(_READY_SECONDS, self._process.kill)
        watchdog.start()
        line = stdout.readline()
        watchdog.cancel()
        if not line.startswith("ready bootstrap="):
            self.close()
            raise AssertionError(f"the fake cluster did not get ready: {line!r}")
        self.bootstrap = line.split("=", 1)[1].strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


async def _serve(arguments: argparse.Namespace) -> None:
    topics = {}
    for each in arguments.topic:
        name, _, count = each.rpartition(":")
        topics[name] = int(count)
    cluster = FakeCluster(arguments.brokers, topics, kept_max=arguments.kept_max)
    await cluster.start()
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    print(f"ready bootstrap={cluster.bootstrap}", flush=True)
    await stop.wait()
    cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A fake Kafka cluster on loopback.")
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--topic", action="append", default=[], metavar="NAME:PARTITIONS")
    parser.add_argument("--kept-max", type=int, default=None, help="batches kept per partition")
    import uvloop  # noqa: PLC0415 - only the process needs it

    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
