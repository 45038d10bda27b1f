"""What all commands of `fencepost` share: mistakes on the command line, missing packages, and the environment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.cli import main as cli
from fencepost_proxy.cli.main import main
from tests.support.ports import free_port


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        (["topcs"], "there is no command topcs; did you mean topics?"),
        (["kafka-topic", "--list"], "there is no command kafka-topic; did you mean kafka-topics?"),
        (["xyzzy"], "there is no command xyzzy (choose from demo, dev, append, "),
        (["status", "--statsu", "a:1"], "unrecognized arguments: --statsu a:1; did you mean --status? (see fencepost "),
        (
            ["append", "orders", "--exect=3"],
            "unrecognized arguments: --exect=3; did you mean --expect? (see fencepost ",
        ),
        (["status", "--xyzzy"], "unrecognized arguments: --xyzzy (see fencepost status --help)"),
    ],
)
def test_mistake_is_answered_with_what_was_meant(
    arguments: list[str], stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert stated in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("proxy", "proxy"),
        ("check", "proxy"),
        ("append", "proxy"),
        ("dev", "proxy,dev"),
        ("demo", "proxy,dev,spark"),
        ("kafka-topics", "proxy,dev"),
    ],
)
def test_missing_package_names_the_extras_of_the_command(
    command: str, extras: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> Any:
        raise ModuleNotFoundError(name="crc32c")

    monkeypatch.setattr(cli, "import_module", missing)
    assert main([command]) == 2
    assert capsys.readouterr().err == (
        f"fencepost: Python package crc32c is missing (run pip install 'fencepost[{extras}]', "
        f"or in a clone pip install '.[{extras}]')\n"
    )


@pytest.mark.parametrize("command", ["expansions", "transactions"])
def test_refused_connection_ends_the_command_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    address, started = f"127.0.0.1:{free_port()}", time.monotonic()
    assert main([command, "--bootstrap-server", address]) == 2
    assert time.monotonic() - started < 4  # retries would take longer
    assert address in capsys.readouterr().err


@pytest.mark.parametrize("command", [["append", "orders", "x"], ["read", "orders"], ["expansions"], ["transactions"]])
def test_bootstrap_server_comes_from_the_environment(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("FENCEPOST_BOOTSTRAP_SERVER", address)
    monkeypatch.setenv("FENCEPOST_STATUS", "127.0.0.1:1")
    assert main(command) == 2
    assert address in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "topics", "health", "expansions", "transactions"])
def test_status_page_comes_from_the_environment(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.delenv("FENCEPOST_BOOTSTRAP_SERVER", raising=False)
    monkeypatch.setenv("FENCEPOST_STATUS", f"http://{address}/")
    assert main([command]) in (1, 2)
    assert f"no response from http://{address}/" in capsys.readouterr().err


def test_reader_that_ends_first_is_no_error(tmp_path: Path) -> None:
    script = "import sys; from fencepost_proxy.cli.main import main; sys.exit(main(['config', 'explain', '--toml']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
