"""The archive from which brokers start faster: used where it is the right one and whole, else done without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fencepost_dev import archive_writer, class_archive
from fencepost_dev.java import Jdk

LOCK = "kafka-9.9.9"


@pytest.fixture
def jdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jdk:
    monkeypatch.setenv("FENCEPOST_CACHE", str(tmp_path))
    monkeypatch.setattr(class_archive, "classpath", lambda lock: f"/jars/{lock}.jar")
    java = tmp_path / "java"
    java.touch()
    return Jdk(java, 17)


def _put(tmp_path: Path, jdk: Jdk, content: bytes) -> Path:
    archive = tmp_path / "archives" / f"{class_archive.key(jdk, LOCK)}-7.jsa"
    archive.parent.mkdir(exist_ok=True)
    archive.write_bytes(content)
    return archive


def test_missing_archive_adds_no_flags(jdk: Jdk) -> None:
    assert class_archive.flags(class_archive.archive_of(jdk, LOCK)) == []


def test_existing_archive_is_used(jdk: Jdk, tmp_path: Path) -> None:
    archive = _put(tmp_path, jdk, b"classes")
    assert class_archive.archive_of(jdk, LOCK) == archive
    assert f"-XX:SharedArchiveFile={archive}" in class_archive.flags(archive)


def test_truncated_archive_is_ignored(jdk: Jdk, tmp_path: Path) -> None:
    """A JVM would die of it."""
    _put(tmp_path, jdk, b"class")
    assert class_archive.archive_of(jdk, LOCK) is None


def test_archive_of_other_jars_or_java_is_ignored(jdk: Jdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(tmp_path, jdk, b"classes")
    assert class_archive.archive_of(jdk, "kafka-9.9.8") is None
    os.utime(jdk.java, ns=(1, 1))  # replaced in place, as by an update
    assert class_archive.archive_of(jdk, LOCK) is None


def test_failed_archive_creation_is_only_reported(
    jdk: Jdk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(archive_writer, "make", fails)
    archive_writer.main()
    assert "no class archive created: no space left on device" in capsys.readouterr().err
