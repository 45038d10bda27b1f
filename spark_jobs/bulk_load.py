#!/usr/bin/env python3
"""Load files into a Kafka topic through Fencepost: each row exactly once, also after failures. Rerun it to resume.

    spark-submit bulk_load.py --input flights.csv --bootstrap PROXY:9092 --topic flights

One task writes all rows of a Kafka partition with the sink (`format("fencepost")`), in an order that depends on the
data only, and so does a row's partition: not on how Spark splits the files. A rerun reads from the log which rows an
earlier run appended.

Needs `pip install fencepost[spark]` on the driver and the workers; no Kafka connector and no jar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import posixpath
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyspark.sql.functions as sf
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from fencepost.spark import append_arranged, arrange, register, stated
from fencepost.spark.arranging import partitioned
from fencepost.spark.datasource import check_topic
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.files import (
    INPUT,
    ORDER,
    add_load_arguments,
    format_of,
    input_error,
    keeps_order,
    rows_of,
)
from fencepost.spark.jobs import Progress, Stages, client_settings, rows_in_log, session
from fencepost.spark.log import Log
from fencepost.spark.options import client_options, settings

#: Of a dry run.
EXAMPLES_MAX = 3
SHOWN_MAX = 200


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
    parser.add_argument("--input", required=True, help=INPUT)
    add_load_arguments(parser, bootstrap="the proxy")
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing: read the input, and describe what a load would write"
    )
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
    register(spark)
    options = sink_options(args)
    with Log(client_options(options), patience_seconds=args.patience) as log:
        log.connect()
        count = log.partition_count(args.topic)
        order = ORDER if keeps_order(args) else ()
        rows = arrange(_rows(spark, args), partitions=count, order_by=order)
        found_before = rows_in_log(log, load_name(args), args.topic)
        progress = Progress("bulk_load", Stages(spark), log, args.topic, partitions=count, found=found_before)
        with tempfile.TemporaryDirectory() as directory, progress.shown(), _input_errors():
            report = Path(directory, "report.json")
            append_arranged(rows, {**options, "report": str(report)})
            found: dict[str, dict[str, dict[str, Any]]] = json.loads(report.read_text("utf-8"))
    return sorted(Outcome(int(number), **each) for number, each in found.get(args.topic, {}).items())


def _rows(spark: SparkSession, args: argparse.Namespace) -> DataFrame:
    # The time zone affects the text of timestamps, which a resumed load compares.
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return rows_of(spark, args, partition=args.partition_column, has_order=keeps_order(args))


@contextlib.contextmanager
def _input_errors() -> Iterator[None]:
    """Raises SinkError with the sink's message, or with what is wrong with the input; else Spark's error."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        words = stated(error) or input_error(error)
        if words is None:
            raise
        raise SinkError(words) from error


def dry_run(spark: SparkSession, args: argparse.Namespace) -> int:
    """Read all of the input, and say what a load would write. Returns an exit code. Raises SinkError, CannotReach."""
    options = sink_options(args)
    chosen = settings(options)
    with Log(chosen.client, patience_seconds=args.patience) as log:
        log.connect()
        count = log.partition_count(args.topic)
        check_topic(args.topic, log.config(args.topic))
        found = rows_in_log(log, load_name(args), args.topic)
    with _input_errors():
        rows = _rows(spark, args)
        kind, csv_options = format_of(spark, args)
        examples = rows.select("key", "value").take(EXAMPLES_MAX)
        placed, partition = partitioned(rows, {args.topic: count})
        size = sf.coalesce(sf.octet_length("key"), sf.lit(0)) + sf.coalesce(sf.octet_length("value"), sf.lit(0))
        sums = placed.groupBy(partition.alias("partition")).agg(sf.count("*"), sf.sum(size), sf.max(size))
        partitions = sorted(tuple(row) for row in sums.collect())
    files = len(spark.read.text(args.input).inputFiles())
    described = "".join(f", {name}={value!r}" for name, value in csv_options.items() if name in ("sep", "encoding"))
    say(f"{args.input}: {files:,} file{'s' * (files != 1)}, read as {kind}{described}")
    largest = max((largest for *_, largest in partitions), default=0)
    say(
        f"{sum(each[1] for each in partitions):,} rows, {sum(each[2] for each in partitions):,} bytes of keys and "
        f"values, largest row {largest:,} bytes"
    )
    for number, some, of_bytes, _ in partitions:
        say(f"{args.topic}-{number}: {some:,} rows, {of_bytes:,} bytes")
    for row in examples:
        say(f"record: key {_shown(row['key'])}, value {_shown(row['value'])}")
    if found:
        say(f"an earlier run of load {load_name(args)!r} appended {found:,} of these rows")
    if largest > chosen.record_bytes_max:
        raise SinkError(f"the largest row exceeds kafka.max.request.size={chosen.record_bytes_max} (raise that option)")
    say("dry run: nothing was written")
    return 0


def _shown(text: bytes | None) -> str:
    shown = "null" if text is None else bytes(text).decode("utf-8", "backslashreplace")
    return shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}…"


def say(line: str) -> None:
    print(f"bulk_load: {line}", flush=True)


def report(args: argparse.Namespace, outcomes: list[Outcome]) -> int:
    for each in outcomes:
        where = f", at offsets {each.first} to {each.end - 1}" if each.appended else ""
        say(f"{args.topic}-{each.partition}: {each.found} rows found, {each.appended} appended{where}")
    total = sum(each.found + each.appended for each in outcomes)
    say(f"complete: {total} rows of load {load_name(args)!r} in {args.topic}")
    return 0


def main() -> int:
    args = arguments().parse_args()
    spark = session(f"bulk_load {load_name(args)}")
    try:
        return dry_run(spark, args) if args.dry_run else report(args, load(spark, args))
    except (SinkError, CannotReach) as error:
        print(f"bulk_load: {error}", file=sys.stderr)
        state = "dry run: nothing was written" if args.dry_run else "NOT complete; nothing was duplicated"
        print(f"bulk_load: {state}", file=sys.stderr)
        return 1
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
