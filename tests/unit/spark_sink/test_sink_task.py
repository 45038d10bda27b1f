"""One task and the log, without Spark and threads: what it appends, reads and refuses, with which message.

Retries, late appends, expansions and drivers that die: tests/sink_simulation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fencepost.spark.closing import close, refuse_without_task
from fencepost.spark.commit_tags import CommitTag, Prefix
from fencepost.spark.driver_probe import DriverProbe, Observation, probe
from fencepost.spark.errors import SinkError
from fencepost.spark.task import Task
from fencepost.spark.write import Outcome, Plan, Write
from tests.sink_simulation.model import Answer, Batch, Faults, ModelFraming, ModelLog, Partition, World, body

TOPIC = "t"


class Log(ModelLog):
    """Responds at once. `script`: other results of the next appends."""

    def __init__(self, partitions: int = 1) -> None:
        self.world = World(1, Faults())
        self.world.topics[TOPIC] = [Partition() for _ in range(partitions)]
        super().__init__(self.world)
        self.script: list[Callable[[Any, Batch], Answer | Exception]] = []
        self.sent: list[Batch] = []
        self.reads: list[tuple[int, int]] = []

    def _breathe(self, queries: int = 1) -> None:
        for partition in self.world.topics[TOPIC]:
            partition.high_watermark = partition.end

    def append(self, topic: str, partition: int, batch: Any) -> Future[Any]:
        self.sent.append(batch)
        answer: Future[Any] = Future()
        at = self.world.topics[topic][partition]
        if self.script:
            result = self.script.pop(0)(at, batch)
        elif batch.expected != at.end:
            result = Answer(44, at.end, "OFFSET_MISMATCH")
        else:
            result = Answer(0, at.append(batch.bodies, batch.commit_tag))
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
        return answer

    def read(self, topic: str, partition: int, start: int, end: int) -> Any:
        self.reads.append((start, end))
        return super().read(topic, partition, start, end)

    @property
    def first(self) -> Partition:
        return self.world.topics[TOPIC][0]

    def other_appends(self) -> None:
        """Another writer, to the first partition."""
        self.first.append((b"\1other",), None)

    def bodies(self) -> list[bytes]:
        """Of the first partition."""
        return [each for stored in self.first.stored for each in stored.bodies]


class Clock:
    time = 0.0

    def now(self) -> float:
        return self.time

    def time_ms(self) -> int:
        return int(self.time * 1000)

    def random(self) -> float:
        return 0.5

    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        if not any(each.done() for each in futures):
            self.time += seconds


@pytest.fixture
def log() -> Log:
    return Log()


PLAN = Plan("s", patience_seconds=30, append_bytes_max=100, append_rows_max=1000)


def probed(log: Log, **more: Any) -> DriverProbe:
    return probe(log, "s", {TOPIC: log.identify(TOPIC)}, **{"at": 0, **more})


def values(*numbers: int) -> list[bytes]:
    return [body(None, b"%d" % number) for number in numbers]


def keyed(*numbers: int) -> list[bytes]:
    return [body(b"k", b"%d" % number) for number in numbers]


def write(
    log: Log, observed: DriverProbe, rows: list[bytes], plan: Plan = PLAN, *, is_sorted: bool = False, **who: Any
) -> Outcome:
    """All rows go to partition `task`."""
    identity = {"query": "q", "batch": 0, "task": 0, **who}
    current = Write(
        plan, observed, log=log, framing=ModelFraming(), clock=Clock(), is_sorted=is_sorted or not identity["query"],
        **identity,
    )  # fmt: skip
    one = Task(current)
    one.begin()
    if rows:
        feed(one, rows, observed.counts[TOPIC], identity["task"])
    return one.finish()


def feed(one: Task, rows: list[bytes], arranged: int = 1, task: int = 0) -> None:
    one.feed(TOPIC, pa.array(rows, pa.large_binary()), np.full(len(rows), -1 - task), arranged)


def commit(log: Log, outcomes: list[Outcome], plan: Plan = PLAN) -> list[Any]:
    return close(plan, outcomes, log=log, framing=ModelFraming(), clock=Clock())


def load(log: Log, observed: DriverProbe, *tasks: list[bytes]) -> dict[str, int]:
    """All tasks of a `df.write`, and its commit."""
    outcomes = [write(log, observed, rows, query="", task=number) for number, rows in enumerate(tasks)]
    refuse_without_task("s", outcomes)
    ended = commit(log, outcomes)
    written = [*(at for outcome in outcomes for at in outcome.partitions.values()), *(at for _, at in ended)]
    return {"found": sum(at.found for at in written), "appended": sum(at.appended for at in written)}


def test_rows_are_appended_in_batches_of_requested_size(log: Log) -> None:
    done = write(log, probed(log), values(*range(30)))
    assert log.bodies() == values(*range(30))
    assert (done.rows, done.appended, done.found) == (30, 30, 0)
    assert done.appends > 1
    assert [batch.expected for batch in log.sent][:2] == [0, len(log.sent[0].bodies)]
    assert log.reads == []  # without another writer, nothing is read
    assert done.waited == 0


def test_time_of_waiting_is_counted(log: Log) -> None:
    log.script = [lambda at, batch: Answer(6, -1, "NOT_LEADER")]
    assert write(log, probed(log), values(0)).waited > 0.1


@pytest.mark.parametrize(
    ("answer", "stated"),
    [
        (Answer(10), "max.message.bytes"),
        (Answer(29), "needs WRITE, READ and DESCRIBE"),
        (Answer(32), "compare the clocks"),
        (Answer(44, -1, "OFFSET_VIOLATION t 0 appended_at=7"), "bypasses the proxy"),
        (Answer(44, -1, "IDEMPOTENCE_REQUIRED t 0"), "IDEMPOTENCE_REQUIRED"),
        (Answer(0, 7), "nothing checked"),
    ],
)
def test_non_retriable_refusal_ends_the_task(log: Log, answer: Answer, stated: str) -> None:
    log.script = [lambda at, batch: answer]
    with pytest.raises(SinkError, match=stated):
        write(log, probed(log), values(1))


def rival(at: Any, batch: Batch) -> Answer:
    at.append((b"\1rival",), None)
    return Answer(44, at.end)


@pytest.mark.parametrize(
    ("answer", "message"),
    [(lambda at, batch: Answer(6, -1, "NOT_LEADER"), r"for 30 s .*NOT_LEADER"), (rival, "nothing could be appended")],
    ids=["broker", "rival"],
)
def test_patience_ends_and_says_what_it_waited_for(log: Log, answer: Any, message: str) -> None:
    log.script = [answer] * 100_000
    with pytest.raises(SinkError, match=message):
        write(log, probed(log), values(1))


def test_a_driver_that_is_overtaken_stops(log: Log) -> None:
    old = probed(log)
    write(log, probed(log), values(1), batch=0)
    write(log, probed(log), values(2), batch=1)
    with pytest.raises(SinkError, match="another driver is ahead"):
        write(log, old, values(1), batch=0)
    assert log.bodies() == values(1, 2)


def cut_off(log: Log) -> None:
    """Retention."""
    partition = log.first
    partition.start = partition.end
    partition.stored.clear()


@pytest.mark.parametrize("rare", [False, True], ids=["earlier rows", "no row ever"])
def test_later_batch_is_appended_after_all_records_were_deleted(log: Log, rare: bool) -> None:
    """Another driver than that of the batch before."""
    log.other_appends()
    if not rare:
        write(log, probed(log), values(1), batch=0)
    cut_off(log)
    log.other_appends()
    write(log, probed(log), values(2), batch=1)
    write(log, probed(log), values(2), batch=1)
    assert lying(log) == Counter([*values(2), b"\1other"])


def test_half_written_batch_with_deleted_rows_is_refused(log: Log) -> None:
    write(log, probed(log), values(*range(20)))
    partition = log.first
    partition.start = partition.stored[0].next_offset
    del partition.stored[0]
    with pytest.raises(SinkError, match="rows of batch 0 may have been there"):
        write(log, probed(log), values(*range(20)))


def test_last_commit_tag_is_found_once_and_remembered(log: Log) -> None:
    write(log, probed(log), values(1), batch=0)
    partition = log.first
    for _ in range(30):
        partition.append((b"\1other",), None)
    remembered: dict[Any, Observation] = {}
    commit_tag = probed(log, known=remembered).observations[TOPIC, 0].last
    assert isinstance(commit_tag, CommitTag)
    partition.append((b"\1other",), None)
    log.reads.clear()
    assert probed(log, known=remembered).observations[TOPIC, 0].last == commit_tag
    assert log.reads == [(31, 32)]


def test_commit_tag_of_a_deleted_topic_is_forgotten(log: Log) -> None:
    remembered: dict[Any, Observation] = {}
    write(log, probed(log, known=remembered), values(1), batch=0)
    probed(log, known=remembered)
    log.world.topics[TOPIC] = [Partition()]
    for _ in range(5):
        log.other_appends()
    assert probed(log, known=remembered).observations[TOPIC, 0].last is None


def test_commit_tag_of_a_log_that_became_shorter_is_forgotten(log: Log) -> None:
    """Records were lost with a leader, and others were appended up to the same end since."""
    remembered: dict[Any, Observation] = {}
    write(log, probed(log, known=remembered), values(1), batch=0)
    assert probed(log, known=remembered).observations[TOPIC, 0].last is not None
    log.world.topics[TOPIC] = [Partition(leader_epoch=1)]
    log.other_appends()
    assert probed(log, known=remembered).observations[TOPIC, 0].last is None


def test_leader_change_alone_forgets_no_commit_tag(log: Log) -> None:
    remembered: dict[Any, Observation] = {}
    write(log, probed(log, known=remembered), values(1), batch=0)
    log.other_appends()
    commit_tag = probed(log, known=remembered).observations[TOPIC, 0].last
    log.first.leader_epoch += 1
    log.reads.clear()
    assert probed(log, known=remembered).observations[TOPIC, 0].last == commit_tag is not None
    assert log.reads == []


def test_driver_remembers_commit_tag_after_retention(log: Log) -> None:
    remembered: dict[Any, Observation] = {}
    write(log, probed(log), values(1), batch=0)
    probed(log, known=remembered)
    cut_off(log)
    write(log, probed(log, known=remembered), values(2), batch=1)
    assert log.bodies() == values(2)


@pytest.mark.parametrize("query", ["", "q"])
@pytest.mark.parametrize("foreign", [0, 3], ids=["nothing else", "others' records after"])
@pytest.mark.parametrize("batch", [0, 2])
def test_a_batch_deleted_unread_is_not_appended_again(batch: int, foreign: int, query: str) -> None:
    """The driver probed the log, appended the batch and did not commit. Retention deleted all. The session retries."""
    log = Log(2)
    remembered: dict[Any, Observation] = {}
    if batch:
        write(log, probed(log), keyed(*range(20)), batch=batch - 1, query=query)
    write(log, probed(log, known=remembered), keyed(*range(20)), batch=batch, query=query)
    cut_off(log)
    for _ in range(foreign):
        log.other_appends()
    before = lying(log)
    for _ in range(2):
        with pytest.raises(SinkError, match="lost its records below offset"):
            write(log, probed(log, known=remembered), keyed(*range(20)), batch=batch, query=query)
    assert lying(log) == before


def test_log_shorter_than_acknowledged_raises(log: Log) -> None:

    def lost_data(at: Any, batch: Batch) -> Answer:
        at.end -= 1
        return Answer(44, at.end)

    log.script = [lambda at, batch: Answer(0, at.append(batch.bodies, batch.commit_tag)), lost_data]
    with pytest.raises(SinkError, match="before acknowledged records"):
        write(log, probed(log), values(*range(40)))


# --- rows of an earlier attempt -------------------------------------------------------------------------------------


def lying(log: Log) -> Counter[bytes]:
    return Counter(log.bodies())


# --- finished loads ---------------------------------------------------------------------------------------------------


class SlowLog(Log):
    """Responds to one append at each wait, a second later. `sent_at`: partition and time of each append."""

    def __init__(self, partitions: int) -> None:
        super().__init__(partitions)
        self.clock = AnsweringClock()
        self.sent_at: list[tuple[int, float]] = []
        self.in_flight_max = 0

    def append(self, topic: str, partition: int, batch: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.clock.unanswered.append((answer, super().append(topic, partition, batch).result()))
        self.in_flight_max = max(self.in_flight_max, len(self.clock.unanswered))
        self.sent_at.append((partition, self.clock.time))
        return answer

    def write(self, **more: Any) -> Write:
        return Write(PLAN, probed(self), "q", 0, 0, self, ModelFraming(), self.clock, **more)


class AnsweringClock(Clock):
    def __init__(self) -> None:
        self.unanswered: list[tuple[Future[Any], Any]] = []

    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        self.time += 1.0
        if self.unanswered:
            answer, result = self.unanswered.pop()
            answer.set_result(result)


def test_rows_wait_for_one_append_in_flight_and_the_next() -> None:
    current = SlowLog(2).write()
    task, waiting = Task(current), []
    task.begin()
    for at in range(0, 2000, 10):
        rows = pa.array(values(*range(at, at + 10)), pa.large_binary())
        task.feed(TOPIC, rows, np.full(10, -1), 2)
        waiting.append(current.partitions[TOPIC, 0].queued_bytes)
    assert max(waiting) <= 2 * PLAN.append_bytes_max < rows.nbytes * 200
    assert task.finish().appended == 2000


def test_few_of_many_partitions_have_an_append_in_flight() -> None:
    """So a slow broker's answers arrive in time."""
    slow = SlowLog(100)
    task = Task(slow.write())
    task.begin()
    task.feed(TOPIC, pa.array(values(*range(100)), pa.large_binary()), -1 - np.arange(100), 1)
    assert task.finish().appended == 100
    assert slow.in_flight_max == 32


