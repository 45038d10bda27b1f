"""Stories of group progress: Kafka is queried, and members get their assignment or wait."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.fetches import Fetched
from fencepost_proxy.config import Limits
from fencepost_proxy.expansion.gated import encode_gated, encode_released
from fencepost_proxy.expansion.history import Expansion, encode_done, encode_expansion, encode_partition_count
from fencepost_proxy.expansion.queries import GatedPartitions, LookedUp, MayHave
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services import gating_decisions, groups, unread_records
from fencepost_proxy.services.groups import GroupProgressTracker
from fencepost_proxy.topics.state import StateView, encode_topic_config
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, Offset, TopicPartition
from fencepost_proxy.wire.state_records import StateRecord
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch

ORDERS, OTHERS, ANEW = UUID(int=7), UUID(int=8), UUID(int=9)
P0, P1, P2, P3 = (TopicPartition("orders", each) for each in range(4))
Q0, Q1 = (TopicPartition("others", each) for each in range(2))
_IMPATIENCE_SECONDS = 600.0
_PATIENCE_SECONDS = 3600.0


class Clock:
    """In end_of_log of the module `time`."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return 1_000_000.0 + self.passed

    def time(self) -> float:
        return 1_800_000_000.0 + self.passed


class State:
    """A state topic that is read back at once."""

    def __init__(self) -> None:
        self.view = StateView("cluster")
        self._names = iter(range(100, 1000))

    def append_now(self, records: Iterable[StateRecord]) -> None:
        for record in records:
            assert self.view.apply(self.view.next_offset, record.key, record.value) is None

    async def append(self, records: Iterable[StateRecord], **_: Any) -> list[int]:
        self.append_now(records)
        return []

    def expand(self, topic: str, topic_id: UUID, from_count: int, to_count: int, *thresholds: int) -> None:
        if self.view.history(topic, topic_id).count is None:
            config = encode_topic_config(topic, topic_id, {"fencepost.ordered.partition.expansion": "true"})
            self.append_now([config, encode_partition_count(topic, topic_id, from_count)])
        proposal, end = UUID(int=next(self._names)), UUID(int=next(self._names))
        expansion = Expansion(topic, topic_id, from_count, to_count, proposal, 0, process=UUID(int=1))
        ends, epochs = list(map(LogEndOffset, thresholds)), [LeaderEpoch(0)] * from_count
        done = encode_done(expansion, end, thresholds=ends, epochs=epochs, at_ms=1, blocked_ms=1)
        self.append_now([encode_expansion(expansion), done])


class Kafka:
    """In end_of_log of the Kafka client. `broken` – topics that cannot be queried, with Kafka's error code.

    `meanwhile` – happens once, during a query of commits."""

    def __init__(self) -> None:
        self.commits: dict[TopicPartition, int] = {}
        self.starts: dict[TopicPartition, int] = {}
        self.broken: dict[str, int | None] = {}
        self.meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def committed_offsets(
        self, group: str, partitions: Iterable[TopicPartition], **_: Any
    ) -> Mapping[TopicPartition, int]:
        for each in partitions:
            if each.topic in self.broken:
                raise UpstreamUnavailable(f"{each}: not now", error_code=self.broken[each.topic])
        found = {each: self.commits[each] for each in partitions if each in self.commits}
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return found

    async def log_start(self, partition: TopicPartition, **_: Any) -> int:
        return self.starts.get(partition, 0)

    async def fetch(self, partition: TopicPartition, offset: int, **_: Any) -> Fetched:
        """Records everywhere."""
        batch = offset.to_bytes(8, "big") + encode_uncompressed_batch([(b"k", b"v")] * 100, 0)[8:]
        return Fetched(batch, (), Offset(offset + 100))


