"""Measure what a Metadata response of all topics costs the proxy, by its number of partitions.

    python -m benchmarks.metadata                              # the code alone, in this process: some seconds
    python -m benchmarks.metadata --kafka --topics 200         # also a Kafka with so many topics, and a proxy

Topics have ten partitions with three replicas each (with --kafka: one). CPU time is that of the proxy, per response.
The code is measured with the native module, in pure Python, and decoded and encoded whole for comparison.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final
from unittest.mock import patch
from uuid import UUID

from kafka.protocol.admin import CreateTopicsRequest
from kafka.protocol.metadata import MetadataRequest

from benchmarks import machine
from benchmarks.scaling import cpu_seconds
from benchmarks.status_page import share
from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.executor import EXECUTOR, Executor
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import NodeId
from fencepost_proxy.wire import layouts
from fencepost_proxy.wire.apis import METADATA
from fencepost_proxy.wire.control import (
    decode_response,
    encode_request_frame,
    encode_response,
    encode_response_frame,
    parse_response_header,
)
from fencepost_proxy.wire.schema import Message
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection

_VERSION: Final = 12
_PARTITIONS: Final = (100, 10_000, 100_000)
_PARTITIONS_OF_TOPIC: Final = 10
_STATE_TOPIC: Final = "__fencepost_state"
_TIMES: Final = 20
_ONCE_FROM_PARTITIONS: Final = 100_000
_TOPICS_AT_ONCE: Final = 50
_PATIENCE_SECONDS: Final = 600.0


def response_of(partition_count: int) -> bytes:
    """A whole frame, with the state topic in the middle."""
    names = [f"topic-{number:05}" for number in range(partition_count // _PARTITIONS_OF_TOPIC)]
    names.insert(len(names) // 2, _STATE_TOPIC)
    replicas = [0, 1, 2]
    partitions = [
        Message(partition_index=index, leader_id=0, leader_epoch=7, replica_nodes=replicas, isr_nodes=replicas)
        for index in range(_PARTITIONS_OF_TOPIC)
    ]
    topics = [
        Message(name=name, topic_id=UUID(int=number + 1), partitions=partitions) for number, name in enumerate(names)
    ]
    brokers = [Message(node_id=node_id, host=f"kafka-{node_id}", port=9092) for node_id in replicas]
    return encode_response_frame(METADATA, _VERSION, 1, Message(brokers=brokers, topics=topics))


def rewriting() -> Callable[[memoryview], object]:
    """What the proxy does with a response to a client that queried all topics."""
    book = AddressBook(19092)
    known = Known(
        StateView("cluster"), lambda topic: {}, lambda topic: None, _STATE_TOPIC, may_check_counts=frozenset()
    )
    for node_id in range(3):
        book.listens_on(NodeId(node_id), book.listener_port(NodeId(node_id)))
    rewriters = RequestRewriters(book, lambda: known, frozenset[int], lambda new: None)
    request = encode_request_frame(METADATA, _VERSION, 1, "client", Message(topics=None))
    finish = rewriters.begin(METADATA, _VERSION, memoryview(request)[4:], "127.0.0.1").finish
    assert finish is not None
    return finish


def decoding(frame: memoryview) -> object:
    offset = parse_response_header(frame, METADATA, _VERSION).body_offset
    return encode_response(METADATA, _VERSION, decode_response(METADATA, _VERSION, frame[offset:]))


def milliseconds(work: Callable[[memoryview], object], frame: memoryview, times: int) -> float:
    """CPU time of this process; the best of several."""
    took = []
    for _ in range(times):
        began = time.process_time()
        work(frame)
        took.append(time.process_time() - began)
    return min(took) * 1e3


def measure_code() -> None:
    python = Executor(None, "measured")
    print("| partitions | bytes | native CPU ms | pure Python | decoded and encoded |\n|---|---|---|---|---|")
    for partition_count in _PARTITIONS:
        frame = memoryview(response_of(partition_count))[4:]
        columns = []
        for executor in (EXECUTOR, python):
            with patch.object(layouts, "EXECUTOR", executor):
                columns.append("–" if executor is EXECUTOR and EXECUTOR.module is None else _shown(rewriting(), frame))
        times = 1 if partition_count >= _ONCE_FROM_PARTITIONS else 3
        columns.append(f"{milliseconds(decoding, frame, times):,.1f}")
        print(f"| {partition_count:,} | {len(frame):,} | {' | '.join(columns)} |", flush=True)


def _shown(work: Callable[[memoryview], object], frame: memoryview) -> str:
    return f"{milliseconds(work, frame, _TIMES):,.2f}"


# ---- a real Kafka


def create(bootstrap: str, topic_count: int) -> None:
    names = [f"topic-{number:05}" for number in range(topic_count)]
    with Connection(bootstrap, timeout_seconds=_PATIENCE_SECONDS) as connection:
        for begin in range(0, len(names), _TOPICS_AT_ONCE):
            topics = [
                CreateTopicsRequest.CreatableTopic(
                    name=name,
                    num_partitions=_PARTITIONS_OF_TOPIC,
                    replication_factor=1,
                    assignments=[],
                    configs=[],
                )
                for name in names[begin : begin + _TOPICS_AT_ONCE]
            ]
            query = CreateTopicsRequest(topics=topics, timeout_ms=120_000, validate_only=False)
            assert not any(each.error_code for each in connection.query(query, 5).topics)
        until(
            lambda: len({topic.name for topic in connection.metadata().topics} & set(names)) == topic_count,
            "all topics",
            seconds=_PATIENCE_SECONDS,
        )


def all_topics(address: str) -> tuple[float, int]:
    """Median milliseconds of a response, and its bytes."""
    took, size = [], 0
    query = MetadataRequest(
        topics=None,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    with Connection(address, timeout_seconds=_PATIENCE_SECONDS) as connection:
        for _ in range(_TIMES):
            _, frame = connection.frame(query, _VERSION)
            began = time.monotonic()
            connection.socket.sendall(frame)
            size = len(connection.receive_frame())
            took.append(time.monotonic() - began)
    return median(took) * 1e3, size


def measure_kafka(directory: Path, topic_count: int) -> None:
    with (
        KafkaCluster(1, heap="2g", properties={"log.index.size.max.bytes": "65536"}) as kafka,
        ProxyProcess(kafka.bootstrap, directory) as proxy,
    ):
        create(kafka.bootstrap, topic_count)
        idle = share(proxy.pid, 5.0) / 100
        direct, _ = all_topics(kafka.bootstrap)
        before, began = cpu_seconds(proxy.pid), time.monotonic()
        through, size = all_topics(proxy.bootstrap)
        used = (cpu_seconds(proxy.pid) - before - idle * (time.monotonic() - began)) / _TIMES * 1e3
        print(
            f"\n{topic_count * _PARTITIONS_OF_TOPIC:,} partitions, {size:,} bytes: Kafka {direct:.1f} ms, "
            f"through the proxy {through:.1f} ms, CPU of the proxy {used:.1f} ms a response",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", action="store_true", help="also measure with Kafka and a proxy process")
    parser.add_argument("--topics", type=int, default=20, help="topics there, of ten partitions each")
    args = parser.parse_args(argv)
    machine.print_heading("Metadata")
    print(f"Python {sys.version.split()[0]}, {EXECUTOR}")
    measure_code()
    if args.kafka:
        with tempfile.TemporaryDirectory(prefix="fencepost-metadata-") as directory:
            measure_kafka(Path(directory), args.topics)


if __name__ == "__main__":
    main()
