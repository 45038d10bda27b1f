"""No other task or thread can use a writer, reader or ordered consumer that is in use. The first use ends well."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fencepost import ConcurrentUseError, Record, RetryPolicy
from fencepost._appending import Append
from fencepost._checks import TopicFacts
from fencepost._log_writer import BlockingLogWriter, LogWriterBase
from fencepost._ordered_consumer import OrderedReads
from fencepost._reading import BlockingLogReader, LogReaderBase
from fencepost._steps import run, run_async
from fencepost._transactional_writer import BlockingTransactionalWriter, TransactionalWriterBase
from tests.support.faulty_log import FakeConsumer

POLICY = RetryPolicy(attempt_seconds=1, total_seconds=20)
WAIT_SECONDS = 20.0
APPENDED: dict[Any, Any] = {("t", 0): (0, [Record(b"x")])}


class Log:
    """Two records. `calls`: of the consumer's and the producer's methods that do I/O."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.calls: list[str] = []

    def something_happens(self) -> None: ...

    def stable(self, partition: int) -> int:
        return 2

    def committed(self, partition: int, offset: int) -> tuple[bytes, bytes]:
        return b"%d" % offset, b"id"


class BlockingHold:
    """A call that waits until it is released, on another thread."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.entered.set()
        assert self.leave.wait(WAIT_SECONDS)


class AsyncHold:
    def __init__(self) -> None:
        self.entered, self.leave = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> Any:
        self.entered.set()
        await self.leave.wait()


class Producer:
    """Of a log writer and of a transactional writer. `held`: called at each append."""

    error = ConnectionError

    def __init__(self, held: Callable[[], Any]) -> None:
        self._held = held
        self.sent = 0

    def require(self, topic: str) -> TopicFacts:
        return TopicFacts(None)

    def send(self, append: Append | Any, write_id: bytes = b"") -> Any:
        self.sent += 1
        held = self._held()
        return append.expected if held is None else self._later(held, append.expected)

    @staticmethod
    async def _later(held: Coroutine[Any, Any, None], offset: int) -> int:
        await held
        return offset

    def open(self) -> None: ...
    def begin(self) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> bool:
        return True

    def discard(self) -> None: ...
    def close(self) -> None: ...


class Consumer(FakeConsumer):
    """`held`: called at each read of the log bounds."""

    def __init__(self, held: Callable[[], Any]) -> None:
        super().__init__(Log(), 0.0)
        self._held = held

    def bounds(self, topic: str, partition: int) -> Any:
        held = self._held()
        return super().bounds(topic, partition) if held is None else self._bounds(held, topic, partition)

    async def _bounds(self, held: Coroutine[Any, Any, None], topic: str, partition: int) -> tuple[int, int]:
        await held
        return super().bounds(topic, partition)


def _nothing() -> None: ...


def _writer(kind: Any, held: Callable[[], Any]) -> Any:
    writer = kind("t", 0, Producer(held), Consumer(_nothing), POLICY, 10_000)
    writer._position.next_offset, writer._position.at_end = 0, True
    return writer


def _blocking_log_writer(held: Any) -> tuple[Any, Callable[[], Any]]:
    writer = _writer(BlockingLogWriter, held)
    return writer, lambda: writer.append([Record(b"x")])


def _blocking_log_reader(held: Any) -> tuple[Any, Callable[[], Any]]:
    reader = BlockingLogReader([("t", 0)], Consumer(held), POLICY)
    return reader, lambda: reader.read_to_end(lambda *_: None)


def _blocking_transactional_writer(held: Any) -> tuple[Any, Callable[[], Any]]:
    writer = BlockingTransactionalWriter("w", Producer(held), Consumer(_nothing), POLICY)
    return writer, lambda: writer.append(APPENDED)


def _blocking_consumer(held: Any) -> tuple[Any, Callable[[], Any]]:
    reads = _ordered_reads()
    return reads, lambda: run(reads.fetch(0, lambda _: held()))


def _ordered_reads() -> OrderedReads:
    return OrderedReads(
        (),
        None,
        partition_filter=None,
        given=None,
        grouped=False,
        latest=False,
        refresh_seconds=1,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "use_of", [_blocking_log_writer, _blocking_log_reader, _blocking_transactional_writer, _blocking_consumer]
)
def test_second_thread_is_refused_at_once(use_of: Callable[[Any], tuple[Any, Callable[[], Any]]]) -> None:
    hold = BlockingHold()
    _used, use = use_of(hold)
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(use()))
    thread.start()
    try:
        assert hold.entered.wait(WAIT_SECONDS)
        with pytest.raises(ConcurrentUseError, match="nothing was read or sent") as refused:
            use()
    finally:
        hold.leave.set()
        thread.join(WAIT_SECONDS)
    assert refused.value.outcome == "refused"
    assert not refused.value.retriable
    assert len(first) == 1, "the first use failed"
    use_again = use()
    assert isinstance(use_again, type(first[0]))


def _async_log_writer(held: Any) -> Callable[[], Any]:
    writer: LogWriterBase = _writer(LogWriterBase, held)
    return lambda: run_async(writer.append([Record(b"x")]))


def _async_log_reader(held: Any) -> Callable[[], Any]:
    reader = LogReaderBase([("t", 0)], Consumer(held), POLICY)

    async def read() -> list[Any]:
        return [record async for record in reader._loop()]

    return read


def _async_transactional_writer(held: Any) -> Callable[[], Any]:
    writer = TransactionalWriterBase("w", Producer(held), Consumer(_nothing), POLICY)
    return lambda: run_async(writer.append(APPENDED))


def _async_consumer(held: Any) -> Callable[[], Any]:
    reads = _ordered_reads()
    return lambda: run_async(reads.fetch(0, lambda _: held()))


ASYNC = pytest.mark.parametrize(
    "use_of", [_async_log_writer, _async_log_reader, _async_transactional_writer, _async_consumer]
)


@ASYNC
@pytest.mark.parametrize("first_is_cancelled", [False, True])
async def test_second_task_is_refused_at_once(
    use_of: Callable[[Any], Callable[[], Any]], first_is_cancelled: bool
) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        hold = AsyncHold()
        use = use_of(hold)
        first = asyncio.ensure_future(use())
        await hold.entered.wait()
        with pytest.raises(ConcurrentUseError):
            await use()
        if first_is_cancelled:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        hold.leave.set()
        if not first_is_cancelled:
            await first
        if use_of is not _async_log_writer or not first_is_cancelled:  # that one must be read first
            await use()


async def test_cancelled_append_counts_as_used_until_it_is_aborted() -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        sending, aborting = AsyncHold(), AsyncHold()
        producer = Producer(sending)
        producer.abort = aborting  # type: ignore[method-assign, assignment]
        writer = TransactionalWriterBase("w", producer, Consumer(_nothing), POLICY)
        first = asyncio.ensure_future(run_async(writer.append(APPENDED)))
        await sending.entered.wait()
        first.cancel()
        await aborting.entered.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        sending.leave.set()
        with pytest.raises(ConcurrentUseError):
            await run_async(writer.append(APPENDED))
        aborting.leave.set()
        for _ in range(20):
            await asyncio.sleep(0)
        await run_async(writer.append(APPENDED))


async def test_loop_that_breaks_is_over_at_once() -> None:
    """An asynchronous generator would be closed by the event loop, later."""

    reader = LogReaderBase([("t", 0)], Consumer(_nothing), POLICY)
    async for _, record in reader._loop():
        if record.offset == 1:
            break
    assert [record.offset async for _, record in reader._loop()] == [1]


async def test_two_tasks_on_one_loop_are_refused() -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        hold = AsyncHold()
        reader = LogReaderBase([("t", 0)], Consumer(hold), POLICY)
        loop = reader._loop()
        first = asyncio.ensure_future(anext(loop))
        await hold.entered.wait()
        with pytest.raises(ConcurrentUseError, match="one loop over a log"):
            await anext(loop)
        hold.leave.set()
        assert (await first)[1].offset == 0
        assert [record.offset async for _, record in loop] == [1]
