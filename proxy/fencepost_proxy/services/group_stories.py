"""What this process remembers of groups with gated partitions: reports changes in logs, metrics and the status page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.expansion.gating import Decision, Wait
from fencepost_proxy.expansion.group_story import GroupStory
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.status import GatedStatus
from fencepost_proxy.types import TopicPartition

_log = logs.get("services.group_stories")

_SHOWN_AS_STANDING_SECONDS: Final = 60.0


class GroupStories:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_group: dict[str, GroupStory] = {}

    def get(self, group: str) -> GroupStory | None:
        return self._by_group.get(group)

    def of(self, group: str) -> GroupStory:
        return self._by_group.setdefault(group, GroupStory())

    def forget(self, group: str) -> None:
        self._by_group.pop(group, None)

    def __len__(self) -> int:
        return len(self._by_group)

    def report(
        self, group: str, gated: Mapping[TopicPartition, Decision], queried: Iterable[TopicPartition], now: float
    ) -> None:
        """Log and count changes of a group's gated partitions."""
        story = self.of(group)
        story.silent = False
        for partition in queried:
            decision = gated.get(partition)
            if decision is None:
                since = story.since.pop(partition, None)
                story.decisions.pop(partition, None)
                if since is not None:
                    self._metrics.partitions_released.inc()
                    _log.info("gated partition assigned", group=group, partition=partition, waited=now - since)
                continue
            story.decisions[partition] = decision
            if partition not in story.since:
                story.since[partition] = now
                _log.info(
                    "new partition gated for a group",
                    group=group,
                    partition=partition,
                    reason=decision.why.value if decision.why else None,
                    records_max=decision.records_max,
                )
        self._count_gated()
        story.free_since = None if story.since else story.free_since or now

    def silence(self, group: str) -> None:
        """Stop reporting a group, which may no longer exist."""
        story = self.get(group)
        if story is not None and not story.silent:
            story.silent = True
            story.idle_since.clear()  # a group that was stopped could not commit
            self._count_gated()

    def _count_gated(self) -> None:
        reported = (len(each.since) for each in self._by_group.values() if not each.silent)
        self._metrics.partitions_gated.value = sum(reported)

    def status(self, now: float) -> list[GatedStatus]:
        return [
            GatedStatus(
                group=group,
                topic=partition.topic,
                partition=partition.partition,
                why="" if decision.why is None else decision.why.value,
                records_max=decision.records_max,
                waits=tuple(
                    _described(wait, story.stood_seconds(partition.topic, wait, now)) for wait in decision.waits
                ),
                seconds=now - story.since.get(partition, now),
            )
            for group, story in sorted(self._by_group.items())
            if not story.silent
            for partition, decision in sorted(story.decisions.items())
        ]


def _described(wait: Wait, stood_seconds: float) -> str:
    at = f"committed {wait.position}" if wait.committed else "nothing committed"
    stands = f", no further commit for {stood_seconds:.0f} s" if stood_seconds >= _SHOWN_AS_STANDING_SECONDS else ""
    return f"partition {wait.prior_partition}: {at}, threshold {wait.threshold}{stands}"
