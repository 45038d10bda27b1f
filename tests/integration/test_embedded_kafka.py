"""The embedded Kafka is a real one, follows its options, and leaves no process or file."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.errors import ClusterError, PortTakenError, ToolError
from fencepost_dev.tools import compile_java, run_java, run_tool
from tests.kit.waiting import until
from tests.support.kafka import kafka_version, running_kafka

pytestmark = pytest.mark.kafka


def produce(bootstrap: str, topic: str, *values: bytes) -> list[int]:
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    try:
        return [producer.send(topic, value, partition=0).get(timeout=90).offset for value in values]
    finally:
        producer.close()


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=60_000)
    try:
        consumer.assign([TopicPartition(topic, 0)])
        return [record.value for _, record in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()


def exists(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def answers(cluster: KafkaCluster, node_id: int, seconds: float) -> bool:
    """Whether a broker responds to an ApiVersions v0 in time."""
    with socket.create_connection(cluster.address(node_id), 60) as connection:
        connection.sendall(bytes.fromhex("0000000a 0012 0000 00000001 ffff"))
        connection.settimeout(seconds)
        try:
            return connection.recv(4) != b""
        except TimeoutError:
            return False


@pytest.mark.brokers
def test_what_is_produced_is_consumed(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    topic = unique_topic()
    assert produce(kafka.bootstrap, topic, b"a", b"b") == [0, 1]
    assert consume(kafka.bootstrap, topic, 2) == [b"a", b"b"]
    assert len(kafka.cluster_id) == 22
    assert f"kafka version: {kafka_version()}" in kafka.log_file(1).read_text().lower()


@pytest.mark.brokers
def test_kafkas_own_tools_run(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    topic = unique_topic()
    at = ["--bootstrap-server", kafka.bootstrap]
    version = kafka.version
    run_tool("kafka-topics", [*at, "--create", "--topic", topic, "--partitions", "3"], version=version)
    run_tool("kafka-console-producer", [*at, "--topic", topic], stdin="one\ntwo\n", version=version)
    read = run_tool(
        "kafka-console-consumer",
        [*at, "--topic", topic, "--from-beginning", "--max-messages", "2", "--timeout-ms", "50000"],
        version=version,
    )
    assert sorted(read.output.split()) == ["one", "two"]
    with pytest.raises(ToolError, match=r"kafka-topics failed with code 1:\n.*already exists"):
        run_tool("kafka-topics", [*at, "--create", "--topic", topic], version=version)


def test_java_program_compiles_once_against_locked_jars(tmp_path: Path) -> None:
    source = tmp_path / "Version.java"
    source.write_text(
        "public class Version { public static void main(String[] a) {"
        " System.out.println(org.apache.kafka.common.utils.AppInfoParser.getVersion() + a[0]); } }"
    )
    classes = compile_java([source])
    built = (classes / "Version.class").stat().st_mtime_ns
    assert run_java("Version", ["!"], classes=classes).output == "4.3.1!\n"
    assert compile_java([source]) == classes
    assert (classes / "Version.class").stat().st_mtime_ns == built

    source.write_text("public class Version { nonsense }")
    with pytest.raises(ToolError, match=r"javac failed with code 1:\n.*Version\.java:1: error"):
        compile_java([source])


def test_restarted_broker_keeps_its_records_and_address(unique_topic: Callable[..., str]) -> None:
    topic = unique_topic()
    with running_kafka() as cluster:
        bootstrap, pid = cluster.bootstrap, cluster.pid(1)
        produce(bootstrap, topic, b"before")

        cluster.kill(1)
        assert not cluster.running(1)
        assert not exists(pid)

        cluster.restart(1)
        assert cluster.bootstrap == bootstrap
        assert cluster.pid(1) != pid
        assert produce(bootstrap, topic, b"after") == [1]
        assert consume(bootstrap, topic, 2) == [b"before", b"after"]


def test_paused_broker_answers_only_once_resumed() -> None:
    with running_kafka() as cluster:
        assert answers(cluster, 1, 60)
        cluster.pause(1)
        assert cluster.running(1)
        assert not answers(cluster, 1, 0.5)
        cluster.resume(1)
        assert answers(cluster, 1, 60)


def test_a_paused_broker_can_be_stopped() -> None:
    cluster = KafkaCluster(version=kafka_version())
    cluster.start()
    pid, data = cluster.pid(1), cluster.data
    cluster.pause(1)
    cluster.stop()
    assert not exists(pid)
    assert not data.exists()


@pytest.mark.soak  # clusters of other tests also do this
def test_three_brokers_lose_one_and_gain_one(unique_topic: Callable[..., str]) -> None:
    topic = unique_topic()
    with running_kafka(3) as cluster:
        at = ["--bootstrap-server", cluster.bootstrap]
        run_tool(
            "kafka-topics",
            [*at, "--create", "--topic", topic, "--replication-factor", "3", "--config", "min.insync.replicas=2"],
            version=cluster.version,
        )
        cluster.kill(3)
        assert produce(cluster.bootstrap, topic, b"with two") == [0]
        cluster.restart(3)

        assert cluster.add_broker() == 4
        assert cluster.node_ids == (1, 2, 3, 4)
        assert len(cluster.bootstrap.split(",")) == 4
        assert consume(str(cluster.address(4)), topic, 1) == [b"with two"]


def test_only_named_data_directory_is_kept(tmp_path: Path, unique_topic: Callable[..., str]) -> None:
    topic, data = unique_topic(), tmp_path / "data"
    with running_kafka(data=data) as first:
        produce(first.bootstrap, topic, b"kept")
    with running_kafka(data=data) as second:
        assert second.cluster_id == first.cluster_id
        assert consume(second.bootstrap, topic, 1) == [b"kept"]
    with pytest.raises(ClusterError, match=r"contains a cluster of 1 brokers, not 3"), running_kafka(3, data=data):
        pass
    with running_kafka() as other:
        temporary = other.data
        assert temporary.exists()
    assert not temporary.exists()


def test_foreign_data_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ClusterError, match="is not empty and contains no cluster"), running_kafka(data=tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_more_listeners_and_server_properties(unique_topic: Callable[..., str]) -> None:
    properties = {
        "auto.create.topics.enable": "false",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
        'user_alice="secret";',
    }
    with running_kafka(listeners={"SASL": "SASL_PLAINTEXT"}, properties=properties) as cluster:
        authenticated = KafkaConsumer(
            bootstrap_servers=cluster.bootstrap_of("SASL"),
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_plain_username="alice",
            sasl_plain_password="secret",
        )
        topic = unique_topic()
        at = ["--bootstrap-server", cluster.bootstrap]
        run_tool("kafka-topics", [*at, "--create", "--topic", topic], version=cluster.version)
        try:
            # A new topic is not immediately in every broker's metadata.
            until(lambda: authenticated.topics() == {topic}, f"{topic} to be known")
        finally:
            authenticated.close()
        with pytest.raises(ToolError, match="Could not match any topic-partitions"):
            run_tool("kafka-get-offsets", [*at, "--topic", unique_topic()], version=cluster.version)


def test_brokers_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from fencepost_dev.cluster import KafkaCluster\n"
        "cluster = KafkaCluster(version=sys.argv[1], data=Path(sys.argv[2]))\n"
        # As with asyncio.to_thread and fixtures: the thread that started the brokers has ended when they are used.
        "starter = threading.Thread(target=cluster.start)\n"
        "starter.start(); starter.join()\n"
        "time.sleep(1)\n"
        "print(cluster.pid(1) if cluster.running(1) else 'ended', flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, kafka_version(), str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert exists(pid)
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not exists(pid), "the broker to end")


def test_taken_port_is_named_before_kafka_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} on 127\.0\.0\.1 is in use"):
            KafkaCluster(ports=[port]).start()


def test_port_taken_during_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("fencepost_dev.ports.require_free", lambda ports: None)
        with pytest.raises(PortTakenError, match=rf"one of the ports .*{port}.* of broker 1 is in use"):
            KafkaCluster(ports=[port], version=kafka_version()).start()


def test_invalid_kafka_setting_is_reported_with_log_path() -> None:
    cluster = KafkaCluster(version=kafka_version(), properties={"log.segment.bytes": "-1"})
    with pytest.raises(ClusterError, match=r"(?s)log\.segment\.bytes.*\(see (.*)\)") as raised:
        cluster.start()
    assert "\n" not in str(raised.value)
    assert cluster.data.exists(), "the log file in the error message is missing"
    shutil.rmtree(cluster.data)
