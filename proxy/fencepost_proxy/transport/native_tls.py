"""TLS in native code (`native/src/tls.rs`, by rustls), so that native code can relay what it decrypts.

OpenSSL decides. `Context.native` is None for what rustls does not support. If rustls refuses the first message of a
client, OpenSSL answers it. OpenSSL verifies the certificates of clients (`client_certificates.py`). If rustls refuses a
broker, `upstreams.py` connects again with OpenSSL. So every refusal, and its reason in the log, is OpenSSL's.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.transport.client_certificates import ClientCertificates
from fencepost_proxy.transport.tls import TlsBuffers, TlsSocket, _OverSocket, _Records, waiting_bytes

if TYPE_CHECKING:
    from fencepost_native import Tls, TlsContext

T = TypeVar("T")
#: OpenSSL's names of what a peer says in an alert.
_ALERTS: Final = {
    10: "SSLV3_ALERT_UNEXPECTED_MESSAGE",
    20: "SSLV3_ALERT_BAD_RECORD_MAC",
    22: "TLSV1_ALERT_RECORD_OVERFLOW",
    40: "SSLV3_ALERT_HANDSHAKE_FAILURE",
    42: "SSLV3_ALERT_BAD_CERTIFICATE",
    43: "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    44: "SSLV3_ALERT_CERTIFICATE_REVOKED",
    45: "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    46: "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    47: "SSLV3_ALERT_ILLEGAL_PARAMETER",
    48: "TLSV1_ALERT_UNKNOWN_CA",
    49: "TLSV1_ALERT_ACCESS_DENIED",
    50: "TLSV1_ALERT_DECODE_ERROR",
    51: "TLSV1_ALERT_DECRYPT_ERROR",
    70: "TLSV1_ALERT_PROTOCOL_VERSION",
    71: "TLSV1_ALERT_INSUFFICIENT_SECURITY",
    80: "TLSV1_ALERT_INTERNAL_ERROR",
    90: "TLSV1_ALERT_USER_CANCELLED",
    109: "TLSV13_ALERT_MISSING_EXTENSION",
    116: "TLSV13_ALERT_CERTIFICATE_REQUIRED",
}


class Context(ssl.SSLContext):
    """`why_python` – why native code cannot have the same certificates and versions. `clients` – verifies theirs."""

    why_python: str = ""
    clients: ClientCertificates | None = None
    _native: TlsContext | None = None
    _make: Callable[[type[TlsContext]], tuple[TlsContext, float]] | None = None
    _until: float = float("inf")

    def set_native(self, make: Callable[[type[TlsContext]], tuple[TlsContext, float]]) -> None:
        """`make` returns until when it can be used, and raises ValueError for what native code does not support."""
        if EXECUTOR.module is None:
            return
        self._make, self._native = make, None
        try:
            self._native, self._until = make(EXECUTOR.module.TlsContext)
        except ValueError as error:
            self.why_python = str(error)

    @property
    def native(self) -> TlsContext | None:
        if self._make is not None and self._native is not None and time.time() >= self._until:
            self.set_native(self._make)
        return self._native


def tls_socket(
    raw: socket.socket, context: ssl.SSLContext, buffers: TlsBuffers, server_hostname: str | None = None
) -> TlsSocket:
    """Encrypts in native code if that is possible. Raises ValueError for a host that no certificate can be for."""
    if isinstance(context, Context) and (native := context.native) is not None and not _needs_openssl(context, raw):
        with contextlib.suppress(ValueError):  # OpenSSL decides
            return NativeTlsSocket(raw, context, buffers, server_hostname, native.connection(server_hostname))
    return TlsSocket(raw, context, buffers, server_hostname)


def _needs_openssl(context: Context, raw: socket.socket) -> bool:
    if context.clients is None:
        return False
    with contextlib.suppress(OSError):  # it has closed
        return context.clients.needs_openssl(raw.getpeername()[0])
    return False


class NativeTlsSocket(TlsSocket):
    """As a `TlsSocket`. `tls` – None: OpenSSL has taken over."""

    __slots__ = ("_context", "_first", "_is_client", "_tls")

    def __init__(
        self, raw: socket.socket, context: Context, buffers: TlsBuffers, server_hostname: str | None, tls: Tls
    ) -> None:
        _OverSocket.__init__(self, raw, buffers)
        self._context: Context | None = context
        self._tls: Tls | None = tls
        self._is_client = server_hostname is not None
        #: What a client has sent before the first response. None: OpenSSL can no longer take over.
        self._first: bytes | None = None if self._is_client else b""

    @property
    def native(self) -> Tls | None:
        return self._tls

    def failure(self) -> OSError | None:
        found = None if self._tls is None else self._tls.failure
        if found is None:
            return None
        alert, reason, text = found
        reason = reason or (None if alert is None else _ALERTS.get(alert))
        error = ssl.SSLError(1, text if reason is None else f"[SSL: {reason}] {text}")
        error.library, error.reason = "SSL", reason or text
        return error

    # ---- the handshake

    def handshake(self) -> bool:
        tls, data = self._tls, b""
        if tls is None:
            return super().handshake()
        descriptor = self._raw.fileno()
        tls.flush(descriptor)
        while True:
            try:
                done = tls.advance(data)
            except OSError as error:
                if self._first is not None:
                    return self._leave_to_openssl(self._first)
                with contextlib.suppress(OSError):
                    tls.flush(descriptor)  # the alert, which gives the peer the reason
                raise self._refusal() or self.failure() or error from error
            if tls.unflushed_bytes:
                self._first = None
            tls.flush(descriptor)
            if done:
                self._context = self._first = None
                del self._records
                return True
            data = self._next_of_handshake()
            if self._first is not None:
                self._first += data

    def _refusal(self) -> OSError | None:
        """OpenSSL's, of the client's certificate. After another failure OpenSSL gets the address's next connection."""
        assert self._context is not None
        clients = self._context.clients
        if clients is None or self._tls is None:
            return None
        if (
            (refused := clients.take_refusal()) is None
            and self._tls.failure is not None
            and self._tls.failure[0] is None
        ):
            with contextlib.suppress(OSError):
                clients.leave_to_openssl(self._raw.getpeername()[0])
        return refused

    def _leave_to_openssl(self, first: bytes) -> bool:
        """It answers what the client has sent so far."""
        assert self._context is not None
        self._tls = None
        self._use_openssl(self._context, None)
        self._context = self._first = None
        self._buffers.incoming.write(first)
        return super().handshake()

    @property
    def awaits_write(self) -> bool:
        return super().awaits_write if self._tls is None else self._tls.unflushed_bytes > 0

    # ---- data

    def recv_into(self, buffer: memoryview) -> int:
        if self._tls is None:
            return super().recv_into(buffer)
        data = self._checked(self._tls.recv, self._raw.fileno())
        buffer[: len(data)] = data
        return len(data)

    def send(self, chunk: bytes | memoryview) -> int:
        if self._tls is None:
            return super().send(chunk)
        return self._checked(self._tls.send, self._raw.fileno(), bytes(chunk))

    def _checked(self, call: Callable[..., T], *arguments: object) -> T:
        try:
            return call(*arguments)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self.failure() or error from error

    def expect(self, plaintext_bytes: int) -> None:
        if self._tls is None:
            super().expect(plaintext_bytes)
        else:
            self._tls.expect(self._raw.fileno(), plaintext_bytes)

    def wake_at(self, plaintext_bytes: int) -> None:
        if self._tls is None:
            super().wake_at(plaintext_bytes)
        else:
            self._tls.wake_at(self._raw.fileno(), plaintext_bytes)

    def _send_end(self) -> None:
        if self._tls is None:
            super()._send_end()
        else:
            self._tls.end(self._raw.fileno())

    def unread_bytes(self) -> int:
        if self._tls is None:
            return super().unread_bytes()
        ahead = self._tls.carried
        if waiting := waiting_bytes(self._raw.fileno()):
            with contextlib.suppress(OSError):
                ahead += self._raw.recv(waiting, socket.MSG_PEEK)
        return _Records(self._tls.overhead_bytes).unread_bytes(ahead)
