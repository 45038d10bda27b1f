"""Conditional publish with confluent-kafka."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

try:
    from confluent_kafka import (
        OFFSET_BEGINNING,
        OFFSET_END,
        Consumer,
        IsolationLevel,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicPartition,
    )
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented, but not in its __all__
        AdminClient,
        ConfigResource,
        OffsetSpec,
        ResourceType,
    )
except ModuleNotFoundError as error:
    raise ImportError("fencepost.confluent needs confluent-kafka: pip install 'confluent-kafka>=2.16'") from error

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
    count_changed,
    crc32,
    murmur2,
    refuse_configs,
)
from fencepost._reading import BlockingLogReader
from fencepost._refusals import POLICY_VIOLATION, refusal, verify
from fencepost._steps import CannotRead, run
from fencepost._transaction import FENCED, Part, explained
from fencepost._transactional_writer import BlockingTransactionalWriter, CommitInDoubt, CommitRefused
from fencepost.errors import (
    FencepostError,
    OffsetMismatch,
    PartitionCountChanged,
    PartitionRequired,
    TransactionConflict,
    WriterFenced,
)
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
    "ConditionalProducer",
    "LogReader",
    "LogWriter",
    "OrderedConsumer",
    "OrderedProducer",
    "TransactionalWriter",
    "describe_topic",
]

OnDelivery = Callable[[Any, Message], None]

#: Longest wait of a batch for `flush`; long, so that the library never splits a batch on a timer.
_LINGER_MS = 300_000
_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
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
#: Callbacks of the client object, not passed to its admin client.
_CALLBACKS = frozenset({"on_delivery", "error_cb", "stats_cb", "throttle_cb", "logger"})


def _checks_of(
    ttl_seconds: float, config: Mapping[str, Any], timeout_seconds: float, check: str = CHECK_CONFIG
) -> BlockingChecks:
    admin_config = {k: v for k, v in config.items() if k not in _CALLBACKS}
    return BlockingChecks(
        CheckCache(ttl_seconds, config=check),
        lambda: AdminClient(admin_config),
        lambda admin, topic: describe_topic(admin, topic, timeout_seconds),
    )


class LogEnds:
    """Derives the log end offset from the offsets that librdkafka reports for refused records.

    librdkafka numbers the records of a failed batch like those of a successful one: for record `i` of a batch refused
    at log end offset 57, it reports 57 + i. Consecutive refusals with consecutive offsets belong to one batch, unless
    the second record was produced after the first refusal was delivered.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[tuple[str, int], tuple[int, int, int, int]] = {}

    @property
    def count(self) -> int:
        """Number of refusals so far; store it when producing a record."""
        return self._count

    def of_refusal(self, topic: str, partition: int, expected: int, offset: int, produced_at: int) -> int:
        """The log end offset. `offset`: reported by librdkafka; `produced_at`: `count` when the record was produced."""
        self._count += 1
        number, last_expected, last_offset, end = self._last.get((topic, partition), (0, -1, -1, -1))
        counts_on = expected == last_expected + 1 and offset == last_offset + 1
        if not (counts_on and number > produced_at):
            end = offset
        self._last[topic, partition] = (self._count, expected, offset, end)
        return end