class Story:
    """The group `billing`, of one member, at one proxy process."""

    def __init__(self, clock: Clock, state: State, kafka: Kafka) -> None:
        self.clock, self.state, self.kafka = clock, state, kafka
        self.ids = {"orders": ORDERS, "others": OTHERS}
        self.metrics = Metrics()
        self.tracker = GroupProgressTracker(
            Limits(gated_without_commit_seconds=_IMPATIENCE_SECONDS, gated_without_progress_seconds=_PATIENCE_SECONDS),
            lambda: state,  # type: ignore[arg-type, return-value]
            lambda: state.view,
            groups=kafka,  # type: ignore[arg-type]
            log_ends=kafka,  # type: ignore[arg-type]
            fetches=kafka,  # type: ignore[arg-type]
            configured=[],
            policy=lambda topic: TopicPolicy(ordered=True),
            topic_id=self.ids.get,
            metrics=self.metrics,
        )
        self.watch = self.tracker.watch
        self.tracker.refresh()

    async def queries_to_send(self, *partitions: TopicPartition) -> frozenset[TopicPartition]:
        """The member is about to get these; returns the gated ones."""
        reply = await self.tracker.answer(MayHave("billing", "client", partitions), "10.0.0.1")
        self.tracker.refresh()
        assert isinstance(reply, GatedPartitions)
        return reply.partitions

    async def probes(self, *, last_observed: bool = True) -> frozenset[TopicPartition]:
        """The process probes what the group waits for; returns what is still gated."""
        if last_observed and "billing" in self.watch.groups:
            self.watch.groups["billing"].active_at = self.clock.monotonic()
        await self.tracker._probe("billing")
        await self.tracker._store_what_is_due()
        self.tracker.refresh()
        return self.gated

    @property
    def gated(self) -> frozenset[TopicPartition]:
        watched = self.watch.groups.get("billing")
        return frozenset() if watched is None or watched.gated is None else watched.gated


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    """`orders` and `others` were expanded from 1 to 2 partitions; ten records are in each prior partition."""
    clock, state = Clock(), State()
    for module in (gating_decisions, groups, unread_records):
        monkeypatch.setattr(module, "time", clock)
    state.expand("orders", ORDERS, 1, 2, 10)
    state.expand("others", OTHERS, 1, 2, 10)
    return Story(clock, state, Kafka())


# --- what is released -------------------------------------------------------------------------------------------------


async def test_partition_gated_during_probe_is_not_released(story: Story) -> None:
    """A probe began for one partition, and another one is gated before it ends. A KIP-848 member must not get the
    latter with
    its next heartbeat."""
    story.kafka.commits = {P0: 5, Q0: 5}
    assert await story.queries_to_send(P1) == {P1}

    async def meanwhile() -> None:
        assert await story.queries_to_send(Q1) == {Q1}
        story.watch.consumer_assigned("billing", "m", ((OTHERS, (0, 1)),), ((OTHERS, (0,)),), frozenset({Q1}))

    story.kafka.meanwhile = meanwhile
    assert await story.probes() == {P1, Q1}
    assert story.watch.consumer_gets("billing", "m", story.tracker.topics.topic_ids()) is None

    story.kafka.commits[Q0] = 10
    assert await story.probes() == {P1}
    assert story.watch.consumer_gets("billing", "m", story.tracker.topics.topic_ids()) == ((OTHERS, (0, 1)),)


async def test_older_probe_does_not_release_others_gated_partitions(story: Story) -> None:
    """1. All members are at one process, where a partition is gated.
    2. The other process reads that, and probes.
    3. Another partition is gated at the first process, which dies; a KIP-848 member comes to the other process."""
    story.kafka.commits = {P0: 5, Q0: 5}
    other = Story(story.clock, story.state, story.kafka)
    await story.queries_to_send(P1)
    other.tracker.refresh()
    assert await other.probes(last_observed=False) == {P1}
    await story.queries_to_send(Q1)
    other.tracker.refresh()
    await other.probes(last_observed=False)

    assert not other.watch.consumer_is_unknown("billing", "m")
    assert not other.watch.must_rejoin("billing", "m", 5, story.clock.monotonic())
    assert other.gated == {P1, Q1}


async def test_unqueryable_topic_does_not_delay_others(story: Story) -> None:
    """One of two topics was deleted, or has a partition without a leader."""
    story.kafka.commits = {P0: 5, Q0: 5}
    assert await story.queries_to_send(P1, Q1) == {P1, Q1}
    story.kafka.broken["others"] = None
    story.kafka.commits[P0] = 10
    assert await story.probes() == {Q1}
    assert await story.queries_to_send(P1, Q1) == {Q1}


async def test_unauthorized_topic_releases_only_its_own_partitions(story: Story) -> None:
    story.kafka.commits = {P0: 5}
    story.kafka.broken["others"] = 29
    assert await story.queries_to_send(P1, Q1) == {P1, Q1}
    assert await story.probes() == {P1, Q1}
    story.clock.passed += _IMPATIENCE_SECONDS + 1
    await story.probes()
    assert await story.queries_to_send(P1, Q1) == {P1}
    assert await story.probes() == {P1}


