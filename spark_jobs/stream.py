#!/usr/bin/env python3
"""A topic, through a query, into a topic: Spark's own Kafka source and sink, with Fencepost between.

    spark-submit --packages … stream.py --bootstrap PROXY:9092 --from orders --to invoices --checkpoint DIR \\
        --sql "SELECT key, upper(CAST(value AS STRING)) AS value FROM source"

Spark's Kafka sink writes at least once: a micro-batch that failed half way, or whose commit was lost, is written again.
Where a row knows the offset that it must get, the proxy makes that exactly once: name the columns that hold it,

    --sql "SELECT *, offset AS expected, concat('mirror/', partition, '/', offset) AS id FROM source"
    --expected-offset expected --write-id id

and a row that is written again is recognised by its id and not appended again; one that finds another record in its
place fails the query. See README.md beside this file for what that asks of a query, and for what it cannot do.

A source topic that grows in order (`ordered.partition.expansion=true`) is read in order: Spark assigns partitions by
hand and reads all of a micro-batch's at once, so a new partition joins the query only when the micro-batches that
hold the rest of the earlier ones are finished.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import pyspark.sql.functions as sf
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Headers of the proxy's contract.
EXPECTED_OFFSET = "expected-offset"
WRITE_ID = "write-id"
CHECK_CONFIG = "check.expected.offsets"
ORDERED_CONFIG = "ordered.partition.expansion"
EXPANSIONS_CONFIG = "ordered.partition.expansions"
#: How often a query that runs is looked at: has the topic grown, may another partition be read?
LOOK_SECONDS = 2.0
#: For how long a micro-batch is waited for before it is interrupted (and done again, with the partitions that it had).
INTERRUPT_SECONDS = 60.0

#: Of the sink, where rows carry expectations. Each record is its own batch: a batch is refused or recognised as a
#: whole, and when a micro-batch is written again, its rows are not batched as they were the first time.
CONDITIONAL_PRODUCER = {"batch.size": "0"}


class CheckIsOff(Exception):
    """Nothing would look at the expectations that were asked for."""


class Growth(NamedTuple):
    """A topic's partitions, and its expansions as `ordered.partition.expansions` tells them."""

    count: int
    expansions: list[dict[str, Any]]


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stream.py",
        description="A topic, through a query, into a topic, with Spark's own Kafka source and sink. At least once; "
        "exactly once where each row carries the offset that it must get, and an id.",
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
        "--expected-offset", metavar="COLUMN", help="a column of the query: the offset that the row must get"
    )
    parser.add_argument("--write-id", metavar="COLUMN", help="a column of the query: names the row's write, for ever")
    parser.add_argument("--starting", choices=["earliest", "latest"], default="earliest", help="of a new checkpoint")
    trigger = parser.add_mutually_exclusive_group()
    trigger.add_argument("--once", action="store_true", help="all that is there, then end")
    trigger.add_argument("--every", type=float, metavar="SECONDS", help="a micro-batch that often (default: at once)")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Kafka client setting for both sides, such as security.protocol=SASL_SSL; repeatable",
    )
    parser.add_argument(
        "--producer-option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="for the sink only"
    )
    return parser


def read(spark: SparkSession, args: argparse.Namespace, partitions: list[int] | None = None) -> DataFrame:
    """The source topic as a stream, with the columns that Spark documents and `headers`; all of it, those partitions
    that come included, or `partitions` of it."""
    reader = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", args.bootstrap)
        .option(
            *(("subscribe", args.source) if partitions is None else ("assign", json.dumps({args.source: partitions})))
        )
        .option("startingOffsets", args.starting)
        .option("includeHeaders", "true")
    )
    for name, value in args.option:
        reader = reader.option(f"kafka.{name}", value)
    return reader.load()


