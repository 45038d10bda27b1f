"""The registry and the sequence, over a partition in memory with every fault of a real one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fencepost import ForeignRecordError, InDoubtError, OffsetMismatchError, PositionLostError, Record
from fencepost._appending import Append, MaybeAppended
from fencepost.recipes import Entry, Registry, Sequence
from tests.support.faulty_log import FakeConsumer, clock
from tests.support.recipe_log import RecipePartition, partition

__all__ = ["clock", "partition"]  # fixtures


def test_name_keeps_its_first_value_and_number(partition: RecipePartition) -> None:
    a, b = Registry(partition.writer()), Registry(partition.writer())
    assert a.register("user", b"int") == Entry(1, b"int", 0)
    assert b.register("user", b"long") == Entry(1, b"int", 0)
    assert b.register("order", b"int") == Entry(2, b"int", 1)
    assert a.get("order") == Entry(2, b"int", 1)
    assert a.get("none") is None
    assert dict(a.entries) == dict(b.entries)
    first = partition.records[0]
    assert first is not None
    assert (first.key, first.value) == (b"user", b"int")
    assert first.headers[:2] == (("fencepost-recipe", b"registry/1 entry"), ("fencepost-number", b"1"))


def test_two_masters_never_give_one_number_twice(partition: RecipePartition) -> None:
    """The second one registers between the first one's read and its append."""
    first, second = Registry(partition.writer()), Registry(partition.writer())
    _overtaken_by(first, lambda: second.register("b"))
    assert first.register("a").number == 2
    _overtaken_by(first, lambda: second.register("c", b"second"))
    assert first.register("c", b"first") == Entry(3, b"second", 2)
    assert dict(Registry(partition.writer()).entries) == {}
    reader = Registry(partition.writer())
    reader.get("none")
    assert [entry.number for entry in reader.entries.values()] == [1, 2, 3]


def test_two_takers_never_get_one_number(partition: RecipePartition) -> None:
    first, second = Sequence(partition.writer()), Sequence(partition.writer())
    numbers = [second.take()]
    _overtaken_by(first, lambda: numbers.append(second.take()))
    numbers.append(first.take())
    assert numbers == [1, 2, 3]


def _overtaken_by(recipe: Registry | Sequence, act: Callable[[], object]) -> None:
    """`act` runs once, before the next append."""
    appender = recipe._log._appender
    send = appender.send

    def overtaken(append: Append) -> int:
        appender.send = send  # type: ignore[method-assign]
        act()
        return int(send(append))

    appender.send = overtaken  # type: ignore[method-assign]


@contextmanager
def _appended_without_answer(recipe: Registry | Sequence, partition: RecipePartition) -> Iterator[None]:
    """The next append gets no answer, and is appended after its writer gave up."""
    appender, attempts = recipe._log._appender, list[Append]()
    send = appender.send

    def lost(append: Append) -> int:
        attempts.append(append)
        raise MaybeAppended from TimeoutError("no answer")

    appender.send = lost  # type: ignore[method-assign]
    try:
        yield
    finally:
        partition.land(attempts[0])
        appender.send = send  # type: ignore[method-assign]


def test_number_of_an_unknown_outcome_is_returned(partition: RecipePartition) -> None:
    sequence = Sequence(partition.writer())
    with pytest.raises(InDoubtError), _appended_without_answer(sequence, partition):
        sequence.take(b"bill 7")
    assert sequence.take(b"bill 8") == 2
    assert sequence.take(b"bill 7") == 1
    assert sequence.take(b"bill 7") == 3


