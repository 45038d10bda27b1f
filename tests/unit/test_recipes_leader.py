"""The leader of a partition, over a partition in memory with every fault of a real one."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from fencepost import (
    ForeignRecordError,
    InDoubtError,
    LogRecord,
    NotAtEndError,
    NotLeaderError,
    OffsetMismatchError,
    PositionLostError,
    Record,
)
from fencepost._appending import Append, MaybeAppended
from fencepost._steps import run_async
from fencepost.recipes import Claim, Leader
from fencepost.recipes._leader import LeaderBase
from tests.support.faulty_log import clock
from tests.support.recipe_log import RecipePartition, partition

__all__ = ["clock", "partition"]  # fixtures

CLAIM = ("fencepost-recipe", b"leader/1 claim")


def _leader(partition: RecipePartition, name: str = "a", problem: float = 0.0) -> Leader:
    return Leader(partition.writer(problem), name)


def test_claim_is_a_record_and_its_offset_the_term(partition: RecipePartition) -> None:
    partition.append_foreign(Record(b"x"))
    leader = _leader(partition, "node-1")
    assert leader.claim() == leader.term == 1
    assert leader.append([Record(b"y"), Record(b"z")]) == 2
    claim = partition.records[1]
    assert claim is not None
    assert (claim.key, claim.value, claim.headers[0]) == (None, b"node-1", CLAIM)


def test_follower_applies_records_and_knows_the_leader(partition: RecipePartition) -> None:
    leader = _leader(partition, "node-1")
    leader.claim()
    leader.append([Record(b"y")])
    applied: list[bytes | None] = []
    follower = Leader(partition.writer(), "node-2", lambda record: applied.append(record.value))
    assert follower.read_to_end() == 2
    assert applied == [b"y"]
    assert follower.current == Claim(0, "node-1")
    with pytest.raises(NotLeaderError, match=r"t-0: this process does not lead: 'node-1' leads since offset 0 \("):
        follower.append([Record(b"x")])
    with pytest.raises(NotLeaderError, match="no claim was read"):
        _leader(partition).append([Record(b"x")])


def test_stale_leader_is_refused(partition: RecipePartition) -> None:
    """Its append, its retry and its read: it never reads over the claim."""
    old, new = _leader(partition, "old"), _leader(partition, "new")
    assert old.claim() == 0
    old.append([Record(b"1")])
    assert new.claim() == 2
    with pytest.raises(NotLeaderError, match=r"the term 0 of this process is over: 'new' leads since offset 2") as e:
        old.append([Record(b"2")])
    assert isinstance(e.value.__cause__, OffsetMismatchError)
    assert (e.value.term, e.value.leader_term, e.value.leader) == (0, 2, "new")
    assert old.term is None
    for _ in range(2):
        with pytest.raises(NotLeaderError):
            old.append([Record(b"2")])
        old.read_to_end()
    new.append([Record(b"3")])
    assert partition.values == [b"old", b"1", b"new", b"3"]


def test_reading_ends_at_a_foreign_claim(partition: RecipePartition) -> None:
    applied: list[bytes | None] = []
    old, new = Leader(partition.writer(), "old", lambda record: applied.append(record.value)), _leader(partition, "new")
    old.claim()
    partition.append_foreign(Record(b"before"))
    new.claim()
    new.append([Record(b"after")])
    with pytest.raises(NotLeaderError):
        old.read_to_end()
    assert applied == [b"before"]
    assert old.read_to_end() == 4
    assert applied == [b"before", b"after"]
    assert old.claim() == 4


def test_only_one_of_two_contenders_wins(partition: RecipePartition) -> None:
    first, second = _leader(partition, "first"), _leader(partition, "second")
    send = first._log._appender.send

    def overtaken(append: Append) -> int:
        first._log._appender.send = send  # type: ignore[method-assign]
        second.claim()
        return int(send(append))

    first._log._appender.send = overtaken  # type: ignore[method-assign]
    with pytest.raises(NotLeaderError, match="'second' leads since offset 0"):
        first.claim()
    assert partition.values == [b"second"]
    assert first.claim() == 1


def test_busy_leader_can_be_deposed(partition: RecipePartition) -> None:
    """Ordinary records between a contender's read and its claim are applied before it leads."""
    old, applied = _leader(partition, "old"), list[bytes | None]()
    new = Leader(partition.writer(), "new", lambda record: applied.append(record.value))
    old.claim()
    send, busy = new._log._appender.send, iter((b"1", b"2", b"3"))

    def overtaken(append: Append) -> int:
        for value in busy:
            old.append([Record(value)])
            break
        return int(send(append))

    new._log._appender.send = overtaken  # type: ignore[method-assign]
    assert new.claim() == 4
    assert applied == [b"1", b"2", b"3"]


