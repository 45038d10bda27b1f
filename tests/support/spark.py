"""Shared parts of Spark tests: a session, usable topics, and the records in Kafka.

Only creating a session imports PySpark, so that collecting tests does not need it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import expanding

JOBS = Path(__file__).parents[2] / "spark_jobs"
#: Limit for one query of a few hundred rows on a busy machine.
QUERY_SECONDS = 600.0
#: Limit for a whole test with its fixtures and several queries.
TEST_SECONDS = 1800
#: Of modules that start Spark. PySpark leaves sockets to the garbage collector and warns about this pandas version.
SPARK_MARKERS = [
    pytest.mark.kafka,
    pytest.mark.no_cover,
    pytest.mark.spark,
    pytest.mark.timeout(TEST_SECONDS),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
_READ_SECONDS = 120.0
_STOP_SECONDS = 60.0
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "OFF",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@contextmanager
def running_spark(more: Mapping[str, str]) -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyspark import SparkContext  # noqa: PLC0415 - its import warns
        from pyspark.sql import SparkSession  # noqa: PLC0415

        builder = SparkSession.builder.master("local[2]")
        for name, value in {**SETTINGS, **more}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            yield session
        finally:
            gateway = SparkContext._gateway  # noqa: SLF001 - it has no other name
            session.stop()
            # Otherwise the next session of this process gets the same JVM, which has other jars.
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(_STOP_SECONDS)
            SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001


def session_of(leader: int) -> dict[int, tuple[int, str]]:
    """Parent and command line of each live process of a session."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found[int(directory.name)] = (int(parent), (directory / "cmdline").read_text().replace("\0", " "))
    return found


def job(name: str) -> ModuleType:
    """A module of spark_jobs/."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Read(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def create(bootstrap: str, *topics: str, partitions: int) -> None:
    """Create them, and wait until all have leaders: a broker learns of them shortly after the controller."""
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])

        def led() -> bool:
            there = {each["name"]: each["partitions"] for each in admin.describe_topics(list(topics))}
            return all(
                len(there.get(topic, ())) == partitions and all(each["leader_id"] >= 0 for each in there[topic])
                for topic in topics
            )

        until(led, f"the leaders of {', '.join(topics)}")


def expand(bootstrap: str, topic: str, count: int) -> None:
    """Repeat the request: an expansion of an ordered topic waits for all proxies of this Kafka."""

    def expanded() -> bool:
        expanding.expand(bootstrap, topic, count, timeout_ms=60_000)
        return expanding.partition_count(bootstrap, topic) == count

    until(expanded, f"{topic} to be expanded to {count} partitions", seconds=180)


def contents(kafka: KafkaCluster, topic: str) -> dict[int, list[Read]]:
    """All records of a topic by partition, read directly from Kafka."""

    async def read() -> dict[int, list[Read]]:
        async with AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest") as consumer:
            ends = await consumer.end_offsets(consumer.assignment())
            found: dict[int, list[Read]] = {at.partition: [] for at in sorted(ends)}
            async with asyncio.timeout(_READ_SECONDS):
                while any([await consumer.position(at) < end for at, end in ends.items()]):
                    for at, records in (await consumer.getmany(timeout_ms=200)).items():
                        found[at.partition] += [Read(r.offset, r.key, r.value, tuple(r.headers)) for r in records]
        return found

    return asyncio.run(read())


def ends(kafka: KafkaCluster, topic: str) -> dict[int, int]:
    async def query() -> dict[int, int]:
        async with AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap) as consumer:
            return {at.partition: end for at, end in (await consumer.end_offsets(consumer.assignment())).items()}

    return asyncio.run(query())


def append(
    bootstrap: str,
    topic: str,
    partition: int,
    value: bytes | None,
    *,
    key: bytes | None = None,
    expected: int | None = None,
) -> None:
    """Append as another kind of writer. Raises PolicyViolationError for a refusal."""

    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
            headers = [] if expected is None else [("fencepost-expected-offset", b"%d" % expected)]
            await producer.send_and_wait(topic, value, key=key, partition=partition, headers=headers)

    asyncio.run(send())
