"""The format `fencepost` with real Spark, real Kafka and a proxy in between."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, TopicPartition
from kafka.partitioner import murmur2

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import ProxyProcess
from tests.support.spark import QUERY_SECONDS, SPARK_MARKERS, append, contents, create, expand, running_spark

pytestmark = SPARK_MARKERS

ROOT = Path(__file__).parents[2]
PARTITIONS = 3
CHECKED, REQUIRED, COUNT_CHECKED = "checked", "required", "counted"
CONFIG = f"""
[topics."{CHECKED}-*"]
"fencepost.check.expected.offsets" = "true"
[topics."{REQUIRED}-*"]
"fencepost.check.expected.offsets" = "required"
[topics."{COUNT_CHECKED}-*"]
"fencepost.check.expected.offsets" = "true"
"fencepost.check.partition.count" = "true"
"""


proxy = proxy_fixture(config=CONFIG)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    with running_spark(settings) as session:
        yield session  # finds the format: `pyspark_fencepost`


@pytest.fixture
def topic(proxy: ProxyProcess, unique_topic: Callable[..., str]) -> Callable[..., str]:
    def make(kind: str = CHECKED, partitions: int = PARTITIONS) -> str:
        name = unique_topic(kind)
        create(proxy.bootstrap, name, partitions=partitions)
        return name

    return make


def values(kafka: KafkaCluster, topic: str) -> Counter[bytes]:
    return Counter((record.value or b"").strip() for records in contents(kafka, topic).values() for record in records)


def numbers(count: int, start: int = 0) -> Counter[bytes]:
    return Counter(b"%d" % number for number in range(start, start + count))


def rows(spark: Any, count: int, start: int = 0, tasks: int = 2) -> Any:
    return spark.range(start, start + count, 1, tasks).selectExpr(
        "CAST(id % 50 AS STRING) AS key", "CAST(id AS STRING) AS value"
    )


def save(df: Any, proxy: ProxyProcess, topic: str | list[str], sink: str = "load", **more: Any) -> None:
    """`more`: `order_by`, `batch_id`, and options."""
    import fencepost.spark  # noqa: PLC0415

    parameters = {name: more.pop(name) for name in ("order_by", "batch_id") if name in more}
    options = {"kafka.bootstrap.servers": proxy.bootstrap, **more}
    fencepost.spark.append(df, topic=topic, sink_id=sink, options=options, **parameters)


def refusal(spark_call: Callable[[], Any]) -> str:
    import fencepost.spark  # noqa: PLC0415

    with pytest.raises(Exception) as raised:  # noqa: PT011 - Spark's exception, whose text is checked
        spark_call()
    stated = fencepost.spark.stated(raised.value)
    assert stated is not None, raised.value
    return stated


def test_repeated_load_appends_each_row_once(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic(REQUIRED)
    report = tmp_path / "report.json"
    save(rows(spark, 5000), proxy, name, report=str(report))
    first = json.loads(report.read_text())[name]
    assert values(kafka, name) == numbers(5000)
    assert sum(each["appended"] for each in first.values()) == 5000
    assert [first[str(p)]["first"] for p in range(PARTITIONS)] == [0, 0, 0]

    save(rows(spark, 5000), proxy, name, report=str(report))

    again = json.loads(report.read_text())[name]
    assert sum(each["found"] for each in again.values()) == 5000
    assert sum(each["appended"] for each in again.values()) == 0
    found = contents(kafka, name)
    assert sum(map(len, found.values())) == 5000
    for partition, records in found.items():
        assert {(murmur2(r.key or b"") & 0x7FFFFFFF) % PARTITIONS for r in records} == {partition}


def test_load_into_a_recreated_topic_appends_all_rows_despite_an_old_lock(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    name = topic()
    save(rows(spark, 1000), proxy, name)
    # Earlier versions kept a lock and a log end here.
    directory = Path(tempfile.gettempdir(), f"fencepost-spark-{os.getuid()}")
    directory.mkdir(exist_ok=True)
    lock = directory / hashlib.sha256(f"{proxy.bootstrap} load\0{name}".encode()).hexdigest()
    lock.write_text("1000")
    locked = lock.open()
    fcntl.flock(locked, fcntl.LOCK_EX)
    with closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
        admin.delete_topics([name])
        until(lambda: name not in admin.list_topics(), "the deletion")
    create(proxy.bootstrap, name, partitions=PARTITIONS)

    with locked:
        save(rows(spark, 1000), proxy, name, **{"patience.seconds": "20"})

    assert values(kafka, name) == numbers(1000)
    lock.unlink()


def test_micro_batches_of_foreach_batch_are_written_once_each(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    name = topic()
    for batch, tasks in ((0, 2), (1, 2), (1, 3), (0, 2), (2, 2)):
        save(rows(spark, 200, start=200 * batch, tasks=tasks), proxy, name, batch_id=batch)
    assert values(kafka, name) == numbers(600)
    assert "checkpoint" in refusal(lambda: save(rows(spark, 200, start=9000), proxy, name, batch_id=1))
    assert values(kafka, name) == numbers(600)


def test_thread_can_write_after_registering_the_format(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    """Otherwise Spark reports DATA_SOURCE_NOT_FOUND, since a new thread has no active session."""
    import fencepost.spark  # noqa: PLC0415

    name, df = topic(), rows(spark, 100)

    def write() -> None:
        fencepost.spark.register(spark)
        save(df, proxy, name)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(write).result(QUERY_SECONDS)

    assert values(kafka, name) == numbers(100)


# --- interrupted loads ------------------------------------------------------------------------------------------------


#: With these options, the long row of `with_long_row` fails while the rows before it are in flight.
FAILS = {"kafka.max.request.size": "2000", "batch.bytes": "4000"}


def with_long_row(spark: Any, count: int, tasks: int = 2) -> Any:
    """Rows of which the one before the last hundred is long."""
    df = rows(spark, count, tasks=tasks)
    return df.selectExpr("key", f"rpad(value, IF(CAST(value AS INT) = {count - 100}, 3000, 6), ' ') AS value")


def fail_in_the_middle(load: Callable[[], Any], kafka: KafkaCluster, name: str) -> None:
    """On a busy machine a task may reach the long row before it sends its first append. Then try again."""
    for _ in range(10):
        assert "raise that option" in refusal(load)
        if values(kafka, name):
            return
    raise AssertionError("nothing was appended in ten tries")


def other_in_one_partition(spark: Any, kafka: KafkaCluster, name: str) -> Any:
    """The rows of `with_long_row`, but those of a partition of which the topic has some. They are new elsewhere."""
    written = next(partition for partition, records in contents(kafka, name).items() if records)
    keys = [f"{key}" for key in range(50) if (murmur2(b"%d" % key) & 0x7FFFFFFF) % PARTITIONS == written]
    return rows(spark, 4000).selectExpr("key", f"IF(key IN ({','.join(keys)}), value || ' other', value) AS value")


@pytest.mark.parametrize("batch_id", [None, 3])
def test_right_rows_finish_a_batch_after_a_retry_with_others(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], batch_id: int | None
) -> None:
    name = topic(partitions=2)
    placed = rows(spark, 4000).selectExpr("*", "IF(CAST(value AS INT) % 100 = 0, 0, 1) AS partition")

    def load(value: str, **more: Any) -> None:
        save(placed.selectExpr("key", f"{value} AS value", "partition"), proxy, name, batch_id=batch_id, **more)

    # Partition 0 gets no row.
    fail_in_the_middle(lambda: load("IF(partition = 0, rpad(value, 3000, ' '), value)", **FAILS), kafka, name)
    assert values(kafka, name).total() < 4000

    # The task of partition 0 has nothing to compare, and the other one needs longer.
    assert "and the data now has" in refusal(lambda: load("value || ' other'"))
    assert not [each for each in values(kafka, name) if each.endswith(b" other")]

    load("IF(partition = 0, rpad(value, 3000, ' '), value)")
    assert values(kafka, name) == numbers(4000)


def test_batch_continues_after_spark_stopped_a_task_in_the_middle(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    """When a task fails, Spark stops the others. It closes the socket on which they read their rows, and Arrow takes
    that for the end of the rows."""
    import fencepost.spark  # noqa: PLC0415

    name = topic(partitions=2)
    parts = rows(spark, 4000).selectExpr("key", "rpad(value, 300, ' ') AS value", "CAST(value AS INT) % 2 AS partition")
    arranged = fencepost.spark.arrange(parts, 2)

    def write(value: str, **more: Any) -> None:
        placed = arranged.selectExpr("key", f"{value} AS value", "partition", "fencepost_hash", "fencepost_partitions")
        of_batch = {"kafka.bootstrap.servers": proxy.bootstrap, "topic": name, "sink.id": "load", "batch.id": "3"}
        fencepost.spark.append_arranged(placed, of_batch | more)

    # Partition 1 fails after three seconds. Partition 0 needs six.
    delay = "IF(partition = 0, 3L, IF(trim(value) = '1', 3000L, 0L))"
    slow = f"substr(coalesce(reflect('java.lang.Thread', 'sleep', {delay}), '-'), 99)"
    long = "IF(trim(value) = '1', rpad(value, 3000, ' '), value)"
    assert "raise that option" in refusal(lambda: write(f"concat({long}, {slow})", **FAILS))
    assert values(kafka, name).total() < 2000

    write("value")
    assert values(kafka, name) == numbers(4000)


def test_failed_load_resumes_where_it_stopped(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name, report = topic(), tmp_path / "report.json"

    fail_in_the_middle(lambda: save(with_long_row(spark, 4000), proxy, name, **FAILS), kafka, name)
    assert values(kafka, name).total() < 4000

    there = values(kafka, name)
    for other in (rows(spark, 4000, start=9000), other_in_one_partition(spark, kafka, name)):
        assert "and the data now has" in refusal(lambda other=other: save(other, proxy, name))  # type: ignore[misc]
        assert values(kafka, name) == there

    save(with_long_row(spark, 4000, tasks=5), proxy, name, report=str(report))
    done = json.loads(report.read_text())[name].values()
    assert sum(each["found"] for each in done) == there.total()
    assert sum(each["appended"] + each["found"] for each in done) == 4000
    assert values(kafka, name) == numbers(4000)


@pytest.mark.parametrize("first_adaptive", [True, False])
def test_load_continues_with_adaptive_execution_on_or_off(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], first_adaptive: bool
) -> None:
    """Adaptive execution would put rows of several partitions into one task, or split a large one."""
    name, tasks = topic(partitions=5), 9

    def load(adaptive: bool, **more: str) -> None:
        settings = {
            "spark.sql.adaptive.enabled": str(adaptive),
            "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
            "spark.sql.shuffle.partitions": str(tasks),
        }
        before = {each: spark.conf.get(each) for each in settings}
        try:
            for each, setting in settings.items():
                spark.conf.set(each, setting)
            save(with_long_row(spark, 4000).repartition("value"), proxy, name, **more)
        finally:
            for each, setting in before.items():
                spark.conf.set(each, setting)

    fail_in_the_middle(lambda: load(first_adaptive, **FAILS), kafka, name)
    load(not first_adaptive)
    assert values(kafka, name) == numbers(4000)


#: The rows of `with_long_row`, written by another driver, by executors that come and go, and by copies of tasks.
ELSEWHERE = """
import sys
from tests.integration.test_spark_sink import with_long_row
from tests.support.spark import running_spark
import fencepost.spark
cluster = {
    "spark.master": "local-cluster[3,1,1024]",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": "1ms",
    "spark.speculation.interval": "10ms",
}
with running_spark(cluster) as spark:
    assert spark.sparkContext.master == cluster["spark.master"]
    df, (_, topic, bootstrap) = with_long_row(spark, 4000, tasks=7), sys.argv
    fencepost.spark.append(df, topic=topic, sink_id="load", bootstrap=bootstrap)
