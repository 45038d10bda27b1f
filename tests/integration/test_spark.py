"""Real Spark and real Kafka with the proxy in between: Spark's connector, and the jobs of spark_jobs/ under injected
faults."""

from __future__ import annotations

import bz2
import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from kafka.partitioner import murmur2
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException

from fencepost.spark import append as sink_append
from fencepost.spark import register, stated
from fencepost.spark import stream as sink_stream
from fencepost.spark.errors import SinkError
from fencepost.spark.files import ORDER, Reader, input_error, rows_of, spark_reader
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import fetch
from tests.kit.waiting import until
from tests.support import spark as support
from tests.support.fixtures import proxy_fixture
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.raw import Log
from tests.support.sasl_ssl import ADMIN, Secured, token
from tests.support.spark import (
    JOBS,
    QUERY_SECONDS,
    SETTINGS,
    SPARK_MARKERS,
    Read,
    append,
    contents,
    job,
    running_spark,
    session_of,
)

pytestmark = SPARK_MARKERS

PARTITIONS = 2
#: Topics with this prefix are checked by the proxy's configuration.
OFFSETS_CHECKED = "offsets-checked"
#: Topics that check expected offsets and accept records without one.
CHECKED = "checked"
#: Topics with ordered partition expansion.
ORDERED = "ordered"
CONFIG = f"""
[topics."{OFFSETS_CHECKED}-*"]
"fencepost.check.expected.offsets" = "required"
[topics."{CHECKED}-*"]
"fencepost.check.expected.offsets" = "true"
[topics."{ORDERED}-*"]
"fencepost.ordered.partition.expansion" = "true"
"""


proxy = proxy_fixture(config=CONFIG)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    # Two attempts per task: Spark's producer sometimes holds ten records back until their 120 s expire, also directly
    # at Kafka.
    settings = {"spark.jars": ",".join(map(str, fetch("spark-kafka"))), "spark.master": "local[2,2]"}
    with running_spark(settings) as session:
        # Workers find the job's functions by the name of their module, which is not the main module here.
        session.sparkContext.addPyFile(str(JOBS / "verify.py"))
        yield session


def create(where: KafkaCluster | ProxyProcess, *topics: str, partitions: int = PARTITIONS) -> None:
    support.create(where.bootstrap, *topics, partitions=partitions)


# --- Spark's own connector --------------------------------------------------------------------------------------------


