"""`fencepost expansions`: partition expansions, and consumer groups with gated partitions."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from fencepost_proxy.cli.options import (
    Subparsers,
    add_command,
    add_source,
    client_config,
    kafka_python_settings,
    require_source,
)
from fencepost_proxy.cli.status_client import STATUS_HELP, CannotQuery, address, listed, query
from fencepost_proxy.cli.tables import Columns, table_of, utc
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.topics.virtual_configs import ORDERED_PARTITION_EXPANSIONS
from fencepost_proxy.types import Address

_AT_ONCE: Final = 500
_THRESHOLDS_SHOWN: Final = 8

_DESCRIPTION: Final = """\
Show partition expansions of topics with fencepost.ordered.partition.expansion:

  - expansions in progress: current step, how long appends have been blocked, and what the step waits for;
  - completed expansions with their thresholds, the offsets at which the old partitions ended;
  - consumer groups with gated partitions: how many records a group must read before it receives a new partition.

To expand a topic, run any admin tool through the proxy (kafka-topics --alter --partitions). The subcommand `open`
stops gating for one group. See docs/partition-expansion.md.

Read from a status page (--status), or from any proxy as a Kafka client (--bootstrap-server), which shows no groups."""

_EXAMPLES: Final = """\
examples:
  fencepost expansions --status 127.0.0.1:8080
      show all expansions and gated partitions

  fencepost expansions --status 127.0.0.1:8080 --topic orders --json
      print one topic as JSON, with the fields of the status page

  fencepost expansions --bootstrap-server localhost:19092
      show expansions without a status page

  fencepost expansions open orders billing --status 127.0.0.1:8080 --token-file /etc/fencepost/status-token
      give group billing all new partitions of orders with its next heartbeats; it loses the order of keys
"""

_OPEN_DESCRIPTION: Final = """\
Give a consumer group all new partitions of a topic before it has finished the old ones. The group may receive records
of a key out of order. Use it for a group that lags for too long, or that does not need the order.

The command applies to the topic's expansions so far, permanently and on all proxies. Later expansions are gated again.

It needs the token in the proxy's status_token_file. It is the same as
  curl -X POST -H "Authorization: Bearer TOKEN" 'http://STATUS/groups/GROUP/release?topic=TOPIC'"""


def add_parser(subparsers: Subparsers) -> None:
    summary = "show partition expansions and consumer groups with gated partitions"
    parser = add_command(subparsers, "expansions", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add_source(parser, "a proxy")
    parser.add_argument("--topic", metavar="TOPIC", help="show only this topic")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    what = parser.add_subparsers(metavar="open", title="subcommands")
    add = add_command(
        what, "open", run_open, "give a group all new partitions of a topic now", _OPEN_DESCRIPTION
    ).add_argument
    add("opened_topic", metavar="TOPIC")
    add("group", metavar="GROUP")
    # A default here would override a --status given before `open`.
    add("--status", type=address, metavar="HOST:PORT", default=argparse.SUPPRESS, help=STATUS_HELP)
    add("--token-file", type=Path, metavar="FILE", help="file whose first line is the token (status_token_file)")


# --- queries ----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Raises `FencepostError` if no proxy responds."""
    require_source(args)
    found = _of_bootstrap(args) if args.bootstrap else _of_status(args.status, args.topic)
    print(json.dumps(found, indent=2) if args.json else reported(found, time.time()))
    return 0


def run_open(args: argparse.Namespace) -> int:
    if args.status is None:
        raise CannotQuery("no proxy given: use --status HOST:PORT (a status page)")
    group, topic = urllib.parse.quote(args.group, safe=""), urllib.parse.quote(args.opened_topic, safe="")
    token = None if args.token_file is None else secret("--token-file", args.token_file)
    stated = query(args.status, f"/groups/{group}/release?topic={topic}", method="POST", token=token).strip()
    done = stated.startswith("group ")
    print(stated, file=sys.stdout if done else sys.stderr)
    return 0 if done else 1


_Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def _of_status(status: Address, topic: str | None = None) -> _Rows:
    return {
        "expansions": list(listed(status, "expansions", topic=topic)),
        "gated": list(listed(status, "groups", topic=topic)),
    }


