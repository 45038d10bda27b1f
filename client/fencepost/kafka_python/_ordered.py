"""The producer and the consumer that keep keys in order across expansions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError

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
from fencepost._steps import run
from fencepost.kafka_python._producer import SendFuture, checks_of, describe_topic
from fencepost.records import COUNT_CHECK_CONFIG

_PAUSE_SECONDS = 0.1
_FOREVER_SECONDS = 10.0**9


class OrderedProducer(OrderedProducerBase, KafkaProducer):  # type: ignore[misc]
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
        """Defaults that differ from KafkaProducer's: `enable_idempotence=False` (an idempotent producer of kafka-python
        3 is unusable after its first refusal) and `max_in_flight_requests_per_connection=1` (otherwise later batches
        overtake a retried batch). `acks=0`, idempotence and transactions raise ValueError."""
        configs |= configured(idempotence, configs, "enable_idempotence", possible=False)
        refuse_configs(
            acks=configs.get("acks", "all"),
            idempotent=bool(configs.setdefault("enable_idempotence", False)),
            transactional=configs.get("transactional_id") is not None,
            idempotence="an idempotent producer of kafka-python is unusable after its first refusal (leave it off)",
        )
        configs.setdefault("max_in_flight_requests_per_connection", 1)
        self._serializers = configs.pop("key_serializer", None), configs.pop("value_serializer", None)
        self._sends = OrderedSends(partitioner, repartition_timeout_seconds, buffered_max)
        self._checks = checks_of(check_ttl_seconds, configs, COUNT_CHECK_CONFIG)
        #: Guards the state; never locked during a blocking call.
        self._changed = threading.Condition()
        #: Serializes calls of the library, so that records are sent in the order of their numbers.
        self._forwarding = threading.RLock()
        self._resender: threading.Thread | None = None
        self._ending = False
        super().__init__(**configs)

    def send(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Any:
        """KafkaProducer.send. A record with `partition` is never repartitioned.

        Raises CheckIsOffError, ValueError; the future fails with PartitionCountChangedError.
        """
        headers = self._sends.checked(headers)
        self._sends.cluster_id = self._checks.require(topic).cluster_id
        key_bytes = _serialized(self._serializers[0], topic, headers, key)
        value_bytes = _serialized(self._serializers[1], topic, headers, value)
        if topic not in self._sends.topics:
            count = len(self.partitions_for(topic))
            with self._changed:
                self._sends.add(topic, count)
        sends, future = self._sends.topics[topic], SendFuture()
        self._wait_for_space(topic)
        with self._forwarding:
            with self._changed:
                send = self._sends.new(topic, key_bytes, value_bytes, headers, partition, timestamp_ms, future)
                direct = sends.submit(send)
            if direct:
                try:
                    self._forward(sends, send)
                except BaseException:
                    self._ended(sends, send)
                    raise
        return future

    def flush(self, timeout: float | None = None) -> None:
        """KafkaProducer.flush, including records to repartition."""
        deadline = time.monotonic() + (_FOREVER_SECONDS if timeout is None else timeout)
        while True:
            super().flush(max(0.0, deadline - time.monotonic()))
            with self._changed:
                if not len(self._sends):
                    return
                if time.monotonic() >= deadline:
                    raise KafkaTimeoutError(f"flush timed out after {timeout} s: some records are not appended")
                self._changed.wait(_PAUSE_SECONDS)

    def close(self, timeout: float | None = None, null_logger: bool = False) -> None:
        if not hasattr(self, "config"):
            return  # __del__ of a producer whose __init__ raised
        if not self._ending:
            with contextlib.suppress(KafkaTimeoutError):
                if len(self._sends):
                    self.flush(timeout)
            with self._changed:
                self._ending = True
                self._changed.notify_all()
        super().close(timeout, null_logger)
        if self._resender is not None:
            self._resender.join()
        with self._changed:
            left = self._sends.give_up()
        for send, error in left:
            send.outcome.failure(error)
        self._checks.close()

    def _wait_for_space(self, topic: str) -> None:
        deadline = time.monotonic() + self.config["max_block_ms"] / 1000
        with self._changed:
            while self._sends.is_full(topic):
                if time.monotonic() >= deadline:
                    raise KafkaTimeoutError(
                        f"{self._sends.buffered_max} records are queued until the topic's partition count is known"
                    )
                self._changed.wait(_PAUSE_SECONDS)

    def _forward(self, sends: TopicSends, send: Send) -> None:
        inner = super().send(
            send.topic, send.value, send.key, self._sends.headers(send), send.chosen_partition, send.timestamp_ms
        )
        inner.add_callback(lambda metadata: self._appended(sends, send, metadata))
        inner.add_errback(lambda error: self._failed(sends, send, error))

    def _appended(self, sends: TopicSends, send: Send, metadata: Any) -> None:
        self._ended(sends, send)
        send.outcome.success(metadata)

    def _failed(self, sends: TopicSends, send: Send, error: Exception) -> None:
        if not (isinstance(error, BrokerResponseError) and error.errno == INVALID_PARTITIONS):
            self._ended(sends, send)
            send.outcome.failure(error)
            return
        with self._changed:
            sends.refuse(send, str(error.args[0]) if error.args else None)
            if self._resender is None and not self._ending:
                name = "fencepost-repartitioner"
                self._resender = threading.Thread(target=self._resend_refused, name=name, daemon=True)
                self._resender.start()
            self._changed.notify_all()

    def _ended(self, sends: TopicSends, send: Send) -> None:
        with self._changed:
            sends.ended(send)
            self._changed.notify_all()

    def _resend_refused(self) -> None:
        """Runs in its own thread: the library's I/O thread runs the callbacks, which must not block."""
        while True:
            with self._changed:
                while not (stale := self._sends.drained):
                    if self._ending:
                        return
                    self._changed.wait(_PAUSE_SECONDS)
            for topic in stale:
                self._repartition(topic, self._sends.topics[topic])

    def _repartition(self, topic: str, sends: TopicSends) -> None:
        self._metadata.request_update()
        with contextlib.suppress(KafkaError):
            count = len(self.partitions_for(topic))
            with self._changed:
                late = self._sends.update_count(topic, count)
            for send, error in late:
                send.outcome.failure(error)
        if sends.stale:
            time.sleep(_PAUSE_SECONDS)
            return
        with self._forwarding:
            while True:
                with self._changed:
                    send_next = sends.next()
                    self._changed.notify_all()
                if send_next is None:
                    return
                try:
                    self._forward(sends, send_next)
                except Exception as error:
                    self._ended(sends, send_next)
                    send_next.outcome.failure(error)


