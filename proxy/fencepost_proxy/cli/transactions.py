"""`fencepost transactions`: open and hanging transactions of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fencepost_proxy import logs
from fencepost_proxy.cli import abort
from fencepost_proxy.cli.options import Subparsers, add_command, add_source, require_source
from fencepost_proxy.cli.status_client import CannotQuery, status_page
from fencepost_proxy.cli.tables import Columns, duration, printable, table, table_of, utc
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.config.reading import read
from fencepost_proxy.errors import ConfigError, error_name
from fencepost_proxy.types import NodeId, TopicPartition

if TYPE_CHECKING:
    from fencepost_proxy.cluster.client import KafkaClient
    from fencepost_proxy.cluster.watching import Queries
    from fencepost_proxy.transactions.watched import Described
    from fencepost_proxy.transactions.watching import TransactionMonitor

_FOUND, _UNKNOWN = 1, 2
_NOT_COORDINATOR: Final = 16
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
(--status).

`abort ID` lets the coordinator end an open transaction. `abort` with --topic ends a hanging one, which no coordinator
knows, on one partition, like kafka-transactions.sh abort (KIP-664). It refuses a
transaction that a coordinator still has open there. The principal needs ALTER on the cluster (before Kafka 3.8
CLUSTER_ACTION), READ on the topic, and DESCRIBE on the transactional id. Kafka and the proxy both accept it; on a
checked topic, the proxy writes the marker while no conditional append is in progress."""

_EXAMPLES: Final = """\
examples:
  fencepost transactions --bootstrap-server localhost:19092
      list open transactions and count transactional ids by state

  fencepost transactions describe payments-7 --bootstrap-server kafka-1:9092
      show state, producer and partitions of one transactional id

  fencepost transactions hanging --bootstrap-server kafka-1:9092
      read every partition, and print the command that aborts each hanging transaction

  fencepost transactions abort payments-7 --bootstrap-server kafka-1:9092
      abort the open transaction of payments-7 on all partitions, and fence its producer

  fencepost transactions abort --topic orders --partition 0 --start-offset 3 --dry-run
      show the transaction that begins at offset 3, and what to check before it is aborted

  fencepost transactions --bootstrap-server kafka-1:9093 --config fencepost.toml
      connect with the TLS and SASL settings of a proxy's config file

  fencepost transactions --bootstrap-server kafka-1:9093 --command-config client.properties
      connect with the TLS and SASL settings of a Java client

  fencepost transactions hanging --status 127.0.0.1:8080 --json
      print what the proxy has found as JSON

exit code: 0; `hanging`: 1 if a transaction hangs, 2 if none was found but not everything could be read; `abort`: 1 if
nothing was written.
ACLs: DESCRIBE on transactional ids; for `abort ID` WRITE on it; for `hanging` also DESCRIBE and READ on topics.
Without DESCRIBE on its id, an open transaction is reported as hanging. docs/stuck-transactions.md describes what to do.
"""


