"""Reads committed records of any partition up to its end, shared by log writers, log readers and transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fencepost._appending import LogPosition, Observation
from fencepost._steps import CannotRead, Closing, Steps, now, run
from fencepost._transaction import topic_partition
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

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Read from here on. The consumer has started."""

    def poll(self) -> Any:
        """(records, position after them and after offsets without records, or None). Waits a short time."""

    def pause(self) -> None:
        """Fetch no further records."""

    def close(self) -> Any: ...


class Reading:
    """`attempt_seconds`: how long no record may arrive."""

    def __init__(self, consumer: Consumer, attempt_seconds: float) -> None:
        self.consumer = consumer
        self._attempt_seconds = attempt_seconds

    def probe(self, topic: str, partition: int, offset: int) -> Steps[Observation | None]:
        """The log bounds and the first record from `offset`; None if the log could not be read."""
        try:
            yield self.consumer.start()
            log_start, log_end = yield self.consumer.bounds(topic, partition)
            if not log_start <= offset < log_end:
                return Observation(log_start, log_end, None)
            self.consumer.seek(topic, partition, offset)
            try:
                records, _ = yield from self._next(topic, partition, offset, log_end)
            finally:
                self.consumer.pause()
            return Observation(log_start, log_end, records[0] if records else None)
        except (CannotRead, self.consumer.error):
            return None

    def read_to_end(self, at: LogPosition, apply: Callable[[LogRecord], Any]) -> Steps[int]:
        """Apply each record from the position to the log end, and await the result if it is awaitable. Raises
        CannotRead, PositionLostError, and the errors of `apply`."""
        try:
            log_start, log_end = yield self.consumer.bounds(at.topic, at.partition)
        except self.consumer.error as error:
            raise CannotRead from error
        position = at.start_reading(log_start, log_end)
        if position < log_end:
            yield from self._apply_each(at, position, log_end, apply)
        return at.reached(log_end)

    def _apply_each(self, at: LogPosition, position: int, end: int, apply: Callable[[LogRecord], Any]) -> Steps[None]:
        self.consumer.seek(at.topic, at.partition, position)
        try:
            while position < end:
                records, position = yield from self._next(at.topic, at.partition, position, end)
                for record in records:
                    applied = apply(record)
                    if applied is not None:
                        yield applied
                    at.next_offset = record.offset + 1
        finally:
            self.consumer.pause()

    def _next(self, topic: str, partition: int, position: int, end: int) -> Steps[tuple[Sequence[LogRecord], int]]:
        """The next records and the position after them; none if there are none before `end`."""
        give_up = now() + self._attempt_seconds
        records: Sequence[LogRecord] = ()
        while not records and position < end:
            try:
                records, reached = yield self.consumer.poll()
            except self.consumer.error as error:
                raise CannotRead from error
            if reached is not None and reached > position:
                position, give_up = reached, now() + self._attempt_seconds
            elif now() >= give_up:
                raise CannotRead from self.consumer.timeout_error(
                    f"{topic}-{partition}: no records from offset {position} for {self._attempt_seconds:g} s"
                )
        return records, position


class LogReaderBase:
    """Reads the committed records of several partitions, and returns the expected offset of each. See docs/client.md.

    The expected offset is the last stable offset: it lies after all committed and aborted records and their markers.
    While another transaction is open, it is that transaction's first offset. A conditional append there waits until
    that transaction ends, and is then refused.

    `partitions`: (topic, partition) tuples or TopicPartitions. `configs` (`config` for confluent-kafka): the
    library's consumer settings.
    """

    # As in `LogWriterBase`, the method is steps.

    def __init__(self, partitions: Iterable[Any], consumer: Consumer, retry: RetryPolicy) -> None:
        self._consumer = consumer
        self._reading = Reading(consumer, retry.attempt_seconds)
        self._retry = retry
        self._positions = {key: LogPosition(*topic_partition(key), retry, 0) for key in partitions}

    def read_to_end(self, apply: Callable[[Any, LogRecord], Any]) -> Any:
        """Call `apply(partition, record)` for each unread committed record, one partition after the other.

        With aiokafka, `apply` may be a coroutine function. Returns {partition: expected offset}. If `apply` raises, the
        error propagates and the record counts as unread. An unreachable cluster is retried for `retry.total_seconds`,
        then the client library's error is raised. Raises PositionLostError.
        """
        ends = {}
        for key, position in self._positions.items():
            ends[key] = yield from patiently(
                lambda k=key, at=position: self._reading.read_to_end(at, lambda record: apply(k, record)),  # type: ignore[misc]
                self._retry,
            )
        return ends


class BlockingLogReader(LogReaderBase, Closing):
    __doc__ = LogReaderBase.__doc__

    def read_to_end(self, apply: Callable[[Any, LogRecord], None]) -> dict[Any, int]:
        return dict(run(super().read_to_end(apply)))

    def close(self) -> None:
        self._consumer.close()