def _serialized(serializer: Any, topic: str, headers: list[tuple[str, bytes]], data: Any) -> Any:
    if serializer is None:
        return data
    if hasattr(serializer, "serialize"):
        return serializer.serialize(topic, headers, data)
    return serializer(data)


class OrderedConsumer(OrderedConsumerBase, KafkaConsumer):  # type: ignore[misc]
    __doc__ = OrderedConsumerBase.__doc__

    def __init__(
        self,
        *topics: str,
        partition_filter: Callable[[int], bool] | None = None,
        positions: Mapping[TopicPartition, int] | None = None,
        refresh_seconds: float = 1.0,
        **configs: Any,
    ) -> None:
        self._admin: Any = None
        super().__init__(**configs)
        try:
            self._admin = KafkaAdminClient(**{k: v for k, v in configs.items() if k in KafkaAdminClient.DEFAULT_CONFIG})
            self._reads = OrderedReads(
                topics,
                _Assignment(self, self._admin),
                partition_filter=partition_filter,
                given=positions,
                grouped=self.config["group_id"] is not None,
                latest=self.config["auto_offset_reset"] == "latest",
                refresh_seconds=refresh_seconds,
                key=TopicPartition,
            )
            run(self._reads.start())
        except BaseException:
            self.close(autocommit=False)
            raise

    def poll(self, timeout_ms: float = 0, max_records: int | None = None, update_offsets: bool = True) -> Any:
        """KafkaConsumer.poll. Also raises KafkaError if the topic's expansions cannot be read."""
        poll = super().poll
        return run(
            self._reads.fetch(
                max(0.0, timeout_ms / 1000), lambda seconds: poll(seconds * 1000, max_records, update_offsets)
            )
        )

    def close(self, *args: Any, **kwargs: Any) -> None:
        super().close(*args, **kwargs)
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()


class _Assignment:
    def __init__(self, consumer: KafkaConsumer, admin: KafkaAdminClient) -> None:
        self._consumer = consumer
        self._admin = admin

    def describe(self, topic: str) -> tuple[int, dict[str, str | None]]:
        (described,) = self._admin.describe_topics([topic])
        return len(described["partitions"]), describe_topic(self._admin, topic)

    def committed(self, topic: str, partitions: Collection[int]) -> dict[int, int | None]:
        found = {p: self._consumer.committed(TopicPartition(topic, p)) for p in partitions}
        return {p: None if offset is None or offset < 0 else offset for p, offset in found.items()}

    def log_starts(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        found = self._consumer.beginning_offsets([TopicPartition(topic, p) for p in partitions])
        return {tp.partition: offset for tp, offset in found.items()}

    earliest = log_starts

    def log_ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        found = self._consumer.end_offsets([TopicPartition(topic, p) for p in partitions])
        return {tp.partition: offset for tp, offset in found.items()}

    def position(self, topic: str, partition: int) -> int | None:
        # Not position(), which waits for an unknown position.
        state = self._consumer._subscription.assignment.get(TopicPartition(topic, partition))
        position = None if state is None else state.position
        return None if position is None else int(position.offset)

    def assign(self, topic: str, starts: Mapping[int, int | None], opened: Collection[tuple[str, int]]) -> None:
        self._consumer.assign([TopicPartition(*where) for where in opened])
        for partition, offset in starts.items():
            if offset is not None:
                self._consumer.seek(TopicPartition(topic, partition), offset)