def with_expectations(rows: DataFrame, expected_offset: str, write_id: str | None) -> DataFrame:
    """Moves the columns into the `headers` column of Spark's sink, behind what it already holds.

    A row whose expected offset is null carries none.
    """

    def header(name: str, value: Column) -> Column:
        # Spark's sink wants exactly array<struct<key: string, value: binary>>.
        return sf.struct(sf.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))

    given = [header(EXPECTED_OFFSET, sf.col(expected_offset))]
    if write_id is not None:
        given.append(header(WRITE_ID, sf.col(write_id)))
    ours = sf.filter(sf.array(*given), lambda each: each["value"].isNotNull())
    theirs = "headers" in rows.columns
    headers = sf.concat(sf.coalesce(sf.col("headers"), sf.array()), ours) if theirs else ours
    return rows.withColumn("headers", headers).drop(*filter(None, (expected_offset, write_id)))


def write(rows: DataFrame, args: argparse.Namespace) -> DataStreamWriter:
    """The sink, not started yet."""
    producer = {}
    if args.expected_offset:
        rows = with_expectations(rows, args.expected_offset, args.write_id)
        producer.update(CONDITIONAL_PRODUCER)
    producer.update(args.option)
    producer.update(args.producer_option)
    writer = (
        rows.writeStream.format("kafka")
        .option("kafka.bootstrap.servers", args.bootstrap)
        .option("topic", args.target)
        .option("checkpointLocation", args.checkpoint)
    )
    for name, value in producer.items():
        writer = writer.option(f"kafka.{name}", value)
    if args.once:
        writer = writer.trigger(availableNow=True)
    elif args.every is not None:
        writer = writer.trigger(processingTime=f"{args.every} seconds")
    return writer


def _admin(spark: SparkSession, args: argparse.Namespace) -> Any:
    """The connector's own Kafka client."""
    jvm: Any = spark.sparkContext._jvm
    settings = jvm.java.util.HashMap()
    for name, value in {"bootstrap.servers": args.bootstrap, **dict(args.option)}.items():
        settings.put(name, value)
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


def require_check(spark: SparkSession, args: argparse.Namespace) -> None:
    """Raises CheckIsOff unless the target topic's check is on, as the connector's own Kafka client sees it."""
    admin = _admin(spark, args)
    try:
        value = _configs(spark, admin, args.target)(CHECK_CONFIG)
    finally:
        admin.close()
    if value not in ("true", "required"):
        raise CheckIsOff(
            f"topic {args.target!r} has {CHECK_CONFIG}={value}, so expected offsets would be ignored. Set it to "
            "'required' (or 'true') through the proxy, and give the proxy's address as --bootstrap"
        )


def growth(spark: SparkSession, args: argparse.Namespace) -> Growth | None:
    """How the source topic has grown; None where it does not grow in order."""
    admin = _admin(spark, args)
    try:
        # In this sequence: a growth is described before its partitions are there, so all that are seen are explained.
        count = admin.describeTopics([args.source]).allTopicNames().get().get(args.source).partitions().size()
        value = _configs(spark, admin, args.source)
        if value(ORDERED_CONFIG) not in ("true", "any") or value(EXPANSIONS_CONFIG) is None:
            return None
        return Growth(count, json.loads(value(EXPANSIONS_CONFIG)))
    finally:
        admin.close()


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
    """Raises CheckIsOff."""
    if args.expected_offset:
        require_check(spark, args)
    read(spark, args, partitions).createOrReplaceTempView("source")
    return write(spark.sql(args.sql), args).start()


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Until the query ends. Raises CheckIsOff, StreamingQueryException."""
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
    if args.write_id and not args.expected_offset:
        parser.error("--write-id names a write at an expected offset: give --expected-offset as well")
    spark = SparkSession.builder.appName(f"stream {args.source} to {args.target}").getOrCreate()
    try:
        run(spark, args)
    except (CheckIsOff, StreamingQueryException) as error:
        # A refusal is in the latter, in the proxy's words.
        print(f"stream: {error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
