"""KIP-98's data flows and guarantees hold with every client through the proxy, with three brokers.

Topics are relayed, or checked with a commit validator in the path of each commit. The printed table is in
docs/transactions.md. Each client is a separate process. A dead instance is a process that was killed with an open
transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import kafka as kafka_python
import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import MAIN_CLASSES, compile_java, run_java
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.instances import CLIENTS, Process
from tests.support.kafka import kafka_version, unique_topic
from tests.support.messages import Fields, RawConnection
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.transactions import set_transaction_version

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

OK = 0
LIST_OFFSETS, FIND_COORDINATOR, DESCRIBE_TRANSACTIONS = 2, 10, 65
LONG_MS, SHORT_MS = 60_000, 3_000
#: Time without records after which a reader stops, where it must not see a record.
IDLE_MS = 1_000
PATIENCE_SECONDS = 120.0
SOURCES = Path(__file__).parents[1] / "java"
#: Topics with the commit validator in the path of each commit, and without it.
PREFIXES = ("checked", "plain")
#: Errors of a producer whose transactional id was taken over, by client and protocol version.
FENCED = re.compile(r"fenced|INVALID_PRODUCER_EPOCH|InvalidProducerEpoch|InvalidProducerIdMapping", re.IGNORECASE)


#: The coordinators check for timed-out transactions every 200 ms.
cluster = kafka_fixture(3, properties={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"})


proxy = proxy_fixture(of="cluster", config=CHECKED_BY_NAME, unexpected=("Traceback", "OFFSET_VIOLATION"))


@pytest.fixture(scope="module")
def second(proxy: ProxyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Process]]:
    """One long-running process per client."""
    directory = tmp_path_factory.mktemp("second")
    processes = {client: Process(client, proxy.bootstrap, directory) for client in CLIENTS}
    yield processes
    for process in processes.values():
        process.kill()


# --- queries to Kafka, not to the proxy -------------------------------------------------------------------------------


def _query(address: str, api_key: int, version: int, body: Fields) -> Fields:
    with RawConnection(Address.parse(address)) as connection:
        return connection.query(api_key, version, body)


def _last_stable_offset(cluster: KafkaCluster, topic: str) -> int:
    partition = {"PartitionIndex": 0, "Timestamp": -1, "CurrentLeaderEpoch": -1}
    queried = {"ReplicaId": -1, "IsolationLevel": 1, "Topics": [{"Name": topic, "Partitions": [partition]}]}
    (found,) = _query(Log(cluster.bootstrap).leader(topic), LIST_OFFSETS, 4, queried)["Topics"]
    return int(found["Partitions"][0]["Offset"])


def _state(cluster: KafkaCluster, transactional_id: str) -> str:
    def answer() -> str | None:
        queried = {"KeyType": 1, "CoordinatorKeys": [transactional_id]}
        (found,) = _query(str(cluster.address(1)), FIND_COORDINATOR, 4, queried)["Coordinators"]
        if found["ErrorCode"]:
            return None
        body = {"TransactionalIds": [transactional_id]}
        answer = _query(f"{found['Host']}:{found['Port']}", DESCRIBE_TRANSACTIONS, 0, body)["TransactionStates"][0]
        return None if answer["ErrorCode"] else str(answer["TransactionState"])

    return str(until(answer, "the transaction coordinator", seconds=PATIENCE_SECONDS))


def _committed(cluster: KafkaCluster, group: str, topic: str) -> int | None:
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=cluster.bootstrap, group_id=group)
    try:
        found = consumer.committed(kafka_python.TopicPartition(topic, 0))
        return None if found is None else int(getattr(found, "offset", found))
    finally:
        consumer.close()


# --- the flows --------------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """Flows of one client on one topic. `shown` – each step's result, as the table shows it."""

    client: str
    topic: str
    cluster: KafkaCluster
    first: Process
    second: Process
    shown: dict[str, str] = field(default_factory=dict)
    #: Values in log order: the committed ones, and all.
    visible: list[str] = field(default_factory=list)
    everything: list[str] = field(default_factory=list)

    @property
    def checked(self) -> bool:
        return self.topic.startswith("checked")

    def send(self, process: Process, name: str, value: str, *, expected: int | None = None) -> int:
        offset = process.do("send", name, self.topic, 0, value, "-" if expected is None else expected)
        self.everything.append(value)
        return int(offset)

    def lso_reaches_the_end(self) -> None:
        until(
            lambda: _last_stable_offset(self.cluster, self.topic) == Log(self.cluster.bootstrap).end(self.topic),
            "the last stable offset to reach the end",
            seconds=PATIENCE_SECONDS,
        )

    def read(self, level: str, stop: str, idle_ms: int = 0) -> list[str]:
        return self.second.do("read", self.topic, 0, level, stop, idle_ms).split()

    # ---- each step needs the previous ones

    def commit(self) -> None:
        """Records of two committed transactions are visible."""
        self.first.do("init", "a", f"{self.topic}-txn", LONG_MS)
        for number in range(2):
            self.first.do("begin", "a")
            conditional = self.checked and not number
            offset = self.send(self.first, "a", f"c{number}", expected=0 if conditional else None)
            assert not conditional or offset == 0
            self.first.do("commit", "a")
            self.visible.append(f"c{number}")
        one, other = [each for each in Log(self.cluster.bootstrap).batches(self.topic) if not each.is_control][:2]
        assert one.producer_id == other.producer_id
        self.shown["protocol"] = "v2" if other.producer_epoch > one.producer_epoch else "v1"
        self.shown["commit"] = "visible"

    def abort(self) -> None:
        """A read_committed reader stops at an open transaction and never sees it after it is aborted. A
        read_uncommitted reader sees it."""
        self.first.do("begin", "a")
        offset = self.send(self.first, "a", "aborted")
        assert _last_stable_offset(self.cluster, self.topic) == offset
        assert self.read("uncommitted", "aborted") == self.everything
        assert self.read("committed", "aborted", IDLE_MS) == self.visible
        self.first.do("abort", "a")
        self.lso_reaches_the_end()
        self.shown["abort"] = "invisible"

    def consume_transform_produce(self, source: str, group: str) -> None:
        """When a transaction aborts, its consumer offset is not committed either."""
        for offset, end in enumerate(("commit", "abort", "commit")):
            at = min(offset, 1)
            self.first.do("begin", "a")
            values = self.first.do("read", source, 0, "committed", "in1", 0).split()
            self.send(self.first, "a", f"{values[at]}-{end}")
            self.first.do("offsets", "a", group, source, 0, at + 1)
            self.first.do(end, "a")
            if end == "commit":
                self.visible.append(f"{values[at]}-{end}")
            until(
                lambda at=at, end=end: _committed(self.cluster, group, source) == at + (end == "commit"),
                "the committed offset",
                seconds=PATIENCE_SECONDS,
            )
        self.shown["offsets"] = "with the records"

    def fence(self) -> None:
        """When a second instance takes the transactional id, the open transaction is aborted. The first instance can
        neither send nor commit."""
        self.first.do("begin", "a")
        self.send(self.first, "a", "zombie")
        self.second.do("init", "b", f"{self.topic}-txn", LONG_MS)
        reported = self.first.query("commit", "a")
        assert not reported.ok, "a fenced producer has committed"
        assert FENCED.search(reported.text), reported
        self.shown["zombie"] = reported.error
        self.second.do("begin", "b")
        self.send(self.second, "b", "successor")
        self.second.do("commit", "b")
        self.visible.append("successor")

    def recover(self) -> None:
        """The next instance aborts the open transaction of a killed one."""
        self.first.do("init", "dead", f"{self.topic}-dead", LONG_MS)
        self.first.do("begin", "dead")
        offset = self.send(self.first, "dead", "left-behind")
        self.first.kill()
        assert _last_stable_offset(self.cluster, self.topic) == offset
        self.second.do("init", "successor", f"{self.topic}-dead", LONG_MS)
        self.lso_reaches_the_end()
        self.shown["dead instance"] = "aborted by the next"

    def time_out(self) -> None:
        """The coordinator aborts a transaction that times out."""
        name = f"{self.topic}-slow"
        self.second.do("init", "slow", name, SHORT_MS)
        self.second.do("begin", "slow")
        self.send(self.second, "slow", "too-late")
        until(lambda: _state(self.cluster, name) == "CompleteAbort", "the timeout", seconds=PATIENCE_SECONDS)
        reported = self.second.query("commit", "slow")
        assert not reported.ok, "the producer committed a transaction that its coordinator aborted"
        self.shown["timed out"] = reported.error
        self.second.do("init", "again", name, LONG_MS)
        self.second.do("begin", "again")
        self.send(self.second, "again", "last")
        self.second.do("commit", "again")
        self.visible.append("last")

    def read_all(self) -> None:
        self.lso_reaches_the_end()
        assert self.read("committed", "last") == self.visible
        assert self.read("uncommitted", "last") == self.everything
        self.shown["read_committed"] = f"{len(self.visible)} of {len(self.everything)}"

    def run(self, source: str) -> Story:
        with self.first:
            self.commit()
            self.abort()
            self.first.do("init", "input", f"{source}-txn", LONG_MS)
            self.first.do("begin", "input")
            for number in range(2):
                self.first.do("send", "input", source, 0, f"in{number}", "-")
            self.first.do("commit", "input")
            self.consume_transform_produce(source, f"{source}-group")
            self.fence()
            self.recover()
        self.time_out()
        self.read_all()
        return self


