"""A log writer over a partition in memory, with every fault of a real one.

The stand-in gives each offset once, as the proxy does. It drops responses, requests and reads, appends late requests
after the writer gave up on them, and has other writers.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from kafka.errors import KafkaError

from fencepost import (
    AppendRefusedError,
    ConcurrentUseError,
    InDoubtError,
    LogRecord,
    NotAtEndError,
    OffsetMismatchError,
    OffsetViolationError,
    PositionLostError,
    Record,
    RetryPolicy,
)
from fencepost._appending import Append, MaybeAppended
from fencepost._checks import TopicFacts
from fencepost._log_writer import BlockingLogWriter
from fencepost.kafka_python import LogReader
from tests.support.faulty_log import FakeConsumer, clock
from tests.support.ports import free_ports_in_a_row

__all__ = ["clock"]  # a fixture

POLICY = RetryPolicy(attempt_seconds=1, total_seconds=20)


class Partition:
    """The log: (value, write-id) at each offset, None where an offset holds no record (a transaction marker)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log: list[tuple[bytes, bytes] | None] = []
        self.queued: list[Append] = []
        self.unreplicated = 0

    @classmethod
    def quiet(cls) -> Partition:
        """Without faults."""
        partition = cls(random.Random(0))
        partition.something_happens = lambda: None  # type: ignore[method-assign]
        return partition

    def land(self, append: Append) -> bool:
        if append.expected != len(self.log):
            return False
        self.log += [(r.value or b"", append.write_id) for r in append.records]
        return True

    def others_append(self) -> None:
        self.log += [(b"other", b"other")] * self.rng.randint(1, 3)
        if self.rng.random() < 0.3:
            self.log.append(None)

    def something_happens(self) -> None:
        for append in list(self.queued):
            if self.rng.random() < 0.3:
                self.queued.remove(append)
                self.land(append)
        if self.rng.random() < 0.15:
            self.others_append()
        self.unreplicated = self.rng.randint(0, 3) if self.rng.random() < 0.3 else 0

    def stable(self, partition: int) -> int:
        return max(0, len(self.log) - self.unreplicated)

    def committed(self, partition: int, offset: int) -> tuple[bytes, bytes] | None:
        return self.log[offset]

    def known(self, append: Append) -> bool:
        at = append.expected
        entry = self.log[at] if at < len(self.log) else None
        return entry is not None and entry[1] == append.write_id


class FakeAppender:
    error = ConnectionError

    def __init__(self, partition: Partition, problem: float) -> None:
        self.at = partition
        self.problem = problem

    def close(self) -> None: ...

    def require(self, topic: str) -> TopicFacts:
        return TopicFacts(None)

    def send(self, append: Append) -> int:
        rng = self.at.rng
        self.at.something_happens()
        if rng.random() < self.problem:
            what = rng.choice(["never arrives", "queued", "answer lost", "answer lost, sent again by the library"])
            if what == "queued":
                self.at.queued.append(append)
            elif what != "never arrives" and self.at.land(append) and what.endswith("library"):
                # The library's own retry, by a proxy that cannot read the first one yet.
                self.at.others_append()
                raise self._refusal(append, possibly_yours=rng.choice([None, True]))
            raise MaybeAppended from TimeoutError(what)
        if self.at.land(append) or self.at.known(append):
            return append.expected
        raise self._refusal(append, possibly_yours=rng.choice([None, False]))

    def _refusal(self, append: Append, possibly_yours: bool | None) -> OffsetMismatchError:
        end = len(self.at.log)
        return OffsetMismatchError("t", 0, append.expected, end, possibly_yours=possibly_yours)


class FakeLogWriter(BlockingLogWriter):
    def __init__(self, partition: Partition, problem: float) -> None:
        self.appender = FakeAppender(partition, problem)
        super().__init__("t", 0, self.appender, FakeConsumer(partition, problem), POLICY, 10_000)


def _values(partition: Partition) -> list[bytes]:
    return [entry[0] for entry in partition.log if entry is not None]


