"""Reads a topic with ordered partition expansion as a stream, in order per key (KIP-253).

Spark's Kafka source reads all partitions of a micro-batch at once. So an added partition joins the query only after a
micro-batch with the rest of its prior partitions is finished. To add it, the query restarts from its checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fencepost._ordering import TopicOrder, every, expansions_of
from fencepost.spark.errors import SinkError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Interval of checks for expansions and for partitions that may now be read.
REFRESH_SECONDS = 2
#: How long to wait for a micro-batch before interrupting it. Spark then repeats it with the same partitions.
INTERRUPT_SECONDS = 60.0


def read_ordered(
    spark: SparkSession,
    topic: str,
    start: Callable[[DataFrame], StreamingQuery],
    *,
    checkpoint: str,
    options: Mapping[str, str],
) -> None:
    """Run a streaming query over `topic` that reads an added partition after its prior partitions.

    `start(rows)` starts the query and returns it. It is called again, with the same checkpoint, each time that a
    partition is added. `rows` has the columns of Spark's Kafka source, and is not shuffled: a query that shuffles loses
    the order. `checkpoint`: the query's checkpointLocation. `options`: those of Spark's Kafka source, with the proxy as
    kafka.bootstrap.servers.

    Returns when the query has ended and no partition is left to add. Raises CheckIsOffError if the topic has no ordered
    expansion, SinkError if the topic cannot be described, StreamingQueryException if the query fails.
    """
    positions = finished(spark, topic, checkpoint)
    # A new query that starts at the latest offsets may read all partitions.
    skips = not positions and options.get("startingOffsets") == "latest"
    partitions = _readable(spark, topic, options, positions, skips=skips)
    while True:
        reader = spark.readStream.format("kafka").options(**{"startingOffsets": "earliest", **options})
        query = start(reader.option("assign", json.dumps({topic: partitions})).load())
        try:
            ended, now = False, partitions
            while not ended and now == partitions:
                ended = bool(query.awaitTermination(REFRESH_SECONDS))
                positions = finished(spark, topic, checkpoint)
                now = _readable(spark, topic, options, positions, skips=skips and not positions)
        finally:
            _stop(query)
        if now == partitions:
            return
        partitions = now


def _readable(
    spark: SparkSession, topic: str, options: Mapping[str, str], positions: Mapping[int, int], *, skips: bool
) -> list[int]:
    """The partitions that a query may read, given the end offsets of its last micro-batch."""
    order = TopicOrder(topic, every)
    count, configs = described(spark, topic, options)
    order.learn(count, expansions_of(topic, configs))
    order.opened = set(positions)
    waiting = {each: order.waiting(each, positions) for each in range(count)}
    # Without prior partitions, the thresholds are not known yet.
    return [each for each, waits in waiting.items() if waits is None or (skips and waits.prior_partitions)]


def described(spark: SparkSession, topic: str, options: Mapping[str, str]) -> tuple[int, dict[str, str | None]]:
    """The topic's partition count and configs, read with the connector's own Kafka client. Raises SinkError."""
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415 - Spark Connect works without it

    jvm: Any = spark.sparkContext._jvm
    settings = jvm.java.util.HashMap()
    for name, value in options.items():
        if name.startswith("kafka."):
            settings.put(name.removeprefix("kafka."), value)
    resource = jvm.org.apache.kafka.common.config.ConfigResource
    named = resource(getattr(resource, "Type").TOPIC, topic)  # noqa: B009 - Java's Type, not an attribute
    try:
        with closing(jvm.org.apache.kafka.clients.admin.Admin.create(settings)) as admin:
            # Read the count first: an expansion is described before its partitions exist.
            count = admin.describeTopics([topic]).allTopicNames().get().get(topic).partitions().size()
            entries = admin.describeConfigs([named]).all().get().get(named).entries().toArray()
            return int(count), {str(each.name()): each.value() for each in entries}
    except Py4JJavaError as error:
        raise SinkError(f"cannot describe topic {topic}: {_cause(error.java_exception)}") from None


def _cause(error: Any) -> str:
    while error.getCause() is not None:
        error = error.getCause()
    return f"{error.getClass().getSimpleName()}: {error.getMessage()}"


def finished(spark: SparkSession, topic: str, checkpoint: str) -> dict[int, int]:
    """{partition: end offset of the last finished micro-batch} from the checkpoint; empty for a new checkpoint."""
    jvm: Any = spark.sparkContext._jvm
    path = jvm.org.apache.hadoop.fs.Path
    commits = path(f"{checkpoint}/commits")
    files = commits.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    if not files.exists(commits):
        return {}
    names = [status.getPath().getName() for status in files.listStatus(commits)]
    batches = [int(name) for name in names if name.isdigit()]
    if not batches:
        return {}
    opened = files.open(path(f"{checkpoint}/offsets/{max(batches)}"))
    try:
        text = str(jvm.org.apache.commons.io.IOUtils.toString(opened, "UTF-8"))
    finally:
        opened.close()
    # The file has a version line, a metadata line, and one line per source ("-" if it has no offset yet).
    sources = [json.loads(line) for line in text.splitlines()[2:] if line.startswith("{")]
    return {int(partition): offset for each in sources for partition, offset in each.get(topic, {}).items()}


def _stop(query: StreamingQuery) -> None:
    """Stop between two micro-batches if possible, because an interrupted one is written again."""
    deadline = time.monotonic() + INTERRUPT_SECONDS
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    query.stop()
