"""The producer and the consumer that keep keys in order across expansions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from fencepost._idempotence import Idempotence, configured
from fencepost._ordered_consumer import OrderedConsumerBase, OrderedReads
from fencepost._partitioning import (
    INVALID_PARTITIONS,
    OrderedProducerBase,
    OrderedSends,
    Partitioner,
    Send,
    TopicSends,
    count_changed,
    crc32,
    murmur2,
    refuse_configs,
)
from fencepost._steps import run
from fencepost.confluent._producer import CALLBACKS, checks_of, describe_topic
from fencepost.errors import PartitionCountChangedError
from fencepost.records import COUNT_CHECK_CONFIG

OnDelivery = Callable[[Any, Message], None]
_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 0.1


class OrderedConsumer(OrderedConsumerBase, Consumer):
    __doc__ = OrderedConsumerBase.__doc__

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        *,
        partition_filter: Callable[[int], bool] | None = None,
        positions: Mapping[tuple[str, int], int] | None = None,
        refresh_seconds: float = 1.0,
        timeout_seconds: float = 30.0,
        **kwargs: Any,
    ) -> None:
        self._grouped = "group.id" in config
        alone = {"group.id": "fencepost-ordered-consumer", "enable.auto.commit": False}  # never joined
        # position() is after the last record: only end-of-partition events cover offsets without records after it.
        ours: dict[str, Any] = {"enable.partition.eof": True}
        self._reports_ends = str(config.get("enable.partition.eof", False)).lower() == "true"
        self._stores = self._grouped and str(config.get("enable.auto.offset.store", True)).lower() == "true"
        if self._stores:
            ours["enable.auto.offset.store"] = False  # stored here, to cover offsets without records after the last one
        super().__init__({**({} if self._grouped else alone), **config, **ours}, **kwargs)
        #: {(topic, partition): offset after the last record returned, and after offsets without records}.
        self._read: dict[tuple[str, int], int] = {}
        consumers_own = ("group.", "partition.assignment.", "session.", "heartbeat.", "auto.offset.", "enable.auto.")
        admin = AdminClient({k: v for k, v in config.items() if k not in CALLBACKS and not k.startswith(consumers_own)})
        latest = config.get("auto.offset.reset", "largest") in ("largest", "latest", "end")
        self._reads = OrderedReads(
            topics,
            _Assignment(self, admin, self._read, OFFSET_END if latest else OFFSET_BEGINNING, timeout_seconds),
            partition_filter=partition_filter,
            given=positions,
            grouped=self._grouped,
            latest=latest,
            refresh_seconds=refresh_seconds,
        )
        try:
            run(self._reads.start())
        except BaseException:
            super().close()
            raise

    def poll(self, timeout: float | None = -1) -> Message | None:
        """Consumer.poll. Also raises KafkaException if the topic's expansions cannot be read."""
        return next(iter(self._get(timeout, lambda seconds: [super(OrderedConsumer, self).poll(seconds)])), None)

    def consume(self, num_messages: int = 1, timeout: float | None = -1) -> list[Message]:
        """Consumer.consume; may return early with fewer messages."""
        return self._get(timeout, lambda seconds: super(OrderedConsumer, self).consume(num_messages, seconds))

    def commit(self, *, asynchronous: bool = True, **what: Any) -> Any:
        """Consumer.commit; without arguments, commits everything read, and offsets after the last record that hold no
        records (transaction markers)."""
        if not what:
            what["offsets"] = [TopicPartition(topic, partition, at) for (topic, partition), at in self._read.items()]
        return super().commit(asynchronous=asynchronous, **what)  # type: ignore[call-overload]

    def seek(self, partition: TopicPartition) -> None:
        super().seek(partition)
        if partition.offset >= 0:
            self._read[partition.topic, partition.partition] = partition.offset

    def _get(self, timeout: float | None, query: Callable[[float], Sequence[Message | None]]) -> list[Message]:
        def records(seconds: float) -> list[Message]:
            return [message for message in query(seconds) if message is not None and self._record(message)]

        return run(self._reads.fetch(timeout, records))

    def _record(self, message: Message) -> bool:
        """Record the position. False for an end-of-partition event that the application did not enable."""
        error, topic, partition, offset = message.error(), message.topic(), message.partition(), message.offset()
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            assert topic is not None
            assert partition is not None
            assert offset is not None
            position = offset + 1 if error is None else max(offset, self._read.get((topic, partition), 0))
            moved = self._read.get((topic, partition)) != position
            self._read[topic, partition] = position
            if moved and self._stores:
                self.store_offsets(offsets=[TopicPartition(topic, partition, position)])
        return error is None or error.code() != KafkaError._PARTITION_EOF or self._reports_ends


