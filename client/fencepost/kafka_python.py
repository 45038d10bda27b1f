"""Conditional publish with kafka-python 3."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

try:
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
    from kafka.admin import ConfigResource, ConfigResourceType
    from kafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError, RetriableError, UnknownError
    from kafka.future import Future
except ModuleNotFoundError as error:
    raise ImportError("fencepost.kafka_python needs kafka-python: pip install 'kafka-python>=3,<4'") from error

from fencepost._appending import Append, Appended, MaybeAppended, Refused, Reply
from fencepost._checks import BlockingChecks, CheckCache, TopicFacts
from fencepost._idempotence import Idempotence, configured
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, BlockingLogWriter
from fencepost._ordered_consumer import OrderedReads
from fencepost._ordering import Waiting
from fencepost._partitioning import (
    INVALID_PARTITIONS,
    OrderedSends,
    Partitioner,
    Send,
    TopicSends,
    murmur2,
    refuse_configs,
)
from fencepost._reading import BlockingLogReader
from fencepost._refusals import refusal, verify
from fencepost._steps import CannotRead, run
from fencepost._transaction import COMMIT_REFUSED, FENCED, Part, explained
from fencepost._transactional_writer import BlockingTransactionalWriter, CommitInDoubt
from fencepost.errors import OffsetMismatch, PartitionRequired, WriterFenced
from fencepost.records import (
    CHECK_CONFIG,
    COUNT_CHECK_CONFIG,
    HeaderNames,
    LogRecord,
    Record,
    conditional_headers,
    new_write_id,
)
from fencepost.retries import RetryPolicy

__all__ = [
    "ConditionalFuture",
    "ConditionalProducer",
    "LogReader",
    "LogWriter",
    "OrderedConsumer",
    "OrderedProducer",
    "TransactionalWriter",
    "describe_topic",
]

#: Longest wait of a batch for `flush`; long, so that the library never splits a batch on a timer.
_LINGER_MS = 300_000
_POLL_MS = 500
_PAUSE_SECONDS = 0.1
_FOREVER_SECONDS = 10.0**9
_FETCH_WAIT_MS = 10
#: Retry backoff of an append that waits for another writer's transaction.
_RETRY_BACKOFF_MS = 20
_ERROR_CODE = re.compile(r"\[Error (\d+)\]")


def _checks_of(ttl_seconds: float, configs: Mapping[str, Any], check: str = CHECK_CONFIG) -> BlockingChecks:
    admin_configs = {k: v for k, v in configs.items() if k in KafkaAdminClient.DEFAULT_CONFIG}
    return BlockingChecks(
        CheckCache(ttl_seconds, config=check),
        lambda: KafkaAdminClient(**admin_configs),
        describe_topic,
        lambda admin: admin.close(),
    )


class ConditionalFuture(Future):  # type: ignore[misc]
    """The result of a conditional `send`: fails with OffsetMismatch if refused, else yields RecordMetadata."""

    def __init__(self, inner: Any, topic: str, partition: int, expected: int) -> None:
        super().__init__()
        self._inner = inner
        self._where = (topic, partition, expected)
        inner.add_callback(self._appended).add_errback(self._failed)

    def _appended(self, metadata: Any) -> None:
        try:
            verify(*self._where, metadata.offset)
        except Exception as error:
            self.failure(error)
        else:
            self.success(metadata)

    def _failed(self, error: Exception) -> None:
        ours = None
        if isinstance(error, BrokerResponseError):
            message = error.args[0] if error.args else None
            ours = refusal(*self._where, code=error.errno, message=message)
        if ours is not None:
            ours.__cause__ = error
        self.failure(ours or error)

    def get(self, timeout: float | None = None) -> Any:
        """RecordMetadata. Waits up to `timeout` seconds; raises KafkaTimeoutError or the error of the send."""
        try:
            self._inner.get(timeout)
        except Exception:
            if not self.is_done:
                raise
        if self.exception is not None:
            raise self.exception
        return self.value


class ConditionalProducer(KafkaProducer):  # type: ignore[misc]
    """KafkaProducer whose `send` takes `expected_offset`. All else is KafkaProducer's.

    Defaults that differ from KafkaProducer's:

    - `enable_idempotence=False`. True raises ValueError: an idempotent producer of kafka-python 3 is unusable after its
      first refusal. Transactions work, because a refused transaction can be aborted;
    - `max_in_flight_requests_per_connection=1`: otherwise later batches overtake a retried batch and are refused.

    `idempotence`: `"off"` or `"safe"`, which is the same here; `"required"` raises ValueError. `check_ttl_seconds`: how
    long a topic's check config is cached. `acks=0` raises ValueError, because the producer would not receive refusals.
    """

    def __init__(
        self,
        *,
        check_ttl_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        idempotence: Idempotence | None = None,
        **configs: Any,
    ) -> None:
        configs |= configured(idempotence, configs, "enable_idempotence", possible=False)
        if configs.get("acks") == 0:
            raise ValueError("acks=0 cannot be used with expected offsets: the producer would not receive refusals")
        self._header_names = header_names
        self._checks = _checks_of(check_ttl_seconds, configs)
        if configs.get("transactional_id") is None and configs.setdefault("enable_idempotence", False):
            # A refusal would also fail all other records in flight, appended or not.
            raise ValueError(
                "enable_idempotence=True cannot be used with expected offsets: an idempotent producer of kafka-python "
                "is unusable after its first refusal (leave it off: an expected offset already prevents duplicates)"
            )
        configs.setdefault("max_in_flight_requests_per_connection", 1)
        super().__init__(**configs)

    def send(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        *,
        expected_offset: int | None = None,
        write_id: bytes | None = None,
    ) -> Any:
        """KafkaProducer.send; with `expected_offset`, the record is appended at that offset or not at all.

        The future fails with OffsetMismatch if the log ends at another offset. The records of one batch are accepted or
        refused together; those without `expected_offset` then fail with PolicyViolationError. `write_id`: identifies
        this write, 16 random bytes by default. To repeat a send with an unknown outcome, pass the same `write_id` and
        the same record. Raises CheckIsOff, PartitionRequired, ValueError.
        """
        if expected_offset is None:
            return super().send(topic, value, key, headers, partition, timestamp_ms)
        if partition is None:
            raise PartitionRequired("expected_offset= needs partition= (offsets are per partition)")
        headers = conditional_headers(self._header_names, headers or [], expected_offset, write_id or new_write_id())
        self._checks.require(topic)
        future = super().send(topic, value, key, headers, partition, timestamp_ms)
        return ConditionalFuture(future, topic, partition, expected_offset)

    def close(self, timeout: float | None = None, null_logger: bool = False) -> None:
        if not hasattr(self, "config"):
            return  # __del__ of a producer whose __init__ raised
        super().close(timeout, null_logger)
        self._checks.close()


class LogWriter(BlockingLogWriter):
    """Reads one partition to its end, then appends batches, each only if the log still ends there (KIP-27).

    Reads committed records only. `configs`: kafka-python's connection settings (`bootstrap_servers`,
    `security_protocol`, …) for producer, consumer and admin client. `batch_bytes_max`: bytes, uncompressed. See
    docs/client.md.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        compression_type: str | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        batch_bytes_max: int = DEFAULT_BATCH_BYTES_MAX,
        check_ttl_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        consumer = _CommittedConsumer(retry.attempt_seconds, configs)
        consumer.start()
        producer_configs = {
            **configs,
            "compression_type": compression_type,
            "header_names": header_names,
            "batch_size": batch_bytes_max,
            # One send per attempt: a read of the log decides whether to send again.
            "retries": 0,
        }
        appender = _Appender(producer_configs, _checks_of(check_ttl_seconds, configs), retry.attempt_seconds)
        super().__init__(topic, partition, appender, consumer, retry, header_names, batch_bytes_max)


