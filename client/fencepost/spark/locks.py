"""Append locks: on one machine, one task at a time appends to a partition, at the log end that the last one left.

A lock is a range of a file in the temporary directory. The kernel releases it when its process dies. The range has the
log end after the last known append and that append's commit tag, so the next task neither tries an older end nor reads
the log. Tasks of other machines have other files.

Locks avoid refused appends, and nothing depends on them: the expected offset decides which append is accepted. What a
file has is a hint (`appender.py`): its run may have ended, and the log may have become shorter since. A file is named
by sink and topic id, so another topic of the same name or another cluster has another file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fencepost.spark.interfaces import NO_APPEND, LastAppend, TopicPartition

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None  # type: ignore[assignment]

#: A longer commit tag is not stored.
_RANGE_BYTES: Final = 16_384
_HEAD: Final = struct.Struct(">IIq")  # CRC, size of the commit tag, log end
#: Files not written for so long are deleted.
_KEPT_SECONDS: Final = 3600.0


class AppendLocks:
    """The locks of one task. `topic_ids`: by name. `close` releases all of them."""

    def __init__(self, sink: str, topic_ids: Mapping[str, str]) -> None:
        self._sink, self._topic_ids = sink, topic_ids
        self._files: dict[str, int | None] = {}
        #: Responses arrive in another thread.
        self._guard = threading.Lock()

    def take(self, topic_partition: TopicPartition) -> tuple[bool, LastAppend]:
        (topic, partition), taken = topic_partition, True
        with self._guard:
            file = self._file(topic)
            if file is None:
                return True, NO_APPEND
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _RANGE_BYTES, partition * _RANGE_BYTES)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return True, NO_APPEND
                taken = False
            return taken, _decoded(os.pread(file, _RANGE_BYTES, partition * _RANGE_BYTES))

    def store(self, topic_partition: TopicPartition, last: LastAppend) -> None:
        topic, partition = topic_partition
        with self._guard, contextlib.suppress(OSError):
            if (file := self._files.get(topic)) is not None:
                os.pwrite(file, _encoded(last), partition * _RANGE_BYTES)

    def release(self, topic_partition: TopicPartition) -> None:
        topic, partition = topic_partition
        with self._guard, contextlib.suppress(OSError):
            if (file := self._files.get(topic)) is not None:
                fcntl.lockf(file, fcntl.LOCK_UN, _RANGE_BYTES, partition * _RANGE_BYTES)

    def close(self) -> None:
        with self._guard:
            files, self._files = self._files, {}
            for file in files.values():
                if file is not None:
                    os.close(file)

    def _file(self, topic: str) -> int | None:
        if topic not in self._files:
            self._files[topic] = None
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    name = f"{self._sink}\0{self._topic_ids[topic]}"
                    self._files[topic] = _opened(hashlib.sha256(name.encode()).hexdigest())
        return self._files[topic]


def _opened(name: str) -> int | None:
    directory = Path(tempfile.gettempdir(), f"fencepost-spark-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():
        return None  # another user could state a wrong commit tag
    for each in directory.iterdir():
        with contextlib.suppress(OSError):
            if each.stat().st_mtime < time.time() - _KEPT_SECONDS:
                each.unlink()
    return os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)


def _encoded(last: LastAppend) -> bytes:
    if _HEAD.size + len(last.commit_tag) > _RANGE_BYTES:
        return bytes(_HEAD.size)
    checked = _HEAD.pack(0, len(last.commit_tag), last.end)[4:] + last.commit_tag
    return struct.pack(">I", zlib.crc32(checked)) + checked


def _decoded(data: bytes) -> LastAppend:
    """NO_APPEND if nothing was written, or not all of it."""
    if len(data) < _HEAD.size:
        return NO_APPEND
    crc, size, end = _HEAD.unpack_from(data)
    if zlib.crc32(data[4 : _HEAD.size + size]) != crc or len(data) < _HEAD.size + size or not size:
        return NO_APPEND
    return LastAppend(end, data[_HEAD.size : _HEAD.size + size])