def test_batch_source_and_sink_match_direct_kafka(
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


def test_streaming_source_and_sink_match_direct_kafka(
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
            sql = "SELECT key, concat('read ', CAST(value AS STRING)) AS value FROM source"
            command = (
                f"--bootstrap {bootstrap} --from {source} --to {topic} --checkpoint {tmp_path / topic} --once --sql"
            )
            args = stream.arguments().parse_args([*command.split(), sql])
            assert stream.start(stream.read(spark, args), args).awaitTermination(QUERY_SECONDS)

    direct, proxied = (contents(kafka, topic) for topic in topics.values())
    assert sum(map(len, proxied.values())) == 600
    assert {p: [r.value for r in records] for p, records in proxied.items()} == {
        p: [r.value for r in records] for p, records in direct.items()
    }


def expecting(spark: Any, values: list[str], first_offset: int) -> Any:
    rows = [
        (0, value, [("fencepost-expected-offset", str(first_offset + n).encode())]) for n, value in enumerate(values)
    ]
    schema = "partition INT, value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    return spark.createDataFrame(rows, schema).coalesce(1)


def test_headers_column_makes_a_write_conditional(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic(OFFSETS_CHECKED)
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


def test_sinks_and_source_work_with_tls_and_login(
    spark: Any, secured: Secured, tmp_path: Path, unique_topic: Callable[..., str]
) -> None:
    register(spark)
    topic = unique_topic(OFFSETS_CHECKED)
    config = secured.proxy_config("SCRAM-SHA-256") + CONFIG
    with ProxyProcess(secured.kafka.bootstrap_of("SECURED"), tmp_path, config=config) as proxy:
        # A checked topic, and the connection settings of Spark's connector.
        create(secured.kafka, topic, partitions=1)
        login = {f"kafka.{name}": value for name, value in secured.java(ADMIN, "SCRAM-SHA-512").items()}
        login["kafka.bootstrap.servers"] = proxy.bootstrap
        rows = spark.range(0, 200, 1, 2).selectExpr("CAST(id AS STRING) AS value")

        # Spark's sink writes three rows at their expected offset, then the Fencepost sink writes a load twice.
        expecting(spark, ["a", "b", "c"], 0).write.format("kafka").options(**login, topic=topic).save()
        sink_append(rows, topic=topic, sink_id="load", options=login)

        # Another run logs in with a token from a file, and trusts a Java key store.
        command = ["keytool", "-importcert", "-noprompt", "-storepass", "changeit", "-storetype", "JKS", "-file"]
        store = str(tmp_path / "trust.jks")
        subprocess.run([*command, str(secured.authority.file), "-keystore", store], check=True, capture_output=True)
        (tmp_path / "token").write_text(f"{token(ADMIN)}\n")
        java = {
            "ssl.truststore.location": store,
            "ssl.truststore.password": "changeit",
            "sasl.mechanism": "OAUTHBEARER",
        }
        java |= {"sasl.oauthbearer.token.endpoint.url": (tmp_path / "token").as_uri(), "security.protocol": "SASL_SSL"}
        options = {f"kafka.{name}": value for name, value in java.items()}
        sink_append(rows, topic=topic, sink_id="load", options=options, bootstrap=proxy.bootstrap)

        # Spark's source reads each row once.
        read = spark.read.format("kafka").options(**login, subscribe=topic).load().select("value").collect()
        assert Counter(bytes(row.value) for row in read) == Counter(
            [b"a", b"b", b"c", *(b"%d" % n for n in range(200))]
        )

        # A wrong password is reported without disclosing it.
        wrong = login | {"kafka.sasl.jaas.config": login["kafka.sasl.jaas.config"].replace("secret", "guess")}
        with pytest.raises(Exception, match="SASL authentication with") as refused:
            sink_append(rows, topic=topic, sink_id="w", options=wrong)
        assert "guess" not in str(stated(refused.value))


# --- stream.py --------------------------------------------------------------------------------------------------------


def test_stream_with_sink_id_survives_lost_commit(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target, unchecked = unique_topic("source"), unique_topic(OFFSETS_CHECKED), unique_topic("open")
    create(kafka, source, target, unchecked)
    rows = spark.range(200).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    rows.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", kafka.bootstrap).option(
        "topic", source
    ).save()
    stream = job("stream")
    checkpoint = tmp_path / "checkpoint"

    def mirror(target: str = target) -> None:
        command = f"--bootstrap {proxy.bootstrap} --from {source} --to {target} --checkpoint {checkpoint} --once"
        command += " --sink-id mirror --sink-option patience.seconds=180 --sql"
        args = stream.arguments().parse_args([*command.split(), "SELECT key, value, partition FROM source"])
        assert stream.start(stream.read(spark, args), args).awaitTermination(QUERY_SECONDS)

    # The stream writes its first micro-batch.
    mirror()
    once = contents(kafka, target)
    assert {p: [r.value for r in found] for p, found in once.items()} == {
        p: [r.value for r in found] for p, found in contents(kafka, source).items()
    }

    # The commit is lost, as after a kill between the sink's last write and Spark's commit. The stream runs again.
    for lost in (checkpoint / "commits").glob("*0*"):
        lost.unlink()
    mirror()
    assert contents(kafka, target) == once

    # The checkpoint is lost. The stream refuses to write the rows again.
    shutil.rmtree(checkpoint)
    with pytest.raises(StreamingQueryException) as refused:
        mirror()
    assert "checkpoint" in (stated(refused.value) or "")
    assert contents(kafka, target) == once

    # The stream refuses a topic without checks.
    with pytest.raises(StreamingQueryException) as refused:
        mirror(unchecked)
    assert "fencepost.check.expected.offsets" in (stated(refused.value) or "")
    assert contents(kafka, unchecked) == {0: [], 1: []}


def test_half_written_micro_batch_resumes_in_order(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """Kafka, a mapping and the sink."""
    source, target = unique_topic("source"), unique_topic(OFFSETS_CHECKED)
    create(kafka, source, target)
    each = 3000
    _produce(kafka, [(source, partition) for partition in range(PARTITIONS)], each, long=each - 100)
    register(spark)

    def run(checkpoint: Path, **more: str) -> None:
        read = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka.bootstrap)
        mapped = (
            read.option("subscribe", source).option("startingOffsets", "earliest").load().selectExpr("key", "value")
        )
        writer = sink_stream(mapped, topic=target, sink_id="mapped", bootstrap=proxy.bootstrap, options=more)
        query = writer.trigger(availableNow=True)
        assert query.option("checkpointLocation", str(checkpoint)).start().awaitTermination(QUERY_SECONDS)

    # The micro-batch fails half-way at a long row. On a busy machine it may fail before the first append; then try
    # again.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "250")
    try:
        for number in range(10):
            checkpoint = tmp_path / f"checkpoint-{number}"
            with pytest.raises(StreamingQueryException) as failed:
                run(checkpoint, **{"kafka.max.request.size": "2000", "batch.bytes": "4000"})
            assert "raise that option" in (stated(failed.value) or "")
            time.sleep(1)  # lets appends in flight finish
            if first := sum(map(len, contents(kafka, target).values())):
                break
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert first, "in ten tries no row was appended before the failure"

    # The restarted query appends each row once and in order.
    run(checkpoint)
    found = contents(kafka, target)
    values = Counter((record.value or b"").strip() for records in found.values() for record in records)
    assert values == Counter(b"%d:%d" % (partition, row) for partition in range(PARTITIONS) for row in range(each))
    for records in found.values():
        for key in {record.key for record in records}:
            order = [int((r.value or b"").split(b":")[1]) for r in records if r.key == key]
            assert order == sorted(order)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Spark's processes in /proc")
@pytest.mark.parametrize(
    ("topics", "partitions"),
    [(1, 2), (1, 4), (2, 2), (4, 1)],
)
def test_killed_driver_with_kafka_source_resumes_without_refusal(  # noqa: PLR0917 - fixtures
    kafka: KafkaCluster,
    proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    tmp_path: Path,
    topics: int,
    partitions: int,
) -> None:
    """For any topic names. Only one partition has rows in the previous batch."""
    sources = [unique_topic("source") for _ in range(topics)]
    target = unique_topic(OFFSETS_CHECKED)
    create(kafka, *sources, partitions=partitions)
    create(kafka, target)
    topic_partitions = [(source, partition) for source in sources for partition in range(partitions)]
    output, checkpoint = tmp_path / "stream.log", str(tmp_path / "checkpoint")
    command = [sys.executable, "-m", "tests.support.mapped_stream", kafka.bootstrap, proxy.bootstrap]
    command += [",".join(sources), target, checkpoint]

    def start() -> subprocess.Popen[bytes]:
        with output.open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(stream: subprocess.Popen[bytes]) -> None:
        for pid in session_of(stream.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        stream.wait()

    def there() -> int:
        return sum(logs.end(target, partition) for partition in range(PARTITIONS))

    def through() -> None:
        stream = start()
        try:
            assert stream.wait(QUERY_SECONDS) == 0, output.read_text()[-3000:]
        finally:
            end(stream)

    # A complete micro-batch, and a driver that is killed in the middle of the next one.
    logs = Log(kafka.bootstrap)
    _produce(kafka, topic_partitions[:1], 10)
    through()
    each = 80_000 // len(topic_partitions)
    _produce(kafka, topic_partitions, each, start=10)
    count = 10 + len(topic_partitions) * each
    stream = start()
    try:
        until(lambda: stream.poll() is not None or there() > count // 10, "some rows", seconds=QUERY_SECONDS)
    finally:
        end(stream)
    assert count // 10 < there() < count, output.read_text()[-3000:]

    # The restarted query continues, and each row is there once.
    through()
    found = Counter(record.value for records in contents(kafka, target).values() for record in records)
    assert found.total() == count
    assert len(found) == count


def _produce(
    kafka: KafkaCluster, topic_partitions: list[tuple[str, int]], each: int, start: int = 0, long: int | None = None
) -> None:
    """Rows of 100 bytes, `each` per partition: a number of the partition, and one of the row. `long` – a row of 3000
    bytes."""
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True})
    for number, (topic, partition) in enumerate(topic_partitions):
        for row in range(start, start + each):
            value = b"%d:%d" % (number, row)
            size = 3000 if row == long else 100
            producer.produce(topic, value.ljust(size), key=b"%d-%d" % (number, row % 50), partition=partition)
            producer.poll(0)
    assert producer.flush(QUERY_SECONDS) == 0


def test_stream_reads_an_expanded_topic_in_order(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """The target has one partition, and its values name the source partitions. Its order is the order of reading."""
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
                append(proxy.bootstrap, source, partition, b"x")

    def expand(count: int) -> None:
        support.expand(proxy.bootstrap, source, count)

    fill(2)
    expand(4)
    fill(4)
    expand(8)
    fill(8)
    stream.run(spark, args)

    observed = [(record.value or b"").decode() for record in contents(kafka, target)[0]]
    assert len(observed) == len(set(observed)) == 5 * (2 + 4 + 8)
    first = {partition: observed.index(f"{partition}/0") for partition in range(8)}
    for new, prior_partitions in {2: {0: 5, 1: 5}, 3: {0: 5, 1: 5}, 7: {0: 10, 1: 10, 2: 5, 3: 5}}.items():
        for prior_partition, threshold in prior_partitions.items():
            assert observed.index(f"{prior_partition}/{threshold - 1}") < first[new], (new, prior_partition)

    # The next run reads only new records and keeps reading all partitions.
    fill(8)
    stream.run(spark, args)
    assert len(contents(kafka, target)[0]) == 5 * (2 + 4 + 8 + 8)


def test_running_stream_reads_partitions_of_an_expansion(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target = unique_topic(ORDERED), unique_topic("target")
    create(proxy, source)
    create(kafka, target, partitions=1)
    stream = job("stream")
    command = f"--bootstrap {proxy.bootstrap} --from {source} --to {target} --checkpoint {tmp_path / 'c'} --sql"
    args = stream.arguments().parse_args([*command.split(), "SELECT value FROM source"])
    append(proxy.bootstrap, source, 0, b"before")

    runner = threading.Thread(target=stream.run, args=(spark, args))
    runner.start()
    try:
        until(lambda: len(contents(kafka, target)[0]) == 1, "the first row", seconds=QUERY_SECONDS)
        support.expand(proxy.bootstrap, source, 4)
        append(proxy.bootstrap, source, 3, b"after")
        until(lambda: len(contents(kafka, target)[0]) == 2, "the row of a new partition", seconds=QUERY_SECONDS)
    finally:

        def ended() -> bool:
            for query in spark.streams.active:
                query.stop()
            return not runner.is_alive()

        until(ended, "the job to end", seconds=QUERY_SECONDS)


# --- bulk_load.py -----------------------------------------------------------------------------------------------------


def write_csv(file: Path, count: int) -> list[dict[str, str]]:
    """Rows with duplicates and repeated names."""
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


def fields(records: list[Read]) -> list[tuple[str, ...]]:
    """Fields of the records that are rows. An empty CSV field is null in JSON."""
    return [
        tuple(value or "" for value in json.loads(r.value).values()) for r in records if r.value and r.value[:1] == b"{"
    ]


def assert_each_row_once(kafka: KafkaCluster, topic: str, rows: list[dict[str, str]], *, others: int = 0) -> None:
    found = contents(kafka, topic)
    assert Counter(row for records in found.values() for row in fields(records)) == Counter(
        tuple(row.values()) for row in rows
    )
    assert sum(map(len, found.values())) == len(rows) + others
    for records in found.values():
        assert [record.offset for record in records] == list(range(len(records)))


def bulk_load(spark: Any, proxy: ProxyProcess, topic: str, file: Path, *more: str) -> list[Any]:
    module = job("bulk_load")
    args = module.arguments().parse_args(
        ["--input", str(file), "--bootstrap", proxy.bootstrap, "--topic", topic, "--patience", "180", *more]
    )
    outcomes: list[Any] = module.load(spark, args)
    return outcomes


def test_repeated_bulk_load_adds_nothing(  # noqa: PLR0917 - fixtures
    spark: Any,
    kafka: KafkaCluster,
    proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic = unique_topic(OFFSETS_CHECKED)
    create(kafka, topic)
    rows = write_csv(tmp_path / "rows.csv", 5000)
    (tmp_path / "rows.csv").rename(tmp_path / "rows.psv")

    # A dry run describes the load and writes nothing.
    module = job("bulk_load")
    words = ["--input", str(tmp_path / "rows.psv"), "--bootstrap", proxy.bootstrap, "--topic", topic]
    words += ["--format", "csv", "--csv-option", "sep=,", "--load", "rows.csv"]
    assert module.dry_run(spark, module.arguments().parse_args([*words, "--dry-run"])) == 0
    (tmp_path / "rows.psv").rename(tmp_path / "rows.csv")
    described = capsys.readouterr().out
    assert "rows.psv: 1 file, read as csv, sep=','\n" in described
    values = [json.dumps({n: v or None for n, v in row.items()}, separators=(",", ":")) for row in rows]
    largest = max(map(len, values))
    assert f"5,000 rows, {sum(map(len, values)):,} bytes of keys and values, largest row {largest} bytes" in described
    assert f"record: key null, value {values[0]}\n" in described
    assert contents(kafka, topic) == {0: [], 1: []}

    first = bulk_load(spark, proxy, topic, tmp_path / "rows.csv")
    assert [(o.found, o.first, o.end) for o in first] == [(0, 0, o.appended) for o in first]
    assert_each_row_once(kafka, topic, rows)
    for outcome in first:
        assert f"{topic}-{outcome.partition}: {outcome.appended:,} rows, " in described

    # Spark splits the file differently into other batches. Each row keeps its partition and order.
    before = spark.conf.get("spark.sql.files.maxPartitionBytes")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "20000")
    try:
        again = bulk_load(spark, proxy, topic, tmp_path / "rows.csv", "--batch-bytes", "1000")
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", before)
    assert [(o.found, o.appended) for o in again] == [(o.appended, 0) for o in first]

    # Another input with the same name.
    text = (tmp_path / "rows.csv").read_text().replace("n1", "m1")
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(SinkError, match=r"another sink\.id"):
        bulk_load(spark, proxy, topic, tmp_path / "rows.csv")


def test_bulk_load_needs_the_check_and_the_topic(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic("open")
    create(kafka, topic)
    write_csv(tmp_path / "rows.csv", 10)
    with pytest.raises(SinkError, match=r"check\.expected\.offsets"):
        bulk_load(spark, proxy, topic, tmp_path / "rows.csv")
    with pytest.raises(SinkError, match="topic"):
        bulk_load(spark, proxy, unique_topic(OFFSETS_CHECKED), tmp_path / "rows.csv")
    assert contents(kafka, topic) == {0: [], 1: []}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_bulk_load_partitions_keys_like_kafka_in_order(  # noqa: PLR0917 - fixtures
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    topic = unique_topic(OFFSETS_CHECKED)
    create(kafka, topic)
    (file := tmp_path / f"rows.{kind}").mkdir()
    # Spark reads the larger file first. The requested order is the order of the names, with numbers in them by value.
    rows = write_csv(tmp_path / "part-2.csv", 100) + write_csv(tmp_path / "part-10.csv", 600)
    for name, part in (("part-2", rows[:100]), ("part-10", rows[100:])):
        if kind == "csv":
            (tmp_path / f"{name}.csv").rename(file / f"{name}.csv")
        elif kind == "jsonl":
            (file / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
        else:
            spark.read.csv(str(tmp_path / f"{name}.csv"), header=True).coalesce(1).write.parquet(str(tmp_path / name))
            [written] = (tmp_path / name).glob("*.parquet")
            written.rename(file / f"{name}.parquet")

    bulk_load(spark, proxy, topic, file, "--key", "name")

    expected: dict[int, list[tuple[bytes, str]]] = {0: [], 1: []}
    for row in rows:
        key = row["name"].encode()
        expected[(murmur2(key) & 0x7FFFFFFF) % PARTITIONS].append((key, row["id"]))
    found = contents(kafka, topic)
    assert {p: [(r.key, json.loads(r.value or b"")["id"]) for r in records] for p, records in found.items()} == expected


def test_bulk_load_continues_after_appends_of_another_writer(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    # Another writer appends to the topic once the load has begun.
    topic = unique_topic(CHECKED)
    create(kafka, topic)
    file = tmp_path / "rows.csv"
    rows = write_csv(file, 20_000)
    before: list[int] = []

    log = Log(kafka.bootstrap)

    def interfere() -> None:
        until(lambda: log.end(topic) >= 100, "the load to have begun", seconds=QUERY_SECONDS, pause_seconds=0)
        for _ in range(5):
            before.append(log.end(topic))
            append(proxy.bootstrap, topic, 0, b"other")

    thread = threading.Thread(target=interfere)
    thread.start()
    outcomes = bulk_load(spark, proxy, topic, file, "--batch-bytes", "2000")
    thread.join(QUERY_SECONDS)
    # The load is complete, with the other writer's records in between.
    assert sum(o.appended for o in outcomes) == len(rows)
    assert before[0] < outcomes[0].end - 5, "the other writer came too late: this run proves nothing"
    assert_each_row_once(kafka, topic, rows, others=5)
    # Another run finds the load complete.
    again = bulk_load(spark, proxy, topic, file)
    assert [(o.found, o.appended) for o in again] == [(o.appended, 0) for o in outcomes]


_ENCODING, _FIELDS = r"--csv-option\s+encoding", "more or fewer fields"
_FILES: dict[str, tuple[bytes, tuple[str, ...], list[tuple[bytes | None, bytes]] | str]] = {
    "quoted.csv": (b'a,b\n"he said ""hi""",2\n', (), [(None, rb'{"a":"he said \"hi\"","b":"2"}')]),
    "escaped.csv": (b'a\n"say \\"hi\\""\n', ("--csv-option", "escape=\\"), [(None, rb'{"a":"say \"hi\""}')]),
    "tick.csv": (b"a`b,c.d\n1,2\n", ("--key", "a`b"), [(b"1", b'{"a`b":"1","c.d":"2"}')]),
    "tabs.tsv": (b"a\tb\n1\t2\n", ("--value", "b"), [(None, b"2")]),
    "short.csv": (b"a,b\n1,2\n3\n", ("--value", "a"), _FIELDS),
    "long.csv": (b"a,b\n1,2\n3,4,5\n", ("--value", "a"), _FIELDS),
    "number.csv": (b"a\nx\n", ("--schema", "a INT"), _FIELDS),
    "columns.csv": (b"a\n1\n", ("--key", "b"), "no such column; it has a"),
    "schema.csv": (b"a\n1\n", ("--schema", "a INT, b"), "is not a list of columns"),
    "latin1.csv": (b"a\nJos\xe9\n", (), _ENCODING),
    "named.csv": (b"a\nJos\xe9\n", ("--csv-option", "encoding=ISO-8859-1"), [(None, '{"a":"José"}'.encode())]),
    "allowed.csv": (b"a\nJos\xe9\n", ("--allow-replacement-characters",), [(None, '{"a":"Jos\ufffd"}'.encode())]),
    "utf16.csv": ("a\nx\n".encode("utf-16"), ("--format", "csv"), _ENCODING),
    "lines.ndjson": (b'{"a":1}\n\n{"k":"x"}\n', ("--key", "k"), [(None, b'{"a":1}'), (b"x", b'{"k":"x"}')]),
    "lines.jsonl.bz2": (bz2.compress(b'{"a":1}\n'), (), [(None, b'{"a":1}')]),
    "array.jsonl": (b'[{"a":1}]\n', (), "not a JSON object"),
    "malformed.jsonl": (b'{"a":1}\n{"a":\n', ("--value", "a"), "not a JSON object"),
    "latin1.jsonl": (b'{"a":"Jos\xe9"}\n', (), "not UTF-8"),
    "array.json": (b'[{"a":1}]', (), "does not say what it contains"),
    "table.parquet": (b"a,b\n1,2\n", (), "not a Parquet file"),
}


@pytest.mark.parametrize("name", _FILES)
def test_files_are_read_as_they_are_or_refused(spark: Any, tmp_path: Path, name: str) -> None:
    data, options, expected = _FILES[name]
    (tmp_path / name).write_bytes(data)
    assert_read(spark, tmp_path / name, options, expected)


def test_header_that_differs_between_files_is_refused(spark: Any, tmp_path: Path) -> None:
    (file := tmp_path / "two.csv").mkdir()
    (file / "x.csv").write_text("a,b\n1,2\n")
    (file / "y.csv").write_text("b,a\n3,4\n")
    assert_read(spark, file, (), "the header of .*two.csv.* differs")
    assert_read(spark, tmp_path / "none.csv", (), "no such file")


def test_kind_of_a_folder_is_that_of_its_files(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    for folder in (tmp_path, tmp_path / "*"):
        assert_read(spark, folder, ("--value", "b"), [(None, b"2")])
    (tmp_path / "y.csv").write_text("a,b\n1,2\n")
    assert_read(spark, tmp_path, ("--value", "b"), r"several kinds \(\.csv, \.tsv\)")
    assert_read(spark, tmp_path / "none", (), "no such file")


def test_verify_finds_rows_that_sparks_reader_leaves_out(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "blanks.csv").write_text("a\n1\n  \n2\n")
    assert read_by(spark_reader, spark, tmp_path / "blanks.csv", ("--value", "a")) == [(None, b"1"), (None, b"2")]
    expected = [(None, b"1"), (None, b"  "), (None, b"2")]
    assert read_by(job("verify").second_reader, spark, tmp_path / "blanks.csv", ("--value", "a")) == expected


def assert_read(
    spark: Any, file: Path, options: tuple[str, ...], expected: list[tuple[bytes | None, bytes]] | str
) -> None:
    """By the load, and by its check with another reader."""
    found = read_by(spark_reader, spark, file, options)
    if isinstance(expected, str) and isinstance(found, str):
        assert re.search(expected, found)
    else:
        assert found == expected
    again = read_by(job("verify").second_reader, spark, file, options)
    if "table.parquet" in file.name or "--allow-replacement-characters" in options:
        assert again == "OnlySpark"
    else:
        assert again == found or (isinstance(again, str) and isinstance(found, str)), again


def read_by(read: Reader, spark: Any, file: Path, options: tuple[str, ...]) -> list[tuple[bytes | None, bytes]] | str:
    """Key and value of each row, or why the file is not read."""
    words = ["--input", str(file), "--bootstrap", "none:1", "--topic", "t", *options]
    verify = job("verify")
    args = verify.arguments().parse_args(words)
    try:
        rows = rows_of(spark, args, read=read).sort(*ORDER)
        return [(None if row["key"] is None else bytes(row["key"]), bytes(row["value"])) for row in rows.collect()]
    except verify.OnlySpark:
        return "OnlySpark"
    except SinkError as error:
        return str(error)
    except (PySparkException, Py4JJavaError) as error:
        return input_error(error) or str(error)


def test_bulk_load_of_an_unreadable_line_says_what_to_do(
    spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic(OFFSETS_CHECKED)
    create(kafka, topic)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(SinkError, match="--multiline"):
        bulk_load(spark, proxy, topic, tmp_path / "rows.csv")
    assert contents(kafka, topic) == {0: [], 1: []}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Spark's processes in /proc")
def test_bulk_load_survives_killed_driver_worker_and_proxy(
    kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic(OFFSETS_CHECKED)
    create(kafka, topic)
    rows = write_csv(tmp_path / "rows.csv", 120_000)
    import pyspark  # noqa: PLC0415

    home = Path(pyspark.__file__).parent
    output = tmp_path / "load.log"
    conf = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]

    with ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG, port=free_ports_in_a_row(4)) as proxy:
        # Two concurrent tasks, each with up to four attempts.
        command = [str(home / "bin/spark-submit"), "--master", "local[2,4]", *conf, str(JOBS / "bulk_load.py")]
        command += ["--input", str(tmp_path / "rows.csv"), "--bootstrap", proxy.bootstrap, "--topic", topic]
        command += ["--batch-bytes", "6000", "--patience", "180"]

        def start() -> subprocess.Popen[bytes]:
            with output.open("w") as log:
                environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home)}
                return subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )

        logs = Log(kafka.bootstrap)

        def wait_for(count: int) -> None:
            def appended() -> bool:
                there = sum(logs.end(topic, partition) for partition in range(PARTITIONS))
                ended = there < count and load.poll() is not None
                assert not ended, f"ended with {there} of {count} rows:\n{output.read_text()[-3000:]}"
                return there >= count

            until(appended, f"{count} rows", seconds=QUERY_SECONDS, pause_seconds=0.02)

        def kill_a_worker() -> bool:
            """Kill a worker with a task: a process forked by the daemon of Spark's workers."""
            members = session_of(load.pid)
            for pid, (parent, name) in members.items():
                above = members.get(parent, (0, ""))[1]
                if "pyspark" in name and "pyspark" in above and "java" not in above:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        return True
            assert load.poll() is None, f"the load ended early:\n{output.read_text()[-3000:]}"
            return False

        load = start()
        try:
            # Kill the JVM, which is driver and executor. Its Python workers notice when they next request rows.
            wait_for(20_000)
            load.kill()
            load.wait()

            # Start again at once. Now a worker is killed during its task, and later the proxy.
            load = start()
            wait_for(50_000)
            until(kill_a_worker, "a worker with a task")
            wait_for(80_000)
            proxy.kill()
            time.sleep(0.5)
            proxy.restart()
            assert load.wait(QUERY_SECONDS) == 0, f"{output.read_text()[-2000:]}\n{proxy.log[-2000:]}"
        finally:
            for pid in session_of(load.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            load.wait()

    assert "bulk_load: complete: 120000 rows" in output.read_text()
    assert_each_row_once(kafka, topic, rows)


# --- verify.py --------------------------------------------------------------------------------------------------------


def test_verify_detects_missing_duplicate_and_unknown_records(  # noqa: PLR0917 - fixtures
    spark: Any,
    kafka: KafkaCluster,
    proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verify = job("verify")
    topic, file = unique_topic(CHECKED), tmp_path / "rows.csv"
    create(kafka, topic)
    write_csv(file, 600)
    words = ["--key", "name", "--load", "names", "--compression", "gzip"]
    bulk_load(spark, proxy, topic, file, *words)
    there = contents(kafka, topic)

    def verified(*more: str) -> tuple[int, str]:
        command = ["--input", str(file), "--bootstrap", kafka.bootstrap, "--topic", topic, *words, *more]
        capsys.readouterr()
        return verify.verify(spark, verify.arguments().parse_args(command)), capsys.readouterr().out

    # Exactly the loaded rows.
    code, report = verified()
    assert code == 0, report
    assert "600 rows expected: 600 found once, 0 missing, 0 duplicates; 0 unknown" in report
    assert "order within each Kafka partition: 0 rows" in report

    # A duplicate row, a record that is no row, and a row of the input that the topic lacks.
    twice = there[0][0]
    append(kafka.bootstrap, topic, 0, twice.value, key=twice.key)
    append(kafka.bootstrap, topic, 1, b"other")
    with file.open("a") as out:
        out.write("77777,late,x\n")
    code, report = verified()
    assert code == 1
    assert "601 rows expected: 600 found once, 1 missing, 1 duplicates; 1 unknown" in report, report
    assert f"duplicate: partition 0 offset {len(there[0])}\n" in report
    assert f"unknown: partition 1 offset {len(there[1])}\n" in report
    assert "PROVED" not in report.replace("NOT PROVED", "")
