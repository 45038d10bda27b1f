#!/usr/bin/env python3
"""A topic, through a query, into a topic, exactly once: Spark's Kafka source, and the sink of Fencepost.

    spark-submit --packages … stream.py --bootstrap PROXY:9092 --from orders --to invoices --checkpoint DIR \\
        --sink-id invoices --sql "SELECT key, upper(CAST(value AS STRING)) AS value FROM source"

Spark's own Kafka sink writes at least once: a micro-batch that failed half way, or whose commit was lost, is written
again. With `--sink-id`, rows are written by `format("fencepost")`, which finds in the log what is there already.
Without it, Spark's own sink writes.

A source topic that grows in order (`ordered.partition.expansion=true`) is read in order: Spark assigns partitions by
hand and reads all of a micro-batch's at once, so a new partition joins the query only when the micro-batches that
hold the rest of the earlier ones are finished.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from fencepost.spark import register, said
from fencepost.spark.errors import SinkError
from fencepost.spark.jobs import add_client_arguments, client_settings, named_value

ORDERED_CONFIG = "ordered.partition.expansion"
EXPANSIONS_CONFIG = "ordered.partition.expansions"
#: How often a query that runs is looked at: has the topic grown, may another partition be read?
LOOK_SECONDS = 2.0
#: For how long a micro-batch is waited for before it is interrupted (and done again, with the partitions that it had).
INTERRUPT_SECONDS = 60.0


class Growth(NamedTuple):
    """A topic's partitions, and its expansions as `ordered.partition.expansions` tells them."""

    count: int
    expansions: list[dict[str, Any]]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stream.py",
        description="A topic, through a query, into a topic. Exactly once with --sink-id; without, at least once, "
        "by Spark's own Kafka sink.",
    )
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT", help="the proxy")
    parser.add_argument("--from", required=True, dest="source", metavar="TOPIC")
    parser.add_argument("--to", required=True, dest="target", metavar="TOPIC")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="where Spark keeps its place")
    parser.add_argument(
        "--sql",
        default="SELECT key, value FROM source",
        help="from the view `source` (key, value, topic, partition, offset, timestamp, headers) to key, value and, "
        "where wanted, partition and headers (default: %(default)s)",
    )
    parser.add_argument(
        "--sink-id",
        metavar="NAME",
        help="names this stream in the target topic, for ever: exactly once. One name per query and topic",
    )
    parser.add_argument(
        "--starting",
        choices=["earliest", "latest"],
        default="earliest",
        help="where a new checkpoint begins (default: earliest)",
    )
    trigger = parser.add_mutually_exclusive_group()
    trigger.add_argument("--once", action="store_true", help="all that is there, then end")
    trigger.add_argument("--every", type=float, metavar="SECONDS", help="a micro-batch that often (default: at once)")
    add_client_arguments(parser)
    parser.add_argument(
        "--producer-option",
        type=named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a client setting for the sink only; repeatable",
    )
    parser.add_argument(
        "--sink-option",
        type=named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the sink itself, such as patience.seconds=300; repeatable",
    )
    return parser


def read(spark: SparkSession, args: argparse.Namespace, partitions: list[int] | None = None) -> DataFrame:
    """The source topic as a stream, with the columns that Spark documents and `headers`; all of it, those partitions
    that come included, or `partitions` of it."""
    reader = (
        spark.readStream.format("kafka")
        .options(**client_settings(args))
        .option(
            *(("subscribe", args.source) if partitions is None else ("assign", json.dumps({args.source: partitions})))
        )
        .option("startingOffsets", args.starting)
        .option("includeHeaders", "true")
    )
    return reader.load()


def write(rows: DataFrame, args: argparse.Namespace) -> DataStreamWriter:
    """The sink, not started yet."""
    options = client_settings(args) | {f"kafka.{name}": value for name, value in args.producer_option}
    if args.sink_id:
        register(rows.sparkSession)
        options |= {"sink.id": args.sink_id, **dict(args.sink_option)}
    writer = (
        rows.writeStream.format("fencepost" if args.sink_id else "kafka")
        .options(**options)
        .option("topic", args.target)
        .option("checkpointLocation", args.checkpoint)
    )
    if args.once:
        writer = writer.trigger(availableNow=True)
    elif args.every is not None:
        writer = writer.trigger(processingTime=f"{args.every} seconds")
    return writer


def _admin(spark: SparkSession, args: argparse.Namespace) -> Any:
    """The connector's own Kafka client."""
    jvm: Any = spark.sparkContext._jvm
    settings = jvm.java.util.HashMap()
    for name, value in client_settings(args).items():
        settings.put(name.removeprefix("kafka."), value)
    return jvm.org.apache.kafka.clients.admin.Admin.create(settings)


def _configs(spark: SparkSession, admin: Any, topic: str) -> Any:
    """name → value of a topic's configs; None for one that it does not have."""
    jvm: Any = spark.sparkContext._jvm
    resource = jvm.org.apache.kafka.common.config.ConfigResource
    named = resource(getattr(resource, "Type").TOPIC, topic)  # noqa: B009 - Java's Type, not an attribute
    found = admin.describeConfigs([named]).all().get().get(named)

    def value(name: str) -> str | None:
        entry = found.get(name)
        return None if entry is None else str(entry.value())

    return value


