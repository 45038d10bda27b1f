"""Real Kafka, proxies in front of it, and optionally a fault proxy in the connection to each broker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.fault_proxy import FaultProxy
from tests.kit.waiting import until
from tests.support.kafka import kafka_version
from tests.support.messages import Closed, Fields, RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log

NODES = (1, 2, 3)
#: For reactions of a broker to an expired session (4 s), on a busy machine.
PATIENCE_SECONDS = 90.0
#: Server properties of three brokers. Leaders move only on request of a test.
THREE_REPLICAS = {
    "auto.leader.rebalance.enable": "false",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "replica.lag.time.max.ms": "4000",
}
#: The listener of `piped_kafka` that advertises the fault proxies.
WIRE = "WIRE"
_OFFSET_FOR_LEADER_EPOCH, _METADATA, _ELECT_LEADERS, _REASSIGN, _DESCRIBE_QUORUM = 23, 3, 43, 45, 55
_PREFERRED = 0
_ELECTION_NOT_NEEDED = 84
_TIMEOUT_MS = 20_000


class AdvertisedCluster(KafkaCluster):
    """`addresses` – by listener and node id, the address that a broker advertises."""

    def __init__(self, brokers: int, addresses: Mapping[str, Mapping[int, str]], **settings: Any) -> None:
        listeners = settings.pop("listeners", dict.fromkeys(addresses, "PLAINTEXT"))
        super().__init__(brokers, version=kafka_version(), listeners=listeners, **settings)
        self._addresses = addresses

    def _properties(self, node_id: int) -> dict[str, str]:
        self._listeners.advertised = {
            name: Address.parse(by_node[node_id]) for name, by_node in self._addresses.items()
        }
        return super()._properties(node_id)


@contextmanager
def piped_kafka(brokers: int, **settings: Any) -> Iterator[tuple[KafkaCluster, dict[int, FaultProxy]]]:
    """Also yields the fault proxies by node id. The brokers' own listener bypasses them."""
    with ExitStack() as stack:
        pipes = {node_id: stack.enter_context(FaultProxy()) for node_id in range(1, brokers + 1)}
        addresses = {WIRE: {node_id: pipe.address for node_id, pipe in pipes.items()}}
        kafka = stack.enter_context(AdvertisedCluster(brokers, addresses, **settings))
        for node_id, pipe in pipes.items():
            pipe.targets = (kafka.address(node_id, WIRE),)
        yield kafka, pipes


