"""`fencepost transactions`: open and hanging transactions of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fencepost_proxy import logs
from fencepost_proxy.cli.proxy import COMMAND_CONFIG
from fencepost_proxy.cli.status_client import STATUS_HELP, address, status_page
from fencepost_proxy.cli.tables import duration, printable, table
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.config.reading import read
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address, TopicPartition

if TYPE_CHECKING:
    from fencepost_proxy.cluster.client import KafkaClient
    from fencepost_proxy.transactions.watching import TransactionMonitor

_FOUND, _UNKNOWN = 1, 2
_NOT_COORDINATOR: Final = 16
_CONNECT_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.1
_LIST_SECONDS: Final = 30.0
#: Time to confirm the remaining candidates after all partitions were read.
_DECIDE_SECONDS: Final = 60.0
_PARTITIONS_PER_SECOND: Final = 2_000.0
_SHOWN_MAX: Final = 1_000_000

_DESCRIPTION: Final = """\
Show transactions of a Kafka cluster: list the open ones, describe one, or find hanging ones. A hanging transaction is
open in a partition's log, but no coordinator knows it. Readers with read_committed stop there indefinitely.

Query brokers (--bootstrap-server: Kafka or a proxy), or the status page of a proxy that watches transactions
(--status)."""

_EXAMPLES: Final = """\
examples:
  fencepost transactions --bootstrap-server localhost:19092
      list open transactions and count transactional ids by state

  fencepost transactions describe payments-7 --bootstrap-server kafka-1:9092
      show state, producer and partitions of one transactional id

  fencepost transactions hanging --bootstrap-server kafka-1:9092
      read every partition, and print the command that aborts each hanging transaction

  fencepost transactions --bootstrap-server kafka-1:9093 --config fencepost.toml
      connect with the TLS and SASL settings of a proxy's config file

  fencepost transactions --bootstrap-server kafka-1:9093 --command-config client.properties
      connect with the TLS and SASL settings of a Java client

  fencepost transactions hanging --status 127.0.0.1:8080 --json
      print what the proxy has found as JSON

exit code: 0; `hanging`: 1 if a transaction hangs, 2 if none was found but not everything could be read.
ACLs: DESCRIBE on transactional ids; for `hanging` also DESCRIBE and READ on topics. Without DESCRIBE on its id, an open
transaction is reported as hanging. docs/stuck-transactions.md describes what to do.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "transactions",
        help="list open transactions, and find hanging ones",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("list", "describe", "hanging"), default="list", help="default: list")
    add("id", nargs="?", metavar="ID", help="transactional id (describe only)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--bootstrap-server", "--bootstrap", dest="bootstrap", metavar="HOST:PORT[,…]",
        help="brokers or a proxy to query (--bootstrap: the same)")  # fmt: skip
    where.add_argument("--status", type=address, metavar="HOST:PORT", help=f"{STATUS_HELP}, instead of "
        "--bootstrap-server")  # fmt: skip
    add("--command-config", **COMMAND_CONFIG)
    add("--config", type=Path, metavar="FILE.toml", help="with --bootstrap-server: take TLS and SASL from a proxy's "
        "config file (upstream_tls, control_sasl)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    add("--partitions-per-second", type=float, default=_PARTITIONS_PER_SECOND, metavar="N",
        help=f"hanging only: read rate (default {_PARTITIONS_PER_SECOND:g})")  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if (args.what == "describe") != (args.id is not None):
        raise ConfigError(
            "describe needs an ID: fencepost transactions describe ID" if args.id is None else f"unexpected {args.id!r}"
        )
    if not args.partitions_per_second > 0:
        raise ConfigError("--partitions-per-second must be above 0")
    if args.status is not None:
        return _of_status(args)
    if args.bootstrap is None:
        raise ConfigError(
            "no source given: use --bootstrap-server HOST:PORT (brokers or a proxy) "
            "or --status HOST:PORT (a status page)"
        )
    logs.setup("error", "console")
    try:
        addresses = [Address.parse(each.strip()) for each in args.bootstrap.split(",") if each.strip()]
    except ValueError as error:
        raise ConfigError(f"--bootstrap-server: {error}") from error
    if not addresses:
        raise ConfigError("--bootstrap-server: no address given")
    return asyncio.run(_of_kafka(args, addresses, _config(args)))


