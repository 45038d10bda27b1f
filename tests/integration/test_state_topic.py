"""The state topic on real Kafka: shared by several processes, kept indefinitely, and closed when it is not reliable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
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

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.cluster import heartbeats, state_topic
from fencepost_proxy.cluster.appends import Appends
from fencepost_proxy.cluster.broker import OutcomeUnknown, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import Configs
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.process_identity import own_identity
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.state_topic_settings import TOPIC_CONFIGS
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, StateError
from fencepost_proxy.topics.fencing import encode_producer_id
from fencepost_proxy.topics.processes import encode_heartbeat, encode_heartbeat_tombstone, encode_process
from fencepost_proxy.topics.state import encode_topic_config
from fencepost_proxy.types import ProducerId, TopicPartition
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.state_records import StateRecord
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch
from tests.kit.event_loop import in_event_loop
from tests.kit.waiting import until_async

pytestmark = pytest.mark.kafka

LIMITS = replace(Limits(), request_timeout_seconds=10.0, connect_timeout_seconds=1.0)
LEASE_SECONDS = 1.0
TOPIC_ID = UUID(int=7)


class Process:
    """One proxy process's access to the state topic: a control client, the topic, and the changes reported to it."""

    def __init__(self, control: KafkaClient, name: str) -> None:
        self.control = control
        self.changes: list[StateRecord] = []
        self.state = StateTopic(control, name=name, lease_seconds=LEASE_SECONDS, limits=LIMITS, on_change=self._changed)

    def _changed(self, records: Sequence[StateRecord]) -> None:
        self.changes += records


@asynccontextmanager
async def process(kafka: KafkaCluster, name: str) -> AsyncIterator[Process]:
    """A process that has not started: `await p.state.start()`."""
    control = KafkaClient([kafka.address(each) for each in kafka.node_ids], LIMITS)
    await control.start(timeout_seconds=30)
    one = Process(control, name)
    try:
        yield one
    finally:
        await one.state.close()
        await control.close()


@asynccontextmanager
async def started(kafka: KafkaCluster, name: str, *, heartbeats: bool = False) -> AsyncIterator[Process]:
    async with process(kafka, name) as one:
        await one.state.start()
        if heartbeats:
            await one.state.heartbeats.enter()
        yield one


@pytest.fixture
def name() -> str:
    return f"__state-{uuid4().hex[:8]}"


