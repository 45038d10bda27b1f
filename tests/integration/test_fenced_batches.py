"""A real Kafka accepts the proxy's fenced batches and returns them so that the digest recognises them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from uuid import UUID

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer as ConfluentConsumer
from confluent_kafka import TopicPartition as ConfluentPartition
from kafka import KafkaConsumer

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import run_tool
from fencepost_proxy.errors import Error
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import BatchHeader, fence_batch, split_batches, verify_crc
from fencepost_proxy.wire.batch_digest import digest_batch, may_be_rewritten
from fencepost_proxy.wire.batch_scan import HeaderNames, scan_batch
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    TopicData,
    encode_produce_request,
    parse_produce_response,
)
from tests.support import raw

pytestmark = pytest.mark.kafka

LIMIT = 1 << 20
WHERE = TopicPartition("t", 0)
PRODUCER_ID = 1 << 40


def _topic(connection: raw.Connection, name: str, configs: dict[str, str]) -> UUID:
    assert connection.create_topic(name, configs=configs) == (0, None)
    deadline = time.monotonic() + 60
    while True:
        topic = connection.metadata(name).topics[0]
        if topic.error_code == 0 and topic.partitions[0].leader_id >= 0:
            return UUID(str(topic.topic_id))
        assert time.monotonic() < deadline, f"{name} has no leader: {topic}"
        time.sleep(0.05)


def _append(
    connection: raw.Connection, version: int, name: str, topic_id: UUID, records: bytes | bytearray
) -> PartitionResult:
    """Append with the proxy's codec, and retry until the leader in Metadata has accepted its role."""
    partition = PartitionData(0, memoryview(records))
    topic = TopicData("", topic_id, (partition,)) if version >= 13 else TopicData(name, None, (partition,))
    deadline = time.monotonic() + 60
    while True:
        request = ProduceRequest(version, 5, "test", b"", None, -1, 10_000, (topic,))
        connection.socket.sendall(b"".join(encode_produce_request(request)))
        response = parse_produce_response(memoryview(connection.receive_frame()), version)
        assert response.correlation_id == 5
        result = response.topics[0].partitions[0]
        retriable = (Error.NOT_LEADER_OR_FOLLOWER, Error.UNKNOWN_TOPIC_OR_PARTITION, Error.UNKNOWN_TOPIC_ID)
        if result.error_code not in retriable or time.monotonic() > deadline:
            return result
        time.sleep(0.05)


def _fetch(connection: raw.Connection, name: str) -> list[tuple[BatchHeader, memoryview]]:
    answer = connection.query(raw.fetch(name, bytes_max=LIMIT), 4).responses[0].partitions[0]
    assert answer.error_code == 0
    return list(split_batches(memoryview(bytes(answer.records))))


def _batches() -> list[bytes]:
    """One batch of each codec, with compressible records."""
    now_ms = int(time.time() * 1000)
    records = [
        raw.Record(b"value %d " % i * 20, key=b"k%d" % i, headers=[("h", b"1")], timestamp_ms=now_ms + 90 * i - 500)
        for i in range(10)
    ]
    return [raw.batch(*records, producer=raw.Producer(77, 3, 9), codec=codec) for codec in raw.CODECS.values()]


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param({}, id="as-sent"),
        pytest.param({"compression.type": "zstd"}, id="repacked"),
        pytest.param({"compression.type": "uncompressed"}, id="unpacked"),
        pytest.param({"message.timestamp.type": "LogAppendTime"}, id="log-append-time"),
        pytest.param(
            {"message.timestamp.type": "LogAppendTime", "compression.type": "gzip"}, id="log-append-time-repacked"
        ),
    ],
)
@pytest.mark.parametrize("version", [3, 7, 9, 12, 13])
def test_fenced_batches_are_appended_and_recognised_again(
    kafka: KafkaCluster, unique_topic: Callable[..., str], version: int, configs: dict[str, str]
) -> None:
    """The expected offset of each batch is its sequence. The broker checks the CRC and the sequence."""
    sent = _batches() if version >= 7 else _batches()[:-1]  # zstd requires v7
    name = unique_topic("fenced")
    ignore_timestamps = "message.timestamp.type" in configs
    with raw.Connection(kafka.bootstrap) as connection:
        topic_id = _topic(connection, name, configs)
        for i, batch in enumerate(sent):
            assert verify_crc(memoryview(batch))
            fenced = fence_batch(memoryview(batch), producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=10 * i)
            result = _append(connection, version, name, topic_id, fenced)
            assert (result.error_code, result.base_offset) == (0, 10 * i)
        gap = fence_batch(
            memoryview(sent[0]), producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=10 * len(sent) + 1
        )
        assert _append(connection, version, name, topic_id, gap).error_code == Error.OUT_OF_ORDER_SEQUENCE_NUMBER
        stored = _fetch(connection, name)

    assert [header.base_offset for header, _ in stored] == list(range(0, 10 * len(sent), 10))
    for batch, (header, found) in zip(sent, stored, strict=True):
        assert (header.producer_id, header.base_sequence) == (PRODUCER_ID, header.base_offset)
        assert header.is_log_append_time == ignore_timestamps
        assert digest_batch(found, decompressed_bytes_max=LIMIT, ignore_timestamps=ignore_timestamps) == digest_batch(
            memoryview(batch), decompressed_bytes_max=LIMIT, ignore_timestamps=ignore_timestamps
        )


