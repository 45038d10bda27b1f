"""`for record in log`, with each of the three Kafka clients, through a proxy to real Kafka."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost import ConcurrentUseError, LogRecord, NotAtEndError, PositionLostError, Record, RetryPolicy
from tests.support import clients
from tests.support.clients import LIBRARIES
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.proxy import ProxyProcess

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.parametrize("library", LIBRARIES),
    # kafka-python leaves the socket of a failed connection attempt to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

_CONFIG = """
[topics."iterated-*"]
"fencepost.check.expected.offsets" = "required"
"""
_MANY = 3000
_BIG_BYTES, _BIG = 20_000, 2500
#: Of a log of 50 MB. One poll returns at most 10 MB (500 records), and the next one may be there already.
_PEAK_BYTES = 25_000_000


#: It does not create topics when a client requests them, as aiokafka does.
own_kafka = kafka_fixture(properties={"auto.create.topics.enable": "false"})
own_proxy = proxy_fixture(of="own_kafka", config=_CONFIG)


@pytest.fixture
def topic(own_proxy: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    return clients.create_topic(own_proxy.bootstrap, unique_topic("iterated"))


def _values(records: Iterator[LogRecord] | clients.Log) -> list[bytes | None]:
    return [record.value for record in records]


def test_loop_reads_in_order_to_the_end_at_its_start(library: str, own_proxy: ProxyProcess, topic: str) -> None:
    values = [b"%d" % number for number in range(_MANY)]
    with (
        closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log,
        closing(clients.log_writer("kafka-python", topic, own_proxy.bootstrap)) as other,
    ):
        assert _values(log) == []
        assert log.append([Record(value) for value in values[: _MANY // 2]]) == 0
        other.read_to_end(lambda record: None)
        other.append([Record(value) for value in values[_MANY // 2 :]])

        read = []
        for record in log:
            if not read:
                other.append([Record(b"during the loop")])
            read.append((record.offset, record.value))
        assert read == list(enumerate(values))[_MANY // 2 :]
        assert log.next_offset == _MANY
        assert _values(log) == [b"during the loop"]
        assert log.append([Record(b"after it")]) == _MANY + 1


def test_loop_that_breaks_continues_with_its_last_record(library: str, own_proxy: ProxyProcess, topic: str) -> None:
    with (
        closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log,
        closing(clients.log_writer("kafka-python", topic, own_proxy.bootstrap)) as other,
    ):
        other.read_to_end(lambda record: None)
        other.append([Record(b"a"), Record(b"b"), Record(b"c")])
        for record in log:
            if record.value == b"b":
                break
        with pytest.raises(NotAtEndError):
            log.append([Record(b"too early")])
        assert _values(log) == [b"b", b"c"]
        assert log.append([Record(b"d")]) == 3


def test_second_append_of_one_writer_is_refused_and_the_first_one_is_in_the_log(
    library: str, own_proxy: ProxyProcess, topic: str
) -> None:
    """As two requests of a web service do that share one log writer."""
    first, second = [Record(b"first")], [Record(b"second")]
    outcomes: list[Any] = []
    if library == "aiokafka":

        async def both() -> list[Any]:
            async with fencepost.aiokafka.LogWriter(topic, 0, bootstrap_servers=own_proxy.bootstrap) as log:
                await log.read_to_end(lambda record: None)
                return await asyncio.gather(log.append(first), log.append(second), return_exceptions=True)

        outcomes = asyncio.run(both())
    else:
        with closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log:
            log.read_to_end(lambda record: None)
            thread = threading.Thread(target=lambda: outcomes.append(log.append(first)))
            sending = _called(log, "_appender", "send")
            thread.start()
            assert sending.wait(clients.WAIT_SECONDS)
            with pytest.raises(ConcurrentUseError) as refused:
                log.append(second)
            thread.join(clients.WAIT_SECONDS)
            outcomes.append(refused.value)
    assert outcomes[0] == 0
    assert isinstance(outcomes[1], ConcurrentUseError)
    assert clients.read_all(own_proxy.bootstrap, topic) == [(0, b"first")]


def _called(owner: Any, attribute: str, name: str) -> threading.Event:
    """Set when the method `name` of `owner.attribute` is called."""
    used = getattr(owner, attribute)
    called, method = threading.Event(), getattr(used, name)

    def noted(*args: Any) -> Any:
        called.set()
        return method(*args)

    setattr(used, name, noted)
    return called


_LIMIT = 20


def _counted(state: int, record: LogRecord) -> int:
    return state + 1


def _below_limit(state: int) -> list[Record]:
    return [Record(b"%d" % state)] if state < _LIMIT else []


def test_processes_that_share_logs_keep_a_limit(library: str, own_proxy: ProxyProcess, topic: str) -> None:
    """Two shared logs, as of two processes, with four threads or tasks each."""
    bootstrap = own_proxy.bootstrap
    if library == "aiokafka":

        async def processes() -> None:
            async with (
                fencepost.aiokafka.SharedLog(
                    fencepost.aiokafka.LogWriter(topic, 0, bootstrap_servers=bootstrap), 0, _counted
                ) as one,
                fencepost.aiokafka.SharedLog(
                    fencepost.aiokafka.LogWriter(topic, 0, bootstrap_servers=bootstrap), 0, _counted
                ) as two,
            ):
                await asyncio.gather(*(log.change(_below_limit) for log in (one, two) for _ in range(_LIMIT)))
                assert (await one.change(_below_limit)).state == _LIMIT

        asyncio.run(processes())
    else:
        with (
            fencepost.kafka_python.SharedLog(
                cast("Any", clients.log_writer(library, topic, bootstrap)), 0, _counted
            ) as one,
            fencepost.confluent.SharedLog(
                cast("Any", clients.log_writer(library, topic, bootstrap)), 0, _counted
            ) as two,
            ThreadPoolExecutor(8) as pool,
        ):
            changes = [pool.submit(log.change, _below_limit) for log in (one, two) for _ in range(_LIMIT)]
            assert sorted(offset for each in changes if (offset := each.result(90).offset) is not None) == [
                *range(_LIMIT)
            ]
            assert one.change(_below_limit) == (None, _LIMIT)
    assert [int(value) for _, value in clients.read_all(bootstrap, topic)] == [*range(_LIMIT)]


def test_loop_holds_a_bounded_part_of_the_log(library: str, own_proxy: ProxyProcess, topic: str) -> None:
    with closing(clients.log_writer("kafka-python", topic, own_proxy.bootstrap)) as other:
        other.read_to_end(lambda record: None)
        for _ in range(_BIG // 25):
            other.append([Record(bytes(_BIG_BYTES))] * 25)
    with closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log:
        tracemalloc.start()
        try:
            count = sum(1 for _ in log)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert count == _BIG
    assert peak < _PEAK_BYTES


def test_deleted_partition_is_reported_clearly_and_soon(library: str, own_proxy: ProxyProcess, topic: str) -> None:
    retry = RetryPolicy(attempt_seconds=4, total_seconds=300)
    with closing(clients.log_writer(library, topic, own_proxy.bootstrap, retry)) as log:
        log.read_to_end(lambda record: None)
        with closing(KafkaAdminClient(bootstrap_servers=own_proxy.bootstrap)) as admin:
            admin.delete_topics([topic])
        began = time.monotonic()
        with pytest.raises(PositionLostError, match=f"{topic}-0: the partition does not exist"):
            _values(log)
    assert time.monotonic() - began < retry.total_seconds / 2


async def _pairs(places: list[tuple[str, int]], bootstrap: str) -> tuple[list[Any], dict[Any, int]]:
    async with fencepost.aiokafka.LogReader(places, bootstrap_servers=bootstrap) as log:
        return [(place, record.value) async for place, record in log], log.next_offsets


def test_reader_of_several_partitions_iterates_over_pairs(
    library: str, own_proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic("iterated-pairs")
    with closing(KafkaAdminClient(bootstrap_servers=own_proxy.bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, 2, 1)])
    with closing(fencepost.kafka_python.ConditionalProducer(bootstrap_servers=own_proxy.bootstrap)) as producer:
        for partition, offset, value in ((0, 0, b"a"), (1, 0, b"b"), (0, 1, b"c")):
            producer.send(topic, value, partition=partition, expected_offset=offset).get(90)
    places = [(topic, 0), (topic, 1)]
    if library == "aiokafka":
        read, ends = asyncio.run(_pairs(places, own_proxy.bootstrap))
    else:
        with (
            fencepost.kafka_python.LogReader(places, bootstrap_servers=own_proxy.bootstrap)
            if library == "kafka-python"
            else fencepost.confluent.LogReader(places, {"bootstrap.servers": own_proxy.bootstrap}) as log
        ):
            assert log.next_offsets == {}
            read, ends = [(place, record.value) for place, record in log], log.next_offsets
    assert read == [(places[0], b"a"), (places[0], b"c"), (places[1], b"b")]
    assert ends == {places[0]: 2, places[1]: 1}
