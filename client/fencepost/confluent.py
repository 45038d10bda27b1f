"""Conditional publish with confluent-kafka."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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

from fencepost._appending import Append, Appended, Doubtful, Refused, Reply
from fencepost._checks import CheckCache, TopicFacts
from fencepost._idempotence import Idempotence, configured
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, BlockingLogWriter, CannotRead
from fencepost._ordering import TopicOrder, Waiting, every, refuse_alone, was_read
from fencepost._placing import (
    INVALID_PARTITIONS,
    Placement,
    Send,
    TopicSends,
    count_changed,
    counted_headers,
    crc32,
    murmur2,
    refuse_configs,
)
from fencepost._refusals import POLICY_VIOLATION, refusal, verify
from fencepost._transaction import FENCED, Part, explained
from fencepost._transactional_writer import (
    BlockingLogReader,
    BlockingTransactionalWriter,
    CommitInDoubt,
    CommitRefused,
    Reading,
)
from fencepost.errors import FencepostError, OffsetMismatch, PartitionRequired, TransactionConflict, WriterFenced
from fencepost.expansions import expansions_of
from fencepost.records import (
    CHECK_CONFIG,
    COUNT_CHECK_CONFIG,
    HeaderNames,
    LogRecord,
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

#: A batch waits for `flush` at most this long, so that the library never cuts one in two by the clock.
_LINGER_MS = 300_000
_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
_POLL_RECORDS = 500
_FETCH_WAIT_MS = 10
#: See `_failure`.
_RAISED: Any = (KafkaException, KafkaError, SystemError)
#: Of an append that waits for another's transaction.
_RETRY_BACKOFF_MS = 20

#: After these a batch may be in the log, or may be appended by another try.
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
#: Callbacks that belong to one client object, not to the admin client beside it.
_CALLBACKS = frozenset({"on_delivery", "error_cb", "stats_cb", "throttle_cb", "logger"})


class TopicChecks:
    """Which topics are checked, asked through an admin client of its own. Thread-safe, as Producer is."""

    def __init__(
        self, ttl_seconds: float, config: Mapping[str, Any], timeout_seconds: float, check: str = CHECK_CONFIG
    ) -> None:
        self._cache = CheckCache(ttl_seconds, config=check)
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._config = {k: v for k, v in config.items() if k not in _CALLBACKS}
        self._admin: AdminClient | None = None

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient(self._config)
        return self._admin

    def close(self) -> None:
        self._admin = None  # the library closes it with its last reference

    def require(self, topic: str) -> TopicFacts:
        """Raises CheckIsOff, or KafkaException if it cannot be found out."""
        with self._lock:
            facts = self._cache.get(topic)
            return facts if facts is not None else self._cache.learn(topic, self._describe(topic))

    def _describe(self, topic: str) -> dict[str, str | None]:
        return describe_topic(self.admin, topic, self._timeout_seconds)


class LogEnds:
    """Which log end a refusal tells.

    librdkafka counts on through a failed batch as it does through a successful one: for the record `i` of a batch that
    was refused at the log end 57 it shows the offset 57 + i. A refusal that counts on from the one before it is of the
    same batch, unless its record was handed over only after the other refusal was known.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[tuple[str, int], tuple[int, int, int, int]] = {}

    @property
    def count(self) -> int:
        """Refusals so far; to be noted when a record is handed over."""
        return self._count

    def of_refusal(self, topic: str, partition: int, expected: int, offset: int, produced_at: int) -> int:
        """`offset` is what librdkafka shows, `produced_at` the `count` when the record was handed over."""
        self._count += 1
        number, last_expected, last_offset, end = self._last.get((topic, partition), (0, -1, -1, -1))
        counts_on = expected == last_expected + 1 and offset == last_offset + 1
        if not (counts_on and number > produced_at):
            end = offset
        self._last[topic, partition] = (self._count, expected, offset, end)
        return end


