"""The `fencepost` command."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any, Final

from fencepost_proxy.errors import FencepostError

_DESCRIPTION = """\
A Kafka-protocol proxy that adds conditional appends (KIP-27) to any Kafka: a producer states the
offset that it expects, and the proxy refuses the append if the partition ends at another offset."""

_EXAMPLES = """\
examples:
  fencepost demo                              run a demonstration with real Kafka and Spark
  fencepost dev                               run Kafka and the proxy on this machine
  fencepost dev --brokers 3 --data ./data     run three brokers, and keep their data
  fencepost proxy --bootstrap-server localhost:9092    run the proxy in front of an existing Kafka
  fencepost config explain                    list all configuration keys
  fencepost check --config fencepost.toml     check a configuration, with a fix for each failure
  fencepost status --status HOST:PORT         show health and suggested actions
  fencepost topics --status HOST:PORT         show checked topics: log ends, pending appends, refusals
  fencepost expansions --status HOST:PORT     show partition expansions and gated consumer groups
  fencepost transactions hanging --bootstrap-server HOST:PORT    find transactions that block committed readers

Show all options of a command: fencepost COMMAND --help
"""


#: One module per command: those of `_DEV_COMMANDS` in `fencepost_dev.commands`, the others here.
_COMMANDS: Final = (
    "demo",
    "dev",
    "proxy",
    "config",
    "check",
    "status",
    "topics",
    "expansions",
    "transactions",
    "health",
    "completion",
)
_DEV_COMMANDS: Final = ("demo", "dev")


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # noqa: PLC0415 - slow to import

        from fencepost_proxy.executor import EXECUTOR  # noqa: PLC0415 - loads the native module

        print(f"fencepost {version('fencepost')} ({EXECUTOR})")
        parser.exit()


def command_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Parser of all commands, or of `command` alone: importing the other modules would delay the start."""
    parser = argparse.ArgumentParser(
        prog="fencepost",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [command] if command in _COMMANDS else _COMMANDS:
        # Imported here, so that `main` can report a missing package without a stack trace.
        package = "fencepost_dev.commands" if name in _DEV_COMMANDS else "fencepost_proxy.cli"
        import_module(f"{package}.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. 2: user or environment error, printed in one line. 130: Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        parser = command_parser(arguments[0] if arguments else None)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}; see fencepost {arguments[0]} --help")
        return int(args.run(args))
    except FencepostError as error:
        print(f"fencepost: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0].startswith("fencepost"):
            raise
        print(
            f"fencepost: Python package {error.name} is missing (install fencepost[proxy,dev,spark])",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
