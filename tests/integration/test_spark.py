"""Real Spark, real Kafka, the proxy between: the connector, and the jobs of spark_jobs/ with what should break them."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import PolicyViolationError
from kafka.admin import KafkaAdminClient, NewPartitions, NewTopic
from kafka.partitioner import murmur2

from fencepost_proxy.dev.cluster import KafkaCluster
from fencepost_proxy.dev.jars import fetch
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.no_cover,
    pytest.mark.spark,
    pytest.mark.timeout(240),
    # PySpark's own: sockets that it leaves to the garbage collector, and what it thinks of this pandas.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

JOBS = Path(__file__).parents[2] / "spark_jobs"
PARTITIONS = 2
#: Topics that begin with this are guarded from birth by the proxy's configuration.
GUARDED = "guarded"
#: These grow in order.
ORDERED = "ordered"
CONFIG = f"""
[topics."{GUARDED}-*"]
"check.expected.offsets" = "required"
[topics."{ORDERED}-*"]
"ordered.partition.expansion" = "true"
"""
SPARK_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "OFF",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class Read(NamedTuple):
    """A record as it lies in Kafka."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), config=CONFIG) as process:
        yield process


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyspark.sql import SparkSession  # noqa: PLC0415 - its import warns

        builder = SparkSession.builder.master("local[2]").config("spark.jars", ",".join(map(str, fetch("spark-kafka"))))
        for name, value in SPARK_SETTINGS.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        # Workers find the job's functions by their module's name, since it is not the main one here.
        session.sparkContext.addPyFile(str(JOBS / "bulk_load.py"))
        yield session
        session.stop()


def job(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def create(kafka: KafkaCluster | ProxyProcess, *topics: str, partitions: int = PARTITIONS) -> None:
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    try:
        admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])
    finally:
        admin.close()


def contents(kafka: KafkaCluster, topic: str) -> dict[int, list[Read]]:
    """All records of a topic by partition, read from Kafka itself."""
    return asyncio.run(_contents(kafka.bootstrap, topic))


async def _contents(bootstrap: str, topic: str) -> dict[int, list[Read]]:
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        found: dict[int, list[Read]] = {at.partition: [] for at in sorted(ends)}
        async with asyncio.timeout(30):
            while any([await consumer.position(at) < end for at, end in ends.items()]):
                for at, records in (await consumer.getmany(timeout_ms=200)).items():
                    found[at.partition] += [Read(r.offset, r.key, r.value, tuple(r.headers)) for r in records]
    return found


def ends(kafka: KafkaCluster, topic: str) -> dict[int, int]:
    async def ask() -> dict[int, int]:
        async with AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap) as consumer:
            return {at.partition: end for at, end in (await consumer.end_offsets(consumer.assignment())).items()}

    return asyncio.run(ask())


def append(bootstrap: str, topic: str, partition: int, expected: int, value: bytes) -> None:
    """A writer of another kind. Raises PolicyViolationError where it is refused."""

    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
            headers = [("expected-offset", b"%d" % expected)]
            await producer.send_and_wait(topic, value, partition=partition, headers=headers)

    asyncio.run(send())


# --- Spark's own connector --------------------------------------------------------------------------------------------


def test_batch_source_and_sink_are_as_without_the_proxy(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topics = {kafka.bootstrap: unique_topic("direct"), proxy.bootstrap: unique_topic("proxied")}
    create(kafka, *topics.values())
    rows = spark.range(500).selectExpr(
        "CAST(id AS STRING) AS key",
        "CAST(concat('value ', id) AS BINARY) AS value",
        "CAST(id % 2 AS INT) AS partition",
        "array(named_struct('key', 'h', 'value', CAST(CAST(id AS STRING) AS BINARY))) AS headers",
    )
    read = {}
    for bootstrap, topic in topics.items():
        rows.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", bootstrap).option(
            "topic", topic
        ).save()
        source = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
        found = source.option("includeHeaders", "true").load()
        read[bootstrap] = [
            tuple(row)
            for row in found.select("partition", "offset", "key", "value", "headers")
            .sort("partition", "offset")
            .collect()
        ]

    assert len(read[kafka.bootstrap]) == 500
    assert read[proxy.bootstrap] == read[kafka.bootstrap]
    assert contents(kafka, topics[proxy.bootstrap]) == contents(kafka, topics[kafka.bootstrap])


