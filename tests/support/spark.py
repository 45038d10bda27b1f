"""What tests of Spark share: a session, topics that can be used at once, and what lies in Kafka.

PySpark is imported only where a session is made: collecting tests needs none.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import growing

#: Of one query of a few hundred rows, on a machine that has other things to do.
QUERY_SECONDS = 600.0
#: For the whole of a test with its fixtures, which runs several of those.
TEST_SECONDS = 1800
_READ_SECONDS = 120.0
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
        from pyspark.sql import SparkSession  # noqa: PLC0415 - its import warns

        builder = SparkSession.builder.master("local[2]")
        for name, value in {**SETTINGS, **more}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            yield session
        finally:
            session.stop()


class Read(NamedTuple):
    """A record as it lies in Kafka."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def create(bootstrap: str, *topics: str, partitions: int) -> None:
    """Comes back when all are shown with their leaders: a broker learns of them a moment after the controller."""
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])

        def led() -> bool:
            there = {each["name"]: each["partitions"] for each in admin.describe_topics(list(topics))}
            return all(
                len(there.get(topic, ())) == partitions and all(each["leader_id"] >= 0 for each in there[topic])
                for topic in topics
            )

        until(led, f"the leaders of {', '.join(topics)}")


def grow(bootstrap: str, topic: str, count: int) -> None:
    """An ordered topic waits for whoever serves this Kafka, and may have to be asked for again."""

    def grown() -> bool:
        growing.grow(bootstrap, topic, count, timeout_ms=60_000)
        return growing.partition_count(bootstrap, topic) == count

    until(grown, f"{topic} to grow to {count} partitions", seconds=180)


def contents(kafka: KafkaCluster, topic: str) -> dict[int, list[Read]]:
    """All records of a topic by partition, read from Kafka itself."""

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
    """As a writer of another kind. Raises PolicyViolationError where it is refused."""

    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
            headers = [] if expected is None else [("fencepost-expected-offset", b"%d" % expected)]
            await producer.send_and_wait(topic, value, key=key, partition=partition, headers=headers)

    asyncio.run(send())