def add_parser(subparsers: Subparsers) -> None:
    summary = "list open transactions, find and abort hanging ones"
    parser = add_command(subparsers, "transactions", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add = parser.add_argument
    add("what", nargs="?", choices=("list", "describe", "hanging", "abort"), default="list", help="default: list")
    add("id", nargs="?", metavar="ID", help="transactional id (describe, abort)")
    add_source(parser, "brokers or a proxy")
    add("--config", type=Path, metavar="FILE.toml", help="with --bootstrap-server: take TLS and SASL from a proxy's "
        "config file (upstream_tls, control_sasl)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    add("--partitions-per-second", type=float, default=_PARTITIONS_PER_SECOND, metavar="N",
        help=f"hanging only: read rate (default {_PARTITIONS_PER_SECOND:g})")  # fmt: skip
    abort.add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.what != "abort" and (args.what == "describe") != (args.id is not None):
        raise ConfigError(
            "describe needs an ID: fencepost transactions describe ID" if args.id is None else f"unexpected {args.id!r}"
        )
    if not args.partitions_per_second > 0:
        raise ConfigError("--partitions-per-second must be above 0")
    abort.require(args)
    require_source(args)
    if args.what == "abort" and args.status is not None:
        raise ConfigError("abort needs --bootstrap-server HOST:PORT (brokers or a proxy)")
    if args.status is not None:
        return _of_status(args)
    logs.setup("error", "console")
    given = {"upstream": args.bootstrap}
    config = read(args.config, given, environment=os.environ, command_config=args.command_config).config
    return asyncio.run(_of_kafka(args, config))


# --- from a status page ---------------------------------------------------------------------------------------------


def _of_status(args: argparse.Namespace) -> int:
    found = status_page(args.status)
    report = found["transactions"]
    if report is None:
        raise ConfigError(f"the proxy at {args.status} does not watch transactions (set watch_transactions)")
    if args.what != "describe":
        return _report(args, report, f"{found['bootstrap'] or 'HOST:PORT'}")
    one = next((each for each in report["open"] if each["transactional_id"] == args.id), None)
    if one is None:
        raise ConfigError(
            f"no open transaction of {args.id} on the status page (query brokers: --bootstrap-server HOST:PORT)"
        )
    if args.json:
        hanging = [each for each in report["hanging"] if each["transactional_id"] == args.id]
        print(json.dumps({**one, "hanging": hanging}, indent=2))
    else:
        print(table(("", ""), [(key.replace("_", " "), value) for key, value in one.items()]).lstrip())
    return 0


# --- from brokers ---------------------------------------------------------------------------------------------------


async def _of_kafka(args: argparse.Namespace, config: ProxyConfig) -> int:
    from fencepost_proxy.cli.connecting import reason_of  # noqa: PLC0415 - keeps `--help` fast
    from fencepost_proxy.cluster.broker import Access, UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.cluster.client import KafkaClient  # noqa: PLC0415
    from fencepost_proxy.transport.certificates import Certificates  # noqa: PLC0415

    certificates = Certificates(None, config.upstream_tls)
    access = Access(lambda: certificates.upstream, config.control_sasl)
    limits = Limits(connect_timeout_seconds=args.timeout, request_timeout_seconds=args.timeout)
    control = KafkaClient(config.upstream, limits, access=access)
    try:
        try:
            await control.start(timeout_seconds=0.0)  # each server once
        except UpstreamUnavailable as error:
            raise CannotQuery(f"cannot connect to {reason_of(error)}") from None
        if args.what == "describe":
            return await _describe(args, control)
        if args.what == "abort":
            return await (abort.abort if args.id is None else abort.abort_by_id)(args, control)
        report = await _probe(args, control)
    finally:
        await control.close()
    login = f" --command-config {args.command_config}" if args.command_config else ""
    return _report(args, report, args.bootstrap + login)


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
    from fencepost_proxy.cluster.watching import Queries  # noqa: PLC0415
    from fencepost_proxy.transactions.watched import OPEN_STATES  # noqa: PLC0415

    queries = Queries(control)
    found, coordinator = await _found(queries, sorted(control.brokers), args.id)
    partitions = await _probed(queries, control.brokers, found)
    # The coordinator reports the start time of the last transaction even after its end.
    age = (time.time() * 1000 - found.started_at_ms) / 1000 if found.state in OPEN_STATES else None
    if args.json:
        fields: dict[str, Any] = {key: value for key, value in asdict(found).items() if key != "partitions"}
        fields |= {"coordinator": coordinator, "age_seconds": age, "partitions": partitions}
        print(json.dumps(fields, indent=2))
        return 0
    print(f"transactional id   {printable(found.transactional_id)}")
    print(f"state              {found.state}")
    print(f"coordinator        broker {coordinator}")
    print(f"producer           {found.producer_id}, epoch {found.producer_epoch}")
    print(f"timeout            {duration(found.timeout_ms / 1000)}")
    print(f"open for           {'-' if age is None else duration(age)}")
    if partitions:
        partitions.sort(key=lambda each: (each["topic"], each["partition"]))
        print(f"\n{table_of(_PARTITION_COLUMNS, partitions)}")
    return 0


async def _found(queries: Queries, brokers: Sequence[NodeId], transactional_id: str) -> tuple[Described, NodeId]:
    """The transaction and its coordinator. Raises ConfigError if there is none."""
    from fencepost_proxy.cluster.broker import UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.transactions.watched import DescribeTransactions  # noqa: PLC0415

    silent = None
    for node_id in brokers:
        try:
            described = await queries.describe_transactions(DescribeTransactions(node_id, (transactional_id,)))
        except UpstreamUnavailable as error:
            if error.error_code is None:
                silent = error  # another broker may be the coordinator
            elif error.error_code != _NOT_COORDINATOR:
                raise
            continue
        if described.transactions:
            return described.transactions[0], node_id
        silent = None
        break
    if silent is not None:
        raise silent
    raise ConfigError(f"transactional id {transactional_id} not found, or DESCRIBE on it is denied")


async def _probed(queries: Queries, brokers: Iterable[NodeId], found: Described) -> list[dict[str, Any]]:
    """The transaction's partitions, as their leaders see them."""
    from fencepost_proxy.cluster.broker import UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.transactions.watched import FindLeaders, PartitionProbe, ProbePartitions  # noqa: PLC0415

    leaders = await queries.query(FindLeaders())
    led_here = {node_id: each for node_id, each in leaders.by_node.items() if node_id in brokers}  # type: ignore[union-attr]
    # Partitions without a leader: no marker can be written.
    partitions = [_entry(each, None) for each in found.partitions.difference(*led_here.values())]
    for node_id, led in led_here.items():
        here = tuple(each for each in led if each in found.partitions)
        if not here:
            continue
        try:
            probes = await queries.query(ProbePartitions(node_id, here))
        except UpstreamUnavailable as error:
            partitions += [_entry(each, node_id, problem=str(error)) for each in here]
            continue
        for partition, probe in probes.found.items():  # type: ignore[union-attr]
            if not isinstance(probe, PartitionProbe):
                partitions.append(_entry(partition, node_id, error_code=probe))
                continue
            offsets = {"last_stable_offset": probe.last_stable_offset, "high_watermark": probe.high_watermark}
            mine = [each.start_offset for each in probe.open if each.producer_id == found.producer_id]
            partitions.append(_entry(partition, node_id, start_offset=mine[0] if mine else None, **offsets))
    return partitions


def _entry(partition: TopicPartition, leader: NodeId | None, **more: object) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition, "leader": leader, **more}


