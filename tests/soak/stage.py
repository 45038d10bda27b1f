"""Three brokers, two proxies, and a fault proxy in each of their connections.

    client → fault proxy (127.0.0.2, the proxy's ports) → proxy → fault proxy (the broker's advertised address) → broker

Each proxy has its own listener on each broker, so that it can be cut off alone. Another listener, without
fault proxies, serves to read the log and control faults.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from fencepost_proxy.dev.cluster import KafkaCluster, _free_ports
from tests.kit.fault_proxy import FaultProxies
from tests.kit.waiting import until
from tests.support.kafka import kafka_version
from tests.support.messages import Closed, Fields, RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log

NODES = (1, 2, 3)
#: The address that clients connect to. Another loopback address, so that fault proxies can use the proxies' ports.
CLIENTS_HOST = "127.0.0.2"
PROXIES = ("a", "b")
_PATIENCE_SECONDS = 90.0
_START_ATTEMPTS = 4
_METADATA, _ELECT_LEADERS, _REASSIGN, _DESCRIBE_QUORUM = 3, 43, 45, 55

_PROPERTIES = {
    "auto.leader.rebalance.enable": "false",  # leaders move only by the schedule
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "replica.lag.time.max.ms": "4000",
    "transaction.max.timeout.ms": "60000",
}
_CONFIG = """
advertised_host = "{host}"
config_lease_seconds = 2.0

[broker_ports]
{ports}

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


class _Cluster(KafkaCluster):
    """Advertises the fault proxies instead of the brokers."""

    def __init__(self, pipes: Mapping[tuple[str, int], int]) -> None:
        super().__init__(
            len(NODES),
            version=kafka_version(),
            listeners={f"WIRE_{proxy.upper()}": "PLAINTEXT" for proxy in PROXIES},
            properties=_PROPERTIES,
        )
        self._pipes = pipes

    def _properties(self, node_id: int) -> dict[str, str]:
        advertised = [f"PLAINTEXT://{self.address(node_id)}"]
        advertised += [f"WIRE_{proxy.upper()}://127.0.0.1:{self._pipes[proxy, node_id]}" for proxy in PROXIES]
        return super()._properties(node_id) | {"advertised.listeners": ",".join(advertised)}