_COLUMNS = (
    "client", "topic", "protocol", "commit", "abort", "offsets", "zombie", "dead instance", "timed out",
    "read_committed",
)  # fmt: skip


def _row(story: Story) -> str:
    cells = {"client": story.client, "topic": story.topic.split("-")[0], **story.shown}
    return "| " + " | ".join(cells[name] for name in _COLUMNS) + " |"


@pytest.mark.parametrize("version", [2, 1], ids=["transaction.version 2", "transaction.version 1"])
@pytest.mark.parametrize("prefix", [PREFIXES[0], pytest.param(PREFIXES[1], marks=pytest.mark.soak)])
def test_every_flow_of_the_kip(  # noqa: PLR0917
    prefix: str,
    version: int,
    cluster: KafkaCluster,
    proxy: ProxyProcess,
    second: Mapping[str, Process],
    tmp_path: Path,
    say: Callable[[str], None],
) -> None:
    set_transaction_version(str(cluster.address(1)), version)

    def run(client: str) -> Story:
        topic, source = unique_topic(prefix), unique_topic("in")
        with Connection(proxy.bootstrap) as admin:
            for each in (topic, source):
                assert admin.create_topic(each, replicas=3) == (OK, None)
        first = Process(client, proxy.bootstrap, tmp_path)
        return Story(client, topic, cluster, first, second[client]).run(source)

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        stories = list(pool.map(run, CLIENTS))
    lines = [f"transaction.version {version}", *map(_row, stories)]
    say("\n    ".join(lines))
    assert {story.client: story.shown["protocol"] for story in stories}["java"] == f"v{version}"


