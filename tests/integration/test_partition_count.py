"""Partition counts (KIP-253) with real clients: errors that users see when their producer's partition count is
outdated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewPartitions, NewTopic

from fencepost_dev.cluster import KafkaCluster
from fencepost_policies.partitioners import Partitioner, partition_for
from tests.kit.java import JavaProducers
from tests.support.clients import read_all
from tests.support.keyed import CLIENTS, Keyed, Sent, keyed
from tests.support.proxy import LEASE_SECONDS, ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

CONFIG = f"""
config_lease_seconds = {LEASE_SECONDS}

[topics."counted-*"]
"fencepost.check.partition.count" = "true"

[topics."needed-*"]
"fencepost.check.partition.count" = "required"

[topics."murmur2-*"]
"fencepost.check.partition.count" = "true"
"fencepost.partitioner" = "murmur2"

[topics."crc32-*"]
"fencepost.check.partition.count" = "true"
"fencepost.partitioner" = "crc32"
"""
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), config=CONFIG) as process:
        yield process


class Expanding:
    """A topic of two partitions that is expanded to three, known to the proxy."""

    def __init__(self, kafka: KafkaCluster, proxy: ProxyProcess, name: str) -> None:
        self.name = name
        self._kafka = kafka
        self._proxy = proxy
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        try:
            admin.create_topics([NewTopic(name, 2, 1)])
        finally:
            admin.close()
        self._probe(2)

    def expand(self, *, past_the_proxy: bool = False) -> None:
        bootstrap = self._kafka.bootstrap if past_the_proxy else self._proxy.bootstrap
        admin = KafkaAdminClient(bootstrap_servers=bootstrap)
        try:
            admin.create_partitions({self.name: NewPartitions(3)})
        finally:
            admin.close()
        if past_the_proxy:
            self._probe(3)

    def _probe(self, count: int) -> None:
        """Append once the proxy knows the partition count."""
        give_up = time.monotonic() + WAIT_SECONDS
        while True:
            producer = KafkaProducer(
                bootstrap_servers=self._proxy.bootstrap, enable_idempotence=False, client_id="probe"
            )
            try:
                headers = [("fencepost-partition-count", b"%d" % count)]
                producer.send(self.name, b"probe", partition=count - 1, headers=headers).get(WAIT_SECONDS)
                return
            except Exception:
                assert time.monotonic() < give_up
                time.sleep(0.05)
            finally:
                producer.close()

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


@pytest.mark.parametrize("prefix", ["counted", "needed"])
@pytest.mark.parametrize("client", CLIENTS)
def test_producer_stating_stale_count_is_refused_then_recovers(
    client: str, prefix: str, new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    topic = new_expanding(prefix)
    with keyed(client, proxy.bootstrap, **CONFIGS.get(client, {})) as producer:
        key = moving_key(producer.placed_by)
        old, new = (partition_for(producer.placed_by, key.encode(), count) for count in (2, 3))
        assert producer.send(topic.name, key, "before", says=True).partition == old

        topic.expand()
        observed = producer.send(topic.name, key, "after", says=True)
        error, shown = STALE[client]
        reported = f"INVALID_PARTITION_COUNT topic={topic.name} partition={old} expected=2 actual=3"
        assert (observed.error, observed.shown) == (error, shown.format(reported=reported))

        # The producer refreshes its metadata and assigns the key to its new partition.
        assert sends_again(producer, topic.name, key, "after", says=True).partition == new
    assert topic.values() == {"before": old, "after": new}


@pytest.mark.parametrize("client", CLIENTS)
def test_producer_without_count_is_checked_by_its_keys(
    client: str, new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    with keyed(client, proxy.bootstrap, **CONFIGS.get(client, {})) as producer:
        placed_by = producer.placed_by
        topic = new_expanding(placed_by.value)
        key = moving_key(placed_by)
        old, new = (partition_for(placed_by, key.encode(), count) for count in (2, 3))
        producer.send(topic.name, key, "before", says=False)

        topic.expand()
        observed = producer.send(topic.name, key, "after", says=False)
        error, shown = STALE[client]
        reported = (
            f"MISPLACED_KEY topic={topic.name} partition={old} record=0 belongs={new} actual=3: of 3 partitions, its "
            f"key is placed on another one by {placed_by.value}"
        )
        assert (observed.error, observed.shown) == (error, shown.format(reported=reported))

        assert sends_again(producer, topic.name, key, "after", says=False).partition == new
    assert topic.values() == {"before": old, "after": new}


@pytest.mark.parametrize("client", CLIENTS)
def test_keyless_check_uses_last_metadata_response(
    client: str, new_expanding: Callable[[str], Expanding], proxy: ProxyProcess
) -> None:
    """A heuristic: the proxy accepts records that are partitioned during a metadata refresh, wherever they are."""
    topic = new_expanding("counted")
    with keyed(client, proxy.bootstrap, **CONFIGS.get(client, {})) as producer:
        key = moving_key(producer.placed_by)
        old, new = (partition_for(producer.placed_by, key.encode(), count) for count in (2, 3))
        producer.send(topic.name, key, "before", says=False)

        topic.expand()
        observed = producer.send(topic.name, key, "first", says=False)
        error, shown = STALE[client]
        reported = f"INVALID_PARTITION_COUNT topic={topic.name} partition={old} expected=2 actual=3"
        assert (observed.error, observed.shown) == (error, shown.format(reported=reported))

        assert sends_again(producer, topic.name, key, "first", says=False).error is None
        while producer.send(topic.name, key, f"later {time.monotonic()}", says=False).partition != new:
            time.sleep(0.05)
    values = topic.values()
    assert values["first"] in (old, new)


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
