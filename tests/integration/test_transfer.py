"""Transfers between two accounts on two partitions, run as a command with many writers of every client library.

The total is conserved, also when writers and proxies are killed. In transactions without expected offsets it is not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from fencepost import LogRecord, Record
from fencepost.kafka_python import LogReader, TransactionalWriter
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import compile_java, run_java
from tests.kit.waiting import until
from tests.support.clients import set_check
from tests.support.fixtures import proxy_fixture
from tests.support.kafka import kafka_version
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.transactions import set_transaction_version

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "transfer.py"
JAVA = Path(__file__).parents[1] / "java" / "TransferWriter.java"
LONG_SECONDS = 1500
PAID_IN = 1000


bank_proxy = proxy_fixture()


def _run(topic: str, *options: str, seconds: float = 600) -> tuple[int, str]:
    command = [sys.executable, str(EXAMPLE), "--topic", topic, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, result.stdout + result.stderr


def _conserved(status: int, reported: str) -> None:
    print(reported)
    assert status == 0, reported
    assert "transfers lost: 0   doubled: 0   decided on a stale balance: 0" in reported
    assert "CONSERVED" in reported


def test_many_writers_neither_make_nor_lose_money(bank_proxy: ProxyProcess, unique_topic: Callable[..., str]) -> None:
    status, reported = _run(
        unique_topic("bank"), "--bootstrap", bank_proxy.bootstrap, "--writers", "3", "--transfers", "12"
    )
    _conserved(status, reported)
    decided = re.search(r"36 transfers were decided (\d+) times", reported)
    assert decided is not None
    assert int(decided[1]) > 36, "no transfer was decided twice: the writers never competed"


def test_transactions_alone_lose_it(bank_proxy: ProxyProcess, unique_topic: Callable[..., str]) -> None:
    status, reported = _run(
        *(unique_topic("bank-unchecked"), "--bootstrap", bank_proxy.bootstrap, "--unchecked"),
        *("--writers", "3", "--transfers", "15", "--client", "kafka-python"),
    )
    print(reported)
    assert status == 1, reported
    assert "NOT CONSERVED" in reported
    assert "transfers lost: 0" in reported, "every transfer is atomic, although the total changed"


def test_writers_and_proxies_are_killed(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    _conserved(*_killed(kafka, unique_topic("bank-kills"), writers=3, transfers=6, kills=4, seconds=700))


@pytest.mark.soak
@pytest.mark.timeout(LONG_SECONDS + 100)
def test_writers_and_proxies_are_killed_many_times(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    reported = _killed(kafka, unique_topic("bank-kills"), writers=6, transfers=200, kills=120, seconds=LONG_SECONDS)
    _conserved(*reported)


def _killed(
    kafka: KafkaCluster, topic: str, *, writers: int, transfers: int, kills: int, seconds: float
) -> tuple[int, str]:
    ports = ",".join(str(free_ports_in_a_row(3)) for _ in range(2))
    status, reported = _run(
        *(topic, "--kafka", kafka.bootstrap, "--ports", ports, "--kills", str(kills)),
        *("--writers", str(writers), "--transfers", str(transfers)),
        seconds=seconds,
    )
    counts = re.search("^killed: (.*)$", reported, re.MULTILINE)
    assert counts is not None, reported
    assert sum(map(int, re.findall(r"(\d+) times", counts[1]))) >= kills - 1, reported
    return status, reported


@pytest.mark.parametrize("version", [1, 2])
def test_java_writers_do_it_by_hand(
    version: int, kafka: KafkaCluster, bank_proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    """The code of docs/other-clients.md, with both transaction versions."""
    release, before = kafka_version(), PAID_IN
    classes = compile_java([JAVA], version=release)
    topic = unique_topic("bank-java")
    with closing(KafkaAdminClient(bootstrap_servers=bank_proxy.bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, 2, 1)])
    set_check(bank_proxy.bootstrap, topic, "true")
    places = [(topic, account) for account in (0, 1)]
    set_transaction_version(kafka.bootstrap, version)
    try:
        with TransactionalWriter(f"{topic}-deposit", bootstrap_servers=bank_proxy.bootstrap) as writer:
            writer.append({place: (0, [Record(b"deposit %d" % before)]) for place in places})

        def write(name: str) -> int:
            arguments = [bank_proxy.bootstrap, topic, name, "6"]
            ran = run_java("TransferWriter", arguments, classes=classes, version=release, timeout_seconds=400)
            return int(ran.output.split()[-1])

        with ThreadPoolExecutor(2) as pool:
            decided = sum(pool.map(write, ("a", "b")))
    finally:
        set_transaction_version(kafka.bootstrap, 2)
    values: dict[int, list[tuple[str, int]]] = {0: [], 1: []}

    def apply(place: tuple[str, int], record: LogRecord) -> None:
        name, balance = (record.value or b"").decode().split()
        values[place[1]].append((name, int(balance)))

    with LogReader(places, bootstrap_servers=bank_proxy.bootstrap) as log:
        until(lambda: log.read_to_end(apply) and len(values[0]) == len(values[1]) == 13, "the last markers")
    print(f"transactions v{version}: 12 transfers were decided {decided} times")
    assert [name for name, _ in values[0]] == [name for name, _ in values[1]], "the partitions have different orders"
    assert sorted(name for name, _ in values[0]) == sorted(["deposit", *(f"{w}-{n}" for w in "ab" for n in range(6))])
    assert {mine + other for (_, mine), (_, other) in zip(values[0], values[1], strict=True)} == {2 * before}
