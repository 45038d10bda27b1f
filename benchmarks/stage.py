"""Services of a run: Kafka, the routes to it, the JVM of the load tools. Started once, stopped at the end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from benchmarks import machine
from benchmarks.java import Jvm
from benchmarks.raw import Connection, RefusedError
from benchmarks.results import DIRECT, PRODUCT, is_product
from benchmarks.routes import Peer, Route, StartError, free_ports
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import DEFAULT_VERSION
from fencepost_dev.ports import HOST
from fencepost_proxy.types import Address

#: Directory of Kafka's log if it has enough space: no disk is measured.
_MEMORY = Path("/dev/shm")
_MEMORY_FREE_BYTES_MIN = 6 << 30
_ROUTE_SECONDS = 60.0
_STABILIZE_SECONDS = 2.0
#: Limit the disk space of long runs.
TOPIC_CONFIGS = {
    "segment.bytes": str(64 << 20),
    "retention.bytes": str(192 << 20),
    "file.delete.delay.ms": "1000",
}
_BROKER_PROPERTIES = {
    "log.retention.check.interval.ms": "2000",
    "log.initial.task.delay.ms": "2000",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
}


def say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a run. `rounds`: repetitions after a discarded warm-up round."""

    quick: bool
    rounds: int
    produce_records: int
    consume_records: int
    #: Requests per slice, and slices per round, of each series.
    slice_requests: int
    slices: int
    idle_connections: tuple[int, ...]
    starts: int

    def with_rounds(self, rounds: int) -> Plan:
        return replace(self, rounds=rounds)


FULL = Plan(False, 5, 400_000, 800_000, 50, 30, (500, 5000), 5)
QUICK = Plan(True, 2, 100_000, 200_000, 25, 14, (500,), 2)


@dataclass
class Run:
    """Argument of the workloads.

    `kafka`: the broker's own address. `routes`: the running routes, the direct one first.
    """

    plan: Plan
    cluster: KafkaCluster
    routes: list[Route]
    directory: Path
    missing: dict[str, str] = field(default_factory=dict)
    _jvm: Jvm | None = None
    _numbers: int = 0

    @property
    def kafka(self) -> str:
        return self.cluster.bootstrap

    @property
    def direct(self) -> Route:
        return self._named(DIRECT)

    @property
    def product(self) -> Route:
        return self._named(PRODUCT)

    @property
    def products(self) -> list[Route]:
        """The product, and its other checkouts, which peers.toml names `fencepost, …`."""
        return [route for route in self.routes if is_product(route.name)]

    @contextlib.contextmanager
    def alone(self, product: Route) -> Iterator[None]:
        """Stop all other `products`: appends are pipelined only while one process serves the cluster."""
        routes, others = self.routes, [route for route in self.products if route is not product]
        for route in others:
            route.stop()
        self.routes = [route for route in routes if route not in others]
        # Until it has observed that they left, and its takeover period is over.
        time.sleep(_STABILIZE_SECONDS if others else 0.0)
        try:
            yield
        finally:
            for route in others:
                route.start()
                await_kafka_through(route)
            self.routes = routes

    def _named(self, name: str) -> Route:
        return next(route for route in self.routes if route.name == name)

    @property
    def jvm(self) -> Jvm:
        if self._jvm is None:
            self._jvm = Jvm(self.directory / "jvm.log", version=DEFAULT_VERSION)
        return self._jvm

    def topic(self, prefix: str, partitions: int = 1, **configs: str) -> str:
        """Create a topic. `prefix` selects its checks in the product's configuration in `routes.py`."""
        self._numbers += 1
        return self.named_topic(f"{prefix}-{self._numbers}", partitions, **configs)

    def named_topic(self, name: str, partitions: int = 1, **configs: str) -> str:
        with contextlib.closing(Connection(self.kafka)) as admin:
            admin.create_topic(name, partitions, TOPIC_CONFIGS | configs)
        self.await_topic(name)
        return name

    def await_topic(self, name: str) -> None:
        """Wait until every route returns the leaders of a new topic."""
        deadline = time.monotonic() + _ROUTE_SECONDS
        for route in self.routes:
            while not self._is_led(route, name):
                if time.monotonic() > deadline:
                    raise RefusedError(f"{route.name} does not return the leaders of {name}")
                time.sleep(0.02)

    def _is_led(self, route: Route, name: str) -> bool:
        with contextlib.closing(Connection(route.address)) as connection:
            (topic,) = connection.metadata(name).topics
        return not topic.error_code and all(not part.error_code for part in topic.partitions)

    def drop(self, *topics: str) -> None:
        with contextlib.closing(Connection(self.kafka)) as admin:
            for topic in topics:
                admin.delete_topic(topic)

    def close(self) -> None:
        if self._jvm is not None:
            self._jvm.close()
        for route in self.routes:
            route.stop()


