"""TLS on one nonblocking socket, with a socket's interface: `recv_into`, `send`, `sendmsg`, `shutdown`, `close`.

So `ProxiedSocket` works with both. Like a socket, a `TlsSocket` raises BlockingIOError if the call would block, and
OSError if the connection failed (`ssl.SSLError` is one).

OpenSSL reads and writes memory, not the socket, so that one system call transfers many records. All connections share
the two memory BIOs (`TlsBuffers`), which are empty between calls. They contain ciphertext only: bytes left there by a
defect end a connection, but cannot leak plaintext to another.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import socket
import ssl
import termios
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from fencepost_proxy.cluster.tls_failures import NotTls, failure

if TYPE_CHECKING:
    from fencepost_native import Tls

_AGAIN: Final = (BlockingIOError, InterruptedError)
#: Reserve in the plaintext buffer for the part of a record that an earlier read received.
_SPARE_BYTES: Final = 32 * 1024
_RECEIVED_BYTES: Final = 256 * 1024 - _SPARE_BYTES
#: Encrypted per step, and so kept at most if the socket blocks.
_ENCRYPTED_BYTES: Final = 128 * 1024
#: Maximum kept for a peer that does not read: OpenSSL answers some records automatically.
_UNFLUSHED_BYTES_MAX: Final = 256 * 1024
#: Two records of maximum size, one of which is complete: more without plaintext are key updates, for example, and each
#: costs as much as a record with data. rustls limits their number.
_BARREN_BYTES_MAX: Final = 34 * 1024
#: Bytes of a relayed frame that wake the event loop, or fewer if the socket's buffer is smaller.
_WAKES_AT_BYTES: Final = 128 * 1024
#: Maximum plaintext of a record.
_PLAINTEXT_BYTES_MAX: Final = 16 * 1024
#: A record's header: type, version, length. During the handshake the first bytes must be one.
_HEADER_BYTES: Final = 5
_RECORD_TYPES: Final = frozenset({0x14, 0x15, 0x16, 0x17})
_MAJOR_VERSION: Final = 3
#: Maximum length of a record: 2^14 plus encryption overhead.
_RECORD_BYTES_MAX: Final = 16 * 1024 + 2048


def waiting_bytes(fd: int) -> int:
    """Bytes in a socket's receive buffer."""
    waiting = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    return waiting[0]


class TlsBuffers:
    """Buffers that all connections of a process share; they are empty between calls."""

    def __init__(self) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.received = memoryview(bytearray(_RECEIVED_BYTES))


