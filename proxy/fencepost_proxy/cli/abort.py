"""`fencepost transactions abort`: end a transaction by its id, or a hanging one on one partition."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from fencepost_proxy.cli.options import partition
from fencepost_proxy.cli.status_client import CannotQuery
from fencepost_proxy.cli.tables import printable, utc
from fencepost_proxy.errors import ConfigError, Error, error_name
from fencepost_proxy.types import NodeId, ProducerId, TopicPartition

if TYPE_CHECKING:
    from fencepost_proxy.cluster.client import KafkaClient
    from fencepost_proxy.cluster.watching import Queries
    from fencepost_proxy.transactions.watched import OpenInLog, PartitionProbe

_REFUSED: Final = 1
_BY_PRODUCER: Final = ("producer_id", "producer_epoch", "coordinator_epoch")

_BEFORE: Final = """\
Before you abort:
  - Read the transaction's records if they matter. Kafka has acknowledged them, and committed readers will skip them.
  - Check whether the application has sent them again in another transaction.
  - Check whether the transaction committed (docs/stuck-transactions.md). Then write its records again."""
_RIGHTS: Final = "the principal needs ALTER on the cluster; before Kafka 3.8 CLUSTER_ACTION"
_REASONS: Final = {
    Error.NOT_LEADER_OR_FOLLOWER: "the leader has moved: run the command again",
    Error.TOPIC_AUTHORIZATION_FAILED: "clients cannot access this topic",
    Error.CLUSTER_AUTHORIZATION_FAILED: _RIGHTS,
    Error.INVALID_PRODUCER_EPOCH: "the producer has a newer epoch on this partition",
    Error.POLICY_VIOLATION: "the producer id is the proxy's own",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of abort")
    add = group.add_argument
    add("--topic", metavar="TOPIC")
    add("--partition", type=partition, metavar="N")
    add("--start-offset", type=partition, metavar="OFFSET", help="the transaction's first offset in the partition")
    add("--producer-id", type=partition, metavar="N", help="name the transaction by its producer instead, with "
        "--producer-epoch and --coordinator-epoch")  # fmt: skip
    add("--producer-epoch", type=partition, metavar="N")
    add("--coordinator-epoch", type=partition, metavar="N")
    add("--dry-run", action="store_true", help="show the transaction, and write nothing")
    add("--yes", action="store_true", help="skip the confirmation")


def require(args: argparse.Namespace) -> None:
    """Raises ConfigError unless the options name one transaction, or if they are those of another command."""
    given = [name for name in _BY_PRODUCER if getattr(args, name) is not None]
    of_partition = args.topic or args.partition is not None or args.start_offset is not None or given
    if args.what != "abort":
        if of_partition:
            raise ConfigError("--topic, --partition and what names a transaction are options of abort")
        return
    if args.json:
        raise ConfigError("abort has no --json")
    if args.id is not None:
        if of_partition:
            raise ConfigError("abort ID ends the transaction on all partitions: leave out --topic and the like")
        return
    if args.topic is None or args.partition is None:
        raise ConfigError("abort needs --topic and --partition")
    if (args.start_offset is None) != (len(given) == len(_BY_PRODUCER)) or (given and args.start_offset is not None):
        raise ConfigError("abort needs --start-offset, or --producer-id, --producer-epoch and --coordinator-epoch")


async def abort_by_id(args: argparse.Namespace, control: KafkaClient) -> int:
    """Its coordinator ends it, so nothing is checked that `abort` checks."""
    from fencepost_proxy.cluster.transactions import Transactions  # noqa: PLC0415 - keeps `--help` fast
    from fencepost_proxy.transactions.watched import ONGOING  # noqa: PLC0415

    transactions = Transactions(control)
    found = await transactions.describe(args.id, timeout_seconds=args.timeout)
    if found is None or found.state != ONGOING:
        _complain(
            f"{printable(args.id)} has no open transaction (its state: {'unknown' if found is None else found.state})"
        )
        return _REFUSED
    print(f"{printable(args.id)}: transaction of producer {found.producer_id}, epoch {found.producer_epoch}")
    print(f"  since {utc(found.started_at_ms)}, on {printable(', '.join(map(str, sorted(found.partitions))))}")
    print("Its producer is fenced: if it still runs, it fails.")
    if args.dry_run:
        print("nothing changed (--dry-run)")
        return 0
    if not args.yes and not _confirmed():
        print("nothing changed")
        return _REFUSED
    await transactions.fence(found, timeout_seconds=args.timeout)
    print("aborted")
    return 0


async def abort(args: argparse.Namespace, control: KafkaClient) -> int:
    from fencepost_proxy.cluster.broker import OutcomeUnknown  # noqa: PLC0415 - keeps `--help` fast
    from fencepost_proxy.cluster.transactions import write_abort_marker  # noqa: PLC0415
    from fencepost_proxy.cluster.watching import Queries  # noqa: PLC0415

    queries, tp = Queries(control), TopicPartition(args.topic, args.partition)
    leader = await _leader(control, tp)
    probe = await _probe(queries, leader, tp)
    opened = _named(args, probe)
    print(f"{printable(str(tp))}: transaction of producer {opened.producer_id}, epoch {opened.producer_epoch}")
    print(f"  from offset {opened.start_offset}, last record at {utc(opened.last_timestamp_ms)}")
    print(f"  last stable offset {probe.last_stable_offset}, high watermark {probe.high_watermark}")
    if await _is_known(queries, sorted(control.brokers), opened.producer_id, tp):
        _complain("its coordinator will end it on all its partitions (if it does not: docs/stuck-transactions.md)")
        return _REFUSED
    print(_BEFORE)
    if args.dry_run:
        print("nothing written (--dry-run)")
        return 0
    if not args.yes and not _confirmed():
        print("nothing written")
        return _REFUSED
    opened = _named(args, await _probe(queries, leader, tp))  # still: no coordinator has ended it meanwhile
    try:
        error = await write_abort_marker(control, leader, tp, opened, timeout_seconds=args.timeout)
    except OutcomeUnknown as failure:
        raise CannotQuery(
            f"the marker may be written: {failure} (run it with --dry-run before you repeat it)"
        ) from None
    if error:
        _complain(f"Kafka returned {error_name(error)}" + (f": {_REASONS[Error(error)]}" if error in _REASONS else ""))
        return _REFUSED
    print(f"aborted; last stable offset {(await _probe(queries, leader, tp)).last_stable_offset}")
    return 0


async def _leader(control: KafkaClient, tp: TopicPartition) -> NodeId:
    await control.refresh_metadata([tp.topic])
    leader = control.leader(tp)
    if leader is None:
        raise ConfigError(f"{tp} not found, or it has no leader, or DESCRIBE on it is denied")
    return leader.node_id


async def _probe(queries: Queries, leader: NodeId, tp: TopicPartition) -> PartitionProbe:
    from fencepost_proxy.transactions.watched import PartitionProbe, ProbePartitions  # noqa: PLC0415

    found = (await queries.query(ProbePartitions(leader, (tp,)))).found.get(tp)  # type: ignore[union-attr]
    if not isinstance(found, PartitionProbe):
        answer = "nothing" if found is None else error_name(found)
        raise ConfigError(f"cannot read {tp}: Kafka returned {answer} (the principal needs READ on the topic)")
    return found


def _named(args: argparse.Namespace, probe: PartitionProbe) -> OpenInLog:
    """The open transaction that the options name. Raises ConfigError if there is none."""
    from fencepost_proxy.transactions.watched import OpenInLog  # noqa: PLC0415

    for each in probe.open:
        if args.start_offset is not None and each.start_offset == args.start_offset:
            return each
        if args.producer_id is not None and each.producer_id == args.producer_id:
            return OpenInLog(
                ProducerId(args.producer_id),
                args.producer_epoch,
                args.coordinator_epoch,
                each.start_offset,
                each.last_timestamp_ms,
            )
    opened = ", ".join(f"producer {each.producer_id} from offset {each.start_offset}" for each in probe.open)
    raise ConfigError(f"no such open transaction on {args.topic}-{args.partition} (open: {opened or 'none'})")


async def _is_known(queries: Queries, brokers: list[NodeId], producer_id: ProducerId, tp: TopicPartition) -> bool:
    """Whether a coordinator has the partition in an open transaction of the producer. Prints what coordinators know.

    Queries every broker: one that is cut off may take itself for the coordinator, with old state.
    """
    from fencepost_proxy.cluster.broker import UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.transactions.watched import (  # noqa: PLC0415
        OPEN_STATES,
        DescribeTransactions,
        ListTransactions,
    )

    silent, listed_open = [], []
    for node_id in brokers:
        try:
            listed = (await queries.list_transactions(ListTransactions(node_id, (), (producer_id,)))).transactions
            ids = tuple(each.transactional_id for each in listed)
            known = (
                (await queries.describe_transactions(DescribeTransactions(node_id, ids))).transactions if ids else ()
            )
        except UpstreamUnavailable as error:
            silent.append(f"broker {node_id}: {error}")
            continue
        for each in known:
            print(f"  coordinator, broker {node_id}: {printable(each.transactional_id)} is {each.state}", end="")
            is_open = each.state in OPEN_STATES and tp in each.partitions
            print(" here" if is_open else ", and does not include this partition")
            listed_open.append(is_open)
    if not listed_open:
        print("  no coordinator lists its producer: its transactional id expired, or DESCRIBE on it is denied")
    for failure in silent:
        print(f"  unknown: {failure}")
    return any(listed_open)


def _complain(reason: str) -> None:
    print(f"fencepost: not aborted: {reason}", file=sys.stderr)


def _confirmed() -> bool:
    try:
        return input("Abort it? (yes) ").strip() == "yes"
    except EOFError:
        print()
        return False