"""


def test_load_continues_on_another_cluster_that_changes(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    fail_in_the_middle(lambda: save(with_long_row(spark, 4000), proxy, name, **FAILS), kafka, name)
    with (tmp_path / "driver.log").open("w") as log:
        command = [sys.executable, "-c", ELSEWHERE, name, proxy.bootstrap]
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log, timeout=QUERY_SECONDS)
    assert values(kafka, name) == numbers(4000)


def test_rows_are_in_the_asked_order_after_a_failure(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    name = topic(partitions=4)

    def load(tasks: int, **more: str) -> None:
        df = with_long_row(spark, 3000, tasks=tasks).selectExpr("*", "CAST(value AS INT) AS at")
        save(df, proxy, name, order_by=["at"], **more)

    fail_in_the_middle(lambda: load(3, **FAILS), kafka, name)
    load(7)

    assert values(kafka, name) == numbers(3000)
    for partition, records in contents(kafka, name).items():
        order = [int(r.value or b"") for r in records]
        assert order == sorted(order)
        assert {(murmur2(r.key or b"") & 0x7FFFFFFF) % 4 for r in records} <= {partition}


def test_different_data_under_same_sink_id_is_refused(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    name = topic()
    save(rows(spark, 300), proxy, name)
    for other in (rows(spark, 300, start=1), rows(spark, 300).union(rows(spark, 5)), rows(spark, 299)):
        stated = refusal(lambda other=other: save(other, proxy, name))  # type: ignore[misc]
        assert "the topic has rows of this load of sink 'load', and the data now has" in stated
        assert "another sink.id" in stated
    assert values(kafka, name) == numbers(300)
    save(rows(spark, 300, tasks=3), proxy, name)  # the same rows, split differently
    assert values(kafka, name) == numbers(300)

    save(rows(spark, 300), proxy, name, sink="again")  # another sink id: appended after the others
    assert set(values(kafka, name).values()) == {2}
    append(proxy.bootstrap, name, 0, b"foreign")
    save(rows(spark, 300), proxy, name)  # the first load's commit tag lies before others' records
    assert values(kafka, name).total() == 601


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_are_what_sparks_own_sink_has(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    one, two = topic(), topic(COUNT_CHECKED)
    df = spark.range(6).selectExpr(
        f"CASE WHEN id < 3 THEN '{one}' ELSE '{two}' END AS topic",
        "CAST(id AS STRING) AS value",
        "CAST(NULL AS BINARY) AS key",
        "CAST(id % 3 AS INT) AS partition",
        "CAST(1600000000 + id AS TIMESTAMP) AS timestamp",
        "array(named_struct('key', 'h', 'value', CAST(CAST(id AS STRING) AS BINARY))) AS headers",
    )

    save(df, proxy, [one, two], **{"kafka.compression.type": "lz4"})

    for first, name in ((0, one), (3, two)):
        for partition, [record] in contents(kafka, name).items():
            number = first + partition
            assert (record.key, record.value) == (None, b"%d" % number)
            own = [h for h in record.headers if h[0] in ("h", "event-time")]
            assert own == [("h", b"%d" % number), ("event-time", b"%d" % ((1_600_000_000 + number) * 1000))]
            assert {h[0] for h in record.headers} - {"h", "event-time"} == {
                "fencepost-expected-offset",
                "fencepost-sink",
            } | ({"fencepost-partition-count"} if name == two else set())


# --- streams ----------------------------------------------------------------------------------------------------------


class Stream:
    """A query over the files of a directory. Each file is one batch."""

    def __init__(self, spark: Any, proxy: ProxyProcess, topic: str, home: Path) -> None:
        self.spark, self.proxy, self.topic, self.home = spark, proxy, topic, home
        (home / "in").mkdir(parents=True)
        self.checkpoint = home / "checkpoint"

    def file(self, name: str, start: int, count: int = 200) -> None:
        text = "".join(f"{number}\n" for number in range(start, start + count))
        half = self.home / name
        half.write_text(text)
        half.rename(self.home / "in" / name)

    def run(self, sink: str = "stream", *, tasks: int = 2, **more: str) -> None:
        """Process all available files, then stop."""
        import fencepost.spark  # noqa: PLC0415

        df = self.spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(self.home / "in"))
        df = df.selectExpr("CAST(CAST(value AS INT) % 20 AS STRING) AS key", "value").repartition(tasks, "key")
        topic, options = more.pop("topic", self.topic), {"kafka.bootstrap.servers": self.proxy.bootstrap, **more}
        writer = fencepost.spark.stream(df, topic=topic, sink_id=sink, options=options)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_SECONDS)

    def forget_commit(self, batch: int) -> None:
        """Remove a commit, as if the driver had died before it stored it."""
        for name in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink()


def test_stream_appends_each_row_once_despite_old_checkpoint(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic(REQUIRED)
    stream = Stream(spark, proxy, name, tmp_path)
    stream.file("a", 0)
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "backup")
    stream.file("b", 200)
    stream.run()
    assert values(kafka, name) == numbers(400)

    # Batch 1 is repeated, and all its rows are there.
    stream.forget_commit(1)
    stream.run()
    assert values(kafka, name) == numbers(400)

    # With a restored checkpoint, batch 1 is recognized and the stream continues.
    stream.file("c", 400)
    stream.run()
    shutil.rmtree(stream.checkpoint)
    shutil.copytree(tmp_path / "backup", stream.checkpoint)
    stream.run()
    assert values(kafka, name) == numbers(600)

    # Different rows for a known batch are refused.
    shutil.rmtree(stream.checkpoint)
    shutil.copytree(tmp_path / "backup", stream.checkpoint)
    (tmp_path / "in" / "b").unlink()
    stream.file("b2", 9000, count=150)
    stated = refusal(stream.run)
    assert "the checkpoint was restored from before later batches" in stated
    assert values(kafka, name) == numbers(600)


def test_stream_goes_on_whatever_the_split(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    stream = Stream(spark, proxy, name, tmp_path)
    stream.file("a", 0)
    stream.run()
    stream.forget_commit(0)
    stream.file("b", 200)

    stream.run(tasks=5)

    assert values(kafka, name) == numbers(400)


def test_batch_deleted_by_retention_is_not_appended_again(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    stream = Stream(spark, proxy, name, tmp_path)
    for number in range(2):
        stream.file(f"{number}", 200 * number)
        stream.run()
    # The commit of batch 1 is lost, and all its rows are deleted.
    stream.forget_commit(1)
    with closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
        admin.delete_records({TopicPartition(name, each): -1 for each in range(PARTITIONS)})
    # The same session tries the batch again and is refused.
    assert "lost its records below offset" in refusal(stream.run)
    assert not values(kafka, name)
    # A driver that remembers nothing of the sink: retention deleted older records, which is no loss.
    stream.run(sink="rare")
    assert values(kafka, name) == numbers(200, 200)


def test_lost_checkpoint_is_refused_without_new_sink_id(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    stream = Stream(spark, proxy, name, tmp_path)
    stream.file("a", 0)
    stream.run()

    shutil.rmtree(stream.checkpoint)
    stated = refusal(stream.run)
    assert "restore its checkpoint" in stated
    assert "new sink.id" in stated
    assert values(kafka, name) == numbers(200)

    shutil.rmtree(stream.checkpoint)
    stream.run(sink="another")
    assert values(kafka, name) == numbers(200) + numbers(200)


def test_stream_resumes_after_expansion_within_a_batch(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic(COUNT_CHECKED)
    stream = Stream(spark, proxy, name, tmp_path)
    stream.file("a", 0)
    stream.run()
    expand(proxy.bootstrap, name, 6)

    stream.forget_commit(0)
    stream.file("b", 200)
    stream.run()

    assert values(kafka, name) == numbers(400)
    found = contents(kafka, name)
    assert any(found[partition] for partition in (3, 4, 5))
    for partition, records in found.items():
        later = [r for r in records if int(r.value or b"") >= 200]
        assert {(murmur2(r.key or b"") & 0x7FFFFFFF) % 6 for r in later} <= {partition}


# --- SQL --------------------------------------------------------------------------------------------------------------


def test_insert_is_refused_with_the_way_that_works(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    name = topic()
    rows(spark, 300).createOrReplaceTempView("given")
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW target (key STRING, value STRING) USING fencepost OPTIONS "
        f"('kafka.bootstrap.servers' '{proxy.bootstrap}', 'topic' '{name}', 'sink.id' 'insert')"
    )
    insert = "INSERT INTO target SELECT key, value FROM given"
    assert "write them with fencepost.spark.append(df, …)" in refusal(lambda: spark.sql(insert))
    assert not values(kafka, name)
    assert "cannot be overwritten" in refusal(lambda: spark.sql("INSERT OVERWRITE target SELECT * FROM given"))
    assert "cannot be read" in refusal(lambda: spark.sql("SELECT * FROM target").collect())


# --- immediate refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_wrong_target_is_refused_at_once_in_one_sentence(  # noqa: PLR0917 - fixtures
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path, streams: bool
) -> None:
    df, there, unchecked = rows(spark, 10), topic(), topic("open")
    stream = Stream(spark, proxy, there, tmp_path)
    stream.file("a", 0)
    wrong = {
        "topic checked-absent does not exist (create it with the number of partitions that it needs)": {
            "topic": "checked-absent"
        },
        f"topic {there} has no fencepost.check.expected.offsets: kafka.bootstrap.servers is not the proxy (set the "
        "option to the proxy's address)": {"kafka.bootstrap.servers": kafka.bootstrap},
        f"topic {unchecked}: fencepost.check.expected.offsets is off, so rows could be written twice (switch it on: "
        f"kafka-configs.sh --bootstrap-server PROXY --alter --topic {unchecked} "
        "--add-config fencepost.check.expected.offsets=true)": {"topic": unchecked},
        "unknown option 'sinkid'; did you mean 'sink.id'?": {"sinkid": "x"},
    }
    wrong[
        "the proxy: cannot connect to 127.0.0.1:1: Connection refused (check kafka.bootstrap.servers), tried for 10 s"
    ] = {"kafka.bootstrap.servers": "127.0.0.1:1"}
    for sentence, options in wrong.items():
        with pytest.raises(Exception, match=r"\S") as raised:
            stream.run(**options) if streams else save(df, proxy, options.pop("topic", there), **options)
        stated = str(raised.value).split("=== Streaming Query ===")[0]
        assert len(stated.splitlines()) <= 2, stated
        assert stated == sentence or re.search(rf"fencepost\.spark\.errors\.\w+: {re.escape(sentence)}\n", stated)
        assert "PicklingError" not in stated
        assert "Traceback" not in stated


def test_continuous_trigger_is_refused_before_a_query_runs(
    spark: Any, proxy: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Spark would run such a query without Python sinks. It refuses one whose rows are shuffled, as the sink's are."""
    import fencepost.spark  # noqa: PLC0415

    df = spark.readStream.format("rate").load().selectExpr("CAST(value AS STRING) AS value")
    writer = fencepost.spark.stream(df, topic=topic(), sink_id="continuous", bootstrap=proxy.bootstrap)
    with pytest.raises(Exception, match="Continuous processing does not support RepartitionByExpression"):
        writer.option("checkpointLocation", str(tmp_path)).trigger(continuous="1 second").start()
    assert not spark.streams.active


