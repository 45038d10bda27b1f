#!/usr/bin/env python3
"""Load files into a Kafka topic through Fencepost: each row exactly once, also after failures. Rerun it to resume.

    spark-submit bulk_load.py --input flights.csv --bootstrap PROXY:9092 --topic flights

One task writes all rows of a Kafka partition with the sink (`format("fencepost")`), in the order of the input. A row's
partition depends on its key or content only, not on how Spark splits the files. A rerun reads from the log which rows
an earlier run appended.

Needs `pip install fencepost[spark]` on the driver and the workers; no Kafka connector and no jar.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from fencepost.spark import arrange, register, stated
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.files import ORDER, add_file_arguments, input_error, rows_of
from fencepost.spark.jobs import Progress, add_client_arguments, client_settings
from fencepost.spark.log import Log
from fencepost.spark.options import client_options


class Outcome(NamedTuple):
    """Result for one Kafka partition: rows found, rows appended, and the appended offsets from `first` up to but not
    including `end` (-1 if none)."""

    partition: int
    found: int
    appended: int
    first: int
    end: int


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bulk_load.py",
        description="Load files into a Kafka topic through Fencepost, each row exactly once. Run it again to resume. "
        "The topic must exist, with fencepost.check.expected.offsets=required (or true).",
    )
    parser.add_argument("--input", required=True, help="file, directory or glob that Spark can read")
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT", help="the proxy")
    parser.add_argument("--topic", required=True)
    parser.add_argument(
        "--load", metavar="NAME", help="name of this load in the log, used as sink.id (default: last part of --input)"
    )
    partitioning = parser.add_mutually_exclusive_group()
    partitioning.add_argument(
        "--key", metavar="COLUMN", help="column for the record key; selects the partition like the Java producer"
    )
    partitioning.add_argument("--partition-column", metavar="COLUMN", help="column with the partition number")
    add_file_arguments(parser)
    parser.add_argument(
        "--batch-bytes", type=int, metavar="N", help="uncompressed size of a record batch (default: 900000)"
    )
    parser.add_argument("--compression", choices=["none", "gzip", "snappy", "lz4", "zstd"], default="zstd")
    parser.add_argument(
        "--patience",
        type=int,
        default=120,
        metavar="SECONDS",
        help="fail after this long without progress (default: %(default)s)",
    )
    add_client_arguments(parser)
    return parser


def load_name(args: argparse.Namespace) -> str:
    return str(args.load or posixpath.basename(args.input.rstrip("/")))


def sink_options(args: argparse.Namespace) -> dict[str, str]:
    """Raises SinkError."""
    found = {
        **client_settings(args),
        "topic": args.topic,
        "sink.id": load_name(args),
        "patience.seconds": str(args.patience),
        "kafka.compression.type": args.compression,
    }
    if args.batch_bytes:
        found["batch.bytes"] = str(args.batch_bytes)
    return found


def load(spark: SparkSession, args: argparse.Namespace) -> list[Outcome]:
    """Run the load. Returns an `Outcome` per partition with rows. Raises SinkError, CannotReach."""
    # The time zone affects the text of timestamps, which a resumed load compares.
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    register(spark)
    options = sink_options(args)
    with Log(client_options(options), patience_seconds=args.patience) as log:
        log.connect()
        count = log.partition_count(args.topic)
        rows = arrange(rows_of(spark, args, partition=args.partition_column), partitions=count, order_by=ORDER)
        with (
            tempfile.TemporaryDirectory() as directory,
            Progress("bulk_load", spark, log, args.topic, partitions=count).shown(),
        ):
            report = Path(directory, "report.json")
            _write(rows, {**options, "report": str(report)})
            found: dict[str, dict[str, dict[str, Any]]] = json.loads(report.read_text("utf-8"))
    return sorted(Outcome(int(number), **each) for number, each in found.get(args.topic, {}).items())


def _write(rows: DataFrame, options: dict[str, str]) -> None:
    """Raises SinkError with the sink's message, or with what is wrong with the input; else Spark's error."""
    try:
        rows.write.format("fencepost").mode("append").options(**options).save()
    except (PySparkException, Py4JJavaError) as error:
        words = stated(error) or input_error(error)
        if words is None:
            raise
        raise SinkError(words) from error


def report(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    for each in outcomes:
        where = f", at offsets {each.first} to {each.end - 1}" if each.appended else ""
        print(f"bulk_load: {args.topic}-{each.partition}: {each.found} rows found, {each.appended} appended{where}")
    total = sum(each.found + each.appended for each in outcomes)
    print(f"bulk_load: complete: {total} rows of load {load_name(args)!r} in {args.topic}", flush=True)


def main() -> int:
    args = arguments().parse_args()
    spark = SparkSession.builder.appName(f"bulk_load {load_name(args)}").getOrCreate()
    try:
        report(args, load(spark, args))
    except (SinkError, CannotReach) as error:
        print(f"bulk_load: {error}", file=sys.stderr)
        print("bulk_load: NOT complete; nothing was duplicated", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
