"""The jar locks and the cache: nothing gets on a classpath but the bytes that a lock names."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from fencepost_dev import jars
from fencepost_dev.errors import JarError
from fencepost_dev.jars import Jar, fetch_jars, parse_lock, read_lock

A, B = "a" * 64, "b" * 64


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Maven repository on disk, and an empty cache."""
    monkeypatch.setenv("FENCEPOST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FENCEPOST_MAVEN_URL", (tmp_path / "repository").as_uri() + "/")
    return tmp_path / "repository"


def publish(repository: Path, content: bytes, artifact: str = "clients") -> Jar:
    jar = Jar("org.example", artifact, "1.0", "", hashlib.sha256(content).hexdigest())
    file = repository / jar.repository_path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return jar


def quiet(line: str) -> None:
    pass


def test_lock_lists_one_jar_per_line() -> None:
    text = f"# from something\n\norg.b:two:2.0-M1:linux-x86_64 {B}\norg.a:one_2.13:1.0.1 {A}\n"
    assert parse_lock(text, "x") == (
        Jar("org.b", "two", "2.0-M1", "linux-x86_64", B),
        Jar("org.a", "one_2.13", "1.0.1", "", A),
    )


def test_jars_that_are_not_cached_are_missing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (publish(repository, content, content.decode()) for content in (b"one", b"other"))
    monkeypatch.setattr(jars, "read_lock", lambda _: (one, other))
    assert jars.missing("lock") == 2
    fetch_jars((one,), "lock", quiet)
    assert jars.missing("lock") == 1


def test_jar_has_its_maven_repository_path() -> None:
    assert Jar("org.b", "two", "2.0", "linux", B).repository_path == "org/b/two/2.0/two-2.0-linux.jar"
    assert Jar("org.b", "two", "2.0", "", B).repository_path == "org/b/two/2.0/two-2.0.jar"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("org.a:one:1.0", "line 2"),
        (f"org.a:one {A}", "line 2"),
        (f"org.a:one:1.0 {A[:-1]}", "line 2"),
        (f"org.a:one:1.0 {A.upper()}", "line 2"),
        (f"org.a:one:1.0 md5:{A}", "line 2"),
        (f"../../etc:one:1.0 {A}", "line 2"),
        (f"org.z:first:2.0 {A}", "org.z:first is listed twice"),
    ],
)
def test_invalid_lock_line_is_named_in_error(line: str, reason: str) -> None:
    with pytest.raises(JarError, match=rf"x\.lock line 2: .*{reason.removeprefix('line 2')}"):
        parse_lock(f"org.z:first:1.0 {A}\n{line}\n", "x")


def test_an_empty_lock_is_an_error() -> None:
    with pytest.raises(JarError, match=r"x\.lock lists no jars"):
        parse_lock("# nothing\n", "x")


def test_every_releases_locks_match_the_release() -> None:
    for version, release in jars.RELEASES.items():
        broker = {jar.artifact: jar.version for jar in read_lock(release.broker_lock)}
        assert broker["kafka_2.13"] == broker["kafka-clients"] == version
        tools = {jar.artifact: jar.version for jar in read_lock(release.tools_lock)}
        assert f"kafka-tools-{tools['kafka-tools']}" == release.tools_lock
        assert "kafka-streams" in tools


def test_an_unknown_release_names_those_that_there_are() -> None:
    with pytest.raises(JarError, match=r"no lock file for Kafka 1\.0\.0; there is one for 4\.4\.0, "):
        jars.release("1.0.0")


def test_jar_is_fetched_once_then_cached(repository: Path) -> None:
    jar = publish(repository, b"content")
    (path,) = fetch_jars((jar,), "test", quiet)
    assert path.name == "clients-1.0.jar"
    assert path.read_bytes() == b"content"
    (repository / jar.repository_path).unlink()
    assert fetch_jars((jar,), "test", quiet) == (path,)


def test_jar_with_wrong_checksum_is_not_kept(repository: Path, tmp_path: Path) -> None:
    jar = publish(repository, b"content")
    (repository / jar.repository_path).write_bytes(b"tampered with")
    with pytest.raises(JarError, match=rf"org\.example:clients:1\.0 .* but the lock file says {jar.sha256}"):
        fetch_jars((jar,), "test", quiet)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_damaged_cached_jar_is_fetched_again(repository: Path) -> None:
    jar = publish(repository, b"content")
    (path,) = fetch_jars((jar,), "test", quiet)
    path.write_bytes(b"conten")
    stated: list[str] = []
    fetch_jars((jar,), "test", stated.append)
    assert path.read_bytes() == b"content"
    assert any("damaged" in line for line in stated)


def test_no_network_is_one_line_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    jar = publish(repository, b"content")
    monkeypatch.setenv("FENCEPOST_MAVEN_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(jars, "ATTEMPTS", 1)
    with pytest.raises(JarError, match=r"cannot fetch org\.example:clients:1\.0 .*FENCEPOST_MAVEN_URL") as raised:
        fetch_jars((jar,), "test", quiet)
    assert "\n" not in str(raised.value)


def test_concurrent_fetches_share_one_cache(repository: Path, tmp_path: Path) -> None:
    requested = tuple(publish(repository, f"content {n}".encode() * 100_000, f"artifact{n}") for n in range(5))
    results: list[tuple[Path, ...]] = []
    threads = [threading.Thread(target=lambda: results.append(fetch_jars(requested, "test", quiet))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 4
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(left) == sorted(results[0])
