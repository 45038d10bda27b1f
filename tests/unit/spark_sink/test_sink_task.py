"""One task and the log, without Spark and threads: what it appends, reads and refuses, with which message.

Retries, late appends, other splits and drivers that die: tests/sink_simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from fencepost.spark.closing import close
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.comparing import Compared, _compare_rows, compare
from fencepost.spark.driver_probe import DriverProbe, Known, probe
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import NO_APPEND, LastAppend, TopicPartition
from fencepost.spark.task import Task
from fencepost.spark.write import NoLocks, Outcome, Plan, Write
from tests.sink_simulation.model import Answer, Batch, Faults, ModelFraming, ModelLog, Partition, Stored, World, body

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
    log: Log, observed: DriverProbe, rows: list[bytes], plan: Plan = PLAN, partition: int | None = 0, **who: Any
) -> Outcome:
    """`partition` None: the task has no rows. Task 3 of a load defers no row."""
    identity = {"query": "q", "batch": 0, "task": 3 if who.get("query") == "" else 0, "attempt": "a", **who}
    one = Task(Write(plan, observed, log=log, framing=ModelFraming(), clock=Clock(), **identity))
    one.begin()
    if partition is not None:
        one.feed(TOPIC, pa.array(rows, pa.large_binary()), [partition] * len(rows))
    return one.finish()


def commit(log: Log, outcomes: list[Outcome], plan: Plan = PLAN) -> list[Any]:
    return close(plan, outcomes, log=log, framing=ModelFraming(), clock=Clock())


def load(log: Log, observed: DriverProbe, *tasks: list[bytes]) -> dict[str, int]:
    """All tasks of a `df.write`, and its commit."""
    outcomes = [write(log, observed, rows, query="", task=number) for number, rows in enumerate(tasks)]
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


def test_refusal_reads_only_the_last_batch(log: Log) -> None:
    observed = probed(log)
    for task in (1, 2, 3):
        write(log, observed, values(*range(task * 100, task * 100 + 20)), task=task)
    log.reads.clear()
    done = write(log, observed, values(1, 2), task=0)
    assert done.refused == 1
    assert log.reads == []
    assert log.bodies()[-2:] == values(1, 2)


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


@pytest.mark.parametrize("unmatched", ["auto", "refuse"])
def test_load_with_other_rows_is_refused_before_appending(log: Log, unmatched: str) -> None:
    write(log, probed(log), keyed(1, 2), query="")
    with pytest.raises(SinkError, match="does not have now"):
        write(log, probed(log), keyed(11, 12), replace(PLAN, unmatched=unmatched), query="")
    assert lying(log) == Counter(keyed(1, 2))


#: A stream. Each write has its rows and where they are; the last is refused.
OTHER_DATA = {
    "another split": ([(values(1, 2, 3), {}), (values(3, 4), {"task": 1})], "split into tasks differently"),
    "another split, its own rows first": (
        [(values(1, 2, 3), {}), (values(*range(50, 90), 3), {"task": 2})],
        r"split into tasks differently.*last resort",
    ),
    "another query of this name": (
        [(values(1), {}), (values(2), {"query": "r"})],
        r"restore its checkpoint.*new sink.id",
    ),
    "one different row": ([(keyed(*range(10)), {}), (keyed(*range(9), 99), {})], "does not have now"),
    "changing data": ([(keyed(1, 2), {}), (keyed(11, 12), {}), (keyed(21, 22), {})], "does not have now"),
    "after a complete batch": (
        [
            *((keyed(10 * batch + task), {"task": task, "batch": batch}) for batch in (0, 1) for task in (0, 1)),
            (keyed(20, 21), {"batch": 1}),
        ],
        "does not have now",
    ),
}


@pytest.mark.parametrize(("writes", "message"), OTHER_DATA.values(), ids=OTHER_DATA)
def test_other_data_is_refused_before_appending(
    log: Log, writes: list[tuple[list[bytes], dict[str, Any]]], message: str
) -> None:
    *accepted, (rows, where) = writes
    for more, at in accepted:
        write(log, probed(log), more, **at)
    with pytest.raises(SinkError, match=message):
        write(log, probed(log), rows, **where)
    assert lying(log) == Counter(row for more, _ in accepted for row in more)


def test_option_same_split_accepts_equal_rows_in_two_tasks(log: Log) -> None:
    write(log, probed(log), values(1, 2, 3), task=0)
    observed, plan = probed(log), replace(PLAN, same_split=True)
    one = write(log, observed, values(1, 2, 3), plan, task=0)
    two = write(log, observed, values(3, 4), plan, task=1)
    assert log.bodies() == values(1, 2, 3, 4)
    assert resolve(log, one, two, plan=plan) == Compared(found=1, unknown=0, appended=1)
    assert log.bodies() == values(1, 2, 3, 4, 3)


@pytest.mark.parametrize("query", ["", "q"])
@pytest.mark.parametrize("split", [3, 4, 5, 2])
def test_rows_without_a_key_are_written_once_after_another_split(query: str, split: int) -> None:
    """Half a batch in four tasks, then half of it in three with `unmatched.rows=keep`, then all of it in any number."""
    log = Log(2)

    def run(rows: dict[int, list[int]], plan: Plan) -> list[Outcome]:
        observed = probed(log)
        return [
            write(log, observed, values(*numbers), plan, task % 2, query=query, task=task)
            for task, numbers in rows.items()
        ]

    run({0: [0, 1], 1: [3, 4]}, PLAN)
    keeping = replace(PLAN, unmatched="keep")
    with pytest.raises(SinkError, match="split into tasks differently"):
        run({1: [4, 5, 6, 7], 2: [8, 9, 10, 11], 0: [0, 1, 2, 3]}, keeping)
    assert logged(log) > Counter(values(0, 3, 5, 6, 8, 9, 10))
    for unmatched in ("auto", "refuse"):
        with suppress(SinkError):
            run(
                {3: [9, 10, 11], 2: [6, 7, 8], 0: [0, 1, 2], 1: [3, 4, 5]},
                replace(PLAN, same_split=True, unmatched=unmatched),
            )
        assert logged(log) <= Counter(values(*range(12)))
    finding = replace(PLAN, same_split=True, unmatched="compare")
    size = -(-12 // split)
    outcomes = run({task: [*range(task * size, min(12, (task + 1) * size))] for task in range(split)}, finding)
    resolve(log, *outcomes, plan=finding)
    if not query:
        commit(log, outcomes, finding)
    assert logged(log) == Counter(values(*range(12)))


def test_arranged_rows_know_no_tasks(log: Log) -> None:
    arranged = replace(PLAN, arranged=True)
    write(log, probed(log), values(1, 2), arranged, task=5)
    done = write(log, probed(log), values(2, 1, 3), arranged, task=0)
    assert (done.found, done.appended) == (2, 1)
    observed = probed(log)
    write(log, observed, values(1, 2, 3, 4), arranged, task=0)
    with pytest.raises(SinkError, match="although arranged=true"):
        write(log, observed, values(1, 2, 3, 5), arranged, task=1)


def test_older_batch_than_the_log_appends_nothing(log: Log) -> None:
    for batch in range(4):
        write(log, probed(log), values(batch * 10, batch * 10 + 1), batch=batch)
    done = write(log, probed(log), values(11, 10), batch=1)
    assert (done.found, done.appended) == (2, 0)
    with pytest.raises(SinkError, match="checkpoint was restored"):
        write(log, probed(log), values(10, 11, 12), batch=1)
    with pytest.raises(SinkError, match="as a whole does not have now"):
        resolve(log, write(log, probed(log), values(10), batch=1))
    assert len(log.bodies()) == 8


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
    remembered: dict[Any, Known] = {}
    commit_tag = probed(log, known=remembered).observations[TOPIC, 0].last
    assert isinstance(commit_tag, CommitTag)
    partition.append((b"\1other",), None)
    log.reads.clear()
    assert probed(log, known=remembered).observations[TOPIC, 0].last == commit_tag
    assert log.reads == [(31, 32)]


def test_commit_tag_of_a_deleted_topic_is_forgotten(log: Log) -> None:
    remembered: dict[Any, Known] = {}
    write(log, probed(log, known=remembered), values(1), batch=0)
    probed(log, known=remembered)
    log.world.topics[TOPIC] = [Partition()]
    for _ in range(5):
        log.other_appends()
    assert probed(log, known=remembered).observations[TOPIC, 0].last is None


def test_commit_tag_of_a_log_that_became_shorter_is_forgotten(log: Log) -> None:
    """Records were lost with a leader, and others were appended up to the same end since."""
    remembered: dict[Any, Known] = {}
    write(log, probed(log, known=remembered), values(1), batch=0)
    assert probed(log, known=remembered).observations[TOPIC, 0].last is not None
    log.world.topics[TOPIC] = [Partition(leader_epoch=1)]
    log.other_appends()
    assert probed(log, known=remembered).observations[TOPIC, 0].last is None


def test_leader_change_alone_forgets_no_commit_tag(log: Log) -> None:
    remembered: dict[Any, Known] = {}
    write(log, probed(log, known=remembered), values(1), batch=0)
    log.other_appends()
    commit_tag = probed(log, known=remembered).observations[TOPIC, 0].last
    log.first.leader_epoch += 1
    log.reads.clear()
    assert probed(log, known=remembered).observations[TOPIC, 0].last == commit_tag is not None
    assert log.reads == []


def test_driver_remembers_commit_tag_after_retention(log: Log) -> None:
    remembered: dict[Any, Known] = {}
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
    remembered: dict[Any, Known] = {}
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

    known = probed(log, known=remembered, nothing_deleted=True)
    write(log, known, keyed(*range(20)), replace(PLAN, first_run=True), batch=batch, query=query)
    assert not any(observation.unread for observation in probed(log, known=remembered).observations.values())


def test_first_run_option_appends_only_deleted_rows() -> None:
    """The rest of a half-written stream is appended."""
    log = Log(2)
    write(log, probed(log), keyed(*range(20)))
    partition, other = log.world.topics[TOPIC]
    for each in (partition, other):
        each.append((b"\1other",), None)
    lost = list(partition.stored.pop(0).bodies)
    partition.start = len(lost)
    other.start, other.stored = other.end, []
    long_ago = {"at": 10_000_000, "retention_ms": {TOPIC: 1000}}
    for more in ({}, long_ago):
        with pytest.raises(SinkError, match=r"lost its records.*first.run=true.*the rest is appended"):
            write(log, probed(log, **more), keyed(*range(20)))
    done = write(log, probed(log, **long_ago), keyed(*range(20)), replace(PLAN, first_run=True))
    assert (done.found, done.appended) == (20 - len(lost), len(lost))
    assert lying(log) == Counter([*keyed(*range(20)), b"\1other"])


def test_load_with_lost_records_suggests_another_sink_id(log: Log) -> None:
    write(log, probed(log), keyed(*range(20)), query="")
    partition = log.first
    partition.start = partition.stored.pop(0).next_offset
    with pytest.raises(SinkError, match=r"lost its records.*another sink.id") as raised:
        write(log, probed(log), keyed(*range(20)), query="")
    assert "first.run" not in str(raised.value)


def test_sink_found_in_one_partition_is_sought_everywhere() -> None:
    """`never_ran` is wrong: the load ran."""
    log = Log(2)
    for partition in range(2):
        write(log, probed(log), keyed(partition), task=partition, partition=partition)
    log.other_appends()
    observed = probed(log, never_ran=True)
    assert [observed.observations[TOPIC, number].last is not None for number in range(2)] == [True, True]


def test_remembered_foreign_records_do_not_hide_own_rows(log: Log) -> None:
    """A load whose first run was in the same process."""
    remembered: dict[Any, Known] = {}
    log.other_appends()
    write(log, probed(log, never_ran=True, known=remembered), keyed(1), query="")
    log.other_appends()
    done = write(log, probed(log, never_ran=True, known=remembered), keyed(1), query="")
    assert (done.found, done.appended) == (1, 0)


@pytest.mark.parametrize("query", ["", "q"])
@pytest.mark.parametrize("gone", ["a record", "a batch", "the last record of a batch"])
def test_compacted_rows_are_not_appended_after_newer_ones(log: Log, gone: str, query: str) -> None:
    rows = [body(b"a", b"1"), *(body(b"b", b"%d" % number) for number in range(20)), body(b"a", b"2")]
    write(log, probed(log), rows, query=query)
    stored = log.first.stored
    assert len(stored) > 2
    first = stored[0]
    if gone == "a batch":
        del stored[0]
    elif gone == "a record":
        stored[0] = replace(first, bodies=first.bodies[1:], compacted=1)
    else:
        stored[0] = replace(first, bodies=first.bodies[:-1], commit_tag=None, compacted=1)
    before = lying(log)
    with pytest.raises(SinkError, match=r"was compacted since .* began.*sink.id"):
        write(log, probed(log), rows, query=query)
    assert lying(log) == before


def test_compacted_topic_with_all_rows_left_is_accepted(log: Log) -> None:
    observed = probed(log)
    write(log, observed, keyed(1), task=0)
    log.other_appends()
    write(log, observed, keyed(2), task=1)
    log.first.stored[1] = Stored(1, (), None, compacted=1)
    done = write(log, probed(log), keyed(1, 2), replace(PLAN, unmatched="compare"))
    assert (done.found, done.appended) == (2, 0)


def test_first_run_does_not_read_foreign_records(log: Log) -> None:
    log.other_appends()
    assert probed(log, never_ran=True).observations[TOPIC, 0].last is None
    assert log.reads == []


def test_log_shorter_than_acknowledged_raises(log: Log) -> None:

    def lost_data(at: Any, batch: Batch) -> Answer:
        at.end -= 1
        return Answer(44, at.end)

    log.script = [lambda at, batch: Answer(0, at.append(batch.bodies, batch.commit_tag)), lost_data]
    with pytest.raises(SinkError, match="before acknowledged records"):
        write(log, probed(log), values(*range(40)))


# --- another split into tasks, of rows that are placed by their value -------------------------------------------------


def resolve(log: Log, *done: Outcome, plan: Plan = PLAN) -> Compared | None:
    return compare(plan, done, log=log, framing=ModelFraming(), clock=Clock())


def logged(log: Log) -> Counter[bytes]:
    """In all partitions."""
    return Counter(
        each for partition in log.world.topics[TOPIC] for stored in partition.stored for each in stored.bodies
    )


def lying(log: Log) -> Counter[bytes]:
    return Counter(log.bodies())


def found_twice(log: Log, **more: Any) -> list[Outcome]:
    """Two tasks have found the one row 7."""
    write(log, probed(log), keyed(7), task=0)
    observed = probed(log, **more)
    return [write(log, observed, keyed(7), task=task) for task in (0, 1)]


def test_unmatched_rows_are_refused_unless_kept(log: Log) -> None:
    observed = probed(log)
    write(log, observed, keyed(1, 2), task=0)
    write(log, observed, keyed(11), task=1)
    observed = probed(log)
    plan = replace(PLAN, unmatched="compare")
    done = [write(log, observed, keyed(1, 3), plan, task=0), write(log, observed, keyed(11), plan, task=1)]
    with pytest.raises(SinkError, match=r"has 1 rows of batch 0 .* as a whole does not have"):
        resolve(log, *done, plan=plan)
    keep = replace(PLAN, unmatched="keep")
    assert resolve(log, *done, plan=keep) == Compared(found=0, unknown=1, appended=0)


def test_rows_are_compared_individually_rather_than_by_number(log: Log) -> None:
    write(log, probed(log), keyed(7, 1, 2, 3), task=0)
    observed = probed(log)
    plan = replace(PLAN, unmatched="compare")
    # One 7 is found twice, and a 3 is there that is a 4 now.
    done = [write(log, observed, keyed(7, 1, 2, 4), plan, task=0), write(log, observed, keyed(7), plan, task=1)]
    with pytest.raises(SinkError, match="as a whole does not have"):
        resolve(log, *done, plan=plan)


def test_driver_append_after_an_expansion_is_refused(log: Log) -> None:
    """Otherwise a task of another run that knows the expansion may search for the row in its new partition."""
    done = found_twice(log, count_checked=frozenset([TOPIC]))
    # The topic is expanded, and a task of another run appends.
    commit_tag = CommitTag.decode(log.first.stored[0].commit_tag or b"")
    log.first.append(tuple(keyed(8)), replace(commit_tag, run="later", task=1, over=2).encode())

    def grown(_: Any, batch: Batch) -> Answer:
        assert batch.count == 1
        return Answer(37, -1)

    log.script = [grown]
    with pytest.raises(SinkError, match="the topic was expanded after the batch began"):
        resolve(log, *done, plan=replace(PLAN, unmatched="keep"))
    assert lying(log) == Counter(keyed(7, 8))


def test_digests_ending_with_zeros_are_compared_like_others() -> None:
    zero, short, other = bytes(16), b"q" * 15 + b"\0", b"x" * 16
    assert _compare_rows(zero + zero + other, zero + short) == ({zero: 1, other: 1}, 1)
    assert _compare_rows(b"", b"") == ({}, 0)


def test_overtaken_driver_appends_nothing(log: Log) -> None:
    done = found_twice(log)
    write(log, probed(log), keyed(100), task=0, batch=1)
    with pytest.raises(SinkError, match="another driver is ahead"):
        resolve(log, *done)
    assert lying(log) == Counter(keyed(7, 100))


def test_unchanged_split_is_not_compared(log: Log) -> None:
    observed = probed(log)
    for task in (0, 1):
        write(log, observed, keyed(task), task=task)
    observed = probed(log)
    done = [write(log, observed, keyed(task, task + 10), task=task) for task in (0, 1)]
    log.reads.clear()
    assert resolve(log, *done) is None
    assert log.reads == []


# --- finished loads ---------------------------------------------------------------------------------------------------


def test_finished_load_appends_no_other_rows(log: Log) -> None:
    """Three equal rows, then five: without the commit tag, the topic would silently have five."""
    assert load(log, probed(log), keyed(7, 7, 7)) == {"found": 0, "appended": 3}
    log.reads.clear()
    assert load(log, probed(log), keyed(7), keyed(7, 7)) == {"found": 3, "appended": 0}
    assert log.reads == []
    for rows in (keyed(7, 7, 7, 7, 7), keyed(7, 7), keyed(7, 7, 8), []):
        with pytest.raises(SinkError, match=rf"has written 3 rows, and the data now has {len(rows)}.*another sink.id"):
            load(log, probed(log), rows)
    assert lying(log) == Counter(keyed(7, 7, 7))


def test_driver_of_finished_load_appends_nothing_more(log: Log) -> None:
    """1. A driver stops at its commit. 2. Another finishes the load. 3. The first resumes; it, or a task, has a row."""
    late = probed(log)
    outcomes = [write(log, late, keyed(1, 2), task=0, query="")]
    load(log, probed(log), keyed(1, 2))
    assert commit(log, outcomes) != []
    with pytest.raises(SinkError, match="another driver has finished load 's' meanwhile"):
        write(log, late, keyed(9), query="")
    assert lying(log) == Counter(keyed(1, 2))


def test_load_without_rows_can_be_repeated(log: Log) -> None:
    assert load(log, probed(log), [], []) == {"found": 0, "appended": 0}
    assert load(log, probed(log), keyed(1)) == {"found": 0, "appended": 1}


def test_resumed_arranged_load_holds_one_append_of_the_log(log: Log) -> None:
    """The task reads the log as far as its rows need it, and appends only after all of it is found."""
    rows, plan = keyed(*range(200)), replace(PLAN, arranged=True)
    first = write(log, probed(log), rows[:150], plan, query="")
    assert first.appends > 10
    current = Write(
        plan, probed(log), query="", batch=0, task=0, attempt="b", log=log, framing=ModelFraming(), clock=Clock()
    )
    task = Task(current)
    task.begin()
    held = []
    for at in range(0, 200, 5):
        task.feed(TOPIC, pa.array(rows[at : at + 5], pa.large_binary()), [0] * 5, [True] * 5)
        held.append(len(list(current.partitions[TOPIC, 0].there.left())))
    assert max(held) <= 150 / first.appends + 10
    done = task.finish()
    assert (done.found, done.rows) == (150, 200)


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
        return Write(PLAN, probed(self), "q", 0, 0, "a", self, ModelFraming(), self.clock, **more)


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
        task.feed(TOPIC, rows, [0] * 10)
        waiting.append(current.partitions[TOPIC, 0].queued_bytes)
    assert max(waiting) <= 2 * PLAN.append_bytes_max < rows.nbytes * 200
    assert task.finish().appended == 2000


def test_few_of_many_partitions_have_an_append_in_flight() -> None:
    """So a slow broker's answers arrive in time."""
    slow = SlowLog(100)
    task = Task(slow.write())
    task.begin()
    task.feed(TOPIC, pa.array(values(*range(100)), pa.large_binary()), list(range(100)))
    assert task.finish().appended == 100
    assert slow.in_flight_max == 32


