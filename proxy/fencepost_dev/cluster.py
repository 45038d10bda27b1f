"""A real Kafka cluster (KRaft) on this machine, from the locked jars, with brokers as child processes.

Used by `fencepost dev`, the demonstration and every test against Kafka. Synchronous: from asyncio, use
`asyncio.to_thread`.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from fencepost_dev import class_archive, probe
from fencepost_dev.errors import ClusterError, PortTakenError
from fencepost_dev.jars import DEFAULT_VERSION, Progress, classpath, release, say
from fencepost_dev.java import QUICK_JVM, find_jdk, logging_flags
from fencepost_dev.process import SupervisedProcess
from fencepost_proxy.types import Address

HOST = "127.0.0.1"
START_TIMEOUT_SECONDS = 120.0
#: Time for one broker to shut down before it is killed.
SHUT_DOWN_TIMEOUT_SECONDS = 20.0
#: The same for a whole cluster with persistent data. The last of several nodes find no controller and would wait for
#: minutes; Kafka recovers from SIGKILL.
STOP_TIMEOUT_SECONDS = 6.0
POLL_SECONDS = 0.1
#: Below the ephemeral ports (Linux: from 32768), so that no outgoing connection takes the port of a restarting broker.
FREE_PORTS = range(15_000, 32_000)
#: Another process may take a chosen port before the broker binds it.
PORT_ATTEMPTS = 3

_ADDRESS_IN_USE = "Address already in use"
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
        self._release = release(version)
        self._brokers = brokers
        self._given_ports = tuple(ports) if ports is not None else None
        self._given_data = data
        self._temporary = data is None
        self._extra_properties = dict(properties or {})
        self._extra_listeners = dict(listeners or {})
        self._listener_ports = dict(listener_ports or {})
        self._advertised = dict(advertised or {})
        self._heap = heap
        self._quick_start = quick_start
        self._archive_to = archive_to
        self._progress = progress
        self._java: list[str] = []
        self._data = Path()
        self._cluster_id = ""
        #: Node id → listener name → port. CONTROLLER only for a controller.
        self._ports: dict[int, dict[str, int]] = {}
        self._processes: dict[int, SupervisedProcess] = {}
        self._paused: set[int] = set()

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        return self._cluster_id

    @property
    def data(self) -> Path:
        return self._data

    @property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(self._ports)

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT[,HOST:PORT…]` of all brokers."""
        return self.bootstrap_of("PLAINTEXT")

    def bootstrap_of(self, listener: str) -> str:
        return ",".join(str(self.address(node_id, listener)) for node_id in self._ports)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(self.address(node_id) for node_id in self._ports)

    def address(self, node_id: int, listener: str = "PLAINTEXT") -> Address:
        return Address(HOST, self._ports[node_id][listener])

    def log_file(self, node_id: int) -> Path:
        """The broker's log and output, kept across restarts."""
        return self._directory(node_id) / "broker.log"

    def pid(self, node_id: int) -> int:
        return self._processes[node_id].pid

    def running(self, node_id: int) -> bool:
        return node_id in self._processes and self._processes[node_id].running

    # --- all nodes --------------------------------------------------------------------------------------------------

    def __enter__(self) -> KafkaCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        if self._processes:
            raise ValueError("the cluster was started already")
        _require_free((*(self._given_ports or ()), *self._listener_ports.values()))
        jdk = find_jdk()
        path = classpath(self._release.broker_lock, self._progress)
        self._java = [str(jdk.java), "-cp", path]
        if self._quick_start:
            self._java[1:1] = class_archive.flags(class_archive.archive_of(jdk, self._release.broker_lock))
        self._progress(f"starting Kafka {self.version}: {self._brokers} broker{'s' * (self._brokers > 1)}")
        started = time.monotonic()
        self._prepare_data()
        atexit.register(self.stop)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            try:
                self._start_once()
                break
            except PortTakenError:
                self._kill_all()
                if attempt == PORT_ATTEMPTS or (self._given_ports is not None and not _all_free(self._given_ports)):
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
            for node_id in self._processes:
                self.resume(node_id)
            for process in self._processes.values():
                process.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
            for process in self._processes.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill_all()
        if self._temporary and self._data != Path():
            shutil.rmtree(self._data, ignore_errors=True)

    def keep_data(self) -> None:
        """Keeps temporary data after `stop`, for an error that names a log file in it."""
        self._temporary = False

    def add_broker(self, properties: Mapping[str, str] | None = None) -> int:
        """Adds a broker (not a controller) to the running cluster. Returns its node id."""
        node_id = max(self._ports) + 1
        names = ["PLAINTEXT", *self._extra_listeners]
        self._ports[node_id] = dict(zip(names, _free_ports(len(names), self._used_ports()), strict=True))
        self._write_properties(node_id, properties or {})
        self._format(node_id)
        self._launch(node_id)
        self._await_ready()
        return node_id

    # --- one node ---------------------------------------------------------------------------------------------------

    def kill(self, node_id: int) -> None:
        """SIGKILL: like a power failure for the process, not for the disk."""
        self._end(node_id, signal.SIGKILL)

    def shut_down(self, node_id: int, *, timeout_seconds: float = SHUT_DOWN_TIMEOUT_SECONDS) -> None:
        """SIGTERM: leadership moves to other brokers first, if any. SIGKILL after the timeout."""
        self._end(node_id, signal.SIGTERM, timeout_seconds)

    def pause(self, node_id: int) -> None:
        """SIGSTOP: connections stay open, requests queue up, no response is sent."""
        self._processes[node_id].stop_all_threads()
        self._paused.add(node_id)

    def paused(self, node_id: int) -> bool:
        return node_id in self._paused

    def resume(self, node_id: int) -> None:
        self._processes[node_id].signal(signal.SIGCONT)
        self._paused.discard(node_id)

    def restart(self, node_id: int, *, wait: bool = True) -> None:
        """Restarts the node on its old ports. `wait`: return when it has rejoined."""
        if self.running(node_id):
            self.shut_down(node_id)
        self._launch(node_id)
        if wait:
            self._await_ready()

    def await_ready(self) -> None:
        """Waits until every running, unpaused node lists all of them, and coordinators respond."""
        self._await_ready()

    # --- internals --------------------------------------------------------------------------------------------------

    def _directory(self, node_id: int) -> Path:
        return self._data / f"node-{node_id}"

    def _prepare_data(self) -> None:
        if self._given_data is None:
            self._data = Path(tempfile.mkdtemp(prefix="fencepost-kafka-"))
        else:
            self._data = self._given_data.resolve()
            self._data.mkdir(parents=True, exist_ok=True)
        id_file = self._data / _CLUSTER_ID_FILE
        if id_file.exists():
            self._cluster_id = id_file.read_text("ascii").strip()
            existing = sum(1 for _ in self._data.glob("node-*"))
            if existing != self._brokers:
                # Fewer would leave partitions without leaders; more would change the controller quorum.
                raise ClusterError(f"{self._data} contains a cluster of {existing} brokers, not {self._brokers}")
        elif any(self._data.iterdir()):
            raise ClusterError(f"{self._data} is not empty and contains no cluster (use an empty directory)")
        else:
            self._cluster_id = _new_cluster_id()

    def _start_once(self) -> None:
        self._choose_ports()
        for node_id in self._ports:
            self._write_properties(node_id, {})
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._format, self._ports))
        # Written last: a later start reuses only a complete cluster.
        (self._data / _CLUSTER_ID_FILE).write_text(self._cluster_id + "\n", "ascii")
        for node_id in self._ports:
            self._launch(node_id)
        self._await_ready()

    def _choose_ports(self) -> None:
        names = ["CONTROLLER", "PLAINTEXT", *self._extra_listeners]
        self._ports = {}
        for index in range(self._brokers):
            ports = dict(zip(names, _free_ports(len(names), self._used_ports()), strict=True))
            if self._given_ports is not None:
                ports["PLAINTEXT"] = self._given_ports[index]
            ports |= self._listener_ports
            self._ports[index + 1] = ports

    def _used_ports(self) -> set[int]:
        chosen = {port for ports in self._ports.values() for port in ports.values()}
        return chosen | set(self._given_ports or ()) | set(self._listener_ports.values())

    def _write_properties(self, node_id: int, extra: Mapping[str, str]) -> None:
        directory = self._directory(node_id)
        directory.mkdir(exist_ok=True)
        properties = self._properties(node_id) | self._extra_properties | dict(extra)
        lines = [f"{name}={_escaped(value)}\n" for name, value in properties.items()]
        (directory / "server.properties").write_text("".join(lines), "utf-8")

    def _properties(self, node_id: int) -> dict[str, str]:
        ports = self._ports[node_id]
        listeners = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
        advertised = listeners | {name: f"{name}://{address}" for name, address in self._advertised.items()}
        protocols = {"CONTROLLER": "PLAINTEXT", "PLAINTEXT": "PLAINTEXT"} | self._extra_listeners
        voters = [
            f"{other}@{HOST}:{of_other['CONTROLLER']}"
            for other, of_other in self._ports.items()
            if "CONTROLLER" in of_other
        ]
        replicas = min(3, self._brokers)
        in_sync = min(2, replicas)
        properties = {
            "node.id": str(node_id),
            "process.roles": "broker,controller" if "CONTROLLER" in ports else "broker",
            # Static voters, not stored in the log as newer releases can: ports may change between runs.
            "controller.quorum.voters": ",".join(voters),
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(listeners.values()),
            "advertised.listeners": ",".join(text for name, text in advertised.items() if name != "CONTROLLER"),
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self._directory(node_id) / "data"),
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
                properties[isr] = str(in_sync)
        if self.version.startswith("3."):
            # KIP-848 groups are a preview in 3.x; later releases enable them.
            properties["group.coordinator.rebalance.protocols"] = "classic,consumer"
            properties["unstable.api.versions.enable"] = "true"
        return properties

    def _jvm(self) -> list[str]:
        flags = QUICK_JVM if self._quick_start else _KAFKA_JVM
        return [
            self._java[0],
            f"-Xmx{self._heap}",
            *flags,
            "-Djava.awt.headless=true",
            *logging_flags("INFO", to_stderr=False),
            *self._java[1:],
        ]

    def _format(self, node_id: int) -> None:
        directory = self._directory(node_id)
        if (directory / "data" / "meta.properties").exists():
            return
        output = directory / "format.log"
        process = SupervisedProcess(
            [
                *self._jvm(),
                "kafka.tools.StorageTool",
                "format",
                f"--config={directory / 'server.properties'}",
                f"--cluster-id={self._cluster_id}",
            ],
            output=output,
        )
        ended = process.wait(START_TIMEOUT_SECONDS)
        if not ended or process.exit_code:
            process.signal(signal.SIGKILL)
            how = f"code {process.exit_code}" if ended else f"timeout after {START_TIMEOUT_SECONDS:.0f} s"
            raise ClusterError(
                f"formatting the storage of node {node_id} failed ({how}): {_last_line(output)} (see {output})"
            )

    def _launch(self, node_id: int) -> None:
        directory = self._directory(node_id)
        self._paused.discard(node_id)
        jvm = self._jvm()
        if self._archive_to is not None:
            jvm.insert(1, f"-XX:ArchiveClassesAtExit={self._archive_to}")
        self._processes[node_id] = SupervisedProcess(
            [*jvm, "kafka.Kafka", str(directory / "server.properties")], output=self.log_file(node_id)
        )

    def _end(self, node_id: int, how: signal.Signals, timeout_seconds: float = SHUT_DOWN_TIMEOUT_SECONDS) -> None:
        process = self._processes[node_id]
        process.signal(how)
        if node_id in self._paused:
            # SIGTERM is not delivered to a stopped process; SIGKILL is.
            self.resume(node_id)
        if not process.wait(timeout_seconds):
            process.signal(signal.SIGKILL)
            process.wait(SHUT_DOWN_TIMEOUT_SECONDS)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait(SHUT_DOWN_TIMEOUT_SECONDS)
        self._processes.clear()
        self._paused.clear()

    def _await_ready(self) -> None:
        nodes = {node_id for node_id in self._ports if self.running(node_id) and node_id not in self._paused}
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        for node_id in nodes:
            # A killed node is also listed until its session ends.
            self._until(partial(self._sees, node_id, nodes), deadline, "brokers to register")
        first = self.address(min(nodes))
        for key_type in probe.COORDINATOR_TYPES:
            self._until(partial(probe.has_coordinator, first, key_type), deadline, "a coordinator")
        self._until(partial(probe.gives_producer_ids, first), deadline, "producer ids")

    def _sees(self, node_id: int, nodes: set[int]) -> bool:
        return nodes <= probe.registered_brokers(self.address(node_id))

    def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        while True:
            with contextlib.suppress(OSError):
                if condition():
                    return
            for node_id, process in self._processes.items():
                if not process.running and process.exit_code != -signal.SIGKILL:
                    self._explain_end(node_id, process.exit_code)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Kafka {self.version} was not ready in {START_TIMEOUT_SECONDS:.0f} s: waiting for {what} "
                    f"(see {self._data}/node-*/broker.log)"
                )
            time.sleep(POLL_SECONDS)

    def _explain_end(self, node_id: int, exit_code: int | None) -> None:
        log = self.log_file(node_id)
        if _ADDRESS_IN_USE in log.read_text("utf-8", "replace"):
            ports = ", ".join(str(port) for port in self._ports[node_id].values())
            raise PortTakenError(f"one of the ports {ports} of broker {node_id} is in use (see {log})")
        raise ClusterError(f"broker {node_id} exited with code {exit_code}: {_last_line(log)} (see {log})")


