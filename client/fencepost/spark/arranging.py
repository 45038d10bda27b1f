"""All rows of a Kafka partition in one task, in the order that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.functions as sf

from fencepost.spark.encoding import murmur2
from fencepost.spark.errors import SinkError
from fencepost.spark.log import Log
from fencepost.spark.options import client_options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: What the sink takes; other columns are dropped once the rows are in order.
COLUMNS = ("key", "value", "headers", "topic", "partition", "timestamp")
#: Over how many partitions the column `partition` was made.
COUNT_COLUMN = "partition_count"


def arrange(
    df: DataFrame,
    partitions: int | None = None,
    *,
    order_by: Sequence[str | Column] = (),
    topic: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Splits the rows so that each Kafka partition has one task, and sorts them within by `order_by`.

    The last step before `.format("fencepost").option("arranged", "true")`. The partition of a row is what its column
    `partition` says; else where Java's producer puts its key; else a hash of its value.

    `partitions` – of the topic; without it Kafka is asked for that of `topic`, by `options` as the sink takes them.
    Where the topic grows afterwards, the sink says so, and the query has to be started again.

    `order_by` – a total order, so that a replay has the same one. Without it rows come in any order. Not for streams:
    Spark sorts none, and each task writes its rows as the shuffle brings them.

    Spark needs no other setting: there are as many tasks as partitions, and adaptive execution leaves them alone.
    """
    if partitions is None:
        if topic is None or options is None:
            raise SinkError("arrange needs partitions=, or topic= and options= to read the number from Kafka")
        partitions = Log.shared(client_options(options)).partition_count(topic)
    if partitions < 1:
        raise SinkError(f"partitions={partitions}: must be at least 1")
    placed = sf.pmod(sf.xxhash64(sf.col("value")), sf.lit(partitions)).cast("int")
    if "key" in df.columns:
        placed = sf.coalesce(_placement(sf.col("key").cast("binary"), sf.lit(partitions)), placed)
    if "partition" in df.columns:
        placed = sf.coalesce(sf.col("partition").cast("int"), placed)
    arranged = df.withColumn("partition", placed).repartitionById(partitions, sf.col("partition"))
    if not df.isStreaming:
        arranged = arranged.sortWithinPartitions("partition", *order_by)
    elif order_by:
        raise SinkError("Spark cannot sort a stream (leave order_by out; rows are written in the order of their task)")
    kept = [name for name in COLUMNS if name in arranged.columns]
    return arranged.select(*kept, sf.lit(partitions).cast("int").alias(COUNT_COLUMN))


def _java_placement(key: pa.Array, count: pa.Array) -> pa.Array:
    if not len(key):
        return pa.array([], pa.int32())
    filled = pc.fill_null(key.cast(pa.large_binary()), pa.scalar(b"", pa.large_binary()))
    found = murmur2(filled) % count[0].as_py()
    return pc.if_else(key.is_valid(), pa.array(found, pa.int32()), pa.scalar(None, pa.int32()))


def _placement(key: Column, count: Column) -> Any:
    return sf.arrow_udf(_java_placement, "int")(key, count)  # type: ignore[attr-defined] # as PySpark lays it out
