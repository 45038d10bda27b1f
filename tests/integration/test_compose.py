"""docker-compose.yml on a Docker daemon: what clients get and what they cannot reach.

FENCEPOST_IMAGE, FENCEPOST_SPARK_IMAGE and FENCEPOST_KAFKA_IMAGE, or .env, name the images. Without them, the images of
the proxy and of Spark are built from this work tree on FENCEPOST_BASE_IMAGE.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

from fencepost.errors import OffsetMismatchError
from fencepost.kafka_python import ConditionalProducer
from tests.support.clients import create_topic, log_end, read_all
from tests.support.ports import free_port, free_ports_in_a_row

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
HEALTHY_SECONDS = 120.0
#: The first run on a machine with a registry pulls and builds the images.
UP_SECONDS = 840.0
#: Send ApiVersions to HOST PORT and print whether Kafka responds. An open connection proves nothing: a gateway on the
#: route may accept any.
QUERY_KAFKA = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 3) as kafka:
        kafka.sendall(bytes.fromhex("0000000a 0012 0000 0fe9ce90 0000"))
        print("Kafka" if kafka.recv(8)[4:] == bytes.fromhex("0fe9ce90") else "something else")
except OSError as error:
    print("no connection:", error)
"""
ROWS = 1000
PARTITIONS = 4


