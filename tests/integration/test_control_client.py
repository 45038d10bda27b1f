"""The Kafka client against a real Kafka: exact results, and bounded waits when Kafka does not respond."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from unittest.mock import Mock, patch
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.admin import AdminClient

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy import logs
from fencepost_proxy.cluster import client as client_module
from fencepost_proxy.cluster.appends import Appends
from fencepost_proxy.cluster.broker import BrokerConnection, OutcomeUnknown, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import Configs
from fencepost_proxy.cluster.fetches import Fetches, Found, NotYet, OutOfRange
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.producer_ids import ProducerIds
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.config import Limits
from fencepost_proxy.types import Address, LeaderEpoch, NodeId, Offset, ProducerId, TopicPartition
from fencepost_proxy.wire.batch import fence_batch, parse_batch_header
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch, read_uncompressed_records
from tests.kit.event_loop import in_event_loop
from tests.kit.waiting import until_async

pytestmark = pytest.mark.kafka

LIMITS = replace(Limits(), request_timeout_seconds=10.0, connect_timeout_seconds=2.0)


@asynccontextmanager
async def started(kafka: KafkaCluster, limits: Limits = LIMITS) -> AsyncIterator[KafkaClient]:
    client = KafkaClient([kafka.address(each) for each in kafka.node_ids], limits)
    try:
        await client.start(timeout_seconds=60)
        yield client
    finally:
        await client.close()


@contextmanager
def paused(kafka: KafkaCluster, *nodes: int) -> Iterator[None]:
    try:
        for node in nodes:
            kafka.pause(node)
        time.sleep(0.1)  # until every thread has received the signal
        yield
    finally:
        for node in nodes:
            kafka.resume(node)


async def new_topic(client: KafkaClient, *, replicas: int = 1, **configs: str) -> TopicPartition:
    name = f"control-{uuid4().hex[:8]}"
    settings = {key.replace("_", "."): value for key, value in configs.items()}
    assert await Topics(client).create(name, partitions=1, replication_factor=replicas, configs=settings)
    tp = TopicPartition(name, 0)
    # Every broker knows the topic, and it has a leader.
    await LogEnds(client).log_end(tp)
    return tp


def batch(*values: bytes) -> bytes:
    return encode_uncompressed_batch([(None, value) for value in values], int(time.time() * 1000))


def values_of(found: object) -> list[bytes | None]:
    assert isinstance(found, Found), found
    view = memoryview(found.batch)
    return [record.value for record in read_uncompressed_records(parse_batch_header(view), view)]


# --- offsets ----------------------------------------------------------------------------------------------------------


@in_event_loop
async def test_log_end_is_right_after_each_append(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        assert (await LogEnds(client).log_end(tp)).offset == 0

        for expected in (0, 3):
            result = await Appends(client).produce(tp, batch(b"a", b"b", b"c"), timeout_ms=5_000)
            assert (result.error_code, result.base_offset) == (0, expected)

        end = await LogEnds(client).log_end(tp)
        assert end.offset == 6
        assert Leader(end.node_id, end.leader_epoch) == client.leader(tp)
        assert await LogEnds(client).high_watermark(tp) == 6
        assert await LogEnds(client).log_start(tp) == 0


def believe(client: KafkaClient, tp: TopicPartition, leader: Leader) -> None:
    """Replace the client's leader by a false one, as from outdated metadata or from a broker that is ahead."""
    info = client.topic(tp.topic)
    assert info is not None
    partition = replace(info.partitions[tp.partition], leader=leader)
    topics = {**client.metadata.known.topics, tp.topic: replace(info, partitions={tp.partition: partition})}
    client.metadata.known = replace(client.metadata.known, topics=topics)