def test_refused_load_reads_only_the_last_batch(log: Log) -> None:
    observed = probed(log)
    write(log, observed, values(*range(20)), query="", task=0)
    log.reads.clear()
    done = write(log, observed, values(*range(20)), query="", task=0)
    assert done.refused == 1
    assert log.reads == []
    assert (done.found, log.bodies()) == (19, values(*range(19)))


@pytest.mark.parametrize("query", ["", "q"])
def test_retry_appends_only_missing_rows(log: Log, query: str) -> None:
    """A load skips what its commit tag counts, without reading it, and goes on after other writers' records."""
    rows = keyed(*range(200))
    half = Task(Write(PLAN, probed(log), query, 0, 3, log, ModelFraming(), Clock(), is_sorted=not query))
    log.world.topics[TOPIC] += [Partition() for _ in range(3)]
    half._write.probed = probed(log)
    half.begin()
    feed(half, rows[:150], 4, 3)
    partition = log.world.topics[TOPIC][3]
    there = partition.end
    assert there > 50
    partition.append((b"\1other",), None)
    observed = probed(log)
    log.reads.clear()
    done = write(log, observed, rows, query=query, task=3)
    assert (done.found, done.appended) == (there, 200 - there)
    assert [each for stored in partition.stored for each in stored.bodies if each != b"\1other"] == rows
    assert bool(log.reads) == bool(query)


