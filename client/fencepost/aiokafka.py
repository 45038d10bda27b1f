"""Conditional publish with aiokafka."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
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

from fencepost._appending import Append, Appended, Done, Doubtful, LogPosition, Refused, Reply, Sight
from fencepost._checks import CheckCache, TopicFacts
from fencepost._idempotence import Idempotence, configured
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, CannotRead, stamped_now
from fencepost._ordering import TopicOrder, Waiting, every, refuse_alone, was_read
from fencepost._placing import (
    INVALID_PARTITIONS,
    Placement,
    Send,
    TopicSends,
    count_changed,
    counted_headers,
    murmur2,
    refuse_configs,
)
from fencepost._refusals import POLICY_VIOLATION, refusal, verify
from fencepost._transaction import (
    COMMIT_REFUSED,
    FENCED,
    PRODUCER_FENCED,
    REFUSED_AT_THE_END,
    Ended,
    Part,
    Wanted,
    explained,
    landed,
    parts_of,
    place,
    refuse_required,
    settle,
)
from fencepost.errors import (
    FencepostError,
    OffsetMismatch,
    OutcomeUnknown,
    PartitionRequired,
    TransactionAborted,
    TransactionConflict,
    WriterFenced,
)
from fencepost.expansions import PartitionExpansion, expansions_of
from fencepost.records import (
    CHECK_CONFIG,
    COUNT_CHECK_CONFIG,
    MAX_MESSAGE_BYTES_CONFIG,
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
#: The log end that can be asked for is the high watermark, which may lag behind what refused the write.
_LOG_END_TRIES = 5
_LOG_END_PAUSE_SECONDS = 0.05
_FETCH_WAIT_MS = 10
_END_SECONDS = 1.0
#: Of an append that waits for another's transaction.
_RETRY_BACKOFF_MS = 50
#: DescribeConfigs errors that mean "not visible" rather than "ask again": unknown topic, not authorized.
_NOT_VISIBLE = frozenset({3, 29})


class TopicChecks:
    """Which topics are checked, asked through an admin client of its own."""

    def __init__(self, ttl_seconds: float, configs: Mapping[str, Any], check: str = CHECK_CONFIG) -> None:
        self._cache = CheckCache(ttl_seconds, config=check)
        self._configs = _only(AIOKafkaAdminClient, configs)
        self._admin: Any = None
        self._lock = asyncio.Lock()

    async def require(self, topic: str) -> TopicFacts:
        """Raises CheckIsOff, or a KafkaError if it cannot be found out."""
        facts = self._cache.get(topic)
        if facts is not None:
            return facts
        async with self._lock:
            facts = self._cache.get(topic)
            return facts if facts is not None else self._cache.learn(topic, await self._describe(topic))

    async def _describe(self, topic: str) -> dict[str, str | None]:
        if self._admin is None:
            admin = AIOKafkaAdminClient(**self._configs)
            try:
                await admin.start()
            except BaseException:
                await admin.close()
                raise
            self._admin = admin
        wanted = dict.fromkeys((self._cache.config, MAX_MESSAGE_BYTES_CONFIG), "")
        (response,) = await self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, wanted)])
        code, message, _, _, entries = response.resources[0]
        if code in _NOT_VISIBLE:
            return {}
        if code:
            raise for_code(code)(message)
        return {entry[0]: entry[1] for entry in entries}

    async def close(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()


class ConditionalProducer(AIOKafkaProducer):  # type: ignore[misc]
    """AIOKafkaProducer whose `send` and `send_and_wait` take `expected_offset`. Everything else is the library's own.

    `acks="all"` by default, which the proxy makes of every conditional append anyway; `acks=0` is not possible, since a
    refusal could not be told.
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
            raise ValueError("acks=0 cannot be used with expected offsets: nobody would hear of a refusal")
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
        """As AIOKafkaProducer.send; with `expected_offset`, the record is appended at this offset or not at all.

        Then the future raises OffsetMismatch where the log ended elsewhere. Records that the library puts into one
        batch stand or fall together, those without an expectation too (they raise PolicyViolationError). `write_id`
        names this write, by default at random: give the same one, and the same record, to send it again after a
        doubt. Raises CheckIsOff, PartitionRequired.
        """
        if expected_offset is None:
            plain: asyncio.Future[Any] = await super().send(topic, value, key, partition, timestamp_ms, headers)
            return plain
        if partition is None:
            raise PartitionRequired("expected_offset= needs partition=: every partition has offsets of its own")
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
        """`send`, and its outcome."""
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
        if self._outcomes:  # some may still be asking where the log ends
            await asyncio.wait(self._outcomes)
        await self._checks.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.stop()

    async def _outcome(self, future: asyncio.Future[Any], topic: str, partition: int, expected: int) -> Any:
        try:
            # Cancelling the caller's future does not stop the record, as in the library.
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
        # aiokafka speaks Produce v7, which has no message, and drops the offset: ask where the log ends.
        end = await self._log_end(TopicPartition(topic, partition), expected)
        return refusal(topic, partition, expected, code=error.errno, message=None, log_end=end)

    async def _log_end(self, tp: TopicPartition, expected: int) -> int | None:
        try:
            async with self._reader_lock:
                if self._reader is None:
                    reader = AIOKafkaConsumer(**self._reader_configs, enable_auto_commit=False)
                    try:
                        await reader.start()
                    except BaseException:
                        await reader.stop()
                        raise
                    self._reader = reader
            end: int | None = None
            for _ in range(_LOG_END_TRIES):
                end = (await self._reader.end_offsets([tp]))[tp]
                if end != expected:
                    break
                await asyncio.sleep(_LOG_END_PAUSE_SECONDS)
            return end  # as expected after all: then another record of the batch did not fit
        except KafkaError:
            return None  # the refusal stands without it


