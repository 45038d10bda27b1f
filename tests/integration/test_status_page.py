"""The status page of a real proxy: connected clients, refused appends."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.cli.main import main
from tests.kit.waiting import until
from tests.support.fake_cluster import FakeClusterProcess
from tests.support.kafka import unique_topic
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess
from tests.support.raw import Connection, batch

pytestmark = pytest.mark.kafka

_PATIENCE_SECONDS = 90.0


class Shown(ProxyProcess):
    """A proxy with a status page."""

    def __init__(self, upstream: str, directory: Path, *arguments: str) -> None:
        status = f"127.0.0.1:{free_ports_in_a_row(1)}"
        super().__init__(
            upstream, directory, config=CHECKED_WITH_LONG_LEASE, arguments=("--status", status, *arguments)
        )

    def rows(self, what: str, **queried: object) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.page(f"/{what}.json?{urlencode(queried)}"))["rows"]
        return found


@pytest.fixture(scope="module")
def page(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with Shown(kafka.bootstrap, tmp_path_factory.mktemp("page")) as proxy:
        yield proxy


def appended(client: Connection, topic: str, expected: int) -> int:
    """The error code, after retries while the topic is created."""
    code: int = until(
        lambda: client.append(topic, batch(b"secret", expected=expected), timeout_ms=60_000).error_code,
        "an answer",
        accept=lambda found: found not in (None, 3, 5, 6),
        seconds=_PATIENCE_SECONDS,
    )
    return code


@pytest.mark.parametrize("check", ["required", "checked"])
def test_log_ends_and_refusals_are_shown(
    check: str, page: Shown, kafka: KafkaCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    # A checked topic with one append, and clients whose appends were refused.
    topic = unique_topic(check)
    with ExitStack() as stack:
        clients = [stack.enter_context(Connection(page.bootstrap)) for _ in range(4)]
        assert clients[0].create_topic(topic)[0] == 0
        for number, client in enumerate(clients):
            client.client_id = f"{topic}-writer-{number}"
            client.api_versions(3)
        assert appended(clients[0], topic, 0) == 0
        for client in clients:
            assert appended(client, topic, 9) == 44

        # The page shows each client once, with its software.
        found = until(
            lambda: _all(4, page.rows("clients", search=f"{topic}-writer")), "all clients", seconds=_PATIENCE_SECONDS
        )
        assert [(each["client_id"], each["software"], each["version"]) for each in found] == [
            (f"{topic}-writer-{number}", "raw", "1") for number in range(4)
        ]
        # The page shows the topic, with its log end and its refusals.
        (row,) = page.rows("topics", topic=topic)
        assert row["configs"]["fencepost.check.expected.offsets"] == {"required": "required", "checked": "true"}[check]
        assert (row["log_end_offsets"], row["ends_known"], row["refusals"] >= 4) == (1, 1, True)
        (partition,) = page.rows("partitions", topic=topic)
        assert (partition["state"], partition["log_end_offset"], partition["leader"]) == ("open", 1, 1)
        last = partition["last_refusal"]
        assert (last["reason"], last["expected"], last["log_end_offset"]) == ("offset_mismatch", 9, 1)
        assert last["client_id"] in {client.client_id for client in clients}
        assert page.rows("refusals", search=topic) == [last]

        # The lists and the commands agree.
        assert [each["topic"] for each in page.rows("topics", search=topic.upper())] == [topic]
        assert main(["topics", topic, "--status", page.status]) == 0
        assert "offset_mismatch" in capsys.readouterr().out
        assert main(["status", "--status", page.status]) in (0, 1)  # other tests at this Kafka may cause warnings
        assert page.bootstrap in capsys.readouterr().out
        # No record content appears on any page.
        lists = ("topics", "partitions", "clients", "refusals")
        for path in ("/status.json", "/metrics", *(f"/{each}.json?search={topic}" for each in lists)):
            assert "secret" not in page.page(path), path

    # Disconnected clients are removed.
    until(lambda: not page.rows("clients", search=f"{topic}-writer"), "no client left", seconds=_PATIENCE_SECONDS)


def _all(count: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return rows if len(rows) == count and all(each["software"] for each in rows) else None


def test_clients_of_every_day_say_what_they_are(page: Shown) -> None:
    of_python, of_librdkafka = unique_topic("python"), unique_topic("librdkafka")
    admin = KafkaAdminClient(bootstrap_servers=page.bootstrap, client_id=of_python)
    librdkafka = AdminClient({"bootstrap.servers": page.bootstrap, "client.id": of_librdkafka})
    try:
        admin.list_topics()
        librdkafka.list_topics(timeout=_PATIENCE_SECONDS)
        for client_id, software in ((of_python, "kafka-python"), (of_librdkafka, "confluent-kafka-python")):
            found = until(
                lambda name=client_id: _all(1, page.rows("clients", search=name)[:1]),
                client_id,
                seconds=_PATIENCE_SECONDS,
            )
            assert found[0]["software"] == software
        assert "kafka-python" in page.page("/status.json")
    finally:
        admin.close()


def test_proxies_of_the_cluster_and_rates_are_shown(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(FakeClusterProcess(brokers=1))
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
        one, other = (stack.enter_context(Shown(cluster.bootstrap, tmp_path / name)) for name in ("one", "other"))
        client = stack.enter_context(Connection(one.bootstrap))

        def status() -> dict[str, Any]:
            client.api_versions(3)
            found: dict[str, Any] = json.loads(one.page("/status.json"))
            return found

        found = until(
            lambda: each if max((each := status())["history"]["requests"], default=0) > 0 else None,
            "a rate",
            seconds=_PATIENCE_SECONDS,
        )
        this, another = found["instances"]
        assert (this["status"], this["this"], this["live"], another["this"]) == (one.status, True, True, False)
        assert (another["status"], another["host"], another["live"]) == (other.status, this["host"], True)
        assert this["version"] == another["version"] == found["version"]
        assert {this["instance_id"], another["instance_id"]} == {1, 2}
        assert (found["connections"], found["connections_max"]) == (1, 2_000)
        assert "fencepost_event_loop_cpu_wait_seconds_total" in one.page("/metrics")


def test_unreachable_broker_is_named_with_suggested_action(tmp_path: Path) -> None:
    with FakeClusterProcess(brokers=1) as cluster, Shown(cluster.bootstrap, tmp_path) as proxy:
        (broker,) = json.loads(proxy.page("/status.json"))["brokers"]
        assert broker["problem"] is None

        cluster.close()

        def problems() -> list[str]:
            with suppress(OSError), Connection(broker["listener"], timeout_seconds=5.0) as client:
                client.api_versions(3)  # the proxy connects to the broker for a whole request
            return [each["what"] for each in json.loads(proxy.page("/status.json"))["problems"]]

        until(
            lambda: any(f"Broker {broker['node_id']}" in each for each in problems()),
            "its name",
            seconds=_PATIENCE_SECONDS,
        )
        status = json.loads(proxy.page("/status.json"))
        assert "Is that broker up" in str(status["problems"])
        assert status["state"] in ("degraded", "not_ready")


def test_silent_connections_do_not_stop_health_checks(page: Shown) -> None:
    host, _, port = page.status.partition(":")
    with ExitStack() as silent:
        for _ in range(64):
            silent.enter_context(socket.create_connection((host, int(port))))
        for number in range(42):
            assert page.page("/livez") == "ok\n", number
            silent.enter_context(socket.create_connection((host, int(port))))
        assert page.page("/readyz") == "ready\n"
