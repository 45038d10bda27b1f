"""Writes rows of Spark to Kafka: arranges them, then uses the format `fencepost`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fencepost.spark.arranging import arrange
from fencepost.spark.datasource import compare

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def append(
    df: DataFrame,
    *,
    topic: str | Sequence[str],
    sink_id: str,
    bootstrap: str | None = None,
    order_by: Sequence[str | Column] = (),
    batch_id: int | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Append the rows to `topic`, each exactly once: all rows of a load, or with `batch_id` a micro-batch of
    foreachBatch.

    `topic`: several if the column `topic` names the topic of each row. `bootstrap`: address of the proxy. `sink_id`:
    permanent name of the load or stream. `order_by`: order within a Kafka partition. `options`: more options of the
    format, such as `kafka.security.protocol`. Raises SinkError, CannotReach, and Spark's exceptions (`stated`).
    """
    chosen = _options(topic, sink_id, bootstrap, options)
    if batch_id is not None:
        chosen["batch.id"] = str(batch_id)
    append_arranged(arrange(df, topic=topic, options=chosen, order_by=order_by), chosen)


def append_arranged(rows: DataFrame, options: Mapping[str, str]) -> None:
    """Append rows of `arrange`, as `append` does. If the topic has a part of them, all are compared with that part
    first: other data is refused before any of it is appended. `options`: of the format. Exceptions as for `append`."""
    compare(rows, options)
    rows.write.format("fencepost").mode("append").options(**options).save()


def stream(
    df: DataFrame,
    *,
    topic: str | Sequence[str],
    sink_id: str,
    bootstrap: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataStreamWriter:
    """A writer of the streaming rows to `topic`, each exactly once. Set its checkpointLocation and trigger, and start
    it. Parameters and exceptions as for `append`."""
    chosen = _options(topic, sink_id, bootstrap, options)
    return arrange(df, topic=topic, options=chosen).writeStream.format("fencepost").options(**chosen)


def _options(
    topic: str | Sequence[str], sink_id: str, bootstrap: str | None, more: Mapping[str, str] | None
) -> dict[str, str]:
    chosen = {**(more or {}), "sink.id": sink_id}
    chosen |= {"topic": topic} if isinstance(topic, str) else {"topics": ",".join(topic)}
    if bootstrap is not None:
        chosen["kafka.bootstrap.servers"] = bootstrap
    return chosen
