"""Topics with ordered expansion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from uuid import UUID, uuid4

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewPartitions, NewTopic

from fencepost_proxy.expansion.history import Expansion, encode_done, encode_expansion
from fencepost_proxy.types import LeaderEpoch, LogEndOffset
from fencepost_proxy.wire.state_records import StateRecord
from tests.kit.waiting import until
from tests.support.raw import Log

STATE_TOPIC = "__fencepost_state"


class ExpandedTopic:
    """`kafka` – Kafka's bootstrap address, `proxy` – the proxy's. Created with `partitions`."""

    def __init__(
        self, kafka: str, proxy: str, name: str, partitions: int, *, replicas: int = 1, **configs: str
    ) -> None:
        self.kafka, self.proxy, self.name = kafka, proxy, name
        self.count = partitions
        with closing(KafkaAdminClient(bootstrap_servers=kafka)) as admin:
            admin.create_topics([NewTopic(name, partitions, replicas, topic_configs=configs)])
            until(lambda: self._partitions(admin) == partitions, f"{name} did not appear")
            self.topic_id = UUID(str(admin.describe_topics([name])[0]["topic_id"]))
        with closing(KafkaAdminClient(bootstrap_servers=proxy)) as through:
            change = {"fencepost.ordered.partition.expansion": (AlterConfigOp.SET, "any")}
            through.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, change)])

    def _partitions(self, admin: KafkaAdminClient) -> int:
        return len(admin.describe_topics([self.name])[0]["partitions"])

    def write(self, partition: int, count: int, *, key: str = "k") -> None:
        with closing(KafkaProducer(bootstrap_servers=self.kafka, linger_ms=50)) as producer:
            begin = self.end(partition)
            for number in range(begin, begin + count):
                value = f"v{number}".encode()
                producer.send(self.name, key=f"{key}{partition}".encode(), value=value, partition=partition)
            producer.flush()

    def end(self, partition: int) -> int:
        return Log(self.kafka).end(self.name, partition)

    def expand(self, to: int) -> None:
        """Expand through the proxy. On return, the new partitions accept appends."""
        self._add_partitions(self.proxy, to)

    def expand_by_hand(self, to: int, *, thresholds: Sequence[int]) -> None:
        """Store an expansion with arbitrary thresholds, without the procedure that determines them."""
        now_ms = int(time.time() * 1000)
        expansion = Expansion(self.name, self.topic_id, self.count, to, uuid4(), now_ms, process=uuid4())
        ends = [LogEndOffset(each) for each in thresholds]
        epochs = [LeaderEpoch(0)] * len(ends)
        done = encode_done(expansion, uuid4(), thresholds=ends, epochs=epochs, at_ms=now_ms, blocked_ms=0)
        self._store(encode_expansion(expansion), done)
        self._add_partitions(self.kafka, to)

    def _add_partitions(self, address: str, to: int) -> None:
        with closing(KafkaAdminClient(bootstrap_servers=address)) as admin:
            admin.create_partitions({self.name: NewPartitions(to)})
        self.count = to
        with closing(KafkaAdminClient(bootstrap_servers=self.kafka)) as admin:
            until(lambda: self._partitions(admin) == to, f"{self.name} has not {to} partitions")

    def _store(self, *records: StateRecord) -> None:
        """Store the records in one batch, so that no reader observes an incomplete expansion."""
        with closing(KafkaProducer(bootstrap_servers=self.kafka, linger_ms=500)) as producer:
            sent = [producer.send(STATE_TOPIC, key=each.key, value=each.value, partition=0) for each in records]
            for each in sent:
                each.get(30)
