"""Brokers that start, stop and move: listeners follow, and clients recover as without the proxy.

This module has a separate cluster, since it stops brokers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import kafka as kafka_python
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from kafka.admin import NewTopic

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.producers import start
from tests.kit.reading import read
from tests.kit.waiting import until
from tests.support.clients import LIBRARIES
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.kafka import running_kafka, unique_topic
from tests.support.messages import Closed, Fields, RawConnection
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.brokers, pytest.mark.timeout(240)]

METADATA, FIND_COORDINATOR = 3, 10
PATIENCE_SECONDS = 60.0


# One replica of the offsets topic: a group whose broker is down has no coordinator, and Kafka reports that.
cluster = kafka_fixture(3, properties={"offsets.topic.replication.factor": "1"})


proxy = proxy_fixture(of="cluster", config="[limits]\nmetadata_refresh_seconds = 1.0\n")


def brokers_listed(proxy: ProxyProcess) -> dict[int, Address]:
    with RawConnection(Address.parse(proxy.bootstrap)) as connection:
        brokers = connection.query(METADATA, 9, {"Topics": []})["Brokers"]
    return {each["NodeId"]: Address(each["Host"], each["Port"]) for each in brokers}


def answers(address: Address) -> bool:
    with RawConnection(address, 20.0) as connection:
        return bool(connection.query(METADATA, 9, {"Topics": []})["Brokers"])


class Clients:
    """One producer of each library, open while the cluster changes. Each appends to all three partitions."""

    def __init__(self, bootstrap: str) -> None:
        self.topic = unique_topic("changes")
        admin = kafka_python.KafkaAdminClient(bootstrap_servers=bootstrap)
        admin.create_topics([NewTopic(self.topic, 3, 3)], wait_for_metadata=True)
        admin.close()
        self._bootstrap = bootstrap
        more = {"kafka-python": {"retries": 100}}
        self._producers = [start(each, None, bootstrap, acks="all", **more.get(each, {})) for each in LIBRARIES]
        self.sent = 0

    def append(self) -> None:
        for partition in range(3):
            for producer in self._producers:
                producer.send(self.topic, "v", partition=partition).result(PATIENCE_SECONDS)
                self.sent += 1

    def read(self) -> int:
        """The number of records that a new consumer reads through the proxy."""
        return sum(1 for _ in read(self._bootstrap, *((self.topic, partition) for partition in range(3))))

    def close(self) -> None:
        for producer in self._producers:
            producer.close()


@pytest.fixture(scope="module")
def clients(proxy: ProxyProcess) -> Iterator[Clients]:
    running = Clients(proxy.bootstrap)
    running.append()
    yield running
    running.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_clients_continue_while_a_broker_is_down(cluster: KafkaCluster, proxy: ProxyProcess, clients: Clients) -> None:
    before = brokers_listed(proxy)
    cluster.shut_down(2)
    clients.append()

    # Its listener remains but serves no request while the broker is down.
    with contextlib.suppress(OSError, Closed):
        assert not answers(before[2])

    with RawConnection(before[1]) as connection:
        names = [f"group-{number}" for number in range(30)]
        found = connection.query(FIND_COORDINATOR, 4, {"CoordinatorKeys": names})["Coordinators"]
    lost = [each for each in found if each["ErrorCode"]]
    assert lost, "the group still has a coordinator although its broker is down"
    assert {(each["ErrorCode"], each["Host"], each["Port"]) for each in lost} == {(15, "", -1)}

    cluster.restart(2)
    until(lambda: brokers_listed(proxy) == before and answers(before[2]), "broker 2 to respond through its listener")
    clients.append()
    assert clients.read() >= clients.sent


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_moved_broker_keeps_its_proxy_listener(cluster: KafkaCluster, proxy: ProxyProcess, clients: Clients) -> None:
    before = brokers_listed(proxy)
    old = cluster.address(3)
    cluster.shut_down(3)
    new = move(cluster, 3)
    cluster.restart(3)

    assert new != old
    until(lambda: brokers_listed(proxy) == before and answers(before[3]), "broker 3 to respond through its listener")
    clients.append()
    assert clients.read() >= clients.sent


def move(cluster: KafkaCluster, node_id: int) -> Address:
    """Give a stopped broker another port."""
    old = cluster.address(node_id)
    new_port = free_port()
    file = cluster.data / f"node-{node_id}" / "server.properties"
    file.write_text(file.read_text().replace(f"PLAINTEXT://{old}", f"PLAINTEXT://{old.host}:{new_port}"))
    cluster._listeners.ports[node_id]["PLAINTEXT"] = new_port
    return cluster.address(node_id)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_new_broker_gets_a_listener(cluster: KafkaCluster, proxy: ProxyProcess, clients: Clients) -> None:
    known = brokers_listed(proxy)
    node_id = cluster.add_broker()

    everybody = known.keys() | {node_id}
    observed = until(lambda: found if (found := brokers_listed(proxy)).keys() == everybody else None, "the new broker")

    assert observed[node_id] != cluster.address(node_id)
    until(lambda: answers(observed[node_id]), "the new broker to respond through its listener")
    topic = unique_topic("on-the-new-broker")
    with RawConnection(observed[node_id]) as connection:
        requested: Fields = {"Name": topic, "NumPartitions": -1, "ReplicationFactor": -1}
        requested["Assignments"] = [{"PartitionIndex": 0, "BrokerIds": [node_id]}]
        assert connection.query(19, 7, {"Topics": [requested]})["Topics"][0]["ErrorCode"] == 0
    producer = kafka_python.KafkaProducer(bootstrap_servers=proxy.bootstrap, retries=100)
    assert producer.send(topic, b"first").get(PATIENCE_SECONDS).offset == 0
    producer.close()
    clients.append()


def test_connections_that_kafka_refuses_are_reported(cluster: KafkaCluster, tmp_path: Path) -> None:
    node_id, most = cluster.node_ids[0], 40
    admin = AdminClient({"bootstrap.servers": str(cluster.address(node_id))})

    def limit(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("max.connections.per.ip", str(most), incremental_operation=operation)
        resource = ConfigResource(ConfigResource.Type.BROKER, str(node_id), incremental_configs=[entry])
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(PATIENCE_SECONDS)

    with ProxyProcess(cluster.bootstrap, tmp_path, arguments=("--status", "127.0.0.1:0")) as proxy:
        listener = brokers_listed(proxy)[node_id]
        limit(AlterConfigOpType.SET)
        try:
            with contextlib.ExitStack() as stack:
                refused = 0
                while refused < 3:
                    connection = stack.enter_context(RawConnection(listener, 20.0))
                    try:
                        connection.query(METADATA, 9, {"Topics": []})
                    except (OSError, Closed):
                        refused += 1
            problems = [each["what"] for each in json.loads(proxy.page("/status.json"))["problems"]]
            counted = proxy.metrics()['fencepost_upstream_refused_total{of="clients"}']
        finally:
            limit(AlterConfigOpType.DELETE)
    address = cluster.address(node_id)
    what = f"Broker {node_id} ({address}) closes new connections before its first response: "
    assert [each for each in problems if each.startswith(what)]
    assert counted >= 3
    assert f"broker closed a new connection before its first response broker={address}" in proxy.log


def test_new_connections_are_closed_while_kafka_is_down(tmp_path: Path) -> None:
    """As by a broker that is down."""
    with running_kafka(1) as kafka, ProxyProcess(kafka.bootstrap, tmp_path) as proxy:
        kafka.kill(1)
        with pytest.raises((OSError, Closed)), RawConnection(Address.parse(proxy.bootstrap), 10.0) as connection:
            connection.query(METADATA, 9, {"Topics": []})
        assert proxy.running
    assert "no upstream connection for a client" in proxy.log
