"""`fencepost proxy`: from the command line to a configuration, or to a one-line error."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.main import main
from fencepost_proxy.config import Limits
from fencepost_proxy.types import Address


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fencepost")
    proxy.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["proxy", *words])


def test_every_option_reaches_the_configuration() -> None:
    config = proxy.read_config(
        parse(
            "--bootstrap-server=a:1,b:2", "--listen=[::]:3", "--advertised-host=example.com", "--refusal-scope=request",
            "--status=127.0.0.1:8080", "--log-level=debug", "--log-format=json",
        )
    ).config  # fmt: skip

    assert config.upstream == (Address("a", 1), Address("b", 2))
    assert config.listen == Address("::", 3)
    assert config.advertised_host == "example.com"
    assert config.refusal_scope == "request"
    assert config.status == Address("127.0.0.1", 8080)
    assert (config.log.level, config.log.format) == ("debug", "json")


def test_virtual_configs_in_the_file_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.toml"
    file.write_text('upstream = "a:1"\n[topics."x"]\n"fencepost.check.expected.offsets" = "yes"\n', encoding="utf-8")

    assert main(["proxy", f"--config={file}"]) == 2
    assert "it must be false, true or required" in capsys.readouterr().err


def test_users_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--listen=a:1"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [captured.err.strip()]
    assert "--bootstrap-server HOST:PORT" in captured.err


def test_the_example_file_in_the_help_loads(tmp_path: Path) -> None:
    example = proxy._EXAMPLES.split("config file:\n")[1]
    file = tmp_path / "f.toml"
    file.write_text(example, encoding="utf-8")

    config = proxy.read_config(parse(f"--config={file}")).config

    assert config.configs_for("orders-1") == {"fencepost.check.expected.offsets": "required"}
    assert config.limits.connections_max == 500


def test_limits_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--list-limits")

    text = capsys.readouterr().out
    assert f"frame_bytes_max = {Limits().frame_bytes_max}" in text
    assert "socket.request.max.bytes" in text


def test_workers_option_names_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--workers", "4")

    assert "--workers was removed: run several proxies with reuse_port = true" in capsys.readouterr().err
