"""Log writer for the two blocking client libraries. `fencepost.aiokafka` has the asynchronous one."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from fencepost._appending import Append, Appended, Done, LogPosition, Observation, Reply
from fencepost._checks import TopicFacts
from fencepost.records import HeaderNames, LogRecord, Record, new_write_id
from fencepost.retries import RetryPolicy

T = TypeVar("T")

DEFAULT_BATCH_BYTES_MAX = 1_000_000


class CannotRead(Exception):
    """A temporary read failure. `__cause__`: the client library's error."""


def timestamped_now(records: Sequence[Record]) -> list[Record]:
    """`records`, with the current time where the timestamp is missing: a retry must equal the first attempt."""
    now_ms = int(time.time() * 1000)
    return [replace(r, timestamp_ms=now_ms) if r.timestamp_ms is None else r for r in records]


class BlockingLogWriter(ABC):
    """Reads one partition to its end, then appends batches, each only if the log still ends there.

    Each append is one batch, appended completely or not at all. One append at a time; not thread-safe.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        retry: RetryPolicy,
        names: HeaderNames,
        batch_bytes_max: int,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self._retry = retry
        self._position = LogPosition(topic, partition, names, retry, batch_bytes_max)

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
        return self._patiently(lambda: self._read_once(apply))

    def _read_once(self, apply: Callable[[LogRecord], None]) -> int:
        log_start, log_end = self._bounds()
        for record in self._read(self._position.start_reading(log_start, log_end), log_end):
            apply(record)
            self._position.next_offset = record.offset + 1
        return self._position.reached(log_end)

    def append(self, records: Sequence[Record]) -> int:
        """Append `records` as one batch at `next_offset`. Returns the offset of the first record.

        Raises OffsetMismatch (another writer was first: `read_to_end`, then decide again), NotAtEnd, BatchTooLarge,
        CheckIsOff or ValueError: nothing was appended. Raises InDoubt if the outcome is unknown, OffsetViolation if
        the batch was appended at another offset. Other errors are the client library's. Call `read_to_end` before the
        next append, except after BatchTooLarge, CheckIsOff and ValueError.
        """
        facts = self._patiently(self._require_check)
        append = self._position.begin(timestamped_now(records), new_write_id(), facts, time.monotonic())
        while True:
            reply = self._send(append)
            observation = None if isinstance(reply, Appended) else self._probe(append.expected)
            step = append.validate(reply, observation, time.monotonic())
            if isinstance(step, Done):
                self._position.ended(append)
                return step.base_offset
            time.sleep(step.after_seconds)

    def _probe(self, offset: int) -> Observation | None:
        try:
            log_start, log_end = self._bounds()
            if not log_start <= offset < log_end:
                return Observation(log_start, log_end, None)
            records = self._read(offset, log_end)
            first = next(records, None)
            records.close()
            return Observation(log_start, log_end, first)
        except CannotRead:
            return None

    def _patiently(self, read: Callable[[], T]) -> T:
        """Call `read`, retrying on CannotRead for `total_seconds`; then raise its cause."""
        deadline = time.monotonic() + self._retry.total_seconds
        for tries in itertools.count(1):
            try:
                return read()
            except CannotRead as error:
                if time.monotonic() >= deadline:
                    raise (error.__cause__ or error) from None
                time.sleep(self._retry.pause(tries))
        raise AssertionError("unreachable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connections. No append is pending: `append` waits for its outcome."""

    @abstractmethod
    def _require_check(self) -> TopicFacts:
        """Raises CheckIsOff or CannotRead."""

    @abstractmethod
    def _send(self, append: Append) -> Reply:
        """Make one attempt, in one batch. Raises the client library's error if it is final."""

    @abstractmethod
    def _bounds(self) -> tuple[int, int]:
        """Log start offset and last stable offset. Raises CannotRead."""

    @abstractmethod
    def _read(self, offset: int, end: int) -> Generator[LogRecord, None, None]:
        """Committed records from `offset` to at least `end`. Raises CannotRead."""