@pytest.fixture
def partition() -> Partition:
    return Partition.quiet()


@pytest.mark.parametrize("seed", range(300))
def test_append_happens_once_or_fails_under_faults(seed: int) -> None:
    rng = random.Random(seed)
    partition = Partition(rng)
    writer = FakeLogWriter(partition, problem=rng.choice([0.0, 0.2, 0.5]))
    read: list[LogRecord] = []
    own: list[tuple[int, bytes]] = []
    refused: list[bytes] = []
    in_doubt: list[bytes] = []
    for number in range(30):
        values = [b"%d.%d" % (number, i) for i in range(rng.randint(1, 3))]
        try:
            if not writer._position.at_end:
                try:
                    writer.read_to_end(read.append)
                except PositionLostError:
                    # The high watermark of this stand-in may fall behind what was acknowledged. Kafka's does not.
                    continue
            offset = writer.append([Record(value) for value in values])
        except OffsetMismatchError:
            refused += values
        except InDoubtError:
            in_doubt += values
        else:
            own += [(offset + i, value) for i, value in enumerate(values)]
    for append in partition.queued:
        partition.land(append)
    there = _values(partition)
    for offset, value in own:
        entry = partition.log[offset]
        assert entry is not None
        assert entry[0] == value, "acknowledged, and something else is there"
        assert there.count(value) == 1
    assert not [value for value in refused if value in there], "reported as refused, and it is in the log"
    assert all(there.count(value) <= 1 for value in in_doubt)
    # What it read, together with what it wrote, is the log from the start without a gap.
    mine = {offset for offset, _ in own}
    offsets = [record.offset for record in read]
    assert offsets == sorted(set(offsets)), "read twice, or out of order"
    assert not mine & set(offsets), "its own appends were read again"
    known = mine | set(offsets)
    end = writer.next_offset or 0
    assert all(at in known for at in range(end) if partition.log[at] is not None), "a record was skipped"


def _no_answer(append: Append) -> int:
    raise MaybeAppended from TimeoutError("no answer")


def test_acknowledgement_for_another_offset_is_a_violation() -> None:
    writer = FakeLogWriter(Partition.quiet(), problem=0.0)
    writer.read_to_end(lambda record: None)
    writer.appender.send = lambda append: append.expected + 1  # type: ignore[method-assign]
    with pytest.raises(OffsetViolationError):
        writer.append([Record(b"x")])
    with pytest.raises(NotAtEndError):
        writer.append([Record(b"x")])


def test_retry_repeats_write_id_and_timestamps(clock: SimpleNamespace, partition: Partition) -> None:
    """Otherwise the proxy could not recognize it."""
    writer = FakeLogWriter(partition, problem=0.0)
    writer.read_to_end(lambda record: None)
    tries: list[tuple[bytes, list[int | None]]] = []

    def send(append: Append) -> int:
        clock.seconds += 1
        tries.append((append.write_id, [r.timestamp_ms for r in append.records]))
        return _no_answer(append) if len(tries) < 3 else append.expected

    writer.appender.send = send  # type: ignore[method-assign]
    writer.append([Record(b"x"), Record(b"y", timestamp_ms=77)])
    assert len(tries) == 3
    assert tries[0][1][1] == 77
    assert tries == [tries[0]] * 3


def test_refusal_by_another_check_is_raised_at_once() -> None:
    writer = FakeLogWriter(Partition.quiet(), problem=0.0)
    writer.read_to_end(lambda record: None)
    tries: list[Append] = []

    def send(append: Append) -> int:
        tries.append(append)
        raise AppendRefusedError("t", 0, "PARTITION_COUNT_REQUIRED")

    writer.appender.send = send  # type: ignore[method-assign]
    with pytest.raises(AppendRefusedError):
        writer.append([Record(b"x")])
    assert len(tries) == 1


