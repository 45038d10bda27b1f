"""Every command that a help text of `fencepost` shows runs, against a real Kafka and a proxy with a status page."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer

from fencepost_dev.cluster import KafkaCluster
from tests.support.clients import set_check
from tests.support.docs import printed_commands
from tests.support.ports import free_port, free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.spark import create
from tests.unit.test_docs_commands import help_texts

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

#: How the commands begin that other tests run.
_ELSEWHERE = {
    "fencepost demo": "test_demo.py",
    "fencepost dev": "test_dev_command.py, test_embedded_kafka.py",
    "fencepost kafka-topics --create": "test_dev_command.py",
    "fencepost check --config fencepost.toml --running": "test_check.py",
    "fencepost verify-broker": "test_verify_broker.py",
    "fencepost expansions open": "test_groups.py",
    "fencepost transactions abort": "test_stuck_transactions.py",
    "curl ": "test_groups.py",
}
PRINTED = sorted(
    {
        command
        for text in help_texts()
        for command in printed_commands(text)
        # With the files of `fencepost dev --secure`: test_dev_secure.py.
        if not command.startswith(tuple(_ELSEWHERE)) and "secure/" not in command
    }
)
_SERVES = re.compile(r"fencepost proxy|--watch")


@pytest.fixture(scope="module")
def stage(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProxyProcess, str, Path]]:
    """The proxy, its status page, and the directory in which the commands run."""
    directory, status = tmp_path_factory.mktemp("help"), f"127.0.0.1:{free_port()}"
    (directory / "client.properties").write_text("security.protocol=PLAINTEXT\n")
    for name in ("orders.jsonl", "lines.txt"):
        (directory / name).write_text('{"customer": 7}\n')
    (directory / "part-1.jsonl.gz").write_bytes(gzip.compress(b'{"customer": 8}\n'))
    (bin_ := directory / "bin").mkdir()
    (bin_ / "fencepost").write_text(f'#!/bin/sh\nexec {sys.executable} -m fencepost_proxy "$@"\n')
    (bin_ / "fencepost").chmod(0o755)
    for each in (".zfunc", ".config/fish/completions", ".local/share/bash-completion/completions"):
        (directory / each).mkdir(parents=True)
    with ProxyProcess(kafka.bootstrap, directory, arguments=("--status", status)) as proxy:
        create(proxy.bootstrap, "orders", partitions=1)
        set_check(proxy.bootstrap, "orders", "true")
        payments = KafkaProducer(bootstrap_servers=proxy.bootstrap, transactional_id="payments-7")
        payments.init_transactions()
        payments.close()
        yield proxy, status, directory


def given(command: str, proxy: ProxyProcess, status: str, kafka: KafkaCluster) -> str:
    """The command with the addresses of this run. A filter in a pipe is left out."""
    text = command.partition(" | ")[0]
    if "fencepost proxy" not in text:
        text = re.sub(r"--status \S+", f"--status {status}", text)
        text = re.sub(
            r"--bootstrap-server localhost:19092|--bootstrap-server HOST:PORT",
            f"--bootstrap-server {proxy.bootstrap}",
            text,
        )
    text = re.sub(r"--status (127\.0\.0\.1:8080)", f"--status 127.0.0.1:{free_port()}", text)
    text = re.sub(r"--listen (localhost|0\.0\.0\.0):19092", rf"--listen \1:{free_ports_in_a_row(4)}", text)
    return re.sub(r"(kafka-\d|localhost):909\d(,kafka-\d:909\d)*", kafka.bootstrap, text)


@pytest.mark.parametrize("command", PRINTED)
def test_printed_command_succeeds(command: str, stage: tuple[ProxyProcess, str, Path], kafka: KafkaCluster) -> None:
    proxy, status, directory = stage
    (directory / "fencepost.toml").write_text(
        f'upstream = "{kafka.bootstrap}"\nlisten = "127.0.0.1:{free_ports_in_a_row(4)}"\n'
    )
    environment = {
        **os.environ,
        "HOME": str(directory),
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "FENCEPOST_BOOTSTRAP_SERVER": proxy.bootstrap,
        "FENCEPOST_STATUS": status,
    }
    if re.search("fencepost (proxy|config|check)", command):
        del environment["FENCEPOST_BOOTSTRAP_SERVER"], environment["FENCEPOST_STATUS"]
        environment["FENCEPOST_LISTEN"] = f"127.0.0.1:{free_ports_in_a_row(4)}"  # the default may be in use
    with subprocess.Popen(
        ["bash", "-c", given(command, proxy, status, kafka)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        serves = _SERVES.search(command)
        if serves:
            shown = process.stdout.readline()
            os.killpg(process.pid, signal.SIGTERM)
        rest, errors = process.communicate(timeout=240)
    if serves:
        assert shown, errors
    assert "Traceback" not in errors
    accepted = (0, -signal.SIGTERM) if serves else (0, 1) if "append" in command else (0,)
    assert process.returncode in accepted, f"{given(command, proxy, status, kafka)}\n{rest}{errors}"
