"""The producer with expected offsets, and reads of topic configs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import BrokerResponseError, PolicyViolationError, for_code
from aiokafka.producer.sender import Sender, SendProduceReqHandler

from fencepost._checks import CheckCache, TopicFacts
from fencepost._idempotence import Idempotence, configured
from fencepost._ordering import PartitionExpansion, expansions_of
from fencepost._refusals import POLICY_VIOLATION, silent_refusal, verify
from fencepost.errors import FencepostError, PartitionRequiredError
from fencepost.records import CHECK_CONFIG, binding_of, conditional_headers, new_write_id, unstated_headers

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

    def others(self, topic: str) -> Sequence[str]:
        """The topic's other checks: see `CheckCache.others`."""
        return self._cache.others(topic)

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
        self._sender.__class__ = _Sender  # aiokafka takes no sender
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
        if self._outcomes:
            await asyncio.wait(self._outcomes)
        await self._checks.close()

    async def _outcome(self, future: asyncio.Future[Any], topic: str, partition: int, expected: int) -> Any:
        try:
            # As in aiokafka, cancelling the caller's future does not cancel the record.
            metadata = await asyncio.shield(future)
        except BrokerResponseError as error:
            ours = self._refusal(error, topic, partition, expected)
            if ours is None:
                raise
            raise ours from error
        verify(topic, partition, expected, metadata.offset)
        return metadata

    def _refusal(self, error: BrokerResponseError, topic: str, partition: int, expected: int) -> FencepostError | None:
        if not isinstance(error, _Refused):
            return None
        return silent_refusal(
            topic,
            partition,
            expected,
            base_offset=error.base_offset,
            append_time_ms=error.append_time_ms,
            transactional=self._txn_manager is not None and self._txn_manager.transactional_id is not None,
            checks=self._checks.others(topic),
        )


class _Refused(PolicyViolationError):  # type: ignore[misc]
    """`earlier`: whether the batch was sent before, so that the answer covers its last attempt only."""

    base_offset = append_time_ms = -1
    earlier = False


class _InvalidRecord(BrokerResponseError):  # type: ignore[misc]
    """To aiokafka an unknown error, and so a retriable one."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The proxy or Kafka refused the batch."


class _Sender(Sender):  # type: ignore[misc]
    async def _send_produce_req(self, node_id: Any, batches: Any) -> None:
        handler = _ProduceHandler(self, batches)
        await handler.do(node_id)
        self._in_flight.remove(node_id)
        for tp in batches:
            self._muted_partitions.remove(tp)


class _ProduceHandler(SendProduceReqHandler):  # type: ignore[misc]
    """Keeps what aiokafka drops of a refusal: offset and time. Produce v7, which it uses, has no message."""

    def handle_response(self, response: Any) -> None:
        for topic, partitions in response.topics:
            for partition, code, base_offset, append_time_ms, *_ in partitions:
                batch = self._batches.get(TopicPartition(topic, partition))
                if batch is not None and code in {POLICY_VIOLATION, _InvalidRecord.errno}:
                    refused = _InvalidRecord() if code == _InvalidRecord.errno else _Refused()
                    refused.base_offset, refused.append_time_ms = base_offset, append_time_ms
                    refused.earlier = batch.retry_count > 1  # it counts the first send
                    batch.failure(exception=refused)  # what aiokafka does next finds it done
        super().handle_response(response)
