"""`fencepost topics`: checked topics, or the partitions of one topic."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fencepost_proxy.cli.options import Subparsers, add_command
from fencepost_proxy.cli.status import ago
from fencepost_proxy.cli.status_client import CannotQuery, add_status, listed, show
from fencepost_proxy.cli.tables import Columns, table_of

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


def add_parser(subparsers: Subparsers) -> None:
    summary = "show checked topics: log ends, pending appends, last refusals"
    parser = add_command(subparsers, "topics", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="show the partitions of this topic")
    parser.add_argument("--search", metavar="TEXT", help="show only names that contain TEXT (case-insensitive)")
    add_status(parser)


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
        return (
            f"No checked {what} known to this proxy process, or none with a matching name. Topics that the "
            "configuration file checks appear within a minute of a start, or at their first append."
        )
    return _topics(rows, now) if what == "topics" else _partitions(rows, now)


def _topics(rows: Sequence[Mapping[str, Any]], now: float) -> str:
    columns: Columns = {
        "TOPIC": "topic",
        "CONFIGS": lambda each: _configs(each["configs"]),
        "PARTITIONS": "partitions",
        "SUM OF LOG ENDS": _ends,
        "PENDING": "waiting",
        "REFUSED": "refusals",
        "LAST REFUSAL": lambda each: _last(each, now),
    }
    return table_of(columns, rows)


def _partitions(rows: Sequence[Mapping[str, Any]], now: float) -> str:
    columns: Columns = {
        "PARTITION": lambda each: f"{each['topic']}-{each['partition']}",
        "LEADER": lambda each: "none" if each["leader"] is None else each["leader"],
        "SEQUENCER": lambda each: each["state"] or "not used yet",
        "LOG END": "log_end_offset",
        "SEQUENCE OFFSET": "sequence_offset",
        "PENDING": "waiting",
        "REFUSED": "refusals",
        "LAST REFUSAL": lambda each: _last(each, now),
    }
    return table_of(columns, rows)


def _configs(configs: Mapping[str, str]) -> str:
    return ", ".join(f"{name.removeprefix('fencepost.')}={value}" for name, value in configs.items())


def _ends(each: Mapping[str, Any]) -> object:
    if not each["ends_known"]:
        return None
    part = f" in {each['ends_known']}" if each["ends_known"] < each["partitions"] else ""
    return f"{each['log_end_offsets']}{part}"


def _last(each: Mapping[str, Any], now: float) -> str | None:
    last = each["last_refusal"]
    if last is None:
        return None
    known = last["expected"] is not None and last["log_end_offset"] is not None
    offsets = f", expected {last['expected']}, log end {last['log_end_offset']}" if known else ""
    return f"{last['reason']}, {ago(last['at_ms'], now)}{offsets}"
