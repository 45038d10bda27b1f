"""The table, over a partition in memory with every fault of a real one, and its snapshot file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fencepost import (
    ConcurrentUseError,
    ForeignRecordError,
    InDoubtError,
    OffsetMismatchError,
    PositionLostError,
    Record,
    VersionMismatchError,
)
from fencepost.recipes import ABSENT, Table, TableEntry
from tests.support.faulty_log import FakeConsumer, clock
from tests.support.linearizable import Call, violations
from tests.support.recipe_log import RecipePartition, partition

__all__ = ["clock", "partition"]  # fixtures


def test_put_get_delete_and_versions(partition: RecipePartition) -> None:
    a, b = Table(partition.writer()), Table(partition.writer())
    assert a.get("x") is None
    assert a.put("x", b"1") == 0
    assert b.get("x") == TableEntry(b"1", 0)
    assert b.put("x", b"2", version=0) == 1
    with pytest.raises(VersionMismatchError, match=r"key 'x' has version 1, expected 0 \(get it") as refused:
        a.put("x", b"3", version=0)
    assert (refused.value.expected, refused.value.actual, refused.value.retriable) == (0, 1, True)
    with pytest.raises(VersionMismatchError, match="has version 1, expected -1"):
        a.put("x", b"3", version=ABSENT)
    assert a.delete("x", version=1) == 2
    assert b.get("x") is None
    with pytest.raises(VersionMismatchError, match="has version -1, expected 1"):
        b.delete("x", version=1)
    assert b.put("x", b"", version=ABSENT) == 3
    assert a.get("x") == TableEntry(b"", 3)
    deletion = partition.records[2]
    assert deletion is not None
    assert (deletion.key, deletion.value, deletion.headers[0]) == (b"x", b"", ("fencepost-recipe", b"table/1 delete"))


def test_watch_gets_each_change_in_order(partition: RecipePartition) -> None:
    changes: list[tuple[str, TableEntry | None]] = []
    a, b = Table(partition.writer(), watch=lambda *change: changes.append(change)), Table(partition.writer())
    b.put("x", b"1")
    a.put("y", b"2")
    b.delete("x")
    a.read_to_end()
    assert changes == [("x", TableEntry(b"1", 0)), ("y", TableEntry(b"2", 1)), ("x", None)]


def test_call_within_a_call_is_refused() -> None:
    """Otherwise a call of another thread could append between the decision and the append of the first one."""
    errors: list[str] = []

    def watch(key: str, entry: TableEntry | None) -> None:
        for call in (lambda: table.get(key), lambda: table.put(key, b"2")):
            with pytest.raises(ConcurrentUseError) as refused:
                call()
            errors.append(str(refused.value))

    partition = RecipePartition.quiet()
    table = Table(partition.writer(), watch=watch)
    assert table.put("x", b"1") == 0
    assert [error.partition(":")[0] for error in errors] == ["Table of t-0"] * 2
    assert partition.values == [b"1"]
    assert table.get("x") == TableEntry(b"1", 0)


def test_history_is_linearizable_under_faults() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        partition = RecipePartition(rng)
        # Kafka acknowledges what consumers see; this stand-in may show it later.
        partition.stable = lambda _, partition=partition: len(partition.log)  # type: ignore[method-assign,misc]
        problem = rng.choice([0.0, 0.2, 0.5])
        tables = [Table(partition.writer(problem)) for _ in range(3)]
        history: list[Call] = []
        for number in range(60):
            at, key = rng.randrange(3), f"{rng.randrange(2)}"
            known = tables[at].entries.get(key)
            expected = rng.choice([None, ABSENT if known is None else known.version])
            call = Call(key, number, expected=expected, value=b"%d" % number)
            try:
                if rng.random() < 0.5:
                    call.got(tables[at].get(key), number + 0.5)
                elif rng.random() < 0.3:
                    call.value = None
                    call.put(tables[at].delete(key, expected), number + 0.5)
                else:
                    call.put(tables[at].put(key, call.value or b"", expected), number + 0.5)
            except VersionMismatchError as error:
                call.observe(error.actual, None, number + 0.5)
            except PositionLostError:  # the high watermark of this stand-in may go back; Kafka's does not
                tables[at] = Table(partition.writer(problem))
                continue
            except InDoubtError:
                pass
            except (OffsetMismatchError, ConnectionError):
                continue
            history.append(call)
        assert violations(history) == [], f"seed {seed}"


def test_stale_put_is_refused(partition: RecipePartition) -> None:
    """Another process puts between the decision and the append."""
    a, b = Table(partition.writer()), Table(partition.writer())
    a.put("x", b"1")
    b.get("x")
    a.put("x", b"2")
    with pytest.raises(VersionMismatchError):
        b.put("x", b"3", version=0)
    assert b.entries["x"] == TableEntry(b"2", 1)


def test_get_shows_what_others_put(partition: RecipePartition) -> None:
    a, b = Table(partition.writer()), Table(partition.writer())
    b.get("x")
    a.put("x", b"1")
    assert b.get("x") == TableEntry(b"1", 0)


def _filled(partition: RecipePartition, path: Path) -> Table:
    table = Table(partition.writer())
    table.put("x", b"1")
    table.put("y", b"2")
    table.save(path)
    return table


def test_snapshot_continues_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition, path = RecipePartition.quiet(), tmp_path / "table"
    table = _filled(partition, path)
    table.delete("x")
    sought: list[int] = []
    seek = FakeConsumer.seek

    def noted(self: FakeConsumer, topic: str, number: int, offset: int) -> None:
        sought.append(offset)
        seek(self, topic, number, offset)

    monkeypatch.setattr(FakeConsumer, "seek", noted)
    restored = Table(partition.writer(), snapshot=path)
    assert restored.get("y") == TableEntry(b"2", 1)
    assert dict(restored.entries) == dict(table.entries)
    assert sought == [1]
    assert restored.snapshot_ignored is None
    restored.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["table"]


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (["z"], "the log has no record at its offset"),
        ([], "its offset is outside the log"),
        (["z", "z", "z"], "the log has another record at its offset"),
        (["z", None, "z"], "the log has another record at its offset"),
    ],
)
def test_snapshot_of_another_log_is_not_used(log: list[str | None], why: str, tmp_path: Path) -> None:
    _filled(RecipePartition.quiet(), tmp_path / "table")
    partition = RecipePartition.quiet()
    for key in log:
        if key is None:
            partition.others_append()
        else:
            Table(partition.writer()).put(key, b"new")
    restored = Table(partition.writer(), snapshot=tmp_path / "table")
    assert restored.get("x") is None
    assert restored.entries.keys() == {key for key in log if key is not None}
    assert restored.snapshot_ignored == f"the snapshot is not of this log: {why}"


@pytest.mark.parametrize("damage", ["cut", "changed", "other topic", "empty", "no dict"])
def test_damaged_snapshot_is_not_used(damage: str, tmp_path: Path) -> None:
    partition, path = RecipePartition.quiet(), tmp_path / "table"
    _filled(partition, path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-20],
            "changed": whole.replace(b"MQ==", b"Mg=="),
            "other topic": whole.replace(b'"topic": "t"', b'"topic": "u"'),
            "empty": b"",
            "no dict": b"[]\n",
        }[damage]
    )
    restored = Table(partition.writer(), snapshot=path)
    assert restored.get("x") == TableEntry(b"1", 0)
    assert restored.snapshot_ignored is not None


def test_table_is_bounded_and_its_log_complete(monkeypatch: pytest.MonkeyPatch, partition: RecipePartition) -> None:
    table = Table(partition.writer(), entries_max=1)
    table.put("x", b"1")
    table.put("x", b"2")
    with pytest.raises(ValueError, match="'y' is not put: the table has 1 entries"):
        table.put("y", b"1")
    monkeypatch.setattr(FakeConsumer, "bounds", lambda *_: (1, 2))
    with pytest.raises(PositionLostError):
        Table(partition.writer()).get("x")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Record(b"x", b"y"), "it is neither `table/1 put` nor `table/1 delete`"),
        (Record(b"x", b"\xff", (("fencepost-recipe", b"table/1 put"),)), "its key is not UTF-8"),
    ],
)
def test_record_without_the_format_stops_reading(record: Record, why: str, partition: RecipePartition) -> None:
    partition.append_foreign(record)
    with pytest.raises(ForeignRecordError, match=why):
        Table(partition.writer()).get("y")