async def test_group_reset_to_partition_start_waits_again(story: Story) -> None:
    """The first records of the new partition have expired, those of the prior partitions have not."""
    story.kafka.starts[P1] = 5
    story.kafka.commits = {P0: 0, P1: 5}
    assert await story.queries_to_send(P1) == {P1}
    story.kafka.commits[P1] = 6
    assert await story.queries_to_send(P1) == set()


# --- groups without commits -------------------------------------------------------------------------------------------


async def test_gated_prior_partition_does_not_time_out(story: Story) -> None:
    """Two expansions, and a group that lags in the first for longer than a group without commits is waited for."""
    story.state.expand("orders", ORDERS, 2, 4, 10, 5)
    story.tracker.refresh()
    story.kafka.commits = {P0: 5}
    assert await story.queries_to_send(P1, P2, P3) == {P1, P2, P3}
    for _ in range(3):
        story.clock.passed += _IMPATIENCE_SECONDS
        story.kafka.commits[P0] += 1
        assert await story.probes() == {P1, P2, P3}

    story.kafka.commits[P0] = 10
    assert await story.probes() == {P2, P3}
    story.clock.passed += 1
    assert await story.queries_to_send(P1, P2, P3) == {P2, P3}
    assert await story.probes() == {P2, P3}
    story.kafka.commits[P1] = 4
    assert await story.probes() == {P2, P3}
    story.kafka.commits[P1] = 5
    assert await story.probes() == set()


async def test_commit_timeout_starts_after_all_other_waits(story: Story) -> None:
    story.state.expand("orders", ORDERS, 2, 4, 10, 5)
    story.tracker.refresh()
    story.kafka.commits = {P0: 5}
    await story.queries_to_send(P1, P2)
    story.clock.passed += 2 * _IMPATIENCE_SECONDS
    story.kafka.commits = {P0: 10}
    await story.probes()
    await story.probes()

    story.clock.passed += _IMPATIENCE_SECONDS - 1
    assert await story.probes() == {P2}
    story.clock.passed += 2
    assert await story.probes() == set()
    # Permanently: the next member does not wait.
    assert await Story(story.clock, story.state, story.kafka).queries_to_send(P2) == set()


async def test_group_without_further_commits_times_out(story: Story) -> None:
    """A client that commits only when records arrive never commits the last ones."""
    story.kafka.commits = {P0: 5}
    await story.queries_to_send(P1)
    assert await story.probes() == {P1}
    story.clock.passed += _PATIENCE_SECONDS - 1
    story.kafka.commits = {P0: 6}  # each commit begins the wait again
    assert await story.probes() == {P1}
    story.clock.passed += _PATIENCE_SECONDS - 1
    assert await story.probes() == {P1}
    (waiting,) = story.tracker.waiting()
    stood = f"no further commit for {_PATIENCE_SECONDS - 1:.0f} s"
    assert waiting.waits == (f"partition 0: committed 6, threshold 10, {stood}",)
    story.clock.passed += 2
    assert await story.probes() == set()
    assert story.metrics.partitions_timed_out.value == 1
    assert await Story(story.clock, story.state, story.kafka).queries_to_send(P1) == set()


async def test_stopped_groups_timeout_starts_at_its_return(story: Story) -> None:
    story.kafka.commits = {P0: 5}
    await story.queries_to_send(P1)
    await story.probes()
    story.clock.passed += 2 * _PATIENCE_SECONDS
    assert await story.probes(last_observed=False) == {P1}
    assert await story.queries_to_send(P1) == {P1}
    assert await story.probes() == {P1}


@pytest.mark.parametrize(
    ("looked_up", "waits"),
    [(["end"], False), (["beginning"], True), (["beginning", "end"], True), (["end", "beginning"], True), ([], True)],
)
async def test_only_pure_log_end_query_begins_at_end(story: Story, looked_up: list[str], waits: bool) -> None:
    """A client that begins at the beginning may query the end too (`get_watermark_offsets`), or share its client id."""
    for end_of_log in looked_up:
        ends, others = ((P0,), ()) if end_of_log == "end" else ((), (P0,))
        story.tracker.notice(LookedUp("client", ends, others), "10.0.0.1")  # type: ignore[arg-type]
    assert (await story.queries_to_send(P1) == {P1}) is waits


# --- what is remembered by name ---------------------------------------------------------------------------------------


