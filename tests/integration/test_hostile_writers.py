"""A hostile client and a correct writer use the same checked partition. Through the proxy, the writer keeps half of the
rate that it has directly at Kafka under the same attack.

    python -m pytest tests/integration/test_hostile_writers.py -s

prints the rates. The two rates are measured alternately, in short windows, and the best window of each counts. A busy
machine slows some windows. A blocked partition is slow in all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka.protocol.admin import CreatePartitionsRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import raw
from tests.support.hostile import WAYS, WIDE_PARTITIONS
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(600)]

#: Pause of the writer between a response and its next append. It keeps the writer's CPU time from limiting its rate.
THINKS_SECONDS = 0.02
WINDOW_SECONDS = 1.5
ROUNDS_MIN, ROUNDS_MAX = 2, 10
#: The test measures until the ratio reaches `WANTED`, and requires `LEAST` on a busy machine. A blocked partition keeps
#: less than a tenth.
WANTED, LEAST = 0.5, 0.3
OK, UNKNOWN_PARTITION, NOT_LEADER, TIMED_OUT = 0, 3, 6, 7


@contextlib.contextmanager
def hostile(address: str, topic: str, way: str, *status: str) -> Iterator[subprocess.Popen[str]]:
    """Start a hostile client, wait until it is ready, and pause it."""
    command = [sys.executable, "-m", "tests.support.hostile", address, topic, way, *status]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "ready\n", process.communicate()[1][-3000:]
            os.kill(process.pid, signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def rate(address: str, topic: str, beside: subprocess.Popen[str]) -> float:
    """The writer's appends per second in one window."""
    os.kill(beside.pid, signal.SIGCONT)
    try:
        appended, end = 0, time.monotonic() + WINDOW_SECONDS
        records = raw.batch(b"good")
        while time.monotonic() < end:
            # A lost connection, or one silent for a whole window, counts as no append.
            with contextlib.suppress(OSError, raw.Closed), raw.Connection(address, timeout_seconds=2.0) as connection:
                while time.monotonic() < end:
                    error = connection.append(topic, records).error_code
                    assert error in (OK, NOT_LEADER, TIMED_OUT)
                    appended += error == OK and time.monotonic() < end
                    time.sleep(THINKS_SECONDS)
        return appended / WINDOW_SECONDS
    finally:
        os.kill(beside.pid, signal.SIGSTOP)


@pytest.fixture
def proxy(kafka: KafkaCluster, tmp_path: Path) -> Iterator[ProxyProcess]:
    arguments = ("--status", "127.0.0.1:0")
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CHECKED_WITH_LONG_LEASE, arguments=arguments) as process:
        yield process


@pytest.mark.parametrize("way", WAYS)
def test_good_writer_keeps_half_rate_despite_hostile_client(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], way: str
) -> None:
    topics = {kafka.bootstrap: unique_topic("checked"), proxy.bootstrap: unique_topic("checked")}
    for address, topic in topics.items():
        with raw.Connection(address) as connection:
            connection.create_topic(topic)
            connection.create_topic(f"{topic}-wide", partitions=WIDE_PARTITIONS)
    best = dict.fromkeys(topics, 0.0)
    with contextlib.ExitStack() as stack:
        status = {proxy.bootstrap: [proxy.status]}
        beside = {
            address: stack.enter_context(hostile(address, topic, way, *status.get(address, [])))
            for address, topic in topics.items()
        }
        for number in range(ROUNDS_MAX):
            for address, topic in topics.items():
                best[address] = max(best[address], rate(address, topic, beside[address]))
            kept = best[proxy.bootstrap] / max(best[kafka.bootstrap], 1.0)
            if number + 1 >= ROUNDS_MIN and kept >= WANTED:  # otherwise the machine may have been busy
                break
    print(f"\n| {way} | {best[kafka.bootstrap]:.1f} | {best[proxy.bootstrap]:.1f} | {kept:.0%} |")
    assert kept >= LEAST


def test_request_for_2000_absent_partitions_costs_milliseconds(
    proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic("checked")
    batches = {topic: dict.fromkeys(range(1, 2001), raw.batch(b"x"))}
    seconds = []
    with raw.Connection(proxy.bootstrap) as connection:
        connection.create_topic(topic)
        for _ in range(5):
            began = time.monotonic()
            answers = connection.produce(batches)
            seconds.append(time.monotonic() - began)
            assert {answer.error_code for answer in answers.values()} == {UNKNOWN_PARTITION}
            assert len(answers) == 2000
    print(f"\n2,000 absent partitions: {min(seconds) * 1000:.0f} ms")
    assert min(seconds) < 1.0


def test_partition_added_at_kafka_accepts_first_append(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    """The proxy's metadata is older than the partition."""
    topic = unique_topic("checked")
    with raw.Connection(kafka.bootstrap) as direct, raw.Connection(proxy.bootstrap) as connection:
        direct.create_topic(topic)
        assert connection.append(topic, raw.batch(b"x")).error_code == OK
        assert connection.append(topic, raw.batch(b"x"), partition=1).error_code == UNKNOWN_PARTITION
        requested = CreatePartitionsRequest.CreatePartitionsTopic(name=topic, count=2, assignments=None)
        answer = direct.query(CreatePartitionsRequest(topics=[requested], timeout_ms=10_000, validate_only=False), 3)
        assert answer.results[0].error_code == OK
        until(lambda: raw.Log(kafka.bootstrap).end(topic, 1) == 0, "the partition's leader", accept=bool)
        assert connection.append(topic, raw.batch(b"x"), partition=1).error_code == OK