class Stage:
    """`proxies` by name. `upstream`, `downstream`: names of their fault proxies on both sides.

    `fencing` False: the proxies compare offsets without Kafka, so that the checker finds violations.
    """

    def __init__(self, directory: Path, *, fencing: bool = True) -> None:
        self._stack = ExitStack()
        self._fencing = fencing
        self.directory = directory
        self.proxies: dict[str, ProxyProcess] = {}
        self.upstream: dict[str, list[str]] = {}
        self.downstream: dict[str, list[str]] = {}
        #: Stopping, pausing or starting a proxy requires its lock.
        self.proxy_locks = {name: threading.Lock() for name in PROXIES}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.pipes = self._stack.enter_context(FaultProxies())
        wires = [(proxy, node_id) for proxy in PROXIES for node_id in NODES]
        ports = dict(zip(wires, _free_ports(len(wires), set()), strict=True))
        self.kafka = self._stack.enter_context(_Cluster(ports))
        self.log = Log(self.kafka.bootstrap)
        for (proxy, node_id), port in ports.items():
            name = f"{proxy} to broker {node_id}"
            target = self.kafka.address(node_id, f"WIRE_{proxy.upper()}")
            self.pipes.open(name, ("127.0.0.1", port), (target.host, target.port))
            self.upstream.setdefault(proxy, []).append(name)
        with ThreadPoolExecutor(len(PROXIES)) as pool:
            list(pool.map(lambda proxy: self._start_proxy(proxy, ports), PROXIES))

    def _start_proxy(self, name: str, wires: Mapping[tuple[str, int], int]) -> None:
        listen, *brokers = _free_ports(1 + len(NODES), set())
        broker_ports = dict(zip(NODES, brokers, strict=True))
        config = "" if self._fencing else "unsafe_disable_fencing = true\n"
        config += _CONFIG.format(
            host=CLIENTS_HOST, ports="\n".join(f"{node_id} = {port}" for node_id, port in broker_ports.items())
        )
        directory = self.directory / f"proxy-{name}"
        directory.mkdir(parents=True, exist_ok=True)
        upstream = ",".join(f"127.0.0.1:{wires[name, node_id]}" for node_id in NODES)
        process = ProxyProcess(upstream, directory, config=config, port=listen)
        self._stack.callback(process.close)
        self.proxies[name] = process
        for port in (listen, *brokers):
            pipe = f"clients to {name}, port {port}"
            self.pipes.open(pipe, (CLIENTS_HOST, port), ("127.0.0.1", port))
            self.downstream.setdefault(name, []).append(pipe)

    def bootstrap(self, proxy: str) -> str:
        """The address of the fault proxy before the proxy."""
        return f"{CLIENTS_HOST}:{self.proxies[proxy].port}"

    def create(self, topic: str, leader: int) -> None:
        on = [leader, *(node_id for node_id in NODES if node_id != leader)]
        with Connection(f"127.0.0.1:{self.proxies['a'].port}") as connection:
            assert connection.create_topic(topic, on=on) == (0, None)
        until(lambda: self.leader(topic) == leader, f"{topic} to have a leader", seconds=_PATIENCE_SECONDS)

    # ---- queries to a running broker

    def _query(self, api_key: int, version: int, body: Fields) -> Fields | None:
        for node_id in NODES:
            if self.kafka.running(node_id) and node_id not in self.kafka._paused:
                with contextlib.suppress(OSError, Closed), RawConnection(self.kafka.address(node_id), 5.0) as broker:
                    return broker.query(api_key, version, body)
        return None

    def _partition(self, topic: str) -> Fields:
        answer = self._query(_METADATA, 9, {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False})
        found: list[Fields] = answer["Topics"][0]["Partitions"] if answer else []
        return found[0] if found else {}

    def leader(self, topic: str) -> int:
        """-1: none or unknown."""
        return int(self._partition(topic).get("LeaderId", -1))

    def in_sync(self, topic: str) -> set[int]:
        return set(self._partition(topic).get("IsrNodes", ()))

    def controller(self) -> int:
        topics = [{"TopicName": "__cluster_metadata", "Partitions": [{"PartitionIndex": 0}]}]
        answer = self._query(_DESCRIBE_QUORUM, 1, {"Topics": topics})
        return int(answer["Topics"][0]["Partitions"][0]["LeaderId"]) if answer and answer["Topics"] else -1

    def reassign(self, topic: str, replicas: Sequence[int]) -> None:
        """Makes the first one preferred, but not yet the leader."""
        requested = [{"PartitionIndex": 0, "Replicas": list(replicas)}]
        self._query(_REASSIGN, 0, {"TimeoutMs": 5_000, "Topics": [{"Name": topic, "Partitions": requested}]})

    def elect_preferred(self, topic: str) -> None:
        partitions = [{"Topic": topic, "Partitions": [0]}]
        self._query(_ELECT_LEADERS, 2, {"ElectionType": 0, "TopicPartitions": partitions, "TimeoutMs": 5_000})

    # ---- repair

    def start_proxy(self, name: str) -> None:
        """Start it after a stop or kill. This may take several attempts while brokers are down."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self.proxies[name].start()
                return
            except AssertionError:
                if attempt == _START_ATTEMPTS:
                    raise
                time.sleep(1.0)

    def mend(self) -> None:
        """Start everything that is down."""
        for node_id in NODES:
            if node_id in self.kafka._paused:
                self.kafka.resume(node_id)
        for node_id in NODES:
            if not self.kafka.running(node_id):
                self.kafka.restart(node_id, wait=False)
        self.kafka.await_ready()
        for name, proxy in self.proxies.items():
            with self.proxy_locks[name]:
                if proxy.running:
                    proxy.resume()
                else:
                    self.start_proxy(name)
