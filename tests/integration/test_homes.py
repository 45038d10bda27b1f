"""A fleet of proxies with `homes = true` before three brokers: each partition's appends are in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kafka.protocol.consumer import FetchRequest

from fencepost.kafka_python import ConditionalProducer
from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.clients import create_topic
from tests.support.docs import ROOT
from tests.support.kafka import unique_topic
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Connection, Log, fetch

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

_CONFIG = 'homes = true\nadvertised_host = "127.0.0.1"\n'
_PARTITIONS = 12


@pytest.fixture
def fleet(kafka3: KafkaCluster, tmp_path: Path) -> Iterator[list[ProxyProcess]]:
    with ExitStack() as running:
        proxies = []
        for number in range(3):
            (directory := tmp_path / str(number)).mkdir()
            status = ("--status", f"127.0.0.1:{free_ports_in_a_row(1)}")
            proxy = ProxyProcess(kafka3.bootstrap, directory, config=_CONFIG + CHECKED_BY_NAME, arguments=status)
            proxies.append(running.enter_context(proxy))
        until_shared(proxies, 3)
        yield proxies


def brokers_at(proxy: ProxyProcess) -> dict[int, str]:
    """The addresses that a client gets."""
    with Connection(proxy.bootstrap) as client:
        return {each.node_id: f"{each.host}:{each.port}" for each in client.metadata().brokers}


def homes(proxy: ProxyProcess) -> list[int]:
    """The bootstrap ports of the brokers' homes."""
    return sorted(int(at.rpartition(":")[2]) - 1 - node for node, at in brokers_at(proxy).items())


def until_shared(proxies: list[ProxyProcess], processes: int, of: list[ProxyProcess] | None = None) -> None:
    """All name the same homes, and these are all of them, or `of`."""

    def probe() -> list[list[int]]:
        return [homes(each) for each in proxies]

    expected = {each.port for each in of or proxies}
    assert len(expected) == processes
    until(probe, "the same homes", accept=lambda found: all(set(each) == expected for each in found))
    assert len({tuple(sorted(brokers_at(each).items())) for each in proxies}) == 1


def append(proxy: ProxyProcess, topic: str, offset: int) -> None:
    with closing(ConditionalProducer(bootstrap_servers=proxy.bootstrap)) as producer:
        sent = [producer.send(topic, b"x", partition=each, expected_offset=offset) for each in range(_PARTITIONS)]
        assert [each.get(60).offset for each in sent] == [offset] * _PARTITIONS


def test_each_partition_is_in_one_process(fleet: list[ProxyProcess]) -> None:
    topic = create_topic(fleet[0].bootstrap, unique_topic("required-homes"), partitions=_PARTITIONS)
    for offset, proxy in enumerate(fleet):
        append(proxy, topic, offset)
    shares = [
        sum(value for name, value in each.metrics().items() if name.startswith("fencepost_sequencers{"))
        for each in fleet
    ]
    assert sum(shares) == _PARTITIONS
    assert all(shares)


def test_probes_are_no_client_connections(fleet: list[ProxyProcess]) -> None:
    """Each process connects to the others every second."""
    name = "fencepost_client_connections_accepted_total"
    before = [each.metrics()[name] for each in fleet]
    time.sleep(4)
    assert [each.metrics()[name] for each in fleet] == before
    homes(fleet[0])
    assert fleet[0].metrics()[name] == before[0] + 1


@pytest.mark.soak
def test_moved_home_ends_no_fetch_in_progress(kafka3: KafkaCluster, tmp_path: Path) -> None:
    """A fetch that waits for records, on a connection to a broker whose home becomes another process."""
    for each in ("first", "second"):
        (tmp_path / each).mkdir()
    with ExitStack() as running:
        proxies = [running.enter_context(ProxyProcess(kafka3.bootstrap, tmp_path / "first", config=_CONFIG))]
        topic = create_topic(proxies[0].bootstrap, unique_topic("homes"), partitions=_PARTITIONS)
        with Connection(proxies[0].bootstrap) as client:
            leaders = {each.leader_id: each.partition_index for each in client.metadata(topic).topics[0].partitions}
        at = brokers_at(proxies[0])
        clients = {node: running.enter_context(Connection(at[node])) for node in leaders}
        for client in clients.values():
            client.api_versions()
        time.sleep(32)  # a new connection may stay for 30 s
        for node, client in clients.items():
            client.send(fetch(topic, leaders[node], wait_ms=25_000), 12)
        proxies.append(running.enter_context(ProxyProcess(kafka3.bootstrap, tmp_path / "second", config=_CONFIG)))
        until_shared(proxies, 2)
        began = time.monotonic()
        answers = {node: client.receive(FetchRequest, 12)[1] for node, client in clients.items()}
        assert {each.responses[0].partitions[0].error_code for each in answers.values()} == {0}
        assert time.monotonic() - began > 10
        after = brokers_at(proxies[0])
        assert after != at
        assert {node for node, client in clients.items() if client.is_closed(5)} == {n for n in at if after[n] != at[n]}


def test_killed_home_is_replaced_soon(fleet: list[ProxyProcess]) -> None:
    topic = create_topic(fleet[0].bootstrap, unique_topic("required-homes"), partitions=_PARTITIONS)
    append(fleet[0], topic, 0)
    fleet[2].kill()
    until_shared(fleet[:2], 2)
    append(fleet[0], topic, 1)
    fleet[2].restart()
    until_shared(fleet, 3)
    append(fleet[1], topic, 2)
    log = Log(fleet[0].bootstrap)
    assert Counter(len(log.values(topic, each)) for each in range(_PARTITIONS)) == {3: _PARTITIONS}


def test_stopping_process_is_no_home_before_it_ends(fleet: list[ProxyProcess]) -> None:
    until_shared(fleet, 3)
    config = fleet[2].config
    fleet[2].stop()
    fleet[2].config = config + "\n[limits]\ndrain_notice_seconds = 20\n"
    fleet[2].restart()
    until_shared(fleet, 3)
    os.kill(fleet[2].pid, signal.SIGTERM)
    until_shared(fleet[:2], 2)
    assert fleet[2].running, "it still serves clients that have its address"
    until_shared([fleet[2], *fleet[:2]], 2, of=fleet[:2])


def test_transactions_through_several_homes_lose_no_transfer(fleet: list[ProxyProcess]) -> None:
    """The coordinator's home validates the commit of appends that other homes checked."""
    options = ("--topic", unique_topic("homes"), "--bootstrap-server", fleet[0].bootstrap, "--transfers", "8")
    command = [sys.executable, str(ROOT / "examples" / "transfer.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
