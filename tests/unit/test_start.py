"""A start loads what it needs and no more: every import is time before the first client."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fencepost_proxy.cli.main import main
from fencepost_proxy.executor import EXECUTOR

_START = """
import sys
from fencepost_proxy.cli import main
main.command_parser("proxy")
import fencepost_proxy.server
print(*sorted(sys.modules))
"""
_AFTER_START = """
import gc
from fencepost_proxy.cli import proxy
before = gc.get_threshold()
proxy._tune_garbage_collector()
assert gc.isenabled() and gc.get_freeze_count() > 1000
assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > before[2]
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(EXECUTOR.module is None, reason=EXECUTOR.why_python)
def test_proxy_start_loads_no_unneeded_modules() -> None:
    loaded = set(run(_START).split())

    assert "fencepost_proxy.server" in loaded
    assert not loaded & {
        "http.server",
        "kafka",
        "fencepost_dev.commands.dev",
        "fencepost_dev.commands.demo",
        "fencepost_dev.cluster",
        "difflib",
        "pyspark",
        # Megabytes for what native code does, or for few users.
        "crc32c",
        "email",
        "fencepost",
        "importlib.metadata",
        "importlib.resources",
        "secrets",
        "stringzilla",
        "tempfile",
    }


def test_startup_objects_are_frozen_and_gc_continues() -> None:
    run(_AFTER_START)


@pytest.mark.parametrize("arguments", [["--help"], [], ["no-such-command"]])
def test_every_command_is_named_where_none_was_given(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)

    out = "".join(capsys.readouterr())
    assert "COMMAND" in out
    if arguments:
        assert all(command in out for command in ("demo", "dev", "proxy"))


def test_unknown_option_refers_to_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["proxy", "--zookeeper", "kafka:2181"])

    assert exit_.value.code == 2
    assert "--zookeeper kafka:2181 (see fencepost proxy --help)" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])

    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("fencepost ")
