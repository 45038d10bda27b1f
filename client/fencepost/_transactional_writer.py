"""Conditional transactions and multi-partition reads for the two blocking client libraries.

`fencepost.aiokafka` has the asynchronous versions.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from fencepost._appending import LogPosition, Observation
from fencepost._checks import TopicFacts
from fencepost._log_writer import CannotRead
from fencepost._transaction import (
    COMMIT_REFUSED_MESSAGE,
    Ended,
    Part,
    RequestedAppends,
    appended_batch,
    parts_of,
    refuse_required,
    resolve,
    topic_partition,
)
from fencepost.errors import (
    OutcomeUnknown,
    TransactionAborted,
    TransactionConflict,
    WriterFenced,
)
from fencepost.records import HeaderNames, LogRecord, new_write_id
from fencepost.retries import RetryPolicy

T = TypeVar("T")


class Reading(ABC):
    """Reads committed records of any partition with its own consumer, which connects on first use."""

    @abstractmethod
    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Log start offset and last stable offset. Raises CannotRead."""

    @abstractmethod
    def read(self, topic: str, partition: int, offset: int, end: int) -> Generator[LogRecord, None, None]:
        """Committed records from `offset` to at least `end`. Raises CannotRead."""

    @abstractmethod
    def close(self) -> None: ...

    def probe(self, topic: str, partition: int, offset: int) -> Observation | None:
        """The log bounds and the first record from `offset`; None if the log could not be read."""
        try:
            log_start, log_end = self.bounds(topic, partition)
            if not log_start <= offset < log_end:
                return Observation(log_start, log_end, None)
            records = self.read(topic, partition, offset, log_end)
            first = next(records, None)
            records.close()
            return Observation(log_start, log_end, first)
        except CannotRead:
            return None


def patiently(act: Callable[[], T], policy: RetryPolicy) -> T:
    """Call `act`, retrying on CannotRead for `total_seconds`; then raise its cause."""
    deadline = time.monotonic() + policy.total_seconds
    for tries in itertools.count(1):
        try:
            return act()
        except CannotRead as error:
            if time.monotonic() >= deadline:
                raise (error.__cause__ or error) from None
            time.sleep(policy.pause(tries))
    raise AssertionError("unreachable")


class BlockingLogReader:
    """Reads the committed records of several partitions, and returns the expected offset of each.

    The expected offset is the last stable offset: it lies after all committed and aborted records and their markers.
    While another transaction is open, it is that transaction's first offset. A conditional append there waits until
    that transaction ends, and is then refused.
    """

    def __init__(self, partitions: Iterable[Any], reading: Reading, retry: RetryPolicy) -> None:
        self._reading = reading
        self._retry = retry
        self._positions = {key: LogPosition(*topic_partition(key), HeaderNames(), retry, 0) for key in partitions}

    def read_to_end(self, apply: Callable[[Any, LogRecord], None]) -> dict[Any, int]:
        """Call `apply(partition, record)` for each unread committed record, one partition after the other.

        Returns {partition: expected offset}. If `apply` raises, the error propagates and the record counts as unread.
        An unreachable cluster is retried for `retry.total_seconds`, then the client library's error is raised. Raises
        PositionLost.
        """
        return {key: patiently(lambda k=key: self._read(k, apply), self._retry) for key in self._positions}  # type: ignore[misc]

    def _read(self, key: Any, apply: Callable[[Any, LogRecord], None]) -> int:
        position = self._positions[key]
        log_start, log_end = self._reading.bounds(position.topic, position.partition)
        offset = position.start_reading(log_start, log_end)
        if offset < log_end:
            for record in self._reading.read(position.topic, position.partition, offset, log_end):
                apply(key, record)
                position.next_offset = record.offset + 1
        return position.reached(log_end)

    def close(self) -> None:
        self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CommitRefused(Exception):
    """The proxy refused the commit, and the producer can still abort."""


class CommitInDoubt(Exception):
    """The commit's outcome is unknown. `refused`: the commit was probably refused, but only a new producer can
    continue."""

    def __init__(self, *, refused: bool = False) -> None:
        super().__init__()
        self.refused = refused


