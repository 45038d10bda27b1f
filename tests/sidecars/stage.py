"""Three brokers whose client listener advertises their sidecars, and three sidecars.

Sidecars connect to the brokers' other listener. Writers find leaders by Kafka's metadata.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support.certificates import Authority
from tests.support.kafka import kafka_version
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, as_it_is
from tests.support.sasl_ssl import ALICE, Secured, server_properties, set_scram_passwords
from tests.support.secured import allow
from tests.support.three_brokers import NODES, STAMPED, Stage3

CLIENTS, SECURED = "CLIENTS", "SECURED"
#: How clients connect. secured: SASL_SSL at sidecars and brokers. loopback: the brokers' listener for sidecars is
#: SASL_PLAINTEXT, the one between brokers SASL_SSL.
Way = Literal["plain", "secured", "loopback"]
#: ACLs to read, write and create topics, and to get producer ids: resource type and name, operation.
_ALICES_RIGHTS = ((2, "*", 3), (2, "*", 4), (4, "kafka-cluster", 5), (4, "kafka-cluster", 12))
_CONTROL = "SCRAM-SHA-512"
_PROPERTIES = {
    # Leaders move only on request of a test.
    "auto.leader.rebalance.enable": "false",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "replica.lag.time.max.ms": "4000",
}


class AdvertisedCluster(KafkaCluster):
    """Its listener CLIENTS advertises the ports of the sidecars."""

    def __init__(
        self,
        ports: Mapping[int, int],
        listeners: Mapping[str, str] = MappingProxyType({CLIENTS: "PLAINTEXT"}),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            len(ports), version=kafka_version(), listeners=listeners, properties=_PROPERTIES | dict(properties)
        )
        self._sidecars = ports

    def _properties(self, node_id: int) -> dict[str, str]:
        properties = super()._properties(node_id)
        advertised = dict(each.split("://") for each in properties["advertised.listeners"].split(","))
        advertised[CLIENTS] = f"127.0.0.1:{self._sidecars[node_id]}"
        return properties | {"advertised.listeners": ",".join(f"{name}://{at}" for name, at in advertised.items())}


class Sidecars(Stage3):
    """As `Stage3`, but without fault proxies; `proxies` – ordered by node id."""

    def __init__(self, kafka: KafkaCluster, proxies: tuple[ProxyProcess, ...]) -> None:
        self.kafka = kafka
        self.pipes = {}
        self.proxies = proxies  # type: ignore[assignment]

    def sidecar(self, node_id: int) -> ProxyProcess:
        return self.proxies[node_id - 1]

    def restart_broker(self, node_id: int, *, kill: bool = False) -> None:
        """Without `kill`, the broker's leaders move away before it ends, as in a controlled restart."""
        if kill:
            self.kafka.kill(node_id)
        self.kafka.restart(node_id)
        self.kafka.await_ready()


@contextmanager
def sidecars(directory: Path, workers: int = 1, way: Way = "plain") -> Iterator[Sidecars]:
    with ExitStack() as stack:
        ports = {node_id: free_port() for node_id in NODES}
        config = f'advertised_host = "127.0.0.1"\nworkers = {workers}\n'
        enter = as_it_is
        if way == "plain":
            kafka = stack.enter_context(AdvertisedCluster(ports))
            upstream = kafka.bootstrap
            config += STAMPED
        else:
            secured = stack.enter_context(_secured(directory, ports, way))
            kafka, upstream, enter = secured.kafka, secured.kafka.bootstrap_of(SECURED), secured.entering(ALICE)
            config += f"broker_tls = {str(way == 'secured').lower()}\n" + secured.proxy_config(_CONTROL, more=STAMPED)

        def start(node_id: int) -> ProxyProcess:
            logs = directory / f"sidecar-{node_id}"
            logs.mkdir()
            arguments = ("--mode", "sidecar", "--broker", str(kafka.address(node_id, CLIENTS)))
            proxy = ProxyProcess(upstream, logs, config=config, port=ports[node_id], arguments=arguments, enter=enter)
            stack.callback(proxy.close)
            return proxy

        with ThreadPoolExecutor(len(NODES)) as pool:
            yield Sidecars(kafka, tuple(pool.map(start, NODES)))


@contextmanager
def _secured(directory: Path, ports: Mapping[int, int], way: Way) -> Iterator[Secured]:
    """Clients log in as ALICE, with read and write permissions, and not as a superuser."""
    authority = Authority(directory / "authority")
    server = authority.sign("server")
    listeners = {CLIENTS: "SASL_SSL" if way == "secured" else "SASL_PLAINTEXT", SECURED: "SASL_SSL"}
    properties = server_properties(authority, server, (CLIENTS.lower(), SECURED.lower()))
    with AdvertisedCluster(ports, listeners, properties) as kafka:
        set_scram_passwords(kafka.bootstrap)
        for kind, name, operation in _ALICES_RIGHTS:
            allow(kafka, ALICE, kind, name, operation)
        yield Secured(kafka, authority, server, directory)


def addresses_told(address: str) -> dict[int, str]:
    """The address of each broker in the metadata at this address."""
    with contextlib.closing(Connection(address)) as connection:
        return {each.node_id: f"{each.host}:{each.port}" for each in connection.metadata().brokers}
