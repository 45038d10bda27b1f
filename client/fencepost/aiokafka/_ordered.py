"""The producer and the consumer that keep keys in order across expansions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import BrokerResponseError, KafkaError, for_code

from fencepost._idempotence import Idempotence, configured
from fencepost._ordered_consumer import OrderedConsumerBase, OrderedReads
from fencepost._partitioning import (
    INVALID_PARTITIONS,
    OrderedProducerBase,
    OrderedSends,
    Partitioner,
    Send,
    TopicSends,
    murmur2,
    refuse_configs,
)
from fencepost._steps import run_async
from fencepost.aiokafka._producer import NOT_VISIBLE, TopicChecks, describe_topic, only
from fencepost.records import COUNT_CHECK_CONFIG

_PAUSE_SECONDS = 0.1


class OrderedConsumer(OrderedConsumerBase, AIOKafkaConsumer):  # type: ignore[misc]
    __doc__ = OrderedConsumerBase.__doc__

    def __init__(
        self,
        *topics: str,
        partition_filter: Callable[[int], bool] | None = None,
        positions: Mapping[TopicPartition, int] | None = None,
        refresh_seconds: float = 1.0,
        **configs: Any,
    ) -> None:
        super().__init__(**configs)
        self._admin = AIOKafkaAdminClient(**only(AIOKafkaAdminClient, configs))
        self._reads = OrderedReads(
            topics,
            _Assignment(self, self._admin),
            partition_filter=partition_filter,
            given=positions,
            grouped=configs.get("group_id") is not None,
            latest=configs.get("auto_offset_reset", "latest") == "latest",
            refresh_seconds=refresh_seconds,
            key=TopicPartition,
        )
        self._refresh_seconds = refresh_seconds

    async def start(self) -> None:
        await super().start()
        await self._admin.start()
        await run_async(self._reads.start())

    async def stop(self) -> None:
        await super().stop()
        await self._admin.close()

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """AIOKafkaConsumer.getmany. Also raises KafkaError if the topic's expansions cannot be read."""
        getmany = super().getmany
        return await run_async(
            self._reads.fetch(
                max(0.0, timeout_ms / 1000),
                lambda seconds: getmany(*partitions, timeout_ms=seconds * 1000, max_records=max_records),
            )
        )

    async def getone(self, *partitions: TopicPartition) -> Any:
        """AIOKafkaConsumer.getone."""
        while True:
            found = await self.getmany(*partitions, timeout_ms=self._refresh_seconds * 1000, max_records=1)
            for records in found.values():
                return records[0]