class _Assignment:
    """`read`: the consumer's positions; `reset`: where a partition without a known offset starts."""

    def __init__(
        self,
        consumer: Consumer,
        admin: AdminClient,
        read: dict[tuple[str, int], int],
        reset: int,
        timeout_seconds: float,
    ) -> None:
        self._consumer = consumer
        self._admin = admin
        self._read = read
        self._reset = reset
        self._timeout_seconds = timeout_seconds

    def describe(self, topic: str) -> tuple[int, dict[str, str | None]]:
        count = len(self._admin.list_topics(topic, self._timeout_seconds).topics[topic].partitions)
        return count, describe_topic(self._admin, topic, self._timeout_seconds)

    def committed(self, topic: str, partitions: Collection[int]) -> dict[int, int | None]:
        query = [TopicPartition(topic, p) for p in partitions]
        known: dict[int, int | None] = {}
        for tp in self._consumer.committed(query, timeout=self._timeout_seconds):
            if tp.error is not None:
                raise KafkaException(tp.error)
            known[tp.partition] = tp.offset if tp.offset >= 0 else None
        return known

    def log_starts(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        return {p: self._bounds(topic, p)[0] for p in partitions}

    def earliest(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, OFFSET_BEGINNING)

    def log_ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        return {p: self._bounds(topic, p)[1] for p in partitions}

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        bounds = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=self._timeout_seconds)
        if bounds is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return bounds

    def position(self, topic: str, partition: int) -> int | None:
        return self._read.get((topic, partition))

    def assign(self, topic: str, starts: Mapping[int, int | None], opened: Collection[tuple[str, int]]) -> None:
        self._consumer.incremental_assign(
            [TopicPartition(topic, p, self._reset if at is None else at) for p, at in sorted(starts.items())]
        )
        self._read.update({(topic, p): at for p, at in starts.items() if at is not None and at >= 0})


