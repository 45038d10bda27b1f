"""The fake cluster responds like a real Kafka to what the proxy and its benchmarks send: one script runs on both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.cluster.appends import Appends
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import Configs
from fencepost_proxy.cluster.fetches import Fetches, Found
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.producer_ids import ProducerIds
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.cluster.transactions import Transactions
from fencepost_proxy.config import Limits
from fencepost_proxy.types import Address, Offset, ProducerId, TopicPartition
from tests.kit.waiting import until
from tests.support.fake_cluster import INVALID_RECORD, FakeClusterProcess
from tests.support.kafka import unique_topic
from tests.support.raw import Connection, Log, Producer, Record, batch, read_batches

pytestmark = pytest.mark.kafka

LIMITS = replace(Limits(), request_timeout_seconds=10.0)
Reports = list[tuple[str, object]]


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeClusterProcess]:
    with FakeClusterProcess() as cluster:
        yield cluster


def test_produce_and_fetch_are_answered_alike(kafka: KafkaCluster, fake: FakeClusterProcess) -> None:
    assert produce_and_fetch(fake.bootstrap) == produce_and_fetch(kafka.bootstrap)


def test_fake_cluster_answers_control_client_like_kafka(kafka: KafkaCluster, fake: FakeClusterProcess) -> None:
    assert asyncio.run(queries(fake.bootstrap)) == asyncio.run(queries(kafka.bootstrap))


def test_an_error_without_an_answer_closes_the_connection(kafka: KafkaCluster, fake: FakeClusterProcess) -> None:
    for bootstrap in (kafka.bootstrap, fake.bootstrap):
        with Connection(bootstrap) as client:
            client.send_produce({"no-such-topic": {0: batch(b"a")}}, acks=0)
            assert client.is_closed()


def produce_and_fetch(bootstrap: str) -> Reports:
    topic = unique_topic("fake")
    reported: Reports = []

    def report(what: str, answer: object) -> None:
        reported.append((what, answer))

    with Connection(bootstrap) as client:
        report("create", client.create_topic(topic, partitions=2, configs={"max.message.bytes": "2000000"})[0])
        report("create again", client.create_topic(topic, partitions=2)[0])
        _until_led(client, topic)
        one, two = client.init_producer_id(), client.init_producer_id()
        report("ids differ", one.id != two.id)
        metadata = client.metadata(topic, "no-such-topic")
        report("metadata", [(each.error_code, len(each.partitions)) for each in metadata.topics])
        report("no such topic", client.append("no-such-topic", batch(b"a")).error_code)

        def append(what: str, records: bytes, partition: int = 0) -> None:
            answer = client.append(topic, records, partition=partition)
            # A response to a duplicate has the time of the first append, others have -1. Only this is compared.
            observed = _whether_present(answer.log_append_time_ms)
            report(what, (answer.error_code, answer.base_offset, observed, answer.log_start_offset))

        append("first", batch(b"a", b"b"))
        append("second", batch(b"c"))
        append("base offset", batch(b"c", base_offset=7))
        append("broken", batch(b"c")[:-1] + b"\xff")
        append("no such partition", batch(b"c"), 2)
        append("any first sequence", batch(b"d", producer=Producer(one.id, 0, 77)))
        append("again", batch(b"d", producer=Producer(one.id, 0, 77)))
        append("other content, same sequence", batch(b"x", producer=Producer(one.id, 0, 77)))
        append("gap", batch(b"e", producer=Producer(one.id, 0, 79)))
        append("next", batch(b"e", b"f", producer=Producer(one.id, 0, 78)))
        append("higher epoch, not at 0", batch(b"g", producer=Producer(one.id, 1, 5)))
        append("higher epoch", batch(b"g", producer=Producer(one.id, 1, 0)))
        append("older epoch", batch(b"h", producer=Producer(one.id, 0, 80)))
        append("before the wrap", batch(b"i", producer=Producer(two.id, 0, 2**31 - 1)))
        append("after the wrap", batch(b"j", producer=Producer(two.id, 0, 0)))
        for number in range(5):
            append(f"more {number}", batch(b"k", producer=Producer(two.id, 0, 1 + number)))
        append("one of the last five", batch(b"k", producer=Producer(two.id, 0, 1)))
        append("forgotten", batch(b"j", producer=Producer(two.id, 0, 0)))
        append("with headers", batch(Record(b"l", expected=3)), 1)
    log = Log(bootstrap)
    for partition in (0, 1):
        report(f"log end {partition}", log.end(topic, partition))
        report(f"log {partition}", [(each.base_offset, each.values) for each in log.batches(topic, partition)])
    return reported


def _whether_present(log_append_time_ms: int) -> str:
    return "none" if log_append_time_ms == -1 else "some"


def _until_led(client: Connection, topic: str) -> None:
    """Wait for leaders. Metadata names a leader shortly before it serves; until then an append gets 3 or 6."""

    def led() -> bool:
        described = client.metadata(topic).topics[0]
        if described.error_code or any(each.leader_id < 0 for each in described.partitions):
            return False
        # An invalid batch, so that nothing is appended.
        return all(
            client.append(topic, batch(b"a", base_offset=1), partition=each.partition_index).error_code
            == INVALID_RECORD
            for each in described.partitions
        )

    until(led, f"{topic} to have leaders that know it")


async def queries(bootstrap: str) -> Reports:
    topic = unique_topic("fake")
    reported: Reports = []
    client = KafkaClient([Address.parse(each) for each in bootstrap.split(",")], LIMITS)
    try:
        await client.start(timeout_seconds=60)
        reported.append(("created", await Topics(client).create(topic, partitions=1, replication_factor=1, configs={})))
        reported.append(("again", await Topics(client).create(topic, partitions=1, replication_factor=1, configs={})))
        tp = TopicPartition(topic, 0)
        reported.append(("empty", (await LogEnds(client).log_end(tp)).offset))
        producer_id, epoch = await ProducerIds(client).init()
        records = batch(b"a", b"b", producer=Producer(producer_id, epoch, 5))
        reported.append(("produce", (await Appends(client).produce(tp, records, timeout_ms=5_000)).base_offset))
        reading = await Producers(client).read_partition(tp)
        state = asdict(reading.producers[ProducerId(producer_id)])
        reported.append(
            ("state", {name: state[name] for name in ("epoch", "last_sequence", "current_txn_start_offset")})
        )
        reported.append(("consistent", (reading.consistent, reading.log_start_offset, reading.log_end.offset)))
        reported.append(("high watermark", await LogEnds(client).high_watermark(tp)))
        found = await Fetches(client).read_batch(tp, Offset(1))
        assert isinstance(found, Found)
        reported.append(("batch", [(each.base_offset, each.values) for each in read_batches(found.batch)]))
        reported.append(("not yet", await Fetches(client).read_batch(tp, Offset(2))))
        reported.append(("far after the end", await Fetches(client).read_batch(tp, Offset(1_000))))
        reported.append(("facts", asdict(await Configs(client).topic_facts(topic))))
        reported.append(("of many", sorted(await Configs(client).facts_of_topics([topic, "no-such-topic"])) == [topic]))
        reported.append(("brokers", asdict(await Configs(client).broker_facts())))
        reported.append(("transaction", await Transactions(client).describe("no-such-transaction")))
        try:
            await LogEnds(client).log_end(TopicPartition("no-such-topic", 0), timeout_seconds=60)
        except UpstreamUnavailable as error:
            reported.append(("missing", error.error_code))
        same = False
        for _ in range(10):  # a periodic refresh of all topics may replace the metadata in between
            again = await client.refresh_metadata([topic])
            same = same or await client.refresh_metadata([topic]) is again
        reported.append(("the same bytes again", same))
    finally:
        await client.close()
    return reported