class LogWriter:
    """Reads one partition to its end, then appends batches to it, each exactly where it believes the log ends.

    One append at a time, in one batch: it is in the log as a whole or not at all. KIP-27's worked example; see
    docs/client.md. `configs` are aiokafka's for the connection (`bootstrap_servers`, `security_protocol`, …), for
    producer, consumer and admin client alike. Transactions of others are read once they are committed.

    `start` and `stop` it, or use it as `async with`. Not for several tasks at once.
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
        self._retry = retry
        self._position = LogPosition(topic, partition, header_names, retry, batch_bytes_max)
        # Also how long aiokafka itself sends a batch again, the same bytes; then it gives it up.
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self._producer = ConditionalProducer(
            **configs,
            compression_type=compression_type,
            max_batch_size=batch_bytes_max,
            check_ttl_seconds=check_ttl_seconds,
            header_names=header_names,
        )
        self._reading = _Reading(retry.attempt_seconds, configs)

    @property
    def next_offset(self) -> int | None:
        """The offset behind the last record read or appended; None before the first `read_to_end`."""
        return self._position.next_offset

    async def start(self) -> None:
        await self._producer.start()
        try:
            await self._reading.start()
        except CannotRead as error:
            raise (error.__cause__ or error) from None

    async def stop(self) -> None:
        await self._reading.stop()
        await self._producer.stop()

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

    async def read_to_end(self, apply: Callable[[LogRecord], Awaitable[None] | None]) -> int:
        """Calls `apply` (a function or a coroutine function) for every record from where this writer stands up to
        the end of the log, in order.

        Returns the offset that the next append will expect. Own appends are not read again. An exception of `apply`
        is passed on; the record counts as not read. While the cluster cannot be reached it is tried for
        `retry.total_seconds`, then the client library's error is raised. Raises PositionLost.
        """
        return await self._patiently(lambda: self._read_once(apply))

    async def append(self, records: Sequence[Record]) -> int:
        """Appends `records` as one batch at the end that was read; returns the offset of the first.

        Raises, with nothing appended: OffsetMismatch (another writer was first: `read_to_end`, then decide again),
        NotAtEnd, BatchTooLarge, CheckIsOff. Raises InDoubt where it could not be found out. After any of them but
        BatchTooLarge and CheckIsOff the writer must `read_to_end` again. Other errors are the client library's.
        """
        facts = await self._patiently(self._require_check)
        append = self._position.begin(stamped_now(records), new_write_id(), facts, time.monotonic())
        while True:
            reply = await self._send(append)
            sight = None if isinstance(reply, Appended) else await self._look(append.expected)
            step = append.judge(reply, sight, time.monotonic())
            if isinstance(step, Done):
                self._position.ended(append)
                return step.base_offset
            await asyncio.sleep(step.after_seconds)

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        return await _patiently(read, self._retry)

    async def _require_check(self) -> TopicFacts:
        try:
            return await self._producer._checks.require(self.topic)
        except KafkaError as error:
            raise CannotRead from error

    async def _send(self, append: Append) -> Reply:
        batch = self._producer.create_batch()
        for index, record in enumerate(append.records):
            fits = batch.append(
                timestamp=record.timestamp_ms, key=record.key, value=record.value, headers=append.headers(index)
            )
            assert fits is not None, "batch_bytes_max() promises that it fits"
        batch.close()
        try:
            metadata = await (await self._producer.send_batch(batch, self.topic, partition=self.partition))
            return Appended(metadata.offset)
        except BrokerResponseError as error:
            ours = await self._producer._refusal(error, self.topic, self.partition, append.expected)
            if isinstance(ours, OffsetMismatch):
                return Refused(ours)
            if error.retriable or isinstance(error, UnknownError):
                return Doubtful(error)
            raise
        except KafkaError as error:  # of this side: timeouts, connections
            return Doubtful(error)

    async def _look(self, offset: int) -> Sight | None:
        return await self._reading.look(self.topic, self.partition, offset)

    async def _read_once(self, apply: Callable[[LogRecord], Awaitable[None] | None]) -> int:
        log_start, log_end = await self._reading.bounds(self.topic, self.partition)
        offset = self._position.start_reading(log_start, log_end)
        async for record in self._reading.read(self.topic, self.partition, offset, log_end):
            result = apply(record)
            if inspect.isawaitable(result):
                await result
            self._position.next_offset = record.offset + 1
        return self._position.reached(log_end)


class _Reading:
    """Committed records of any partition, by a consumer of its own."""

    def __init__(self, attempt_seconds: float, configs: Mapping[str, Any]) -> None:
        self._attempt_seconds = attempt_seconds
        self._configs = {
            "fetch_max_wait_ms": _FETCH_WAIT_MS,  # only what is there already is waited for
            **_only(AIOKafkaConsumer, configs),
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
        }
        self._consumer: Any = None

    async def start(self) -> None:
        """Raises CannotRead: ask again."""
        if self._consumer is None:
            consumer = AIOKafkaConsumer(**self._configs)
            try:
                await consumer.start()
            except BaseException as error:
                await consumer.stop()
                if isinstance(error, KafkaError):
                    raise CannotRead from error
                raise
            self._consumer = consumer

    async def stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()

    async def look(self, topic: str, partition: int, offset: int) -> Sight | None:
        """None: it cannot be read."""
        try:
            await self.start()
            log_start, log_end = await self.bounds(topic, partition)
            if not log_start <= offset < log_end:
                return Sight(log_start, log_end, None)
            records = self.read(topic, partition, offset, log_end)
            first = await anext(records, None)
            await records.aclose()
            return Sight(log_start, log_end, first)
        except CannotRead:
            return None

    async def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Where the log starts, and where what can be read of it ends (the last stable offset). Raises CannotRead."""
        tp = TopicPartition(topic, partition)
        try:
            start = (await self._consumer.beginning_offsets([tp]))[tp]
            return start, (await self._consumer.end_offsets([tp]))[tp]
        except KafkaError as error:
            raise CannotRead from error

    async def read(self, topic: str, partition: int, offset: int, end: int) -> AsyncGenerator[LogRecord, None]:
        """The committed records from `offset` until all before `end` were seen, perhaps more. Raises CannotRead."""
        tp = TopicPartition(topic, partition)
        if self._consumer.assignment() != {tp}:
            self._consumer.assign([tp])
        self._consumer.seek(tp, offset)
        self._consumer.resume(tp)
        position, give_up = offset, time.monotonic() + self._attempt_seconds
        try:
            while position < end:
                try:
                    records = (await self._consumer.getmany(tp, timeout_ms=_POLL_MS)).get(tp, [])
                    reached = await self._consumer.position(tp)
                except KafkaError as error:
                    raise CannotRead from error
                for record in records:
                    yield LogRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
                if reached > position:
                    position, give_up = reached, time.monotonic() + self._attempt_seconds
                elif time.monotonic() >= give_up:
                    raise CannotRead from KafkaTimeoutError(
                        f"{tp}: nothing came from offset {position} on for {self._attempt_seconds:g} s"
                    )
        finally:
            self._consumer.pause(tp)  # else it goes on fetching what is appended


