"""A transactional writer over partitions and a coordinator in memory, with every fault of real ones.

The stand-in keeps what Kafka and the proxy promise: an append is made at its expected offset or not at all, a commit of
an older epoch is refused, and a new producer of the same name first ends the open transaction. It drops responses,
requests, reads and aborts, has late commits and other writers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost import (
    FencepostError,
    LogRecord,
    OffsetMismatchError,
    OffsetViolationError,
    OutcomeUnknownError,
    Record,
    RetryPolicy,
    TransactionAbortedError,
    TransactionConflictError,
    WriterFencedError,
    retrying,
    retrying_async,
)
from fencepost._appending import Observation
from fencepost._checks import TopicFacts
from fencepost._reading import BlockingLogReader
from fencepost._steps import CannotRead
from fencepost._transaction import Ended, Part, appended_batch, explained, parts_of, resolve
from fencepost._transactional_writer import BlockingTransactionalWriter, CommitInDoubt, CommitRefused
from tests.support.faulty_log import FakeConsumer, clock

__all__ = ["clock"]  # a fixture

POLICY = RetryPolicy(attempt_seconds=1, total_seconds=20)
TOPIC = "t"


@dataclass
class Entry:
    value: bytes
    write_id: bytes
    epoch: int
    committed: bool | None = None  # None: its transaction is open


@dataclass
class Cluster:
    """Two partitions, one transactional id."""

    rng: random.Random
    logs: dict[int, list[Entry | None]] = field(default_factory=lambda: {0: [], 1: []})
    epoch: int = 0
    joined: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)  # commits under way, by their epoch

    def end(self, epoch: int, *, commit: bool) -> bool:
        if epoch != self.epoch or not self.joined:
            return False
        for partition in self.joined:
            for entry in self.logs[partition]:
                if entry is not None and entry.epoch == epoch and entry.committed is None:
                    entry.committed = commit
            self.logs[partition].append(None)
        self.joined.clear()
        return True

    def initialise(self) -> int:
        self.end(self.epoch, commit=False)
        self.epoch += 1
        return self.epoch

    def stable(self, partition: int) -> int:
        log = self.logs[partition]
        return next((at for at, each in enumerate(log) if each is not None and each.committed is None), len(log))

    def committed(self, partition: int, offset: int) -> tuple[bytes, bytes] | None:
        entry = self.logs[partition][offset]
        return (entry.value, entry.write_id) if entry is not None and entry.committed else None

    def something_happens(self) -> None:
        for epoch in list(self.late):
            if self.rng.random() < 0.3:
                self.late.remove(epoch)
                self.end(epoch, commit=True)
        if self.rng.random() < 0.1:
            partition = self.rng.choice((0, 1))
            if self.stable(partition) == len(self.logs[partition]):
                self.logs[partition].append(Entry(b"other", b"other", -1, True))

    def there(self) -> list[tuple[int, int, bytes]]:
        return [
            (partition, at, each.value)
            for partition, log in self.logs.items()
            for at, each in enumerate(log)
            if each is not None and each.committed
        ]


class FakeProducer:
    """`aborts` – whether its client library can abort after a commit was refused, or a new producer must."""

    error = ConnectionError

    def __init__(self, cluster: Cluster, problem: float, *, aborts: bool = True) -> None:
        self.at, self.problem, self.aborts = cluster, problem, aborts
        self.epoch: int | None = None
        self.dead = False

    def _problem(self) -> bool:
        self.at.something_happens()
        return self.at.rng.random() < self.problem

    def require(self, topic: str) -> TopicFacts:
        if self._problem():
            raise ConnectionError("no broker")
        return TopicFacts(None, required=topic == "required")

    def open(self) -> None:
        if self._problem():
            raise CannotRead from ConnectionError("no coordinator")
        self.epoch, self.dead = self.at.initialise(), False
        if self._problem():
            self.discard()
            raise CannotRead from TimeoutError("the answer was lost")

    def begin(self) -> None:
        assert self.epoch is not None
        assert not self.dead, "begun on a producer that is of no use any more"

    def send(self, part: Part, write_id: bytes) -> int:
        assert self.epoch is not None
        if self.epoch != self.at.epoch:
            raise WriterFencedError("w")
        self.at.joined.add(part.partition)
        log = self.at.logs[part.partition]
        lost = self._problem()
        if lost and self.at.rng.random() < 0.5:
            raise TransactionAbortedError("never arrived")
        if part.expected is not None and part.expected != len(log):
            self.dead = True
            raise OffsetMismatchError(TOPIC, part.partition, part.expected, len(log))
        at = len(log)
        log += [Entry(record.value or b"", write_id, self.epoch) for record in part.records]
        if lost:
            raise TransactionAbortedError("the answer was lost")
        return at

    def commit(self) -> None:
        assert self.epoch is not None
        if self.epoch != self.at.epoch:
            raise WriterFencedError("w")
        if not self._problem():
            assert self.at.end(self.epoch, commit=True)
            return
        what = self.at.rng.choice(["refused", "never arrives", "late", "answer lost"])
        self.dead = True
        if what == "refused":
            if self.aborts:
                self.dead = False
                raise CommitRefused from ConnectionError(what)
            raise CommitInDoubt(refused=True) from ConnectionError(what)
        if what == "late":
            self.at.late.append(self.epoch)
        if what == "answer lost":
            self.at.end(self.epoch, commit=True)
        raise CommitInDoubt from TimeoutError(what)

    def abort(self) -> bool:
        assert self.epoch is not None
        if self._problem():
            self.dead = True
            raise TimeoutError("no coordinator")
        if self.epoch != self.at.epoch:
            raise ConnectionError("fenced")
        self.at.end(self.epoch, commit=False)
        return True

    def discard(self) -> None:
        self.epoch = None

    def close(self) -> None: ...


class FakeWriter(BlockingTransactionalWriter):
    def __init__(self, cluster: Cluster, problem: float, *, aborts: bool = True) -> None:
        self.producer = FakeProducer(cluster, problem, aborts=aborts)
        super().__init__("w", self.producer, FakeConsumer(cluster, problem), POLICY)


@pytest.mark.parametrize("seed", range(400))
def test_transaction_is_atomic_or_unknown_under_faults(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng)
    problem = rng.choice([0.0, 0.2, 0.5])
    writer = FakeWriter(cluster, problem, aborts=rng.random() < 0.5)
    reader = BlockingLogReader([(TOPIC, 0), (TOPIC, 1)], FakeConsumer(cluster, problem), POLICY)
    done: list[tuple[int, int, bytes]] = []
    nothing: list[bytes] = []
    unknown: list[bytes] = []
    for number in range(25):
        value = b"%d" % number
        try:
            expected = reader.read_to_end(lambda *_: None)
        except OSError:
            continue
        count = rng.randint(1, 2)
        requested = {
            place: (offset if rng.random() < 0.9 else offset + 1, [Record(value)] * count)
            for place, offset in expected.items()
        }
        if rng.random() < 0.1:
            cluster.initialise()  # another producer with the same name
        try:
            offsets = writer.append(requested)
        except (OffsetMismatchError, TransactionAbortedError):
            nothing.append(value)
        except WriterFencedError:
            nothing.append(value)
            with pytest.raises(WriterFencedError):
                writer.append(requested)
            writer = FakeWriter(cluster, problem, aborts=writer.producer.aborts)
        except OutcomeUnknownError:
            unknown.append(value)
        except OSError:
            nothing.append(value)  # could not even begin
        else:
            done += [(place[1], offset + i, value) for place, offset in offsets.items() for i in range(count)]
            assert all(offsets[place] == requested[place][0] for place in requested)
        assert writer._fenced or writer.producer.epoch is None or not writer.producer.dead, (
            "a producer of no use is kept"
        )
    for epoch in cluster.late:
        cluster.end(epoch, commit=True)
    cluster.initialise()
    there = cluster.there()
    values = [value for _, _, value in there]
    assert set(done) <= set(there), "reported as committed, and it is not there"
    assert not [value for value in nothing if value in values], "reported as aborted, and it is there"
    for value in unknown:
        assert {partition for partition, _, each in there if each == value} in (set(), {0, 1}), "half of it is there"


def test_the_seeds_meet_everything() -> None:
    """Else the test above shows less than it says."""
    met: set[str] = set()
    for seed in range(400):
        cluster = Cluster(random.Random(seed))
        writer = FakeWriter(cluster, 0.5)
        for _ in range(10):
            try:
                writer.append({(TOPIC, p): (cluster.stable(p), [Record(b"x")]) for p in (0, 1)})
                met.add("committed")
            except (FencepostError, OSError) as error:
                met.add(type(error).__name__)
    assert met >= {
        "committed",
        "OffsetMismatchError",
        "TransactionAbortedError",
        "TransactionConflictError",
        "ConnectionError",
    }


def test_commit_without_any_response_is_unknown(clock: SimpleNamespace) -> None:
    cluster = Cluster(random.Random(0))
    cluster.something_happens = lambda: None  # type: ignore[method-assign]
    writer = FakeWriter(cluster, 0.0)
    writer.append({(TOPIC, 0): (0, [Record(b"first")])})

    def commit() -> None:
        cluster.late.append(cluster.epoch)
        writer.producer.open = cannot  # type: ignore[method-assign]
        raise CommitInDoubt from TimeoutError("no answer")

    def cannot() -> None:
        raise CannotRead from ConnectionError("no coordinator")

    healthy: Callable[[], None] = writer.producer.open
    writer.producer.commit = commit  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknownError, match="t-0 at 2, t-1 at 0") as caught:
        writer.append({(TOPIC, 0): (2, [Record(b"x")]), (TOPIC, 1): (0, [Record(b"x")])})
    assert clock.seconds >= POLICY.total_seconds
    assert caught.value.expected == {(TOPIC, 0): 2, (TOPIC, 1): 0}
    # The next append first ends that transaction, so that it cannot be committed later.
    writer.producer.open = healthy  # type: ignore[method-assign]
    del writer.producer.commit
    with pytest.raises(OffsetMismatchError):
        writer.append({(TOPIC, 0): (2, [Record(b"y")])})
    assert not cluster.end(cluster.late[0], commit=True)
    assert cluster.there() == [(0, 0, b"first")]


# --- the decisions ----------------------------------------------------------------------------------------------------


def test_partitions_are_appended_in_a_fixed_order() -> None:
    one = [Record(b"x")]
    requested: dict[Any, Any] = {
        ("b", 0): (0, one),
        ("a", 10): (0, one),
        ("c", 0): (None, one),
        SimpleNamespaceKey("a", 9): (5, one),
    }
    parts = parts_of(requested)
    assert [(part.where, part.expected) for part in parts] == [
        (("a", 9), 5),
        (("a", 10), 0),
        (("b", 0), 0),
        (("c", 0), None),
    ]
    assert parts[0].key == SimpleNamespaceKey("a", 9)
    assert all(record.timestamp_ms is not None for part in parts for record in part.records)


@dataclass(frozen=True)
class SimpleNamespaceKey:
    """As a client library's TopicPartition."""

    topic: str
    partition: int


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ({}, "no partition has an expected offset"),
        ({("t", 0): (None, [Record(b"x")])}, "no partition has an expected offset"),
        ({("t", 0): (0, [])}, "nothing to append"),
        ({("t", 0): (0, [Record(b"x")]), SimpleNamespaceKey("t", 0): (0, [Record(b"x")])}, "named twice"),
    ],
)
def test_invalid_transaction_is_not_sent(requested: dict[Any, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parts_of(requested)


def test_refusal_on_required_topic_is_not_retried() -> None:
    writer = FakeWriter(Cluster(random.Random(0)), 0.0)
    with pytest.raises(ValueError, match="which refuses transactions"):
        retrying(lambda: writer.append({("required", 0): (0, [Record(b"x")])}), POLICY)
    assert writer.producer.epoch is None, "nothing was begun"


PART = parts_of({("t", 0): (7, [Record(b"x")])})[0]
OURS, OTHERS = (LogRecord(7, 0, None, b"x", (("fencepost-write-id", each),)) for each in (b"w", b"v"))


@pytest.mark.parametrize(
    ("observation", "ended"),
    [
        (None, None),
        (Observation(0, 7, None), None),  # its marker is not there yet
        (Observation(0, 9, OURS), Ended.COMMITTED),
        (Observation(0, 9, OTHERS), Ended.ABORTED),
        (Observation(0, 9, None), Ended.ABORTED),
        (Observation(0, 9, LogRecord(8, 0, None, b"x")), Ended.ABORTED),
        (Observation(8, 9, None), Ended.DELETED),
    ],
)
def test_log_shows_how_a_transaction_ended(observation: Observation | None, ended: Ended | None) -> None:
    assert resolve(PART, b"w", observation) is ended


@pytest.mark.parametrize(
    ("error", "code", "retriable", "raised"),
    [
        (OffsetMismatchError("t", 0, 7, 9), None, False, OffsetMismatchError),
        # It is never committed, so there is nothing to repair.
        (OffsetViolationError("t", 0, 7, 9), None, False, OffsetMismatchError),
        (RuntimeError(), 47, False, WriterFencedError),
        (RuntimeError(), 90, False, WriterFencedError),
        (TransactionConflictError("t-0: open"), 44, False, TransactionConflictError),
        (RuntimeError(), 45, False, TransactionAbortedError),
        (RuntimeError(), 6, True, TransactionAbortedError),
        (TimeoutError(), None, True, TransactionAbortedError),
        (RuntimeError(), 29, False, RuntimeError),
    ],
)
def test_what_is_raised_for_a_failed_append(
    error: Exception, code: int | None, retriable: bool, raised: type[Exception]
) -> None:
    assert type(explained(PART, error, code=code, retriable=retriable, transactional_id="w")) is raised


def test_append_at_another_offset_is_a_mismatch() -> None:
    assert appended_batch(PART, 7) == 7
    with pytest.raises(OffsetMismatchError, match="appended at 9, and aborted"):
        appended_batch(PART, 9)


# --- retrying ---------------------------------------------------------------------------------------------------------


def test_operation_is_retried_until_it_succeeds(clock: SimpleNamespace) -> None:
    refusals: list[Exception] = [
        OffsetMismatchError("t", 0, 1, 2),
        TransactionConflictError("another"),
        TransactionAbortedError("late"),
    ]
    left = list(refusals)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    assert retrying(attempt, POLICY) == "done"
    assert not left
    assert 0 < clock.seconds <= sum(POLICY.pause(tries) for tries in (1, 2, 3))


def test_retries_stop_at_timeout_or_unknown_outcome(clock: SimpleNamespace) -> None:
    def refused() -> None:
        raise TransactionConflictError("another")

    with pytest.raises(TransactionConflictError):
        retrying(refused, POLICY)
    assert clock.seconds < POLICY.total_seconds
    calls: list[None] = []

    def unknown() -> None:
        calls.append(None)
        raise OutcomeUnknownError({("t", 0): 0}, b"w", "no answer")

    with pytest.raises(OutcomeUnknownError):
        retrying(unknown, POLICY)
    assert len(calls) == 1


def test_coroutines_are_retried_as_well() -> None:
    tries: list[None] = []

    async def attempt() -> str:
        tries.append(None)
        if len(tries) < 3:
            raise TransactionConflictError("another")
        return "done"

    assert asyncio.run(retrying_async(attempt, RetryPolicy(pause_seconds=0.001))) == "done"
    assert len(tries) == 3


def test_pauses_differ() -> None:
    pauses = {POLICY.jittered(3) for _ in range(20)}
    assert len(pauses) > 10
    assert max(pauses) <= POLICY.pause(3)