def test_nothing_of_an_old_term_follows_a_later_claim() -> None:
    """Contenders claim, append, stop and continue at random. No record of a term follows a later claim."""
    for seed in range(100):
        rng = random.Random(seed)
        partition = RecipePartition(rng)
        problem = rng.choice([0.0, 0.2, 0.5])
        contenders = [_leader(partition, f"{number}", problem) for number in range(3)]
        appended: dict[bytes, int] = {}
        refused: list[bytes] = []
        for number in range(60):
            leader = rng.choice(contenders)
            value = b""
            try:
                if leader.term is None or rng.random() < 0.1:
                    if rng.random() < 0.7:
                        leader.claim()
                elif leader._log.at_end:
                    value = b"%d %d" % (leader.term, number)
                    appended[value] = leader.append([Record(value)])
                else:
                    leader.read_to_end()
            except (OffsetMismatchError, NotLeaderError):
                refused += [value] if value else []
            except (InDoubtError, PositionLostError, ConnectionError):
                pass
        for append in partition.queued:
            partition.land(append)
        term, terms = -1, list[int]()
        for record in partition.records:
            if record is None:
                continue
            if CLAIM in record.headers:
                term = record.offset
                terms.append(term)
            else:
                assert int((record.value or b"").split()[0]) == term, f"seed {seed}: a record of an old term"
        assert not [value for value in refused if value in partition.values], f"seed {seed}: refused, but appended"
        for value, offset in appended.items():
            found = partition.records[offset]
            assert found is not None
            assert found.value == value, f"seed {seed}"


def test_unreadable_log_raises_and_is_not_silent(clock: SimpleNamespace, partition: RecipePartition) -> None:
    partition.append_foreign(Record(b"x"))
    leader = _leader(partition)
    leader.read_to_end()
    clock.seconds += 10
    leader.read_to_end()
    assert leader.silent_seconds == 10
    leader._log._reading.consumer.problem = 1.1
    with pytest.raises(ConnectionError):
        leader.read_to_end()
    assert leader.silent_seconds == 10
    leader._log._reading.consumer.problem = 0.0
    partition.append_foreign(Record(b"y"))
    leader.read_to_end()
    assert leader.silent_seconds == 0


def test_unknown_outcome_ends_no_term_and_reading_decides(clock: SimpleNamespace, partition: RecipePartition) -> None:
    applied: list[bytes | None] = []
    leader = Leader(partition.writer(), "a", lambda record: applied.append(record.value))
    leader.claim()
    send = leader._log._appender.send

    def lost(append: Append) -> int:
        clock.seconds += 30
        raise MaybeAppended from TimeoutError("no answer")

    leader._log._appender.send = lost  # type: ignore[method-assign]
    with pytest.raises(InDoubtError):
        leader.append([Record(b"1")])
    with pytest.raises(NotAtEndError):
        leader.append([Record(b"2")])
    partition.append_foreign(Record(b"1"))
    leader._log._appender.send = send  # type: ignore[method-assign]
    leader.read_to_end()
    assert applied == [b"1"]
    assert leader.append([Record(b"2")]) == 2


def test_failed_apply_leaves_the_record_unread(partition: RecipePartition) -> None:
    partition.append_foreign(Record(b"x"))
    results = iter((RuntimeError("full"), None))
    applied: list[bytes | None] = []

    def apply(record: LogRecord) -> None:
        if (error := next(results, None)) is not None:
            raise error
        applied.append(record.value)

    leader = Leader(partition.writer(), "a", apply)
    with pytest.raises(RuntimeError, match="full"):
        leader.read_to_end()
    assert leader.claim() == 1
    assert applied == [b"x"]


def test_newer_format_stops_reading(partition: RecipePartition) -> None:
    partition.append_foreign(Record(b"x", headers=(("fencepost-recipe", b"leader/2 claim"),)))
    leader = _leader(partition)
    with pytest.raises(ForeignRecordError, match=r"at offset 0: it has the format leader/2, .* reads leader/1"):
        leader.claim()


def test_application_cannot_append_a_claim_by_accident() -> None:
    leader = _leader(RecipePartition.quiet())
    leader.claim()
    with pytest.raises(ValueError, match="is set by recipes"):
        leader.append([Record(b"x", headers=(CLAIM,))])


def test_log_writer_of_the_other_kind_is_refused() -> None:
    recipes = pytest.importorskip("fencepost.recipes.aiokafka")
    with pytest.raises(TypeError, match=r"use that of fencepost\.recipes\)"):
        recipes.Leader(RecipePartition.quiet().writer(), "a")
    with pytest.raises(TypeError, match=r"Loader of another client library \(use that of fencepost\.recipes\)"):
        recipes.Loader("a load", [RecipePartition.quiet().writer()])


def test_coroutine_of_apply_is_awaited(partition: RecipePartition) -> None:
    partition.append_foreign(Record(b"x"))
    applied: list[bytes | None] = []

    async def apply(record: LogRecord) -> None:
        await asyncio.sleep(0)
        applied.append(record.value)

    leader = LeaderBase(partition.writer(), "a", apply)
    assert asyncio.run(run_async(leader._claim())) == 1
    assert applied == [b"x"]