def test_streaming_source_and_sink_are_as_without_the_proxy(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source = unique_topic("source")
    topics = {kafka.bootstrap: unique_topic("direct"), proxy.bootstrap: unique_topic("proxied")}
    create(kafka, source, *topics.values())
    stream = job("stream")
    for first in (0, 300):  # the second round resumes from the checkpoint
        rows = spark.range(first, first + 300).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
        rows.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", kafka.bootstrap).option(
            "topic", source
        ).save()
        for bootstrap, topic in topics.items():
            sql = "SELECT key, concat('seen ', CAST(value AS STRING)) AS value FROM source"
            command = (
                f"--bootstrap {bootstrap} --from {source} --to {topic} --checkpoint {tmp_path / topic} --once --sql"
            )
            args = stream.arguments().parse_args([*command.split(), sql])
            assert stream.start(spark, args).awaitTermination(60)

    direct, proxied = (contents(kafka, topic) for topic in topics.values())
    assert sum(map(len, proxied.values())) == 600
    assert {p: [r.value for r in records] for p, records in proxied.items()} == {
        p: [r.value for r in records] for p, records in direct.items()
    }


def expecting(spark: Any, values: list[str], first_offset: int) -> Any:
    rows = [(0, value, [("expected-offset", str(first_offset + n).encode())]) for n, value in enumerate(values)]
    schema = "partition INT, value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    return spark.createDataFrame(rows, schema).coalesce(1)


