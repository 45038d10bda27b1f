"""Topics that have grown in order, without a proxy's procedure: what it would have stored is written by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID, uuid4

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewPartitions, NewTopic

from fencepost_proxy.topics.expansions import Expansion, encode_done, encode_expansion, encode_partition_count
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.types import LeaderEpoch, LogEndOffset
from tests.support.members import until

STATE_TOPIC = "__fencepost_state"


class GrownTopic:
    """`kafka` – bootstrap of Kafka itself, `proxy` – of the proxy. Created with `partitions`, and ordered."""

    def __init__(self, kafka: str, proxy: str, name: str, partitions: int, **configs: str) -> None:
        self.kafka, self.proxy, self.name = kafka, proxy, name
        self.count = partitions
        admin = KafkaAdminClient(bootstrap_servers=kafka)
        try:
            admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
            until(lambda: self._partitions(admin) == partitions, f"{name} did not appear")
            self.topic_id = UUID(str(admin.describe_topics([name])[0]["topic_id"]))
        finally:
            admin.close()
        through = KafkaAdminClient(bootstrap_servers=proxy)
        try:
            change = {"ordered.partition.expansion": (AlterConfigOp.SET, "true")}
            through.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, change)])
        finally:
            through.close()
        self._store(encode_partition_count(name, self.topic_id, partitions))

    def _partitions(self, admin: KafkaAdminClient) -> int:
        return len(admin.describe_topics([self.name])[0]["partitions"])

    def _store(self, *records: StateRecord) -> None:
        producer = KafkaProducer(bootstrap_servers=self.kafka)
        try:
            for each in records:
                producer.send(STATE_TOPIC, key=each.key, value=each.value, partition=0).get(30)
        finally:
            producer.close()

    def write(self, partition: int, count: int, *, key: str = "k") -> None:
        producer = KafkaProducer(bootstrap_servers=self.kafka, linger_ms=50)
        try:
            begin = self.end(partition)
            for number in range(begin, begin + count):
                value = f"v{number}".encode()
                producer.send(self.name, key=f"{key}{partition}".encode(), value=value, partition=partition)
            producer.flush()
        finally:
            producer.close()

    def end(self, partition: int) -> int:
        consumer = KafkaConsumer(bootstrap_servers=self.kafka)
        try:
            tp = TopicPartition(self.name, partition)
            return int(consumer.end_offsets([tp])[tp])
        finally:
            consumer.close()

    def grow(self, to: int, *, thresholds: Sequence[int] | None = None) -> Expansion:
        """As the procedure does it: intent, partitions, thresholds."""
        expansion = self.begin(to)
        self.create(to)
        return self.finish(expansion, thresholds)

    def begin(self, to: int) -> Expansion:
        now_ms = int(time.time() * 1000)
        expansion = Expansion(self.name, self.topic_id, self.count, to, uuid4(), now_ms, process=uuid4())
        self._store(encode_expansion(expansion))
        return expansion

    def create(self, to: int) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self.kafka)
        try:
            admin.create_partitions({self.name: NewPartitions(to)})
            until(lambda: self._partitions(admin) == to, f"{self.name} did not grow")
        finally:
            admin.close()

    def finish(self, expansion: Expansion, thresholds: Sequence[int] | None = None) -> Expansion:
        ends = [self.end(prior) for prior in expansion.priors] if thresholds is None else thresholds
        self._store(
            encode_done(
                expansion,
                uuid4(),
                thresholds=[LogEndOffset(each) for each in ends],
                epochs=[LeaderEpoch(0)] * len(ends),
                at_ms=int(time.time() * 1000),
                held_ms=0,
            )
        )
        self.count = expansion.to_count
        return expansion
