"""Bytes that a socket has not taken yet: copies of written chunks, and pipes of spliced bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections import deque
from typing import Final, Protocol

#: Capacity of a pipe, and so the maximum of one splice.
PIPE_BYTES: Final = 1024 * 1024
#: Pipes kept for reuse. An account that is not root may have 64 MiB of pipe buffers in total.
_PIPES_KEPT: Final = 8
_CAN_SPLICE: Final = sys.platform == "linux" and hasattr(os, "splice")


class Pipe:
    """Bytes on their way from one socket to another through the kernel. It contains `filled_bytes`.

    It belongs to one connection until it is empty: another client would get bytes that are left in it.
    """

    __slots__ = ("filled_bytes", "read_fd", "write_fd")

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.filled_bytes = 0
        with contextlib.suppress(OSError):  # the account's pipe quota is used up: a smaller pipe works too
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


class Pipes:
    """Empty pipes, kept for reuse."""

    def __init__(self) -> None:
        self._kept: list[Pipe] = []

    def take(self) -> Pipe | None:
        """None if the platform has no splice, or no file descriptor is left."""
        if self._kept:
            return self._kept.pop()
        try:
            return Pipe() if _CAN_SPLICE else None
        except OSError:
            return None

    def give_back(self, pipe: Pipe) -> None:
        if pipe.filled_bytes or len(self._kept) >= _PIPES_KEPT:
            pipe.close()
        else:
            self._kept.append(pipe)

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()


class _Sends(Protocol):
    def send(self, chunk: memoryview, /) -> int: ...


class Unsent:
    """In their order. `byte_count`: in all."""

    __slots__ = ("_pipes", "_queue", "byte_count")

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes
        self._queue: deque[memoryview | Pipe] = deque()
        self.byte_count = 0

    def append(self, what: bytes | Pipe) -> None:
        if isinstance(what, Pipe):
            self._queue.append(what)
            self.byte_count += what.filled_bytes
        elif what:
            self._queue.append(memoryview(what))
            self.byte_count += len(what)

    def send(self, sock: _Sends, fd: int) -> None:
        """Sends all of it. Raises OSError, BlockingIOError if the socket takes no more now."""
        queue = self._queue
        while queue:
            first = queue[0]
            if isinstance(first, Pipe):
                sent = os.splice(first.read_fd, fd, first.filled_bytes, flags=os.SPLICE_F_NONBLOCK)
                first.filled_bytes -= sent
                if not first.filled_bytes:
                    self._pipes.give_back(first)
                    queue.popleft()
            else:
                sent = sock.send(first)
                if sent == len(first):
                    queue.popleft()
                else:
                    queue[0] = first[sent:]
            self.byte_count -= sent

    def close(self) -> None:
        """What it has is lost."""
        while self._queue:
            first = self._queue.popleft()
            if isinstance(first, Pipe):
                first.close()
        self.byte_count = 0