class _Records:
    """Position in a stream of records, from their headers.

    `left_bytes` – missing bytes of the current record. `begun_bytes` – its plaintext size. `plaintext_bytes` –
    plaintext size of all records whose headers were received.
    """

    __slots__ = ("begun_bytes", "header", "left_bytes", "overhead_bytes", "plaintext_bytes")

    def __init__(self, overhead_bytes: int = 0) -> None:
        self.header = b""
        self.left_bytes = 0
        self.begun_bytes = 0
        self.plaintext_bytes = 0
        self.overhead_bytes = overhead_bytes

    def missing(self) -> int:
        """Bytes to the end of the header, or of the record."""
        return self.left_bytes or _HEADER_BYTES - len(self.header)

    def follow(self, data: memoryview) -> None:
        at, size = 0, len(data)
        while at < size:
            if self.left_bytes:
                step = min(self.left_bytes, size - at)
                self.left_bytes -= step
                at += step
                continue
            step = min(_HEADER_BYTES - len(self.header), size - at)
            self.header += bytes(data[at : at + step])
            at += step
            if len(self.header) == _HEADER_BYTES:
                self.left_bytes = int.from_bytes(self.header[3:], "big")
                self.begun_bytes = max(0, self.left_bytes - self.overhead_bytes)
                self.plaintext_bytes += self.begun_bytes
                self.header = b""

    def bytes_before(self, plaintext_bytes: int) -> int:
        """Minimum stream bytes that bring the next `plaintext_bytes` of plaintext, with records of maximum size."""
        more = max(0, plaintext_bytes - (self.begun_bytes if self.left_bytes else 0))
        headers = -(-more // _PLAINTEXT_BYTES_MAX) * (_HEADER_BYTES + self.overhead_bytes)
        return self.left_bytes + more + headers - len(self.header)

    def unread_bytes(self, ahead: bytes) -> int:
        """Unread plaintext: of the incomplete record, and of `ahead`, which `follow` has not processed."""
        other = _Records(self.overhead_bytes)
        other.header, other.left_bytes = self.header, self.left_bytes
        other.follow(memoryview(ahead))
        return (self.begun_bytes if self.left_bytes else 0) + other.plaintext_bytes


class Unused(ConnectionResetError):
    """The peer closed the connection before it sent a byte: a port check, as tools and load balancers make it."""


class _OverSocket:
    """Socket methods that TLS does not change, and what is known of the peer before encryption."""

    __slots__ = ("_buffers", "_greeted", "_raw", "_records", "family")

    def __init__(self, raw: socket.socket, buffers: TlsBuffers) -> None:
        raw.setblocking(False)
        self._raw = raw
        self.family = raw.family
        self._buffers = buffers
        self._records = _Records()
        self._greeted = False  # the peer has sent something

    def fileno(self) -> int:
        return self._raw.fileno()

    def setblocking(self, flag: bool, /) -> None:
        self._raw.setblocking(flag)

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        self._raw.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        return self._raw.getsockopt(level, option, size)

    def getsockname(self) -> tuple[str, int]:
        name: tuple[str, int] = self._raw.getsockname()
        return name

    def getpeername(self) -> tuple[str, int]:
        name: tuple[str, int] = self._raw.getpeername()
        return name


class TlsSocket(_OverSocket):
    """`raw` – a connected, nonblocking socket; this object closes it.

    `server_hostname` – expected name of the peer, if this end is the client; None: this end is the server.
    """

    __slots__ = ("_barren_bytes", "_ended", "_owed_bytes", "_ssl", "_unflushed", "_wakes_at")

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        buffers: TlsBuffers,
        server_hostname: str | None = None,
    ) -> None:
        super().__init__(raw, buffers)
        self._use_openssl(context, server_hostname)

    def _use_openssl(self, context: ssl.SSLContext, server_hostname: str | None) -> None:
        incoming, outgoing = self._buffers.incoming, self._buffers.outgoing
        self._ssl = context.wrap_bio(
            incoming, outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._ended = False
        self._barren_bytes = 0  # received since the last plaintext
        self._unflushed = b""  # encrypted, not yet sent
        # Plaintext size of `_unflushed` that `send` has not returned yet. To encrypt it again would send it twice.
        self._owed_bytes = 0
        self._wakes_at = 1  # received bytes that wake the event loop

    @property
    def native(self) -> Tls | None:
        """What encrypts, if that is native code."""
        return None

    @property
    def is_openssl(self) -> bool:
        """Whether what it refuses is refused."""
        return self.native is None

    def failure(self) -> OSError | None:
        """Why native code failed."""
        return None

    # ---- the handshake

    def handshake(self) -> bool:
        """Continues the handshake; returns True when it is complete. Raises BlockingIOError, see `awaits_write`.

        Reads the socket record by record, so as not to read data after the handshake.
        """
        self._flush()
        while True:
            incoming, outgoing = self._buffers.incoming, self._buffers.outgoing
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError:
                self._unflushed += outgoing.read()
                with contextlib.suppress(OSError):
                    self._flush()  # the alert, which gives the peer the reason
                raise
            else:
                done = True
            finally:
                self._drain()
            self._flush()
            if done:
                self._records.overhead_bytes = self._overhead()
                return True
            incoming.write(self._next_of_handshake())

    def _next_of_handshake(self) -> bytes:
        data = self._raw.recv(self._records.missing())
        if not data and not self._greeted:
            raise Unused("closed before the handshake")
        if not data:
            raise ConnectionResetError("closed during the handshake")
        self._greeted = True
        self._inspect_first(data)
        self._records.follow(memoryview(data))
        return data

    def _inspect_first(self, data: bytes) -> None:
        records = self._records
        if records.left_bytes:
            return
        header = records.header + data
        if header[0] not in _RECORD_TYPES or (len(header) > 1 and header[1] != _MAJOR_VERSION):
            raise NotTls(f"first bytes: {header.hex(' ')}")
        if len(header) == _HEADER_BYTES and int.from_bytes(header[3:], "big") > _RECORD_BYTES_MAX:
            raise NotTls(f"a record of {int.from_bytes(header[3:], 'big')} bytes")

    @property
    def awaits_write(self) -> bool:
        return bool(self._unflushed)

    def _overhead(self) -> int:
        """Bytes that encryption adds to a record, without its header."""
        cipher = self._ssl.cipher()
        assert cipher is not None
        if cipher[1] == "TLSv1.3":
            return 17  # the true record type, and 16 bytes for authentication
        return 24 if "GCM" in cipher[0] else 16

    # ---- data

    def recv(self, byte_count: int, flags: int, /) -> bytes:
        """Of the encrypted stream."""
        return self._raw.recv(byte_count, flags)

    def recv_into(self, buffer: memoryview) -> int:
        """Reads once and decrypts. 0: the peer has closed. `buffer` has at least 256 KiB."""
        if self._ended:
            return 0
        received = self._buffers.received
        count = self._raw.recv_into(received)
        if not count:
            return 0
        data = received[:count]
        self._records.follow(data)
        plaintext_bytes = 0
        try:
            for at in range(0, count, _BARREN_BYTES_MAX):
                piece = data[at : at + _BARREN_BYTES_MAX]
                decrypted = self._decrypt(piece, buffer[plaintext_bytes:])
                plaintext_bytes += decrypted
                self._barren_bytes = 0 if decrypted else self._barren_bytes + len(piece)
                if self._ended or self._barren_bytes > _BARREN_BYTES_MAX:
                    break
        finally:
            self._drain()
        if self._barren_bytes > _BARREN_BYTES_MAX:
            raise ConnectionAbortedError("the peer sends TLS records without data")
        if self._unflushed and not self._owed_bytes:
            # A response by OpenSSL. If the socket blocks, it is sent before the next write.
            with contextlib.suppress(*_AGAIN):
                self._flush()
        if len(self._unflushed) > _UNFLUSHED_BYTES_MAX:
            raise ConnectionAbortedError("the peer does not read TLS responses")
        if not plaintext_bytes and not self._ended:
            raise BlockingIOError
        if plaintext_bytes and self._ended:
            # The peer's close came with its last data: make the next read return 0, since nothing else may arrive.
            with contextlib.suppress(OSError):
                self._raw.shutdown(socket.SHUT_RD)
        return plaintext_bytes

    def _decrypt(self, data: memoryview, buffer: memoryview) -> int:
        incoming, tls, plaintext_bytes = self._buffers.incoming, self._ssl, 0
        incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):  # the record is incomplete
            while incoming.pending or tls.pending():
                taken = tls.read(len(buffer) - plaintext_bytes, buffer[plaintext_bytes:])
                if not taken:
                    self._ended = True
                    break
                plaintext_bytes += taken  # type: ignore[operator]
        return plaintext_bytes

    def expect(self, plaintext_bytes: int) -> None:
        """At least `plaintext_bytes` will follow: wake the event loop for many records together, and for the last one.

        Java writes each record separately, and an iteration of the event loop costs more than relaying one record.
        The end of the connection still wakes the loop at once.
        """
        wakes_at = 1
        if plaintext_bytes > _PLAINTEXT_BYTES_MAX:
            wakes_at = min(self._records.bytes_before(plaintext_bytes), _WAKES_AT_BYTES)
        self._wake_at(wakes_at)

    def wake_at(self, plaintext_bytes: int) -> None:
        """Wake the event loop for one record of that size, or for anything with 1."""
        overhead = _HEADER_BYTES + self._records.overhead_bytes
        self._wake_at(1 if plaintext_bytes == 1 else plaintext_bytes + overhead)

    def _wake_at(self, wakes_at: int) -> None:
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            with contextlib.suppress(OSError):  # a closed connection shows in the next read
                self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def send(self, chunk: bytes | memoryview) -> int:
        """Returns how many bytes were taken. As with a socket, the caller must pass the rest again."""
        self._flush()
        taken = min(self._owed_bytes, len(chunk))
        self._owed_bytes -= taken
        rest = memoryview(chunk)[taken:]
        while rest:
            piece = rest[:_ENCRYPTED_BYTES]
            self._encrypt(piece)
            try:
                self._flush()
            except _AGAIN:
                self._owed_bytes = len(piece)
                if taken:
                    return taken
                raise
            taken += len(piece)
            rest = rest[len(piece) :]
        return taken

    def sendmsg(self, chunks: list[bytes | memoryview]) -> int:
        """`send` of the chunks in as few records as possible: each has an overhead."""
        return self.send(b"".join(chunks))

    def _encrypt(self, piece: memoryview) -> None:
        try:
            while piece:
                piece = piece[self._ssl.write(piece) :]
        finally:
            self._drain()

    def _drain(self) -> None:
        """Empties the shared buffers."""
        incoming, outgoing = self._buffers.incoming, self._buffers.outgoing
        if outgoing.pending:
            self._unflushed += outgoing.read()
        if incoming.pending:
            incoming.read()
            self._ended = True

    def _flush(self) -> None:
        """Raises BlockingIOError unless the socket takes all of it."""
        data = self._unflushed
        if not data:
            return
        sent = self._raw.send(data)
        self._unflushed = data[sent:]
        if self._unflushed:
            raise BlockingIOError

    def shutdown(self, how: int) -> None:
        self._send_end()
        self._raw.shutdown(how)

    def close(self) -> None:
        self._send_end()
        self._raw.close()

    def _send_end(self) -> None:
        """Sends close_notify, so that the peer detects no truncation; skipped if the socket blocks."""
        try:
            if not self._unflushed:
                self._ssl.unwrap()
        except (OSError, ValueError):
            pass  # the peer's close_notify is not awaited
        finally:
            self._drain()
        with contextlib.suppress(OSError):
            self._flush()
        self._unflushed = b""

    def unread_bytes(self) -> int:
        """Exact number of unread plaintext bytes, computed from record headers.

        It decides which pipelined appends the client sent before it knew of a failure.
        """
        ahead = b""
        if waiting := waiting_bytes(self._raw.fileno()):
            with contextlib.suppress(OSError):
                ahead = self._raw.recv(waiting, socket.MSG_PEEK)
        return self._records.unread_bytes(ahead)