@pytest.mark.parametrize(
    ("configs", "kept"),
    [
        pytest.param({}, True, id="as-sent"),
        pytest.param({"compression.type": "zstd"}, False, id="repacked"),
        pytest.param({"message.timestamp.type": "LogAppendTime"}, False, id="log-append-time"),
    ],
)
@pytest.mark.parametrize("instance_id", [1, 170, 255])
def test_instance_id_is_kept_unless_broker_rewrites_batch(
    kafka: KafkaCluster, unique_topic: Callable[..., str], instance_id: int, configs: dict[str, str], kept: bool
) -> None:
    name = unique_topic("tagged")
    batch = raw.batch(raw.Record(b"v", timestamp_ms=int(time.time() * 1000)), codec=raw.CODECS["gzip"])
    fenced = fence_batch(
        memoryview(batch), producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=0, instance_id=instance_id
    )
    with raw.Connection(kafka.bootstrap) as connection:
        topic_id = _topic(connection, name, configs)
        assert _append(connection, 9, name, topic_id, fenced).error_code == 0
        ((header, _),) = _fetch(connection, name)
    assert header.instance_id == (instance_id if kept else 0)
    assert not header.is_transactional
    assert not header.is_control


def _confluent(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = ConfluentConsumer({"bootstrap.servers": bootstrap, "group.id": topic, "enable.auto.commit": False})
    consumer.assign([ConfluentPartition(topic, 0, 0)])
    try:
        found = [message.value() or b"" for message in consumer.consume(count, 90)]
    finally:
        consumer.close()
    return found


def _kafka_python(bootstrap: str, topic: str, count: int) -> list[bytes]:
    with closing(KafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")) as consumer:
        return [record.value for record in islice(consumer, count)]


def _aiokafka(bootstrap: str, topic: str, count: int) -> list[bytes]:
    async def story() -> list[bytes]:
        async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
            return [(await asyncio.wait_for(consumer.getone(), 90)).value for _ in range(count)]

    return asyncio.run(story())


def _java(bootstrap: str, topic: str, count: int) -> list[bytes]:
    arguments = ["--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"]
    found = run_tool("kafka-console-consumer", [*arguments, "--max-messages", str(count), "--timeout-ms", "90000"])
    return found.output.encode().split()


def test_consumers_accept_batches_with_an_instance_id(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    """A batch of each codec, with all bits of the instance id set. Java reads with the console consumer."""
    name = unique_topic("tagged")
    with raw.Connection(kafka.bootstrap) as connection:
        topic_id = _topic(connection, name, {})
        for i, (codec, number) in enumerate(raw.CODECS.items()):
            record = raw.Record(codec.encode(), timestamp_ms=int(time.time() * 1000))
            batch = memoryview(raw.batch(record, codec=number))
            fenced = fence_batch(batch, producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=i, instance_id=255)
            assert _append(connection, 9, name, topic_id, fenced).error_code == 0
    values = [codec.encode() for codec in raw.CODECS]
    for read in (_kafka_python, _confluent, _aiokafka, _java):
        assert read(kafka.bootstrap, name, len(values)) == values


@pytest.mark.parametrize("compression", ["producer", "zstd"])
def test_broker_computes_same_newest_timestamp_as_proxy(
    kafka: KafkaCluster, unique_topic: Callable[..., str], compression: str
) -> None:
    """The batch header states a wrong timestamp, and its base timestamp is not the first record's."""
    now_ms = int(time.time() * 1000)
    batch = bytearray(raw.batch(*(raw.Record(b"v", timestamp_ms=now_ms + delta) for delta in (0, 5, -20))))
    batch[61 + 2] = 2 * 9  # the first record's delta: length, attributes, then 9 in zigzag
    batch[35:43] = (now_ms - 5_000).to_bytes(8, "big")  # max timestamp
    raw.sign(batch)
    scan = scan_batch(memoryview(batch), HeaderNames(), WHERE, source_is_base=False, decompressed_bytes_max=LIMIT)
    assert scan.max_timestamp_ms == now_ms + 9
    name = unique_topic("newest")
    with raw.Connection(kafka.bootstrap) as connection:
        topic_id = _topic(connection, name, {"compression.type": compression})
        assert _append(connection, 9, name, topic_id, batch).error_code == 0
        ((header, found),) = _fetch(connection, name)
    assert header.max_timestamp_ms == scan.max_timestamp_ms
    stored = scan_batch(found, HeaderNames(), WHERE, source_is_base=False, decompressed_bytes_max=LIMIT)
    assert stored.digest == scan.digest or may_be_rewritten(stored.digest, scan.digest)
    assert digest_batch(found, decompressed_bytes_max=LIMIT) == digest_batch(
        memoryview(batch), decompressed_bytes_max=LIMIT
    )
