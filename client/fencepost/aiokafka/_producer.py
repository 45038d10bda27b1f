"""The producer with expected offsets, and reads of topic configs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import BrokerResponseError, KafkaError, for_code

from fencepost._checks import CheckCache, TopicFacts
from fencepost._idempotence import Idempotence, configured
from fencepost._ordering import PartitionExpansion, expansions_of
from fencepost._refusals import POLICY_VIOLATION, refusal, verify
from fencepost.errors import FencepostError, PartitionRequiredError
from fencepost.records import CHECK_CONFIG, binding_of, conditional_headers, new_write_id, unstated_headers

#: ListOffsets returns the high watermark, which may lag the log end offset that caused the refusal.
_LOG_END_TRIES = 5
_LOG_END_PAUSE_SECONDS = 0.05
#: DescribeConfigs errors that mean "not visible" rather than "retry": unknown topic, not authorized.
NOT_VISIBLE = frozenset({3, 29})


def only(client: type, configs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `configs` that the constructor of `client` accepts."""
    known = inspect.signature(client).parameters
    return {name: value for name, value in configs.items() if name in known and name != "loop"}


async def started(client: Any, stop: str = "stop") -> Any:
    """`client`, after `start`, or stopped again."""
    try:
        await client.start()
    except BaseException:
        await getattr(client, stop)()
        raise
    return client


async def describe_topic(admin: Any, topic: str) -> dict[str, str | None]:
    """A topic's configs {name: value}, read with an AIOKafkaAdminClient; empty if they are not visible."""
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, None)])
    code, message, _, _, entries = response.resources[0]
    if code in NOT_VISIBLE:
        return {}
    if code:
        raise for_code(code)(message)
    return {entry[0]: entry[1] for entry in entries}


async def read_expansions(admin: Any, topic: str) -> tuple[PartitionExpansion, ...]:
    """See `fencepost.partition_expansions`."""
    return expansions_of(topic, await describe_topic(admin, topic))