def _of_bootstrap(args: argparse.Namespace) -> _Rows:
    from kafka import KafkaAdminClient  # noqa: PLC0415 - slow to import
    from kafka.admin import ConfigResource, ConfigResourceType  # noqa: PLC0415
    from kafka.errors import KafkaError  # noqa: PLC0415

    from fencepost_proxy.cli.connecting import require_connection  # noqa: PLC0415

    require_connection(client_config(args), args.timeout)
    try:
        admin = KafkaAdminClient(
            client_id="fencepost-expansions", request_timeout_ms=int(args.timeout * 1000), **kafka_python_settings(args)
        )
        try:
            topics = sorted(admin.list_topics()) if args.topic is None else [args.topic]
            described: dict[str, Any] = {}
            for at in range(0, len(topics), _AT_ONCE):
                requested = [ConfigResource(ConfigResourceType.TOPIC, each) for each in topics[at : at + _AT_ONCE]]
                described |= admin.describe_configs(requested, config_filter="all").get("topic", {})
        finally:
            admin.close()
    except KafkaError as error:
        raise CannotQuery(f"cannot query {args.bootstrap}: {error}") from None
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


# --- tables -----------------------------------------------------------------------------------------------------------


def reported(found: _Rows, now: float) -> str:
    """Tables for a terminal. `now` is the wall clock in seconds."""
    expansions = found["expansions"]
    pending = [each for each in expansions if each["state"] == "pending"]
    ended = [each for each in expansions if each["state"] != "pending"]
    parts = []
    if pending:
        columns: Columns = {
            "TOPIC": "topic",
            "PARTITIONS": _history,
            "FOR": lambda each: None if each["at_ms"] is None else f"{max(0.0, now - each['at_ms'] / 1000):.0f} s",
            "STEP": lambda each: each.get("step") or "run by another instance",
            "WAITS FOR": lambda each: each.get("waits_for") or None,
        }
        parts.append(_titled("In progress: appends are blocked", columns, pending))
    if ended:
        columns = {
            "TOPIC": "topic",
            "PARTITIONS": _history,
            "AT": lambda each: None if each["at_ms"] is None else utc(each["at_ms"]),
            "BLOCKED FOR": _blocked,
            "THRESHOLDS": lambda each: "UNORDERED" if each["state"] == "unordered" else _thresholds(each["thresholds"]),
        }
        parts.append(_titled("Expanded", columns, ended))
    if not expansions:
        parts.append("No ordered partition expansion, in progress or completed.")
    if "gated" not in found:
        parts.append("Gated partitions of consumer groups are shown by a status page (--status).")
    elif found["gated"]:
        columns = {
            "GROUP": "group",
            "GATED PARTITION": lambda each: f"{each['topic']}-{each['partition']}",
            "FOR": lambda each: f"{each['seconds']:.0f} s",
            "RECORDS LEFT, AT MOST": lambda each: f"{each['records_max']:,}",
            "LAGS IN": lambda each: "; ".join(each["waits"]) or each["why"],
        }
        parts.append(_titled("Consumer groups with gated partitions", columns, found["gated"]))
        parts.append("To stop gating a group: fencepost expansions open TOPIC GROUP (it loses the order of keys).")
    else:
        parts.append("No consumer group has gated partitions.")
    return "\n\n".join(parts)


def _titled(title: str, columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{title}\n{indent(table_of(columns, rows), '  ')}"


def _history(each: Mapping[str, Any]) -> str:
    return f"{each['from_count']} -> {each['to_count']}"


def _blocked(each: Mapping[str, Any]) -> str | None:
    blocked_ms = each.get("blocked_ms")
    return None if blocked_ms is None else f"{blocked_ms / 1000:.3f} s"


def _thresholds(thresholds: Sequence[int]) -> str:
    shown = [str(each) for each in thresholds[:_THRESHOLDS_SHOWN]]
    more = len(thresholds) - len(shown)
    return ", ".join(shown) + (f", … ({more} more)" if more else "")
