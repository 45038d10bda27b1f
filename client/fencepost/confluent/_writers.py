"""Log writers, log readers and transactional writers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented, but not in its __all__
    AdminClient,
    OffsetSpec,
)

from fencepost._appending import Append, MaybeAppended
from fencepost._checks import BlockingChecks
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, BlockingLogWriter
from fencepost._reading import BlockingLogReader
from fencepost._steps import CannotRead
from fencepost._transaction import FENCED, Part, explained
from fencepost._transactional_writer import BlockingTransactionalWriter, CommitInDoubt, CommitRefused
from fencepost.confluent._producer import CALLBACKS, ConditionalProducer, checks_of
from fencepost.errors import FencepostError, WriterFencedError
from fencepost.records import LogRecord, Record
from fencepost.retries import RetryPolicy

#: Longest wait of a batch for `flush`; long, so that the library never splits a batch on a timer.
_LINGER_MS = 300_000
_POLL_SECONDS = 0.5
_POLL_RECORDS = 500
_FETCH_WAIT_MS = 10
#: What the library may raise: see `_failure`.
_RAISED: Any = (KafkaException, KafkaError, SystemError)
#: Retry backoff of an append that waits for another writer's transaction.
_RETRY_BACKOFF_MS = 20
#: After these errors a batch may already be appended, or may still be.
_IN_DOUBT = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._PURGE_QUEUE,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.UNKNOWN,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.KAFKA_STORAGE_ERROR,
    }
)


class LogWriter(BlockingLogWriter):
    __doc__ = BlockingLogWriter.__doc__

    def __init__(
        self,
        topic: str,
        partition: int,
        config: Mapping[str, Any],
        *,
        compression_type: str = "none",
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        batch_bytes_max: int = DEFAULT_BATCH_BYTES_MAX,
        check_ttl_seconds: float = 30.0,
    ) -> None:
        producer = ConditionalProducer(
            {
                **config,
                "compression.type": compression_type,
                "batch.size": batch_bytes_max,
                "batch.num.messages": 1_000_000,
                "message.max.bytes": max(1_000_000, 2 * batch_bytes_max),
                "queue.buffering.max.messages": 1_000_000,
                # One send per attempt: a read of the log decides whether to send again.
                "retries": 0,
                "enable.idempotence": False,
                "linger.ms": _LINGER_MS,
                "message.timeout.ms": 2 * _LINGER_MS,
                "request.timeout.ms": int(retry.attempt_seconds * 1000),
            },
            check_ttl_seconds=check_ttl_seconds,
            check_timeout_seconds=retry.attempt_seconds,
        )
        consumer = _CommittedConsumer(retry.attempt_seconds, config)
        consumer.start()
        appender = _Appender(producer, retry.attempt_seconds)
        super().__init__(topic, partition, appender, consumer, retry, batch_bytes_max)


class _Delivered:
    """The outcomes of one batch, in order."""

    def __init__(self) -> None:
        self._outcomes: list[Any] = []
        self._offsets: list[int | None] = []

    def __call__(self, outcome: Any, msg: Message) -> None:
        self._outcomes.append(outcome)
        self._offsets.append(msg.offset())

    @property
    def error(self) -> Any:
        return next((outcome for outcome in self._outcomes if outcome is not None), None)

    @property
    def base_offset(self) -> int:
        assert self._offsets[0] is not None
        return self._offsets[0]


def _produce(  # noqa: PLR0917 - private
    producer: ConditionalProducer,
    topic: str,
    partition: int,
    records: Sequence[Record],
    expected: int | None,
    write_id: bytes,
) -> _Delivered:
    delivered = _Delivered()
    for index, record in enumerate(records):
        assert record.timestamp_ms is not None
        producer.produce(
            topic,
            record.value,
            record.key,
            partition,
            on_delivery=delivered,
            timestamp=record.timestamp_ms,
            headers=list(record.headers),
            expected_offset=None if expected is None else expected + index,
            write_id=write_id,
        )
    return delivered


class _Appender:
    error = KafkaException

    def __init__(self, producer: ConditionalProducer, attempt_seconds: float) -> None:
        self.require = producer._checks.require
        self._producer = producer
        self._attempt_seconds = attempt_seconds

    def send(self, append: Append) -> int:
        delivered = _produce(
            self._producer, append.topic, append.partition, append.records, append.expected, append.write_id
        )
        if self._producer.flush(self._attempt_seconds):
            self._producer.purge()
            self._producer.flush(self._attempt_seconds)
        error = delivered.error
        if error is None:
            return delivered.base_offset
        if isinstance(error, FencepostError):
            raise error
        if error.code() in _IN_DOUBT:
            raise MaybeAppended from KafkaException(error)
        raise KafkaException(error)

    def close(self) -> None:
        self._producer.close()


class _CommittedConsumer:
    error = KafkaException
    timeout_error = TimeoutError

    def __init__(self, attempt_seconds: float, config: Mapping[str, Any]) -> None:
        self._attempt_seconds = attempt_seconds
        self._admin_config = {k: v for k, v in config.items() if k not in CALLBACKS}
        self._config: dict[str, Any] = {
            # A fetch that waits for future records would delay the next partition.
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            **config,
            "group.id": "fencepost-log-writer",  # required by the library; no group is joined, nothing committed
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        self._admin: AdminClient | None = None
        self._consumer: Any = None

    def start(self) -> None:
        if self._consumer is None:
            self._consumer = Consumer(self._config)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        tp = TopicPartition(topic, partition)
        start = self._list_offset(tp, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return start, self._list_offset(tp, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def _list_offset(self, tp: TopicPartition, spec: OffsetSpec) -> int:
        if self._admin is None:
            self._admin = AdminClient(self._admin_config)
        futures = self._admin.list_offsets(
            {tp: spec},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=self._attempt_seconds,
        )
        offset: int = futures[tp].result().offset
        if offset < 0:
            # OFFSET_INVALID (-1001) without an error: librdkafka could not query the partition's leader.
            raise CannotRead
        return offset

    def exists(self, topic: str, partition: int) -> bool:
        self.start()
        listed = self._consumer.list_topics(timeout=self._attempt_seconds).topics.get(topic)
        return listed is not None and partition in listed.partitions

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self.start()
        self._consumer.assign([TopicPartition(topic, partition, offset)])

    def poll(self) -> tuple[list[LogRecord], int | None]:
        first = self._consumer.poll(_POLL_SECONDS)
        if first is None:
            return [], None
        records, position = [], 0
        # consume() with a timeout would wait for the full number of records.
        for msg in (first, *self._consumer.consume(_POLL_RECORDS, 0)):
            error, at = msg.error(), msg.offset()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            if error is None:
                records.append(LogRecord(at, msg.timestamp()[1], msg.key(), msg.value(), _headers(msg.headers())))
            # At an end of the partition, offsets after the last record hold none.
            position = at + 1 if error is None else max(position, at)
        return records, position

    def pause(self) -> None:
        self._consumer.unassign()  # otherwise it keeps fetching new records

    def close(self) -> None:
        self._admin = None  # the library closes it with its last reference
        if self._consumer is not None:
            self._consumer.close()


class LogReader(BlockingLogReader):
    __doc__ = BlockingLogReader.__doc__

    def __init__(
        self,
        partitions: Iterable[Any],
        config: Mapping[str, Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(partitions, _CommittedConsumer(retry.attempt_seconds, config), retry)


class TransactionalWriter(BlockingTransactionalWriter):
    __doc__ = BlockingTransactionalWriter.__doc__

    def __init__(
        self,
        transactional_id: str,
        config: Mapping[str, Any],
        *,
        compression_type: str = "none",
        transaction_timeout_seconds: float = 60.0,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        check_ttl_seconds: float = 30.0,
    ) -> None:
        producer_config = {
            "log_level": 2,  # otherwise each refusal is logged as an error
            **config,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(transaction_timeout_seconds * 1000),
            "compression.type": compression_type,
            "linger.ms": 0,
            "message.timeout.ms": int(min(retry.attempt_seconds, transaction_timeout_seconds) * 1000),
            "retry.backoff.ms": _RETRY_BACKOFF_MS,
        }
        checks = checks_of(check_ttl_seconds, config, retry.attempt_seconds)
        super().__init__(
            transactional_id,
            _Transaction(producer_config, checks, retry.attempt_seconds),
            _CommittedConsumer(retry.attempt_seconds, config),
            retry,
        )


class _Transaction:
    error = KafkaException

    def __init__(self, config: dict[str, Any], checks: BlockingChecks, attempt_seconds: float) -> None:
        self._config = config
        self._checks = checks
        self.require = checks.require
        self._attempt_seconds = attempt_seconds
        self._producer: Any = None

    def open(self) -> None:
        self._producer = ConditionalProducer(self._config)
        self._producer._checks = self._checks  # one admin client for all producers
        try:
            self._producer.init_transactions(self._attempt_seconds)
        except KafkaException as error:
            self.discard()
            if error.args[0].retriable() or error.args[0].code() in _IN_DOUBT:
                raise CannotRead from error
            raise

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, part: Part, write_id: bytes) -> int:
        try:
            delivered = _produce(self._producer, part.topic, part.partition, part.records, part.expected, write_id)
            if self._producer.flush(self._attempt_seconds):
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            error = delivered.error
            if error is not None:
                raise error if isinstance(error, FencepostError) else KafkaException(error)
        except FencepostError as error:
            raise explained(part, error, retriable=False, transactional_id=self._id) from error.__cause__
        except _RAISED as error:
            failed = _failure(error)
        else:
            return delivered.base_offset
        reported = failed.args[0]
        code = KafkaError.PRODUCER_FENCED if reported.code() == KafkaError._FENCED else reported.code()
        why = explained(part, failed, code=code, retriable=code in _IN_DOUBT, transactional_id=self._id)
        raise why from (None if why is failed else failed)

    def commit(self) -> None:
        try:
            self._producer.commit_transaction(self._attempt_seconds)
        except _RAISED as error:
            failed = _failure(error)
        else:
            return
        reported = failed.args[0]
        if reported.code() in {KafkaError._FENCED, *FENCED}:
            raise WriterFencedError(self._id) from failed
        raise (CommitRefused if reported.txn_requires_abort() else CommitInDoubt) from failed

    def abort(self) -> bool:
        self._producer.abort_transaction(self._attempt_seconds)
        return True

    def discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # Not close(), which tries to abort and fails if that fails. The library closes the producer with its last
            # reference.
            with contextlib.suppress(*_RAISED):
                producer.purge()
                producer.poll(0)

    def close(self) -> None:
        self._checks.close()

    @property
    def _id(self) -> str:
        return str(self._config["transactional.id"])


def _failure(error: BaseException) -> KafkaException:
    """The KafkaException in `error`; raises `error` if there is none.

    The library raises a fatal error from its next call: as a bare KafkaError, which a traceback cannot show, or as the
    cause of a SystemError if a delivery callback was due."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KafkaException):
            return found
        if isinstance(found, KafkaError):
            return KafkaException(found)
        found = found.__cause__
    raise error


def _headers(headers: Any) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, b"" if value is None else value) for name, value in headers or ())
