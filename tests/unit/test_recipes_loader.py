"""A load over partitions in memory with every fault of real ones: killed at any point, run twice, delayed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost import (
    FencepostError,
    LoadChangedError,
    LoadPositionLostError,
    LoadTakenOverError,
    PositionLostError,
    Record,
)
from fencepost.recipes import Loader, by_key
from fencepost.recipes._loader import LOAD
from tests.support.faulty_log import FakeConsumer, clock
from tests.support.recipe_log import RecipePartition
from tests.unit.test_client_log_writer import POLICY

__all__ = ["clock"]  # a fixture

Unit = tuple[list[Record], bytes]


class Source:
    """Units with rows for some partitions. Its positions are the numbers of units."""

    def __init__(self, rng: random.Random, units: int = 30) -> None:
        self.units: list[Unit] = []
        for number in range(1, units + 1):
            keys = [rng.choice([None, b"%d" % rng.randrange(9)]) for _ in range(rng.choice([0, 1, 2, 5]))]
            size = rng.choice([0, 0, 0, 3000])  # a batch has at most 10,000 bytes
            rows = [Record(b"%d.%d" % (number, at) + b"x" * size, key) for at, key in enumerate(keys)]
            self.units.append((rows, b"%d" % number))

    def read(self, position: bytes | None) -> Iterator[Unit]:
        yield from self.units[int(position or 0) :]

    def placed(self, count: int) -> list[list[bytes]]:
        """The values of each partition."""
        found: list[list[bytes]] = [[] for _ in range(count)]
        for number, (rows, _) in enumerate(self.units, 1):
            for row in rows:
                found[by_key(row, number, count)].append(row.value or b"")
        return found


def test_short_run_reads_only_the_last_group_again() -> None:
    """Each run is one group, which cannot state that it is complete. The next one does."""
    partitions, source = [RecipePartition.quiet()], Source(random.Random(8), units=40)
    read: list[bytes | None] = []
    for end in (10, 20, 30, 40):
        with _loader(partitions, group_bytes=1 << 20) as load:
            read.append(load.position)
            _go_through(load, source.units[int(load.position or 0) : end])
    assert read == [None, None, b"10", b"20"]
    assert [_rows(each) for each in partitions] == source.placed(1)


def _loader(partitions: Sequence[RecipePartition], problem: float = 0.0, **options: Any) -> Loader:
    logs = [partition.writer(problem) for partition in partitions]
    for number, log in enumerate(logs):
        log.partition = number
    return Loader("a load", logs, **{"group_bytes": 500, **options})


def _rows(partition: RecipePartition) -> list[bytes]:
    """Without those of other writers."""
    return [value for value in partition.values if value is not None and b"." in value]


def _load(partitions: Sequence[RecipePartition], source: Source, **options: Any) -> None:
    with _loader(partitions, **options) as load:
        _go_through(load, source.read(load.position))


def test_rows_are_in_their_partitions_in_order_and_a_second_run_adds_none() -> None:
    partitions, source = [RecipePartition.quiet() for _ in range(3)], Source(random.Random(1))
    _load(partitions, source)
    assert [_rows(each) for each in partitions] == source.placed(3)
    before = [list(each.records) for each in partitions]
    _load(partitions, source)
    assert [list(each.records) for each in partitions] == before
    last = partitions[0].records[-1]
    assert last is not None
    stated = dict(last.headers)[LOAD]
    assert stated.startswith(b'{"load":"a load","run":"')
    assert sum(LOAD in dict(each.headers) for each in partitions[0].records if each) < len(partitions[0].records)


def test_load_can_be_killed_anywhere() -> None:
    """Any number of runs end anywhere, two at once; one last run is complete."""
    for seed in range(150):
        rng = random.Random(seed)
        partitions = [RecipePartition(rng) for _ in range(rng.choice([1, 2, 4]))]
        source = Source(rng)
        running: list[tuple[Loader, Iterator[Unit]]] = []
        for _ in range(80):
            if not running or (len(running) < 2 and rng.random() < 0.2):
                _begin(running, partitions, source, rng)
            elif rng.random() < 0.1:
                running.pop(rng.randrange(len(running)))  # killed: what it sent may be appended later
            else:
                _go_on(running, rng)
        for partition in partitions:
            partition.queued.clear()
            partition.something_happens = lambda: None  # type: ignore[method-assign]
            partition.unreplicated = 0
        _load(partitions, source)
        assert [_rows(each) for each in partitions] == source.placed(len(partitions)), seed


def _begin(
    running: list[tuple[Loader, Iterator[Unit]]],
    partitions: Sequence[RecipePartition],
    source: Source,
    rng: random.Random,
) -> None:
    load = _loader(partitions, rng.choice([0.0, 0.1, 0.4]), group_bytes=rng.choice([1, 300, 2000]))
    try:
        load.start()
    except (FencepostError, ConnectionError):
        return
    running.append((load, source.read(load.position)))


def _go_on(running: list[tuple[Loader, Iterator[Unit]]], rng: random.Random) -> None:
    at = rng.randrange(len(running))
    load, units = running[at]
    try:
        if (unit := next(units, None)) is None:
            load.flush()
            del running[at]
        else:
            load.append(*unit)
    except (FencepostError, ConnectionError):
        del running[at]


def test_older_loader_is_refused() -> None:
    partitions, source = [RecipePartition.quiet()], Source(random.Random(2))
    old, new = _loader(partitions, group_bytes=1), _loader(partitions, group_bytes=1)
    old.start()
    for rows, position in source.units[:5]:
        old.append(rows, position)
    new.start()
    units = source.read(new.position)
    for _ in range(6):
        new.append(*next(units))
    with pytest.raises(LoadTakenOverError, match=r"t-0: another loader of 'a load' appended at offset \d+"):
        _go_through(old, source.units[5:])
    with pytest.raises(RuntimeError, match="has ended"):
        old.append([Record(b"9.9")], b"9")
    _go_through(new, units)
    new.flush()
    assert [_rows(each) for each in partitions] == source.placed(1)


def _go_through(load: Loader, units: Iterable[Unit]) -> None:
    for rows, position in units:
        load.append(rows, position)


def test_changed_source_is_refused() -> None:
    """The group was cut off after its first partition: the restart has to skip rows there."""
    partitions, source = [RecipePartition.quiet(), RecipePartition.quiet()], Source(random.Random(3))
    cut_off(partitions, source)
    for change in (_other_position, _fewer_rows):
        changed = Source(random.Random(3))
        change(changed.units)
        with pytest.raises(LoadChangedError, match="another position or fewer rows"):
            _load(partitions, changed)
    _load(partitions, source)
    assert [_rows(each) for each in partitions] == source.placed(2)


def cut_off(partitions: Sequence[RecipePartition], source: Source) -> None:
    """Append the first units to the first partition only."""
    load = _loader(partitions, group_bytes=1 << 20)
    load.start()
    _go_through(load, source.read(None))
    load._logs[1].appender.send = _fails  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        load.flush()
    assert _rows(partitions[0])
    assert not _rows(partitions[1])


def _fails(*_: object) -> int:
    raise ArithmeticError


def _other_position(units: list[Unit]) -> None:
    units[-1] = (units[-1][0], b"elsewhere")
    units[:] = [(rows, b"x" + position) for rows, position in units]


def _fewer_rows(units: list[Unit]) -> None:
    units[:] = [([], position) for _, position in units]


def test_rows_of_other_writers_are_no_obstacle() -> None:
    partitions, source = [RecipePartition.quiet(), RecipePartition.quiet()], Source(random.Random(4))
    with _loader(partitions, group_bytes=1) as load:
        for rows, position in source.units[:20]:
            partitions[0].append_foreign(Record(b"other"))
            load.append(rows, position)
    for _ in range(300):
        partitions[1].append_foreign(Record(b"other", headers=((LOAD, b'{"load":"another","unit":7}'),)))
    _load(partitions, source)
    assert [_rows(each) for each in partitions] == source.placed(2)


def test_rows_stay_in_place_when_the_topic_is_expanded() -> None:
    """Those of the group that was cut off keep the old partition count; later ones get the new one."""
    partitions, source = [RecipePartition.quiet(), RecipePartition.quiet()], Source(random.Random(5))
    cut_off(partitions, Source(random.Random(5), units=10))
    source.units[:10] = Source(random.Random(5), units=10).units
    partitions += [RecipePartition.quiet(), RecipePartition.quiet()]
    _load(partitions, source)
    found = sorted(value for each in partitions for value in _rows(each))
    assert found == sorted(row.value or b"" for rows, _ in source.units for row in rows)
    assert _rows(partitions[3])


def test_deleted_position_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = [RecipePartition.quiet()]
    for _ in range(3):
        partitions[0].append_foreign(Record(b"other"))
    monkeypatch.setattr(FakeConsumer, "bounds", lambda self, topic, partition: (2, self.log.stable(partition)))
    with pytest.raises(LoadPositionLostError, match="pass new=True"):
        _load(partitions, Source(random.Random(6)))
    _load(partitions, Source(random.Random(6)), new=True)
    _load(partitions, Source(random.Random(6)))
    assert [_rows(each) for each in partitions] == Source(random.Random(6)).placed(1)


def test_missing_partition_is_reported_after_one_attempt(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeConsumer, "exists", lambda *_: False)
    with pytest.raises(PositionLostError, match="t-0: the partition does not exist"):
        _loader([RecipePartition.quiet()], 1.1).start()
    assert POLICY.attempt_seconds <= clock.seconds < POLICY.total_seconds


def test_group_is_appended_when_it_is_old_or_large(clock: SimpleNamespace) -> None:
    partitions = [RecipePartition.quiet()]
    with _loader(partitions, group_bytes=1000, linger_seconds=5) as load:
        load.append([Record(b"1.0")], b"1")
        assert (load.position, partitions[0].values) == (None, [])
        clock.seconds = 5.0
        load.append([Record(b"2.0")], b"2")
        assert (load.position, len(partitions[0].values)) == (b"2", 2)
        load.append([Record(b"3.0" * 300)], b"3")
        assert load.position == b"3"
        load.append([], b"4")
        load.flush()
        assert load.position == b"4"
    with contextlib.suppress(ZeroDivisionError), _loader([RecipePartition.quiet()]) as load:
        load.append([Record(b"1.0")], b"1")
        raise ZeroDivisionError
    assert load.position is None


def test_wrong_arguments_are_refused() -> None:
    partitions = [RecipePartition.quiet(), RecipePartition.quiet()]
    logs = [each.writer() for each in partitions]
    with pytest.raises(ValueError, match="one LogWriter for each partition"):
        Loader("x", logs)
    with _loader(partitions, partition_of=lambda record, unit, count: count) as load:
        with pytest.raises(ValueError, match=r"partition_of\(\) returned 2 \(topic t has 2 partitions\)"):
            load.append([Record(b"1.0")], b"1")
        load._ended = None
        load.append([], b"1")


def test_single_log_writer_may_be_of_any_partition() -> None:
    log = RecipePartition.quiet()
    writer = log.writer()
    writer.partition = 3
    with Loader("x", [writer]) as load:
        load.append([Record(b"1.0", b"key")], b"1")
    assert log.values == [b"1.0"]


def test_half_a_unit_is_not_appended() -> None:
    """The source fails between two rows, and the application goes on."""
    partitions = [RecipePartition.quiet()]

    def rows() -> Iterator[Record]:
        yield Record(b"1.0")
        raise ConnectionError

    load = _loader(partitions, group_bytes=1 << 20)
    load.start()
    with pytest.raises(ConnectionError):
        load.append(rows(), b"1")
    with pytest.raises(RuntimeError, match="has ended"):
        load.flush()
    assert partitions[0].values == []
