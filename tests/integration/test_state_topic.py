"""The state topic on real Kafka: shared by several processes, kept for ever, and closed when it cannot be relied on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from fencepost_proxy.config import Limits
from fencepost_proxy.dev.cluster import KafkaCluster
from fencepost_proxy.net import state_topic
from fencepost_proxy.net.control import ControlClient, Leader, OutcomeUnknown
from fencepost_proxy.net.places import own_place
from fencepost_proxy.net.state_topic import TOPIC_CONFIGS, StateTopic
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.topics.state import (
    StateError,
    encode_alive,
    encode_alive_tombstone,
    encode_process,
    encode_producer_id,
    encode_topic_config,
)
from fencepost_proxy.types import ProducerId, TopicPartition
from fencepost_proxy.wire.plain_batch import encode_plain_batch
from tests.support.waiting import until

pytestmark = pytest.mark.kafka

LIMITS = replace(Limits(), request_timeout_seconds=10.0, connect_timeout_seconds=1.0)
LEASE_SECONDS = 1.0
TOPIC_ID = UUID(int=7)


class Process:
    """What one proxy process has of the state topic: a control client, the topic, and what it was told."""

    def __init__(self, control: ControlClient, name: str) -> None:
        self.control = control
        self.changes: list[StateRecord] = []
        self.state = StateTopic(control, name=name, lease_seconds=LEASE_SECONDS, limits=LIMITS, on_change=self._changed)

    def _changed(self, records: Sequence[StateRecord]) -> None:
        self.changes += records


@asynccontextmanager
async def process(kafka: KafkaCluster, name: str) -> AsyncIterator[Process]:
    """Not started yet: `await p.state.start()`."""
    control = ControlClient(kafka.addresses, LIMITS)
    await control.start(timeout_seconds=30)
    one = Process(control, name)
    try:
        yield one
    finally:
        await one.state.close()
        await control.close()


@pytest.fixture
def name() -> str:
    return f"__state-{uuid4().hex[:8]}"


async def confirmed(kafka: KafkaCluster, call: Callable[[AdminClient], Mapping[Any, Future[Any]]]) -> None:
    """An admin's call, carried out."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in call(admin).values():
        await asyncio.to_thread(future.result, 30)


def config(topic: str, check: str = "required") -> StateRecord:
    return encode_topic_config(topic, TOPIC_ID, {"check.expected.offsets": check})


def test_it_is_created_durable_and_compacted(kafka3: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka3, name) as one:
            await one.state.start()
            assert one.state.fresh
            info = one.control.topic(name)
            assert info is not None
            assert (info.partition_count, info.replication_factor) == (1, 3)
            facts = await one.control.topic_facts(name)
            assert facts.cleanup_policy == {"compact"}
            assert facts.min_insync_replicas == 2

    asyncio.run(story())


