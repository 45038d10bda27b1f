"""One nonblocking socket of a proxied connection: read when readable, written at once, spliced if possible.

It replaces asyncio's transports to avoid queueing and copying relayed bytes. The callback that reads bytes writes them
to the other socket, directly from the receive buffer; only bytes that the kernel does not take are kept. If the session
knows that the next bytes of a frame are relayed, `splice` moves them from socket to pipe to socket in the kernel.

Backpressure: bytes that the peer's socket does not take are kept here. Above `UNSENT_BYTES_MAX` the other socket is not
read. A session may pause a socket too; reading resumes when no reason to pause is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from fencepost_proxy.transport.tls import TlsBuffers, TlsSocket, waiting_bytes
from fencepost_proxy.transport.unsent import PIPE_BYTES, Pipe, Pipes, Unsent

if TYPE_CHECKING:
    from fencepost_native import Tls

#: Shared by all connections of the process: data is handled before the next read.
RECEIVE_BUFFER_BYTES: Final = 256 * 1024
#: Small requests may be expensive: if handling one read took longer, the socket's next read is smaller.
_READ_SECONDS_MAX: Final = 0.002
_READ_BYTES_MIN: Final = 1024
#: Bytes kept for a peer that does not read; above this, the other socket is not read. One read may exceed it.
UNSENT_BYTES_MAX: Final = 64 * 1024
#: Maximum buffers of one `sendmsg` (IOV_MAX of Linux and macOS).
_CHUNKS_MAX: Final = 1024
#: How long received bytes of a relayed frame may stay unread while more are expected.
_TRICKLE_SECONDS: Final = 1.0
#: Minimum remaining bytes of a relayed frame for `splice`.
SPLICE_BYTES_MIN: Final = 64 * 1024
#: BBR paces sends by a timer at its estimate of the path's rate. Reno does not pace, and needs no privilege.
_PACING: Final = b"bbr"
_NOT_PACING: Final = b"reno"
_TCP_CONGESTION: Final[int | None] = getattr(socket, "TCP_CONGESTION", None)
_AGAIN: Final = (BlockingIOError, InterruptedError)


class Socket(Protocol):
    """The interface that `ProxiedSocket` uses, of a kernel socket or a `TlsSocket`."""

    @property
    def family(self) -> int: ...
    def fileno(self) -> int: ...
    def setblocking(self, flag: bool, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...
    def getsockname(self) -> tuple[str, int]: ...
    def getpeername(self) -> tuple[str, int]: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def recv(self, byte_count: int, flags: int, /) -> bytes: ...
    def send(self, chunk: bytes | memoryview, /) -> int: ...
    def sendmsg(self, chunks: list[bytes | memoryview], /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Paused:
    """Reasons not to read a socket, as bits, since several may apply."""

    #: The other socket's unsent bytes exceed the limit.
    FULL: Final = 1
    #: Requested by the session.
    SESSION: Final = 2
    #: The upstream connection is not open yet.
    CONNECTING: Final = 4
    #: The client does not read its responses: those made by the proxy would accumulate.
    UNREAD: Final = 16


class Buffers:
    """Buffers that all sockets of a process share; no data in them outlives a callback."""

    def __init__(self) -> None:
        self.received = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self.pipes = Pipes()
        self._tls: TlsBuffers | None = None

    @property
    def tls(self) -> TlsBuffers:
        """Created for the first TLS connection."""
        if self._tls is None:
            self._tls = TlsBuffers()
        return self._tls


def _send_unpaced_within_this_host(sock: Socket) -> None:
    """Turns off BBR pacing on loopback, which loses no packets and has no rate to estimate.

    On a virtual machine, BBR's timers took two fifths of the CPU time of relaying a response. Connections that leave
    the host keep the congestion control that its administrator configured.
    """
    option = _TCP_CONGESTION
    if option is None:
        return
    with contextlib.suppress(OSError):  # a closed connection shows in the first read
        if sock.getsockname()[0] != sock.getpeername()[0]:
            return
        if sock.getsockopt(socket.IPPROTO_TCP, option, 16).startswith(_PACING):
            sock.setsockopt(socket.IPPROTO_TCP, option, _NOT_PACING)


def native_tls(proxied: ProxiedSocket) -> Tls | None:
    """What encrypts in native code, once the handshake is complete."""
    sock = proxied._sock
    return sock.native if isinstance(sock, TlsSocket) else None


def encrypts_in_python(proxied: ProxiedSocket) -> bool:
    return proxied.secured and native_tls(proxied) is None


def error_of(proxied: ProxiedSocket, number: int) -> OSError:
    """`number`: from native code."""
    sock = proxied._sock
    failure = sock.failure() if isinstance(sock, TlsSocket) else None
    return failure or OSError(number, os.strerror(number))


class ProxiedSocket:
    """A subclass handles received bytes, spliced bytes and the end: `_received`, `_passed`, `_lost`.

    `passing_bytes` – how many of the next bytes are relayed to the other socket; the subclass keeps it current.
    `reader` – called instead of `_readable`, unless it is None. It is set before the first read.
    """

    __slots__ = (
        "_buffers",
        "_fd",
        "_hangs_up",
        "_loop",
        "_reading",
        "_sock",
        "closing",
        "closing_since",
        "ended",
        "other",
        "passing_bytes",
        "paused",
        "read_bytes_max",
        "reader",
        "received_at",
        "secured",
        "unsent",
    )

    def __init__(self, sock: Socket, buffers: Buffers, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _send_unpaced_within_this_host(sock)
        self._sock = sock
        self.secured = isinstance(sock, TlsSocket)  # or will be
        self._fd = sock.fileno()
        self._loop = loop
        self._buffers = buffers
        self.unsent: Unsent | None = None  # None while empty, to save memory
        self._reading = False
        self.closing = False  # by this end, or ended
        self.ended = False
        self._hangs_up = False
        self.other: ProxiedSocket | None = None
        self.paused = 0
        self.passing_bytes = 0
        self.received_at = 0.0
        self.read_bytes_max = 0  # no limit
        self.reader: Callable[[], None] | None = None
        self.closing_since: float | None = None

    # ---- for the subclass

    def _received(self, data: memoryview) -> None:
        """`data` is valid during the call only."""
        raise NotImplementedError

    def _passed(self, byte_count: int) -> None:
        """`byte_count` of `passing_bytes` were spliced to the other socket."""
        raise NotImplementedError

    def _lost(self, error: OSError | None) -> None:
        """Called once, never from within another call of this class. `error` is None for an orderly end."""
        raise NotImplementedError

    def _changed(self) -> None:
        """It has unsent bytes, or closes."""

    # ---- reading

    def wake_at(self, byte_count: int) -> None:
        """The event loop calls for so many unread bytes, or the end of the connection; 1 is the default."""
        sock = self._sock
        if isinstance(sock, TlsSocket):
            sock.wake_at(byte_count)
        else:
            with contextlib.suppress(OSError):  # a closed connection shows in the next read
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, byte_count)

    def pause(self, reason: int) -> None:
        self.paused |= reason
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self, reason: int = 0) -> None:
        """Starts reading, unless another reason not to is left."""
        self.paused &= ~reason
        if not self.paused and not self._reading and not self.closing:
            self._reading = True
            self._loop.add_reader(self._fd, self.reader or self._readable)

    def _readable(self) -> None:
        if self.passing_bytes >= SPLICE_BYTES_MIN and self._splice():
            return
        received, limit = self._buffers.received, self.read_bytes_max
        try:
            count = self._sock.recv_into(received[:limit] if limit else received)
        except _AGAIN:
            return
        except OSError as error:
            self.abort(error)
            return
        if not count:
            self.close(monotonic())  # Kafka peers do not half-close
            return
        self._received(received[:count])
        seconds = monotonic() - self.received_at
        if limit or seconds > _READ_SECONDS_MAX:
            self.read_bytes_max = next_limit(limit, count, seconds, secured=self.secured)

    def _relay_next(self, byte_count: int) -> None:
        """The next `byte_count` bytes are relayed to the other socket."""
        self.passing_bytes = byte_count
        sock = self._sock
        if isinstance(sock, TlsSocket):
            sock.expect(byte_count)

    def take_trickle(self, now: float) -> None:
        """Reads waiting bytes of a relayed frame, however few: time limits depend on the time of the last read."""
        sock = self._sock
        if isinstance(sock, TlsSocket) and now - self.received_at > _TRICKLE_SECONDS:
            sock.expect(0)

    def _splice(self) -> bool:
        """False: not possible now, read instead."""
        other = self.other
        if other is None or other.closing or other.unsent is not None or self.secured or other.secured:
            return False
        pipes = self._buffers.pipes
        pipe = pipes.take()
        if pipe is None:
            return False
        try:
            count = os.splice(self._fd, pipe.write_fd, min(self.passing_bytes, PIPE_BYTES), flags=os.SPLICE_F_NONBLOCK)
        except _AGAIN:
            pipes.give_back(pipe)
            return True
        except OSError as error:
            pipes.give_back(pipe)
            if error.errno == errno.EINVAL:
                return False  # the socket does not support splice
            self.abort(error)
            return True
        if not count:
            pipes.give_back(pipe)
            self.close(monotonic())
            return True
        pipe.filled_bytes = count
        self.passing_bytes -= count
        other._send_piped(pipe)
        self._passed(count)
        return True

    def unread_bytes(self) -> int:
        """Bytes in the socket's receive buffer."""
        if self.ended:
            return 0
        sock = self._sock
        return sock.unread_bytes() if isinstance(sock, TlsSocket) else waiting_bytes(self._fd)

    # ---- writing

    def write(self, chunks: list[bytes | memoryview]) -> None:
        """The chunks need to be valid during the call only."""
        if len(chunks) == 1 or len(chunks) > _CHUNKS_MAX:
            self.send(chunks[0] if len(chunks) == 1 else b"".join(chunks))
            return
        if self.closing:
            return
        if self.unsent is not None:
            for chunk in chunks:
                self.keep(bytes(chunk))
            return
        try:
            sent = self._sock.sendmsg(chunks)
        except _AGAIN:
            sent = 0
        except OSError as error:
            self.abort(error)
            return
        for chunk in chunks:
            size = len(chunk)
            if sent < size:
                self.keep(bytes(memoryview(chunk)[sent:]))
                sent = 0
            else:
                sent -= size

    def send(self, chunk: bytes | memoryview) -> None:
        """`write` for one chunk."""
        if self.closing:
            return
        if self.unsent is not None:
            self.keep(bytes(chunk))
            return
        try:
            sent = self._sock.send(chunk)
        except _AGAIN:
            sent = 0
        except OSError as error:
            self.abort(error)
            return
        if sent < len(chunk):
            self.keep(bytes(memoryview(chunk)[sent:]))

    def _send_piped(self, pipe: Pipe) -> None:
        try:
            while pipe.filled_bytes:
                pipe.filled_bytes -= os.splice(
                    pipe.read_fd, self._fd, pipe.filled_bytes, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
                )
        except _AGAIN:
            self.keep(pipe)
            return
        except OSError as error:
            pipe.close()
            self.abort(error)
            return
        self._buffers.pipes.give_back(pipe)

    def keep(self, what: bytes | Pipe) -> None:
        self._changed()
        if self.unsent is None:
            self.unsent = Unsent(self._buffers.pipes)
            self._loop.add_writer(self._fd, self._writable)
        self.unsent.append(what)
        if self.unsent.byte_count > UNSENT_BYTES_MAX:
            self._hold_back(full=True)

    def _hold_back(self, *, full: bool) -> None:
        """Reads nothing more from the other socket, or reads it again."""
        if self.other is not None:
            (self.other.pause if full else self.other.resume)(Paused.FULL)

    def _writable(self) -> None:
        assert self.unsent is not None
        try:
            self.unsent.send(self._sock, self._fd)
        except _AGAIN:
            return
        except OSError as error:
            self.abort(error)
            return
        self.unsent = None
        self._loop.remove_writer(self._fd)
        self._all_sent()

    def _all_sent(self) -> None:
        if self._hangs_up:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self.abort(error)
        elif self.closing:
            self.abort()
        else:
            self._hold_back(full=False)

    # ---- the end

    def close(self, now: float) -> None:
        """Closes after sending the unsent bytes. If the peer never reads them, call `abort`; see `closing_since`."""
        if self.closing:
            return
        self._changed()
        self.closing, self.closing_since = True, now
        self.pause(0)
        if self.unsent is None:
            self._all_sent()

    def hang_up(self, now: float) -> None:
        """`close` for a peer that may still be sending: half-closes, and closes once the peer has closed.

        Data from the peer is discarded until then. Closing a socket with unread bytes resets the connection, and a
        reset could discard the last response before the peer has read it.
        """
        if self.closing:
            return
        self._changed()
        self.closing, self.closing_since = True, now
        self._hangs_up = True
        self.pause(0)
        self._reading = True
        self._loop.add_reader(self._fd, self._discard)
        if self.unsent is None:
            self._all_sent()

    def _discard(self) -> None:
        try:
            count = self._sock.recv_into(self._buffers.received)
        except _AGAIN:
            return
        except OSError as error:
            self.abort(error)
            return
        if not count:
            self.abort()

    def abort(self, error: OSError | None = None) -> None:
        """Closes at once; unsent bytes are lost."""
        if self.ended:
            return
        self._changed()
        self.closing = self.ended = True
        self.pause(0)
        if self.unsent is not None:
            self._loop.remove_writer(self._fd)
            self.unsent.close()
        self.unsent = None
        # Deferred, so that `_lost` is not called from within a write. `_lost` runs before the close: a peer that
        # reconnects at once must find this connection no longer counted.
        self._loop.call_soon(self._finish, error)

    def _finish(self, error: OSError | None) -> None:
        self._lost(error)
        self._sock.close()
        # Breaks reference cycles, so that memory is freed without garbage collection.
        self.other = None


def next_limit(limit: int, count: int, seconds: float, *, secured: bool) -> int:
    """Reads less per event, to let other connections run. TLS is exempt: it has already read the data."""
    if seconds > _READ_SECONDS_MAX:
        return 0 if secured else max(_READ_BYTES_MIN, int(count * _READ_SECONDS_MAX / seconds))
    if count == limit:
        return 2 * count if 2 * count < RECEIVE_BUFFER_BYTES else 0
    return limit
