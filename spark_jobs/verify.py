#!/usr/bin/env python3
"""Check that a Kafka topic contains exactly the rows of an input, in order. Exit code 0 if so, else 1.

    spark-submit verify.py --input flights.csv --bootstrap KAFKA:9092 --topic flights

It takes the command line of the load. The topic is read with a plain consumer: pass Kafka's own address to check
independently of the proxy. The sink's record headers are ignored. Rows are compared by key and value, and by partition
with `--partition-column`; equal rows are counted.

CSV and JSON lines on local disks are read with pyarrow and Python, not with Spark's readers as in the load: a file that
Spark misreads must not prove itself.

`--from TOPIC --sql …` compares with a query on a topic instead, to check the output of `stream.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyspark.sql.functions as sf
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from fencepost.spark import stated
from fencepost.spark.arranging import partitioned
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.files import INPUT, ORDER, add_load_arguments, input_error, keeps_order, rows_of
from fencepost.spark.jobs import client_settings, session
from fencepost.spark.log import Log, connection_options
from fencepost.spark.options import client_options

#: Maximum records of a partition that one task reads.
RANGE_RECORDS = 250_000
BATCH_RECORDS = 20_000
PATIENCE_SECONDS = 60.0
EXAMPLES_MAX = 5
#: A row of CSV must fit into it.
_BLOCK_BYTES = 16 << 20
_METADATA = "_metadata"
#: Options of Spark's CSV reader that mean what pyarrow does.
_AS_PYARROW = {("header", "true"), ("mode", "FAILFAST"), ("enforceschema", "false"), ("columnpruning", "false")}


Reading = Callable[[Any], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Found:
    """Result of the comparison, as row counts. `examples`: {kind of error: positions}, never row contents."""

    expected: int
    once: int
    missing: int
    too_often: int
    unknown: int
    out_of_order: int | None
    examples: dict[str, list[str]]

    def holds(self, *, others: bool) -> bool:
        wrong = self.missing + self.too_often + (self.out_of_order or 0)
        return not wrong and (others or not self.unknown)


class Topic:
    """A topic to read, between its current log start and end offsets. Raises SinkError, CannotReach."""

    def __init__(self, name: str, client: dict[str, Any]) -> None:
        self.name = name
        self._client = client
        with Log(client) as log:  # never creates a topic
            self.bounds = dict(sorted(log.offsets(name, range(log.partition_count(name))).items()))

    def rows(self, spark: SparkSession) -> DataFrame:
        """Columns `partition`, `offset`, `key` and `value`. A task reads up to `RANGE_RECORDS` records."""
        ranges = [
            (partition, first, min(first + RANGE_RECORDS, end))
            for partition, (start, end) in self.bounds.items()
            for first in range(start, end, RANGE_RECORDS)
        ]
        columns = "partition INT, offset BIGINT, key BINARY, value BINARY"
        return read_by(spark, source_of(f"verify-{self.name}", columns, ranges, topic_reader(self.name, self._client)))


def consumer_options(client: dict[str, Any]) -> dict[str, Any]:
    """Of aiokafka's consumer."""
    # Records of aborted transactions are not rows.
    return {"enable_auto_commit": False, "isolation_level": "read_committed", **connection_options(client)}


def source_of(name: str, columns: StructType | str, parts: Sequence[Any], read: Reading) -> type[DataSource]:
    """One task reads each of `parts`. `mapInArrow` would need pandas."""

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> StructType | str:
            return columns

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(each) for each in parts]

        def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
            # Spark treats an empty list of partitions like None.
            return iter(()) if partition is None else read(partition.value)

    return Source