async def _patiently(act: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    deadline = time.monotonic() + policy.total_seconds
    for tries in itertools.count(1):
        try:
            return await act()
        except CannotRead as error:
            if time.monotonic() >= deadline:
                raise (error.__cause__ or error) from None
            await asyncio.sleep(policy.pause(tries))
    raise AssertionError("unreachable")


class LogReader:
    """Reads several partitions to their ends, and says which offset to expect there. See docs/client.md.

    What it reads is committed. `read_to_end` returns for each partition the offset behind everything that has ended:
    records, markers of transactions, what was aborted. It is what an append that is decided on this state expects.
    While another transaction is open, that is its first offset: the append waits until it has ended, and is refused.

    `partitions` – of (topic, partition) tuples, or TopicPartition. `configs` are aiokafka's for a consumer.
    """

    def __init__(
        self,
        partitions: Iterable[Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self._reading = _Reading(retry.attempt_seconds, configs)
        self._retry = retry
        self._positions = {key: LogPosition(*place(key), HeaderNames(), retry, 0) for key in partitions}

    async def read_to_end(self, apply: Callable[[Any, LogRecord], Awaitable[None] | None]) -> dict[Any, int]:
        """Calls `apply(partition, record)`, a function or a coroutine function, for every committed record that was not
        read yet, one partition after the other. Returns partition → the offset to expect.

        An exception of `apply` is passed on; the record counts as not read. While the cluster cannot be reached it is
        tried for `retry.total_seconds`, then the client library's error is raised. Raises PositionLost.
        """
        return {key: await _patiently(lambda k=key: self._read(k, apply), self._retry) for key in self._positions}  # type: ignore[misc]

    async def _read(self, key: Any, apply: Callable[[Any, LogRecord], Awaitable[None] | None]) -> int:
        position = self._positions[key]
        log_start, log_end = await self._reading.bounds(position.topic, position.partition)
        offset = position.start_reading(log_start, log_end)
        if offset < log_end:
            async for record in self._reading.read(position.topic, position.partition, offset, log_end):
                result = apply(key, record)
                if inspect.isawaitable(result):
                    await result
                position.next_offset = record.offset + 1
        return position.reached(log_end)

    async def start(self) -> None:
        await _patiently(self._reading.start, self._retry)

    async def stop(self) -> None:
        await self._reading.stop()

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


class TransactionalWriter:
    """Appends to several partitions in one transaction, each exactly where it is expected to end: all or nothing.

    Compare-and-append (KIP-27) over KIP-98's transactions; see docs/client.md. `configs` are aiokafka's for the
    connection, for producer, consumer and admin client alike. `transaction_timeout_seconds` – after that the
    coordinator aborts by itself what this process left open. A send, a commit, an abort takes `retry.attempt_seconds`
    at most, what is not known then `retry.total_seconds`.

    `stop` it, or use it as `async with`. One append at a time, and one writer for each `transactional_id`: a new one
    fences the one before.
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
        self._retry = retry
        self._names = header_names
        self._configs = configs
        self._checks = TopicChecks(check_ttl_seconds, configs)
        self._producer_configs: dict[str, Any] = {
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
            **configs,
            "transactional_id": transactional_id,
            "transaction_timeout_ms": int(transaction_timeout_seconds * 1000),
            "compression_type": compression_type,
            "header_names": header_names,
        }
        self._producer: ConditionalProducer | None = None
        self._reading = _Reading(retry.attempt_seconds, configs)
        self._fenced = False

    async def append(self, wanted: Wanted) -> dict[Any, int]:
        """`wanted`: partition → (expected offset, records). All of it is appended and committed, or none.

        Returns partition → offset of its first record. Behind the last one comes the transaction's marker, so unless
        somebody else appends, the next offset to expect is that offset + the number of records + 1. A partition is
        named by a (topic, partition) tuple or a TopicPartition. The expected offset of some may be None: these records
        are appended wherever the log ends, within the same transaction.

        Raises, with nothing of it visible, then or later: OffsetMismatch (the partition ended elsewhere),
        TransactionConflict, TransactionAborted (not done in time); after any of them read, decide and append again, see
        `retrying_async`. Raises WriterFenced; OutcomeUnknown where it could not be found out; ValueError and CheckIsOff
        with nothing sent. Other errors are the client library's: then too, nothing is visible. A cancelled append is
        aborted, unless its commit had been sent.
        """
        parts = parts_of(wanted)
        write_id = new_write_id()
        if self._fenced:
            raise WriterFenced(self.transactional_id)
        for part in parts:
            if part.expected is not None:
                facts: TopicFacts = await _patiently(lambda p=part: self._require_check(p.topic), self._retry)  # type: ignore[misc]
                refuse_required(part.topic, facts)
        if self._producer is None:
            await _patiently(self._start, self._retry)
        assert self._producer is not None
        try:
            await self._producer.begin_transaction()
            offsets = {part.key: landed(part, await self._send(part, write_id)) for part in parts}
        except BaseException as error:
            self._fenced |= isinstance(error, WriterFenced)
            await asyncio.shield(self._give_up())
            raise
        try:
            await asyncio.wait_for(self._producer.commit_transaction(), self._retry.attempt_seconds)
        except asyncio.CancelledError:
            await asyncio.shield(self._drop())  # the next append brings it to its end
            raise
        # Whatever the coordinator's error, this producer is dead.
        except Exception as error:
            await self._drop()
            code = _code_of(error)
            aborted: Exception = TransactionAborted("its commit was not answered, and did not happen")
            if code in FENCED:
                self._fenced, aborted = True, WriterFenced(self.transactional_id)
            elif code in COMMIT_REFUSED:
                aborted = TransactionConflict(REFUSED_AT_THE_END)
            await self._settle(parts, write_id, aborted, error)
        return offsets

    async def start(self) -> None:
        """Nothing is connected before it is needed."""

    async def stop(self) -> None:
        await self._drop()
        await self._checks.close()
        await self._reading.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _require_check(self, topic: str) -> TopicFacts:
        try:
            return await self._checks.require(topic)
        except KafkaError as error:
            raise CannotRead from error

    async def _start(self) -> None:
        """A new producer, and whatever an earlier one left is brought to its end. Raises CannotRead: ask again."""
        producer = ConditionalProducer(**self._producer_configs)
        checks, producer._checks = producer._checks, self._checks  # one admin client, whatever becomes of the producer
        try:
            await asyncio.wait_for(producer.start(), self._retry.attempt_seconds)
        except BaseException as error:
            await _end(producer, checks)
            if isinstance(error, TimeoutError) or (isinstance(error, KafkaError) and error.retriable):
                raise CannotRead from error
            raise
        self._producer = producer

    async def _send(self, part: Part, write_id: bytes) -> int:
        """The offset of the first record. Raises what `append` raises once it has aborted."""
        producer = self._producer
        assert producer is not None
        try:
            futures = []
            for index, record in enumerate(part.records):
                headers = part.headers(index, self._names, write_id)
                futures.append(
                    await AIOKafkaProducer.send(
                        producer, part.topic, record.value, record.key, part.partition, record.timestamp_ms, headers
                    )
                )
            sent = await asyncio.wait_for(asyncio.gather(*futures), self._retry.attempt_seconds)
            return int(sent[0].offset)
        except (KafkaError, TimeoutError) as error:
            code = _code_of(error)
            if code == POLICY_VIOLATION and part.expected is not None:
                # Nothing tells which of the refusals it is. What is committed shows whether it was a mismatch.
                sight = await self._sight(part)
                if sight is not None and sight.log_end != part.expected:
                    raise OffsetMismatch(part.topic, part.partition, part.expected, sight.log_end) from error
            passing = isinstance(error, TimeoutError) or error.retriable or isinstance(error, UnknownError)
            why = explained(part, error, code=code, passing=passing, transactional_id=self.transactional_id)
            raise why from (None if why is error else error)

    async def _sight(self, part: Part) -> Sight | None:
        assert part.expected is not None
        return await self._reading.look(part.topic, part.partition, part.expected)

    async def _give_up(self) -> None:
        """Nothing is committed. Others wait for the partitions until the transaction is over.

        Without this producer: a refused batch leaves a gap in its sequences, which the next one would fall into.
        """
        aborted = False
        with contextlib.suppress(Exception):
            assert self._producer is not None
            await asyncio.wait_for(self._producer.abort_transaction(), self._retry.attempt_seconds)
            aborted = True
        await self._drop()
        if not aborted and not self._fenced:
            with contextlib.suppress(Exception):  # then the next append will do it, or the transaction's timeout
                await self._start()

    async def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await _end(producer)

    async def _settle(self, parts: list[Part], write_id: bytes, aborted: Exception, cause: Exception) -> None:
        """Returns if it is committed. Raises `aborted`, or OutcomeUnknown."""
        part = next(part for part in parts if part.expected is not None)
        deadline = time.monotonic() + self._retry.total_seconds
        for tries in itertools.count(1):
            if self._producer is None and not self._fenced:
                with contextlib.suppress(Exception):
                    await self._start()
            ended = settle(part, write_id, await self._sight(part), self._names)
            if ended is Ended.COMMITTED:
                return
            if ended is Ended.ABORTED:
                raise aborted from cause
            if ended is Ended.GONE or time.monotonic() >= deadline:
                reason = "the log starts behind it by now" if ended is Ended.GONE else f"at last: {cause!r}"
                expected = {each.where: each.expected for each in parts if each.expected is not None}
                raise OutcomeUnknown(expected, write_id, reason) from cause
            await asyncio.sleep(self._retry.pause(tries))


async def _end(producer: ConditionalProducer, checks: TopicChecks | None = None) -> None:
    """Closes a producer that may be dead, and which shares the checks of its owner."""
    with contextlib.suppress(KafkaError, TimeoutError):
        # It would go on trying to commit for as long as that takes.
        await asyncio.wait_for(AIOKafkaProducer.stop(producer), _END_SECONDS)
    waiter = producer._txn_manager.wait_for_transaction_end()
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()  # else the loop complains that nobody has asked
    if checks is not None:
        await checks.close()


def _code_of(error: BaseException | None) -> int | None:
    """The server's error code; the library may have wrapped it into another error."""
    while error is not None:
        if isinstance(error, ProducerFenced):  # the library's own, for either code
            return PRODUCER_FENCED
        if isinstance(error, BrokerResponseError) and error.errno > 0:
            return int(error.errno)
        error = error.__cause__
    return None


def _only(client: type, configs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `configs` that the constructor of `client` takes."""
    known = inspect.signature(client).parameters
    return {name: value for name, value in configs.items() if name in known and name != "loop"}


async def describe_topic(admin: Any, topic: str) -> dict[str, str | None]:
    """A topic's configs through an AIOKafkaAdminClient; none where they cannot be seen."""
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, None)])
    code, message, _, _, entries = response.resources[0]
    if code in _NOT_VISIBLE:
        return {}
    if code:
        raise for_code(code)(message)
    return {entry[0]: entry[1] for entry in entries}


async def read_expansions(admin: Any, topic: str) -> tuple[PartitionExpansion, ...]:
    """What `fencepost.partition_expansions` gives."""
    return expansions_of(topic, await describe_topic(admin, topic))


class OrderedConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """AIOKafkaConsumer that reads topics by hand, all of their partitions or some, those to come included, and each key
    in order while they grow (KIP-253). See docs/client.md.

    `getmany`, `getone` and iteration are the library's; a partition that came with a growth is assigned once all that
    were there before have been read up to where they ended then. What an earlier call returned counts as read.

    `mine` – which partitions are this consumer's, for several processes that share topics by hand; all have one
    `group_id` then, and commit. `positions` – where to begin, for an application that keeps its offsets itself; others
    begin at the group's commits, or by `auto_offset_reset`. `refresh_seconds` – how often growth, and what others have
    committed, is looked for. `start` raises CheckIsOff, ValueError.
    """

    def __init__(
        self,
        *topics: str,
        mine: Callable[[int], bool] | None = None,
        positions: Mapping[TopicPartition, int] | None = None,
        refresh_seconds: float = 1.0,
        **configs: Any,
    ) -> None:
        super().__init__(**configs)
        self._orders = {topic: TopicOrder(topic, mine or every) for topic in topics}
        self._given = dict(positions or {})
        self._reset = configs.get("auto_offset_reset", "latest")
        self._grouped = configs.get("group_id") is not None
        self._refresh_seconds = refresh_seconds
        self._look_at = 0.0
        self._others: dict[str, dict[int, int | None]] = {topic: {} for topic in topics}
        self._admin = AIOKafkaAdminClient(**_only(AIOKafkaAdminClient, configs))

    async def start(self) -> None:
        await super().start()
        await self._admin.start()
        for order in self._orders.values():
            await self._begin(order)

    async def stop(self) -> None:
        await super().stop()
        await self._admin.close()

    def waiting(self) -> dict[TopicPartition, Waiting]:
        """The partitions that are not read yet, and what each waits for."""
        return {
            TopicPartition(topic, partition): waits
            for topic, order in self._orders.items()
            for partition in order.unopened
            if (waits := order.waiting(partition, self._positions(order)))
        }

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """As AIOKafkaConsumer.getmany. Raises KafkaError also where the topic's growth cannot be read."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            await self._open()
            left = min(max(0.0, deadline - time.monotonic()), self._refresh_seconds)
            records: dict[TopicPartition, list[Any]] = await super().getmany(
                *partitions, timeout_ms=left * 1000, max_records=max_records
            )
            if records or time.monotonic() >= deadline:
                return records

    async def getone(self, *partitions: TopicPartition) -> Any:
        """As AIOKafkaConsumer.getone."""
        while True:
            found = await self.getmany(*partitions, timeout_ms=self._refresh_seconds * 1000, max_records=1)
            for records in found.values():
                return records[0]

    def subscribe(self, *_: Any, **__: Any) -> None:
        """Not possible: a group's coordinator would assign partitions that wait."""
        raise TypeError("an OrderedConsumer reads the topics that it was made with; groups are ordered by the proxy")

    async def _begin(self, order: TopicOrder) -> None:
        await self._learn(order)
        refuse_alone(order.topic, order.shares, "given" if self._grouped else None)
        known = {p: await self._known(TopicPartition(order.topic, p)) for p in order.unopened}
        born = [TopicPartition(order.topic, p) for p in known if order.is_born(p)]
        log_starts = await self.beginning_offsets(born) if born else {}
        fresh = self._reset == "latest" and all(offset is None for offset in known.values())
        opened = [
            p
            for p in known
            if not order.is_born(p) or fresh or was_read(known[p], log_starts[TopicPartition(order.topic, p)])
        ]
        await self._assign(order, opened, {p: self._given.get(TopicPartition(order.topic, p)) for p in opened})

    async def _learn(self, order: TopicOrder) -> None:
        # In this sequence: see TopicOrder.learn.
        (described,) = await self._admin.describe_topics([order.topic])
        if described["error_code"] not in {0, *_NOT_VISIBLE}:
            raise for_code(described["error_code"])(order.topic)
        configs = await describe_topic(self._admin, order.topic)
        order.learn(len(described["partitions"]), expansions_of(order.topic, configs))

    async def _known(self, tp: TopicPartition) -> int | None:
        if tp in self._given or not self._grouped:
            return self._given.get(tp)
        offset: int | None = await self.committed(tp)
        return offset

    async def _open(self) -> None:
        now = time.monotonic()
        look = now >= self._look_at
        if look:
            self._look_at = now + self._refresh_seconds
        for order in self._orders.values():
            if look:
                await self._learn(order)
            if not order.unopened:
                continue
            if look:
                await self._look_at_priors(order, now)
            ready = order.ready(self._positions(order))
            if ready:
                # From the beginning, whatever auto_offset_reset says: all of it came since the topic grew.
                starts = {p: await self._known(TopicPartition(order.topic, p)) for p in ready}
                tps = [TopicPartition(order.topic, p) for p in ready if starts[p] is None]
                begins = await self.beginning_offsets(tps) if tps else {}
                starts.update({tp.partition: offset for tp, offset in begins.items()})
                await self._assign(order, ready, starts)

    async def _look_at_priors(self, order: TopicOrder, now: float) -> None:
        behind = order.behind(self._positions(order), now)
        for prior in behind:
            if not order.mine(prior):
                self._others[order.topic][prior] = await self._known(TopicPartition(order.topic, prior))
        if behind and order.ends_are_due(now):
            ends = await self.end_offsets([TopicPartition(order.topic, prior) for prior in behind])
            for tp, end in ends.items():
                order.ended_at(tp.partition, end)

    def _positions(self, order: TopicOrder) -> dict[int, int | None]:
        positions = dict(self._others[order.topic])
        for partition in order.opened:
            positions[partition] = self._position_now(TopicPartition(order.topic, partition))
        return positions

    def _position_now(self, tp: TopicPartition) -> int | None:
        # Not position(): that waits for one that is not known yet.
        subscription = self._subscription.subscription
        assignment = None if subscription is None else subscription.assignment
        if assignment is None or tp not in assignment.tps:
            return None
        state = assignment.state_value(tp)
        return int(state.position) if state.has_valid_position else None

    async def _assign(self, order: TopicOrder, partitions: list[int], starts: Mapping[int, int | None]) -> None:
        # The library forgets positions and pauses with each assignment.
        seeks = {tp: position for tp in self.assignment() if (position := self._position_now(tp)) is not None}
        paused = self.paused()
        for partition, offset in starts.items():
            if offset is not None:
                seeks[TopicPartition(order.topic, partition)] = offset
        order.opened.update(partitions)
        self.assign([TopicPartition(o.topic, p) for o in self._orders.values() for p in sorted(o.opened)])
        for tp, position in seeks.items():
            self.seek(tp, position)
        self.pause(*paused)


class OrderedProducer(AIOKafkaProducer):  # type: ignore[misc]
    """AIOKafkaProducer that keeps each key in order while its topic grows (KIP-253). See docs/client.md.

    Every record says over how many partitions it was placed. Where the topic has more by then, the proxy refuses it,
    and this producer places it again, in the order of `send`. `partitioner` – (key, count) → partition, by default
    where Java puts keys. `settle_seconds` – how long a record may be refused before it fails with
    PartitionCountChanged; `held_max` – how many records may wait meanwhile, then `send` does.

    `acks="all"` by default; `acks=0`, idempotence (a refusal wedges an idempotent producer of aiokafka on that
    partition) and transactions are not possible.
    """

    def __init__(
        self,
        *,
        partitioner: Placement = murmur2,
        settle_seconds: float = 120.0,
        held_max: int = 10_000,
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
            idempotence="an idempotent producer of aiokafka is stuck on a partition that refused it; leave it off",
        )
        self._serializers = configs.pop("key_serializer", None), configs.pop("value_serializer", None)
        super().__init__(**configs)
        self._place_key, self._settle_seconds, self._held_max = partitioner, settle_seconds, held_max
        self._count_header = header_names.partition_count
        self._checks = TopicChecks(check_ttl_seconds, configs, COUNT_CHECK_CONFIG)
        self._sends: dict[str, TopicSends] = {}
        self._numbers = itertools.count()
        #: One hands records over at a time, so that they leave in the order of their numbers.
        self._handing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._settlers: dict[str, asyncio.Task[None]] = {}
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
        """As AIOKafkaProducer.send. A record with `partition` stays on it, whatever the topic's count.

        Raises CheckIsOff; the future raises PartitionCountChanged.
        """
        given = counted_headers(self._count_header, headers or (), 0)[:-1]
        await self._checks.require(topic)
        key_serializer, value_serializer = self._serializers
        key = key if key_serializer is None else key_serializer(key)
        value = value if value_serializer is None else value_serializer(value)
        if topic not in self._sends:
            count = len(await self.partitions_for(topic))
            self._sends.setdefault(topic, TopicSends(self._place_key, count))
        sends = self._sends[topic]
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        while len(sends.queue) >= self._held_max:
            await self._change()
        async with self._handing:
            what = (value, given, timestamp_ms or int(time.time() * 1000), future)
            deadline = time.monotonic() + self._settle_seconds
            send = Send(next(self._numbers), topic, key, partition, deadline, what)
            if sends.submit(send):
                try:
                    await self._hand_over(sends, send)
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
        """`send`, and its outcome."""
        return await (await self.send(topic, value, key, partition, timestamp_ms, headers))

    async def flush(self) -> None:
        """As AIOKafkaProducer.flush, what must be placed again included."""
        await super().flush()
        while any(map(len, self._sends.values())):
            await self._change()

    async def stop(self) -> None:
        if not self._closed and self._sends:
            await self.flush()
        await super().stop()
        for settler in self._settlers.values():
            settler.cancel()
        if running := [*self._settlers.values(), *self._outcomes]:
            await asyncio.wait(running)
        for sends in self._sends.values():
            for send in sends.give_up():
                send.what[3].set_exception(count_changed(send, None, "the producer was closed"))
        await self._checks.close()

    async def _hand_over(self, sends: TopicSends, send: Send) -> None:
        value, headers, timestamp_ms, _ = send.what
        counted = counted_headers(self._count_header, headers, send.placed_over)
        inner = await super().send(send.topic, value, send.key, send.placed_on, timestamp_ms, counted)
        outcome = asyncio.create_task(self._outcome(inner, sends, send))
        self._outcomes.add(outcome)
        outcome.add_done_callback(self._outcomes.discard)

    async def _outcome(self, inner: asyncio.Future[Any], sends: TopicSends, send: Send) -> None:
        future = send.what[3]
        try:
            metadata = await inner
        except KafkaError as error:
            if isinstance(error, BrokerResponseError) and error.errno == INVALID_PARTITIONS:
                sends.refuse(send)
                if send.topic not in self._settlers:
                    self._settlers[send.topic] = asyncio.create_task(self._settle(send.topic, sends))
            else:
                sends.ended(send)
                if not future.done():
                    future.set_exception(error)
        else:
            sends.ended(send)
            if not future.done():
                future.set_result(metadata)
        finally:
            self._tell()

    async def _settle(self, topic: str, sends: TopicSends) -> None:
        while True:
            while not sends.settled:
                await self._change()
            try:
                await self.client.force_metadata_update()
                count = len(await self.partitions_for(topic))
            except KafkaError:
                await asyncio.sleep(_PAUSE_SECONDS)
                count = 0
            for send in sends.regrown(count, time.monotonic()):
                if not send.what[3].done():
                    reason = f"tried for {self._settle_seconds:g} s"
                    send.what[3].set_exception(count_changed(send, count or None, reason))
            self._tell()
            if sends.stale:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            async with self._handing:
                while (again := sends.next()) is not None:
                    try:
                        await self._hand_over(sends, again)
                    except KafkaError as error:
                        sends.ended(again)
                        if not again.what[3].done():
                            again.what[3].set_exception(error)
                    self._tell()

    def _tell(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
