"""`fencepost proxy` as a process: its ready line, its exit codes and its reaction to signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from fencepost_dev.cluster import KafkaCluster
from tests.kit.fault_proxy import FaultProxy
from tests.kit.waiting import until
from tests.support.ports import free_port, free_ports_in_a_row
from tests.support.proxy import CHECKED_WITH_LONG_LEASE
from tests.support.raw import Connection, Log, batch, produce_request

pytestmark = pytest.mark.kafka

NOT_LEADER, TIMED_OUT = 6, 7


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
    """Wait until the process is ready and return its bootstrap address."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line.startswith("ready bootstrap="), line
    return line.removeprefix("ready bootstrap=")


def get(port: int, path: str) -> tuple[int, str]:
    """The status and the body, or (0, "") while the port is closed."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return 0, ""
        raise


def test_proxy_reports_ready_serves_and_stops_on_sigterm(kafka: KafkaCluster) -> None:
    port = free_port()
    with proxy(f"--upstream={kafka.bootstrap}", "--listen=127.0.0.1:0", f"--status=127.0.0.1:{port}") as process:
        bootstrap = ready(process)
        producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 90_000})
        errors: list[object] = []
        producer.produce("proxy-command", b"x", on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(100) == 0
        assert errors == [None]

        assert get(port, "/readyz") == (200, "ready\n")
        status: dict[str, Any] = json.loads(get(port, "/status.json")[1])
        assert status["bootstrap"] == bootstrap
        assert status["cluster_id"] == kafka.cluster_id
        assert 'fencepost_requests_total{api="Produce",version=' in get(port, "/metrics")[1]
        assert "Fencepost" in get(port, "/")[1]

        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == "", "stdout must contain only the ready line"
        assert "draining" in err


def test_proxy_waiting_for_kafka_serves_once_it_starts(kafka: KafkaCluster) -> None:
    status, absent = free_port(), free_port()
    options = f"--upstream=127.0.0.1:{absent}", f"--listen=127.0.0.1:{free_ports_in_a_row(4)}"
    with proxy(*options, f"--status=127.0.0.1:{status}") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "waiting for Kafka" in line:
                assert f"127.0.0.1:{absent}" in line
                break
        else:
            pytest.fail("it never reported what it waits for")
        for _ in range(3):  # queries must not disturb the start
            assert get(status, "/livez")[0] == 200
            code, reason = get(status, "/readyz")
            assert code == 503
            assert f"127.0.0.1:{absent}: cannot connect: Connection refused" in reason

        with FaultProxy(kafka.address(1), port=absent):
            ready(process)
            until(lambda: get(status, "/readyz")[0] == 200, "it to be ready")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == 0


def test_proxy_waiting_for_kafka_can_be_stopped() -> None:
    status = free_port()
    options = f"--upstream=127.0.0.1:{free_port()}", f"--listen=127.0.0.1:{free_port()}"
    with proxy(*options, f"--status=127.0.0.1:{status}") as process:
        until(lambda: "cannot connect" in get(status, "/readyz")[1], "it to wait")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in err) == (0, False)


def test_drain_closes_idle_refuses_new_and_finishes_begun(
    kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, status = unique_topic("drained"), free_port()
    file = tmp_path / "proxy.toml"
    file.write_text("[limits]\ndrain_seconds = 150.0\n")
    options = f"--upstream={kafka.bootstrap}", f"--listen=127.0.0.1:{free_ports_in_a_row(4)}", f"--config={file}"
    with proxy(*options, f"--status=127.0.0.1:{status}") as process:
        bootstrap = ready(process)
        with Connection(bootstrap) as idle, Connection(bootstrap) as begun:
            assert idle.create_topic(topic) == (0, None)
            _, frame = begun.frame(produce_request({topic: {0: batch(b"begun before the signal")}}), 9)
            begun.api_versions()
            begun.socket.sendall(frame[:-5])

            process.send_signal(signal.SIGTERM)

            assert idle.is_closed()
            until(lambda: _refused(bootstrap), "its port to be closed")
            assert get(status, "/readyz") == (503, "not ready\nit is shutting down\n")
            assert get(status, "/livez")[0] == 200
            assert process.poll() is None
            _, another = begun.frame(produce_request({topic: {0: batch(b"not begun")}}), 9)
            begun.socket.sendall(frame[-5:] + another)
            assert begun.receive_produce()[1][topic, 0].error_code == 0
            assert begun.is_closed()  # closed but not reset, so the response could be read
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "not answered within" not in err
    assert Log(kafka.bootstrap).values(topic) == [b"begun before the signal"]


def _refused(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), 60):
            return False
    except ConnectionRefusedError:
        return True


def test_drain_notice_keeps_serving_with_readyz_unavailable(kafka: KafkaCluster, tmp_path: Path) -> None:
    """With `drain_notice_seconds`, load balancers can react to /readyz before connections close. A second signal ends
    the notice."""
    status = free_port()
    file = tmp_path / "proxy.toml"
    file.write_text("[limits]\ndrain_notice_seconds = 150\n")
    options = f"--upstream={kafka.bootstrap}", f"--listen=127.0.0.1:{free_ports_in_a_row(4)}", f"--config={file}"
    with proxy(*options, f"--status=127.0.0.1:{status}") as process:
        bootstrap = ready(process)
        with Connection(bootstrap) as before:
            process.send_signal(signal.SIGTERM)
            until(lambda: get(status, "/readyz")[0] == 503, "it not to be ready")
            assert before.api_versions()
            with Connection(bootstrap) as late:
                assert late.api_versions()
                process.send_signal(signal.SIGTERM)
                assert late.is_closed()
            assert before.is_closed()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_unfinished_requests_at_drain_limit_are_logged(
    kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, status = unique_topic("required"), free_port()
    file = tmp_path / "proxy.toml"
    file.write_text(f"{CHECKED_WITH_LONG_LEASE}\n[limits]\ntakeover_seconds = 0.5\ndrain_seconds = 3.0\n")
    options = f"--upstream={kafka.bootstrap}", f"--listen=127.0.0.1:{free_ports_in_a_row(4)}", f"--config={file}"
    with proxy(*options, f"--status=127.0.0.1:{status}") as process, Connection(ready(process)) as client:
        assert client.create_topic(topic) == (0, None)
        until(lambda: client.append(topic, batch(b"first", expected=0)).base_offset == 0, "the first append")
        kafka.pause(1)
        try:
            client.send_produce({topic: {0: batch(b"second", expected=1)}}, timeout_ms=120_000)
            until(lambda: json.loads(get(status, "/status.json")[1])["requests_in_flight"] == 1, "it to be under way")
            process.send_signal(signal.SIGTERM)
            answer = client.receive_produce()[1][topic, 0]
            assert answer.error_code in (NOT_LEADER, TIMED_OUT), answer
            assert client.is_closed()
            _, err = process.communicate(timeout=60)
        finally:
            kafka.resume(1)
        assert process.returncode == 0, err
        assert "'Produce': 1" in err
    # NOT_LEADER: the append was not sent. TIMED_OUT: it may have been appended.
    possible = [[b"first"], [b"first", b"second"]][: 1 if answer.error_code == NOT_LEADER else 2]
    assert Log(kafka.bootstrap).values(topic) in possible


def test_second_stop_signal_ends_the_drain_at_once(kafka: KafkaCluster, tmp_path: Path) -> None:
    drains_long = tmp_path / "proxy.toml"
    drains_long.write_text("[limits]\ndrain_seconds = 150.0\n")
    with proxy(f"--upstream={kafka.bootstrap}", "--listen=127.0.0.1:0", f"--config={drains_long}") as process:
        host, port = ready(process).rsplit(":", 1)
        # Pause the broker, so that the request is not answered before the drain ends.
        kafka.pause(1)
        try:
            with socket.create_connection((host, int(port))) as client:
                metadata_v1 = "0003 0001 00000001 ffff ffffffff"  # for all topics
                client.sendall(bytes.fromhex("0000000e" + metadata_v1))
                time.sleep(3)  # the request has no observable sign of its arrival
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
                assert process.poll() is None, "the drain must wait for the response in progress"
                process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=100)  # well before the drain limit
                assert process.returncode == 0
                assert "second stop signal" in err
                assert "requests not answered within" in err
                assert client.recv(1) == b"", "the proxy must close the connection without a reset"
        finally:
            kafka.resume(1)


def test_taken_port_is_one_line_and_status_2(kafka: KafkaCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in (f"--listen=127.0.0.1:{port}", f"--status=127.0.0.1:{port}"):
            listen = "--listen=127.0.0.1:0"
            with proxy(f"--upstream={kafka.bootstrap}", listen, option) as process:
                out, err = process.communicate(timeout=60)
                assert process.returncode == 2
                assert out == ""
                assert str(port) in err.splitlines()[-1]
                assert "Traceback" not in err