class TopicChecks:
    """Checked topics, read through its own admin client."""

    def __init__(self, ttl_seconds: float, configs: Mapping[str, Any], check: str = CHECK_CONFIG) -> None:
        self._cache = CheckCache(ttl_seconds, config=check)
        self._configs = only(AIOKafkaAdminClient, configs)
        self._admin: Any = None
        self._lock = asyncio.Lock()

    @property
    def cluster_id(self) -> str | None:
        """Of Kafka; None before `require`."""
        return self._cache.cluster_id

    async def require(self, topic: str) -> TopicFacts:
        """The facts of a checked topic. Raises CheckIsOffError, or KafkaError if the configs cannot be read."""
        facts = self._cache.get(topic)
        if facts is not None:
            return facts
        async with self._lock:
            facts = self._cache.get(topic)
            return facts if facts is not None else self._cache.learn(topic, await self._describe(topic))

    async def _describe(self, topic: str) -> dict[str, str | None]:
        if self._admin is None:
            self._admin = await started(AIOKafkaAdminClient(**self._configs), "close")
        if self._cache.cluster_id is None:
            self._cache.cluster_id = (await self._admin.describe_cluster()).get("cluster_id")
        return await describe_topic(self._admin, topic)

    async def close(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()


class ConditionalProducer(AIOKafkaProducer):  # type: ignore[misc]
    """AIOKafkaProducer whose `send` and `send_and_wait` take `expected_offset`. All else is AIOKafkaProducer's.

    The default is `acks="all"`, which the proxy uses for every conditional append anyway. `acks=0` raises ValueError,
    because the producer would not receive refusals. `check_ttl_seconds`: how long a topic's check config is cached.
    """

    def __init__(
        self,
        *,
        check_ttl_seconds: float = 30.0,
        idempotence: Idempotence | None = None,
        **configs: Any,
    ) -> None:
        configs |= configured(idempotence, configs, "enable_idempotence", possible=True)
        if configs.get("acks") == 0:
            raise ValueError("acks=0 cannot be used with expected offsets: the producer would not receive refusals")
        configs.setdefault("acks", "all")
        super().__init__(**configs)
        self._checks = TopicChecks(check_ttl_seconds, configs)
        self._reader_configs = only(AIOKafkaConsumer, configs)
        self._reader: Any = None
        self._reader_lock = asyncio.Lock()
        self._outcomes: set[asyncio.Task[Any]] = set()

    async def send(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        *,
        expected_offset: int | None = None,
        write_id: bytes | None = None,
    ) -> asyncio.Future[Any]:
        """AIOKafkaProducer.send; with `expected_offset`, the record is appended at that offset or not at all.

        The future raises OffsetMismatchError if the log ends at another offset. The records of one batch are accepted
        or refused together; those without `expected_offset` then raise PolicyViolationError. `write_id`: identifies
        this write, 16 random bytes by default. To repeat a send with an unknown outcome, pass the same `write_id` and
        the same record. Raises CheckIsOffError, PartitionRequiredError, ValueError.
        """
        if expected_offset is None:
            unchecked: asyncio.Future[Any] = await super().send(topic, value, key, partition, timestamp_ms, headers)
            return unchecked
        if partition is None:
            raise PartitionRequiredError("expected_offset= needs partition= (offsets are per partition)")
        given = unstated_headers(headers or (), expected_offset)
        where = binding_of(topic, partition, (await self._checks.require(topic)).cluster_id)
        headers = conditional_headers(given, expected_offset, write_id or new_write_id(), where)
        future = await super().send(topic, value, key, partition, timestamp_ms, headers)
        outcome = asyncio.create_task(self._outcome(future, topic, partition, expected_offset))
        self._outcomes.add(outcome)
        outcome.add_done_callback(self._outcomes.discard)
        return outcome

    async def send_and_wait(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        *,
        expected_offset: int | None = None,
        write_id: bytes | None = None,
    ) -> Any:
        """`send`, then wait for the outcome: RecordMetadata."""
        future = await self.send(
            topic,
            value,
            key,
            partition,
            timestamp_ms,
            headers,
            expected_offset=expected_offset,
            write_id=write_id,
        )
        return await future

    async def stop(self) -> None:
        await super().stop()
        if self._outcomes:  # some may still read the log end offset
            await asyncio.wait(self._outcomes)
        await self._checks.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.stop()

    async def _outcome(self, future: asyncio.Future[Any], topic: str, partition: int, expected: int) -> Any:
        try:
            # As in aiokafka, cancelling the caller's future does not cancel the record.
            metadata = await asyncio.shield(future)
        except BrokerResponseError as error:
            ours = await self._refusal(error, topic, partition, expected)
            if ours is None:
                raise
            raise ours from error
        verify(topic, partition, expected, metadata.offset)
        return metadata

    async def _refusal(
        self, error: BrokerResponseError, topic: str, partition: int, expected: int
    ) -> FencepostError | None:
        if error.errno != POLICY_VIOLATION:
            return None
        # aiokafka uses Produce v7, which has no message, and drops the offset: read the log end offset.
        end = await self._log_end(TopicPartition(topic, partition), expected)
        return refusal(topic, partition, expected, code=error.errno, message=None, log_end=end)

    async def _log_end(self, tp: TopicPartition, expected: int) -> int | None:
        try:
            async with self._reader_lock:
                if self._reader is None:
                    self._reader = await started(AIOKafkaConsumer(**self._reader_configs, enable_auto_commit=False))
            end: int | None = None
            for _ in range(_LOG_END_TRIES):
                end = (await self._reader.end_offsets([tp]))[tp]
                if end != expected:
                    break
                await asyncio.sleep(_LOG_END_PAUSE_SECONDS)
            return end  # if equal to `expected`: another record of the batch was refused
        except KafkaError:
            return None  # the refusal is valid without it
