"""A shared log over a partition in memory with every fault of a real one: see `test_client_log_writer.py`."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost import Change, InDoubtError, LogBusyError, LogRecord, PositionLostError, Record
from fencepost._appending import Append, MaybeAppended
from fencepost._shared_log import AsyncSharedLog, BlockingSharedLog
from fencepost._steps import run
from tests.support.faulty_log import clock
from tests.unit.test_client_log_writer import POLICY, FakeLogWriter, Partition

__all__ = ["clock"]  # a fixture

State = tuple[bytes, ...]


def _apply(state: State, record: LogRecord) -> State:
    assert record.value is not None
    return (*state, record.value)


class Full(Exception):
    pass


def _nothing(_: State) -> list[Record]:
    return []


def _add(value: bytes, limit: int = 10_000) -> Callable[[State], list[Record]]:
    def decide(state: State) -> list[Record]:
        if len(state) >= limit:
            raise Full(len(state))
        return [Record(value)]

    return decide


class StoppedLog(BlockingSharedLog[State]):
    """Works only when `work` is called, in the caller's thread."""

    def __init__(self, partition: Partition, problem: float = 0.0, **options: Any) -> None:
        self.log = FakeLogWriter(partition, problem)
        super().__init__(self.log, (), _apply, **options)

    def _start_worker(self) -> None: ...

    def submit(self, *decisions: Callable[[State], Sequence[Record]]) -> list[Future[Change[State]]]:
        return [self._submit(decide) for decide in decisions]

    def work(self) -> None:
        run(self._work())


def _sends(log: StoppedLog) -> list[int]:
    """The number of records of each append that is sent from now on."""
    sizes: list[int] = []
    send = log.log.appender.send

    def noted(append: Append) -> int:
        sizes.append(len(append.records))
        return send(append)

    log.log.appender.send = noted  # type: ignore[method-assign]
    return sizes


def _values(partition: Partition) -> State:
    return tuple(entry[0] for entry in partition.log if entry is not None)


@pytest.fixture
def partition() -> Partition:
    return Partition.quiet()


def test_waiting_decisions_share_one_append_and_see_each_other(partition: Partition) -> None:
    log = StoppedLog(partition)
    sizes = _sends(log)
    seen: list[int] = []

    def decide(state: State) -> list[Record]:
        seen.append(len(state))
        return [Record(b"%d" % len(state)), Record(b"more")]

    outcomes = log.submit(decide, decide, decide)
    log.work()
    assert sizes == [6]
    assert seen == [0, 2, 4]
    assert [outcome.result(0).offset for outcome in outcomes] == [0, 2, 4]
    assert [len(outcome.result(0).state) for outcome in outcomes] == [2, 4, 6]
    assert log.state == _values(partition)


def test_decisions_are_made_again_after_another_writer_was_first(partition: Partition) -> None:
    log = StoppedLog(partition)
    log.submit(_add(b"first"))
    log.work()
    partition.log.append((b"other", b"other"))
    states: list[State] = []

    def decide(state: State) -> list[Record]:
        states.append(state)
        return [Record(b"second")]

    second, full = log.submit(decide, _add(b"third", limit=2))
    log.work()
    assert states == [(b"first",), (b"first", b"other")]
    assert second.result(0) == Change(2, (b"first", b"other", b"second"))
    with pytest.raises(Full):  # what it found in the refused batch, 2, does not count
        full.result(0)
    assert full.exception(0).args == (3,)  # type: ignore[union-attr]
    assert log.state == _values(partition) == (b"first", b"other", b"second")


@pytest.mark.parametrize("seed", range(200))
def test_limit_holds_and_results_are_true_under_faults(seed: int) -> None:
    rng = random.Random(seed)
    partition = Partition(rng)
    partition.others_append = lambda: partition.log.append(None)  # type: ignore[method-assign]
    problem = rng.choice([0.0, 0.2, 0.5])
    logs = [StoppedLog(partition, problem) for _ in range(2)]
    limit = rng.randint(3, 25)
    outcomes: dict[bytes, Future[Change[State]]] = {}
    for number in range(40):
        log = rng.choice(logs)
        for _ in range(rng.randint(1, 3)):
            value = b"%d-%d" % (number, len(outcomes))
            outcomes[value] = log.submit(_add(value, limit))[0]
        log.work()
    for append in partition.queued:
        partition.land(append)
    there = _values(partition)
    assert len(there) <= limit
    for value, outcome in outcomes.items():
        error = outcome.exception(0)
        assert there.count(value) <= 1
        if error is None:
            change = outcome.result(0)
            entry = partition.log[change.offset or 0]
            assert entry is not None
            assert entry[0] == value
            assert change.state == there[: len(change.state)], "decided on a state that never was"
        elif isinstance(error, Full | LogBusyError):
            assert value not in there
        else:
            assert isinstance(error, InDoubtError | PositionLostError | ConnectionError), error
    for log in logs:
        assert log.state == there[: len(log.state)]


def test_failing_decision_fails_alone(partition: Partition) -> None:
    log = StoppedLog(partition)
    good, full, text, reserved, also_good = log.submit(
        _add(b"a"),
        _add(b"b", limit=1),
        lambda _: [Record("text")],  # type: ignore[arg-type]
        lambda _: [Record(b"x", headers=(("fencepost-write-id", b"1"),))],
        _add(b"c"),
    )
    log.work()
    assert good.result(0).offset == 0
    for failed, kind in ((full, Full), (text, TypeError), (reserved, ValueError)):
        with pytest.raises(kind):
            failed.result(0)
    assert also_good.result(0) == Change(1, (b"a", b"c"))


