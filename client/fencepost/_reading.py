"""Reads committed records of any partition up to its end, shared by log writers, log readers and transactions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from fencepost._appending import LogPosition, Observation
from fencepost._steps import CannotRead, Closing, Steps, Use, now, run, run_async
from fencepost._transaction import topic_partition
from fencepost.errors import PositionLostError
from fencepost.records import LogRecord
from fencepost.retries import RetryPolicy, patiently


class Consumer(Protocol):
    """An adapter's read_committed consumer. Methods return a result or an awaitable, and raise CannotRead or
    `error`, the client library's exception. `timeout_error`: raised if no records arrive in time."""

    @property
    def error(self) -> type[Exception]: ...
    @property
    def timeout_error(self) -> type[Exception]: ...

    def start(self) -> Any:
        """Connect, unless connected."""

    def bounds(self, topic: str, partition: int) -> Any:
        """Log start offset and last stable offset."""

    def exists(self, topic: str, partition: int) -> Any:
        """Whether the cluster lists the partition."""

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Read from here on. The consumer has started."""

    def poll(self) -> Any:
        """(records, position after them and after offsets without records, or None). Waits a short time."""

    def pause(self) -> None:
        """Fetch no further records."""

    def close(self) -> Any: ...


class Reading:
    """Reads with one consumer, one read at a time: see `use`."""

    def __init__(self, consumer: Consumer, retry: RetryPolicy, use: Use) -> None:
        self.consumer = consumer
        self.retry = retry
        self.use = use
        self.current: Read | None = None

    def probe(self, topic: str, partition: int, offset: int) -> Steps[Observation | None]:
        """The log bounds and the first record from `offset`; None if the log could not be read."""
        try:
            yield self.consumer.start()
            log_start, log_end = yield self.consumer.bounds(topic, partition)
            if not log_start <= offset < log_end:
                return Observation(log_start, log_end, None)
            self.consumer.seek(topic, partition, offset)
            try:
                records, _ = yield from self.poll(topic, partition, offset, log_end)
            finally:
                self.consumer.pause()
            return Observation(log_start, log_end, records[0] if records else None)
        except (CannotRead, self.consumer.error):
            return None

    def bounds(self, topic: str, partition: int, begun: float) -> Steps[tuple[int, int]]:
        """Log start offset and last stable offset. `begun`: when the first attempt began.

        Raises CannotRead, and PositionLostError if the partition does not exist.
        """
        exists = True
        try:
            bounds: tuple[int, int] = yield self.consumer.bounds(topic, partition)
            return bounds
        except (CannotRead, self.consumer.error) as error:
            failure = error if isinstance(error, CannotRead) else CannotRead()
            failure.__cause__ = failure.__cause__ or error
        if now() >= begun + self.retry.attempt_seconds:  # before, a new topic may be unknown to a broker
            with contextlib.suppress(CannotRead, self.consumer.error):
                exists = yield self.consumer.exists(topic, partition)
        if not exists:
            raise PositionLostError(
                f"{topic}-{partition}: the partition does not exist (it was deleted, or this client may not see it)"
            ) from failure.__cause__
        raise failure

    def poll(self, topic: str, partition: int, position: int, end: int) -> Steps[tuple[Sequence[LogRecord], int]]:
        """The next records and the position after them; none if there are none before `end`."""
        give_up = now() + self.retry.attempt_seconds
        records: Sequence[LogRecord] = ()
        while not records and position < end:
            try:
                records, reached = yield self.consumer.poll()
            except self.consumer.error as error:
                raise CannotRead from error
            if reached is not None and reached > position:
                position, give_up = reached, now() + self.retry.attempt_seconds
            elif now() >= give_up:
                raise CannotRead from self.consumer.timeout_error(
                    f"{topic}-{partition}: no records from offset {position} for {self.retry.attempt_seconds:g} s"
                )
        return records, position

    def close(self) -> Any:
        self.current = None
        return self.consumer.close()


@dataclass(frozen=True, slots=True)
class _Item:
    value: Any


class Loop:
    """One loop over the unread records of some partitions, one after the other, to their log ends.

    A record counts as read when the next one is requested. The loop is a use of its reader until its end, an error, or
    its last reference, as after `break`. An asynchronous generator would end later than that.
    """

    def __init__(
        self, reading: Reading, positions: Iterable[tuple[Any, LogPosition]], item: Callable[[Any, LogRecord], Any]
    ) -> None:
        self._items = self._read(reading, positions, item)
        self._use = Use("one loop over a log", "a loop for each task or thread")

    @staticmethod
    def _read(
        reading: Reading, positions: Iterable[tuple[Any, LogPosition]], item: Callable[[Any, LogRecord], Any]
    ) -> Steps[None]:
        """Steps, with an `_Item` for each record."""
        reading.use.begin()
        try:
            for key, at in positions:
                read = Read(reading, at)
                try:
                    while records := (yield from read.next()):
                        for record in records:
                            yield _Item(item(key, record))
                            read.passed(record)
                finally:
                    read.end()
        finally:
            reading.use.end()

    def following(self) -> Steps[Any]:
        """The next `_Item`; None after the last."""
        return self._use.alone(self._following())

    def _following(self) -> Steps[_Item | None]:
        resume: Callable[[], Any] = partial(next, self._items)
        while True:
            try:
                step = resume()
            except StopIteration:
                return None
            if isinstance(step, _Item):
                return step
            try:
                resume = partial(self._items.send, (yield step))
            except BaseException as error:
                resume = partial(self._items.throw, error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = run(self.following())
        if item is None:
            raise StopIteration
        return item.value

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        item = await run_async(self.following())
        if item is None:
            raise StopAsyncIteration
        return item.value


class Read:
    """One read from a position to the log end at its start. Holds the records of one poll at a time."""

    def __init__(self, reading: Reading, at: LogPosition) -> None:
        self._reading = reading
        self._at = at
        self._position = self._end = 0
        self._begun = 0.0
        self._seeked = False
        reading.current = self

    def next(self) -> Steps[Sequence[LogRecord]]:
        """The next records; none at the log end. Raises PositionLostError, or the client library's error if the
        cluster is unreachable for `retry.total_seconds`."""
        self._verify_current()
        self._begun = now()
        return (yield from patiently(self._next, self._reading.retry))

    def passed(self, record: LogRecord) -> None:
        self._verify_current()
        self._at.next_offset = record.offset + 1

    def end(self) -> None:
        """Fetch no further records."""
        if self._reading.current is self:
            self._reading.current = None
            if self._seeked:
                self._reading.consumer.pause()

    def _next(self) -> Steps[Sequence[LogRecord]]:
        at, consumer = self._at, self._reading.consumer
        try:
            if not self._seeked:
                log_start, self._end = yield from self._reading.bounds(at.topic, at.partition, self._begun)
                self._position = at.start_reading(log_start, self._end)
                if self._position < self._end:
                    consumer.seek(at.topic, at.partition, self._position)
                    self._seeked = True
            records, self._position = yield from self._reading.poll(at.topic, at.partition, self._position, self._end)
        except CannotRead:
            self._seeked = False
            raise
        records = [record for record in records if record.offset < self._end]
        if not records:
            at.reached(self._end)
        return records

    def _verify_current(self) -> None:
        if self._reading.current is not self:
            raise RuntimeError(f"{self._at.topic}-{self._at.partition}: the log was closed during a loop")


class LogReaderBase:
    """Reads the committed records of several partitions, and returns the expected offset of each. See docs/client.md.

    `for partition, record in log` (aiokafka: `async for`) reads each unread record, one partition after the other, to
    the log ends at the time when their partition is begun. `read_to_end` does the same with a callback. A record counts
    as read when the loop requests the next one: after an error or `break`, it is read again. An unreachable cluster is
    retried for `retry.total_seconds`, then the client library's error is raised. Raises PositionLostError.

    The expected offset is the last stable offset: it lies after all committed and aborted records and their markers.
    While another transaction is open, it is that transaction's first offset. A conditional append there waits until
    that transaction ends, and is then refused.

    `partitions`: (topic, partition) tuples or TopicPartitions. `configs` (`config` for confluent-kafka): the
    library's consumer settings.
    """

    def __init__(self, partitions: Iterable[Any], consumer: Consumer, retry: RetryPolicy) -> None:
        self._positions = {key: LogPosition(*topic_partition(key), retry, 0) for key in partitions}
        self._reading = Reading(consumer, retry, Use("LogReader", "a LogReader for each task or thread"))

    def _loop(self) -> Loop:
        return Loop(self._reading, self._positions.items(), lambda key, record: (key, record))

    @property
    def next_offsets(self) -> dict[Any, int]:
        """{partition: expected offset} of the partitions that were read."""
        return {key: at.next_offset for key, at in self._positions.items() if at.next_offset is not None}


class BlockingLogReader(LogReaderBase, Closing):
    __doc__ = LogReaderBase.__doc__

    def __iter__(self) -> Iterator[tuple[Any, LogRecord]]:
        return self._loop()

    def read_to_end(self, apply: Callable[[Any, LogRecord], None]) -> dict[Any, int]:
        """Call `apply(partition, record)` for each unread record. Returns {partition: expected offset}."""
        for key, record in self:
            apply(key, record)
        return self.next_offsets

    def close(self) -> None:
        self._reading.close()
