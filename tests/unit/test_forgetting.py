"""The state topic's records of a topic are removed once the topic is deleted, and not earlier."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.config import Limits
from fencepost_proxy.expansion.gated import encode_released
from fencepost_proxy.expansion.history import Expansion, encode_expansion, encode_failed, encode_partition_count
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services import expansions
from fencepost_proxy.services.expansions import Expansions
from tests.unit import test_group_progress as group_progress
from tests.unit.test_group_progress import Clock

OLD, NEW = UUID(int=7), UUID(int=8)
MINUTE = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(expansions, "time", clock)
    return clock


class State(group_progress.State):
    """`orders` was expanded from 1 to 2 partitions."""

    fresh, process, names = True, UUID(int=2), frozenset({UUID(int=2)})

    def __init__(self) -> None:
        super().__init__()
        self.expand("orders", OLD, 1, 2, 10)

    @property
    def heartbeats(self) -> State:
        return self

    def live(self, now: float) -> frozenset[UUID]:
        return frozenset()

    def may_append(self, now: float) -> frozenset[UUID]:
        return frozenset()


class Metadata:
    """`shows` – the topic as metadata has it."""

    def __init__(self) -> None:
        self.shows: UUID | None = OLD
        self.refreshed = 0

    async def refresh(self, topics: Any, **_: Any) -> None:
        self.refreshed += 1

    def topic(self, name: str) -> Any:
        if self.shows is None:
            return None
        return SimpleNamespace(name=name, topic_id=self.shows, partition_count=2)


def _expansions(state: State, metadata: Metadata, tasks: list[asyncio.Task[None]]) -> Expansions:
    return Expansions(
        state,  # type: ignore[arg-type]
        Limits(),
        metadata=metadata,  # type: ignore[arg-type]
        topics=SimpleNamespace(),  # type: ignore[arg-type]
        producers=SimpleNamespace(),  # type: ignore[arg-type]
        log_ends=SimpleNamespace(),  # type: ignore[arg-type]
        barriers=SimpleNamespace(open_barrier=None),  # type: ignore[arg-type]
        metrics=Metrics(),
        spawn=lambda work, name: tasks.append(asyncio.get_running_loop().create_task(work)),
    )


async def _maintained(state: State, metadata: Metadata) -> None:
    """By housekeeping, for an hour."""
    tasks: list[asyncio.Task[None]] = []
    kept = _expansions(state, metadata, tasks)
    kept.start()
    clock = expansions.time
    assert isinstance(clock, Clock)
    for _ in range(61):
        kept.maintain([])
        await asyncio.gather(*tasks)
        tasks.clear()
        clock.passed += MINUTE


def _known(state: State) -> bool:
    return state.view.history("orders", OLD).count is not None


async def test_replaced_topic_keeps_only_its_checks_after_hour(clock: Clock) -> None:
    state, metadata = State(), Metadata()
    state.append_now([encode_released(OLD, 2, "billing", 5), encode_partition_count("orders", NEW, 3)])
    metadata.shows = NEW

    await _maintained(state, metadata)

    assert metadata.refreshed == 1, "not without another query"
    assert not _known(state)
    assert state.view.configs_set_on("orders", NEW) == {"fencepost.ordered.partition.expansion": "true"}
    assert not state.view.groups.released(OLD, 2, "billing")
    assert state.view.history("orders", NEW).count == 3


@pytest.mark.parametrize("shown", [OLD, None], ids=["there", "not shown"])
async def test_present_or_merely_hidden_topic_is_kept(clock: Clock, shown: UUID | None) -> None:
    """Without DESCRIBE on it, thresholds and configs must stay."""
    state, metadata = State(), Metadata()
    metadata.shows = shown

    await _maintained(state, metadata)

    assert _known(state)
    assert state.view.configs_set_on("orders", OLD)


async def test_lagging_broker_causes_no_removal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker sometimes shows the topic's predecessor; before the removal it is queried again."""
    state, metadata = State(), Metadata()
    shown = iter([NEW, NEW, OLD] * 100)
    monkeypatch.setattr(
        metadata,
        "topic",
        lambda name: SimpleNamespace(name=name, topic_id=next(shown), partition_count=2),
    )
    await _maintained(state, metadata)
    assert _known(state)

    monkeypatch.undo()
    monkeypatch.setattr(expansions, "time", clock)
    metadata.shows = NEW

    async def refreshes(*_: Any, **__: Any) -> None:
        metadata.shows = OLD

    monkeypatch.setattr(metadata, "refresh", refreshes)
    await _maintained(state, metadata)
    assert _known(state)


async def test_expanding_topic_is_not_forgotten(clock: Clock) -> None:
    """Its driver finds out that the topic was replaced."""
    state, metadata = State(), Metadata()
    metadata.shows = NEW
    pending = Expansion("orders", OLD, 2, 4, UUID(int=9), 0, process=UUID(int=99))
    kept = _expansions(state, metadata, [])
    state.append_now([encode_expansion(pending)])

    await kept._counts._forget("orders", OLD)
    assert _known(state)

    state.append_now([encode_failed(pending, UUID(int=10), reason="deleted", at_ms=2)])
    await kept._counts._forget("orders", OLD)
    assert not _known(state)