def test_records_that_do_not_fit_go_into_the_next_append(partition: Partition) -> None:
    log = StoppedLog(partition)  # 10,000 bytes at most
    sizes = _sends(log)
    outcomes = log.submit(*[_add(bytes(4000))] * 5, lambda _: [Record(bytes(11_000))], _add(b"last"))
    log.work()
    assert sizes == [2, 2, 1, 1]
    assert [outcome.result(0).offset for outcome in outcomes[:5]] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the limit is 10000"):
        outcomes[5].result(0)
    assert outcomes[6].result(0).offset == 5


def test_unknown_outcome_is_reported_to_decisions_with_records_only(
    clock: SimpleNamespace, partition: Partition
) -> None:
    log = StoppedLog(partition)
    send = log.log.appender.send

    def in_doubt(append: Append) -> int:
        clock.seconds += POLICY.attempt_seconds
        if clock.seconds > POLICY.total_seconds:
            log.log.appender.send = send  # type: ignore[method-assign]
        raise MaybeAppended from TimeoutError("no answer")

    log.log.appender.send = in_doubt  # type: ignore[method-assign]
    unknown, none = log.submit(_add(b"a"), _nothing)
    log.work()
    assert isinstance(unknown.exception(0), InDoubtError)
    assert isinstance(none.exception(0), LogBusyError)  # its time is over too
    (again,) = log.submit(_add(b"b"))
    log.work()
    assert again.result(0) == Change(0, (b"b",))


def test_decision_without_records_sees_the_log_end(partition: Partition) -> None:
    log = StoppedLog(partition)
    log.submit(_nothing)
    log.work()
    partition.log.append((b"other", b"other"))
    assert log.state == ()
    read, full = log.submit(_nothing, _add(b"b", limit=0))
    log.work()
    assert read.result(0) == Change(None, (b"other",))
    assert full.exception(0).args == (1,)  # type: ignore[union-attr]


def test_refused_writer_pauses_and_gives_up_in_time(clock: SimpleNamespace, partition: Partition) -> None:
    log = StoppedLog(partition)
    send = log.log.appender.send

    def other_is_first(append: Append) -> int:
        partition.log.append((b"other", b"other"))
        assert len(partition.log) < 1000, "no pause"
        return send(append)

    log.log.appender.send = other_is_first  # type: ignore[method-assign]
    (never,) = log.submit(_add(b"a"))
    log.work()
    with pytest.raises(LogBusyError, match="not decided within 20 s"):
        never.result(0)
    assert POLICY.total_seconds <= clock.seconds < 2 * POLICY.total_seconds


def test_full_queue_and_long_wait_are_refused(clock: SimpleNamespace) -> None:
    log = StoppedLog(Partition.quiet(), waiting_max=2)
    log.submit(_add(b"a"), _add(b"b"))
    with pytest.raises(LogBusyError, match="2 decisions are waiting; nothing was sent"):
        log.submit(_add(b"c"))
    clock.seconds += POLICY.total_seconds
    late = log._queue[0].outcome
    log.work()
    with pytest.raises(LogBusyError, match="not decided within 20 s"):
        late.result(0)
    assert not log._log.next_offset


def test_threads_share_a_log(partition: Partition) -> None:
    log: BlockingSharedLog[State] = BlockingSharedLog(FakeLogWriter(partition, 0.0), (), _apply)
    offsets: list[int | None] = []

    def add() -> None:
        for _ in range(40):
            offsets.append(log.change(lambda state: [Record(b"%d" % len(state))]).offset)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    log.close()
    assert sorted(offset for offset in offsets if offset is not None) == list(range(320))
    assert _values(partition) == tuple(b"%d" % number for number in range(320))
    with pytest.raises(RuntimeError, match="the log was closed"):
        log.change(_nothing)


def test_decision_cannot_change_the_log_itself() -> None:
    log: BlockingSharedLog[State] = BlockingSharedLog(FakeLogWriter(Partition.quiet(), 0.0), (), _apply)

    def nested(_: State) -> list[Record]:
        log.change(_nothing)
        return []

    with pytest.raises(RuntimeError, match="cannot be called by a decision"):
        log.change(nested)
    log.close()


def test_cancelled_call_is_not_appended_if_undecided_and_harms_no_other() -> None:
    """First: cancelled during its append. Second: cancelled in the queue. Third: not cancelled."""

    async def scenario() -> None:
        partition = Partition.quiet()
        writer = FakeLogWriter(partition, 0.0)
        sending, may_end = asyncio.Event(), asyncio.Event()
        send = writer.appender.send

        async def slow(append: Append) -> int:
            sending.set()
            await may_end.wait()
            return send(append)

        writer.appender.send = slow  # type: ignore[method-assign, assignment]
        log: AsyncSharedLog[State] = AsyncSharedLog(writer, (), _apply)
        first = asyncio.ensure_future(log.change(_add(b"first")))
        await sending.wait()
        second, third = (asyncio.ensure_future(log.change(_add(value))) for value in (b"second", b"third"))
        await asyncio.sleep(0)
        for cancelled in (first, second):
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        may_end.set()
        assert await third == Change(1, (b"first", b"third"))
        assert _values(partition) == (b"first", b"third")

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def test_end_of_the_event_loop_ends_waiting_calls() -> None:
    async with asyncio.timeout(20):
        writer = FakeLogWriter(Partition.quiet(), 0.0)
        sending, never = asyncio.Event(), asyncio.Event()

        async def stuck(append: Append) -> int:
            sending.set()
            await never.wait()
            raise AssertionError

        writer.appender.send = stuck  # type: ignore[method-assign, assignment]
        log: AsyncSharedLog[State] = AsyncSharedLog(writer, (), _apply)
        call = asyncio.ensure_future(log.change(_add(b"x")))
        await sending.wait()
        assert log._worker is not None
        log._worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