class ConditionalProducer(Producer):
    """Producer whose `produce` takes `expected_offset`. All else is Producer's.

    Defaults that differ from Producer's:

    - `enable.idempotence=true` (needs `acks=all`): librdkafka then retries the identical batch, and continues after a
      refusal. Otherwise it may retry a record in one batch with later records. If the first send was appended, that
      batch is refused, including the record that is already in the log;
    - `max.in.flight.requests.per.connection=1`: otherwise later batches overtake a retried batch and are refused.

    `acks=0` raises ValueError, because the producer would not receive refusals. `check_ttl_seconds`: how long a topic's
    check config is cached. `check_timeout_seconds`: limit for reading it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        check_ttl_seconds: float = 30.0,
        check_timeout_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        idempotence: Idempotence | None = None,
        **kwargs: Any,
    ) -> None:
        config = {**config, **configured(idempotence, config, "enable.idempotence", possible=True)}
        if str(config.get("acks", config.get("request.required.acks", "all"))) == "0":
            raise ValueError("acks=0 cannot be used with expected offsets: the producer would not receive refusals")
        defaults = {"enable.idempotence": True, "max.in.flight.requests.per.connection": 1}
        super().__init__({**defaults, **config}, **kwargs)
        self._header_names = header_names
        self._log_ends = LogEnds()
        self._default_delivery: OnDelivery | None = config.get("on_delivery")
        self._checks = _checks_of(check_ttl_seconds, config, check_timeout_seconds)

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
        *,
        expected_offset: int | None = None,
        write_id: bytes | None = None,
    ) -> None:
        """Producer.produce; with `expected_offset`, the record is appended at that offset or not at all.

        If the log ends at another offset, `on_delivery(err, msg)` gets an OffsetMismatch as `err`; an OffsetViolation
        if the record was appended elsewhere; other errors are KafkaErrors. The records of one batch are accepted or
        refused together. `write_id`: identifies this write, 16 random bytes by default. The call blocks while it reads
        the topic configs: the first time for a topic, then every `check_ttl_seconds`. Raises CheckIsOff,
        PartitionRequired, ValueError.
        """
        deliver = on_delivery or callback
        options: dict[str, Any] = {"partition": partition, "timestamp": timestamp}
        if expected_offset is None:
            if deliver is not None:
                options["on_delivery"] = deliver
            super().produce(topic, value, key, headers=headers, **options)
            return
        if partition < 0:
            raise PartitionRequired("expected_offset= needs partition= (offsets are per partition)")
        given = headers.items() if isinstance(headers, Mapping) else headers or []
        headers = conditional_headers(self._header_names, given, expected_offset, write_id or new_write_id())
        self._checks.require(topic)
        deliver = deliver or self._default_delivery
        where = (topic, partition, expected_offset)
        produced_at = self._log_ends.count

        def delivered(err: KafkaError | None, msg: Message) -> None:
            outcome = self._outcome(where, err, msg.offset(), produced_at)
            if deliver is not None:
                deliver(outcome, msg)

        super().produce(topic, value, key, headers=headers, on_delivery=delivered, **options)

    def close(self) -> bool:
        closed = super().close()
        self._checks.close()
        return closed

    def _outcome(
        self, where: tuple[str, int, int], err: KafkaError | None, offset: int | None, produced_at: int
    ) -> FencepostError | KafkaError | None:
        if err is None:
            try:
                verify(*where, -1 if offset is None else offset)
            except FencepostError as violation:
                return violation
            return None
        # librdkafka drops the server's message, but reports the base offset with the error.
        end = None
        if err.code() == POLICY_VIOLATION and offset is not None and offset >= 0:
            end = self._log_ends.of_refusal(*where, offset, produced_at)
        ours = refusal(*where, code=err.code(), message=None, log_end=end)
        if ours is not None:
            ours.__cause__ = KafkaException(err)
        return ours or err


class LogWriter(BlockingLogWriter):
    """Reads one partition to its end, then appends batches, each only if the log still ends there (KIP-27).

    Reads committed records only. `config`: librdkafka's connection settings (`bootstrap.servers`,
    `security.protocol`, …) for producer, consumer and admin client. `batch_bytes_max`: bytes, uncompressed. See
    docs/client.md.
    """

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
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
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
            header_names=header_names,
        )
        consumer = _CommittedConsumer(retry.attempt_seconds, config)
        consumer.start()
        appender = _Appender(producer, retry.attempt_seconds)
        super().__init__(topic, partition, appender, consumer, retry, header_names, batch_bytes_max)


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
        self._producer = producer
        self._attempt_seconds = attempt_seconds

    def require(self, topic: str) -> TopicFacts:
        return self._producer._checks.require(topic)

    def send(self, append: Append) -> Reply:
        delivered = _produce(
            self._producer, append.topic, append.partition, append.records, append.expected, append.write_id
        )
        if self._producer.flush(self._attempt_seconds):
            self._producer.purge()
            self._producer.flush(self._attempt_seconds)
        error = delivered.error
        if error is None:
            return Appended(delivered.base_offset)
        if isinstance(error, OffsetMismatch):
            return Refused(error)
        if isinstance(error, FencepostError):
            raise error
        if error.code() in _IN_DOUBT:
            return MaybeAppended(KafkaException(error))
        raise KafkaException(error)

    def close(self) -> None:
        self._producer.close()


class _CommittedConsumer:
    error = KafkaException
    timeout_error = TimeoutError

    def __init__(self, attempt_seconds: float, config: Mapping[str, Any]) -> None:
        self._attempt_seconds = attempt_seconds
        self._admin_config = {k: v for k, v in config.items() if k not in _CALLBACKS}
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
    """Reads the committed records of several partitions, and returns the expected offset of each. See docs/client.md.

    `partitions`: (topic, partition) tuples or TopicPartitions. `config`: librdkafka's consumer settings.
    """

    def __init__(
        self,
        partitions: Iterable[Any],
        config: Mapping[str, Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(partitions, _CommittedConsumer(retry.attempt_seconds, config), retry)


class TransactionalWriter(BlockingTransactionalWriter):
    """Appends to several partitions in one transaction, each at its expected offset: all or nothing (KIP-27, KIP-98).

    `config`: librdkafka's connection settings for producer, consumer and admin client. `transaction_timeout_seconds`:
    the coordinator aborts an open transaction after this time. A send, commit or abort takes up to
    `retry.attempt_seconds`, finding an unknown outcome up to `retry.total_seconds`. See docs/client.md.
    """

    def __init__(
        self,
        transactional_id: str,
        config: Mapping[str, Any],
        *,
        compression_type: str = "none",
        transaction_timeout_seconds: float = 60.0,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        check_ttl_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
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
        checks = _checks_of(check_ttl_seconds, config, retry.attempt_seconds)
        super().__init__(
            transactional_id,
            _Transaction(producer_config, checks, header_names, retry.attempt_seconds),
            _CommittedConsumer(retry.attempt_seconds, config),
            retry,
            header_names,
        )


class _Transaction:
    error = KafkaException

    def __init__(
        self, config: dict[str, Any], checks: BlockingChecks, names: HeaderNames, attempt_seconds: float
    ) -> None:
        self._config = config
        self._checks = checks
        self._names = names
        self._attempt_seconds = attempt_seconds
        self._producer: Any = None

    def require(self, topic: str) -> TopicFacts:
        return self._checks.require(topic)

    def open(self) -> None:
        self._producer = ConditionalProducer(self._config, header_names=self._names)
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
            if isinstance(error, OffsetMismatch) and error.actual in (None, error.expected):
                # librdkafka hides the message; only a mismatch reports the log end offset.
                raise TransactionConflict(
                    f"{part.topic}-{part.partition}: another transaction is open on it"
                ) from error
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
            raise WriterFenced(self._id) from failed
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


def describe_topic(admin: AdminClient, topic: str, timeout_seconds: float = 30.0) -> dict[str, str | None]:
    """A topic's configs {name: value}, read with an AdminClient; empty if they are not visible."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        entries = admin.describe_configs([resource], request_timeout=timeout_seconds)[resource].result()
    except KafkaException as error:
        if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            return {}
        raise
    return {name: entry.value for name, entry in entries.items()}


