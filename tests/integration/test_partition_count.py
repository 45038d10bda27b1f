"""Partition counts (KIP-253) with real clients: errors that users see when their producer's partition count is
outdated. And with raw connections: requests that no client library sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from kafka.protocol.metadata import MetadataRequest

from fencepost_dev.cluster import KafkaCluster
from fencepost_policies.partitioners import Partitioner, partition_for
from tests.kit.java import JavaProducers
from tests.kit.waiting import until
from tests.support.clients import read_all
from tests.support.expanding import create_partitions
from tests.support.fixtures import proxy_fixture
from tests.support.keyed import CLIENTS, Keyed, Sent, keyed
from tests.support.proxy import LEASE_SECONDS, ProxyProcess
from tests.support.raw import Closed, Connection, Log, Record, batch

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

CONFIG = f"""
config_lease_seconds = {LEASE_SECONDS}

[topics."counted-*"]
"fencepost.check.partition.count" = "true"

[topics."murmur2-*"]
"fencepost.check.partition.count" = "true"
"fencepost.partitioner" = "murmur2"

[topics."crc32-*"]
"fencepost.check.partition.count" = "true"
"fencepost.partitioner" = "crc32"
"""
WAIT_SECONDS = 60.0
NOT_LEADER, INVALID_PARTITIONS = 6, 37


proxy = proxy_fixture(config=CONFIG)


def stated(count: int, value: bytes = b"probe", **settings: Any) -> bytes:
    return batch(Record(value, headers=[("fencepost-partition-count", b"%d" % count)]), **settings)


class Expanding:
    """A topic of two partitions that is expanded to three, known to the proxy."""

    def __init__(self, kafka: KafkaCluster, proxy: ProxyProcess, name: str) -> None:
        self.name, self._kafka, self._proxy = name, kafka, proxy
        with Connection(proxy.bootstrap) as client:
            assert client.create_topic(name, partitions=2) == (0, None)
            until(lambda: client.append(name, stated(2), partition=1).error_code == 0, "the topic's leader")

    def expand(self, *, past_the_proxy: bool = False) -> None:
        with Connection(self._kafka.bootstrap if past_the_proxy else self._proxy.bootstrap) as client:
            assert create_partitions(client, {self.name: 3})[self.name][0] == 0

    def values(self) -> dict[str, int]:
        """The partition of each value. Each value must be there once."""
        found: dict[str, int] = {}
        for partition in range(3):
            for _, value in read_all(self._kafka.bootstrap, self.name, partition):
                if value != b"probe":
                    assert value.decode() not in found, f"{value!r} is in the log twice"
                    found[value.decode()] = partition
        return found


def moving_key(partitioner: Partitioner) -> str:
    """A key whose partition differs between two and three partitions."""
    return next(
        key
        for key in (f"key-{n}" for n in range(1000))
        if partition_for(partitioner, key.encode(), 2) != partition_for(partitioner, key.encode(), 3)
    )


@pytest.fixture
def new_expanding(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> Callable[[str], Expanding]:
    return lambda prefix: Expanding(kafka, proxy, unique_topic(prefix))


def test_java_partitioner_agrees_on_every_key() -> None:
    keys = [b"", b"k", b"key", b"\xff" * 7, bytes(range(256)), *(b"%d" % n * (n % 9) for n in range(300))]
    cases = [(key, count) for key in keys for count in (1, 2, 3, 7, 100)]
    with JavaProducers() as java:
        queried = [java.query("place", "-", key.hex(), str(count)) for key, count in cases]
        placed = [each.result(WAIT_SECONDS)[0] for each in queried]

    assert placed == [partition_for(Partitioner.MURMUR2, key, count) for key, count in cases]


#: The error and message that each client shows when its producer's partition count is outdated.
STALE = {
    "Java": ("InvalidPartitionsException", "{reported}"),
    "kafka-python": ("InvalidPartitionsError", "[Error 37] InvalidPartitionsError: {reported}"),
    "aiokafka": ("InvalidPartitionsError", "[Error 37] InvalidPartitionsError"),
    "confluent-kafka": ("INVALID_PARTITIONS", "Broker: Invalid number of partitions"),
}
#: User settings per client: with an idempotent producer and without.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Java (default: idempotent)": ("Java", {}),
    "Java, `enable.idempotence=false`": ("Java", {"enable.idempotence": "false"}),
    "kafka-python (default: idempotent)": ("kafka-python", {}),
    "kafka-python, `enable_idempotence=False`": ("kafka-python", {"enable_idempotence": False}),
    "aiokafka (default)": ("aiokafka", {}),
    "aiokafka, `enable_idempotence=True`": ("aiokafka", {"enable_idempotence": True}),
    "confluent-kafka (default)": ("confluent-kafka", {}),
    "confluent-kafka, `enable.idempotence=true`": ("confluent-kafka", {"enable.idempotence": True}),
}
#: kafka-python's default producer is idempotent and stops after any non-retriable error.
CONFIGS: dict[str, dict[str, Any]] = {"kafka-python": {"enable_idempotence": False}}


def sends_again(producer: Keyed, topic: str, key: str, value: str, *, says: bool) -> Sent:
    """Send again until appended, as `docs/other-clients.md` recommends."""
    give_up = time.monotonic() + WAIT_SECONDS
    while True:
        sent = producer.send(topic, key, value, says=says)
        if sent.error is None or time.monotonic() > give_up:
            return sent
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["its keys", "its last metadata response"])
@pytest.mark.parametrize("client", CLIENTS)
def test_producer_without_count_is_refused_then_recovers(
    client: str, how: str, new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    """`how` – what the proxy compares. The last metadata response is a heuristic: the proxy accepts records that are
    partitioned during a metadata refresh, wherever they are."""
    with keyed(client, proxy.bootstrap, **CONFIGS.get(client, {})) as producer:
        placed_by = producer.placed_by
        topic = new_expanding(placed_by.value if how == "its keys" else "counted")
        key = moving_key(placed_by)
        old, new = (partition_for(placed_by, key.encode(), count) for count in (2, 3))
        assert producer.send(topic.name, key, "before", says=False).partition == old

        topic.expand()
        observed = producer.send(topic.name, key, "after", says=False)
        reported = f"INVALID_PARTITION_COUNT topic={topic.name} partition={old} expected=2 actual=3"
        if how == "its keys":
            reported = (
                f"MISPLACED_KEY topic={topic.name} partition={old} record=0 belongs={new} actual=3: of 3 partitions, "
                f"its key is placed on another one by {placed_by.value}"
            )
        error, shown = STALE[client]
        assert (observed.error, observed.shown) == (error, shown.format(reported=reported))

        # The producer refreshes its metadata and assigns the key to its new partition.
        again = sends_again(producer, topic.name, key, "after", says=False)
        assert again.error is None
        if how != "its last metadata response":
            assert again.partition == new
        else:
            until(
                lambda: producer.send(topic.name, key, f"{time.monotonic()}", says=False).partition == new, "a refresh"
            )
    values = topic.values()
    assert (values.pop("before"), values.pop("after")) == (old, again.partition)
    assert not values or how == "its last metadata response"


_JAVA = "`InvalidPartitionsException: {reported}`"
_KAFKA_PYTHON = "`InvalidPartitionsError: [Error 37] InvalidPartitionsError: {reported}`"
_AIOKAFKA = "`InvalidPartitionsError: [Error 37] InvalidPartitionsError`"
_CONFLUENT = "`INVALID_PARTITIONS: Broker: Invalid number of partitions`"
#: Per client, as in `docs/other-clients.md`: the exception, the outcome of a resend, and the outcome of another key for
#: the partition that refused.
TABLE = {
    "Java (default: idempotent)": (_JAVA, "yes", "yes"),
    "Java, `enable.idempotence=false`": (_JAVA, "yes", "yes"),
    "kafka-python (default: idempotent)": (_KAFKA_PYTHON, "**no**", "**no**"),
    "kafka-python, `enable_idempotence=False`": (_KAFKA_PYTHON, "yes", "yes"),
    "aiokafka (default)": (_AIOKAFKA, "yes", "yes"),
    "aiokafka, `enable_idempotence=True`": (_AIOKAFKA, "yes", "`OutOfOrderSequenceNumber`"),
    "confluent-kafka (default)": (_CONFLUENT, "yes", "yes"),
    "confluent-kafka, `enable.idempotence=true`": (_CONFLUENT, "yes", "yes"),
}
REPORTED = "INVALID_PARTITION_COUNT topic=t partition=0 expected=2 actual=3"


def test_every_variant_has_an_expected_outcome() -> None:
    assert TABLE.keys() == VARIANTS.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_becomes_of_the_producer_afterwards(
    variant: str, new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    client, configs = VARIANTS[variant]
    topic = new_expanding("counted")
    with keyed(client, proxy.bootstrap, **configs) as producer:
        key, stays = _keys_of_the_first(producer.placed_by)
        producer.send(topic.name, key, "before", says=True)
        topic.expand()

        refused = producer.send(topic.name, key, "after", says=True)
        observed = f"`{refused.error}: {refused.shown}`".replace(f"topic={topic.name}", "topic=t")
        again = producer.send(topic.name, key, "after", says=True)
        give_up = time.monotonic() + (WAIT_SECONDS if TABLE[variant][1] == "yes" else 3.0)
        while again.error is not None and time.monotonic() < give_up:
            time.sleep(0.05)
            again = producer.send(topic.name, key, "after", says=True)
        another = [producer.send(topic.name, stays, f"another {n}", says=True) for n in range(3)]

    if again.error is None:
        new = partition_for(producer.placed_by, key.encode(), 3)
        values = topic.values()
        assert (values["before"], values["after"]) == (0, new)
    reported = "yes" if again.error is None else "**no**" if again == refused else f"`{again.error}`"
    others = {"yes" if each.error is None else "**no**" if each == refused else f"`{each.error}`" for each in another}
    assert ((observed, reported), others) == (
        (TABLE[variant][0].format(reported=REPORTED), TABLE[variant][1]),
        {TABLE[variant][2]},
    )


def _keys_of_the_first(placed_by: Partitioner) -> tuple[str, str]:
    """Two keys on partition 0 of two. With three partitions, the first moves and the second stays."""
    of_two = [key for key in (f"key-{n}" for n in range(1000)) if partition_for(placed_by, key.encode(), 2) == 0]
    moves = next(key for key in of_two if partition_for(placed_by, key.encode(), 3) != 0)
    return moves, next(key for key in of_two if partition_for(placed_by, key.encode(), 3) == 0)


@pytest.mark.parametrize("says", [True, False], ids=["says its count", "says nothing"])
@pytest.mark.parametrize("client", CLIENTS)
def test_running_producer_loses_nothing_during_expansion(
    client: str, says: bool, new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    # The producer states its count with each record, or the topic has a configured partitioner. It resends refused
    # records.
    with keyed(client, proxy.bootstrap, **CONFIGS.get(client, {})) as producer:
        topic = new_expanding("counted" if says else producer.placed_by.value)
        keys = [f"key-{number}" for number in range(20)]
        refused = 0
        sent: list[tuple[str, str]] = []
        grown = threading.Thread(target=topic.expand)
        left = 40

        # The topic is expanded meanwhile.
        while left or grown.is_alive():
            left = max(0, left - 1)
            if len(sent) == 39:
                grown.start()
                left = 2 * len(keys)
            elif grown.is_alive():
                left = 2 * len(keys)
            key, value = keys[len(sent) % len(keys)], f"{len(sent)}"
            while (observed := producer.send(topic.name, key, value, says=says)).error is not None:
                assert observed.error == STALE[client][0], observed
                refused += 1
                time.sleep(0.02)
            sent.append((key, value))
        grown.join()

    # Each record is there once. No record of a key is on the old partition after one on the new partition.
    assert refused > 0
    values = topic.values()
    assert values.keys() == {value for _, value in sent}
    for key in keys:
        old, new = (partition_for(producer.placed_by, key.encode(), count) for count in (2, 3))
        appended_batch = [values[value] for its_key, value in sent if its_key == key]
        assert appended_batch == sorted(appended_batch, key=lambda partition: partition == new) or old == new
        assert appended_batch[0] == old
        assert appended_batch[-1] == new


# --- raw connections --------------------------------------------------------------------------------------------------


def test_pipelining_client_reads_answers_before_the_close(
    new_expanding: Callable[[str], Expanding], proxy: ProxyProcess, kafka: KafkaCluster
) -> None:
    """A pipeline: responses that Kafka still owes, a stale count in the middle, and megabytes after it."""
    topic = new_expanding("murmur2").name
    with Connection(proxy.bootstrap) as client:
        sent = [client.send_produce({topic: {0: stated(2)}}), client.send(MetadataRequest(topics=[]), 1)]
        sent += [client.send_produce({topic: {0: stated(3)}})]
        for _ in range(3):
            client.send_produce({topic: {0: stated(2, bytes(700_000))}})

        # Everything up to the stale count is answered, and nothing after it is appended.
        first, good = client.receive_produce()
        second, _ = client.receive(MetadataRequest, 1)
        third, stale = client.receive_produce()
        assert [first, second, third] == sent
        assert (good[topic, 0].error_code, stale[topic, 0].error_code) == (0, INVALID_PARTITIONS)
        with pytest.raises(Closed, match="closed by"):
            client.receive_frame()
    assert Log(kafka.bootstrap).values(topic) == [b"probe"]


def test_expansion_bypassing_the_proxy_is_detected(
    new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    topic = new_expanding("murmur2")
    with Connection(proxy.bootstrap) as client:
        assert client.append(topic.name, stated(2)).error_code == 0
        topic.expand(past_the_proxy=True)

        def code_of_current_count() -> int:
            with Connection(proxy.bootstrap) as another:
                return another.append(topic.name, stated(3)).error_code

        # The broker may not know the new partition yet.
        refused = {0, INVALID_PARTITIONS, NOT_LEADER}
        until(code_of_current_count, "the new count", accept=lambda code: code == 0 or code not in refused)
        assert code_of_current_count() == 0
        until(lambda: client.append(topic.name, stated(2)).error_code == INVALID_PARTITIONS, "every process knows")