class ConditionalProducer(Producer):
    """Producer whose `produce` takes `expected_offset`. Everything else is the library's own.

    Defaults that differ:

    - `enable.idempotence=true`: otherwise librdkafka puts a record that it sends again into a batch with later ones.
      If the first send had landed after all, that batch is refused, and with it the record that is in the log. An
      idempotent producer of librdkafka sends the same batch again, and goes on after a refusal. Needs `acks=all`;
    - `max.in.flight.requests.per.connection=1`: otherwise a batch that has to be sent again is overtaken by the next
      ones, which are then refused.

    `acks=0` is not possible: a refusal could not be told.
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
            raise ValueError("acks=0 cannot be used with expected offsets: nobody would hear of a refusal")
        defaults = {"enable.idempotence": True, "max.in.flight.requests.per.connection": 1}
        super().__init__({**defaults, **config}, **kwargs)
        self._header_names = header_names
        self._log_ends = LogEnds()
        self._default_delivery: OnDelivery | None = config.get("on_delivery")
        self._checks = TopicChecks(check_ttl_seconds, config, check_timeout_seconds)

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
        """As Producer.produce; with `expected_offset`, the record is appended at this offset or not at all.

        Where the log ended elsewhere, `on_delivery(err, msg)` gets an OffsetMismatch as `err` (any other error is a
        KafkaError, as always). Records that the library puts into one batch stand or fall together, those without an
        expectation too. `write_id` names this write, by default at random. The first call for a topic, and one every
        `check_ttl_seconds`, asks the cluster whether the check is on, and blocks for that. Raises CheckIsOff,
        PartitionRequired.
        """
        deliver = on_delivery or callback
        options: dict[str, Any] = {"partition": partition, "timestamp": timestamp}
        if expected_offset is None:
            if deliver is not None:
                options["on_delivery"] = deliver
            super().produce(topic, value, key, headers=headers, **options)
            return
        if partition < 0:
            raise PartitionRequired("expected_offset= needs partition=: every partition has offsets of its own")
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
        # librdkafka drops the server's message, but shows the base offset beside the error.
        end = None
        if err.code() == POLICY_VIOLATION and offset is not None and offset >= 0:
            end = self._log_ends.of_refusal(*where, offset, produced_at)
        ours = refusal(*where, code=err.code(), message=None, log_end=end)
        if ours is not None:
            ours.__cause__ = KafkaException(err)
        return ours or err


class LogWriter(BlockingLogWriter):
    """Reads one partition to its end, then appends batches to it (KIP-27's worked example). See docs/client.md.

    `config` is librdkafka's for the connection (`bootstrap.servers`, `security.protocol`, …), for producer, consumer
    and admin client alike; `compression_type` is for the producer. Transactions of others are read once committed.
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
        super().__init__(topic, partition, retry=retry, names=header_names, batch_bytes_max=batch_bytes_max)
        self._producer = ConditionalProducer(
            {
                **config,
                "compression.type": compression_type,
                "batch.size": batch_bytes_max,
                "batch.num.messages": 1_000_000,
                "message.max.bytes": max(1_000_000, 2 * batch_bytes_max),
                "queue.buffering.max.messages": 1_000_000,
                # One send a try: whether to send again is decided after a look at the log.
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
        self._reading = _Reading(retry.attempt_seconds, config)
        self._reading.open()

    def close(self) -> None:
        self._reading.close()
        self._producer.close()

    def _require_check(self) -> TopicFacts:
        try:
            return self._producer._checks.require(self.topic)
        except KafkaException as error:
            raise CannotRead from error

    def _send(self, append: Append) -> Reply:
        outcomes: list[Any] = []
        offsets: list[int | None] = []

        def delivered(outcome: Any, msg: Message) -> None:
            outcomes.append(outcome)
            offsets.append(msg.offset())

        for index, record in enumerate(append.records):
            assert record.timestamp_ms is not None
            self._producer.produce(
                self.topic,
                record.value,
                record.key,
                self.partition,
                on_delivery=delivered,
                timestamp=record.timestamp_ms,
                headers=list(record.headers),
                expected_offset=append.expected + index,
                write_id=append.write_id,
            )
        if self._producer.flush(self._retry.attempt_seconds):
            self._producer.purge()
            self._producer.flush(self._retry.attempt_seconds)
        return _reply(outcomes, offsets)

    def _bounds(self) -> tuple[int, int]:
        return self._reading.bounds(self.topic, self.partition)

    def _read(self, offset: int, end: int) -> Generator[LogRecord, None, None]:
        return self._reading.read(self.topic, self.partition, offset, end)


class _Reading(Reading):
    def __init__(self, attempt_seconds: float, config: Mapping[str, Any]) -> None:
        self._attempt_seconds = attempt_seconds
        self._admin_config = {k: v for k, v in config.items() if k not in _CALLBACKS}
        self._config: dict[str, Any] = {
            # Only what is there is waited for; a fetch that waits for more would hold up the next partition.
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            **config,
            "group.id": "fencepost-log-writer",  # wanted by the library; no group is joined, nothing committed
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        self._admin: AdminClient | None = None
        self._consumer: Consumer | None = None

    def open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = Consumer(self._config)
        return self._consumer

    def close(self) -> None:
        self._admin = None  # the library closes it with its last reference
        if self._consumer is not None:
            self._consumer.close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        tp = TopicPartition(topic, partition)
        start = self._list_offset(tp, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return start, self._list_offset(tp, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def _list_offset(self, tp: TopicPartition, spec: OffsetSpec) -> int:
        if self._admin is None:
            self._admin = AdminClient(self._admin_config)
        try:
            futures = self._admin.list_offsets(
                {tp: spec},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=self._attempt_seconds,
            )
            offset: int = futures[tp].result().offset
        except KafkaException as error:
            raise CannotRead from error
        if offset < 0:
            # OFFSET_INVALID (-1001), and no error: librdkafka could not ask the partition's leader.
            raise CannotRead
        return offset

    def read(self, topic: str, partition: int, offset: int, end: int) -> Generator[LogRecord, None, None]:
        consumer = self.open()
        consumer.assign([TopicPartition(topic, partition, offset)])
        position, give_up = offset, time.monotonic() + self._attempt_seconds
        try:
            while position < end:
                first = consumer.poll(_POLL_SECONDS)
                # consume() with a timeout would wait for the full number of records.
                more = [] if first is None else consumer.consume(_POLL_RECORDS, 0)
                for msg in (first, *more) if first is not None else ():
                    err, at = msg.error(), msg.offset()
                    if err is not None and err.code() != KafkaError._PARTITION_EOF:
                        raise CannotRead from KafkaException(err)
                    assert at is not None
                    give_up = time.monotonic() + self._attempt_seconds
                    if err is not None:
                        position = max(position, at)  # behind the last record there may be offsets that hold none
                        continue
                    yield LogRecord(at, msg.timestamp()[1], msg.key(), msg.value(), _headers(msg.headers()))
                    position = at + 1
                if position < end and time.monotonic() >= give_up:
                    raise CannotRead from TimeoutError(
                        f"{topic}-{partition}: nothing came from offset {position} on for {self._attempt_seconds:g} s"
                    )
        finally:
            consumer.unassign()  # else it goes on fetching what is appended


class LogReader(BlockingLogReader):
    """Reads several partitions to their ends, and says which offset to expect there. See docs/client.md.

    `partitions` – of (topic, partition) tuples, or TopicPartition. `config` is librdkafka's for a consumer.
    """

    def __init__(
        self,
        partitions: Iterable[Any],
        config: Mapping[str, Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(partitions, _Reading(retry.attempt_seconds, config), retry)


class TransactionalWriter(BlockingTransactionalWriter):
    """Compare-and-append over several partitions, all or nothing (KIP-98 and KIP-27). See docs/client.md.

    `config` is librdkafka's for the connection (`bootstrap.servers`, `security.protocol`, …), for producer, consumer
    and admin client alike. `transaction_timeout_seconds` – after that the coordinator aborts by itself what this
    process left open. A send, a commit, an abort takes `retry.attempt_seconds` at most, what is not known then
    `retry.total_seconds`.
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
        super().__init__(
            transactional_id,
            retry=retry,
            names=header_names,
            reading=_Reading(retry.attempt_seconds, config),
        )
        self._checks = TopicChecks(check_ttl_seconds, config, retry.attempt_seconds)
        self._producer: ConditionalProducer | None = None
        self._producer_config: dict[str, Any] = {
            "log_level": 2,  # else each refusal is logged as an error
            **config,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(transaction_timeout_seconds * 1000),
            "compression.type": compression_type,
            "linger.ms": 0,
            "message.timeout.ms": int(min(retry.attempt_seconds, transaction_timeout_seconds) * 1000),
            "retry.backoff.ms": _RETRY_BACKOFF_MS,
        }

    def close(self) -> None:
        super().close()
        self._checks.close()

    def _require_check(self, topic: str) -> TopicFacts:
        try:
            return self._checks.require(topic)
        except KafkaException as error:
            raise CannotRead from error

    def _open_producer(self) -> None:
        self._producer = ConditionalProducer(self._producer_config, header_names=self._names)
        self._producer._checks = self._checks  # one admin client, whatever becomes of the producer
        try:
            self._producer.init_transactions(self._retry.attempt_seconds)
        except KafkaException as error:
            self._discard()
            if error.args[0].retriable() or error.args[0].code() in _IN_DOUBT:
                raise CannotRead from error
            raise

    def _begin(self) -> None:
        assert self._producer is not None
        self._producer.begin_transaction()

    def _send(self, part: Part, write_id: bytes) -> int:
        assert self._producer is not None
        outcomes: list[Any] = []
        offsets: list[int | None] = []

        def delivered(outcome: Any, msg: Message) -> None:
            outcomes.append(outcome)
            offsets.append(msg.offset())

        try:
            for index, record in enumerate(part.records):
                assert record.timestamp_ms is not None
                self._producer.produce(
                    part.topic,
                    record.value,
                    record.key,
                    part.partition,
                    on_delivery=delivered,
                    timestamp=record.timestamp_ms,
                    headers=list(record.headers),
                    expected_offset=None if part.expected is None else part.expected + index,
                    write_id=write_id,
                )
            if self._producer.flush(self._retry.attempt_seconds):
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            error = next((outcome for outcome in outcomes if outcome is not None), None)
            if error is not None:
                raise error if isinstance(error, FencepostError) else KafkaException(error)
        except FencepostError as error:
            if isinstance(error, OffsetMismatch) and error.actual in (None, error.expected):
                # The message is not shown; only a mismatch comes with the offset where the log ends.
                raise TransactionConflict(f"{part.topic}-{part.partition}: another transaction holds it") from error
            raise explained(part, error, passing=False, transactional_id=self.transactional_id) from error.__cause__
        except _RAISED as error:
            failed = _failure(error)
        else:
            assert offsets[0] is not None
            return offsets[0]
        told = failed.args[0]
        code = KafkaError.PRODUCER_FENCED if told.code() == KafkaError._FENCED else told.code()
        why = explained(part, failed, code=code, passing=code in _IN_DOUBT, transactional_id=self.transactional_id)
        raise why from (None if why is failed else failed)

    def _commit(self) -> None:
        assert self._producer is not None
        try:
            self._producer.commit_transaction(self._retry.attempt_seconds)
        except _RAISED as error:
            failed = _failure(error)
        else:
            return
        told = failed.args[0]
        if told.code() in {KafkaError._FENCED, *FENCED}:
            raise WriterFenced(self.transactional_id) from failed
        raise (CommitRefused if told.txn_requires_abort() else CommitInDoubt) from failed

    def _abort(self) -> bool:
        assert self._producer is not None
        self._producer.abort_transaction(self._retry.attempt_seconds)
        return True

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # Not close(), which in vain asks the cluster to abort, and fails where that fails: the library ends it with
            # its last reference.
            with contextlib.suppress(*_RAISED):
                producer.purge()
                producer.poll(0)


def _failure(error: BaseException) -> KafkaException:
    """The library raises a fatal error out of whichever call comes next, as it is, which cannot even be shown in a
    traceback, or as the cause of a SystemError where a delivery callback was to be called too."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KafkaException):
            return found
        if isinstance(found, KafkaError):
            return KafkaException(found)
        found = found.__cause__
    raise error


def _reply(outcomes: Sequence[Any], offsets: Sequence[int | None]) -> Reply:
    error = next((outcome for outcome in outcomes if outcome is not None), None)
    if error is None:
        assert offsets[0] is not None
        return Appended(offsets[0])
    if isinstance(error, OffsetMismatch):
        return Refused(error)
    if isinstance(error, FencepostError):
        raise error
    if error.code() in _IN_DOUBT:
        return Doubtful(KafkaException(error))
    raise KafkaException(error)


def _headers(headers: Any) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, b"" if value is None else value) for name, value in headers or ())


def describe_topic(admin: AdminClient, topic: str, timeout_seconds: float = 30.0) -> dict[str, str | None]:
    """A topic's configs through an AdminClient; none where they cannot be seen."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        entries = admin.describe_configs([resource], request_timeout=timeout_seconds)[resource].result()
    except KafkaException as error:
        if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            return {}
        raise
    return {name: entry.value for name, entry in entries.items()}


class OrderedConsumer(Consumer):
    """Consumer that reads topics by hand, all of their partitions or some, those to come included, and each key in
    order while they grow (KIP-253). See docs/client.md.

    `poll` and `consume` are the library's (`consume` may return sooner, with fewer messages); a partition that came
    with a growth is assigned once all that were there before have been read up to where they ended then. What an
    earlier call returned counts as read.

    `mine` – which partitions are this consumer's, for several processes that share topics by hand; all have one
    `group.id` then, and commit. `positions` – (topic, partition) → where to begin, for an application that keeps its
    offsets itself; others begin at the group's commits, or by `auto.offset.reset`. `refresh_seconds` – how often
    growth, and what others have committed, is looked for. Differs from Consumer: `commit()` without arguments commits
    what was read, with offsets behind it that hold no records (markers of transactions). Raises CheckIsOff, ValueError.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        *,
        mine: Callable[[int], bool] | None = None,
        positions: Mapping[tuple[str, int], int] | None = None,
        refresh_seconds: float = 1.0,
        timeout_seconds: float = 30.0,
        **kwargs: Any,
    ) -> None:
        self._grouped = "group.id" in config
        alone = {"group.id": "fencepost-ordered-consumer", "enable.auto.commit": False}  # joined by nobody
        # librdkafka's own position() is behind the last record: only the end of a partition tells of what follows it.
        ours: dict[str, Any] = {"enable.partition.eof": True}
        self._tells_ends = str(config.get("enable.partition.eof", False)).lower() == "true"
        self._stores = self._grouped and str(config.get("enable.auto.offset.store", True)).lower() == "true"
        if self._stores:
            ours["enable.auto.offset.store"] = False  # done here, since it would not store what follows a last record
        super().__init__({**({} if self._grouped else alone), **config, **ours}, **kwargs)
        self._latest = config.get("auto.offset.reset", "largest") in ("largest", "latest", "end")
        self._orders = {topic: TopicOrder(topic, mine or every) for topic in topics}
        self._given = dict(positions or {})
        self._read: dict[tuple[str, int], int] = {}
        self._others: dict[str, dict[int, int | None]] = {topic: {} for topic in topics}
        self._refresh_seconds = refresh_seconds
        self._timeout_seconds = timeout_seconds
        self._look_at = 0.0
        consumers_own = ("group.", "partition.assignment.", "session.", "heartbeat.", "auto.offset.", "enable.auto.")
        self._admin = AdminClient(
            {k: v for k, v in config.items() if k not in _CALLBACKS and not k.startswith(consumers_own)}
        )
        try:
            for order in self._orders.values():
                self._start(order)
        except BaseException:
            super().close()
            raise

    def waiting(self) -> dict[tuple[str, int], Waiting]:
        """The partitions (topic, partition) that are not read yet, and what each waits for."""
        return {
            (topic, partition): waits
            for topic, order in self._orders.items()
            for partition in order.unopened
            if (waits := order.waiting(partition, self._positions(order)))
        }

    def poll(self, timeout: float | None = -1) -> Message | None:
        """As Consumer.poll. Raises KafkaException also where the topic's growth cannot be read."""
        return next(iter(self._get(timeout, lambda seconds: [super(OrderedConsumer, self).poll(seconds)])), None)

    def consume(self, num_messages: int = 1, timeout: float | None = -1) -> list[Message]:
        """As Consumer.consume, but for what the class says."""
        return self._get(timeout, lambda seconds: super(OrderedConsumer, self).consume(num_messages, seconds))

    def commit(self, *, asynchronous: bool = True, **what: Any) -> Any:
        """As Consumer.commit; see the class."""
        if not what:
            what["offsets"] = [TopicPartition(topic, partition, at) for (topic, partition), at in self._read.items()]
        return super().commit(asynchronous=asynchronous, **what)  # type: ignore[call-overload]

    def seek(self, partition: TopicPartition) -> None:
        super().seek(partition)
        if partition.offset >= 0:
            self._read[partition.topic, partition.partition] = partition.offset

    def subscribe(self, *_: Any, **__: Any) -> None:
        """Not possible: a group's coordinator would assign partitions that wait."""
        raise TypeError("an OrderedConsumer reads the topics that it was made with; groups are ordered by the proxy")

    def _get(self, timeout: float | None, ask: Callable[[float], Sequence[Message | None]]) -> list[Message]:
        deadline = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        while True:
            self._open()
            left = self._refresh_seconds
            if deadline is not None:
                left = min(left, max(0.0, deadline - time.monotonic()))
            messages = [message for message in ask(left) if message is not None and self._note(message)]
            if messages or (deadline is not None and time.monotonic() >= deadline):
                return messages

    def _note(self, message: Message) -> bool:
        """False for an end of partition that the application has not asked for."""
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
        return error is None or error.code() != KafkaError._PARTITION_EOF or self._tells_ends

    def _start(self, order: TopicOrder) -> None:
        self._learn(order)
        refuse_alone(order.topic, order.shares, "given" if self._grouped else None)
        known = self._known(order, order.unopened)
        fresh = self._latest and all(offset is None for offset in known.values())
        opened = [
            p for p in known if not order.is_born(p) or fresh or was_read(known[p], self._bounds(order.topic, p)[0])
        ]
        self._assign(order, {p: known[p] for p in opened})

    def _learn(self, order: TopicOrder) -> None:
        # In this sequence: see TopicOrder.learn.
        count = len(self._admin.list_topics(order.topic, self._timeout_seconds).topics[order.topic].partitions)
        configs = describe_topic(self._admin, order.topic, self._timeout_seconds)
        order.learn(count, expansions_of(order.topic, configs))

    def _known(self, order: TopicOrder, partitions: Sequence[int]) -> dict[int, int | None]:
        known = {p: self._given.get((order.topic, p)) for p in partitions}
        ask = [TopicPartition(order.topic, p) for p, offset in known.items() if offset is None]
        if self._grouped and ask:
            for tp in self.committed(ask, timeout=self._timeout_seconds):
                if tp.error is not None:
                    raise KafkaException(tp.error)
                known[tp.partition] = tp.offset if tp.offset >= 0 else None
        return known

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        bounds = self.get_watermark_offsets(TopicPartition(topic, partition), timeout=self._timeout_seconds)
        if bounds is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return bounds

    def _open(self) -> None:
        now = time.monotonic()
        look = now >= self._look_at
        if look:
            self._look_at = now + self._refresh_seconds
        for order in self._orders.values():
            if look:
                self._learn(order)
            if not order.unopened:
                continue
            if look:
                self._look_at_priors(order, now)
            ready = order.ready(self._positions(order))
            if ready:
                # From the beginning, whatever auto.offset.reset says: all of it came since the topic grew.
                starts = self._known(order, ready)
                self._assign(order, {p: OFFSET_BEGINNING if at is None else at for p, at in starts.items()})

    def _look_at_priors(self, order: TopicOrder, now: float) -> None:
        behind = order.behind(self._positions(order), now)
        others = [prior for prior in behind if not order.mine(prior)]
        if others:
            self._others[order.topic].update(self._known(order, others))
        for prior in behind if order.ends_are_due(now) else ():
            order.ended_at(prior, self._bounds(order.topic, prior)[1])

    def _positions(self, order: TopicOrder) -> dict[int, int | None]:
        return {**self._others[order.topic], **{p: self._read.get((order.topic, p)) for p in order.opened}}

    def _assign(self, order: TopicOrder, starts: Mapping[int, int | None]) -> None:
        """None: by the reset policy."""
        order.opened.update(starts)
        default = OFFSET_END if self._latest else OFFSET_BEGINNING
        self.incremental_assign(
            [TopicPartition(order.topic, p, default if at is None else at) for p, at in sorted(starts.items())]
        )
        self._read.update({(order.topic, p): at for p, at in starts.items() if at is not None and at >= 0})


class OrderedProducer(Producer):
    """Producer that keeps each key in order while its topic grows (KIP-253). See docs/client.md.

    Every record says over how many partitions it was placed. Where the topic has more by then, the proxy refuses it,
    and this producer places it again, in the order of `produce`; that happens in `poll` and `flush`, as deliveries do.
    `partitioner` – (key, count) → partition, by default as the setting `partitioner` says (`consistent_random`, that is
    crc32, or `murmur2_random`). `settle_seconds` – how long a record may be refused before it is delivered as a
    PartitionCountChanged; `held_max` – how many records may wait meanwhile, then `produce` raises BufferError.

    `enable.idempotence=true` by default, so that what is sent again keeps its order. `acks=0` and transactions are not
    possible.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        partitioner: Placement | None = None,
        settle_seconds: float = 120.0,
        held_max: int = 10_000,
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
        if partitioner is None and named not in _PLACEMENTS:
            raise ValueError(
                f"partitioner={named!r} cannot be repeated here: give partitioner=, or one of {', '.join(_PLACEMENTS)}"
            )
        super().__init__({"enable.idempotence": True, **config}, **kwargs)
        self._place_key = partitioner or _PLACEMENTS[named]
        self._settle_seconds, self._held_max = settle_seconds, held_max
        self._timeout_seconds = check_timeout_seconds
        self._count_header = header_names.partition_count
        self._default_delivery: OnDelivery | None = config.get("on_delivery")
        self._checks = TopicChecks(check_ttl_seconds, config, check_timeout_seconds, COUNT_CHECK_CONFIG)
        self._sends: dict[str, TopicSends] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._ask_at = 0.0

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
        """As Producer.produce. A record with `partition` stays on it, whatever the topic's count.

        The first call for a topic, and one every `check_ttl_seconds`, asks the cluster whether the check is on, and
        blocks for that. Raises CheckIsOff.
        """
        given = counted_headers(
            self._count_header, headers.items() if isinstance(headers, Mapping) else headers or [], 0
        )[:-1]
        self._checks.require(topic)
        with self._lock:
            if topic not in self._sends:
                self._sends[topic] = TopicSends(self._place_key, self._count(topic))
            sends = self._sends[topic]
            if len(sends.queue) >= self._held_max:
                raise BufferError(f"{self._held_max} records wait for the partition count of {topic!r}; call poll()")
            send = Send(
                next(self._numbers),
                topic,
                key.encode() if isinstance(key, str) else key,
                partition if partition >= 0 else None,
                time.monotonic() + self._settle_seconds,
                (value, given, timestamp or int(time.time() * 1000), on_delivery or callback or self._default_delivery),
            )
            if sends.submit(send):
                try:
                    self._hand_over(sends, send)
                except BaseException:
                    sends.ended(send)
                    raise

    def poll(self, timeout: float = -1) -> int:
        """As Producer.poll; places again what was refused."""
        deadline = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            events = super().poll(left)
            self._settle()
            if events or (deadline is not None and time.monotonic() >= deadline):
                return events

    def flush(self, timeout: float = -1) -> int:
        """As Producer.flush, what must be placed again included."""
        deadline = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            super().flush(left)
            self._settle()
            if not len(self) or (deadline is not None and time.monotonic() >= deadline):
                return len(self)

    def close(self) -> bool:
        self.flush(self._settle_seconds)
        closed = super().close()
        self._checks.close()
        return closed

    def __len__(self) -> int:
        with self._lock:
            return super().__len__() + sum(len(sends) - len(sends.flying) for sends in self._sends.values())

    def _count(self, topic: str) -> int:
        return len(self.list_topics(topic, self._timeout_seconds).topics[topic].partitions)

    def _hand_over(self, sends: TopicSends, send: Send) -> None:
        value, headers, timestamp, deliver = send.what

        def delivered(err: KafkaError | None, msg: Message) -> None:
            with self._lock:
                if err is not None and err.code() in _MISPLACED:
                    sends.refuse(send)
                    return
                sends.ended(send)
            if deliver is not None:
                deliver(err, msg)

        super().produce(
            send.topic,
            value,
            send.key,
            -1 if send.placed_on is None else send.placed_on,
            on_delivery=delivered,
            timestamp=timestamp,
            headers=counted_headers(self._count_header, headers, send.placed_over),
        )

    def _settle(self) -> None:
        with self._lock:
            late: list[tuple[Send, int | None]] = []
            for topic, sends in self._sends.items():
                if sends.settled and time.monotonic() >= self._ask_at:
                    count = None
                    with contextlib.suppress(KafkaException):
                        count = self._count(topic)
                    late += [(send, count) for send in sends.regrown(count or 0, time.monotonic())]
                    if sends.stale:
                        self._ask_at = time.monotonic() + _PAUSE_SECONDS
                while (again := sends.next()) is not None:
                    try:
                        self._hand_over(sends, again)
                    except (BufferError, KafkaException) as error:
                        sends.put_back(again)
                        if isinstance(error, BufferError) or error.args[0].code() == KafkaError._UNKNOWN_PARTITION:
                            break  # at the next poll
                        sends.queue.popleft()
                        late.append((again, sends.count))
        for send, count in late:
            deliver = send.what[3]
            if deliver is not None:
                reason = f"tried for {self._settle_seconds:g} s; there is no message"
                deliver(count_changed(send, count, reason), None)


#: Setting `partitioner` of librdkafka → where it puts a key.
_PLACEMENTS: dict[str, Placement] = {
    "consistent": crc32,
    "consistent_random": crc32,
    "murmur2": murmur2,
    "murmur2_random": murmur2,
}
#: Refused by the proxy, or by librdkafka itself, which has not heard of a partition yet: not appended.
_MISPLACED = frozenset({INVALID_PARTITIONS, KafkaError._UNKNOWN_PARTITION})
