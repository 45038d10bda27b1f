"""`fencepost topics`: checked topics, or the partitions of one topic."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, Final

from fencepost_proxy.cli.status import ago
from fencepost_proxy.cli.status_client import CannotQuery, add_status, listed, show
from fencepost_proxy.cli.tables import table

_DESCRIPTION: Final = """\
Show checked topics (topics with at least one append check): their checks, log ends, pending appends and last refusals.
With TOPIC, show its partitions.

A log end is known after the first append to the partition through this proxy process."""

_EXAMPLES: Final = """\
examples:
  fencepost topics
      show all checked topics of the proxy that runs on this machine with --status 127.0.0.1:8080

  fencepost topics --search orders --watch
      show topics with "orders" in their names, and refresh every two seconds

  fencepost topics orders --json
      print the partitions of one topic as JSON, with the fields of /partitions.json
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "topics",
        help="show checked topics: log ends, pending appends, last refusals",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="show the partitions of this topic")
    parser.add_argument("--search", metavar="TEXT", help="show only names that contain TEXT (case-insensitive)")
    add_status(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Raises `CannotQuery`."""
    what = "topics" if args.topic is None else "partitions"

    def probe() -> tuple[dict[str, Any], int]:
        rows = list(listed(args.status, what, topic=args.topic, search=args.search))
        if not rows and args.topic is not None and args.search is None:
            raise CannotQuery(
                f"{args.topic} is not a checked topic of the proxy at {args.status} (list: fencepost topics)"
            )
        return {what: rows}, 0

    return show(args, probe, lambda found: reported(found, time.time()))


def reported(found: Mapping[str, Any], now: float) -> str:
    ((what, rows),) = found.items()
    if not rows:
        return f"No checked {what}, or none with a matching name."
    return _topics(rows, now) if what == "topics" else _partitions(rows, now)


def _topics(rows: list[dict[str, Any]], now: float) -> str:
    columns = ("TOPIC", "OFFSETS", "COUNT", "ORDERED", "IDEMPOTENCE", "PARTITIONS", "SUM OF LOG ENDS", "PENDING",
        "REFUSED", "LAST REFUSAL")  # fmt: skip
    return table(
        columns,
        [
            (
                each["topic"],
                each["check"],
                each["count_check"],
                "true" if each["ordered"] else "false",
                each["idempotence"],
                each["partitions"],
                _ends(each),
                each["waiting"],
                each["refusals"],
                _last(each, now),
            )
            for each in rows
        ],
    )


def _partitions(rows: list[dict[str, Any]], now: float) -> str:
    columns = ("PARTITION", "LEADER", "SEQUENCER", "LOG END", "SEQUENCE OFFSET", "PENDING", "REFUSED", "LAST REFUSAL")
    return table(
        columns,
        [
            (
                f"{each['topic']}-{each['partition']}",
                "none" if each["leader"] is None else each["leader"],
                each["state"] or "not used yet",
                *("-" if each[name] is None else each[name] for name in ("log_end_offset", "sequence_offset")),
                each["waiting"],
                each["refusals"],
                _last(each, now),
            )
            for each in rows
        ],
    )


def _ends(each: Mapping[str, Any]) -> object:
    if not each["ends_known"]:
        return "-"
    part = f" in {each['ends_known']}" if each["ends_known"] < each["partitions"] else ""
    return f"{each['log_end_offsets']}{part}"


def _last(each: Mapping[str, Any], now: float) -> str:
    last = each["last_refusal"]
    if last is None:
        return "-"
    offsets = "" if last["expected"] is None or last["log_end_offset"] is None else (
        f", expected {last['expected']}, log end {last['log_end_offset']}"
    )  # fmt: skip
    return f"{last['reason']}, {ago(last['at_ms'], now)}{offsets}"
