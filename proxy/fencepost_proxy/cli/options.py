"""Parsers of commands, and options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from fencepost_proxy.cli.status_client import STATUS_HELP, address
from fencepost_proxy.errors import ConfigError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

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
        help=f"{brokers} to query (--bootstrap: the same)")  # fmt: skip
    where.add_argument("--status", type=address, metavar="HOST:PORT", help=f"{STATUS_HELP}, instead of "
        "--bootstrap-server")  # fmt: skip
    parser.add_argument("--command-config", **COMMAND_CONFIG)
    parser.set_defaults(brokers=brokers)


def require_source(args: argparse.Namespace) -> None:
    """Raises ConfigError if neither `--bootstrap-server` nor `--status` is given."""
    if args.status is None and not args.bootstrap:
        raise ConfigError(
            f"no source given: use --bootstrap-server HOST:PORT ({args.brokers}) or --status HOST:PORT (a status page)"
        )
