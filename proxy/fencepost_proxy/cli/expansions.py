"""`fencepost expansions`: how topics have grown, what is under way, and which consumer group waits for what."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from fencepost_proxy.cli.asking import STATUS_HELP, CannotAsk, address, ask, listed
from fencepost_proxy.cli.tables import table
from fencepost_proxy.net.certificates import secret
from fencepost_proxy.topics.virtual_configs import ORDERED_PARTITION_EXPANSIONS
from fencepost_proxy.types import Address

_ASK_MS: Final = 5_000
_AT_ONCE: Final = 500
_THRESHOLDS_SHOWN: Final = 8

_DESCRIPTION: Final = """\
Shows how topics with ordered.partition.expansion have grown, and what goes on now:

  - expansions under way: at which step, for how long appends have been held, and what is waited for;
  - past ones, with their thresholds: where each old partition ended when the new ones came;
  - consumer groups that have not got a new partition yet: how many records are left to them before they may have it.

A topic grows by any tool, through the proxy (kafka-topics --alter --partitions). This command only shows; `open` below
changes one thing. docs/partition-expansion.md is the whole story.

Ask a proxy process by its status page (its --status), or any proxy as a Kafka client (--bootstrap): that one tells what
every client may know, thresholds, and nothing of groups."""

_EXAMPLES: Final = """\
examples:
  fencepost expansions --status 127.0.0.1:8080
      everything that this proxy knows

  fencepost expansions --status 127.0.0.1:8080 --topic orders --json
      of one topic, for programs; the fields are those of the status page

  fencepost expansions --bootstrap localhost:19092
      what has grown, without a status page

  fencepost expansions open orders billing --status 127.0.0.1:8080 --token-file /etc/fencepost/status-token
      group billing gets all of orders' new partitions with its next heartbeats, and gives up the order for it
"""

_OPEN_DESCRIPTION: Final = """\
Lets a consumer group have the new partitions of a topic although it is not done with the old ones: records of a key may
reach it out of order. For a group that lags for too long, or whose order does not matter. It holds for the expansions
that the topic has had so far, for good, in all proxy processes; the next one is waited for again.

It needs the token of the proxy's status_token_file. The same as
  curl -X POST -H "Authorization: Bearer TOKEN" 'http://STATUS/groups/GROUP/release?topic=TOPIC'"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "expansions",
        help="how topics have grown, and which consumer groups wait for what",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_source(parser)
    parser.add_argument("--topic", metavar="TOPIC", help="only of this one")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object on stdout")
    parser.set_defaults(run=run)
    what = parser.add_subparsers(metavar="open", title="what it can change")
    opening = what.add_parser(
        "open",
        help="lets a group have a topic's new partitions at once",
        description=_OPEN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    opening.add_argument("opened_topic", metavar="TOPIC")
    opening.add_argument("group", metavar="GROUP")
    # Not a default of its own: that would hide what was given in front of `open`.
    opening.add_argument("--status", type=address, metavar="HOST:PORT", default=argparse.SUPPRESS, help=STATUS_HELP)
    opening.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the token: its first line (status_token_file)"
    )
    opening.set_defaults(run=run_open)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", type=address, metavar="HOST:PORT", help=STATUS_HELP)
    parser.add_argument("--bootstrap", metavar="HOST:PORT[,…]", help="instead: the proxy's address for clients")


# --- what it does -----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Raises FencepostError where nobody can be asked."""
    if (args.status is None) == (args.bootstrap is None):
        raise CannotAsk("say whom to ask: --status HOST:PORT, a proxy's status page; or --bootstrap HOST:PORT, a proxy")
    one_topic = args.topic
    found = _of_bootstrap(args.bootstrap, one_topic) if args.bootstrap else _of_status(args.status, one_topic)
    print(json.dumps(found, indent=2) if args.json else told(found, time.time()))
    return 0


def run_open(args: argparse.Namespace) -> int:
    if args.status is None:
        raise CannotAsk("say whom to ask: --status HOST:PORT, a proxy's status page")
    group, topic = urllib.parse.quote(args.group, safe=""), urllib.parse.quote(args.opened_topic, safe="")
    token = None if args.token_file is None else secret("--token-file", args.token_file)
    said = ask(args.status, f"/groups/{group}/release?topic={topic}", method="POST", token=token).strip()
    done = said.startswith(("group ", "asked: "))  # of several workers, the owner does it by itself
    print(said, file=sys.stdout if done else sys.stderr)
    return 0 if done else 1


_Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def _of_status(status: Address, topic: str | None = None) -> _Rows:
    return {
        "expansions": list(listed(status, "expansions", topic=topic)),
        "withheld": list(listed(status, "groups", topic=topic)),
    }


def _of_bootstrap(bootstrap: str, topic: str | None) -> _Rows:
    from kafka import KafkaAdminClient  # noqa: PLC0415 - slow to import, and only for this
    from kafka.admin import ConfigResource, ConfigResourceType  # noqa: PLC0415
    from kafka.errors import KafkaError  # noqa: PLC0415

    try:
        admin = KafkaAdminClient(
            bootstrap_servers=bootstrap.split(","), client_id="fencepost-expansions", bootstrap_timeout_ms=_ASK_MS
        )
        try:
            topics = sorted(admin.list_topics()) if topic is None else [topic]
            described: dict[str, Any] = {}
            for at in range(0, len(topics), _AT_ONCE):
                wanted = [ConfigResource(ConfigResourceType.TOPIC, each) for each in topics[at : at + _AT_ONCE]]
                described |= admin.describe_configs(wanted, config_filter="all").get("topic", {})
        finally:
            admin.close()
    except KafkaError as error:
        raise CannotAsk(f"{bootstrap} could not be asked: {error}") from None
    rows = []
    for name, configs in described.items():
        for each in json.loads(configs.get(ORDERED_PARTITION_EXPANSIONS, {}).get("value") or "[]"):
            state = "pending" if each.get("pending") else "unordered" if each["unordered"] else "done"
            rows.append(
                {
                    "topic": name,
                    "from_count": each["from"],
                    "to_count": each["to"],
                    "state": state,
                    "at_ms": each["at_ms"],
                    "thresholds": each["thresholds"] or [],
                }
            )
    return {"expansions": rows}


# --- what people read -------------------------------------------------------------------------------------------------


def told(found: _Rows, now: float) -> str:
    """Tables. `now` – the wall clock's seconds, for how long ago something was."""
    expansions = found["expansions"]
    pending = [each for each in expansions if each["state"] == "pending"]
    ended = [each for each in expansions if each["state"] != "pending"]
    parts = []
    if pending:
        rows = [
            (
                each["topic"],
                _growth(each),
                _ago(each["at_ms"], now),
                each.get("step") or "driven by another process",
                each.get("waits_for") or "-",
            )
            for each in pending
        ]
        parts.append(_table("Under way: appends are held", ("TOPIC", "PARTITIONS", "FOR", "STEP", "WAITS FOR"), rows))
    if ended:
        rows = [
            (
                each["topic"],
                _growth(each),
                _when(each["at_ms"]),
                "-" if each.get("held_ms") is None else f"{each['held_ms'] / 1000:.3f} s",
                "UNORDERED" if each["state"] == "unordered" else _thresholds(each["thresholds"]),
            )
            for each in ended
        ]
        parts.append(_table("Grown", ("TOPIC", "PARTITIONS", "AT", "HELD FOR", "THRESHOLDS"), rows))
    if not expansions:
        parts.append("No topic grows, or has grown in order.")
    if "withheld" not in found:
        parts.append("Which consumer groups wait for a new partition, a status page tells (--status).")
    elif found["withheld"]:
        rows = [
            (
                each["group"],
                f"{each['topic']}-{each['partition']}",
                f"{each['seconds']:.0f} s",
                f"{each['records_max']:,}",
                "; ".join(each["waits"]) or each["why"],
            )
            for each in found["withheld"]
        ]
        columns = ("GROUP", "PARTITION", "FOR", "RECORDS LEFT, AT MOST", "BEHIND IN")
        parts.append(_table("Groups that wait for a new partition", columns, rows))
        parts.append("A group that waits for too long: fencepost expansions open TOPIC GROUP (gives up the order).")
    else:
        parts.append("No consumer group waits for a new partition.")
    return "\n\n".join(parts)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return f"{title}\n{indent(table(columns, list(rows)), '  ')}"


def _growth(each: Mapping[str, Any]) -> str:
    return f"{each['from_count']} -> {each['to_count']}"


def _when(at_ms: int | None) -> str:
    return "-" if at_ms is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))


def _ago(at_ms: int | None, now: float) -> str:
    return "-" if at_ms is None else f"{max(0.0, now - at_ms / 1000):.0f} s"


def _thresholds(thresholds: Sequence[int]) -> str:
    shown = [str(each) for each in thresholds[:_THRESHOLDS_SHOWN]]
    more = len(thresholds) - len(shown)
    return ", ".join(shown) + (f", … ({more} more)" if more else "")
