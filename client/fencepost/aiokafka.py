"""Conditional publish with aiokafka."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

try:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
    from aiokafka.errors import (
        BrokerResponseError,
        KafkaError,
        KafkaTimeoutError,
        ProducerFenced,
        UnknownError,
        for_code,
    )
except ModuleNotFoundError as error:
    raise ImportError("fencepost.aiokafka needs aiokafka: pip install 'aiokafka>=0.14'") from error

from fencepost._appending import Append, Appended, LogPosition, MaybeAppended, Refused, Reply
from fencepost._checks import CheckCache, TopicFacts
from fencepost._idempotence import Idempotence, configured
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, LogAppends
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
from fencepost._reading import Positions, Reading
from fencepost._refusals import POLICY_VIOLATION, refusal, verify
from fencepost._steps import CannotRead, once, patiently, run_async
from fencepost._transaction import COMMIT_REFUSED, FENCED, PRODUCER_FENCED, Part, RequestedAppends, explained
from fencepost._transactional_writer import CommitInDoubt, Transactions
from fencepost.errors import FencepostError, OffsetMismatch, PartitionRequired, WriterFenced
from fencepost.expansions import PartitionExpansion, expansions_of
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
    "read_expansions",
]

T = TypeVar("T")

_POLL_MS = 500
_PAUSE_SECONDS = 0.1
#: ListOffsets returns the high watermark, which may lag the log end offset that caused the refusal.
_LOG_END_TRIES = 5
_LOG_END_PAUSE_SECONDS = 0.05
_FETCH_WAIT_MS = 10
_END_SECONDS = 1.0
#: Retry backoff of an append that waits for another writer's transaction.
_RETRY_BACKOFF_MS = 50
#: DescribeConfigs errors that mean "not visible" rather than "retry": unknown topic, not authorized.
_NOT_VISIBLE = frozenset({3, 29})


class TopicChecks:
    """Checked topics, read through its own admin client."""

    def __init__(self, ttl_seconds: float, configs: Mapping[str, Any], check: str = CHECK_CONFIG) -> None:
        self._cache = CheckCache(ttl_seconds, config=check)
        self._configs = _only(AIOKafkaAdminClient, configs)
        self._admin: Any = None
        self._lock = asyncio.Lock()

    async def require(self, topic: str) -> TopicFacts:
        """The facts of a checked topic. Raises CheckIsOff, or KafkaError if the configs cannot be read."""
        facts = self._cache.get(topic)
        if facts is not None:
            return facts
        async with self._lock:
            facts = self._cache.get(topic)
            return facts if facts is not None else self._cache.learn(topic, await self._describe(topic))

    async def _describe(self, topic: str) -> dict[str, str | None]:
        if self._admin is None:
            self._admin = await _started(AIOKafkaAdminClient(**self._configs), "close")
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
        header_names: HeaderNames = HeaderNames(),  # noqa: B008 - frozen
        idempotence: Idempotence | None = None,
        **configs: Any,
    ) -> None:
        configs |= configured(idempotence, configs, "enable_idempotence", possible=True)
        if configs.get("acks") == 0:
            raise ValueError("acks=0 cannot be used with expected offsets: the producer would not receive refusals")
        configs.setdefault("acks", "all")
        super().__init__(**configs)
        self._header_names = header_names
        self._checks = TopicChecks(check_ttl_seconds, configs)
        self._reader_configs = _only(AIOKafkaConsumer, configs)
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

        The future raises OffsetMismatch if the log ends at another offset. The records of one batch are accepted or
        refused together; those without `expected_offset` then raise PolicyViolationError. `write_id`: identifies this
        write, 16 random bytes by default. To repeat a send with an unknown outcome, pass the same `write_id` and the
        same record. Raises CheckIsOff, PartitionRequired, ValueError.
        """
        if expected_offset is None:
            unchecked: asyncio.Future[Any] = await super().send(topic, value, key, partition, timestamp_ms, headers)
            return unchecked
        if partition is None:
            raise PartitionRequired("expected_offset= needs partition= (offsets are per partition)")
        headers = conditional_headers(self._header_names, headers or (), expected_offset, write_id or new_write_id())
        await self._checks.require(topic)
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
                    self._reader = await _started(AIOKafkaConsumer(**self._reader_configs, enable_auto_commit=False))
            end: int | None = None
            for _ in range(_LOG_END_TRIES):
                end = (await self._reader.end_offsets([tp]))[tp]
                if end != expected:
                    break
                await asyncio.sleep(_LOG_END_PAUSE_SECONDS)
            return end  # if equal to `expected`: another record of the batch was refused
        except KafkaError:
            return None  # the refusal is valid without it