def test_lock_is_waited_for_while_other_partitions_get_rows() -> None:
    """Its holder waits for the same slow broker."""
    slow, free_at = SlowLog(2), 20.0

    class Held(NoLocks):
        def take(self, topic_partition: TopicPartition) -> tuple[bool, LastAppend]:
            return topic_partition[1] == 1 or slow.clock.time >= free_at, NO_APPEND

    task = Task(slow.write(locks=Held()))
    task.begin()
    task.feed(TOPIC, pa.array(values(*range(430)), pa.large_binary()), [0] * 30 + [1] * 400)
    assert task.finish().appended == 430
    assert min(at for partition, at in slow.sent_at if partition == 0) >= free_at
    assert len([at for partition, at in slow.sent_at if partition == 1 and at < free_at]) > 15


@pytest.mark.parametrize("is_tag", [True, False])
def test_last_append_of_another_run_is_only_a_hint(log: Log, is_tag: bool) -> None:
    """The log was longer when it was stored: leaders lost records since."""
    write(log, probed(log), values(*range(20)))
    hint = LastAppend(log.first.end, log.first.stored[-1].commit_tag if is_tag else b"of a newer version")
    log.world.topics[TOPIC] = [Partition()]

    class Stored(NoLocks):
        def take(self, topic_partition: TopicPartition) -> tuple[bool, LastAppend]:
            return True, hint

    one = Task(Write(PLAN, probed(log), "q", 0, 0, "a", log, ModelFraming(), Clock(), Stored()))
    one.begin()
    one.feed(TOPIC, pa.array(values(1, 2), pa.large_binary()), [0] * 2)
    assert one.finish().appended == 2
    assert log.bodies() == values(1, 2)