def test_kafkas_own_tools(cluster: KafkaCluster, proxy: ProxyProcess, tmp_path: Path) -> None:
    """kafka-transactions lists, describes and aborts an open transaction through the proxy, and does not call it
    hanging."""
    topic = unique_topic("checked")
    with Connection(proxy.bootstrap) as admin:
        assert admin.create_topic(topic, replicas=3) == (OK, None)
    here = ("--bootstrap-server", proxy.bootstrap)
    name = f"{topic}-txn"
    with Process("kafka-python", proxy.bootstrap, tmp_path) as process:
        process.do("init", "a", name, LONG_MS)
        process.do("begin", "a")
        assert process.do("send", "a", topic, 0, "open", 0) == "0"
        where = ("--topic", topic, "--partition", "0")
        commands = [
            ("list",),
            ("describe", "--transactional-id", name),
            ("describe-producers", *where),
            # The coordinator knows the transaction, so it does not hang, however long it is open.
            ("find-hanging", "--topic", topic, "--max-transaction-timeout", "0"),
            ("abort", *where, "--start-offset", "0"),
            ("describe-producers", *where),
        ]
        script = tmp_path / "tools"
        main_class = MAIN_CLASSES["kafka-transactions"]
        script.write_text("".join("\t".join([main_class, "", *here, *each]) + "\n" for each in commands))
        classes = compile_java([SOURCES / "ToolRunner.java"], version=kafka_version())
        printed = run_java(
            "ToolRunner", [str(script)], classes=classes, version=kafka_version(), timeout_seconds=400
        ).output
        parts = re.split(r"^=== \d+ (-?\d+)\n", printed, flags=re.MULTILINE)[1:]
        assert parts[::2] == ["0"] * len(commands), printed
        listed, described, producers, hanging, _, after = parts[1::2]
        assert re.search(rf"{name}\s+\d+\s+\d+\s+Ongoing", listed), listed
        assert re.search(rf"{name}\s.*Ongoing\s.*{topic}-0", described), described
        assert re.search(r"^\d+\s+\d+\s+-?\d+\s+\d+\s+-?\d+\s+0\s*$", producers, re.MULTILINE), producers
        assert topic not in hanging, hanging
        assert re.search(r"None\s*$", after.strip()), after
        assert _last_stable_offset(cluster, topic) == Log(cluster.bootstrap).end(topic) == 2
        process.query("abort", "a")