class _Stopping:
    """An asynchronous context manager that starts and stops its object."""

    async def start(self) -> None:
        """No-op: connections open on first use."""

    async def stop(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class LogWriter(_Stopping):
    """Reads one partition to its end, then appends batches, each only if the log still ends there (KIP-27).

    Each append is one batch, appended completely or not at all. Reads committed records only. `configs`: aiokafka's
    connection settings (`bootstrap_servers`, `security_protocol`, …) for producer, consumer and admin client.
    `batch_bytes_max`: bytes, uncompressed. See docs/client.md.

    Call `start` and `stop`, or use `async with`. Do not share it between concurrent tasks.
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
        self.topic = topic
        self.partition = partition
        # aiokafka also retries a batch, unchanged, for this long.
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self._appender = _Appender(
            ConditionalProducer(
                **configs,
                compression_type=compression_type,
                max_batch_size=batch_bytes_max,
                check_ttl_seconds=check_ttl_seconds,
                header_names=header_names,
            )
        )
        self._consumer = _CommittedConsumer(configs)
        self._position = LogPosition(topic, partition, header_names, retry, batch_bytes_max)
        self._appends = LogAppends(self._position, self._appender, self._consumer, retry)

    @property
    def next_offset(self) -> int | None:
        """The offset after the last record read or appended; None before the first `read_to_end`."""
        return self._position.next_offset

    async def start(self) -> None:
        await self._appender.producer.start()
        await self._consumer.start()

    async def stop(self) -> None:
        await self._consumer.close()
        await self._appender.close()

    async def read_to_end(self, apply: Callable[[LogRecord], Awaitable[None] | None]) -> int:
        """Call `apply(record)` (a function or coroutine function) for each record from `next_offset` to the log end.

        Returns the offset that the next append expects. This writer's own appends are not read again. If `apply`
        raises, the error propagates and the record counts as unread. An unreachable cluster is retried for
        `retry.total_seconds`, then the client library's error is raised. Raises PositionLost.
        """
        return await run_async(self._appends.read_to_end(apply))

    async def append(self, records: Sequence[Record]) -> int:
        """Append `records` as one batch at `next_offset`. Returns the offset of the first record.

        Raises OffsetMismatch (another writer was first: `read_to_end`, then decide again), NotAtEnd, BatchTooLarge,
        CheckIsOff or ValueError: nothing was appended. Raises InDoubt if the outcome is unknown, OffsetViolation if
        the batch was appended at another offset. Other errors are the client library's. Call `read_to_end` before the
        next append, except after BatchTooLarge, CheckIsOff and ValueError.
        """
        return await run_async(self._appends.append(records))


class _Appender:
    error = KafkaError

    def __init__(self, producer: ConditionalProducer) -> None:
        self.producer = producer

    async def require(self, topic: str) -> TopicFacts:
        return await self.producer._checks.require(topic)

    async def send(self, append: Append) -> Reply:
        batch = self.producer.create_batch()
        for index, record in enumerate(append.records):
            fits = batch.append(
                timestamp=record.timestamp_ms, key=record.key, value=record.value, headers=append.headers(index)
            )
            assert fits is not None, "batch_bytes_max() promises that it fits"
        batch.close()
        try:
            metadata = await (await self.producer.send_batch(batch, append.topic, partition=append.partition))
            return Appended(metadata.offset)
        except BrokerResponseError as error:
            ours = await self.producer._refusal(error, append.topic, append.partition, append.expected)
            if isinstance(ours, OffsetMismatch):
                return Refused(ours)
            if error.retriable or isinstance(error, UnknownError):
                return MaybeAppended(error)
            raise
        except KafkaError as error:  # client-side errors: timeouts, connections
            return MaybeAppended(error)

    async def close(self) -> None:
        await self.producer.stop()


class _CommittedConsumer:
    error = KafkaError
    timeout_error = KafkaTimeoutError

    def __init__(self, configs: Mapping[str, Any]) -> None:
        self._configs = {
            "fetch_max_wait_ms": _FETCH_WAIT_MS,  # a read never waits for future records
            **_only(AIOKafkaConsumer, configs),
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
        }
        self._consumer: Any = None

    async def start(self) -> None:
        if self._consumer is None:
            self._consumer = await _started(AIOKafkaConsumer(**self._configs))

    async def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        tp = TopicPartition(topic, partition)
        start = (await self._consumer.beginning_offsets([tp]))[tp]
        return start, (await self._consumer.end_offsets([tp]))[tp]

    def seek(self, topic: str, partition: int, offset: int) -> None:
        tp = TopicPartition(topic, partition)
        if self._consumer.assignment() != {tp}:
            self._consumer.assign([tp])
        self._consumer.seek(tp, offset)
        self._consumer.resume(tp)

    async def poll(self) -> tuple[list[LogRecord], int]:
        (tp,) = self._consumer.assignment()
        records = [
            LogRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
            for record in (await self._consumer.getmany(tp, timeout_ms=_POLL_MS)).get(tp, [])
        ]
        return records, await self._consumer.position(tp)

    def pause(self) -> None:
        self._consumer.pause(*self._consumer.assignment())  # otherwise it keeps fetching new records

    async def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()


class LogReader(_Stopping):
    """Reads the committed records of several partitions, and returns the expected offset of each. See docs/client.md.

    The expected offset is the last stable offset: it lies after all committed and aborted records and their markers.
    While another transaction is open, it is that transaction's first offset. A conditional append there waits until
    that transaction ends, and is then refused.

    `partitions`: (topic, partition) tuples or TopicPartitions. `configs`: aiokafka's consumer settings.
    """

    def __init__(
        self,
        partitions: Iterable[Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self._retry = retry
        self._consumer = _CommittedConsumer(configs)
        self._positions = Positions(partitions, Reading(self._consumer, retry.attempt_seconds), retry)

    async def read_to_end(self, apply: Callable[[Any, LogRecord], Awaitable[None] | None]) -> dict[Any, int]:
        """Call `apply(partition, record)` (a function or coroutine function) for each unread committed record.

        Reads one partition after the other. Returns {partition: expected offset}. If `apply` raises, the error
        propagates and the record counts as unread. An unreachable cluster is retried for `retry.total_seconds`, then
        the client library's error is raised. Raises PositionLost.
        """
        return await run_async(self._positions.read_to_end(apply))

    async def start(self) -> None:
        await run_async(patiently(lambda: once(self._consumer.start), self._retry, KafkaError))

    async def stop(self) -> None:
        await self._consumer.close()


class TransactionalWriter(_Stopping):
    """Appends to several partitions in one transaction, each at its expected offset: all or nothing (KIP-27, KIP-98).

    `configs`: aiokafka's connection settings for producer, consumer and admin client. `transaction_timeout_seconds`:
    the coordinator aborts an open transaction after this time. A send, commit or abort takes up to
    `retry.attempt_seconds`, finding an unknown outcome up to `retry.total_seconds`. See docs/client.md.

    Call `stop`, or use `async with`. One append at a time, and one writer per `transactional_id`: a new writer fences
    the previous one.
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
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self.transactional_id = transactional_id
        producer_configs = {
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
            **configs,
            "transactional_id": transactional_id,
            "transaction_timeout_ms": int(transaction_timeout_seconds * 1000),
            "compression_type": compression_type,
            "header_names": header_names,
        }
        self._consumer = _CommittedConsumer(configs)
        self._producer = _Transaction(
            producer_configs,
            TopicChecks(check_ttl_seconds, configs),
            Reading(self._consumer, retry.attempt_seconds),
            retry.attempt_seconds,
        )
        self._transactions = Transactions(transactional_id, self._producer, self._consumer, retry, header_names)

    async def append(self, requested: RequestedAppends) -> dict[Any, int]:
        """Append to all partitions and commit, or append to none.

        `requested`: {partition: (expected offset, records)}. A partition is a (topic, partition) tuple or a
        TopicPartition. An expected offset of None appends without a check; at least one must be set. Returns
        {partition: offset of its first record}. A transaction marker follows the records, so the next expected offset
        is that offset + number of records + 1, unless another writer appends first.

        Raises OffsetMismatch, TransactionConflict or TransactionAborted (not done in time): no record is or becomes
        visible; read, decide and append again (see `retrying_async`). Raises WriterFenced if the writer is unusable,
        OutcomeUnknown if the outcome is unknown, ValueError and CheckIsOff if nothing was sent. Other errors are the
        client library's; no record is visible then either. A cancelled append is aborted, unless its commit was sent.
        """
        return await run_async(self._transactions.append(requested))

    async def stop(self) -> None:
        await run_async(self._transactions.drop())
        await self._producer.close()
        await self._consumer.close()


class _Transaction:
    error = KafkaError

    def __init__(self, configs: dict[str, Any], checks: TopicChecks, reading: Reading, attempt_seconds: float) -> None:
        self._configs = configs
        self._checks = checks
        self._reading = reading
        self._attempt_seconds = attempt_seconds
        self._producer: Any = None

    async def require(self, topic: str) -> TopicFacts:
        return await self._checks.require(topic)

    async def open(self) -> None:
        producer = ConditionalProducer(**self._configs)
        checks, producer._checks = producer._checks, self._checks  # one admin client for all producers
        try:
            await self._in_time(producer.start())
        except BaseException as error:
            await _end(producer)
            await checks.close()
            if isinstance(error, TimeoutError) or (isinstance(error, KafkaError) and error.retriable):
                raise CannotRead from error
            raise
        self._producer = producer

    async def begin(self) -> None:
        await self._producer.begin_transaction()

    async def send(self, part: Part, write_id: bytes) -> int:
        try:
            futures = [
                await AIOKafkaProducer.send(
                    self._producer,
                    part.topic,
                    record.value,
                    record.key,
                    part.partition,
                    record.timestamp_ms,
                    part.headers(index, self._configs["header_names"], write_id),
                )
                for index, record in enumerate(part.records)
            ]
            sent = await self._in_time(asyncio.gather(*futures))
            return int(sent[0].offset)
        except (KafkaError, TimeoutError) as error:
            cause = self._cause(error)
            code = _code_of(cause)
            if code == POLICY_VIOLATION and part.expected is not None:
                # aiokafka hides which refusal it is. A committed read shows whether it was a mismatch.
                observation = await run_async(self._reading.probe(part.topic, part.partition, part.expected))
                if observation is not None and observation.log_end != part.expected:
                    raise OffsetMismatch(part.topic, part.partition, part.expected, observation.log_end) from error
            retriable = _is_temporary(cause)
            why = explained(part, error, code=code, retriable=retriable, transactional_id=self._id)
            raise why from (None if why is error else error)

    async def commit(self) -> None:
        try:
            await self._in_time(self._producer.commit_transaction())
        # After any error of the coordinator, this producer is unusable.
        except Exception as error:
            code = _code_of(error)
            if code in FENCED:
                raise WriterFenced(self._id) from error
            raise CommitInDoubt(refused=code in COMMIT_REFUSED) from error

    async def abort(self) -> bool:
        await self._in_time(self._producer.abort_transaction())
        return True

    async def discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await _end(producer)

    async def close(self) -> None:
        await self._checks.close()

    def _cause(self, error: BaseException) -> BaseException:
        """Why aiokafka's sender stopped, if it did: each record then fails with a KafkaError that lacks the cause."""
        sender = self._producer._sender.sender_task
        stopped = sender.exception() if type(error) is KafkaError and sender.done() and not sender.cancelled() else None
        return error if stopped is None else stopped.__cause__ or stopped

    async def _in_time(self, call: Awaitable[T]) -> T:
        return await asyncio.wait_for(call, self._attempt_seconds)

    @property
    def _id(self) -> str:
        return str(self._configs["transactional_id"])


async def _end(producer: ConditionalProducer) -> None:
    """Close a producer that may be unusable."""
    with contextlib.suppress(KafkaError, TimeoutError):
        # Without a limit, it would keep trying to commit.
        await asyncio.wait_for(AIOKafkaProducer.stop(producer), _END_SECONDS)
    waiter = producer._txn_manager.wait_for_transaction_end()
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()  # otherwise the loop logs an unretrieved exception


async def _started(client: Any, stop: str = "stop") -> Any:
    """`client`, after `start`, or stopped again."""
    try:
        await client.start()
    except BaseException:
        await getattr(client, stop)()
        raise
    return client


def _is_temporary(error: BaseException) -> bool:
    """Whether a failed append may succeed in the next transaction. Errors of neither Kafka nor aiokafka stop its sender
    when the connection to the coordinator is lost."""
    if not isinstance(error, KafkaError) or type(error) is KafkaError:
        return True
    return bool(error.retriable) or isinstance(error, UnknownError | KafkaTimeoutError)


def _code_of(error: BaseException | None) -> int | None:
    """The server's error code, also if the library wrapped the error; None if there is none."""
    while error is not None:
        if isinstance(error, ProducerFenced):  # aiokafka raises it for both codes
            return PRODUCER_FENCED
        if isinstance(error, BrokerResponseError) and error.errno > 0:
            return int(error.errno)
        error = error.__cause__
    return None


def _only(client: type, configs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `configs` that the constructor of `client` accepts."""
    known = inspect.signature(client).parameters
    return {name: value for name, value in configs.items() if name in known and name != "loop"}


async def describe_topic(admin: Any, topic: str) -> dict[str, str | None]:
    """A topic's configs {name: value}, read with an AIOKafkaAdminClient; empty if they are not visible."""
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, None)])
    code, message, _, _, entries = response.resources[0]
    if code in _NOT_VISIBLE:
        return {}
    if code:
        raise for_code(code)(message)
    return {entry[0]: entry[1] for entry in entries}