async def confirmed(kafka: KafkaCluster, call: Callable[[AdminClient], Mapping[Any, Future[Any]]]) -> None:
    """Wait for the result of an admin call."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in call(admin).values():
        await asyncio.to_thread(future.result, 60)


def config(topic: str, check: str = "required") -> StateRecord:
    return encode_topic_config(topic, TOPIC_ID, {"fencepost.check.expected.offsets": check})


@in_event_loop
async def test_it_is_created_durable_and_compacted(kafka3: KafkaCluster, name: str) -> None:
    async with started(kafka3, name) as one:
        await until_async(lambda: one.state.fresh, "a fresh state")
        info = one.control.topic(name)
        assert info is not None
        assert (info.partition_count, info.replication_factor) == (1, 3)
        facts = await Configs(one.control).topic_facts(name)
        assert facts.cleanup_policy == {"compact"}
        assert facts.min_insync_replicas == 2


@in_event_loop
async def test_stored_records_reach_every_process(kafka: KafkaCluster, name: str) -> None:
    async with started(kafka, name) as one, started(kafka, name) as two:
        assert await one.state.append([config("a"), config("b")]) == [0, 1]
        assert set(one.state.view.topic_configs) == {"a", "b"}
        assert await two.state.append([config("a", "true")]) == [2]
        await until_async(lambda: one.state.view.next_offset == 3, "offset 3")
        assert one.state.view.topic_configs["a"].configs == {"fencepost.check.expected.offsets": "true"}
        assert one.changes == two.changes == [config("a"), config("b"), config("a", "true")]

        async with started(kafka, name) as three:
            assert three.changes == one.changes
            assert three.state.view.topic_configs == one.state.view.topic_configs


@in_event_loop
async def test_read_to_end_returns_everything_stored_before(kafka: KafkaCluster, name: str) -> None:
    async with started(kafka, name) as one, started(kafka, name) as two:
        query = AsyncMock(wraps=two.state._confirmed_leader.high_watermark)
        two.state._confirmed_leader.high_watermark = query  # type: ignore[method-assign]
        for number in range(30):
            await one.state.append([config(f"topic-{number}")])
            await two.state.read_to_end(timeout_seconds=30)
            assert f"topic-{number}" in two.state.view.topic_configs
        query.reset_mock()
        await asyncio.gather(*(two.state.read_to_end(timeout_seconds=30) for _ in range(50)))
        assert 1 <= query.await_count <= 2, "concurrent calls must share a query"

        kafka.pause(1)
        try:
            with pytest.raises(UpstreamUnavailable):
                await two.state.read_to_end(timeout_seconds=0.2)
        finally:
            kafka.resume(1)
        await two.state.read_to_end(timeout_seconds=30)


@in_event_loop
async def test_all_processes_agree_on_one_producer_id(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(kafka, name) as one, process(kafka, name) as two, process(kafka, name) as three:
        await asyncio.gather(one.state.start(), two.state.start(), three.state.start())
        # No process proposes an id before all of them know that none is stored.
        queried, all_queried = set[Process](), asyncio.Event()

        def together(each: Process, query: Callable[..., Any]) -> Callable[..., Any]:
            async def init_producer_id(**settings: Any) -> Any:
                answer = await query(**settings)
                queried.add(each)
                if len(queried) == 3:
                    all_queried.set()
                await all_queried.wait()
                return answer

            return init_producer_id

        for each in (one, two, three):
            init = together(each, each.state._producer_ids.init)
            monkeypatch.setattr(each.state, "_producer_ids", SimpleNamespace(init=init))
        agreed = await asyncio.gather(*(p.state.acquire_producer_id() for p in (one, two, three, one)))
        assert len(set(agreed)) == 1
        proposals = [record for record in one.changes if record.key.startswith(b"producer-id/")]
        assert len(proposals) > 1, "only one process proposed an id: this test proves nothing"

    async with started(kafka, name) as four:
        assert await four.state.acquire_producer_id() == agreed[0]


@in_event_loop
async def test_view_expires_while_broker_is_paused_and_recovers(kafka: KafkaCluster, name: str) -> None:
    async with started(kafka, name) as one:
        await one.state.append([config("before")])
        await asyncio.sleep(LEASE_SECONDS * 1.5)
        await until_async(lambda: one.state.fresh, "a fresh state")  # following the topic must keep the view fresh

        kafka.pause(1)
        try:
            paused_at = time.monotonic()
            await until_async(lambda: not one.state.fresh, "a stale state")
            # A query sent before the pause counts from the time it was sent.
            assert one.state.fresh_until <= paused_at + LEASE_SECONDS
            with pytest.raises(OutcomeUnknown):
                await one.state.append([config("in-doubt")], timeout_seconds=0.2)
            await asyncio.sleep(LIMITS.connect_timeout_seconds + 0.5)
            assert not one.state.fresh
        finally:
            kafka.resume(1)

        await until_async(lambda: one.state.fresh, "a fresh state")
        # The append had reached the broker's queue, and its outcome was unknown.
        await until_async(lambda: "in-doubt" in one.state.view.topic_configs, "the in-doubt config")
        assert one.state.failure is None


@in_event_loop
async def test_start_waits_for_a_living_broker(kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Metadata without brokers, as while all of them resume from a pause.
    named, queried = KafkaClient.brokers, []

    def brokers(self: KafkaClient) -> object:
        queried.append(named.__get__(self))
        return {} if len(queried) <= 2 else queried[-1]

    async with process(kafka, name) as one:
        monkeypatch.setattr(KafkaClient, "brokers", property(brokers))
        # The topic is created once the brokers are back, with all available replicas.
        await one.state.start()
        assert len(queried) > 2
        await until_async(lambda: one.state.fresh, "a fresh state")


@pytest.mark.parametrize("whose", ["its own", "another's"])
@in_event_loop
async def test_what_it_has_just_created_is_waited_for(
    whose: str, kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The brokers do not show the new topic for a while, as when one of them is busy.
    shown, queried = LogEnds.log_start, []

    async def log_start(self: LogEnds, tp: TopicPartition, **how: Any) -> object:
        queried.append(tp)
        if len(queried) == 1:
            raise UpstreamUnavailable(f"{tp}: there is none", error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
        return await shown(self, tp, **how)

    async def created_by_another(self: Topics, *args: object, **how: object) -> bool:
        return False

    async with process(kafka, name) as one:
        monkeypatch.setattr(LogEnds, "log_start", log_start)
        if whose == "its own":
            # A process that has created the topic waits for it.
            await one.state.start()
            assert queried
            await until_async(lambda: one.state.fresh, "a fresh state")
        else:
            # If another process reports that it created the topic, this process may lack permission, and fails.
            monkeypatch.setattr(Topics, "create", created_by_another)
            with pytest.raises(UpstreamUnavailable, match="there is none"):
                await one.state.start()


@in_event_loop
async def test_freshness_counts_from_the_request_time(kafka: KafkaCluster, name: str) -> None:
    async with started(kafka, name) as one:
        # The first fetch is answered at once. An idle broker delays later ones by 250 ms, and another process may
        # append meanwhile.
        started_with = one.state.fresh_until
        await until_async(lambda: one.state.fresh_until > started_with, "a renewed lease")
        left = []
        until_then = time.monotonic() + 1.0
        while time.monotonic() < until_then:
            left.append(one.state.fresh_until - time.monotonic())
            await asyncio.sleep(0.005)
        assert max(left) <= LEASE_SECONDS - 0.2


@in_event_loop
async def test_long_topic_is_loaded_only_at_its_end(kafka: KafkaCluster, name: str) -> None:
    async with started(kafka, name) as one:
        filler = StateRecord(b"from-a-newer-version/x", b"x" * 600_000)
        for _ in range(5):  # more than one Fetch response can contain
            await one.state.append([filler])
        await one.state.append([config("last")])

    async with started(kafka, name) as two:
        assert two.state.view.next_offset == 6
        assert "last" in two.state.view.topic_configs


@in_event_loop
async def test_an_append_returns_once_it_was_read_back(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(kafka, name) as one:
        fetch, may_query = one.state._fetch, asyncio.Event()
        may_query.set()

        async def late() -> None:
            await asyncio.sleep(0.4)
            await may_query.wait()
            await fetch()

        monkeypatch.setattr(one.state, "_fetch", late)
        await asyncio.sleep(0.3)  # the fetch in progress was sent without delay
        assert await one.state.append([config("a")]) == [0]
        assert "a" in one.state.view.topic_configs
        may_query.clear()
        with pytest.raises(OutcomeUnknown, match="stored at offset 1, but not read back in time"):
            await one.state.append([config("b")], timeout_seconds=5.0)
        may_query.set()


@in_event_loop
async def test_it_follows_a_leader_that_moves(kafka3: KafkaCluster, name: str) -> None:
    async with started(kafka3, name) as one:
        await one.state.append([config("before")])
        leader = one.control.leader(TopicPartition(name, 0))
        assert leader is not None
        await asyncio.to_thread(kafka3.shut_down, leader.node_id)
        try:
            stopped_at = time.monotonic()
            await until_async(
                lambda: one.state.fresh_until > stopped_at + LEASE_SECONDS,
                "a renewed lease",
            )
            await one.state.append([config("after")], timeout_seconds=60)
            assert set(one.state.view.topic_configs) == {"before", "after"}
        finally:
            await asyncio.to_thread(kafka3.restart, leader.node_id)


@in_event_loop
async def test_replica_restarts_leave_no_gap_in_freshness(kafka3: KafkaCluster, name: str) -> None:
    """All brokers restart one by one, including the leader."""
    lease_seconds = 60.0  # covers many fetches, even on a busy machine
    async with process(kafka3, name) as one:
        one.state._lease_seconds = lease_seconds
        await one.state.start()
        gaps = asyncio.create_task(until_async(lambda: not one.state.fresh, "a stale state", seconds=3600))
        for node_id in (1, 2, 3):
            await asyncio.to_thread(kafka3.shut_down, node_id)
            try:
                stopped_at = time.monotonic()
                # This renewal was requested while the broker was down.
                await until_async(
                    lambda stopped_at=stopped_at: one.state.fresh_until > stopped_at + lease_seconds,
                    "a renewed lease",
                )
            finally:
                await asyncio.to_thread(kafka3.restart, node_id)
        assert not gaps.done(), "the view expired in between"
        gaps.cancel()


@in_event_loop
async def test_deleted_topic_is_waited_for_and_replacement_refused(
    kafka: KafkaCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with process(kafka, name) as one, process(kafka, name) as successor:
        await one.state.start()
        await one.state.append([config("checked")])
        await confirmed(kafka, lambda admin: admin.delete_topics([name]))
        await until_async(lambda: not one.state.fresh, "a stale state")
        await until_async(lambda: "state topic is missing" in caplog.text, "the log line")
        assert one.state.failure is None

        await successor.state.start()
        await until_async(lambda: one.state.failure is not None, "a failure")
        assert "created again" in str(one.state.failure)
        await asyncio.sleep(0.5)
        assert not one.state.fresh
        with pytest.raises(StateError, match="created again"):
            await one.state.append([config("x")])
        assert any(r.levelno == logging.ERROR and "state topic failed" in r.message for r in caplog.records)


@in_event_loop
async def test_lost_records_are_not_overlooked(kafka: KafkaCluster, name: str) -> None:
    async with process(kafka, name) as one, process(kafka, name) as late:
        await one.state.start()
        await one.state.append([config("a")])
        await one.state.append([config("b")])
        # Kafka refuses DeleteRecords on a topic that is only compacted, but an operator can change the policy.
        await alter(kafka, name, "delete")
        await confirmed(kafka, lambda admin: admin.delete_records([ConfluentPartition(name, 0, 1)]))
        await until_async(lambda: one.state.failure is not None, "a failure")
        assert "lost records" in str(one.state.failure)
        assert not await becomes_fresh(one)

        await alter(kafka, name, "compact")
        with pytest.raises(StateError, match="lost records"):
            await late.state.start()


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
@in_event_loop
async def test_unsuitable_existing_topic_is_refused(
    kafka: KafkaCluster, name: str, partitions: int, configs: dict[str, str], complaint: str
) -> None:
    async with process(kafka, name) as one:
        await Topics(one.control).create(name, partitions=partitions, replication_factor=1, configs=configs)
        await LogEnds(one.control).log_end(TopicPartition(name, 0))
        with pytest.raises(StateError, match=complaint):
            await one.state.start()
        assert not one.state.fresh


@in_event_loop
async def test_another_clusters_records_are_not_taken(kafka: KafkaCluster, name: str) -> None:
    async with process(kafka, name) as one, process(kafka, name) as two:
        await one.state.start()
        foreign = encode_producer_id(uuid4(), "some-other-cluster", ProducerId(4))
        with pytest.raises((StateError, OutcomeUnknown)):
            await one.state.append([foreign])
        await until_async(lambda: one.state.failure is not None, "a failure")
        assert "some-other-cluster" in str(one.state.failure)
        with pytest.raises(StateError, match="some-other-cluster"):
            await two.state.start()


@in_event_loop
async def test_an_unreadable_batch_closes_it(kafka: KafkaCluster, name: str) -> None:
    async with process(kafka, name) as one:
        await Topics(one.control).create(
            name, partitions=1, replication_factor=1, configs={**TOPIC_CONFIGS, "compression.type": "gzip"}
        )
        tp = TopicPartition(name, 0)
        await LogEnds(one.control).log_end(tp)
        await one.state.start()
        # The broker compresses it, and the decompressed size has no bound.
        batch = encode_uncompressed_batch([(b"topic-config/a", b"{}")], int(time.time() * 1000))
        assert (await Appends(one.control).produce(tp, batch, timeout_ms=5_000)).error_code == 0
        await until_async(lambda: one.state.failure is not None, "a failure")
        assert "compression.type must be" in str(one.state.failure)


# --- the processes of a cluster ---------------------------------------------------------------------------------------


@in_event_loop
async def test_processes_see_each_other_and_get_distinct_ids(kafka: KafkaCluster, name: str) -> None:
    async with process(kafka, name) as one, process(kafka, name) as two:
        await one.state.start()
        assert not one.state.heartbeats.alone(time.monotonic())  # no other process can know of this one yet
        assert await one.state.heartbeats.enter() is False
        await until_async(lambda: one.state.heartbeats.alone(time.monotonic()), "no other live process")
        await two.state.start()
        assert await two.state.heartbeats.enter() is True
        assert not two.state.heartbeats.alone(time.monotonic())
        await until_async(lambda: not one.state.heartbeats.alone(time.monotonic()), "another live process")
        assert {one.state.heartbeats.instance_id, two.state.heartbeats.instance_id} == {1, 2}
        await two.state.heartbeats.leave()
        await until_async(lambda: one.state.heartbeats.alone(time.monotonic()), "no other live process")


@in_event_loop
async def test_process_without_heartbeats_is_dead_after_a_time(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_DEAD_SECONDS", 10.0)
    monkeypatch.setattr(heartbeats, "_HEARTBEAT_SECONDS", 1.0)
    async with started(kafka, name, heartbeats=True) as one:
        async with started(kafka, name, heartbeats=True):
            await until_async(lambda: not one.state.heartbeats.alone(time.monotonic()), "another live process")
            await asyncio.sleep(11)
            assert not one.state.heartbeats.alone(time.monotonic())  # it sends heartbeats
        await until_async(lambda: one.state.heartbeats.alone(time.monotonic()), "no other live process")


@in_event_loop
async def test_long_dead_process_is_ignored_and_removed(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_HEARTBEAT_SECONDS", 0.5)
    ghost = uuid4()
    async with started(kafka, name) as one:
        await one.state.append([encode_heartbeat(ghost, int((time.time() - 3600) * 1000))])
    async with started(kafka, name) as two:
        assert await two.state.heartbeats.enter() is False
        await until_async(lambda: two.state.heartbeats.alone(time.monotonic()), "no other live process")
        await until_async(
            lambda: encode_heartbeat_tombstone(ghost) in two.changes,
            "the dead process's tombstone",
        )


@in_event_loop
async def test_process_that_cannot_send_heartbeats_stops_serving(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_SILENT_SECONDS_MAX", 8.0)
    async with started(kafka, name, heartbeats=True) as one:
        await until_async(lambda: one.state.fresh, "a fresh state")
        await until_async(lambda: not one.state.fresh, "a stale state")


@pytest.mark.parametrize("stored", [False, True], ids=["lost", "only its answer"])
@in_event_loop
async def test_unacknowledged_process_serves_only_after_reading_its_record(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The outcome of a process's first record is unknown. An expansion would not wait for this process."""
    monkeypatch.setattr(heartbeats, "_UNACKNOWLEDGED_SECONDS", 0.2)
    lost = PartitionResult(partition=0, error_code=Error.REQUEST_TIMED_OUT)
    async with process(kafka, name) as one, process(kafka, name) as two:
        await one.state.start()
        await two.state.start()
        await two.state.heartbeats.enter()
        produce, may_pass = one.state._appends.produce, asyncio.Event()

        async def produces(*args: Any, **settings: Any) -> PartitionResult:
            if may_pass.is_set():
                return await produce(*args, **settings)
            if stored:
                asyncio.get_running_loop().create_task(late(*args, **settings))
            return lost

        async def late(*args: Any, **settings: Any) -> None:
            await may_pass.wait()
            await produce(*args, **settings)

        monkeypatch.setattr(one.state, "_appends", SimpleNamespace(produce=produces))
        await one.state.heartbeats.enter()
        # Even with a fresh view: an expansion that begins now could end before this process learns of it.
        await until_async(lambda: one.state.read_until > time.monotonic(), "a lease")
        assert not one.state.fresh
        assert one.state.heartbeats.unacknowledged
        assert two.state.heartbeats.may_append(time.monotonic()) == frozenset()

        may_pass.set()
        await until_async(lambda: one.state.fresh, "a fresh state")
        await until_async(
            lambda: two.state.heartbeats.may_append(time.monotonic()) == {one.state.heartbeats.process},
            "the other process to be known",
        )