def test_stream_defers_no_row(log: Log) -> None:
    done = write(log, probed(log), keyed(1, 2), task=0)
    assert (done.deferred, done.total.rows, lying(log)) == (None, 0, Counter(keyed(1, 2)))


# --- other rows -------------------------------------------------------------------------------------------------------


def test_quiet_batch_does_not_reset_known_tasks(log: Log) -> None:
    observed = probed(log)
    for task in (0, 1):
        write(log, observed, keyed(task), task=task, batch=0)
    write(log, probed(log), keyed(10), task=0, batch=1)
    write(log, probed(log), keyed(20), task=0, batch=2)
    # Task 1 may have become task 0, with rows of the same key.
    one = write(log, probed(log), keyed(21), task=0, batch=2)
    assert one.appended == 1


def test_a_complete_batch_is_found_under_whatever_number(log: Log) -> None:
    for batch in range(3):
        observed = probed(log)
        write(log, observed, keyed(batch * 10), task=0, batch=batch)
        write(log, observed, values(batch * 10 + 1), task=1, batch=batch)
    observed = probed(log)
    done = [write(log, observed, values(11), task=0, batch=1), write(log, observed, keyed(10), task=1, batch=1)]
    assert [each.appended for each in done] == [0, 0]
    assert resolve(log, *done) == Compared(found=2, unknown=0, appended=0)
    with pytest.raises(SinkError, match="restore the newest"):
        resolve(log, write(log, probed(log), keyed(10), task=0, batch=1))


