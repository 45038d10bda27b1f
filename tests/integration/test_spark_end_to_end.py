"""Kafka to Spark to Kafka: the query is killed, and its source topic is expanded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import confluent_kafka
import pytest
from kafka.partitioner import murmur2

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import ProxyProcess
from tests.support.raw import Log
from tests.support.spark import QUERY_SECONDS, SPARK_MARKERS, contents, create, expand, session_of

pytestmark = SPARK_MARKERS

_KEYS = 60
#: Per key, before and after the expansion.
_EACH = 300
_CONFIG = """
[topics."ordered-*"]
"fencepost.ordered.partition.expansion" = "true"
[topics."checked-*"]
"fencepost.check.expected.offsets" = "required"
"""


proxy = proxy_fixture(scope="function", config=_CONFIG)


def _produce(proxy: ProxyProcess, topic: str, partitions: int, numbers: range) -> None:
    """Rows of 100 bytes: key and number, as Java's producer partitions them."""
    producer = confluent_kafka.Producer({"bootstrap.servers": proxy.bootstrap, "linger.ms": 100})
    for number in numbers:
        for key in (b"%d" % each for each in range(_KEYS)):
            partition = (murmur2(key) & 0x7FFFFFFF) % partitions
            producer.produce(topic, (b"%s:%d" % (key, number)).ljust(100), key=key, partition=partition)
        producer.poll(0)
    assert producer.flush(QUERY_SECONDS) == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Spark's processes in /proc")
def test_killed_query_over_expanded_topic_writes_each_output_once_in_order(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target = unique_topic("ordered"), unique_topic("checked")
    create(proxy.bootstrap, source, target, partitions=2)
    _produce(proxy, source, 2, range(_EACH))
    expand(proxy.bootstrap, source, 4)
    _produce(proxy, source, 4, range(_EACH, 2 * _EACH))
    output, logs, rows = tmp_path / "stream.log", Log(kafka.bootstrap), 2 * _EACH * _KEYS
    command = [sys.executable, "-m", "tests.support.mapped_stream", kafka.bootstrap, proxy.bootstrap]
    command += [source, target, str(tmp_path / "checkpoint"), "ordered"]

    def run(until_written: int) -> int | None:
        """Kill the query when so many rows are in the target. Return its exit status if it ended before."""
        with output.open("w") as log:
            query = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            until(
                lambda: query.poll() is not None or sum(logs.end(target, each) for each in (0, 1)) > until_written,
                f"{until_written} rows",
                seconds=QUERY_SECONDS,
            )
            return query.poll()
        finally:
            for pid in session_of(query.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            query.wait()

    # Killed in the micro-batch before the expansion's partitions, then in the one with them.
    for share in (0.1, 0.8):
        assert run(int(share * rows)) is None, output.read_text()[-3000:]
        assert sum(logs.end(target, each) for each in (0, 1)) < rows
    assert run(rows) == 0, output.read_text()[-3000:]

    found = contents(kafka, target)
    values = [(record.value or b"").strip() for records in found.values() for record in records]
    assert Counter(values) == Counter(b"%d:%d" % (key, number) for key in range(_KEYS) for number in range(2 * _EACH))
    for key in range(_KEYS):
        numbers = [int(value.split(b":")[1]) for value in values if value.startswith(b"%d:" % key)]
        assert numbers == list(range(2 * _EACH)), key
