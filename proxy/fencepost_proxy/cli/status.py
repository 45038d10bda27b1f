"""`fencepost status`: health of a running proxy, suggested actions and current activity."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any, Final

from fencepost_proxy.cli.expansions import reported as expansions_text
from fencepost_proxy.cli.status_client import add_status, painted, show, status_page
from fencepost_proxy.cli.tables import duration, printable, table

_HEALTHY: Final = ("healthy", "warning")
_DECISIONS: Final = {
    "healthy": ("good", "✓ Healthy"),
    "warning": ("warn", "△ Serving, with warnings"),
    "degraded": ("bad", "✕ Serving, but degraded"),
    "not_ready": ("bad", "✕ Not ready: do not route clients to this proxy"),
}

_DESCRIPTION: Final = """\
Show health and suggested actions of a proxy process, then brokers and listeners, the last refusals, partition
expansions, gated consumer groups, transactions and clients. The status page in a browser shows the same.
docs/status.md explains each part."""

_EXAMPLES: Final = """\
examples:
  fencepost status
      show the proxy on this machine that runs with --status 127.0.0.1:8080

  fencepost status --status 127.0.0.1:8081 --watch
      show another proxy, and refresh every two seconds

  fencepost status --json | jq -r '.problems[].what'
      list problems in a script; the fields are those of /status.json

exit code: 0 healthy, or serving with warnings; 1 degraded or not ready; 2 no response.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help="show health and suggested actions",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_status(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Raises `CannotQuery`."""

    def probe() -> tuple[dict[str, Any], int]:
        found = status_page(args.status)
        return found, 0 if found["state"] in _HEALTHY else 1

    return show(args, probe, lambda found: reported(found, time.time()))


def reported(found: Mapping[str, Any], now: float) -> str:
    """Text for a terminal. `found` is `/status.json`; `now` is the wall clock in seconds."""
    tone, decision = _DECISIONS.get(found["state"], ("bad", found["state"]))
    parts = [painted(decision, tone)]
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
    columns = ("ID", "HOST", "VERSION", "STATUS PAGE", "LAST HEARTBEAT")
    parts += _table("Proxies of the cluster", columns, [_instance(each) for each in found["instances"]])
    parts += _table("Brokers", ("ID", "CLIENTS CONNECT TO", "KAFKA", "CONNECTIONS", "PROBLEM"), brokers)
    parts += _table("Last refusals", REFUSAL_COLUMNS, refusal_rows(found["last_refusals"], now))
    if found["expansions"] or found["gated"]:
        parts.append(expansions_text({name: found[name] for name in ("expansions", "gated")}, now))
    parts += _transactions(found["transactions"])
    software = [
        (each["software"] or "not reported", each["version"] or "-", each["connections"]) for each in found["software"]
    ]
    parts += _table("Clients connected", ("SOFTWARE", "VERSION", "CONNECTIONS"), software)
    return "\n\n".join(parts)


def _instance(each: Mapping[str, Any]) -> tuple[object, ...]:
    beat = "this process" if each["this"] else f"{duration(each['heartbeat_seconds'])} ago"
    named = (each[name] or "-" for name in ("instance_id", "host", "version", "status"))
    return (*named, beat if each["live"] else f"{beat}: dead or cut off")


def _figures(found: Mapping[str, Any]) -> str:
    refused = sum(found["refusals"].values())
    lines = [
        f"clients connect to {found['bootstrap'] or '- (not listening)'}, cluster {found['cluster_id'] or 'unknown'}",
        f"fencepost {found['version']} ({found['executor']}), up for {duration(found['uptime_seconds'])}",
        f"{found['connections']:,} of {found['connections_max']:,} connections, {found['requests_in_flight']:,} "
        f"requests in flight{_rates(found['history'])}",
        f"{found['totals']['checked_topics']:,} checked topics (fencepost topics), {refused:,} batches refused",
    ]
    return "\n".join(map(printable, lines))


def _rates(history: Mapping[str, Any]) -> str:
    """The last sample."""
    if not history.get("requests"):
        return ""
    last = {name: values[-1] for name, values in history.items()}
    megabytes = (last["to_kafka"] + last["to_clients"]) / 1e6
    return f"; {last['requests']:,.1f} requests/s, {megabytes:,.2f} MB/s, {last['refusals']:,.1f} refusals/min"


def _transactions(observed: Mapping[str, Any] | None) -> list[str]:
    if observed is None:
        return []
    rows = [
        (
            each["transactional_id"],
            each["state"],
            "-" if each["age_seconds"] is None else duration(each["age_seconds"]),
            "-" if each["partitions"] is None else each["partitions"],
        )
        for each in observed["open"]
    ]
    hanging = sum(observed["hanging_by_reason"].values())
    stated = f"Transactions of the cluster: {observed['open_transactions']:,} open, {hanging:,} hanging"
    return [stated, *_table("Open transactions", ("TRANSACTIONAL ID", "STATE", "AGE", "PARTITIONS"), rows)]


REFUSAL_COLUMNS: Final = ("PARTITION", "WHEN", "REASON", "EXPECTED", "LOG END", "USER", "CLIENT ID", "FROM")


def refusal_rows(refusals: Sequence[Mapping[str, Any]], now: float) -> list[tuple[object, ...]]:
    return [
        (
            f"{each['topic']}-{each['partition']}",
            ago(each["at_ms"], now),
            each["reason"],
            *("-" if each[name] is None else each[name] for name in ("expected", "log_end_offset")),
            each["principal"] or "-",
            each["client_id"] or "-",
            each["client"] or "-",
        )
        for each in refusals
    ]


def ago(at_ms: int, now: float) -> str:
    return f"{duration(max(0.0, now - at_ms / 1000))} ago"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[str]:
    return [f"{painted(title, 'title')}\n{indent(table(columns, rows), '  ')}"] if rows else []
