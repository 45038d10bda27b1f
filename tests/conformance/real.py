"""A Kafka whose brokers cases may stop, as a driver."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.preflight.conformance.cluster import AnyKafka
from fencepost_proxy.preflight.conformance.driver import DEFAULTS, Settings
from fencepost_proxy.preflight.conformance.topics import AnyTopic
from fencepost_proxy.types import Address
from fencepost_proxy.wire.schema import Message

#: Longest wait for a response.
ANSWER_SECONDS = 60.0
#: Needed by `Topic.deny`.
PROPERTIES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
_CREATE_ACLS = 30
#: Longest wait of a follower's fetch: replica.fetch.wait.max.ms.
FETCH_WAIT_SECONDS = 0.5


class RealKafka(AnyKafka):
    """Cases may break `cluster`: do not share it."""

    def __init__(self, cluster: KafkaCluster) -> None:
        upstream = tuple(cluster.address(node) for node in cluster.node_ids)
        super().__init__(ProxyConfig(upstream), answer_seconds=ANSWER_SECONDS, prefix="conformance", replicas=1)
        self.cluster = cluster
        self.paused: set[int] = set()
        self.topics: list[RealTopic] = []

    def address(self, node: int) -> Address:
        return self.cluster.address(node)

    def servers(self) -> Sequence[Address]:
        """Running ones."""
        nodes = [each for each in self.cluster.node_ids if self.cluster.running(each) and each not in self.paused]
        return [self.cluster.address(each) for each in nodes]

    def create(self, settings: Settings = DEFAULTS) -> RealTopic:
        topic = RealTopic(self, self.name(), settings)
        self.topics.append(topic)
        return topic

    def restart(self) -> None:
        self.disconnect()
        for node in self.cluster.node_ids:
            self.cluster.shut_down(node)
        self._start_all()

    def crash(self) -> None:
        self.disconnect()
        for node in self.cluster.node_ids:
            self.cluster.kill(node)
        self._start_all()

    def _start_all(self) -> None:
        """Metadata names leaders slightly before they serve."""
        for node in self.cluster.node_ids:
            self.cluster.restart(node, wait=False)
        self.cluster.await_ready()
        for topic in self.topics:
            topic.end()

    def expire_producers(self) -> None:
        """Brokers do it automatically (`producer.id.expiration.check.interval.ms`)."""

    def pause(self, node: int) -> None:
        self.cluster.pause(node)
        self.paused.add(node)

    def let_fetches_end(self) -> None:
        time.sleep(2 * FETCH_WAIT_SECONDS)

    def resume(self, node: int) -> None:
        self.cluster.resume(node)
        self.paused.discard(node)

    def kill(self, node: int) -> None:
        self.disconnect()
        self.cluster.kill(node)
        self.paused.discard(node)

    def start_again(self, node: int) -> None:
        self.cluster.restart(node)

    def heal(self) -> None:
        """Restore the cluster for the next case."""
        self.topics.clear()
        for node in list(self.paused):
            self.resume(node)
        down = [node for node in self.cluster.node_ids if not self.cluster.running(node)]
        for node in down:
            self.cluster.restart(node, wait=False)
        if down:
            self.cluster.await_ready()
        self.clean()
        self.disconnect()


class RealTopic(AnyTopic):
    kafka: RealKafka

    def deny(self, operation: str) -> None:
        rule = {"resource_type": 2, "resource_name": self.name, "resource_pattern_type": 3}
        rule |= {"principal": "User:ANONYMOUS", "host": "*"}
        allowed = Message(**rule, operation=2, permission_type=3)
        denied = Message(**rule, operation={"READ": 3, "WRITE": 4}[operation], permission_type=2)
        answer = self.kafka.query(_CREATE_ACLS, Message(creations=[allowed, denied]), at_least=2, at_most=2)
        assert [each.error_code for each in answer.results] == [0, 0]

    def other_replicas(self, leader: int) -> Sequence[int]:
        return [each for each in super().other_replicas(leader) if each not in self.kafka.paused]
