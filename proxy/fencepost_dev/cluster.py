"""A real Kafka cluster (KRaft) on this machine, from the locked jars, with brokers as child processes.

Used by `fencepost dev`, the demonstration and every test against Kafka. Synchronous: from asyncio, use
`asyncio.to_thread`.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from fencepost_dev import class_archive, probe
from fencepost_dev.errors import ClusterError, PortTakenError
from fencepost_dev.jars import DEFAULT_VERSION, Progress, classpath, release, say
from fencepost_dev.java import QUICK_JVM, find_jdk, logging_flags
from fencepost_dev.node import SHUT_DOWN_TIMEOUT_SECONDS, Node
from fencepost_dev.ports import HOST, Listeners, is_free
from fencepost_proxy.types import Address

START_TIMEOUT_SECONDS = 120.0
#: Time for a whole cluster with persistent data to shut down. The last of several nodes find no controller and would
#: wait for minutes; Kafka recovers from SIGKILL.
STOP_TIMEOUT_SECONDS = 6.0
POLL_SECONDS = 0.1
#: Another process may take a chosen port before the broker binds it.
PORT_ATTEMPTS = 3

_CLUSTER_ID_FILE = "cluster-id"
_KAFKA_JVM = ("-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")


class KafkaCluster:
    """`brokers` nodes with the ids 1, 2, … on 127.0.0.1; each is broker and controller.

    ports: client listener ports in the order of node ids; None for free ports.
    data: directory to keep, so that a later cluster has the same id, topics and records. None for a temporary
        directory, which `stop` removes.
    properties: server properties that override those of `_properties`.
    listeners: further client listeners, name → security protocol (`{"SASL": "SASL_PLAINTEXT"}`), each on a free port;
        their settings go into `properties`. See `bootstrap_of`.
    listener_ports: fixed ports for some of `listeners`. One broker only.
    advertised: advertised address by listener, for a relay in front of it that rewrites nothing. One broker only.
    quick_start: JVM flags for a fast start at lower peak speed. False for measurements.
    archive_to: file to which each broker writes a class archive at shutdown (`class_archive`).

    `start` and `restart` return when all brokers are registered, and group and transaction coordinators are elected.
    Errors: JavaError, JarError, PortTakenError, ClusterError.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        version: str = DEFAULT_VERSION,
        ports: Sequence[int] | None = None,
        data: Path | None = None,
        properties: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        listener_ports: Mapping[str, int] | None = None,
        advertised: Mapping[str, Address] | None = None,
        heap: str = "512m",
        quick_start: bool = True,
        archive_to: Path | None = None,
        progress: Progress = say,
    ) -> None:
        if brokers < 1 or (ports is not None and len(ports) != brokers):
            raise ValueError("at least one broker is needed, and as many ports as brokers or none")
        if brokers > 1 and (listener_ports or advertised):
            raise ValueError("several brokers cannot share a port or an advertised address")
        self.version = version
        self.data = Path()
        self.cluster_id = ""
        self._release = release(version)
        self._brokers = brokers
        self._given_data = data
        self._temporary = data is None
        self._extra_properties = dict(properties or {})
        self._listeners = Listeners(ports, listeners, listener_ports, advertised)
        self._heap = heap
        self._quick_start = quick_start
        self._archive_to = archive_to
        self._progress = progress
        self._java: list[str] = []
        self._nodes: dict[int, Node] = {}

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(self._listeners.ports)

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT[,HOST:PORT…]` of all brokers."""
        return self.bootstrap_of("PLAINTEXT")

    def bootstrap_of(self, listener: str) -> str:
        return ",".join(str(self.address(node_id, listener)) for node_id in self.node_ids)

    def address(self, node_id: int, listener: str = "PLAINTEXT") -> Address:
        return Address(HOST, self._listeners.ports[node_id][listener])

    def log_file(self, node_id: int) -> Path:
        """The broker's log and output, kept across restarts."""
        return self._nodes[node_id].log_file

    def pid(self, node_id: int) -> int:
        return self._nodes[node_id].started.pid

    def running(self, node_id: int) -> bool:
        return node_id in self._nodes and self._nodes[node_id].running

    # --- all nodes --------------------------------------------------------------------------------------------------

    def __enter__(self) -> KafkaCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        if any(node.process is not None for node in self._nodes.values()):
            raise ValueError("the cluster was started already")
        self._listeners.require_free()
        self._java = _java_command(self._release.broker_lock, self._heap, self._quick_start, self._progress)
        self._progress(f"starting Kafka {self.version}: {self._brokers} broker{'s' * (self._brokers > 1)}")
        started = time.monotonic()
        self.data, self.cluster_id = _prepared_data(self._given_data, self._brokers)
        atexit.register(self.stop)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            try:
                self._start_once()
                break
            except PortTakenError:
                _kill(self._nodes.values())
                if attempt == PORT_ATTEMPTS or not all(map(is_free, self._listeners.given_ports)):
                    self.stop()
                    raise
            except BaseException as error:
                if isinstance(error, ClusterError):
                    self.keep_data()
                self.stop()
                raise
        self._progress(f"Kafka {self.version} is up at {self.bootstrap} ({time.monotonic() - started:.1f} s)")

    def stop(self) -> None:
        """Ends all brokers: kills those with temporary data, which is removed; shuts down the others."""
        atexit.unregister(self.stop)
        if not self._temporary:
            started = [node for node in self._nodes.values() if node.process is not None]
            for node in started:
                node.resume()
                node.started.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
            for node in started:
                node.started.wait(max(0.0, deadline - time.monotonic()))
        _kill(self._nodes.values())
        if self._temporary and self.data != Path():
            shutil.rmtree(self.data, ignore_errors=True)

    def keep_data(self) -> None:
        """Keeps temporary data after `stop`, for an error that names a log file in it."""
        self._temporary = False

    def add_broker(self, properties: Mapping[str, str] | None = None) -> int:
        """Adds a broker (not a controller) to the running cluster. Returns its node id."""
        node_id = max(self.node_ids) + 1
        self._listeners.choose_for_broker(node_id)
        node = self._add_node(node_id, properties or {})
        node.format(self.cluster_id)
        node.launch()
        self.await_ready()
        return node_id

    # --- one node ---------------------------------------------------------------------------------------------------

    def kill(self, node_id: int) -> None:
        """SIGKILL: like a power failure for the process, not for the disk."""
        self._nodes[node_id].end(signal.SIGKILL)

    def shut_down(self, node_id: int, *, timeout_seconds: float = SHUT_DOWN_TIMEOUT_SECONDS) -> None:
        """SIGTERM: leadership moves to other brokers first, if any. SIGKILL after the timeout."""
        self._nodes[node_id].end(signal.SIGTERM, timeout_seconds)

    def pause(self, node_id: int) -> None:
        """SIGSTOP: connections stay open, requests queue up, no response is sent."""
        self._nodes[node_id].pause()

    def paused(self, node_id: int) -> bool:
        return self._nodes[node_id].paused

    def resume(self, node_id: int) -> None:
        self._nodes[node_id].resume()

    def restart(self, node_id: int, *, wait: bool = True) -> None:
        """Restarts the node on its old ports. `wait`: return when it has rejoined."""
        if self.running(node_id):
            self.shut_down(node_id)
        self._nodes[node_id].launch()
        if wait:
            self.await_ready()

    def await_ready(self) -> None:
        """Waits until every running, unpaused node lists all of them, and coordinators respond."""
        nodes = {node_id for node_id, node in self._nodes.items() if node.running and not node.paused}
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        for node_id in nodes:
            # A killed node is also listed until its session ends.
            self._until(partial(_sees, self.address(node_id), nodes), deadline, "brokers to register")
        first = self.address(min(nodes))
        for key_type in probe.COORDINATOR_TYPES:
            self._until(partial(probe.has_coordinator, first, key_type), deadline, "a coordinator")
        self._until(partial(probe.gives_producer_ids, first), deadline, "producer ids")

    # --- internals --------------------------------------------------------------------------------------------------

    def _start_once(self) -> None:
        self._listeners.choose_for_controllers(self._brokers)
        for node_id in self.node_ids:
            self._add_node(node_id, {})
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.format(self.cluster_id), self._nodes.values()))
        # Written last: a later start reuses only a complete cluster.
        (self.data / _CLUSTER_ID_FILE).write_text(self.cluster_id + "\n", "ascii")
        for node in self._nodes.values():
            node.launch()
        self.await_ready()

    def _add_node(self, node_id: int, extra: Mapping[str, str]) -> Node:
        flags = [] if self._archive_to is None else [f"-XX:ArchiveClassesAtExit={self._archive_to}"]
        node = self._nodes[node_id] = Node(node_id, self.data / f"node-{node_id}", self._java, flags)
        node.write_properties(self._properties(node_id) | self._extra_properties | dict(extra))
        return node

    def _properties(self, node_id: int) -> dict[str, str]:
        return {
            "node.id": str(node_id),
            "log.dirs": str(self._nodes[node_id].directory / "data"),
            **self._listeners.properties(node_id),
            **_cluster_properties(self.version, self._brokers),
        }

    def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        while True:
            with contextlib.suppress(OSError):
                if condition():
                    return
            for node_id, node in self._nodes.items():
                node.require_running(tuple(self._listeners.ports[node_id].values()))
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Kafka {self.version} was not ready in {START_TIMEOUT_SECONDS:.0f} s: waiting for {what} "
                    f"(see {self.data}/node-*/broker.log)"
                )
            time.sleep(POLL_SECONDS)


def _sees(address: Address, nodes: set[int]) -> bool:
    return nodes <= probe.registered_brokers(address)


def _kill(nodes: Iterable[Node]) -> None:
    started = [node for node in nodes if node.process is not None]
    for node in started:
        node.started.signal(signal.SIGKILL)
    for node in started:
        node.started.wait(SHUT_DOWN_TIMEOUT_SECONDS)
        node.process, node.paused = None, False


def _java_command(lock: str, heap: str, quick_start: bool, progress: Progress) -> list[str]:
    jdk = find_jdk()
    path = classpath(lock, progress)
    archive = class_archive.archive_of(jdk, lock) if quick_start else None
    return [
        str(jdk.java),
        f"-Xmx{heap}",
        *(QUICK_JVM if quick_start else _KAFKA_JVM),
        "-Djava.awt.headless=true",
        *logging_flags("INFO", to_stderr=False),
        *class_archive.flags(archive),
        "-cp",
        path,
    ]


def _prepared_data(given: Path | None, brokers: int) -> tuple[Path, str]:
    """The data directory, and the id of the cluster in it or a new one."""
    if given is None:
        data = Path(tempfile.mkdtemp(prefix="fencepost-kafka-"))
    else:
        data = given.resolve()
        data.mkdir(parents=True, exist_ok=True)
    id_file = data / _CLUSTER_ID_FILE
    if id_file.exists():
        existing = sum(1 for _ in data.glob("node-*"))
        if existing != brokers:
            # Fewer would leave partitions without leaders; more would change the controller quorum.
            raise ClusterError(f"{data} contains a cluster of {existing} brokers, not {brokers}")
        return data, id_file.read_text("ascii").strip()
    if any(data.iterdir()):
        raise ClusterError(f"{data} is not empty and contains no cluster (use an empty directory)")
    return data, _new_cluster_id()


def _new_cluster_id() -> str:
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        # As Kafka's Uuid.randomUuid: Kafka's tools would parse a leading dash as an option.
        if not text.startswith("-"):
            return text


def _cluster_properties(version: str, brokers: int) -> dict[str, str]:
    """Server properties that all nodes share."""
    replicas = min(3, brokers)
    properties = {
        # Kafka's default delays each new group by three seconds.
        "group.initial.rebalance.delay.ms": "0",
        # A killed broker can register again only after its old session ended: by default 9 s.
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "1000",
    }
    for topic, isr in (
        ("offsets.topic", None),
        ("transaction.state.log", "transaction.state.log.min.isr"),
        ("share.coordinator.state.topic", "share.coordinator.state.topic.min.isr"),
    ):
        properties[f"{topic}.replication.factor"] = str(replicas)
        # Kafka's default of 50 costs seconds at first use on a machine with few cores.
        properties[f"{topic}.num.partitions"] = "5"
        if isr is not None:
            properties[isr] = str(min(2, replicas))
    if version.startswith("3."):
        # KIP-848 groups are a preview in 3.x; later releases enable them.
        properties["group.coordinator.rebalance.protocols"] = "classic,consumer"
        properties["unstable.api.versions.enable"] = "true"
    return properties
