"""A log writer for all tasks or threads of a process: decisions wait in a queue and are appended together.

Rounds of one worker: take all waiting decisions, let each decide on the state after the ones before it, append their
records as one batch, then report the results. After a refusal, read on and make every decision of the batch again.

The state after a decision is not final before the batch is acknowledged. `apply` therefore returns a new state: after a
refusal the acknowledged one is still there, without copying or replaying it, and other threads can read it at any time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fencepost._log_writer import BlockingLogWriter, LogWriterBase
from fencepost._steps import Closing, Pause, Steps, now, run, run_async
from fencepost.errors import LogBusyError, OffsetMismatchError
from fencepost.records import LogRecord, Record, batch_bytes_max, timestamped_now, unstated_headers

S = TypeVar("S")


class Change(NamedTuple, Generic[S]):
    """The outcome of a decision. `offset`: of its first record, None if it has none; `state`: after its records."""

    offset: int | None
    state: S


@dataclass(eq=False, slots=True)
class _Waiting(Generic[S]):
    """A decision in the queue. `deadline`: monotonic seconds."""

    decide: Callable[[S], Iterable[Record]]
    outcome: Future[Change[S]]
    deadline: float

    def end(self, result: Change[S] | Exception) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return  # its caller was cancelled
        if isinstance(result, Exception):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


@dataclass(frozen=True, slots=True)
class _Decided(Generic[S]):
    """`end`: its result if all records of the batch are appended, this decision's `records` among them."""

    waiting: _Waiting[S]
    records: Sequence[Record]
    end: Change[S] | Exception


class SharedLogBase(Generic[S]):
    """Keeps a state in one partition, for all tasks or threads of a process. See docs/client.md.

    `change(decide)` appends the records that `decide(state)` returns, decided on the state at the log end. Decisions
    that wait at the same time are appended as one batch; each sees the state after the ones before it. If another
    writer was first, the log is read on and `decide` is called again, so it must have no other effects. If it raises,
    nothing of it is appended, and `change` raises that.

    `log`: a LogWriter that nothing else uses. `state`: before the first record. `apply(state, record)` returns the
    state after the record, and must not change the given one. It also gets this process's own records, without the
    headers that the library adds. `waiting_max`: decisions in the queue. A decision waits for at most the log's
    `retry.total_seconds`, and an append takes at most the same.
    """

    def __init__(
        self, log: LogWriterBase, state: S, apply: Callable[[S, LogRecord], S], *, waiting_max: int = 1000
    ) -> None:
        self._log = log
        self._apply = apply
        self._state = state
        self._waiting_max = waiting_max
        self._queue: deque[_Waiting[S]] = deque()
        self._lock = threading.Lock()
        self._working = self._closed = False

    @property
    def state(self) -> S:
        """The state after the last record read or acknowledged. Other writers may have appended since."""
        return self._state

    def _start_worker(self) -> None:
        raise NotImplementedError

    def _submit(self, decide: Callable[[S], Iterable[Record]]) -> Future[Change[S]]:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._log.topic}-{self._log.partition}: the log was closed")
            if len(self._queue) >= self._waiting_max:
                raise self._busy(f"{self._waiting_max} decisions are waiting")
            if not self._working:
                self._start_worker()
                self._working = True
            waiting: _Waiting[S] = _Waiting(decide, Future(), now() + self._log.retry.total_seconds)
            self._queue.append(waiting)
        return waiting.outcome

    def _busy(self, reason: str) -> LogBusyError:
        return LogBusyError(f"{self._log.topic}-{self._log.partition}: {reason}; nothing was sent (try later)")

    def _work(self) -> Steps[None]:
        """Rounds, until no decision waits."""
        refusals, batch = 0, list[_Waiting[S]]()
        try:
            while batch := self._take():
                try:
                    yield from self._round(batch)
                    refusals = 0
                except OffsetMismatchError:  # another writer was first
                    self._put_back(batch)
                    refusals += 1
                    if refusals > 1:
                        yield Pause(self._log.retry.jittered(refusals - 1))
                except Exception as error:
                    for waiting in batch:
                        waiting.end(error)
        except BaseException:  # the event loop ends
            with self._lock:
                self._working = False
                for waiting in (*batch, *self._queue):
                    waiting.outcome.cancel()
                self._queue.clear()
            raise

    def _take(self) -> list[_Waiting[S]]:
        """All waiting decisions; without any, the worker ends."""
        with self._lock:
            taken = [waiting for waiting in self._queue if not waiting.outcome.cancelled()]
            self._queue.clear()
            self._working = bool(taken)
        return taken

    def _put_back(self, batch: Sequence[_Waiting[S]]) -> None:
        with self._lock:
            self._queue.extendleft(reversed(batch))

    def _round(self, batch: list[_Waiting[S]]) -> Steps[None]:
        """One append for `batch`. Puts back the decisions that do not fit, or have to be made again."""
        log = self._log
        for waiting in [waiting for waiting in batch if now() >= waiting.deadline]:
            batch.remove(waiting)
            waiting.end(self._busy(f"not decided within {log.retry.total_seconds:g} s"))
        if not batch:
            return
        limit = yield from log.batch_limit()
        read = not log.at_end
        if read:
            yield from self._read_on()
        decided = self._decide(batch, *limit)
        # An append proves that its decisions knew the log end. Others need a read that began after they were submitted.
        if not read and not any(each.records for each in decided) and (yield from self._read_on()):
            decided = self._decide(batch, *limit)
        self._put_back(batch[len(decided) :])
        del batch[len(decided) :]
        records = [record for each in decided for record in each.records]
        if records:
            try:
                yield from LogWriterBase.append(log, records)
            except OffsetMismatchError:
                raise
            except Exception:
                # Decisions without records were made on a state that may never have been.
                self._put_back([each.waiting for each in decided if not each.records])
                batch[:] = [each.waiting for each in decided if each.records]
                raise
            self._state = next(e.end.state for e in reversed(decided) if e.records and isinstance(e.end, Change))
        for each in decided:
            each.waiting.end(each.end)

    def _decide(self, batch: Sequence[_Waiting[S]], bytes_max: int, binding: bytes) -> list[_Decided[S]]:
        """The decisions whose records fit into one append, at least one."""
        state, offset, size = self._state, self._log.next_offset, 0
        assert offset is not None
        decided: list[_Decided[S]] = []
        for waiting in batch:
            try:
                records = timestamped_now(list(waiting.decide(state)))
                after = state
                for at, record in enumerate(records, offset):
                    after = self._apply(after, _appended(record, at))
                size += batch_bytes_max(records, binding)
            except Exception as error:
                decided.append(_Decided(waiting, (), error))
                continue
            if decided and size > bytes_max and records:
                break
            decided.append(_Decided(waiting, records, Change(offset if records else None, after)))
            state, offset = after, offset + len(records)
        return decided

    def _read_on(self) -> Steps[bool]:
        """Apply the records to the log end. Whether there were any."""
        loop, any_read = self._log.loop(), False
        while (item := (yield from loop.following())) is not None:
            self._state, any_read = self._apply(self._state, item.value), True
        return any_read


