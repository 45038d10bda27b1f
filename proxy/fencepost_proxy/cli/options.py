"""Parsers of commands, and options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from fencepost_proxy.cli.status_client import STATUS_HELP, STATUS_VARIABLE, address
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.config.reading import read
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

BOOTSTRAP_VARIABLE: Final = "FENCEPOST_BOOTSTRAP_SERVER"
#: Where the proxy of `fencepost dev` listens.
DEV_BOOTSTRAP: Final = "127.0.0.1:19092"
_TIMEOUT_SECONDS: Final = 30.0
#: Of every command that connects to Kafka.
COMMAND_CONFIG: Final[Mapping[str, Any]] = {
    "type": Path,
    "metavar": "FILE",
    "help": "client.properties of a Java client, for TLS and SASL (docs/configuration.md)",
}


def add_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int] | None,
    summary: str,
    description: str,
    *,
    examples: str | None = None,
) -> argparse.ArgumentParser:
    """`run` – None for a command with subcommands. `summary` – its line in the list of commands."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_source(parser: argparse.ArgumentParser, brokers: str) -> None:
    """Adds `--bootstrap-server` (`brokers` says what it may be), `--status` and `--command-config`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--bootstrap-server", "--bootstrap", dest="bootstrap", metavar="HOST:PORT[,…]",
        help=f"{brokers} to query (--bootstrap: the same; default: {BOOTSTRAP_VARIABLE})")  # fmt: skip
    where.add_argument("--status", type=address, metavar="HOST:PORT", help=f"{STATUS_HELP}, instead of "
        f"--bootstrap-server (default: {STATUS_VARIABLE})")  # fmt: skip
    parser.add_argument("--command-config", **COMMAND_CONFIG)
    add_timeout(parser)
    parser.set_defaults(brokers=brokers)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=seconds, default=_TIMEOUT_SECONDS, metavar="SECONDS", help="longest wait for "
        f"a response (default {_TIMEOUT_SECONDS:g}); a refused connection fails immediately")  # fmt: skip


def seconds(text: str) -> float:
    """Argument type: a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def require_source(args: argparse.Namespace) -> None:
    """Takes the source from the environment if there is no option. Raises ConfigError if there is none either."""
    if args.status is None and not args.bootstrap:
        args.bootstrap = os.environ.get(BOOTSTRAP_VARIABLE)
        args.status = None if args.bootstrap else _from_environment(STATUS_VARIABLE)
    if args.status is None and not args.bootstrap:
        raise ConfigError(
            f"no source given: use --bootstrap-server HOST:PORT ({args.brokers}) or --status HOST:PORT (a status page)"
        )


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Adds TOPIC and what is needed to reach it through a proxy."""
    add = parser.add_argument
    add("topic", metavar="TOPIC")
    add("--bootstrap-server", "--bootstrap", dest="bootstrap", metavar="HOST:PORT[,…]",
        default=os.environ.get(BOOTSTRAP_VARIABLE) or DEV_BOOTSTRAP,
        help=f"the proxy (--bootstrap: the same; default: {BOOTSTRAP_VARIABLE}, or {DEV_BOOTSTRAP})")  # fmt: skip
    add("--command-config", **COMMAND_CONFIG)
    add_timeout(parser)


def partition(text: str) -> int:
    """Argument type: a partition or an offset."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be 0 or a positive number, not {text!r}")
    return int(text)


def _from_environment(variable: str) -> Address | None:
    text = os.environ.get(variable)
    try:
        return address(text) if text else None
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"environment {variable}: {error}") from None


def client_config(args: argparse.Namespace) -> ProxyConfig:
    """`--bootstrap-server` and `--command-config` as a proxy's upstream. Raises `ConfigError`."""
    return read(None, {"upstream": args.bootstrap}, command_config=args.command_config).config


def kafka_python_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of kafka-python's clients for `--bootstrap-server`, `--command-config` and `--timeout`.

    Call a function of `connecting` first: kafka-python retries what cannot succeed. Raises `ConfigError`.
    """
    from fencepost_proxy.transport.certificates import upstream_context  # noqa: PLC0415 - slow to import

    config = client_config(args)
    timeout_ms = int(args.timeout * 1000)
    found: dict[str, Any] = {"bootstrap_servers": args.bootstrap.split(","), "bootstrap_timeout_ms": timeout_ms}
    tls, sasl = config.upstream_tls, config.control_sasl
    found["security_protocol"] = ("SASL_" if sasl else "") + ("SSL" if tls else "PLAINTEXT")
    if tls is not None:
        found["ssl_context"] = upstream_context(tls)
    if sasl is not None and sasl.password_file is not None:
        password = secret("--command-config", sasl.password_file)
        found |= {
            "sasl_mechanism": sasl.mechanism,
            "sasl_plain_username": sasl.username,
            "sasl_plain_password": password,
        }
    return found
