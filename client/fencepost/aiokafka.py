"""Conditional publish with aiokafka."""

from __future__ import annotations

import asyncio
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
    from aiokafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError, UnknownError, for_code
except ModuleNotFoundError as error:
    raise ImportError("fencepost.aiokafka needs aiokafka: pip install 'aiokafka>=0.14'") from error

from fencepost._appending import Append, Appended, Done, Doubtful, LogPosition, Refused, Reply, Sight
from fencepost._checks import CheckCache, TopicFacts
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
from fencepost.errors import FencepostError, OffsetMismatch, PartitionRequired
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
    "LogWriter",
    "OrderedConsumer",
    "OrderedProducer",
    "describe_topic",
    "read_expansions",
]

T = TypeVar("T")

_POLL_MS = 500
_PAUSE_SECONDS = 0.1
#: The log end that can be asked for is the high watermark, which may lag behind what refused the write.
_LOG_END_TRIES = 5
_LOG_END_PAUSE_SECONDS = 0.05
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
        **configs: Any,
    ) -> None:
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
        self._tp = TopicPartition(topic, partition)
        # Also how long aiokafka itself sends a batch again, the same bytes; then it gives it up.
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        self._producer = ConditionalProducer(
            **configs,
            compression_type=compression_type,
            max_batch_size=batch_bytes_max,
            check_ttl_seconds=check_ttl_seconds,
            header_names=header_names,
        )
        self._consumer = AIOKafkaConsumer(
            **configs, auto_offset_reset="none", enable_auto_commit=False, isolation_level="read_committed"
        )

    @property
    def next_offset(self) -> int | None:
        """The offset behind the last record read or appended; None before the first `read_to_end`."""
        return self._position.next_offset

    async def start(self) -> None:
        await self._producer.start()
        await self._consumer.start()

    async def stop(self) -> None:
        await self._consumer.stop()
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
        deadline = time.monotonic() + self._retry.total_seconds
        for tries in itertools.count(1):
            try:
                return await read()
            except CannotRead as error:
                if time.monotonic() >= deadline:
                    raise (error.__cause__ or error) from None
                await asyncio.sleep(self._retry.pause(tries))
        raise AssertionError("unreachable")

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
        try:
            log_start, log_end = await self._bounds()
            if not log_start <= offset < log_end:
                return Sight(log_start, log_end, None)
            records = self._read(offset, log_end)
            first = await anext(records, None)
            await records.aclose()
            return Sight(log_start, log_end, first)
        except CannotRead:
            return None

    async def _read_once(self, apply: Callable[[LogRecord], Awaitable[None] | None]) -> int:
        log_start, log_end = await self._bounds()
        async for record in self._read(self._position.start_reading(log_start, log_end), log_end):
            result = apply(record)
            if inspect.isawaitable(result):
                await result
            self._position.next_offset = record.offset + 1
        return self._position.reached(log_end)

    async def _bounds(self) -> tuple[int, int]:
        try:
            start = (await self._consumer.beginning_offsets([self._tp]))[self._tp]
            return start, (await self._consumer.end_offsets([self._tp]))[self._tp]
        except KafkaError as error:
            raise CannotRead from error

    async def _read(self, offset: int, end: int) -> AsyncGenerator[LogRecord, None]:
        if not self._consumer.assignment():
            self._consumer.assign([self._tp])
        self._consumer.seek(self._tp, offset)
        self._consumer.resume(self._tp)
        position, give_up = offset, time.monotonic() + self._retry.attempt_seconds
        try:
            while position < end:
                try:
                    records = (await self._consumer.getmany(self._tp, timeout_ms=_POLL_MS)).get(self._tp, [])
                    reached = await self._consumer.position(self._tp)
                except KafkaError as error:
                    raise CannotRead from error
                for record in records:
                    yield LogRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
                if reached > position:
                    position, give_up = reached, time.monotonic() + self._retry.attempt_seconds
                elif time.monotonic() >= give_up:
                    raise CannotRead from KafkaTimeoutError(
                        f"{self._tp}: nothing came from offset {position} on for {self._retry.attempt_seconds:g} s"
                    )
        finally:
            self._consumer.pause(self._tp)  # else it goes on fetching what is appended


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
        **configs: Any,
    ) -> None:
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
