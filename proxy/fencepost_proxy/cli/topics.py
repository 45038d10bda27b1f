"""`fencepost topics`: topics that a proxy checks in some way, and the partitions of one of them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, Final

from fencepost_proxy.cli.asking import CannotAsk, add_status, listed, show
from fencepost_proxy.cli.status import ago
from fencepost_proxy.cli.tables import table

_DESCRIPTION: Final = """\
Shows the topics that a proxy process checks in some way: what is checked, where their logs end as far as the process
knows, how many appends wait at their gates, and what was refused last. Or the partitions of one topic.

A log end is known once somebody has appended to the partition through this process."""

_EXAMPLES: Final = """\
examples:
  fencepost topics
      all of them, of the proxy on this machine that was started with --status 127.0.0.1:8080

  fencepost topics --search orders --watch
      those that have "orders" in their names, shown again every two seconds

  fencepost topics orders --json
      the partitions of one topic, for programs; the fields are those of /partitions.json
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "topics",
        help="checked topics: log ends, what waits, what was refused last",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the partitions of this one")
    parser.add_argument("--search", metavar="TEXT", help="only what has this in its name, in capitals or not")
    add_status(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Raises CannotAsk."""
    what = "topics" if args.topic is None else "partitions"

    def look() -> tuple[dict[str, Any], int]:
        rows = list(listed(args.status, what, topic=args.topic, search=args.search))
        if not rows and args.topic is not None and args.search is None:
            raise CannotAsk(f"{args.topic} is not a topic that the proxy at {args.status} checks: see fencepost topics")
        return {what: rows}, 0

    return show(args, look, lambda found: told(found, time.time()))


def told(found: Mapping[str, Any], now: float) -> str:
    ((what, rows),) = found.items()
    if not rows:
        return f"No {what} that the proxy checks, or none with that in its name."
    return _topics(rows, now) if what == "topics" else _partitions(rows, now)


def _topics(rows: list[dict[str, Any]], now: float) -> str:
    columns = ("TOPIC", "OFFSETS", "COUNT", "ORDERED", "IDEMPOTENCE", "PARTITIONS", "LOG ENDS, SUMMED", "WAITING",
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
    columns = ("PARTITION", "LEADER", "GATE", "LOG END", "SHIFT", "WAITING", "REFUSED", "LAST REFUSAL")
    return table(
        columns,
        [
            (
                f"{each['topic']}-{each['partition']}",
                "none" if each["leader"] is None else each["leader"],
                each["state"] or "not used yet",
                *("-" if each[name] is None else each[name] for name in ("log_end_offset", "shift")),
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
