"""What a process remembers of one group with gated partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from fencepost_proxy.expansion.gating import Decision, Wait
from fencepost_proxy.expansion.offset_lookups import Client
from fencepost_proxy.types import TopicPartition

#: A new partition of one incarnation of a topic.
_CreatedPartition = tuple[UUID, TopicPartition]
#: Commits on prior partitions; -1 for none.
_Commits = dict[int, int]


@dataclass(slots=True)
class GroupStory:
    """Per group: gated partitions with start times, progress, and its members' clients.

    `idle_since`: for a gated partition whose prior partitions are all assigned: commits there, and since when they have
    not advanced. `silent`: no member sent a request here recently.
    """

    since: dict[TopicPartition, float] = field(default_factory=dict)
    idle_since: dict[_CreatedPartition, tuple[_Commits, float]] = field(default_factory=dict)
    stood: dict[TopicPartition, tuple[int, float]] = field(default_factory=dict)
    decisions: dict[TopicPartition, Decision] = field(default_factory=dict)
    clients: dict[Client, float] = field(default_factory=dict)
    timed_out: set[_CreatedPartition] = field(default_factory=set)
    free_since: float | None = None
    silent: bool = False

    def stood_seconds(self, topic: str, wait: Wait, now: float) -> float:
        """Time since the group last advanced on that prior partition."""
        position, since = self.stood.get(TopicPartition(topic, wait.prior_partition), (-1, now))
        return now - since if position == wait.position else 0.0

    def observe(self, decisions: Mapping[TopicPartition, Decision], now: float) -> None:
        """Record since when the group has not advanced on the prior partitions that it waits for."""
        waits = {
            TopicPartition(each.topic, wait.prior_partition): wait.position
            for each, decision in decisions.items()
            for wait in decision.waits
        }
        before = self.stood
        self.stood = {
            each: before[each] if each in before and before[each][0] == position else (position, now)
            for each, position in waits.items()
        }
