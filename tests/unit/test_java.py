"""Which Java is used, and the message if none is suitable."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost_dev.errors import JavaError
from fencepost_dev.java import find_jdk


def java_in(directory: Path, printed: str) -> Path:
    """A `java` that prints a version as the real ones do: to standard error."""
    directory.mkdir(parents=True)
    java = directory / "java"
    java.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    java.chmod(0o755)
    return java


def test_java_home_takes_precedence_over_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_in(tmp_path / "path", 'openjdk version "17.0.1" 2021-10-19')
    chosen = java_in(tmp_path / "home" / "bin", 'openjdk version "21" 2023-09-19')
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    jdk = find_jdk()
    assert (jdk.java, jdk.version) == (chosen, 21)

    monkeypatch.delenv("JAVA_HOME")
    assert find_jdk().version == 17


def test_no_java_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match=r"^no Java found; install a JDK 17 or newer, .*JAVA_HOME$"):
        find_jdk()


def test_java_home_without_java_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaError, match=rf"JAVA_HOME={tmp_path} contains no bin/java"):
        find_jdk()


@pytest.mark.parametrize(
    ("printed", "version"), [('openjdk version "11.0.2" 2019-01-15', 11), ('java version "1.8.0_202"', 8)]
)
def test_a_java_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, version: int) -> None:
    java = java_in(tmp_path / "home" / "bin", printed)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with pytest.raises(JavaError, match=rf"{java} is Java {version}, too old; install a JDK 17"):
        find_jdk()


def test_a_java_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_in(tmp_path / "home" / "bin", 'openjdk version "17.0.9"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with pytest.raises(JavaError, match="without the compiler javac"):
        _ = find_jdk().javac
