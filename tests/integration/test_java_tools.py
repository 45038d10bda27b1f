"""Kafka's own tools, a Kafka Streams application and kcat behave the same through the proxy and without it.

All tools of one run share a JVM (`tests/java/ToolRunner.java`), since starting a JVM takes seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from contextlib import closing
from pathlib import Path

import kafka as kafka_python
import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import compile_java, run_java, run_tool
from tests.integration.test_equivalence import _addresses
from tests.support.kafka import kafka_version, unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.tools import Command, at_both, run_script

pytestmark = [pytest.mark.kafka, pytest.mark.brokers, pytest.mark.timeout(600)]

SOURCES = Path(__file__).parents[1] / "java"
METADATA = 3


def run_tools(bootstrap: str, prefix: str, directory: Path) -> list[tuple[str, int, str]]:
    """(tool, exit code, output) of each, with names, addresses and measured numbers normalized."""
    topic, group = f"{prefix}-topic", f"{prefix}-group"
    here = ("--bootstrap-server", bootstrap)
    # Consumers end after a number of records or a timeout.
    commands: list[Command] = [
        ("kafka-topics", "", (*here, "--create", "--topic", topic, "--partitions", "2")),
        ("kafka-topics", "", (*here, "--create", "--topic", topic)),
        ("kafka-topics", "", (*here, "--describe", "--topic", topic)),
        ("kafka-topics", "", (*here, "--alter", "--topic", topic, "--partitions", "3")),
        ("kafka-configs", "", (*here, "--alter", "--topic", topic, "--add-config", "retention.ms=1234567")),
        ("kafka-console-producer", "a\\nb\\nc\\n", (*here, "--topic", topic)),
        ("kafka-console-consumer", "", (
            *here, "--topic", topic, "--group", group, "--from-beginning",
            "--max-messages", "3", "--timeout-ms", "90000",
        )),
        ("kafka-consumer-groups", "", (*here, "--describe", "--group", group)),
        ("kafka-consumer-groups", "", (*here, "--list")),
        # Placed late, since the change reaches the brokers one by one.
        ("kafka-configs", "", (*here, "--describe", "--topic", topic)),
        ("kafka-get-offsets", "", (*here, "--topic", topic)),
        ("kafka-producer-perf-test", "", (
            "--topic", topic, "--num-records", "2000", "--record-size", "100", "--throughput", "-1",
            "--producer-props", f"bootstrap.servers={bootstrap}",
        )),
        ("kafka-consumer-perf-test", "", (
            *here, "--topic", topic, "--messages" if _is_old() else "--num-records", "2003", "--timeout", "90000",
        )),
        ("kafka-get-offsets", "", (*here, "--topic", topic)),
        ("kafka-transactions", "", (*here, "describe-producers", "--topic", topic, "--partition", "0")),
        ("kafka-transactions", "", (*here, "list")),
        ("kafka-features", "", (*here, "describe")),
        ("kafka-consumer-groups", "", (*here, "--delete", "--group", group)),
        ("kafka-topics", "", (*here, "--delete", "--topic", topic)),
    ]  # fmt: skip
    ran = run_script(commands, directory / f"{prefix}.tools", pause_after=("kafka-topics", "kafka-configs"))
    names = _addresses(bootstrap)
    return [(tool, code, _plain(tool, text, prefix, names)) for tool, code, text in ran]


def _is_old() -> bool:
    return kafka_version().startswith(("3.", "4.0"))


def _plain(tool: str, text: str, prefix: str, names: dict[str, str]) -> str:
    for address, name in names.items():
        text = text.replace(address, name)
    text = text.replace(prefix, "x")
    text = re.sub(r"TopicId: \S+", "TopicId: id", text)
    # Replica placement and the number of metadata changes vary between runs.
    text = re.sub(r"(Leader|Replicas|Isr|Epoch): \d+", r"\1: n", text)
    if tool.endswith("perf-test"):
        # Compare the number of records, not the throughput.
        return " ".join(re.findall(r"\d+ records sent|[a-zA-Z.]{4,}|\b2003\b", text))
    if tool == "kafka-transactions":
        # Producer ids, times, and the transactions of other tests.
        return re.sub(r"\d+", "n", "\n".join(line for line in text.splitlines() if "x-" in line or "Producer" in line))
    if tool == "kafka-console-consumer":
        return "\n".join(sorted(text.split()))
    if "--list" in text or tool == "kafka-consumer-groups":
        lines = [line for line in text.splitlines() if "x-" in line or "GROUP" in line or "rror" in line]
        # The producer chooses the partitions of the three records.
        return re.sub(r"\s+", " ", "\n".join(sorted({line.split(" ")[0] for line in lines})))
    if tool == "kafka-get-offsets":
        return str(sum(int(line.rpartition(":")[2]) for line in text.split()))
    return text


def test_quorum_is_described_with_the_proxys_addresses(kafka3: KafkaCluster, proxied3: ProxyProcess) -> None:
    """Kafka's tool and kafka-python need DescribeQuorum v2. All brokers here are controllers too."""

    def of_kafka_python(bootstrap: str) -> dict[int, list[str]]:
        with closing(kafka_python.KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
            quorum = admin.describe_metadata_quorum()
        (partition,) = quorum["topics"][0]["partitions"]
        assert partition["error"] is None
        assert {each["replica_id"] for each in partition["current_voters"]} == {1, 2, 3}
        return {
            node["node_id"]: [f"{each['name']}://{each['host']}:{each['port']}" for each in node["listeners"]]
            for node in quorum["nodes"]
        }

    def of_the_tool(bootstrap: str) -> dict[int, list[str]]:
        ran = run_tool(
            "kafka-metadata-quorum", ["--bootstrap-server", bootstrap, "describe", "--status"], version=kafka_version()
        )
        (voters,) = re.findall(r"^CurrentVoters: +(.*)", ran.output, re.MULTILINE)
        return {each["id"]: each["endpoints"] for each in json.loads(voters)}

    direct = {node_id: [f"CONTROLLER://{kafka3.address(node_id, 'CONTROLLER')}"] for node_id in kafka3.node_ids}
    names = {name: address for address, name in _addresses(proxied3.bootstrap).items()}
    proxied = {node_id: [f"CONTROLLER://{names[f'broker {node_id}']}"] for node_id in kafka3.node_ids}
    for queried in (of_kafka_python, of_the_tool):
        assert queried(kafka3.bootstrap) == direct
        assert queried(proxied3.bootstrap) == proxied


@pytest.mark.parametrize("brokers", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_kafka_tools_behave_the_same_through_proxy(
    brokers: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cluster: KafkaCluster = request.getfixturevalue("kafka" if brokers == 1 else "kafka3")
    proxy: ProxyProcess = request.getfixturevalue("proxied" if brokers == 1 else "proxied3")

    direct, proxied = at_both(
        lambda bootstrap: run_tools(bootstrap, unique_topic("tools"), tmp_path), cluster.bootstrap, proxy.bootstrap
    )

    for one, other in zip(direct, proxied, strict=True):
        print(other)
        assert other == one
    by_tool = {tool: text for tool, _, text in proxied}
    assert by_tool["kafka-get-offsets"] == "2003"
    assert by_tool["kafka-console-consumer"] == "a\nb\nc"
    assert [code for _, code, _ in proxied].count(0) >= len(proxied) - 1, "only the second creation of the topic fails"


@pytest.mark.parametrize(
    "protocol", ["classic", pytest.param("streams", marks=pytest.mark.skipif(kafka_version() < "4.2", reason="early"))]
)
def test_streams_application_counts_exactly_once_through_proxy(
    kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path, protocol: str
) -> None:
    classes = compile_java([SOURCES / "WordCount.java"], version=kafka_version())
    lines = [f"word{number % 7} word{number % 11} word{number % 13}" for number in range(200)]
    expected: dict[str, int] = {}
    for word in " ".join(lines).split():
        expected[word] = expected.get(word, 0) + 1

    def count(bootstrap: str) -> dict[str, int]:
        prefix = unique_topic("words")
        admin = kafka_python.KafkaAdminClient(bootstrap_servers=bootstrap)
        admin.create_topics(
            [kafka_python.admin.NewTopic(f"{prefix}-{what}", 2, 1) for what in ("in", "out")], wait_for_metadata=True
        )
        admin.close()
        producer = kafka_python.KafkaProducer(bootstrap_servers=bootstrap)
        for number, line in enumerate(lines):
            producer.send(f"{prefix}-in", line.encode(), partition=number % 2)
        producer.flush()
        producer.close()
        state = tmp_path / prefix
        arguments = [
            bootstrap,
            f"{prefix}-app",
            f"{prefix}-in",
            f"{prefix}-out",
            str(state),
            str(3 * len(lines)),
            protocol,
        ]
        run_java("WordCount", arguments, classes=classes, version=kafka_version(), timeout_seconds=400)
        # One committed update for each word; the last update of a word is its count.
        updates = _committed(bootstrap, f"{prefix}-out", 3 * len(lines))
        assert len(updates) == 3 * len(lines)
        return {word: max(number for other, number in updates if other == word) for word, _ in updates}

    direct, through = at_both(count, kafka.bootstrap, proxied.bootstrap)

    assert through == direct == expected


def _committed(bootstrap: str, topic: str, at_least: int) -> list[tuple[str, int]]:
    """Records at the moment the topic has `at_least` records, plus one more poll."""
    consumer = kafka_python.KafkaConsumer(
        topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    found: list[tuple[str, int]] = []
    deadline, over = time.monotonic() + 120, False
    while not over:
        over = len(found) >= at_least or time.monotonic() > deadline
        for records in consumer.poll(timeout_ms=1_000).values():
            found += [(record.key.decode(), int(record.value)) for record in records]
    consumer.close()
    return found


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (Debian: apt-get install kcat)")
def test_kcat_does_the_same_through_the_proxy(kafka: KafkaCluster, proxied: ProxyProcess) -> None:
    def run(bootstrap: str) -> list[str]:
        topic = unique_topic("kcat")

        def kcat(*arguments: str, stdin: str = "") -> str:
            done = subprocess.run(
                ["kcat", "-b", bootstrap, "-t", topic, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            return done.stdout.replace(topic, "x")

        kcat("-P", "-p", "0", "-K", ":", "-H", "h=1", stdin="a:1\nb:2\n")
        kcat("-P", "-p", "0", "-z", "lz4", stdin="three\n")
        read = kcat("-C", "-e", "-q", "-f", "%p %o %k %s %h\n")
        listed = kcat("-L")
        names = _addresses(bootstrap)
        for address, name in names.items():
            listed = listed.replace(address, name)
        listed = re.sub(r"\(from .*\)|\s*\(controller\)", "", listed)
        return [read, listed]

    direct, through = run(kafka.bootstrap), run(proxied.bootstrap)

    assert through == direct
    assert through[0] == "0 0 a 1 h=1\n0 1 b 2 h=1\n0 2  three \n"