class OrderedConsumer(Consumer):
    """Consumer that reads topics without joining a group, and keeps keys in order across expansions (KIP-253).

    `poll` and `consume` work as in Consumer; `consume` may return early with fewer messages. A partition that an
    expansion added is assigned after all prior partitions are read up to their thresholds. Records returned by an
    earlier call count as read. See docs/client.md.

    `partition_filter(partition)`: whether this consumer reads a partition, also a future one; default all. Processes
    that share topics need the same `group.id` and must commit. `positions`: {(topic, partition): offset} to start at,
    for applications that store offsets themselves. Other partitions start at the group's committed offsets or by
    `auto.offset.reset`. `refresh_seconds`: interval of checks for expansions and other processes' commits. `commit()`
    without arguments also covers offsets after the last record that hold no records (transaction markers). Raises
    CheckIsOff, ValueError.
    """

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
        admin = AdminClient(
            {k: v for k, v in config.items() if k not in _CALLBACKS and not k.startswith(consumers_own)}
        )
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

    def waiting(self) -> dict[tuple[str, int], Waiting]:
        """The gated partitions, and what each waits for: {(topic, partition): Waiting}."""
        return self._reads.waiting()

    def poll(self, timeout: float | None = -1) -> Message | None:
        """Consumer.poll. Also raises KafkaException if the topic's expansions cannot be read."""
        return next(iter(self._get(timeout, lambda seconds: [super(OrderedConsumer, self).poll(seconds)])), None)

    def consume(self, num_messages: int = 1, timeout: float | None = -1) -> list[Message]:
        """Consumer.consume; may return early with fewer messages."""
        return self._get(timeout, lambda seconds: super(OrderedConsumer, self).consume(num_messages, seconds))

    def commit(self, *, asynchronous: bool = True, **what: Any) -> Any:
        """Consumer.commit; without arguments, commits everything read (see the class)."""
        if not what:
            what["offsets"] = [TopicPartition(topic, partition, at) for (topic, partition), at in self._read.items()]
        return super().commit(asynchronous=asynchronous, **what)  # type: ignore[call-overload]

    def seek(self, partition: TopicPartition) -> None:
        super().seek(partition)
        if partition.offset >= 0:
            self._read[partition.topic, partition.partition] = partition.offset

    def subscribe(self, *_: Any, **__: Any) -> None:
        """Raises TypeError: a group coordinator would assign gated partitions."""
        raise TypeError("an OrderedConsumer reads the topics of its constructor (the proxy orders groups)")

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


