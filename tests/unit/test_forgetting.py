"""What the state topic says of topics and groups is taken back once nobody needs it, and not a moment before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.config import Limits
from fencepost_proxy.groups.gating import RemainingRecords
from fencepost_proxy.groups.queries import GatedPartitions, MayHave
from fencepost_proxy.net import expansions, groups
from fencepost_proxy.net.expansions import Expansions
from fencepost_proxy.net.groups import GroupProgressTracker, _Probed
from fencepost_proxy.net.metrics import Metrics
from fencepost_proxy.topics.expansions import (
    Expansion,
    encode_done,
    encode_expansion,
    encode_failed,
    encode_partition_count,
)
from fencepost_proxy.topics.gated import encode_gated, encode_released
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.topics.state import StateView, encode_topic_config
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, TopicPartition

OLD, NEW = UUID(int=7), UUID(int=8)
GROWN = Expansion("orders", OLD, 1, 2, UUID(int=1), 0, process=UUID(int=2))
THRESHOLD = LogEndOffset(10)
BORN, PRIOR = TopicPartition("orders", 1), TopicPartition("orders", 0)
MINUTE = 60.0


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return 1_000_000.0 + self.passed

    def time(self) -> float:
        return 1_800_000_000.0 + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(groups, "time", clock)
    monkeypatch.setattr(expansions, "time", clock)
    return clock


class State:
    """A state topic that is read back at once."""

    fresh, process, names = True, UUID(int=2), frozenset({UUID(int=2)})

    def __init__(self) -> None:
        self.view = StateView("cluster")
        self.append_now(
            [
                encode_partition_count("orders", OLD, 1),
                encode_topic_config("orders", OLD, {"fencepost.ordered.partition.expansion": "true"}),
                encode_expansion(GROWN),
                encode_done(GROWN, UUID(int=3), thresholds=[THRESHOLD], epochs=[LeaderEpoch(0)], at_ms=1, blocked_ms=1),
            ]
        )

    def append_now(self, records: Iterable[StateRecord]) -> None:
        for record in records:
            assert self.view.apply(self.view.next_offset, record.key, record.value) is None

    async def append(self, records: Iterable[StateRecord], **_: Any) -> list[int]:
        self.append_now(records)
        return []

    def live(self, now: float) -> frozenset[UUID]:
        return frozenset()

    def may_append(self, now: float) -> frozenset[UUID]:
        return frozenset()


class Control:
    """`committed` – of the group, on the old partition. `shows` – the topic as metadata has it."""

    def __init__(self) -> None:
        self.committed = 5
        self.shows: UUID | None = OLD
        self.refreshed = 0

    async def committed_offsets(self, group: str, partitions: Any, **_: Any) -> Mapping[TopicPartition, int]:
        return {PRIOR: self.committed}

    async def log_start(self, partition: TopicPartition, **_: Any) -> int:
        return 0

    async def refresh_metadata(self, topics: Any, **_: Any) -> None:
        self.refreshed += 1

    def topic(self, name: str) -> Any:
        if self.shows is None:
            return None
        return SimpleNamespace(name=name, topic_id=self.shows, partition_count=2)


# --- groups -----------------------------------------------------------------------------------------------------------


class Story:
    """A group that waits for the new partition, and whose members are heard of as long as somebody asks for them."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.state, self.control = clock, State(), Control()
        self.keeper = GroupProgressTracker(
            self.control,  # type: ignore[arg-type]
            Limits(),
            configured=[],
            policy=lambda topic: TopicPolicy(ordered=True),
            topic_id=lambda topic: OLD,
            metrics=Metrics(),
        )
        self.keeper.attach(self.state)  # type: ignore[arg-type]
        self.keeper.refresh()
        remaining = RemainingRecords.of(THRESHOLD)
        remaining.found(0, 9)
        self.keeper._remaining[OLD, 0, THRESHOLD] = _Probed(remaining, clock.monotonic())

    async def queries_to_send(self) -> frozenset[TopicPartition]:
        reply = await self.keeper.answer(MayHave("billing", "client", (BORN,)), "127.0.0.1")
        assert isinstance(reply, GatedPartitions)
        return reply.partitions

    async def probes(self, *, last_observed: bool = True) -> None:
        if last_observed and "billing" in self.keeper.watch.groups:
            self.keeper.watch.groups["billing"].active_at = self.clock.monotonic()
        await self.keeper._probe("billing")
        self.keeper.refresh()

    @property
    def recorded(self) -> bool:
        return "billing" in self.state.view.groups.groups


def test_gated_record_is_kept_half_an_hour_longer(clock: Clock) -> None:
    """A member that has not asked since holds less than the coordinator thinks, whichever process it comes back by."""

    async def story() -> None:
        reported = Story(clock)
        assert await reported.queries_to_send() == {BORN}
        assert reported.recorded

        reported.control.committed = THRESHOLD
        for _ in range(29):
            await reported.probes()
            clock.passed += MINUTE
        assert reported.recorded
        clock.passed += MINUTE
        await reported.probes()

        assert not reported.recorded
        assert "billing" not in reported.keeper.watch.groups
        assert not reported.keeper.waiting()

    asyncio.run(story())


