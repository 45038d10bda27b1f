"""Which barriers a process keeps closed, by the expansions that it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.config import Limits
from fencepost_proxy.expansion.history import Expansion, encode_done, encode_expansion, encode_failed
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services.expansions import Expansions
from fencepost_proxy.topics.state import StateView, TopicConfigChange
from fencepost_proxy.types import LeaderEpoch, LogEndOffset
from fencepost_proxy.wire.state_records import StateRecord

OLD, NEW = UUID(int=7), UUID(int=8)
PROCESS = UUID(int=2)
BEFORE = Expansion("orders", OLD, 1, 2, UUID(int=3), 0, process=PROCESS)
AFTER = Expansion("orders", NEW, 3, 6, UUID(int=4), 0, process=PROCESS)


class Process:
    """`barriers` – the open count of each, None if closed; `stated` – all that happened to them."""

    def __init__(self) -> None:
        self.view = StateView("cluster")
        self.barriers: dict[str, int | None] = {}
        self.stated: list[str] = []
        unused: Any = SimpleNamespace()
        state = SimpleNamespace(view=self.view, heartbeats=SimpleNamespace(process=None, names=frozenset()))
        self.expansions = Expansions(
            state,  # type: ignore[arg-type]
            Limits(),
            metadata=unused,
            topics=unused,
            producers=unused,
            log_ends=unused,
            barriers=self,  # type: ignore[arg-type]
            metrics=Metrics(),
            spawn=lambda work, name: work.close(),
        )

    def close_barrier(self, topic: str, but_for: Any) -> None:
        self.barriers[topic] = None
        self.stated.append("closed")

    def open_barrier(self, topic: str, partition_count: int | None) -> None:
        self.barriers[topic] = partition_count or 0
        self.stated.append("open")

    def reads(self, *records: StateRecord) -> None:
        for record in records:
            assert self.view.apply(self.view.next_offset, record.key, record.value) is None
        self.expansions.view_changed()


@pytest.fixture
def process() -> Process:
    return Process()


def _done(expansion: Expansion) -> StateRecord:
    ends = [LogEndOffset(5)] * expansion.from_count
    epochs = [LeaderEpoch(0)] * expansion.from_count
    return encode_done(expansion, UUID(int=9), thresholds=ends, epochs=epochs, at_ms=1, blocked_ms=1)


def test_barrier_is_closed_from_intent_to_end(process: Process) -> None:
    process.reads(encode_expansion(BEFORE))
    assert process.barriers == {"orders": None}
    process.reads(_done(BEFORE))
    assert process.barriers == {"orders": 2}


@pytest.mark.parametrize("end", ["failed", "forgotten"])
def test_end_of_predecessors_expansion_opens_no_barrier(process: Process, end: str) -> None:
    """A topic was deleted at Kafka during its expansion, and its successor expands too."""
    process.reads(encode_expansion(BEFORE))
    process.reads(encode_expansion(AFTER))
    process.stated.clear()

    if end == "failed":
        process.reads(encode_failed(BEFORE, UUID(int=9), reason="the topic was deleted", at_ms=1))
    else:
        process.reads(*process.view.records_of([TopicConfigChange("orders", OLD, deleted=True)]))
    assert process.barriers == {"orders": None}
    assert "open" not in process.stated

    process.reads(_done(AFTER))
    assert process.barriers == {"orders": 6}