def test_finished_load_without_the_rows_of_a_partition_is_refused_as_finished() -> None:
    log = Log(2)
    plan = replace(PLAN, arranged=True)

    def run(*partitions: int) -> None:
        observed = probed(log)
        outcomes = [
            write(log, observed, values(task), plan, task if task in partitions else None, query="", task=task)
            for task in range(2)
        ]
        compare(plan, outcomes, log=log, framing=ModelFraming(), clock=Clock())
        commit(log, outcomes, plan)

    run(0, 1)
    with pytest.raises(SinkError, match=r"is finished: it has written 2 rows, and the data now has 1"):
        run(0)


def test_lock_is_released_before_the_next_append(log: Log) -> None:
    """A response is done before its callbacks have run, which another thread runs later."""
    events: list[str] = []
    late: list[Callable[[], object]] = []

    class Answered(Future[Any]):
        def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
            late.append(lambda: fn(self))

    class LateLog(Log):
        def append(self, topic: str, partition: int, batch: Any) -> Future[Any]:
            events.append("append")
            answer = Answered()
            answer.set_result(super().append(topic, partition, batch).result())
            return answer

    class LateClock(Clock):
        def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
            while late:
                late.pop()()

    class Locks(NoLocks):
        def release(self, topic_partition: TopicPartition) -> None:
            events.append("release")

    late_log = LateLog()
    late_log.world = log.world
    observed = probed(log)
    one = Task(Write(PLAN, observed, "q", 0, 0, "a", late_log, ModelFraming(), LateClock(), Locks()))
    one.begin()
    one.feed(TOPIC, pa.array(values(*range(100)), pa.large_binary()), [0] * 100)
    assert one.finish().appended == 100
    assert events == ["append", "release"] * (len(events) // 2)
    assert len(events) > 2