def topic_reader(topic: str, client: dict[str, Any]) -> Reading:
    """Reads ranges (partition, first offset, end)."""

    def read_range(at: tuple[int, int, int]) -> Iterator[pa.RecordBatch]:
        with asyncio.Runner() as runner:

            def run(what: Any) -> Any:
                async def waited_for() -> Any:
                    return await what

                return runner.run(waited_for())

            try:
                yield from read(*at, run)
            except (KafkaError, TimeoutError) as error:
                raise CannotReach(
                    f"{topic}-{at[0]} cannot be read: {error} (run verify again when Kafka is up)"
                ) from error

    async def start(at: TopicPartition, first: int) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(**consumer_options(client))
        try:
            await consumer.start()
        except BaseException:
            await consumer.stop()
            raise
        consumer.assign([at])
        consumer.seek(at, first)
        return consumer

    def read(partition: int, first: int, end: int, run: Callable[[Any], Any]) -> Iterator[pa.RecordBatch]:
        at = TopicPartition(topic, partition)
        consumer = run(start(at, first))
        try:
            give_up = time.monotonic() + PATIENCE_SECONDS
            position = first
            while position < end:
                records = run(consumer.getmany(at, timeout_ms=500, max_records=BATCH_RECORDS)).get(at, ())
                before, position = position, run(consumer.position(at))
                if position > before:
                    give_up = time.monotonic() + PATIENCE_SECONDS
                elif time.monotonic() > give_up:
                    raise TimeoutError(f"{topic}-{partition}: no record of offsets {position} to {end - 1} in time")
                found = [(record.offset, record.key, record.value) for record in records if record.offset < end]
                if found:
                    offsets, keys, values = zip(*found, strict=True)
                    yield pa.RecordBatch.from_arrays(
                        [
                            pa.array([partition] * len(found), pa.int32()),
                            pa.array(offsets, pa.int64()),
                            pa.array(keys, pa.binary()),
                            pa.array(values, pa.binary()),
                        ],
                        ["partition", "offset", "key", "value"],
                    )
        finally:
            run(consumer.stop())

    return read_range


# --- the input, with other readers than Spark's -----------------------------------------------------------------------


class OnlySpark(Exception):
    """Why the input can be read with Spark's reader only."""


def second_reader(
    spark: SparkSession, args: argparse.Namespace, kind: str, csv_options: Mapping[str, str]
) -> DataFrame:
    """A `fencepost.spark.files.Reader` without Spark's readers. One task reads a file. Raises OnlySpark, SinkError."""
    if kind == "parquet":
        raise OnlySpark("it is Parquet")
    if args.allow_replacement_characters:
        raise OnlySpark("--allow-replacement-characters")
    files = sorted(spark.read.text(args.input).inputFiles())
    paths = {file: _local_path(file) for file in files}
    if kind == "jsonl":
        lines = _second(spark, ["value"], files, lambda file: _lines_of(file, paths[file]))
        return lines.select(sf.col("0").cast("string").alias("value"), _METADATA)
    parsing = _csv_parsing(csv_options)
    columns: list[str] = next(filter(None, (_header(file, paths[file], parsing) for file in files)), [])
    rows = _second(spark, columns, files, lambda file: _rows_of(file, paths[file], parsing, columns))
    if not args.schema:
        return rows.select(*(sf.col(f"`{n}`").cast("string").alias(name) for n, name in enumerate(columns)), _METADATA)
    fields = spark.createDataFrame([], args.schema).schema.fields
    if len(fields) != len(columns):
        raise SinkError(f"--schema has {len(fields)} columns, and the header of {files[0]} {len(columns)}")
    typed = (sf.col(f"`{n}`").cast("string").cast(field.dataType).alias(field.name) for n, field in enumerate(fields))
    return rows.select(*typed, _METADATA)


def _local_path(file: str) -> str:
    parts = urlsplit(file)
    if parts.scheme != "file":
        raise OnlySpark(f"it is on {parts.scheme}:")
    path = unquote(parts.path)
    if path.endswith((".deflate", ".lz4", ".snappy")):
        raise OnlySpark(f"only Hadoop reads {path.rpartition('.')[2]} files as Hadoop writes them")
    return path