def _config(args: argparse.Namespace) -> ProxyConfig:
    given = {"upstream": args.bootstrap}
    return read(args.config, given, environment=os.environ, command_config=args.command_config).config


# --- from a status page ---------------------------------------------------------------------------------------------


def _of_status(args: argparse.Namespace) -> int:
    found = status_page(args.status)
    report = found["transactions"]
    if report is None:
        raise ConfigError(f"the proxy at {args.status} does not watch transactions (set watch_transactions)")
    if args.what != "describe":
        return _report(args, report, f"{found['bootstrap'] or 'HOST:PORT'}")
    (*described,) = [each for each in report["open"] if each["transactional_id"] == args.id]
    if not described:
        raise ConfigError(
            f"no open transaction of {args.id} on the status page (query brokers: --bootstrap-server HOST:PORT)"
        )
    (one,) = described
    hanging = [each for each in report["hanging"] if each["transactional_id"] == args.id]
    if args.json:
        print(json.dumps({**one, "hanging": hanging}, indent=2))
        return 0
    print(table(("", ""), [(key.replace("_", " "), value) for key, value in one.items()]).lstrip())
    return 0


# --- from brokers ---------------------------------------------------------------------------------------------------


async def _of_kafka(args: argparse.Namespace, addresses: Sequence[Address], config: ProxyConfig) -> int:
    from fencepost_proxy.cluster.broker import Access  # noqa: PLC0415 - keeps `--help` fast
    from fencepost_proxy.cluster.client import KafkaClient  # noqa: PLC0415
    from fencepost_proxy.transport.certificates import Certificates  # noqa: PLC0415

    certificates = Certificates(None, config.upstream_tls)
    access = Access(lambda: certificates.upstream, config.control_sasl)
    control = KafkaClient(addresses, Limits(), access=access)
    try:
        await control.start(timeout_seconds=_CONNECT_SECONDS)
        if args.what == "describe":
            return await _describe(args, control)
        report = await _probe(args, control)
    finally:
        await control.close()
    return _report(args, report, args.bootstrap)


async def _probe(args: argparse.Namespace, control: KafkaClient) -> dict[str, Any]:
    from fencepost_proxy.services.watching import TransactionWatch  # noqa: PLC0415
    from fencepost_proxy.transactions.watching import Pace  # noqa: PLC0415

    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    pace = Pace(args.partitions_per_second, round_seconds=1.0, sweep_seconds=86_400.0)
    watch = TransactionWatch(control, pace, spawn)
    done: Callable[[TransactionMonitor], bool] = _listed if args.what == "list" else _decided
    deadline = time.monotonic() + _LIST_SECONDS
    while not done(watch.watching) and time.monotonic() < deadline:
        watch.query()
        await asyncio.sleep(_TICK_SECONDS)
        if args.what == "hanging" and not watch.watching.sweeps:
            deadline = time.monotonic() + _DECIDE_SECONDS  # a sweep always ends: each request times out
    report = asdict(watch.report(_SHOWN_MAX))
    if not done(watch.watching):
        report["problem"] = report["problem"] or "timed out"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return report


def _listed(watching: TransactionMonitor) -> bool:
    return watching.rounds > 0 and watching.all_ids_listed


def _decided(watching: TransactionMonitor) -> bool:
    return watching.rounds > 1 and watching.sweeps > 0 and not watching.undecided