class _Assignment:
    def __init__(self, consumer: AIOKafkaConsumer, admin: AIOKafkaAdminClient) -> None:
        self._consumer = consumer
        self._admin = admin

    async def describe(self, topic: str) -> tuple[int, dict[str, str | None]]:
        (described,) = await self._admin.describe_topics([topic])
        if described["error_code"] not in {0, *NOT_VISIBLE}:
            raise for_code(described["error_code"])(topic)
        return len(described["partitions"]), await describe_topic(self._admin, topic)

    async def committed(self, topic: str, partitions: Collection[int]) -> dict[int, int | None]:
        return {p: await self._consumer.committed(TopicPartition(topic, p)) for p in partitions}

    async def log_starts(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        found = await self._consumer.beginning_offsets([TopicPartition(topic, p) for p in partitions])
        return {tp.partition: offset for tp, offset in found.items()}

    earliest = log_starts

    async def log_ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        found = await self._consumer.end_offsets([TopicPartition(topic, p) for p in partitions])
        return {tp.partition: offset for tp, offset in found.items()}

    def position(self, topic: str, partition: int) -> int | None:
        # Not position(), which waits for an unknown position.
        tp = TopicPartition(topic, partition)
        subscription = self._consumer._subscription.subscription
        assignment = None if subscription is None else subscription.assignment
        if assignment is None or tp not in assignment.tps:
            return None
        state = assignment.state_value(tp)
        return int(state.position) if state.has_valid_position else None

    def assign(self, topic: str, starts: Mapping[int, int | None], opened: Collection[tuple[str, int]]) -> None:
        # aiokafka forgets positions and pauses at each assignment.
        offsets = {tp: self.position(*tp) for tp in self._consumer.assignment()}
        offsets |= {TopicPartition(topic, partition): offset for partition, offset in starts.items()}
        paused = self._consumer.paused()
        self._consumer.assign([TopicPartition(*where) for where in opened])
        for tp, offset in offsets.items():
            if offset is not None:
                self._consumer.seek(tp, offset)
        self._consumer.pause(*paused)


class OrderedProducer(OrderedProducerBase, AIOKafkaProducer):  # type: ignore[misc]
    __doc__ = OrderedProducerBase.__doc__

    def __init__(
        self,
        *,
        partitioner: Partitioner = murmur2,
        repartition_timeout_seconds: float = 120.0,
        buffered_max: int = 10_000,
        check_ttl_seconds: float = 30.0,
        idempotence: Idempotence | None = None,
        **configs: Any,
    ) -> None:
        """The default is `acks="all"`. `acks=0`, transactions and idempotence raise ValueError (an idempotent producer
        of aiokafka cannot append to a partition after a refusal)."""
        configs |= configured(idempotence, configs, "enable_idempotence", possible=False)
        refuse_configs(
            acks=configs.setdefault("acks", "all"),
            idempotent=bool(configs.get("enable_idempotence")),
            transactional=configs.get("transactional_id") is not None,
            idempotence="an idempotent producer of aiokafka fails on a partition after a refusal (leave it off)",
        )
        self._serializers = configs.pop("key_serializer", None), configs.pop("value_serializer", None)
        super().__init__(**configs)
        self._sends = OrderedSends(partitioner, repartition_timeout_seconds, buffered_max)
        self._checks = TopicChecks(check_ttl_seconds, configs, COUNT_CHECK_CONFIG)
        #: Serializes calls of the library, so that records are sent in the order of their numbers.
        self._forwarding = asyncio.Lock()
        self._changed = asyncio.Event()
        self._resenders: dict[str, asyncio.Task[None]] = {}
        self._outcomes: set[asyncio.Task[None]] = set()

    async def send(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
    ) -> asyncio.Future[Any]:
        """AIOKafkaProducer.send. A record with `partition` is never repartitioned.

        Raises CheckIsOffError, ValueError; the future raises PartitionCountChangedError.
        """
        given = self._sends.checked(headers)
        self._sends.cluster_id = (await self._checks.require(topic)).cluster_id
        key_serializer, value_serializer = self._serializers
        key = key if key_serializer is None else key_serializer(key)
        value = value if value_serializer is None else value_serializer(value)
        if topic not in self._sends.topics:
            self._sends.add(topic, len(await self.partitions_for(topic)))
        sends = self._sends.topics[topic]
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        while self._sends.is_full(topic):
            await self._change()
        async with self._forwarding:
            send = self._sends.new(topic, key, value, given, partition, timestamp_ms, future)
            if sends.submit(send):
                try:
                    await self._forward(sends, send)
                except BaseException:
                    sends.ended(send)
                    raise
        return future

    async def flush(self) -> None:
        """AIOKafkaProducer.flush, including records to repartition."""
        await super().flush()
        while len(self._sends):
            await self._change()

    async def stop(self) -> None:
        if not self._closed and self._sends.topics:
            await self.flush()
        await super().stop()
        for resender in self._resenders.values():
            resender.cancel()
        if running := [*self._resenders.values(), *self._outcomes]:
            await asyncio.wait(running)
        for send, error in self._sends.give_up():
            send.outcome.set_exception(error)
        await self._checks.close()

    async def _forward(self, sends: TopicSends, send: Send) -> None:
        inner = await super().send(
            send.topic, send.value, send.key, send.chosen_partition, send.timestamp_ms, self._sends.headers(send)
        )
        outcome = asyncio.create_task(self._outcome(inner, sends, send))
        self._outcomes.add(outcome)
        outcome.add_done_callback(self._outcomes.discard)

    async def _outcome(self, inner: asyncio.Future[Any], sends: TopicSends, send: Send) -> None:
        future = send.outcome
        try:
            metadata = await inner
        except KafkaError as error:
            if isinstance(error, BrokerResponseError) and error.errno == INVALID_PARTITIONS:
                sends.refuse(send)
                if send.topic not in self._resenders:
                    self._resenders[send.topic] = asyncio.create_task(self._resend_refused(send.topic, sends))
            else:
                sends.ended(send)
                if not future.done():
                    future.set_exception(error)
        else:
            sends.ended(send)
            if not future.done():
                future.set_result(metadata)
        finally:
            self._report()

    async def _resend_refused(self, topic: str, sends: TopicSends) -> None:
        while True:
            while not sends.drained:
                await self._change()
            try:
                await self.client.force_metadata_update()
                count = len(await self.partitions_for(topic))
            except KafkaError:
                await asyncio.sleep(_PAUSE_SECONDS)
                count = 0
            for send, error in self._sends.update_count(topic, count):
                if not send.outcome.done():
                    send.outcome.set_exception(error)
            self._report()
            if sends.stale:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            async with self._forwarding:
                while (again := sends.next()) is not None:
                    try:
                        await self._forward(sends, again)
                    except KafkaError as failed:
                        sends.ended(again)
                        if not again.outcome.done():
                            again.outcome.set_exception(failed)
                    self._report()

    def _report(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
