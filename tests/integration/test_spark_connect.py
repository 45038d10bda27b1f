"""The sink in a Spark Connect session: a load and a stream, each started twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fencepost_dev.cluster import KafkaCluster
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection
from tests.support.spark import QUERY_SECONDS, SETTINGS, SPARK_MARKERS, contents

pytestmark = SPARK_MARKERS

#: In its own process: PySpark has classic or Connect sessions, not both.
_JOBS = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from fencepost.spark import append, register, stream

bootstrap, topic, directory, *settings = sys.argv[1:]
builder = SparkSession.builder.remote("local[2]")
for setting in settings:
    builder = builder.config(*setting.split("=", 1))
spark = builder.getOrCreate()
assert "connect" in type(spark).__module__
register(spark)
for _ in range(2):
    rows = spark.range(100).selectExpr("CAST(id AS STRING) AS value")
    append(rows, topic=topic, sink_id="load", bootstrap=bootstrap)
for number in range(2):
    Path(directory, "rows", str(number)).write_text(f"row {number}")
    lines = stream(spark.readStream.text(directory + "/rows"), topic=topic, sink_id="stream", bootstrap=bootstrap)
    lines.option("checkpointLocation", directory + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""


def test_load_and_stream_of_spark_connect_write_each_row_once(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic("required")
    with Connection(proxy.bootstrap) as admin:
        assert admin.create_topic(topic, partitions=2) == (0, None)
    (tmp_path / "rows").mkdir()
    settings = [f"{name}={given}" for name, given in SETTINGS.items()]

    ended = subprocess.run(
        [sys.executable, "-c", _JOBS, proxy.bootstrap, topic, str(tmp_path), *settings],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=QUERY_SECONDS,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr[-4000:]
    written = Counter(record.value for records in contents(kafka, topic).values() for record in records)
    assert written == Counter([b"%d" % number for number in range(100)] + [b"row 0", b"row 1"])