async def _describe(args: argparse.Namespace, control: KafkaClient) -> int:
    from fencepost_proxy.cluster.broker import UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.services.watching import Queries  # noqa: PLC0415
    from fencepost_proxy.transactions.watched import (  # noqa: PLC0415
        OPEN_STATES,
        DescribeTransactions,
        FindLeaders,
        PartitionProbe,
        ProbePartitions,
    )

    queries = Queries(control)
    found = coordinator = silent = None
    for node_id in sorted(control.brokers):
        try:
            described = await queries.describe_transactions(DescribeTransactions(node_id, (args.id,)))
        except UpstreamUnavailable as error:
            if error.error_code is None:
                silent = error  # another broker may be the coordinator
            elif error.error_code != _NOT_COORDINATOR:
                raise
            continue
        found, coordinator = next(iter(described.transactions), None), node_id
        break
    if coordinator is None and silent is not None:
        raise silent
    if found is None:
        raise ConfigError(f"transactional id {args.id} not found, or DESCRIBE on it is denied")
    leaders = await queries.query(FindLeaders())
    partitions: list[dict[str, Any]] = []
    led_here = {node_id: each for node_id, each in leaders.by_node.items() if node_id in control.brokers}  # type: ignore[union-attr]
    # Partitions without a leader: no marker can be written.
    partitions += [{**_name(each), "leader": None} for each in found.partitions.difference(*led_here.values())]
    for node_id, led in led_here.items():
        here = tuple(each for each in led if each in found.partitions)
        if not here:
            continue
        try:
            probes = await queries.query(ProbePartitions(node_id, here))
        except UpstreamUnavailable as error:
            partitions += [{**_name(each), "leader": node_id, "problem": str(error)} for each in here]
            continue
        for partition, probe in probes.found.items():  # type: ignore[union-attr]
            entry: dict[str, Any] = {**_name(partition), "leader": node_id}
            if isinstance(probe, PartitionProbe):
                mine = [each.start_offset for each in probe.open if each.producer_id == found.producer_id]
                entry |= {
                    "start_offset": mine[0] if mine else None,
                    "last_stable_offset": probe.last_stable_offset,
                    "high_watermark": probe.high_watermark,
                }
            else:
                entry |= {"error_code": probe}
            partitions.append(entry)
    # The coordinator reports the start time of the last transaction even after its end.
    age = (time.time() * 1000 - found.started_at_ms) / 1000 if found.state in OPEN_STATES else None
    if args.json:
        fields: dict[str, Any] = {key: value for key, value in asdict(found).items() if key != "partitions"}
        print(
            json.dumps({**fields, "coordinator": coordinator, "age_seconds": age, "partitions": partitions}, indent=2)
        )
        return 0
    print(f"transactional id   {printable(found.transactional_id)}")
    print(f"state              {found.state}")
    print(f"coordinator        broker {coordinator}")
    print(f"producer           {found.producer_id}, epoch {found.producer_epoch}")
    print(f"timeout            {duration(found.timeout_ms / 1000)}")
    print(f"open for           {'-' if age is None else duration(age)}")
    if partitions:
        print()
        print(
            table(
                ("PARTITION", "LEADER", "FROM OFFSET", "LSO", "HIGH WATERMARK"),
                [
                    (f"{each['topic']}-{each['partition']}", *_columns(each))
                    for each in sorted(partitions, key=lambda each: (each["topic"], each["partition"]))
                ],
            )
        )
    return 0


def _name(partition: TopicPartition) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition}


def _columns(entry: Mapping[str, Any]) -> tuple[object, ...]:
    if entry["leader"] is None:
        return "none", "-", "-", "-"
    if "problem" in entry:
        return entry["leader"], "-", "no response", "-"
    if "error_code" in entry:
        return entry["leader"], "-", f"error {entry['error_code']}", "-"
    start = entry["start_offset"]
    return (
        entry["leader"],
        "nothing written" if start is None else start,
        entry["last_stable_offset"],
        entry["high_watermark"],
    )


# --- output ---------------------------------------------------------------------------------------------------------


