"""The steps of a log writer: read to the end, append there, and find the outcome of an append in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fencepost._appending import Append, Failure, LogPosition, MaybeAppended
from fencepost._checks import TopicFacts
from fencepost._reading import Consumer, Loop, Reading
from fencepost._refusals import verify
from fencepost._steps import Closing, Pause, Steps, Use, now, once, run
from fencepost.errors import AppendRefusedError, OffsetMismatchError
from fencepost.records import LogRecord, Record, binding_of, new_write_id, timestamped_now
from fencepost.retries import RetryPolicy, patiently

DEFAULT_BATCH_BYTES_MAX = 1_000_000


class Appender(Protocol):
    """An adapter's producer. Methods return a result or an awaitable."""

    @property
    def error(self) -> type[Exception]: ...

    def require(self, topic: str) -> Any:
        """TopicFacts. Raises CheckIsOffError, or `error` if the configs cannot be read."""

    def send(self, append: Append) -> Any:
        """Make one attempt, in one batch. Returns the offset of the first record. Raises OffsetMismatchError,
        MaybeAppended,
        or the client library's error if it is final."""

    def close(self) -> Any: ...


class LogWriterBase:
    """Reads one partition to its end, then appends batches, each only if the log still ends there (KIP-27).

    `for record in log` (aiokafka: `async for`) reads each committed record from `next_offset` to the end that the log
    has when the loop begins. `read_to_end` does the same with a callback. The writer's own appends are not read again.
    A record counts as read when the loop requests the next one: after an error or `break`, it is read again. An
    unreachable cluster is retried for `retry.total_seconds`, then the client library's error is raised. Raises
    PositionLostError.

    Each append is one batch, appended completely or not at all. `configs` (`config` for
    confluent-kafka): the library's connection settings for producer, consumer and admin client. `batch_bytes_max`:
    bytes, uncompressed. See docs/client.md.

    One append, read or loop at a time: a second one raises ConcurrentUseError. With aiokafka, call `start` and `stop`,
    or use `async with`.
    """

    # Here `append` is steps; each adapter's class runs them.

    def __init__(  # noqa: PLR0917 - called by the adapters
        self,
        topic: str,
        partition: int,
        appender: Appender,
        consumer: Consumer,
        retry: RetryPolicy,
        batch_bytes_max: int,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self._position = LogPosition(topic, partition, retry, batch_bytes_max)
        self._appender = appender
        use = Use(f"LogWriter of {topic}-{partition}", "a SharedLog for several tasks or threads")
        self._reading = Reading(consumer, retry, use)
        self.retry = retry
        #: The `fencepost-write-id` of the last successful append.
        self.last_write_id: bytes | None = None

    @property
    def next_offset(self) -> int | None:
        """The offset after the last record read or appended; None before the first read."""
        return self._position.next_offset

    def start_at(self, offset: int) -> None:
        """Read from `offset` on. The caller's state is the one before that record, as after loading a snapshot."""
        self._position.next_offset, self._position.at_end = offset, False

    def start_again_at(self, offset: int) -> None:
        """Read from `offset` on. The caller knows that the log has it."""
        self._position.next_offset, self._position.at_end = offset, False

    def bounds(self) -> Steps[tuple[int, int]]:
        """Log start offset and last stable offset. Raises PositionLostError, or the client library's error."""
        begun = now()
        return patiently(lambda: self._reading.bounds(self.topic, self.partition, begun), self.retry)

    def append(self, records: Sequence[Record]) -> Any:
        """Append `records` as one batch at `next_offset`. Returns the offset of the first record.

        Raises OffsetMismatchError (another writer was first: read to the end, then decide again), NotAtEndError,
        BatchTooLargeError, CheckIsOffError or ValueError: nothing was appended. Raises InDoubtError if the outcome is
        unknown, OffsetViolationError if the batch was appended at another offset. Other errors are the client
        library's. Read to the end before the next append, except after BatchTooLargeError, CheckIsOffError and
        ValueError.
        """
        return self._reading.use.alone(self._append(records))

    @property
    def at_end(self) -> bool:
        """Whether an append needs no read first."""
        return self._position.at_end

    def loop(self) -> Loop:
        return Loop(self._reading, [(None, self._position)], lambda _, record: record)

    def batch_limit(self) -> Steps[tuple[int, bytes]]:
        """The bytes of the largest append, and the binding of its headers. Raises CheckIsOffError, or the client
        library's error."""
        facts = yield from self._facts()
        return self._position.bytes_limit(facts), binding_of(self.topic, self.partition, facts.cluster_id)

    def _facts(self) -> Steps[TopicFacts]:
        return patiently(lambda: once(self._appender.require, self.topic), self.retry, self._appender.error)

    def _append(self, records: Sequence[Record]) -> Steps[int]:
        topic, partition = self.topic, self.partition
        facts = yield from self._facts()
        append = self._position.begin(timestamped_now(records), new_write_id(), facts, now())
        in_doubt = False
        while True:
            try:
                verify(topic, partition, append.expected, (yield self._appender.send(append)))
                break
            except OffsetMismatchError as error:
                failure: Failure = error
            except MaybeAppended as error:
                failure, in_doubt = error, True
            except (AppendRefusedError, self._appender.error) as error:
                if not in_doubt:
                    raise
                failure = MaybeAppended()  # this attempt is refused; an earlier one may still be appended
                failure.__cause__ = error
            observation = yield from self._reading.probe(topic, partition, append.expected)
            pause = append.pause_after(failure, observation, now())
            if pause is None:
                break
            yield Pause(pause)
        self._position.ended(append)
        self.last_write_id = append.write_id
        return append.expected


class BlockingLogWriter(LogWriterBase, Closing):
    __doc__ = LogWriterBase.__doc__

    def __iter__(self) -> Iterator[LogRecord]:
        return self.loop()

    def read_to_end(self, apply: Callable[[LogRecord], None]) -> int:
        """Call `apply(record)` for each record to the log end. Returns the offset that the next append expects."""
        for record in self:
            apply(record)
        assert self.next_offset is not None
        return self.next_offset

    def append(self, records: Sequence[Record]) -> int:
        return int(run(super().append(records)))

    def close(self) -> None:
        """Close the connections. No append is pending: `append` waits for its outcome."""
        self._appender.close()
        self._reading.close()