def _csv_parsing(csv_options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `_opened`, from the options of Spark's CSV reader."""
    found: dict[str, Any] = {"double_quote": False}
    for option, value in csv_options.items():
        name = option.lower()
        if name in {"sep", "delimiter"} and len(value) == 1:
            found["delimiter"] = value
        elif name == "quote" and len(value) == 1:
            found["quote_char"] = value
        elif name == "escape" and len(value) == 1:
            found |= {"double_quote": True} if value == csv_options.get("quote", '"') else {"escape_char": value}
        elif name in {"encoding", "charset"}:
            found["encoding"] = value
        elif name == "multiline":
            found["newlines_in_values"] = value == "true"
        elif (name, value) not in _AS_PYARROW:
            raise OnlySpark(f"--csv-option {option}={value}")
    return found


def _opened(path: str, parsing: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Reads the columns as text, piece by piece. An empty field is null, quoted or not, as in Spark."""
    from pyarrow import csv  # noqa: PLC0415 - in the workers

    reading = csv.ReadOptions(block_size=_BLOCK_BYTES, encoding=parsing.get("encoding", "utf8"))
    parse = csv.ParseOptions(**{name: value for name, value in parsing.items() if name != "encoding"})
    converting = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    return csv.open_csv(pa.input_stream(path), reading, parse, converting)


def _header(file: str, path: str, parsing: Mapping[str, Any]) -> list[str]:
    """Its columns; none of an empty file. Raises OnlySpark, SinkError."""
    with pa.input_stream(path) as stream:
        if not stream.read(1):
            return []
    try:
        with _opened(path, parsing, ()) as rows:
            names = list(rows.schema.names)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise SinkError(_malformed(file, error)) from None
    if "" in names or len({name.lower() for name in names}) < len(names):
        raise OnlySpark("Spark renames its columns, because two have one name or one has none")
    return names


def _rows_of(file: str, path: str, parsing: Mapping[str, Any], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    names = _header(file, path, parsing)
    if not names:
        return
    if names != list(columns):
        raise ValueError(f"--input: the header of {file} differs from the first one")
    try:
        for batch in _opened(path, parsing, names):
            yield _placed(file, [each.cast(pa.binary()) for each in batch.columns])
    except pa.ArrowInvalid as error:
        raise ValueError(_malformed(file, error)) from None


def _malformed(file: str, error: ValueError) -> str:
    """Without pyarrow's words if they have the row in them."""
    if "Expected" in str(error):
        return f"--input: a line of {file} has more or fewer fields than the header"
    return f"--input: pyarrow cannot read {file} as CSV" + ("" if "'" in str(error) else f": {error}")


def _lines_of(file: str, path: str) -> Iterator[pa.RecordBatch]:
    # Whatever is not UTF-8 becomes what it was when it is encoded again.
    with pa.input_stream(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape") as lines:
        while some := list(itertools.islice(lines, BATCH_RECORDS)):
            encoded = [line.rstrip("\n").encode("utf-8", "surrogateescape") for line in some]
            yield _placed(file, [pa.array(encoded, pa.binary())])


def _placed(file: str, columns: list[pa.Array]) -> pa.RecordBatch:
    count = len(columns[0])
    position = pa.StructArray.from_arrays(
        [pa.array([file] * count, pa.string()), pa.array([0] * count, pa.int64())], ["file_path", "file_block_start"]
    )
    return pa.RecordBatch.from_arrays([*columns, position], [*map(str, range(len(columns))), _METADATA])


def _second(spark: SparkSession, columns: Sequence[str], files: Sequence[str], read: Reading) -> DataFrame:
    """Binary columns `0`, `1`, …, and the position, as Spark's readers have it."""
    position = StructType([StructField("file_path", StringType()), StructField("file_block_start", LongType())])
    fields = [StructField(str(number), BinaryType()) for number in range(len(columns))]
    schema = StructType([*fields, StructField(_METADATA, position)])
    return read_by(spark, source_of("verify-input", schema, files, read))


def read_by(spark: SparkSession, source: type[DataSource]) -> DataFrame:
    spark.dataSource.register(source)
    return spark.read.format(source.name()).load()


def _same(key: Column, value: Column, partition: Column) -> Column:
    """Digest of a row. Includes the lengths, so that ("ab", "c") and ("a", "bc") differ."""
    lengths = sf.concat_ws(
        ":", sf.coalesce(sf.octet_length(key), sf.lit(-1)), sf.coalesce(sf.octet_length(value), sf.lit(-1)), partition
    )
    empty = sf.lit("").cast("binary")
    return sf.unhex(sf.md5(sf.concat(lengths.cast("binary"), sf.coalesce(key, empty), sf.coalesce(value, empty))))


def compare(expected: DataFrame, found: DataFrame, order: str) -> Found:
    """Compare `expected` (key, value, sort column `at`, and `partition` where it is known) with `found` (partition,
    offset, key, value).

    `order`: `partition` (rows of each Kafka partition follow the input order), `key` (rows of each key follow it and
    are in one partition), or `none`. Equal rows are matched in order.
    """
    partition = sf.col("partition") if "partition" in expected.columns else sf.lit("")
    row = _same(sf.col("key"), sf.col("value"), partition).alias("row")
    key = sf.unhex(sf.md5("key")).alias("of_key")
    ours = expected.select(row, "at").groupBy("row").agg(sf.sort_array(sf.collect_list("at")).alias("expected"))
    position = sf.struct("partition", "offset").alias("position")
    theirs = (
        found.select(row, key, position)
        .groupBy("row")
        .agg(sf.sort_array(sf.collect_list("position")).alias("found"), sf.first("of_key").alias("of_key"))
    )
    both = ours.join(theirs, "row", "full_outer").select(
        "of_key",
        *(sf.coalesce(each, sf.array()).alias(each) for each in ("expected", "found")),
    )
    both = both.withColumn("n", sf.size("expected")).withColumn("m", sf.size("found")).persist()
    try:
        return _reported(both, order)
    finally:
        both.unpersist()


def _reported(both: DataFrame, order: str) -> Found:
    too_often = sf.when(sf.col("n") > 0, sf.greatest(sf.col("m") - sf.col("n"), sf.lit(0))).otherwise(0)
    sums = both.agg(
        sf.sum("n"),
        sf.sum(sf.least("n", "m")),
        sf.sum(sf.greatest(sf.col("n") - sf.col("m"), sf.lit(0))),
        sf.sum(too_often),
        sf.sum(sf.when(sf.col("n") == 0, sf.col("m")).otherwise(0)),
    ).first()
    assert sums is not None
    expected, once, missing, often, unknown = (int(each or 0) for each in sums)
    examples: dict[str, list[str]] = {}
    if missing:
        lost = both.where("m < n").selectExpr("explode(slice(expected, m + 1, n - m)) AS at")
        lost = lost.orderBy("at").limit(EXAMPLES_MAX).select(sf.col("at").cast("string"))
        examples["missing"] = [f"input {row['at']}" for row in lost.collect()]
    for what, condition in (("duplicate", "n > 0 AND m > n"), ("unknown", "n = 0")):
        if unknown if what == "unknown" else often:
            where = both.where(condition).selectExpr("explode(slice(found, n + 1, m - n)) AS position")
            examples[what] = _offsets(where)
    wrong = None
    if order != "none":
        pairs = both.selectExpr("of_key", "explode(slice(arrays_zip(expected, found), 1, least(n, m))) AS pair")
        pairs = pairs.select("of_key", "pair.expected", "pair.found.partition", "pair.found.offset")
        if order == "key":
            pairs = pairs.where("of_key IS NOT NULL")
        one = Window.partitionBy("of_key" if order == "key" else "partition").orderBy("partition", "offset")
        before = pairs.select(
            "*",
            sf.lag("expected").over(one).alias("expected_before"),
            sf.lag("partition").over(one).alias("partition_before"),
        )
        bad = before.where("expected < expected_before OR partition <> partition_before").persist()
        wrong = bad.count()
        if wrong:
            examples["out of order"] = _offsets(bad.select(sf.struct("partition", "offset").alias("position")))
        bad.unpersist()
    return Found(expected, once, missing, often, unknown, wrong, examples)


def _offsets(where: DataFrame) -> list[str]:
    found = (
        where.select("position.partition", "position.offset")
        .orderBy("partition", "offset")
        .limit(EXAMPLES_MAX)
        .collect()
    )
    return [f"partition {row['partition']} offset {row['offset']}" for row in found]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify.py",
        description="Compare a topic with its expected rows: missing rows, duplicates, order. Exit code 1 if they "
        "differ. Takes the command line of bulk_load.py.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", help=INPUT)
    what.add_argument("--from", dest="source", metavar="TOPIC", help="source topic, used with --sql")
    add_load_arguments(parser, bootstrap="Kafka, or the proxy")
    parser.add_argument(
        "--sql",
        default="SELECT key, value, struct(partition, offset) AS at FROM source",
        help="with --from: query on the view `source` (key, value, partition, offset) that returns key, value and, to "
        "check order, `at`, which sorts the rows of a key (default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        choices=["partition", "key", "none"],
        help="check order within each Kafka partition, within each key (default with --from), or not at all (default "
        "with --input: as --keep-order)",
    )
    parser.add_argument("--others", action="store_true", help="allow other records in the topic")
    return parser


def expected_rows(spark: SparkSession, args: argparse.Namespace, client: dict[str, Any], partitions: int) -> DataFrame:
    """`partitions`: of the topic."""
    if args.input:
        # The time zone affects the text of timestamps.
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        try:
            rows = rows_of(spark, args, partition=args.partition_column, read=second_reader)
        except OnlySpark as why:
            say(f"--input is read with Spark's reader, as in the load, so its errors do not show: {why}")
            rows = rows_of(spark, args, partition=args.partition_column)
        rows = rows.withColumn("at", sf.struct(*ORDER)).drop(*ORDER)
        if args.partition_column:
            # Where it is null, the key decides.
            rows, partition = partitioned(rows, {args.topic: partitions})
            rows = rows.select("key", "value", "at", partition.alias("partition"))
        return rows
    Topic(args.source, client).rows(spark).createOrReplaceTempView("source")
    rows = spark.sql(args.sql)
    at = sf.col("at") if "at" in rows.columns else sf.lit(0)
    return rows.select(sf.col("key").cast("binary"), sf.col("value").cast("binary"), at.alias("at"))


def say(line: str) -> None:
    print(f"verify: {line}", flush=True)


def report(args: argparse.Namespace, topic: Topic, found: Found, order: str) -> int:
    for partition, (start, end) in topic.bounds.items():
        say(f"{topic.name}-{partition}: " + (f"offsets {start:,} to {end - 1:,}" if end > start else "empty"))
    say(
        f"{found.expected:,} rows expected: {found.once:,} found once, {found.missing:,} missing, "
        f"{found.too_often:,} duplicates; {found.unknown:,} unknown records"
    )
    if found.out_of_order is not None:
        each = "Kafka partition" if order == "partition" else "key"
        say(f"order within each {each}: {found.out_of_order:,} rows out of order")
    for what, where in found.examples.items():
        say(f"{what}: {'; '.join(where)}{' …' if len(where) == EXAMPLES_MAX else ''}")
    good = found.holds(others=args.others)
    say("PROVED: every row exactly once" if good else "NOT PROVED: see above")
    return 0 if good else 1


def _order(args: argparse.Namespace) -> str:
    if args.input:
        return "partition" if keeps_order(args) else "none"
    return "key"


def verify(spark: SparkSession, args: argparse.Namespace) -> int:
    """Raises SinkError, CannotReach."""
    client = client_options(client_settings(args))
    order = args.order or _order(args)
    topic = Topic(args.topic, client)
    try:
        found = compare(expected_rows(spark, args, client, len(topic.bounds)), topic.rows(spark), order)
    except (PySparkException, Py4JJavaError) as error:
        words = stated(error) or input_error(error)
        if words is None:
            raise
        raise SinkError(words) from error
    return report(args, topic, found, order)


def main() -> int:
    args = arguments().parse_args()
    spark = session(f"verify {args.topic}")
    try:
        return verify(spark, args)
    except (SinkError, CannotReach) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