def test_gating_again_restarts_the_half_hour(clock: Clock) -> None:
    """Given a group that was set back before the end of it."""

    async def story() -> None:
        reported = Story(clock)
        await reported.queries_to_send()
        reported.control.committed = THRESHOLD
        await reported.probes()
        clock.passed += 29 * MINUTE
        reported.control.committed = 5
        assert await reported.queries_to_send() == {BORN}
        clock.passed += 2 * MINUTE
        reported.control.committed = THRESHOLD
        await reported.probes()

        assert reported.recorded

    asyncio.run(story())


def test_groups_inactive_for_a_day_are_removed(clock: Clock) -> None:
    async def story() -> None:
        reported = Story(clock)
        assert await reported.queries_to_send() == {BORN}  # this one is young, then it is heard of
        day_ms = 86_400_000
        now_ms = int(clock.time() * 1000)
        ids = {"orders": OLD}
        reported.state.append_now(
            [
                encode_gated("old", [BORN], ids, now_ms - day_ms - 1000),
                encode_gated("younger", [BORN], ids, now_ms - day_ms + 60_000),
            ]
        )
        reported.keeper.refresh()

        await reported.keeper._tidy(clock.monotonic())
        assert set(reported.state.view.groups.groups) == {"billing", "younger"}

        clock.passed += 2 * 86_400
        reported.keeper.watch.groups["billing"].active_at = clock.monotonic() - 1
        await reported.keeper._tidy(clock.monotonic())
        assert set(reported.state.view.groups.groups) == {"billing"}

    asyncio.run(story())


# --- topics -----------------------------------------------------------------------------------------------------------


def _keeper(state: State, control: Control, tasks: list[asyncio.Task[None]]) -> Expansions:
    return Expansions(
        control,  # type: ignore[arg-type]
        state,  # type: ignore[arg-type]
        Limits(),
        barriers=SimpleNamespace(),  # type: ignore[arg-type]
        metrics=Metrics(),
        spawn=lambda work, name: tasks.append(asyncio.get_running_loop().create_task(work)),
        primary=True,
    )


async def _looked_after(state: State, control: Control) -> None:
    """By housekeeping, for an hour."""
    tasks: list[asyncio.Task[None]] = []
    keeper = _keeper(state, control, tasks)
    keeper.start()
    clock = expansions.time
    assert isinstance(clock, Clock)
    for _ in range(61):
        keeper.maintain([])
        await asyncio.gather(*tasks)
        tasks.clear()
        clock.passed += MINUTE


def _known(state: State) -> bool:
    return state.view.history("orders", OLD).count is not None


def test_replaced_topic_keeps_only_its_checks_after_hour(clock: Clock) -> None:
    async def story() -> None:
        state, control = State(), Control()
        state.append_now([encode_released(OLD, 2, "billing", 5), encode_partition_count("orders", NEW, 3)])
        control.shows = NEW

        await _looked_after(state, control)

        assert control.refreshed == 1, "not without another look"
        assert not _known(state)
        assert state.view.configs_set_on("orders", NEW) == {"fencepost.ordered.partition.expansion": "true"}
        assert not state.view.groups.released(OLD, 2, "billing")
        assert state.view.history("orders", NEW).count == 3

    asyncio.run(story())


@pytest.mark.parametrize("shown", [OLD, None], ids=["there", "not shown"])
def test_present_or_merely_hidden_topic_is_kept(clock: Clock, shown: UUID | None) -> None:
    """Somebody has taken away the proxy's right to DESCRIBE it: thresholds and configs must still be there."""

    async def story() -> None:
        state, control = State(), Control()
        control.shows = shown

        await _looked_after(state, control)

        assert _known(state)
        assert state.view.configs_set_on("orders", OLD)

    asyncio.run(story())


def test_lagging_broker_causes_no_removal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the predecessor of a topic, now and then; and at the last moment it is asked once more."""

    async def story() -> None:
        state, control = State(), Control()
        shown = iter([NEW, NEW, OLD] * 100)
        monkeypatch.setattr(
            control,
            "topic",
            lambda name: SimpleNamespace(name=name, topic_id=next(shown), partition_count=2),
        )
        await _looked_after(state, control)
        assert _known(state)

        monkeypatch.undo()
        monkeypatch.setattr(expansions, "time", clock)
        control.shows = NEW

        async def refreshes(*_: Any, **__: Any) -> None:
            control.shows = OLD

        monkeypatch.setattr(control, "refresh_metadata", refreshes)
        await _looked_after(state, control)
        assert _known(state)

    asyncio.run(story())


def test_expanding_topic_is_not_forgotten(clock: Clock) -> None:
    """Who drives that finds out by himself that the topic is another one."""

    async def story() -> None:
        state, control = State(), Control()
        control.shows = NEW
        pending = Expansion("orders", OLD, 2, 4, UUID(int=9), 0, process=UUID(int=99))
        keeper = _keeper(state, control, [])
        state.append_now([encode_expansion(pending)])

        await keeper._forget("orders", OLD)
        assert _known(state)

        state.append_now([encode_failed(pending, UUID(int=10), reason="deleted", at_ms=2)])
        await keeper._forget("orders", OLD)
        assert not _known(state)

    asyncio.run(story())
