"""Kafka and the proxy as containers for an application's tests, with the Python package testcontainers.

Not run by the project's own tests where there is no Docker engine; `tests/integration/test_testcontainers.py` runs it
where there is one. Without Docker, use the fixture of `fencepost_dev.pytest`.

    docker build -f deploy/docker/Dockerfile -t fencepost:local .
    pip install testcontainers kafka-python
    python examples/testcontainers/kafka_and_fencepost.py

Kafka is in a network that the host does not reach, so no client bypasses the proxy. The proxy has one port for its
bootstrap address and one for broker 1, two above it: both have the same number on the host, since clients get them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

KAFKA_IMAGE = os.environ.get("FENCEPOST_KAFKA_IMAGE", "apache/kafka:4.3.1")
FENCEPOST_IMAGE = os.environ.get("FENCEPOST_IMAGE", "fencepost:local")
PORT = 29_192
_KAFKA = {
    "KAFKA_NODE_ID": "1",
    "KAFKA_PROCESS_ROLES": "broker,controller",
    "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://127.0.0.1:9093",
    "KAFKA_ADVERTISED_LISTENERS": "PLAINTEXT://kafka:9092",
    "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
    "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@127.0.0.1:9093",
    "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
    "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
    "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
}


@contextmanager
def kafka_and_fencepost(port: int = PORT) -> Iterator[str]:
    """The proxy's address. `port` and the port two above it must be free on this host."""
    proxy_command = f"--bootstrap-server kafka:9092 --listen 0.0.0.0:{port} --advertised-host localhost"
    with Network() as network:
        kafka = DockerContainer(KAFKA_IMAGE).with_envs(**_KAFKA).with_network(network).with_network_aliases("kafka")
        proxy = DockerContainer(FENCEPOST_IMAGE).with_command(proxy_command).with_network(network)
        for each in (port, port + 2):
            proxy = proxy.with_bind_ports(each, each)
        with kafka, proxy.waiting_for(LogMessageWaitStrategy("ready bootstrap=")):
            yield f"localhost:{port}"


def main() -> None:
    from kafka import KafkaProducer  # noqa: PLC0415
    from kafka.admin import KafkaAdminClient, NewTopic  # noqa: PLC0415
    from kafka.errors import PolicyViolationError  # noqa: PLC0415

    with kafka_and_fencepost() as bootstrap:
        with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
            admin.create_topics([NewTopic("orders", 1, 1, topic_configs={"fencepost.check.expected.offsets": "true"})])
        producer = KafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=False)
        first = [("fencepost-expected-offset", b"0@orders/0")]
        print("appended at", producer.send("orders", b"first", headers=first, partition=0).get(60).offset)
        try:
            producer.send("orders", b"second", headers=first, partition=0).get(60)
        except PolicyViolationError as refused:
            print("refused:", refused)
        producer.close()


if __name__ == "__main__":
    main()
