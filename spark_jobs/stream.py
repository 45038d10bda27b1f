#!/usr/bin/env python3
"""Stream a topic through a query into another topic, exactly once: Spark's Kafka source and Fencepost's sink.

    spark-submit --packages … stream.py --bootstrap PROXY:9092 --from orders --to invoices --checkpoint DIR \\
        --sink-id invoices --sql "SELECT key, upper(CAST(value AS STRING)) AS value FROM source"

Spark's own Kafka sink writes at least once: it rewrites a micro-batch that failed or whose commit was lost. With
`--sink-id`, `format("fencepost")` writes, and reads from the log which rows it already appended. Without it, Spark's
own sink writes.

A source topic with `fencepost.ordered.partition.expansion=true` is read in order, by `fencepost.spark.read_ordered`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from fencepost._ordering import ORDERED_CONFIG
from fencepost.errors import FencepostError
from fencepost.spark import read_ordered, register, stated, stream
from fencepost.spark.errors import CannotReach
from fencepost.spark.jobs import add_client_arguments, add_named_values, client_settings, session
from fencepost.spark.ordered import described


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stream.py",
        description="Stream a topic through a query into another topic: exactly once with --sink-id, otherwise at "
        "least once with Spark's own Kafka sink.",
    )
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT", help="the proxy")
    parser.add_argument("--from", required=True, dest="source", metavar="TOPIC")
    parser.add_argument("--to", required=True, dest="target", metavar="TOPIC")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="Spark's checkpoint directory")
    parser.add_argument(
        "--sql",
        default="SELECT key, value FROM source",
        help="query on the view `source` (key, value, topic, partition, offset, timestamp, headers) that returns key, "
        "value and optionally partition and headers (default: %(default)s)",
    )
    parser.add_argument(
        "--sink-id",
        metavar="NAME",
        help="permanent name of this stream in the target topic, unique per query and topic; makes it exactly once",
    )
    parser.add_argument(
        "--starting",
        choices=["earliest", "latest"],
        default="earliest",
        help="start of a new checkpoint (default: earliest)",
    )
    trigger = parser.add_mutually_exclusive_group()
    trigger.add_argument("--once", action="store_true", help="process the available records, then exit")
    trigger.add_argument("--every", type=float, metavar="SECONDS", help="interval of micro-batches (default: no pause)")
    add_client_arguments(parser)
    add_named_values(parser, "--producer-option", help="Kafka client setting for the sink only; repeatable")
    add_named_values(parser, "--sink-option", help="sink option, such as patience.seconds=300; repeatable")
    return parser


def source_options(args: argparse.Namespace) -> dict[str, str]:
    return client_settings(args) | {"startingOffsets": args.starting, "includeHeaders": "true"}


def read(spark: SparkSession, args: argparse.Namespace) -> DataFrame:
    """The source topic as a stream, with all partitions, also future ones."""
    return spark.readStream.format("kafka").options(**source_options(args), subscribe=args.source).load()


def write(rows: DataFrame, args: argparse.Namespace) -> DataStreamWriter:
    """The configured sink, not started."""
    options = client_settings(args) | {f"kafka.{name}": value for name, value in args.producer_option}
    if args.sink_id:
        register(rows.sparkSession)
        writer = stream(rows, topic=args.target, sink_id=args.sink_id, options=options | dict(args.sink_option))
    else:
        writer = rows.writeStream.format("kafka").options(**options).option("topic", args.target)
    writer = writer.option("checkpointLocation", args.checkpoint)
    if args.once:
        writer = writer.trigger(availableNow=True)
    elif args.every is not None:
        writer = writer.trigger(processingTime=f"{args.every} seconds")
    return writer


def start(rows: DataFrame, args: argparse.Namespace) -> StreamingQuery:
    rows.createOrReplaceTempView("source")
    return write(rows.sparkSession.sql(args.sql), args).start()


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Run until the query ends. Raises FencepostError, PySparkException."""
    options = source_options(args)
    _, configs = described(spark, args.source, options)
    if configs.get(ORDERED_CONFIG) in ("true", "any"):
        read_ordered(spark, args.source, partial(start, args=args), checkpoint=args.checkpoint, options=options)
    else:
        start(read(spark, args), args).awaitTermination()


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.sink_option and not args.sink_id:
        parser.error("--sink-option is for the sink that --sink-id chooses")
    spark = session(f"stream {args.source} to {args.target}")
    try:
        run(spark, args)
    except (FencepostError, CannotReach, PySparkException) as error:
        print(f"stream: {stated(error) or error}", file=sys.stderr)
        return 1
    else:
        if args.once:
            print(f"stream: finished, all records that {args.source} had are processed into {args.target}")
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
