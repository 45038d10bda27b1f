"""`fencepost dev` from the user's view: one line when it is ready or fails, and no process or file left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer

from fencepost_dev.commands import dev
from fencepost_proxy.cli.main import main
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.docs import printed_commands
from tests.support.kafka import kafka_version
from tests.support.ports import free_port

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
            ready = re.fullmatch(
                r"ready bootstrap=(\S+:\d+) kafka=(\S+:\d+) status=(\S+:\d+)\n", process.stdout.readline()
            )
            assert ready is not None
            assert main(["health", "--status", ready[3]]) == 0
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


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    """The environment in which commands reach it, and its log."""
    log = tmp_path_factory.mktemp("dev") / "log"
    command = fencepost("dev", "--listen", "127.0.0.1:0", "--status", f"127.0.0.1:{free_port()}")
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = dict(each.split("=") for each in process.stdout.readline().split()[1:])
            names = {"FENCEPOST_BOOTSTRAP_SERVER": found["bootstrap"], "FENCEPOST_STATUS": found["status"]}
            yield {**os.environ, **names}, log
        finally:
            process.terminate()
            process.wait(90)


def run(environment: dict[str, str], *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        fencepost(*arguments), env=environment, input=stdin, capture_output=True, text=True, timeout=150, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_commands_of_its_help_run_without_warnings(running: tuple[dict[str, str], Path]) -> None:
    environment, log = running
    shown = run(environment, "dev", "--help")[1].partition("try it")[2].partition("environment:")[0]
    printed = [each.split()[1:] for each in printed_commands(shown)]
    assert [words[0] for words in printed] == ["kafka-topics", "kafka-configs", "append", "read", "status"]
    for words in printed[:2]:
        assert run(environment, *words)[0] == 0
    until(
        lambda: run(environment, "kafka-topics", "--describe", "--topic", "orders"),
        "the topic",
        accept=lambda done: done[0] == 0,
    )
    # The brokers may learn of the topic, and the proxy of its config, a moment later.
    appended = until(lambda: run(environment, *printed[2]), "an append", accept=lambda done: done[0] != 2)
    assert appended == (0, "appended at offset 0\n", "")
    assert run(environment, *printed[3]) == (0, "0\t0\t-\tfirst\n", "orders-0: the next record gets offset 1\n")
    refused = "fencepost: refused: orders-0: expected offset 0, but the log end offset is 1\n"
    assert run(environment, *printed[2]) == (1, "", refused)
    code, shown, _ = run(environment, *printed[4])
    problems = [line for line in shown.splitlines()[1:] if line.startswith(("  ✗", "  △"))]
    # On a busy machine, the proxy reports that, and nothing else.
    only_busy = bool(problems) and all("gets no CPU" in each for each in problems)
    assert (code, shown.startswith("✓ Healthy") or only_busy) == (0, True), shown
    assert "1 checked topics" in shown
    assert not [line for line in log.read_text().splitlines() if " WARNING " in line and "watchdog" not in line]


def test_lines_of_stdin_are_appended_together(running: tuple[dict[str, str], Path]) -> None:
    environment, _ = running
    topic = "together"
    options = ("--create", "--topic", topic)
    assert run(environment, "kafka-topics.sh", *options)[0] == 0
    switch_on = ("--alter", "--topic", topic, "--add-config", "fencepost.check.expected.offsets=true")
    assert run(environment, "kafka-configs", *switch_on)[0] == 0
    append = ("append", topic, "--key", "k", "--expect")
    until(lambda: run(environment, *append, "0", stdin="one\ntwo\n")[0], "an append", accept=lambda code: code == 0)
    assert run(environment, *append, "1", stdin="stale\nstale\n")[0] == 1
    assert run(environment, *append, "2", stdin="three\nfour\n")[:2] == (0, "appended at offsets 2 to 3\n")
    assert "do not fit into one batch" in run(environment, *append, "4", stdin="x" * 900_000)[2]
    shown = run(environment, "read", topic, "--partition", "0")[1]
    assert [line.split("\t") for line in shown.splitlines()] == [
        ["0", str(offset), "k", value] for offset, value in enumerate(("one", "two", "three", "four"))
    ]
    assert "has no partition 7, only 0 to 0" in run(environment, "read", topic, "--partition", "7")[2]
    assert "does not exist" in run(environment, "read", "nowhere")[2]


def test_status_page_avoids_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = Address(*taken.getsockname())
        monkeypatch.setattr(dev, "STATUS_DEFAULT", used)
        assert dev.status_address(None).port not in (0, used.port)
        with pytest.raises(ConfigError, match="for the status page"):
            dev.status_address(used)


def failed(*arguments: str, **environment: str) -> str:
    """The last line of a command that fails."""
    done = subprocess.run(
        fencepost("dev", *arguments),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


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
    assert re.fullmatch(stated, failed("--listen", "127.0.0.1:0", **environment))


def test_taken_port_is_one_line_with_exit_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        last = failed("--listen", f"127.0.0.1:{port}", "--data", str(tmp_path / "data"))
    assert last.startswith("fencepost: ")
    assert str(port) in last
    assert brokers_under(tmp_path / "data") == []
