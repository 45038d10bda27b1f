"""Log writers, log readers and transactional writers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError, ProducerFenced, UnknownError

from fencepost._appending import Append, Appended, LogPosition, MaybeAppended, Refused, Reply
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, LogAppends
from fencepost._reading import Positions, Reading
from fencepost._refusals import POLICY_VIOLATION
from fencepost._steps import CannotRead, once, run_async
from fencepost._transaction import COMMIT_REFUSED, FENCED, PRODUCER_FENCED, Part, RequestedAppends, explained
from fencepost._transactional_writer import CommitInDoubt, Transactions
from fencepost.aiokafka._producer import ConditionalProducer, TopicChecks, only, started
from fencepost.errors import OffsetMismatch, WriterFenced
from fencepost.records import HeaderNames, LogRecord, Record
from fencepost.retries import RetryPolicy, patiently

T = TypeVar("T")
_POLL_MS = 500
_FETCH_WAIT_MS = 10
_END_SECONDS = 1.0
#: Retry backoff of an append that waits for another writer's transaction.
_RETRY_BACKOFF_MS = 50


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
        self.require = producer._checks.require

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
            **only(AIOKafkaConsumer, configs),
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
        }
        self._consumer: Any = None

    async def start(self) -> None:
        if self._consumer is None:
            self._consumer = await started(AIOKafkaConsumer(**self._configs))

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
        self.require = checks.require
        self._reading = reading
        self._attempt_seconds = attempt_seconds
        self._producer: Any = None

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
        if type(error) is KafkaError and sender.done() and not sender.cancelled():
            error = sender.exception() or error
        while type(error) is KafkaError and error.__cause__ is not None:
            error = error.__cause__
        return error

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
