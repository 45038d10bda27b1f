"""`fencepost kafka-topics`, `fencepost kafka-configs`, …: Kafka's tools, from locked jars."""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from fencepost_dev.tools import MAIN_CLASSES, tool_command
from fencepost_proxy.cli.options import BOOTSTRAP_VARIABLE, DEV_BOOTSTRAP

_BOOTSTRAP: Final = "--bootstrap-server"
#: Tools that read files, not a cluster.
_LOCAL: Final = ("kafka-dump-log", "kafka-storage")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    for name in MAIN_CLASSES:
        # No prefix character: every argument is the tool's, --help too.
        parser = subparsers.add_parser(name, aliases=[f"{name}.sh"], add_help=False, prefix_chars="\0")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        parser.set_defaults(run=run, tool=name)


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the tool, at `fencepost dev` if no server is given."""
    given = list(args.arguments)
    if args.tool not in _LOCAL and not any(each.startswith((_BOOTSTRAP, "--help", "--version")) for each in given):
        given[:0] = [_BOOTSTRAP, os.environ.get(BOOTSTRAP_VARIABLE) or DEV_BOOTSTRAP]
    command = tool_command(args.tool, given)
    os.execv(command[0], command)
