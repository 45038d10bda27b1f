"""Partition counts in the state topic: stores those that changed without the proxy, forgets replaced topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid4

from fencepost_proxy import logs
from fencepost_proxy.cluster.metadata import TopicInfo
from fencepost_proxy.cluster.metadata_cache import MetadataCache
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.errors import FencepostError
from fencepost_proxy.expansion.history import Expansion, encode_expansion, encode_partition_count
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services.expansion_effects import QUERY_SECONDS

_log = logs.get("services.partition_counts")
_limited_log = logs.RateLimitedLog(_log)

#: How long a topic name must have another id, so that no broker still reports the old one.
_REPLACED_SECONDS: Final = 3600.0


class PartitionCounts:
    """`open_barrier`: opens a topic's append barrier with a new count."""

    def __init__(
        self,
        state: StateTopic,
        metadata: MetadataCache,
        metrics: Metrics,
        spawn: Spawn,
        open_barrier: Callable[[str, int], None],
    ) -> None:
        self._state = state
        self._metadata = metadata
        self._metrics = metrics
        self._spawn = spawn
        self._open_barrier = open_barrier
        self._busy: set[UUID] = set()
        self._replaced_since: dict[UUID, float] = {}  # incarnations that metadata shows as replaced

    def maintain(self, count_checked: Iterable[str], now: float) -> None:
        """`count_checked`: known topics with partition-count checks."""
        for topic in count_checked:
            info = self._metadata.topic(topic)
            if info is None:
                continue
            history = self._state.view.history(topic, info.topic_id)
            if history.pending is None and (history.count is None or info.partition_count > history.count):
                self._once(info.topic_id, partial(self._count, info), f"count {topic}")
        self._detect_replaced(now)

    def _detect_replaced(self, now: float) -> None:
        """Forget records of topics that were deleted and created again without the proxy.

        A topic that is merely not visible keeps its records: the proxy may lack authorization temporarily, and the
        thresholds could not be restored. Configs are always kept: the new topic inherits the checks.
        """
        there = {}
        for topic_id, topic in self._state.view.expansions.incarnations.items():
            info = self._metadata.topic(topic)
            if info is not None and info.topic_id != topic_id:
                there[topic_id] = self._replaced_since.get(topic_id, now)
                if now - there[topic_id] >= _REPLACED_SECONDS:
                    self._once(topic_id, partial(self._forget, topic, topic_id), f"forget {topic}")
        self._replaced_since = there

    def _once(self, topic_id: UUID, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        if topic_id in self._busy:
            return
        self._busy.add(topic_id)

        async def run() -> None:
            try:
                await work()
            finally:
                self._busy.discard(topic_id)

        self._spawn(run(), name)

    async def _forget(self, topic: str, topic_id: UUID) -> None:
        view = self._state.view
        try:
            await self._metadata.refresh([topic], timeout_seconds=QUERY_SECONDS)
            info = self._metadata.topic(topic)
            if info is None or info.topic_id == topic_id or view.history(topic, topic_id).pending is not None:
                return
            await self._state.append(view.forget_but_configs(topic_id))
            _log.info("records of a replaced topic forgotten", topic=topic, topic_id=topic_id)
        except FencepostError as error:
            _limited_log.warning("forget", "failed to forget records of a replaced topic", topic=topic, reason=error)

    async def _count(self, info: TopicInfo) -> None:
        try:
            await self.record(info)
        except FencepostError as error:
            _limited_log.warning("count", "failed to store a partition count", topic=info.name, reason=error)

    async def record(self, info: TopicInfo) -> None:
        """Store a new partition count. Raises `UpstreamUnavailable`, `StateError`."""
        history = self._state.view.history(info.name, info.topic_id)
        if history.pending is not None:
            return
        if history.count is None:
            await self._state.append([encode_partition_count(info.name, info.topic_id, info.partition_count)])
        elif info.partition_count > history.count:
            at_ms = int(time.time() * 1000)
            unordered = Expansion(
                info.name, info.topic_id, history.count, info.partition_count, uuid4(), at_ms, unordered=True
            )
            await self._state.append([encode_expansion(unordered)])
            if self._state.view.history(info.name, info.topic_id).ended(unordered.proposal) is None:
                return  # another process stored it, or it was an expansion
            _log.error(
                "UNORDERED_EXPANSION: partitions were added without the proxy, key order is lost across this expansion",
                topic=info.name,
                was=history.count,
                partitions=info.partition_count,
            )
            self._metrics.expansions.inc("unordered")
            self._open_barrier(info.name, info.partition_count)