def test_what_one_stores_the_other_knows_and_a_third_finds(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one, process(kafka, name) as two:
            await asyncio.gather(one.state.start(), two.state.start())
            assert await one.state.append([config("a"), config("b")]) == [0, 1]
            assert set(one.state.view.topic_configs) == {"a", "b"}
            assert await two.state.append([config("a", "true")]) == [2]
            await until(lambda: one.state.view.next_offset == 3)
            assert one.state.view.topic_configs["a"].configs == {"check.expected.offsets": "true"}
            assert one.changes == two.changes == [config("a"), config("b"), config("a", "true")]

            async with process(kafka, name) as three:
                await three.state.start()
                assert three.changes == one.changes
                assert three.state.view.topic_configs == one.state.view.topic_configs

    asyncio.run(story())


def test_all_processes_agree_on_one_producer_id_and_keep_it(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one, process(kafka, name) as two, process(kafka, name) as three:
            await asyncio.gather(one.state.start(), two.state.start(), three.state.start())
            agreed = await asyncio.gather(*(p.state.acquire_producer_id() for p in (one, two, three, one)))
            assert len(set(agreed)) == 1
            proposals = [record for record in one.changes if record.key.startswith(b"producer-id/")]
            assert len(proposals) > 1, "nobody raced: this test shows nothing"

        async with process(kafka, name) as four:
            await four.state.start()
            assert await four.state.acquire_producer_id() == agreed[0]

    asyncio.run(story())


def test_a_view_grows_stale_while_the_broker_is_paused_and_recovers(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.append([config("before")])
            await asyncio.sleep(LEASE_SECONDS * 1.5)
            assert one.state.fresh, "following it must keep it fresh"

            kafka.pause(1)
            try:
                paused_at = time.monotonic()
                await until(lambda: not one.state.fresh)
                # A question that was sent before the pause counts from when it was sent.
                assert one.state.fresh_until <= paused_at + LEASE_SECONDS
                with pytest.raises(OutcomeUnknown):
                    await one.state.append([config("in-doubt")], timeout_seconds=0.2)
                await asyncio.sleep(LIMITS.connect_timeout_seconds + 0.5)
                assert not one.state.fresh
            finally:
                kafka.resume(1)

            await until(lambda: one.state.fresh)
            # It had reached the broker's queue. In doubt means just that.
            await until(lambda: "in-doubt" in one.state.view.topic_configs)
            assert one.state.failure is None

    asyncio.run(story())


def test_a_controller_that_knows_no_living_broker_is_waited_for(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given metadata without brokers, as while all of them come back from a pause
    named, asked = ControlClient.brokers, []

    def brokers(self: ControlClient) -> object:
        asked.append(named.__get__(self))
        return {} if len(asked) <= 2 else asked[-1]

    async def story() -> None:
        async with process(kafka, name) as one:
            monkeypatch.setattr(ControlClient, "brokers", property(brokers))
            # Then the topic is created when they are back, on as many as there are
            await one.state.start()
            assert len(asked) > 2
            assert one.state.fresh

    asyncio.run(story())


def test_freshness_counts_from_the_question_not_from_its_answer(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            # A start's own question was answered at once. Idle, the broker holds each of those behind it for 250 ms: an
            # append elsewhere may come in between.
            started_with = one.state.fresh_until
            await until(lambda: one.state.fresh_until > started_with)
            left = []
            until_then = time.monotonic() + 1.0
            while time.monotonic() < until_then:
                left.append(one.state.fresh_until - time.monotonic())
                await asyncio.sleep(0.005)
            assert max(left) <= LEASE_SECONDS - 0.2

    asyncio.run(story())


def test_a_long_topic_counts_as_loaded_only_at_its_end(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            filler = StateRecord(b"from-a-newer-version/x", b"x" * 600_000)
            for _ in range(5):  # more than one Fetch holds
                await one.state.append([filler])
            await one.state.append([config("last")])

        async with process(kafka, name) as two:
            await two.state.start()
            assert two.state.view.next_offset == 6
            assert "last" in two.state.view.topic_configs

    asyncio.run(story())


def test_an_append_returns_once_it_was_read_back(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            fetch = one.state._fetch

            async def late(leader: Leader) -> None:
                await asyncio.sleep(0.4)
                await fetch(leader)

            monkeypatch.setattr(one.state, "_fetch", late)
            await asyncio.sleep(0.3)  # the question under way was asked without delay
            assert await one.state.append([config("a")]) == [0]
            assert "a" in one.state.view.topic_configs
            with pytest.raises(OutcomeUnknown, match="stored at offset 1, but not read back in time"):
                await one.state.append([config("b")], timeout_seconds=0.1)

    asyncio.run(story())


def test_it_follows_a_leader_that_moves(kafka3: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka3, name) as one:
            await one.state.start()
            await one.state.append([config("before")])
            leader = one.control.leader(TopicPartition(name, 0))
            assert leader is not None
            await asyncio.to_thread(kafka3.shut_down, leader.node_id)
            try:
                stopped_at = time.monotonic()
                await until(lambda: one.state.fresh_until > stopped_at + LEASE_SECONDS)
                await one.state.append([config("after")], timeout_seconds=60)
                assert set(one.state.view.topic_configs) == {"before", "after"}
            finally:
                await asyncio.to_thread(kafka3.restart, leader.node_id)

    asyncio.run(story())


def test_a_topic_that_vanishes_is_waited_for_and_one_in_its_place_is_refused(
    kafka: KafkaCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with process(kafka, name) as one, process(kafka, name) as successor:
            await one.state.start()
            await one.state.append([config("guarded")])
            await confirmed(kafka, lambda admin: admin.delete_topics([name]))
            await until(lambda: not one.state.fresh)
            await until(lambda: "the state topic is not there" in caplog.text)
            assert one.state.failure is None

            await successor.state.start()
            await until(lambda: one.state.failure is not None)
            assert "created again" in str(one.state.failure)
            await asyncio.sleep(0.5)
            assert not one.state.fresh
            with pytest.raises(StateError, match="created again"):
                await one.state.append([config("x")])
            assert any(r.levelno == logging.ERROR and "state topic failed" in r.message for r in caplog.records)

    asyncio.run(story())


def test_lost_records_are_not_overlooked(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one, process(kafka, name) as late:
            await one.state.start()
            await one.state.append([config("a")])
            await one.state.append([config("b")])
            # Kafka refuses DeleteRecords on a topic that is only compacted; an operator can find a way.
            await alter(kafka, name, "delete")
            await confirmed(kafka, lambda admin: admin.delete_records([ConfluentPartition(name, 0, 1)]))
            await until(lambda: one.state.failure is not None)
            assert "lost records" in str(one.state.failure)
            assert not await becomes_fresh(one)

            await alter(kafka, name, "compact")
            with pytest.raises(StateError, match="lost records"):
                await late.state.start()

    asyncio.run(story())


async def becomes_fresh(one: Process) -> bool:
    stale_since = one.state.fresh_until
    await asyncio.sleep(0.6)
    return one.state.fresh_until > stale_since


async def alter(kafka: KafkaCluster, name: str, policy: str) -> None:
    entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
    await confirmed(kafka, lambda admin: admin.incremental_alter_configs([resource]))


@pytest.mark.parametrize(
    ("partitions", "configs", "complaint"),
    [
        (2, TOPIC_CONFIGS, "has 2 partitions"),
        (1, {"cleanup.policy": "delete"}, "has cleanup.policy=delete"),
        (1, {"cleanup.policy": "compact,delete"}, "has cleanup.policy=compact,delete"),
    ],
)
def test_a_topic_that_forgets_or_is_somebody_elses_is_not_relied_on(
    kafka: KafkaCluster, name: str, partitions: int, configs: dict[str, str], complaint: str
) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.control.create_topic(name, partitions=partitions, replication_factor=1, configs=configs)
            await one.control.log_end(TopicPartition(name, 0))
            with pytest.raises(StateError, match=complaint):
                await one.state.start()
            assert not one.state.fresh

    asyncio.run(story())


def test_another_clusters_records_are_not_taken(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one, process(kafka, name) as two:
            await one.state.start()
            foreign = encode_producer_id(uuid4(), "some-other-cluster", ProducerId(4))
            with pytest.raises((StateError, OutcomeUnknown)):
                await one.state.append([foreign])
            await until(lambda: one.state.failure is not None)
            assert "some-other-cluster" in str(one.state.failure)
            with pytest.raises(StateError, match="some-other-cluster"):
                await two.state.start()

    asyncio.run(story())


def test_an_unreadable_batch_closes_it(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.control.create_topic(
                name, partitions=1, replication_factor=1, configs={**TOPIC_CONFIGS, "compression.type": "gzip"}
            )
            tp = TopicPartition(name, 0)
            await one.control.log_end(tp)
            await one.state.start()
            # The broker compresses it, and what it unpacks to has no bound.
            batch = encode_plain_batch([(b"topic-config/a", b"{}")], int(time.time() * 1000))
            assert (await one.control.produce(tp, batch, timeout_ms=5_000)).error_code == 0
            await until(lambda: one.state.failure is not None)
            assert "compression.type must be" in str(one.state.failure)

    asyncio.run(story())


# --- the processes of a cluster ---------------------------------------------------------------------------------------


def test_processes_know_of_each_other_and_have_tags_of_their_own(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one, process(kafka, name) as two:
            await one.state.start()
            assert not one.state.alone(time.monotonic())  # nobody could know of it yet
            assert await one.state.enter() is False
            assert one.state.alone(time.monotonic())
            await two.state.start()
            assert await two.state.enter() is True
            assert not two.state.alone(time.monotonic())
            await until(lambda: not one.state.alone(time.monotonic()))
            assert {one.state.tag, two.state.tag} == {1, 2}
            await two.state.leave()
            await until(lambda: one.state.alone(time.monotonic()))

    asyncio.run(story())


def test_a_process_that_ended_without_a_word_is_gone_after_a_time(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_topic, "_GONE_SECONDS", 3.0)
    monkeypatch.setattr(state_topic, "_ALIVE_SECONDS", 1.0)

    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.enter()
            async with process(kafka, name) as two:
                await two.state.start()
                await two.state.enter()
                await until(lambda: not one.state.alone(time.monotonic()))
                await asyncio.sleep(4)
                assert not one.state.alone(time.monotonic())  # it gives signs
            await until(lambda: one.state.alone(time.monotonic()))

    asyncio.run(story())


def test_who_died_long_ago_is_nobodys_concern_and_is_taken_off_the_list(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_topic, "_ALIVE_SECONDS", 0.5)
    ghost = uuid4()

    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.append([encode_alive(ghost, int((time.time() - 3600) * 1000))])
        async with process(kafka, name) as two:
            await two.state.start()
            assert await two.state.enter() is False
            assert two.state.alone(time.monotonic())
            await until(lambda: encode_alive_tombstone(ghost) in two.changes)

    asyncio.run(story())


def test_who_cannot_say_that_it_lives_does_not_serve(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_topic, "_SILENT_SECONDS_MAX", 2.0)

    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.enter()
            assert one.state.fresh
            await until(lambda: not one.state.fresh)

    asyncio.run(story())


def test_a_kafka_that_wants_every_producer_to_begin_at_0_is_not_served(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none yet. A producer id that the partition knows stands in for it: its next sequence would be 78."""

    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.enter()
            (known,) = (await one.control.read_partition(TopicPartition(name, 0))).producers

            async def again(**_: object) -> tuple[ProducerId, int]:
                return known, 0

            monkeypatch.setattr(one.control, "init_producer_id", again)
            monkeypatch.setattr(state_topic, "_ANY_SEQUENCE", 500)
            with pytest.raises(StateError, match="begin at sequence 0"):
                await one.state.enter()

    asyncio.run(story())


def test_a_tag_that_runs_out_is_renewed(kafka: KafkaCluster, name: str) -> None:
    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.enter()
            await one.state.append([encode_process(uuid4(), 0) for _ in range(200)])
            assert (one.state.tag, one.state.tag_runs_out) == (1, True)
            await one.state.enter()
            assert (one.state.tag, one.state.tag_runs_out) == (202, False)
            assert one.state.alone(time.monotonic())  # not beside its former self
            await one.state.append([encode_process(uuid4(), 0) for _ in range(254)])
            assert one.state.tag == 0  # the next one would have it

    asyncio.run(story())


def test_what_a_silent_process_has_sent_may_be_queued_for_a_while(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given another process that says nothing any more, then it is alive for so long, and its appends for longer."""
    monkeypatch.setattr(state_topic, "_SILENT_SECONDS_MAX", 75.0)
    ghost = uuid4()

    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.enter()
            await one.state.append([encode_alive(ghost, int(time.time() * 1000))])
            now = time.monotonic()
            assert one.state.alive(now) == one.state.may_append(now) == {ghost}
            assert one.state.alive(now + 91) == frozenset()
            assert one.state.may_append(now + 91) == {ghost}
            assert one.state.may_append(now + 75 + LIMITS.takeover_seconds + 1) == frozenset()
            # It ended well after all: with nothing under way.
            await one.state.append([encode_alive_tombstone(ghost)])
            assert one.state.may_append(now) == frozenset()

    asyncio.run(story())


def test_a_process_of_this_machine_that_was_killed_is_gone_at_once(kafka: KafkaCluster, name: str) -> None:
    ghost = uuid4()
    place = own_place()
    assert place is not None
    of_another = f"{place}0"  # the same number, begun at another time

    async def story() -> None:
        async with process(kafka, name) as one:
            await one.state.start()
            await one.state.enter()
            now_ms = int(time.time() * 1000)
            await one.state.append([encode_process(ghost, now_ms, of_another), encode_alive(ghost, now_ms)])
            now = time.monotonic()
            assert one.state.alive(now) == frozenset()
            assert one.state.may_append(now) == {ghost}  # what it had sent
            assert one.state.may_append(now + LIMITS.takeover_seconds + 1) == frozenset()

    asyncio.run(story())
