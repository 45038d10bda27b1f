"""The commands in the docstrings of examples/, as printed, in front of the proxy that they use by default."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost_dev.commands.dev import DEFAULT_LISTEN
from tests.support.docs import ROOT, printed_commands
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import ProxyProcess

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_PYTHON = ".venv/bin/python "
_STATED = {
    "event_sourcing.py": "RIGHT: every command is one event, on the version before it.\n",
    "kv_store.py": "EQUAL: both leaders and the replay have the requested values.\n",
    "partition_expansion.py": "3000 records of 20 keys read, 0 of them out of order\n",
    "registry_two_masters.py": "RIGHT: two masters disagree with plain Kafka, and never with Registry.\n",
    "stopped_leader.py": "Entries of the old leader after its successor's claim: 1 with plain Kafka, 0 with Leader.\n",
    "transfer.py": "CONSERVED: the balances equal the deposits.\n",
    "web_service.py": "RIGHT: no cart holds more than 5 items, and both servers show what the topic holds.\n",
}


proxy = proxy_fixture()


def printed(example: Path) -> list[str]:
    return list(printed_commands(ast.get_docstring(ast.parse(example.read_text("utf-8"))) or ""))


@pytest.mark.kafka
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs_as_printed(example: Path, proxy: ProxyProcess) -> None:
    dev, command = printed(example)
    assert dev == ".venv/bin/fencepost dev"
    assert command.startswith(_PYTHON)
    environment = {**os.environ, "FENCEPOST_BOOTSTRAP_SERVER": proxy.bootstrap}
    done = subprocess.run(
        [sys.executable, *command.removeprefix(_PYTHON).split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(_STATED[example.name])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_default_is_the_address_of_fencepost_dev(example: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "FENCEPOST_BOOTSTRAP_SERVER"}
    shown = subprocess.run(
        [sys.executable, str(example), "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert f"(default: {DEFAULT_LISTEN})" in shown.stdout


def test_transfer_needs_only_one_client() -> None:
    script = "import runpy, sys; sys.modules |= dict(aiokafka=None, confluent_kafka=None); sys.argv[1:] = ['--help']"
    script += f"; runpy.run_path({str(ROOT / 'examples' / 'transfer.py')!r}, run_name='__main__')"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "--client {kafka-python,all}" in shown.stdout, shown.stderr