def test_headers_column_makes_a_write_conditional(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic(GUARDED)
    create(kafka, topic)

    def write(rows: Any) -> None:
        rows.write.format("kafka").option("kafka.bootstrap.servers", proxy.bootstrap).option("topic", topic).save()

    write(expecting(spark, ["a", "b", "c"], 0))
    write(expecting(spark, ["d"], 3))
    for stale in (0, 3, 5):
        with pytest.raises(Exception, match=rf"OFFSET_MISMATCH topic={topic} partition=0 expected={stale} actual=4"):
            write(expecting(spark, ["x"], stale))
    with pytest.raises(Exception, match="EXPECTATION_REQUIRED"):
        write(spark.createDataFrame([(0, "x")], "partition INT, value STRING"))

    assert [record.value for record in contents(kafka, topic)[0]] == [b"a", b"b", b"c", b"d"]


# --- stream.py --------------------------------------------------------------------------------------------------------


def test_a_conditional_stream_appends_once_although_its_commit_was_lost(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target, unguarded = unique_topic("source"), unique_topic(GUARDED), unique_topic("open")
    create(kafka, source, target, unguarded)
    rows = spark.range(200).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    rows.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", kafka.bootstrap).option(
        "topic", source
    ).save()
    stream = job("stream")
    checkpoint = tmp_path / "checkpoint"

    def mirror(target: str = target) -> None:
        command = f"--bootstrap {proxy.bootstrap} --from {source} --to {target} --checkpoint {checkpoint} --once"
        command += " --expected-offset e --write-id id --sql"
        sql = "SELECT key, value, partition, offset AS e, concat('m/', partition, '/', offset) AS id FROM source"
        args = stream.arguments().parse_args([*command.split(), sql])
        assert stream.start(spark, args).awaitTermination(60)

    mirror()
    once = contents(kafka, target)
    assert {p: [r.value for r in found] for p, found in once.items()} == {
        p: [r.value for r in found] for p, found in contents(kafka, source).items()
    }

    # Killed between the sink's last write and Spark's commit: the micro-batch is written again.
    for lost in (checkpoint / "commits").glob("*0*"):
        lost.unlink()
    mirror()
    assert contents(kafka, target) == once

    # Another checkpoint, so the same rows, but somebody else's record is where the 200th of a partition should go.
    shutil.rmtree(checkpoint)
    append(proxy.bootstrap, target, 0, len(once[0]), b"somebody else's")
    append(kafka.bootstrap, source, 0, -1, b"one more")
    with pytest.raises(Exception, match="OFFSET_MISMATCH"):
        mirror()
    assert len(contents(kafka, target)[0]) == len(once[0]) + 1

    with pytest.raises(stream.CheckIsOff, match="would be ignored"):
        mirror(unguarded)


def test_a_stream_reads_a_growing_topic_in_order(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """Each row of the target has the source's partition in its value; the target has one partition, so its order is
    that in which the query read."""
    source, target = unique_topic(ORDERED), unique_topic("target")
    create(proxy, source)
    create(kafka, target, partitions=1)
    stream = job("stream")
    command = f"--bootstrap {proxy.bootstrap} --from {source} --to {target} --checkpoint {tmp_path / 'c'} --once --sql"
    sql = "SELECT CAST(concat(partition, '/', offset) AS BINARY) AS value FROM source"
    args = stream.arguments().parse_args([*command.split(), sql])

    def fill(partitions: int) -> None:
        for partition in range(partitions):
            for _ in range(5):
                append(proxy.bootstrap, source, partition, -1, b"x")

    def grow(count: int) -> None:
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
            admin.create_partitions({source: NewPartitions(count)})

    fill(2)
    grow(4)
    fill(4)
    grow(8)
    fill(8)
    stream.run(spark, args)

    seen = [(record.value or b"").decode() for record in contents(kafka, target)[0]]
    assert len(seen) == len(set(seen)) == 5 * (2 + 4 + 8)
    first = {partition: seen.index(f"{partition}/0") for partition in range(8)}
    for new, priors in {2: {0: 5, 1: 5}, 3: {0: 5, 1: 5}, 7: {0: 10, 1: 10, 2: 5, 3: 5}}.items():
        for prior, threshold in priors.items():
            assert seen.index(f"{prior}/{threshold - 1}") < first[new], (new, prior)

    # Once more: what it read is read, and a partition that was opened stays open.
    fill(8)
    stream.run(spark, args)
    assert len(contents(kafka, target)[0]) == 5 * (2 + 4 + 8 + 8)


def test_a_stream_that_runs_takes_in_what_a_growth_brings(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target = unique_topic(ORDERED), unique_topic("target")
    create(proxy, source)
    create(kafka, target, partitions=1)
    stream = job("stream")
    command = f"--bootstrap {proxy.bootstrap} --from {source} --to {target} --checkpoint {tmp_path / 'c'} --sql"
    args = stream.arguments().parse_args([*command.split(), "SELECT value FROM source"])
    append(proxy.bootstrap, source, 0, -1, b"before")

    def follow() -> None:
        with contextlib.suppress(AssertionError):  # how it is told to end
            stream.run(spark, args)

    runner = threading.Thread(target=follow)
    runner.start()
    try:
        wait_until(lambda: len(contents(kafka, target)[0]) == 1)
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
            admin.create_partitions({source: NewPartitions(4)})
        append(proxy.bootstrap, source, 3, -1, b"after")
        wait_until(lambda: len(contents(kafka, target)[0]) == 2)
    finally:
        stream.growth = lambda *_: None  # so that it starts no other
        for query in spark.streams.active:
            query.stop()
        runner.join(60)
        sys.modules.pop("stream")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# --- bulk_load.py -----------------------------------------------------------------------------------------------------


def write_csv(file: Path, count: int) -> list[dict[str, str]]:
    """Rows, some of them equal to each other, with names that repeat."""
    choice = random.Random(7)
    rows = [
        {"id": str(n // 2), "name": f"n{choice.randrange(200)}", "text": "x" * choice.randrange(40)}
        for n in range(count)
    ]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["id", "name", "text"])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def said(records: list[Read]) -> list[tuple[str, ...]]:
    """The rows in records that are rows; an empty CSV field is null in JSON."""
    return [
        tuple(value or "" for value in json.loads(r.value).values()) for r in records if r.value and r.value[:1] == b"{"
    ]


def assert_each_row_once(kafka: KafkaCluster, topic: str, rows: list[dict[str, str]], *, others: int = 0) -> None:
    found = contents(kafka, topic)
    assert Counter(row for records in found.values() for row in said(records)) == Counter(
        tuple(row.values()) for row in rows
    )
    assert sum(map(len, found.values())) == len(rows) + others
    for records in found.values():
        assert [record.offset for record in records] == list(range(len(records)))


def bulk_load(spark: Any, proxy: ProxyProcess, topic: str, file: Path, *more: str) -> list[Any]:
    module = job("bulk_load")
    args = module.arguments().parse_args(
        ["--input", str(file), "--bootstrap", proxy.bootstrap, "--topic", topic, "--patience", "30", *more]
    )
    outcomes: list[Any] = module.load(spark, args, module.settings_of(args))
    return outcomes


def test_bulk_load_is_complete_and_a_second_run_adds_nothing(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic(GUARDED)
    create(kafka, topic)
    rows = write_csv(tmp_path / "rows.csv", 5000)

    first = bulk_load(spark, proxy, topic, tmp_path / "rows.csv")
    assert [(o.problem, o.rows_found) for o in first] == [(None, 0)] * PARTITIONS
    assert_each_row_once(kafka, topic, rows)

    # Spark splits the file otherwise, the batches are others: each row's place is the same.
    before = spark.conf.get("spark.sql.files.maxPartitionBytes")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "20000")
    try:
        again = bulk_load(spark, proxy, topic, tmp_path / "rows.csv", "--batch-records", "7")
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", before)
    assert [(o.problem, o.rows_found, o.rows_appended) for o in again] == [(None, o.rows_appended, 0) for o in first]

    # Another input under the same name.
    text = (tmp_path / "rows.csv").read_text().replace("n1", "m1")
    (tmp_path / "rows.csv").write_text(text)
    changed = bulk_load(spark, proxy, topic, tmp_path / "rows.csv")
    assert all("are not those of this input" in o.problem for o in changed)
    assert_each_row_once(kafka, topic, rows)


def test_bulk_load_needs_the_check_and_the_topic(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic("open")
    create(kafka, topic)
    write_csv(tmp_path / "rows.csv", 10)
    with pytest.raises(job("bulk_load").LoadError, match=r"check\.expected\.offsets=false"):
        bulk_load(spark, proxy, topic, tmp_path / "rows.csv")
    with pytest.raises(job("bulk_load").LoadError, match="create it first"):
        bulk_load(spark, proxy, unique_topic(GUARDED), tmp_path / "rows.csv")
    assert contents(kafka, topic) == {0: [], 1: []}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_bulk_load_puts_keys_where_kafka_clients_do_in_the_order_of_the_file(  # noqa: PLR0917 - fixtures
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    topic = unique_topic(GUARDED)
    create(kafka, topic)
    (file := tmp_path / f"rows.{kind}").mkdir()
    # Spark reads the larger file first; the order asked for is that of the names.
    rows = write_csv(tmp_path / "a.csv", 100) + write_csv(tmp_path / "b.csv", 600)
    for name, part in (("a", rows[:100]), ("b", rows[100:])):
        if kind == "csv":
            (tmp_path / f"{name}.csv").rename(file / f"{name}.csv")
        elif kind == "jsonl":
            (file / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
        else:
            spark.read.csv(str(tmp_path / f"{name}.csv"), header=True).coalesce(1).write.parquet(str(tmp_path / name))
            [written] = (tmp_path / name).glob("*.parquet")
            written.rename(file / f"{name}.parquet")

    assert [o.problem for o in bulk_load(spark, proxy, topic, file, "--key", "name")] == [None] * PARTITIONS

    place: dict[int, list[tuple[bytes, str]]] = {0: [], 1: []}
    for row in rows:
        key = row["name"].encode()
        place[(murmur2(key) & 0x7FFFFFFF) % PARTITIONS].append((key, row["id"]))
    found = contents(kafka, topic)
    assert {p: [(r.key, json.loads(r.value or b"")["id"]) for r in records] for p, records in found.items()} == place


def test_bulk_load_stops_where_another_writer_interferes_and_goes_on_if_told_to(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic(GUARDED)
    create(kafka, topic)
    file = tmp_path / "rows.csv"
    rows = write_csv(file, 20_000)
    won: list[int] = []

    def interfere() -> None:
        """Waits until the load has begun, then fights for an offset of partition 0 until it gets one."""
        while (end := ends(kafka, topic)[0]) < 100:
            time.sleep(0.02)

        async def fight(end: int) -> None:
            async with (
                AIOKafkaProducer(bootstrap_servers=proxy.bootstrap, acks="all") as producer,
                AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap) as consumer,
            ):
                while not won:
                    with contextlib.suppress(PolicyViolationError):
                        headers = [("expected-offset", b"%d" % end)]
                        await producer.send_and_wait(topic, b"other", partition=0, headers=headers)
                        won.append(end)
                    # One batch ahead of what was read: the load may be there by the time that this arrives.
                    at = TopicPartition(topic, 0)
                    end = (await consumer.end_offsets([at]))[at] + 20

        asyncio.run(fight(end))

    thread = threading.Thread(target=interfere)
    thread.start()
    outcomes = bulk_load(spark, proxy, topic, file, "--batch-records", "20")
    thread.join(30)
    assert won, "the other writer never won an offset, so nothing was tested"

    assert f"another writer appended to partition 0 at offset {won[0]}" in outcomes[0].problem
    assert outcomes[1].problem is None
    [other] = [r for r in contents(kafka, topic)[0] if r.value == b"other"]
    assert other.offset == won[0] == len(contents(kafka, topic)[0]) - 1

    again = bulk_load(spark, proxy, topic, file)
    assert f"another writer appended to partition 0 at offset {won[0]}" in again[0].problem
    resumed = bulk_load(spark, proxy, topic, file, "--after-others")
    assert [o.problem for o in resumed] == [None, None]
    assert resumed[0].rows_found == won[0]
    assert_each_row_once(kafka, topic, rows, others=1)


def session_of(leader: int) -> dict[int, tuple[int, str]]:
    """Parent and name of each living process of a session."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found[int(directory.name)] = (int(parent), (directory / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Spark's processes in /proc")
def test_bulk_load_survives_kills_of_driver_worker_and_proxy(
    kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic(GUARDED)
    create(kafka, topic)
    rows = write_csv(tmp_path / "rows.csv", 120_000)
    import pyspark  # noqa: PLC0415

    home = Path(pyspark.__file__).parent
    output = tmp_path / "load.log"
    conf = [word for name, value in SPARK_SETTINGS.items() for word in ("--conf", f"{name}={value}")]

    with ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG, port=free_ports_in_a_row(4)) as proxy:
        # Two tasks at once, each tried up to four times.
        command = [str(home / "bin/spark-submit"), "--master", "local[2,4]", *conf, str(JOBS / "bulk_load.py")]
        command += ["--input", str(tmp_path / "rows.csv"), "--bootstrap", proxy.bootstrap, "--topic", topic]
        command += ["--batch-records", "100", "--patience", "60"]

        def start() -> subprocess.Popen[bytes]:
            with output.open("w") as log:
                environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home)}
                return subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )

        def wait_for(count: int) -> None:
            deadline = time.monotonic() + 90
            while (there := sum(ends(kafka, topic).values())) < count:
                assert load.poll() is None, f"ended with {there} of {count} rows:\n{output.read_text()[-3000:]}"
                assert time.monotonic() < deadline
                time.sleep(0.02)

        load = start()
        try:
            # The JVM, which is driver and executor, dies; its Python workers find out when they next want rows.
            wait_for(20_000)
            load.kill()
            load.wait()

            # Started again at once. This time a worker dies in its task, and later the proxy.
            load = start()
            wait_for(50_000)
            members = session_of(load.pid)
            workers = [
                pid
                for pid, (parent, name) in members.items()
                if "pyspark" in name
                and parent in members
                and "pyspark" in members[parent][1]
                and "java" not in members[parent][1]
            ]
            assert workers, members
            os.kill(workers[0], signal.SIGKILL)
            wait_for(80_000)
            proxy.kill()
            time.sleep(0.5)
            proxy.restart()
            assert load.wait(120) == 0, f"{output.read_text()[-2000:]}\n{proxy.log[-2000:]}"
        finally:
            for pid in session_of(load.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            load.wait()

    assert "bulk_load: complete: 120000 rows" in output.read_text()
    assert_each_row_once(kafka, topic, rows)
