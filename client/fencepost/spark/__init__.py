"""Exactly-once writes from Spark to Kafka: the format `fencepost`.

    fencepost.spark.append(df, topic="flights", sink_id="flights-2013", bootstrap=PROXY)
    writer = fencepost.spark.stream(df, topic="enriched", sink_id="enrich", bootstrap=PROXY)
    writer.option("checkpointLocation", …).start()

Requires `pip install fencepost[spark]` on the driver and all workers, and Spark 4.1 or later. No jar.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakSet

from fencepost.spark.arranging import arrange
from fencepost.spark.calls import append, append_arranged, stream
from fencepost.spark.datasource import FencepostDataSource
from fencepost.spark.errors import CannotReach, LogRefused, SinkError
from fencepost.spark.options import client_options
from fencepost.spark.ordered import read_ordered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "FencepostDataSource",
    "LogRefused",
    "SinkError",
    "append",
    "append_arranged",
    "arrange",
    "client_options",
    "read_ordered",
    "register",
    "stated",
    "stream",
]


def register(spark: SparkSession) -> None:
    """Register the format `fencepost`, if Spark does not find it: only an installed package has `pyspark_fencepost`.

    Call it once, and in each additional thread that writes.

    Spark looks up formats in the thread's active session, and a new thread has none until it creates a frame.
    """
    if spark not in _registered:  # Spark warns when a format is replaced
        spark.dataSource.register(FencepostDataSource)
        _registered.add(spark)
    spark.createDataFrame([], "nothing INT")


_registered: WeakSet[SparkSession] = WeakSet()


def stated(error: BaseException) -> str | None:
    """The sink's message from an exception; None if the sink did not raise it."""
    if isinstance(error, (SinkError, CannotReach)):
        return str(error)
    found = re.findall(r"fencepost\.spark\.\w+\.\w+: ([^\n]+)", str(error))
    return str(found[-1]).strip() if found else None
