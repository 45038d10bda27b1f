"""Sources of a `Loader`, while loaders, the proxy and PostgreSQL are killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from fencepost.kafka_python import LogReader
from fencepost_dev.cluster import KafkaCluster
from tests.client_matrix.releases import Release, installed, must
from tests.kit.waiting import until
from tests.soak.postgres_load import Plan, Stage, load_under_kills
from tests.support import clients
from tests.support.docs import ROOT
from tests.support.postgres import missing_program, postgres_server
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.senders import free_proxy_port

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("changes", "kills"),
    [(5_000, 9), pytest.param(1_000_000, 100, marks=[pytest.mark.soak, pytest.mark.timeout(4_000)])],
)
def test_each_change_is_in_the_topic_once_and_in_order(
    changes: int, kills: int, kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    if (missing := missing_program()) is not None:
        pytest.skip(f"needs PostgreSQL's {missing} in the PATH")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with (
        postgres_server() as postgres,
        ProxyProcess(kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, port=free_proxy_port()) as proxy,
    ):
        topic = clients.create_topic(proxy.bootstrap, unique_topic("required"), partitions=2)
        result = load_under_kills(Plan(changes, kills, 3_000, seed), Stage(postgres, proxy, kafka, topic))
    print("\n".join(result.table()))
    assert result.problems == []
    assert result.written >= changes
    assert result.kills.total() == kills


@contextmanager
def _killed_at_the_end(*commands: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    processes = [subprocess.Popen(each, stdout=subprocess.DEVNULL, env=environment) for each in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class SourceTopic:
    """A topic that is written in transactions. `committed` – the values of each partition."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.name = name
        self._kafka = kafka
        self._numbers = itertools.count()
        self.committed: defaultdict[int, list[bytes]] = defaultdict(list)
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
        self._producer.init_transactions(30)

    def write(self, partitions: Sequence[int], transactions: int = 6) -> None:
        """Every third transaction is aborted."""
        until(
            lambda: len(self._producer.list_topics(self.name).topics[self.name].partitions) > max(partitions),
            "it is expanded",
        )
        for number in range(transactions):
            self._producer.begin_transaction()
            values = [b"%d" % next(self._numbers) for _ in range(100)]
            for at, value in enumerate(values):
                self._producer.produce(self.name, value, b"key", partitions[at % len(partitions)])
            if number % 3 == 1:
                self._producer.flush(30)
                self._producer.abort_transaction(30)
                continue
            self._producer.commit_transaction(30)
            for at, value in enumerate(values):
                self.committed[partitions[at % len(partitions)]].append(value)

    def admin(self) -> contextlib.closing[KafkaAdminClient]:
        return contextlib.closing(KafkaAdminClient(bootstrap_servers=self._kafka.bootstrap))


def test_topic_is_copied_once_and_in_order_or_not_at_all(
    kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source = SourceTopic(kafka, clients.create_topic(kafka.bootstrap, unique_topic("source"), partitions=2))
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, port=free_proxy_port()) as proxy:
        target = clients.create_topic(proxy.bootstrap, unique_topic("required"), partitions=3)
        command = [sys.executable, str(ROOT / "examples/sources/kafka_topic.py"), source.name, target]
        command += ["--from", kafka.bootstrap, "--to", proxy.bootstrap]

        def copy() -> subprocess.CompletedProcess[str]:
            return subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=200, check=False)

        def copied() -> dict[int, list[bytes | None]]:
            found: defaultdict[int, list[bytes | None]] = defaultdict(list)
            with LogReader([(target, each) for each in range(3)], bootstrap_servers=kafka.bootstrap) as log:
                for (_, partition), record in log:
                    found[partition].append(record.value)
            return found

        for disturb in (False, True):
            with _killed_at_the_end(command, command):
                source.write([0, 1])
                time.sleep(2)
                if disturb:
                    proxy.kill()
                    proxy.restart()
                source.write([0, 1])
                time.sleep(random.uniform(0, 2))
        done = copy()
        assert done.returncode == 0, done.stderr
        assert copied() == source.committed
        with source.admin() as admin:
            admin.create_partitions({source.name: 3})
        source.write([0, 1, 2])
        assert copy().returncode == 0
        assert copied() == source.committed
        assert len(source.committed[2]) > 100

        # Retention deletes records that were not copied.
        source.write([0])
        with source.admin() as admin:
            tp = TopicPartition(source.name, 0)
            admin.delete_records({tp: -1})
        done = copy()
        assert done.returncode == 1
        assert "cannot continue" in done.stderr
        assert "records were deleted before they were copied" in done.stderr

        # The topic is replaced by one that has the same offsets.
        with source.admin() as admin:
            admin.delete_topics([source.name])
            until(lambda: source.name not in admin.list_topics(), "the topic is deleted")
        clients.create_topic(kafka.bootstrap, source.name, partitions=3)
        before = copied()
        source.write([0, 1, 2], transactions=20)
        done = copy()
        assert done.returncode == 1
        assert "was deleted and created again" in done.stderr
        assert copied() == before


