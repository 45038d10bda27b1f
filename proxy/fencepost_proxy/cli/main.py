"""The `fencepost` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

from fencepost_proxy.config.keys import nearest
from fencepost_proxy.errors import FencepostError

_DESCRIPTION = """\
A Kafka-protocol proxy that adds conditional appends (KIP-27) to any Kafka: a producer states the
offset that it expects, and the proxy refuses the append if the partition ends at another offset."""

_EXAMPLES = """\
examples:
  fencepost demo                              show what it prevents, with real Kafka and Spark
  fencepost dev                               run Kafka and the proxy on this machine
  fencepost dev --brokers 3 --data ./data     run three brokers, and keep their data
  fencepost append orders first --expect 0    append a record, if it gets offset 0
  fencepost load orders lines.txt             load the lines of a file, each once
  fencepost read orders                       print all records of a topic, with their offsets
  fencepost kafka-topics --list               run a tool of Kafka
  fencepost proxy --bootstrap-server localhost:9092    run the proxy in front of an existing Kafka
  fencepost config explain                    list all configuration keys
  fencepost check --config fencepost.toml     check a configuration, with a fix for each failure
  fencepost verify-broker --bootstrap-server HOST:PORT    test whether a cluster behaves as the promises need
  fencepost status --status HOST:PORT         show health and suggested actions
  fencepost topics --status HOST:PORT         show checked topics: log ends, pending appends, refusals
  fencepost expansions --status HOST:PORT     show partition expansions and gated consumer groups
  fencepost transactions hanging --bootstrap-server HOST:PORT    find transactions that block committed readers

Show all options of a command: fencepost COMMAND --help
"""


#: Command → its module in this package, or in `fencepost_dev.commands`.
_COMMANDS: Final = {
    **{"demo": "fencepost_dev.commands.demo", "dev": "fencepost_dev.commands.dev"},
    **{name: f"fencepost_proxy.cli.{name}" for name in ("append", "load", "read")},
    **{name: f"fencepost_proxy.cli.{name}" for name in ("proxy", "config", "check", "status", "topics", "expansions")},
    "verify-broker": "fencepost_proxy.cli.verify_broker",
    **{name: f"fencepost_proxy.cli.{name}" for name in ("transactions", "health", "completion")},
}
#: How much a misspelt word must resemble a known one.
_ALIKE: Final = 0.75
_KAFKA_TOOLS: Final = "fencepost_dev.commands.kafka_tools"
#: Command → the extras that it needs, if others than `proxy`.
_EXTRAS: Final = {"demo": "proxy,dev,spark", "dev": "proxy,dev", "kafka-…": "proxy,dev"}


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
    known = {**_COMMANDS, "kafka-…": _KAFKA_TOOLS}
    if command is not None and command.startswith("kafka-"):
        known = {command: _KAFKA_TOOLS}
    # Imported here, so that `main` can report a missing package without a stack trace.
    for module in [known[command]] if command in known else known.values():
        import_module(module).add_parser(subparsers)
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _meant(word: str, known: Iterable[str]) -> str:
    near = nearest(word.partition("=")[0], known, _ALIKE)
    return f"; did you mean {near}?" if near else ""


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. 2: user or environment error, printed in one line. 130: Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        parser = command_parser(arguments[0] if arguments else None)
        if arguments and arguments[0] not in (*_commands(parser), *_options(parser)):
            hint = _meant(arguments[0], _commands(parser)) or f" (choose from {', '.join(_COMMANDS)})"
            parser.error(f"there is no command {arguments[0]}{hint}")
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            options = _options(_commands(parser)[arguments[0]])
            parser.error(
                f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown[0], options)} "
                f"(see fencepost {arguments[0]} --help)"
            )
        return int(args.run(args))
    except FencepostError as error:
        print(f"fencepost: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0].startswith("fencepost"):
            raise
        command = arguments[0] if arguments else ""
        extras = _EXTRAS["kafka-…"] if command.startswith("kafka-") else _EXTRAS.get(command, "proxy")
        print(
            f"fencepost: Python package {error.name} is missing (run pip install 'fencepost[{extras}]', or in a clone "
            f"pip install '.[{extras}]')",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:  # such as `fencepost read orders | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at its end
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
