"""Transactions with expectations, and reading several partitions, for the two blocking client libraries.

`fencepost.aiokafka` has the same, awaiting.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from fencepost._appending import LogPosition, Sight
from fencepost._checks import TopicFacts
from fencepost._log_writer import CannotRead
from fencepost._transaction import (
    REFUSED_AT_THE_END,
    Ended,
    Part,
    Wanted,
    landed,
    parts_of,
    place,
    refuse_required,
    settle,
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
    """Committed records of any partition, by a consumer of its own, which connects when it is asked."""

    @abstractmethod
    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Where the log starts, and where what can be read of it ends (the last stable offset). Raises CannotRead."""

    @abstractmethod
    def read(self, topic: str, partition: int, offset: int, end: int) -> Generator[LogRecord, None, None]:
        """The committed records from `offset` until all before `end` were seen, perhaps more. Raises CannotRead."""

    @abstractmethod
    def close(self) -> None: ...

    def look(self, topic: str, partition: int, offset: int) -> Sight | None:
        """None: it cannot be read."""
        try:
            log_start, log_end = self.bounds(topic, partition)
            if not log_start <= offset < log_end:
                return Sight(log_start, log_end, None)
            records = self.read(topic, partition, offset, log_end)
            first = next(records, None)
            records.close()
            return Sight(log_start, log_end, first)
        except CannotRead:
            return None


def patiently(act: Callable[[], T], policy: RetryPolicy) -> T:
    """Again and again while CannotRead is raised, for `total_seconds`; then its cause is raised."""
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
    """Reads several partitions to their ends, in order each, and knows which offset to expect there.

    What it reads is committed. `read_to_end` returns for each partition the offset behind everything that has ended:
    records, markers of transactions, what was aborted. It is what an append that is decided on this state expects.
    While another transaction is open, that is its first offset: the append waits until it has ended, and is refused.
    """

    def __init__(self, partitions: Iterable[Any], reading: Reading, retry: RetryPolicy) -> None:
        self._reading = reading
        self._retry = retry
        self._positions = {key: LogPosition(*place(key), HeaderNames(), retry, 0) for key in partitions}

    def read_to_end(self, apply: Callable[[Any, LogRecord], None]) -> dict[Any, int]:
        """Calls `apply(partition, record)` for every committed record that was not read yet, one partition after the
        other. Returns partition → the offset to expect.

        An exception of `apply` is passed on; the record counts as not read. While the cluster cannot be reached it is
        tried for `retry.total_seconds`, then the client library's error is raised. Raises PositionLost.
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
    """By the proxy, and the producer can abort."""


class CommitInDoubt(Exception):
    """`refused` – it is rather sure that nothing was committed, but only a new producer can go on."""

    def __init__(self, *, refused: bool = False) -> None:
        super().__init__()
        self.refused = refused


class BlockingTransactionalWriter(ABC):
    """Appends to several partitions in one transaction, each exactly where it is expected to end: all or nothing.

    Not thread-safe. One writer for each `transactional_id` at a time: a new one fences the one before.
    """

    def __init__(self, transactional_id: str, *, retry: RetryPolicy, names: HeaderNames, reading: Reading):
        self.transactional_id = transactional_id
        self._retry = retry
        self._names = names
        self._reading = reading
        self._open = False
        self._fenced = False

    def append(self, wanted: Wanted) -> dict[Any, int]:
        """`wanted`: partition → (expected offset, records). All of it is appended and committed, or none.

        Returns partition → offset of its first record. Behind the last one comes the transaction's marker, so unless
        somebody else appends, the next offset to expect is that offset + the number of records + 1. A partition is
        named by a (topic, partition) tuple or by the client library's TopicPartition. The expected offset of some may
        be None: these records are appended wherever the log ends, within the same transaction.

        Raises, with nothing of it visible, then or later: OffsetMismatch (the partition ended elsewhere),
        TransactionConflict, TransactionAborted (not done in time); after any of them read, decide and append again, see
        `retrying`. Raises WriterFenced; OutcomeUnknown where it could not be found out; ValueError and CheckIsOff with
        nothing sent. Other errors are the client library's: then too, nothing is visible.
        """
        parts = parts_of(wanted)
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
            offsets = {part.key: landed(part, self._send(part, write_id)) for part in parts}
        except BaseException as error:
            self._fenced |= isinstance(error, WriterFenced)
            # Without this producer: a refused batch leaves a gap in its sequences, which the next one would fall into.
            self._give_up(goes_on=False)
            raise
        try:
            self._commit()
        except CommitRefused as refusal:
            self._give_up(goes_on=True)
            raise TransactionConflict(REFUSED_AT_THE_END) from refusal.__cause__
        except WriterFenced as fenced:
            self._fenced = True
            self._drop()
            self._settle(parts, write_id, fenced, fenced.__cause__)
        except CommitInDoubt as doubt:
            self._drop()
            aborted = (
                TransactionConflict(REFUSED_AT_THE_END)
                if doubt.refused
                else TransactionAborted("its commit was not answered, and did not happen")
            )
            self._settle(parts, write_id, aborted, doubt.__cause__)
        except BaseException:
            self._drop()  # interrupted: the next append brings it to its end
            raise
        return offsets

    def close(self) -> None:
        """Closes the connections. Nothing is pending: `append` waits for its outcome."""
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
        """Nothing is committed. Others wait for the partitions until the transaction is over."""
        aborted = False
        with contextlib.suppress(Exception):
            aborted = self._abort()
        if aborted and goes_on:
            return
        self._drop()
        if not aborted and not self._fenced:
            with contextlib.suppress(Exception):  # then the next append will do it, or the transaction's timeout
                self._start()

    def _settle(self, parts: list[Part], write_id: bytes, aborted: Exception, cause: BaseException | None) -> None:
        """Returns if it is committed. Raises `aborted`, or OutcomeUnknown."""
        part = next(part for part in parts if part.expected is not None)
        deadline = time.monotonic() + self._retry.total_seconds
        for tries in itertools.count(1):
            if not self._open and not self._fenced:
                with contextlib.suppress(Exception):
                    self._start()
            assert part.expected is not None
            ended = settle(part, write_id, self._reading.look(part.topic, part.partition, part.expected), self._names)
            if ended is Ended.COMMITTED:
                return
            if ended is Ended.ABORTED:
                raise aborted from cause
            if ended is Ended.GONE or time.monotonic() >= deadline:
                reason = "the log starts behind it by now" if ended is Ended.GONE else f"at last: {cause!r}"
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
        """Raises CheckIsOff, or CannotRead."""

    @abstractmethod
    def _open_producer(self) -> None:
        """A new producer, and whatever an earlier one left is brought to its end. Raises CannotRead: ask again."""

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _send(self, part: Part, write_id: bytes) -> int:
        """The offset of the first record. Raises what `append` raises once it has aborted."""

    @abstractmethod
    def _commit(self) -> None:
        """Raises CommitRefused, CommitInDoubt, WriterFenced."""

    @abstractmethod
    def _abort(self) -> bool:
        """False, or any error: not known to be aborted."""

    @abstractmethod
    def _discard(self) -> None: ...
