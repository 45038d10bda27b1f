"""`fencepost status`: is a running proxy well, and if not, what to do. Then what it is doing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any, Final

from fencepost_proxy.cli.asking import add_status, painted, show, status_page
from fencepost_proxy.cli.expansions import told as told_expansions
from fencepost_proxy.cli.tables import duration, printable, table

_WELL: Final = ("well", "attention")
_VERDICTS: Final = {
    "well": ("good", "✓ All is well"),
    "attention": ("warn", "△ It serves; look at this"),
    "trouble": ("bad", "✕ It serves, but something is wrong"),
    "not_ready": ("bad", "✕ Not ready: clients should not be sent here at the moment"),
}

_DESCRIPTION: Final = """\
Shows whether a proxy process is well, what is wrong if it is not, and what to do then; after that brokers and their
listeners, the last refusals, topics that grow and groups that wait for it, transactions, clients. The same as the
status page in a browser; docs/status.md explains each part."""

_EXAMPLES: Final = """\
examples:
  fencepost status
      of the proxy on this machine that was started with --status 127.0.0.1:8080

  fencepost status --status 127.0.0.1:8081 --watch
      of another one, shown again every two seconds

  fencepost status --json | jq -r '.problems[].what'
      for programs: the fields are those of /status.json

exit status: 0 if it is well, or serves and there is something to look at; 1 if something is wrong, or it is not ready;
2 if it cannot be asked.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help="is a running proxy well, and if not, what to do",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_status(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Raises CannotAsk."""

    def look() -> tuple[dict[str, Any], int]:
        found = status_page(args.status)
        return found, 0 if found["state"] in _WELL else 1

    return show(args, look, lambda found: told(found, time.time()))


def told(found: Mapping[str, Any], now: float) -> str:
    """`found` – as `/status.json` has it; `now` – the wall clock's seconds."""
    tone, verdict = _VERDICTS.get(found["state"], ("bad", found["state"]))
    parts = [painted(verdict, tone)]
    for each in found["problems"]:
        mark = painted("✕", "bad") if each["bad"] else painted("△", "warn")
        parts[0] += f"\n  {mark} {printable(each['what'])}"
        if each["do"]:
            parts[0] += f"\n    {printable(each['do'])}"
    parts.append(_figures(found))
    brokers = [
        (each["node_id"], each["listener"] or "none", each["kafka"], each["connections"], each["problem"] or "-")
        for each in found["brokers"]
    ]
    parts += _table("Brokers", ("ID", "CLIENTS CONNECT TO", "KAFKA", "CONNECTIONS", "PROBLEM"), brokers)
    parts += _table("Last refusals", REFUSAL_COLUMNS, refusal_rows(found["last_refusals"], now))
    if found["expansions"] or found["withheld"]:
        parts.append(told_expansions({name: found[name] for name in ("expansions", "withheld")}, now))
    parts += _transactions(found["transactions"])
    software = [
        (each["software"] or "not said", each["version"] or "-", each["connections"]) for each in found["software"]
    ]
    parts += _table("Clients connected", ("SOFTWARE", "VERSION", "CONNECTIONS"), software)
    return "\n\n".join(parts)


def _figures(found: Mapping[str, Any]) -> str:
    refused = sum(found["refusals"].values())
    lines = [
        f"clients connect to {found['bootstrap'] or '- (not listening)'}, cluster {found['cluster_id'] or 'unknown'}",
        f"fencepost {found['version']}, up for {duration(found['uptime_seconds'])}",
        f"{found['connections']:,} connections, {found['requests_in_flight']:,} requests in flight",
        f"{found['totals']['guarded_topics']:,} checked topics (fencepost topics), {refused:,} batches refused",
    ]
    return "\n".join(map(printable, lines))


def _transactions(seen: Mapping[str, Any] | None) -> list[str]:
    if seen is None:
        return []
    rows = [
        (
            each["transactional_id"],
            each["state"],
            "-" if each["age_seconds"] is None else duration(each["age_seconds"]),
            "-" if each["partitions"] is None else each["partitions"],
        )
        for each in seen["open"]
    ]
    hanging = sum(seen["hanging_by_reason"].values())
    said = f"Transactions of the cluster: {seen['open_transactions']:,} open, {hanging:,} hanging"
    return [said, *_table("Open transactions", ("TRANSACTIONAL ID", "STATE", "AGE", "PARTITIONS"), rows)]


REFUSAL_COLUMNS: Final = ("PARTITION", "WHEN", "REASON", "EXPECTED", "LOG END", "CLIENT ID", "FROM")


def refusal_rows(refusals: Sequence[Mapping[str, Any]], now: float) -> list[tuple[object, ...]]:
    return [
        (
            f"{each['topic']}-{each['partition']}",
            ago(each["at_ms"], now),
            each["reason"],
            *("-" if each[name] is None else each[name] for name in ("expected", "log_end_offset")),
            each["client_id"] or "-",
            each["client"] or "-",
        )
        for each in refusals
    ]


def ago(at_ms: int, now: float) -> str:
    return f"{duration(max(0.0, now - at_ms / 1000))} ago"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[str]:
    return [f"{painted(title, 'title')}\n{indent(table(columns, rows), '  ')}"] if rows else []
