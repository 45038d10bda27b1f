"""The library's ordered consumers during expansions, through a real proxy, with each of the three clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, Protocol

import confluent_kafka
import kafka as kafka_python
import pytest
from aiokafka import TopicPartition as AioTopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from confluent_kafka.admin import AdminClient
from kafka.admin import NewPartitions, NewTopic
from kafka.errors import KafkaError

import fencepost
import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost import CheckIsOffError, PartitionExpansion
from tests.kit.waiting import until
from tests.support.clients import LIBRARIES
from tests.support.expanding import partition_count
from tests.support.proxy import ProxyProcess

pytestmark = [pytest.mark.kafka]
each_library = pytest.mark.parametrize("library", LIBRARIES)

_WAIT_SECONDS = 120.0
#: (partition, offset)
Place = tuple[int, int]


class Reader(Protocol):
    """Common interface of the ordered consumers, for one topic."""

    def read(self, seconds: float) -> list[Place]:
        """The records that one call returns."""
        ...

    def waiting(self) -> dict[int, dict[int, tuple[int | None, int]]]:
        """Partition → prior partition → (position, threshold)."""
        ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


def _reported(waiting: Iterable[fencepost.Waiting]) -> dict[int, dict[int, tuple[int | None, int]]]:
    return {each.partition: dict(each.prior_partitions) for each in waiting}


class KafkaPython:
    def __init__(self, bootstrap: str, topic: str, positions: dict[int, int], **options: Any) -> None:
        tps = {kafka_python.TopicPartition(topic, p): at for p, at in positions.items()}
        self._consumer = fencepost.kafka_python.OrderedConsumer(
            topic, bootstrap_servers=bootstrap, positions=tps, refresh_seconds=0.2, enable_auto_commit=False, **options
        )

    def read(self, seconds: float) -> list[Place]:
        found = self._consumer.poll(seconds * 1000, max_records=5)
        return [(r.partition, r.offset) for records in found.values() for r in records]

    def waiting(self) -> dict[int, dict[int, tuple[int | None, int]]]:
        return _reported(self._consumer.waiting().values())

    def commit(self) -> None:
        self._consumer.commit()

    def close(self) -> None:
        self._consumer.close()


class Confluent:
    def __init__(self, bootstrap: str, topic: str, positions: dict[int, int], **options: Any) -> None:
        partition_filter = options.pop("partition_filter", None)
        config = {name.replace("_", "."): value for name, value in options.items()}
        self._consumer = fencepost.confluent.OrderedConsumer(
            {"bootstrap.servers": bootstrap, "enable.auto.commit": False, **config},
            [topic],
            partition_filter=partition_filter,
            positions={(topic, p): at for p, at in positions.items()},
            refresh_seconds=0.2,
        )

    def read(self, seconds: float) -> list[Place]:
        message = self._consumer.poll(seconds)
        if message is None:
            return []
        assert message.error() is None, message.error()
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        return [(partition, offset)]

    def waiting(self) -> dict[int, dict[int, tuple[int | None, int]]]:
        return _reported(self._consumer.waiting().values())

    def commit(self) -> None:
        self._consumer.commit(asynchronous=False)

    def close(self) -> None:
        self._consumer.close()


class Aiokafka:
    """Its event loop runs only during a call."""

    def __init__(self, bootstrap: str, topic: str, positions: dict[int, int], **options: Any) -> None:
        self._runner = asyncio.Runner()
        tps = {AioTopicPartition(topic, p): at for p, at in positions.items()}

        async def start() -> fencepost.aiokafka.OrderedConsumer:
            consumer = fencepost.aiokafka.OrderedConsumer(
                topic,
                bootstrap_servers=bootstrap,
                positions=tps,
                refresh_seconds=0.2,
                enable_auto_commit=False,
                **options,
            )
            try:
                await consumer.start()
            except BaseException:
                await consumer.stop()
                raise
            return consumer

        try:
            self._consumer = self._runner.run(start())
        except BaseException:
            self._runner.close()
            raise

    def read(self, seconds: float) -> list[Place]:
        found = self._runner.run(self._consumer.getmany(timeout_ms=seconds * 1000, max_records=5))
        return [(r.partition, r.offset) for records in found.values() for r in records]

    def waiting(self) -> dict[int, dict[int, tuple[int | None, int]]]:
        return _reported(self._consumer.waiting().values())

    def commit(self) -> None:
        self._runner.run(self._consumer.commit())

    def close(self) -> None:
        self._runner.run(self._consumer.stop())
        self._runner.close()


def reader(
    library: str, proxy: ProxyProcess, topic: str, positions: dict[int, int] | None = None, **options: Any
) -> Reader:
    options.setdefault("auto_offset_reset", "earliest")
    kinds: dict[str, Callable[..., Reader]] = {
        "kafka-python": KafkaPython,
        "aiokafka": Aiokafka,
        "confluent-kafka": Confluent,
    }
    return kinds[library](proxy.bootstrap, topic, positions or {}, **options)


@pytest.fixture
def topic(growing: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    """A topic with two partitions and ordered expansion."""
    return create(growing, unique_topic("ordered"), 2)


def create(proxy: ProxyProcess, topic: str, partitions: int) -> str:
    with closing(kafka_python.KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, partitions, 1)])
    # A broker gets the new count shortly after the controller.
    until(lambda: partition_count(proxy.bootstrap, topic) == partitions, f"{topic} to appear")
    return topic


def expand(proxy: ProxyProcess, topic: str, to_count: int) -> None:
    """Repeat the request: kafka-python's admin client gives up after half a minute."""

    def grown() -> bool:
        with (
            contextlib.suppress(KafkaError),
            closing(kafka_python.KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin,
        ):
            admin.create_partitions({topic: NewPartitions(to_count)})
        return partition_count(proxy.bootstrap, topic) == to_count

    until(grown, f"{topic} to be expanded to {to_count} partitions", seconds=_WAIT_SECONDS)


def write(proxy: ProxyProcess, topic: str, partition: int, count: int) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": proxy.bootstrap})
    for _ in range(count):
        producer.produce(topic, b"x", partition=partition)
    assert producer.flush(_WAIT_SECONDS) == 0


def write_in_transaction(proxy: ProxyProcess, topic: str, partition: int, count: int, *, abort: bool) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": proxy.bootstrap, "transactional.id": f"{topic}-{abort}"})
    producer.init_transactions(_WAIT_SECONDS)
    producer.begin_transaction()
    for _ in range(count):
        producer.produce(topic, b"x", partition=partition)
    producer.flush(_WAIT_SECONDS)
    (producer.abort_transaction if abort else producer.commit_transaction)(_WAIT_SECONDS)


def read_all(consumer: Reader, count: int) -> list[Place]:
    """Exactly `count` records, in the order received."""
    found: list[Place] = []
    give_up = time.monotonic() + _WAIT_SECONDS
    while len(found) < count:
        assert time.monotonic() < give_up, f"{found} came; {consumer.waiting()} wait"
        found += consumer.read(0.5)
    assert len(found) == count
    return found


def places(partition: int, start: int, end: int) -> set[Place]:
    return {(partition, offset) for offset in range(start, end)}


@each_library
def test_new_partition_waits_for_its_prior_partitions(library: str, growing: ProxyProcess, topic: str) -> None:
    write(growing, topic, 0, 20)
    write(growing, topic, 1, 10)
    with closing(reader(library, growing, topic)) as consumer:
        first = read_all(consumer, 1) if library == "confluent-kafka" else consumer.read(_WAIT_SECONDS)
        # When the topic is expanded while the consumer lags, and all partitions get more records:
        expand(growing, topic, 4)
        for partition in range(3):
            write(growing, topic, partition, 5)
        time.sleep(0.3)  # until the consumer's next check for an expansion is due
        # Then it observes the expansion while it lags.
        give_up = time.monotonic() + _WAIT_SECONDS
        while set(consumer.waiting()) != {2, 3}:
            assert time.monotonic() < give_up, f"{first} came; {consumer.waiting()} wait"
            assert not places(0, 0, 20) | places(1, 0, 10) <= set(first), "it read all, but observed no expansion"
            first += consumer.read(1.0)
        rest = read_all(consumer, 45 - len(first))
        assert consumer.waiting() == {}
    observed = [*first, *rest]
    begins = min(observed.index(each) for each in places(2, 0, 5))
    assert places(0, 0, 20) | places(1, 0, 10) <= set(observed[:begins])
    assert set(observed) == places(0, 0, 25) | places(1, 0, 15) | places(2, 0, 5)


@each_library
def test_waiting_partitions_and_their_thresholds_are_reported(library: str, growing: ProxyProcess, topic: str) -> None:
    write(growing, topic, 0, 3)
    expand(growing, topic, 4)
    write(growing, topic, 2, 1)
    with closing(reader(library, growing, topic, {0: 1, 1: 0})) as consumer:
        reported = consumer.waiting()
        assert set(reported) == {2, 3}
        assert reported[2][0][1] == 3
        assert set(read_all(consumer, 3)) == {(0, 1), (0, 2), (2, 0)}
        assert consumer.waiting() == {}


@each_library
def test_several_expansions_are_read_in_order(
    library: str, growing: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic, counts = create(growing, unique_topic("ordered"), 1), (1, 2, 4, 8)
    for count, larger in zip(counts, (*counts[1:], None), strict=True):
        for partition in range(count):
            write(growing, topic, partition, 4)
        if larger is not None:
            expand(growing, topic, larger)
    with closing(reader(library, growing, topic)) as consumer:
        observed = read_all(consumer, 4 * sum(counts))
    # Partition 1 existed in three of the four generations: it has 12 records, of which 8 precede the last expansion.
    for partition, prior_partition, threshold in ((1, 0, 4), (2, 0, 8), (3, 1, 4), (4, 0, 12), (5, 1, 8), (7, 2, 4)):
        assert places(prior_partition, 0, threshold) <= set(observed[: observed.index((partition, 0))]), (
            partition,
            prior_partition,
        )


@each_library
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_markers_and_aborted_records_do_not_block_reading(
    library: str, isolation: str, growing: ProxyProcess, topic: str
) -> None:
    write_in_transaction(growing, topic, 0, 2, abort=False)
    write_in_transaction(growing, topic, 1, 2, abort=True)
    expand(growing, topic, 4)
    write(growing, topic, 2, 1)
    aborted = 2 if isolation == "read_uncommitted" else 0
    with closing(reader(library, growing, topic, isolation_level=isolation)) as consumer:
        assert read_all(consumer, 3 + aborted)[-1] == (2, 0)


@each_library
def test_processes_of_a_group_wait_for_commits(library: str, growing: ProxyProcess, topic: str) -> None:
    write_in_transaction(growing, topic, 0, 2, abort=False)
    expand(growing, topic, 4)
    write(growing, topic, 2, 1)
    shared = {"group_id": f"{topic}-group"}
    with (
        closing(reader(library, growing, topic, partition_filter=lambda p: p < 2, **shared)) as old,
        closing(reader(library, growing, topic, partition_filter=lambda p: p >= 2, **shared)) as new,
    ):
        assert read_all(old, 2) == [(0, 0), (0, 1)]
        assert new.read(1.5) == []  # no offset is committed yet
        assert new.waiting() == {2: {0: (None, 3)}, 3: {0: (None, 3)}}
        give_up = time.monotonic() + _WAIT_SECONDS
        observed: list[Place] = []
        while not observed:
            assert time.monotonic() < give_up, new.waiting()
            old.read(0.2)
            old.commit()  # past the transaction marker, too
            observed = new.read(0.2)
        assert observed == [(2, 0)]


@each_library
def test_partial_topic_without_group_is_refused(library: str, growing: ProxyProcess, topic: str) -> None:
    with pytest.raises(ValueError, match="set one group id in all processes"):
        reader(library, growing, topic, partition_filter=lambda p: p == 1)


@each_library
def test_partition_with_a_position_does_not_wait(library: str, growing: ProxyProcess, topic: str) -> None:
    write(growing, topic, 0, 3)
    expand(growing, topic, 4)
    write(growing, topic, 2, 2)
    with closing(reader(library, growing, topic, {0: 0, 2: 1})) as consumer:
        assert set(consumer.waiting()) <= {3}
        assert set(read_all(consumer, 4)) == {*places(0, 0, 3), (2, 1)}


@each_library
def test_latest_consumer_reads_new_partitions_from_the_start(library: str, growing: ProxyProcess, topic: str) -> None:
    write(growing, topic, 0, 3)
    with closing(reader(library, growing, topic, auto_offset_reset="latest")) as consumer:
        assert consumer.read(1.0) == []
        expand(growing, topic, 4)
        write(growing, topic, 2, 2)
        assert set(read_all(consumer, 2)) == places(2, 0, 2)


@each_library
def test_topic_without_ordered_expansion_is_refused(
    library: str, growing: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = create(growing, unique_topic("plain"), 1)
    with pytest.raises(CheckIsOffError, match=r"add-config fencepost\.ordered\.partition\.expansion=true"):
        reader(library, growing, topic)


def test_thresholds_are_read_by_every_admin_client(growing: ProxyProcess, topic: str) -> None:
    write(growing, topic, 1, 7)
    expand(growing, topic, 6)

    async def by_aiokafka() -> tuple[PartitionExpansion, ...]:
        admin = AIOKafkaAdminClient(bootstrap_servers=growing.bootstrap)
        await admin.start()
        try:
            return tuple(await fencepost.partition_expansions(admin, topic))
        finally:
            await admin.close()

    with closing(kafka_python.KafkaAdminClient(bootstrap_servers=growing.bootstrap)) as admin:
        reported = fencepost.partition_expansions(admin, topic)
    (expansion,) = reported
    assert (expansion.from_count, expansion.to_count, expansion.thresholds) == (2, 6, (0, 7))
    assert asyncio.run(by_aiokafka()) == reported
    assert fencepost.partition_expansions(AdminClient({"bootstrap.servers": growing.bootstrap}), topic) == reported
    with pytest.raises(TypeError, match="is not an admin client"):
        fencepost.partition_expansions(object(), topic)
