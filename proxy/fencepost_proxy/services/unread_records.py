"""Records below an expansion's thresholds that consumers of prior partitions still have to read.

Searches logs backwards for the last consumable record, and remembers what it found. Needs READ on the topics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.fetches import Fetches
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.expansion.consumable import Aborted, consumable_below
from fencepost_proxy.expansion.gating import RemainingRecords, Search
from fencepost_proxy.expansion.history import Expansion
from fencepost_proxy.types import Bounded, Offset, TopicPartition

_QUERY_SECONDS: Final = 5.0
#: Records found in the log are searched again if a group does not advance to them: they may be deleted.
SEARCH_AGAIN_SECONDS: Final = 10.0
_LOG_START_SECONDS: Final = 5.0
_FETCH_BYTES: Final = 1_048_576
#: Rate limit of all searches for consumable records.
_SEARCH_BYTES_PER_SECOND: Final = 32_000_000
_FIRST_WINDOW: Final = 2
_WINDOW_FACTOR: Final = 32
_REMAINING_MAX: Final = 100_000
_BYTES_UNPACKED_MAX: Final = 104_857_600


@dataclass(slots=True)
class _Probed:
    """A log-end snapshot, and when it was last read."""

    remaining: RemainingRecords
    at: float


class UnreadRecords:
    """One search at a time, at a bounded rate."""

    def __init__(self, log_ends: LogEnds, fetches: Fetches) -> None:
        self._log_ends = log_ends
        self._fetches = fetches
        #: By topic id, prior partition and threshold.
        self._remaining: Bounded[tuple[UUID, int, int], _Probed] = Bounded(_REMAINING_MAX)
        self._starts: dict[tuple[UUID, TopicPartition], tuple[int, float]] = {}
        self._searching = asyncio.Lock()
        self._search_again_at = 0.0

    def known(self, expansion: Expansion) -> Mapping[int, RemainingRecords]:
        """By prior partition."""
        return {
            prior_partition: probed.remaining
            for prior_partition, threshold in enumerate(expansion.thresholds)
            if (probed := self._remaining.get((expansion.topic_id, prior_partition, threshold))) is not None
        }

    def forget_old(self, topic_id: UUID | None, prior_partition: int, now: float) -> None:
        for key, probed in list(self._remaining.items()):
            if key[:2] == (topic_id, prior_partition) and now - probed.at >= SEARCH_AGAIN_SECONDS:
                del self._remaining[key]

    def bound(self) -> None:
        if len(self._starts) > _REMAINING_MAX:
            self._starts.clear()

    async def search(self, expansion: Expansion, topic: str, search: Search) -> None:
        """Search backwards from the threshold for the last consumable record, as far as needed."""
        key = expansion.topic_id, search.prior_partition, search.threshold
        async with self._searching:
            probed = self._remaining.get(key)
            if probed is None:
                probed = self._remaining[key] = _Probed(RemainingRecords.of(search.threshold), time.monotonic())
            remaining = probed.remaining
            window = _FIRST_WINDOW
            while remaining.awaits(search.position) is None:
                start = max(search.position, remaining.searched_from - window)
                partition = TopicPartition(topic, search.prior_partition)
                remaining.found(start, await self._highest(partition, start, remaining.searched_from))
                window *= _WINDOW_FACTOR
            probed.at = time.monotonic()

    async def _highest(self, partition: TopicPartition, start: int, end: int) -> int | None:
        """The highest consumable offset in [start, end)."""
        highest: int | None = None
        offset = start
        while offset < end:
            await asyncio.sleep(max(0.0, self._search_again_at - time.monotonic()))
            fetched = await self._fetches.fetch(
                partition, Offset(offset), bytes_max=_FETCH_BYTES, committed=True, timeout_seconds=_QUERY_SECONDS
            )
            pause = len(fetched.records) / _SEARCH_BYTES_PER_SECOND
            self._search_again_at = max(self._search_again_at, time.monotonic()) + pause
            if fetched.out_of_range:
                # No records below the log start or above the log end.
                start = await self._log_ends.log_start(partition, timeout_seconds=_QUERY_SECONDS)
                if start <= offset:
                    return highest
                offset = start
                continue
            found = await asyncio.to_thread(
                consumable_below,
                end,
                memoryview(fetched.records),
                (Aborted(*each) for each in fetched.aborted),
                from_offset=offset,
                decompressed_bytes_max=_BYTES_UNPACKED_MAX,
            )
            highest = highest if found.highest is None else found.highest
            if found.next_offset is None:
                if fetched.last_stable_offset < end:
                    log_end = await self._log_ends.high_watermark(partition, timeout_seconds=_QUERY_SECONDS)
                    if fetched.last_stable_offset < min(end, log_end):
                        raise UpstreamUnavailable(f"{partition}: a transaction is open at {fetched.last_stable_offset}")
                return highest
            offset = max(found.next_offset, offset + 1)
        return highest

    async def log_starts(self, topic_id: UUID, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        now = time.monotonic()
        found = {each: self._starts[topic_id, each][0] for each in partitions if self._known_start(topic_id, each, now)}
        requested = [each for each in partitions if each not in found]
        starts = await asyncio.gather(
            *(self._log_ends.log_start(each, timeout_seconds=_QUERY_SECONDS) for each in requested)
        )
        for partition, start in zip(requested, starts, strict=True):
            self._starts[topic_id, partition] = start, now
            found[partition] = start
        return found

    def _known_start(self, topic_id: UUID, partition: TopicPartition, now: float) -> bool:
        known = self._starts.get((topic_id, partition))
        return known is not None and now - known[1] < _LOG_START_SECONDS
