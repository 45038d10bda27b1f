"""Partition counts on raw connections, with requests that no client library sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewPartitions, NewTopic
from kafka.protocol.metadata import MetadataRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.proxy import LEASE_SECONDS, ProxyProcess
from tests.support.raw import Closed, Connection, Log, Record, batch

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

CONFIG = f"""
config_lease_seconds = {LEASE_SECONDS}

[limits]
decompressed_bytes_max = 1000000

[topics."counted-*"]
"fencepost.check.partition.count" = "true"
"fencepost.partitioner" = "murmur2"

[topics."both-*"]
"fencepost.check.partition.count" = "true"
"fencepost.check.expected.offsets" = "true"
"""
NOT_LEADER, INVALID_PARTITIONS = 6, 37


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), config=CONFIG) as process:
        yield process


@pytest.fixture
def topic(kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    """A topic of three partitions."""
    return _created(kafka, unique_topic("counted"))


def _created(kafka: KafkaCluster, name: str) -> str:
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    try:
        admin.create_topics([NewTopic(name, 3, 1)])
    finally:
        admin.close()
    return name


def leader(proxy: ProxyProcess, topic: str) -> Connection:
    """A connection to the leader's listener, once the leader accepts appends."""

    def found() -> str | None:
        with Connection(proxy.bootstrap) as client:
            answer = client.metadata(topic)
            led = [each.leader_id for each in answer.topics[0].partitions]
            if answer.topics[0].error_code or len(led) < 3 or -1 in led:
                return None
            return next(f"{each.host}:{each.port}" for each in answer.brokers if each.node_id == led[0])

    address = until(found, f"a leader of {topic}")

    def appends() -> Connection | None:
        connection = Connection(address, timeout_seconds=60.0)
        if connection.append(topic, stated(3)).error_code == 0:
            return connection
        connection.close()
        return None

    connection: Connection = until(appends, f"an append to {topic}")
    return connection


def stated(count: object, *more: tuple[str, bytes], **settings: Any) -> bytes:
    return batch(Record(b"v", headers=[("fencepost-partition-count", str(count).encode()), *more]), **settings)


def test_batch_unpacking_too_much_is_refused_connection_stays(topic: str, proxy: ProxyProcess) -> None:
    with leader(proxy, topic) as client:
        bomb = batch(Record(bytes(5_000_000)), codec=1)
        assert client.append(topic, bomb).error_code == 10
        assert client.append(topic, stated(3)).error_code == 0


def test_pipelining_client_reads_answers_before_the_close(topic: str, proxy: ProxyProcess, kafka: KafkaCluster) -> None:
    # A pipeline: responses that Kafka still owes, a stale count in the middle, and megabytes after it.
    before = Log(kafka.bootstrap).end(topic)
    with leader(proxy, topic) as client:
        appended_batch = Log(kafka.bootstrap).end(topic)
        sent = [client.send_produce({topic: {0: stated(3)}}), client.send(MetadataRequest(topics=[]), 1)]
        sent += [client.send_produce({topic: {0: stated(2)}})]
        for _ in range(3):
            client.send_produce(
                {topic: {0: batch(Record(bytes(700_000), headers=[("fencepost-partition-count", b"3")]))}}
            )

        # Everything up to the stale count is answered, and nothing after it is appended.
        first, good = client.receive_produce()
        second, _ = client.receive(MetadataRequest, 1)
        third, stale = client.receive_produce()
        assert [first, second, third] == sent
        assert (good[topic, 0].error_code, stale[topic, 0].error_code) == (0, INVALID_PARTITIONS)
        with pytest.raises(Closed, match="closed by"):
            client.receive_frame()
    assert before is not None
    assert Log(kafka.bootstrap).end(topic) == (appended_batch or 0) + 1


def test_expansion_bypassing_the_proxy_is_detected(kafka: KafkaCluster, topic: str, proxy: ProxyProcess) -> None:
    with leader(proxy, topic) as client:
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        try:
            admin.create_partitions({topic: NewPartitions(4)})
        finally:
            admin.close()
        # The broker may not know the new partition yet.
        answers: list[int] = []
        give_up = time.monotonic() + 60
        while not answers or answers[-1]:
            assert time.monotonic() < give_up
            with leader_of_four(proxy, topic) as another:
                answers.append(another.append(topic, stated(4)).error_code)
        assert set(answers) <= {0, INVALID_PARTITIONS, NOT_LEADER}
        # Every other process must refresh its metadata.
        until(lambda: client.append(topic, stated(3)).error_code == INVALID_PARTITIONS, "every process knows")


def leader_of_four(proxy: ProxyProcess, topic: str) -> Connection:
    with Connection(proxy.bootstrap) as client:
        answer = client.metadata(topic)
        led = answer.topics[0].partitions[0].leader_id
        return Connection(next(f"{b.host}:{b.port}" for b in answer.brokers if b.node_id == led), timeout_seconds=60.0)
