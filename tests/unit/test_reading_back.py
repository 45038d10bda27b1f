"""A commit's log is read once, outside the event loop, however often the client repeats the commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.cluster.broker import UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.fetches import Fetched
from fencepost_proxy.cluster.transactions import NotCoordinator
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services import transactions as product
from fencepost_proxy.services.transactions import Commits
from fencepost_proxy.session.frames.messages import ValidateCommit
from fencepost_proxy.transactions.commit_validator import V2_FROM, Logged, LogIs, Outcome, ReadBack
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import NodeId, Offset, TopicPartition
from fencepost_proxy.wire.batch_scan import HeaderNames, scan_batch
from tests.kit.waiting import until_async
from tests.support.batches import batch, expecting

TP = TopicPartition("orders", 0)
ID, EPOCH = 7, 3
COORDINATOR, ANOTHER = NodeId(1), NodeId(2)
START = 10
GZIP = 1
QUERY = ReadBack(ID, TP, START)


def at(offset: int, *, compression: int = 0, size: int = 1) -> bytes:
    """One record of the transaction that expects this offset."""
    producer = ID, EPOCH, offset - START
    return bytes(expecting(offset, b"v" * size, base_offset=offset, producer=producer, compression=compression))


@dataclass
class Log:
    """The Kafka client, as far as it reads logs. A fetch returns `fetched` batches."""

    batches: Sequence[bytes]
    fetched: int = 100
    before_fetch: Callable[[int], Awaitable[None]] | None = None
    leader_epoch: int = 1
    offsets: list[int] = field(default_factory=list)  # that were fetched from

    async def log_end(self, tp: TopicPartition, **_: object) -> Any:
        return SimpleNamespace(offset=START + len(self.batches))

    async def fetch(self, tp: TopicPartition, offset: Offset, **_: object) -> Fetched:
        self.offsets.append(offset)
        if self.before_fetch is not None:
            await self.before_fetch(offset)
        first = offset - START
        return Fetched(b"".join(self.batches[first : first + self.fetched]), (), Offset(0))

    async def describe_at(self, node_id: NodeId, transactional_id: str, **_: object) -> Any:
        if node_id != COORDINATOR:
            raise NotCoordinator("another broker")
        return SimpleNamespace(producer_id=ID, producer_epoch=EPOCH, state="Ongoing", partitions=frozenset({TP}))

    async def producer_at(self, *_: object, **__: object) -> Any:
        last = len(self.batches) - 1
        return {TP: SimpleNamespace(epoch=EPOCH, last_sequence=last, current_txn_start_offset=START)}

    async def in_sync(self, topic: str) -> int:
        return 2

    def topic(self, name: str) -> Any:
        return SimpleNamespace(topic_id=UUID(int=5))

    def leader(self, tp: TopicPartition) -> Any:
        return SimpleNamespace(leader_epoch=self.leader_epoch)


@dataclass
class Scans:
    """The batches that were unpacked, and their threads."""

    offsets: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    then: Callable[[], None] | None = None


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    observed = Scans()

    def scan(records: memoryview, names: HeaderNames, where: TopicPartition, **more: Any) -> Any:
        scanned = scan_batch(records, names, where, **more)
        observed.offsets.append(scanned.header.base_offset)
        observed.threads.add(threading.get_ident())
        if observed.then is not None:
            observed.then()
        return scanned

    monkeypatch.setattr(product, "scan_batch", scan)
    return observed


class State:
    """An empty state topic."""

    fresh = True
    view: Any = SimpleNamespace(abort_only_records=SimpleNamespace(of=lambda *_: ()))

    async def read_to_end(self, **_: object) -> None: ...


def commits_on(log: Log, limits: Limits | None = None) -> Commits:
    kafka: Any = log
    policy: Any = SimpleNamespace(is_checked=True, source_is_base=False)
    state: Any = State()
    return Commits(
        limits or Limits(),
        lambda: state,
        metadata=kafka,
        transactions=kafka,
        producers=kafka,
        log_ends=kafka,
        fetches=kafka,
        in_sync=kafka.in_sync,
        table=Table(),
        configured=[],
        policy=lambda topic: policy,
        names=HeaderNames(),
        metrics=Metrics(),
    )


async def read(commits: Commits, query: ReadBack = QUERY) -> LogIs:
    return await commits._read_back(query, deadline_in(60.0))


def offsets(log: LogIs) -> list[tuple[int, int | None]]:
    return [(each.base_offset, each.expected) for each in log.batches or ()]


async def test_log_is_read_over_several_fetches(scans: Scans) -> None:
    log = Log([at(START + i) for i in range(7)], fetched=3)

    found = await read(commits_on(log))

    assert offsets(found) == [(START + i, START + i) for i in range(7)]
    assert log.offsets == [START, START + 3, START + 6]


async def test_next_try_goes_on_where_a_fetch_failed(scans: Scans) -> None:
    async def fails_once(offset: int) -> None:
        if offset == START + 4 and log.offsets.count(offset) == 1:
            raise UpstreamUnavailable("no leader")

    log = Log([at(START + i) for i in range(6)], fetched=2, before_fetch=fails_once)

    commits = commits_on(log)
    with pytest.raises(UpstreamUnavailable):
        await read(commits)
    found = await read(commits)

    assert offsets(found) == [(START + i, START + i) for i in range(6)]
    assert scans.offsets == [START + i for i in range(6)]
    assert log.offsets == [START, START + 2, START + 4, START + 4]


async def test_batch_is_unpacked_once_despite_a_cancelled_commit(scans: Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice is one batch; the commit reaches its deadline during the third."""
    monkeypatch.setattr(product, "_SLICE_SECONDS", 0.0)
    log = Log([at(START + i, compression=GZIP, size=2_000_000) for i in range(5)])
    third, proceed = threading.Event(), threading.Event()

    def blocks() -> None:
        if len(scans.offsets) == 3:
            third.set()
            assert proceed.wait(60)

    scans.then = blocks

    commits = commits_on(log)
    first_try = asyncio.create_task(read(commits))
    await until_async(third.is_set, "the third read")
    first_try.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first_try
    second_try = asyncio.create_task(read(commits))
    await asyncio.sleep(0)
    proceed.set()
    found = await second_try

    assert offsets(found) == [(START + i, START + i) for i in range(5)]
    assert scans.offsets == [START + i for i in range(5)]


