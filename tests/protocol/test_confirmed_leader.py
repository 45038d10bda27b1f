"""Whether the leader of the state topic still leads, by fake brokers with different metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fencepost_proxy.cluster import confirmed_leader
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.confirmed_leader import ConfirmedLeader
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.config import Limits
from fencepost_proxy.types import Address, TopicPartition
from fencepost_proxy.wire import control as wire
from fencepost_proxy.wire.apis import METADATA
from fencepost_proxy.wire.schema import Message
from tests.kit.waiting import until_async
from tests.support.fake_cluster import FakeCluster

NAME = "__state"
STATE = TopicPartition(NAME, 0)
LIST_OFFSETS = 2
#: A confirmation times out after the connection timeout. Nothing else requests metadata meanwhile.
LIMITS = Limits(connect_timeout_seconds=2.0, metadata_refresh_seconds=3600.0)


class Brokers(FakeCluster):
    """Broker 1 leads the state topic. `epochs`, `replicas` – the leader epoch and the replicas in the metadata of a
    broker, if they are wrong. `silent` – brokers that do not respond. `listed` – the brokers in all metadata. `queried`
    – (broker, API key), in order.
    """

    def __init__(self, brokers: int, replicas: int, in_sync: int) -> None:
        super().__init__(brokers)
        self.create(NAME, 1, replicas, {"cleanup.policy": "compact", "min.insync.replicas": str(in_sync)})
        self.epochs: dict[int, int] = {}
        self.replicas: dict[int, list[int]] = {}
        self.silent: set[int] = set()
        self.listed: list[int] | None = None
        self.queried: list[tuple[int, int]] = []
        self._answering = 0

    def answer(self, node_id: int, frame: bytes) -> Any:
        key = wire.parse_request_header(frame).api_key
        self.queried.append((node_id, key))
        if node_id in self.silent:
            return None
        self._answering = node_id
        self.changed()  # each has another response
        return super().answer(node_id, frame)

    def _metadata(self, version: int, request: Message) -> Message:
        answer = super()._metadata(version, request)
        if self.listed is not None:
            answer.brokers = [each for each in answer.brokers if each.node_id in self.listed]
        for topic in answer.topics:
            for partition in topic.partitions:
                partition.leader_epoch = self.epochs.get(self._answering, partition.leader_epoch)
                partition.replica_nodes = self.replicas.get(self._answering, partition.replica_nodes)
        return answer


@asynccontextmanager
async def brokers_and_client(
    *, brokers: int = 3, replicas: int = 3, in_sync: int = 2
) -> AsyncIterator[tuple[Brokers, KafkaClient]]:
    kafka = Brokers(max(brokers, replicas), replicas, in_sync)
    await kafka.start()
    client = KafkaClient([Address.parse(kafka.bootstrap.split(",")[0])], LIMITS)
    try:
        await client.start(timeout_seconds=60)
        await client.refresh_metadata([NAME])
        yield kafka, client
    finally:
        await client.close()
        kafka.close()


async def confirmed(leader: ConfirmedLeader, in_sync: int = 2, seconds: float = 60.0) -> bool:
    try:
        return await leader.high_watermark(STATE, in_sync=in_sync, timeout_seconds=seconds) == 0
    except UpstreamUnavailable:
        return False


def queried_nodes(kafka: Brokers) -> list[int]:
    return [node_id for node_id, key in kafka.queried if key == METADATA]


@pytest.mark.parametrize(
    ("replicas", "in_sync", "others"), [(3, 2, 1), (5, 2, 3), (5, 3, 2), (3, 1, 2), (3, 3, 0), (2, 2, 0), (1, 1, 0)]
)
async def test_only_as_many_replicas_as_needed_are_queried(
    replicas: int, in_sync: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmed_leader, "_ONE_MORE_SECONDS", 60.0)

    async with brokers_and_client(replicas=replicas, in_sync=in_sync) as (kafka, client):
        confirming = ConfirmedLeader(client)
        assert await confirmed(confirming, in_sync)
        kafka.queried.clear()

        assert await confirmed(confirming, in_sync)

        assert (1, LIST_OFFSETS) in kafka.queried
        queried = queried_nodes(kafka)
        assert len(queried) == len(set(queried)) == others
        assert 1 not in queried
        assert len(kafka.queried) == 1 + others


async def test_silent_replica_is_not_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with brokers_and_client() as (kafka, client):
        confirming = ConfirmedLeader(client)
        assert await confirmed(confirming)
        (first,) = queried_nodes(kafka)[-1:]
        kafka.silent.add(first)

        assert await confirmed(confirming)

        monkeypatch.setattr(confirmed_leader, "_ONE_MORE_SECONDS", 60.0)
        kafka.queried.clear()
        assert await confirmed(confirming)
        assert queried_nodes(kafka) == [5 - first]


async def test_too_few_that_answer_confirm_nothing() -> None:
    async with brokers_and_client() as (kafka, client):
        confirming = ConfirmedLeader(client)
        kafka.silent |= {2, 3}
        assert not await confirmed(confirming, seconds=0.6)
        kafka.silent.clear()
        assert await confirmed(confirming)


@pytest.mark.parametrize(("in_sync", "enough"), [(1, True), (2, False)])
async def test_dead_replica_is_not_needed_where_one_is_in_sync(in_sync: int, enough: bool) -> None:
    async with brokers_and_client() as (kafka, client):
        # Given metadata without the other replicas
        kafka.listed = [1]
        await client.refresh_metadata([NAME])
        assert await confirmed(ConfirmedLeader(client), in_sync, seconds=60.0 if enough else 0.6) == enough


async def test_leaders_of_several_topics_are_confirmed_together() -> None:
    async with brokers_and_client(replicas=2, in_sync=1) as (kafka, client):
        topics = [f"t{number}" for number in range(3)]
        for topic in topics:
            kafka.create(topic, 1, 2)
        await client.refresh_metadata(topics)
        confirming, deadline = ConfirmedLeader(client), client.deadline(60.0)
        partitions = [TopicPartition(topic, 0) for topic in topics if client.topic(topic)]
        led = {each: leader for each in partitions if (leader := client.leader(each)) is not None}
        assert len(led) == 3

        async def read(tp: TopicPartition) -> TopicPartition:
            return tp

        kafka.queried.clear()
        results = (
            confirming.confirmed(read(tp), tp, leader, in_sync=1, deadline=deadline) for tp, leader in led.items()
        )
        assert await asyncio.gather(*results) == list(led)
        nodes = queried_nodes(kafka)
        assert len(nodes) == len(set(nodes))


@pytest.mark.parametrize("knows", [2, 3])
async def test_later_leader_is_accepted_from_any_replica(knows: int) -> None:
    async with brokers_and_client() as (kafka, client):
        confirming = ConfirmedLeader(client)
        # Given that both others are needed, and one of them knows an election that the leader does not know
        kafka.epochs[knows] = 7
        querying = asyncio.create_task(confirmed(confirming, in_sync=1, seconds=3600))

        def believed() -> bool:
            leader = client.leader(STATE)
            return leader is not None and leader.leader_epoch == 7

        await until_async(believed, "the old leader to respond")
        assert not querying.done()
        querying.cancel()


async def test_added_replicas_count_once_one_replica_reports_them() -> None:
    async with brokers_and_client(brokers=5) as (kafka, client):
        confirming = ConfirmedLeader(client)
        # Given two new replicas unknown to the leader: a later leader may need only those
        kafka.replicas = {node_id: [1, 2, 3, 4, 5] for node_id in (2, 3)}
        kafka.silent |= {4, 5}
        assert not await confirmed(confirming, seconds=0.6)

        kafka.silent.clear()
        kafka.queried.clear()
        assert await confirmed(confirming)
        assert {4, 5} & set(queried_nodes(kafka))


# --- the lease


@asynccontextmanager
async def followed(client: KafkaClient, lease_seconds: float) -> AsyncIterator[StateTopic]:
    state = StateTopic(client, name=NAME, lease_seconds=lease_seconds, limits=LIMITS)
    await state.start()
    try:
        yield state
    finally:
        await state.close()


async def test_view_is_fresh_only_after_other_replicas_confirm() -> None:
    async with brokers_and_client() as (kafka, client):
        # Given other replicas that do not respond, and a leader that does
        kafka.silent |= {2, 3}
        async with followed(client, 30.0) as state:
            read = state._read_as_of
            await until_async(lambda: state._read_as_of > read, "another read")
            assert not state.fresh
            kafka.silent.clear()
            await until_async(lambda: state.fresh, "a fresh state")


async def test_view_is_as_old_as_its_confirmation() -> None:
    async with brokers_and_client() as (kafka, client), followed(client, 1.0) as state:
        await until_async(lambda: state.fresh, "a fresh state")
        kafka.silent |= {2, 3}
        silent_at = time.monotonic()
        await until_async(lambda: not state.fresh, "a stale state")
        assert state.fresh_until <= silent_at + 1.0
        # The leader still responds.
        await until_async(lambda: state._read_as_of > silent_at, "a read after the silence")

        kafka.silent.clear()
        await until_async(lambda: state.fresh, "a fresh state")


async def test_one_that_is_away_makes_no_gap() -> None:
    async with brokers_and_client() as (kafka, client), followed(client, 30.0) as state:
        (confirms,) = queried_nodes(kafka)[-1:]
        kafka.silent.add(confirms)
        silent_at = time.monotonic()
        ends = []

        def renewed() -> bool:
            ends.append(state.fresh_until - time.monotonic())
            return state.fresh_until > silent_at + 30.0

        await until_async(renewed, "a renewed lease")
        assert min(ends) > 0


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, 1), (1, 2), (3, 1)])
async def test_single_possible_leader_needs_no_confirmation(replicas: int, in_sync: int) -> None:
    async with (
        brokers_and_client(replicas=replicas, in_sync=in_sync) as (kafka, client),
        followed(client, 0.6) as state,
    ):
        kafka.queried.clear()
        assert state.fresh_until > float("-inf")
        renewed = state.fresh_until
        await until_async(lambda: state.fresh_until > renewed + 0.6, "the next renewal")
        assert LIST_OFFSETS not in {key for _, key in kafka.queried}
        assert set(queried_nodes(kafka)) <= {1}  # the leader: the client looks for it if a fetch takes too long


async def test_read_to_end_renews_the_lease() -> None:
    # its next query would come in minutes
    async with brokers_and_client() as (_, client), followed(client, 3000.0) as state:
        renewed = state.fresh_until
        await state.read_to_end(timeout_seconds=60)
        await until_async(lambda: state.fresh_until > renewed, "the next renewal")


async def test_unread_end_does_not_renew_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a new leader whose high watermark lagged: the end that it reported is not read yet
    async with brokers_and_client() as (_, client), followed(client, 1.0) as state:
        await until_async(lambda: state.fresh, "a fresh state")

        async def far_ahead(*args: object, **how: object) -> int:
            return 10

        monkeypatch.setattr(state._confirmed_leader, "high_watermark", far_ahead)
        await until_async(lambda: not state.fresh, "a stale state")