class Stage:
    """A context manager that ends the proxies, and leaves Kafka and the fault proxies running.

    `proxies` – those that `mend` repairs, and that a test may stop. `directory` – for logs.
    """

    def __init__(
        self, kafka: KafkaCluster, directory: Path, pipes: Mapping[int, FaultProxy] = MappingProxyType({})
    ) -> None:
        self.kafka, self.directory, self.pipes = kafka, directory, pipes
        self.proxies: list[ProxyProcess] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def on_exit(self, resource: AbstractContextManager[object]) -> None:
        """Enter it now and exit it with the stage."""
        self._stack.enter_context(resource)

    # ---- proxies

    @property
    def upstream(self) -> str:
        """What proxies connect to."""
        return ",".join(pipe.address for pipe in self.pipes.values()) or self.kafka.bootstrap

    def start_proxy(self, name: str, *, upstream: str = "", **settings: Any) -> ProxyProcess:
        """Start one that is not in `proxies`."""
        logs = self.directory / name
        logs.mkdir(parents=True)
        proxy = ProxyProcess(upstream or self.upstream, logs, **settings)
        self._stack.callback(proxy.close)
        return proxy

    def start_proxies(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Start several at once and add them to `proxies`; `settings` by name."""
        with ThreadPoolExecutor(len(settings)) as pool:
            self.proxies += pool.map(lambda name: self.start_proxy(name, **settings[name]), settings)

    # ---- queries to a running broker of Kafka

    @property
    def living(self) -> list[int]:
        return [each for each in self.kafka.node_ids if self.kafka.running(each) and not self.kafka.paused(each)]

    @property
    def log(self) -> Log:
        return Log(",".join(str(self.kafka.address(each)) for each in self.living))

    def query(self, api_key: int, version: int, body: Fields) -> Fields:
        def answer() -> Fields | None:
            for node_id in self.living:
                address = self.kafka.address(node_id)
                with contextlib.suppress(OSError, Closed), RawConnection(address, 10.0) as connection:
                    return connection.query(api_key, version, body)
            return None

        found: Fields = self.until(answer, "any broker to answer")
        return found

    def partition(self, topic: str, partition: int = 0) -> Fields:
        """LeaderId, IsrNodes, … as in Metadata."""
        found = self.query(_METADATA, 9, {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False})["Topics"][0]
        return next((each for each in found["Partitions"] if each["PartitionIndex"] == partition), {})

    def leader(self, topic: str, partition: int = 0) -> int:
        """-1: none or unknown."""
        return int(self.partition(topic, partition).get("LeaderId", -1))

    def isr(self, topic: str) -> set[int]:
        return set(self.partition(topic).get("IsrNodes", ()))

    def controller(self) -> int:
        topics = [{"TopicName": "__cluster_metadata", "Partitions": [{"PartitionIndex": 0}]}]

        def leader() -> int:
            answer = self.query(_DESCRIBE_QUORUM, 1, {"Topics": topics})
            return int(answer["Topics"][0]["Partitions"][0]["LeaderId"]) if answer["Topics"] else -1

        nodes = self.kafka.node_ids
        found: int = until(leader, "an active controller", accept=lambda each: each in nodes, seconds=PATIENCE_SECONDS)
        return found

    def log_end_of(self, topic: str, node_id: int) -> int:
        """The log end of this broker, if it believes that it leads."""
        epoch = self.partition(topic)["LeaderEpoch"]
        body: Fields = {
            "ReplicaId": -1,
            "Topics": [{"Topic": topic, "Partitions": [{"Partition": 0, "LeaderEpoch": epoch}]}],
        }
        with RawConnection(self.kafka.address(node_id), 10.0) as connection:
            answer = connection.query(_OFFSET_FOR_LEADER_EPOCH, 4, body)["Topics"][0]["Partitions"][0]
        return int(answer["EndOffset"])

    # ---- waiting

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return until(condition, what, seconds=PATIENCE_SECONDS)

    def await_leader(self, topic: str, *, other_than: int | None = None, is_now: int | None = None) -> int:
        def there() -> int:
            leader = self.leader(topic)
            wrong = leader == other_than or (is_now is not None and leader != is_now)
            return 0 if wrong or leader not in self.kafka.node_ids else leader

        found: int = self.until(there, f"{topic} to be led by {is_now or f'another than {other_than}'}")
        return found

    def await_in_sync(self, topic: str, replicas: int = 3) -> None:
        self.until(lambda: len(self.isr(topic)) == replicas, f"{topic} to have {replicas} replicas in sync")

    # ---- changes

    def create(self, topic: str, *, on: Sequence[int] = NODES, configs: Mapping[str, str] | None = None) -> str:
        """Create it through the first proxy; the first of `on` leads."""
        first = self.proxies[0]
        with Connection(first.bootstrap, enter=first.enter) as connection:
            assert connection.create_topic(topic, on=on, configs=configs) == (0, None)
        self.await_leader(topic, is_now=on[0])
        self.await_in_sync(topic, len(on))
        assert self.log.end(topic) == 0
        return topic

    def request_reassignment(self, topic: str, replicas: Sequence[int], partitions: Sequence[int] = (0,)) -> bool:
        """Whether Kafka accepted it. The first replica is then preferred, but does not lead yet."""
        requested = [{"PartitionIndex": each, "Replicas": list(replicas)} for each in partitions]
        body: Fields = {"TimeoutMs": _TIMEOUT_MS, "Topics": [{"Name": topic, "Partitions": requested}]}
        answer = self.query(_REASSIGN, 0, body)
        codes = [each["ErrorCode"] for of in answer["Responses"] for each in of["Partitions"]]
        return not answer["ErrorCode"] and not any(codes)

    def request_election(self, topic: str, partitions: Sequence[int] = (0,)) -> bool:
        """Whether the preferred replicas lead."""
        requested = [{"Topic": topic, "Partitions": list(partitions)}]
        body: Fields = {"ElectionType": _PREFERRED, "TopicPartitions": requested, "TimeoutMs": _TIMEOUT_MS}
        answer = self.query(_ELECT_LEADERS, 2, body)
        codes = [each["ErrorCode"] for of in answer["ReplicaElectionResults"] for each in of["PartitionResult"]]
        return not answer["ErrorCode"] and set(codes) <= {0, _ELECTION_NOT_NEEDED}

    def reassign(self, topic: str, replicas: Sequence[int]) -> None:
        """Wait until the partition has these replicas, with all running ones in sync."""
        living = set(replicas) & set(self.living)
        self.until(lambda: self.request_reassignment(topic, replicas), f"a reassignment of {topic} to begin")
        self.until(
            lambda: self.partition(topic).get("ReplicaNodes") == list(replicas) and self.isr(topic) >= living,
            f"{topic} to be on {replicas}",
        )

    def elect_preferred(self, topic: str) -> None:
        self.until(lambda: self.request_election(topic), f"a preferred election of {topic}")

    def lead(self, topic: str, node_id: int) -> None:
        """Move only the leader."""
        rest = [each for each in self.partition(topic)["ReplicaNodes"] if each != node_id]
        self.reassign(topic, [node_id, *rest])
        self.elect_preferred(topic)
        self.await_leader(topic, is_now=node_id)

    # ---- repair

    def mend(self) -> None:
        """Remove the faults of `pipes`, and wait until every process runs."""
        for pipe in self.pipes.values():
            pipe.forget_faults()
        for node_id in self.kafka.node_ids:
            if self.kafka.paused(node_id):
                self.kafka.resume(node_id)
        for node_id in self.kafka.node_ids:
            if not self.kafka.running(node_id):
                self.kafka.restart(node_id, wait=False)
        self.kafka.await_ready()
        for proxy in self.proxies:
            self.mend_proxy(proxy)

    def mend_proxy(self, proxy: ProxyProcess) -> None:
        if proxy.running:
            proxy.resume()
        else:
            proxy.restart()
