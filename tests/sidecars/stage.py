"""Three brokers whose client listener advertises their sidecars, and three sidecars.

Sidecars connect to the brokers' other listener. Writers find leaders by Kafka's metadata.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from tests.kit.stage import NODES, THREE_REPLICAS, AdvertisedCluster, Stage
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, as_it_is
from tests.support.sasl_ssl import ALICE, Secured, server_properties, set_scram_passwords
from tests.support.secured import allow
from tests.support.three_brokers import FENCED

CLIENTS, SECURED = "CLIENTS", "SECURED"
#: How clients connect. secured: SASL_SSL at sidecars and brokers. loopback: the brokers' listener for sidecars is
#: SASL_PLAINTEXT, the one between brokers SASL_SSL.
Way = Literal["plain", "secured", "loopback"]
#: ACLs to read, write and create topics, and to get producer ids: resource type and name, operation.
_ALICES_RIGHTS = ((2, "*", 3), (2, "*", 4), (4, "kafka-cluster", 5), (4, "kafka-cluster", 12))
_CONTROL = "SCRAM-SHA-512"


class Sidecars(Stage):
    """`proxies` – ordered by node id."""

    def sidecar(self, node_id: int) -> ProxyProcess:
        return self.proxies[node_id - 1]

    def restart_broker(self, node_id: int, *, kill: bool = False) -> None:
        """Without `kill`, the broker's leaders move away before it ends, as in a controlled restart."""
        if kill:
            self.kafka.kill(node_id)
        self.kafka.restart(node_id)
        self.kafka.await_ready()


@contextmanager
def sidecars(directory: Path, way: Way = "plain") -> Iterator[Sidecars]:
    with ExitStack() as stack:
        ports = {node_id: free_port() for node_id in NODES}
        advertised = {CLIENTS: {node_id: f"127.0.0.1:{port}" for node_id, port in ports.items()}}
        config = 'advertised_host = "127.0.0.1"\n'
        enter = as_it_is
        if way == "plain":
            kafka = stack.enter_context(AdvertisedCluster(len(NODES), advertised, properties=THREE_REPLICAS))
            upstream = kafka.bootstrap
            config += FENCED
        else:
            secured = stack.enter_context(_secured(directory, advertised, way))
            kafka, upstream, enter = secured.kafka, secured.kafka.bootstrap_of(SECURED), secured.entering(ALICE)
            config += f"broker_tls = {str(way == 'secured').lower()}\n" + secured.proxy_config(_CONTROL, more=FENCED)

        stage = stack.enter_context(Sidecars(kafka, directory))
        shared = {"upstream": upstream, "config": config, "enter": enter}
        stage.start_proxies(
            {
                f"sidecar-{node_id}": shared
                | {"port": port, "arguments": ("--mode", "sidecar", "--broker", str(kafka.address(node_id, CLIENTS)))}
                for node_id, port in ports.items()
            }
        )
        yield stage


@contextmanager
def _secured(directory: Path, advertised: Mapping[str, Mapping[int, str]], way: Way) -> Iterator[Secured]:
    """Clients log in as ALICE, with read and write permissions, and not as a superuser."""
    authority = Authority(directory / "authority")
    server = authority.sign("server")
    listeners = {CLIENTS: "SASL_SSL" if way == "secured" else "SASL_PLAINTEXT", SECURED: "SASL_SSL"}
    properties = THREE_REPLICAS | server_properties(authority, server, (CLIENTS.lower(), SECURED.lower()))
    with AdvertisedCluster(len(NODES), advertised, listeners=listeners, properties=properties) as kafka:
        set_scram_passwords(kafka.bootstrap)
        for kind, name, operation in _ALICES_RIGHTS:
            allow(kafka, ALICE, kind, name, operation)
        yield Secured(kafka, authority, server, directory)


def addresses_reported(address: str) -> dict[int, str]:
    """The address of each broker in the metadata at this address."""
    with contextlib.closing(Connection(address)) as connection:
        return {each.node_id: f"{each.host}:{each.port}" for each in connection.metadata().brokers}
