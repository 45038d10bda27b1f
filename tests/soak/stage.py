"""Three brokers, two proxies, and a fault proxy in each of their connections.

    client → fault proxy (127.0.0.2, the proxy's ports) → proxy → fault proxy (the broker's advertised address) → broker

Each proxy has its own listener on each broker, so that it can be cut off alone. Another listener, without
fault proxies, serves to read the log and control faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.ports import free_ports
from tests.kit import stage as kit
from tests.kit.fault_proxy import FaultProxies
from tests.kit.stage import NODES, THREE_REPLICAS, AdvertisedCluster
from tests.support.proxy import ProxyProcess

#: The address that clients connect to. Another loopback address, so that fault proxies can use the proxies' ports.
CLIENTS_HOST = "127.0.0.2"
PROXIES = ("a", "b")
_START_ATTEMPTS = 4
_PROPERTIES = THREE_REPLICAS | {"transaction.max.timeout.ms": "60000"}
_CONFIG = f"""
advertised_host = "{CLIENTS_HOST}"
config_lease_seconds = 2.0

[limits]
sequencer_wait_max_seconds = 2.0
request_timeout_seconds = 8.0
connect_timeout_seconds = 2.0
metadata_refresh_seconds = 1.0
reconnect_backoff_max_seconds = 0.2
drain_seconds = 3.0

[topics."required-*"]
"fencepost.check.expected.offsets" = "required"

[topics."checked-*"]
"fencepost.check.expected.offsets" = "true"
"""


class Stage(kit.Stage):
    """`named` – the proxies by name. `to_brokers`, `to_proxies`: names of each proxy's fault proxies on both sides."""

    def __init__(self, kafka: KafkaCluster, directory: Path, fault_proxies: FaultProxies) -> None:
        super().__init__(kafka, directory)
        self.fault_proxies = fault_proxies
        self.to_brokers: dict[str, list[str]] = {name: [] for name in PROXIES}
        self.to_proxies: dict[str, list[str]] = {name: [] for name in PROXIES}
        #: Stopping, pausing or starting a proxy requires its lock.
        self.proxy_locks = {name: threading.Lock() for name in PROXIES}

    @property
    def named(self) -> dict[str, ProxyProcess]:
        return dict(zip(PROXIES, self.proxies, strict=True))

    def bootstrap(self, proxy: str) -> str:
        """The address of the fault proxy before the proxy."""
        return f"{CLIENTS_HOST}:{self.named[proxy].port}"

    def restart_proxy(self, name: str) -> None:
        """Start it after a stop or kill. This may take several attempts while brokers are down."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self.named[name].start()
                return
            except AssertionError:
                if attempt == _START_ATTEMPTS:
                    raise
                time.sleep(1.0)

    def mend_proxy(self, proxy: ProxyProcess) -> None:
        (name,) = (each for each in PROXIES if self.named[each] is proxy)
        with self.proxy_locks[name]:
            if proxy.running:
                proxy.resume()
            else:
                self.restart_proxy(name)


@contextmanager
def stage(directory: Path, *, fencing: bool = True) -> Iterator[Stage]:
    """`fencing` False: the proxies compare offsets without Kafka, so that the checker finds violations."""
    wires = {proxy: dict(zip(NODES, free_ports(len(NODES)), strict=True)) for proxy in PROXIES}
    advertised = {
        _listener(proxy): {node_id: f"127.0.0.1:{port}" for node_id, port in ports.items()}
        for proxy, ports in wires.items()
    }
    config = _CONFIG if fencing else "unsafe_disable_fencing = true\n" + _CONFIG
    with (
        FaultProxies() as pipes,
        AdvertisedCluster(len(NODES), advertised, properties=_PROPERTIES) as kafka,
        Stage(kafka, directory, pipes) as ready,
    ):
        for proxy, ports in wires.items():
            for node_id, port in ports.items():
                target = kafka.address(node_id, _listener(proxy))
                ready.to_brokers[proxy].append(f"{proxy} to broker {node_id}")
                pipes.open(ready.to_brokers[proxy][-1], ("127.0.0.1", port), (target.host, target.port))
        ready.start_proxies(
            {
                f"proxy-{proxy}": {"config": config, "upstream": ",".join(advertised[_listener(proxy)].values())}
                for proxy in PROXIES
            }
        )
        for name, process in ready.named.items():
            for port in (process.port, *(process.port + 1 + node_id for node_id in NODES)):
                ready.to_proxies[name].append(f"clients to {name}, port {port}")
                pipes.open(ready.to_proxies[name][-1], (CLIENTS_HOST, port), ("127.0.0.1", port))
        yield ready


def _listener(proxy: str) -> str:
    return f"WIRE_{proxy.upper()}"
