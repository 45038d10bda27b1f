"""confluent-kafka-python's tests/integration/conftest.py needs trivup; this one uses the Kafka that `KAFKA` names."""

import os
import time
import uuid

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic


class Cluster:
    def client_conf(self, conf=None):
        return {"bootstrap.servers": os.environ["KAFKA"], **(conf or {})}

    def producer(self, conf=None):
        return Producer(self.client_conf(conf))

    def create_topic_and_wait_propogation(self, prefix, conf=None):
        name = f"{prefix}-{uuid.uuid1()}"
        admin = AdminClient(self.client_conf())
        admin.create_topics([NewTopic(name, 1, 1)])[name].result()
        while admin.list_topics(name, 10).topics[name].error is not None:
            time.sleep(0.1)
        return name

    def seed_topic(self, topic):
        producer = self.producer()
        for number in range(100):
            producer.produce(topic, f"test-data{number}")
        producer.flush()


@pytest.fixture(scope="session")
def kafka_cluster():
    return Cluster()
