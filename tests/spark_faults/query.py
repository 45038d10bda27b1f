"""The query under test, with points among its rows. Drivers and workers import this module."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tests.spark_faults import gates

SCHEMA = "id BIGINT, key STRING, counter BIGINT, text STRING"
#: Small, so that the rows before a point reach Kafka soon.
ROWS_AT_ONCE = 100
BATCH_BYTES = 40 * 1024
FENCEPOST, KAFKA = "fencepost", "kafka"
SINKS = FENCEPOST, KAFKA


def batch_of(context: Any) -> str:
    """0 in `df.write`."""
    return context.getLocalProperty("streaming.sql.batchId") or "0"


def sequenced_topics(let_through: int) -> Any:
    """Points among a task's rows: `task` before the first, `rows` after `let_through` of them, `all` after the last."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        assert context is not None
        batch, task = batch_of(context), context.partitionId()
        gates.note(f"started.{batch}.{task}.{context.attemptNumber()}")
        gates.passing(gates.point("task", batch, task))
        passed = 0
        for rows in batches:
            # The last row of a task has no key.
            gates.note(f"key.{batch}.{task}.{passed}", rows.column("key")[0].as_py() or "")
            yield rows
            if passed < let_through <= passed + rows.num_rows:
                gates.passing(gates.point("rows", batch, task))
            passed += rows.num_rows
        gates.passing(gates.point("all", batch, task))

    return pass_on


class Running:
    """A started query, or one `df.write` in a separate thread."""

    def __init__(self, spark: Any, requested: dict[str, Any]) -> None:
        self._spark = spark
        self._error = ""
        self._query: Any = None
        self._thread: threading.Thread | None = None
        if requested["load"]:
            self._thread = threading.Thread(target=self._load, args=(requested,), daemon=True)
            self._thread.start()
        else:
            self._query = _stream(spark, requested)

    @property
    def state(self) -> dict[str, Any]:
        if self._thread is not None:
            return {"active": self._thread.is_alive(), "error": self._error}
        error = self._query.exception()
        return {"active": self._query.isActive, "error": "" if error is None else str(error)}

    def stop(self) -> None:
        if self._thread is None:
            self._query.stop()
        else:
            self._spark.sparkContext.cancelAllJobs()
            self._thread.join(60)

    def _load(self, requested: dict[str, Any]) -> None:
        try:
            # Spark looks up Python formats in the thread's session, and a new thread has none.
            self._spark._jvm.org.apache.spark.sql.SparkSession.setActiveSession(self._spark._jsparkSession)
            rows = self._spark.read.schema(SCHEMA).parquet(requested["source"])
            rows, chosen = _shaped(rows, requested), options(requested)
            if requested["sink"] == FENCEPOST:
                from fencepost.spark import append_arranged  # noqa: PLC0415

                append_arranged(rows, chosen)
            else:
                rows.write.format(requested["sink"]).mode("append").options(**chosen).save()
        except Exception as error:
            self._error = str(error)


def _stream(spark: Any, requested: dict[str, Any]) -> Any:
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", requested["files"]).parquet(requested["source"])
    writer = _shaped(rows, requested).writeStream.format(requested["sink"]).queryName(requested["name"])
    for name, text in options(requested).items():
        writer = writer.option(name, text)
    return (
        writer.option("checkpointLocation", requested["checkpoint"]).trigger(processingTime="500 milliseconds").start()
    )


def _shaped(rows: Any, requested: dict[str, Any]) -> Any:
    """`requested` – a `stage.Query` as a dictionary, with the settings of its trial."""
    value = f"concat('{requested['prefix']}', id, ' ', counter, ' ', text) AS value"
    # One task reads a file, so each key's rows keep their order through the shuffle.
    placed = rows.repartition(requested["tasks"], "key").selectExpr("key", value, "counter")
    if requested["sink"] == FENCEPOST:
        from fencepost.spark import arrange  # noqa: PLC0415

        placed = arrange(placed, requested["partitions"], order_by=["counter"] if requested["load"] else ())
    else:
        placed = placed.drop("counter")
    return placed.mapInArrow(sequenced_topics(requested["let_through"]), placed.schema)


def options(requested: dict[str, Any]) -> dict[str, str]:
    chosen = {
        "kafka.bootstrap.servers": requested["bootstrap"],
        "topic": requested["topic"],
    }
    if requested["sink"] == FENCEPOST:
        chosen |= {"sink.id": requested["sink_id"], "batch.bytes": str(BATCH_BYTES), **requested["options"]}
    return chosen


def register(spark: Any) -> None:
    from tests.spark_faults.gated_sink import GatedSink  # noqa: PLC0415

    spark.dataSource.register(GatedSink)