def test_only_a_partly_written_batch_is_compared_first() -> None:
    def of(*tags: CommitTag | None) -> DriverProbe:
        observations = {(TOPIC, number): Observation(0, 9, tag) for number, tag in enumerate(tags)}
        return DriverProbe("run", 0, {TOPIC: len(tags)}, frozenset(), observations)

    some = CommitTag("s", "q", "run", 7, 0, -1, (2,), 0, Prefix(9, 1))
    last, done = replace(some, last=True), replace(some, last=True, done=True)
    earlier, later = replace(last, batch=6), replace(last, batch=8)
    assert all(of(*tags).is_partly_written(7) for tags in ((some, None), (some, last), (last, None), (last, earlier)))
    others = ((None, None), (earlier, None), (some, later), (last, last), (done, None))
    assert not any(of(*tags).is_partly_written(7) for tags in others)


@pytest.mark.parametrize("count", [1, 49, 200])
def test_comparison_refuses_other_rows_and_appends_none(log: Log, count: int) -> None:
    """Of the rows after those in the log, it keeps one."""
    rows = keyed(*range(200))
    half = Task(Write(PLAN, probed(log), "", 0, 0, log, ModelFraming(), Clock(), is_sorted=True))
    half.begin()
    feed(half, rows[:150])
    there = log.first.end

    def compare(compared: list[bytes]) -> Outcome:
        current = Write(PLAN, probed(log), "", 0, 0, log, ModelFraming(), Clock(), is_sorted=True, only_compares=True)
        one = Task(current)
        one.begin()
        for at in range(0, len(compared), count):
            feed(one, compared[at : at + count])
        assert current.partitions[TOPIC, 0].queued_rows <= 1
        return one.finish()

    assert (compare(rows).found, compare(rows).deferred) == (there, None)
    for other in (rows[1:], rows[:there], [*rows[: there - 1], *rows[there:]]):
        with pytest.raises(SinkError, match="and the data now has"):
            compare(other)
    assert log.first.end == there


