"""Puts all rows of a Kafka partition into one task, in an order that depends on the data only.

Where a row goes depends on its bytes only: on its column `partition`, else on the Java producer's hash of its key, else
on a hash of its value. So a retry finds the rows of a partition in one task again, however Spark split its input.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.functions as sf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from fencepost.spark.encoding import Encoder
from fencepost.spark.errors import SinkError
from fencepost.spark.log import Log
from fencepost.spark.native import EXECUTOR
from fencepost.spark.options import client_options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Columns of the sink; others are dropped after sorting.
COLUMNS = ("key", "value", "headers", "topic", "partition", "timestamp")
#: The hash that places a row without a partition, and the partition count by which the rows were arranged.
HASH_COLUMN, COUNT_COLUMN = "fencepost_hash", "fencepost_partitions"
_HASHES = 1 << 31
_LAST = (1 << 63) - 1


def arrange(
    df: DataFrame,
    partitions: int | None = None,
    *,
    order_by: Sequence[str | Column] = (),
    topic: str | Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The rows as `append` and `stream` write them: each Kafka partition is in one Spark task. Use it as the last step
    before `.format("fencepost")`, or before a transformation of each row.

    `partitions`: the topic's partition count; None reads that of `topic`, with `options` as for the sink. If the topic
    is expanded later, the sink places the rows by the new count.

    `order_by`: rows that it leaves equal, or all rows without it, are sorted by a hash of their content, so that a
    replay repeats the order. Not for streams, which Spark does not sort: tasks then write rows in shuffle order.

    The last row of each task of a batch has no row of `df`: all its columns are null, and `fencepost_hash` is negative.
    Keep it: the sink appends the last row of a batch only after it.

    Adaptive execution does not change the tasks of the result. Raises SinkError, CannotReach.
    """
    check_columns(df.schema)
    counts = _counts(partitions, topic, options)
    tasks = max(counts.values())
    placed, partition = partitioned(df, counts)
    content = [name for name in COLUMNS if name in df.columns]
    if df.isStreaming:
        if order_by:
            raise SinkError(
                "Spark cannot sort a stream (leave order_by out; rows are written in the order of their task)"
            )
        arranged = placed.repartitionById(tasks, partition)
    else:
        arranged = placed.union(_ends(placed, tasks)).repartitionById(tasks, partition)
        is_end = sf.col(HASH_COLUMN) < 0
        by_content = sf.when(is_end, sf.lit(_LAST)).otherwise(sf.xxhash64(*content))
        # Spark compares eight bytes of the first column before all else, which are equal for a flag.
        order = (is_end, *order_by, by_content) if order_by else (by_content, is_end)
        arranged = arranged.sortWithinPartitions(*order, *content)
    return arranged.select(*content, HASH_COLUMN, COUNT_COLUMN)


def _ends(placed: DataFrame, tasks: int) -> DataFrame:
    """A last row for each task, with a negative hash and nulls. Without it, a task has not read all of its rows: when
    Spark stops a task, or its executor ends, Arrow takes the closed socket for the end of the rows."""
    known = {HASH_COLUMN: (sf.col("id") - tasks).cast("int"), COUNT_COLUMN: sf.lit(tasks)}
    return placed.sparkSession.range(0, tasks, 1, 1).select(*(
        known.get(field.name, sf.lit(None).cast(field.dataType)).alias(field.name) for field in placed.schema
    ))  # fmt: skip


def partitioned(df: DataFrame, counts: Mapping[str, int]) -> tuple[DataFrame, Column]:
    """The rows with the columns by which the sink places them, and the Kafka partition of each. `counts`: partition
    counts by topic."""
    count = sf.lit(max(counts.values()))
    if len(counts) > 1 and "topic" in df.columns:
        named = [sf.when(sf.col("topic") == name, sf.lit(number)) for name, number in counts.items()]
        count = sf.coalesce(*named, count)
    hashed: Any = sf.pmod(sf.xxhash64(sf.col("value")), sf.lit(_HASHES)).cast("int")
    if "key" in df.columns:
        hashed = sf.coalesce(sf.arrow_udf(_java_hash, "int")(sf.col("key").cast("binary")), hashed)  # type: ignore[attr-defined] # as PySpark lays it out
    chosen = sf.col(HASH_COLUMN)
    if "partition" in df.columns:
        chosen = sf.coalesce(sf.col("partition").cast("int"), chosen)
    placed = df.withColumn(HASH_COLUMN, hashed).withColumn(COUNT_COLUMN, count.cast("int"))
    return placed, sf.pmod(chosen, sf.col(COUNT_COLUMN))


def _counts(
    partitions: int | None, topic: str | Sequence[str] | None, options: Mapping[str, str] | None
) -> dict[str, int]:
    if partitions is not None:
        if partitions < 1:
            raise SinkError(f"partitions={partitions}: must be at least 1")
        return {"": partitions}
    if not topic or options is None:
        raise SinkError("arrange needs partitions=, or topic= and options= to read the number from Kafka")
    log = Log.shared(client_options(options))
    log.connect()
    return {each: log.partition_count(each) for each in ([topic] if isinstance(topic, str) else topic)}


def check_columns(schema: StructType) -> None:
    """Raises SinkError."""
    names = schema.fieldNames()
    if twice := [each for each in (*COLUMNS, HASH_COLUMN, COUNT_COLUMN) if names.count(each) > 1]:
        raise SinkError(f"several columns are named {twice[0]!r} (drop or rename all but one)")
    # Since Spark 4.2, timestamps need a time zone. It is irrelevant for checking column types.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    kept = StructType([field for field in schema if field.name in COLUMNS])
    Encoder(to_arrow_schema(kept, **zone))


def _java_hash(key: pa.Array) -> pa.Array:
    if not len(key):
        return pa.array([], pa.int32())
    filled = pc.fill_null(key.cast(pa.large_binary()), pa.scalar(b"", pa.large_binary()))
    return pc.if_else(key.is_valid(), pa.array(EXECUTOR.java_partitions(filled, _HASHES)), pa.scalar(None, pa.int32()))
