"""Whether clients' certificates are trusted: OpenSSL decides, also for connections that native code encrypts.

Python has no function for that. So the certificates are put into a TLS 1.2 handshake in memory, whose messages before
encryption OpenSSL answers like those of a client. The client's signature is not part of it: native code verifies it.
"""

from __future__ import annotations

import ssl
import time
from collections import OrderedDict
from typing import Final

_HANDSHAKE, _TLS12 = b"\x16\x03\x03", b"\x03\x03"
_CLIENT_HELLO, _CERTIFICATE = b"\x01", b"\x0b"
_RECORD_BYTES_MAX: Final = 16 * 1024
#: ECDHE with ECDSA and RSA, AES-GCM.
_SUITES: Final = (0xC02B, 0xC02C, 0xC02F, 0xC030)
#: P-256, P-384, P-521, X25519. OpenSSL needs the curves of the listener's certificate, too.
_GROUPS: Final = (0x17, 0x18, 0x19, 0x1D)
#: ECDSA, Ed25519, RSA-PSS, and RSA of PKCS#1.
_SIGNATURES: Final = (0x403, 0x503, 0x603, 0x807, 0x804, 0x805, 0x806, 0x401, 0x501, 0x601)
_ALERT_BYTES: Final = 7
#: Sent if the reason is not known.
_INTERNAL_ERROR: Final = 80
_ADDRESSES_MAX: Final = 1_000
_OPENSSL_SECONDS: Final = 3_600.0


def _sized(data: bytes, size_bytes: int = 2) -> bytes:
    return len(data).to_bytes(size_bytes, "big") + data


def _list(values: tuple[int, ...]) -> bytes:
    return _sized(b"".join(each.to_bytes(2, "big") for each in values))


def _extension(number: int, data: bytes) -> bytes:
    return number.to_bytes(2, "big") + _sized(data)


def _records(kind: bytes, message: bytes) -> bytes:
    data = kind + _sized(message, 3)
    pieces = (data[at : at + _RECORD_BYTES_MAX] for at in range(0, len(data), _RECORD_BYTES_MAX))
    return b"".join(_HANDSHAKE + _sized(each) for each in pieces)


_HELLO: Final = _records(
    _CLIENT_HELLO,
    _TLS12
    + bytes(33)  # client random; no session
    + _list(_SUITES)
    + b"\x01\x00"  # no compression
    + _sized(_extension(10, _list(_GROUPS)) + _extension(11, b"\x01\x00") + _extension(13, _list(_SIGNATURES))),
)


class ClientCertificates:
    """Of one listener's context. `context`: its trusted certificates, and TLS 1.2 at most."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._refused: ssl.SSLError | None = None
        self._need_openssl: OrderedDict[str, float] = OrderedDict()

    def verify(self, certificates: list[bytes]) -> int | None:
        """Returns the alert for the client, or None if they are trusted. `certificates`: DER, its own first."""
        self._refused = None
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(incoming, outgoing, server_side=True)
        incoming.write(_HELLO)
        try:
            self._continue(tls)
            outgoing.read()
            incoming.write(_records(_CERTIFICATE, _sized(b"".join(_sized(each, 3) for each in certificates), 3)))
            self._continue(tls)
        except ssl.SSLError as error:
            self._refused = error
            alert = outgoing.read()
            return alert[-1] if len(alert) == _ALERT_BYTES else _INTERNAL_ERROR
        return None

    def take_refusal(self) -> ssl.SSLError | None:
        """Why OpenSSL refused the last certificate, once: native code fails at once then."""
        refused, self._refused = self._refused, None
        return refused

    @staticmethod
    def _continue(tls: ssl.SSLObject) -> None:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            raise ssl.SSLError("the handshake is complete without keys")

    # ---- clients with keys that native code does not support (Ed448, for example)

    def needs_openssl(self, host: str) -> bool:
        return self._need_openssl.get(host, 0.0) > time.monotonic()

    def leave_to_openssl(self, host: str) -> None:
        self._need_openssl.pop(host, None)
        self._need_openssl[host] = time.monotonic() + _OPENSSL_SECONDS
        if len(self._need_openssl) > _ADDRESSES_MAX:
            self._need_openssl.popitem(last=False)
