"""`fencepost dev --secure` from the user's view: logins and ACLs decide, with the files that it writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fencepost_dev.tools import run_tool
from tests.kit.waiting import until
from tests.support.docs import printed_commands
from tests.support.kafka import kafka_version
from tests.support.ports import free_port, free_ports_in_a_row
from tests.support.raw import Closed, Connection, Record, batch

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]


_DENIED = 29


@dataclass(frozen=True)
class Dev:
    bootstrap: str
    kafka: str
    #: The directory that has the files as `secure`.
    directory: Path
    log: Path

    def fencepost(self, *arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "FENCEPOST_BOOTSTRAP_SERVER": self.bootstrap}
        if arguments[0] == "check":
            del environment["FENCEPOST_BOOTSTRAP_SERVER"]
        done = subprocess.run(
            [sys.executable, "-m", "fencepost_proxy", *arguments],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    def bypassing(self) -> dict[str, str]:
        """What `fencepost check` says of checked topics: state and text."""
        status, printed = self.fencepost("check", "--config", "secure/fencepost.toml", "--running", "--json")
        assert status == 0, printed
        (found,) = [each for each in json.loads(printed)["findings"] if each["what"] == "checked topics"]
        return found


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    directory = tmp_path_factory.mktemp("dev")
    listen, status = f"127.0.0.1:{free_ports_in_a_row(2)}", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "fencepost_proxy", "dev", "--listen", listen, "--status", status]
    options = ["--kafka-version", kafka_version(), "--secure", str(directory / "secure")]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            ready = re.fullmatch(r"ready bootstrap=(\S+) kafka=(\S+) status=\S+ files=(\S+)\n", line)
            assert ready is not None, (directory / "log").read_text()
            assert (ready[1], ready[3]) == (listen, str(directory / "secure"))
            yield Dev(ready[1], ready[2], directory, directory / "log")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0


@pytest.fixture(scope="module")
def answers(dev: Dev) -> list[tuple[int, str]]:
    """Of the commands that the help shows, in order: the same files and names."""
    shown = (
        dev.fencepost("dev", "--help")[1].partition("dev --secure ./secure")[2].partition("fencepost dev --listen")[0]
    )
    commands = [each.split()[1:] for each in printed_commands(shown)]
    assert [words[0] for words in commands] == ["kafka-topics", "kafka-configs", "append", "append", "check"]
    found = [dev.fencepost(*commands[0])]
    # The brokers may learn of the topic, and the proxy of its config, a moment later.
    found.append(until(lambda: dev.fencepost(*commands[1]), "the config", accept=lambda done: done[0] == 0))
    found.append(until(lambda: dev.fencepost(*commands[2]), "an append", accept=lambda done: done[0] != 2))
    return found + [dev.fencepost(*words) for words in commands[3:]]


def test_app_appends_and_user_without_acls_is_refused(dev: Dev, answers: list[tuple[int, str]]) -> None:
    (created, _), (configured, _), appended, (refused, why), (checked, _) = answers
    assert (created, configured, checked) == (0, 0, 0)
    assert appended == (0, "appended at offset 0\n")
    assert refused == 2
    assert "this user may not DESCRIBE it" in why
    read = dev.fencepost("read", "--command-config", "secure/app.properties", "app-orders")
    assert read == (0, "0\t0\t-\tfirst\napp-orders-0: the next record gets offset 1\n")


def test_app_has_no_right_on_other_topics(dev: Dev, answers: list[tuple[int, str]]) -> None:
    create = ("--create", "--topic", "orders", "--command-config", "secure/app.properties")
    status, why = dev.fencepost("kafka-topics", *create)
    assert status != 0
    assert "Authorization failed" in why


def test_client_without_login_may_not_write(dev: Dev, answers: list[tuple[int, str]]) -> None:
    """At the listener without logins, on which the cluster's start is observed, Kafka permits nothing."""
    found = re.search(r"Kafka \S+ is up at (\S+)", dev.log.read_text())
    assert found is not None
    with Connection(found[1]) as client:
        answer = client.append("app-orders", batch(Record(b"intruder")))
    assert answer.error_code == _DENIED
    for address in (dev.kafka, dev.bootstrap):
        with Connection(address) as client, pytest.raises((Closed, ConnectionResetError)):
            client.append("app-orders", batch(Record(b"intruder")))


def test_java_clients_use_the_files(dev: Dev, answers: list[tuple[int, str]]) -> None:
    consume = ["--topic", "app-orders", "--group", "app-readers", "--from-beginning", "--max-messages", "1"]
    for address in (dev.kafka, dev.bootstrap):
        files = ["--consumer.config", str(dev.directory / "secure" / "app.properties")]
        group = [*consume[:3], f"app-{address}", *consume[4:]]
        done = run_tool("kafka-console-consumer", ["--bootstrap-server", address, *files, *group])
        assert done.output.endswith("first\n")


def test_check_says_whether_bypassing_is_prevented(dev: Dev, answers: list[tuple[int, str]]) -> None:
    found = dev.bypassing()
    assert found["state"] == "ok"
    assert "bypassing is prevented by Kafka" in found["reported"]
    assert "and User:app from this host only: app-orders" in found["reported"]

    acl = ("--allow-principal", "User:app", "--operation", "Write", "--topic", "app-orders")
    assert dev.fencepost("kafka-acls", "--command-config", "secure/admin.properties", "--add", *acl)[0] == 0

    found = until(dev.bypassing, "the ACL", accept=lambda each: each["state"] == "warning")
    assert "WRITE on app-orders is allowed to User:app from host *: can bypass the proxy" in found["reported"]
    assert "kafka-acls" in found["todo"]