@in_event_loop
async def test_abandoned_process_name_is_not_waited_for(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new name was not stored. The next heartbeat contains it and removes the old one."""
    monkeypatch.setattr(heartbeats, "_HEARTBEAT_SECONDS", 0.3)
    async with process(kafka, name) as one, process(kafka, name) as two:
        for each in (one, two):
            await each.state.start()
            await each.state.heartbeats.enter()
        appends = one.state._appends

        async def lost(*_: Any, **__: Any) -> PartitionResult:
            monkeypatch.setattr(one.state, "_appends", appends)
            return PartitionResult(partition=0, error_code=Error.REQUEST_TIMED_OUT)

        monkeypatch.setattr(one.state, "_appends", SimpleNamespace(produce=lost))
        await one.state.heartbeats.enter()
        assert not one.state.heartbeats.unacknowledged  # the others know its old name
        await until_async(
            lambda: two.state.heartbeats.may_append(time.monotonic()) == {one.state.heartbeats.process},
            "the other process to be known",
        )


@in_event_loop
async def test_kafka_requiring_sequence_0_is_refused(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such Kafka exists yet. A producer id that the partition knows has the same effect, since its next sequence is
    not 0."""
    async with started(kafka, name, heartbeats=True) as one:
        (known,) = (await Producers(one.control).read_partition(TopicPartition(name, 0))).producers

        async def again(**_: object) -> tuple[ProducerId, int]:
            return known, 0

        monkeypatch.setattr(one.state.heartbeats, "_producer_ids", SimpleNamespace(init=again))
        monkeypatch.setattr(state_topic, "_ANY_SEQUENCE", 500)
        with pytest.raises(StateError, match="begin at sequence 0"):
            await one.state.heartbeats.enter()


@in_event_loop
async def test_exhausted_instance_id_is_renewed(kafka: KafkaCluster, name: str) -> None:
    async with started(kafka, name, heartbeats=True) as one:
        await one.state.append([encode_process(uuid4(), 0) for _ in range(200)])
        assert (one.state.heartbeats.instance_id, one.state.heartbeats.instance_id_expires) == (1, True)
        await one.state.heartbeats.enter()
        assert (one.state.heartbeats.instance_id, one.state.heartbeats.instance_id_expires) == (202, False)
        await until_async(
            lambda: one.state.heartbeats.alone(time.monotonic()), "no other live process"
        )  # its former identity does not count
        await one.state.append([encode_process(uuid4(), 0) for _ in range(254)])
        assert one.state.heartbeats.instance_id == 0  # the next process would have the same id


@in_event_loop
async def test_appends_of_silent_process_count_as_queued(
    kafka: KafkaCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without heartbeats is live for a while, and its appends count as queued for longer."""
    monkeypatch.setattr(heartbeats, "_SILENT_SECONDS_MAX", 75.0)
    ghost = uuid4()
    async with started(kafka, name, heartbeats=True) as one:
        await one.state.append([encode_heartbeat(ghost, int(time.time() * 1000))])
        now = time.monotonic()
        assert one.state.heartbeats.live(now) == one.state.heartbeats.may_append(now) == {ghost}
        assert one.state.heartbeats.live(now + 91) == frozenset()
        assert one.state.heartbeats.may_append(now + 91) == {ghost}
        assert one.state.heartbeats.may_append(now + 75 + LIMITS.takeover_seconds + 1) == frozenset()
        # It ended in order after all, with no request in progress.
        await one.state.append([encode_heartbeat_tombstone(ghost)])
        assert one.state.heartbeats.may_append(now) == frozenset()


@in_event_loop
async def test_killed_local_process_is_dead_at_once(kafka: KafkaCluster, name: str) -> None:
    ghost = uuid4()
    place = own_identity()
    assert place is not None
    of_another = f"{place}0"  # the same process id with another start time
    async with started(kafka, name, heartbeats=True) as one:
        now_ms = int(time.time() * 1000)
        await one.state.append([encode_process(ghost, now_ms, of_another), encode_heartbeat(ghost, now_ms)])
        now = time.monotonic()
        assert one.state.heartbeats.live(now) == frozenset()
        assert one.state.heartbeats.may_append(now) == {ghost}  # its queued appends
        assert one.state.heartbeats.may_append(now + LIMITS.takeover_seconds + 1) == frozenset()
