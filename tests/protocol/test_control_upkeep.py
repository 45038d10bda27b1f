"""The repeated work of the Kafka client, against the fake cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fencepost_proxy.cluster import metadata_cache
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.config import ControlSasl, Limits, ProxyConfig
from fencepost_proxy.services.log_reader import LogReader
from fencepost_proxy.services.membership import Membership
from fencepost_proxy.services.missing_rights import MissingRights
from fencepost_proxy.topics.processes import encode_process
from fencepost_proxy.types import Address, Monotonic, TopicPartition
from fencepost_proxy.wire import control as wire
from fencepost_proxy.wire.apis import FETCH, METADATA, PRODUCE
from fencepost_proxy.wire.batch_scan import HeaderNames
from tests.support.fake_cluster import FakeCluster


@asynccontextmanager
async def fake_kafka(*, brokers: int = 1) -> AsyncIterator[tuple[FakeCluster, KafkaClient]]:
    kafka = FakeCluster(brokers, {"orders": 3, "payments": 2})
    await kafka.start()
    client = KafkaClient([Address.parse(kafka.bootstrap.split(",")[0])], Limits())
    try:
        await client.start(timeout_seconds=60)
        yield kafka, client
    finally:
        await client.close()
        kafka.close()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The API keys of the answers that were decoded, in their order."""
    keys: list[int] = []
    decode = wire.decode_response

    def decode_and_record(api_key: int, version: int, body: memoryview) -> Any:
        keys.append(api_key)
        return decode(api_key, version, body)

    monkeypatch.setattr(wire, "decode_response", decode_and_record)
    return keys


async def test_unchanged_metadata_is_not_decoded(decoded: list[int]) -> None:
    async with fake_kafka() as (_, client):
        # Given two alternating queries, as housekeeping has them
        known = await client.refresh_metadata(["orders", "payments"])
        await client.refresh_metadata(["orders"])
        decoded.clear()
        for _ in range(3):
            assert await client.refresh_metadata(["orders", "payments"]) is known
            assert await client.refresh_metadata(["orders"]) is known
        assert METADATA not in decoded


async def test_changed_metadata_between_equal_responses_is_applied() -> None:
    async with fake_kafka(brokers=2) as (kafka, client):
        await client.refresh_metadata(["orders"])
        first = kafka.topics["orders"].partitions[0]
        led_by_two = TopicPartition("orders", 0)

        for leader in (2, 1, 2):
            first.leader = leader
            kafka.changed()
            await client.refresh_metadata(["orders"])

            reported = client.leader(led_by_two)
            assert reported is not None
            assert reported.node_id == leader


async def test_repeated_response_is_applied_after_other_changes() -> None:
    async with fake_kafka() as (kafka, client):
        # Given that one topic was deleted between two queries
        await client.refresh_metadata(None)
        orders = kafka.topics.pop("orders")
        kafka.changed()
        await client.refresh_metadata(["orders"])
        assert client.topic("orders") is None

        # When it is back as it was, so that the answer about all of them is the same to the byte
        kafka.topics = {"orders": orders, **kafka.topics}
        kafka.changed()
        await client.refresh_metadata(None)

        assert client.topic("orders") is not None


async def test_few_metadata_queries_are_remembered() -> None:
    async with fake_kafka() as (_, client):
        for number in range(50):
            await client.refresh_metadata([f"no-such-topic-{number}"])
        assert len(client.metadata._reported._answers) <= metadata_cache._QUERIES_REMEMBERED


async def test_newest_version_is_known_after_all_brokers_report() -> None:
    async with fake_kafka(brokers=2) as (kafka, client):
        assert client.pool.version_max(PRODUCE) == 13
        kafka.add_broker()
        kafka.changed()
        await kafka.start()
        await client.refresh_metadata([])
        assert client.pool.version_max(PRODUCE) == 0, "the new broker has not reported yet"
        await client.pool.learn_versions()
        assert client.pool.version_max(PRODUCE) == 13


async def test_topic_configs_are_read_together_and_changes_reported(decoded: list[int]) -> None:
    async with fake_kafka() as (kafka, client):
        config = ProxyConfig((Address("kafka", 9092),))
        reads = LogReader(
            client,
            Membership(client, config),
            1,
            rights=MissingRights(client, config),
            names=HeaderNames(),
            unpacked_bytes_max=1,
        )
        decoded.clear()
        assert await reads.changed_facts(["orders", "payments", "no-such-topic"]) == ["orders", "payments"]
        assert len(decoded) == 1

        kafka.topics["payments"].configs["message.timestamp.type"] = "LogAppendTime"

        assert await reads.changed_facts(["orders", "payments"]) == ["payments"]
        facts = reads.known_facts("payments")
        assert facts is not None
        assert facts.log_append_time
        assert await reads.changed_facts(["orders", "payments"]) == []


async def test_topic_hidden_from_the_proxy_is_not_taken_for_a_deleted_one() -> None:
    """A deleted topic ends expansions and commits; a missing right must not."""
    config = ProxyConfig((Address("kafka", 9092),), control_sasl=ControlSasl("PLAIN", "gateway", Path("secret")))
    async with fake_kafka() as (kafka, client):
        rights, partition = MissingRights(client, config), TopicPartition("orders", 0)
        await rights.require({"orders": ("READ", "DESCRIBE")})
        kafka.hidden = {"orders"}
        kafka.changed()

        with pytest.raises(UpstreamUnavailable, match="may not DESCRIBE") as failed:
            await LogEnds(client).log_end(partition, timeout_seconds=30)
        assert failed.value.error_code == 29
        with pytest.raises(UpstreamUnavailable) as failed:
            await rights.require({"orders": ("READ", "DESCRIBE")})
        assert failed.value.error_code == 29
        assert "User:gateway, the proxy's user, may not READ and DESCRIBE orders (kafka-acls " in str(failed.value)
        await rights.look_up(["orders", "payments"])
        (problem,) = rights.problems()
        assert problem.bad
        assert problem.do.startswith("Run kafka-acls --bootstrap-server kafka:9092 ")
        assert problem.do.endswith("--operation DescribeConfigs --topic orders")

        kafka.hidden = set()
        kafka.changed()
        await rights.look_up_again()
        assert list(rights.problems()) == []
        await client.refresh_metadata(["orders"])
        assert not client.metadata.denied


async def test_start_does_not_wait_at_state_topic_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    encode = wire.encode_request_frame

    def encode_and_record(
        api_key: int, version: int, correlation_id: int, client_id: str | None, message: Any
    ) -> bytes:
        if api_key == FETCH:
            waits.append(message.max_wait_ms)
        return encode(api_key, version, correlation_id, client_id, message)

    monkeypatch.setattr(wire, "encode_request_frame", encode_and_record)

    async with fake_kafka() as (_, client):
        # Given a state topic with nothing in it, as after a first start that was cut short
        state = StateTopic(client, name="__state", lease_seconds=3.0, limits=Limits())
        try:
            await state.start()
            assert waits[0] == 0
            assert state.fresh_until > Monotonic(0)
            # Then it waits for news
            await state.append([encode_process(uuid4(), 0)])
            assert set(waits[1:]) == {250}
        finally:
            await state.close()