class IcebergTable:
    """Of a catalog in a directory. pyiceberg is installed for this test only: without it, the test is skipped."""

    def __init__(self, directory: Path) -> None:
        release = Release("pyiceberg", "0.12.0", lambda *_: [])
        pinned = ROOT / "tests" / "client_matrix" / "pinned" / f"{release}.txt"

        def install(target: Path) -> None:
            command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
            command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", str(target)]
            must(release, *command, "-r", pinned)

        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(installed(release, [pinned], install)), str(ROOT)]),
            "PYICEBERG_CATALOG__DEFAULT__TYPE": "sql",
            "PYICEBERG_CATALOG__DEFAULT__URI": f"sqlite:///{directory}/catalog.db",
            "PYICEBERG_CATALOG__DEFAULT__WAREHOUSE": f"file://{directory}",
        }

    def change(self, *changes: str) -> None:
        command = [sys.executable, "-m", "tests.support.iceberg_table", *changes]
        subprocess.run(command, env=self.environment, cwd=ROOT, check=True, capture_output=True, timeout=120)


@pytest.mark.soak  # it installs pyiceberg, whose start takes seconds in each of ten processes
def test_table_is_loaded_snapshot_by_snapshot(
    kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    table = IcebergTable(tmp_path)
    table.change("append", "3500", "2200", "1", "4000")
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, port=free_proxy_port()) as proxy:
        topic = clients.create_topic(proxy.bootstrap, unique_topic("required"), partitions=2)
        command = [sys.executable, str(ROOT / "examples/sources/iceberg.py"), "shop.orders", topic]
        command += ["--key", "customer", "--bootstrap", proxy.bootstrap]

        def load() -> subprocess.CompletedProcess[str]:
            options: dict[str, Any] = {"env": table.environment, "capture_output": True, "text": True, "timeout": 200}
            return subprocess.run([*command, "--once"], check=False, **options)

        def assert_loaded(count: int) -> None:
            done = load()
            assert done.returncode == 0, done.stderr
            print(done.stdout)
            found: defaultdict[str, list[int]] = defaultdict(list)
            with LogReader([(topic, 0), (topic, 1)], bootstrap_servers=kafka.bootstrap) as log:
                for _, record in log:
                    row = json.loads(record.value or b"")
                    found[row["customer"]].append(row["id"])
            expected = {f"c{each}": list(range(each, count, 7)) for each in range(7)}
            assert {key: len(rows) for key, rows in found.items()} == {key: len(rows) for key, rows in expected.items()}
            assert found == expected

        with _killed_at_the_end(command, command, environment=table.environment):
            until(lambda: any(proxy_ends(proxy, topic)), "the first rows")
            proxy.kill()
            proxy.restart()
        assert_loaded(9701)
        table.change("append", "10")
        assert_loaded(9711)
        table.change("expire")
        table.change("append", "5")
        assert_loaded(9716)
        table.change("append", "5", "5")
        table.change("expire")
        done = load()
        assert done.returncode == 1
        assert "they were expired or rolled back" in done.stderr


def proxy_ends(proxy: ProxyProcess, topic: str) -> list[int]:
    with contextlib.closing(KafkaConsumer(bootstrap_servers=proxy.bootstrap)) as consumer:
        return list(consumer.end_offsets([TopicPartition(topic, 0), TopicPartition(topic, 1)]).values())