CHANGED = {
    "one different row": ([*range(9), 99], "other rows"),
    "other rows": ([*range(20, 30)], "other rows"),
    "fewer rows": ([*range(9)], "fewer rows"),
    "the rows of another order": ([*range(9, -1, -1)], "in another order"),
    "more rows": ([*range(11)], "more rows"),
}


@pytest.mark.parametrize(("numbers", "what"), CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("query", ["", "q"])
def test_retry_with_other_rows_is_refused_before_appending(log: Log, numbers: list[int], what: str, query: str) -> None:
    """A load, and a micro-batch of foreachBatch."""

    def run(rows: list[bytes]) -> None:
        write(log, probed(log), rows, is_sorted=True) if query else load(log, probed(log), rows)

    run(keyed(*range(10)))
    with pytest.raises(SinkError, match=f"the data now has .*{what}.*: the source or the query changed"):
        run(keyed(*numbers))
    assert lying(log) == Counter(keyed(*range(10)))


@pytest.mark.parametrize(("numbers", "what"), list(CHANGED.values())[:3], ids=list(CHANGED)[:3])
def test_micro_batch_with_other_rows_is_refused_before_appending(log: Log, numbers: list[int], what: str) -> None:
    write(log, probed(log), keyed(*range(10)))
    with pytest.raises(SinkError, match=r"the data now has other rows.*go back to the query and source"):
        write(log, probed(log), keyed(*numbers))
    assert lying(log) == Counter(keyed(*range(10)))


def test_other_query_of_the_same_sink_is_refused(log: Log) -> None:
    write(log, probed(log), values(1))
    with pytest.raises(SinkError, match=r"restore its checkpoint.*new sink.id"):
        write(log, probed(log), values(2), query="r")


def test_micro_batch_is_found_in_any_order(log: Log) -> None:
    write(log, probed(log), values(1, 2, 2))
    done = write(log, probed(log), values(2, 3, 1, 2, 2))
    assert (done.found, done.appended) == (3, 2)
    assert lying(log) == Counter(values(1, 2, 2, 2, 3))


@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_of_another_task_are_refused_before_any_append(log: Log, is_sorted: bool) -> None:
    log.world.topics[TOPIC].append(Partition())
    one = Task(Write(PLAN, probed(log), "q", 0, 1, log, ModelFraming(), Clock(), is_sorted))
    one.begin()
    with pytest.raises(SinkError, match=r"must be in one task \(write them with fencepost\.spark\.append"):
        one.feed(TOPIC, pa.array(values(1, 2), pa.large_binary()), np.array([5, 4]), 2)
    assert log.sent == []


@pytest.mark.parametrize("is_sorted", [False, True])
def test_older_batch_than_the_log_appends_nothing(log: Log, is_sorted: bool) -> None:
    for batch in range(4):
        write(log, probed(log), values(batch * 10, batch * 10 + 1), batch=batch, is_sorted=is_sorted)
    done = write(log, probed(log), values(11, 10), batch=1, is_sorted=is_sorted)
    assert (done.found, done.appended) == (2, 0)
    with pytest.raises(SinkError, match="checkpoint was restored"):
        write(log, probed(log), values(10, 11, 12), batch=1)
    with pytest.raises(SinkError, match="restore the newest one"):
        write(log, probed(log), values(10), batch=1)
    assert len(log.bodies()) == 8


def test_complete_batch_is_found_where_it_was_placed(log: Log) -> None:
    """The topic was expanded since."""
    write(log, probed(log), values(1), batch=0)
    log.world.topics[TOPIC].append(Partition())
    write(log, probed(log), values(2), batch=1)
    one = Task(Write(PLAN, probed(log), "q", 0, 1, log, ModelFraming(), Clock()))
    one.begin()
    one.feed(TOPIC, pa.array(values(1), pa.large_binary()), np.array([1]), 2)
    assert one.finish().found == 1


def test_expansion_in_between_stops_the_task(log: Log) -> None:
    log.script = [lambda at, batch: Answer(37, -1)]
    with pytest.raises(SinkError, match=r"was expanded from 1 partitions while batch 0 was written \(start it again"):
        write(log, probed(log, count_checked=frozenset([TOPIC])), values(1))


@pytest.mark.parametrize("query", ["", "q"])
@pytest.mark.parametrize("gone", ["a record", "a batch", "the last batch"])
def test_compacted_rows_are_not_appended_after_newer_ones(log: Log, gone: str, query: str) -> None:
    """A load needs only its last commit tag."""
    rows = [body(b"a", b"1"), *(body(b"b", b"%d" % number) for number in range(20)), body(b"a", b"2")]
    write(log, probed(log), rows, query=query)
    stored = log.first.stored
    assert len(stored) > 2
    if gone == "the last batch":
        log.other_appends()
        del stored[-2]
    elif gone == "a batch":
        del stored[0]
    else:
        stored[0] = replace(stored[0], bodies=stored[0].bodies[1:], compacted=1)
    before = lying(log)
    if not query and gone != "the last batch":
        load(log, probed(log), rows)
        assert lying(log) == before + Counter(rows[-1:])
        return
    with pytest.raises(SinkError, match=r"was compacted since .* began.*sink.id"):
        write(log, probed(log), rows, query=query)
    assert lying(log) == before


# --- loads ------------------------------------------------------------------------------------------------------------


def test_finished_load_appends_no_other_rows(log: Log) -> None:
    """Three equal rows, then five: without the flag, the topic would silently have five."""
    assert load(log, probed(log), keyed(7, 7, 7)) == {"found": 0, "appended": 3}
    log.reads.clear()
    assert load(log, probed(log), keyed(7, 7, 7)) == {"found": 3, "appended": 0}
    assert log.reads == []
    for rows in (keyed(7, 7, 7, 7, 7), keyed(7, 7), keyed(7, 7, 8), []):
        with pytest.raises(SinkError, match=r"the data now has .*another sink.id"):
            load(log, probed(log), rows)
    assert lying(log) == Counter(keyed(7, 7, 7))


def test_finished_load_appends_no_rows_to_an_empty_partition() -> None:
    log = Log(3)
    load(log, probed(log), keyed(1), [], keyed(2))
    with pytest.raises(SinkError, match="the data now has more rows"):
        load(log, probed(log), keyed(1), keyed(3), keyed(2))
    with pytest.raises(SinkError, match=r"t-2: .*the data now has none"):
        load(log, probed(log), keyed(1), [], [])
    assert log.world.topics[TOPIC][1].end == 0


def test_driver_of_finished_load_appends_nothing_more(log: Log) -> None:
    """1. A driver stops at its commit. 2. Another finishes the load. 3. The first resumes; it, or a task, has a row."""
    late = probed(log)
    outcomes = [write(log, late, keyed(1, 2), task=0, query="")]
    load(log, probed(log), keyed(1, 2))
    assert commit(log, outcomes) != []
    with pytest.raises(SinkError, match="the data now has"):
        write(log, late, keyed(1, 2, 9), query="")
    assert lying(log) == Counter(keyed(1, 2))


def test_load_without_rows_can_be_repeated(log: Log) -> None:
    assert load(log, probed(log), []) == {"found": 0, "appended": 0}
    assert load(log, probed(log), keyed(1)) == {"found": 0, "appended": 1}


def test_stream_defers_no_row(log: Log) -> None:
    done = write(log, probed(log), keyed(1, 2), task=0)
    assert (done.deferred, lying(log)) == (None, Counter(keyed(1, 2)))


def test_load_resumes_after_its_first_records_were_deleted(log: Log) -> None:
    write(log, probed(log), keyed(*range(20)), query="")
    partition = log.first
    partition.start = partition.stored.pop(0).next_offset
    assert load(log, probed(log), keyed(*range(20))) == {"found": 19, "appended": 1}


@pytest.mark.parametrize("query", ["", "q"])
def test_batch_of_version_1_is_not_continued(log: Log, query: str) -> None:
    """Version 1 placed rows without a key by their task. A later micro-batch follows one of version 1."""
    old = {
        **{"v": 1, "sink": "s", "query": query, "run": "r", "batch": 0, "task": 0, "attempt": "a", "append": 0},
        **{"began": 0, "before": -1, "over": 1, "created_partitions": 1, "arranged": False, "at": 0},
    }
    log.first.append(tuple(values(1)), json.dumps({**old, "task_appends": {}}).encode())
    with pytest.raises(SinkError, match=r"an earlier version of fencepost wrote .*finish it with that version"):
        write(log, probed(log), values(1), query=query)
    if query:
        write(log, probed(log), values(2), query=query, batch=1)
        assert log.bodies() == values(1, 2)