class _Sender:
    """Sends one batch at a time with a producer that can be discarded."""

    error = KafkaError

    def __init__(self, configs: Mapping[str, Any], checks: BlockingChecks, attempt_seconds: float) -> None:
        self._checks = checks
        self._attempt_seconds = attempt_seconds
        self._timeout_ms = int(attempt_seconds * 1000)
        self._producer: Any = None
        self._configs: dict[str, Any] = {
            **configs,
            "linger_ms": _LINGER_MS,
            "delivery_timeout_ms": _LINGER_MS + 2 * self._timeout_ms,
            "max_block_ms": self._timeout_ms,
        }

    def require(self, topic: str) -> TopicFacts:
        return self._checks.require(topic)

    def _open(self) -> Any:
        if self._producer is None:
            self._producer = ConditionalProducer(**self._configs)
            self._producer._checks = self._checks  # one admin client for all producers
        return self._producer

    def _sent(
        self, topic: str, partition: int, records: Sequence[Record], expected: int | None, write_id: bytes
    ) -> list[Any]:
        """The futures of `records`, after a flush."""
        futures = [
            self._producer.send(
                topic,
                record.value,
                record.key,
                list(record.headers),
                partition,
                record.timestamp_ms,
                expected_offset=None if expected is None else expected + index,
                write_id=write_id,
            )
            for index, record in enumerate(records)
        ]
        self._producer.flush(self._attempt_seconds)
        return futures

    def discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # close() waits for pending records without a limit; no public method drops them.
            producer._sender.force_close()
            KafkaProducer.close(producer)

    def close(self) -> None:
        self.discard()
        self._checks.close()