@in_event_loop
async def test_leader_move_is_followed_by_every_query(kafka3: KafkaCluster) -> None:
    async with started(kafka3) as client:
        tp = await new_topic(client, replicas=3, min_insync_replicas="2")
        assert (await Appends(client).produce(tp, batch(b"a"), timeout_ms=5_000)).error_code == 0
        before = await LogEnds(client).log_end(tp)

        await asyncio.to_thread(kafka3.shut_down, before.node_id)
        try:
            # The client is not informed: it still uses the old leader and its epoch.
            believe(client, tp, Leader(before.node_id, before.leader_epoch))
            after = await LogEnds(client).log_end(tp)
            assert after.offset == before.offset == 1
            assert after.node_id != before.node_id
            assert after.leader_epoch > before.leader_epoch

            believe(client, tp, Leader(after.node_id, before.leader_epoch))  # right broker, old epoch: fenced
            assert await LogEnds(client).log_end(tp) == after

            believe(client, tp, Leader(before.node_id, before.leader_epoch))
            assert values_of(await Fetches(client).read_batch(tp, Offset(0))) == [b"a"]
            believe(client, tp, Leader(before.node_id, before.leader_epoch))
            assert (await Producers(client).read_partition(tp)).log_end == after
        finally:
            await asyncio.to_thread(kafka3.restart, before.node_id)

        assert (await Appends(client).produce(tp, batch(b"b"), timeout_ms=5_000)).error_code == 0
        assert (await LogEnds(client).log_end(tp)).offset == 2


@in_event_loop
async def test_a_follower_is_never_taken_for_the_leader(kafka3: KafkaCluster) -> None:
    async with started(kafka3) as client:
        tp = await new_topic(client, replicas=3)
        end = await LogEnds(client).log_end(tp)
        follower = next(NodeId(node) for node in kafka3.node_ids if node != end.node_id)

        # A follower replica responds to DescribeProducers, and that request has no epoch to fence it.
        believe(client, tp, Leader(follower, end.leader_epoch))
        reading = await Producers(client).read_partition(tp)

        assert reading.log_end.node_id == end.node_id


