"""The set-up of `make bench`: Kafka advertises the address of the route, and each route really relays."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from benchmarks import stage
from benchmarks.raw import Connection
from benchmarks.routes import Peer, Route, StartError, free_ports, product
from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.fault_proxy import FaultProxy
from tests.support.kafka import running_kafka

pytestmark = pytest.mark.kafka


def test_listener_advertises_the_address_in_front(tmp_path: Path) -> None:
    # given a TCP proxy that does not rewrite
    with FaultProxy() as tcp_peers:
        in_front = Address("127.0.0.1", tcp_peers.port)
        with running_kafka(1, listeners={"FRONT": "PLAINTEXT"}, advertised={"FRONT": in_front}) as cluster:
            tcp_peers.targets = (cluster.address(1, "FRONT"),)
            route = Route(Peer("plain", address=str(in_front)), port=0, upstream="", directory=tmp_path)
            # then its clients are directed to it, and direct clients are not
            assert stage.await_kafka_through(route) == str(in_front)
            for address, reported in ((str(in_front), str(in_front)), (cluster.bootstrap, cluster.bootstrap)):
                with contextlib.closing(Connection(address)) as connection:
                    assert connection.broker() == reported


def test_route_that_redirects_to_kafka_is_not_measured() -> None:
    # given a TCP proxy that does not rewrite, configured as a proxy that does
    with FaultProxy() as tcp_peers:
        (kafka_port,) = free_ports(1)
        tcp_peers.targets = (("127.0.0.1", kafka_port),)
        given = Peer("plain", address=tcp_peers.address)
        # when a run is set up with it
        with stage.Stage(stage.QUICK, [product(), given], kafka_port=kafka_port) as run:
            routes = [route.name for route in run.routes]
    # then it is skipped, and the result states the reason
    assert "returns Kafka's own addresses" in run.missing["plain"]
    assert routes == ["direct", "fencepost"]
    assert not run.product.running


def test_only_a_single_broker_can_advertise_something_else() -> None:
    with pytest.raises(ValueError, match="several brokers"):
        KafkaCluster(2, advertised={"FRONT": Address("127.0.0.1", 1)})


def test_route_that_does_not_reach_kafka_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_ROUTE_SECONDS", 0.3)
    with FaultProxy() as nowhere:
        route = Route(Peer("lost", address=nowhere.address), port=0, upstream="", directory=tmp_path)
        with pytest.raises(StartError, match="Kafka does not respond through lost"):
            stage.await_kafka_through(route)