def _report(args: argparse.Namespace, report: Mapping[str, Any], bootstrap: str) -> int:
    from fencepost_proxy.services.watching import abort_command  # noqa: PLC0415

    hanging = list(report["hanging"])
    for each in hanging:
        each["to_end_it"] = abort_command(bootstrap, each["topic"], each["partition"], each["start_offset"])
    stuck = [each for each in report["open"] if each["stuck"] is not None]
    incomplete = report["problem"] is not None or report["partitions_unreadable"] or report["partitions_left_out"]
    code = 0
    if args.what == "hanging":
        code = _FOUND if hanging or stuck else _UNKNOWN if incomplete or report["sweep_seconds"] is None else 0
    if args.json:
        print(json.dumps(report, indent=2))
        return code
    if args.what == "list":
        _print_open(report["open"])
        if report["open_transactions"] > len(report["open"]):
            print(f"and {report['open_transactions'] - len(report['open'])} more")
        print(
            f"\n{report['open_transactions']} open; transactional ids by state: {_counts(report['transactional_ids'])}"
        )
    else:
        _print_hanging(hanging, stuck, report)
    if report["problem"] is not None:
        print(f"fencepost: result incomplete: {report['problem']}", file=sys.stderr)
    return code


def _print_open(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        print("no open transactions")
        return
    columns = ("TRANSACTIONAL ID", "STATE", "AGE", "TIMEOUT", "PRODUCER", "COORDINATOR", "PARTITIONS")
    print(
        table(
            columns,
            [
                (
                    each["transactional_id"],
                    each["state"],
                    "-" if each["age_seconds"] is None else duration(each["age_seconds"]),
                    "-" if each["timeout_ms"] is None else duration(each["timeout_ms"] / 1000),
                    f"{each['producer_id']}/{'?' if each['producer_epoch'] is None else each['producer_epoch']}",
                    each["coordinator"],
                    _partitions(each),
                )
                for each in rows
            ],
        )
    )


def _partitions(one: Mapping[str, Any]) -> str:
    if one["partitions"] is None:
        return "-"
    more = ", …" if one["partitions"] > len(one["first_partitions"]) else ""
    return f"{one['partitions']}: {', '.join(one['first_partitions'])}{more}"


def _print_hanging(
    hanging: Sequence[Mapping[str, Any]], stuck: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> None:
    from fencepost_proxy.transactions.watched import WHY  # noqa: PLC0415

    for each in hanging:
        last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each["last_timestamp_ms"] / 1000))
        print(f"{each['topic']}-{each['partition']}: hanging from offset {each['start_offset']}: {WHY[each['why']]}")
        print(f"  producer {each['producer_id']}, epoch {each['producer_epoch']}, last record at {last}, ", end="")
        print(f"transactional id {printable(each['transactional_id'] or 'unknown')}")
        print(f"  to abort it:  {each['to_end_it']}")
    for each in stuck:
        age = "" if each["age_seconds"] is None else f", open for {duration(each['age_seconds'])}"
        print(f"{printable(each['transactional_id'])}: {each['state']}{age}: {WHY[each['stuck']]}")
        print(f"  coordinator: broker {each['coordinator']}; partitions {_partitions(each)}")
    if not hanging and not stuck:
        print("no hanging transactions found")
    age = report["sweep_age_seconds"]
    observed = f"{report['partitions']} partitions read" + (
        ", sweep not complete" if age is None else f", sweep completed {duration(age)} ago"
    )
    if report["partitions_unreadable"]:
        observed += f"; {report['partitions_unreadable']} unreadable (no leader, or READ denied)"
    if report["partitions_left_out"]:
        observed += f"; {report['partitions_left_out']} skipped"
    print(f"\n{observed}; {report['lagging_partitions']} with committed readers lagging")


def _counts(states: Mapping[str, int]) -> str:
    return ", ".join(f"{state} {count}" for state, count in states.items() if count) or "none"
