"""`fencepost proxy` as a process: its one line, its exit codes, and how it takes being told to stop."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support.ports import free_port

pytestmark = pytest.mark.kafka


@contextmanager
def proxy(*options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fencepost_proxy.cli.main", "proxy", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> str:
    """The bootstrap address; fails where the process ends before it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line.startswith("ready bootstrap="), line
    return line.removeprefix("ready bootstrap=")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_says_when_it_is_ready_serves_and_ends_well_on_sigterm(kafka: KafkaCluster) -> None:
    port = free_port()
    with proxy(f"--upstream={kafka.bootstrap}", "--listen=127.0.0.1:0", f"--status=127.0.0.1:{port}") as process:
        bootstrap = ready(process)
        producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 20_000})
        errors: list[object] = []
        producer.produce("proxy-command", b"x", on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(30) == 0
        assert errors == [None]

        assert get(port, "/readyz") == (200, "ready\n")
        status: dict[str, Any] = json.loads(get(port, "/status.json")[1])
        assert status["bootstrap"] == bootstrap
        assert status["cluster_id"] == kafka.cluster_id
        assert 'fencepost_requests_total{api="Produce"}' in get(port, "/metrics")[1]
        assert "Fencepost" in get(port, "/")[1]

        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert out == "", "nothing but the ready line belongs on stdout"
        assert "draining" in err


def test_while_it_waits_for_kafka_it_says_so_and_can_be_stopped() -> None:
    status, absent = free_port(), free_port()
    with proxy(f"--upstream=127.0.0.1:{absent}", "--listen=127.0.0.1:0", f"--status=127.0.0.1:{status}") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "waiting for Kafka" in line:
                assert f"127.0.0.1:{absent}" in line
                break
        else:
            pytest.fail("it never said what it waits for")
        assert get(status, "/livez")[0] == 200
        assert get(status, "/readyz")[0] == 503

        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_a_second_signal_ends_it_at_once(kafka: KafkaCluster) -> None:
    with proxy(f"--upstream={kafka.bootstrap}", "--listen=127.0.0.1:0") as process:
        host, port = ready(process).rsplit(":", 1)
        # A request that Kafka will not answer before the drain is over: the broker is paused.
        kafka.pause(1)
        try:
            with socket.create_connection((host, int(port))) as client:
                metadata_v1 = "0003 0001 00000001 ffff ffffffff"  # of all topics
                client.sendall(bytes.fromhex("0000000e" + metadata_v1))
                time.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
                assert process.poll() is None, "it must wait for the answer under way"
                process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=8)  # a drain may take 10
                assert process.returncode == 1
                assert "asked twice to stop" in err
        finally:
            kafka.resume(1)


def test_a_taken_port_is_one_line_and_status_2(kafka: KafkaCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in (f"--listen=127.0.0.1:{port}", f"--status=127.0.0.1:{port}"):
            listen = "--listen=127.0.0.1:0"
            with proxy(f"--upstream={kafka.bootstrap}", listen, option) as process:
                out, err = process.communicate(timeout=30)
                assert process.returncode == 2
                assert out == ""
                assert str(port) in err.splitlines()[-1]
                assert "Traceback" not in err