async def test_repeated_commit_tries_read_each_batch_once(scans: Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_SLICE_SECONDS", 0.0)

    async def both(offset: int) -> None:
        """The first fetch of each try is answered when there are two."""
        await until_async(lambda: len(log.offsets) >= 2, "two reads")

    log = Log([at(START + i, compression=GZIP, size=2_000_000) for i in range(5)], before_fetch=both)

    commits = commits_on(log)
    one, other = await asyncio.gather(read(commits), read(commits))

    assert offsets(one) == offsets(other) == [(START + i, START + i) for i in range(5)]
    assert scans.offsets == [START + i for i in range(5)]


@pytest.mark.parametrize(
    ("compression", "size", "here"), [(GZIP, 1, True), (GZIP, 2_000_000, False), (0, 70_000, False)]
)
async def test_large_unpacked_batches_are_read_in_a_thread(
    scans: Scans, compression: int, size: int, here: bool
) -> None:
    await read(commits_on(Log([at(START, compression=compression, size=size)])))

    assert scans.offsets == [START]
    assert (scans.threads == {threading.get_ident()}) is here


async def test_batches_that_were_checked_here_are_not_unpacked(scans: Scans) -> None:
    log = Log([at(START + i) for i in range(5)])

    found = await read(commits_on(log), ReadBack(ID, TP, START, (START + 1, START + 4)))

    assert scans.offsets == [START, START + 4]
    assert found.batches is not None
    assert found.batches[2] == Logged(START + 2, 1, EPOCH, 2)


async def test_batches_of_other_producers_are_not_unpacked(scans: Scans) -> None:
    other = bytes(batch(b"v", base_offset=START + 1, producer=(ID + 1, 0, 0)))

    found = await read(commits_on(Log([at(START), other, at(START + 2)])))

    assert scans.offsets == [START, START + 2]
    assert [each.base_offset for each in found.batches or ()] == [START, START + 2]


async def test_another_leader_is_read_from_the_start(scans: Scans) -> None:
    log = Log([at(START + i) for i in range(3)])

    commits = commits_on(log)
    await read(commits)
    await read(commits)
    log.leader_epoch += 1
    await read(commits)

    assert scans.offsets == [START, START + 1, START + 2] * 2


async def test_slow_commit_succeeds_at_a_later_try(scans: Scans) -> None:
    """Then its log is forgotten."""
    log = Log([at(START + i, compression=GZIP, size=2_000_000) for i in range(6)])
    scans.then = lambda: time.sleep(0.3)
    requested = ValidateCommit(1, "transfer", ID, EPOCH, V2_FROM)

    commits = commits_on(log, Limits(commit_wait_seconds=0.5))
    outcomes = [Outcome.LATER]
    while outcomes[-1] is Outcome.LATER and len(outcomes) < 30:
        outcomes.append((await commits.validate(requested, COORDINATOR)).outcome)

    assert len(outcomes) > 2
    assert outcomes[-1] is Outcome.PASS
    assert scans.offsets == [START + i for i in range(6)]
    assert len(commits._read) == 0


@pytest.mark.parametrize("node_id", [ANOTHER, None])
async def test_commit_through_another_broker_than_its_coordinator_is_none(scans: Scans, node_id: NodeId | None) -> None:
    log = Log([at(START)])

    decision = await commits_on(log).validate(ValidateCommit(1, "transfer", ID, EPOCH, V2_FROM), node_id)

    assert (decision.outcome, decision.later) == (Outcome.LATER, Error.NOT_COORDINATOR)


async def test_only_so_many_batches_are_remembered(scans: Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_REMEMBERED_MAX", 10)
    log = Log([at(START + i) for i in range(3)])

    commits = commits_on(log)
    for end in range(20):
        await read(commits, ReadBack(ID, TP, START, (0, end)))
    assert (len(commits._read)) <= 3
