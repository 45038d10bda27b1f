"""JVM class archive (JEP 350): brokers start with little more than half of the CPU time.

One JVM writes the loaded, parsed and verified classes of a broker to the archive; later JVMs map it into memory.
Without an archive, brokers only start slower.

`archive_writer` creates it in the cache directory. Its name contains a key of the jars and the Java, and its size: a
JVM crashes if it maps a truncated archive.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fencepost_dev.jars import cache_directory, classpath
from fencepost_dev.java import Jdk


def archive_of(jdk: Jdk, lock: str) -> Path | None:
    """The complete archive for the jars of `lock`, or None."""
    for found in directory().glob(f"{key(jdk, lock)}-*.jsa"):
        if found.stem.rpartition("-")[2] == str(found.stat().st_size):
            return found
    return None


def flags(archive: Path | None) -> list[str]:
    """JVM flags to use the archive, if there is one."""
    # A JVM that cannot use it starts without it; do not log that.
    return [] if archive is None else [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def directory() -> Path:
    return cache_directory() / "archives"


def key(jdk: Jdk, lock: str) -> str:
    known = f"{jdk.java}\n{jdk.java.stat().st_mtime_ns}\n{classpath(lock)}\n"
    return f"{lock}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