class Stage:
    """`with Stage(…) as run`. Stops all that it started, also after an error."""

    def __init__(self, plan: Plan, peers: Sequence[Peer], *, kafka_port: int | None) -> None:
        self._plan = plan
        self._peers = [peer for peer in peers if not peer.missing]
        self._missing = {peer.name: peer.missing for peer in peers if peer.missing}
        self._kafka_port = kafka_port
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Run:
        with contextlib.ExitStack() as opened:
            run = self._build(opened)
            self._open = opened.pop_all()
            return run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ctrl-C during the shutdown would leave processes running.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._open.close()
        signal.signal(signal.SIGINT, before)

    def _build(self, opened: contextlib.ExitStack) -> Run:
        directory = Path(tempfile.mkdtemp(prefix="fencepost-bench-"))
        opened.callback(shutil.rmtree, directory, ignore_errors=True)
        cluster = opened.enter_context(self._kafka(opened, directory))
        run = Run(self._plan, cluster, [], directory, dict(self._missing))
        opened.callback(run.close)
        run.routes.append(Route(Peer(DIRECT, address=cluster.bootstrap), port=0, upstream="", directory=directory))
        for number, peer in enumerate(self._peers):
            upstream = cluster.bootstrap if peer.rewrites else cluster.bootstrap_of(f"ROUTE{number}")
            route = Route(peer, port=self._ports[number], upstream=upstream, directory=directory)
            if not route.is_ours:
                say(f"waiting for {route.name} at {route.address}, which must forward to {upstream}")
            try:
                if route.is_ours:
                    route.start()
                if await_kafka_through(route) in _own_addresses(cluster):
                    raise StartError(
                        f"{route.name} returns Kafka's own addresses, so clients would bypass it "
                        "(set `rewrites = false`, or use --tcp-route)"
                    )
            except (StartError, OSError, RefusedError) as error:
                route.stop()
                run.missing[peer.name] = str(error)
                say(f"{peer.name} is skipped: {error}")
                continue
            run.routes.append(route)
        if PRODUCT not in [route.name for route in run.routes]:
            raise StartError(f"the product did not start: {run.missing[PRODUCT]}")
        return run

    def _kafka(self, opened: contextlib.ExitStack, directory: Path) -> KafkaCluster:
        self._ports = free_ports(
            len(self._peers), but=range(self._kafka_port or 0, (self._kafka_port or 0) + 1 + len(self._peers))
        )
        tcp_peers = {number: peer for number, peer in enumerate(self._peers) if not peer.rewrites}
        advertised = {
            f"ROUTE{number}": Address.parse(peer.address or f"{HOST}:{self._ports[number]}")
            for number, peer in tcp_peers.items()
        }
        listener_ports = {}
        if self._kafka_port is not None:
            given = [number for number, peer in tcp_peers.items() if peer.address]
            listener_ports = {f"ROUTE{number}": self._kafka_port + 1 + index for index, number in enumerate(given)}
        data = directory / "kafka"
        if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MEMORY_FREE_BYTES_MIN:
            data = Path(tempfile.mkdtemp(prefix="fencepost-bench-", dir=_MEMORY))
            opened.callback(shutil.rmtree, data, ignore_errors=True)
        return KafkaCluster(
            ports=[self._kafka_port] if self._kafka_port is not None else None,
            data=data,
            properties=_BROKER_PROPERTIES,
            listeners=dict.fromkeys(advertised, "PLAINTEXT"),
            listener_ports=listener_ports,
            advertised=advertised,
            heap="1g",
            quick_start=False,
            progress=say,
        )


def _own_addresses(cluster: KafkaCluster) -> set[str]:
    return set(cluster.bootstrap.split(","))


def await_kafka_through(route: Route) -> str:
    """Wait until Kafka responds through the route and at its advertised address. Returns that address.

    Raises StartError after a timeout.
    """
    deadline = time.monotonic() + _ROUTE_SECONDS
    problem = "nothing"
    while time.monotonic() < deadline:
        try:
            with contextlib.closing(Connection(route.address)) as connection:
                connection.greet()
                reported = connection.broker()
                with contextlib.closing(Connection(reported)) as leader:
                    leader.greet()
            return reported
        except (OSError, RefusedError) as error:
            problem = str(error)
        if route.is_ours and not route.running:
            break
        time.sleep(0.05)
    raise StartError(f"Kafka does not respond through {route.name} at {route.address}: {problem}; {route.last_words()}")


@contextlib.contextmanager
def cpu_of(route: Route) -> Iterator[list[float]]:
    """CPU seconds of the route's processes during the block."""
    spent: list[float] = []
    pids = route.pids()
    before = machine.cpu_seconds(pids)
    yield spent
    spent.append(machine.cpu_seconds(pids) - before)
