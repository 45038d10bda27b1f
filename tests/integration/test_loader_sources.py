"""Sources of a `Loader`: PostgreSQL's logical replication, while loaders, the proxy and PostgreSQL are killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.kafka_python import LogReader
from fencepost_dev.cluster import KafkaCluster
from tests.support import clients
from tests.support.docs import ROOT
from tests.support.ports import free_port
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.senders import free_proxy_port

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(900)]

_DATABASE_USER = "nobody" if os.getuid() == 0 else None  # PostgreSQL does not run as root
_TRANSACTIONS = 150


class Postgres:
    """A server in a directory."""

    def __init__(self, directory: Path) -> None:
        self._data, self._port = directory / "data", free_port()
        self.connection = f"host=127.0.0.1 port={self._port} user=shop dbname=postgres"
        shutil.chown(directory, _DATABASE_USER or os.getuid())
        self._run("initdb", "-D", str(self._data), "-U", "shop", "--auth=trust", "--no-sync")
        self.start()

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, user=_DATABASE_USER, cwd="/", timeout=60)

    def start(self) -> None:
        options = f"-p {self._port} -c wal_level=logical -c unix_socket_directories='' -c fsync=off"
        log = self._data.parent / "log"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", str(log), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "stop")

    def execute(self, sql: str) -> None:
        command = ["psql", self.connection, "-qX", "-v", "ON_ERROR_STOP=1"]
        subprocess.run(command, input=sql, text=True, check=True, capture_output=True, timeout=60)


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    if missing := [each for each in ("initdb", "pg_ctl", "psql") if shutil.which(each) is None]:
        pytest.skip(f"needs PostgreSQL's {missing[0]} in the PATH")
    directory = Path(f"/tmp/fencepost-postgres-{os.getpid()}")  # the test's own directory is closed to other users
    directory.mkdir(mode=0o755)
    server = None
    try:
        server = Postgres(directory)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(directory)


def _write(postgres: Postgres, rng: random.Random, numbers: Iterator[int]) -> list[tuple[str, int | None]]:
    """Transactions of some changes. Returns (id, new number, None for deleted), in commit order."""
    changes: list[tuple[str, int | None]] = []
    statements = []
    for _ in range(_TRANSACTIONS):
        statements.append("BEGIN;")
        for _ in range(rng.choice([1, 1, 3, 40])):
            of, number = rng.randrange(200), next(numbers)
            if rng.random() < 0.1 and any(each == str(of) for each, _ in changes[-50:]):
                statements.append(f"DELETE FROM orders WHERE id = {of};")
                kept = next((n for each, n in reversed(changes) if each == str(of)), None)
                if kept is not None:
                    changes.append((str(of), None))
            else:
                statements.append(
                    f"INSERT INTO orders VALUES ({of}, {number}) ON CONFLICT (id) DO UPDATE SET number = {number};"
                )
                changes.append((str(of), number))
        statements.append("COMMIT;")
    postgres.execute("\n".join(statements))
    return changes


@contextmanager
def _killed_at_the_end(*commands: list[str]) -> Iterator[None]:
    processes = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_each_change_is_in_the_topic_once_and_in_order(
    kafka: KafkaCluster, postgres: Postgres, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, numbers = random.Random(seed), iter(range(10**9))
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY, number int)")
    postgres.execute("CREATE PUBLICATION orders FOR TABLE orders")
    postgres.execute("SELECT pg_create_logical_replication_slot('to_kafka', 'pgoutput')")
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, port=free_proxy_port()) as proxy:
        topic = clients.create_topic(proxy.bootstrap, unique_topic("required"), partitions=2)
        command = [sys.executable, str(ROOT / "examples/sources/postgres.py"), postgres.connection]
        command += ["--slot", "to_kafka", "--publication", "orders", "--topic", topic, "--bootstrap", proxy.bootstrap]
        changes: list[tuple[str, int | None]] = []
        for disturb in (None, proxy, postgres):
            with _killed_at_the_end(command, command):
                for _ in range(3):
                    changes += _write(postgres, rng, numbers)
                    time.sleep(rng.uniform(0.2, 1.5))
                if disturb is proxy:
                    proxy.kill()
                    proxy.restart()
                elif disturb is postgres:
                    postgres.stop()
                    postgres.start()
                time.sleep(rng.uniform(0.5, 2))
        subprocess.run([*command, "--once"], check=True, timeout=200, capture_output=True)
        found: list[tuple[str, int | None, int]] = []
        with LogReader([(topic, 0), (topic, 1)], bootstrap_servers=kafka.bootstrap) as log:
            for (_, partition), record in log:
                of = json.loads(record.key or b"")["id"]
                found.append((of, None if record.value is None else int(json.loads(record.value)["number"]), partition))
    for of in {of for of, _ in changes}:
        assert [n for each, n, _ in found if each == of] == [n for each, n in changes if each == of], of
        assert len({partition for each, _, partition in found if each == of}) == 1
    assert len(found) == len(changes) > 1000
