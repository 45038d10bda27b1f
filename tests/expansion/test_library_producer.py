"""The library's ordered producers during expansions, through a real proxy, with each of the three clients."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from kafka import KafkaAdminClient

import fencepost
from fencepost import CheckIsOffError, PartitionExpansion
from fencepost._partitioning import Partitioner, crc32, murmur2
from tests.expansion.test_library_consumer import create, expand
from tests.kit import reading
from tests.kit.producers import ORDERED, failures, ordered, start
from tests.support.clients import LIBRARIES
from tests.support.proxy import ProxyProcess

pytestmark = [pytest.mark.kafka]
each_library = pytest.mark.parametrize("library", LIBRARIES)

PLACEMENTS: dict[str, Partitioner] = {"kafka-python": murmur2, "aiokafka": murmur2, "confluent-kafka": crc32}


@pytest.fixture
def topic(growing: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    """A topic with two partitions, ordered expansion and partition-count checks."""
    return create(growing, unique_topic("counted"), 2)


def read(proxy: ProxyProcess, topic: str, count: int) -> dict[int, list[tuple[str, int]]]:
    """Partition → (key, value) of all its records."""
    found: dict[int, list[tuple[str, int]]] = {partition: [] for partition in range(count)}
    for message in reading.read(proxy.bootstrap, *((topic, partition) for partition in found)):
        found[message.partition()].append((message.key().decode(), int(message.value())))
    return found


def in_order(
    found: dict[int, list[tuple[str, int]]], expansions: Sequence[PartitionExpansion], place: Partitioner
) -> dict[str, list[int]]:
    """Key → its values by generation of the topic: those on the key's partition of that generation, between the
    thresholds that start and end it. (The log has only records, because these tests use no transactions.)"""
    values: dict[str, list[int]] = defaultdict(list)
    keys = {key for records in found.values() for key, _ in records}
    starts = [0] * len(found)
    for number in range(len(expansions) + 1):
        count = expansions[number].from_count if number < len(expansions) else len(found)
        ends = expansions[number].thresholds if number < len(expansions) else None
        for key in keys:
            partition = place(key.encode(), count)
            end = len(found[partition]) if ends is None else ends[partition]
            values[key] += [value for each, value in found[partition][starts[partition] : end] if each == key]
        starts = [*(ends or ()), *[0] * (len(found) - len(ends or ()))]
    return values


@each_library
def test_keys_stay_in_order_across_expansions(library: str, growing: ProxyProcess, topic: str) -> None:
    keys, counts, rounds = [f"key{i}" for i in range(16)], [2, 4, 8], 120
    with closing(ordered(library, growing.bootstrap)) as sender:
        grower: threading.Thread | None = None
        sent = []
        for number in range(1, rounds + 1):
            for key in keys:
                sent.append(sender.send(topic, str(number), key=key, partition=None))
            if number in (30, 70):
                # Concurrently with the producer, which continues to send with the count that it knows.
                grower = threading.Thread(target=expand, args=(growing, topic, counts[1 if number == 30 else 2]))
                grower.start()
            time.sleep(0.005)
            if number in (60, 100):
                assert grower is not None
                grower.join()
        assert failures(sent) == []
    found = read(growing, topic, counts[-1])
    with closing(KafkaAdminClient(bootstrap_servers=growing.bootstrap)) as admin:
        expansions = fencepost.partition_expansions(admin, topic)
    assert [each.to_count for each in expansions] == counts[1:]
    values = in_order(found, expansions, PLACEMENTS[library])
    assert values == {key: list(range(1, rounds + 1)) for key in keys}
    assert found[7], "no record was placed with the last count"


@each_library
def test_explicit_partition_is_kept_after_expansion(library: str, growing: ProxyProcess, topic: str) -> None:
    with closing(ordered(library, growing.bootstrap)) as sender:
        assert failures([sender.send(topic, "1", key="a", partition=1)]) == []
        expand(growing, topic, 6)
        assert failures([sender.send(topic, value, key="a", partition=1) for value in ("2", "3")]) == []
    assert read(growing, topic, 6)[1] == [("a", 1), ("a", 2), ("a", 3)]


@each_library
def test_topic_without_partition_count_check_is_refused(
    library: str, growing: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = create(growing, unique_topic("plain"), 1)
    with (
        closing(ordered(library, growing.bootstrap)) as sender,
        pytest.raises(CheckIsOffError, match=r"add-config fencepost\.check\.partition\.count=true"),
    ):
        sender.send(topic, "1", key="a", partition=None)


@each_library
def test_what_cannot_be_kept_in_order_is_refused(library: str, growing: ProxyProcess) -> None:
    def open_with(**settings: Any) -> None:
        start(library, None, growing.bootstrap, kind=ORDERED[library], **settings)

    with pytest.raises(ValueError, match="acks=0"):
        open_with(acks=0)
    with pytest.raises(ValueError, match="transactions"):
        open_with(transactional_id="t")
    if library != "confluent-kafka":
        with pytest.raises(ValueError, match="idempotent producer"):
            open_with(enable_idempotence=True)
