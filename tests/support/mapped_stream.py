"""A separate Spark driver that can be killed: Spark's Kafka source, a mapping and the sink.

Arguments: Kafka, the proxy, the source's topics separated by commas, the target, the checkpoint, and `ordered` to read
an expanded topic in order. It ends when all records that existed at its start are written.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any


def main() -> None:
    warnings.simplefilter("ignore")
    from fencepost.spark import read_ordered, register, stream  # noqa: PLC0415 - its import warns
    from fencepost_dev.jars import fetch  # noqa: PLC0415
    from tests.support.spark import running_spark  # noqa: PLC0415

    kafka, proxy, sources, target, checkpoint, *ordered = sys.argv[1:]
    settings = {
        "spark.jars": ",".join(map(str, fetch("spark-kafka"))),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    with running_spark(settings) as spark:
        register(spark)
        options = {"kafka.bootstrap.servers": proxy, "batch.bytes": "4000"}

        def start(rows: Any) -> Any:
            writer = stream(rows.selectExpr("key", "value"), topic=target, sink_id="mapped", options=options)
            return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()

        if ordered:
            source = {"kafka.bootstrap.servers": proxy}
            read_ordered(spark, sources, start, checkpoint=checkpoint, options=source)
        else:
            read = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka)
            start(read.option("subscribe", sources).option("startingOffsets", "earliest").load()).awaitTermination()


if __name__ == "__main__":
    main()
