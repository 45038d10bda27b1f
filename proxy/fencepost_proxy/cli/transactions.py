"""`fencepost transactions`: which are open, whose they are, and which will never end."""

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
from fencepost_proxy.cli.asking import STATUS_HELP, address, status_page
from fencepost_proxy.cli.tables import duration, printable, table
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.config.reading import load
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address, TopicPartition

if TYPE_CHECKING:
    from fencepost_proxy.net.control import ControlClient
    from fencepost_proxy.transactions.watching import Watching

_FOUND, _UNKNOWN = 1, 2
_NOT_COORDINATOR: Final = 16
_CONNECT_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.1
_LIST_SECONDS: Final = 30.0
#: For the last suspects, once all partitions were looked at.
_DECIDE_SECONDS: Final = 60.0
_PARTITIONS_PER_SECOND: Final = 2_000.0
_SHOWN_MAX: Final = 1_000_000

_DESCRIPTION: Final = """\
Shows the transactions of a Kafka cluster: the open ones with their age and owner, one of them in full, or those that
hang: open in a partition's log while no coordinator knows of them, so that committed readers stand still for ever.

Ask brokers (--bootstrap: Kafka's or the proxy's address for clients), or a proxy that has looked already, by its status
page (--status)."""

_EXAMPLES: Final = """\
examples:
  fencepost transactions --bootstrap localhost:19092
      the open ones, and how many transactional ids there are

  fencepost transactions describe payments-7 --bootstrap kafka-1:9092
      state, producer, partitions, and where each of them stands

  fencepost transactions hanging --bootstrap kafka-1:9092
      looks at every partition, and says by which command each hanging transaction is ended

  fencepost transactions --bootstrap kafka-1:9093 --config fencepost.toml
      brokers that speak TLS or want a login: as the proxy with that file does it

  fencepost transactions hanging --status 127.0.0.1:8080 --json
      what that proxy has found, for programs

exit status: 0; of `hanging`: 1 if some hang, 2 if not everything could be looked at and none was found.
Rights: DESCRIBE on transactional ids; for `hanging` DESCRIBE and READ on topics. An open transaction whose id may not
be described is told to hang, as one that no coordinator lists. docs/stuck-transactions.md says what to do.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "transactions",
        help="transactions that are open, and those that hang",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("list", "describe", "hanging"), default="list", help="default: list")
    add("id", nargs="?", metavar="ID", help="of describe: the transactional id")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--bootstrap", metavar="HOST:PORT[,…]", help="brokers to ask, or the proxy as one")
    where.add_argument("--status", type=address, metavar="HOST:PORT", help=f"instead: {STATUS_HELP}")
    add("--config", type=Path, metavar="FILE.toml", help="with --bootstrap: TLS and login as in a proxy's file "
        "(upstream_tls, control_sasl)")  # fmt: skip
    add("--json", action="store_true", help="for programs: one JSON object on stdout")
    add("--partitions-per-second", type=float, default=_PARTITIONS_PER_SECOND, metavar="N",
        help=f"of hanging: how fast to look (default {_PARTITIONS_PER_SECOND:g})")  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if (args.what == "describe") != (args.id is not None):
        raise ConfigError(
            "write: fencepost transactions describe ID" if args.id is None else f"what is {args.id!r} for?"
        )
    if not args.partitions_per_second > 0:
        raise ConfigError("--partitions-per-second must be above 0")
    if args.status is not None:
        return _of_status(args)
    if args.bootstrap is None:
        raise ConfigError(
            "say whom to ask: --bootstrap HOST:PORT, brokers or a proxy; or --status HOST:PORT, a proxy's page"
        )
    logs.setup("error", "console")
    try:
        addresses = [Address.parse(each.strip()) for each in args.bootstrap.split(",") if each.strip()]
    except ValueError as error:
        raise ConfigError(f"--bootstrap: {error}") from error
    if not addresses:
        raise ConfigError("--bootstrap: no address is given")
    return asyncio.run(_of_kafka(args, addresses, _config(args)))


def _config(args: argparse.Namespace) -> ProxyConfig:
    return load(args.config, {"upstream": args.bootstrap}, environment=os.environ)


# --- asked of a proxy -----------------------------------------------------------------------------------------------


def _of_status(args: argparse.Namespace) -> int:
    found = status_page(args.status)
    report = found["transactions"]
    if report is None:
        raise ConfigError(f"the proxy at {args.status} does not look at transactions (watch_transactions)")
    if args.what != "describe":
        return _tell(args, report, f"{found['bootstrap'] or 'HOST:PORT'}")
    (*described,) = [each for each in report["open"] if each["transactional_id"] == args.id]
    if not described:
        raise ConfigError(f"that page names no open transaction of {args.id}; ask brokers: --bootstrap HOST:PORT")
    (one,) = described
    hanging = [each for each in report["hanging"] if each["transactional_id"] == args.id]
    if args.json:
        print(json.dumps({**one, "hanging": hanging}, indent=2))
        return 0
    print(table(("", ""), [(key.replace("_", " "), value) for key, value in one.items()]).lstrip())
    return 0


# --- asked of brokers -----------------------------------------------------------------------------------------------


async def _of_kafka(args: argparse.Namespace, addresses: Sequence[Address], config: ProxyConfig) -> int:
    from fencepost_proxy.net.broker import Access  # noqa: PLC0415 - `--help` need not load it
    from fencepost_proxy.net.certificates import Certificates  # noqa: PLC0415
    from fencepost_proxy.net.control import ControlClient  # noqa: PLC0415

    certificates = Certificates(None, config.upstream_tls)
    access = Access(lambda: certificates.upstream, config.control_sasl)
    control = ControlClient(addresses, Limits(), access=access)
    try:
        await control.start(timeout_seconds=_CONNECT_SECONDS)
        if args.what == "describe":
            return await _describe(args, control)
        report = await _look(args, control)
    finally:
        await control.close()
    return _tell(args, report, args.bootstrap)


async def _look(args: argparse.Namespace, control: ControlClient) -> dict[str, Any]:
    from fencepost_proxy.net.watching import TransactionWatch  # noqa: PLC0415
    from fencepost_proxy.transactions.watching import Pace  # noqa: PLC0415

    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    pace = Pace(args.partitions_per_second, round_seconds=1.0, sweep_seconds=86_400.0)
    watch = TransactionWatch(control, pace, spawn)
    done: Callable[[Watching], bool] = _listed if args.what == "list" else _decided
    deadline = time.monotonic() + _LIST_SECONDS
    while not done(watch.watching) and time.monotonic() < deadline:
        watch.ask()
        await asyncio.sleep(_TICK_SECONDS)
        if args.what == "hanging" and not watch.watching.sweeps:
            deadline = time.monotonic() + _DECIDE_SECONDS  # a sweep ends by itself: each question has a time limit
    report = asdict(watch.report(_SHOWN_MAX))
    if not done(watch.watching):
        report["problem"] = report["problem"] or "not everything was known in time"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return report


def _listed(watching: Watching) -> bool:
    return watching.rounds > 0 and watching.counted


def _decided(watching: Watching) -> bool:
    return watching.rounds > 1 and watching.sweeps > 0 and not watching.undecided


async def _describe(args: argparse.Namespace, control: ControlClient) -> int:
    from fencepost_proxy.net.control import UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.net.watching import Questions  # noqa: PLC0415
    from fencepost_proxy.transactions.watched import (  # noqa: PLC0415
        OPEN_STATES,
        DescribeTransactions,
        FindLeaders,
        Look,
        LookAt,
    )

    questions = Questions(control)
    found = coordinator = silent = None
    for node_id in sorted(control.brokers):
        try:
            described = await questions.describe_transactions(DescribeTransactions(node_id, (args.id,)))
        except UpstreamUnavailable as error:
            if error.error_code is None:
                silent = error  # another one may be the coordinator
            elif error.error_code != _NOT_COORDINATOR:
                raise
            continue
        found, coordinator = next(iter(described.transactions), None), node_id
        break
    if coordinator is None and silent is not None:
        raise silent
    if found is None:
        raise ConfigError(f"no coordinator knows the transactional id {args.id}, or you may not describe it")
    leaders = await questions.ask(FindLeaders())
    places: list[dict[str, Any]] = []
    led_here = {node_id: each for node_id, each in leaders.by_node.items() if node_id in control.brokers}  # type: ignore[union-attr]
    # Where nobody leads, no marker is written.
    places += [{**_name(each), "leader": None} for each in found.partitions.difference(*led_here.values())]
    for node_id, led in led_here.items():
        here = tuple(each for each in led if each in found.partitions)
        if not here:
            continue
        try:
            looks = await questions.ask(LookAt(node_id, here))
        except UpstreamUnavailable as error:
            places += [{**_name(each), "leader": node_id, "problem": str(error)} for each in here]
            continue
        for partition, look in looks.found.items():  # type: ignore[union-attr]
            place: dict[str, Any] = {**_name(partition), "leader": node_id}
            if isinstance(look, Look):
                mine = [each.start_offset for each in look.open if each.producer_id == found.producer_id]
                place |= {
                    "start_offset": mine[0] if mine else None,
                    "last_stable_offset": look.last_stable_offset,
                    "high_watermark": look.high_watermark,
                }
            else:
                place |= {"error_code": look}
            places.append(place)
    # The coordinator still tells when the last one began, once it is over.
    age = (time.time() * 1000 - found.started_at_ms) / 1000 if found.state in OPEN_STATES else None
    if args.json:
        fields: dict[str, Any] = {key: value for key, value in asdict(found).items() if key != "partitions"}
        print(json.dumps({**fields, "coordinator": coordinator, "age_seconds": age, "partitions": places}, indent=2))
        return 0
    print(f"transactional id   {printable(found.transactional_id)}")
    print(f"state              {found.state}")
    print(f"coordinator        broker {coordinator}")
    print(f"producer           {found.producer_id}, epoch {found.producer_epoch}")
    print(f"timeout            {duration(found.timeout_ms / 1000)}")
    print(f"open for           {'-' if age is None else duration(age)}")
    if places:
        print()
        print(
            table(
                ("PARTITION", "LEADER", "FROM OFFSET", "LSO", "HIGH WATERMARK"),
                [
                    (f"{each['topic']}-{each['partition']}", *_place(each))
                    for each in sorted(places, key=lambda each: (each["topic"], each["partition"]))
                ],
            )
        )
    return 0


def _name(partition: TopicPartition) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition}


def _place(place: Mapping[str, Any]) -> tuple[object, ...]:
    if place["leader"] is None:
        return "none", "-", "-", "-"
    if "problem" in place:
        return place["leader"], "-", "no answer", "-"
    if "error_code" in place:
        return place["leader"], "-", f"error {place['error_code']}", "-"
    start = place["start_offset"]
    return (
        place["leader"],
        "nothing written" if start is None else start,
        place["last_stable_offset"],
        place["high_watermark"],
    )


# --- what is printed ------------------------------------------------------------------------------------------------


def _tell(args: argparse.Namespace, report: Mapping[str, Any], bootstrap: str) -> int:
    from fencepost_proxy.net.watching import abort_command  # noqa: PLC0415

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
            print(f"and {report['open_transactions'] - len(report['open'])} more, which this page does not name")
        print(
            f"\n{report['open_transactions']} open; transactional ids by state: {_counts(report['transactional_ids'])}"
        )
    else:
        _print_hanging(hanging, stuck, report)
    if report["problem"] is not None:
        print(f"fencepost: not everything is known: {report['problem']}", file=sys.stderr)
    return code


def _print_open(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        print("no transaction is open")
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
        print(f"{each['topic']}-{each['partition']}: hangs from offset {each['start_offset']} on: {WHY[each['why']]}")
        print(f"  producer {each['producer_id']}, epoch {each['producer_epoch']}, last record of {last}, ", end="")
        print(f"transactional id {printable(each['transactional_id'] or 'unknown')}")
        print(f"  to end it:  {each['to_end_it']}")
    for each in stuck:
        age = "" if each["age_seconds"] is None else f", open for {duration(each['age_seconds'])}"
        print(f"{printable(each['transactional_id'])}: {each['state']}{age}: {WHY[each['stuck']]}")
        print(f"  coordinator: broker {each['coordinator']}; partitions {_partitions(each)}")
    if not hanging and not stuck:
        print("no transaction was found that hangs")
    age = report["sweep_age_seconds"]
    seen = f"{report['partitions']} partitions looked at" + (
        ", not all yet" if age is None else f", all of them {duration(age)} ago"
    )
    if report["partitions_unreadable"]:
        seen += f"; {report['partitions_unreadable']} could not be (no leader, or READ is missing)"
    if report["partitions_left_out"]:
        seen += f"; {report['partitions_left_out']} were left out"
    print(f"\n{seen}; {report['partitions_behind']} with committed readers behind")


def _counts(states: Mapping[str, int]) -> str:
    return ", ".join(f"{state} {count}" for state, count in states.items() if count) or "none"