class OrderedProducer(OrderedProducerBase, Producer):
    __doc__ = OrderedProducerBase.__doc__

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        partitioner: Partitioner | None = None,
        repartition_timeout_seconds: float = 120.0,
        buffered_max: int = 10_000,
        check_ttl_seconds: float = 30.0,
        check_timeout_seconds: float = 30.0,
        idempotence: Idempotence | None = None,
        **kwargs: Any,
    ) -> None:
        """Records are repartitioned during `poll` and `flush`. The default is `enable.idempotence=true`, so that
        retries keep their order. `acks=0` and transactions raise ValueError."""
        config = {**config, **configured(idempotence, config, "enable.idempotence", possible=True)}
        refuse_configs(
            acks=config.get("acks", config.get("request.required.acks", "all")),
            idempotent=True,
            transactional="transactional.id" in config,
        )
        named = config.get("partitioner", "consistent_random")
        if partitioner is None and named not in _PARTITIONERS:
            raise ValueError(
                f"partitioner={named!r} is not supported (pass partitioner=, or set one of {', '.join(_PARTITIONERS)})"
            )
        super().__init__({"enable.idempotence": True, **config}, **kwargs)
        self._sends = OrderedSends(partitioner or _PARTITIONERS[named], repartition_timeout_seconds, buffered_max)
        self._sends.reason += " (on_delivery gets no message)"
        self._repartition_timeout_seconds = repartition_timeout_seconds
        self._timeout_seconds = check_timeout_seconds
        self._default_delivery: OnDelivery | None = config.get("on_delivery")
        self._checks = checks_of(check_ttl_seconds, config, check_timeout_seconds, COUNT_CHECK_CONFIG)
        self._lock = threading.RLock()
        self._query_at = 0.0

    def produce(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        callback: OnDelivery | None = None,
        on_delivery: OnDelivery | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Producer.produce. A record with `partition` is never repartitioned.

        The call blocks while it reads the topic configs: the first time for a topic, then every `check_ttl_seconds`.
        Raises CheckIsOffError, ValueError, BufferError.
        """
        given = self._sends.checked(headers.items() if isinstance(headers, Mapping) else headers)
        self._sends.cluster_id = self._checks.require(topic).cluster_id
        deliver = on_delivery or callback or self._default_delivery
        key = key.encode() if isinstance(key, str) else key
        with self._lock:
            if topic not in self._sends.topics:
                self._sends.add(topic, self._count(topic))
            if self._sends.is_full(topic):
                raise BufferError(
                    f"{self._sends.buffered_max} records are queued until the partition count of {topic!r} is known "
                    "(call poll())"
                )
            sends = self._sends.topics[topic]
            chosen = partition if partition >= 0 else None
            send = self._sends.new(topic, key, value, given, chosen, timestamp, deliver)
            if sends.submit(send):
                try:
                    self._forward(sends, send)
                except BaseException:
                    sends.ended(send)
                    raise

    def poll(self, timeout: float = -1) -> int:
        """Producer.poll; also repartitions refused records."""
        deadline = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            events = super().poll(left)
            self._resend_refused()
            if events or (deadline is not None and time.monotonic() >= deadline):
                return events

    def flush(self, timeout: float = -1) -> int:
        """Producer.flush, including records to repartition."""
        deadline = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            super().flush(left)
            self._resend_refused()
            if not len(self) or (deadline is not None and time.monotonic() >= deadline):
                return len(self)

    def close(self) -> bool:
        self.flush(self._repartition_timeout_seconds)
        closed = super().close()
        self._checks.close()
        return closed

    def __len__(self) -> int:
        with self._lock:
            in_flight = sum(len(sends.in_flight) for sends in self._sends.topics.values())
            return super().__len__() + len(self._sends) - in_flight

    def _count(self, topic: str) -> int:
        return len(self.list_topics(topic, self._timeout_seconds).topics[topic].partitions)

    def _forward(self, sends: TopicSends, send: Send) -> None:
        def delivered(err: KafkaError | None, msg: Message) -> None:
            with self._lock:
                if err is not None and err.code() in _COUNT_REFUSED:
                    sends.refuse(send)
                    return
                sends.ended(send)
            if send.outcome is not None:
                send.outcome(err, msg)

        super().produce(
            send.topic,
            send.value,
            send.key,
            -1 if send.chosen_partition is None else send.chosen_partition,
            on_delivery=delivered,
            timestamp=send.timestamp_ms,
            headers=self._sends.headers(send),
        )

    def _resend_refused(self) -> None:
        with self._lock:
            late: list[tuple[Send, PartitionCountChangedError]] = []
            for topic, sends in self._sends.topics.items():
                if sends.drained and time.monotonic() >= self._query_at:
                    count = 0
                    with contextlib.suppress(KafkaException):
                        count = self._count(topic)
                    late += self._sends.update_count(topic, count)
                    if sends.stale:
                        self._query_at = time.monotonic() + _PAUSE_SECONDS
                while (again := sends.next()) is not None:
                    try:
                        self._forward(sends, again)
                    except (BufferError, KafkaException) as error:
                        sends.put_back(again)
                        if isinstance(error, BufferError) or error.args[0].code() == KafkaError._UNKNOWN_PARTITION:
                            break  # at the next poll
                        sends.queue.popleft()
                        late.append((again, count_changed(again, sends.count, self._sends.reason)))
        for send, late_error in late:
            if send.outcome is not None:
                send.outcome(late_error, None)


#: librdkafka setting `partitioner` → partitioner.
_PARTITIONERS: dict[str, Partitioner] = {
    "consistent": crc32,
    "consistent_random": crc32,
    "murmur2": murmur2,
    "murmur2_random": murmur2,
}
#: Not appended: refused by the proxy, or by librdkafka because it does not know the partition yet.
_COUNT_REFUSED = frozenset({INVALID_PARTITIONS, KafkaError._UNKNOWN_PARTITION})
