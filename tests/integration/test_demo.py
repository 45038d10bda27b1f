"""`fencepost demo` shows both faults and cleans up, and its proof distinguishes correct topics from wrong ones."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.proof import Proof, read_back, row_hash
from tests.support.proxy import ProxyProcess


def processes_about(path: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_text(errors="replace").replace("\0", " ")
            if str(path) in command:
                found.append(command)
    return found


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_interrupted_demo_leaves_no_process_or_file(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "fencepost_proxy", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
        # A shell's background jobs ignore SIGINT, and so do their children. This test may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no lock is taken in it
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "Spark is starting" in line:
                break
        # During the start of Spark, which is a shell, then a JVM, then Python.
        deadline = time.monotonic() + 120
        job = "kafka_sink_load.py"
        while not any(job in each for each in processes_about(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)
        assert any("kafka.Kafka" in each for each in processes_about(tmp_path))
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=120)
    finally:
        demo.kill()
        demo.wait()

    assert demo.returncode == 130, errors
    assert "interrupted; all processes and files were removed" in errors
    assert "Traceback" not in errors
    assert processes_about(tmp_path) == []
    assert [each for each in tmp_path.iterdir() if each.name.startswith("fencepost-")] == []


def shown(*options: str) -> str:
    command = [sys.executable, "-m", "fencepost_proxy", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.kafka
@pytest.mark.timeout(400)
def test_demo_of_two_writers_loses_an_update_with_kafka_alone() -> None:
    output = shown("--without-spark")
    assert "The log has the balances 100, 150, 70. The last one counts, but 120 is right" in output
    assert "appends 70: REFUSED, it expected offset 1, but the log ends at offset 2" in output
    assert "The log has the balances 100, 150, 120. The last one counts, which is right." in output


@pytest.mark.kafka
def test_two_writers_of_the_compose_file_append_again(kafka: KafkaCluster, proxied: ProxyProcess) -> None:
    """In containers, the data is kept."""
    for option, shown in (
        (f"--kafka={kafka.bootstrap}", "The log has the balances 100, 150, 70. The last one counts, but 120 is right"),
        (f"--proxy={proxied.bootstrap}", "The log has the balances 100, 150, 120. The last one counts, which is right"),
    ):
        for _ in range(2):
            command = [sys.executable, "-m", "fencepost_dev.two_writers", option]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert shown in done.stdout, done.stdout + done.stderr


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(700)
def test_demo_duplicates_rows_with_kafka_alone() -> None:
    alone, checked = re.findall(r"records for 336,776 rows; 0 rows missing, ([\d,]+) too often", shown())
    assert (alone != "0", checked) == (True, "0")


@pytest.mark.kafka
def test_demo_proof_detects_wrong_topic_contents(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    topic = unique_topic("proof")
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.create_topics([NewTopic(topic, 2, 1)])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all")

    def append(partition: int, *values: bytes) -> None:
        for value in values:
            producer.send(topic, value, partition=partition).get(30)

    def prove(*rows: str) -> Proof:
        requested = Counter(row_hash([row]) for row in rows)
        return read_back(
            kafka.bootstrap, topic, requested, lambda v: None if v == b"junk" else [v.decode()], lambda count: None
        )

    try:
        append(0, b"a", b"b")
        append(1, b"b")
        good = prove("a", "b", "b")
        assert good.holds
        assert [
            (observed.log_start, observed.log_end, observed.records, observed.gaps) for observed in good.partitions
        ] == [
            (0, 2, 2, 0),
            (0, 1, 1, 0),
        ]

        missing = prove("a", "b", "b", "c")
        assert (missing.holds, missing.rows_missing) == (False, 1)
        twice = prove("a", "b")
        assert (twice.holds, twice.rows_too_often, twice.records_unknown) == (False, 1, 0)
        swapped = prove("a", "a", "b")  # the number of records is right
        assert (swapped.holds, swapped.rows_missing, swapped.rows_too_often) == (False, 1, 1)
        strange = prove("b", "b", "x")
        assert (strange.holds, strange.rows_missing, strange.records_unknown) == (False, 1, 1)
        append(1, b"junk")
        assert (prove("a", "b", "b").holds, prove("a", "b", "b").records_unknown) == (False, 1)
    finally:
        producer.close()

    holed = replace(good, partitions=(replace(good.partitions[0], log_end=3, gaps=1), good.partitions[1]))
    assert not holed.holds
    beheaded = replace(good, partitions=(replace(good.partitions[0], log_start=1, log_end=3), good.partitions[1]))
    assert not beheaded.holds


def test_row_hash_distinguishes_field_boundaries() -> None:
    assert len({row_hash(fields) for fields in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["", "abc"], [])}) == 6