@pytest.mark.parametrize("final", [AppendRefusedError("t", 0, "PARTITION_COUNT_REQUIRED"), ConnectionError("denied")])
@pytest.mark.parametrize("appended", [False, True])
def test_refused_retry_does_not_refuse_the_attempt_before_it(
    final: Exception, appended: bool, clock: SimpleNamespace, partition: Partition
) -> None:
    """1. An attempt gets no answer. 2. The topic's checks change, and the next attempt is refused. 3. Kafka appends the
    first one."""
    writer = FakeLogWriter(partition, problem=0.0)
    writer.read_to_end(lambda record: None)
    tries: list[Append] = []

    def send(append: Append) -> int:
        clock.seconds += 1
        tries.append(append)
        if len(tries) == 1:
            return _no_answer(append)
        if len(tries) == 3 and appended:
            partition.land(append)
        raise final

    writer.appender.send = send  # type: ignore[method-assign]
    if appended:
        assert writer.append([Record(b"x")]) == 0
    else:
        with pytest.raises(InDoubtError):
            writer.append([Record(b"x")])


def test_apply_exception_propagates_and_record_is_reread(partition: Partition) -> None:
    partition.log = [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")]
    writer = FakeLogWriter(partition, problem=0.0)

    def fails_at_b(record: LogRecord) -> None:
        if record.value == b"b":
            raise RuntimeError("state is full")

    with pytest.raises(RuntimeError, match="full"):
        writer.read_to_end(fails_at_b)
    read: list[LogRecord] = []
    writer.read_to_end(read.append)
    assert [record.value for record in read] == [b"b", b"c"]


def test_missing_partition_is_reported_after_one_attempt(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FakeLogWriter(Partition.quiet(), problem=1.1)
    monkeypatch.setattr(FakeConsumer, "exists", lambda *_: False)
    with pytest.raises(PositionLostError, match="t-0: the partition does not exist"):
        list(writer)
    assert POLICY.attempt_seconds <= clock.seconds < POLICY.total_seconds


def test_loop_ends_where_the_log_ended_at_its_start(partition: Partition) -> None:
    partition.log = [(b"a", b"1"), None, (b"b", b"1"), None]
    writer = FakeLogWriter(partition, problem=0.0)
    read = []
    for record in writer:
        read.append(record.offset)
        partition.log.append((b"later", b"1"))
    assert read == [0, 2]
    assert writer.next_offset == 4
    assert [record.offset for record in writer] == [4, 5]


def test_record_of_an_unfinished_loop_pass_is_read_again(partition: Partition) -> None:
    partition.log = [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")]
    writer = FakeLogWriter(partition, problem=0.0)
    for record in writer:
        if record.value == b"b":
            break
    with pytest.raises(NotAtEndError):
        writer.append([Record(b"x")])
    assert [record.value for record in writer] == [b"b", b"c"]
    assert writer.append([Record(b"x")]) == 3


def test_use_inside_a_loop_is_refused_and_the_loop_continues(partition: Partition) -> None:
    partition.log = [(b"a", b"1"), (b"b", b"1")]
    writer = FakeLogWriter(partition, problem=0.0)
    outer = iter(writer)
    next(outer)
    for use in (lambda: list(writer), lambda: writer.append([Record(b"x")])):
        with pytest.raises(ConcurrentUseError, match=r"LogWriter of t-0: another append, read or loop is in progress"):
            use()
    assert [record.value for record in outer] == [b"b"]
    assert writer.append([Record(b"x")]) == 2


def test_loop_after_close_raises(partition: Partition) -> None:
    partition.log = [(b"a", b"1"), (b"b", b"1")]
    writer = FakeLogWriter(partition, problem=0.0)
    records = iter(writer)
    next(records)
    writer.close()
    with pytest.raises(RuntimeError, match="the log was closed"):
        next(records)


def test_first_read_without_a_broker_raises_the_librarys_error() -> None:
    """The consumer is created by the first read, and its creation fails."""
    retry = RetryPolicy(attempt_seconds=0.1, total_seconds=0.2)
    with (
        LogReader([("t", 0)], bootstrap_servers=f"127.0.0.1:{free_ports_in_a_row(1)}", retry=retry) as log,
        pytest.raises(KafkaError),
    ):
        log.read_to_end(lambda partition, record: None)