class _Appender(_Sender):
    def send(self, append: Append) -> Reply:
        done = False
        try:
            self._open()
            futures = self._sent(append.topic, append.partition, append.records, append.expected, append.write_id)
            done = True
            offsets = [future.get(0).offset for future in futures]
            return Appended(offsets[0])
        except OffsetMismatch as error:
            return Refused(error)
        except (RetriableError, UnknownError) as error:
            return MaybeAppended(error)
        finally:
            if not done:
                self.discard()  # drops its buffered records: a later flush must not send them


class _CommittedConsumer:
    error = KafkaError
    timeout_error = KafkaTimeoutError

    def __init__(self, attempt_seconds: float, configs: Mapping[str, Any]) -> None:
        self._timeout_ms = int(attempt_seconds * 1000)
        self._configs = {
            "fetch_max_wait_ms": _FETCH_WAIT_MS,  # a read never waits for future records
            **{k: v for k, v in configs.items() if k in KafkaConsumer.DEFAULT_CONFIG},
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
        }
        self._consumer: Any = None

    def start(self) -> None:
        if self._consumer is None:
            self._consumer = KafkaConsumer(**self._configs)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        tp = TopicPartition(topic, partition)
        self.start()
        start = self._consumer.beginning_offsets([tp], self._timeout_ms)[tp]
        return start, self._consumer.end_offsets([tp], self._timeout_ms)[tp]

    def seek(self, topic: str, partition: int, offset: int) -> None:
        tp = TopicPartition(topic, partition)
        if self._consumer.assignment() != {tp}:
            self._consumer.assign([tp])
        self._consumer.seek(tp, offset)

    def poll(self) -> tuple[list[LogRecord], int | None]:
        (tp,) = self._consumer.assignment()
        records = [
            LogRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
            for record in self._consumer.poll(_POLL_MS).get(tp, [])
        ]
        return records, self._consumer.position(tp, _POLL_MS)

    def pause(self) -> None:
        """Nothing is fetched between polls."""

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