def _run(command: Sequence[str], seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def _compose_command() -> list[str]:
    """Skip the test without Docker."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command: install Docker to run this test")
    daemon = _run(["docker", "version", "--format", "{{.Server.Version}}"], 30)
    if daemon.returncode:
        stated = daemon.stderr.strip().splitlines() or ["no reason given"]
        pytest.skip(f"no Docker daemon answers: {stated[-1]}")
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and _run([*command, "version"], 30).returncode == 0:
            return command
    pytest.skip("a Docker daemon answers, but there is neither 'docker compose' nor 'docker-compose'")


def _need(variable: str) -> None:
    """Skip the test if a third-party image of the compose file is not available."""
    default = re.search(rf"\$\{{{variable}:-(.+)\}}", (ROOT / "docker-compose.yml").read_text())
    assert default is not None
    file = ROOT / ".env"
    named = dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line) if file.exists() else {}
    image = os.environ.get(variable) or named.get(variable) or default[1]
    if _run(["docker", "image", "inspect", image], 30).returncode == 0:
        return
    pulled = _run(["docker", "pull", "--quiet", image], UP_SECONDS)
    if pulled.returncode:
        pytest.skip(
            f"image {image} is not here and cannot be pulled ({pulled.stderr.strip()}): deploy/docker/README.md shows "
            f"how to make images without a registry; name them by {variable}"
        )


class Stack:
    """The services of docker-compose.yml as a separate project, on free ports."""

    def __init__(self, command: list[str], data: Path) -> None:
        self.project = f"fencepost-test-{os.getpid()}"
        self._command = [*command, "-f", str(ROOT / "docker-compose.yml"), "-p", self.project]
        port = free_ports_in_a_row(3)  # the last one is for broker 1
        self.bootstrap = f"{HOST}:{port}"
        self.status_port, self.jobs_status_port = free_port(), free_port()
        self._environment = {
            "FENCEPOST_PORT": str(port),
            "FENCEPOST_BROKER_PORT": str(port + 2),
            "FENCEPOST_STATUS_PORT": str(self.status_port),
            "FENCEPOST_JOBS_STATUS_PORT": str(self.jobs_status_port),
            "FENCEPOST_DATA": str(data),
        }

    def compose(self, *arguments: str, seconds: float = UP_SECONDS) -> str:
        done = _run([*self._command, *arguments], seconds, **self._environment)
        if done.returncode:
            raise AssertionError(f"compose {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def up(self) -> None:
        self.compose("up", "-d")
        self.await_healthy("proxy")

    def await_healthy(self, service: str) -> None:
        deadline = time.monotonic() + HEALTHY_SECONDS
        while (state := self.inspect(service)["State"]["Health"]["Status"]) != "healthy":
            if time.monotonic() > deadline:
                raise AssertionError(f"{service} is {state}:\n{self.compose('logs', '--tail', '50')}")
            time.sleep(0.5)

    def inspect(self, service: str) -> dict[str, Any]:
        container = self.compose("ps", "-q", service).strip()
        found: list[dict[str, Any]] = json.loads(_run(["docker", "inspect", container], 30).stdout)
        return found[0]

    def addresses(self, service: str) -> list[str]:
        return [network["IPAddress"] for network in self.inspect(service)["NetworkSettings"]["Networks"].values()]

    def spark(self, *arguments: str) -> str:
        return self.compose("run", "--rm", "-T", "spark", *arguments)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    command = _compose_command()
    _need("FENCEPOST_KAFKA_IMAGE")
    ours = {"proxy": "FENCEPOST_IMAGE", "spark": "FENCEPOST_SPARK_IMAGE"}
    to_build = [service for service, variable in ours.items() if not os.environ.get(variable)]
    if to_build:
        _need("FENCEPOST_BASE_IMAGE")
    data = tmp_path_factory.mktemp("data")
    data.chmod(0o755)  # the job runs as another user than the tests
    stack = Stack(command, data)
    try:
        if to_build:
            stack.compose("build", *to_build)
        stack.up()
        with (data / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("id", "name"), *((i, f"name {i}") for i in range(ROWS))])
        yield stack
    finally:
        # The job's volume belongs to a profile, which `down` ignores unless it is named.
        stack.compose("--profile", "jobs", "down", "-v", "--remove-orphans", seconds=120)


def test_clients_on_the_host_produce_and_consume(stack: Stack) -> None:
    topic = create_topic(stack.bootstrap, "plain")
    with closing(KafkaProducer(bootstrap_servers=stack.bootstrap, acks="all")) as producer:
        offsets = [producer.send(topic, b"%d" % i).get(30).offset for i in range(3)]
    assert offsets == [0, 1, 2]
    assert read_all(stack.bootstrap, topic) == [(0, b"0"), (1, b"1"), (2, b"2")]


def test_conditional_append_is_accepted_and_stale_one_refused(stack: Stack) -> None:
    topic = create_topic(stack.bootstrap, "conditional", check="required")
    with closing(ConditionalProducer(bootstrap_servers=stack.bootstrap)) as producer:
        assert producer.send(topic, b"first", partition=0, expected_offset=0).get(30).offset == 0
        with pytest.raises(OffsetMismatchError) as refused:
            producer.send(topic, b"stale", partition=0, expected_offset=0).get(30)
        assert (refused.value.expected, refused.value.actual) == (0, 1)
        assert producer.send(topic, b"second", partition=0, expected_offset=1).get(30).offset == 1
    assert read_all(stack.bootstrap, topic) == [(0, b"first"), (1, b"second")]


def test_demo_is_refused_where_kafka_alone_loses_an_update(stack: Stack) -> None:
    profiles = ("--profile", "demo", "--profile", "direct")
    shown = {service: stack.compose(*profiles, "run", "--rm", "-T", service) for service in ("demo", "direct")}
    assert "REFUSED" in shown["demo"]
    assert "which is right" in shown["demo"]
    assert "an update is LOST" in shown["direct"]


def test_kafka_is_reached_from_the_proxy_alone(stack: Stack) -> None:
    assert not any((stack.inspect("kafka")["NetworkSettings"]["Ports"] or {}).values()), "Kafka has a published port"
    query = ("-c", QUERY_KAFKA)
    port = stack.bootstrap.partition(":")[2]
    for target in stack.addresses("kafka"):
        assert "Kafka" not in _run([sys.executable, *query, target, "9092"], 30).stdout, (
            f"the host reaches it at {target}"
        )
        assert "Kafka" not in stack.spark("python3", *query, target, "9092"), f"a job reaches it at {target}"
    assert "Kafka" not in stack.spark("python3", *query, "kafka", "9092")
    # The same query where Kafka is reachable.
    assert "Kafka" in _run([sys.executable, *query, HOST, port], 30).stdout
    assert "Kafka" in stack.compose("exec", "-T", "proxy", "python3", *query, "kafka", "9092")
    assert "Kafka" in stack.spark("python3", *query, "proxy-jobs", "19092")


def test_the_status_page_is_on_the_loopback(stack: Stack) -> None:
    for service, port in (("proxy", stack.status_port), ("proxy-jobs", stack.jobs_status_port)):
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=10) as answer:
            assert answer.read() == b"ready\n"
        (published,) = stack.inspect(service)["NetworkSettings"]["Ports"]["8080/tcp"]
        assert published["HostIp"] == HOST


def test_no_container_runs_as_root(stack: Stack) -> None:
    for service in ("kafka", "proxy"):
        assert int(stack.compose("exec", "-T", service, "id", "-u")) != 0
    assert int(stack.spark("id", "-u")) != 0


def test_image_runs_alone_with_minimal_rights(stack: Stack) -> None:
    """Without rights and writable files, the proxy reports that it is healthy and exits cleanly on request."""
    name = f"{stack.project}-alone"
    image = os.environ.get("FENCEPOST_IMAGE") or "fencepost:local"
    rights = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    options = ("--upstream", "kafka:9092", "--listen", "0.0.0.0:19092", "--advertised-host", "localhost")
    status = ("--status", "127.0.0.1:8080")
    started = _run(
        [
            "docker",
            "run",
            "-d",
            "--name",
            name,
            "--network",
            f"{stack.project}_kafka",
            *rights,
            image,
            *options,
            *status,
        ],
        60,
    )
    try:
        assert started.returncode == 0, started.stderr

        def inspect() -> dict[str, Any]:
            found: list[dict[str, Any]] = json.loads(_run(["docker", "inspect", name], 30).stdout)
            return found[0]

        deadline = time.monotonic() + HEALTHY_SECONDS
        while inspect()["State"]["Health"]["Status"] != "healthy":
            assert time.monotonic() < deadline, _run(["docker", "logs", name], 30).stderr
            time.sleep(0.5)
        assert inspect()["Config"]["User"].partition(":")[0] == "10001"
        assert _run(["docker", "diff", name], 30).stdout == ""

        _run(["docker", "stop", "--time", "60", name], 90)
        assert inspect()["State"]["ExitCode"] == 0
    finally:
        _run(["docker", "rm", "-f", name], 60)


def test_every_spark_job_runs(stack: Stack) -> None:
    topic = "checked-rows"  # checked from creation, by deploy/fencepost.toml
    with closing(KafkaAdminClient(bootstrap_servers=stack.bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS, 1)])

    stated = stack.spark("bulk_load", "--input", "/data/rows.csv", "--topic", topic, "--compression", "gzip")

    assert f"complete: {ROWS} rows" in stated
    ids: list[int] = []
    for partition in range(PARTITIONS):
        records = read_all(stack.bootstrap, topic, partition)
        assert [offset for offset, _ in records] == list(range(len(records)))
        ids += [int(json.loads(value)["id"]) for _, value in records]
    assert sorted(ids) == list(range(ROWS))

    copy = create_topic(stack.bootstrap, "copy", check="true")
    stated = stack.spark(
        *("stream", "--from", topic, "--to", copy, "--sink-id", "copy", "--checkpoint", "/home/spark/copy", "--once")
    )
    assert log_end(stack.bootstrap, copy) >= ROWS, stated

    for checked, order in ((topic, "partition"), (copy, "none")):
        stated = stack.spark("verify", "--input", "/data/rows.csv", "--topic", checked, "--order", order)
        assert f"{ROWS} rows expected: {ROWS} found once" in stated.replace(",", "")
        assert "PROVED" in stated.replace("NOT PROVED", "")


def test_data_outlives_the_containers(stack: Stack) -> None:
    topic = create_topic(stack.bootstrap, "kept", check="required")
    with closing(ConditionalProducer(bootstrap_servers=stack.bootstrap)) as producer:
        producer.send(topic, b"kept", partition=0, expected_offset=0).get(30)

    stack.compose("down")
    stack.up()

    assert log_end(stack.bootstrap, topic) == 1
    with closing(ConditionalProducer(bootstrap_servers=stack.bootstrap)) as producer:
        assert producer.send(topic, b"next", partition=0, expected_offset=1).get(30).offset == 1
