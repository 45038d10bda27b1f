"""A separate Spark driver that can be killed: Spark's Kafka source, a mapping and the sink, without a shuffle.

Arguments: Kafka, the proxy, the source's topics separated by commas, the target, the checkpoint. It ends when all
records that existed at its start are written.
"""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    warnings.simplefilter("ignore")
    from fencepost.spark import register  # noqa: PLC0415 - its import warns
    from fencepost_dev.jars import fetch  # noqa: PLC0415
    from tests.support.spark import running_spark  # noqa: PLC0415

    kafka, proxy, sources, target, checkpoint = sys.argv[1:]
    settings = {
        "spark.jars": ",".join(map(str, fetch("spark-kafka"))),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    with running_spark(settings) as spark:
        register(spark)
        read = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka).option("subscribe", sources)
        mapped = read.option("startingOffsets", "earliest").load().selectExpr("key", "value")
        options = {"kafka.bootstrap.servers": proxy, "topic": target, "sink.id": "mapped", "batch.bytes": "4000"}
        writer = mapped.writeStream.format("fencepost").options(**options).trigger(availableNow=True)
        writer.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main()
