"""Three brokers with a fault proxy each, and two proxies that connect through these.

Every node is broker and controller. All tests of a run share one cluster; the fixture `stage3` repairs it after each.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fencepost_proxy.dev.cluster import KafkaCluster, _free_ports
from fencepost_proxy.types import Address
from tests.kit.fault_proxy import FaultProxy
from tests.kit.waiting import until
from tests.support.kafka import kafka_version, unique_topic
from tests.support.messages import Closed, Fields, RawConnection
from tests.support.proxy import GUARDED_BY_NAME, LEASE_SECONDS, ProxyProcess
from tests.support.raw import Connection, Log

NODES = (1, 2, 3)
#: For reactions of a broker to an expired session (4 s), on a busy machine.
PATIENCE_SECONDS = 90.0
#: Short takeovers of `true` topics.
LIMITS = """
[limits]
sequencer_wait_max_seconds = 1.0
metadata_refresh_seconds = 1.0
reconnect_backoff_max_seconds = 0.2
takeover_seconds = 3.0
"""
STAMPED = GUARDED_BY_NAME + LIMITS
#: A long lease, so that their faults are visible on a slow machine, too.
NAIVE = "unsafe_disable_fencing = true\n" + STAMPED.replace(
    f"config_lease_seconds = {LEASE_SECONDS}", "config_lease_seconds = 30.0"
)
_ELECT_LEADERS, _REASSIGN, _DESCRIBE_QUORUM, _METADATA = 43, 45, 55, 3
_OFFSET_FOR_LEADER_EPOCH = 23
_PREFERRED = 0
_ELECTION_NOT_NEEDED = 84

_PROPERTIES = {
    # Leaders move only on request of a test.
    "auto.leader.rebalance.enable": "false",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "replica.lag.time.max.ms": "4000",
}


class PipedCluster(KafkaCluster):
    """Its listener WIRE advertises the fault proxies."""

    def __init__(self, pipes: Mapping[int, FaultProxy]) -> None:
        super().__init__(len(pipes), version=kafka_version(), listeners={"WIRE": "PLAINTEXT"}, properties=_PROPERTIES)
        self._pipes = pipes

    def _properties(self, node_id: int) -> dict[str, str]:
        advertised = f"PLAINTEXT://{self.address(node_id)},WIRE://{self._pipes[node_id].address}"
        return super()._properties(node_id) | {"advertised.listeners": advertised}


class Stage3:
    def __init__(
        self, kafka: KafkaCluster, pipes: Mapping[int, FaultProxy], start: Callable[[str, str], ProxyProcess]
    ) -> None:
        self.kafka = kafka
        self.pipes = pipes
        self._start = start
        with ThreadPoolExecutor(2) as pool:
            p1, p2 = pool.map(start, ("p1", "p2"), (STAMPED, STAMPED))
        self.proxies = (p1, p2)
        self._naive: tuple[ProxyProcess, ProxyProcess] | None = None

    @property
    def naive(self) -> tuple[ProxyProcess, ProxyProcess]:
        """Two proxies that compare offsets without Kafka. Their faults show what fencing prevents."""
        if self._naive is None:
            self._naive = self._start("n1", NAIVE), self._start("n2", NAIVE)
        return self._naive

    def one_more_proxy(self, name: str, config: str = STAMPED) -> ProxyProcess:
        return self._start(name, config)

    # ---- queries to a running broker of Kafka

    @property
    def living(self) -> list[int]:
        return [each for each in NODES if self.kafka.running(each) and not self.kafka.paused(each)]

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

        found: Fields = until(answer, "any broker to answer", seconds=PATIENCE_SECONDS)
        return found

    def partition(self, topic: str, partition: int = 0) -> Fields:
        """LeaderId, IsrNodes, … as in Metadata."""
        found = self.query(_METADATA, 9, {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False})["Topics"][0]
        return next((each for each in found["Partitions"] if each["PartitionIndex"] == partition), {})

    def leader(self, topic: str) -> int:
        return int(self.partition(topic).get("LeaderId", -1))

    def isr(self, topic: str) -> set[int]:
        return set(self.partition(topic).get("IsrNodes", ()))

    def controller(self) -> int:
        topics = [{"TopicName": "__cluster_metadata", "Partitions": [{"PartitionIndex": 0}]}]

        def leader() -> int:
            answer = self.query(_DESCRIBE_QUORUM, 1, {"Topics": topics})
            return int(answer["Topics"][0]["Partitions"][0]["LeaderId"]) if answer["Topics"] else -1

        found: int = until(leader, "an active controller", accept=lambda each: each in NODES, seconds=PATIENCE_SECONDS)
        return found

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return until(condition, what, seconds=PATIENCE_SECONDS)

    def log_end_of(self, topic: str, node_id: int) -> int:
        """The log end of this broker, if it believes that it leads."""
        body: Fields = {
            "ReplicaId": -1,
            "Topics": [{"Topic": topic, "Partitions": [{"Partition": 0, "LeaderEpoch": self.leader_epoch(topic)}]}],
        }
        with RawConnection(self.kafka.address(node_id), 10.0) as connection:
            answer = connection.query(_OFFSET_FOR_LEADER_EPOCH, 4, body)["Topics"][0]["Partitions"][0]
        return int(answer["EndOffset"])

    def leader_epoch(self, topic: str) -> int:
        return int(self.partition(topic)["LeaderEpoch"])

    def await_leader(self, topic: str, *, other_than: int | None = None, is_now: int | None = None) -> int:
        def there() -> int:
            leader = self.leader(topic)
            wrong = leader == other_than or (is_now is not None and leader != is_now)
            return 0 if wrong or leader not in NODES else leader

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

    def reassign(self, topic: str, replicas: Sequence[int]) -> None:
        """Wait until the partition has these replicas, with all running ones in sync. The first is preferred, but does
        not lead yet."""
        living = set(replicas) & set(self.living)
        requested = [{"PartitionIndex": 0, "Replicas": list(replicas)}]
        body: Fields = {"TimeoutMs": 20_000, "Topics": [{"Name": topic, "Partitions": requested}]}

        def queried() -> bool:
            answer = self.query(_REASSIGN, 0, body)
            codes = [each["ErrorCode"] for of in answer["Responses"] for each in of["Partitions"]]
            return not answer["ErrorCode"] and not any(codes)

        self.until(queried, f"a reassignment of {topic} to begin")
        self.until(
            lambda: self.partition(topic).get("ReplicaNodes") == list(replicas) and self.isr(topic) >= living,
            f"{topic} to be on {replicas}",
        )

    def elect_preferred(self, topic: str) -> None:
        partitions = [{"Topic": topic, "Partitions": [0]}]
        body: Fields = {"ElectionType": _PREFERRED, "TopicPartitions": partitions, "TimeoutMs": 20_000}

        def elected() -> bool:
            answer = self.query(_ELECT_LEADERS, 2, body)
            codes = [each["ErrorCode"] for of in answer["ReplicaElectionResults"] for each in of["PartitionResult"]]
            return not answer["ErrorCode"] and set(codes) <= {0, _ELECTION_NOT_NEEDED}

        self.until(elected, f"a preferred election of {topic}")

    def lead(self, topic: str, node_id: int) -> None:
        """Move only the leader."""
        rest = [each for each in self.partition(topic)["ReplicaNodes"] if each != node_id]
        self.reassign(topic, [node_id, *rest])
        self.elect_preferred(topic)
        self.await_leader(topic, is_now=node_id)

    def mend(self) -> None:
        """Remove all faults, and wait until every process runs."""
        for pipe in self.pipes.values():
            pipe.forget_faults()
        for node_id in NODES:
            if self.kafka.paused(node_id):
                self.kafka.resume(node_id)
        for node_id in NODES:
            if not self.kafka.running(node_id):
                self.kafka.restart(node_id, wait=False)
        self.kafka.await_ready()
        for proxy in self.proxies:
            if proxy.running:
                proxy.resume()
            else:
                proxy.restart()


@contextmanager
def three_brokers(directory: Path) -> Iterator[Stage3]:
    with ExitStack() as stack:
        pipes = {node_id: stack.enter_context(FaultProxy()) for node_id in NODES}
        kafka = stack.enter_context(PipedCluster(pipes))
        for node_id, pipe in pipes.items():
            pipe.targets = (kafka.address(node_id, "WIRE"),)
        bootstrap = ",".join(pipe.address for pipe in pipes.values())

        def start(name: str, config: str) -> ProxyProcess:
            logs = directory / name
            logs.mkdir()
            # All of its ports are chosen here, so that they are free for a restart.
            port, *listeners = _free_ports(1 + len(NODES), set())
            ports = "".join(f"{node_id} = {each}\n" for node_id, each in zip(NODES, listeners, strict=True))
            proxy = ProxyProcess(bootstrap, logs, config=f"{config}\n[broker_ports]\n{ports}", port=port)
            stack.callback(proxy.close)
            with contextlib.suppress(Closed):
                leaders_listener(proxy, "there-is-no-such-topic")  # learns the listeners
            return proxy

        yield Stage3(kafka, pipes, start)


def required_topic() -> str:
    return unique_topic("required")


#: Listeners of each proxy process by node id, once a client has learned them.
_listeners: dict[int, dict[int, str]] = {}


def _client(proxy: ProxyProcess, address: str) -> RawConnection:
    return RawConnection(Address.parse(address), 2.0, enter=proxy.enter)


def leaders_listener(proxy: ProxyProcess, topic: str) -> str:
    """The address for a client's appends through this proxy. Raises Closed or OSError; retry then.

    Queries any known address, as clients do, because some brokers may be stopped.
    """
    known = _listeners.setdefault(proxy.pid, {})
    for address in random.sample([proxy.bootstrap, *known.values()], 1 + len(known)):
        with contextlib.suppress(OSError, Closed), _client(proxy, address) as connection:
            topics: Fields = {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False}
            metadata = connection.query(_METADATA, 9, topics)
            known |= {each["NodeId"]: f"{each['Host']}:{each['Port']}" for each in metadata["Brokers"]}
            leaders = [each["LeaderId"] for each in metadata["Topics"][0]["Partitions"] if each["PartitionIndex"] == 0]
            if leaders and leaders[0] in known:
                return known[leaders[0]]
    raise Closed(f"no leader of {topic} is known to {proxy.bootstrap}")
