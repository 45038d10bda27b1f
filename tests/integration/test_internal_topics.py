"""A pattern that covers every topic leaves Kafka's internal topics alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import confluent_kafka
import pytest
from kafka.protocol.metadata import MetadataRequest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.topics.virtual_configs import INTERNAL_TOPICS
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection

pytestmark = pytest.mark.kafka

CHECK, SOURCE = "fencepost.check.expected.offsets", "fencepost.expected.offsets.source"


def committed(bootstrap: str, group: str, topic: str) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    (found,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], timeout=30)
    consumer.close()
    return int(found.offset)


@pytest.mark.parametrize("mode", ["true", "required"])
@pytest.mark.parametrize("offset_source", ["header", "base"])
def test_transactional_offsets_commit_with_all_topics_checked(
    kafka: KafkaCluster, tmp_path: Path, unique_topic: Callable[..., str], mode: str, offset_source: str
) -> None:
    topic = unique_topic("everything")
    config = f'[topics."*"]\n"{CHECK}" = "{mode}"\n"{SOURCE}" = "{offset_source}"\n'
    with ProxyProcess(kafka.bootstrap, tmp_path, config=config) as proxy:
        with Connection(proxy.bootstrap) as client:
            client.create_topic(topic)
        consumer = confluent_kafka.Consumer({"bootstrap.servers": proxy.bootstrap, "group.id": topic})
        producer = confluent_kafka.Producer({"bootstrap.servers": proxy.bootstrap, "transactional.id": topic})
        producer.init_transactions(60)
        for offset in (1, 2):
            producer.begin_transaction()
            if (mode, offset_source) == ("true", "header"):  # otherwise an append needs an expected offset
                producer.produce(topic, f"record {offset}", partition=0)
            positions = [confluent_kafka.TopicPartition(topic, 0, offset)]
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 60)
            producer.commit_transaction(60)
            assert committed(kafka.bootstrap, topic, topic) == offset
        consumer.close()


def test_internal_topic_refuses_virtual_config(kafka: KafkaCluster, proxied: ProxyProcess) -> None:
    committed(kafka.bootstrap, "any", "any")  # creates __consumer_offsets
    with Connection(proxied.bootstrap) as client:
        code, message = client.alter_topic("__consumer_offsets", {CHECK: "true"})
        assert (code, "__consumer_offsets is internal to Kafka" in (message or "")) == (40, True)
        assert client.describe_topic("__consumer_offsets")[CHECK] == "false"


def test_topics_that_kafka_calls_internal_are_known(kafka: KafkaCluster) -> None:
    committed(kafka.bootstrap, "any", "any")
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": "any"})
    producer.init_transactions(60)

    def internal() -> set[str]:
        with Connection(kafka.bootstrap) as client:
            return {each.name for each in client.query(MetadataRequest(topics=None), 9).topics if each.is_internal}

    until(lambda: {"__consumer_offsets", "__transaction_state"} <= internal(), "Kafka's internal topics")
    assert internal() <= INTERNAL_TOPICS
    assert all(name.startswith("__") for name in INTERNAL_TOPICS)
