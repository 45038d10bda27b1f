"""The queue, over partitions in memory with every fault of a real one."""

from __future__ import annotations

import random

import pytest

from fencepost import (
    ForeignRecordError,
    InDoubtError,
    LogRecord,
    NotLeaderError,
    OffsetMismatchError,
    PositionLostError,
    Record,
)
from fencepost._reading import BlockingLogReader
from fencepost.recipes import Queue
from tests.support.faulty_log import FakeConsumer, clock
from tests.support.recipe_log import RecipePartition
from tests.unit.test_client_log_writer import POLICY

__all__ = ["clock"]  # a fixture

POSITION = "fencepost-position"


def _items(count: int) -> RecipePartition:
    partition = RecipePartition.quiet()
    for number in range(count):
        partition.append_foreign(Record(b"%d" % number))
    return partition


def _queue(items: RecipePartition, results: RecipePartition, name: str = "a", problem: float = 0.0) -> Queue:
    reader = BlockingLogReader([("jobs", 0)], FakeConsumer(items, problem / 10), POLICY)
    return Queue(reader, results.writer(problem), name)


def _work(queue: Queue, limit: int = 100) -> int:
    """Handle the next items. Returns their number."""
    items = queue.take(limit)
    if items:
        queue.finish([Record(b"result " + (item.value or b"")) for item in items])
    return len(items)


def _results(partition: RecipePartition) -> list[bytes]:
    return [value for value in partition.values if value is not None and value.startswith(b"result")]


def test_results_and_position_are_one_append() -> None:
    items, results = _items(5), RecipePartition.quiet()
    queue = _queue(items, results, "node-1")
    queue.claim()
    assert [item.value for item in queue.take(2)] == [b"0", b"1"]
    assert [item.value for item in queue.take(3)] == [b"0", b"1", b"2"], "not finished yet"
    assert queue.finish([Record(b"result a"), Record(b"result b")]) == 1
    assert queue.position == 3
    last = results.records[2]
    assert last is not None
    assert (POSITION, b"3@jobs/0") in last.headers
    assert [item.value for item in queue.take()] == [b"3", b"4"]
    queue.finish([])
    only = results.records[3]
    assert only is not None
    assert only.headers[:2] == (("fencepost-recipe", b"queue/1 position"), (POSITION, b"5@jobs/0"))
    assert queue.take() == []


def test_next_leader_continues_at_the_position() -> None:
    items, results = _items(6), RecipePartition.quiet()
    first, applied = _queue(items, results, "first"), list[bytes | None]()
    first.claim()
    _work(first, 2)
    reader = BlockingLogReader([("jobs", 0)], FakeConsumer(items, 0.0), POLICY)
    second = Queue(reader, results.writer(), "second", lambda record: applied.append(record.value))
    second.claim()
    assert applied == [b"result 0", b"result 1"]
    assert second.position == 2
    while _work(second, 3):
        pass
    assert _results(results) == [b"result %d" % number for number in range(6)]


def test_former_leader_finishes_nothing() -> None:
    items, results = _items(3), RecipePartition.quiet()
    first, second = _queue(items, results, "first"), _queue(items, results, "second")
    first.claim()
    first.take(1)
    second.claim()
    _work(second, 1)
    with pytest.raises(NotLeaderError, match="'second' leads"):
        first.finish([Record(b"result 0")])
    with pytest.raises(NotLeaderError):
        first.take()
    assert _results(results) == [b"result 0"]


def test_each_item_has_one_result_under_faults() -> None:
    for seed in range(80):
        rng = random.Random(seed)
        items, results = _items(25), RecipePartition(rng)
        problem = rng.choice([0.0, 0.2, 0.5])
        workers = [_queue(items, results, f"{number}", problem) for number in range(3)]
        for _ in range(60):
            at = rng.randrange(3)
            try:
                if rng.random() < 0.1:  # it was killed
                    workers[at] = _queue(items, results, f"{at}", problem)
                if workers[at].term is None:
                    workers[at].claim()
                _work(workers[at], rng.randint(1, 4))
            except PositionLostError:  # the high watermark of this stand-in may go back; Kafka's does not
                workers[at] = _queue(items, results, f"{at}", problem)
            except (OffsetMismatchError, NotLeaderError, InDoubtError, ConnectionError):
                pass
        for append in results.queued:
            results.land(append)
        found = _results(results)
        assert found == [b"result %d" % number for number in range(len(found))], f"seed {seed}"


def test_finish_without_take_is_an_error() -> None:
    queue = _queue(_items(1), RecipePartition.quiet())
    queue.claim()
    with pytest.raises(ValueError, match="no items to finish"):
        queue.finish([])
    queue.take()
    queue.finish([])
    with pytest.raises(ValueError, match="no items to finish"):
        queue.finish([])


def test_position_of_another_partition_or_going_back_stops_reading() -> None:
    for stated, why in ((b"3@jobs/1", "'3@jobs/1' does not follow None of jobs/0"), (b"x@jobs/0", "'x@jobs/0'")):
        results = RecipePartition.quiet()
        results.append_foreign(Record(b"r", headers=((POSITION, stated),)))
        with pytest.raises(ForeignRecordError, match=why):
            _queue(_items(1), results).claim()
    results = RecipePartition.quiet()
    for _ in range(2):
        results.append_foreign(Record(b"r", headers=((POSITION, b"3@jobs/0"),)))
    with pytest.raises(ForeignRecordError, match=r"at offset 1: .* does not follow 3"):
        _queue(_items(1), results).claim()


def test_failed_apply_repeats_the_record_with_its_position() -> None:
    items, results = _items(2), RecipePartition.quiet()
    first = _queue(items, results)
    first.claim()
    _work(first)
    errors = iter([RuntimeError("full")])

    def apply(record: LogRecord) -> None:
        for error in errors:
            raise error

    reader = BlockingLogReader([("jobs", 0)], FakeConsumer(items, 0.0), POLICY)
    second = Queue(reader, results.writer(), "second", apply)
    with pytest.raises(RuntimeError, match="full"):
        second.claim()
    second.claim()
    assert second.take() == []


def test_deleted_items_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    items, results = _items(5), RecipePartition.quiet()
    queue = _queue(items, results)
    queue.claim()
    _work(queue, 1)
    monkeypatch.setattr(queue._items._reading.consumer, "bounds", lambda *_: (3, 5))
    with pytest.raises(PositionLostError, match="jobs-0: next offset 1 is outside the log"):
        queue.take()
    with pytest.raises(ValueError, match="items has 2 partitions"):
        Queue(BlockingLogReader([("a", 0), ("a", 1)], FakeConsumer(items, 0.0), POLICY), results.writer(), "x")
