"""Brokers that start in little more than half of the CPU time: with a class archive of the JVM's (JEP 350).

What a JVM has to load, parse and verify for a broker, one writes down once; all later ones map it into memory. Without
an archive everything is as it is with one, and slower.

`python -m fencepost_proxy.dev.class_archive` makes one (`make jars`) and removes older ones. It lies in the cache
beside the jars. Its name says what it is good for, a release's jars and one Java, and how long it is: a JVM that maps
one that is cut short dies.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from fencepost_proxy.dev.errors import DevError
from fencepost_proxy.dev.jars import DEFAULT_VERSION, Progress, cache_directory, classpath, release, say
from fencepost_proxy.dev.java import Jdk, find_jdk

_WRITE_SECONDS = 120
_VERIFY_SECONDS = 60


def archive_of(jdk: Jdk, lock: str) -> Path | None:
    """The one for the jars of `lock`, if there is one and all of it."""
    for found in _directory().glob(f"{_key(jdk, lock)}-*.jsa"):
        if found.stem.rpartition("-")[2] == str(found.stat().st_size):
            return found
    return None


def flags(archive: Path | None) -> list[str]:
    """Of a JVM that uses it, where there is one."""
    # A JVM that cannot use it after all goes on without; that is not worth a line in a broker's log.
    return [] if archive is None else [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def make(progress: Progress = say) -> None:
    """For the default release, unless it is there. Several processes may do it at once."""
    from fencepost_proxy.dev.cluster import KafkaCluster  # noqa: PLC0415 - which uses the archive

    jdk, lock = find_jdk(), release(DEFAULT_VERSION).broker_lock
    if archive_of(jdk, lock) is not None:
        return
    progress("making a class archive, from which Kafka starts faster")
    _directory().mkdir(parents=True, exist_ok=True)
    part = _directory() / f".part-{os.getpid()}"
    try:
        with KafkaCluster(archive_to=part, progress=lambda _: None) as cluster:
            for node_id in cluster.node_ids:
                # The JVM writes it when it ends in peace.
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
    """Whether a JVM can use all of it. Raises OSError."""
    use = ["-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}", "-cp", classpath(lock)]
    done = subprocess.run(
        [str(jdk.java), *use, "-version"], capture_output=True, text=True, timeout=_VERIFY_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"the JVM does not take it: {(done.stdout + done.stderr).strip()[:500]}")


def _directory() -> Path:
    return cache_directory() / "archives"


def _key(jdk: Jdk, lock: str) -> str:
    known = f"{jdk.java}\n{jdk.java.stat().st_mtime_ns}\n{classpath(lock)}\n"
    return f"{lock}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"


def main() -> None:
    try:
        make()
    except (DevError, OSError, subprocess.TimeoutExpired) as error:
        # Only slower without.
        print(f"fencepost: there is no class archive: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
