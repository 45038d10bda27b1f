"""Reads Java key stores (JKS and PKCS12), as certificates and keys that Python's `ssl` takes.

The content shows the kind, as in Java since version 9. JKS is read here: its format is small and final, and no
maintained library reads it. PKCS12 needs the package `cryptography`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

_JKS: Final = b"\xfe\xed\xfe\xed"
_JCEKS: Final = b"\xce\xce\xce\xce"
_DER: Final = b"\x30"
#: What Java digests between the password and the store.
_WHITENER: Final = b"Mighty Aphrodite"
_DIGEST_BYTES: Final = 20


class KeyStoreError(ValueError):
    """A key store cannot be read. Its text has no secret."""


class Entry(NamedTuple):
    """DER. `key`: PKCS #8, None for a trusted certificate; `certificates`: the first one is that of the key."""

    key: bytes | None
    certificates: tuple[bytes, ...]


def is_key_store(data: bytes) -> bool:
    """By its first bytes; otherwise it may be PEM."""
    return data.startswith((_JKS, _JCEKS, _DER))


def trusted_certificates(data: bytes, password: str | None) -> list[bytes]:
    """DER of the certificates of a trust store: all certificates of PKCS12, trusted ones and those of keys of JKS.
    Without a password, a JKS store is not checked for changes, as in Java. Raises KeyStoreError."""
    of_entry = None if data.startswith(_DER) else 1
    certificates = [each for entry in _entries(data, password, None) for each in entry.certificates[:of_entry]]
    if not certificates:
        raise KeyStoreError("has no certificate")
    return certificates


def identity(data: bytes, password: str | None, key_password: str | None = None) -> str:
    """PEM of the private key of a key store and of its certificates. `key_password`: None if it is `password`. Raises
    KeyStoreError."""
    found = [each for each in _entries(data, password, key_password or password) if each.key is not None]
    if len(found) != 1:
        raise KeyStoreError(f"has {len(found)} private keys (it must have one)")
    key, certificates = found[0]
    assert key is not None
    return _block("PRIVATE KEY", key) + pem(certificates)


def pem(certificates: list[bytes] | tuple[bytes, ...]) -> str:
    return "".join(_block("CERTIFICATE", each) for each in certificates)


def _block(kind: str, data: bytes) -> str:
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(data).decode('ascii')}-----END {kind}-----\n"


@contextmanager
def pem_file(text: str) -> Iterator[str]:
    """A file with the text that only this user can read: `ssl` takes keys from files only."""
    with tempfile.NamedTemporaryFile("w", encoding="ascii", suffix=".pem") as file:
        file.write(text)
        file.flush()
        yield file.name


def _entries(data: bytes, password: str | None, key_password: str | None) -> list[Entry]:
    """`key_password`: None if keys are not needed; then that of a JKS entry is empty."""
    if data.startswith(_JCEKS):
        raise KeyStoreError("is a JCEKS store (convert it: keytool -importkeystore … -deststoretype PKCS12)")
    if data.startswith(_JKS):
        try:
            return _jks(data, password, key_password)
        except (IndexError, UnicodeDecodeError) as error:
            raise KeyStoreError("is damaged") from error
    if data.startswith(_DER):
        return _pkcs12(data, password)
    raise KeyStoreError("is neither a JKS nor a PKCS12 store")


# --- PKCS12 -----------------------------------------------------------------------------------------------------------


def _pkcs12(data: bytes, password: str | None) -> list[Entry]:
    try:
        from cryptography.hazmat.primitives import serialization as to  # noqa: PLC0415 - optional
        from cryptography.hazmat.primitives.serialization import pkcs12  # noqa: PLC0415
    except ImportError:
        raise KeyStoreError("is a PKCS12 store, which needs a package: pip install 'fencepost[keystores]'") from None
    try:
        found = pkcs12.load_pkcs12(data, None if password is None else password.encode())
    except ValueError:
        why = "needs its password" if password is None else "cannot be read with this password"
        raise KeyStoreError(f"is a PKCS12 store that {why}") from None
    der = [
        each.certificate.public_bytes(to.Encoding.DER)
        for each in (found.cert, *found.additional_certs)
        if each is not None
    ]
    if found.key is None:
        return [Entry(None, (each,)) for each in der]
    key = found.key.private_bytes(to.Encoding.DER, to.PrivateFormat.PKCS8, to.NoEncryption())
    return [Entry(key, tuple(der))]


# --- JKS --------------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        """Raises IndexError at the end."""
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise IndexError
        self._at += count
        return taken

    def number(self, size: int = 4) -> int:
        return int.from_bytes(self.take(size), "big")


def _jks(data: bytes, password: str | None, key_password: str | None) -> list[Entry]:
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if password is not None:
        expected = hashlib.sha1(_utf16(password) + _WHITENER + body).digest()
        if not hmac.compare_digest(digest, expected):
            raise KeyStoreError("is damaged, or its password is wrong")
    reader = _Reader(body[len(_JKS) :])
    version, count = reader.number(), reader.number()
    if version not in (1, 2):
        raise KeyStoreError(f"is a JKS store of version {version}, which is unknown")

    def certificate() -> bytes:
        if version == 2:
            reader.take(reader.number(2))  # its type, X.509
        return reader.take(reader.number())

    entries = []
    for _ in range(count):
        kind = reader.number()
        reader.take(reader.number(2))  # alias
        reader.take(8)  # when it was added
        if kind == 1:
            protected = reader.take(reader.number())
            certificates = tuple(certificate() for _ in range(reader.number()))
            entries.append(Entry(b"" if key_password is None else _key(protected, key_password), certificates))
        elif kind == 2:
            entries.append(Entry(None, (certificate(),)))
        else:
            raise KeyStoreError("has an entry that is neither a key nor a certificate")
    return entries


def _key(protected: bytes, password: str) -> bytes:
    """PKCS #8 of a key. Only JKS protects keys like this: XOR with repeated SHA-1 digests."""
    reader = _Reader(protected)
    _into(reader)  # EncryptedPrivateKeyInfo
    reader.take(_into(reader))  # its algorithm
    sealed = reader.take(_into(reader))
    salt, cipher, check = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    secret, stream, last = _utf16(password), b"", salt
    while len(stream) < len(cipher):
        last = hashlib.sha1(secret + last).digest()
        stream += last
    key = bytes(one ^ other for one, other in zip(cipher, stream, strict=False))
    if not hmac.compare_digest(hashlib.sha1(secret + key).digest(), check):
        raise KeyStoreError("has a private key with another password")
    return key


def _into(reader: _Reader) -> int:
    """Read the head of a DER element. Returns the length of its content."""
    reader.take(1)
    length = reader.number(1)
    return reader.number(length - 0x80) if length > 0x80 else length


def _utf16(password: str) -> bytes:
    return password.encode("utf-16-be")
