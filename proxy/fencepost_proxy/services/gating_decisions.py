"""Decides which new partitions of a group are gated, from its commits and the logs.

The Kafka client needs DESCRIBE on these groups and topics, and READ on the topics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster.groups import ConsumerGroups
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import FencepostError
from fencepost_proxy.expansion.gated import encode_released
from fencepost_proxy.expansion.gating import Decision, Progress, Why, brought_by, decide
from fencepost_proxy.expansion.history import Expansion
from fencepost_proxy.expansion.offset_lookups import OffsetLookups
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services.expanded_topics import ExpandedTopics
from fencepost_proxy.services.group_stories import GroupStories
from fencepost_proxy.services.unread_records import UnreadRecords
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.state_records import StateRecord

_log = logs.get("services.gating_decisions")

_QUERY_SECONDS: Final = 5.0


class GatingDecisions:
    """`to_store`: records of timed-out gatings, not stored yet."""

    def __init__(
        self,
        topics: ExpandedTopics,
        stories: GroupStories,
        limits: Limits,
        metrics: Metrics,
        *,
        groups: ConsumerGroups,
        unread: UnreadRecords,
        lookups: OffsetLookups,
    ) -> None:
        self._topics = topics
        self._stories = stories
        self._limits = limits
        self._metrics = metrics
        self._groups = groups
        self._unread = unread
        self._lookups = lookups
        self.to_store: list[StateRecord] = []

    async def commits(self, group: str, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        requested = sorted(set(partitions))
        if not requested:
            return {}
        return await self._groups.committed_offsets(group, requested, timeout_seconds=_QUERY_SECONDS)

    async def decide(
        self, group: str, partitions: Iterable[TopicPartition], seconds: float
    ) -> tuple[dict[TopicPartition, Decision], dict[TopicPartition, Exception]]:
        """Gated partitions with decisions, and partitions whose lookup failed with reasons.

        Topics are independent: a deleted, leaderless or unauthorized topic does not affect partitions of the others.
        """
        topics: dict[str, list[TopicPartition]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition)

        async def of_topic(queried: list[TopicPartition]) -> dict[TopicPartition, Decision]:
            async with asyncio.timeout(seconds):
                return await self._of_topic(group, queried)

        answers = await asyncio.gather(*map(of_topic, topics.values()), return_exceptions=True)
        gated: dict[TopicPartition, Decision] = {}
        failed: dict[TopicPartition, Exception] = {}
        for queried, answer in zip(topics.values(), answers, strict=True):
            if isinstance(answer, FencepostError | TimeoutError):
                failed |= dict.fromkeys(queried, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                gated |= answer
        return gated, failed

    async def _of_topic(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Decision]:
        """Gated partitions of one topic. Raises `UpstreamUnavailable`."""
        gated: dict[TopicPartition, Decision] = {}
        queried: dict[TopicPartition, Expansion] = {}
        for partition in partitions:
            brought = brought_by(self._topics.history(partition.topic), partition.partition)
            if isinstance(brought, Why):
                gated[partition] = Decision(brought)
            elif brought is not None and not self._let_go(group, partition, brought):
                queried[partition] = brought
        if not queried:
            return gated
        prior_partitions = {
            TopicPartition(each.topic, prior_partition)
            for each, by in queried.items()
            for prior_partition in by.prior_partitions
        }
        commits = await self.commits(group, prior_partitions | queried.keys())
        lagging = [
            prior_partition
            for prior_partition in prior_partitions
            if self._is_lagging(prior_partition, commits, queried.values())
        ]
        if lagging:  # otherwise nothing is gated, wherever the logs start
            lagging += [each for each in queried if commits.get(each, 0) > 0 and each not in lagging]
        starts = await self._unread.log_starts(next(iter(queried.values())).topic_id, lagging)
        for partition, expansion in queried.items():
            decision = await self._decide_one(group, partition, expansion, commits, starts)
            if decision.why is not None:
                gated[partition] = decision
        return gated

    def _let_go(self, group: str, partition: TopicPartition, expansion: Expansion) -> bool:
        """Whether an operator or a timeout stopped gating, whatever the group committed."""
        story = self._stories.get(group)
        timed_out = story is not None and (expansion.topic_id, partition) in story.timed_out
        return timed_out or self._topics.view.groups.released(expansion.topic_id, expansion.to_count, group)

    @staticmethod
    def _is_lagging(
        prior_partition: TopicPartition, commits: Mapping[TopicPartition, int], expansions: Iterable[Expansion]
    ) -> bool:
        return any(
            prior_partition.topic == each.topic
            and prior_partition.partition < each.from_count
            and commits.get(prior_partition, 0) < each.thresholds[prior_partition.partition]
            for each in expansions
        )

    async def _decide_one(
        self,
        group: str,
        partition: TopicPartition,
        expansion: Expansion,
        commits: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
    ) -> Decision:
        topic = partition.topic
        progress = Progress(
            commits={each.partition: offset for each, offset in commits.items() if each.topic == topic},
            log_starts={each.partition: offset for each, offset in starts.items() if each.topic == topic},
            passed=self._passed(group, partition, expansion),
        )
        while True:
            decision = decide(expansion, partition.partition, progress, self._unread.known(expansion))
            if not decision.searches:
                return self._after_waiting(group, partition, expansion, decision)
            for search in decision.searches:
                await self._unread.search(expansion, topic, search)

    def _passed(self, group: str, partition: TopicPartition, expansion: Expansion) -> frozenset[int]:
        """Prior partitions without a commit that a member started reading at the end, so none of them is awaited."""
        story = self._stories.get(group)
        if story is None:
            return frozenset()
        return frozenset(
            prior_partition
            for prior_partition in expansion.prior_partitions
            if any(
                self._lookups.began_at_end(each, TopicPartition(partition.topic, prior_partition))
                for each in story.clients
            )
        )

    def _after_waiting(
        self, group: str, partition: TopicPartition, expansion: Expansion, decision: Decision
    ) -> Decision:
        """Bound the wait for a group that commits nothing, or nothing further.

        The limit does not apply while a prior partition is itself gated. Example: a topic is expanded from 1 to 2 to 4
        partitions, and a group lags in the first one for an hour. It then gets the second one, without commits on it.
        """
        story, created_partitions, now = self._stories.get(group), (expansion.topic_id, partition), time.monotonic()
        if story is None:
            return decision
        lacks_prior_partitions = any(
            TopicPartition(partition.topic, wait.prior_partition) in story.since for wait in decision.waits
        )
        if decision.why is None or lacks_prior_partitions:
            story.idle_since.pop(created_partitions, None)
            return decision
        commits = {wait.prior_partition: wait.position if wait.committed else -1 for wait in decision.waits}
        before, since = story.idle_since.get(created_partitions, (commits, now))
        if commits != before:
            since = now
        story.idle_since[created_partitions] = commits, since
        has_committed = max(commits.values(), default=-1) >= 0
        limit = "gated_without_progress_seconds" if has_committed else "gated_without_commit_seconds"
        if now - since < getattr(self._limits, limit):
            return decision
        story.timed_out.add(created_partitions)
        # Stored for all processes, or each rebalance would restart the wait.
        now_ms = int(time.time() * 1000)
        self.to_store.append(encode_released(expansion.topic_id, expansion.to_count, group, now_ms))
        self._metrics.partitions_timed_out.inc()
        _log.warning(
            "gating timed out: the group committed nothing further on prior partitions within the limit, and may read "
            "records of a key out of order",
            group=group,
            partition=partition,
            commits=commits,
            limit=f"limits.{limit}",
        )
        return Decision()

    def release_unobserved(self, group: str, partitions: Iterable[TopicPartition], now: float) -> None:
        """Without authorization the group's progress is unknown: it waits like a group without commits."""
        story = self._stories.of(group)
        for partition in partitions:
            since = story.since.setdefault(partition, now)
            brought = brought_by(self._topics.history(partition.topic), partition.partition)
            if not isinstance(brought, Expansion):
                continue
            created_partitions = brought.topic_id, partition
            if created_partitions in story.timed_out or now - since < self._limits.gated_without_commit_seconds:
                continue
            story.timed_out.add(created_partitions)
            self._metrics.partitions_timed_out.inc()
            _log.error(
                "gating timed out: the group's progress is unknown, because the proxy is not authorized (its "
                "principal needs DESCRIBE on groups and topics, and READ on topics with ordered expansion)",
                group=group,
                partition=partition,
            )
