"""`fencepost dev` from the user's view: one line when it is ready or fails, and no process or file left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kafka import KafkaProducer

from tests.support.kafka import kafka_version

pytestmark = pytest.mark.kafka


def fencepost(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fencepost_proxy", *arguments]


def brokers_under(data: Path) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue  # it ended during the search
            if f"{data}/node-".encode() in command:
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_dev_reports_ready_and_stops_on_signal(tmp_path: Path, stop_signal: signal.Signals) -> None:
    data = tmp_path / "data"
    with subprocess.Popen(
        fencepost("dev", "--listen", "127.0.0.1:0", "--data", str(data), "--kafka-version", kafka_version()),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.fullmatch(r"ready bootstrap=(\S+:\d+) kafka=(\S+:\d+)\n", process.stdout.readline())
            assert ready is not None
            assert ready[1] != ready[2]
            producer = KafkaProducer(bootstrap_servers=ready[1])
            assert producer.send("through-the-proxy", b"hello").get(timeout=90).offset == 0
            producer.close()
            assert len(brokers_under(data)) == 1

            # Like a terminal: signal the whole process group.
            os.killpg(process.pid, stop_signal)
            assert process.wait(timeout=90) == 0
            assert process.stdout.read() == "", "standard output has more than one line"
        finally:
            process.kill()
    assert brokers_under(data) == []


@pytest.mark.parametrize(
    ("environment", "stated"),
    [
        ({"JAVA_HOME": "/nonexistent"}, r"fencepost: JAVA_HOME=/nonexistent contains no bin/java .*"),
        (
            {"FENCEPOST_CACHE": "{tmp}/cache", "FENCEPOST_MAVEN_URL": "http://127.0.0.1:9"},
            r"fencepost: cannot fetch \S+ from http://127\.0\.0\.1:9/\S+: .*Connection refused; check the network.*",
        ),
    ],
)
def test_missing_prerequisite_is_one_line_with_exit_2(tmp_path: Path, environment: dict[str, str], stated: str) -> None:
    environment = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    done = subprocess.run(
        fencepost("dev", "--listen", "127.0.0.1:0"),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    *progress, last = done.stderr.splitlines()
    assert re.fullmatch(stated, last)
    assert not any("Traceback" in line for line in progress)


def test_taken_port_is_one_line_with_exit_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            fencepost("dev", "--listen", f"127.0.0.1:{port}", "--data", str(tmp_path / "data")),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fencepost: ")
    assert str(port) in last
    assert brokers_under(tmp_path / "data") == []