class OrderedProducer(Producer):
    """Producer that keeps each key in order across expansions of its topic (KIP-253). See docs/client.md.

    Each record carries the partition count that chose its partition. If the topic has more partitions, the proxy
    refuses the record, and this producer repartitions it, in the order of `produce`, during `poll` and `flush`.

    `partitioner`: (key, partition count) → partition; default: by the setting
    `partitioner` (`consistent_random`, that is crc32, or `murmur2_random`).
    `repartition_timeout_seconds`: how long a record may be refused before it is delivered as PartitionCountChanged.
    `buffered_max`: how many records may be queued meanwhile; then `produce` raises BufferError.

    The default is `enable.idempotence=true`, so that retries keep their order. `acks=0` and transactions raise
    ValueError.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        partitioner: Partitioner | None = None,
        repartition_timeout_seconds: float = 120.0,
        buffered_max: int = 10_000,
        check_ttl_seconds: float = 30.0,
        check_timeout_seconds: float = 30.0,
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        idempotence: Idempotence | None = None,
        **kwargs: Any,
    ) -> None:
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
        self._sends = OrderedSends(
            partitioner or _PARTITIONERS[named], header_names, repartition_timeout_seconds, buffered_max
        )
        self._sends.reason += " (on_delivery gets no message)"
        self._repartition_timeout_seconds = repartition_timeout_seconds
        self._timeout_seconds = check_timeout_seconds
        self._default_delivery: OnDelivery | None = config.get("on_delivery")
        self._checks = _checks_of(check_ttl_seconds, config, check_timeout_seconds, COUNT_CHECK_CONFIG)
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
        Raises CheckIsOff, ValueError, BufferError.
        """
        given = self._sends.checked(headers.items() if isinstance(headers, Mapping) else headers)
        self._checks.require(topic)
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
            late: list[tuple[Send, PartitionCountChanged]] = []
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