def test_invalid_options_are_refused_before_the_first_row(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, topic: Callable[..., str]
) -> None:
    import fencepost.spark  # noqa: PLC0415

    name = topic()
    df = rows(spark, 10)
    assert "option 'sink.id' is required" in refusal(lambda: save(df, proxy, name, sink=""))
    assert "no column 'value'" in refusal(lambda: save(df.drop("value"), proxy, name))
    with pytest.raises(Exception, match="rows are not arranged"):
        df.write.format("fencepost").mode("append").options(**{
            "kafka.bootstrap.servers": proxy.bootstrap, "topic": name, "sink.id": "plain"
        }).save()  # fmt: skip
    arranged = fencepost.spark.arrange(df, PARTITIONS)
    moved = arranged.repartition(2, "value").write.format("fencepost").mode("append")
    moved = moved.option("kafka.bootstrap.servers", proxy.bootstrap).option("topic", name).option("sink.id", "moved")
    assert "has rows of other tasks" in refusal(moved.save)
    without_ends = arranged.filter("value IS NOT NULL")
    of_load = {"kafka.bootstrap.servers": proxy.bootstrap, "topic": name, "sink.id": "filtered"}
    assert "keep the rows with a negative fencepost_hash" in refusal(
        lambda: fencepost.spark.append_arranged(without_ends, of_load)
    )
    assert values(kafka, name).total() <= 10
