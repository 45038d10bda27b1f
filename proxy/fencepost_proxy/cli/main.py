"""The `fencepost` command."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any, Final

from fencepost_proxy.errors import FencepostError

_DESCRIPTION = """\
A Kafka-protocol proxy that adds conditional publish to any Kafka: a producer may say
"append this only if the log ends where I think it does" (KIP-27). All else is Kafka's own."""

_EXAMPLES = """\
examples:
  fencepost demo                              see it work: real Kafka, real Spark, one command
  fencepost dev                               Kafka and the proxy on this machine, to work against
  fencepost dev --brokers 3 --data ./data     three brokers, data kept until the next run
  fencepost proxy --upstream localhost:9092   only the proxy, in front of a Kafka you have
  fencepost config explain                    what can be set, and how
  fencepost check --config fencepost.toml     does it work here, and what to do where it does not
  fencepost status --status HOST:PORT         is it well, and if not, what to do
  fencepost topics --status HOST:PORT         checked topics: log ends, what waits, what was refused last
  fencepost expansions --status HOST:PORT     how topics have grown, and which consumer groups wait
  fencepost transactions hanging --bootstrap localhost:9092    what keeps committed readers from going on

Every command explains itself: fencepost COMMAND --help
"""


#: One module per command.
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


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # noqa: PLC0415 - slow, and only for this

        print(f"fencepost {version('fencepost')}")
        parser.exit()


def command_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Knows all commands, or only the given one: importing another's modules would delay its start."""
    parser = argparse.ArgumentParser(
        prog="fencepost",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show program's version number and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [command] if command in _COMMANDS else _COMMANDS:
        # Imported here, so that a package that one of them lacks is a message, not a stack trace.
        import_module(f"fencepost_proxy.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code. 2: a mistake of the user or the machine, told in one line; 130: Ctrl-C."""
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
            f"fencepost: the Python package {error.name} is missing; install fencepost[proxy,dev,spark]",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
