"""Puts all rows of a Kafka partition into one task, in an order that depends on the data only, and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.functions as sf

from fencepost.spark.errors import SinkError
from fencepost.spark.log import Log
from fencepost.spark.native import EXECUTOR
from fencepost.spark.options import client_options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Columns of the sink; others are dropped after sorting.
COLUMNS = ("key", "value", "headers", "topic", "partition", "timestamp")
#: Partition count that the column `partition` was computed for.
COUNT_COLUMN = "partition_count"


def append(
    df: DataFrame,
    *,
    topic: str,
    sink_id: str,
    bootstrap: str | None = None,
    order_by: Sequence[str | Column] = (),
    batch_id: int | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Append the rows to `topic`, each exactly once: all rows of a load, or with `batch_id` a micro-batch of
    foreachBatch.

    `bootstrap`: address of the proxy. `sink_id`: permanent name of the load or stream. `order_by`: order within a Kafka
    partition. `options`: more options of the format, such as `kafka.security.protocol`. Raises SinkError, CannotReach,
    and Spark's exceptions (`stated`).
    """
    chosen = _options(topic, sink_id, bootstrap, options)
    rows = arrange(df, topic=topic, options=chosen, order_by=order_by)
    writer = rows.write.format("fencepost").mode("append").options(**chosen)
    if batch_id is not None:
        writer = writer.option("batch.id", str(batch_id))
    writer.save()


def stream(
    df: DataFrame,
    *,
    topic: str,
    sink_id: str,
    bootstrap: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataStreamWriter:
    """A writer of the streaming rows to `topic`, each exactly once. Set its checkpointLocation and trigger, and start
    it. Parameters and exceptions as for `append`."""
    chosen = _options(topic, sink_id, bootstrap, options)
    return arrange(df, topic=topic, options=chosen).writeStream.format("fencepost").options(**chosen)


def _options(topic: str, sink_id: str, bootstrap: str | None, more: Mapping[str, str] | None) -> dict[str, str]:
    chosen = {**(more or {}), "topic": topic, "sink.id": sink_id, "arranged": "true"}
    if bootstrap is not None:
        chosen["kafka.bootstrap.servers"] = bootstrap
    return chosen


def arrange(
    df: DataFrame,
    partitions: int | None = None,
    *,
    order_by: Sequence[str | Column] = (),
    topic: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Give each Kafka partition one Spark task, with its rows sorted by `order_by`.

    Use it as the last step before `.format("fencepost").option("arranged", "true")`. A row's partition is its column
    `partition`, else the Java producer's partition for its key, else a hash of its value.

    `partitions`: the topic's partition count; None reads that of `topic`, with `options` as for the sink. If the topic
    is expanded later, the sink fails and the query must be restarted.

    `order_by`: rows that it leaves equal, or all rows without it, are sorted by a hash of their content, so that a
    replay repeats the order. Not for streams, which Spark does not sort: tasks then write rows in shuffle order.

    The result has one task per partition; adaptive execution does not change that. Raises SinkError, CannotReach.
    """
    if partitions is None:
        if topic is None or options is None:
            raise SinkError("arrange needs partitions=, or topic= and options= to read the number from Kafka")
        log = Log.shared(client_options(options))
        log.connect()
        partitions = log.partition_count(topic)
    if partitions < 1:
        raise SinkError(f"partitions={partitions}: must be at least 1")
    placed = sf.pmod(sf.xxhash64(sf.col("value")), sf.lit(partitions)).cast("int")
    if "key" in df.columns:
        placed = sf.coalesce(_placement(sf.col("key").cast("binary"), sf.lit(partitions)), placed)
    if "partition" in df.columns:
        placed = sf.coalesce(sf.col("partition").cast("int"), placed)
    arranged = df.withColumn("partition", placed).repartitionById(partitions, sf.col("partition"))
    if not df.isStreaming:
        content = [name for name in COLUMNS if name in arranged.columns]
        arranged = arranged.sortWithinPartitions("partition", *order_by, sf.xxhash64(*content), *content)
    elif order_by:
        raise SinkError("Spark cannot sort a stream (leave order_by out; rows are written in the order of their task)")
    kept = [name for name in COLUMNS if name in arranged.columns]
    return arranged.select(*kept, sf.lit(partitions).cast("int").alias(COUNT_COLUMN))


def _java_placement(key: pa.Array, count: pa.Array) -> pa.Array:
    if not len(key):
        return pa.array([], pa.int32())
    filled = pc.fill_null(key.cast(pa.large_binary()), pa.scalar(b"", pa.large_binary()))
    found = EXECUTOR.java_partitions(filled, count[0].as_py())
    return pc.if_else(key.is_valid(), pa.array(found), pa.scalar(None, pa.int32()))


def _placement(key: Column, count: Column) -> Any:
    return sf.arrow_udf(_java_placement, "int")(key, count)  # type: ignore[attr-defined] # as PySpark lays it out
