"""JVM class archive (JEP 350): brokers start with little more than half of the CPU time.

One JVM writes the loaded, parsed and verified classes of a broker to the archive; later JVMs map it into memory.
Without an archive, brokers only start slower.

`python -m fencepost_dev.class_archive` (`make jars`) creates the archive in the cache directory and removes older
ones. Its name contains a key of the jars and the Java, and its size: a JVM crashes if it maps a truncated archive.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from fencepost_dev.errors import DevError
from fencepost_dev.jars import DEFAULT_VERSION, Progress, cache_directory, classpath, release, say
from fencepost_dev.java import Jdk, find_jdk

_WRITE_SECONDS = 120
_VERIFY_SECONDS = 60


def archive_of(jdk: Jdk, lock: str) -> Path | None:
    """The complete archive for the jars of `lock`, or None."""
    for found in _directory().glob(f"{_key(jdk, lock)}-*.jsa"):
        if found.stem.rpartition("-")[2] == str(found.stat().st_size):
            return found
    return None


def flags(archive: Path | None) -> list[str]:
    """JVM flags to use the archive, if there is one."""
    # A JVM that cannot use it starts without it; do not log that.
    return [] if archive is None else [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def make(progress: Progress = say) -> None:
    """Creates the archive of the default release if it is missing. Safe in several processes at once."""
    from fencepost_dev.cluster import KafkaCluster  # noqa: PLC0415 - it imports this module

    jdk, lock = find_jdk(), release(DEFAULT_VERSION).broker_lock
    if archive_of(jdk, lock) is not None:
        return
    progress("creating a class archive, so that Kafka starts faster")
    _directory().mkdir(parents=True, exist_ok=True)
    part = _directory() / f".part-{os.getpid()}"
    try:
        with KafkaCluster(archive_to=part, progress=lambda _: None) as cluster:
            for node_id in cluster.node_ids:
                # The JVM writes the archive at a clean exit.
                cluster.shut_down(node_id, timeout_seconds=_WRITE_SECONDS)
        _verify(jdk, lock, part)
        archive = _directory() / f"{_key(jdk, lock)}-{part.stat().st_size}.jsa"
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    for other in _directory().glob(f"{lock}-*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)


def _verify(jdk: Jdk, lock: str, archive: Path) -> None:
    """Raises `OSError` if a JVM cannot use the archive."""
    use = ["-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}", "-cp", classpath(lock)]
    done = subprocess.run(
        [str(jdk.java), *use, "-version"], capture_output=True, text=True, timeout=_VERIFY_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"the JVM rejects it: {(done.stdout + done.stderr).strip()[:500]}")


def _directory() -> Path:
    return cache_directory() / "archives"


def _key(jdk: Jdk, lock: str) -> str:
    known = f"{jdk.java}\n{jdk.java.stat().st_mtime_ns}\n{classpath(lock)}\n"
    return f"{lock}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"


def main() -> None:
    try:
        make()
    except (DevError, OSError, subprocess.TimeoutExpired) as error:
        # Not an error: brokers only start slower.
        print(f"fencepost: no class archive created: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