async def read_expansions(admin: Any, topic: str) -> tuple[PartitionExpansion, ...]:
    """See `fencepost.partition_expansions`."""
    return expansions_of(topic, await describe_topic(admin, topic))


class OrderedConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """AIOKafkaConsumer that reads topics without joining a group, and keeps keys in order across expansions (KIP-253).

    `getmany`, `getone` and iteration work as in AIOKafkaConsumer. A partition that an expansion added is assigned after
    all prior partitions are read up to their thresholds. Records returned by an earlier call count as read. See
    docs/client.md.

    `partition_filter(partition)`: whether this consumer reads a partition, also a future one; default all. Processes
    that share topics need the same `group_id` and must commit. `positions`: {TopicPartition: offset} to start at, for
    applications that store offsets themselves. Other partitions start at the group's committed offsets or by
    `auto_offset_reset`. `refresh_seconds`: interval of checks for expansions and other processes' commits. `start`
    raises CheckIsOff, ValueError.
    """

    def __init__(
        self,
        *topics: str,
        partition_filter: Callable[[int], bool] | None = None,
        positions: Mapping[TopicPartition, int] | None = None,
        refresh_seconds: float = 1.0,
        **configs: Any,
    ) -> None:
        super().__init__(**configs)
        self._admin = AIOKafkaAdminClient(**_only(AIOKafkaAdminClient, configs))
        self._reads = OrderedReads(
            topics,
            _Assignment(self, self._admin),
            partition_filter=partition_filter,
            given=positions,
            grouped=configs.get("group_id") is not None,
            latest=configs.get("auto_offset_reset", "latest") == "latest",
            refresh_seconds=refresh_seconds,
        )
        self._refresh_seconds = refresh_seconds

    async def start(self) -> None:
        await super().start()
        await self._admin.start()
        await run_async(self._reads.start())

    async def stop(self) -> None:
        await super().stop()
        await self._admin.close()

    def waiting(self) -> dict[TopicPartition, Waiting]:
        """The gated partitions, and what each waits for: {TopicPartition: Waiting}."""
        return {TopicPartition(*where): waits for where, waits in self._reads.waiting().items()}

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

    def subscribe(self, *_: Any, **__: Any) -> None:
        """Raises TypeError: a group coordinator would assign gated partitions."""
        raise TypeError("an OrderedConsumer reads the topics of its constructor (the proxy orders groups)")