async def _at_once() -> None:
    pass


async def secure(sock: TlsSocket, admitted: Callable[[], Awaitable[None]] = _at_once) -> None:
    """Completes the handshake; each step waits to be `admitted`. The caller sets the time limit. Raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        await admitted()
        try:
            sock.handshake()
        except _AGAIN:
            await _ready(loop, sock.fileno(), to_write=sock.awaits_write)
        else:
            return


async def _ready(loop: asyncio.AbstractEventLoop, descriptor: int, *, to_write: bool) -> None:
    ready = loop.create_future()

    def report() -> None:
        if not ready.done():
            ready.set_result(None)

    (loop.add_writer if to_write else loop.add_reader)(descriptor, report)
    try:
        await ready
    finally:
        (loop.remove_writer if to_write else loop.remove_reader)(descriptor)


def of_client(error: OSError) -> tuple[str, str]:
    """Why a client's handshake failed: a metric label, and a description for the log."""
    kind, stated = failure(error)
    match kind:
        case "not_tls":
            words = f"it does not speak TLS ({stated}); this listener needs security.protocol=SSL or SASL_SSL"
        case "no_certificate":
            words = "it sent no certificate, and listen_tls.client_certificates is required"
        case "not_now":
            kind, words = "untrusted", f"its certificate is not valid now: {stated}"
        case "untrusted" | "hostname_mismatch":
            kind, words = "untrusted", f"its certificate is not trusted: {stated} (listen_tls.client_ca_file)"
        case "distrusted" | "certificate_required":
            kind, words = "distrusted", f"it does not trust this proxy's certificate: {stated}"
        case "no_common":
            words = f"it has no TLS version or cipher in common with this proxy: {stated} (listen_tls.min_version)"
        case "left":
            words = f"it closed the connection during the TLS handshake: {stated}"
        case _:
            words = f"the TLS handshake failed: {stated}"
    return kind, words
