"""Rows of Spark into Kafka, each once, whatever dies: the format `fencepost`.

    import fencepost.spark

    fencepost.spark.register(spark)
    df.writeStream.format("fencepost").option("kafka.bootstrap.servers", PROXY).option("topic", "flights").option(
        "sink.id", "flights-1"
    ).option("checkpointLocation", …).start()

Needs `pip install fencepost[spark]` on the driver and on the workers, Spark 4.1 or later, and no jar.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fencepost.spark.arranging import arrange
from fencepost.spark.datasource import FencepostDataSource
from fencepost.spark.errors import LogRefused, SinkError
from fencepost.spark.options import client_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FencepostDataSource", "LogRefused", "SinkError", "arrange", "client_options", "register", "stated"]


def register(spark: SparkSession) -> None:
    """Makes the format `fencepost` known to a session: once, and in each thread of your own that writes.

    Spark looks a format up in its thread's active session. A new thread has none, until it makes a frame.
    """
    spark.dataSource.register(FencepostDataSource)
    spark.createDataFrame([], "nothing INT")


def stated(error: BaseException) -> str | None:
    """What the sink said, out of Spark's exception with its traces; None where it was not the sink."""
    found = re.findall(r"fencepost\.spark\.\w+\.\w+: ([^\n]+)", str(error))
    return str(found[-1]).strip() if found else None
