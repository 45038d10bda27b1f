#!/usr/bin/env python3
"""Stream a topic through a query into another topic, exactly once: Spark's Kafka source and Fencepost's sink.

    spark-submit --packages … stream.py --bootstrap PROXY:9092 --from orders --to invoices --checkpoint DIR \\
        --sink-id invoices --sql "SELECT key, upper(CAST(value AS STRING)) AS value FROM source"

Spark's own Kafka sink writes at least once: it rewrites a micro-batch that failed or whose commit was lost. With
`--sink-id`, `format("fencepost")` writes, and reads from the log which rows it already appended. Without it, Spark's
own sink writes.

A source topic with `fencepost.ordered.partition.expansion=true` is read in order. Spark reads all partitions of a
micro-batch at once, so an added partition joins the query only after the micro-batches with the rest of its
prior partitions end.
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

from fencepost.spark import register, stated
from fencepost.spark.errors import SinkError
from fencepost.spark.jobs import add_client_arguments, client_settings, named_value

ORDERED_CONFIG = "fencepost.ordered.partition.expansion"
EXPANSIONS_CONFIG = "fencepost.ordered.partition.expansions"
#: Interval of checks for expansions and for partitions that may now be read.
REFRESH_SECONDS = 2.0
#: How long to wait for a micro-batch before interrupting it. Spark then repeats it with the same partitions.
INTERRUPT_SECONDS = 60.0


class ExpansionHistory(NamedTuple):
    """A topic's partition count and its expansions, parsed from `fencepost.ordered.partition.expansions`."""

    count: int
    expansions: list[dict[str, Any]]


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
    parser.add_argument(
        "--producer-option",
        type=named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Kafka client setting for the sink only; repeatable",
    )
    parser.add_argument(
        "--sink-option",
        type=named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="sink option, such as patience.seconds=300; repeatable",
    )
    return parser


def read(spark: SparkSession, args: argparse.Namespace, partitions: list[int] | None = None) -> DataFrame:
    """The source topic as a stream, with Spark's documented columns and `headers`. None: all partitions, also future
    ones; otherwise only `partitions`."""
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
    """The configured sink, not started."""
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
    """A function from config name to value of a topic, None for a config that the topic lacks."""
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


def history(spark: SparkSession, args: argparse.Namespace) -> ExpansionHistory | None:
    """The source topic's expansions; None without ordered expansion."""
    with closing(_admin(spark, args)) as admin:
        # Read the count first: an expansion is described before its partitions exist.
        count = _count(admin, args.source)
        value = _configs(spark, admin, args.source)
        if value(ORDERED_CONFIG) not in ("true", "any") or value(EXPANSIONS_CONFIG) is None:
            return None
        return ExpansionHistory(count, json.loads(value(EXPANSIONS_CONFIG)))


def finished(spark: SparkSession, args: argparse.Namespace) -> dict[int, int]:
    """{partition: end offset of the last finished micro-batch} from the checkpoint; empty for a new checkpoint."""
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
    # The file has a version line, a metadata line, and one line per source (here one).
    offsets = json.loads(text.splitlines()[2])
    return {int(partition): offset for partition, offset in offsets.get(args.source, {}).items()}


def readable(expansion_history: ExpansionHistory, positions: dict[int, int], *, latest: bool) -> list[int]:
    """The partitions that a query may read, given the end offsets of its last micro-batch.

    An added partition may be read after all prior partitions are read up to their thresholds (KIP-253). A partition in
    the checkpoint is already open. A new query that starts at the latest offsets may read all partitions.
    """
    known = max((each["to"] for each in expansion_history.expansions), default=expansion_history.count)
    if latest and not positions:
        return list(range(min(expansion_history.count, known)))

    def may(partition: int) -> bool:
        expansion = next(
            (each for each in expansion_history.expansions if each["from"] <= partition < each["to"]), None
        )
        if partition in positions or expansion is None:
            return partition in positions or partition < known
        if expansion.get("unordered"):
            return True
        thresholds = expansion.get("thresholds")
        return bool(thresholds) and all(t == 0 or positions.get(q, 0) >= t for q, t in enumerate(thresholds))

    return [partition for partition in range(expansion_history.count) if may(partition)]


def start(spark: SparkSession, args: argparse.Namespace, partitions: list[int] | None = None) -> StreamingQuery:
    rows = read(spark, args, partitions)
    if args.sink_id:
        rows = one_task_each(rows, partition_count(spark, args))
    rows.createOrReplaceTempView("source")
    return write(spark.sql(args.sql), args).start()


def one_task_each(rows: DataFrame, partitions: int) -> DataFrame:
    """Give each source partition the task with its number, in its order.

    The sink finds a task's appended rows by task number. Spark's source also has one task per partition, but numbers
    them in discovery order: up to four numbers may differ when a micro-batch is repeated from the checkpoint.
    """
    return rows.repartitionById(partitions, rows["partition"])


def partition_count(spark: SparkSession, args: argparse.Namespace) -> int:
    """Partition count of the source topic."""
    with closing(_admin(spark, args)) as admin:
        return _count(admin, args.source)


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Run until the query ends. Raises PySparkException (StreamingQueryException if the query fails)."""
    while True:
        expansion_history = history(spark, args)
        if expansion_history is None:
            start(spark, args).awaitTermination()
            return
        partitions = readable(expansion_history, finished(spark, args), latest=args.starting == "latest")
        query = start(spark, args, partitions)
        ended = False
        while not ended and _may_read(spark, args) == partitions:
            ended = bool(query.awaitTermination(REFRESH_SECONDS))
        if not ended:
            _stop(query)
        elif _may_read(spark, args) == partitions:
            return


def _may_read(spark: SparkSession, args: argparse.Namespace) -> list[int]:
    expansion_history = history(spark, args)
    assert expansion_history is not None, (
        f"topic {args.source!r} no longer has ordered expansion: {ORDERED_CONFIG} was switched off"
    )
    return readable(expansion_history, finished(spark, args), latest=args.starting == "latest")


def _stop(query: StreamingQuery) -> None:
    """Stop between two micro-batches if possible, because an interrupted one is written again."""
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
        words = None if isinstance(error, SinkError) else stated(error)
        print(f"stream: {words or error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
