"""Transactions with expected offsets on three brokers, by unmodified clients. One client ignores refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import aiokafka.errors
import confluent_kafka
import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.producers import start
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.transactions import committed

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

PATIENCE_SECONDS = 60.0
PARTITIONS = range(3)


@pytest.fixture
def topic(kafka3: KafkaCluster, proxy3: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    """A topic with three partitions, usually led by three brokers."""
    name = unique_topic("checked")
    with Connection(proxy3.bootstrap) as client:
        assert client.create_topic(name, partitions=len(PARTITIONS), replicas=3) == (0, None)
    for partition in PARTITIONS:
        Log(kafka3.bootstrap).leader(name, partition)
    return name


def visible(kafka: KafkaCluster, topic: str) -> list[bytes]:
    """All committed records, once every partition's end is stable."""
    found = committed(kafka.bootstrap, *((topic, partition) for partition in PARTITIONS))
    return sorted(value for values in found.values() for value in values)


def test_confluent_kafka_aborts_refused_transactions_and_commits_others(
    kafka3: KafkaCluster, proxy3: ProxyProcess, topic: str
) -> None:
    """A refusal by one of three brokers aborts the whole transaction. The same producer commits the next one."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": proxy3.bootstrap, "transactional.id": f"{topic}-txn", "log_level": 0}
    )
    producer.init_transactions(PATIENCE_SECONDS)

    def append(value: bytes, expected: dict[int, int]) -> None:
        producer.begin_transaction()
        for partition, offset in expected.items():
            producer.produce(topic, value, partition=partition, headers=[("fencepost-expected-offset", b"%d" % offset)])
        producer.flush(PATIENCE_SECONDS / 4)

    append(b"first", dict.fromkeys(PARTITIONS, 0))
    producer.commit_transaction(PATIENCE_SECONDS)
    until(lambda: all(Log(kafka3.bootstrap).end(topic, p) == 2 for p in PARTITIONS), "the markers")
    assert visible(kafka3, topic) == [b"first"] * 3

    append(b"second", {0: 2, 1: 2, 2: 1})
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        producer.commit_transaction(PATIENCE_SECONDS)
    assert refused.value.args[0].txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)

    def third() -> bool:
        append(b"third", {p: Log(kafka3.bootstrap).end(topic, p) for p in PARTITIONS})
        try:
            producer.commit_transaction(PATIENCE_SECONDS)
        except confluent_kafka.KafkaException as failed:
            # An abort marker moved the end, or librdkafka counts its refused batch among the sequences (45).
            print(f"{time.monotonic():.1f}: {failed}")
            producer.abort_transaction(PATIENCE_SECONDS)
            return False
        return True

    until(third, "a commit", seconds=3 * PATIENCE_SECONDS)
    assert visible(kafka3, topic) == [*[b"first"] * 3, *[b"third"] * 3]


def test_aiokafka_commit_after_ignored_refusal_is_refused(
    kafka3: KafkaCluster, proxy3: ProxyProcess, topic: str
) -> None:
    """aiokafka's transaction manager would commit the records that were appended."""

    settings = {"transactional_id": f"{topic}-txn"}
    with closing(start("aiokafka", None, proxy3.bootstrap, **settings)) as producer:
        producer.begin()
        for partition, expected in enumerate((0, 0, 7)):
            producer.send(topic, "half of it", partition=partition, expected=expected)
        with pytest.raises(aiokafka.errors.KafkaError):
            producer.commit()
    # A new producer with the same transactional id aborts the open transaction.
    start("aiokafka", None, proxy3.bootstrap, **settings).close()
    assert "half of it" in str(Log(kafka3.bootstrap).values(topic, 0))
    assert visible(kafka3, topic) == []
