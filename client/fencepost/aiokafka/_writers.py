"""Log writers, log readers and transactional writers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError, ProducerFenced, UnknownError

from fencepost._appending import Append, MaybeAppended
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, LogWriterBase
from fencepost._reading import LogReaderBase
from fencepost._shared_log import AsyncSharedLog
from fencepost._steps import CannotRead, once, run_async
from fencepost._transaction import COMMIT_REFUSED, FENCED, PRODUCER_FENCED, Part, RequestedAppends, explained
from fencepost._transactional_writer import CommitInDoubt, TransactionalWriterBase
from fencepost.aiokafka._producer import ConditionalProducer, TopicChecks, only, started
from fencepost.errors import AppendRefusedError, WriterFencedError
from fencepost.records import LogRecord, Record
from fencepost.retries import RetryPolicy, patiently

S = TypeVar("S")
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


async def _started_patiently(start: Callable[[], Awaitable[None]], retry: RetryPolicy) -> None:
    """The proxy may be starting, too."""
    await run_async(patiently(partial(once, start), retry, KafkaError))


class LogWriter(LogWriterBase, _Stopping):
    __doc__ = LogWriterBase.__doc__

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        compression_type: str | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        batch_bytes_max: int = DEFAULT_BATCH_BYTES_MAX,
        check_ttl_seconds: float = 30.0,
        **configs: Any,
    ) -> None:
        # aiokafka also retries a batch, unchanged, for this long.
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self._sender = ConditionalProducer(
            **configs,
            compression_type=compression_type,
            max_batch_size=batch_bytes_max,
            check_ttl_seconds=check_ttl_seconds,
        )
        consumer = _CommittedConsumer(configs)
        super().__init__(topic, partition, _Appender(self._sender), consumer, retry, batch_bytes_max)

    async def start(self) -> None:
        await _started_patiently(self._sender.start, self.retry)
        await _started_patiently(self._reading.consumer.start, self.retry)

    async def stop(self) -> None:
        await self._reading.close()
        await self._appender.close()

    def __aiter__(self) -> AsyncIterator[LogRecord]:
        return self.loop()

    async def read_to_end(self, apply: Callable[[LogRecord], Awaitable[None] | None]) -> int:
        """Call `apply(record)` for each record to the log end, and await a coroutine. Returns the offset that the next
        append expects."""
        async for record in self:
            await _applied(apply(record))
        assert self.next_offset is not None
        return self.next_offset

    async def append(self, records: Sequence[Record]) -> int:
        return int(await run_async(super().append(records)))


class _Appender:
    error = KafkaError

    def __init__(self, producer: ConditionalProducer) -> None:
        self._producer = producer
        self.require = producer._checks.require

    async def send(self, append: Append) -> int:
        batch = self._producer.create_batch()
        for index, record in enumerate(append.records):
            fits = batch.append(
                timestamp=record.timestamp_ms, key=record.key, value=record.value, headers=append.headers(index)
            )
            assert fits is not None, "batch_bytes_max() promises that it fits"
        batch.close()
        try:
            metadata = await (await self._producer.send_batch(batch, append.topic, partition=append.partition))
            return int(metadata.offset)
        except BrokerResponseError as error:
            ours = self._producer._refusal(error, append.topic, append.partition, append.expected)
            if isinstance(ours, AppendRefusedError) and error.earlier:
                raise MaybeAppended from error
            if ours is not None:
                raise ours from error
            if error.retriable or isinstance(error, UnknownError) or getattr(error, "earlier", False):
                raise MaybeAppended from error
            raise
        except KafkaError as error:  # client-side errors: timeouts, connections
            raise MaybeAppended from error

    async def close(self) -> None:
        await self._producer.stop()


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

    async def exists(self, topic: str, partition: int) -> bool:
        cluster = await self._consumer._client.fetch_all_metadata()
        return partition in (cluster.partitions_for_topic(topic) or ())

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
        # Otherwise it keeps fetching new records, up to what one poll returns. A loop over the log that is collected as
        # garbage outside of the event loop cannot pause it.
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self._consumer.pause(*self._consumer.assignment())

    async def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()


class SharedLog(AsyncSharedLog[S], _Stopping):
    __doc__ = AsyncSharedLog.__doc__

    _log: LogWriter

    async def start(self) -> None:
        """Start the log writer, and read to the log end."""
        await self._log.start()
        await self.change(lambda _: ())

    async def stop(self) -> None:
        """Append what waits, then stop the log writer."""
        self._closed = True
        if self._worker is not None:
            await asyncio.wait([self._worker])
        await self._log.stop()


class LogReader(LogReaderBase, _Stopping):
    __doc__ = LogReaderBase.__doc__

    def __init__(
        self,
        partitions: Iterable[Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        super().__init__(partitions, _CommittedConsumer(configs), retry)

    def __aiter__(self) -> AsyncIterator[tuple[Any, LogRecord]]:
        return self._loop()

    async def read_to_end(self, apply: Callable[[Any, LogRecord], Awaitable[None] | None]) -> dict[Any, int]:
        """Call `apply(partition, record)` for each unread record, and await a coroutine. Returns {partition: expected
        offset}."""
        async for key, record in self:
            await _applied(apply(key, record))
        return self.next_offsets

    async def start(self) -> None:
        await _started_patiently(self._reading.consumer.start, self._reading.retry)

    async def stop(self) -> None:
        await self._reading.close()


class TransactionalWriter(TransactionalWriterBase, _Stopping):
    __doc__ = TransactionalWriterBase.__doc__

    def __init__(
        self,
        transactional_id: str,
        *,
        compression_type: str | None = None,
        transaction_timeout_seconds: float = 60.0,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        check_ttl_seconds: float = 30.0,
        **configs: Any,
    ) -> None:
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        producer_configs = {
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
            **configs,
            "transactional_id": transactional_id,
            "transaction_timeout_ms": int(transaction_timeout_seconds * 1000),
            "compression_type": compression_type,
        }
        consumer, attempt_seconds = _CommittedConsumer(configs), retry.attempt_seconds
        producer = _Transaction(
            producer_configs,
            TopicChecks(check_ttl_seconds, configs),
            attempt_seconds,
        )
        super().__init__(transactional_id, producer, consumer, retry)

    async def append(self, requested: RequestedAppends) -> dict[Any, int]:
        return dict(await run_async(super().append(requested)))

    async def stop(self) -> None:
        await run_async(self._drop())
        await self._producer.close()
        await self._consumer.close()


class _Transaction:
    error = KafkaError

    def __init__(self, configs: dict[str, Any], checks: TopicChecks, attempt_seconds: float) -> None:
        self._configs = configs
        self._checks = checks
        self.require = checks.require
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
                    part.headers(index, write_id, self._checks.cluster_id),
                )
                for index, record in enumerate(part.records)
            ]
            sent = await self._in_time(asyncio.gather(*futures))
            return int(sent[0].offset)
        except (KafkaError, TimeoutError) as error:
            cause = self._cause(error)
            code = _code_of(cause)
            refused: Exception = error
            if isinstance(cause, BrokerResponseError) and part.expected is not None:
                refused = self._producer._refusal(cause, *part.where, part.expected) or error
            retriable = _is_temporary(cause)
            why = explained(part, refused, code=code, retriable=retriable, transactional_id=self._id)
            raise why from (None if why is error else error)

    async def commit(self) -> None:
        try:
            await self._in_time(self._producer.commit_transaction())
        # After any error of the coordinator, this producer is unusable.
        except Exception as error:
            code = _code_of(error)
            if code in FENCED:
                raise WriterFencedError(self._id) from error
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


async def _applied(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result


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