@in_event_loop
async def test_unknown_leader_epoch_is_waited_for(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        end = await LogEnds(client).log_end(tp)
        # As if metadata of a broker that is ahead had named the next epoch: no older response may replace it.
        believe(client, tp, Leader(end.node_id, LeaderEpoch(end.leader_epoch + 1)))

        async def refused() -> bool:
            with pytest.raises(UpstreamUnavailable) as caught:
                await LogEnds(client).log_end(tp, timeout_seconds=0.5)
            return "UNKNOWN_LEADER_EPOCH" in str(caught.value)

        await until_async(refused, "a refusal")


@in_event_loop
async def test_missing_topic_fails_soon_and_is_not_created(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        started_at = time.monotonic()
        with pytest.raises(UpstreamUnavailable, match="no such topic or partition") as caught:
            await LogEnds(client).log_end(TopicPartition("nobody-made-this", 0), timeout_seconds=120)
        assert caught.value.error_code == 3
        assert time.monotonic() - started_at < 60
        assert "nobody-made-this" not in (await client.refresh_metadata(None)).topics

        tp = await new_topic(client)
        with pytest.raises(UpstreamUnavailable, match="no such topic or partition"):
            await LogEnds(client).log_end(TopicPartition(tp.topic, 9))


# --- producers and transactions ---------------------------------------------------------------------------------------


@in_event_loop
async def test_producer_state_before_and_after_fenced_append(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        producer_id, epoch = await ProducerIds(client).init()
        assert (await Producers(client).read_partition(tp)).producers.get(producer_id) is None

        before_ms = int(time.time() * 1000)
        fenced = fence_batch(
            memoryview(batch(b"a", b"b")), producer_id=producer_id, producer_epoch=epoch, base_sequence=41
        )
        assert (await Appends(client).produce(tp, bytes(fenced), timeout_ms=5_000)).error_code == 0

        state = (await Producers(client).read_partition(tp)).producers.get(producer_id)
        assert state is not None
        assert (state.epoch, state.last_sequence, state.current_txn_start_offset) == (epoch, 42, None)
        assert before_ms <= state.last_timestamp_ms <= int(time.time() * 1000)
        reading = await Producers(client).read_partition(tp)
        assert reading.consistent
        assert reading.log_end.offset == 2
        assert set(reading.producers) == {producer_id}
        assert (await Producers(client).read_partition(tp)).producers.get(ProducerId(producer_id + 1_000_000)) is None


@in_event_loop
async def test_partitions_are_read_together(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        name = f"control-{uuid4().hex[:8]}"
        assert await Topics(client).create(name, partitions=20, replication_factor=1, configs={})
        partitions = [TopicPartition(name, number) for number in range(20)]
        await asyncio.gather(*(LogEnds(client).log_end(tp) for tp in partitions))
        for tp in partitions[:3]:
            values = [b"v"] * (1 + tp.partition)
            assert (await Appends(client).produce(tp, batch(*values), timeout_ms=5_000)).error_code == 0

        producers, missing = Producers(client), TopicPartition(name, 20)
        with patch.object(BrokerConnection, "pipeline", autospec=True, side_effect=BrokerConnection.pipeline) as sent:
            read = await asyncio.gather(
                *(producers.read_partition(tp, timeout_seconds=2) for tp in (*partitions, missing)),
                return_exceptions=True,
            )

        *readings, refused = read
        assert [each.log_end.offset for each in readings] == [1, 2, 3, *[0] * 17]  # type: ignore[union-attr]
        assert all(each.consistent for each in readings)  # type: ignore[union-attr]
        assert isinstance(refused, UpstreamUnavailable)
        reads = [call for call in sent.mock_calls if len(call.args[1]) == 4]
        assert [len(call.args[1][0].message.topics[0].partitions) for call in reads] == [16, 4]


@in_event_loop
async def test_a_read_together_ends_with_its_first_reader_alone(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        first, other = await new_topic(client), await new_topic(client)
        producers = Producers(client)
        ending = asyncio.create_task(producers.read_partition(first))
        reading = asyncio.create_task(producers.read_partition(other))
        for _ in range(3):
            await asyncio.sleep(0)
        ending.cancel()
        assert (await reading).log_end.offset == 0
        with pytest.raises(asyncio.CancelledError):
            await ending


@in_event_loop
async def test_open_transaction_is_listed_until_its_marker(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        assert (await Appends(client).produce(tp, batch(b"plain"), timeout_ms=5_000)).error_code == 0
        assert await Producers(client).open_transactions(tp) == {}
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": tp.topic})

        def begin() -> None:
            producer.init_transactions(90)
            producer.begin_transaction()
            producer.produce(tp.topic, b"x", partition=0)
            producer.flush(90)

        await asyncio.to_thread(begin)
        (open_one,) = (await Producers(client).open_transactions(tp)).values()
        assert open_one.current_txn_start_offset == 1

        await asyncio.to_thread(producer.commit_transaction, 90)

        await until_async(
            lambda: Producers(client).open_transactions(tp), "no open transaction", accept=lambda found: not found
        )
        # The marker took offset 2 and can be read like a batch.
        assert (await LogEnds(client).log_end(tp)).offset == 3
        marker = await Fetches(client).read_batch(tp, Offset(2))
        assert isinstance(marker, Found)
        assert parse_batch_header(memoryview(marker.batch)).is_control


# --- records ----------------------------------------------------------------------------------------------------------


@in_event_loop
async def test_batch_is_read_whole_from_any_offset(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        for values in ((b"a",), (b"b", b"c", b"d"), (b"e" * 5_000,)):
            assert (await Appends(client).produce(tp, batch(*values), timeout_ms=5_000)).error_code == 0

        for offset in (1, 2, 3):
            assert values_of(await Fetches(client).read_batch(tp, Offset(offset))) == [b"b", b"c", b"d"]
        assert values_of(await Fetches(client).read_batch(tp, Offset(4), bytes_max=100)) == [b"e" * 5_000]
        assert await Fetches(client).read_batch(tp, Offset(5)) == NotYet(Offset(5))
        assert await Fetches(client).read_batch(tp, Offset(500)) == NotYet(Offset(5))


@in_event_loop
async def test_offset_below_log_start_is_out_of_range(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        for value in (b"a", b"b", b"c"):
            await Appends(client).produce(tp, batch(value), timeout_ms=5_000)
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        await asyncio.to_thread(
            lambda: [f.result(90) for f in admin.delete_records([ConfluentPartition(tp.topic, 0, 2)]).values()]
        )

        assert await Fetches(client).read_batch(tp, Offset(1)) == OutOfRange(Offset(2))
        assert values_of(await Fetches(client).read_batch(tp, Offset(2))) == [b"c"]
        assert await LogEnds(client).log_start(tp) == 2
        assert (await Producers(client).read_partition(tp)).log_start_offset == 2


@in_event_loop
async def test_unreplicated_record_counts_in_log_end_only(kafka3: KafkaCluster) -> None:
    async with started(kafka3) as client:
        tp = await new_topic(client, replicas=3)
        assert (await Appends(client).produce(tp, batch(b"a"), timeout_ms=5_000)).error_code == 0
        end = await LogEnds(client).log_end(tp)

        with paused(kafka3, *(node for node in kafka3.node_ids if node != end.node_id)):
            assert (await Appends(client).produce(tp, batch(b"b"), timeout_ms=5_000, acks=1)).base_offset == 1
            assert (await LogEnds(client).log_end(tp)).offset == 2
            assert await LogEnds(client).high_watermark(tp) == 1
            shown = await LogEnds(client).partition_end(tp)
            assert (shown.log_end.offset, shown.high_watermark) == (2, 1)
            assert await Fetches(client).read_batch(tp, Offset(1)) == NotYet(Offset(1))

        shown = await until_async(
            lambda: LogEnds(client).partition_end(tp), "all replicas", accept=lambda end: end.high_watermark == 2
        )
        assert shown.log_end.offset == await LogEnds(client).high_watermark(tp) == 2
        assert values_of(await Fetches(client).read_batch(tp, Offset(1))) == [b"b"]


@in_event_loop
async def test_append_for_deleted_topic_is_refused_after_recreation(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        await LogEnds(client).log_end(tp)
        old = client.topic(tp.topic)
        assert old is not None
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        await asyncio.to_thread(lambda: [f.result(90) for f in admin.delete_topics([tp.topic]).values()])

        await until_async(
            lambda: client.refresh_metadata([tp.topic]), "deletion", accept=lambda found: tp.topic not in found.topics
        )
        await Topics(client).create(tp.topic, partitions=1, replication_factor=1, configs={})
        assert (await LogEnds(client).log_end(tp)).offset == 0

        result = await Appends(client).produce(tp, batch(b"stale"), timeout_ms=5_000, topic_id=old.topic_id)

        assert result.error_code == 100
        assert (await LogEnds(client).log_end(tp)).offset == 0
        new = client.topic(tp.topic)
        assert new is not None
        assert new.topic_id != old.topic_id


# --- the cluster ------------------------------------------------------------------------------------------------------


@in_event_loop
async def test_facts_of_topics_and_brokers(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(
            client, message_timestamp_type="LogAppendTime", max_message_bytes="4321", cleanup_policy="compact"
        )
        facts = await Configs(client).topic_facts(tp.topic)
        assert (facts.assumed, facts.log_append_time, facts.max_message_bytes) == (False, True, 4321)
        assert facts.cleanup_policy == {"compact"}
        assert not (await Configs(client).topic_facts((await new_topic(client)).topic)).log_append_time
        assert (await Configs(client).broker_facts()).producer_id_expiration_ms == 86_400_000


@in_event_loop
async def test_cluster_facts_match_the_running_brokers(kafka3: KafkaCluster) -> None:
    async with started(kafka3) as client:
        assert client.cluster_id == kafka3.cluster_id
        assert dict(client.brokers) == {NodeId(node): kafka3.address(node) for node in kafka3.node_ids}
        tp = await new_topic(client, replicas=3)
        end = await LogEnds(client).log_end(tp)
        info = client.topic(tp.topic)
        assert info is not None
        assert (info.partition_count, info.replication_factor) == (1, 3)
        assert all(client.pool.api_versions(node_id) for node_id in client.brokers)
        versions = client.pool.api_versions(end.node_id)
        assert versions is not None
        assert versions[0][1] >= 12
        assert client.pool.api_versions(NodeId(99)) is None
        assert not await Topics(client).create(tp.topic, partitions=1, replication_factor=1, configs={})


@in_event_loop
async def test_concurrent_metadata_refreshes_share_few_requests(
    kafka: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(kafka) as client:
        tps = [await new_topic(client) for _ in range(3)]
        adopted = Mock(wraps=client.metadata.adopt)
        monkeypatch.setattr(client.metadata, "adopt", adopted)
        results = await asyncio.gather(*(client.refresh_metadata([tps[n % 3].topic]) for n in range(60)))
        assert adopted.call_count <= 6, "60 refreshes share too few requests (a few periodic ones are included)"
        assert all(tps[n % 3].topic in result.topics for n, result in enumerate(results))


# --- when Kafka does not respond --------------------------------------------------------------------------------------


@in_event_loop
async def test_query_to_paused_broker_respects_its_time_limit(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        await LogEnds(client).log_end(tp)
        assert (await Appends(client).produce(tp, batch(b"a"), timeout_ms=5_000)).error_code == 0

        with paused(kafka, 1):
            started_at = time.monotonic()
            with pytest.raises(UpstreamUnavailable):
                await LogEnds(client).log_end(tp, timeout_seconds=0.3)
            with pytest.raises(OutcomeUnknown):
                await Appends(client).produce(tp, batch(b"in doubt"), timeout_ms=100)
            assert time.monotonic() - started_at < LIMITS.request_timeout_seconds

        # The append was in doubt: the broker appends it when it resumes.
        await until_async(lambda: LogEnds(client).log_end(tp), "an append", accept=lambda end: end.offset == 2)
        assert values_of(await Fetches(client).read_batch(tp, Offset(1))) == [b"in doubt"]


@in_event_loop
async def test_restarted_broker_is_found_again(kafka3: KafkaCluster) -> None:
    async with started(kafka3) as client:
        tp = await new_topic(client)
        await Appends(client).produce(tp, batch(b"a"), timeout_ms=5_000)
        node_id = (await LogEnds(client).log_end(tp)).node_id
        await asyncio.to_thread(kafka3.kill, node_id)
        try:
            with pytest.raises(UpstreamUnavailable):
                await LogEnds(client).log_end(tp, timeout_seconds=0.3)
        finally:
            await asyncio.to_thread(kafka3.restart, node_id)
        assert (await LogEnds(client).log_end(tp, timeout_seconds=60)).offset == 1
        assert (await Appends(client).produce(tp, batch(b"b"), timeout_ms=5_000)).base_offset == 1


@in_event_loop
async def test_start_says_what_it_waits_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test of this process may have caused the same line a moment ago.
    monkeypatch.setattr(client_module, "_limited_log", logs.RateLimitedLog(logs.get("cluster.client")))
    # One attempt takes the connect timeout. The line is written only if there is time for another attempt.
    limits = replace(LIMITS, connect_timeout_seconds=0.2, reconnect_backoff_max_seconds=0.1)
    client = KafkaClient([Address("127.0.0.1", 1)], limits)
    with caplog.at_level(logging.WARNING), pytest.raises(UpstreamUnavailable, match="cannot connect"):
        await client.start(timeout_seconds=2.0)
    await client.close()
    assert "waiting for Kafka" in caplog.text


# --- added partitions -------------------------------------------------------------------------------------------------


@in_event_loop
async def test_partitions_are_validated_then_created_then_there_already(kafka: KafkaCluster) -> None:
    async with started(kafka) as client:
        tp = await new_topic(client)
        [node_id] = kafka.node_ids
        replica_ids = [[NodeId(node_id)], [NodeId(node_id)]]

        async def create(count: int, replica_ids: list[list[NodeId]] | None, *, validate_only: bool) -> int:
            created = Topics(client).create_partitions(tp.topic, count, replica_ids, validate_only=validate_only)
            return (await created)[0]

        assert await create(3, replica_ids, validate_only=True) == 0
        assert (await client.refresh_metadata([tp.topic])).topics[tp.topic].partition_count == 1
        assert await create(3, [[NodeId(99)], [NodeId(99)]], validate_only=False) == 39
        assert await create(3, replica_ids, validate_only=False) == 0
        code, message = await Topics(client).create_partitions(tp.topic, 3, None, validate_only=True)
        assert (code, message) == (37, "Topic already has 3 partition(s).")
        assert (await Topics(client).create_partitions("there-is-none", 3, None, validate_only=True))[0] == 3
