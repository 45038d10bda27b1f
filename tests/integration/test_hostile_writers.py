"""A hostile client and a correct writer use the same checked partition. Through the proxy, the writer keeps half of the
rate that it has directly at Kafka under the same attack.

    python -m pytest tests/integration/test_hostile_writers.py -s

prints the rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from kafka.protocol.admin import CreatePartitionsRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import raw
from tests.support.fixtures import proxy_fixture
from tests.support.good_writer import LEAST, kept_rate
from tests.support.hostile import WAYS, WIDE_PARTITIONS, WITH_LOGINS
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(600)]

OK, UNKNOWN_PARTITION = 0, 3


proxy = proxy_fixture(scope="function", config=CHECKED_WITH_LONG_LEASE, arguments=("--status", "127.0.0.1:0"))


@pytest.mark.parametrize("way", [way for way in WAYS if way not in WITH_LOGINS])
def test_good_writer_keeps_half_rate_despite_hostile_client(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], way: str
) -> None:
    topics = {kafka.bootstrap: unique_topic("checked"), proxy.bootstrap: unique_topic("checked")}
    for address, topic in topics.items():
        with raw.Connection(address) as connection:
            connection.create_topic(topic)
            connection.create_topic(f"{topic}-wide", partitions=WIDE_PARTITIONS)
    assert kept_rate(topics, way, proxy.status) >= LEAST


def test_request_for_2000_absent_partitions_costs_milliseconds(
    proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic("checked")
    batches = {topic: dict.fromkeys(range(1, 2001), raw.batch(b"x"))}
    seconds = []
    with raw.Connection(proxy.bootstrap) as connection:
        connection.create_topic(topic)
        for _ in range(5):
            began = time.monotonic()
            answers = connection.produce(batches)
            seconds.append(time.monotonic() - began)
            assert {answer.error_code for answer in answers.values()} == {UNKNOWN_PARTITION}
            assert len(answers) == 2000
    print(f"\n2,000 absent partitions: {min(seconds) * 1000:.0f} ms")
    assert min(seconds) < 1.0


def test_partition_added_at_kafka_accepts_first_append(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    """The proxy's metadata is older than the partition."""
    topic = unique_topic("checked")
    with raw.Connection(kafka.bootstrap) as direct, raw.Connection(proxy.bootstrap) as connection:
        direct.create_topic(topic)
        assert connection.append(topic, raw.batch(b"x")).error_code == OK
        assert connection.append(topic, raw.batch(b"x"), partition=1).error_code == UNKNOWN_PARTITION
        requested = CreatePartitionsRequest.CreatePartitionsTopic(name=topic, count=2, assignments=None)
        answer = direct.query(CreatePartitionsRequest(topics=[requested], timeout_ms=10_000, validate_only=False), 3)
        assert answer.results[0].error_code == OK
        until(lambda: raw.Log(kafka.bootstrap).end(topic, 1) == 0, "the partition's leader", accept=bool)
        assert connection.append(topic, raw.batch(b"x"), partition=1).error_code == OK