class _Assignment:
    def __init__(self, consumer: AIOKafkaConsumer, admin: AIOKafkaAdminClient) -> None:
        self._consumer = consumer
        self._admin = admin

    async def describe(self, topic: str) -> tuple[int, dict[str, str | None]]:
        (described,) = await self._admin.describe_topics([topic])
        if described["error_code"] not in {0, *_NOT_VISIBLE}:
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


class OrderedProducer(AIOKafkaProducer):  # type: ignore[misc]
    """AIOKafkaProducer that keeps each key in order across expansions of its topic (KIP-253). See docs/client.md.

    Each record carries the partition count that chose its partition. If the topic has more partitions, the proxy
    refuses the record, and this producer repartitions it, in the order of `send`.

    `partitioner`: (key, partition count) → partition; default: the Java client's.
    `repartition_timeout_seconds`: how long a record may be refused before it fails with PartitionCountChanged.
    `buffered_max`: how many records may be queued meanwhile; then `send` waits.

    The default is `acks="all"`. `acks=0`, transactions and idempotence raise ValueError (an idempotent producer of
    aiokafka cannot append to a partition after a refusal).
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
            acks=configs.setdefault("acks", "all"),
            idempotent=bool(configs.get("enable_idempotence")),
            transactional=configs.get("transactional_id") is not None,
            idempotence="an idempotent producer of aiokafka fails on a partition after a refusal (leave it off)",
        )
        self._serializers = configs.pop("key_serializer", None), configs.pop("value_serializer", None)
        super().__init__(**configs)
        self._sends = OrderedSends(partitioner, header_names, repartition_timeout_seconds, buffered_max)
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

        Raises CheckIsOff, ValueError; the future raises PartitionCountChanged.
        """
        given = self._sends.checked(headers)
        await self._checks.require(topic)
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

    async def send_and_wait(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
    ) -> Any:
        """`send`, then wait for the outcome: RecordMetadata."""
        return await (await self.send(topic, value, key, partition, timestamp_ms, headers))

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
