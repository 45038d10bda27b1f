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
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pyspark.sql.functions as sf
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Headers of the proxy's contract.
EXPECTED_OFFSET = "expected-offset"
WRITE_ID = "write-id"
CHECK_CONFIG = "check.expected.offsets"

#: Of the sink, where rows carry expectations. Each record is its own batch: a batch is refused or recognised as a
#: whole, and when a micro-batch is written again, its rows are not batched as they were the first time.
CONDITIONAL_PRODUCER = {"batch.size": "0"}


class CheckIsOff(Exception):
    """Nothing would look at the expectations that were asked for."""


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


def read(spark: SparkSession, args: argparse.Namespace) -> DataFrame:
    """The source topic as a stream, with the columns that Spark documents and `headers`."""
    reader = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", args.bootstrap)
        .option("subscribe", args.source)
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


def require_check(spark: SparkSession, args: argparse.Namespace) -> None:
    """Raises CheckIsOff unless the target topic's check is on, as the connector's own Kafka client sees it."""
    jvm: Any = spark.sparkContext._jvm
    clients = jvm.org.apache.kafka.clients.admin
    settings = jvm.java.util.HashMap()
    for name, value in {"bootstrap.servers": args.bootstrap, **dict(args.option)}.items():
        settings.put(name, value)
    resource = jvm.org.apache.kafka.common.config.ConfigResource
    topic = resource(getattr(resource, "Type").TOPIC, args.target)  # noqa: B009 - Java's Type, not an attribute
    admin = clients.Admin.create(settings)
    try:
        entry = admin.describeConfigs([topic]).all().get().get(topic).get(CHECK_CONFIG)
    finally:
        admin.close()
    value = None if entry is None else entry.value()
    if value not in ("true", "required"):
        raise CheckIsOff(
            f"topic {args.target!r} has {CHECK_CONFIG}={value}, so expected offsets would be ignored. Set it to "
            "'required' (or 'true') through the proxy, and give the proxy's address as --bootstrap"
        )


def start(spark: SparkSession, args: argparse.Namespace) -> StreamingQuery:
    """Raises CheckIsOff."""
    if args.expected_offset:
        require_check(spark, args)
    read(spark, args).createOrReplaceTempView("source")
    return write(spark.sql(args.sql), args).start()


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.write_id and not args.expected_offset:
        parser.error("--write-id names a write at an expected offset: give --expected-offset as well")
    spark = SparkSession.builder.appName(f"stream {args.source} to {args.target}").getOrCreate()
    try:
        start(spark, args).awaitTermination()
    except (CheckIsOff, StreamingQueryException) as error:
        # A refusal is in the latter, in the proxy's words.
        print(f"stream: {error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