class BlockingTransactionalWriter(ABC):
    """Appends to several partitions in one transaction, each at its expected offset: all or nothing.

    Not thread-safe. Use one writer per `transactional_id` at a time: a new writer fences the previous one.
    """

    def __init__(self, transactional_id: str, *, retry: RetryPolicy, names: HeaderNames, reading: Reading):
        self.transactional_id = transactional_id
        self._retry = retry
        self._names = names
        self._reading = reading
        self._open = False
        self._fenced = False

    def append(self, requested: RequestedAppends) -> dict[Any, int]:
        """Append to all partitions and commit, or append to none.

        `requested`: {partition: (expected offset, records)}. A partition is a (topic, partition) tuple or the client
        library's TopicPartition. An expected offset of None appends without a check; at least one must be set. Returns
        {partition: offset of its first record}. A transaction marker follows the records, so the next expected offset
        is that offset + number of records + 1, unless another writer appends first.

        Raises OffsetMismatch, TransactionConflict or TransactionAborted (not done in time): no record is or becomes
        visible; read, decide and append again (see `retrying`). Raises WriterFenced if the writer is unusable,
        OutcomeUnknown if the outcome is unknown, ValueError and CheckIsOff if nothing was sent. Other errors are the
        client library's; no record is visible then either.
        """
        parts = parts_of(requested)
        write_id = new_write_id()
        self._refuse_if_fenced()
        for part in parts:
            if part.expected is not None:
                facts: TopicFacts = patiently(lambda p=part: self._require_check(p.topic), self._retry)  # type: ignore[misc]
                refuse_required(part.topic, facts)
        if not self._open:
            patiently(self._start, self._retry)
        try:
            self._begin()
            offsets = {part.key: appended_batch(part, self._send(part, write_id)) for part in parts}
        except BaseException as error:
            self._fenced |= isinstance(error, WriterFenced)
            # A refused batch leaves a sequence gap in this producer, so the next append needs a new one.
            self._give_up(goes_on=False)
            raise
        try:
            self._commit()
        except CommitRefused as refusal:
            self._give_up(goes_on=True)
            raise TransactionConflict(COMMIT_REFUSED_MESSAGE) from refusal.__cause__
        except WriterFenced as fenced:
            self._fenced = True
            self._drop()
            self._resolve_commit(parts, write_id, fenced, fenced.__cause__)
        except CommitInDoubt as in_doubt:
            self._drop()
            aborted = (
                TransactionConflict(COMMIT_REFUSED_MESSAGE)
                if in_doubt.refused
                else TransactionAborted("no response to the commit, and it was not applied")
            )
            self._resolve_commit(parts, write_id, aborted, in_doubt.__cause__)
        except BaseException:
            self._drop()  # interrupted: the next append completes or aborts the transaction
            raise
        return offsets

    def close(self) -> None:
        """Close the connections. No append is pending: `append` waits for its outcome."""
        self._drop()
        self._reading.close()

    def _refuse_if_fenced(self) -> None:
        if self._fenced:
            raise WriterFenced(self.transactional_id)

    def _start(self) -> None:
        self._open_producer()
        self._open = True

    def _drop(self) -> None:
        self._open = False
        self._discard()

    def _give_up(self, *, goes_on: bool) -> None:
        """Abort the transaction, because other writers wait for its partitions."""
        aborted = False
        with contextlib.suppress(Exception):
            aborted = self._abort()
        if aborted and goes_on:
            return
        self._drop()
        if not aborted and not self._fenced:
            with contextlib.suppress(Exception):  # otherwise the next append or the transaction timeout aborts it
                self._start()

    def _resolve_commit(
        self, parts: list[Part], write_id: bytes, aborted: Exception, cause: BaseException | None
    ) -> None:
        """Return if the transaction committed. Raises `aborted` or OutcomeUnknown."""
        part = next(part for part in parts if part.expected is not None)
        deadline = time.monotonic() + self._retry.total_seconds
        for tries in itertools.count(1):
            if not self._open and not self._fenced:
                with contextlib.suppress(Exception):
                    self._start()
            assert part.expected is not None
            ended = resolve(part, write_id, self._reading.probe(part.topic, part.partition, part.expected), self._names)
            if ended is Ended.COMMITTED:
                return
            if ended is Ended.ABORTED:
                raise aborted from cause
            if ended is Ended.DELETED or time.monotonic() >= deadline:
                reason = "the log now starts after it" if ended is Ended.DELETED else f"last error: {cause!r}"
                expected = {each.where: each.expected for each in parts if each.expected is not None}
                raise OutcomeUnknown(expected, write_id, reason) from cause
            time.sleep(self._retry.pause(tries))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _require_check(self, topic: str) -> TopicFacts:
        """Raises CheckIsOff or CannotRead."""

    @abstractmethod
    def _open_producer(self) -> None:
        """Start a producer, which first ends an earlier one's transaction. Raises CannotRead if worth a retry."""

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _send(self, part: Part, write_id: bytes) -> int:
        """The offset of the first record. Raises the error that `append` raises after the abort."""

    @abstractmethod
    def _commit(self) -> None:
        """Raises CommitRefused, CommitInDoubt, WriterFenced."""

    @abstractmethod
    def _abort(self) -> bool:
        """True if aborted. False or any error: the abort is not confirmed."""

    @abstractmethod
    def _discard(self) -> None: ...
