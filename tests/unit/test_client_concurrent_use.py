"""No other task or thread can use a writer, reader or ordered consumer that is in use. The first use ends well."""

from __future__ import annotations

import asyncio
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
from tests.unit.test_client_log_writer import Partition

POLICY = RetryPolicy(attempt_seconds=1, total_seconds=20)
WAIT_SECONDS = 20.0
APPENDED: dict[Any, Any] = {("t", 0): (0, [Record(b"x")])}


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
        log = Partition.quiet()
        log.log += [(b"0", b"id"), (b"1", b"id")]
        super().__init__(log, 0.0)
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


def _use_of(what: str, held: Any, *, blocking: bool) -> Callable[[], Any]:
    """A call of a writer, reader or consumer."""
    if what == "log reader" and blocking:
        reader = BlockingLogReader([("t", 0)], Consumer(held), POLICY)
        return lambda: reader.read_to_end(lambda *_: None)
    if what == "log reader":
        loop = LogReaderBase([("t", 0)], Consumer(held), POLICY)

        async def read() -> list[Any]:
            return [record async for record in loop._loop()]

        return read
    if what == "consumer":
        reads = _ordered_reads()
        return lambda: (run if blocking else run_async)(reads.fetch(0, lambda _: held()))
    writer: Any
    if what == "log writer":
        writer, appended = _writer(BlockingLogWriter if blocking else LogWriterBase, held), [Record(b"x")]
    else:
        kind = BlockingTransactionalWriter if blocking else TransactionalWriterBase
        writer, appended = kind("w", Producer(held), Consumer(_nothing), POLICY), APPENDED
    return lambda: writer.append(appended) if blocking else run_async(writer.append(appended))


each_use = pytest.mark.parametrize("what", ["log writer", "log reader", "transactional writer", "consumer"])


@each_use
def test_second_thread_is_refused_at_once(what: str) -> None:
    hold = BlockingHold()
    use = _use_of(what, hold, blocking=True)
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


@each_use
@pytest.mark.parametrize("first_is_cancelled", [False, True])
async def test_second_task_is_refused_at_once(what: str, first_is_cancelled: bool) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        hold = AsyncHold()
        use = _use_of(what, hold, blocking=False)
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
        if what != "log writer" or not first_is_cancelled:  # that one must be read first
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