def test_registry_under_faults() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        partition = RecipePartition(rng)
        problem = rng.choice([0.0, 0.2, 0.5])
        masters = [Registry(partition.writer(problem)) for _ in range(3)]
        given: dict[str, set[Entry]] = {}
        for _ in range(40):
            at = rng.randrange(3)
            name = f"{rng.randrange(15)}"
            try:
                given.setdefault(name, set()).add(masters[at].register(name, b"%d" % at))
            except PositionLostError:  # the high watermark of this stand-in may go back; Kafka's does not
                masters[at] = Registry(partition.writer(problem))
            except (OffsetMismatchError, InDoubtError, ConnectionError):
                pass
        for append in partition.queued:
            partition.land(append)
        partition.something_happens = lambda: None  # type: ignore[method-assign]
        partition.unreplicated = 0
        reader = Registry(partition.writer())
        reader.get("none")
        assert [entry.number for entry in reader.entries.values()] == list(range(1, len(reader.entries) + 1))
        for name, entries in given.items():
            assert entries <= {reader.entries[name]} if entries else True, f"seed {seed}: {name}"


def test_sequence_under_faults() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        partition = RecipePartition(rng)
        problem = rng.choice([0.0, 0.2, 0.5])
        takers = [Sequence(partition.writer(problem)) for _ in range(3)]
        taken: dict[int, bytes] = {}
        for number in range(40):
            at, purpose = rng.randrange(3), b"%d" % number
            for _ in range(10):
                try:
                    got = takers[at].take(purpose)
                except InDoubtError:
                    continue
                except PositionLostError:
                    takers[at] = Sequence(partition.writer(problem))
                except (OffsetMismatchError, ConnectionError):
                    pass
                else:
                    assert got not in taken, f"seed {seed}: number {got} twice"
                    taken[got] = purpose
                break
        for append in partition.queued:
            partition.land(append)
        records = [record for record in partition.records if record is not None]
        assert [dict(r.headers)["fencepost-number"] for r in records] == [b"%d" % (n + 1) for n in range(len(records))]
        purposes = [record.value for record in records]
        assert len(set(purposes)) == len(purposes), f"seed {seed}: two numbers for one purpose"
        assert all(records[number - 1].value == purpose for number, purpose in taken.items()), f"seed {seed}"


def test_registered_name_is_returned_after_an_unknown_outcome(partition: RecipePartition) -> None:
    registry = Registry(partition.writer())
    with pytest.raises(InDoubtError), _appended_without_answer(registry, partition):
        registry.register("a", b"x")
    assert registry.register("a", b"x") == Entry(1, b"x", 0)
    assert partition.values == [b"x"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Record(b"x", b"a"), "it has no header `fencepost-recipe: registry/1 entry`"),
        (Record(b"x", b"a", (("fencepost-recipe", b"registry/1 entry"),)), "it has no number in the header"),
        (
            Record(b"x", b"a", (("fencepost-recipe", b"registry/1 entry"), ("fencepost-number", b"3"))),
            "it registers 'a' with number 3 after number 0",
        ),
        (
            Record(b"x", b"\xff", (("fencepost-recipe", b"registry/1 entry"), ("fencepost-number", b"1"))),
            "its key is not UTF-8",
        ),
        (Record(b"x", b"a", (("fencepost-recipe", b"registry/2 entry"),)), "format registry/2"),
    ],
)
def test_record_without_the_format_stops_reading(record: Record, why: str, partition: RecipePartition) -> None:
    partition.append_foreign(record)
    registry = Registry(partition.writer())
    for _ in range(2):
        with pytest.raises(ForeignRecordError, match=f"at offset 0: .*{why}"):
            registry.register("b")


def test_deleted_records_are_an_error_and_free_no_name(
    monkeypatch: pytest.MonkeyPatch, partition: RecipePartition
) -> None:
    Registry(partition.writer()).register("a")
    Sequence(other := RecipePartition.quiet().writer()).take()
    monkeypatch.setattr(FakeConsumer, "bounds", lambda *_: (1, 1))
    with pytest.raises(PositionLostError, match="next offset 0 is outside the log"):
        Registry(partition.writer()).register("a")
    assert other.next_offset == 1
    with pytest.raises(PositionLostError, match="the last number is unknown"):
        Sequence(partition.writer()).take()


def test_registry_is_bounded() -> None:
    registry = Registry(RecipePartition.quiet().writer(), entries_max=1)
    registry.register("a")
    with pytest.raises(ValueError, match="'b' is not registered: there are 1 names"):
        registry.register("b")
    assert registry.register("a").number == 1
