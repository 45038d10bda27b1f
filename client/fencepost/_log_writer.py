"""The steps of a log writer: read to the end, append there, and find the outcome of an append in the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fencepost._appending import Append, Appended, Done, LogPosition
from fencepost._reading import Consumer, Reading
from fencepost._steps import Closing, Pause, Steps, now, once, run
from fencepost.records import HeaderNames, LogRecord, Record, new_write_id, timestamped_now
from fencepost.retries import RetryPolicy, patiently

DEFAULT_BATCH_BYTES_MAX = 1_000_000


class Appender(Protocol):
    """An adapter's producer. Methods return a result or an awaitable."""

    @property
    def error(self) -> type[Exception]: ...

    def require(self, topic: str) -> Any:
        """TopicFacts. Raises CheckIsOff, or `error` if the configs cannot be read."""

    def send(self, append: Append) -> Any:
        """Make one attempt, in one batch. Returns a Reply, or raises the client library's error if it is final."""

    def close(self) -> Any: ...


class LogAppends:
    """One partition, read and appended to by one log writer."""

    def __init__(self, position: LogPosition, appender: Appender, consumer: Consumer, retry: RetryPolicy) -> None:
        self.position = position
        self._appender = appender
        self._reading = Reading(consumer, retry.attempt_seconds)
        self._retry = retry

    def read_to_end(self, apply: Callable[[LogRecord], Any]) -> Steps[int]:
        return patiently(lambda: self._reading.read_to_end(self.position, apply), self._retry)

    def append(self, records: Sequence[Record]) -> Steps[int]:
        at = self.position
        facts = yield from patiently(lambda: once(self._appender.require, at.topic), self._retry, self._appender.error)
        append = at.begin(timestamped_now(records), new_write_id(), facts, now())
        while True:
            reply = yield self._appender.send(append)
            observation = None
            if not isinstance(reply, Appended):
                observation = yield from self._reading.probe(at.topic, at.partition, append.expected)
            step = append.validate(reply, observation, now())
            if isinstance(step, Done):
                at.ended(append)
                return step.base_offset
            yield Pause(step.after_seconds)


class BlockingLogWriter(Closing):
    """Reads one partition to its end, then appends batches, each only if the log still ends there.

    Each append is one batch, appended completely or not at all. One append at a time; not thread-safe.
    """

    def __init__(  # noqa: PLR0917 - called by the adapters
        self,
        topic: str,
        partition: int,
        appender: Appender,
        consumer: Consumer,
        retry: RetryPolicy,
        names: HeaderNames,
        batch_bytes_max: int,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self._position = LogPosition(topic, partition, names, retry, batch_bytes_max)
        self._appender = appender
        self._consumer = consumer
        self._appends = LogAppends(self._position, appender, consumer, retry)

    @property
    def next_offset(self) -> int | None:
        """The offset after the last record read or appended; None before the first `read_to_end`."""
        return self._position.next_offset

    def read_to_end(self, apply: Callable[[LogRecord], None]) -> int:
        """Call `apply(record)` for each record from `next_offset` to the end of the log, in order.

        Returns the offset that the next append expects. This writer's own appends are not read again. If `apply`
        raises, the error propagates and the record counts as unread. An unreachable cluster is retried for
        `retry.total_seconds`, then the client library's error is raised. Raises PositionLost.
        """
        return run(self._appends.read_to_end(apply))

    def append(self, records: Sequence[Record]) -> int:
        """Append `records` as one batch at `next_offset`. Returns the offset of the first record.

        Raises OffsetMismatch (another writer was first: `read_to_end`, then decide again), NotAtEnd, BatchTooLarge,
        CheckIsOff or ValueError: nothing was appended. Raises InDoubt if the outcome is unknown, OffsetViolation if
        the batch was appended at another offset. Other errors are the client library's. Call `read_to_end` before the
        next append, except after BatchTooLarge, CheckIsOff and ValueError.
        """
        return run(self._appends.append(records))

    def close(self) -> None:
        """Close the connections. No append is pending: `append` waits for its outcome."""
        self._appender.close()
        self._consumer.close()