def _appended(record: Record, offset: int) -> LogRecord:
    """Raises TypeError or ValueError for a record that could not be sent: it would fail the whole batch."""
    for part in (record.key, record.value):
        if not isinstance(part, bytes | None):
            raise TypeError(f"a record has a {type(part).__name__} (keys and values are bytes)")
    headers = unstated_headers(record.headers, offset)
    assert record.timestamp_ms is not None
    return LogRecord(offset, record.timestamp_ms, record.key, record.value, tuple(headers))


class BlockingSharedLog(SharedLogBase[S], Closing):
    __doc__ = SharedLogBase.__doc__

    _log: BlockingLogWriter
    _worker: threading.Thread | None = None

    def _start_worker(self) -> None:
        self._worker = threading.Thread(target=run, args=(self._work(),), name="fencepost-shared-log", daemon=True)
        self._worker.start()

    def change(self, decide: Callable[[S], Iterable[Record]]) -> Change[S]:
        """Append what `decide(state)` returns. With no records: the state at the log end. Thread-safe.

        Raises what `decide` raises, LogBusyError (the queue is full, or the wait was too long), and what
        `LogWriter.append` and `read_to_end` raise: OffsetMismatchError only if other writers were first until the
        deadline, InDoubtError with the offset and write id of the whole batch.
        """
        if threading.current_thread() is self._worker:
            raise RuntimeError("change() cannot be called by a decision (return all records from one decision)")
        return self._submit(decide).result()

    def close(self) -> None:
        """Append what waits, then close the log."""
        self._closed = True
        if self._worker is not None:
            self._worker.join()
        self._log.close()


class AsyncSharedLog(SharedLogBase[S]):
    __doc__ = SharedLogBase.__doc__

    _worker: asyncio.Task[None] | None = None

    def _start_worker(self) -> None:
        self._worker = asyncio.create_task(run_async(self._work()))

    async def change(self, decide: Callable[[S], Iterable[Record]]) -> Change[S]:
        """As `change` of the blocking clients. A cancelled call's records are appended if they were already decided."""
        return await asyncio.wrap_future(self._submit(decide))
