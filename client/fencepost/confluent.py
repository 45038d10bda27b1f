"""Conditional publish with confluent-kafka."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

try:
    from confluent_kafka import (
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
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, BlockingLogWriter, CannotRead
from fencepost._refusals import POLICY_VIOLATION, refusal, verify
from fencepost.errors import FencepostError, OffsetMismatch, PartitionRequired
from fencepost.records import HeaderNames, LogRecord, conditional_headers, new_write_id
from fencepost.retries import RetryPolicy

__all__ = ["ConditionalProducer", "LogWriter"]

OnDelivery = Callable[[Any, Message], None]

#: A batch waits for `flush` at most this long, so that the library never cuts one in two by the clock.
_LINGER_MS = 300_000
_POLL_SECONDS = 0.5
_POLL_RECORDS = 500

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

    def __init__(self, ttl_seconds: float, config: Mapping[str, Any], timeout_seconds: float) -> None:
        self._cache = CheckCache(ttl_seconds)
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
        resource = ConfigResource(ResourceType.TOPIC, topic)
        futures = self.admin.describe_configs([resource], request_timeout=self._timeout_seconds)
        try:
            entries = futures[resource].result()
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
                return {}
            raise
        return {name: entry.value for name, entry in entries.items()}


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
        **kwargs: Any,
    ) -> None:
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
        self._consumer = Consumer(
            {
                **config,
                "group.id": "fencepost-log-writer",  # wanted by the library; no group is joined, nothing committed
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
            }
        )

    def close(self) -> None:
        self._consumer.close()
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
        start = self._list_offset(OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return start, self._list_offset(OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def _list_offset(self, spec: OffsetSpec) -> int:
        tp = TopicPartition(self.topic, self.partition)
        try:
            futures = self._producer._checks.admin.list_offsets(
                {tp: spec},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=self._retry.attempt_seconds,
            )
            offset: int = futures[tp].result().offset
        except KafkaException as error:
            raise CannotRead from error
        if offset < 0:
            # OFFSET_INVALID (-1001), and no error: librdkafka could not ask the partition's leader.
            raise CannotRead
        return offset

    def _read(self, offset: int, end: int) -> Generator[LogRecord, None, None]:
        self._consumer.assign([TopicPartition(self.topic, self.partition, offset)])
        position, give_up = offset, time.monotonic() + self._retry.attempt_seconds
        try:
            while position < end:
                first = self._consumer.poll(_POLL_SECONDS)
                # consume() with a timeout would wait for the full number of records.
                more = [] if first is None else self._consumer.consume(_POLL_RECORDS, 0)
                for msg in (first, *more) if first is not None else ():
                    err, at = msg.error(), msg.offset()
                    if err is not None and err.code() != KafkaError._PARTITION_EOF:
                        raise CannotRead from KafkaException(err)
                    assert at is not None
                    give_up = time.monotonic() + self._retry.attempt_seconds
                    if err is not None:
                        position = max(position, at)  # behind the last record there may be offsets that hold none
                        continue
                    yield LogRecord(at, msg.timestamp()[1], msg.key(), msg.value(), _headers(msg.headers()))
                    position = at + 1
                if position < end and time.monotonic() >= give_up:
                    raise CannotRead from TimeoutError(
                        f"{self.topic}-{self.partition}: nothing came from offset {position} on for "
                        f"{self._retry.attempt_seconds:g} s"
                    )
        finally:
            self._consumer.unassign()  # else it goes on fetching what is appended


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