def _new_cluster_id() -> str:
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        # As Kafka's Uuid.randomUuid: Kafka's tools would parse a leading dash as an option.
        if not text.startswith("-"):
            return text


def _escaped(value: str) -> str:
    """Escapes a value for java.util.Properties."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


port_lock = threading.Lock()
ports_given_out: set[int] = set()


def _free_ports(count: int, used: set[int]) -> list[int]:
    """Free ports that no other cluster of this process has chosen."""
    found: list[int] = []
    with port_lock:
        for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
            if port not in used and port not in ports_given_out and is_free(port):
                found.append(port)
                if len(found) == count:
                    ports_given_out.update(found)
                    return found
    raise PortTakenError(f"no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}")


def is_free(port: int) -> bool:
    with socket.socket() as probe_socket:
        # As Java's server sockets: ignore connections of an earlier run in TIME_WAIT.
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((HOST, port))
        except OSError:
            return False
        return True


def _all_free(ports: Sequence[int]) -> bool:
    return all(is_free(port) for port in ports)


def _require_free(ports: Sequence[int]) -> None:
    for port in ports:
        if not is_free(port):
            raise PortTakenError(f"port {port} on {HOST} is in use (stop the other process, or choose another port)")


def _last_line(log: Path) -> str:
    """The last line with an exception, else the last line."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    exceptions = [line for line in lines if "Exception" in line and not line.startswith(("\t", " "))]
    return (exceptions or lines or ["nothing was printed"])[-1].strip()
