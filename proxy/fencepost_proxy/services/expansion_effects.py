"""What expansions need of Kafka and the state topic: carries out the effects of `expansion/procedure.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from fencepost_proxy.cluster.broker import OutcomeUnknown, UpstreamUnavailable
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.metadata_cache import MetadataCache
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import FencepostError
from fencepost_proxy.expansion import procedure as ex
from fencepost_proxy.types import TopicPartition, Transactor

_T = TypeVar("_T")

#: Timeout of one query to Kafka; the procedure retries.
QUERY_SECONDS: Final = 5.0
#: Concurrent queries to partition leaders.
_AT_ONCE: Final = 64


class ExpansionEffects:
    def __init__(
        self,
        state: StateTopic,
        limits: Limits,
        *,
        metadata: MetadataCache,
        topics: Topics,
        producers: Producers,
        log_ends: LogEnds,
    ) -> None:
        self._state = state
        self._limits = limits
        self._metadata = metadata
        self._topics = topics
        self._producers = producers
        self._log_ends = log_ends
        self._querying = asyncio.Semaphore(_AT_ONCE)

    async def answer(self, procedure: ex.Procedure, requested: ex.Effect) -> ex.Answer:
        expansion = procedure.expansion
        try:
            match requested:
                case ex.Append():
                    return await self.append(requested)
                case ex.Describe():
                    return await self._describe(expansion.topic)
                case ex.ProbeTransactions(partitions):
                    return await self.transactions(expansion.topic, partitions)
                case ex.CreatePartitions(to_count, assignments, validate_only):
                    code, message = await self._topics.create_partitions(
                        expansion.topic,
                        to_count,
                        assignments,
                        validate_only=validate_only,
                        timeout_seconds=self._limits.request_timeout_seconds,
                    )
                    return ex.Refused(code, message) if code else ex.Created()
                case ex.ReadEnds(partitions):
                    return await self._ends(expansion.topic, partitions)
        except FencepostError as error:
            return ex.Unanswered(str(error))

    async def append(self, requested: ex.Append) -> ex.Answer:
        try:
            await self._state.append(requested.records)
        except UpstreamUnavailable as error:
            return ex.NotAppended(str(error), in_doubt=isinstance(error, OutcomeUnknown))
        except FencepostError as error:
            return ex.NotAppended(str(error), in_doubt=True)
        return ex.Appended()

    async def _describe(self, topic: str) -> ex.Answer:
        await self._metadata.refresh([topic], timeout_seconds=QUERY_SECONDS)
        info = self._metadata.topic(topic)
        if topic in self._metadata.denied:
            return ex.Unanswered(f"the proxy's user may not DESCRIBE {topic}")
        if info is None:
            return ex.Described(None)
        count = info.partition_count
        leaderless = tuple(
            partition for partition in range(count) if self._metadata.leader(TopicPartition(topic, partition)) is None
        )
        return ex.Described(info.topic_id, count, leaderless)

    async def transactions(self, topic: str, partitions: Iterable[int]) -> ex.Answer:
        async def probe(partition: int) -> tuple[int, list[Transactor]]:
            async with self._querying:
                tp = TopicPartition(topic, partition)
                found = await self._producers.open_transactions(tp, timeout_seconds=QUERY_SECONDS)
                return partition, sorted((each.producer_id, each.epoch) for each in found.values())

        try:
            found = await _all(probe(partition) for partition in partitions)
        except FencepostError as error:
            return ex.Unanswered(str(error))
        return ex.TransactionsOpen({partition: producers for partition, producers in found if producers})

    async def _ends(self, topic: str, partitions: Iterable[int]) -> ex.Ends:
        async def read(partition: int) -> ex.PartitionEnd:
            async with self._querying:
                tp = TopicPartition(topic, partition)
                end = await self._log_ends.partition_end(tp, timeout_seconds=QUERY_SECONDS)
                return ex.PartitionEnd(end.log_end.leader_epoch, end.log_end.offset, end.high_watermark)

        return ex.Ends(tuple(await _all(read(partition) for partition in partitions)))


async def _all(queries: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All results; raises the first failure after all have finished."""
    answers = await asyncio.gather(*queries, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
