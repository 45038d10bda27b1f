"""Append locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.spark.interfaces import NO_APPEND, LastAppend
from fencepost.spark.locks import AppendLocks

AT = ("t", 3)
LAST = LastAppend(17, b"tag")
IDS = {"t": "id of t", "u": "id of u"}
_OTHER = """
import sys
from fencepost.spark.interfaces import LastAppend
from fencepost.spark.locks import AppendLocks
locks = AppendLocks("s", {"t": "id of t"})
print(*locks.take(("t", 3)), flush=True)
sys.stdin.readline()
locks.store(("t", 3), LastAppend(20, b"later"))
locks.release(("t", 3))
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"fencepost-spark-{os.getuid()}"


@pytest.fixture
def locks() -> Iterator[AppendLocks]:
    locks = AppendLocks("s", IDS)
    yield locks
    locks.close()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another task, which has taken the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("True")
        yield process
        process.kill()


def test_lock_is_free_after_release_with_the_last_append(locks: AppendLocks, other: subprocess.Popen[str]) -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    assert locks.take(AT) == (False, NO_APPEND)
    assert locks.take(("t", 2)) == (True, NO_APPEND)
    assert locks.take(("u", 3)) == (True, NO_APPEND)
    print(file=other.stdin, flush=True)
    assert other.stdout.readline() == "released\n"
    assert locks.take(AT) == (True, LastAppend(20, b"later"))


def test_lock_of_a_killed_process_is_free(locks: AppendLocks, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    assert locks.take(AT)[0]


def test_closed_locks_are_free_and_silent(locks: AppendLocks) -> None:
    first = AppendLocks("s", IDS)
    first.take(AT)
    first.close()
    first.store(AT, LAST)
    first.release(AT)
    assert locks.take(AT) == (True, NO_APPEND)


def test_last_append_of_another_topic_of_this_name_is_ignored(locks: AppendLocks) -> None:
    locks.take(AT)
    locks.store(AT, LAST)
    recreated = AppendLocks("s", {"t": "another id"})
    assert recreated.take(AT) == (True, NO_APPEND)
    recreated.close()


@pytest.mark.parametrize("size", [1, 8, 16, 18])
def test_half_written_append_is_ignored(locks: AppendLocks, directory: Path, size: int) -> None:
    locks.take(AT)
    locks.store(AT, LAST)
    assert locks.take(AT) == (True, LAST)
    (file,) = directory.iterdir()
    written = file.read_bytes()
    file.write_bytes(written[: -19 + size] + bytes(19 - size))
    assert locks.take(AT) == (True, NO_APPEND)


def test_too_long_commit_tag_is_not_kept(locks: AppendLocks) -> None:
    locks.take(AT)
    locks.store(AT, LastAppend(17, bytes(20_000)))
    assert locks.take(AT) == (True, NO_APPEND)


def test_old_files_are_deleted(locks: AppendLocks, directory: Path) -> None:
    locks.take(AT)
    locks.store(AT, LAST)
    (old,) = directory.iterdir()
    os.utime(old, (time.time() - 7200,) * 2)
    AppendLocks("another", IDS).take(AT)
    assert old not in directory.iterdir()


@pytest.mark.parametrize("mode", ["file", "stranger"])
def test_without_an_own_directory_there_are_no_locks(
    locks: AppendLocks, directory: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "file":
        directory.write_text("")
    else:
        directory.mkdir()
        another = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: another)
        directory.rename(directory.with_name(f"fencepost-spark-{os.getuid()}"))
    assert locks.take(AT) == (True, NO_APPEND)
    locks.store(AT, LAST)
    assert locks.take(AT) == (True, NO_APPEND)
