"""Creates the class archive of the default release, and removes older ones.

`python -m fencepost_dev.archive_writer` (`make jars`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fencepost_dev.class_archive import archive_of, directory, key
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.errors import DevError
from fencepost_dev.jars import DEFAULT_VERSION, Progress, classpath, release, say
from fencepost_dev.java import Jdk, find_jdk

_WRITE_SECONDS = 120
_VERIFY_SECONDS = 60


def make(progress: Progress = say) -> None:
    """Creates the archive of the default release if it is missing. Safe in several processes at once."""
    jdk, lock = find_jdk(), release(DEFAULT_VERSION).broker_lock
    if archive_of(jdk, lock) is not None:
        return
    progress("creating a class archive, so that Kafka starts faster")
    directory().mkdir(parents=True, exist_ok=True)
    part = directory() / f".part-{os.getpid()}"
    try:
        with KafkaCluster(archive_to=part, progress=lambda _: None) as cluster:
            for node_id in cluster.node_ids:
                # The JVM writes the archive at a clean exit.
                cluster.shut_down(node_id, timeout_seconds=_WRITE_SECONDS)
        _verify(jdk, lock, part)
        archive = directory() / f"{key(jdk, lock)}-{part.stat().st_size}.jsa"
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    for other in directory().glob(f"{lock}-*.jsa"):
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


def main() -> None:
    try:
        make()
    except (DevError, OSError, subprocess.TimeoutExpired) as error:
        # Not an error: brokers only start slower.
        print(f"fencepost: no class archive created: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
