"""Kafka's log, read without proxies and pipes."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatch
from kafka import KafkaConsumer, TopicPartition
from kafka.protocol.consumer import FetchRequest

from tests.support.raw import Connection, Log

_READ_SECONDS = 120.0
_HEADER = struct.Struct(">qiibIhi")
_CONTROL = 0x20
#: Separates the id of a record from its padding.
PADDING = b" "


def _batches(connection: Connection, topic: str, at: int) -> bytes:
    fetch_topic = FetchRequest.FetchTopic
    queried = fetch_topic.FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=at,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1 << 22,
    )
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=200,
        min_bytes=1,
        max_bytes=1 << 24,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[fetch_topic(topic=topic, partitions=[queried])],
        forgotten_topics_data=[],
        rack_id="",
    )
    answer = connection.query(request, 12).responses[0].partitions[0]
    if answer.error_code:
        raise OSError(f"Fetch of {topic} at {at}: {answer.error_code}")
    return bytes(answer.records or b"")


def records(log: Log, topic: str) -> Iterator[tuple[int, str | None, int]]:
    """(offset, id, leader epoch) of all records. A transaction marker has the id None."""
    end = log.end(topic)
    at = 0
    give_up = time.monotonic() + _READ_SECONDS
    with log.connect(topic) as connection:
        while at < end:
            assert time.monotonic() < give_up, f"{topic} was read up to {at} only, but its end is {end}"
            data = _batches(connection, topic, at)
            position = 0
            while len(data) - position >= _HEADER.size:
                base, length, epoch, _, _, attributes, last_delta = _HEADER.unpack_from(data, position)
                batch = data[position : position + 12 + length]
                position += 12 + length
                if len(batch) < 12 + length:
                    break
                if base + last_delta < at:
                    continue
                if attributes & _CONTROL:
                    yield base, None, epoch
                else:
                    for record in DefaultRecordBatch(batch):
                        yield record.offset, (record.value or b"").rstrip(PADDING).decode(errors="replace"), epoch
                at = base + last_delta + 1


def committed(bootstrap: str, topic: str) -> set[int]:
    """Offsets that a read_committed consumer receives."""
    partition = TopicPartition(topic, 0)
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        fetch_max_bytes=1 << 24,
        max_partition_fetch_bytes=1 << 22,
    )
    try:
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        end = consumer.end_offsets([partition])[partition]
        found: set[int] = set()
        give_up = time.monotonic() + _READ_SECONDS
        while consumer.position(partition) < end:
            assert time.monotonic() < give_up, f"{topic}: committed records could not be read up to {end}"
            found |= {record.offset for record in consumer.poll(500, max_records=5000).get(partition, [])}
        return found
    finally:
        consumer.close()


def write(log: Log, bootstrap: str, topics: list[str], path: Path) -> dict[str, int]:
    """Write the log as JSON lines. Return the number of records and markers of each topic."""
    counts = {}
    with path.open("w", encoding="utf-8") as file:
        for topic in topics:
            observed = committed(bootstrap, topic)
            counts[topic] = 0
            for offset, each, epoch in records(log, topic):
                line: dict[str, Any] = {"topic": topic, "partition": 0, "offset": offset, "id": each}
                line |= {"leader_epoch": epoch, "visible": offset in observed}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                counts[topic] += 1
    return counts