class LogReader(BlockingLogReader):
    """Reads the committed records of several partitions, and returns the expected offset of each. See docs/client.md.

    `partitions`: (topic, partition) tuples or TopicPartitions. `configs`: kafka-python's consumer settings.
    """

    def __init__(
        self,
        partitions: Iterable[Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        timeout_ms = int(retry.attempt_seconds * 1000)
        configs.setdefault("request_timeout_ms", timeout_ms)
        configs.setdefault("bootstrap_timeout_ms", timeout_ms)
        super().__init__(partitions, _CommittedConsumer(retry.attempt_seconds, configs), retry)


class TransactionalWriter(BlockingTransactionalWriter):
    """Appends to several partitions in one transaction, each at its expected offset: all or nothing (KIP-27, KIP-98).

    `configs`: kafka-python's connection settings for producer, consumer and admin client.
    `transaction_timeout_seconds`: the coordinator aborts an open transaction after this time. A send, commit or abort
    takes up to `retry.attempt_seconds`, finding an unknown outcome up to `retry.total_seconds`. See docs/client.md.
    """

    def __init__(
        self,
        transactional_id: str,
        *,
        compression_type: str | None = None,
        transaction_timeout_seconds: float = 60.0,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        check_ttl_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        timeout_ms = int(retry.attempt_seconds * 1000)
        configs.setdefault("request_timeout_ms", timeout_ms)
        configs.setdefault("bootstrap_timeout_ms", timeout_ms)
        producer_configs = {
            **configs,
            "transactional_id": transactional_id,
            "transaction_timeout_ms": int(transaction_timeout_seconds * 1000),
            "compression_type": compression_type,
            "header_names": header_names,
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
        }
        super().__init__(
            transactional_id,
            _Transaction(producer_configs, _checks_of(check_ttl_seconds, configs), retry.attempt_seconds),
            _CommittedConsumer(retry.attempt_seconds, configs),
            retry,
            header_names,
        )


class _Transaction(_Sender):
    def open(self) -> None:
        try:
            self._open().init_transactions()
        except KafkaError as error:
            self.discard()
            if isinstance(error, RetriableError):
                raise CannotRead from error
            raise

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, part: Part, write_id: bytes) -> int:
        try:
            futures = self._sent(part.topic, part.partition, part.records, part.expected, write_id)
            offsets = [int(future.get(0).offset) for future in futures]
            return offsets[0]
        except Exception as error:
            code = error.errno if isinstance(error, BrokerResponseError) else None
            message = str(error.args[0]) if error.args and code is not None else None
            retriable = isinstance(error, RetriableError | UnknownError)
            why = explained(part, error, code=code, message=message, retriable=retriable, transactional_id=self._id)
            raise why from (None if why is error else error)

    def commit(self) -> None:
        # Not commit_transaction(), which has no timeout.
        ended = self._producer._transaction_manager.begin_commit()
        self._producer._sender.wakeup()
        try:
            if not ended.wait(self._timeout_ms):
                raise CommitInDoubt from KafkaTimeoutError(f"no response within {self._attempt_seconds:g} s")
        except BrokerResponseError as error:
            if error.errno in FENCED:
                raise WriterFenced(self._id) from error
            raise CommitInDoubt from error
        except KafkaError as error:
            # Most errors arrive as text only, and make the producer unusable.
            code = _ERROR_CODE.search(str(error))
            raise CommitInDoubt(refused=code is not None and int(code[1]) in COMMIT_REFUSED) from error

    def abort(self) -> bool:
        aborted = self._producer._transaction_manager.begin_abort()
        self._producer._sender.wakeup()
        return bool(aborted.wait(self._timeout_ms))

    @property
    def _id(self) -> str:
        return str(self._configs["transactional_id"])


class OrderedFuture(Future):  # type: ignore[misc]
    """The result of `OrderedProducer.send`. Done when the record is appended, in whichever partition."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()
        self.add_both(lambda _: self._done.set())

    def get(self, timeout: float | None = None) -> Any:
        """RecordMetadata. Waits up to `timeout` seconds; raises KafkaTimeoutError or the error of the send."""
        if not self._done.wait(timeout):
            raise KafkaTimeoutError(f"no outcome within {timeout} s: the record may still be appended")
        if self.exception is not None:
            raise self.exception
        return self.value


class OrderedProducer(KafkaProducer):  # type: ignore[misc]
    """KafkaProducer that keeps each key in order across expansions of its topic (KIP-253). See docs/client.md.

    Each record carries the partition count that chose its partition. If the topic has more partitions, the proxy
    refuses the record, and this producer repartitions it, in the order of `send`.

    `partitioner`: (key, partition count) → partition; default: the Java client's.
    `repartition_timeout_seconds`: how long a record may be refused before it fails with PartitionCountChanged.
    `buffered_max`: how many records may be queued meanwhile; then `send` blocks.

    Defaults that differ from KafkaProducer's: `enable_idempotence=False` (an idempotent producer of kafka-python 3 is
    unusable after its first refusal) and `max_in_flight_requests_per_connection=1` (otherwise later batches overtake a
    retried batch). `acks=0`, idempotence and transactions raise ValueError.
    """

    def __init__(
        self,
        *,
        partitioner: Partitioner = murmur2,
        repartition_timeout_seconds: float = 120.0,
        buffered_max: int = 10_000,
        check_ttl_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        idempotence: Idempotence | None = None,
        **configs: Any,
    ) -> None:
        configs |= configured(idempotence, configs, "enable_idempotence", possible=False)
        refuse_configs(
            acks=configs.get("acks", "all"),
            idempotent=bool(configs.setdefault("enable_idempotence", False)),
            transactional=configs.get("transactional_id") is not None,
            idempotence="an idempotent producer of kafka-python is unusable after its first refusal (leave it off)",
        )
        configs.setdefault("max_in_flight_requests_per_connection", 1)
        self._serializers = configs.pop("key_serializer", None), configs.pop("value_serializer", None)
        self._sends = OrderedSends(partitioner, header_names, repartition_timeout_seconds, buffered_max)
        self._checks = _checks_of(check_ttl_seconds, configs, COUNT_CHECK_CONFIG)
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

        Raises CheckIsOff, ValueError; the future fails with PartitionCountChanged.
        """
        headers = self._sends.checked(headers)
        self._checks.require(topic)
        key_bytes = _serialized(self._serializers[0], topic, headers, key)
        value_bytes = _serialized(self._serializers[1], topic, headers, value)
        if topic not in self._sends.topics:
            count = len(self.partitions_for(topic))
            with self._changed:
                self._sends.add(topic, count)
        sends, future = self._sends.topics[topic], OrderedFuture()
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


def describe_topic(admin: Any, topic: str) -> dict[str, str | None]:
    """A topic's configs {name: value}, read with a KafkaAdminClient; empty if they are not visible."""
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    found = admin.describe_configs([resource], config_filter="all").get("topic", {}).get(topic, {})
    return {name: config["value"] for name, config in found.items()}


class OrderedConsumer(KafkaConsumer):  # type: ignore[misc]
    """KafkaConsumer that reads topics without joining a group, and keeps keys in order across expansions (KIP-253).

    `poll` and iteration work as in KafkaConsumer. A partition that an expansion added is assigned after all
    prior partitions are read up to their thresholds. Records returned by an earlier call count as read. See
    docs/client.md.

    `partition_filter(partition)`: whether this consumer reads a partition, also a future one; default all. Processes
    that share topics need the same `group_id` and must commit. `positions`: {TopicPartition: offset} to start at, for
    applications that store offsets themselves. Other partitions start at the group's committed offsets or by
    `auto_offset_reset`. `refresh_seconds`: interval of checks for expansions and other processes' commits. Raises
    CheckIsOff, ValueError.
    """

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
            )
            run(self._reads.start())
        except BaseException:
            self.close(autocommit=False)
            raise

    def waiting(self) -> dict[TopicPartition, Waiting]:
        """The gated partitions, and what each waits for: {TopicPartition: Waiting}."""
        return {TopicPartition(*where): waits for where, waits in self._reads.waiting().items()}

    def poll(self, timeout_ms: float = 0, max_records: int | None = None, update_offsets: bool = True) -> Any:
        """KafkaConsumer.poll. Also raises KafkaError if the topic's expansions cannot be read."""
        poll = super().poll
        return run(
            self._reads.fetch(
                max(0.0, timeout_ms / 1000), lambda seconds: poll(seconds * 1000, max_records, update_offsets)
            )
        )

    def subscribe(self, *_: Any, **__: Any) -> None:
        """Raises TypeError: a group coordinator would assign gated partitions."""
        raise TypeError("an OrderedConsumer reads the topics of its constructor (the proxy orders groups)")

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
