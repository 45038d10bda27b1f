"""The `fencepost` command."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version

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

Every command explains itself: fencepost COMMAND --help
"""


def _parser() -> argparse.ArgumentParser:
    # One module per command; imported here, so that a package that one of them lacks is a message, not a stack trace.
    from fencepost_proxy.cli import demo, dev, proxy  # noqa: PLC0415

    parser = argparse.ArgumentParser(
        prog="fencepost",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fencepost {version('fencepost')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (demo, dev, proxy):
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code. 2: a mistake of the user or the machine, told in one line; 130: Ctrl-C."""
    try:
        args = _parser().parse_args(argv)
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