def _count(admin: Any, topic: str) -> int:
    return int(admin.describeTopics([topic]).allTopicNames().get().get(topic).partitions().size())


def growth(spark: SparkSession, args: argparse.Namespace) -> Growth | None:
    """How the source topic has grown; None where it does not grow in order."""
    with closing(_admin(spark, args)) as admin:
        # In this sequence: a growth is described before its partitions are there, so all that are seen are explained.
        count = _count(admin, args.source)
        value = _configs(spark, admin, args.source)
        if value(ORDERED_CONFIG) not in ("true", "any") or value(EXPANSIONS_CONFIG) is None:
            return None
        return Growth(count, json.loads(value(EXPANSIONS_CONFIG)))


def finished(spark: SparkSession, args: argparse.Namespace) -> dict[int, int]:
    """Partition → where the last finished micro-batch ended, as the checkpoint has it; empty for a new one."""
    jvm: Any = spark.sparkContext._jvm
    path = jvm.org.apache.hadoop.fs.Path
    commits = path(f"{args.checkpoint}/commits")
    files = commits.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())  # type: ignore[attr-defined]
    if not files.exists(commits):
        return {}
    names = [status.getPath().getName() for status in files.listStatus(commits)]
    batches = [int(name) for name in names if name.isdigit()]
    if not batches:
        return {}
    opened = files.open(path(f"{args.checkpoint}/offsets/{max(batches)}"))
    try:
        text = str(jvm.org.apache.commons.io.IOUtils.toString(opened, "UTF-8"))
    finally:
        opened.close()
    # A version, the batch's metadata, then a line per source: there is one.
    offsets = json.loads(text.splitlines()[2])
    return {int(partition): offset for partition, offset in offsets.get(args.source, {}).items()}


def readable(grown: Growth, positions: dict[int, int], *, latest: bool) -> list[int]:
    """The partitions that a query may read now, given where its last micro-batch ended.

    A new one when every partition that was there before has been read up to where it ended then (KIP-253). One that the
    checkpoint has, has been opened; a new query that starts at the latest offsets reads nothing from before any growth.
    """
    known = max((each["to"] for each in grown.expansions), default=grown.count)
    if latest and not positions:
        return list(range(min(grown.count, known)))

    def may(partition: int) -> bool:
        brought = next((each for each in grown.expansions if each["from"] <= partition < each["to"]), None)
        if partition in positions or brought is None:
            return partition in positions or partition < known
        if brought.get("unordered"):
            return True
        thresholds = brought.get("thresholds")
        return bool(thresholds) and all(t == 0 or positions.get(q, 0) >= t for q, t in enumerate(thresholds))

    return [partition for partition in range(grown.count) if may(partition)]


def start(spark: SparkSession, args: argparse.Namespace, partitions: list[int] | None = None) -> StreamingQuery:
    rows = read(spark, args, partitions)
    if args.sink_id:
        rows = one_task_each(rows, partition_count(spark, args))
    rows.createOrReplaceTempView("source")
    return write(spark.sql(args.sql), args).start()


def one_task_each(rows: DataFrame, partitions: int) -> DataFrame:
    """A partition of the source is the task of its number, in its order.

    Spark's source has a task for each partition, too, but numbers them in the order in which it has come to know them:
    up to four may have other numbers when a micro-batch is done again from the checkpoint. The sink finds what a task
    has written by its number.
    """
    return rows.repartitionById(partitions, rows["partition"])


def partition_count(spark: SparkSession, args: argparse.Namespace) -> int:
    """Of the source topic."""
    with closing(_admin(spark, args)) as admin:
        return _count(admin, args.source)


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Until the query ends. Raises PySparkException: StreamingQueryException where the query fails."""
    while True:
        grown = growth(spark, args)
        if grown is None:
            start(spark, args).awaitTermination()
            return
        partitions = readable(grown, finished(spark, args), latest=args.starting == "latest")
        query = start(spark, args, partitions)
        ended = False
        while not ended and _may_read(spark, args) == partitions:
            ended = bool(query.awaitTermination(LOOK_SECONDS))
        if not ended:
            _stop(query)
        elif _may_read(spark, args) == partitions:
            return


def _may_read(spark: SparkSession, args: argparse.Namespace) -> list[int]:
    grown = growth(spark, args)
    assert grown is not None, f"topic {args.source!r} no longer grows in order: {ORDERED_CONFIG} was switched off"
    return readable(grown, finished(spark, args), latest=args.starting == "latest")


def _stop(query: StreamingQuery) -> None:
    """Between two micro-batches where possible: one that is interrupted is written again."""
    deadline = time.monotonic() + INTERRUPT_SECONDS
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    query.stop()


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.sink_option and not args.sink_id:
        parser.error("--sink-option is for the sink that --sink-id chooses")
    spark = SparkSession.builder.appName(f"stream {args.source} to {args.target}").getOrCreate()
    try:
        run(spark, args)
    except (SinkError, PySparkException) as error:
        words = None if isinstance(error, SinkError) else said(error)
        print(f"stream: {words or error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