def _stable(entry: Mapping[str, Any]) -> object:
    if "problem" in entry:
        return "no response"
    return error_name(entry["error_code"]) if "error_code" in entry else entry.get("last_stable_offset")


_PARTITION_COLUMNS: Final[Columns] = {
    "PARTITION": lambda each: f"{each['topic']}-{each['partition']}",
    "LEADER": lambda each: "none" if each["leader"] is None else each["leader"],
    "FROM OFFSET": lambda each: "nothing written" if each.get("start_offset", 0) is None else each.get("start_offset"),
    "LSO": _stable,
    "HIGH WATERMARK": "high_watermark",
}


# --- output ---------------------------------------------------------------------------------------------------------


def _report(args: argparse.Namespace, report: Mapping[str, Any], connect: str) -> int:
    from fencepost_proxy.services.watching import abort_command  # noqa: PLC0415

    hanging = list(report["hanging"])
    for each in hanging:
        each["to_end_it"] = abort_command(connect, each["topic"], each["partition"], each["start_offset"])
    stuck = [each for each in report["open"] if each["stuck"] is not None]
    incomplete = report["problem"] is not None or report["partitions_unreadable"] or report["partitions_left_out"]
    code = 0
    if args.what == "hanging":
        code = _FOUND if hanging or stuck else _UNKNOWN if incomplete or report["sweep_seconds"] is None else 0
    if args.json:
        print(json.dumps(report, indent=2))
        return code
    if args.what == "list":
        print(table_of(_OPEN_COLUMNS, report["open"]) if report["open"] else "no open transactions")
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


def _partitions(one: Mapping[str, Any]) -> str:
    if one["partitions"] is None:
        return "-"
    more = ", …" if one["partitions"] > len(one["first_partitions"]) else ""
    return f"{one['partitions']}: {', '.join(one['first_partitions'])}{more}"


_OPEN_COLUMNS: Final[Columns] = {
    "TRANSACTIONAL ID": "transactional_id",
    "STATE": "state",
    "AGE": lambda each: None if each["age_seconds"] is None else duration(each["age_seconds"]),
    "TIMEOUT": lambda each: None if each["timeout_ms"] is None else duration(each["timeout_ms"] / 1000),
    "PRODUCER": lambda each: (
        f"{each['producer_id']}/{'?' if each['producer_epoch'] is None else each['producer_epoch']}"
    ),
    "COORDINATOR": "coordinator",
    "PARTITIONS": _partitions,
}


def _print_hanging(
    hanging: Sequence[Mapping[str, Any]], stuck: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> None:
    from fencepost_proxy.transactions.watched import WHY  # noqa: PLC0415

    for each in hanging:
        last = utc(each["last_timestamp_ms"])
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