async def test_release_does_not_apply_to_recreated_topic(story: Story) -> None:
    story.kafka.broken["orders"] = 29
    await story.queries_to_send(P1)
    await story.probes()
    story.clock.passed += _IMPATIENCE_SECONDS + 1
    await story.probes()
    assert await story.queries_to_send(P1) == set()

    del story.kafka.broken["orders"]
    story.ids["orders"] = ANEW
    story.state.expand("orders", ANEW, 1, 2, 10)
    story.tracker.refresh()
    assert await story.queries_to_send(P1) == {P1}


async def test_predecessors_log_start_is_ignored(story: Story) -> None:
    story.kafka.starts[P0] = 8
    assert await story.queries_to_send(P1) == {P1}
    story.kafka.starts[P0] = 0
    story.ids["orders"] = ANEW
    story.state.expand("orders", ANEW, 1, 2, 4)
    story.tracker.refresh()
    assert await story.queries_to_send(P1) == {P1}


# --- what operators see -----------------------------------------------------------------------------------------------


async def test_inactive_group_is_not_shown_as_waiting(story: Story) -> None:
    await story.queries_to_send(P1)
    await story.probes()
    assert [each.group for each in story.tracker.waiting()] == ["billing"]
    assert story.metrics.partitions_gated.value == 1

    story.clock.passed += 121
    await story.probes(last_observed=False)
    assert story.tracker.waiting() == []
    assert story.metrics.partitions_gated.value == 0

    story.clock.passed += 60
    await story.probes()
    assert [each.seconds for each in story.tracker.waiting()] == [181]
    assert story.metrics.partitions_gated.value == 1


async def test_absent_group_is_forgotten_after_a_day(story: Story) -> None:
    await story.queries_to_send(P1)
    await story.probes()
    story.clock.passed += 86_401
    await story.tracker._tidy(story.clock.monotonic())
    story.tracker.refresh()
    await story.probes(last_observed=False)
    assert "billing" not in story.watch.groups
    assert not story.tracker._stories


# --- what the state topic keeps ---------------------------------------------------------------------------------------


async def test_release_recorded_while_others_are_stored_is_stored_next(story: Story) -> None:
    later = encode_released(OTHERS, 2, "billing", 1)
    append, stored = story.state.append, []

    async def appending(records: Any, **_: Any) -> Any:
        stored.extend(records)
        if len(stored) == 1:
            story.tracker._decisions.to_store.append(later)
        return await append(records)

    story.state.append = appending  # type: ignore[method-assign]
    story.tracker._decisions.to_store.append(encode_released(ORDERS, 2, "billing", 1))
    await story.tracker._store_what_is_due()
    await story.tracker._store_what_is_due()
    assert stored[1:] == [later]


def recorded(story: Story) -> set[str]:
    return set(story.state.view.groups.groups)


async def test_gated_record_is_kept_half_an_hour_longer(story: Story) -> None:
    """A member that has been silent since has less than the coordinator assigned, and may return by any process."""
    story.kafka.commits = {P0: 5}
    assert await story.queries_to_send(P1) == {P1}
    assert recorded(story) == {"billing"}

    story.kafka.commits[P0] = 10
    for _ in range(29):
        await story.probes()
        story.clock.passed += 60.0
    assert recorded(story) == {"billing"}
    story.clock.passed += 60.0
    await story.probes()

    assert not recorded(story)
    assert "billing" not in story.watch.groups
    assert not story.tracker.waiting()


async def test_gating_again_restarts_the_half_hour(story: Story) -> None:
    """The group is reset before its end."""
    story.kafka.commits = {P0: 5}
    await story.queries_to_send(P1)
    story.kafka.commits[P0] = 10
    await story.probes()
    story.clock.passed += 29 * 60.0
    story.kafka.commits[P0] = 5
    assert await story.queries_to_send(P1) == {P1}
    story.clock.passed += 2 * 60.0
    story.kafka.commits[P0] = 10
    await story.probes()

    assert recorded(story) == {"billing"}


async def test_groups_inactive_for_a_day_are_removed(story: Story) -> None:
    await story.queries_to_send(P1)
    now_ms, day_ms = int(story.clock.time() * 1000), 86_400_000
    for group, at_ms in (("old", now_ms - day_ms - 1000), ("younger", now_ms - day_ms + 60_000)):
        story.state.append_now([encode_gated(group, [P1], story.ids, at_ms)])
    story.tracker.refresh()

    await story.tracker._tidy(story.clock.monotonic())
    assert recorded(story) == {"billing", "younger"}

    story.clock.passed += 2 * 86_400
    story.watch.groups["billing"].active_at = story.clock.monotonic() - 1
    await story.tracker._tidy(story.clock.monotonic())
    assert recorded(story) == {"billing"}
